"""How figures and metric names are written: one place, so that the page never says the same number in two ways."""

import re
from collections.abc import Mapping
from math import floor, log10
from typing import Any, NamedTuple

from fairhead.stats.outcome import p_value as p_value

THIN_SPACE = "\u202f"  # narrow and without a line break: between thousands, and before a unit
MINUS = "\u2212"


# Full names where the short one does not speak for itself; the definition of each metric comes with its figure.
_NAMES: Mapping[str, str] = {
    "DP": "Demographic parity gap",
    "EOp": "Equal opportunity gap",
    "EOd": "Equalized odds gap",
    "TPR": "True positive rate",
    "FPR": "False positive rate",
    "ECE": "Calibration error",
    "ECE_gap": "Calibration error gap",
    "Brier": "Brier score",
    "cramers_v": "Cramér's V",
    "cramers_v_corrected": "Cramér's V, corrected",
    "cramers_v_excess": "Cramér's V, excess",
    "worst_group_accuracy": "Worst-group accuracy",
    "log_odds": "Mean log-odds, in nats",
    "log_odds_size": "Mean size of the log-odds, in nats",
    "ss": "Stereotype score",
    "nll": "Nats lost a token",
    "lms": "Language modelling score",
}
_LIBRARIES = {"fairlearn": "Fairlearn", "aif360": "AIF360"}
# Words in the names of metrics on a scale of their own, which nobody reads as a share of people.
_NOT_A_SHARE = frozenset({"ratio", "impact", "cramers", "auc", "brier", "log", "nll"})


def metric_name(metric: str) -> str:
    """Return the full name of a metric, or the name given with its underscores read as spaces.

    Example:
        >>> metric_name("EOp"), metric_name("AUC_gap"), metric_name("fairlearn.equalized_odds_difference")
        ('Equal opportunity gap', 'AUC gap', 'Equalized odds difference (Fairlearn)')
    """
    if metric in _NAMES:
        return _NAMES[metric]
    library, _, rest = metric.partition(".")
    if library in _LIBRARIES and rest:
        return f"{metric_name(rest)} ({_LIBRARIES[library]})"
    words = " ".join(metric.replace("_", " ").split())
    return words[:1].upper() + words[1:]


def by(group_by: str | None) -> str:
    """Say what a figure is split by.

    Example:
        >>> by("race"), by(None)
        ('by race', 'overall')
    """
    return "overall" if group_by is None else f"by {group_by}"


def is_share(metric: str) -> bool:
    """Return whether a metric is a share or a difference of shares, to be written as percent.

    Example:
        >>> is_share("DP"), is_share("impact_ratio"), is_share("calibration_gap"), is_share("log_odds")
        (True, False, True, False)
    """
    return _NOT_A_SHARE.isdisjoint(re.split(r"[^a-z]+", metric.lower()))


def count(n: float) -> str:
    """Write a count with thin spaces between thousands.

    Example:
        >>> count(1234567).replace(THIN_SPACE, "_")
        '1_234_567'
    """
    return f"{n:,}".replace(",", THIN_SPACE).replace("-", MINUS)


def decimals(*values: float | None, spread: float | None = None) -> int:
    """Return the decimals that a figure deserves: two digits of its uncertainty, or three of its own without one."""
    if spread:
        return min(6, max(1, 1 - floor(log10(spread))))
    largest = max((abs(value) for value in values if value), default=0.0)
    return min(6, max(1, 2 - floor(log10(largest)))) if largest else 1


class Scale(NamedTuple):
    """How the figures of one row or one axis are written: multiplied, rounded, and with a unit.

    Example:
        >>> Scale(factor=100, digits=1, unit="%").write(0.1234).replace(THIN_SPACE, " ")
        '12.3 %'
        >>> Scale(factor=1, digits=2).write(-0.5, signed=True) == MINUS + "0.50"
        True
    """

    factor: float = 1.0
    digits: int = 2
    unit: str = ""

    def number(self, value: float, signed: bool = False) -> str:
        """Write the bare number, without its unit."""
        rounded = round(value * self.factor, self.digits)
        text = f"{abs(rounded):,.{self.digits}f}".replace(",", THIN_SPACE)
        sign = MINUS if rounded < 0 else "+" if signed and rounded > 0 else ""
        return sign + text

    def write(self, value: float, signed: bool = False) -> str:
        """Write the number with its unit."""
        return self.number(value, signed) + (THIN_SPACE + self.unit if self.unit else "")

    def interval(self, low: float | None, high: float | None, signed: bool = False) -> str:
        """Write an interval, or an empty string where there is none."""
        if low is None or high is None:
            return ""
        return f"{self.number(low, signed)} to {self.write(high, signed)}"


def scale_of(
    metric: str, value: float | None, low: float | None = None, high: float | None = None, difference: bool = False
) -> Scale:
    """Choose how a metric's figure is written: percent, points for a difference of two such, or a plain number.

    Example:
        >>> scale_of("DP", 0.1234, 0.10, 0.15).write(0.1234).replace(THIN_SPACE, " ")
        '12.3 %'
        >>> scale_of("impact_ratio", 0.8123, 0.75, 0.88).write(0.8123)
        '0.812'
    """
    factor = 100.0 if is_share(metric) else 1.0
    return _scale(factor, value, low, high, "" if factor == 1 else "points" if difference else "%")


def scale_in_unit(unit: str, value: float | None, low: float | None = None, high: float | None = None) -> Scale:
    """Choose how a figure in a unit of the caller's naming is written; "fraction" becomes percent.

    Example:
        >>> scale_in_unit("SD", 1.2345).write(1.2345).replace(THIN_SPACE, " ")
        '1.23 SD'
    """
    return _scale(100.0, value, low, high, "%") if unit == "fraction" else _scale(1.0, value, low, high, unit)


def _scale(factor: float, value: float | None, low: float | None, high: float | None, unit: str) -> Scale:
    if low is not None and high is not None and high > low:
        return Scale(factor, decimals(spread=(high - low) / 2 * factor), unit)
    # Percent with one decimal, as people write them, unless the figure would vanish.
    digits = decimals(None if value is None else value * factor)
    return Scale(factor, digits if abs((value or 0) * factor) < 0.1 or factor == 1 else 1, unit)


def head_name(layer: int, head: int) -> str:
    """Write a head as the literature does, counted from 0.

    Example:
        >>> head_name(3, 11)
        'L3H11'
    """
    return f"L{layer}H{head}"


def plain_value(value: Any) -> str:
    """Write one entry of a provenance: numbers with sensible digits, everything else as it is.

    Example:
        >>> plain_value(1.23456), plain_value(True), plain_value(None), plain_value([1, 2])
        ('1.235', 'yes', 'none', '1, 2')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return count(value) if abs(value) >= 10_000 else str(value).replace("-", MINUS)
    if isinstance(value, float):
        return f"{value:.4g}".replace("-", MINUS)
    if isinstance(value, list):
        return ", ".join(plain_value(item) for item in value)
    return str(value)
