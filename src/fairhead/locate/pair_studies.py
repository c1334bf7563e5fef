"""What editing heads does to pairs of texts: every figure before and after, held against random heads."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fairhead.language.packing import TokenSequence
from fairhead.language.scorer import Scorer
from fairhead.locate.ablation import Ablation, Controls
from fairhead.locate.alone import each_alone
from fairhead.locate.edits import TextEdits
from fairhead.locate.effects import CurvePoint, Curves, curve_sets
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, HeadMap, score_pairs
from fairhead.locate.log_odds import PairTerms
from fairhead.locate.pair_figures import columns, figure_names, figures, paired_differences, read_of
from fairhead.locate.pairs import TextPairs
from fairhead.locate.passes import TextPasses, has_tf32, matmul_precision
from fairhead.stats import adjust

_LEAST = 10  # pairs of a category, at least, for a figure of it
Rows = NDArray[np.intp]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Statistics:
    """How intervals are made: replicates of the bootstrap (and permutations), confidence level, seed.

    Example:
        >>> Statistics(n_boot=500).level
        0.95
    """

    n_boot: int = 2000
    level: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class PairStudy:
    """The effect of one edit of the chosen heads.

    Attributes:
        kind: of edit.
        way: "direct" (first order, nothing else changes) or "forward" (a true pass).
        ablations: one a figure, against layer-matched controls.

    Example:
        >>> study["log_odds"].change.value, study["log_odds"].p_controls  # doctest: +SKIP
        (-0.21, 0.005)
    """

    kind: str
    way: str
    ablations: tuple[Ablation, ...]

    def __getitem__(self, metric: str) -> Ablation:
        """The ablation of one figure."""
        return next(a for a in self.ablations if a.change.metric == metric)


@dataclass(frozen=True)
class PairBench:
    """Pairs and a model with edited heads: passes over some of the pairs.

    Attributes:
        scorer: the model.
        pairs: the pairs.
        sequences: their texts in tokens.
        edits: what is put in a head's place.
        sign: −1 where log-odds are those of the anti-stereotype.
        how: of the statistics.
        progress: called with (stage, texts done, texts).
        tf32: on GPUs that can, multiply in TF32: several times as fast.

    Example:
        >>> bench = PairBench(scorer, pairs, sequences, edits, 1.0, Statistics())  # doctest: +SKIP
        >>> tables = bench.columns(np.arange(len(pairs)), [(), (Head(3, 1),)], "mean")  # doctest: +SKIP
    """

    scorer: Scorer
    pairs: TextPairs
    sequences: Sequence[TokenSequence]
    edits: TextEdits
    sign: float
    how: Statistics
    progress: Progress | None = None
    tf32: bool = False
    _rounds: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False, repr=False)

    @property
    def in_tf32(self) -> bool:
        """Whether it was asked for and can be."""
        return self.tf32 and has_tf32(next(self.scorer.model.parameters()).device)

    def columns(self, rows: Rows, sets: Sequence[Sequence[Head]], kind: str) -> list[Array]:
        """What each pair adds to the figures (`pair_figures.columns`) with each set of heads edited."""
        texts = texts_of(self.sequences, self.pairs, rows)
        tokens = np.array([len(text.tokens) - text.scored_from for text in texts])
        part = self.pairs.take(rows)

        number = next(self._rounds)

        def tell(done: int, runs: int) -> None:
            if self.progress is not None:
                self.progress(f"forward passes {number}, {runs} sets of heads a text ({kind})", done, len(texts))

        passes = TextPasses(self.scorer, texts, self.edits, kind, tell)
        with matmul_precision(self.in_tf32):
            read = passes(sets)
        return [columns(part, read_of(part, found, tokens), self.sign) for found in read]

    def forward(self, rows: Rows, ranked: Sequence[Head], controls: Controls, kind: str) -> tuple[PairStudy, Curves]:
        """The chosen heads and the controls edited in true forward passes, and the curves of the chosen ones."""
        added, alone, left_out = curve_sets(ranked)
        steps = [*added, *alone, *left_out]
        found = self.columns(rows, [*steps, *controls.sets], kind)
        part = self.pairs.take(rows)
        names = figure_names(part)
        tables = [found[0], found[len(ranked)], *found[len(steps) :]]
        study = PairStudy(kind, "forward", against(tables, part.clusters, names, ranked, controls, self.how))
        values = [figures(table.sum(0)) for table in found[: len(steps)]]
        points = tuple(
            CurvePoint(heads, {name: float(value[name]) for name in names})
            for heads, value in zip(steps, values, strict=True)
        )
        one, two = len(added), len(added) + len(alone)
        return study, Curves(names, points[:one], points[one:two], points[two:])

    def effect_map(self, rows: Rows, shape: tuple[int, int], kind: str, poles: tuple[str, str]) -> HeadMap:
        """What is lost of the log-odds when each head alone is edited in a true forward pass."""
        lost = each_alone(lambda sets: self.columns(rows, sets, kind), shape, lambda table: table[:, 1] / table[:, 0])
        part = self.pairs.take(rows)
        measure = f"log-odds lost without the head ({kind}, forward pass), {poles[0]} minus {poles[1]}"
        return score_pairs(
            lost.without,
            lost.before,
            weights=part.weights,
            clusters=part.clusters,
            names=poles,
            level=self.how.level,
            measure=measure,
        )


def texts_of(sequences: Sequence[TokenSequence], pairs: TextPairs, rows: Rows) -> list[TokenSequence]:
    """The texts of some pairs."""
    return [sequences[i * pairs.per_pair + k] for i in rows for k in range(pairs.per_pair)]


def direct_study(
    terms: PairTerms,
    pairs: TextPairs,
    ranked: Sequence[Head],
    controls: Controls,
    kind: str,
    means: Array,
    how: Statistics,
) -> PairStudy:
    """The direct effect of silencing heads ("zero") or holding them at their mean, without another pass."""
    stuck = means if kind == "mean" else None
    tables = [columns(pairs, terms.without(heads, stuck)) for heads in ((), ranked, *controls.sets)]
    names = [name for name in figure_names(pairs) if name not in ("nll", "lms")]  # which need every text's own
    return PairStudy(kind, "direct", against(tables, pairs.clusters, names, ranked, controls, how))


def against(
    tables: Sequence[Array],
    clusters: NDArray[np.integer],
    names: Sequence[str],
    ranked: Sequence[Head],
    controls: Controls,
    how: Statistics,
) -> tuple[Ablation, ...]:
    """One ablation a figure; tables [n, 7] of the model as it is, with the chosen heads edited, with each control."""
    before, after, *others = tables
    changes = paired_differences(before, after, clusters, names, n_boot=how.n_boot, level=how.level, seed=how.seed)
    found = figures(np.stack([table.sum(0) for table in (before, *others)]))
    return tuple(
        Ablation(
            tuple(sorted(ranked)),
            change,
            controls=tuple((found[change.metric][1:] - found[change.metric][0]).tolist()),
            exhaustive=controls.exhaustive,
        )
        for change in changes
    )


@dataclass(frozen=True)
class CategoryPart:
    """The chosen heads' part in the log-odds of one category of pairs.

    Attributes:
        category: such as "bias_type".
        value: such as "gender".
        n: pairs.
        log_odds: their mean.
        part: the chosen heads' part in it, together.
        low: lower end of the interval of `part`.
        high: upper end.
        p_adjusted: of no part, corrected by Holm over all categories.
    """

    category: str
    value: str
    n: int
    log_odds: float
    part: float
    low: float
    high: float
    p_adjusted: float


def parts_by_category(
    terms: PairTerms, pairs: TextPairs, ranked: Sequence[Head], level: float = 0.95
) -> tuple[CategoryPart, ...]:
    """The chosen heads' direct part, together, in every category that has enough pairs."""
    if not ranked:
        return ()
    together = np.sum([terms.heads[:, layer, head] for layer, head in ranked], axis=0)
    found: list[tuple[str, str, HeadMap]] = []
    for category, values in pairs.categories.items():
        for value in sorted(set(values)):
            rows = np.flatnonzero(np.array(values) == value)
            part = pairs.take(rows)
            if len(rows) >= _LEAST and len(np.unique(part.clusters)) > 1:
                scored = score_pairs(
                    together[rows, None, None],
                    terms.log_odds[rows],
                    weights=part.weights,
                    clusters=part.clusters,
                    level=level,
                )
                found.append((category, value, scored))
    corrected = adjust([float(scored.p[0, 0]) for _, _, scored in found], "holm")
    return tuple(
        CategoryPart(
            category,
            value,
            scored.n,
            scored.total,
            float(scored.gap[0, 0]),
            float(scored.low[0, 0]),
            float(scored.high[0, 0]),
            1.0 if p is None else p,
        )
        for (category, value, scored), p in zip(found, corrected, strict=True)
    )
