"""The command line: one file a command. Commands import what they need when they run, so `--help` is quick."""

import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from fairhead import __version__
from fairhead.cli import audit, bench, locate, mitigate, short_commands
from fairhead.cli.lm import lm_app
from fairhead.errors import FairheadError
from fairhead.store import refuse_pipe

_INTERRUPTED = 130
# Newer typers bring a click of their own, whose errors are not those of `click`; this is the base of either.
_UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="fairhead",
    help=(
        "Find, prove and reduce demographic bias in transformers, at the attention heads where it sits.\n\n"
        "You can also set every option with an environment variable `FAIRHEAD_<COMMAND>_<OPTION>`, "
        "such as `FAIRHEAD_AUDIT_SEED=1`. For an option with several values, separate them with spaces: "
        '`FAIRHEAD_AUDIT_GROUP="race gender"`.'
    ),
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"auto_envvar_prefix": "FAIRHEAD", "help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fairhead {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True, callback=_print_version),
) -> None:
    pass


for name, command, epilog in (
    ("demo", short_commands.demo_command, "**Example**\n\n    fairhead demo --out demo --seed 1"),
    ("audit", audit.audit_command, audit.EPILOG),
    ("discover", short_commands.discover_command, short_commands.DISCOVER_EPILOG),
    ("bench", bench.bench_command, bench.EPILOG),
    ("predict", short_commands.predict_command, short_commands.PREDICT_EPILOG),
    ("locate", locate.locate_command, locate.EPILOG),
    ("ablate", locate.ablate_command, locate.ABLATE_EPILOG),
    ("view", locate.view_command, locate.VIEW_EPILOG),
    ("attention", short_commands.attention_command, short_commands.ATTENTION_EPILOG),
    ("push", short_commands.push_command, short_commands.PUSH_EPILOG),
):
    app.command(name, epilog=epilog)(command)
app.add_typer(lm_app)
app.add_typer(mitigate.mitigate_app)
_COMMANDS = [*(command.name for command in app.registered_commands), "lm", "mitigate"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of the user's making are one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what it cannot encode is escaped, not an error
            stream.reconfigure(errors="backslashreplace")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what a user must know is said by the command
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        _refuse_pipes(given)
        # Not standalone: errors of usage would come in a box of several lines. The arguments go into provenance.
        code = app(args=given, prog_name="fairhead", standalone_mode=False, obj=given)
    except _UsageError as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        command = f"fairhead {given[0]}" if given[0] in _COMMANDS else "fairhead"
        _fail(f"{message}; {command} --help explains")
    except FairheadError as error:
        _fail(str(error))
    except BrokenPipeError:
        # Whoever read our output has had enough (`| head`): not an error worth a word.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # a full disk, a closed folder: a traceback would say no more
        _fail(f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("(out of|allocate) memory", str(error)):
            raise
        _fail(
            f"not enough memory: {str(error)[:200] or 'none is left'}. If the command has them, use a smaller "
            "--batch-size or --limit"
        )
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    if code == _INTERRUPTED:  # newer typers return it instead of raising
        print("fairhead: interrupted", file=sys.stderr)
    if code:
        sys.exit(code)


def _refuse_pipes(words: Sequence[str]) -> None:
    """Refuse named pipes, `reader:pipe` too, whoever would open them."""
    for word in words:
        value = word.partition("=")[2] if word.startswith("--") else word
        for path in (value, value.partition(":")[2]):
            refuse_pipe(path)


def _fail(message: str) -> NoReturn:
    """One line, in which nothing that came from a file or an option steers the terminal."""
    words = (word if len(word) < 500 else f"{word[:200]}…{word[-50:]}" for word in message.split())
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(words))
    print(f"fairhead: error: {''.join(shown)}", file=sys.stderr)
    sys.exit(2)
