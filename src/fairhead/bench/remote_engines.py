"""Cells on a cluster, of Ray or of Slurm. The process that runs the grid stays the only one that writes results.

A worker, a machine or a cell's memory that is lost makes a failed row, which a second run repeats.
"""

import os
import queue
import re
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from fairhead import __version__
from fairhead.bench.grid import Cell
from fairhead.bench.runner import News, Workplace, note_of, work
from fairhead.errors import FairheadError, InputError

_LOOK_AGAIN = 2.0  # seconds between looks at the jobs of Slurm


def on_ray(cells: Sequence[Cell], workplace: Workplace) -> Iterator[News]:
    """Run cells as tasks of Ray, as many at once as there is room for, and yield what they report."""
    ray = _connected(workplace)
    if workplace.device == "auto":
        workplace = replace(workplace, device="cuda" if ray.cluster_resources().get("GPU") else "cpu")
    gpus = 0 if workplace.device == "cpu" else workplace.gpu_share
    # Not tried again: a cell that takes a machine down would take the next one too.
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0, num_returns="streaming")(_stream)
    room = workplace.jobs or max(1, int(ray.cluster_resources().get("CPU", 1)))
    if gpus:
        room = workplace.jobs or max(1, int(ray.cluster_resources().get("GPU", 1) / gpus))
    waiting, running = list(reversed(cells)), dict[Any, Cell]()
    try:
        while waiting or running:
            while waiting and len(running) < room:
                cell = waiting.pop()
                running[task.remote(cell, workplace, __version__)] = cell
            ready, _ = ray.wait(list(running), num_returns=1, fetch_local=False)
            for stream in ready:
                cell = running[stream]
                try:
                    stage, done, total, note, row, records = ray.get(next(stream))
                except Exception as error:  # the worker is gone, or had another version
                    news = _lost(cell, error, ray)
                else:
                    news = News(cell, stage, done, total, note, row, records)
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
    if ray.is_initialized():  # by whoever called
        return ray
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Without an address Ray itself would join a cluster that happens to run here, or wait for one that has ended.
    address = workplace.address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        _try_port(address)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False,
                **({"include_dashboard": False} if address == "local" else {}),
            )  # fmt: skip
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise InputError(
            f"no cluster of Ray answers at {address} ({_line(error)}): start one with "
            "`ray start --head`, or leave out --address"
        ) from None
    return ray


def _try_port(address: str) -> None:
    """Raise an OSError where nobody listens at HOST:PORT: Ray itself would wait for minutes.

    "auto" is the address that the last `ray start` noted on this machine, whose cluster may have ended since.
    """
    if address == "auto":
        noted = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray", "ray_current_cluster")
        with suppress(OSError, UnicodeDecodeError):
            address = noted.read_text(encoding="utf-8").strip()
    if found := re.fullmatch(r"(?:ray://)?([^/:]+):(\d{1,5})", address):
        socket.create_connection((found[1], int(found[2])), timeout=10).close()


def _stream(cell: Cell, workplace: Workplace, version: str) -> Iterator[tuple[Any, ...]]:
    """In a worker: what happens to a cell, as it happens; a thread does the work meanwhile."""
    if version != __version__:
        raise FairheadError(
            f"the worker on {os.uname().nodename} has fairhead {__version__} and the run {version}: install one "
            "version everywhere"
        )
    news: queue.Queue[tuple[Any, ...]] = queue.Queue()

    def run() -> None:
        row, records = work(cell, workplace, lambda *told: news.put((*told, None, None)), sharers)
        news.put((row["status"], 1, 1, note_of(row), row, records))

    def sharers() -> int:
        return max(1, round(1 / workplace.gpu_share))

    threading.Thread(target=run, daemon=True).start()
    while True:
        found = news.get()
        yield found
        if found[4] is not None:
            return


def on_slurm(cells: Sequence[Cell], workplace: Workplace) -> Iterator[News]:
    """Run cells as jobs of Slurm, and yield their ends; `address` "local" and "debug" run them here."""
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
            jobs = {cell.name: executor.submit(_whole, cell, workplace) for cell in cells}
    except (RuntimeError, OSError) as error:
        raise InputError(
            f"Slurm does not take the jobs ({_line(error)}): run this where `sbatch` works, or try --address local"
        ) from None
    running = {cell.name: cell for cell in cells}
    try:
        while running:
            ended = [name for name in running if jobs[name].done()]
            for name in ended:
                cell = running.pop(name)
                try:
                    row, records = jobs[name].result()
                except Exception as error:
                    yield _lost(cell, error)
                else:
                    yield News(cell, row["status"], 1, 1, note_of(row), row, records)
            if running and not ended:
                time.sleep(_LOOK_AGAIN if here is None else 0.1)
    finally:
        for name in running:
            with suppress(Exception):
                jobs[name].cancel()


def _whole(cell: Cell, workplace: Workplace) -> tuple[Any, Any]:
    return work(cell, workplace, lambda *told: None, lambda: 1)


def _lost(cell: Cell, error: Exception, ray: Any = None) -> News:
    """The end of a cell whose worker did not come back."""
    from fairhead.bench.fingerprint import failed_row

    cause = error if ray is None or not isinstance(error, ray.exceptions.RayTaskError) else error.cause
    if isinstance(cause, FairheadError):
        message = str(cause)
    else:
        message = f"the worker of this cell was lost ({type(cause).__name__}: {_line(cause)})"
    return News(cell, "failed", 1, 1, message, failed_row(cell, message), None)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
