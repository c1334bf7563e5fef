"""The attention gap: figures by kind of bias and by layer, and single pairs of sentences token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from markupsafe import Markup

from fairhead.errors import InputError
from fairhead.report.forest import Cell, Mark, Panel, forest
from fairhead.report.markup import fill
from fairhead.report.sections import Section
from fairhead.report.svg import drawing, element
from fairhead.report.wording import count, scale_in_unit

_ROW = 19.0  # height of a token's bar and of the gap below it
_LABEL = 38.0  # percent of the width that the tokens have


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
    """Two sentences and the gap of each of their tokens.

    Attributes:
        texts: the sentences.
        first: tokens of the first.
        second: tokens of the second.
        changed: whether the two differ there.
        gaps: between the attention that the two get.
        groups: kinds of bias that the pair is of.
    """

    texts: Sequence[str]
    first: Sequence[str]
    second: Sequence[str]
    changed: Sequence[bool]
    gaps: Sequence[float]
    groups: Sequence[Any] = ()

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

    def draw(self) -> Markup:
        """One bar a token, as long as its gap; tokens that differ are in another colour, and both are named.

        Example:
            >>> pair = TokenPair(texts=["He cried", "She cried"], first=["He", " cried"], second=["She", " cried"],
            ...                  changed=[True, False], gaps=[0.02, 0.01])
            >>> pair.draw().count("<rect"), "He / She" in pair.draw()
            (2, True)
        """
        largest = max(self.gaps, default=0.0) or 1.0
        parts = []
        for row, (first, second, changed, gap) in enumerate(
            zip(self.first, self.second, self.changed, self.gaps, strict=True)
        ):
            name = f"{first.strip()} / {second.strip()}" if changed else first.strip()
            top, length = row * _ROW, (100 - _LABEL - 12) * gap / largest
            look = "fill: var(--pos4)" if changed else "fill: var(--neg3)"
            ink = "fill: var(--ink)" if changed else None
            parts += [
                element("text", name, x=f"{_LABEL:g}%", y=top + 13, text_anchor="end", style=ink),
                element("rect", x=f"{_LABEL + 1:g}%", y=top + 2, width=f"{length:.2f}%", height=_ROW - 5, style=look),
                element("text", f"{gap:.4f}", x=f"{_LABEL + 2 + length:.2f}%", y=top + 13),
            ]
        return drawing(f"{self.title()}: gap of each token", parts, height=len(self.gaps) * _ROW, class_="pair")


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
