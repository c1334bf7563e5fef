"""`fairhead mitigate …`: methods for language models are commands of their own, all others share one."""

from typing import Any

import typer
from typer.core import TyperGroup

from fairhead.cli.klaad import EPILOG as KLAAD_EPILOG
from fairhead.cli.klaad import klaad_command
from fairhead.cli.language_methods import COMMANDS as LANGUAGE_COMMANDS
from fairhead.cli.language_methods import EPILOG as LANGUAGE_EPILOG
from fairhead.cli.mitigate import EPILOG, mitigate_command
from fairhead.mitigate.registry import listed

_OTHERS = "METHOD"
_LANGUAGE = f"""
**For language models**, each with options of its own (`fairhead mitigate klaad --help`):

{listed("language")}
"""


class _Methods(TyperGroup):
    """Sends what is not the name of a command to the one that takes the method as its argument."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [_OTHERS, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == _OTHERS else name), command, rest  # the name stands in the usage line


mitigate_app = typer.Typer(
    name="mitigate",
    cls=_Methods,
    help="Train a model with a method that reduces gaps, without groups; then audit it.",
    rich_markup_mode="markdown",
)
mitigate_app.command(_OTHERS, epilog=_LANGUAGE + EPILOG)(mitigate_command)
mitigate_app.command("klaad", epilog=KLAAD_EPILOG)(klaad_command)
for _name, _command in LANGUAGE_COMMANDS.items():
    mitigate_app.command(_name, epilog=LANGUAGE_EPILOG)(_command)
