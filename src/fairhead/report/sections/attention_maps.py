"""Pictures, and where in them the first token of each model looks."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, ClassVar

from markupsafe import Markup

from fairhead.report.form import Grid, PictureAddress
from fairhead.report.markup import fill
from fairhead.report.sections import Section
from fairhead.report.svg import drawing, element

if TYPE_CHECKING:
    from PIL.Image import Image

_LARGEST = 224  # pixels of a picture in the page


@dataclass(frozen=True, kw_only=True)
class AttentionMap:
    """What the first token of one model looks at in one picture.

    Attributes:
        model: its name.
        patches: share of attention on each patch, [rows][columns].
        elsewhere: share on tokens that are no patches (the first token itself).
    """

    model: str
    patches: Grid
    elsewhere: float

    def draw(self, address: str) -> Markup:
        """The picture under its map: the darker a patch, the less of the first token's attention is on it."""
        rows, columns = len(self.patches), len(self.patches[0])
        high = max(share or 0.0 for line in self.patches for share in line) or 1.0
        veil = [
            element(
                "rect",
                element("title", f"{100 * (share or 0.0):.1f} %"),
                x=f"{100 * column / columns:.4f}%",
                y=f"{100 * row / rows:.4f}%",
                width=f"{100 / columns:.4f}%",
                height=f"{100 / rows:.4f}%",
                fill="#000",
                fill_opacity=0.85 * (1 - (share or 0.0) / high),
            )
            for row, line in enumerate(self.patches)
            for column, share in enumerate(line)
        ]
        whole = {"x": "0", "y": "0", "width": "100%", "height": "100%", "preserveAspectRatio": "none"}
        inside = [element("image", href=address, **whole), *veil]
        return drawing(f"What {self.model} looks at", inside, height=160, class_="map", width=160)


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


def picture_address(image: "Image", largest: int = _LARGEST) -> str:
    """A picture as a data: address, no larger than it is shown."""
    small = image.convert("RGB")
    small.thumbnail((largest, largest))
    held = BytesIO()
    small.save(held, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(held.getvalue()).decode()
