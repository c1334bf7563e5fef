"""Clusters of pictures or texts: a card each, with its size, its classes, its words and its most typical rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from markupsafe import Markup

from fairhead.report.form import PictureAddress
from fairhead.report.markup import fill
from fairhead.report.sections import Section
from fairhead.report.wording import Scale, count

if TYPE_CHECKING:
    from rich.console import Console

_PERCENT = Scale(100, 1, "%")


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

    def show(self, console: "Console") -> None:
        """A table with one row a cluster."""
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        shown = Table(box=box.SIMPLE_HEAD)
        for name, justify in (("cluster", "left"), ("rows", "right"), ("share", "right"), ("classes", "left")):
            shown.add_column(name, justify=justify)  # type: ignore[arg-type]
        rows = [(one.name, f"{one.n:,}", f"{100 * one.share:.1f} %", one.label_rates) for one in self.clusters]
        for name, cells in (
            ("named groups", ["; ".join(one.mostly) for one in self.clusters]),
            ("words", [", ".join(one.words) for one in self.clusters]),
        ):
            if any(cells):
                shown.add_column(name, overflow="fold")
                rows = [(*row, cell) for row, cell in zip(rows, cells, strict=True)]  # type: ignore[misc]
        for row in rows:
            shown.add_row(*map(escape, row))
        console.print(shown)
