"""Several cells at once, each in a process of its own that outlives its cell and may die without harm to the others."""

import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from fairhead.bench.grid import Cell
from fairhead.errors import FairheadError
from fairhead.records import Records


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
    """Where cells run.

    Attributes:
        device: "cpu", "cuda", ...
        jobs: cells at once.
        cache: folder for decoded pictures and frozen features.
    """

    device: str = "cpu"
    jobs: int = 1
    cache: Path | None = None


def run_cells(cells: Sequence[Cell], workplace: Workplace) -> Iterator[News]:
    """Run cells and yield what happens, as it happens.

    A cell that raises, or whose process dies, ends with a row of status "failed"; the others go on. Leaving the loop
    early ends all workers.
    """
    # A fresh interpreter each: CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn")
    running: Any = context.Value("i", 0, lock=False)
    waiting = list(reversed(cells))
    workers: list[_Worker] = []
    try:
        workers += [_Worker(context, workplace, running) for _ in range(min(workplace.jobs, len(cells)))]
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


class _Worker:
    """A process and the pipe to it."""

    def __init__(self, context: Any, workplace: Workplace, running: Any) -> None:
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, workplace, running), daemon=True)
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
            from fairhead.bench.effective import failed_row

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


def _serve(pipe: Connection, workplace: Workplace, running: Any) -> None:
    """In a worker: run one cell after the other until the pipe ends."""
    # Ctrl-C is for the parent, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Each worker compiles for itself; with as many helpers as cores, each, they would wait for each other.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // workplace.jobs)))
    import torch

    if workplace.device == "cpu":
        # More threads than cores, over all cells, would only wait for each other.
        torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // workplace.jobs)))
    from fairhead.bench.cell import run_cell, run_trial
    from fairhead.bench.effective import failed_row

    def tell(stage: str, done: int, total: int, note: str) -> None:
        pipe.send((stage, done, total, note, None, None))

    def report(row: dict[str, Any], records: Records | None, note: str) -> None:
        pipe.send((row["status"], 1, 1, note, row, records))

    while True:
        try:
            cell: Cell = pipe.recv()
        except EOFError:
            return
        answers: Records | None
        try:
            if cell.trial is None:
                done = run_cell(cell, workplace.device, workplace.cache, tell, lambda: int(running.value))
                row, answers = done.row, done.records
                del done
            else:
                row, answers = run_trial(cell, workplace.device, workplace.cache, tell, lambda: int(running.value))
        except BrokenPipeError:  # the parent is gone: so is the reason to work
            return
        except FairheadError as error:
            report(failed_row(cell, str(error)), None, str(error))
        except Exception as error:  # whatever it was, the other cells go on
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            report(failed_row(cell, message, traceback.format_exc()), None, message)
        else:
            report(row, answers, _note(row))
        # Hooks tie models into cycles; what is left of one cell would count as memory of the next.
        gc.collect()
        if workplace.device != "cpu":
            torch.cuda.empty_cache()


def _note(row: dict[str, Any]) -> str:
    """A word about a cell that has ended."""
    if row["status"] == "failed":
        return str(row["error"])
    if "validation" in row:
        return f"worst class {100 * row['validation']['worst_class']:.1f} % on the validation rows"
    values = {name: row["figures"][name]["value"] for name in ("accuracy", "EOd") if name in row["figures"]}
    return ", ".join(f"{name} {100 * value:.1f} %" for name, value in values.items() if value is not None)
