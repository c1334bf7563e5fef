"""Where cells run, several at once: in worker processes here, or on a cluster of Ray or of Slurm.

A worker, a machine or a cell's memory that is lost makes a failed row and does no harm to the others. Only the process
that runs the grid writes results.
"""

import gc
import multiprocessing
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fairhead import __version__
from fairhead.bench.grid import Cell
from fairhead.errors import FairheadError, InputError
from fairhead.records import Records

Engine = Literal["processes", "ray", "slurm"]
_LOOK_AGAIN = 2.0  # seconds between looks at the jobs of Slurm


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


def run_cells(cells: Sequence[Cell], workplace: Workplace) -> Iterator[News]:
    """Run cells and yield what happens, as it happens.

    A cell that raises, or whose process dies, ends with a row of status "failed"; the others go on. Leaving the loop
    early ends all workers.
    """
    engines = {"processes": _in_processes, "ray": _on_ray, "slurm": _on_slurm}
    return engines[workplace.engine](cells, workplace) if cells else iter(())


def work(cell: Cell, workplace: Workplace, report: Callable[[News], None], sharers: Callable[[], int]) -> News:
    """In a worker: run one cell; its end, whose row says so where it failed."""
    import torch

    from fairhead.bench.cell import failed_row, run_cell, run_trial

    def tell(stage: str, done: int, total: int, note: str) -> None:
        report(News(cell, stage, done, total, note))

    records = None
    try:
        given = (cell, workplace.device, workplace.cache, tell, sharers)
        if cell.trial is not None:
            row, records = run_trial(*given)
        else:
            done = run_cell(*given)
            row, records = done.row, done.records
    except BrokenPipeError:
        raise
    except FairheadError as error:
        row = failed_row(cell, str(error))
    except Exception as error:  # whatever it was, the other cells go on
        row = failed_row(cell, f"{type(error).__name__}: {' '.join(str(error).split())}", traceback.format_exc())
    # Hooks tie models into cycles; what is left of one cell would count as memory of the next.
    gc.collect()
    if workplace.device != "cpu":
        torch.cuda.empty_cache()
    return _end(cell, row, records)


def _end(cell: Cell, row: dict[str, Any], records: Records | None = None) -> News:
    """The last news of a cell, with a word about its row."""
    if row["status"] == "failed":
        note = str(row["error"])
    elif "validation" in row:
        note = f"worst class {100 * row['validation']['worst_class']:.1f} % on the validation rows"
    else:
        values = {name: row["figures"][name]["value"] for name in ("accuracy", "EOd") if name in row["figures"]}
        note = ", ".join(f"{name} {100 * value:.1f} %" for name, value in values.items() if value is not None)
    return News(cell, row["status"], 1, 1, note, row, records)


def _lost(cell: Cell, message: str) -> News:
    """The end of a cell whose worker was lost."""
    from fairhead.bench.cell import failed_row

    return _end(cell, failed_row(cell, message))


def _in_processes(cells: Sequence[Cell], workplace: Workplace) -> Iterator[News]:
    # CUDA does not survive a fork, and to import PyTorch takes each worker seconds. On Linux workers are forked from a
    # process that has imported what they need, and done nothing with it.
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(["fairhead.bench.cell"])
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
        try:
            news: News = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode or 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            news = _lost(self.cell, f"the process of this cell ended with {how}: out of memory?")
        if news.row is not None:
            self.cell = None
        return news

    def end(self) -> None:
        self.pipe.close()
        if self.cell is None:
            # It leaves by itself when its pipe ends, and takes with it what it has started (compilers).
            self.process.join(10)
        self.process.terminate()
        self.process.join()


def _serve(pipe: Connection, workplace: Workplace, running: Any, environment: Mapping[str, str]) -> None:
    """In a worker: run one cell after the other until the pipe ends."""
    os.environ.clear()  # the process may have the environment of an earlier grid
    os.environ.update(environment)
    # Ctrl-C is for the parent, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # More threads than cores, over all cells, would only wait for each other; so would the helpers of compilers.
    cores = max(1, (os.cpu_count() or 1) // workplace.at_once)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(cores))
    import torch

    if workplace.device == "cpu":
        torch.set_num_threads(min(torch.get_num_threads(), cores))
    with suppress(EOFError, BrokenPipeError):  # the parent is gone: so is the reason to work
        while True:
            pipe.send(work(pipe.recv(), workplace, pipe.send, lambda: int(running.value)))


def _on_ray(cells: Sequence[Cell], workplace: Workplace) -> Iterator[News]:
    """Run cells as Ray tasks, as many at a time as the cluster has room for."""
    ray = _connected(workplace)
    room = ray.cluster_resources()
    if workplace.device == "auto":
        workplace = replace(workplace, device="cuda" if room.get("GPU") else "cpu")
    gpus = 0 if workplace.device == "cpu" else workplace.gpu_share
    # Not tried again: a cell that takes a machine down would take the next one too.
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0, num_returns="streaming")(_stream)
    at_once = workplace.jobs or max(1, int(room.get("GPU", 1) / gpus if gpus else room.get("CPU", 1)))
    waiting, running = list(reversed(cells)), dict[Any, Cell]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                cell = waiting.pop()
                running[task.remote(cell, workplace, __version__)] = cell
            ready, _ = ray.wait(list(running), num_returns=1, fetch_local=False)
            for stream in ready:
                try:
                    news: News = ray.get(next(stream))
                except Exception as error:  # the worker is gone, or had another version
                    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                    news = _lost(running[stream], _why_lost(cause))
                if news.row is not None:
                    del running[stream]
                yield news
    finally:
        for stream in running:
            with suppress(Exception):
                ray.cancel(stream, force=True)
        ray.shutdown()


def _connected(workplace: Workplace) -> Any:
    """Ray, with a cluster."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray: Any = import_module("ray")
            import_module("ray.exceptions")  # a folder of that name here would do for the line before
    except ImportError:
        raise InputError('--engine ray needs ray, which is not installed: pip install "fairhead[ray]"') from None
    if ray.is_initialized():  # by the caller
        return ray
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Without an address Ray itself would join a cluster that happens to run here, or wait for one that has ended.
    address = workplace.address or os.environ.get("RAY_ADDRESS") or "local"
    how = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    how |= {"include_dashboard": False} if address == "local" else {}
    try:
        _try_port(address)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=address, **how)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise InputError(
            f"no cluster of Ray answers at {address} ({_in_one_line(error)}): start one with "
            "`ray start --head`, or leave out --address"
        ) from None
    return ray


def _try_port(address: str) -> None:
    """Raise an OSError if no process listens at HOST:PORT: Ray itself would wait for minutes.

    "auto" is the address that the last `ray start` noted on this machine, whose cluster may have ended since.
    """
    if address == "auto":
        noted = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray", "ray_current_cluster")
        with suppress(OSError, UnicodeDecodeError):
            address = noted.read_text(encoding="utf-8").strip()
    if found := re.fullmatch(r"(?:ray://)?([^/:]+):(\d{1,5})", address):
        socket.create_connection((found[1], int(found[2])), timeout=10).close()


def _stream(cell: Cell, workplace: Workplace, version: str) -> Iterator[News]:
    """In a worker: yield the reports of a cell while a thread runs it."""
    if version != __version__:
        raise FairheadError(
            f"the worker on {os.uname().nodename} has fairhead {__version__} and the run {version}: install one "
            "version everywhere"
        )
    told: queue.Queue[News] = queue.Queue()
    sharers = max(1, round(1 / workplace.gpu_share))
    threading.Thread(target=lambda: told.put(work(cell, workplace, told.put, lambda: sharers)), daemon=True).start()
    while True:
        news = told.get()
        yield news
        if news.row is not None:
            return


def _on_slurm(cells: Sequence[Cell], workplace: Workplace) -> Iterator[News]:
    """Run cells as Slurm jobs, which report only their end; `address` "local" or "debug" runs them here."""
    try:
        import submitit
    except ImportError:
        raise InputError(
            '--engine slurm needs submitit, which is not installed: pip install "fairhead[slurm]"'
        ) from None
    here = workplace.address if workplace.address in ("local", "debug") else None
    folder = Path(workplace.folder or Path.cwd()) / "slurm"
    gpus = 0 if workplace.device == "cpu" else 1
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=here or "slurm")
        executor.update_parameters(name="fairhead", timeout_min=24 * 60, cpus_per_task=1, gpus_per_node=gpus)
        if here is None:
            partition = {} if workplace.address is None else {"slurm_partition": workplace.address}
            executor.update_parameters(slurm_array_parallelism=workplace.jobs or 256, **partition)
        with executor.batch():
            jobs = [(cell, executor.submit(_silently, cell, workplace)) for cell in cells]
    except (RuntimeError, OSError) as error:
        raise InputError(
            f"Slurm does not take the jobs ({_in_one_line(error)}): run this where `sbatch` works, or try "
            "--address local"
        ) from None
    try:
        while jobs:
            ended = [(cell, job) for cell, job in jobs if job.done()]
            jobs = [both for both in jobs if both not in ended]
            for cell, job in ended:
                try:
                    news: News = job.result()
                except Exception as error:
                    news = _lost(cell, _why_lost(error))
                yield news
            if jobs and not ended:
                time.sleep(_LOOK_AGAIN if here is None else 0.1)
    finally:
        for _, job in jobs:
            with suppress(Exception):
                job.cancel()


def _silently(cell: Cell, workplace: Workplace) -> News:
    return work(cell, workplace, lambda news: None, lambda: 1)


def _why_lost(error: BaseException) -> str:
    known = isinstance(error, FairheadError)
    return str(error) if known else f"the worker of this cell was lost ({type(error).__name__}: {_in_one_line(error)})"


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
