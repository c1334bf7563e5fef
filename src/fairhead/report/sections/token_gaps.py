"""The attention gap: figures by kind of bias and by layer, and single pairs of sentences token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from markupsafe import Markup

from fairhead.errors import InputError
from fairhead.report.forest import Cell, Mark, Panel, forest
from fairhead.report.markup import fill
from fairhead.report.sections import Section
from fairhead.report.wording import count, scale_in_unit


@dataclass(frozen=True, kw_only=True)
class GapPoint:
    """A figure with its interval and the number of pairs."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None


@dataclass(frozen=True, kw_only=True)
class GapPanel:
    """Figures that share an axis; `unit` "fraction" is written as percent."""

    caption: str
    unit: str
    ideal: float | None
    points: Sequence[GapPoint]


@dataclass(frozen=True, kw_only=True)
class TokenPair:
    """Two sentences and the gap of each of their tokens."""

    texts: Sequence[str]  # the sentences
    first: Sequence[str]  # tokens of the first
    second: Sequence[str]  # tokens of the second
    changed: Sequence[bool]  # whether the two differ there
    gaps: Sequence[float]  # between the attention that the two get
    groups: Sequence[Any] = ()  # kinds of bias that the pair is of

    def check(self, where: str) -> None:
        """One entry a token, and two sentences."""
        lengths = {len(tokens) for tokens in (self.first, self.second, self.changed, self.gaps)}
        if len(lengths) != 1:
            raise InputError(f"{where} has lists of {sorted(lengths)} entries; expected one entry a token in each")
        if len(self.texts) != 2:
            raise InputError(f"{where}.texts has {len(self.texts)} entries; expected the two sentences")

    def title(self) -> str:
        """The kinds of bias, and what differs."""
        both = ("".join(t for t, c in zip(side, self.changed, strict=True) if c) for side in (self.first, self.second))
        return f"{', '.join(map(str, self.groups))}: {' / '.join(' '.join(text.split()) for text in both)}"


@dataclass(frozen=True, kw_only=True)
class AttentionGap(Section):
    """Panels of figures, then pictures of single pairs."""

    kind: ClassVar[str] = "attention_gap"

    panels: Sequence[GapPanel]
    pairs: Sequence[TokenPair]

    def draw(self) -> Markup:
        """Figures on one axis a panel, then the pairs."""
        panels = [_panel(panel) for panel in self.panels if panel.points]
        return fill("attention_gap.html", panels=panels, pairs=self.pairs)


def _panel(panel: GapPanel) -> Panel:
    marks = []
    for point in panel.points:
        low, high, ideal = point.low, point.high, panel.ideal
        scale = scale_in_unit(panel.unit, point.value, low, high)
        value, interval = scale.write(point.value), scale.interval(low, high)
        beyond = ideal is not None and low is not None and high is not None and not low <= ideal <= high
        words = f"{point.name}: {value}{f' ({interval})' if interval else ''}"
        cells = Cell(value, interval), Cell("" if point.n is None else count(point.n))
        marks.append(Mark(point.value, low, high, (), "clear" if beyond else "vague", words, point.name, "", cells))
    largest = scale_in_unit(panel.unit, max(abs(point.value) for point in panel.points))
    return Panel(panel.caption, forest(marks, largest, panel.ideal), marks)
