"""Sections of a page: each is a dataclass whose fields are its JSON form, that checks itself and draws itself.

To add one, write such a file and name it in `SECTIONS`; another package names its own in the entry point group
"fairhead.sections".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, ClassVar

from markupsafe import Markup
from rich.console import Console

from fairhead import added
from fairhead.report.form import build, build_dataclass, one_of, take

# Kind -> where its class is; imported when first used.
SECTIONS: dict[str, str] = {
    "audit": "fairhead.report.sections.audited:Audited",
    "comparison": "fairhead.report.sections.changes:Compared",
    "headmap": "fairhead.report.sections.headmap:Headmap",
    "headmaps": "fairhead.report.sections.headmap:Headmaps",
    "ablation": "fairhead.report.sections.headmap:Ablated",
    "text": "fairhead.report.sections.plain:Text",
    "clusters": "fairhead.report.sections.plain:ClusterCards",
    "curve": "fairhead.report.sections.plain:Curve",
    "top_heads": "fairhead.report.sections.headmap:TopHeads",
    "changes": "fairhead.report.sections.changes:Changes",
    "spillover": "fairhead.report.sections.changes:Spillover",
    "attention_gap": "fairhead.report.sections.attention_sections:AttentionGap",
    "edit_front": "fairhead.report.sections.bench_block:EditFront",
    "tables": "fairhead.report.sections.plain:PlainTables",
    "bench": "fairhead.report.sections.bench_block:BenchBlock",
    "qk_histograms": "fairhead.report.sections.attention_sections:QKHistograms",
    "attention_maps": "fairhead.report.sections.attention_sections:AttentionMaps",
}


@dataclass(frozen=True, kw_only=True)
class Section:
    """What all sections have. The title and the text are drawn by the page."""

    kind: ClassVar[str]  # the name in `SECTIONS`, and the "kind" of the JSON form
    has_figures: ClassVar[bool] = True  # whether the page should say how figures are read

    title: str  # the heading
    text: str = ""  # prose below it; an empty line begins a paragraph

    @classmethod
    def from_json(cls, value: Any, where: str) -> "Section":
        """Build the section of the kind that a JSON form names, checked."""
        kind = build(str, take(value, "kind", where), f"{where}.kind")
        return build_dataclass(section_class(kind, f"{where}.kind"), value, where)

    def check(self, where: str) -> None:
        """Raise InputError for what the types of the fields cannot say, naming the place as `where` and a field."""

    def draw(self) -> Markup:
        """The section below its title and text. Strings are escaped by `fill`, `element` and `Markup.format`."""
        raise NotImplementedError

    def contents(self) -> Sequence[str]:
        """Headings of the parts of the section, for the contents: the part called "block-1" in `draw` first."""
        return ()

    def show(self, console: Console) -> None:
        """What the section shows in a terminal; nothing unless it says otherwise."""

    def metric_definitions(self) -> Mapping[str, str]:
        """Metric -> its definition, for the notes at the end of the page."""
        return {}

    def origin(self) -> Mapping[str, Any]:
        """Where the section's figures came from, for the provenance at the end of the page."""
        return {}


def section_class(kind: str, where: str = "kind") -> type[Section]:
    """The class of a kind of section.

    Example:
        >>> section_class("text").__name__
        'Text'
    """
    known = SECTIONS
    if kind not in SECTIONS:
        known = {name: point.value for name, point in added("fairhead.sections").items()} | SECTIONS
    return resolve_name(known[one_of(kind, list(known), where)])
