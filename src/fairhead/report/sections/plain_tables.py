"""Tables of text, such as figures that others have reported."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from markupsafe import Markup

from fairhead.report.markup import part
from fairhead.report.sections import Section

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class PlainTable:
    """A table whose first column names its rows."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False  # whether its cells hold sentences rather than figures


@dataclass(frozen=True, kw_only=True)
class PlainTables(Section):
    """Tables of text."""

    kind: ClassVar[str] = "tables"
    has_figures: ClassVar[bool] = False

    tables: Sequence[PlainTable]

    def draw(self) -> Markup:
        """One below the other."""
        return Markup().join(part("plain_table", table) for table in self.tables)

    def show(self, console: "Console") -> None:
        """One below the other."""
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        for table in self.tables:
            console.print(escape(table.caption), style="bold", highlight=False)
            shown = Table(box=box.SIMPLE_HEAD)
            for i, name in enumerate(table.columns):
                shown.add_column(escape(name), justify="right" if i else "left", overflow="fold")
            for row in table.rows:
                shown.add_row(*map(escape, row))
            console.print(shown)
