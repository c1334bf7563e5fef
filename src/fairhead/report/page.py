"""The report: what was asked, what was found, the evidence, and where it came from, as one page and its JSON twin."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from fairhead.errors import InputError
from fairhead.report.form import build, json_of, one_of, plain
from fairhead.report.markup import fill, in_reading_order
from fairhead.report.sections import Section
from fairhead.store import made_folder, write_json, write_text


@dataclass(frozen=True)
class Sentence:
    """One sentence of a verdict, and its tone: "good", "bad", "unclear" or "note"."""

    text: str
    tone: str

    def check(self, where: str) -> None:
        """The tone is one of the four."""
        one_of(self.tone, ("good", "bad", "unclear", "note"), f"{where}.tone")


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page before it is written.

    Attributes:
        title: the heading of the page.
        question: what was asked; an empty one leaves its part of the page out.
        verdict: what was found, in sentences.
        sections: the evidence; each a `Section`, or its JSON form.
        provenance: command, seed, versions and the like.
        brand: what kind of page it is.

    Example:
        >>> from fairhead.report.sections.plain import Text
        >>> data = Text(title="Data", text="<b>All</b> of 2025.")
        >>> found = Report(title="Loans", question="Even?", verdict=[], sections=[data], provenance={"seed": 0})
        >>> found.to_dict()["sections"]
        [{'kind': 'text', 'title': 'Data', 'text': '<b>All</b> of 2025.'}]
        >>> "&lt;b&gt;All&lt;/b&gt; of 2025." in render(found)
        True
    """

    schema: ClassVar[str] = "fairhead.report/1"

    title: str
    question: str
    verdict: Sequence[Sentence]
    sections: Sequence[Annotated[Any, Section]]
    provenance: Mapping[str, Any]
    brand: str = "report"

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "Report":
        """Build a report from its JSON form.

        Raises:
            InputError: it is not of the form `fairhead.report/1`; the message names the place.

        Example:
            >>> empty = {"schema": "fairhead.report/1", "title": "T", "question": "Q", "verdict": [], "provenance": {}}
            >>> Report.from_dict({**empty, "sections": [{"kind": "adit", "title": "A"}]})  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            fairhead.errors.InputError: report.sections[0].kind is 'adit'; expected one of ... Did you mean 'audit'?
        """
        return build(cls, plain(given, "report"), "report")

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return plain(json_of(self), "report")


def render(report: Report | Mapping[str, Any]) -> str:
    """A `Report`, or its JSON form, as one HTML page that needs no network and no other file; strings are escaped.

    Raises:
        InputError: the report is not of the form `fairhead.report/1`; the message names the place.
    """
    checked: Report = build(Report, plain(report, "report"), "report")
    definitions = {name: text for section in checked.sections for name, text in section.metric_definitions().items()}
    scripted = any(section.contents() for section in checked.sections)  # tables that can be sorted are in such parts
    return in_reading_order(fill("page.html", report=checked, definitions=definitions, scripted=scripted))


def write(report: Report | Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a report to `path` (ending in .html) and the same figures beside it as JSON, with the same stem.

    Each file appears complete or not at all; folders that are missing are made.
    """
    if not str(path).lower().endswith(".html"):
        raise InputError(f"the report would be written to {str(path)!r}; give a path that ends in .html")
    path = Path(path)
    twin = plain(report, "report")
    page = render(twin)
    made_folder(path.parent)
    write_json(path.with_suffix(".json"), twin)
    write_text(path, page)
