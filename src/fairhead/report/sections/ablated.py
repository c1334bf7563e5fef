"""The ablation of the selected heads: its effect, seen among the effects of ablating random ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from markupsafe import Markup

from fairhead.report.forest import tick_scale
from fairhead.report.form import Head, Must
from fairhead.report.markup import fill
from fairhead.report.sections import Section
from fairhead.report.svg import Axis, drawing, element
from fairhead.report.wording import Scale, count, head_name, metric_name, p_value, scale_of

_FEW = 30  # below this, each control is a dot: a histogram of so few would be noise
_TOP, _BASE, _HEIGHT = 48, 168, 196  # where bars end, where they stand, and the whole with the axis

_Fraction = Annotated[
    float | None,
    Must(
        lambda x: not isinstance(x, int | float) or 0 <= x <= 1,
        "is {value}; expected a fraction of the controls, from 0 to 1",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """An effect and its interval."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Fact:
    """A figure worth large type, with what it is and what goes with it."""

    name: str
    figure: str
    note: str


@dataclass(frozen=True, kw_only=True)
class Ablated(Section):
    """What ablating the selected heads does to a metric.

    Attributes:
        metric: its name.
        selected: (layer, head) of the heads.
        before: the metric of the whole model.
        after: with the heads ablated.
        effect: after − before.
        low: lower end of its interval.
        high: upper end.
        p: of no effect.
        percentile: the effect's place among the controls, from 0 to 1.
        controls: effects of other sets of heads.
        exhaustive: whether these are all sets there are.
        p_controls: of random heads doing as much.
        accuracy_effect: on accuracy.
    """

    kind: ClassVar[str] = "ablation"

    metric: str
    selected: Sequence[Head]
    before: float
    after: float
    effect: float
    low: float | None
    high: float | None
    p: float | None
    percentile: _Fraction
    controls: Sequence[float]
    exhaustive: bool
    p_controls: float | None = None
    accuracy_effect: Effect | None = None

    def draw(self) -> Markup:
        """The effect, its place among the controls, and the side effect on accuracy."""
        sentence, change = self.sentence(), self._scale()
        title = f"{metric_name(self.metric)}: effect of ablating the selected heads among control sets. {sentence}"
        drawn = control_plot(self.effect, self.low, self.high, self.controls, change, title) if self.controls else None
        names = [head_name(layer, head) for layer, head in sorted(map(tuple, self.selected))]
        return fill("ablation.html", heads=names, facts=self._facts(change), sentence=sentence, drawn=drawn)

    def sentence(self) -> str:
        """How many of the controls do as much."""
        n, effect = len(self.controls), self.effect
        if not n:
            return "No control sets were ablated, so there is nothing to compare the effect with."
        beyond = sum(c <= effect if effect < 0 else c >= effect for c in self.controls)
        sets = f"all {count(n)} possible" if self.exhaustive else f"{count(n)} random"
        verb = "lowered" if effect < 0 else "raised"
        return f"Of {sets} control sets of heads, {count(beyond) if beyond else 'none'} {verb} the figure as much."

    def _scale(self) -> Scale:
        return scale_of(self.metric, self.effect, self.low, self.high, difference=True)

    def _facts(self, change: Scale) -> list[Fact]:
        absolute, bare = Scale(change.factor, change.digits, change.unit and "%"), Scale(change.factor, change.digits)
        both = f"{bare.write(self.before)} → {absolute.write(self.after)}"
        facts = [
            Fact(metric_name(self.metric), both, "before and after"),
            _effect_fact("Effect", Effect(value=self.effect, low=self.low, high=self.high), change),
        ]
        if self.p is not None:
            facts.append(Fact("p", p_value(self.p), "paired test of no effect"))
        if self.percentile is not None:
            facts.append(Fact("Percentile", Scale(100, 1, "%").write(self.percentile), "among the controls"))
        if self.p_controls is not None:
            facts.append(Fact("p against controls", p_value(self.p_controls), "of random heads doing as much"))
        if self.accuracy_effect is not None:
            found = self.accuracy_effect
            scale = scale_of("accuracy", found.value, found.low, found.high, difference=True)
            facts.append(_effect_fact("Effect on accuracy", found, scale))
        return facts


def _effect_fact(name: str, effect: Effect, scale: Scale) -> Fact:
    interval = scale.interval(effect.low, effect.high, signed=True)
    return Fact(name, scale.write(effect.value, signed=True), interval and f"interval {interval}")


def control_plot(
    effect: float, low: float | None, high: float | None, controls: Sequence[float], scale: Scale, title: str
) -> Markup:
    """Draw the distribution of control effects with the effect of the selected heads marked in it.

    Example:
        >>> drawn = control_plot(-0.2, -0.3, -0.1, [0.0, 0.01, -0.02], Scale(100, 1, "points"), "Controls")
        >>> drawn.count("<circle")  # three controls and the effect
        4
    """
    axis = Axis.over([0.0, effect, *(x for x in (low, high) if x is not None), *controls])
    written = tick_scale(axis, scale)
    ground = [element("line", x1=axis.at(t), x2=axis.at(t), y1=_TOP, y2=_BASE, class_="grid") for t in axis.ticks]
    ground.append(element("line", x1=axis.at(0), x2=axis.at(0), y1=_TOP - 4, y2=_BASE, class_="ideal"))
    ground.append(element("line", x1="0%", x2="100%", y1=_BASE, y2=_BASE, class_="base"))
    ground += [element("text", written.write(t), x=axis.at(t), y=_BASE + 18, class_="tick") for t in axis.ticks]
    shapes = _dots(axis, controls) if len(controls) < _FEW else _bars(axis, controls)
    return drawing(title, [*ground, *shapes, *_effect(axis, effect, low, high, scale)], _HEIGHT, "controls")


def _bars(axis: Axis, controls: Sequence[float]) -> list[Markup]:
    """Bars of a histogram; equal controls make one bar of the usual width."""
    span = max(controls) - min(controls)
    if span <= 1e-9 * (axis.high - axis.low):
        edges = np.array([-0.5, 0.5]) * (axis.high - axis.low) / 30 + controls[0]
        counts = np.array([len(controls)])
    else:
        # At most 40 bars, and none thinner than a fiftieth of the plot, or a far-off effect would leave only needles.
        bins = max(1, min(40, round(2 * len(controls) ** (1 / 3)), int(50 * span / (axis.high - axis.low))))
        counts, edges = np.histogram(controls, bins=bins)
    tallest = (_BASE - _TOP) / counts.max()
    return [
        element(
            "rect",
            element("title", f"{count} of {len(controls)} control sets"),
            x=axis.at(left),
            width=f"{max(0.2, axis.fraction(right) - axis.fraction(left) - 0.15):.2f}%",
            y=_BASE - count * tallest,
            height=count * tallest,
            class_="bar",
        )
        for count, left, right in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        if count
    ]


def _dots(axis: Axis, controls: Sequence[float]) -> list[Markup]:
    """One dot a control, stacked where they would cover each other."""
    heights: dict[int, int] = {}
    dots = []
    for control in sorted(controls):
        place = round(axis.fraction(control) / 2)
        level = heights[place] = heights.get(place, 0) + 1
        dots.append(element("circle", cx=axis.at(control), cy=max(_TOP, _BASE + 4 - 10 * level), r=4, class_="bar"))
    return dots


def _effect(axis: Axis, effect: float, low: float | None, high: float | None, scale: Scale) -> list[Markup]:
    place = axis.fraction(effect)
    anchor = "start" if place < 30 else "end" if place > 70 else "middle"
    label = f"selected heads: {scale.write(effect, signed=True)}"
    parts = [
        element("text", label, x=axis.at(effect), y=14, text_anchor=anchor, class_="effect-label"),
        element("line", x1=axis.at(effect), x2=axis.at(effect), y1=30, y2=_BASE, class_="effect"),
    ]
    if low is not None and high is not None:
        parts.append(element("line", x1=axis.at(low), x2=axis.at(high), y1=30, y2=30, class_="effect"))
        parts += [element("line", x1=axis.at(x), x2=axis.at(x), y1=26, y2=34, class_="effect") for x in (low, high)]
    parts.append(element("circle", cx=axis.at(effect), cy=30, r=5, class_="effect-dot"))
    return parts
