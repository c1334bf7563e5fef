"""Heads on the page: the map with its largest heads, and the ablation of the selected ones among its controls."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from fairhead.report import wording
from fairhead.report.controls import control_plot
from fairhead.report.heatmap import colour_bar, heatmap, ranked
from fairhead.report.wording import Scale, head_name, metric_name, p_value, scale_in_unit, scale_of


class HeadRow(NamedTuple):
    """A head in the list beside the map."""

    name: str
    value: str
    interval: str
    p: str
    selected: bool

    def tooltip(self) -> str:
        """The row in one line."""
        p = f"adjusted p {self.p if self.p.startswith('<') else '= ' + self.p}" if self.p else ""
        interval = self.interval and f"interval {self.interval}"
        words = (f"{self.name}: {self.value}", interval, p, "selected" if self.selected else "")
        return ", ".join(word for word in words if word)


@dataclass(frozen=True)
class HeadmapView:
    """The map of layers × heads with its legend and its largest heads."""

    drawn: Markup
    bar: Markup | None
    top: tuple[HeadRow, ...]
    subject: str
    n_undefined: int
    n_selected: int
    has_interval: bool
    has_p: bool


def headmap_view(section: Mapping[str, Any]) -> HeadmapView:
    """Return the drawn map, its legend and the heads worth naming."""
    values = section["values"]
    selected = {(layer, head) for layer, head in section["selected"]}
    defined = [v for row in values for v in row if v is not None]
    rows = [
        [_head_row(section, layer, head, selected) for head in range(len(values[0]))] for layer in range(len(values))
    ]
    tooltips = [[row.tooltip() for row in layer] for layer in rows]
    scale = scale_in_unit(section["unit"], max(map(abs, defined), default=0.0))
    measure = f"{section['measure']}, in {scale.unit}" if scale.unit else section["measure"]
    shape = f"{_several(len(values), 'layer')} × {_several(len(values[0]), 'head')}"
    n_undefined = sum(v is None for row in values for v in row)
    parts = (
        shape,
        f"{len(selected) or 'none'} selected",
        f"{wording.count(n_undefined)} undefined" if n_undefined else "",
    )
    return HeadmapView(
        drawn=heatmap(values, tooltips, selected, f"{measure}: {shape}", scale.factor),
        bar=colour_bar(min(defined), max(defined), scale.factor) if defined else None,
        top=tuple(rows[layer][head] for layer, head in ranked(values, selected)),
        subject=f"{measure}: {', '.join(part for part in parts if part)}",
        n_undefined=n_undefined,
        n_selected=len(selected),
        has_interval=section.get("low") is not None and section.get("high") is not None,
        has_p=section.get("p_adjusted") is not None,
    )


def _several(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _head_row(section: Mapping[str, Any], layer: int, head: int, selected: set[tuple[int, int]]) -> HeadRow:
    grids = (section.get(key) for key in ("values", "low", "high", "p_adjusted"))
    value, low, high, p = (None if grid is None else grid[layer][head] for grid in grids)
    chosen = (layer, head) in selected
    if value is None:
        return HeadRow(head_name(layer, head), "undefined", "", "", chosen)
    scale = scale_in_unit(section["unit"], value, low, high)
    return HeadRow(head_name(layer, head), scale.write(value), scale.interval(low, high), p_value(p), chosen)


class Fact(NamedTuple):
    """A figure worth large type, with what it is and what goes with it."""

    name: str
    figure: str
    note: str


@dataclass(frozen=True)
class AblationView:
    """What ablating the selected heads did, in figures and among the controls."""

    heads: tuple[str, ...]
    facts: tuple[Fact, ...]
    drawn: Markup | None
    sentence: str


def ablation_view(section: Mapping[str, Any]) -> AblationView:
    """Return the effect, its place among the controls, and the side effect on accuracy."""
    name, effect, controls = metric_name(section["metric"]), section["effect"], section["controls"]
    change = scale_of(section["metric"], effect, section["low"], section["high"], difference=True)
    heads = tuple(head_name(layer, head) for layer, head in sorted(section["selected"]))
    if not controls:
        sentence = "No control sets were ablated, so there is nothing to compare the effect with."
        return AblationView(heads, _facts(section, name, change), None, sentence)
    beyond = sum(c <= effect for c in controls) if effect < 0 else sum(c >= effect for c in controls)
    sets = (
        f"all {wording.count(len(controls))} possible"
        if section["exhaustive"]
        else f"{wording.count(len(controls))} random"
    )
    verb = "lowered" if effect < 0 else "raised"
    sentence = (
        f"Of {sets} control sets of heads, {wording.count(beyond) if beyond else 'none'} {verb} the figure as much."
    )
    title = f"{name}: effect of ablating the selected heads among control sets. {sentence}"
    drawn = control_plot(effect, section["low"], section["high"], controls, change, title)
    return AblationView(heads, _facts(section, name, change), drawn, sentence)


def _facts(section: Mapping[str, Any], name: str, change: Scale) -> tuple[Fact, ...]:
    absolute = Scale(change.factor, change.digits, change.unit and "%")
    bare = Scale(change.factor, change.digits)
    facts = [
        Fact(name, f"{bare.write(section['before'])} → {absolute.write(section['after'])}", "before and after"),
        _effect("Effect", section["effect"], section["low"], section["high"], change),
    ]
    if section["p"] is not None:
        facts.append(Fact("p", p_value(section["p"]), "paired test of no effect"))
    if section["percentile"] is not None:
        facts.append(Fact("Percentile", Scale(100, 1, "%").write(section["percentile"]), "among the controls"))
    if section.get("p_controls") is not None:
        facts.append(Fact("p against controls", p_value(section["p_controls"]), "of random heads doing as much"))
    accuracy = section.get("accuracy_effect")
    if accuracy is not None:
        value, low, high = accuracy["value"], accuracy["low"], accuracy["high"]
        scale = scale_of("accuracy", value, low, high, difference=True)
        facts.append(_effect("Effect on accuracy", value, low, high, scale))
    return tuple(facts)


def _effect(name: str, value: float, low: float | None, high: float | None, scale: Scale) -> Fact:
    interval = scale.interval(low, high, signed=True)
    return Fact(name, scale.write(value, signed=True), interval and f"interval {interval}")
