"""q and k by group: histograms of single dimensions with the normal curves that DAM's theory assumes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
from markupsafe import Markup

from fairhead.report.axis import Axis
from fairhead.report.markup import fill
from fairhead.report.sections import Section

_TOP, _BOTTOM = 8, 130


@dataclass(frozen=True)
class Shape:
    """One dimension in one group.

    Attributes:
        n: rows.
        mean: of them.
        sd: their standard deviation.
        distance: the largest difference between their distribution and the normal one with this mean and deviation
            (Kolmogorov and Smirnov's D): 0 for normal, 1 at most.
        counts: of a histogram; both groups share its edges.
    """

    n: int
    mean: float
    sd: float
    distance: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Dimension:
    """One dimension of q or k.

    Attributes:
        side: "q" or "k".
        head: its head.
        index: its number within the head.
        groups: its shape in either group.
        difference: of the two means, in standard deviations of both groups together.
        spread_ratio: deviation of the second group over that of the first.
        edges: of the histograms, one more than there are bars.
    """

    side: Literal["q", "k"]
    head: int
    index: int
    groups: tuple[Shape, ...]
    difference: float
    spread_ratio: float
    edges: tuple[float, ...]

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
    """Dimensions of q and k in two groups.

    Attributes:
        names: of the two groups.
        chosen: the dimensions to draw.
        findings: what was found over all dimensions, in sentences.
    """

    kind: ClassVar[str] = "qk_histograms"
    has_figures: ClassVar[bool] = False

    names: Sequence[str]
    chosen: Sequence[Dimension]
    findings: Sequence[str] = ()

    def draw(self) -> Markup:
        """The findings, then the histograms."""
        return fill("qk_histograms.html", section=self)
