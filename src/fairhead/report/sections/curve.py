"""How a figure changes step by step, such as with each further head that is ablated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup

from fairhead.report.forest import Cell, Mark, Panel, forest
from fairhead.report.markup import part
from fairhead.report.sections import Section
from fairhead.report.wording import metric_name, scale_of


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
                panels.append(Panel(name, forest(marks, scale, None), marks))
        if not panels:
            return Markup('<p class="muted">No figure of the curve is defined.</p>')
        return part("forest_table", ("Value",), panels)
