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
    distinct,
    level,
    undefined,
    undefined_figures,
)
from fairhead.report.svg import Axis, element
from fairhead.report.wording import Scale, is_share, metric_name, scale_of


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
    """Everything about one group column, or about no group: overall figures.

    Attributes:
        heading: what the block is about.
        columns: headings of the figures' columns.
        panels: forests of the figures that have a value.
        undefined: the others.
        left_out: which groups were too small to enter some gap, in words.
        thin: which groups entered with few rows, in words.
        table: the rates of each group.
    """

    heading: str
    columns: tuple[str, ...]
    panels: tuple[Panel, ...]
    undefined: tuple[Undefined, ...]
    left_out: tuple[str, ...]
    thin: tuple[str, ...]
    table: GroupTable | None


def audit_view(section: Mapping[str, Any]) -> list[Block]:
    """Return the blocks of an audit: overall figures first, then one block for each group column."""
    audit = section["audit"]
    columns = (f"Value and {level(audit['provenance'])} interval", "Smallest detectable", "n")
    order = distinct([*(e["group_by"] for e in audit["estimates"]), *(r["group_by"] for r in audit["by_group"])])
    blocks = []
    for group_by in sorted(order, key=lambda name: name is not None):  # stable: overall first, the rest as given
        estimates = [e for e in audit["estimates"] if e["group_by"] == group_by]
        groups = [row for row in audit["by_group"] if row["group_by"] == group_by]
        blocks.append(
            Block(
                "Overall" if group_by is None else f"By {group_by}",
                columns,
                _panels(estimates),
                undefined_figures(estimates),
                _said(estimates, "excluded"),
                _said(estimates, "unstable"),
                _group_table(groups) if groups else None,
            )
        )
    return blocks


def _said(estimates: Sequence[Figure], key: str) -> tuple[str, ...]:
    """Collect the sentences that the details of defined figures hold under `key`."""
    details = [e.get("detail") or {} for e in estimates if e["value"] is not None]
    return tuple(distinct(str(words) for detail in details for words in _listed(detail.get(key))))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class _Kind(NamedTuple):
    """What decides which figures share an axis."""

    ideal: float | None  # None for levels: that accuracy is not perfect is no finding about evenness
    share: bool

    @classmethod
    def of(cls, estimate: Figure) -> "_Kind":
        share = is_share(estimate["metric"])
        level_of_something = estimate["group_by"] is None or (share and estimate["ideal"] == 1)
        return cls(None if level_of_something else estimate["ideal"], share)

    @property
    def caption(self) -> str:
        noun = "Levels" if self.ideal is None else "Gaps" if self.ideal == 0 else "Ratios"
        scale = "" if self.share or noun == "Ratios" else " on other scales"
        return noun + scale + ("" if self.ideal is None else f", ideal {self.ideal:g}")


def _panels(estimates: Sequence[Figure]) -> tuple[Panel, ...]:
    kinds: dict[_Kind, list[Figure]] = {}
    for e in estimates:
        if e["value"] is not None:
            kinds.setdefault(_Kind.of(e), []).append(e)
    order = sorted(kinds, key=lambda kind: (kind.ideal is None, kind.ideal or 0.0, not kind.share))
    return tuple(_panel(kinds[kind], kind) for kind in order)


def _panel(estimates: Sequence[Figure], kind: _Kind) -> Panel:
    marks, rows = [], []
    for e in estimates:
        scale = scale_of(e["metric"], e["value"], e["low"], e["high"])
        value, interval, mde = scale.write(e["value"]), scale.interval(e["low"], e["high"]), e.get("mde")
        cells = (Cell(value, interval), Cell("" if mde is None else scale.write(mde)), Cell(wording.count(e["n"])))
        name = metric_name(e["metric"])
        rows.append(Row(name, _note(e, name), cells))
        words = f"{name}: {value}" + (f", interval {interval}" if interval else "")
        marks.append(Mark(e["value"], e["low"], e["high"], _detectable(e, kind.ideal), _look(e, kind.ideal), words))
    # A level has no ideal to be seen against, so it is seen against the whole of 0 to 1.
    hold = (0.0, 1.0) if kind.ideal is None else ()
    scale = Scale(100.0, unit="%") if kind.share else Scale()
    return Panel(kind.caption, forest(marks, scale, kind.ideal, hold), tuple(rows))


def _note(estimate: Figure, name: str) -> str:
    """The metric's short name where the row shows a long one, the groups that make the figure, and their class."""
    metric = estimate["metric"]
    short = metric if len(metric) <= 3 and metric not in name else ""
    groups = " vs ".join(str(group) for group in _listed(estimate.get("groups"))[:2])
    label = (estimate.get("detail") or {}).get("class")
    return " · ".join(part for part in (short, groups, "" if label is None else f"class {label}") if part)


def _look(estimate: Figure, ideal: float | None) -> str:
    low, high = estimate["low"], estimate["high"]
    if ideal is None:
        return "level"
    return "vague" if low is None or high is None or low <= ideal <= high else "clear"


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


def definitions(sections: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the definition of each metric that the audits of a report use, by its full name."""
    audits = [section["audit"] for section in sections if section["kind"] == "audit"]
    audits += [s["comparison"][side] for s in sections if s["kind"] == "comparison" for side in ("a", "b")]
    found = ((e["metric"], (e.get("detail") or {}).get("definition")) for a in audits for e in a["estimates"])
    return {metric_name(metric): str(definition) for metric, definition in found if definition}
