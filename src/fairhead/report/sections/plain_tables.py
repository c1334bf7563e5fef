"""Tables of text, such as figures that others have reported."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup

from fairhead.report.markup import part
from fairhead.report.sections import Section


@dataclass(frozen=True, kw_only=True)
class PlainTable:
    """A table whose first column names its rows."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class PlainTables(Section):
    """Tables of text."""

    kind: ClassVar[str] = "tables"
    has_figures: ClassVar[bool] = False

    tables: Sequence[PlainTable]

    def draw(self) -> Markup:
        """One below the other."""
        return Markup().join(part("plain_table", table) for table in self.tables)
