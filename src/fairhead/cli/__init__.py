"""The command line: a file for each command, or for those that ask alike. `demo` and `push` ask little and are here.

Commands import what they need when they run, so `--help` is quick.
"""

import io
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fairhead import __version__
from fairhead.cli import audit, bench, locate, mitigate, model_on_rows
from fairhead.cli.common import command_line, need, progress
from fairhead.cli.lm import lm_app
from fairhead.errors import FairheadError
from fairhead.store import locked, refuse_pipe

_PUSH_EPILOG = """
The token comes from `hf auth login` or from the environment variable `HF_TOKEN`.

**Example**

    fairhead push run/model my-name/fairer-faces --private
"""
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


def demo_command(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for report, records and models.")] = Path("fairhead-demo"),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of data, training and bootstrap.")] = 0,
) -> None:
    """Run the whole workflow on digits: discover groups, reduce a gap, locate its heads, audit on test rows.

    Takes about a minute. Writes report.html and report.json, the records behind every figure, and the models.

    The same seed gives the same figures on the same machine; processors round differently, and training amplifies that.
    """
    need("demo")
    from fairhead.demo import DemoPlan, run_demo

    context.with_resource(locked(out))
    with progress() as stages:
        found = run_demo(out, DemoPlan(seed=seed), stages.tell, command_line(context))
    for sentence in found.verdict:
        typer.echo(f"- {sentence}")
    typer.echo(f"\nreport: {found.report}")


def push_command(
    model: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model that fairhead saved.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model on the hub: you/model.")],
    private: Annotated[bool, typer.Option("--private", help="Make the model private.")] = False,
) -> None:
    """Upload a saved model with its card to the Hugging Face hub."""
    need()
    from fairhead.report.model_card import push

    typer.echo(f"model: {push(model, name, private=private)}")


for name, command, epilog in (
    ("demo", demo_command, "**Example**\n\n    fairhead demo --out demo --seed 1"),
    ("audit", audit.audit_command, audit.EPILOG),
    ("discover", model_on_rows.discover_command, model_on_rows.DISCOVER_EPILOG),
    ("bench", bench.bench_command, bench.EPILOG),
    ("predict", model_on_rows.predict_command, model_on_rows.PREDICT_EPILOG),
    ("locate", locate.locate_command, locate.EPILOG),
    ("ablate", locate.ablate_command, locate.ABLATE_EPILOG),
    ("view", locate.view_command, locate.VIEW_EPILOG),
    ("attention", model_on_rows.attention_command, model_on_rows.ATTENTION_EPILOG),
    ("push", push_command, _PUSH_EPILOG),
):
    app.command(name, epilog=epilog)(command)
app.add_typer(lm_app)
app.add_typer(mitigate.mitigate_app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of the user's making are one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what it cannot encode is escaped, not an error
            stream.reconfigure(errors="backslashreplace")
    warnings.filterwarnings("ignore", "Image size")  # of Pillow; such a picture is an error of ours
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # the command itself prints what users need to know
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        _refuse_pipes(given)
        # Not standalone: errors of usage would come in a box of several lines. The arguments go into provenance.
        code = app(args=given, prog_name="fairhead", standalone_mode=False, obj=given)
    except _UsageError as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        command = error.ctx.command_path if error.ctx else "fairhead"
        _fail(f"{message}; {' '.join(command.split())} --help explains")
    except FairheadError as error:
        _fail(str(error))
    except BrokenPipeError:
        # The reader of our output has closed the pipe (`| head`): no error message.
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
    """Refuse named pipes in any argument, `reader:pipe` too."""
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
