"""Several maps of heads, one shown at a time: the reader chooses. Without scripts; an old browser shows them all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar
from zlib import crc32

from markupsafe import Markup

from fairhead.errors import InputError
from fairhead.report.markup import fill
from fairhead.report.sections import Section

MOST = 16  # maps that style.css can switch between


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
