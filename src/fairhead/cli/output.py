"""What every command does with its output."""

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from fairhead import store
from fairhead.errors import FairheadError, InputError

_TORCH = ("torch", "transformers", "accelerate")
_EXTRAS = {"lora": ("peft",), "demo": ("sklearn",)}


def check_output(path: str | None) -> None:
    """Say that a path cannot be written before the work is done rather than after."""
    if path is None or path == "-":
        return
    if Path(path).is_dir():
        raise InputError(f"{path} is a directory; a file to write to is expected")
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {Path(path).parent}")


def need(extra: str = "torch") -> None:
    """Say which packages of an extra are not installed, before anything is read.

    Example:
        >>> need("demo")  # doctest: +SKIP
        Traceback (most recent call last):
            ...
        fairhead.errors.FairheadError: this needs sklearn, not installed here: pip install "fairhead[demo]"
    """
    missing = [name for name in (*_TORCH, *_EXTRAS.get(extra, ())) if find_spec(name) is None]
    if missing:
        raise FairheadError(f'this needs {", ".join(missing)}, not installed here: pip install "fairhead[{extra}]"')


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
