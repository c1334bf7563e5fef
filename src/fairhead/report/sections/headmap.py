"""The map of layers × heads: colour for size and sign, an outline for the selected heads, figures where they fit."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from markupsafe import Markup

from fairhead.errors import InputError
from fairhead.report.form import Grid, Head
from fairhead.report.markup import fill
from fairhead.report.sections import Section
from fairhead.report.svg import drawing, element
from fairhead.report.wording import Scale, count, head_name, p_value, scale_in_unit

# Steps of colour on either side of 0; the classes neg5 … neg1, zero, pos1 … pos5 are coloured in style.css.
STEPS = 5

_LEFT, _TOP = 34, 22  # room for the numbers of layers and heads
_WIDTH = 660.0  # what a map of many heads should fit in
_SMALLEST, _LARGEST = 13.0, 46.0  # side of a cell


@dataclass(frozen=True, kw_only=True)
class Headmap(Section):
    """One figure a head.

    Attributes:
        measure: what the figures are.
        unit: of the figures; "fraction" is written as percent.
        values: the figures, [layers][heads]; None where undefined.
        low: lower ends of their intervals, same shape.
        high: upper ends.
        p_adjusted: corrected p-values.
        selected: (layer, head) of the heads to outline.
    """

    kind: ClassVar[str] = "headmap"

    measure: str
    unit: str
    values: Grid
    selected: Sequence[Head]
    low: Grid | None = None
    high: Grid | None = None
    p_adjusted: Grid | None = None

    def check(self, where: str) -> None:
        """All grids have one shape, and the selected heads are in it."""
        layers, heads = len(self.values), len(self.values[0])
        for key, grid in (("low", self.low), ("high", self.high), ("p_adjusted", self.p_adjusted)):
            if grid is not None and (len(grid), len(grid[0])) != (layers, heads):
                raise InputError(f"{where}.{key} is not {layers} layers × {heads} heads, as 'values' is")
        for i, (layer, head) in enumerate(self.selected):
            if layer >= layers or head >= heads:
                found = f"{where}.selected[{i}] is {[layer, head]}"
                raise InputError(f"{found}, outside {layers} layers × {heads} heads (from 0)")

    def draw(self) -> Markup:
        """The map, its legend, and the heads worth naming."""
        layers, heads = len(self.values), len(self.values[0])
        chosen = {(layer, head) for layer, head in self.selected}
        defined = [v for row in self.values for v in row if v is not None]
        n_undefined = layers * heads - len(defined)
        scale = scale_in_unit(self.unit, max(map(abs, defined), default=0.0))
        measure = f"{self.measure}, in {scale.unit}" if scale.unit else self.measure
        shape = f"{_several(layers, 'layer')} × {_several(heads, 'head')}"
        parts = [shape, f"{len(chosen) or 'none'} selected"]
        parts += [f"{count(n_undefined)} undefined"] if n_undefined else []
        tooltips = [[self.row(layer, head).tooltip() for head in range(heads)] for layer in range(layers)]
        return fill(
            "headmap.html",
            drawn=heatmap(self.values, tooltips, chosen, f"{measure}: {shape}", scale.factor),
            bar=colour_bar(min(defined), max(defined), scale.factor) if defined else None,
            top=self.top(),
            subject=f"{measure}: {', '.join(parts)}",
            measure=self.measure,
            n_undefined=n_undefined,
            n_selected=len(chosen),
            has_interval=self.low is not None and self.high is not None,
            has_p=self.p_adjusted is not None,
        )

    def top(self) -> "list[HeadRow]":
        """The heads worth naming, largest first."""
        chosen = {(layer, head) for layer, head in self.selected}
        return [self.row(layer, head) for layer, head in ranked(self.values, chosen)]

    def row(self, layer: int, head: int) -> "HeadRow":
        """What is written of a head."""
        grids = (self.values, self.low, self.high, self.p_adjusted)
        value, low, high, p = (None if grid is None else grid[layer][head] for grid in grids)
        name, chosen = head_name(layer, head), (layer, head) in {tuple(pair) for pair in self.selected}
        if value is None:
            return HeadRow(name, "undefined", "", "", chosen)
        scale = scale_in_unit(self.unit, value, low, high)
        return HeadRow(name, scale.write(value), scale.interval(low, high), p_value(p), chosen)


class HeadRow(NamedTuple):
    """A head in the list beside the map."""

    name: str
    value: str
    interval: str
    p: str
    selected: bool

    def tooltip(self) -> str:
        """The row in one line."""
        p = f"adjusted p {self.p if self.p.startswith('<') else '= ' + self.p}" if self.p else ""
        interval = self.interval and f"interval {self.interval}"
        words = (f"{self.name}: {self.value}", interval, p, "selected" if self.selected else "")
        return ", ".join(word for word in words if word)


def _several(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def colour_class(value: float, largest: float) -> str:
    """Return the CSS class of a value: its sign and its size in fifths of the largest.

    Example:
        >>> colour_class(0.5, 1.0), colour_class(-1.0, 1.0), colour_class(0.0, 0.0)
        ('pos3', 'neg5', 'zero')
    """
    step = min(STEPS, round(abs(value) / largest * STEPS + 1e-9)) if largest else 0
    return "zero" if step == 0 else f"{'pos' if value > 0 else 'neg'}{step}"


def heatmap(
    values: Grid,
    tooltips: Sequence[Sequence[str]],
    selected: Collection[tuple[int, int]],
    title: str,
    factor: float = 1.0,
) -> Markup:
    """Draw the map; each cell carries its tooltip, and undefined cells are empty with a dot.

    Args:
        values: one value a head, [layers][heads]; None where undefined.
        tooltips: what each cell says of itself, same shape.
        selected: (layer, head) of the heads to outline.
        title: what the map shows, for screen readers.
        factor: what values are multiplied by where they are written into cells (100 for percent).

    Example:
        >>> drawn = heatmap([[0.5, None]], [["L0H0: 0.5", "L0H1: undefined"]], {(0, 0)}, "Effect by head")
        >>> drawn.count("<rect"), "<title>L0H1: undefined</title>" in drawn
        (4, True)
    """
    layers, heads = len(values), len(values[0])
    side = min(_LARGEST, max(_SMALLEST, (_WIDTH - _LEFT) / heads))
    largest = max((abs(v) for row in values for v in row if v is not None), default=0.0)
    width, height = _LEFT + heads * side + 2, _TOP + layers * side + 2
    parts = [
        element("g", *_cells(values, tooltips, side, largest, _cell_scale(largest, factor)), class_="cells"),
        element("g", *_numbers(layers, heads, side), class_="numbers"),
    ]
    for layer, head in sorted(selected):
        # Inside the cell, so that neighbours that are both selected keep two outlines.
        box = {"x": _LEFT + head * side + 1, "y": _TOP + layer * side + 1, "width": side - 2, "height": side - 2}
        parts += [element("rect", class_=look, rx=2, fill="none", **box) for look in ("halo", "selected")]
    return element(
        "svg",
        element("title", title),
        *parts,
        role="img",
        class_="heatmap",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        # Never wider than drawn and never so small that the numbers cannot be read: then its box scrolls.
        width=width,
        style=f"min-width:{min(width, max(300.0, width * 0.75)):.0f}px",
    )


def _cells(
    values: Grid, tooltips: Sequence[Sequence[str]], side: float, largest: float, written: Scale
) -> list[Markup]:
    return [
        _cell(value, tooltips[layer][head], _LEFT + head * side, _TOP + layer * side, side, largest, written)
        for layer, row in enumerate(values)
        for head, value in enumerate(row)
    ]


def _cell_scale(largest: float, factor: float) -> Scale:
    """Return how values are written inside cells: two digits of the largest, in whatever power of ten it has."""
    digits = 0
    while largest and digits < 3 and largest * factor * 10**digits < 9.95:
        digits += 1
    return Scale(factor, digits)


def _cell(value: float | None, tip: str, x: float, y: float, side: float, largest: float, written: Scale) -> Markup:
    look = "none" if value is None else colour_class(value, largest)
    box = element("rect", x=x + 0.5, y=y + 0.5, width=side - 1, height=side - 1)
    text: list[Markup] = []
    middle = {"x": x + side / 2, "y": y + side / 2}
    if value is None:
        text = [element("text", "·", **middle)]
    elif side >= 34:
        text = [element("text", written.number(value).replace("0.", ".", 1), **middle)]
    elif look.startswith("neg"):
        # Sign without colour: small cells have no room for a figure but have room for a minus.
        text = [element("text", "−", **middle)]
    return element("g", element("title", tip), box, *text, class_=look)


def _numbers(layers: int, heads: int, side: float) -> list[Markup]:
    every = 1 if side >= 18 else 4
    across = [
        element("text", str(h), x=_LEFT + (h + 0.5) * side, y=_TOP - 8, text_anchor="middle")
        for h in range(0, heads, every)
    ]
    down = [
        element("text", str(layer), x=_LEFT - 7, y=_TOP + (layer + 0.5) * side, dy="0.35em", text_anchor="end")
        for layer in range(0, layers, every)
    ]
    return [*across, *down]


def colour_bar(lowest: float, highest: float, factor: float = 1.0) -> Markup:
    """Draw the colours that occur between the lowest and the highest value, with 0 and the ends of the scale written.

    Example:
        >>> drawn = colour_bar(-0.1, 0.5, factor=100)
        >>> drawn.count("<rect")  # neg1, zero, pos1 … pos5
        7
    """
    largest = max(abs(lowest), abs(highest))
    looks = [f"neg{step}" for step in range(STEPS, 0, -1)] + ["zero"] + [f"pos{step}" for step in range(1, STEPS + 1)]
    first, last = (looks.index(colour_class(edge, largest)) for edge in (min(0.0, lowest), max(0.0, highest)))
    side, zero, written = 34, STEPS - first, _cell_scale(largest, factor)
    parts = []
    for i, look in enumerate(looks[first : last + 1]):
        parts.append(element("g", element("rect", x=i * side, y=0, width=side - 1, height=12), class_=look))
        if i in (0, zero, last - first):
            label = "0" if i == zero else written.number((i - zero) / STEPS * largest)
            parts.append(element("text", label, x=(i + 0.5) * side, y=26, text_anchor="middle"))
    return drawing("Colours of the map", parts, 32, "key heatmap bar", width=(last - first + 1) * side)


def ranked(values: Grid, selected: Collection[tuple[int, int]], most: int = 10) -> list[tuple[int, int]]:
    """Return the heads worth listing, largest first: the `most` largest in size and all that are selected.

    Example:
        >>> ranked([[0.1, -0.4], [None, 0.2]], {(0, 0)}, most=2)
        [(0, 1), (1, 1), (0, 0)]
    """
    sizes = {
        (layer, head): -1.0 if value is None else abs(value)
        for layer, row in enumerate(values)
        for head, value in enumerate(row)
    }
    order = sorted(sizes, key=lambda head: (-sizes[head], head))
    defined = [head for head in order if sizes[head] >= 0]
    top = set(defined[:most]) | set(selected)
    return [head for head in order if head in top]
