"""An audit on the page: gaps and levels of each group column as a forest, then the rates of each group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from fairhead.report import wording
from fairhead.report.forest import Mark, forest
from fairhead.report.panels import (
    Cell,
    Figure,
    Panel,
    Row,
    Undefined,
    by,
    distinct,
    level,
    undefined,
    undefined_figures,
)
from fairhead.report.svg import Axis, element
from fairhead.report.wording import is_share, metric_name, scale_of


class Rate(NamedTuple):
    """One group's rate: figure, interval and a small drawing of both."""

    value: str
    interval: str
    drawn: Markup


@dataclass(frozen=True)
class GroupTable:
    """The rates of each group of one column; None where a group does not have a rate that others have."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, str, tuple[Rate | None, ...]], ...]  # group, n, rates
    undefined: tuple[Undefined, ...]


@dataclass(frozen=True)
class Block:
    """Everything about one group column, or about no group: overall figures."""

    heading: str
    columns: tuple[str, ...]
    panels: tuple[Panel, ...]
    undefined: tuple[Undefined, ...]
    table: GroupTable | None


def audit_view(section: Mapping[str, Any]) -> list[Block]:
    """Return the blocks of an audit: overall figures first, then one block for each group column."""
    audit = section["audit"]
    columns = (f"Value and {level(audit['provenance'])} interval", "Smallest detectable", "n")
    order = distinct([*(e["group_by"] for e in audit["estimates"]), *(r["group_by"] for r in audit["by_group"])])
    blocks = []
    for group_by in sorted(
        order, key=lambda group_by: group_by is not None
    ):  # stable: overall first, the rest as given
        estimates = [e for e in audit["estimates"] if e["group_by"] == group_by]
        groups = [row for row in audit["by_group"] if row["group_by"] == group_by]
        table = _group_table(groups) if groups else None
        heading = by(group_by).capitalize() if group_by is None else f"By {group_by}"
        blocks.append(Block(heading, columns, _panels(estimates), undefined_figures(estimates), table))
    return blocks


def _panels(estimates: Sequence[Figure]) -> tuple[Panel, ...]:
    """Sort the figures into panels: they share an axis when they share the ideal and the way they are written."""
    kinds: dict[tuple[float | None, bool], list[Figure]] = {}
    for e in estimates:
        if e["value"] is not None:
            kinds.setdefault((e["ideal"], is_share(e["metric"])), []).append(e)
    order = sorted(kinds, key=lambda kind: (kind[0] is None, kind[0] or 0.0, not kind[1]))
    return tuple(_panel(kinds[kind], *kind) for kind in order)


def _panel(estimates: Sequence[Figure], ideal: float | None, share: bool) -> Panel:
    marks, rows = [], []
    for e in estimates:
        scale = scale_of(e["metric"], e["value"], e["low"], e["high"])
        value, interval, mde = scale.write(e["value"]), scale.interval(e["low"], e["high"]), e.get("mde")
        cells = (Cell(value, interval), Cell("" if mde is None else scale.write(mde)), Cell(wording.count(e["n"])))
        name = metric_name(e["metric"])
        rows.append(Row(name, _note(e, name), cells))
        words = f"{name}: {value}" + (f", interval {interval}" if interval else "")
        look = "clear" if _leaves_out(ideal, e) else "vague"
        marks.append(Mark(e["value"], e["low"], e["high"], _detectable(e, ideal), look, words))
    if ideal is None:
        caption = "Levels"
    else:
        caption = (
            f"{'Gaps' if ideal == 0 else 'Levels' if share else 'Ratios'}, ideal {ideal * (100 if share else 1):g}"
        )
    # A level has no ideal to be seen against, so it is seen against the whole of 0 to 100 %.
    hold = (0.0, 1.0) if ideal is None and share else ()
    return Panel(caption, forest(marks, scale_of(estimates[0]["metric"], None), ideal, hold), tuple(rows))


def _note(estimate: Figure, name: str) -> str:
    """The metric's short name where the row shows its long one, and the groups that make the figure."""
    short = "" if estimate["metric"].lower().replace("_", " ") in name.lower().replace("-", " ") else estimate["metric"]
    return " · ".join(part for part in (short, " vs ".join(map(str, (estimate.get("groups") or [])[:2]))) if part)


def _leaves_out(ideal: float | None, estimate: Figure) -> bool:
    low, high = estimate["low"], estimate["high"]
    return None not in (ideal, low, high) and not low <= ideal <= high


def _detectable(estimate: Figure, ideal: float | None) -> tuple[float, ...]:
    """One tick, on the side of the ideal where the figure lies."""
    mde = estimate.get("mde")
    if mde is None or ideal is None:
        return ()
    # On the ideal itself the side follows from the scale: gaps grow from 0, ratios fall from 1.
    below = estimate["value"] < ideal or (estimate["value"] == ideal and ideal > 0)
    return (ideal - mde if below else ideal + mde,)


def _group_table(rows: Sequence[Mapping[str, Any]]) -> GroupTable:
    names = distinct(name for row in rows for name in row["rates"])
    lines: dict[str, Axis] = {}
    for name in names:
        rates = [row["rates"][name] for row in rows if name in row["rates"]]
        lines[name] = Axis.over(x for r in rates for x in (r["value"], r["low"], r["high"]) if x is not None)
    return GroupTable(
        tuple(metric_name(name) for name in names),
        tuple(
            (row["group"], wording.count(row["n"]), tuple(_rate(row["rates"].get(name), lines[name]) for name in names))
            for row in rows
        ),
        undefined((row["group"], metric_name(name), rate) for row in rows for name, rate in row["rates"].items()),
    )


def _rate(rate: Figure | None, axis: Axis) -> Rate | None:
    if rate is None:
        return None
    value, low, high = rate["value"], rate["low"], rate["high"]
    if value is None:
        return Rate("undefined", "", Markup(""))
    scale = scale_of(rate["metric"], value, low, high)
    line = [] if low is None or high is None else [element("line", x1=axis.at(low), x2=axis.at(high), y1=5, y2=5)]
    dot = element("circle", cx=axis.at(value), cy=5, r=3)
    # The figures stand beside it in the cell, so a screen reader skips the drawing.
    drawn = element("svg", *line, dot, class_="mini", width="100%", height=10, aria_hidden="true")
    return Rate(scale.write(value), scale.interval(low, high), drawn)
