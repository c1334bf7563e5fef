"""Pictures, and where in them the first token of each model looks."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Annotated, ClassVar

from markupsafe import Markup

from fairhead.report.form import IS_GRID, PictureAddress
from fairhead.report.markup import fill
from fairhead.report.sections import Section

if TYPE_CHECKING:
    from PIL.Image import Image

_LARGEST = 224  # pixels of a picture in the page


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


def picture_address(image: "Image", largest: int = _LARGEST) -> str:
    """A picture as a data: address, no larger than it is shown."""
    small = image.convert("RGB")
    small.thumbnail((largest, largest))
    held = BytesIO()
    small.save(held, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(held.getvalue()).decode()
