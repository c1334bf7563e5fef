"""`fairhead view`: the heads of a run of `fairhead locate`, live in a browser on this machine."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from fairhead.cli.common import DataColumns, need, progress
from fairhead.cli.locate import Output, with_columns
from fairhead.cli.options import options
from fairhead.errors import InputError
from fairhead.locate.locate_settings import LocatePlan, Source

EPILOG = """
**Example**

    fairhead locate --model own/model --data images:labels.csv --label smiling --group sex --out heads

    fairhead view heads

Click heads on the map: gap, accuracy and what random heads do change at once, from the heads' stored parts. *Prove*
runs the model with them edited; *Save* writes it as a folder that transformers loads.

The page is for this machine alone (127.0.0.1), and its address holds a random token. Run it in the folder that locate
was run in. The model runs over the rows once, unless locate was given `--features`; Ctrl-C ends it.
"""


def view_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder that fairhead locate wrote with --out.")],
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Of the page; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Edit heads on a map in a browser, see what changes, prove it, and save the model."""
    asked = _asked(run)
    need()
    from fairhead.locate.live import Live
    from fairhead.locate.live_server import serve
    from fairhead.locate.session import open_question

    with progress() as told:
        opened = open_question(asked.source, replace(asked.plan, forward=True), asked.features, told.tell)
    title = f"Heads of {Path(str(asked.source.called)).name}, live"
    server = serve(Live(opened, asked.plan, run, asked.chosen), title, port)
    typer.echo(f"{server.address}\nCtrl-C ends it.")
    if browser:
        typer.launch(server.address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("ended", err=True)
    finally:
        server.server_close()


class _Asked(NamedTuple):
    """What a run of locate asked, and the heads that it chose."""

    source: Source
    plan: LocatePlan
    features: str | None
    chosen: tuple[tuple[int, int], ...]


def _asked(run: Path) -> _Asked:
    path = run / "headmap.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        arguments = shlex.split(content["provenance"]["command"])
        chosen = tuple((int(layer), int(head)) for layer, head in content["selected"])
    except OSError as error:
        raise InputError(
            f"{run} is not a run of fairhead locate ({path.name}: {error.strerror or error}); give its --out folder"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"{path} is not a head map that the command fairhead locate wrote; give its --out folder"
        ) from None
    if arguments[:2] != ["fairhead", "locate"]:
        raise InputError(
            f"{path} was made by {shlex.join(arguments[:2])!r}; view needs a run of fairhead locate, with all that it "
            "asked on its command line"
        )
    found: list[Any] = []

    @options("locate")
    def take(source: Source, columns: DataColumns, plan: LocatePlan, output: Output) -> None:
        found.append(
            _Asked(replace(with_columns(source, columns, output.images), seed=plan.seed), plan, output.features, chosen)
        )

    app = typer.Typer()
    app.command()(take)
    app(args=arguments[2:], standalone_mode=False)
    return found[0]
