"""Pairs of texts, stereotype and anti-stereotype, as rows: what is scored, which belong together, and their figures.

The log-odds of a pair are those that its benchmark defines: CrowS-Pairs compares sums of log-probabilities, StereoSet
means per token, and StereoSet counts every target term the same. Every figure is a function of sums over pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fairhead.data import read_items
from fairhead.errors import InputError, did_you_mean
from fairhead.language.answers import Request
from fairhead.language.benchmark import sample
from fairhead.language.benchmarks import benchmark_of
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import HeadMap, score_pairs
from fairhead.locate.question import Changes, LocatePlan, Mask, halves
from fairhead.stats import Difference, adjust
from fairhead.stats.bootstrap import Resampling
from fairhead.stats.clusters import cluster_sums, divide
from fairhead.stats.paired import paired_difference

POLES = ("stereotype", "anti-stereotype")
# Columns of the sums over pairs.
_WEIGHT, _ODDS, _SIZE, _PREFERS, _LOST, _TOKENS, _MEANINGFUL = range(7)
# What an even (or, of the last, an able) model would show.
IDEALS: Mapping[str, float | None] = {"log_odds": 0.0, "log_odds_size": 0.0, "ss": 0.5, "nll": None, "lms": 1.0}


@dataclass(frozen=True)
class TextPairs:
    """n pairs of texts, stereotype and anti-stereotype.

    Attributes:
        name: of the benchmark.
        ids: of the pairs.
        texts: the texts to score, as many a pair as `per_pair`: stereotype, anti-stereotype and, in StereoSet, an
            unrelated one, by which damage shows.
        per_pair: texts a pair.
        weights: how much each pair counts, [n], adding up to 1.
        clusters: pairs with one number depend on each other, [n].
        categories: by name ("bias_type"), the category of each pair.
        per_token: whether log-odds are of means per token, not of sums.

    Example:
        >>> from fairhead.data.sentence_pairs import CrowsPair
        >>> pairs = pairs_of([CrowsPair(str(i), f"She {i}.", f"He {i}.", "stereo", "gender", ()) for i in range(4)])
        >>> len(pairs), pairs.take(np.array([1, 3])).ids, pairs.weights.sum()
        (4, ('1', '3'), np.float64(1.0))
    """

    name: str
    ids: tuple[str, ...]
    texts: tuple[Request, ...]
    per_pair: int
    weights: NDArray[np.float64]
    clusters: NDArray[np.intp]
    categories: Mapping[str, tuple[str, ...]]
    per_token: bool

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: NDArray[Any]) -> "TextPairs":
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


def read_pairs(
    spec: str,
    bias_type: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> TextPairs:
    """Pairs of `crows:PATH` or `stereoset:PATH`, or of your own `pairs:PATH` and `triplets:PATH`.

    Args:
        spec: name and path.
        bias_type: only those about, say, "gender"; None for all.
        limit: only so many, drawn at random.
        seed: of the draw.
        options: of the reader.

    Example:
        >>> read_pairs("bold:BOLD")
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: bold has beginnings of texts; pairs of sentences or sentences in threes are needed \
here: crows_pairs, stereoset, pairs, triplets
    """
    data = read_items(spec, "pairs", "triplets", **(options or {}))
    items = list(data)
    if bias_type is not None:
        known = sorted({item.bias_type for item in items})
        if bias_type not in known:
            near = did_you_mean(bias_type, known)
            raise InputError(f"{data.name} has no pairs about {bias_type!r}; it has {', '.join(known)}.{near}")
        items = [item for item in items if item.bias_type == bias_type]
    return pairs_of(items if limit is None else sample(items, limit, seed), data.name)


def pairs_of(items: Sequence[Any], name: str | None = None) -> TextPairs:
    """Items of one benchmark as pairs; `name` it where it is not the published one.

    CrowS-Pairs were written one by one, so each is independent of the others unless they share a sentence. Items of
    StereoSet about the same term depend on each other.

    Example:
        >>> from fairhead.data.sentence_pairs import CrowsPair
        >>> pair = CrowsPair("0", "She cried.", "He cried.", "stereo", "gender", ())
        >>> found = pairs_of([pair, pair])
        >>> found.clusters.tolist(), found.per_token, [text.id for text in found.texts[:2]]
        ([0, 0], False, ['0/more', '0/less'])
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
