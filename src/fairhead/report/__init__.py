"""What every verb returns, and the page that it makes: self-contained HTML with its JSON twin. Imports no torch.

A result can be shown in a terminal that no string from data can steer, written, turned into a table, and seen in a
notebook. Light: every command imports this, and templates are loaded once a page is drawn.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairhead import later

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from fairhead.report.page import Report as Report
    from fairhead.report.page import Sentence as Sentence
    from fairhead.report.page import render as render
    from fairhead.report.page import write as write

_LATER = dict.fromkeys(("Report", "Sentence", "render", "write"), "fairhead.report.page")
__all__ = ["Result", *_LATER]
__getattr__ = later(__name__, _LATER)

TONES = {"good": "green", "bad": "bold red", "unclear": "yellow", "note": "none"}
# What steers a terminal, or turns the order of letters around; line ends and tabs do no harm.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def terminal() -> "Console":
    """A console on which no string from data can move the cursor, change colours or ring the bell."""
    from rich.console import Console

    class Terminal(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str(harmless(text), **options)

    return Terminal()


def harmless(text: str) -> str:
    r"""A string from data as it may be shown: what would steer a terminal is written out."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Result:
    """Base of what verbs return. A kind of result says what its page is, its JSON form and its rows.

    Example:
        >>> from fairhead.report import Report, Sentence
        >>> class Found(Result):
        ...     def page(self):
        ...         verdict = [Sentence("Two heads.", "good")]
        ...         return Report(title="Heads", question="", verdict=verdict, sections=[], provenance={})
        ...     def to_dict(self):
        ...         return {"heads": 2}
        ...     def rows(self):
        ...         return [{"head": "L0H1", "gap": 0.5}, {"head": "L1H0", "gap": 0.25}]
        >>> Found().show()
        Two heads.
        >>> Found().to_frame()["gap"].sum()
        np.float64(0.75)
        >>> Found()
        Found with 2 figures: show() prints them, report(path) writes a page
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__repr__" not in vars(cls):  # a dataclass would make one that prints all it holds
            cls.__repr__ = Result.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        n = len(self.rows())
        figures, them = ("figure", "it") if n == 1 else ("figures", "them")
        return f"{type(self).__name__} with {n:,} {figures}: show() prints {them}, report(path) writes a page"

    def page(self) -> "Report":
        """The result as a report."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        raise NotImplementedError

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The main figures, one row each, for `to_frame`."""
        raise NotImplementedError

    def to_frame(self) -> "pd.DataFrame":
        """The main figures as a pandas DataFrame, one row each."""
        import pandas as pd

        return pd.DataFrame(list(self.rows()))

    def show(self, console: "Console | None" = None) -> None:
        """Print the findings and their tables, as the command line does."""
        show_page(self.page(), console)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write a self-contained page to a path that ends in .html, with its JSON beside it; return the path."""
        from fairhead.report.page import write

        write(self.page(), path)
        return Path(path)

    def _repr_html_(self) -> str:
        from fairhead.report.page import render

        # In a frame of its own, so that neither the notebook's style nor the page's reaches the other.
        page = escape(render(self.page()), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:42em;border:1px solid #ccc" sandbox></iframe>'


def show_page(page: "Report", console: "Console | None" = None) -> None:
    """Print a report: the verdict in the colours of its tones, then what each section shows in a terminal."""
    console = console or terminal()
    show_verdict(console, page.verdict)
    for section in page.sections:
        section.show(console)


def show_verdict(console: "Console", verdict: "Iterable[Sentence]") -> None:
    """One line a sentence, in the colour of its tone."""
    for sentence in verdict:
        # Names from data may have several lines.
        console.print(" ".join(sentence.text.splitlines()), style=TONES[sentence.tone], markup=False, highlight=False)
