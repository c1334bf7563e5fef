"""`fairhead demo`: the whole story on small data, in about a minute."""

from pathlib import Path
from typing import Annotated

import typer

from fairhead.cli.common import command_line, need, progress


def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for report, records and models.")] = Path("fairhead-demo"),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the data, the training and the resampling.")] = 0,
) -> None:
    """Train a small vision transformer on shaded digits, audit it, find the heads that carry the shade, mitigate.

    Writes report.html and report.json, the records behind every figure, and both models, in about a minute.

    The same seed gives the same numbers.
    """
    need("demo")
    from fairhead.demo import DemoPlan, run_demo

    with progress() as stages:
        found = run_demo(out, DemoPlan(seed=seed), stages.tell, command_line(context))
    for sentence in found.verdict:
        typer.echo(f"- {sentence}")
    typer.echo(f"\nreport: {found.report}")
