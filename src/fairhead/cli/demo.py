"""`fairhead demo`: the whole story on small data, in about a minute."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fairhead.cli.output import command_line
from fairhead.errors import FairheadError

_NEEDS = ("torch", "transformers", "accelerate", "sklearn")


def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for report, records and models.")] = Path("fairhead-demo"),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the data, the training and the resampling.")] = 0,
) -> None:
    """Train a small vision transformer on shaded digits, audit it, find the heads that carry the shade, mitigate.

    Writes report.html and report.json, the records behind every figure, and both models, in about a minute.

    The same seed gives the same numbers.
    """
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise FairheadError(f'the demo needs {", ".join(missing)}, not installed here: pip install "fairhead[demo]"')
    from fairhead.demo import DemoPlan, run_demo

    with _progress() as tell:
        found = run_demo(out, DemoPlan(seed=seed), tell, command_line(context))
    for sentence in found.verdict:
        typer.echo(f"- {sentence}")
    typer.echo(f"\nreport: {found.report}")


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int, str], None]]:
    """Bars on a terminal, plain lines elsewhere; both on stderr, so that stdout has the verdict alone."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _tell_in_lines
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bars:
        stages: dict[str, TaskID] = {}

        def tell(stage: str, done: int, total: int, note: str) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total, note=note)
            bars.update(stages[stage], completed=done, note=note)

        yield tell


def _tell_in_lines(stage: str, done: int, total: int, note: str) -> None:
    # Four lines a stage at most.
    if done and done * 4 // total > (done - 1) * 4 // total:
        typer.echo(f"{stage}: {done} of {total}{', ' if note else ''}{note}", err=True)
