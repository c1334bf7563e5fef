"""Statistics that audits, benchmarks and the search for heads share. Imports no torch, and no other room.

Here: figures with their uncertainty, and what may be said of a difference, one vocabulary for every comparison.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np

Outcome = Literal["better", "worse", "changed", "not significant", "undefined"]
Correction = Literal["holm", "bh"]
OUTCOMES: tuple[str, ...] = get_args(Outcome)

# A finding is significant where its p, corrected over its family, is below this.
ALPHA = 0.05
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Span:
    """A figure and the ends of its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """One figure with its uncertainty. All values are fractions, not percent."""

    metric: str  # its name, such as "DP", "EOp", "EOd", "accuracy", "worst_group_accuracy", "impact_ratio"
    group_by: str | None  # the group column, an intersection ("race × gender"), a benchmark's category; None for all
    value: float | None  # None when undefined
    low: float | None  # lower end of the 95 % interval (or of the level asked for); None when undefined
    high: float | None  # upper end
    n: int  # number of rows that the figure rests on
    ideal: float | None  # of a perfectly even model (0 for gaps, 1 for ratios); None where there is no such value
    undefined: str | None = None  # why there is no value ("female has 4 rows with label 1; at least 10 are needed")
    mde: float | None = None  # the smallest gap that a sample of this size would show with 80 % power
    groups: tuple[str, ...] = ()  # that attain the figure, highest first (largest gap between which two, lowest group)
    detail: Mapping[str, Any] = field(default_factory=dict)  # anything else worth knowing, JSON-ready

    @property
    def span(self) -> Span | None:
        """The figure with its interval, where it is defined."""
        if self.value is None or self.low is None or self.high is None:
            return None
        return Span(self.value, self.low, self.high)


@dataclass(frozen=True)
class GroupRow:
    """One group's own figures."""

    group_by: str  # the group column or intersection
    group: str  # the group's name
    n: int  # its rows
    rates: Mapping[str, Estimate]  # "selection_rate", "TPR", "FPR", "precision", "accuracy", ...


@dataclass(frozen=True)
class CalibrationPoint:
    """Rows of one group with like scores."""

    score: float  # their mean score
    share: float  # how many of them have the positive label
    low: float  # lower end of its interval
    high: float  # upper end
    n: int  # rows


@dataclass(frozen=True)
class GroupCurve:
    """The scores of one group."""

    group: str  # its name
    n: int  # its rows
    positives: float  # (weighted) rows with the positive label
    negatives: float  # the other rows
    true_positives: tuple[float, ...]  # for each threshold, positives with that score or a higher one
    false_positives: tuple[float, ...]  # the same of negatives
    calibration: tuple[CalibrationPoint, ...]  # in bins of equal mass; empty where scores are no probabilities


@dataclass(frozen=True)
class Curves:
    """The scores of the groups of one column."""

    group_by: str  # the column
    thresholds: tuple[float, ...]  # ascending; a row is predicted positive from its threshold on
    groups: tuple[GroupCurve, ...]  # one curve each

    def start(self, used: float | None) -> int:
        """The number of the threshold nearest to the one that was used, or of the middle one."""
        steps = self.thresholds
        return len(steps) // 2 if used is None else min(range(len(steps)), key=lambda i: (abs(steps[i] - used), i))


@dataclass(frozen=True)
class Difference:
    """One figure of two models on the same rows or items, b minus a.

    Example:
        >>> found = Difference("DP", "race", 0.2, 0.1, -0.1, -0.15, -0.05, 900, p=0.001, p_adjusted=0.004, ideal=0.0)
        >>> found.outcome, found.better_way
        ('better', 'lower')
    """

    metric: str  # as in `Estimate`
    group_by: str | None  # as in `Estimate`
    a: float | None  # value of the first model; None when undefined
    b: float | None  # value of the second
    value: float | None  # b − a, or the logarithm of b / a for a `relative` figure; None when undefined
    low: float | None  # lower end of the paired interval of `value`
    high: float | None  # upper end
    n: int  # rows or items in both
    p: float | None = None  # two-sided paired p-value
    p_adjusted: float | None = None  # p corrected over the family of differences that it was tested in
    undefined: str | None = None  # why there is no value, or None
    mde: float | None = None  # the smallest difference that this sample would show with 80 % power, were it alone
    ideal: float | None = None  # as in `Estimate`: tells whether a smaller or a larger b is better
    benchmark: str = ""  # the benchmark that the figure is of, such as "crows_pairs"; empty for an audit
    clusters: int | None = None  # independent clusters in both, where items come in clusters
    nearer: Span | None = None  # by how much the distance to the ideal changed, where that has its own interval
    relative: bool = False  # whether `value`, `low`, `high` and `mde` are logarithms of ratios
    note: str | None = None  # what to keep in mind, such as few clusters
    groups: tuple[str, ...] = ()  # the two groups that a signed difference of rates is between; empty otherwise

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out 0, and p (corrected, where it is) is below `ALPHA`, where there is one."""
        p = self.p if self.p_adjusted is None else self.p_adjusted
        defined = self.low is not None and self.high is not None
        return defined and not (self.low or 0.0) <= 0 <= (self.high or 0.0) and (p is None or p < ALPHA)

    @property
    def outcome(self) -> Outcome:
        """What may be said.

        "better" and "worse" are about the distance to the ideal. Where that distance has its own interval (`nearer`),
        it must leave out 0, too; otherwise both values must lie on one side of the ideal: a figure that jumped over its
        ideal has changed, and may be as far from it as before.
        """
        if self.value is None:
            return "undefined"
        if not self.significant:
            return "not significant"
        if self.nearer is not None:
            if self.nearer.low <= 0 <= self.nearer.high:
                return "changed"
            return "better" if self.nearer.value < 0 else "worse"
        if self.better_way not in ("lower", "higher"):
            return "changed"
        return "better" if ((self.b or 0.0) < (self.a or 0.0)) == (self.better_way == "lower") else "worse"

    @property
    def words(self) -> str:
        """The outcome as it is written, with p where it is not significant and the reason where it is undefined."""
        if self.value is None:
            return f"undefined: {self.undefined}"
        p = self.p if self.p_adjusted is None else self.p_adjusted
        shown = p is not None and self.outcome == "not significant"
        return f"{self.outcome} ({p_text(p)})" if shown else self.outcome

    @property
    def better_way(self) -> str:
        """Which way is better: "lower", "higher", "nearer x" where the ideal lies between, or "" without an ideal."""
        if self.ideal is None or self.a is None or self.b is None:
            return ""
        least, most = sorted((self.a, self.b))
        if least < self.ideal < most:
            return f"nearer {self.ideal:g}"
        # On the ideal itself the side follows from the scale: gaps grow from 0, ratios fall from 1.
        return "higher" if least < self.ideal or least == most == self.ideal > 0 else "lower"

    @property
    def direction(self) -> Literal["nearer", "further"] | None:
        """Where the figure moved, significant or not: "nearer" to or "further" from its ideal; None where neither."""
        if self.nearer is not None:
            moved = self.nearer.value
        elif self.a is None or self.b is None or self.ideal is None:
            return None
        else:
            moved = abs(self.b - self.ideal) - abs(self.a - self.ideal)
        return None if abs(moved) < _ROUNDING else "nearer" if moved < 0 else "further"

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; what only figures of benchmarks have is left out of others."""
        more = ("groups",) if self.benchmark else ("benchmark", "clusters", "nearer", "relative", "note", "groups")
        return {name: value for name, value in asdict(self).items() if value or name not in more}


def p_value(p: float | None) -> str:
    """Write a p-value; very small ones as a bound, because a permutation test does not resolve them."""
    if p is None:
        return ""
    if p < 0.001:
        return "< 0.001"
    return f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def p_text(p: float | None) -> str:
    """A p-value in a sentence.

    Example:
        >>> p_text(0.24), p_text(0.0001), p_text(None)
        ('p = 0.24', 'p < 0.001', 'p unknown')
    """
    if p is None:
        return "p unknown"
    return f"p {p_value(p)}" if p < 0.001 else f"p = {p_value(p)}"


def adjust(p: Sequence[float | None], correction: Correction = "holm") -> list[float | None]:
    """Correct p-values over a family by "holm" (no false finding) or "bh" (share of them); None takes no part."""
    tested = [i for i, value in enumerate(p) if value is not None]
    values = np.array([p[i] for i in tested], dtype=np.float64)
    order = np.argsort(values, kind="stable")
    m = len(values)
    if correction == "holm":
        steps = np.maximum.accumulate(values[order] * (m - np.arange(m)))
    else:
        steps = np.minimum.accumulate((values[order] * m / np.arange(1, m + 1))[::-1])[::-1]
    adjusted: list[float | None] = [None] * len(p)
    for i, step in zip(order, steps, strict=True):
        adjusted[tested[i]] = float(min(step, 1.0))
    return adjusted
