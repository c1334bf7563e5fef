"""HTML from templates: every string is escaped, and no name from data turns the words around it."""

import re
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from fairhead.report import wording
from fairhead.report.axis import short

# Overrides, embeddings and isolates of the direction of writing. Letters of right-to-left scripts need none of them.
_TURNS = re.compile("[\u202a-\u202e\u2066-\u2069]")


def fill(template: str, **names: Any) -> Markup:
    """Fill one of the report's templates.

    Example:
        >>> fill("parts.html").strip()
        Markup('')
    """
    return Markup(_environment().get_template(template).render(**names))


def part(macro: str, *values: Any) -> Markup:
    """Call a macro of parts.html, such as `forest_table`.

    Example:
        >>> print(part("dot_key", "vague", "not <clear>").strip()[-24:])
        not &lt;clear&gt;</span>
    """
    return getattr(_environment().get_template("parts.html").module, macro)(*values)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fairhead.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["paragraphs"] = lambda text: [part for part in text.split("\n\n") if part.strip()]
    environment.filters["plain"] = wording.plain_value
    environment.filters["short"] = short
    environment.globals["style"] = Markup(files("fairhead.report").joinpath("templates/style.css").read_text("utf-8"))
    return environment


def in_reading_order(page: str) -> str:
    r"""A page on which no name from data turns the words around it: characters that would do so are written out.

    Example:
        >>> in_reading_order("by \u202eegnaro: 3 points")
        'by \\u202eegnaro: 3 points'
    """
    return _TURNS.sub(lambda found: found[0].encode("unicode_escape").decode(), page)
