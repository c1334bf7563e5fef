"""More about located heads: how the effect grows with each of them, and what each looks at."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fairhead.report.forest import Mark, forest
from fairhead.report.heads_view import Fact
from fairhead.report.panels import Cell, Panel, Row
from fairhead.report.wording import Scale, head_name, metric_name, scale_of


@dataclass(frozen=True)
class CurveView:
    """One panel a metric, one row a step."""

    columns: tuple[str, ...]
    panels: tuple[Panel, ...]


def curve_view(section: Mapping[str, Any]) -> CurveView:
    """Return the steps of each metric, drawn on one axis."""
    panels = []
    for panel in section["panels"]:
        points = [p for p in panel["points"] if p["value"] is not None]
        if not points:
            continue
        name = metric_name(panel["metric"])
        values = [p["value"] for p in points]
        scale = scale_of(panel["metric"], max(values, key=abs))
        marks = [
            Mark(p["value"], None, None, (), "level", f"{p['name']}: {name} {scale.write(p['value'])}") for p in points
        ]
        rows = tuple(Row(p["name"], "", (Cell(scale.write(p["value"])),)) for p in points)
        panels.append(Panel(name, forest(marks, scale, None), rows))
    return CurveView(("Value",), tuple(panels))


class TextRow(NamedTuple):
    """A text that a head's span holds."""

    text: str
    share: str
    attribute: bool


class Pictures(NamedTuple):
    """Images at one end of a head's axis."""

    end: str
    addresses: tuple[str, ...]


class HeadCard(NamedTuple):
    """One head: its figures, its texts, its images."""

    name: str
    facts: tuple[Fact, ...]
    texts: tuple[TextRow, ...]
    pictures: tuple[Pictures, ...]


def top_heads_view(section: Mapping[str, Any]) -> tuple[HeadCard, ...]:
    """Return a card for each head."""
    percent = Scale(100, 1, "%")
    first, second = section["poles"]
    cards = []
    for head in section["heads"]:
        texts = tuple(TextRow(t["text"], percent.write(t["share"]), t["attribute"]) for t in head.get("texts") or [])
        ends = ((f"most {first}", head.get("most")), (f"most {second}", head.get("least")))
        pictures = tuple(Pictures(name, tuple(addresses)) for name, addresses in ends if addresses)
        facts = tuple(Fact(f["name"], f["figure"], f["note"]) for f in head["facts"])
        cards.append(HeadCard(head_name(*head["head"]), facts, texts, pictures))
    return tuple(cards)
