"""Edits of heads by gap and accuracy: the front of those that no other beats, and its table."""

from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup

from fairhead.report.frontier import Frontier
from fairhead.report.sections.plain_tables import PlainTables


@dataclass(frozen=True, kw_only=True)
class EditFront(PlainTables):
    """A picture of edits above their table."""

    kind: ClassVar[str] = "edit_front"

    frontier: Frontier

    def draw(self) -> Markup:
        """The picture, and the table below it."""
        caption = (
            "Edits that no other beat on the choosing half, by their figures on the reporting half. Bars: 95 % "
            "intervals of the change from the model as it is. Filled: no other is better in both here, too."
        )
        figure = Markup('<figure class="block">{}<figcaption class="note">{}</figcaption></figure>')
        return figure.format(self.frontier.draw(), caption) + super().draw()
