"""Before and after on the page: paired changes as forests, and the matrix of categories that moved with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import expm1
from typing import Any, NamedTuple

from fairhead.report.contract import CHANGE_OUTCOMES as OUTCOMES
from fairhead.report.forest import Mark, forest
from fairhead.report.panels import Cell, Panel, Row, Undefined, level, undefined
from fairhead.report.wording import Scale, count, decimals, p_value

Figures = Mapping[str, Any]  # one change, as in a section of kind "changes" or "spillover"

_ROUNDING = 1e-9
_LOOKS = {"better": "better", "worse": "worse", "changed": "clear", "cannot be told apart": "vague"}


class WrittenChange(NamedTuple):
    """A change in words and figures; empty strings where something is undefined."""

    before: str
    after: str
    difference: str
    interval: str
    detectable: str


def written(change: Figures) -> WrittenChange:
    """Write a change (shares in percent, ratios in percent of the first) with the digits that its interval deserves.

    Example:
        >>> made = written({"unit": "share", "before": 0.6, "after": 0.55, "value": -0.05, "low": -0.08,
        ...                 "high": -0.02, "mde": 0.04})
        >>> made.after.replace("\u202f", " "), made.difference.replace("\u2212", "-"), made.detectable
        ('55.0 %', '-5.0', '4.0')
        >>> ratio = written({"unit": "ratio", "before": 20.0, "after": 22.0, "value": 0.0953, "low": 0.08,
        ...                  "high": 0.11, "mde": None})
        >>> ratio.difference.replace("\u202f", " "), ratio.interval.replace("\u202f", " ")
        ('+10.0 %', '+8.3 to +11.6 %')
        >>> written({"unit": "number", "before": 0.00556, "after": 0.00556, "value": 0.0, "low": 0.0, "high": 0.0,
        ...          "mde": None}).before
        '0.00556'
    """
    unit = change["unit"]
    moved, both = _difference_scale(change), _level_scale(change)
    value, low, high, mde = (_shown(change[key], unit) for key in ("value", "low", "high", "mde"))
    return WrittenChange(
        "" if change["before"] is None else both.write(change["before"]),
        "" if change["after"] is None else both.write(change["after"]),
        "" if value is None else moved.write(value, signed=True),
        moved.interval(low, high, signed=True),
        "" if mde is None else moved.write(mde),
    )


def _shown(value: float | None, unit: str) -> float | None:
    """Ratios come as logarithms and are shown as a part of the first figure."""
    return expm1(value) if value is not None and unit == "ratio" else value


def _difference_scale(change: Figures) -> Scale:
    unit = change["unit"]
    value, low, high = (_shown(change[key], unit) for key in ("value", "low", "high"))
    factor = 1.0 if unit == "number" else 100.0
    # An interval of rounding errors is none: it would ask for digits that say nothing.
    spread = None if low is None or high is None or high - low < _ROUNDING else (high - low) / 2 * factor
    digits = decimals(None if value is None else value * factor, spread=spread)
    return Scale(factor, digits, "%" if unit == "ratio" else "")


def _level_scale(change: Figures) -> Scale:
    if change["unit"] == "share":
        return Scale(100.0, max(1, min(2, _difference_scale(change).digits)), "%")
    # Where nothing moved, the difference has no digits to lend.
    if change["unit"] == "ratio" or not change["value"]:
        return Scale(1.0, decimals(change["before"], change["after"]))
    return _difference_scale(change)


@dataclass(frozen=True)
class ChangesView:
    """Changes, drawn and counted."""

    columns: tuple[str, ...]
    panels: tuple[Panel, ...]
    undefined: tuple[Undefined, ...]
    summary: str


def changes_view(section: Mapping[str, Any]) -> ChangesView:
    """Return the changes of a section, panel by panel; figures of a panel share an axis."""
    columns = (
        "Before → after",
        f"Change and {level({'level': section['level']})} interval",
        "Smallest detectable",
        "p and adjusted p",
        "Outcome",
    )
    panels = [(panel["caption"], panel["changes"]) for panel in section["panels"]]
    everything = [change for _, changes in panels for change in changes]
    words = [change["outcome"] for change in everything if change["value"] is not None]
    return ChangesView(
        columns,
        tuple(
            _panel(caption, [c for c in changes if c["value"] is not None])
            for caption, changes in panels
            if any(c["value"] is not None for c in changes)
        ),
        undefined((caption, change["name"], change) for caption, changes in panels for change in changes),
        ", ".join(f"{count(words.count(word))} {word}" for word in OUTCOMES if word in words),
    )


def _panel(caption: str, changes: Sequence[Figures]) -> Panel:
    marks, rows = [], []
    for change in changes:
        made, unit, word = written(change), change["unit"], change["outcome"]
        cells = (
            Cell(f"{made.before} → {made.after}"),
            Cell(made.difference, made.interval),
            Cell(made.detectable),
            Cell(p_value(change["p"]), p_value(change["p_adjusted"])),
            Cell(word, change.get("better") or "", _LOOKS[word]),
        )
        rows.append(Row(change["name"], change.get("note") or "", cells))
        value, low, high, mde = (_shown(change[key], unit) for key in ("value", "low", "high", "mde"))
        assert value is not None
        ticks = () if mde is None else (-mde, mde)
        marks.append(Mark(value, low, high, ticks, _LOOKS[word], f"{change['name']}: {made.difference}, {word}"))
    unit = changes[0]["unit"]
    drawn = forest(marks, Scale(1.0 if unit == "number" else 100.0, unit="%" if unit == "ratio" else ""), ideal=0.0)
    return Panel(caption, drawn, tuple(rows))


class MatrixCell(NamedTuple):
    """A cell of the matrix.

    Attributes:
        text: the change.
        glyph: "✓" nearer and "!" further from the ideal beyond chance, "·" neither.
        look: CSS class.
        tip: the whole of it in words.
        targeted: whether the run was trained on this axis.
    """

    text: str
    glyph: str
    look: str
    tip: str
    targeted: bool


class MatrixRow(NamedTuple):
    """A category of a benchmark; `benchmark` is empty where the row above has the same."""

    benchmark: str
    category: str
    cells: tuple[MatrixCell, ...]


@dataclass(frozen=True)
class SpilloverView:
    """The matrix and what it adds up to."""

    columns: tuple[str, ...]
    rows: tuple[MatrixRow, ...]
    any_targeted: bool
    summaries: tuple[str, ...]


def spillover_view(section: Mapping[str, Any]) -> SpilloverView:
    """Return the matrix: one row a category, one column a run."""
    rows, last = [], None
    for row in section["rows"]:
        cells = tuple(_cell(row, cell) for cell in row["cells"])
        rows.append(MatrixRow("" if row["benchmark"] == last else row["benchmark"], row["category"], cells))
        last = row["benchmark"]
    every = [cell for row in section["rows"] for cell in row["cells"]]
    return SpilloverView(
        tuple(section["columns"]),
        tuple(rows),
        any(cell["targeted"] for cell in every),
        tuple(
            _summary(name, [row["cells"][i] for row in section["rows"]]) for i, name in enumerate(section["columns"])
        ),
    )


_GLYPHS = {"better": "✓", "worse": "!", "changed": "↷"}


def _cell(row: Mapping[str, Any], cell: Figures) -> MatrixCell:
    if cell["value"] is None:
        return MatrixCell("–", "", "none", f"undefined: {cell['undefined']}", cell["targeted"])
    made, word = written(cell), cell["outcome"]
    leaning = {"nearer": "lean-better", "further": "lean-worse"}.get(cell["direction"] or "", "")
    look = word if word in ("better", "worse") else "clear" if word == "changed" else leaning
    where = {"nearer": "nearer to", "further": "further from"}.get(cell["direction"] or "", "as far as before from")
    tip = (
        f"{row['benchmark']}, {row['category']}: {made.before} → {made.after}, {where} even; "
        f"{made.difference} ({made.interval}), n = {count(cell['n'])}: {word}"
    )
    return MatrixCell(made.difference, _GLYPHS.get(word, ""), look, tip, cell["targeted"])


def _summary(name: str, cells: Sequence[Figures]) -> str:
    parts = []
    for targeted, words in ((True, "targeted"), (False, "untargeted")):
        chosen = [c for c in cells if c["targeted"] == targeted and c["value"] is not None]
        if not chosen:
            continue
        outcomes = [c["outcome"] for c in chosen]
        further = sum(c["direction"] == "further" for c in chosen)
        told = ", ".join(f"{outcomes.count(w)} {w}" for w in OUTCOMES if w in outcomes)
        parts.append(f"of {len(chosen)} {words} categories {told}; {further} lie further from even than before")
    return f"{name}: {'. '.join(p[0].upper() + p[1:] if i else p for i, p in enumerate(parts))}."
