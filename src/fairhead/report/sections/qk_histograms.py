"""q and k by group: histograms of single dimensions with the normal curves that DAM's theory assumes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
from markupsafe import Markup

from fairhead.report.markup import Axis, fill
from fairhead.report.sections import Section

_TOP, _BOTTOM = 8, 130


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
