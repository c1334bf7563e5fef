"""What models attend to: gaps between sentences token by token, maps over pictures, and q and k by group."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from markupsafe import Markup

from fairhead.errors import InputError
from fairhead.report.form import IS_GRID, PictureAddress
from fairhead.report.markup import Axis, Cell, Forest, Mark, fill, forest
from fairhead.report.sections import Section
from fairhead.report.wording import count, scale_in_unit

if TYPE_CHECKING:
    from PIL.Image import Image

_LARGEST = 224  # pixels of a picture in the page
_TOP, _BOTTOM = 8, 130


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


def _panel(panel: GapPanel) -> Forest:
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
    return forest(marks, largest, panel.ideal, caption=panel.caption)


@dataclass(frozen=True, kw_only=True)
class AttentionMap:
    """What the first token of one model looks at in one picture."""

    model: str  # its name
    patches: Annotated[Sequence[Sequence[float]], IS_GRID]  # share of attention on each patch, [rows][columns]
    elsewhere: float  # share on tokens that are no patches (the first token itself)

    def shade(self, share: float) -> float:
        """How dark a patch is: the less of the attention is on it, the darker."""
        return 0.85 * (1 - share / (max(map(max, self.patches)) or 1.0))


@dataclass(frozen=True, kw_only=True)
class MappedPicture:
    """One picture, as a data: address, and what each model makes of it."""

    title: str
    picture: PictureAddress
    maps: Sequence[AttentionMap]


@dataclass(frozen=True, kw_only=True)
class AttentionMaps(Section):
    """Pictures with the maps of each model beside them."""

    kind: ClassVar[str] = "attention_maps"
    has_figures: ClassVar[bool] = False

    pictures: Sequence[MappedPicture]

    def draw(self) -> Markup:
        """A row for each picture."""
        return fill("attention_maps.html", pictures=self.pictures)


def picture_address(image: "Image", largest: int = _LARGEST, quality: int = 85) -> str:
    """A picture as a data: address, no larger than it is shown."""
    small = image.convert("RGB")
    small.thumbnail((largest, largest))
    held = BytesIO()
    small.save(held, "JPEG", quality=quality)
    return "data:image/jpeg;base64," + base64.b64encode(held.getvalue()).decode()


@dataclass(frozen=True)
class Shape:
    """One dimension in one group."""

    n: int  # rows
    mean: float  # of them
    sd: float  # their standard deviation
    # The largest difference between their distribution and the normal one with this mean and deviation (Kolmogorov and
    # Smirnov's D): 0 for normal, 1 at most
    distance: float
    counts: tuple[int, ...]  # of a histogram; both groups share its edges


@dataclass(frozen=True)
class Dimension:
    """One dimension of q or k."""

    side: Literal["q", "k"]  # "q" or "k"
    head: int  # its head
    index: int  # its number within the head
    groups: tuple[Shape, ...]  # its shape in either group
    difference: float  # of the two means, in standard deviations of both groups together
    spread_ratio: float  # deviation of the second group over that of the first
    edges: tuple[float, ...]  # of the histograms, one more than there are bars

    def title(self) -> str:
        """Which one it is."""
        return f"{self.side}, head {self.head}, dimension {self.index}"

    def draw(self, names: Sequence[str]) -> Markup:
        """Both groups' densities over one axis, with the normal curve of each group's own mean and deviation."""
        edges = np.array(self.edges)
        across = Axis.over(edges.tolist(), pad=0.0)
        densities = [np.array(shape.counts) / (max(1, shape.n) * np.diff(edges)) for shape in self.groups]
        grid = np.linspace(edges[0], edges[-1], 64)
        curves = [
            np.exp(-(((grid - shape.mean) / shape.sd) ** 2) / 2) / (shape.sd * np.sqrt(2 * np.pi))
            if shape.sd > 0
            else np.zeros_like(grid)  # a dimension that never varies has no normal curve
            for shape in self.groups
        ]
        top = max(float(x.max()) for x in (*densities, *curves))
        return fill(
            "histogram.html",
            title=f"{self.title()} by group",
            across=across,
            bars=[list(zip(edges[:-1], edges[1:], density.tolist(), strict=True)) for density in densities],
            curves=[list(pairwise(zip(grid.tolist(), curve.tolist(), strict=True))) for curve in curves],
            y=lambda density: _BOTTOM - density / top * (_BOTTOM - _TOP),
            bottom=_BOTTOM,
            names=names,
        )


@dataclass(frozen=True, kw_only=True)
class QKHistograms(Section):
    """Dimensions of q and k in two groups."""

    kind: ClassVar[str] = "qk_histograms"
    has_figures: ClassVar[bool] = False

    names: Sequence[str]  # of the two groups
    chosen: Sequence[Dimension]  # the dimensions to draw
    findings: Sequence[str] = ()  # what was found over all dimensions, in sentences

    def draw(self) -> Markup:
        """The findings, then the histograms."""
        return fill("qk_histograms.html", section=self)
