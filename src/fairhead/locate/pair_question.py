"""The log-odds of pairs of texts under a causal language model, asked of their terms and of forward passes.

Every figure is a function of sums over pairs; how it changes is asked as it is of the benchmarks (`stats.paired`).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.language.packing import TokenSequence
from fairhead.language.scorer import Scorer
from fairhead.locate.edits import TEXT_KINDS, TextEdits
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, HeadMap, score_pairs
from fairhead.locate.log_odds import PairTerms, encoded_texts, whole
from fairhead.locate.pair_words import CategoryPart, PairWords
from fairhead.locate.pairs import TextPairs
from fairhead.locate.passes import TextPasses, has_tf32, matmul_precision
from fairhead.locate.question import Changes, Edited, Extremes, LocatePlan, Mask, Question, halves
from fairhead.stats import Difference, adjust
from fairhead.stats.bootstrap import Resampling
from fairhead.stats.clusters import cluster_sums, divide
from fairhead.stats.paired import paired_difference

POLES = ("stereotype", "anti-stereotype")
_EXTREMES = 3
_FEW = 50
_LEAST = 10  # pairs of a category, at least, for a figure of it
# Columns of the sums over pairs.
_WEIGHT, _ODDS, _SIZE, _PREFERS, _LOST, _TOKENS, _MEANINGFUL = range(7)
# What an even (or, of the last, an able) model would show.
IDEALS: Mapping[str, float | None] = {"log_odds": 0.0, "log_odds_size": 0.0, "ss": 0.5, "nll": None, "lms": 1.0}


@dataclass(frozen=True)
class PairRows:
    """Pairs of texts, the log-odds of whose poles are compared.

    The figures are: `log_odds`, the mean log-odds of the first pole against the second; `log_odds_size`, their mean
    absolute value; `ss`, the share of pairs in which the first pole is likelier (ties count half); `nll`, the mean
    negative log-probability of a token of all texts, whose rise is damage; `lms`, how often a meaningful text is
    likelier than the unrelated one, where pairs have one.

    Attributes:
        pairs: n of them.
        sign: −1 where the anti-stereotype is the first pole.

    Example:
        >>> from fairhead.data.sentence_pairs import CrowsPair
        >>> from fairhead.locate.pairs import pairs_of
        >>> made = [CrowsPair(str(i), f"She {i}.", f"He {i}.", "stereo", "gender", ()) for i in range(2)]
        >>> rows = PairRows(pairs_of(made))
        >>> found = rows.figures([rows.sums(np.array([3.0, -1.0]))])
        >>> [(name, float(found[name][0])) for name in ("log_odds", "log_odds_size", "ss")]
        [('log_odds', 1.0), ('log_odds_size', 2.0), ('ss', 0.5)]
    """

    pairs: TextPairs
    sign: float = 1.0

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def noun(self) -> str:
        """What the rows are."""
        return "pairs"

    @property
    def poles(self) -> tuple[str, str]:
        """Which text is set against which."""
        return POLES if self.sign > 0 else (POLES[1], POLES[0])

    @property
    def ids(self) -> tuple[str, ...]:
        """Of the pairs."""
        return self.pairs.ids

    @property
    def gap_name(self) -> str:
        """What the gap is of."""
        return "log-odds"

    @property
    def doses(self) -> tuple[str, ...]:
        """All figures that these pairs have."""
        return tuple(name for name in IDEALS if name != "lms" or self.pairs.per_pair == 3)

    def take(self, rows: NDArray[Any]) -> "PairRows":
        """The chosen pairs; their weights add up to 1 again."""
        return PairRows(self.pairs.take(rows), self.sign)

    def score(self, parts: Array, total: Array, level: float = 0.95, measure: str | None = None) -> HeadMap:
        """The weighted mean of parts [n, layers, heads] of the log-odds [n]."""
        return score_pairs(
            parts,
            total,
            weights=self.pairs.weights,
            clusters=self.pairs.clusters,
            names=self.poles,
            level=level,
            measure=measure or f"direct part in the log-odds, {self.poles[0]} minus {self.poles[1]}",
        )

    def sums(
        self, log_odds: Array, lost: Array | float = 0, tokens: Array | float = 0, able: Array | float = 0
    ) -> Array:
        """What each pair adds to the sums behind the figures, [n, 7].

        Args:
            log_odds: of the first pole against the second, [n].
            lost: summed negative log-probability of the pair's texts, [n].
            tokens: their tokens, [n]; where there are none, nll and lms have no value.
            able: how often a meaningful text is likelier than the unrelated one, [n].
        """
        one, weight = np.ones(len(self)), self.pairs.weights
        weighted = np.column_stack([one, log_odds, np.abs(log_odds), (1 + np.sign(log_odds)) / 2]) * weight[:, None]
        return np.column_stack([weighted, lost * one, tokens * one, able * weight])

    def read(self, logprobs: Array, tokens: NDArray[np.integer]) -> Array:
        """The sums [n, 7] of summed log-probabilities and token counts, one a text, [n · per_pair]."""
        shape = (len(self), self.pairs.per_pair)
        lost, count = -logprobs.reshape(shape), tokens.reshape(shape).astype(np.float64)
        likely = -lost / count if self.pairs.per_token else -lost
        able = (likely[:, :2] > likely[:, 2:3]).sum(1) / 2 if self.pairs.per_pair == 3 else 0.0
        return self.sums(self.sign * (likely[:, 0] - likely[:, 1]), lost.sum(1), count.sum(1), able)

    def evidence(self, read: Array) -> Array:
        """The log-odds, [n]."""
        return read[:, _ODDS] / read[:, _WEIGHT]

    def figures(self, reads: Sequence[Array]) -> Mapping[str, Array]:
        """The figures of several reads, each [k]."""
        return figures(np.stack([read.sum(0) for read in reads]))

    def compare(self, before: Array, after: Array, plan: LocatePlan) -> Changes:
        """Those figures that have a value."""
        of_texts = () if before[:, _TOKENS].any() else ("nll", "lms")
        names = [name for name in self.doses if name not in of_texts]
        how: dict[str, Any] = {"n_boot": plan.n_boot, "level": plan.level, "seed": plan.seed}
        return Changes(paired_differences(before, after, self.pairs.clusters, names, **how))


def figures(totals: Array) -> dict[str, Array]:
    """The figures from totals [..., 7], each [...]; see `PairRows`."""
    weight = totals[..., _WEIGHT]
    return {
        "log_odds": divide(totals[..., _ODDS], weight),
        "log_odds_size": divide(totals[..., _SIZE], weight),
        "ss": divide(totals[..., _PREFERS], weight),
        "nll": divide(totals[..., _LOST], totals[..., _TOKENS]),
        "lms": divide(totals[..., _MEANINGFUL], weight),
    }


def paired_differences(
    before: Array,
    after: Array,
    clusters: NDArray[np.integer],
    names: Sequence[str],
    *,
    n_boot: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[Difference, ...]:
    """Each figure of sums [n, 7] after an edit minus before, with a paired interval; p-values are corrected by Holm.

    Pairs whose `clusters` [n] are one number stay together; `n_boot` is also how many permutations there are at most.
    """
    first, second = (cluster_sums(table, clusters.tolist()) for table in (before, after))
    how = Resampling(n_boot, seed, level, min_items=1)
    found = [
        paired_difference(
            name, partial(_figure, name=name), first, second, len(before), how, ideal=IDEALS[name], n_perm=n_boot
        )
        for name in names
    ]
    adjusted = adjust([change.p for change in found], "holm")
    return tuple(replace(change, p_adjusted=p) for change, p in zip(found, adjusted, strict=True))


def _figure(totals: Array, name: str) -> Array:
    return figures(totals)[name]


def halves_of_pairs(pairs: TextPairs, seed: int = 0) -> Mask:
    """The choosing half, [n] bool: whole clusters, drawn at random; too few of them are refused."""
    clusters = len(np.unique(pairs.clusters))
    if clusters < 4:
        raise InputError(
            f"{len(pairs)} pairs in {clusters} independent clusters; at least 4 are needed for two halves: use more"
        )
    return halves(np.zeros(len(pairs), dtype=np.intp), pairs.clusters, seed)


class PairQuestion(Question):
    """The log-odds of pairs of texts, seen from the pole that the choosing half prefers.

    Args:
        scorer: the model.
        pairs: n pairs of texts.
        terms: their log-odds taken apart (`take_apart`).
        tf32: on GPUs that can, forward passes multiply in TF32: several times as fast. What that changes is noted.
        seed: of halves, and of the outputs that are resampled.
        progress: called with (stage, texts done, texts).

    Raises:
        InputError: too few pairs.

    Example:
        >>> question = PairQuestion(scorer, pairs, take_apart(scorer, pairs))  # doctest: +SKIP
        >>> locate(question, LocatePlan(forward=True)).ranked  # doctest: +SKIP
        (Head(layer=1, head=2),)
    """

    kinds = TEXT_KINDS
    ranks = ("gap", "effect")

    def __init__(
        self,
        scorer: Scorer,
        pairs: TextPairs,
        terms: PairTerms,
        *,
        tf32: bool = False,
        seed: int = 0,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.scorer, self._progress, self._rounds = scorer, progress, itertools.count(1)
        self.choosing = halves_of_pairs(pairs, seed)
        self.comparable = np.ones(len(pairs), dtype=bool)
        self._sequences = encoded_texts(scorer, pairs)
        # Seen from the pole that the choosing half prefers, so that a fall always means a smaller gap.
        prefers = float(pairs.weights[self.choosing] @ terms.log_odds[self.choosing])
        self.rows: PairRows = PairRows(pairs, -1.0 if prefers < 0 else 1.0)
        self.edits: TextEdits = TextEdits.learn_texts(scorer, self._texts(np.flatnonzero(self.choosing)), seed)
        self.terms = terms.times(self.rows.sign)
        self.parts, self.other_parts, self.total = self.terms.heads, self.terms.others, self.terms.log_odds
        self.in_tf32 = tf32 and has_tf32(next(scorer.model.parameters()).device)
        n = len(self.reported)
        self.notes = (f"{n} reported pairs are few: expect wide intervals.",) if n < _FEW else ()

    def _texts(self, rows: NDArray[np.intp]) -> list[TokenSequence]:
        k = self.rows.pairs.per_pair
        return [self._sequences[i * k + j] for i in rows for j in range(k)]

    def direct(self, kind: str, seed: int) -> Edited | None:
        """Of silent heads, or of heads stuck at their mean; resampling would need every token's own output."""
        if kind == "resample":
            return None
        kept, rows = self.terms.take(self.reported), self.rows.take(self.reported)
        stuck = self.edits.means if kind == "mean" else None
        return lambda sets: [rows.sums(kept.without(heads, stuck)) for heads in sets]

    def forward(self, rows: NDArray[np.intp], kind: str) -> Edited:
        """All texts of some pairs, by the model itself."""
        texts, part = self._texts(rows), self.rows.take(rows)
        tokens = np.array([len(text.tokens) - text.scored_from for text in texts])
        number = next(self._rounds)

        def tell(done: int, runs: int) -> None:
            if self._progress is not None:
                self._progress(f"forward passes {number}, {runs} sets of heads a text ({kind})", done, len(texts))

        passes = TextPasses(self.scorer, texts, self.edits, kind, tell)

        def edited(sets: Sequence[Sequence[tuple[int, int]]]) -> list[Array]:
            with matmul_precision(self.in_tf32):
                return [part.read(found, tokens) for found in passes(sets)]

        return edited

    def forward_notes(self, edited: Edited | None) -> list[str]:
        """What TF32 changed."""
        if not self.in_tf32:
            return []
        (plain,) = (edited or self.forward(self.reported, self.kinds[0]))([()])
        off = np.abs(self.rows.evidence(plain) - self.total[self.reported])
        return [
            "Forward passes ran in TF32: the log-odds of the model as it is differ from those in float32 by "
            f"{off.mean():.1g} nats a pair on average, {off.max():.1g} at most."
        ]

    def extremes(self, head: Head, count: int | None) -> Extremes:
        """The reported pairs that a head moves most towards either pole."""
        rows = self.reported
        return Extremes.of(head, self.parts[rows, head.layer, head.head], count or _EXTREMES, rows)

    def words(self, ranked: tuple[Head, ...], plan: LocatePlan) -> PairWords:
        """Log-odds by term, and the chosen heads' part by category."""
        kept, rows = self.terms.take(self.reported), self.rows.take(self.reported)
        sums = {name: float(rows.pairs.weights @ values) for name, values in whole(kept)}
        return PairWords(self.rows.pairs, self.rows.poles, sums, parts_by_category(kept, rows, ranked, plan.level))


def parts_by_category(
    terms: PairTerms, rows: PairRows, ranked: Sequence[Head], level: float = 0.95
) -> tuple[CategoryPart, ...]:
    """The chosen heads' direct part, together, in every category that has enough pairs; Holm over them."""
    if not ranked:
        return ()
    together = np.sum([terms.heads[:, layer, head] for layer, head in ranked], axis=0)
    found: list[tuple[str, str, HeadMap]] = []
    for category, values in rows.pairs.categories.items():
        for value in sorted(set(values)):
            chosen = np.flatnonzero(np.array(values) == value)
            part = rows.take(chosen)
            if len(chosen) >= _LEAST and len(np.unique(part.pairs.clusters)) > 1:
                scored = part.score(together[chosen, None, None], terms.log_odds[chosen], level)
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
