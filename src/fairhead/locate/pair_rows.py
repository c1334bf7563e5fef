"""Pairs of texts that are compared, and their figures.

The log-odds of a pair are those that its benchmark defines: CrowS-Pairs compares sums of log-probabilities, StereoSet
means per token, and StereoSet counts every target term the same. Every figure is a function of sums over pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fairhead.data import read_items
from fairhead.errors import InputError, check_known
from fairhead.language.answers import Request
from fairhead.language.benchmark import sample
from fairhead.language.benchmarks import benchmark_of
from fairhead.language.running import unseen
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import HeadMap, pair_cells, score
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.rows import halves
from fairhead.locate.studies import Changes, Mask
from fairhead.stats import adjust
from fairhead.stats.bootstrap import Resampling
from fairhead.stats.clusters import cluster_sums, quotient
from fairhead.stats.paired import paired_difference

POLES = ("stereotype", "anti-stereotype")
# Columns of the sums over pairs.
_WEIGHT, _ODDS, _SIZE, _PREFERS, _LOST, _TOKENS, _MEANINGFUL = range(7)
# Figure -> the two columns whose quotient it is, and what an even (or, of the last, an able) model would show.
FIGURES: Mapping[str, tuple[int, int, float | None]] = {
    "log_odds": (_ODDS, _WEIGHT, 0.0),
    "log_odds_size": (_SIZE, _WEIGHT, 0.0),
    "ss": (_PREFERS, _WEIGHT, 0.5),
    "nll": (_LOST, _TOKENS, None),
    "lms": (_MEANINGFUL, _WEIGHT, 1.0),
}


@dataclass(frozen=True)
class TextPairs:
    """n pairs of texts, stereotype and anti-stereotype, the log-odds of whose poles are compared.

    The figures are: `log_odds`, the mean log-odds of the first pole against the second; `log_odds_size`, their mean
    absolute value; `ss`, the share of pairs in which the first pole is likelier (ties count half); `nll`, the mean
    negative log-probability of a token of all texts, whose rise is damage; `lms`, how often a meaningful text is
    likelier than the unrelated one, where pairs have one.
    """

    name: str  # of the benchmark
    ids: tuple[str, ...]  # of the pairs
    # The texts to score, as many a pair as `per_pair`: stereotype, anti-stereotype and, in StereoSet, an unrelated one,
    # by which damage shows.
    texts: tuple[Request, ...]
    per_pair: int
    weights: NDArray[np.float64]  # how much each pair counts, [n], adding up to 1
    clusters: NDArray[np.intp]  # pairs with one number depend on each other, [n]
    categories: Mapping[str, tuple[str, ...]]  # by name ("bias_type"), the category of each pair
    per_token: bool  # whether log-odds are of means per token, not of sums
    sign: float = 1.0  # −1 where the anti-stereotype is the first pole

    noun: ClassVar[str] = "pairs"
    gap_name: ClassVar[str] = "log-odds"

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def poles(self) -> tuple[str, str]:
        """Which text is set against which."""
        return POLES if self.sign > 0 else (POLES[1], POLES[0])

    @property
    def doses(self) -> tuple[str, ...]:
        """All figures that these pairs have."""
        return tuple(name for name in FIGURES if name != "lms" or self.per_pair == 3)

    def take(self, rows: NDArray[Any]) -> Self:
        """The chosen pairs: positions, or a mask; weights add up to 1 again."""
        chosen = np.arange(len(self))[rows]
        weights = self.weights[chosen]
        return replace(
            self,
            ids=tuple(self.ids[i] for i in chosen),
            texts=tuple(self.texts[i * self.per_pair + k] for i in chosen for k in range(self.per_pair)),
            weights=weights / weights.sum(),
            clusters=self.clusters[chosen],
            categories={name: tuple(values[i] for i in chosen) for name, values in self.categories.items()},
        )

    def score(self, parts: Array, total: Array, level: float = 0.95, measure: str | None = None) -> HeadMap:
        """The weighted mean of parts [n, layers, heads] of the log-odds [n]."""
        name = measure or f"direct contribution in the log-odds, {self.poles[0]} minus {self.poles[1]}"
        cells = pair_cells(self.weights, self.clusters)
        return score(parts, total, cells, level=level, correction="holm", name=name, unit="nats")

    def sums(
        self,
        log_odds: Array,  # of the first pole against the second, [n]
        lost: Array | float = 0,  # summed negative log-probability of the pair's texts, [n]
        tokens: Array | float = 0,  # their tokens, [n]; where there are none, nll and lms have no value
        able: Array | float = 0,  # how often a meaningful text is likelier than the unrelated one, [n]
    ) -> Array:
        """What each pair adds to the sums behind the figures, [n, 7]."""
        one, weight = np.ones(len(self)), self.weights
        weighted = np.column_stack([one, log_odds, np.abs(log_odds), (1 + np.sign(log_odds)) / 2]) * weight[:, None]
        return np.column_stack([weighted, lost * one, tokens * one, able * weight])

    def read(self, logprobs: Array, tokens: NDArray[np.integer]) -> Array:
        """The sums [n, 7] of summed log-probabilities and token counts, one a text, [n · per_pair]."""
        shape = (len(self), self.per_pair)
        lost, count = -logprobs.reshape(shape), tokens.reshape(shape).astype(np.float64)
        likely = -lost / count if self.per_token else -lost
        able = (likely[:, :2] > likely[:, 2:3]).sum(1) / 2 if self.per_pair == 3 else 0.0
        return self.sums(self.sign * (likely[:, 0] - likely[:, 1]), lost.sum(1), count.sum(1), able)

    def evidence(self, read: Array) -> Array:
        """The log-odds, [n]."""
        return read[:, _ODDS] / read[:, _WEIGHT]

    def figures(self, reads: Sequence[Array]) -> Mapping[str, Array]:
        """The figures of several reads, each [k]."""
        totals = np.stack([read.sum(0) for read in reads])
        return {name: quotient(above, below)(totals) for name, (above, below, _) in FIGURES.items()}

    def compare(self, before: Array, after: Array, plan: LocatePlan) -> Changes:
        """Each figure that has a value, after minus before, paired; clusters stay together, p corrected by Holm."""
        first, second = (cluster_sums(table, self.clusters.tolist()) for table in (before, after))
        how = Resampling(plan.n_boot, plan.seed, plan.level, min_items=1)
        of_texts = () if before[:, _TOKENS].any() else ("nll", "lms")
        found = [
            paired_difference(
                name, quotient(*columns), first, second, len(before), how, ideal=ideal, n_perm=plan.n_boot
            )
            for name, (*columns, ideal) in FIGURES.items()
            if name in self.doses and name not in of_texts
        ]
        adjusted = adjust([change.p for change in found], "holm")
        return Changes(tuple(replace(change, p_adjusted=p) for change, p in zip(found, adjusted, strict=True)))


def read_pairs(
    spec: str,  # name and path
    bias_type: str | None = None,  # only those about, say, "gender"; None for all
    limit: int | None = None,  # only so many, drawn at random
    seed: int = 0,  # of the draw
    options: Mapping[str, Any] | None = None,  # of the reader
    model: Any = None,  # whose training pairs are left out, where its folder says which
) -> TextPairs:
    """Pairs of `crows:PATH` or `stereoset:PATH`, or of your own `pairs:PATH` and `triplets:PATH`."""
    data = read_items(spec, "pairs", "triplets", **(options or {}))
    items = list(unseen(data, model))
    if bias_type is not None:
        known = sorted({item.bias_type for item in items})
        check_known(bias_type, known, f"{data.name} has no pairs about {bias_type!r}; it has")
        items = [item for item in items if item.bias_type == bias_type]
    return pairs_of(items if limit is None else sample(items, limit, seed), data.name)


def pairs_of(items: Sequence[Any], name: str | None = None) -> TextPairs:
    """Items of one benchmark as pairs; `name` it where it is not the published one.

    CrowS-Pairs were written one by one, so each is independent of the others unless they share a sentence. Items of
    StereoSet about the same term depend on each other.
    """
    if not items:
        raise InputError("there is no pair of texts; at least 2 are needed")
    benchmark = benchmark_of(items)
    if benchmark.pairs is None or benchmark.requests is None:
        raise InputError(f"{benchmark.title} has no pairs of texts")
    pairs, texts = benchmark.pairs(items), benchmark.requests(items, benchmark.options())
    _, codes, counts = np.unique([pair.cluster for pair in pairs], return_inverse=True, return_counts=True)
    return TextPairs(
        name or benchmark.name,
        tuple(pair.id for pair in pairs),
        tuple(texts),
        len(texts) // len(pairs),
        1 / (counts[codes] * len(counts)),
        codes if counts.max() > 1 else _linked([(pair.first, pair.second) for pair in pairs]),
        {kind: tuple(pair.categories[kind] for pair in pairs) for kind in pairs[0].categories},
        benchmark.per_token,
    )


def _linked(pairs: Sequence[tuple[str, str]]) -> NDArray[np.int64]:
    """A number for each pair; pairs that share a text have the same, and so have those that others link."""
    texts = {text: i for i, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
    ends = np.array([[texts[one], texts[other]] for one, other in pairs])
    links = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(len(texts), len(texts)))
    of_text = connected_components(links, directed=False)[1].astype(np.int64)
    return of_text[ends[:, 0]]


def halves_of_pairs(pairs: TextPairs, seed: int = 0) -> Mask:
    """The selection half, [n] bool: whole clusters, drawn at random; too few of them are refused."""
    clusters = len(np.unique(pairs.clusters))
    if clusters < 4:
        raise InputError(
            f"{len(pairs)} pairs in {clusters} independent clusters; at least 4 are needed for two halves: use more"
        )
    return halves(np.zeros(len(pairs), dtype=np.intp), pairs.clusters, seed)
