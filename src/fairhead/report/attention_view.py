"""The attention gap on the page: figures by kind of bias and by layer, and single pairs token by token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from fairhead.report.forest import Mark, forest
from fairhead.report.panels import Cell, Panel, Row
from fairhead.report.svg import drawing, element
from fairhead.report.wording import count, scale_in_unit

_ROW = 19.0  # height of a token's bar and of the gap below it
_LABEL = 38.0  # percent of the width that the tokens have


class PairPicture(NamedTuple):
    """A pair of sentences and the gap of each of its tokens."""

    title: str
    first: str
    second: str
    drawn: Markup


@dataclass(frozen=True)
class AttentionGapView:
    """Panels of figures, then pictures."""

    columns: tuple[str, ...]
    panels: tuple[Panel, ...]
    pictures: tuple[PairPicture, ...]


def attention_gap_view(section: Mapping[str, Any]) -> AttentionGapView:
    """Return the figures, drawn on one axis a panel, and the pictures of single pairs."""
    return AttentionGapView(
        ("Value", "Pairs"),
        tuple(_panel(panel) for panel in section["panels"] if panel["points"]),
        tuple(_picture(pair) for pair in section["pairs"]),
    )


def _panel(panel: Mapping[str, Any]) -> Panel:
    points = panel["points"]
    largest = max((abs(p["value"]) for p in points), default=0.0)
    marks, rows = [], []
    for point in points:
        low, high = point.get("low"), point.get("high")
        scale = scale_in_unit(panel["unit"], point["value"], low, high)
        written, interval = scale.write(point["value"]), scale.interval(low, high)
        beyond = panel["ideal"] is not None and low is not None and not low <= panel["ideal"] <= high
        words = f"{point['name']}: {written}{f' ({interval})' if interval else ''}"
        marks.append(Mark(point["value"], low, high, (), "clear" if beyond else "vague", words))
        n = "" if point.get("n") is None else count(point["n"])
        rows.append(Row(point["name"], "", (Cell(written, interval), Cell(n))))
    return Panel(panel["caption"], forest(marks, scale_in_unit(panel["unit"], largest), panel["ideal"]), tuple(rows))


def _picture(pair: Mapping[str, Any]) -> PairPicture:
    changed = ["".join(t[k] for k, c in enumerate(pair["changed"]) if c) for t in (pair["first"], pair["second"])]
    words = [" ".join(text.split()) for text in changed]
    title = f"{', '.join(pair['groups'])}: {words[0]} / {words[1]}"
    return PairPicture(title, pair["texts"][0], pair["texts"][1], pair_bars(pair, title))


def pair_bars(pair: Mapping[str, Any], title: str) -> Markup:
    """Draw a pair: one bar a token, as long as its gap; tokens that differ are in another colour, and both are named.

    Example:
        >>> drawn = pair_bars({"first": ["He", " cried"], "second": ["She", " cried"], "changed": [True, False],
        ...                    "gaps": [0.02, 0.01]}, "he / she")
        >>> drawn.count("<rect"), "He / She" in drawn
        (2, True)
    """
    gaps: Sequence[float] = pair["gaps"]
    largest = max(gaps, default=0.0) or 1.0
    parts = []
    for row, (first, second, changed, gap) in enumerate(
        zip(pair["first"], pair["second"], pair["changed"], gaps, strict=True)
    ):
        name = f"{first.strip()} / {second.strip()}" if changed else first.strip()
        top, length = row * _ROW, (100 - _LABEL - 12) * gap / largest
        colour = "fill: var(--pos4)" if changed else "fill: var(--neg3)"
        ink = "fill: var(--ink)" if changed else None
        bar = element("rect", x=f"{_LABEL + 1:g}%", y=top + 2, width=f"{length:.2f}%", height=_ROW - 5, style=colour)
        parts += [
            element("text", name, x=f"{_LABEL:g}%", y=top + 13, text_anchor="end", style=ink),
            bar,
            element("text", f"{gap:.4f}", x=f"{_LABEL + 2 + length:.2f}%", y=top + 13),
        ]
    return drawing(f"{title}: gap of each token", parts, height=len(gaps) * _ROW, class_="pair")
