"""The page itself: `render` makes it, `write` puts it and its JSON twin on disk."""

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from fairhead.errors import InputError
from fairhead.report import wording
from fairhead.report.attention_view import attention_gap_view
from fairhead.report.audit_view import audit_view, definitions
from fairhead.report.changes_view import changes_view, spillover_view
from fairhead.report.comparison_view import comparison_view
from fairhead.report.contract import checked
from fairhead.report.heads_view import ablation_view, headmap_view
from fairhead.report.located_view import curve_view, top_heads_view
from fairhead.store import made_folder, write_text

# Kind of section -> what makes its figures ready for the template of the same name.
_VIEWS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "audit": audit_view,
    "comparison": comparison_view,
    "headmap": headmap_view,
    "ablation": ablation_view,
    "curve": curve_view,
    "top_heads": top_heads_view,
    "changes": changes_view,
    "spillover": spillover_view,
    "attention_gap": attention_gap_view,
}

# Overrides, embeddings and isolates of the direction of writing. Letters of right-to-left scripts need none of them.
_TURNS = re.compile("[\u202a-\u202e\u2066-\u2069]")


@cache
def environment(package: str = "fairhead.report") -> jinja2.Environment:
    """Templates of a package, which may build on those of the report (base.html), with its style and filters.

    Example:
        >>> "base.html" in environment().list_templates()
        True
    """
    loaders = [jinja2.PackageLoader(name) for name in dict.fromkeys((package, "fairhead.report"))]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["paragraphs"] = lambda text: [part for part in text.split("\n\n") if part.strip()]
    environment.filters["plain"] = wording.plain_value
    environment.globals["style"] = Markup(files("fairhead.report").joinpath("templates/style.css").read_text("utf-8"))
    environment.globals["views"] = _VIEWS
    return environment


def render(report: Mapping[str, Any]) -> str:
    """Return a report as one HTML page that needs no network and no other file.

    Args:
        report: a dict of the form `fairhead.report/1`: title, question, verdict, sections and provenance.

    Returns:
        The page. Every string of the report is escaped.

    Raises:
        InputError: the report is not of that form; the message names the place.

    Example:
        >>> page = render({
        ...     "schema": "fairhead.report/1", "title": "Loans", "question": "Are refusals even?",
        ...     "verdict": [{"text": "Not shown: 3 % (0 to 6 %).", "tone": "unclear"}],
        ...     "sections": [{"kind": "text", "title": "Data", "text": "<b>All</b> of 2025."}],
        ...     "provenance": {"seed": 0},
        ... })
        >>> "&lt;b&gt;All&lt;/b&gt; of 2025." in page
        True
    """
    plain = checked(report)
    page = environment().get_template("page.html")
    return in_reading_order(page.render(report=plain, definitions=definitions(plain["sections"])))


def in_reading_order(page: str) -> str:
    r"""A page on which no name from data turns the words around it: characters that would do so are written out.

    Example:
        >>> in_reading_order("by \u202eegnaro: 3 points")
        'by \\u202eegnaro: 3 points'
    """
    return _TURNS.sub(lambda found: found[0].encode("unicode_escape").decode(), page)


def write(report: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a report to `path` (ending in .html) and the same figures beside it as JSON, with the same stem.

    Each file appears complete or not at all.

    Args:
        report: as for `render`.
        path: where the page goes; folders that are missing are made.

    Raises:
        InputError: the report is not of the form expected, or the path cannot be written.

    Example:
        >>> import tempfile
        >>> empty = {"schema": "fairhead.report/1", "title": "T", "question": "Q",
        ...          "verdict": [], "sections": [], "provenance": {}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(empty, Path(folder, "report.html"))
        ...     sorted(file.name for file in Path(folder).iterdir())
        ['report.html', 'report.json']
    """
    path = Path(path)
    if path.suffix.lower() != ".html":
        raise InputError(f"the report would be written to {str(path)!r}; give a path that ends in .html")
    twin = json.dumps(checked(report), ensure_ascii=False, allow_nan=False, indent=1)
    page = render(report)
    made_folder(path.parent)
    write_text(path.with_suffix(".json"), twin + "\n")
    write_text(path, page)
