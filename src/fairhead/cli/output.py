"""What every command does with its output."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fairhead import store
from fairhead.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

# What steers a terminal, or turns the order of letters around; line ends and tabs do no harm.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def check_output(path: str | None) -> None:
    """Say that a path cannot be written before the work is done rather than after."""
    if path is None or path == "-":
        return
    if Path(path).is_dir():
        raise InputError(f"{path} is a directory; a file to write to is expected")
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {Path(path).parent}")


def harmless(text: str) -> str:
    r"""A string from data as it may be shown: what would steer a terminal is written out.

    Example:
        >>> harmless("a group\x1b[2J")
        'a group\\x1b[2J'
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def terminal() -> "Console":
    """A console on which no string from data can move the cursor, change colours or ring the bell."""
    from rich.console import Console

    class Terminal(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str(harmless(text), **options)

    return Terminal()


def command_line(context: typer.Context) -> str:
    """What was typed, for provenance, behind the environment variables that were read; a shell can run it again."""
    import os
    import shlex

    variables = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        name = str(parameter.envvar or f"{context.auto_envvar_prefix}_{parameter.name}".upper())
        if source is not None and source.name == "ENVIRONMENT" and name in os.environ:
            variables.append(f"{name}={shlex.quote(os.environ[name])}")
    return " ".join([*variables, shlex.join(["fairhead", *(context.obj or [])])])


def write_json(content: Mapping[str, Any], path: str) -> None:
    """Write JSON to a file, or to standard output for "-"."""
    if path == "-":
        typer.echo(store.json_text(content, sys.stdout.encoding or "ascii"))
    else:
        store.write_json(path, content)
