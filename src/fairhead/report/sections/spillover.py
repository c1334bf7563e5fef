"""The matrix of spill-over: how far each category moved, whether a run was trained on it or not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from markupsafe import Markup

from fairhead.errors import InputError
from fairhead.report.markup import fill
from fairhead.report.sections import Section
from fairhead.report.sections.changes import Change, written
from fairhead.report.wording import count
from fairhead.stats import OUTCOMES

_GLYPHS = {"better": "✓", "worse": "!", "changed": "↷"}
_LEANING = {"nearer": ("lean-better", "nearer to"), "further": ("lean-worse", "further from")}


@dataclass(frozen=True, kw_only=True)
class CategoryChange(Change):
    """A cell: whether the run was trained on this axis, and whether it moved "nearer" to even or "further" from it."""

    targeted: bool
    direction: str | None


@dataclass(frozen=True, kw_only=True)
class Category:
    """A row: a category of a benchmark, with a cell for each run."""

    benchmark: str
    category: str
    cells: Sequence[CategoryChange]


class _Drawn(NamedTuple):
    """A cell on the page."""

    text: str
    glyph: str
    look: str
    tip: str
    targeted: bool


@dataclass(frozen=True, kw_only=True)
class Spillover(Section):
    """The matrix: one row a category, one column a run."""

    kind: ClassVar[str] = "spillover"

    columns: Sequence[str]
    rows: Sequence[Category]

    def check(self, where: str) -> None:
        """Each row has one cell a column."""
        for i, row in enumerate(self.rows):
            if len(row.cells) != len(self.columns):
                found = f"{where}.rows[{i}] has {len(row.cells)} cells"
                raise InputError(f"{found}; expected one a column, {len(self.columns)}")

    def draw(self) -> Markup:
        """The matrix, and what each run adds up to."""
        runs = [[row.cells[i] for row in self.rows] for i in range(len(self.columns))]
        return fill(
            "spillover.html",
            section=self,
            cells=[[_drawn(row, cell) for cell in row.cells] for row in self.rows],
            any_targeted=any(cell.targeted for cells in runs for cell in cells),
            summaries=[_summary(name, cells) for name, cells in zip(self.columns, runs, strict=True)],
        )


def _drawn(row: Category, cell: CategoryChange) -> _Drawn:
    if cell.value is None:
        return _Drawn("–", "", "none", f"undefined: {cell.undefined}", cell.targeted)
    made, word = written(vars(cell)), cell.outcome
    leaning, where = _LEANING.get(cell.direction or "", ("", "as far as before from"))
    look = word if word in ("better", "worse") else "clear" if word == "changed" else leaning
    tip = (
        f"{row.benchmark}, {row.category}: {made.before} → {made.after}, {where} even; "
        f"{made.difference} ({made.interval}), n = {count(cell.n)}: {word}"
    )
    return _Drawn(made.difference, _GLYPHS.get(word, ""), look, tip, cell.targeted)


def _summary(name: str, cells: Sequence[CategoryChange]) -> str:
    parts: list[str] = []
    for targeted, words in ((True, "targeted"), (False, "untargeted")):
        chosen = [c for c in cells if c.targeted == targeted and c.value is not None]
        if chosen:
            outcomes = [c.outcome for c in chosen]
            told = ", ".join(f"{outcomes.count(w)} {w}" for w in OUTCOMES if w in outcomes)
            further = sum(c.direction == "further" for c in chosen)
            of = "of" if not parts else "Of"
            parts.append(f"{of} {len(chosen)} {words} categories {told}; {further} lie further from even than before")
    return f"{name}: {'. '.join(parts)}."
