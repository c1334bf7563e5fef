"""The ablation of the selected heads among those of random ones, and figures that change with each further head."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from markupsafe import Markup

from fairhead.report.form import Head, Must
from fairhead.report.markup import Axis, Cell, Mark, fill, forest, part, tick_scale
from fairhead.report.sections import Section
from fairhead.report.wording import Scale, count, head_name, metric_name, p_value, scale_of

_FEW = 30  # below this, each control is a dot: a histogram of so few would be noise
_TOP, _BASE = 48, 168  # where bars end, and where they stand

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
    """What ablating the selected heads does to a metric."""

    kind: ClassVar[str] = "ablation"

    metric: str  # its name
    selected: Sequence[Head]  # (layer, head) of the heads
    before: float  # the metric of the whole model
    after: float  # with the heads ablated
    effect: float  # after − before
    low: float | None  # lower end of its interval
    high: float | None  # upper end
    p: float | None  # of no effect
    percentile: _Fraction  # the effect's place among the controls, from 0 to 1
    controls: Sequence[float]  # effects of other sets of heads
    exhaustive: bool  # whether these are all sets there are
    p_controls: float | None = None  # of random heads doing as much
    accuracy_effect: Effect | None = None  # on accuracy

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
    """Draw the distribution of control effects with the effect of the selected heads marked in it."""
    axis = Axis.over([0.0, effect, *(x for x in (low, high) if x is not None), *controls])
    place = axis.fraction(effect)
    return fill(
        "control_plot.html",
        title=title,
        axis=axis,
        tick=tick_scale(axis, scale),
        dots=_dots(axis, controls) if len(controls) < _FEW else [],
        bars=_bars(axis, controls) if len(controls) >= _FEW else [],
        controls=controls,
        effect=effect,
        ends=[] if low is None or high is None else [low, high],
        label=f"selected heads: {scale.write(effect, signed=True)}",
        anchor="start" if place < 30 else "end" if place > 70 else "middle",
        top=_TOP,
        base=_BASE,
    )


class _Bar(NamedTuple):
    controls: int
    left: float
    width: float  # percent
    height: float


def _bars(axis: Axis, controls: Sequence[float]) -> list[_Bar]:
    """Bars of a histogram; equal controls make one bar of the usual width."""
    span, whole = max(controls) - min(controls), axis.high - axis.low
    if span <= 1e-9 * whole:
        edges, counts = np.array([-0.5, 0.5]) * whole / 30 + controls[0], np.array([len(controls)])
    else:
        # At most 40 bars, and none thinner than a fiftieth of the plot, or a far-off effect would leave only needles.
        bins = max(1, min(40, round(2 * len(controls) ** (1 / 3)), int(50 * span / whole)))
        counts, edges = np.histogram(controls, bins=bins)
    widths = [max(0.2, axis.fraction(b) - axis.fraction(a) - 0.15) for a, b in pairwise(edges.tolist())]
    heights = (_BASE - _TOP) / counts.max() * counts
    bars = map(_Bar, counts.tolist(), edges[:-1].tolist(), widths, heights.tolist())
    return [bar for bar in bars if bar.controls]


def _dots(axis: Axis, controls: Sequence[float]) -> list[tuple[float, int]]:
    """Each control and its height: one dot each, stacked where they would cover each other."""
    levels: dict[int, int] = {}
    dots = []
    for control in sorted(controls):
        place = round(axis.fraction(control) / 2)
        levels[place] = levels.get(place, 0) + 1
        dots.append((control, max(_TOP, _BASE + 4 - 10 * levels[place])))
    return dots


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step and the figure there; None where undefined."""

    name: str
    value: float | None


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of one metric."""

    metric: str
    points: Sequence[Step]


@dataclass(frozen=True, kw_only=True)
class Curve(Section):
    """One panel a metric, one row a step."""

    kind: ClassVar[str] = "curve"

    panels: Sequence[Steps]

    def draw(self) -> Markup:
        """The steps of each metric on one axis; a step without a figure is left out."""
        panels = []
        for panel in self.panels:
            steps = [(step.name, step.value) for step in panel.points if step.value is not None]
            if steps:
                name = metric_name(panel.metric)
                scale = scale_of(panel.metric, max((value for _, value in steps), key=abs))
                marks = []
                for step, value in steps:
                    words = f"{step}: {name} {scale.write(value)}"
                    marks.append(Mark(value, None, None, (), "level", words, step, "", (Cell(scale.write(value)),)))
                panels.append(forest(marks, scale, None, caption=name))
        if not panels:
            return Markup('<p class="muted">No figure of the curve is defined.</p>')
        return part("forest_table", ("Value",), panels)
