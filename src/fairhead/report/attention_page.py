"""Histograms of q and k, and attention over pictures, as one page that needs nothing else."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

from fairhead.report.page import environment, in_reading_order
from fairhead.report.svg import Axis, drawing, element

if TYPE_CHECKING:  # a report imports nothing that needs torch
    from fairhead.locate.assumption import Assumption, Dimension

Array = NDArray[np.float64]
_TOP, _BOTTOM, _HEIGHT = 8, 130, 168
_LARGEST = 224  # pixels of a picture in the page


@dataclass(frozen=True)
class Map:
    """What the first token of one model looks at in one picture.

    Attributes:
        model: its name.
        patches: share of attention on each patch, [rows, columns].
        elsewhere: share on tokens that are no patches (the first token itself).
    """

    model: str
    patches: Array
    elsewhere: float


@dataclass(frozen=True)
class Picture:
    """One picture and what each model makes of it."""

    title: str
    image: Image.Image
    maps: tuple[Map, ...]


def page(
    title: str,
    assumptions: "Mapping[str, Assumption]",
    pictures: Sequence[Picture],
    notes: Sequence[str],
    provenance: Mapping[str, Any],
) -> str:
    """The page.

    Args:
        title: at the top.
        assumptions: model -> how its q and k stand to Assumption 1.
        pictures: with the maps of each model.
        notes: what to know about both.
        provenance: command, versions and the like.
    """
    page = environment().get_template("attention.html")
    return in_reading_order(
        page.render(
            title=title,
            assumptions=assumptions,
            pictures=pictures,
            notes=notes,
            provenance=provenance,
            histogram=histogram,
            overlay=overlay,
            photo=photo,
        )
    )


def histogram(dimension: "Dimension", names: tuple[str, str]) -> Markup:
    """Both groups' densities over one axis, with the normal curve of each group's own mean and deviation."""
    edges = np.array(dimension.edges)
    width = np.diff(edges)
    across = Axis.over(edges.tolist(), pad=0.0)
    densities = [np.array(shape.counts) / (max(1, shape.n) * width) for shape in dimension.groups]
    grid = np.linspace(edges[0], edges[-1], 64)
    curves = [
        np.exp(-(((grid - shape.mean) / shape.sd) ** 2) / 2) / (shape.sd * np.sqrt(2 * np.pi))
        if shape.sd > 0
        else np.zeros_like(grid)  # a dimension that never varies has no normal curve
        for shape in dimension.groups
    ]
    top = max(float(x.max()) for x in (*densities, *curves))

    def y(density: float) -> float:
        return _BOTTOM - density / top * (_BOTTOM - _TOP)

    parts = [
        element("line", x1="0%", x2="100%", y1=_BOTTOM, y2=_BOTTOM, class_="grid"),
        *(element("text", f"{t:g}", x=across.at(t), y=_BOTTOM + 16, class_="tick") for t in across.ticks),
    ]
    for number, (density, curve) in enumerate(zip(densities, curves, strict=True)):
        bars = [
            element(
                "rect",
                x=across.at(edges[i]),
                width=f"{across.fraction(edges[i + 1]) - across.fraction(edges[i]):.3f}%",
                y=y(value),
                height=_BOTTOM - y(value),
            )
            for i, value in enumerate(density.tolist())
            if value > 0
        ]
        lines = [
            element("line", x1=across.at(a), x2=across.at(b), y1=y(c), y2=y(d))
            for a, b, c, d in zip(grid[:-1], grid[1:], curve[:-1].tolist(), curve[1:].tolist(), strict=True)
        ]
        parts.append(element("g", *bars, class_=f"bars{number}"))
        parts.append(element("g", *lines, class_=f"normal{number}"))
    for number, name in enumerate(names):
        x = "0%" if number == 0 else "100%"
        anchor = "start" if number == 0 else "end"
        parts.append(element("text", name, x=x, y=_BOTTOM + 34, text_anchor=anchor, class_=f"name{number}"))
    what = f"{dimension.side}, head {dimension.head}, dimension {dimension.index}"
    return drawing(f"{what} by group", parts, height=_HEIGHT, class_="histogram")


def photo(image: Image.Image) -> str:
    """A picture as a data: address, no larger than it is shown."""
    small = image.convert("RGB")
    small.thumbnail((_LARGEST, _LARGEST))
    held = BytesIO()
    small.save(held, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(held.getvalue()).decode()


def overlay(image: Image.Image, found: Map) -> Markup:
    """The picture under its map: the darker a patch, the less of the first token's attention is on it."""
    rows, columns = found.patches.shape
    high = float(found.patches.max()) or 1.0
    veil = [
        element(
            "rect",
            element("title", f"{100 * share:.1f} %"),
            x=f"{100 * column / columns:.4f}%",
            y=f"{100 * row / rows:.4f}%",
            width=f"{100 / columns:.4f}%",
            height=f"{100 / rows:.4f}%",
            fill="#000",
            fill_opacity=0.85 * (1 - share / high),
        )
        for row, line in enumerate(found.patches.tolist())
        for column, share in enumerate(line)
    ]
    inside = [
        element("image", href=photo(image), x="0", y="0", width="100%", height="100%", preserveAspectRatio="none"),
        *veil,
    ]
    return drawing(f"What {found.model} looks at", inside, height=160, class_="map", width=160)
