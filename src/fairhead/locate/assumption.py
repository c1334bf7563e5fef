"""DAM's theory, and its Assumption 1 on real q and k: is each dimension normal within a group, with one spread in both?

Each dimension of q (and of k) is taken as a mixture of two normal distributions, one a group, with q and k independent
within a group. The gap |E[q·k / √d | group 0] − E[q·k / √d | group 1]| is then bounded, for q and k normalised, or
normalised and made absolute (`norm_bound`, `absolute_bound`, `paper_bound`). Nothing real is exactly so. Shown is how
far off it is: the distance of each group from the normal distribution of its own mean and deviation, the ratio of
the two deviations, and the gap that the theory predicts beside the one that these rows have.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.special import erf, ndtr

from fairhead.errors import InputError
from fairhead.report.sections.attention_sections import Dimension, Shape
from fairhead.stats import ALPHA, adjust

Array = NDArray[np.float64]
Side = Literal["q", "k"]
Operation = Literal["none", "norm", "norm_abs"]
LEAST_ROWS = 20  # of a group: D'Agostino's test is not defined for fewer
_BARS = 32
_PARTS = 10  # of each half of the rows, for the jackknife; a group has a row in each


@dataclass(frozen=True)
class Summary:
    """All dimensions of q, or of k."""

    dimensions: int  # how many; `constant` of them never vary, and are left out of the rest
    constant: int
    distance_median: float  # of a group's distance from normal, over dimensions and groups; and the largest
    distance_largest: float
    not_normal: float  # share of (dimension, group) pairs that D'Agostino and Pearson's test refuses, corrected (Holm)
    spread_smallest: float
    spread_median: float  # of the ratio of deviations, over dimensions; and the smallest and largest
    spread_largest: float
    # Share of dimensions whose deviations differ significantly by Brown and Forsythe's test, corrected (Holm)
    spreads_differ: float
    difference_median: float  # of the size of the standardised difference of means, over dimensions; and the largest
    difference_largest: float


@dataclass(frozen=True)
class GapCheck:
    """The gap in the logit q·k / √d between the groups, averaged over heads.

    Half of the rows, drawn at random, say which group is ahead in each head; the gaps are those of the other half. So
    heads without a gap have zero on average, not the size of their noise.
    """

    operation: Operation  # what is done to q and k first: "none", "norm", or "norm_abs" (DAM)
    predicted: float  # by the theory, from the means and deviations of each group
    measured: float  # in the rows of that other half
    error: float  # standard error of the difference between the two (jackknife)
    bounds: Mapping[str, float]  # name -> what the theory promises at most, for any q and k


@dataclass(frozen=True)
class Assumption:
    """How far real q and k are from Assumption 1."""

    names: tuple[str, str]  # of the two groups
    shares: tuple[float, float]  # of their rows
    q: Summary  # all dimensions of q
    k: Summary  # all dimensions of k
    gaps: tuple[GapCheck, ...]  # what the theory predicts beside what there is
    chosen: tuple[Dimension, ...]  # dimensions to look at, with histograms

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"schema": "fairhead.assumption/1", **asdict(self)}

    def sentences(self) -> list[str]:
        """What was found, in words."""
        said = []
        for side, found in (("q", self.q), ("k", self.k)):
            said.append(
                f"{side}: {100 * found.not_normal:.0f} % of dimension × group pairs are significantly non-normal; "
                f"the distance from normal is {found.distance_median:.3f} (median), {found.distance_largest:.3f} at "
                f"most. The spread of {self.names[1]} over that of {self.names[0]} is {found.spread_median:.2f} at the "
                f"median ({found.spread_smallest:.2f} to {found.spread_largest:.2f}); {100 * found.spreads_differ:.0f} "
                f"% of dimensions have significantly different spreads. Means lie {found.difference_median:.2f} "
                f"standard deviations apart at the median, {found.difference_largest:.2f} at most."
            )
        for check in self.gaps:
            difference = check.measured - check.predicted
            said.append(
                f"Gap in the logit, {_OPERATIONS[check.operation]}: the theory predicts {check.predicted:.3f}, these "
                f"rows have {check.measured:.3f}; the difference, {difference:.3f} ± {check.error:.3f}, is "
                + (
                    "more than three errors: the assumption does not hold closely enough to predict the gap."
                    if abs(difference) > 3 * check.error
                    else "within three errors."
                )
            )
        return said


_OPERATIONS: Mapping[Operation, str] = {"none": "as it is", "norm": "normalised", "norm_abs": "normalised and absolute"}


def check_assumption(
    q: Array,  # [n, H, d]
    k: Array,  # [n, H, d]; heads that share a key have it twice
    in_second: NDArray[np.bool_],  # whether a row is of the second group, [n]
    names: tuple[str, str],  # of the two groups
    # (side, head, dimension) to draw; by default those whose means differ most, whose shape is furthest from normal,
    # and whose spreads differ most, of q and of k
    chosen: tuple[tuple[Side, int, int], ...] = (),
) -> Assumption:
    """Hold q and k of one token in one layer against Assumption 1."""
    q, k = np.asarray(q, dtype=np.float64), np.asarray(k, dtype=np.float64)
    sizes = int((~in_second).sum()), int(in_second.sum())
    if min(sizes) < LEAST_ROWS:
        few = names[int(np.argmin(sizes))]
        raise InputError(f"{few} has {min(sizes)} rows; at least {LEAST_ROWS} of each group are needed to see a shape")
    sides: dict[Side, _Side] = {"q": _Side(q, in_second), "k": _Side(k, in_second)}
    for side, head, index in chosen:
        if not (0 <= head < q.shape[1] and 0 <= index < q.shape[2]):
            raise InputError(
                f"there is no dimension {index} of head {head} of {side}: the layer has {q.shape[1]} heads of "
                f"{q.shape[2]} dimensions, counted from 0"
            )
    wanted = chosen or tuple(pair for side, found in sides.items() for pair in found.interesting(side))
    return Assumption(
        names=names,
        shares=(sizes[0] / len(q), sizes[1] / len(q)),
        q=sides["q"].summary(),
        k=sides["k"].summary(),
        gaps=tuple(_gap(q, k, in_second, operation) for operation in get_args(Operation)),
        chosen=tuple(sides[side].dimension(side, head, index) for side, head, index in wanted),
    )


class _Side:
    """All dimensions of q or k in both groups, [n, H, d] each; statistics are [groups, H, d]."""

    def __init__(self, x: Array, in_second: NDArray[np.bool_]) -> None:
        self.groups = [x[~in_second], x[in_second]]
        self.all = x
        self.mean = np.stack([part.mean(0) for part in self.groups])
        self.sd = np.stack([part.std(0, ddof=1) for part in self.groups])
        self.varies = (self.sd > 1e-9 * np.maximum(1.0, np.abs(self.mean))).all(0)
        safe = np.where(self.sd > 0, self.sd, 1.0)
        self.distance = np.stack([_distance(p, m, s) for p, m, s in zip(self.groups, self.mean, safe, strict=True)])
        pooled = x.std(0)
        self.difference = (self.mean[0] - self.mean[1]) / np.where(pooled > 0, pooled, 1.0)
        self.ratio = self.sd[1] / safe[0]

    def summary(self) -> Summary:
        good = self.varies
        if not good.any():
            raise InputError("no dimension of q or k varies in both groups: there is nothing to look at")
        normal = np.stack([stats.normaltest(part[:, good], axis=0).pvalue for part in self.groups])
        around = [np.abs(part[:, good] - np.median(part[:, good], axis=0)) for part in self.groups]
        # Brown and Forsythe's test: ANOVA of distances from the medians
        spread = np.asarray(stats.f_oneway(*around, axis=0).pvalue)
        distance, ratio, difference = self.distance[:, good], self.ratio[good], np.abs(self.difference[good])
        return Summary(
            dimensions=int(good.size),
            constant=int((~good).sum()),
            distance_median=float(np.median(distance)),
            distance_largest=float(distance.max()),
            not_normal=_refused(normal.ravel()),
            spread_smallest=float(ratio.min()),
            spread_median=float(np.median(ratio)),
            spread_largest=float(ratio.max()),
            spreads_differ=_refused(spread),
            difference_median=float(np.median(difference)),
            difference_largest=float(difference.max()),
        )

    def interesting(self, side: Side) -> list[tuple[Side, int, int]]:
        """The dimensions whose means, shape and spreads are furthest from even."""
        furthest = (
            np.abs(self.difference),
            self.distance.max(0),
            np.abs(np.log(np.where(self.varies, np.maximum(self.ratio, 1e-300), 1.0))),
        )
        found: list[tuple[Side, int, int]] = []
        for measure in furthest:
            for flat in np.argsort(-np.where(self.varies, measure, -1.0), axis=None, kind="stable"):
                head, index = np.unravel_index(flat, self.varies.shape)
                if (side, int(head), int(index)) not in found:
                    found.append((side, int(head), int(index)))
                    break
        return found

    def dimension(self, side: Side, head: int, index: int) -> Dimension:
        """One of them, with its histograms."""
        edges = np.histogram_bin_edges(self.all[:, head, index], _BARS)
        shapes = [
            Shape(
                n=len(part),
                mean=float(self.mean[g, head, index]),
                sd=float(self.sd[g, head, index]),
                distance=float(self.distance[g, head, index]),
                counts=tuple(np.histogram(part[:, head, index], edges)[0].tolist()),
            )
            for g, part in enumerate(self.groups)
        ]
        difference, ratio = float(self.difference[head, index]), float(self.ratio[head, index])
        return Dimension(side, head, index, (shapes[0], shapes[1]), difference, ratio, tuple(edges.tolist()))


def _distance(x: Array, mean: Array, sd: Array) -> Array:
    """Kolmogorov and Smirnov's distance of x [n, ...] from the normal distribution of this mean and sd, [...]."""
    expected = ndtr((np.sort(x, axis=0) - mean) / sd)
    steps = np.arange(len(x) + 1).reshape(-1, *([1] * (x.ndim - 1))) / len(x)
    return np.maximum((steps[1:] - expected).max(0), (expected - steps[:-1]).max(0))


def _refused(p: Array) -> float:
    corrected = adjust(p.tolist(), "holm")
    return float(np.mean([value is not None and value < ALPHA for value in corrected]))


def _gap(q: Array, k: Array, in_second: NDArray[np.bool_], operation: Operation) -> GapCheck:
    share, d = float((~in_second).mean()), q.shape[-1]
    bounds = {
        "none": {},
        "norm": {"norm_bound": norm_bound(share, d)},
        "norm_abs": {"absolute_bound": absolute_bound(share, d), "paper_bound": paper_bound(share, d)},
    }[operation]
    part = _parts(in_second)
    halves = [part < _PARTS, part >= _PARTS]
    if operation != "none":
        good = np.all([x[half].std(0).min(-1) > 0 for x in (q, k) for half in halves], axis=0)
        if not good.any():
            raise InputError("no head varies in all its dimensions: q and k cannot be normalised")
        q, k = q[:, good], k[:, good]
    first, second = (_signed_gaps(q[h], k[h], in_second[h], part[h] % _PARTS, operation) for h in halves)
    # Directions from other rows than the gaps themselves: on the same rows they would make a size out of noise.
    direction = np.sign(first[1][0])
    predicted, measured = ((direction * gaps).mean(-1) for gaps in second)  # [1 + parts] each
    without = (measured - predicted)[1:]
    error = float(np.sqrt((_PARTS - 1) * without.var()))
    # The jackknife again: a folded mean of estimates is off by as much as 1/n.
    corrected = _PARTS * predicted[0] - (_PARTS - 1) * predicted[1:].mean()
    return GapCheck(operation, float(corrected), float(measured[0]), error, bounds)


def _parts(in_second: NDArray[np.bool_]) -> NDArray[np.int64]:
    """A part for each row, [n], drawn at random: either group has as many rows in each, give or take one."""
    rng = np.random.default_rng(0)
    part = np.empty(len(in_second), dtype=np.int64)
    for group in (~in_second, in_second):
        part[group] = rng.permutation(int(group.sum())) % (2 * _PARTS)
    return part


def _signed_gaps(
    q: Array, k: Array, in_second: NDArray[np.bool_], part: NDArray[np.int64], operation: Operation
) -> tuple[Array, Array]:
    """Predicted and measured gaps of each head, [1 + parts, H]: of all rows, then with each part of them left out."""
    if operation != "none":
        q, k = ((x - x.mean(0)) / x.std(0) for x in (q, k))
    absolute = operation == "norm_abs"
    logits = (np.abs(q) * np.abs(k) if absolute else q * k).sum(-1) / np.sqrt(q.shape[-1])
    predicted, measured = [], []
    for group in (~in_second, in_second):
        count = _left(np.ones(int(group.sum())), part[group])
        expected = []
        for x in (q[group], k[group]):
            mean = _left(x, part[group]) / count[:, None, None]
            variance = _left(np.square(x), part[group]) / count[:, None, None] - np.square(mean)
            expected.append(folded_mean(mean, np.sqrt(np.maximum(variance, 0.0))) if absolute else mean)
        predicted.append((expected[0] * expected[1]).sum(-1) / np.sqrt(q.shape[-1]))
        measured.append(_left(logits[group], part[group]) / count[:, None])
    return predicted[0] - predicted[1], measured[0] - measured[1]


def _left(x: Array, part: NDArray[np.int64]) -> Array:
    """Sums of x [n, ...] over all rows, then without each part, [1 + parts, ...]."""
    sums = np.stack([x[part == number].sum(0) for number in range(_PARTS)])
    total = sums.sum(0)
    return np.concatenate([total[None], total - sums])


def folded_mean(mean: ArrayLike, sd: ArrayLike) -> Array:
    """E|x| of x ~ N(mean, sd²)."""
    mean, sd = np.asarray(mean, float), np.asarray(sd, float)
    # Where nothing varies the mean's own size is the answer; a tiny sd would divide by zero.
    safe = np.where(sd > 1e-300, sd, 1.0)
    z = mean / (safe * np.sqrt(2))
    folded = safe * np.sqrt(2 / np.pi) * np.exp(-np.minimum(z**2, 700.0)) + mean * erf(z)
    return np.where(sd > 1e-300, folded, np.abs(mean))


def paper_bound(share0: float, d: int = 1) -> float:
    """The paper's Theorem 1: the largest gap after normalisation with absolute values, of groups with these shares."""
    share1 = 1 - _share(share0)
    first = np.sqrt(2 / (np.pi * share0)) + np.sqrt(share1 / share0)
    second = np.sqrt(2 / (np.pi * share1)) + np.sqrt(share0 / share1)
    return float(np.sqrt(d) * (first**2 + second**2))


def norm_bound(share0: float, d: int = 1) -> float:
    """|λ0 − λ1| / (λ0 λ1): after normalisation alone, reached as the groups' own spread vanishes.

    It is zero for groups of equal size: taking absolute values can only widen the worst case.
    """
    share0 = _share(share0)
    return float(np.sqrt(d) * abs(1 - 2 * share0) / (share0 * (1 - share0)))


def absolute_bound(share0: float, d: int = 1) -> float:
    """max(1/λ0, 1/λ1): after normalisation with absolute values, always below the paper's (Cauchy–Schwarz)."""
    share0 = _share(share0)
    return float(np.sqrt(d) / min(share0, 1 - share0))


def _share(share0: float) -> float:
    if not 0 < share0 < 1:
        raise InputError(f"the share of group 0 lies between 0 and 1; found {share0}")
    return share0
