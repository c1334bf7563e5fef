"""A paired comparison on the page: differences as a forest, which way is better, and whether it went there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from markupsafe import Markup

from fairhead.report.forest import Cell, Mark, Panel, forest, level, undefined
from fairhead.report.markup import fill
from fairhead.report.sections import Section
from fairhead.report.sections.audited import AuditFigures
from fairhead.report.wording import Scale, by, count, is_share, metric_name, p_value, scale_of

# Outcome -> the look of its mark and its word. Only "not clear" is a hollow dot.
_LOOKS = {"better": "better", "worse": "worse", "changed": "clear", "not clear": "vague"}


@dataclass(frozen=True, kw_only=True)
class PairedFigure:
    """A difference b − a, as the JSON form of a comparison has it."""

    metric: str
    group_by: str | None
    a: float | None
    b: float | None
    value: float | None
    low: float | None
    high: float | None
    p: float | None
    p_adjusted: float | None
    n: int
    mde: float | None = None
    ideal: float | None = None
    undefined: str | None = None


@dataclass(frozen=True, kw_only=True)
class ComparisonFigures:
    """The JSON form of a comparison."""

    schema: ClassVar[str] = "fairhead.comparison/1"

    provenance: Mapping[str, Any]
    differences: Sequence[PairedFigure]
    a: AuditFigures
    b: AuditFigures


@dataclass(frozen=True, kw_only=True)
class Compared(Section):
    """A comparison of two sets of predictions.

    Attributes:
        a_name: the first.
        b_name: the second.
        comparison: the comparison, or its JSON form.
    """

    kind: ClassVar[str] = "comparison"

    a_name: str
    b_name: str
    comparison: Annotated[Any, ComparisonFigures]

    def draw(self) -> Markup:
        """The differences b − a with the direction that is better for each."""
        columns = (
            f"{self.a_name} → {self.b_name}",
            f"Difference and {level(self.comparison.provenance)} interval",
            "Smallest detectable",
            "p and adjusted p",
            "Outcome",
        )
        differences: Sequence[PairedFigure] = self.comparison.differences
        missing = undefined((by(d.group_by), metric_name(d.metric), d) for d in differences)
        return fill("comparison.html", section=self, columns=columns, undefined=missing)

    def panels(self) -> tuple[Panel, ...]:
        """The differences that are defined, shares apart from the rest."""
        defined = [d for d in self.comparison.differences if d.value is not None]
        kinds = [[d for d in defined if is_share(d.metric) == share] for share in (True, False)]
        return tuple(_panel(chosen) for chosen in kinds if chosen)

    def summary(self) -> str:
        """How many differences have which outcome."""
        words = [outcome(vars(d)) for d in self.comparison.differences if d.value is not None]
        return ", ".join(f"{count(words.count(word))} {word}" for word in _LOOKS if word in words)

    def metric_definitions(self) -> Mapping[str, str]:
        """Those of both audits' metrics."""
        return self.comparison.a.definitions() | self.comparison.b.definitions()

    def origin(self) -> Mapping[str, Any]:
        """That of the comparison."""
        return self.comparison.provenance


def better_direction(difference: Mapping[str, Any]) -> str:
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


def outcome(difference: Mapping[str, Any]) -> str:
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


def _panel(differences: Sequence[PairedFigure]) -> Panel:
    marks = []
    for d in differences:
        assert d.value is not None
        points = scale_of(d.metric, d.value, d.low, d.high, difference=True)
        # The caption of the panel says the unit once.
        bare, absolute = Scale(points.factor, points.digits), Scale(points.factor, points.digits, points.unit and "%")
        value, interval = bare.write(d.value, signed=True), bare.interval(d.low, d.high, signed=True)
        word, direction = outcome(vars(d)), better_direction(vars(d))
        cells = (
            Cell("" if d.a is None or d.b is None else f"{bare.write(d.a)} → {absolute.write(d.b)}"),
            Cell(value, interval),
            Cell("" if d.mde is None else bare.write(d.mde)),
            Cell(p_value(d.p), p_value(d.p_adjusted)),
            Cell(word, direction and f"{direction} is better", _LOOKS[word]),
        )
        name, of = metric_name(d.metric), by(d.group_by)
        ticks, words = () if d.mde is None else (-d.mde, d.mde), f"{name}, {of}: {value}, {word}"
        marks.append(Mark(d.value, d.low, d.high, ticks, _LOOKS[word], words, name, of, cells))
    share = is_share(differences[0].metric)
    drawn = forest(marks, Scale(100.0 if share else 1.0), ideal=0.0)
    return Panel("Percentage points" if share else "Other scales", drawn, marks)
