"""`fairhead bench`: methods on one backbone, with the same data, seeds, budget and selection."""

import re
import shlex
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fairhead.cli.common import need, progress
from fairhead.cli.options import options
from fairhead.errors import InputError
from fairhead.report import harmless
from fairhead.settings import Count, Option, Positive, Range
from fairhead.store import made_folder, yaml_value

if TYPE_CHECKING:
    from fairhead.bench.engines import News
    from fairhead.cli.common import Progress

EPILOG = """
**Output files** in `--out`: `results.jsonl` (one line for each finished cell), `records/` (the predictions of every
cell, from which all figures are computed), and `table.md`, `table.html` and `table.json` with the table, a summary in
words and the command.

To continue an interrupted run, repeat the same command; only the cells that were running are lost. If a cell fails, its
error is recorded and the other cells continue; the command then ends with exit code 1.

**Examples**

    fairhead bench utkface --out results --device cuda --jobs 6

    fairhead bench grid.yaml --out try --set epochs=1 --set limit=400 --set seeds=0,1 --set methods=erm,dam

**Hyperparameters** come from the grid unless you give `--search`. The search has the same size for every method:

    fairhead bench hatexplain --out searched --search 10 --set "backbones=MiniLM LE" --device cuda

Trials are stored and resumed like other cells. The table shows what was searched, what was selected and what it cost.

You can run parts of a grid on several machines (`--shard 1/2` and `--shard 2/2`) and merge them with `--take-in`, or
run the whole grid on a cluster:

    fairhead bench utkface --out results --engine ray --address auto --gpus-per-cell 0.25

    fairhead bench utkface --out results --engine slurm --address gpu-partition --jobs 16

Built-in grids need no path; `--list` shows them. They look for data in `$FAIRHEAD_DATA` and for pretrained models in
`$FAIRHEAD_MODELS`.
"""


@dataclass(frozen=True)
class Running:
    """How a grid is run.

    Attributes:
        out: folder for results, records and table.
        jobs: number of cells to run at a time, each in its own process; by default one on this machine, and on a
            cluster as many as it has room for.
        device: device: cpu, cuda, cuda:1, ...; auto uses a GPU if there is one.
        engine: processes on this machine, or a Ray or Slurm cluster.
        address: address of a running Ray cluster (auto finds the one on this machine), or the Slurm partition.
        gpu_share: share of a GPU for each cell on a Ray cluster: 0.25 runs four cells on one GPU.
        shard: run the i-th of n parts of the grid, such as 1/4; --take-in merges the folders.
        changes: change the grid: epochs=1, limit=400, seeds=0,1, methods=erm,dam, ...; repeat it for several.
        search: first try N random configurations of every method besides the grid's own, with separate seeds, and keep
            the best on validation rows (by the worst class, unless the grid says otherwise). At least 10.
        choose_with_groups: also show, marked and separately, what the search would select with groups.
        cache: folder for decoded pictures and frozen features.
        take_in: folder of another run whose finished cells are added first; repeat it for several.
        table_only: run nothing; make the table from existing results.
        list_grids: list the built-in grids and stop.
    """

    out: Annotated[Path, Option(metavar="DIR")] = Path("fairhead-bench")
    jobs: Annotated[Count | None, Option(metavar="N")] = None
    device: str = "auto"
    engine: Literal["processes", "ray", "slurm"] = "processes"
    address: Annotated[str | None, Option(metavar="HOST:PORT")] = None
    gpu_share: Annotated[Positive, Option("--gpus-per-cell", "X")] = 1.0
    shard: Annotated[str | None, Option(metavar="I/N")] = None
    changes: Annotated[tuple[str, ...], Option("--set", "KEY=VALUE")] = ()
    search: Annotated[Annotated[int, Range(10)] | None, Option(metavar="N")] = None
    choose_with_groups: bool = False
    cache: Annotated[Path | None, Option(metavar="DIR")] = None
    take_in: Annotated[tuple[Path, ...], Option(metavar="DIR")] = ()
    table_only: bool = False
    list_grids: Annotated[bool, Option("--list")] = False


@options("bench")
def bench_command(
    running: Running,
    grid: Annotated[str | None, typer.Argument(help="A YAML file, or the name of a built-in grid.")] = None,
) -> None:
    """Run a grid of data × backbones × methods × seeds and show which differences are significant."""
    if running.list_grids:
        _list_grids()
        return
    if grid is None:
        raise InputError("missing grid: give a YAML file, or a name from fairhead bench --list")
    from fairhead.bench.grid_file import grid_path, read_grid

    out = running.out
    asked = [*running.changes, *([f"search={running.search}"] if running.search else [])]
    plan = read_grid(grid_path(grid), asked)
    if running.choose_with_groups:
        if plan.search is None:
            raise InputError("--choose-with-groups needs a search: give --search 10 as well")
        asked.append("search.with_groups=true")
        plan = read_grid(grid_path(grid), asked)
    if not running.table_only:
        need()
    from fairhead.bench.results_folder import Store
    from fairhead.bench.table import markdown, write_table
    from fairhead.bench.table_figures import table_of

    for folder in running.take_in:
        if not (folder / "results.jsonl").is_file():
            raise InputError(f"{folder} has no results.jsonl: expected the folder of another run")
        typer.echo(f"{Store(out).take_in(Store(folder))} cells added from {folder}", err=True)
    interrupted, failed = False, 0
    if not running.table_only:
        from fairhead.bench.engines import Workplace
        from fairhead.bench.runner import run_grid
        from fairhead.models.load import device_named

        # `timeout` and schedulers end a run so: what is done should still become a table.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        shard = _shard(running.shard)
        here = running.engine == "processes"
        if here and running.address is not None:
            raise InputError("--address names a cluster: also give --engine ray or --engine slurm")
        device = str(device_named(running.device)) if here else running.device  # this machine may have no GPU
        cluster = (running.engine, running.address, running.gpu_share, out)
        cache = None if running.cache is None else made_folder(running.cache)
        workplace = Workplace(device, running.jobs, cache, *cluster)
        with progress() as shown:
            report = _Report(shown, plan.size)
            try:
                outcome = run_grid(plan, out, workplace, report, report.before, shard)
                failed = outcome.failed
                typer.echo(f"{outcome.done} cells done, {failed} failed, {outcome.before} were done before", err=True)
            except KeyboardInterrupt:
                interrupted = True
                typer.echo("fairhead: interrupted; repeat the same command to continue", err=True)
    try:
        # What makes these results anywhere: without folders, devices, and how they came to be in this one.
        command = shlex.join(["fairhead", "bench", grid, *(word for change in asked for word in ("--set", change))])
        table = table_of(plan, Store(out), command)
    except InputError:
        if interrupted:  # before anything that a table could show
            raise typer.Exit(130) from None
        raise
    page = write_table(table, out)
    typer.echo(harmless(markdown(table)))
    typer.echo(f"table: {page}", err=True)
    if interrupted or failed:
        raise typer.Exit(130 if interrupted else 1)


def _shard(text: str | None) -> tuple[int, int]:
    """Which part of how many."""
    found = re.fullmatch(r"(\d+)/(\d+)", text or "1/1")
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise InputError(f"--shard is {text!r}; expected I/N with I from 1 to N, such as 2/4")
    return int(found[1]), int(found[2])


class _Report:
    """Show news: a bar for the grid and one for each cell at work, or a line when a cell ends."""

    def __init__(self, shown: "Progress", cells: int) -> None:
        self._shown = shown
        self._cells = cells
        self._ended = 0

    def before(self, cells: int) -> None:
        """Count cells that were done before."""
        self._ended += cells

    def __call__(self, news: "News") -> None:
        name = news.cell.name
        if news.row is None:
            if self._shown.has_bars:
                self._shown.tell(f"{name}", news.done, news.total, f"{news.stage} {news.note}")
            return
        self._ended += 1
        self._shown.drop(name)
        seconds = f", {news.row['cost']['seconds']:.0f} s" if "cost" in news.row else ""
        self._shown.say(f"{self._ended} of {self._cells} {name}: {news.stage}, {news.note}{seconds}")
        if self._shown.has_bars:
            self._shown.tell("cells", self._ended, self._cells)


def _list_grids() -> None:
    from fairhead.bench.grid_file import shipped_grids

    for name, file in shipped_grids().items():
        typer.echo(f"{name:<20} {yaml_value(file.read_text(encoding='utf-8'))['title']}")
