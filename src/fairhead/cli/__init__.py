"""The command line: one file a command. Commands import what they need when they run, so `--help` is quick."""

import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fairhead import __version__
from fairhead.cli.attention import EPILOG as ATTENTION_EPILOG
from fairhead.cli.attention import attention_command
from fairhead.cli.audit import EPILOG, audit_command
from fairhead.cli.bench import EPILOG as BENCH_EPILOG
from fairhead.cli.bench import bench_command
from fairhead.cli.common import command_line, need, progress
from fairhead.cli.discover import EPILOG as DISCOVER_EPILOG
from fairhead.cli.discover import discover_command
from fairhead.cli.lm import lm_app
from fairhead.cli.locate import ABLATE_EPILOG, VIEW_EPILOG, ablate_command, locate_command, view_command
from fairhead.cli.locate import EPILOG as LOCATE_EPILOG
from fairhead.cli.mitigate import mitigate_app
from fairhead.cli.predict import EPILOG as PREDICT_EPILOG
from fairhead.cli.predict import predict_command
from fairhead.cli.push import EPILOG as PUSH_EPILOG
from fairhead.cli.push import push_command
from fairhead.errors import FairheadError
from fairhead.store import locked, refuse_pipe

_INTERRUPTED = 130
_COMMANDS = ["ablate", "attention", "audit", "bench", "demo", "discover", "lm", "locate", "mitigate", "predict"]
_COMMANDS += ["push", "view"]
# Newer typers bring a click of their own, whose errors are not those of `click`; this is the base of either.
_UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="fairhead",
    help=(
        "Find, prove and reduce demographic bias in transformers, at the attention heads where it sits.\n\n"
        "Every option can also be given as an environment variable: `FAIRHEAD_<COMMAND>_<OPTION>`, "
        "for instance `FAIRHEAD_AUDIT_SEED=1`; for an option that may be given several times, with spaces between: "
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


@app.command(epilog="**Example**\n\n    fairhead demo --out demo --seed 1")
def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for report, records and models.")] = Path("fairhead-demo"),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the data, the training and the resampling.")] = 0,
) -> None:
    """Find the shade of digits without being told, reduce its gap, locate its heads, and prove it on test digits.

    Writes report.html and report.json, the records behind every figure, and the models, in about a minute.

    The same seed gives the same numbers.
    """
    need("demo")
    from fairhead.demo import DemoPlan, run_demo

    context.with_resource(locked(out))
    with progress() as stages:
        found = run_demo(out, DemoPlan(seed=seed), stages.tell, command_line(context))
    for sentence in found.verdict:
        typer.echo(f"- {sentence}")
    typer.echo(f"\nreport: {found.report}")


app.command("audit", epilog=EPILOG)(audit_command)
app.command("discover", epilog=DISCOVER_EPILOG)(discover_command)
app.add_typer(lm_app)
app.command("bench", epilog=BENCH_EPILOG)(bench_command)
app.add_typer(mitigate_app)
app.command("predict", epilog=PREDICT_EPILOG)(predict_command)
app.command("locate", epilog=LOCATE_EPILOG)(locate_command)
app.command("ablate", epilog=ABLATE_EPILOG)(ablate_command)
app.command("view", epilog=VIEW_EPILOG)(view_command)
app.command("attention", epilog=ATTENTION_EPILOG)(attention_command)
app.command("push", epilog=PUSH_EPILOG)(push_command)


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
        command = " ".join(["fairhead", *given[:1]]) if given[0] in _COMMANDS else "fairhead"
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
            f"there is too little memory for this: {str(error)[:200] or 'none is left'}. Where the command has them, "
            "a smaller --batch-size or --limit needs less"
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
