"""From checked figures to what the templates print: words, drawn cells and rows. No layout here, no figures there."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from fairhead.report import wording
from fairhead.report.controls import control_plot
from fairhead.report.forest import Forest, Mark, forest
from fairhead.report.heatmap import heatmap, legend, ranked
from fairhead.report.svg import Axis, element
from fairhead.report.wording import METRICS, Scale, head_name, is_share, metric_name, p_value, scale_in_unit, scale_of

Figure = Mapping[str, Any]  # an estimate or a difference, as in the JSON form of an audit or a comparison


class Undefined(NamedTuple):
    """A figure that has no value, and why."""

    name: str
    reason: str


class Row(NamedTuple):
    """A line of a forest: its drawn cell is in the `Forest` of the panel; cells are (heading, text) in column order."""

    name: str
    note: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Panel:
    """A forest whose figures share an axis."""

    caption: str
    columns: tuple[str, ...]
    forest: Forest
    rows: tuple[Row, ...]


class Rate(NamedTuple):
    """One group's rate: figure, interval and a small drawing of both."""

    value: str
    interval: str
    drawn: Markup


@dataclass(frozen=True)
class GroupTable:
    """The figures of each group of one column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, str, tuple[Rate | None, ...]], ...]  # group, n, rates
    undefined: tuple[Undefined, ...]


@dataclass(frozen=True)
class Block:
    """Everything about one group column (or about no group: overall figures)."""

    heading: str
    panels: tuple[Panel, ...]
    undefined: tuple[Undefined, ...]
    table: GroupTable | None


def level(provenance: Mapping[str, Any]) -> str:
    """Return the level of the intervals in words: as the provenance says, or 95 %."""
    share = provenance.get("level", 0.95)
    return f"{float(share) * 100:g}{wording.THIN_SPACE}%"


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _by(group_by: str | None) -> str:
    return "Overall" if group_by is None else f"By {group_by}"


def _figure_name(figure: Figure) -> str:
    by = figure["group_by"]
    return metric_name(figure["metric"]) + ("" if by is None else f", by {by}")


def _undefined(figures: Iterable[Figure]) -> tuple[Undefined, ...]:
    return tuple(Undefined(_figure_name(f), f["undefined"]) for f in figures if f["value"] is None)


# ---------------------------------------------------------------------------------------------------------------- audit


def audit_blocks(audit: Mapping[str, Any]) -> list[Block]:
    """Return the blocks of an audit: overall figures first, then one block for each group column."""
    estimates, rows = audit["estimates"], audit["by_group"]
    order = _distinct([*(e["group_by"] for e in estimates), *(r["group_by"] for r in rows)])
    blocks = []
    for group_by in sorted(order, key=lambda by: by is not None):  # stable: overall first, the rest as given
        chosen = [e for e in estimates if e["group_by"] == group_by]
        of_groups = [r for r in rows if r["group_by"] == group_by]
        table = _group_table(of_groups) if of_groups else None
        panels = _audit_panels([e for e in chosen if e["value"] is not None], level(audit["provenance"]))
        blocks.append(Block(_by(group_by), panels, _undefined(chosen), table))
    return blocks


def _audit_panels(estimates: Sequence[Figure], interval: str) -> tuple[Panel, ...]:
    # Figures share an axis when they share the ideal and the way they are written.
    keys = _distinct((e["ideal"], is_share(e["metric"])) for e in estimates)
    keys.sort(key=lambda key: (key[0] is None, key[0] or 0.0, not key[1]))
    columns = ("Value", f"{interval} interval", "Smallest detectable", "n")
    return tuple(
        _audit_panel([e for e in estimates if (e["ideal"], is_share(e["metric"])) == key], key[0], columns)
        for key in keys
    )


def _audit_panel(estimates: Sequence[Figure], ideal: float | None, columns: tuple[str, ...]) -> Panel:
    marks, rows = [], []
    for e in estimates:
        scale = scale_of(e["metric"], e["value"], e["low"], e["high"])
        value, interval = scale.write(e["value"]), scale.interval(e["low"], e["high"])
        mde = e.get("mde")
        cells = (value, interval, "" if mde is None else scale.write(mde), wording.count(e["n"]))
        name = metric_name(e["metric"])
        rows.append(Row(name, _attained_by(e), cells))
        words = f"{name}: {value}" + (f", interval {interval}" if interval else "")
        look = "clear" if ideal is not None and _stands_clear(e, ideal) else "vague"
        marks.append(Mark(e["value"], e["low"], e["high"], _detectable(e, ideal), look, words))
    scale = scale_of(estimates[0]["metric"], None)
    return Panel(_caption(ideal, scale), columns, forest(marks, scale, ideal), tuple(rows))


def _caption(ideal: float | None, scale: Scale) -> str:
    if ideal is None:
        return "Levels"
    kind = "Gaps" if ideal == 0 else "Levels" if scale.unit == "%" else "Ratios"
    return f"{kind} (ideal {Scale(scale.factor, 0, scale.unit).write(ideal)})"


def _attained_by(estimate: Figure) -> str:
    groups = estimate.get("groups") or []
    short = estimate["metric"] if estimate["metric"] in METRICS and len(estimate["metric"]) <= 4 else ""
    return " · ".join(part for part in (short, " vs ".join(str(g) for g in groups[:2])) if part)


def _stands_clear(estimate: Figure, ideal: float) -> bool:
    """Say whether a figure differs from the ideal beyond chance.

    An interval of a largest-minus-smallest gap hardly ever reaches 0, even where there is no gap, so the gap must
    also exceed what a sample of this size can detect.
    """
    low, high, mde = estimate["low"], estimate["high"], estimate.get("mde")
    if low is None or high is None or low <= ideal <= high:
        return False
    return mde is None or abs(estimate["value"] - ideal) >= mde


def _detectable(estimate: Figure, ideal: float | None) -> tuple[float, ...]:
    mde = estimate.get("mde")
    if mde is None or ideal is None:
        return ()
    # One tick, on the side where the figure lies: gaps above 0, ratios below 1.
    return (ideal + mde if (estimate["value"], ideal) >= (ideal, 0.0) and ideal != 1 else ideal - mde,)


def _group_table(rows: Sequence[Mapping[str, Any]]) -> GroupTable:
    names = _distinct(name for row in rows for name in row["rates"])
    lines: dict[str, Axis] = {}
    for name in names:
        rates = [row["rates"][name] for row in rows if name in row["rates"]]
        lines[name] = Axis.over(x for r in rates for x in (r["value"], r["low"], r["high"]) if x is not None)
    undefined = tuple(
        Undefined(f"{row['group']}, {metric_name(name).lower()}", rate["undefined"])
        for row in rows
        for name, rate in row["rates"].items()
        if rate["value"] is None
    )
    table = tuple(
        (row["group"], wording.count(row["n"]), tuple(_rate(row["rates"].get(name), lines[name]) for name in names))
        for row in rows
    )
    return GroupTable(tuple(metric_name(name) for name in names), table, undefined)


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


# ----------------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class ComparisonView:
    """Paired differences, drawn and counted."""

    panels: tuple[Panel, ...]
    undefined: tuple[Undefined, ...]
    outcomes: Mapping[str, int]


def comparison_view(comparison: Mapping[str, Any], a_name: str, b_name: str) -> ComparisonView:
    """Return the differences b − a with the direction that is better for each."""
    differences = comparison["differences"]
    defined = [d for d in differences if d["value"] is not None]
    interval = level(comparison["provenance"])
    columns = (a_name, b_name, "Difference", f"{interval} interval", "Better is", "p", "p adjusted", "Outcome")
    panels = tuple(
        _difference_panel([d for d in defined if is_share(d["metric"]) == share], columns)
        for share in _distinct(is_share(d["metric"]) for d in defined)
    )
    words = [outcome(d) for d in defined]
    return ComparisonView(panels, _undefined(differences), {word: words.count(word) for word in _distinct(words)})


def better_direction(difference: Figure) -> str:
    """Return which way is better: "lower", "higher", "nearer x" where the ideal lies between, or "" if unknown.

    Example:
        >>> better_direction({"a": 0.2, "b": 0.1, "ideal": 0.0}), better_direction({"a": 0.8, "b": 0.9, "ideal": 1.0})
        ('lower', 'higher')
    """
    a, b, ideal = difference["a"], difference["b"], difference.get("ideal")
    if ideal is None or a is None or b is None:
        return ""
    if min(a, b) >= ideal and not (a == b == ideal == 1):
        return "lower"
    return "higher" if max(a, b) <= ideal else f"nearer {ideal:g}"


def outcome(difference: Figure) -> str:
    """Return "better", "worse" or "changed" where the difference stands beyond chance, else "not clear".

    Example:
        >>> d = {"a": 0.2, "b": 0.1, "ideal": 0.0, "low": -0.15, "high": -0.05, "p": 0.001, "p_adjusted": 0.004}
        >>> outcome(d), outcome({**d, "p_adjusted": 0.2})
        ('better', 'not clear')
    """
    low, high = difference["low"], difference["high"]
    p = difference["p"] if difference["p_adjusted"] is None else difference["p_adjusted"]
    if (p is not None and p >= 0.05) or low is None or high is None or low <= 0 <= high:
        return "not clear"
    if not better_direction(difference):
        return "changed"
    ideal = difference["ideal"]
    return "better" if abs(difference["b"] - ideal) < abs(difference["a"] - ideal) else "worse"


def _difference_panel(differences: Sequence[Figure], columns: tuple[str, ...]) -> Panel:
    looks = {"better": "better", "worse": "worse", "changed": "clear", "not clear": "vague"}
    marks, rows = [], []
    for d in differences:
        change = scale_of(d["metric"], d["value"], d["low"], d["high"], difference=True)
        absolute = Scale(change.factor, change.digits, "%" if change.unit else "")
        value, interval = change.number(d["value"], signed=True), change.interval(d["low"], d["high"], signed=True)
        a, b = ("" if x is None else absolute.write(x) for x in (d["a"], d["b"]))
        word = outcome(d)
        cells = (a, b, value, interval, better_direction(d), p_value(d["p"]), p_value(d["p_adjusted"]), word)
        by = d["group_by"]
        rows.append(Row(metric_name(d["metric"]), "overall" if by is None else f"by {by}", cells))
        mde = d.get("mde")
        ticks = () if mde is None else (-mde, mde)
        words = f"{_figure_name(d)}: {value} ({word})"
        marks.append(Mark(d["value"], d["low"], d["high"], ticks, looks[word], words))
    scale = scale_of(differences[0]["metric"], None, difference=True)
    caption = "Differences in percentage points" if scale.unit else "Differences of plain numbers"
    return Panel(caption, columns, forest(marks, scale, 0.0), tuple(rows))


# ---------------------------------------------------------------------------------------------------- heads and ablation


class HeadRow(NamedTuple):
    """A head in the list beside the map."""

    name: str
    value: str
    interval: str
    p: str
    selected: bool


@dataclass(frozen=True)
class HeadmapView:
    """The map of layers × heads with its legend and its largest heads."""

    drawn: Markup
    legend: Sequence[tuple[str, str]]
    top: tuple[HeadRow, ...]
    shape: str
    n_undefined: int
    n_selected: int
    has_interval: bool
    has_p: bool


def headmap_view(section: Mapping[str, Any]) -> HeadmapView:
    """Return the drawn map, its legend and the heads worth naming."""
    values = section["values"]
    selected = {(layer, head) for layer, head in section["selected"]}
    defined = [v for row in values for v in row if v is not None]
    largest = max((abs(v) for v in defined), default=0.0)
    lines = [
        [_head_row(section, layer, head, selected) for head in range(len(row))] for layer, row in enumerate(values)
    ]
    tooltips = [[_tooltip(row) for row in layer] for layer in lines]
    shape = f"{len(values)} layers × {len(values[0])} heads"
    scale = scale_in_unit(section["unit"], largest)
    return HeadmapView(
        drawn=heatmap(values, tooltips, selected, f"{section['measure']} of each head, {shape}", scale.factor),
        legend=legend(largest, any(v < 0 for v in defined), scale) if defined else [],
        top=tuple(lines[layer][head] for layer, head in ranked(values, selected)),
        shape=shape,
        n_undefined=sum(v is None for row in values for v in row),
        n_selected=len(selected),
        has_interval=section.get("low") is not None and section.get("high") is not None,
        has_p=section.get("p_adjusted") is not None,
    )


def _head_row(section: Mapping[str, Any], layer: int, head: int, selected: set[tuple[int, int]]) -> HeadRow:
    value, low, high, p = (
        None if section.get(key) is None else section[key][layer][head]
        for key in ("values", "low", "high", "p_adjusted")
    )
    chosen = (layer, head) in selected
    if value is None:
        return HeadRow(head_name(layer, head), "undefined", "", "", chosen)
    scale = scale_in_unit(section["unit"], value, low, high)
    return HeadRow(head_name(layer, head), scale.write(value), scale.interval(low, high), p_value(p), chosen)


def _tooltip(row: HeadRow) -> str:
    p = f"adjusted p {row.p if row.p.startswith('<') else '= ' + row.p}" if row.p else ""
    words = (
        f"{row.name}: {row.value}",
        row.interval and f"interval {row.interval}",
        p,
        "selected" if row.selected else "",
    )
    return ", ".join(word for word in words if word)


@dataclass(frozen=True)
class AblationView:
    """What ablating the selected heads did, in figures and among the controls."""

    heads: tuple[str, ...]
    facts: tuple[tuple[str, str, str], ...]  # name, figure, what it means
    drawn: Markup | None
    sentence: str


def ablation_view(section: Mapping[str, Any]) -> AblationView:
    """Return the effect, its place among the controls, and the side effect on accuracy."""
    metric, effect, controls = section["metric"], section["effect"], section["controls"]
    change = scale_of(metric, effect, section["low"], section["high"], difference=True)
    absolute = Scale(change.factor, change.digits, "%" if change.unit else "")
    interval = change.interval(section["low"], section["high"], signed=True)
    name = metric_name(metric)
    facts = [
        (
            name,
            f"{absolute.write(section['before'])} → {absolute.write(section['after'])}",
            "before and after ablation",
        ),
        ("Effect", change.write(effect, signed=True), interval and f"interval {interval}"),
    ]
    if section["p"] is not None:
        facts.append(("p", p_value(section["p"]), "of the effect"))
    if section["percentile"] is not None:
        facts.append(("Percentile", f"{section['percentile']:.3g}", "of the effect among the control sets"))
    accuracy = section.get("accuracy_effect")
    if accuracy:
        low, high = accuracy.get("low"), accuracy.get("high")
        scale = scale_of("accuracy", accuracy["value"], low, high, difference=True)
        between = scale.interval(low, high, signed=True)
        facts.append(("Accuracy", scale.write(accuracy["value"], signed=True), between and f"interval {between}"))
    heads = tuple(head_name(layer, head) for layer, head in sorted(section["selected"]))
    if not controls:
        return AblationView(
            heads, tuple(facts), None, "No control sets were ablated, so there is nothing to compare with."
        )
    beyond = sum(c <= effect for c in controls) if effect < 0 else sum(c >= effect for c in controls)
    sets = (
        f"all {wording.count(len(controls))} possible"
        if section["exhaustive"]
        else f"{wording.count(len(controls))} random"
    )
    verb = "lowered" if effect < 0 else "raised"
    sentence = f"Of {sets} head sets used as controls, {wording.count(beyond)} {verb} it at least as much."
    title = f"Effect on {name} of the selected heads among control sets. {sentence}"
    drawn = control_plot(effect, section["low"], section["high"], controls, change, title)
    return AblationView(heads, tuple(facts), drawn, sentence)
