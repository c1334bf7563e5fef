"""One self-contained HTML page and its JSON twin. Imports no torch."""

from fairhead.report.page import Report as Report
from fairhead.report.page import Sentence as Sentence
from fairhead.report.page import render as render
from fairhead.report.page import write as write

__all__ = ["Report", "Sentence", "render", "write"]
