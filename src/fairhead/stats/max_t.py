"""Maxima of studentised statistics: over the pairs of groups behind one gap, and over all gaps of an audit.

The gap between the highest and the lowest of several rates is the largest difference of any pair. Measured in points,
the noise of the smallest group decides how large a gap must be to count, whichever groups make it. Here each
difference is measured in its own standard error (max-T), so a small group does not hide what large ones show.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import accumulate, product
from math import isnan, log, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Groups are put into classes of like noise, and a pair of classes has one standard error: of a gap of one kind of rate
# up to so many classes, each group its own where there are no more groups; of means of gaps so many contrasts at most.
_CLASSES, _CONTRASTS = 8, 100
_BLOCK = 10  # contrasts at a time, so that their replicates fit in a processor's cache
# Standard errors that differ by no more than this factor are alike.
_ALIKE = 1.25
_ROUNDING = 1e-12


class Row(NamedTuple):
    """One kind of rate of one class in all groups."""

    place: tuple[int, int]  # its kind and class
    share: float  # of its gap in the mean of its pool
    rates: list[float]  # of the groups, NaN where left out
    se: list[float]  # their standard errors


class _Part(NamedTuple):
    """A row with its groups in classes of like noise, and which of these are compared: a minus b."""

    place: tuple[int, int]
    share: float
    groups: NDArray[np.intp]  # by class, shape [groups that have the rate]
    classes: list[slice]  # where each class is in `groups`
    a: NDArray[np.intp]  # shape [contrasts]; the number after the last class stands for comparing nothing
    b: NDArray[np.intp] | None  # None for all rows, which every group is compared with

    @property
    def alone(self) -> bool:
        """Whether each group is a class of its own."""
        return len(self.groups) == len(self.classes)

    def squares(self, se: Array) -> Array:
        """Variances of the contrasts, [contrasts], from standard errors of the rates [R, C, G]."""
        noise = (self.share * se[self.place][self.groups]) ** 2
        if not self.alone:
            noise = np.add.reduceat(noise, [some.start for some in self.classes])
            noise /= [some.stop - some.start for some in self.classes]
        if self.a[-1] == len(self.classes):
            noise = np.append(noise, 0.0)
        return noise[self.a] if self.b is None else noise[self.a] + noise[self.b]

    def ends(self, rates: Array) -> "_Ends":
        """Of rates [R, C, G] or [B, R, C, G]."""
        row = rates[(..., *self.place, slice(None))].T
        if self.b is None:
            row = np.abs(row[:-1] - row[-1])
        if not (self.alone and len(row) == len(self.groups)):  # else they are all there, in order
            row = row[self.groups]
        if self.share != 1:
            row = row * self.share
        highest = lowest = row
        nothing = [np.zeros(row.shape[1:])] if self.a[-1] == len(self.classes) else []
        if nothing or not self.alone:  # much quicker than `reduceat`
            highest = np.array([*(row[some].max(axis=0) for some in self.classes), *nothing])
            lowest = np.array([*(row[some].min(axis=0) for some in self.classes), *nothing])
        return _Ends(highest, lowest)

    def compared(self, contrast: int, rates: Array) -> "Compared | None":
        """The two groups of rates [R, C, G] that a contrast compares; None where it compares none, or all rows."""
        if self.b is None or self.a[contrast] == len(self.classes):
            return None
        row = rates[self.place]
        high, low = (self.groups[self.classes[end[contrast]]] for end in (self.a, self.b))
        first, second = int(high[row[high].argmax()]), int(low[row[low].argmin()])
        # A class is compared with itself, too; there the highest can be the lowest.
        return None if first == second else Compared(self.place, first, second)

    def apart(self, ends: "_Ends", some: slice | NDArray[np.intp] = slice(None)) -> Array:
        """Some of the contrasts, shape [contrasts, ...]."""
        apart = ends.highest[self.a[some]]
        if self.b is not None:
            apart -= ends.lowest[self.b[some]]
        return apart


class Compared(NamedTuple):
    """Two groups, the higher first, in the kind and class of rate that they are compared in."""

    place: tuple[int, int]
    high: int
    low: int


class _Ends(NamedTuple):
    """The highest and the lowest rate of each class, each [classes, ...]."""

    highest: Array
    lowest: Array


class _Pool(NamedTuple):
    """Rows whose gaps are averaged; a contrast of the pool adds one of each row."""

    parts: list[_Part]
    chosen: list[NDArray[np.intp]]  # the contrast of each part, each of shape [contrasts of the pool]

    @classmethod
    def of(cls, parts: list[_Part]) -> "_Pool":
        shape = [len(part.a) for part in parts]
        # The last contrast of a part of several compares nothing, and one part at least does compare.
        every = np.arange(prod(shape) - (len(parts) > 1))
        return cls(parts, list(np.unravel_index(every, shape)))

    def se(self, se: Array) -> Array:
        """Standard errors of the contrasts, from those of the rates."""
        if len(self.parts) == 1:
            return np.sqrt(self.parts[0].squares(se))
        return np.sqrt(sum(part.squares(se)[at] for part, at in zip(self.parts, self.chosen, strict=True)))

    def differences(self, ends: "list[_Ends]", some: slice | NDArray[Any] = slice(None)) -> Array:
        """Some of the contrasts, [contrasts, ...], from what `ends` of each part returns."""
        total: Array | None = None
        for part, at, both in zip(self.parts, self.chosen, ends, strict=True):
            apart = part.apart(both, at[some])
            total = apart if total is None else np.add(total, apart, out=total)
        assert total is not None
        return total

    def largest(self, rates: Array, se: Array) -> Array:
        """How many standard errors [contrasts] the contrasts of rates [B, R, C, G] are, at most, shape [B]."""
        ends, first = [part.ends(rates) for part in self.parts], self.parts[0]
        found = np.full(len(rates), -np.inf)
        if len(ends) == 1 and first.b is not None and first.alone:
            row, of_pairs = ends[0].highest, se.reshape(len(first.groups), -1)
            for a in range(len(row) - 1):  # a minus b is b minus a, turned round
                every = row[a + 1 :] - row[a]
                every *= 1 / of_pairs[a, a:, None]
                np.maximum(found, np.abs(every, out=every).max(axis=0), out=found)
            return found
        others, last = [part.apart(both) for part, both in zip(self.parts[:-1], ends, strict=False)], self.parts[-1]
        for start in range(0, len(last.a), _BLOCK):
            block = last.apart(ends[-1], slice(start, start + _BLOCK))
            for number, of_others in enumerate(product(*others)):
                own = se[number * len(last.a) + start :][: len(block)]
                every = block[: len(own)] + sum(of_others)
                every *= 1 / own[:, None]
                np.maximum(found, every.max(axis=0), out=found)
        return found

    def any_above(self, rates: Array, least: Array) -> NDArray[np.bool_]:
        """Whether a contrast of rates [B, R, C, G] is as large as `least` [contrasts], shape [B]."""
        ends = [part.ends(rates) for part in self.parts]
        most = [_Ends(both.highest.max(axis=-1), both.lowest.min(axis=-1)) for both in ends]
        near = self.differences(most) >= least  # most contrasts are nowhere near
        if not near.any():
            return np.zeros(len(rates), dtype=bool)
        return np.asarray((self.differences(ends, near) >= least[near, None]).any(axis=0))


@dataclass(frozen=True)
class Contrasts:
    """A gap of rates [..., R, C, G] as the largest of many differences, each with a standard error.

    Any such difference is at most the gap. Of several pools the largest counts.
    """

    pools: list[_Pool]

    @classmethod
    def of(cls, pools: Sequence[Sequence[Row]], to_overall: bool = False) -> "Contrasts | None":
        """None where all pairs are equally noisy, so that the largest difference is the most significant one as well.

        Of `pools` of rows whose gaps are averaged. With `to_overall` groups are compared with the last one, all rows.

        Example:
            >>> Contrasts.of([[Row((0, 0), 1.0, [0.2, 0.3], [0.01, 0.1])]]) is None
            True
            >>> found = Contrasts.of([[Row((0, 0), 1.0, [0.2, 0.3, 0.6], [0.01, 0.01, 0.2])]])
            >>> se = found.se(np.array([[[0.01, 0.01, 0.2]]]))
            >>> found.largest(np.array([[[[0.2, 0.3, 0.6]]]]), se).round(2).item()  # 0.1 / 0.014, not 0.4 / 0.2
            7.07
        """
        found = [[_part(row, len(pool), to_overall) for row in pool] for pool in pools]
        if len(found) == 1 and all(len(part.classes) == 1 for part in found[0]):
            return None
        return cls([_Pool.of(parts) for parts in found])

    def se(self, se: Array) -> Array:
        """Standard errors of the differences, [contrasts], from those of the rates [R, C, G]."""
        found = [pool.se(se) for pool in self.pools]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def differences(self, rates: Array) -> Array:
        """Each difference, [..., R, C, G] to [contrasts, ...]."""
        return np.concatenate([pool.differences([part.ends(rates) for part in pool.parts]) for pool in self.pools])

    def largest(self, rates: Array, se: Array) -> Array:
        """How many standard errors [contrasts] the differences of rates [B, R, C, G] are, at most, shape [B]."""
        of_pools = zip(self.pools, self._split(se), strict=True)
        return reduce(np.maximum, [pool.largest(rates, own) for pool, own in of_pools])

    def compared(self, contrast: int, rates: Array) -> tuple[Compared, ...]:
        """The pairs of groups that a difference of rates [R, C, G] is between, the higher first."""
        for pool in self.pools:
            if contrast < len(pool.chosen[0]):
                found = [
                    part.compared(int(at[contrast]), rates) for part, at in zip(pool.parts, pool.chosen, strict=True)
                ]
                return tuple(pair for pair in found if pair is not None)
            contrast -= len(pool.chosen[0])
        raise IndexError(contrast)

    def share_above(self, rates: Array, least: Array) -> float:
        """How often any difference of rates [B, R, C, G] is as large as its own of `least` [contrasts]."""
        found = [pool.any_above(rates, own) for pool, own in zip(self.pools, self._split(least), strict=True)]
        return np.count_nonzero(found[0] if len(found) == 1 else np.any(found, axis=0)) / len(rates)

    def _split(self, values: Array) -> list[Array]:
        if len(self.pools) == 1:
            return [values]
        ends = np.cumsum([len(pool.chosen[0]) for pool in self.pools])
        return [values[end - len(pool.chosen[0]) : end] for pool, end in zip(self.pools, ends, strict=True)]


def _most_classes(rows: int) -> int:
    """Into how many classes the groups of a pool of so many rows may be put."""
    return _CLASSES if rows == 1 else max(m for m in (1, 2, 3) if m == 1 or m ** (2 * rows) <= _CONTRASTS)


def _part(row: Row, rows: int, to_overall: bool) -> _Part:
    """One of so many rows of a pool."""
    known, most = [g for g, rate in enumerate(row.rates) if not isnan(rate)], _most_classes(rows)
    se = row.se
    least, largest = min(se[g] for g in known), max(se[g] for g in known)
    classes: list[list[int]] = [known]
    if (len(known) > 2 or to_overall) and largest > _ALIKE * least and most > 1:
        if len(known) <= most:
            classes = [[g] for g in known]
        else:
            width = log(largest / least) / most
            of = [min(int(log(se[g] / least) / width), most - 1) for g in known]
            classes = [[g for g, k in zip(known, of, strict=True) if k == number] for number in sorted(set(of))]
    a, b = _compared(tuple(len(some) > 1 for some in classes), rows > 1, to_overall)
    at = [slice(end - len(some), end) for some, end in zip(classes, accumulate(map(len, classes)), strict=True)]
    groups = np.array([g for some in classes for g in some])
    return _Part(row.place, row.share, groups, at, a, None if to_overall else b)


@lru_cache
def _compared(several: tuple[bool, ...], or_nothing: bool, to_overall: bool) -> NDArray[np.intp]:
    """The classes that are compared, [2, contrasts], of classes that have several groups each, or one."""
    every = range(len(several))
    pairs = [(i, j) for i in every for j in every if (i == j if to_overall else i != j or several[i])]
    return np.array([*pairs, *([(len(several), len(several))] if or_nothing else [])]).T


def westfall_young(observed: Sequence[float], draws: Sequence[Array], blocks: Sequence[Hashable]) -> list[float]:
    """p-values corrected over a family of tests, step by step from the smallest (Westfall and Young 1993, min-P).

    What tests have in common costs nothing: of two that are the same, neither is corrected for the other. Tests of one
    block have the same replicates; blocks count as independent, which is on the safe side (Šidák). Large values of what
    was observed speak against a hypothesis; its draws [B] are replicates where it holds. What differs by rounding alone
    counts as equal: of small groups many replicates are, and the order of a sum must not decide.

    Example:
        >>> noise = np.random.default_rng(0).normal(size=(3, 999))
        >>> same = westfall_young([2.4, 2.4], [noise[0], noise[0]], ["sex", "sex"])
        >>> two = westfall_young([2.4, 2.4], [noise[0], noise[1]], ["sex", "race"])
        >>> [round(p, 3) for p in (*same, *two)]
        [0.006, 0.006, 0.012, 0.012]
    """
    draws = [np.where(np.isnan(drawn), np.inf, drawn) for drawn in draws]  # without a value: as large as can be
    ranked = [np.sort(drawn) for drawn in draws]
    # How large a share of replicates, and of what was observed, is as large as what was observed.
    large = [len(r) - int(np.searchsorted(r, x - _ROUNDING)) for x, r in zip(observed, ranked, strict=True)]
    p = [(1 + many) / (1 + len(r)) for many, r in zip(large, ranked, strict=True)]

    def as_rare(k: int, share: float) -> NDArray[np.bool_]:
        """The replicates of a test that no more than this share of them are as large as, [B]."""
        place = len(ranked[k]) - 1 - int((share + _ROUNDING) * (1 + len(ranked[k])))
        return draws[k] > (ranked[k][place] + _ROUNDING if place >= 0 else -np.inf)

    adjusted = list(p)
    following: dict[Hashable, list[int]] = {}
    for k in sorted(range(len(p)), key=lambda k: -p[k]):  # from the largest: a test is up against those that follow it
        following.setdefault(blocks[k], []).append(k)
        rare = [reduce(np.logical_or, [as_rare(other, p[k]) for other in some]) for some in following.values()]
        none = prod(1 - np.count_nonzero(of_block) / (1 + len(of_block)) for of_block in rare)
        adjusted[k] = float(max(p[k], 1 - none))
    largest = 0.0
    for k in sorted(range(len(p)), key=lambda k: p[k]):
        largest = adjusted[k] = max(largest, adjusted[k])
    return adjusted
