"""`fairhead bench`: methods on one backbone, with the same data, seeds, budget and selection."""

import re
import signal
from collections.abc import Sequence
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
**What is written** to the folder of `--out`: `results.jsonl` (one line a cell, as it ends), `records/` (the answers of
every cell, a file each, from which all figures are recomputed), `table.md`, `table.html`, `table.json`: the table, with
what it shows in words and the command that made it.

A run that was killed goes on where it stopped when the same command is given again; at most the cells in flight are
lost. A cell that fails is recorded with its error and does not stop the others; the command then ends with code 1.

**Examples**

    fairhead bench utkface --out results --device cuda --jobs 6

    fairhead bench grid.yaml --out try --set epochs=1 --set limit=400 --set seeds=0,1 --set methods=erm,dam

**Hyper-parameters** stay as the grid has them unless `--search` is given. The search is the same size for every method:

    fairhead bench hatexplain --out searched --search 10 --set "backbones=MiniLM LE" --device cuda

Trials are kept and resumed like other cells; the table says what was searched, what was chosen and what it cost.

Parts of a grid may run on several machines (`--shard 1/2` here, `--shard 2/2` there) and be put together with
`--take-in`. A cluster takes them all:

    fairhead bench utkface --out results --engine ray --address auto --gpus-per-cell 0.25

    fairhead bench utkface --out results --engine slurm --address gpu-partition --jobs 16

Grids that ship with fairhead can be named without a path; `--list` shows them. They find their data through
`$FAIRHEAD_DATA` and pretrained models through `$FAIRHEAD_MODELS`.
"""


@dataclass(frozen=True)
class Running:
    """How a grid is run.

    Attributes:
        out: folder for results, records and table.
        jobs: cells at once, each in its own process; by default one here, and as many as a cluster has room for.
        device: where to compute: cpu, cuda, cuda:1, ...; auto takes a GPU where there is one.
        engine: processes of this machine, or a cluster of Ray or Slurm.
        address: of a running cluster of Ray (auto finds that of this machine); of Slurm the partition.
        gpu_share: of a GPU that a cell takes on a cluster of Ray: 0.25 runs four on one.
        shard: run the i-th of n parts of the grid, as 1/4; --take-in puts the folders together.
        changes: change the grid: epochs=1, limit=400, seeds=0,1, methods=erm,dam, ...; give it several times.
        search: first try N random configurations of every method beside the grid's own, on seeds of their own, and keep
            what does best on validation rows (by the worst class unless the grid says otherwise). At least 10.
        choose_with_groups: also show what the search would choose with groups, apart and flagged.
        cache: folder for decoded pictures and frozen features.
        take_in: folder of another run whose finished cells are added first; give it several times for several.
        table_only: run nothing: make the table of what there is.
        list_grids: show the grids that ship, and stop.
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
    grid: Annotated[str | None, typer.Argument(help="A YAML file, or the name of a grid that ships.")] = None,
) -> None:
    """Run data × backbones × methods × seeds; show which differences are significant."""
    if running.list_grids:
        _list_grids()
        return
    if grid is None:
        raise InputError("which grid? Give a YAML file, or a name that fairhead bench --list shows")
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
    from fairhead.bench.results_folder import Store, table_of
    from fairhead.bench.table import markdown, write_table

    for folder in running.take_in:
        if not (folder / "results.jsonl").is_file():
            raise InputError(f"{folder} has no results.jsonl: expected the folder of another run")
        typer.echo(f"{Store(out).take_in(Store(folder))} cells taken in from {folder}", err=True)
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
            raise InputError("--address is of a cluster: give --engine ray or --engine slurm as well")
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
                typer.echo("fairhead: interrupted; the same command goes on from here", err=True)
    try:
        table = table_of(plan, Store(out), _command(grid, asked))
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
        """So many cells need not run again."""
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


def _command(grid: str, changes: Sequence[str]) -> str:
    """What makes these results anywhere: without folders, devices, and how they came to be in this one."""
    import shlex

    return shlex.join(["fairhead", "bench", grid, *(word for change in changes for word in ("--set", change))])


def _list_grids() -> None:
    from fairhead.bench.grid_file import shipped_grids

    for name, file in shipped_grids().items():
        typer.echo(f"{name:<20} {yaml_value(file.read_text(encoding='utf-8'))['title']}")
