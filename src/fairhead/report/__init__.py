"""One self-contained HTML page and its JSON twin, and what verbs return. Imports no torch."""

from typing import TYPE_CHECKING

from fairhead import later

if TYPE_CHECKING:
    from fairhead.report.page import Report as Report
    from fairhead.report.page import Sentence as Sentence
    from fairhead.report.page import render as render
    from fairhead.report.page import write as write
    from fairhead.report.result import Result as Result

# Imported when used: results need templates only once they are drawn.
_LATER = dict.fromkeys(("Report", "Sentence", "render", "write"), "fairhead.report.page")
_LATER["Result"] = "fairhead.report.result"
__all__ = [*_LATER]
__getattr__ = later(__name__, _LATER)
