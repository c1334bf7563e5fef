"""How figures and metric names are written: one place, so that the page never says the same number in two ways."""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import floor, log10
from typing import Any, NamedTuple

from fairhead.stats import ALPHA, Difference, Estimate
from fairhead.stats import p_value as p_value
from fairhead.stats.bootstrap import STABLE_ROWS

THIN_SPACE = "\u202f"  # narrow and without a line break: before a unit
MINUS = "\u2212"
CROSS = " × "  # between the names of columns, and of groups, that are crossed
# Full names of metrics whose short name does not explain itself; each figure comes with its definition.
_NAMES: Mapping[str, str] = {
    "DP": "Demographic parity gap",
    "EOp": "Equal opportunity gap",
    "EOd": "Equalized odds gap",
    "TPR": "True positive rate",
    "FPR": "False positive rate",
    "FNR": "False negative rate",
    "FDR": "False discovery rate",
    "NPV": "Negative predictive value",
    "ECE": "Calibration error",
    "ECE_gap": "Calibration error gap",
    "Brier": "Brier score",
    "mean_error": "Mean error",
    "MAE": "Mean absolute error",
    "RMSE": "Root mean squared error",
    "R2": "R²",
    "R2_gap": "R² gap",
    "DP_pairwise": "Demographic parity, mean over pairs",
    "EOp_pairwise": "Equal opportunity, mean over pairs",
    "EOd_pairwise": "Equalized odds, mean over pairs",
    "cramers_v": "Cramér's V",
    "cramers_v_corrected": "Cramér's V, corrected",
    "cramers_v_excess": "Cramér's V, excess",
    "worst_group_accuracy": "Worst-group accuracy",
    "bias_conflicting_accuracy": "Bias-conflicting accuracy",
    "bias_aligned_accuracy": "Bias-aligned accuracy",
    "ABROCA": "Area between ROC curves (ABROCA)",
    "score_distance": "Wasserstein distance of scores",
    "evidence_gap": "Evidence gap, in logits",
    "log_odds": "Mean log-odds, in nats",
    "log_odds_size": "Mean size of the log-odds, in nats",
    "ss": "Stereotype score",
    "nll": "Nats lost a token",
    "lms": "Language modelling score",
}
# What the headline gaps are gaps of, for readers who do not know their names.
_IN_WORDS = {
    "DP": "demographic parity (share predicted positive)",
    "EOp": "equal opportunity (true positive rate)",
    "EOd": "equalized odds (true and false positive rates)",
}
LIBRARIES = {"fairlearn": "Fairlearn", "aif360": "AIF360", "own": "own"}
# Words in the names of metrics that are not shares of people.
_NOT_A_SHARE = {
    *("ratio", "impact", "cramers", "auc", "brier", "log", "nll", "evidence", "own"),
    *("distance", "abroca", "mae", "rmse", "r", "error"),
}


def metric_name(metric: str) -> str:
    """Return the full name of a metric, or the name given with its underscores read as spaces."""
    if metric in _NAMES:
        return _NAMES[metric]
    library, _, rest = metric.partition(".")
    if library in LIBRARIES and rest:
        return f"{metric_name(rest)} ({LIBRARIES[library]})"
    words = " ".join(metric.replace("_", " ").split())
    return words[:1].upper() + words[1:]


def in_words(metric: str, short: bool = False) -> str:
    """What a gap is a gap in, for a sentence; in short, without what that means.

    Example:
        >>> in_words("DP"), in_words("DP", short=True)
        ('demographic parity (share predicted positive)', 'demographic parity')
        >>> in_words("accuracy_gap"), in_words("FPR_gap"), in_words("own.cost")
        ('accuracy', 'false positive rate', 'cost')
    """
    if metric in _IN_WORDS:
        return _IN_WORDS[metric].partition(" (")[0] if short else _IN_WORDS[metric]
    name = metric_name(metric.removeprefix("own.").removesuffix("_gap"))
    return name if name[1:2].isupper() else name[:1].lower() + name[1:]


def listed(items: Iterable[str], word: str) -> str:
    """Items of a sentence.

    Example:
        >>> listed(["a"], "and"), listed(["a", "b"], "or"), listed("abc", "and")
        ('a', 'a or b', 'a, b and c')
    """
    *most, last = items
    return f"{', '.join(most)} {word} {last}" if most else last


# In order of importance: where there is little room, the first ones are shown.
_RATES = (
    *("selection_rate", "TPR", "FPR", "accuracy", "precision", "base_rate"),
    *("AUC", "MAE", "mean_error", "RMSE", "R2"),
)


def main_rates(known: Sequence[str], room: int) -> list[str]:
    """The rates to show where `room` fit: a few of a binary task; accuracy and recalls of a small multi-class one.

    Example:
        >>> main_rates(["base_rate", "selection_rate", "TPR", "FPR"], 2)
        ['selection_rate', 'TPR']
        >>> main_rates(["TPR[cat]", "TPR[dog]", "TPR[eel]", "accuracy"], 4)
        ['accuracy', 'TPR[cat]', 'TPR[dog]', 'TPR[eel]']
    """
    recalls = [rate for rate in known if rate.startswith("TPR[")]
    if not recalls:
        return [rate for rate in _RATES if rate in known][:room]
    return ["accuracy", *(recalls if len(recalls) < room else [])]


def level(share: float) -> str:
    """The level of intervals in words."""
    return f"{share * 100:g}{THIN_SPACE}%"


def by(group_by: str | None) -> str:
    """Say what a figure is split by."""
    return "overall" if group_by is None else f"by {group_by}"


def is_share(metric: str) -> bool:
    """Return whether a metric is a share or a difference of shares, to be written as percent."""
    return _NOT_A_SHARE.isdisjoint(re.split(r"[^a-z]+", metric.lower()))


def count(n: float) -> str:
    """Write a count with commas between thousands."""
    return f"{n:,}".replace("-", MINUS)


def decimals(*values: float | None, spread: float | None = None) -> int:
    """Return the decimals that a figure deserves: two digits of its uncertainty, or three of its own without one."""
    if spread:
        return min(6, max(1, 1 - floor(log10(spread))))
    largest = max((abs(value) for value in values if value), default=0.0)
    return min(6, max(1, 2 - floor(log10(largest)))) if largest else 1


class Scale(NamedTuple):
    """How the figures of one row or one axis are written: multiplied, rounded, and with a unit."""

    factor: float = 1.0
    digits: int = 2
    unit: str = ""

    def number(self, value: float, signed: bool = False) -> str:
        """Write the bare number, without its unit."""
        rounded = round(value * self.factor, self.digits)
        text = f"{abs(rounded):,.{self.digits}f}"
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


def number(value: float | None, digits: int = 3) -> str:
    """A plain figure, or a dash; every sign that people read comes from here.

    Example:
        >>> number(-0.0004), number(-8.14, 1), number(None)
        ('0.000', '−8.1', '–')
    """
    return "–" if value is None else Scale(1.0, digits).number(value)


def signed(value: float | None, digits: int = 3) -> str:
    """A figure with its sign; 0 has none.

    Example:
        >>> signed(0.5, 1), signed(-0.5, 1), signed(-0.0004)
        ('+0.5', '−0.5', '0.000')
    """
    return "–" if value is None else Scale(1.0, digits).number(value, signed=True)


def scale_of(
    metric: str, value: float | None, low: float | None = None, high: float | None = None, difference: bool = False
) -> Scale:
    """Choose how a metric's figure is written: percent, points for a difference of two such, or a plain number."""
    factor = 100.0 if is_share(metric) else 1.0
    return _scale(factor, value, low, high, "" if factor == 1 else "points" if difference else "%")


def scale_for(metric: str) -> Scale:
    """The same for a table, in which figures of all sizes have as many decimals."""
    return Scale(100.0, 1, "%") if is_share(metric) else Scale(1.0, 3)


def from_to(metric: str, before: float, after: float) -> str:
    """A figure before and after, for a sentence."""
    scale = scale_for(metric)
    return f"from {scale.number(before)} to {scale.write(after)}"


def with_interval(figure: Estimate | Difference, signed: bool = False) -> str:
    """A figure that has a value, with its interval in brackets where it has one; signed: as a difference.

    Example:
        >>> with_interval(Estimate("EOd", "sex", 0.12, 0.08, 0.16, 900, 0.0)).replace(THIN_SPACE, " ")
        '12.0 % (8.0 to 16.0 %)'
    """
    assert figure.value is not None
    scale = scale_of(figure.metric, figure.value, figure.low, figure.high, difference=signed)
    ends = scale.interval(figure.low, figure.high, signed)
    return scale.write(figure.value, signed) + (f" ({ends})" if ends else "")


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


def head_names(heads: Sequence[tuple[int, int]]) -> str:
    """Heads in a sentence."""
    return ", ".join(head_name(*head) for head in heads)


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


FOUR_FIFTHS = 0.8
# Of many reasons for one figure, this many are shown; its details have them all.
_REASONS = 3
_SIDES = {"better": "B better", "worse": "B worse", "changed": "B differs"}
# Of the four-fifths rule.
FAILS, HOLDS, UNDECIDED = "fails", "holds", "undecided"
# Of a figure of groups in a comparison: p is about changes of groups, the interval about the size of the figure. Of a
# figure of all rows, such as the lowest recall, p is about whether both predict alike.
GROUPS_MOVED, ROWS_MOVED = "groups moved, size not significant", "predictions moved, size not significant"


def four_fifths(low: float, high: float) -> str:
    """What an interval of an impact ratio says of the four-fifths rule."""
    return FAILS if high < FOUR_FIFTHS else HOLDS if low >= FOUR_FIFTHS else UNDECIDED


def is_finding(estimate: Estimate, level: float) -> bool:
    """Whether a figure is significant among all that the verdict of its audit might speak of.

    The test of a gap knows the noise of an even model, its interval that of the observed rates: a finding needs both.
    """
    p, apart = estimate.detail.get("p_adjusted"), estimate.ideal != 0 or (estimate.low or 0.0) > 0
    return p is not None and p < 1 - level and apart


def said(estimate: Estimate, level: float) -> str:
    """What can be said about a gap or ratio at the level of its interval; empty for a plain level such as accuracy.

    What only the figure's own interval says, and not the test corrected over all that a verdict may speak of, is "taken
    alone".
    """
    if estimate.undefined is not None or estimate.low is None or estimate.high is None:
        return f"undefined: {estimate.undefined}"
    if estimate.metric == "impact_ratio":
        word = four_fifths(estimate.low, estimate.high)
        corrected = estimate.detail.get("four_fifths", word)
        return f"four-fifths rule: {word}{'' if word in (UNDECIDED, corrected) else ', taken alone'}"
    if estimate.ideal != 0 or estimate.group_by is None:
        return ""
    if estimate.low > 0:
        alone = "p_adjusted" in estimate.detail and not is_finding(estimate, level)
        return "larger than 0, taken alone" if alone else "larger than 0"
    return "smaller than 0" if estimate.high < 0 else "not significant"


def left_out(estimate: Estimate) -> str:
    """What a figure goes without, and how many of its cells are thin, if any."""
    if estimate.undefined is not None:
        return ""
    without, thin = (len(estimate.detail.get(key, ())) for key in ("excluded", "unstable"))
    words = [f"without {without} cell{'s that are' if without > 1 else ' that is'} too small"] if without else []
    for key in ("at_most", "at_least"):
        if estimate.detail.get(key):
            words.insert(0, f"{key.replace('_', ' ')} this")
    if thin:
        words.append(f"unstable: {thin} cell{'s' if thin > 1 else ''} of fewer than {STABLE_ROWS} rows")
    return ", ".join(words)


def in_short(reasons: Sequence[str]) -> str:
    """Several reasons in one line; of many the first.

    Example:
        >>> in_short(["a has 1 row", "b has 2 rows", "c has 1 row", "d has 1 row", "e has 3 rows"])
        'a has 1 row; b has 2 rows; c has 1 row; and 2 more like these'
    """
    if len(reasons) <= _REASONS + 1:
        return "; ".join(reasons)
    return "; ".join([*reasons[:_REASONS], f"and {len(reasons) - _REASONS} more like these"])


def points(value: float) -> str:
    """A difference of two shares, for people."""
    return f"{100 * value:.1f} points"


def between(estimate: Estimate) -> str:
    """The groups that attain a gap, highest first, and the class if there are several."""
    of_class = f" for class {estimate.detail['class']}" if "class" in estimate.detail else ""
    return " above ".join(dict.fromkeys((*estimate.groups[:1], *estimate.groups[-1:]))) + of_class


def change_between(pair: Difference, names: Sequence[str] = ("A", "B")) -> str:
    """How the signed difference of a rate between two groups changed between two sets of predictions.

    Example:
        >>> d = Difference("TPR", "sex", -0.2, 0.17, 0.37, 0.3, 0.44, 900, p=0.001, ideal=0.0, groups=("f", "m"))
        >>> change_between(d)
        'TPR by sex, f 20.0 points below m in A and 17.0 points above in B (change +37.0, +30.0 to +44.0)'
    """
    one, other = pair.groups
    scale = (
        Scale(100.0, 1, "points") if is_share(pair.metric) else scale_of(pair.metric, pair.value, pair.low, pair.high)
    )
    far = (scale.write(abs(side or 0.0)).replace(THIN_SPACE, " ") for side in (pair.a, pair.b))
    sides = [
        f"{size} {'above' if (side or 0.0) >= 0 else 'below'}" for size, side in zip(far, (pair.a, pair.b), strict=True)
    ]
    change, *ends = (scale.number(x or 0.0, signed=True) for x in (pair.value, pair.low, pair.high))
    rate = f"{pair.metric.replace('_', ' ')} by {pair.group_by}"
    both = f"{sides[0]} {other} in {names[0]} and {sides[1]} in {names[1]}"
    return f"{rate}, {one} {both} (change {change}, {' to '.join(ends)})"


def said_of_difference(difference: Difference) -> str:
    """What can be said about b against a.

    Example:
        >>> d = Difference("DP", "race", 0.2, 0.1, -0.1, -0.15, -0.05, 900, p=0.001, p_adjusted=0.004, ideal=0.0)
        >>> said_of_difference(d)
        'B better'
    """
    if difference.value is None:
        return f"undefined: {difference.undefined}"
    p = 1.0 if difference.p_adjusted is None else difference.p_adjusted
    if difference.outcome == "not significant" and not difference.groups and p < ALPHA:
        return ROWS_MOVED if difference.group_by is None else GROUPS_MOVED
    return _SIDES.get(difference.outcome, difference.outcome)
