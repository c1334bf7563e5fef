"""Figures with their uncertainty, and what may be said of a difference: one vocabulary for every comparison."""

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
class Estimate:
    """One figure with its uncertainty. All values are fractions, not percent.

    Attributes:
        metric: its name, such as "DP", "EOp", "EOd", "accuracy", "worst_group_accuracy", "impact_ratio".
        group_by: the group column ("race"), an intersection ("race × gender"), the category of a benchmark, or None
            for an overall figure.
        value: the point estimate; None when undefined.
        low: lower end of the 95 % interval (or of the level asked for); None when undefined.
        high: upper end.
        n: number of rows that the figure rests on.
        ideal: the value of a perfectly even model (0 for gaps, 1 for ratios); None where there is no such value.
        undefined: why there is no value ("female has 4 rows with label 1; at least 10 are needed"), or None.
        mde: minimum detectable effect: the smallest gap that a sample of this size would show with 80 % power.
        groups: the groups that attain the figure, highest first (largest gap between which two, lowest group, ...).
        detail: anything else worth knowing, JSON-ready (the class that attains a multi-class maximum, a definition).
    """

    metric: str
    group_by: str | None
    value: float | None
    low: float | None
    high: float | None
    n: int
    ideal: float | None
    undefined: str | None = None
    mde: float | None = None
    groups: tuple[str, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupRow:
    """One group's own figures.

    Attributes:
        group_by: the group column or intersection.
        group: the group's name.
        n: its rows.
        rates: "selection_rate", "TPR", "FPR", "precision", "accuracy", ... each an `Estimate`.
    """

    group_by: str
    group: str
    n: int
    rates: Mapping[str, Estimate]


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
class Span:
    """A figure and the ends of its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """One figure of two models on the same rows or items, b minus a.

    Attributes:
        metric: as in `Estimate`.
        group_by: as in `Estimate`.
        a: value of the first model; None when undefined.
        b: value of the second.
        value: b − a, or the logarithm of b / a for a `relative` figure; None when undefined.
        low: lower end of the paired interval of `value`.
        high: upper end.
        n: rows or items in both.
        p: two-sided paired p-value.
        p_adjusted: p corrected over the family of differences that it was tested in.
        undefined: why there is no value, or None.
        mde: the smallest difference that this paired sample would show with 80 % power, were it the only one.
        ideal: as in `Estimate`: tells whether a smaller or a larger b is better.
        benchmark: the benchmark that the figure is of, such as "crows_pairs"; empty for an audit.
        clusters: independent clusters in both, where items come in clusters.
        nearer: by how much the distance to the ideal changed (negative is nearer), where that has its own interval.
        relative: whether `value`, `low`, `high` and `mde` are logarithms of ratios.
        note: what to keep in mind, such as few clusters.
        groups: the two groups that a signed difference of rates is between; empty otherwise.

    Example:
        >>> found = Difference("DP", "race", 0.2, 0.1, -0.1, -0.15, -0.05, 900, p=0.001, p_adjusted=0.004, ideal=0.0)
        >>> found.outcome, found.better_way
        ('better', 'lower')
    """

    metric: str
    group_by: str | None
    a: float | None
    b: float | None
    value: float | None
    low: float | None
    high: float | None
    n: int
    p: float | None = None
    p_adjusted: float | None = None
    undefined: str | None = None
    mde: float | None = None
    ideal: float | None = None
    benchmark: str = ""
    clusters: int | None = None
    nearer: Span | None = None
    relative: bool = False
    note: str | None = None
    groups: tuple[str, ...] = ()

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out 0 and the (corrected) p is below `ALPHA`."""
        return is_significant(vars(self))

    @property
    def outcome(self) -> Outcome:
        """What may be said; see `outcome_of`."""
        return outcome_of(vars(self))

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
        """Which way is better; see `better_way`."""
        return better_way(vars(self))

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


def is_significant(figures: Mapping[str, Any]) -> bool:
    """Whether the interval of a difference leaves out 0, and its p, adjusted where it is, is below `ALPHA`.

    It is given as its JSON form; without a p the interval decides.
    """
    low, high = figures["low"], figures["high"]
    p = figures["p"] if figures["p_adjusted"] is None else figures["p_adjusted"]
    return low is not None and high is not None and not low <= 0 <= high and (p is None or p < ALPHA)


def outcome_of(figures: Mapping[str, Any]) -> Outcome:
    """What may be said of a difference, given as its JSON form.

    "better" and "worse" are about the distance to the ideal. Where that distance has its own interval (`nearer`), it
    must leave out 0, too; otherwise both values must lie on one side of the ideal: a figure that jumped over its ideal
    has changed, and may be as far from it as before.
    """
    if figures["value"] is None:
        return "undefined"
    if not is_significant(figures):
        return "not significant"
    nearer = figures.get("nearer")
    if isinstance(nearer, Span):
        if nearer.low <= 0 <= nearer.high:
            return "changed"
        return "better" if nearer.value < 0 else "worse"
    way = better_way(figures)
    if way not in ("lower", "higher"):
        return "changed"
    return "better" if (figures["b"] < figures["a"]) == (way == "lower") else "worse"


def better_way(figures: Mapping[str, Any]) -> str:
    """Which way is better: "lower", "higher", "nearer x" where the ideal lies between, or "" without an ideal."""
    a, b, ideal = figures["a"], figures["b"], figures.get("ideal")
    if ideal is None or a is None or b is None:
        return ""
    if min(a, b) < ideal < max(a, b):
        return f"nearer {ideal:g}"
    # On the ideal itself the side follows from the scale: gaps grow from 0, ratios fall from 1.
    return "higher" if min(a, b) < ideal or (a == b == ideal and ideal > 0) else "lower"


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
