"""A paired comparison on the page: differences as a forest, which way is better, and whether it went there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairhead.report import wording
from fairhead.report.forest import Mark, forest
from fairhead.report.panels import Cell, Figure, Panel, Row, Undefined, by, level, undefined_figures
from fairhead.report.wording import Scale, is_share, metric_name, p_value, scale_of

# Outcome -> the look of its mark and its word. Only "not clear" is a hollow dot.
_LOOKS = {"better": "better", "worse": "worse", "changed": "clear", "not clear": "vague"}


@dataclass(frozen=True)
class ComparisonView:
    """Paired differences, drawn and counted."""

    columns: tuple[str, ...]
    panels: tuple[Panel, ...]
    undefined: tuple[Undefined, ...]
    summary: str


def comparison_view(section: Mapping[str, Any]) -> ComparisonView:
    """Return the differences b − a with the direction that is better for each."""
    comparison = section["comparison"]
    differences = [d for d in comparison["differences"] if d["value"] is not None]
    columns = (
        f"{section['a_name']} → {section['b_name']}",
        f"Difference and {level(comparison['provenance'])} interval",
        "Smallest detectable",
        "p and adjusted p",
        "Outcome",
    )
    kinds = {share: [d for d in differences if is_share(d["metric"]) == share] for share in (True, False)}
    words = [outcome(d) for d in differences]
    return ComparisonView(
        columns,
        tuple(_panel(chosen) for chosen in kinds.values() if chosen),
        undefined_figures(comparison["differences"]),
        ", ".join(f"{wording.count(words.count(word))} {word}" for word in _LOOKS if word in words),
    )


def better_direction(difference: Figure) -> str:
    """Return which way is better: "lower", "higher", "nearer x" where the ideal lies between, or "" if unknown.

    Example:
        >>> better_direction({"a": 0.2, "b": 0.1, "ideal": 0.0}), better_direction({"a": 0.8, "b": 0.9, "ideal": 1.0})
        ('lower', 'higher')
    """
    a, b, ideal = difference["a"], difference["b"], difference.get("ideal")
    if ideal is None or a is None or b is None:
        return ""
    if min(a, b) < ideal < max(a, b):
        return f"nearer {ideal:g}"
    # On the ideal itself the side follows from the scale: gaps grow from 0, ratios fall from 1.
    return "higher" if min(a, b) < ideal or (a == b == ideal and ideal > 0) else "lower"


def outcome(difference: Figure) -> str:
    """Return "better", "worse" or "changed" where the difference stands beyond chance, else "not clear".

    Beyond chance means both: its interval leaves 0 out, and its p-value, adjusted where there is such a one, is
    below 0.05. A figure that went over its ideal has changed, and no more can be said: the interval is of the change,
    not of how much nearer it came.

    Example:
        >>> d = {"a": 0.2, "b": 0.1, "ideal": 0.0, "low": -0.15, "high": -0.05, "p": 0.001, "p_adjusted": 0.004}
        >>> outcome(d), outcome({**d, "p_adjusted": 0.2}), outcome({**d, "a": 0.06, "b": -0.04})
        ('better', 'not clear', 'changed')
    """
    low, high = difference["low"], difference["high"]
    p = difference["p"] if difference["p_adjusted"] is None else difference["p_adjusted"]
    if (p is not None and p >= 0.05) or low is None or high is None or low <= 0 <= high:
        return "not clear"
    direction = better_direction(difference)
    if direction not in ("lower", "higher"):
        return "changed"
    return "better" if (difference["b"] < difference["a"]) == (direction == "lower") else "worse"


def _panel(differences: Sequence[Figure]) -> Panel:
    marks, rows = [], []
    for d in differences:
        points = scale_of(d["metric"], d["value"], d["low"], d["high"], difference=True)
        # The caption of the panel says the unit once.
        bare, absolute = Scale(points.factor, points.digits), Scale(points.factor, points.digits, points.unit and "%")
        value, interval = bare.write(d["value"], signed=True), bare.interval(d["low"], d["high"], signed=True)
        both = "" if None in (d["a"], d["b"]) else f"{bare.write(d['a'])} → {absolute.write(d['b'])}"
        mde, word, direction = d.get("mde"), outcome(d), better_direction(d)
        cells = (
            Cell(both),
            Cell(value, interval),
            Cell("" if mde is None else bare.write(mde)),
            Cell(p_value(d["p"]), p_value(d["p_adjusted"])),
            Cell(word, direction and f"{direction} is better", _LOOKS[word]),
        )
        name, of = metric_name(d["metric"]), by(d["group_by"])
        rows.append(Row(name, of, cells))
        words = f"{name}, {of}: {value}, {word}"
        ticks = () if mde is None else (-mde, mde)
        marks.append(Mark(d["value"], d["low"], d["high"], ticks, _LOOKS[word], words))
    share = is_share(differences[0]["metric"])
    drawn = forest(marks, Scale(100.0 if share else 1.0), ideal=0.0)
    return Panel("Percentage points" if share else "Other scales", drawn, tuple(rows))
