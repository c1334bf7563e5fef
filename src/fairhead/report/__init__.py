"""One self-contained HTML page and its JSON twin, and what verbs return. Imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairhead.report.page import Report as Report
    from fairhead.report.page import Sentence as Sentence
    from fairhead.report.page import render as render
    from fairhead.report.page import write as write
    from fairhead.report.result import Result as Result

__all__ = ["Report", "Result", "Sentence", "render", "write"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fairhead.report' has no attribute {name!r}")
    # Imported when used: results need templates only once they are drawn.
    return getattr(import_module(f"fairhead.report.{'result' if name == 'Result' else 'page'}"), name)
