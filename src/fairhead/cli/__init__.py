"""The command line: one file a command. Commands import what they need when they run, so `--help` is quick."""

import sys

import typer

from fairhead import __version__
from fairhead.errors import FairheadError

app = typer.Typer(
    name="fairhead",
    help=(
        "Find, prove and reduce demographic bias in transformers, at the attention heads where it sits.\n\n"
        "Every option can also be given as an environment variable: FAIRHEAD_<COMMAND>_<OPTION>, "
        "for instance FAIRHEAD_AUDIT_SEED=1."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
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


def main() -> None:
    """Run the command line; errors of the user's making are one line on stderr and exit code 2."""
    try:
        app()
    except FairheadError as error:
        print(f"fairhead: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("fairhead: interrupted", file=sys.stderr)
        sys.exit(130)
