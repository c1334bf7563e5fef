"""Maps of layers × heads, a card for each head that is worth one, and the ablation of the selected heads.

A map has a colour for size and sign, an outline for the selected heads, and figures where they fit. Of several maps the
reader chooses one, without scripts; an old browser shows them all.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NamedTuple
from zlib import crc32

import numpy as np
from markupsafe import Markup
from rich.console import Console
from rich.markup import escape

from fairhead.errors import InputError
from fairhead.report.form import Grid, Head, Must, PictureAddress
from fairhead.report.markup import Axis, fill, part, tick_scale
from fairhead.report.sections import Section
from fairhead.report.sections.plain import PlainTable
from fairhead.report.wording import Scale, count, head_name, metric_name, p_value, scale_in_unit, scale_of
from fairhead.settings import Share
from fairhead.stats import ALPHA

# Steps of colour on either side of 0; the classes neg5 … neg1, zero, pos1 … pos5 are coloured in style.css.
STEPS = 5

_LEFT = 34  # room for the numbers of layers
_WIDTH = 660.0  # what a map of many heads should fit in
_SMALLEST, _LARGEST = 13.0, 46.0  # side of a cell
MOST = 16  # maps that style.css can switch between
_FEW = 30  # below this, each control is a dot: a histogram of so few would be noise
_TOP, _BASE = 48, 168  # where bars end, and where they stand
_Poles = Annotated[
    Sequence[str], Must(lambda x: isinstance(x, list) and len(x) == 2, "is {value!r}; expected two names")
]


@dataclass(frozen=True, kw_only=True)
class Headmap(Section):
    """One figure a head."""

    kind: ClassVar[str] = "headmap"

    measure: str  # what the figures are
    unit: str  # of the figures; "fraction" is written as percent
    values: Grid  # the figures, [layers][heads]; None where undefined
    selected: Sequence[Head]  # (layer, head) of the heads to outline
    low: Grid | None = None  # lower ends of their intervals, same shape
    high: Grid | None = None  # upper ends
    p_adjusted: Grid | None = None  # corrected p-values; heads that are not significant are faded
    confirmed: Sequence[Head] | None = None  # those of the selected that other rows confirm; the others are dashed
    cards: Sequence[Head] = ()  # heads that have a card on the page, which a click opens

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
        layers, heads, rows = len(self.values), len(self.values[0]), self.rows()
        defined = [v for row in self.values for v in row if v is not None]
        n_undefined, n_selected = layers * heads - len(defined), len({tuple(pair) for pair in self.selected})
        scale = scale_in_unit(self.unit, max(map(abs, defined), default=0.0))
        measure = f"{self.measure}, in {scale.unit}" if scale.unit else self.measure
        shape = f"{layers} layer{'s' * (layers != 1)} × {heads} head{'s' * (heads != 1)}"
        missing = f", {count(n_undefined)} undefined" if n_undefined else ""
        return fill(
            "headmap.html",
            section=self,
            rows=rows,
            top=self.top(rows),
            bar=colour_bar(min(defined), max(defined), scale.factor) if defined else None,
            side=min(_LARGEST, max(_SMALLEST, (_WIDTH - _LEFT) / heads)),
            left=_LEFT,
            title=f"{measure}: {shape}",
            subject=f"{measure}: {shape}, {n_selected or 'none'} selected{missing}",
            n_undefined=n_undefined,
            confirmed=None if self.confirmed is None else {tuple(pair) for pair in self.confirmed},
            n_faded=sum(row.faded for some in rows for row in some),
        )

    def top(self, rows: "list[list[HeadRow]]") -> "list[HeadRow]":
        """The heads worth naming, largest first."""
        return [rows[layer][head] for layer, head in ranked(self.values, {(a, b) for a, b in self.selected})]

    def rows(self) -> "list[list[HeadRow]]":
        """What is written of each head, [layers][heads]."""
        largest = max((abs(v) for row in self.values for v in row if v is not None), default=0.0)
        inside = _cell_scale(largest, scale_in_unit(self.unit, largest).factor)
        selected, linked = ({tuple(pair) for pair in pairs} for pairs in (self.selected, self.cards))
        rows: list[list[HeadRow]] = []
        for layer, values in enumerate(self.values):
            rows.append([])
            for head, value in enumerate(values):
                low, high, p = (g[layer][head] if g else None for g in (self.low, self.high, self.p_adjusted))
                name, chosen = head_name(layer, head), (layer, head) in selected
                if value is None:
                    rows[-1].append(HeadRow(name, "undefined", "", "", chosen, "none", "·", False, False))
                    continue
                scale, look = scale_in_unit(self.unit, value, low, high), colour_class(value, largest)
                figure = inside.number(value).replace("0.", ".", 1)
                written = scale.write(value), scale.interval(low, high), p_value(p)
                faded = p is not None and p > ALPHA
                rows[-1].append(HeadRow(name, *written, chosen, look, figure, faded, (layer, head) in linked))
        return rows


class HeadRow(NamedTuple):
    """A head in the map, and in the list beside it; `figure` is what its cell has room for."""

    name: str
    value: str
    interval: str
    p: str
    selected: bool
    look: str
    figure: str
    faded: bool
    linked: bool

    def tooltip(self) -> str:
        """The row in one line."""
        p = f"adjusted p {self.p if self.p.startswith('<') else '= ' + self.p}" if self.p else ""
        interval = self.interval and f"interval {self.interval}"
        words = (f"{self.name}: {self.value}", interval, p, "selected" if self.selected else "")
        return ", ".join(word for word in words if word)


def colour_class(value: float, largest: float) -> str:
    """Return the CSS class of a value: its sign and its size in fifths of the largest."""
    step = min(STEPS, round(abs(value) / largest * STEPS + 1e-9)) if largest else 0
    return "zero" if step == 0 else f"{'pos' if value > 0 else 'neg'}{step}"


def _cell_scale(largest: float, factor: float) -> Scale:
    """Return how values are written inside cells: two digits of the largest, in whatever power of ten it has."""
    digits = 0
    while largest and digits < 3 and largest * factor * 10**digits < 9.95:
        digits += 1
    return Scale(factor, digits)


def colour_bar(lowest: float, highest: float, factor: float = 1.0) -> Markup:
    """Draw the colours that occur between the lowest and the highest value, with 0 and the ends written."""
    largest = max(abs(lowest), abs(highest))
    looks = [f"neg{step}" for step in range(STEPS, 0, -1)] + ["zero"] + [f"pos{step}" for step in range(1, STEPS + 1)]
    first, last = (looks.index(colour_class(edge, largest)) for edge in (min(0.0, lowest), max(0.0, highest)))
    zero, written, steps = STEPS - first, _cell_scale(largest, factor), []
    for i, look in enumerate(looks[first : last + 1]):
        label = "0" if i == zero else written.number((i - zero) / STEPS * largest)
        steps.append((look, label if i in (0, zero, last - first) else ""))
    return part("colour_bar", steps)


def ranked(values: Grid, selected: Collection[tuple[int, int]], most: int = 10) -> list[tuple[int, int]]:
    """Return the heads worth listing, largest first: the `most` largest in size and all that are selected."""
    sizes = {
        (layer, head): -1.0 if value is None else abs(value)
        for layer, row in enumerate(values)
        for head, value in enumerate(row)
    }
    order = sorted(sizes, key=lambda head: (-sizes[head], head))
    defined = [head for head in order if sizes[head] >= 0]
    top = set(defined[:most]) | set(selected)
    return [head for head in order if head in top]


@dataclass(frozen=True, kw_only=True)
class Headmaps(Section):
    """Maps with their names: each a section of its own, whose title is what it shows."""

    kind: ClassVar[str] = "headmaps"

    names: Sequence[str]  # on the buttons
    maps: Sequence[Annotated[Any, Section]]

    def check(self, where: str) -> None:
        """A name a map, and no more than can be switched between."""
        if not 1 <= len(self.maps) == len(self.names) <= MOST:
            found = f"{len(self.names)} names for {len(self.maps)} maps"
            raise InputError(f"{where} has {found}; expected one each, 1 to {MOST}")

    def draw(self) -> Markup:
        """Buttons, and below them the map that is chosen."""
        group = f"maps-{crc32('/'.join([self.title, *self.names]).encode()):08x}"
        return fill("headmaps.html", group=group, panes=list(zip(self.names, self.maps, strict=True)))


@dataclass(frozen=True)
class Fact:
    """A figure worth large type, with what it is and what goes with it."""

    name: str
    figure: str
    note: str


@dataclass(frozen=True, kw_only=True)
class SpanText:
    """A text that spans what a head writes: its share of the variance, and whether it names the attribute."""

    text: str
    share: float
    attribute: bool


@dataclass(frozen=True, kw_only=True)
class HeadCard:
    """One head; `most` and `least` are pictures at the two ends of its axis."""

    head: Head
    facts: Sequence[Fact]
    note: str = ""  # beside its name
    texts: Sequence[SpanText] = ()
    most: Sequence[PictureAddress] = ()
    least: Sequence[PictureAddress] = ()


@dataclass(frozen=True, kw_only=True)
class TopHeads(Section):
    """A card for each head; `poles` name the two ends of their axes."""

    kind: ClassVar[str] = "top_heads"

    poles: _Poles
    heads: Sequence[HeadCard]
    others: Sequence[HeadCard] = ()  # shown one at a time, when their head is clicked in a map

    def draw(self) -> Markup:
        """The cards."""
        first, second = (f"most {pole}" for pole in self.poles)
        both = [(card, False) for card in self.heads] + [(card, True) for card in self.others]
        cards = [(card, ((first, card.most), (second, card.least)), other) for card, other in both]
        return fill("top_heads.html", cards=cards, head_name=head_name, percent=Scale(100, 1, "%").write)

    def show(self, console: Console) -> None:
        """The figures of each head in a table, and the texts of each, those of the attribute in bold."""
        rows = []
        for card in self.heads:
            name = f"{head_name(*card.head)}{f' ({card.note})' if card.note else ''}"
            rows.append([name, *(f"{fact.figure} ({fact.note})" for fact in card.facts)])
        columns = ["head", *(fact.name for card in self.heads[:1] for fact in card.facts)]
        PlainTable(caption=f"{self.title}, on the reporting half", columns=columns, rows=rows).show(console)
        for card in self.heads:
            if card.texts:
                texts = (f"[bold]{escape(one.text)}[/]" if one.attribute else escape(one.text) for one in card.texts)
                console.print(f"{head_name(*card.head)}: {', '.join(texts)}", highlight=False)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """An effect and its interval."""

    value: float
    low: float | None
    high: float | None


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
    percentile: Share | None  # the effect's place among the controls
    controls: Sequence[float]  # effects of other sets of heads
    exhaustive: bool  # whether these are all sets there are
    p_controls: float | None = None  # of random heads doing as much
    accuracy_effect: Effect | None = None  # on accuracy

    def draw(self) -> Markup:
        """The effect, its place among the controls, and the side effect on accuracy."""
        sentence = self.sentence()
        change = scale_of(self.metric, self.effect, self.low, self.high, difference=True)
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


def _bars(axis: Axis, controls: Sequence[float]) -> list[tuple[int, float, float, float]]:
    """Bars of a histogram: controls, left end, width in percent and height. Equal controls make one bar."""
    span, whole = max(controls) - min(controls), axis.high - axis.low
    if span <= 1e-9 * whole:
        edges, counts = np.array([-0.5, 0.5]) * whole / 30 + controls[0], np.array([len(controls)])
    else:
        # At most 40 bars, and none thinner than a fiftieth of the plot, or a far-off effect would leave only needles.
        bins = max(1, min(40, round(2 * len(controls) ** (1 / 3)), int(50 * span / whole)))
        counts, edges = np.histogram(controls, bins=bins)
    widths = [max(0.2, axis.fraction(b) - axis.fraction(a) - 0.15) for a, b in pairwise(edges.tolist())]
    heights = (_BASE - _TOP) / counts.max() * counts
    bars = zip(counts.tolist(), edges[:-1].tolist(), widths, heights.tolist(), strict=True)
    return [bar for bar in bars if bar[0]]


def _dots(axis: Axis, controls: Sequence[float]) -> list[tuple[float, int]]:
    """Each control and its height: one dot each, stacked where they would cover each other."""
    levels: dict[int, int] = {}
    dots = []
    for control in sorted(controls):
        place = round(axis.fraction(control) / 2)
        levels[place] = levels.get(place, 0) + 1
        dots.append((control, max(_TOP, _BASE + 4 - 10 * levels[place])))
    return dots
