"""Plain sections: words alone, tables of text, curves of figures, and cards of clusters."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from markupsafe import Markup
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fairhead.report.form import PictureAddress
from fairhead.report.markup import Cell, Mark, fill, forest, part
from fairhead.report.sections import Section
from fairhead.report.wording import Scale, count, metric_name, scale_of

_PERCENT = Scale(100, 1, "%")
_BAR = "\\|"  # within a cell of Markdown


@dataclass(frozen=True, kw_only=True)
class Text(Section):
    """A title and its text."""

    kind: ClassVar[str] = "text"
    has_figures: ClassVar[bool] = False

    text: str = field()  # needed here

    def draw(self) -> Markup:
        """Nothing: the page draws the title and the text of every section."""
        return Markup()


@dataclass(frozen=True, kw_only=True)
class PlainTable:
    """A table whose first column names its rows; a row of one cell is the heading of those below it."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False  # whether its cells hold sentences rather than figures

    def show(self, console: Console) -> None:
        """The table in a terminal."""
        if self.caption:
            console.print(escape(self.caption), style="bold", highlight=False)
        shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for i, name in enumerate(self.columns):
            right = "right" if i and not self.words else "left"
            shown.add_column(escape(name), justify=right, overflow="fold", no_wrap=name == "n")  # type: ignore[arg-type]
        for row in self.rows:
            if len(row) == 1:
                shown.add_section()
                shown.add_row(f"[bold]{escape(row[0])}[/]")
            else:
                shown.add_row(*map(escape, row))
        console.print(shown)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], figures: Collection[int] = ()) -> str:
    """A table in Markdown; columns of `figures` are set to the right, and bars within a cell do not end it."""
    lines = [head, ["--:" if i in figures else "---" for i in range(len(head))], *rows]
    return "\n".join(f"| {' | '.join(text.replace('|', _BAR) for text in line)} |" for line in lines)


@dataclass(frozen=True, kw_only=True)
class PlainTables(Section):
    """Tables of text."""

    kind: ClassVar[str] = "tables"
    has_figures: ClassVar[bool] = False

    tables: Sequence[PlainTable]

    def draw(self) -> Markup:
        """One below the other."""
        return Markup().join(part("plain_table", table) for table in self.tables)

    def show(self, console: Console) -> None:
        """One below the other."""
        for table in self.tables:
            table.show(console)


@dataclass(frozen=True, kw_only=True)
class ClusterCard:
    """One cluster; the pictures, or the posts, are those nearest to its centre."""

    name: str
    n: int
    share: float  # of all rows
    label_rates: str  # the share of each class, in words
    mostly: Sequence[str] = ()  # of named group columns, the most frequent group here
    words: Sequence[str] = ()
    pictures: Sequence[PictureAddress] = ()
    posts: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class ClusterCards(Section):
    """A card for each cluster."""

    kind: ClassVar[str] = "clusters"
    has_figures: ClassVar[bool] = False

    clusters: Sequence[ClusterCard]

    def draw(self) -> Markup:
        """The cards."""
        return fill("cluster_cards.html", clusters=self.clusters, count=count, percent=_PERCENT.write)

    def show(self, console: Console) -> None:
        """A table with one row a cluster; columns that would be empty are left out."""
        columns = {
            "cluster": [one.name for one in self.clusters],
            "rows": [f"{one.n:,}" for one in self.clusters],
            "share": [f"{100 * one.share:.1f} %" for one in self.clusters],
            "classes": [one.label_rates for one in self.clusters],
            "named groups": ["; ".join(one.mostly) for one in self.clusters],
            "words": [", ".join(one.words) for one in self.clusters],
        }
        kept = {name: cells for name, cells in columns.items() if any(cells)}
        rows = list(zip(*kept.values(), strict=True))
        PlainTable(caption="", columns=list(kept), rows=rows, words=True).show(console)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step and the figure there; None where undefined."""

    name: str
    value: float | None


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of one metric."""

    metric: str
    points: Sequence[Step]


@dataclass(frozen=True, kw_only=True)
class Curve(Section):
    """One panel a metric, one row a step."""

    kind: ClassVar[str] = "curve"

    panels: Sequence[Steps]

    def draw(self) -> Markup:
        """The steps of each metric on one axis; a step without a figure is left out."""
        panels = []
        for panel in self.panels:
            steps = [(step.name, step.value) for step in panel.points if step.value is not None]
            if steps:
                name = metric_name(panel.metric)
                scale = scale_of(panel.metric, max((value for _, value in steps), key=abs))
                marks = []
                for step, value in steps:
                    written = scale.write(value)
                    words, cells = f"{step}: {name} {written}", (Cell(written),)
                    marks.append(Mark(value, None, None, (), "level", words, step, cells=cells))
                panels.append(forest(marks, scale, None, caption=name))
        if not panels:
            return Markup('<p class="muted">No figure of the curve is defined.</p>')
        return part("forest_table", ("Value",), panels)
