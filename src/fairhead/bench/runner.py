"""Running a grid: what is done stays done, what failed or was cut short is run again.

Several cells run at once, in worker processes here or on a cluster (`Workplace.engine`); a worker that dies does no
harm to the others. Only the process that runs the grid writes results.
"""

import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fairhead.bench.grid import Cell, Grid
from fairhead.bench.results_folder import Store, has_result
from fairhead.errors import FairheadError, InputError
from fairhead.records import Records

Engine = Literal["processes", "ray", "slurm"]


class News(NamedTuple):
    """What a worker reports about its cell: a stage on the way, or its end with a row (and records if any)."""

    cell: Cell
    stage: str
    done: int
    total: int
    note: str
    row: dict[str, Any] | None = None
    records: Records | None = None


@dataclass(frozen=True)
class Workplace:
    """Where cells run."""

    device: str = "cpu"  # "cpu", "cuda", ...; on a cluster also "auto"
    jobs: int | None = None  # cells at once; None for one here, and for as many as a cluster has room for
    # Folder for decoded pictures and frozen features; on a cluster, one that all machines see or each has
    cache: Path | None = None
    engine: Engine = "processes"  # "processes" of this machine, "ray" or "slurm"
    # Of a cluster of Ray; "auto" finds the one of this machine, None starts one. Of Slurm the partition.
    address: str | None = None
    gpu_share: float = 1.0  # of a GPU that a cell takes, on a cluster
    folder: Path | None = None  # where a cluster's own files go, on a disk that all machines see

    @property
    def at_once(self) -> int:
        """Cells at once on this machine."""
        return self.jobs or 1


class Outcome(NamedTuple):
    """How a run went: cells that were done before, are done now, and failed."""

    before: int
    done: int
    failed: int


def run_grid(
    grid: Grid,  # what to run
    out: Path | str,  # folder of the results
    workplace: Workplace | None = None,  # device, cells at once, and cache
    on_news: Callable[[News], None] | None = None,  # called as cells go on and end
    # Called with how many cells were done before; for the trials of a search and for what follows them
    on_before: Callable[[int], None] | None = None,
    # (i, n) runs the i-th of n parts of the grid, counted from 1; the parts are put together by `take_in`
    shard: tuple[int, int] = (1, 1),
) -> Outcome:
    """Run every cell of a grid that has no result yet in `out`.

    Results are kept as they come (see `Store`): after a kill, call it again. A cell counts as done when its row has the
    same settings, defaults included, was made of files with the same content, and its records are there.
    """
    from fairhead.bench.search import final_cells, trial_cells

    workplace = workplace or Workplace()
    store = Store(out)
    with store.alone():
        trials = trial_cells(grid)
        if trials and shard != (1, 1):
            raise InputError("a search needs all its trials in one folder: run it without --shard")
        tried = _run(trials, store, workplace, on_news, on_before)
        finals = _run(final_cells(grid, store)[shard[0] - 1 :: shard[1]], store, workplace, on_news, on_before)
    return Outcome(*(a + b for a, b in zip(tried, finals, strict=True)))


def _run(
    cells: Sequence[Cell],
    store: Store,
    workplace: Workplace,
    on_news: Callable[[News], None] | None,
    on_before: Callable[[int], None] | None,
) -> Outcome:
    """Run those of the cells that have no result yet."""
    from fairhead.bench.fingerprint import contents_of, fingerprint

    known = {(row["cell"], row["fingerprint"]): row.get("contents") for row in store.rows() if has_result(row)}

    def is_done(cell: Cell) -> bool:
        key = (cell.name, fingerprint(cell))
        # Of rows without it, or without the files, there is nothing to compare.
        return key in known and (known[key] is None or contents_of(cell) in (None, known[key]))

    todo = [cell for cell in cells if not is_done(cell)]
    check(todo)
    if on_before is not None:
        on_before(len(cells) - len(todo))
    failed = 0
    for news in run_cells(todo, workplace):
        if news.row is not None:
            store.add(news.row, news.records)
            failed += not has_result(news.row)
        if on_news is not None:
            on_news(news)
    return Outcome(len(cells) - len(todo), len(todo) - failed, failed)


def check(cells: Sequence[Cell]) -> None:
    """Refuse, before any work, methods, models and data that do not exist. Data are read in the cells."""
    from fairhead.bench.fingerprint import method_of
    from fairhead.bench.tasks import check_auxiliary_models
    from fairhead.data import check_spec
    from fairhead.models.fresh import Recipe
    from fairhead.train import TrainingPlan

    seen = set()
    for cell in cells:
        key = (cell.method.name, cell.data.name, cell.backbone.name, cell.trial)
        if key not in seen:
            seen.add(key)
            method_of(cell)
            TrainingPlan.of(**cell.plan)
            check_auxiliary_models(cell)
            Recipe(cell.backbone.model, ("0", "1"), cell.backbone.settings).check()
    # Last: a wrong setting is reported even where there are no data yet.
    for spec in dict.fromkeys(cell.data.read for cell in cells):
        check_spec(spec)


def run_cells(cells: Sequence[Cell], workplace: Workplace) -> Iterator[News]:
    """Run cells and yield what happens, as it happens.

    A cell that raises, or whose process dies, ends with a row of status "failed"; the others go on. Leaving the loop
    early ends all workers.
    """
    if workplace.engine == "processes" or not cells:
        return _in_processes(cells, workplace)
    from fairhead.bench.remote_engines import on_ray, on_slurm

    return on_ray(cells, workplace) if workplace.engine == "ray" else on_slurm(cells, workplace)


def _in_processes(cells: Sequence[Cell], workplace: Workplace) -> Iterator[News]:
    context = _context()
    running: Any = context.Value("i", 0, lock=False)
    waiting = list(reversed(cells))
    workers: list[_Worker] = []
    try:
        workers += [_Worker(context, workplace, running) for _ in range(min(workplace.at_once, len(cells)))]
        while waiting or any(worker.cell for worker in workers):
            for number, worker in enumerate(workers):
                if worker.cell is None and waiting:
                    if not worker.process.is_alive():
                        workers[number] = worker = _Worker(context, workplace, running)
                    worker.give(waiting.pop())
            running.value = sum(worker.cell is not None for worker in workers)
            ready = wait([worker.pipe for worker in workers if worker.cell is not None])
            for worker in workers:
                if worker.pipe in ready:
                    yield worker.take()
    finally:
        for worker in workers:
            worker.end()


def _context() -> Any:
    """How workers start: CUDA does not survive a fork, and to import PyTorch takes each of them seconds.

    On Linux they are forked from a process that has imported what they need, and done nothing with it.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fairhead.bench.cell"])
    return context


class _Worker:
    """A process and the pipe to it."""

    def __init__(self, context: Any, workplace: Workplace, running: Any) -> None:
        self.pipe, other = context.Pipe()
        arguments = (other, workplace, running, dict(os.environ))
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        # Closed here, so that the death of the process shows as the end of the pipe.
        other.close()
        self.cell: Cell | None = None

    def give(self, cell: Cell) -> None:
        self.cell = cell
        with suppress(BrokenPipeError, ConnectionResetError):  # the worker is dead, which `take` will find
            self.pipe.send(cell)

    def take(self) -> News:
        """Wait for the next report."""
        assert self.cell is not None
        cell = self.cell
        try:
            stage, done, total, note, row, records = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            from fairhead.bench.fingerprint import failed_row

            self.process.join()
            code = self.process.exitcode or 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            row, records = failed_row(cell, f"the process of this cell ended with {how}: out of memory?"), None
            stage, done, total, note = "failed", 1, 1, row["error"]
        if row is not None:
            self.cell = None
        return News(cell, stage, done, total, note, row, records)

    def end(self) -> None:
        self.pipe.close()
        if self.cell is None:
            # It leaves by itself when its pipe ends, and takes with it what it has started (compilers).
            self.process.join(10)
        self.process.terminate()
        self.process.join()


def _serve(pipe: Connection, workplace: Workplace, running: Any, environment: Mapping[str, str]) -> None:
    """In a worker: run one cell after the other until the pipe ends."""
    os.environ.clear()  # it may be that of an earlier grid
    os.environ.update(environment)
    # Ctrl-C is for the parent, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Each worker compiles for itself; with as many helpers as cores, each, they would wait for each other.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // workplace.at_once)))
    import torch

    if workplace.device == "cpu":
        # More threads than cores, over all cells, would only wait for each other.
        torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // workplace.at_once)))

    def tell(stage: str, done: int, total: int, note: str) -> None:
        pipe.send((stage, done, total, note, None, None))

    while True:
        try:
            cell: Cell = pipe.recv()
            row, records = work(cell, workplace, tell, lambda: int(running.value))
            pipe.send((row["status"], 1, 1, note_of(row), row, records))
        except (EOFError, BrokenPipeError):  # the parent is gone: so is the reason to work
            return


def work(
    cell: Cell, workplace: Workplace, tell: Callable[[str, int, int, str], None], sharers: Callable[[], int]
) -> tuple[dict[str, Any], Records | None]:
    """In a worker: run one cell; its row, which says so where it failed, and its records."""
    import torch

    from fairhead.bench.fingerprint import failed_row

    try:
        row, records = _run_one(cell, workplace, tell, sharers)
    except BrokenPipeError:
        raise
    except FairheadError as error:
        row, records = failed_row(cell, str(error)), None
    except Exception as error:  # whatever it was, the other cells go on
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        row, records = failed_row(cell, message, traceback.format_exc()), None
    # Hooks tie models into cycles; what is left of one cell would count as memory of the next.
    gc.collect()
    if workplace.device != "cpu":
        torch.cuda.empty_cache()
    return row, records


def _run_one(
    cell: Cell, workplace: Workplace, tell: Callable[[str, int, int, str], None], sharers: Callable[[], int]
) -> tuple[dict[str, Any], Records | None]:
    from fairhead.bench.cell import run_cell, run_trial

    if cell.trial is not None:
        return run_trial(cell, workplace.device, workplace.cache, tell, sharers)
    done = run_cell(cell, workplace.device, workplace.cache, tell, sharers)
    return done.row, done.records


def note_of(row: dict[str, Any]) -> str:
    """A word about a cell that has ended."""
    if row["status"] == "failed":
        return str(row["error"])
    if "validation" in row:
        return f"worst class {100 * row['validation']['worst_class']:.1f} % on the validation rows"
    values = {name: row["figures"][name]["value"] for name in ("accuracy", "EOd") if name in row["figures"]}
    return ", ".join(f"{name} {100 * value:.1f} %" for name, value in values.items() if value is not None)
