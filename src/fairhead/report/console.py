"""A terminal that no string from data can steer. Light: every command imports it."""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

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
