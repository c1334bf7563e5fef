"""Where attention parts ways between a stereotyped sentence and its counterpart: on the words that differ?

KLAAD's motivation: in a pair of sentences, is the token whose attention differs most one of those that carry the bias?
`attention_pairs.read_gaps` reads a model; this file makes figures of what it read, and needs no torch.

Read the answer with care. Tokens that differ have keys that differ, in any model and for any words: that attention to
them differs most is no proof of bias. What tells something is how the figures compare, between models, heads or kinds
of bias.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.data.crows_pairs import CrowsPair
from fairhead.data.stereoset import StereoSetItem
from fairhead.errors import InputError
from fairhead.language.resampling import Resampling, cluster_sums, ratio
from fairhead.language.tables import ItemTable, Measure, evaluate_table, everywhere
from fairhead.stats import Estimate, adjust

Array = NDArray[np.float64]

SCHEMA = "fairhead.attention_gap/1"
NO_SPAN = "no token was replaced by another"
EQUAL, UNEQUAL = "equal length", "unequal length"


@dataclass(frozen=True)
class SentencePair:
    """Two sentences that differ in the words that carry a bias.

    Attributes:
        id: distinct.
        first: the stereotype.
        second: its counterpart.
        groups: categories that the pair is of.
        cluster: pairs of one cluster are drawn together.
    """

    id: str
    first: str
    second: str
    groups: tuple[str, ...]
    cluster: str


def sentence_pairs(items: Iterable[CrowsPair | StereoSetItem]) -> list[SentencePair]:
    """Pairs of CrowS-Pairs (more, less stereotypical) or StereoSet (stereotype, anti-stereotype).

    Example:
        >>> sentence_pairs([CrowsPair("0", "She cried.", "He cried.", "stereo", "gender", ())])[0].groups
        ('gender',)
    """
    pairs = []
    for item in items:
        if isinstance(item, CrowsPair):
            pairs.append(SentencePair(item.id, item.more, item.less, (item.bias_type,), item.id))
        elif isinstance(item, StereoSetItem):
            first, second, _ = item.texts
            groups = (item.bias_type, item.kind)
            pairs.append(SentencePair(f"{item.kind}/{item.id}", first, second, groups, item.target.casefold()))
        else:
            raise InputError(f"a {type(item).__name__} is no pair of sentences; CrowS-Pairs or StereoSet is expected")
    return pairs


class TokenGaps(NamedTuple):
    """A pair token by token, M places that both sentences have.

    Attributes:
        first: texts of the first sentence's tokens.
        second: texts of the second's.
        changed: where the two differ: the span that carries the bias, [M].
        by_layer: gaps, averaged over heads, [layers, M].
        equal_length: whether the sentences have the same number of tokens.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    changed: NDArray[np.bool_]
    by_layer: Array
    equal_length: bool


@dataclass(frozen=True)
class PairGaps:
    """What was read of a model on n pairs.

    Attributes:
        pairs: the pairs.
        tokens: each token by token.
        hit: whether the largest gap is on the span, in each head, [n, layers, heads]; ties count in part. NaN where
            a layer has fewer heads.
        on: mean gap on the span, [n, layers, heads].
        off: mean gap elsewhere, [n, layers, heads].
        left_out: ids of pairs that could not be compared, by reason.
    """

    pairs: tuple[SentencePair, ...]
    tokens: tuple[TokenGaps, ...]
    hit: Array
    on: Array
    off: Array
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        pairs: Sequence[SentencePair],
        tokens: Sequence[TokenGaps],
        gaps: Sequence[Sequence[Array]],
        left_out: Mapping[str, tuple[str, ...]] | None = None,
    ) -> "PairGaps":
        """From the gaps of each pair: one array [heads, M] a layer."""
        layers, heads = len(gaps[0]), max(len(layer) for layer in gaps[0])
        hit, on, off = (np.full((len(pairs), layers, heads), np.nan) for _ in range(3))
        for i, (of_pair, by_token) in enumerate(zip(gaps, tokens, strict=True)):
            for number, layer in enumerate(of_pair):
                n, changed = len(layer), by_token.changed
                hit[i, number, :n] = largest_on(layer, changed)
                on[i, number, :n], off[i, number, :n] = layer[:, changed].mean(1), layer[:, ~changed].mean(1)
        return cls(tuple(pairs), tuple(tokens), hit, on, off, dict(left_out or {}))

    @property
    def chance(self) -> Array:
        """The share of each pair's tokens that are of its span, [n]: what chance would hit."""
        return np.array([tokens.changed.mean() for tokens in self.tokens])

    def of_layers(self) -> "tuple[Array, Array, Array]":
        """`hit`, `on` and `off` of gaps averaged over heads, [n, layers] each."""
        hit = np.stack([largest_on(tokens.by_layer, tokens.changed) for tokens in self.tokens])
        on, off = (np.stack([t.by_layer[:, t.changed == side].mean(1) for t in self.tokens]) for side in (True, False))
        return hit, on, off


def largest_on(gaps: Array, changed: NDArray[np.bool_]) -> Array:
    """Share of the places with the largest gap [..., M] that are of the span: 1 or 0, something else where gaps tie.

    Example:
        >>> largest_on(np.array([[1.0, 3.0, 2.0], [2.0, 2.0, 0.0]]), np.array([False, True, False])).tolist()
        [1.0, 0.5]
    """
    top = gaps == gaps.max(axis=-1, keepdims=True)
    shares: Array = (top & changed).sum(-1) / top.sum(-1)
    return shares


def table(gaps: PairGaps, layer: int = -1) -> ItemTable:
    """One row a pair, with the gaps of one layer averaged over heads; by default the last, as in the paper."""
    hit, on, off = (values[:, layer] for values in gaps.of_layers())
    lengths = [EQUAL if tokens.equal_length else UNEQUAL for tokens in gaps.tokens]
    groups = [(*pair.groups, length) for pair, length in zip(gaps.pairs, lengths, strict=True)]
    kinds = sorted({group for pair in gaps.pairs for group in pair.groups})
    return ItemTable.of(
        "attention_gap",
        [pair.id for pair in gaps.pairs],
        [pair.cluster for pair in gaps.pairs],
        groups,
        {"hit": hit, "chance": gaps.chance, "on": on, "off": off},
        order=[EQUAL, UNEQUAL, *kinds],
        left_out=gaps.left_out,
    )


def _mean_of(*parts: tuple[str, int]) -> Any:
    def columns(items: ItemTable) -> Array:
        total = sum((sign * items.column(name) for name, sign in parts), np.zeros(len(items)))
        return np.column_stack([total, np.ones(len(items))])

    return columns


# The share of pairs whose largest gap is on the span, what chance would give, and how far it is above; the mean gap on
# the span and off it, and their difference.
MEASURES = (
    Measure("largest_on_span", _mean_of(("hit", 1)), ratio, None, everywhere),
    Measure("chance", _mean_of(("chance", 1)), ratio, None, everywhere),
    Measure("above_chance", _mean_of(("hit", 1), ("chance", -1)), ratio, 0.0, everywhere),
    Measure("gap_on_span", _mean_of(("on", 1)), ratio, None, everywhere),
    Measure("gap_elsewhere", _mean_of(("off", 1)), ratio, None, everywhere),
    Measure("gap_difference", _mean_of(("on", 1), ("off", -1)), ratio, 0.0, everywhere),
)


class Grid(NamedTuple):
    """A mean of every head with its interval, [layers][heads] each; None where it is undefined."""

    value: list[list[float | None]]
    low: list[list[float | None]]
    high: list[list[float | None]]
    p_adjusted: list[list[float | None]]


class LayerFigures(NamedTuple):
    """A layer's gaps, averaged over heads: means with the ends of an interval of the first."""

    layer: int
    above_chance: float
    low: float
    high: float
    gap_on_span: float
    gap_elsewhere: float


@dataclass(frozen=True)
class AttentionGap:
    """The figures.

    Attributes:
        layer: the layer that `estimates` and `tests` are of.
        estimates: `MEASURES` of all pairs, of those of equal and unequal length, and of each kind of bias.
        tests: of "above_chance" and "gap_difference", over all pairs.
        layers: every layer's gaps, averaged over heads.
        heads: by head, how much more often than by chance its largest gap is on the span.
        n: pairs compared.
        left_out: ids of pairs that were not, by reason.
        pictures: single pairs, token by token.
        provenance: model, data and settings.
    """

    layer: int
    estimates: tuple[Estimate, ...]
    tests: "Mapping[str, MeanTest]"
    layers: tuple[LayerFigures, ...]
    heads: Grid
    n: int
    left_out: Mapping[str, tuple[str, ...]]
    pictures: tuple[Mapping[str, Any], ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str | tuple[str, str | None]) -> Estimate:
        """`gap["above_chance"]` of all pairs, or `gap["above_chance", "gender"]`."""
        metric, group = (key, None) if isinstance(key, str) else key
        return next(e for e in self.estimates if (e.metric, e.group_by) == (metric, group))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "schema": SCHEMA,
            "provenance": dict(self.provenance),
            "n": self.n,
            "left_out": {reason: list(ids) for reason, ids in self.left_out.items()},
            "layer": self.layer,
            "estimates": [asdict(e) for e in self.estimates],
            "tests": {name: test._asdict() for name, test in self.tests.items()},
            "layers": [layer._asdict() for layer in self.layers],
            "heads": self.heads._asdict(),
            "pairs": [dict(picture) for picture in self.pictures],
        }


class MeanTest(NamedTuple):
    """A one-sided test that a mean is above 0; None where every pair has the same value.

    Attributes:
        mean: the mean.
        t: Student's, with sums over clusters in place of single pairs.
        p: its p-value.
        p_permutation: the share of draws with a mean as large, had the span lain elsewhere in each sentence.
        n: pairs.
    """

    mean: float
    t: float | None
    p: float | None
    p_permutation: float
    n: int


def evaluate(
    gaps: PairGaps, layer: int = -1, resampling: Resampling | None = None, pictures: int = 6, n_perm: int = 2000
) -> AttentionGap:
    """Figures of what was read.

    Args:
        gaps: from `attention_pairs.read_gaps`.
        layer: whose gaps the estimates and tests are of.
        resampling: how intervals are made.
        pictures: how many single pairs are kept, token by token: those with the largest gap relative to the others of
            their sentence, of each kind of bias in turn.
        n_perm: draws of the permutation test.
    """
    how = resampling or Resampling()
    layers, heads = gaps.hit.shape[1:]
    if not -layers <= layer < layers:
        raise InputError(f"layer {layer} does not exist: the model has {layers} attention layers")
    layer %= layers
    items = table(gaps, layer)
    clusters = [pair.cluster for pair in gaps.pairs]
    chance = gaps.chance
    hit, on, off = gaps.of_layers()
    means = _means(hit - chance[:, None], clusters, how.level)
    of_heads = _means((gaps.hit - chance[:, None, None]).reshape(len(chance), -1), clusters, how.level)
    by_layer = np.column_stack([means.value, means.low, means.high, on.mean(0), off.mean(0)])
    adjusted = np.array(adjust([None if np.isnan(p) else float(p) for p in of_heads.p], "holm"), dtype=np.float64)
    by_chance = _shifted(gaps, layer, n_perm, how.seed)
    observed = {"above_chance": hit[:, layer] - chance, "gap_difference": on[:, layer] - off[:, layer]}
    return AttentionGap(
        layer,
        evaluate_table(items, MEASURES, how),
        {name: _tested(values, clusters, by_chance[name]) for name, values in observed.items()},
        tuple(LayerFigures(i, *map(float, row)) for i, row in enumerate(by_layer)),
        Grid(*(_grid(part, heads) for part in (of_heads.value, of_heads.low, of_heads.high, adjusted))),
        len(chance),
        gaps.left_out,
        tuple(_picture(gaps, i, layer) for i in _telling(gaps, layer, pictures)),
    )


class _Means(NamedTuple):
    value: Array
    low: Array
    high: Array
    t: Array
    p: Array


def _means(values: Array, clusters: Sequence[str], level: float = 0.95) -> _Means:
    """Means of [n, k] over n with intervals and one-sided tests by Student's t, clusters as units: [k] each."""
    from scipy import special

    n = len(values)
    mean = values.mean(axis=0)
    sums = cluster_sums(values - mean, clusters)
    c = len(sums)
    if c < 2:
        nothing = np.full(mean.shape, np.nan)
        return _Means(mean, nothing, nothing, nothing, nothing)
    # For clusters of one pair each this is the standard error of the mean.
    se = np.sqrt(c / (c - 1) * (sums**2).sum(axis=0)) / n
    reach = special.stdtrit(c - 1, (1 + level) / 2) * se
    t = np.divide(mean, se, out=np.full(mean.shape, np.nan), where=se > 1e-12)
    return _Means(mean, mean - reach, mean + reach, t, special.stdtr(c - 1, -t))


def _tested(values: Array, clusters: Sequence[str], by_chance: Array) -> MeanTest:
    mean, _, _, t, p = (float(part[0]) for part in _means(values[:, None], clusters))
    as_large = int(np.count_nonzero(by_chance >= mean - 1e-12))
    t_or_none, p_or_none = (None if np.isnan(x) else x for x in (t, p))
    return MeanTest(mean, t_or_none, p_or_none, (1 + as_large) / (1 + len(by_chance)), len(values))


def _shifted(gaps: PairGaps, layer: int, n_perm: int, seed: int) -> dict[str, Array]:
    """Means over pairs, [n_perm], with each pair's span moved round its sentence by a random number of places."""
    longest = max(len(tokens.changed) for tokens in gaps.tokens)
    hit, apart = np.zeros((2, len(gaps.tokens), longest))
    for i, tokens in enumerate(gaps.tokens):
        values = tokens.by_layer[layer]
        moved = np.stack([np.roll(tokens.changed, shift) for shift in range(len(values))])
        hit[i, : len(values)] = [float(largest_on(values, one)) for one in moved]
        apart[i, : len(values)] = [values[one].mean() - values[~one].mean() for one in moved]
    lengths = np.array([len(tokens.changed) for tokens in gaps.tokens])
    rng = np.random.default_rng(seed)
    expected = float(gaps.chance.mean())
    found: dict[str, list[Array]] = {"above_chance": [], "gap_difference": []}
    block = max(1, (1 << 20) // len(lengths))
    for begin in range(0, n_perm, block):
        drawn = rng.integers(lengths, size=(min(block, n_perm - begin), len(lengths))).T
        found["above_chance"].append(np.take_along_axis(hit, drawn, 1).mean(0) - expected)
        found["gap_difference"].append(np.take_along_axis(apart, drawn, 1).mean(0))
    return {name: np.concatenate(values) for name, values in found.items()}


def _grid(values: Array, heads: int) -> list[list[float | None]]:
    return [[None if np.isnan(v) else float(v) for v in row] for row in values.reshape(-1, heads)]


def _telling(gaps: PairGaps, layer: int, count: int) -> list[int]:
    """Pairs to show: the largest gap against the mean of its sentence, one of each kind of bias after the other."""
    contrast = [t.by_layer[layer].max() / max(t.by_layer[layer].mean(), 1e-12) for t in gaps.tokens]
    kinds: dict[str, list[int]] = {}
    for i in sorted(range(len(contrast)), key=lambda i: -contrast[i]):
        kinds.setdefault(gaps.pairs[i].groups[0] if gaps.pairs[i].groups else "", []).append(i)
    chosen: list[int] = []
    while len(chosen) < min(count, len(contrast)):
        chosen += [members.pop(0) for members in kinds.values() if members]
    return chosen[:count]


def _picture(gaps: PairGaps, i: int, layer: int) -> dict[str, Any]:
    pair, tokens = gaps.pairs[i], gaps.tokens[i]
    return {
        "id": pair.id,
        "groups": list(pair.groups),
        "texts": [pair.first, pair.second],
        "first": list(tokens.first),
        "second": list(tokens.second),
        "changed": tokens.changed.tolist(),
        "gaps": tokens.by_layer[layer].tolist(),
    }
