"""Sentences and sections that what was located in images and in pairs of texts have in common."""

from typing import Any, NamedTuple

import numpy as np

from fairhead.locate.ablation import Ablation
from fairhead.locate.effects import Curves
from fairhead.report.wording import head_name
from fairhead.stats import Difference

ALPHA = 0.05


class Outcome(NamedTuple):
    """What an edit did to a gap: a sentence (empty, or with a blank before it) and its tone, whatever else it cost."""

    sentence: str
    tone: str


def outcome(ablation: Ablation) -> Outcome:
    """Judge the effect on a gap whose ideal is 0, by its interval, its corrected p and the controls.

    Example:
        >>> from fairhead.locate.head_maps import Head
        >>> wider = Difference("DP", "sex", 0.05, 0.16, 0.11, 0.05, 0.17, n=500, p=0.001, p_adjusted=0.004)
        >>> outcome(Ablation((Head(2, 1),), wider, controls=(0.0, 0.01), exhaustive=True))
        Outcome(sentence=' The gap is wider than before.', tone='bad')
    """
    change = ablation.change
    if change.a is None or change.b is None or change.low is None or change.high is None:
        return Outcome("", "unclear")
    p = 1.0 if change.p_adjusted is None else change.p_adjusted
    if change.low <= 0 <= change.high or p >= ALPHA:
        return Outcome(" That change cannot be told from chance in this sample.", "unclear")
    if abs(change.b) > abs(change.a):
        side = ", on the other side" if change.a * change.b < 0 else ""
        return Outcome(f" The gap is wider than before{side}.", "bad")
    if change.low > 0:  # nearer to 0 from below: controls are asked who lowers the figure
        return Outcome("", "note")
    if ablation.p_controls <= ALPHA:
        return Outcome("", "good")
    if ablation.percentile == 0:
        return Outcome(" No control does as much, but there are too few of them to rule out chance.", "note")
    return Outcome(" So the effect is not special to the chosen heads.", "unclear")


def among_controls(ablation: Ablation) -> str:
    """How many control sets do what an edit does to a figure that should fall.

    Example:
        >>> from fairhead.locate.head_maps import Head
        >>> lower = Difference("DP", "sex", 0.16, 0.05, -0.11, -0.17, -0.05, n=500, p=0.01, p_adjusted=0.02)
        >>> among_controls(Ablation((Head(2, 1),), lower, controls=(-0.2, 0.01, 0.0), exhaustive=False))
        'Of 3 control sets of the same layers, 1 lower it as much (p = 0.500).'
    """
    count = round(ablation.percentile * len(ablation.controls))
    falls = ablation.change.value is None or ablation.change.value <= 0
    what = "lower it as much" if falls else "raise it less, or lower it"
    sets = f"Of {len(ablation.controls)} control sets of the same layers"
    return f"{sets}, {count} {what} (p {p_text(ablation.p_controls)})."


def curve_section(found: Curves, way: str) -> dict[str, Any]:
    """The dose–response curve of a report."""
    panels = []
    for metric in found.metrics:
        points = [
            {
                "name": "no head" if not p.heads else f"+ {head_name(*p.heads[-1])}",
                "value": None if np.isnan(p.figures[metric]) else p.figures[metric],
            }
            for p in found.added
        ]
        panels.append({"metric": metric, "points": points})
    return {
        "kind": "curve",
        "title": f"Dose and response ({way})",
        "text": "Heads are changed one after the other, in the order of their rank.",
        "panels": panels,
    }


def finite(value: Any) -> Any:
    """None for NaN, which is not JSON: a figure that has no value, such as V where all predictions are the same."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def interval(change: Difference, factor: float = 1, digits: int = 3) -> str:
    """The ends of a change, times a factor."""
    if change.low is None or change.high is None:
        return "no interval"
    low, high = (signed(end, digits) for end in sorted((factor * change.low, factor * change.high)))
    return f"95 % interval {low} to {high}"


def signed(value: float, digits: int = 3) -> str:
    """A figure with its sign; 0 has none.

    Example:
        >>> signed(-0.0004), signed(-0.5, 1)
        ('0.000', '−0.5')
    """
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def p_text(p: float | None) -> str:
    """A p-value after the letter: "= 0.031"."""
    if p is None:
        return "unknown"
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def line(tone: str, text: str) -> dict[str, str]:
    """A sentence of a verdict."""
    return {"text": text, "tone": tone}
