"""What every command does with its output."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from fairhead.errors import InputError


def check_output(path: str | None) -> None:
    """Say that a path cannot be written before the work is done rather than after."""
    if path is None or path == "-":
        return
    if Path(path).is_dir():
        raise InputError(f"{path} is a directory; a file to write to is expected")
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {Path(path).parent}")


def command_line(context: typer.Context) -> str:
    """What was typed, for provenance."""
    import shlex

    return shlex.join(["fairhead", *(context.obj or [])])


def write_json(content: Mapping[str, Any], path: str) -> None:
    """Write JSON to a file, or to standard output for "-"."""
    import json

    text = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1)
    if path == "-":
        typer.echo(text)
        return
    from fairhead.records.write import output_errors

    with output_errors(Path(path)):
        Path(path).write_text(text + "\n", encoding="utf-8")
