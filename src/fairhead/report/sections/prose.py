"""A section of words alone."""

from dataclasses import dataclass, field
from typing import ClassVar

from markupsafe import Markup

from fairhead.report.sections import Section


@dataclass(frozen=True, kw_only=True)
class Text(Section):
    """A title and its text."""

    kind: ClassVar[str] = "text"
    has_figures: ClassVar[bool] = False

    text: str = field()  # needed here

    def draw(self) -> Markup:
        """Nothing beyond what the page draws of every section."""
        return Markup()
