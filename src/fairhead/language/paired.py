"""How a figure differs between two models that answered the same items. Needs no torch.

Clusters are drawn with both models' answers, so what the items have in common cancels; the p-value swaps the two
models' answers of each cluster at random, and counts in standard errors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from fairhead.audit import intervals
from fairhead.errors import InputError
from fairhead.language.resampling import Array, Resampling, Statistic, expanded_level
from fairhead.language.tables import ItemTable, Measure
from fairhead.stats import adjust

SIGNIFICANT = 0.05
_FEW_CLUSTERS = 10
_ROUNDING = 1e-9
# What rounding makes of no change at all, and of the standard error of a change that is the same everywhere.
_NOTHING, _SURE = 1e-12, 1e-6
# Of a total, for the slope of a figure: small against it, large against rounding.
_STEP = 1e-4
# Swaps of each p-value: at most, and how many as large as what was seen are enough.
N_PERM, _ENOUGH = 100_000, 1000


@dataclass(frozen=True)
class Span:
    """A figure and the ends of its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Change:
    """One figure before and after, on the same items.

    Attributes:
        benchmark: such as "crows_pairs".
        metric: such as "ss".
        group_by: the category; None for all items.
        before: value of the first model; None when undefined.
        after: value of the second.
        value: after − before, or the logarithm of after / before for a `relative` figure; None when undefined.
        low: lower end of the paired interval of `value`.
        high: upper end.
        n: items in both.
        clusters: clusters in both.
        p: two-sided paired permutation p-value.
        p_adjusted: p corrected over the family that it was tested in (Holm).
        mde: the smallest difference that this paired sample would show with 80 % power, were it the only figure.
        ideal: the value of a model without a preference.
        nearer: by how much the distance to the ideal changed (negative is nearer), with its interval.
        relative: whether `value`, `low`, `high` and `mde` are logarithms of ratios.
        undefined: why there is no value.
        note: what to keep in mind, such as few clusters.

    Example:
        >>> moved = Change("crows_pairs", "ss", None, 0.6, 0.55, -0.05, -0.08, -0.02, 1508, 1508, p=0.001, ideal=0.5,
        ...                nearer=Span(-0.05, -0.08, -0.02))
        >>> moved.outcome, moved.direction
        ('better', 'nearer')
    """

    benchmark: str
    metric: str
    group_by: str | None
    before: float | None
    after: float | None
    value: float | None
    low: float | None
    high: float | None
    n: int
    clusters: int
    p: float | None = None
    p_adjusted: float | None = None
    mde: float | None = None
    ideal: float | None = None
    nearer: Span | None = None
    relative: bool = False
    undefined: str | None = None
    note: str | None = None

    @property
    def outcome(self) -> str:
        """What can be said: "better", "worse", "changed", "cannot be told apart" or "undefined".

        Beyond chance means both: the interval leaves out 0, and the (corrected) p is below 0.05. Better and worse also
        need the distance to the ideal to have changed beyond its own interval: a figure that jumped over the ideal has
        changed, but may be as far from it as before.
        """
        if self.value is None or self.low is None or self.high is None:
            return "undefined"
        p = self.p if self.p_adjusted is None else self.p_adjusted
        if p is None or p >= SIGNIFICANT or self.low <= 0 <= self.high:
            return "cannot be told apart"
        if self.nearer is None or self.nearer.low <= 0 <= self.nearer.high:
            return "changed"
        return "better" if self.nearer.value < 0 else "worse"

    @property
    def direction(self) -> str | None:
        """Where the figure moved, certain or not: "nearer" or "further" from its ideal; None where there is none."""
        if self.nearer is None or abs(self.nearer.value) < _ROUNDING:
            return None
        return "nearer" if self.nearer.value < 0 else "further"


def join(first: ItemTable, second: ItemTable) -> tuple[ItemTable, ItemTable]:
    """The items that both tables have, in the same order.

    Raises:
        InputError: there is none, or an item is of other clusters or categories in the second.

    Example:
        >>> one = ItemTable.of("b", ["x", "y"], ["x", "y"], [[], []], {"right": [1, 0]})
        >>> other = ItemTable.of("b", ["y", "z"], ["y", "z"], [[], []], {"right": [1, 1]})
        >>> [table.ids for table in join(one, other)]
        [('y',), ('y',)]
    """
    places = {name: i for i, name in enumerate(second.ids)}
    here = [i for i, name in enumerate(first.ids) if name in places]
    if not here:
        raise InputError(f"{first.benchmark}: the two runs have no item in common; were they made of the same data?")
    there = [places[first.ids[i]] for i in here]
    a, b = first.take(here), second.take(there)
    if a.clusters != b.clusters or a.fields != b.fields:
        raise InputError(
            f"{first.benchmark}: the two runs describe the same items differently; run both with one version"
        )
    return a, b


def change(
    measure: Measure, group: str | None, before: ItemTable, after: ItemTable, how: Resampling, n_perm: int = N_PERM
) -> Change:
    """One figure on two tables of the same items.

    Args:
        measure: the figure.
        group: the category; None for all items.
        before: answers of the first model.
        after: answers of the second, in the same order.
        how: how intervals are made.
        n_perm: random swaps at most.

    Example:
        >>> from fairhead.language.resampling import ratio
        >>> right = Measure("accuracy", lambda t: np.column_stack([t.column("right"), np.ones(len(t))]), ratio, 1.0)
        >>> names = [str(i) for i in range(40)]
        >>> one, other = (ItemTable.of("b", names, names, [[]] * 40, {"right": r}) for r in ([0, 1] * 20, [1] * 40))
        >>> found = change(right, None, one, other, Resampling())
        >>> found.value, found.outcome
        (0.5, 'better')
    """
    one, other = before.part(group), after.part(group)
    found = change_of_sums(
        measure.metric,
        measure.statistic,
        measure.sums(one),
        measure.sums(other),
        len(one),
        how,
        ideal=measure.ideal,
        relative=measure.relative,
        n_perm=n_perm,
    )
    return replace(found, benchmark=before.benchmark, group_by=group)


def change_of_sums(
    metric: str,
    statistic: Statistic,
    first: Array,
    second: Array,
    n: int,
    how: Resampling,
    *,
    ideal: float | None = None,
    relative: bool = False,
    n_perm: int = N_PERM,
) -> Change:
    """One figure from what the items of each cluster add up to.

    Args:
        metric: its name.
        statistic: from totals [..., k] to the figure [...].
        first: sums of the first model's answers, [clusters, k].
        second: those of the second's.
        n: items in all.
        how: how intervals are made.
        ideal: the value of a model without a preference.
        relative: compare by the ratio, not by the difference.
        n_perm: random swaps at most.

    Example:
        >>> from fairhead.language.resampling import ratio
        >>> first = np.column_stack([np.arange(20) % 3, np.ones(20)])
        >>> change_of_sums("mean", ratio, first, first + [1, 0], 20, Resampling()).value
        1.0
    """
    clusters = len(first)
    known: dict[str, Any] = {"n": n, "clusters": clusters, "ideal": ideal, "relative": relative}

    def nothing(reason: str, a: float | None = None, b: float | None = None) -> Change:
        return Change("", metric, None, a, b, None, None, None, undefined=reason, **known)

    if n < how.min_items:
        return nothing(f"{n} items; at least {how.min_items} are needed")
    a, b = (float(statistic(sums.sum(axis=0))) for sums in (first, second))
    if np.isnan(a) or np.isnan(b):
        return nothing("no item has an answer that it could be made of")
    if clusters < 2:
        return nothing("all items are of one cluster, so an interval cannot be made", a, b)
    link: Callable[[Any], Any] = np.log if relative else _itself
    drawn = _draws(clusters, how.n_boot, how.seed)
    star_a, star_b = (np.asarray(statistic(drawn @ sums)) for sums in (first, second))
    kept = ~(np.isnan(star_a) | np.isnan(star_b))
    if not kept.any():
        return nothing("every replicate is without a value: too few items", a, b)
    moved = _span(float(link(b) - link(a)), link(star_b[kept]) - link(star_a[kept]), how.level, clusters)
    nearer = None
    if ideal is not None:
        distances = np.abs(star_b[kept] - ideal) - np.abs(star_a[kept] - ideal)
        nearer = _span(abs(b - ideal) - abs(a - ideal), distances, how.level, clusters)
    se = float(np.std(link(star_b[kept]) - link(star_a[kept])))
    return Change(
        "",
        metric,
        None,
        a,
        b,
        moved.value,
        moved.low,
        moved.high,
        p=_p_value(statistic, first, second, link, how.seed, n_perm),
        # Where no replicate differs from another there is nothing to say what would have been seen.
        mde=intervals.minimum_detectable(se, how.level) if se > 0 else None,
        nearer=nearer,
        note=f"only {clusters} clusters" if clusters < _FEW_CLUSTERS else None,
        **known,
    )


def corrected(changes: Sequence[Change]) -> list[Change]:
    """The changes with p-values corrected over all of them (Holm).

    A note says why a change whose own interval leaves out 0 cannot be told apart. Where there are so few clusters that
    no p-value of theirs could pass the correction, there is no smallest detectable difference either.

    Example:
        >>> both = [Change("b", m, None, 0, 1, 1, 1, 1, 9, 9, p=0.03) for m in "xy"]
        >>> [(c.p_adjusted, c.note) for c in corrected(both)][0]
        (0.06, 'its own interval leaves out 0, but not beyond chance among 2 figures')
    """
    p = [c.p for c in changes]
    family = sum(value is not None for value in p)
    return [_noted(replace(c, p_adjusted=q), p, family) for c, q in zip(changes, adjust(p, "holm"), strict=True)]


def _noted(change: Change, p: Sequence[float | None], family: int) -> Change:
    if change.outcome != "cannot be told apart":
        return change
    # Two of all the ways to swap clusters, none and all, are as large as what was seen, whatever that was.
    least = 2.0 ** (1 - change.clusters)
    if least * (family - sum(value is not None and value < least for value in p)) >= SIGNIFICANT:
        too_few = f"only {change.clusters} clusters: too few to show any change among {family} figures"
        return replace(change, mde=None, note=too_few)
    if change.low is None or change.high is None or change.low <= 0 <= change.high:
        return change
    passes = change.p is not None and change.p < SIGNIFICANT
    why = f"not beyond chance among {family} figures" if passes else "its p is not below 0.05"
    return replace(change, note=", ".join(filter(None, [change.note, f"its own interval leaves out 0, but {why}"])))


def _itself(value: Any) -> Any:
    return value


def _span(value: float, star: Array, level: float, clusters: int) -> Span:
    found = intervals.percentile(star, expanded_level(level, clusters))
    return Span(value, min(found.low, value) + 0.0, max(found.high, value))  # never -0.0


def _p_value(
    statistic: Statistic, first: Array, second: Array, link: Callable[[Any], Any], seed: int, n_perm: int
) -> float:
    """Share of random swaps of whole clusters that make a difference as many standard errors large.

    In standard errors, because swaps may move what the figure itself is blind to. A model that came to prefer "he" to
    "she" as a whole has the WinoBias figure it had, but swapped by halves it has not: measured in its own units, chance
    would seem to explain nearly everything. (Chung and Romano 2013: so the test also holds where the two models'
    answers spread differently; where they can be exchanged it is exact, as without.) A swap without a value counts.

    Swaps are drawn until enough of them are as large (Besag and Clifford 1991): a figure that chance explains is soon
    done with, and one that it hardly explains is followed to the end, where corrections for many figures need it.
    """
    standardised = _Standardised(first, second, lambda totals: link(statistic(totals)))
    observed = float(standardised(np.zeros((1, len(first))))[0])
    found = drawn = 0
    for swaps in _swaps(len(first), n_perm, seed):
        by_chance = standardised(swaps)
        as_large = np.flatnonzero(~(by_chance < observed * (1 - _ROUNDING)))
        if found + len(as_large) >= _ENOUGH:
            return _ENOUGH / (drawn + int(as_large[_ENOUGH - found - 1]) + 1)
        found, drawn = found + len(as_large), drawn + len(swaps)
    return (1 + found) / (1 + n_perm)


class _Standardised:
    """How many standard errors a figure changes from the first answers to the second, with some clusters swapped.

    To the change each cluster adds the slopes of the figure (by the totals of both) times its own sums (of both), the
    delta method; the standard error is that of the sum of what they add. Squares of it are sums over clusters of
    products of two columns, and so, like the totals themselves, one matrix product for many swaps.
    """

    def __init__(self, first: Array, second: Array, figure: Statistic) -> None:
        """From sums of each cluster [clusters, k], and the figure as a function of totals [..., k]."""
        self._figure = figure
        self._size = (np.abs(first) + np.abs(second)).sum(axis=0) / 2
        self._clusters, k = first.shape
        kept, swapped = np.hstack([second, first]), np.hstack([first, second])
        one, other = np.triu_indices(2 * k)
        products, exchanged = kept[:, one] * kept[:, other], swapped[:, one] * swapped[:, other]
        there = (products != 0).any(axis=0) | (exchanged != 0).any(axis=0)
        self._one, self._other = one[there], other[there]
        self._twice = np.where(self._one == self._other, 1.0, 2.0)
        self._sums = np.concatenate([kept.sum(axis=0), products[:, there].sum(axis=0)])
        self._by_swap = np.hstack([swapped - kept, (exchanged - products)[:, there]])

    def __call__(self, swaps: Array) -> Array:
        """Swaps [n, clusters] of 0 and 1 → [n]; NaN where the figure has no value."""
        both, products = np.split(self._sums + swaps @ self._by_swap, [2 * len(self._size)], axis=1)
        after, before = np.hsplit(both, 2)
        change = np.abs(self._figure(after) - self._figure(before))
        change[change < _NOTHING] = 0.0
        slopes = np.hstack([self._slopes(after), -self._slopes(before)])
        squares = (slopes[:, self._one] * slopes[:, self._other] * products) @ self._twice
        squares -= (slopes * both).sum(axis=1) ** 2 / self._clusters
        # A change that is the same in all clusters has no error; it is then as large as with all clusters swapped.
        error = np.maximum(np.sqrt(np.maximum(squares, 0.0)), _SURE * change)
        return np.asarray(change / np.where(error == 0, 1.0, error))

    def _slopes(self, totals: Array) -> Array:
        """Of the figure by the totals, [n, k] → [n, k]; totals that are 0 in every cluster do not count."""
        found = np.zeros_like(totals)
        for k in np.flatnonzero(self._size):
            step = np.zeros(totals.shape[1])
            step[k] = _STEP * self._size[k]
            found[:, k] = (self._figure(totals + step) - self._figure(totals - step)) / (2 * step[k])
        return found


# Draws depend on the number of clusters alone, and every figure of a benchmark asks for the same ones.
@lru_cache(maxsize=2)
def _draws(clusters: int, n: int, seed: int) -> Array:
    """How often each cluster is drawn in each replicate, [n, clusters]."""
    rng = np.random.default_rng(seed)
    drawn = np.empty((n, clusters))
    for row in drawn:
        row[:] = np.bincount(rng.integers(clusters, size=clusters), minlength=clusters)
    return drawn


def _swaps(clusters: int, n: int, seed: int) -> Iterator[Array]:
    """Which clusters are swapped, blocks [≤ n, clusters] of 0 and 1."""
    rng = np.random.default_rng(seed + 1)
    block = max(1, (1 << 21) // clusters)
    for begin in range(0, n, block):
        yield rng.integers(2, size=(min(block, n - begin), clusters), dtype=np.int8).astype(np.float64)
