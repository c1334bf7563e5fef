"""What an audit costs, next to Fairlearn's bootstrap and to pandas, polars and pyarrow reading the same file.

    python benchmarks/audit.py [--repeats 5] [--fairlearn-boot 30] [--rows 100000 1000000 10000000] [--decimals 4]

1. The same group rates, gaps and intervals of four metrics, 20 000 rows, 8 groups, 2000 replicates. Fairlearn would run
   for minutes, so two short runs of it give the seconds that one replicate takes, and 2000 of them are its time.
2. Reading and auditing a CSV against pandas, polars and pyarrow (those that are installed) reading the same file, all
   warm, each in a process of its own, since one would help the other: fairhead has glibc keep the memory that is
   freed, and where it has, pandas too reads small files in less time. That is shown as well. Processor time stands
   beside: others may use the machine.
3. What max-T adds to an audit: with it, and with all differences of groups taken for equally noisy.
4. Peak memory of auditing a CSV of ten million rows, in a process of its own.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd

import fairhead
from fairhead.records import Records
from fairhead.stats.max_t import Contrasts
from machine import machine

REPLICATES = 2000
RACES = np.array(["asian", "black", "hispanic", "indian", "native", "other", "pacific", "white"])


def rows(n: int, seed: int = 0, decimals: int = 4) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    race = rng.integers(8, size=n)
    y = (rng.random(n) < 0.4).astype(int)
    score = np.clip(0.5 + 0.35 * (y - 0.5) * (1 + race / 10) + rng.normal(0, 0.2, n), 0, 1).round(decimals)
    sex = np.where(rng.random(n) < 0.5, "f", "m")
    return pd.DataFrame({"y": y, "yhat": (score > 0.5).astype(int), "race": RACES[race], "sex": sex, "score": score})


def fairlearn_seconds(frame: pd.DataFrame, n_boot: int) -> float:
    from fairlearn.metrics import MetricFrame, false_positive_rate, selection_rate, true_positive_rate
    from sklearn.metrics import accuracy_score

    start = time.perf_counter()
    result = MetricFrame(
        metrics={
            "selection_rate": selection_rate,
            "TPR": true_positive_rate,
            "FPR": false_positive_rate,
            "accuracy": accuracy_score,
        },
        y_true=frame["y"],
        y_pred=frame["yhat"],
        sensitive_features=frame["race"],
        n_boot=n_boot,
        ci_quantiles=[0.025, 0.975],
        random_state=0,
    )
    result.difference_ci()
    return time.perf_counter() - start


def audit_arrays(frame: pd.DataFrame) -> None:
    records = Records.from_arrays(
        label=frame["y"].to_numpy(), prediction=frame["yhat"].to_numpy(), groups={"race": frame["race"].to_numpy()}
    )
    fairhead.audit(records, metrics=["DP", "EOp", "FPR_gap", "accuracy_gap"], n_boot=REPLICATES)


def records_of(path: Path, score: str | None = None) -> Records:
    return Records.read(path, label="y", prediction="yhat", score=score, groups=["race", "sex"])


def audit_file(path: Path, score: str | None = None) -> None:
    fairhead.audit(records_of(path, score))


def bootstrap(repeats: int, fairlearn_boot: int) -> None:
    frame = rows(20_000)
    ours = partial(audit_arrays, frame)
    ours()
    few = max(2, fairlearn_boot // 10)
    each, own = [], []
    for _ in range(repeats):  # they take turns
        more, less = fairlearn_seconds(frame, fairlearn_boot), fairlearn_seconds(frame, few)
        each.append((more - less) / (fairlearn_boot - few))
        start = time.perf_counter()
        ours()
        own.append(time.perf_counter() - start)
    theirs, mine = float(np.median(each)) * REPLICATES, float(np.median(own))
    print(f"Bootstrap, 20 000 rows, 8 groups, 4 metrics, {REPLICATES} replicates:")
    print(f"  fairhead {1000 * mine:8.1f} ms, from arrays to all intervals")
    print(
        f"  Fairlearn {theirs:7.1f} s, scaled from {1000 * np.median(each):.1f} ms a replicate "
        f"(runs of {few} and {fairlearn_boot})"
    )
    print(f"  ratio {theirs / mine:,.0f} (wanted: at least 5,000)")


def write(path: Path, n: int, decimals: int = 4, step: int = 1_000_000) -> None:
    for start in range(0, n, step):
        part = rows(min(step, n - start), start, decimals)
        part.to_csv(path, index=False, mode="a", header=start == 0)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """On the clock, and of the processor."""
    start, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - busy


def read_csv(library: str, path: Path) -> object:
    return import_module(library).read_csv(path)


def max_t(path: Path, repeats: int) -> None:
    """Both take turns in one process."""
    records = records_of(path)
    times: list[tuple[float, float]] = []
    for _ in range(3 * repeats + 2):
        with_it = seconds(partial(fairhead.audit, records))[1]
        with patch.object(Contrasts, "of", return_value=None):
            times.append((with_it, seconds(partial(fairhead.audit, records))[1]))
    with_it, without = 1000 * np.median(times[2:], axis=0)
    print(
        f"An audit of {len(records):,} rows once read, processor time: {with_it:.1f} ms, without max-T {without:.1f} ms"
    )
    print(f"  ratio {with_it / without:.2f} (wanted: at most 1.3)")


def seconds_once_read(path: Path) -> tuple[float, float]:
    records = records_of(path)
    return seconds(partial(fairhead.audit, records))


def seconds_of_pandas_after_fairhead(path: Path) -> tuple[float, float]:
    records_of(path)
    return seconds(partial(pd.read_csv, path))


def reading(folder: Path, repeats: int, sizes: list[int], decimals: int) -> None:
    libraries = [name for name in ("pandas", "polars", "pyarrow.csv") if find_spec(name.partition(".")[0])]
    columns = f"label, prediction, 8 races, 2 sexes and a score of {decimals} decimals"
    print(f"A CSV with {columns}; both group columns audited:")
    for n in sizes:
        path = folder / f"{n}.csv"
        write(path, n, decimals)
        peers: dict[str, Callable[[], tuple[float, float]]] = {
            **{f"{name}.read_csv": partial(seconds, partial(read_csv, name, path)) for name in libraries},
            "Records.read": partial(seconds, partial(records_of, path)),
            "Records.read with score": partial(seconds, partial(records_of, path, "score")),
            "audit": partial(seconds, partial(audit_file, path)),
            "audit with score": partial(seconds, partial(audit_file, path, "score")),
            "audit, once read": partial(seconds_once_read, path),
            "pandas, after fairhead": partial(seconds_of_pandas_after_fairhead, path),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
        with ExitStack() as open_processes:
            processes = {
                name: open_processes.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
                for name in peers
            }
            for turn in range(repeats + 2):  # the first two warm up
                for name in list(peers) if turn % 2 else list(reversed(peers)):
                    found[name].append(processes[name].submit(peers[name]).result())
        median = {name: np.median(times[2:], axis=0) for name, times in found.items()}
        for name, value in median.items():
            ratio, of_processor = value / median["pandas.read_csv"]
            print(
                f"  {n:>10,} rows  {name:<23} {1000 * value[0]:8.1f} ms  ratio {ratio:.2f}"
                f"  (processor: {1000 * value[1]:.1f} ms, {of_processor:.2f})",
                flush=True,
            )
    print("  wanted at 100,000 rows: audit 1.5, with score 3; from a million on 1 and 1.5, of many decimals 3")


_MEASURE = """
import re, sys
from pathlib import Path
import fairhead
from fairhead.records import Records
records = Records.read(sys.argv[1], label="y", prediction="yhat", groups=["race", "sex"])
fairhead.audit(records, intersections=True)
# Not getrusage: its maximum holds what the parent process had before this one began.
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(len(records), int(peak[1]) * 1024)
"""


def memory(folder: Path, n: int) -> None:
    path = folder / "large.csv"
    write(path, n)
    start_time = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _MEASURE, str(path)], capture_output=True, text=True, check=True)
    read, peak = map(int, done.stdout.split())
    seconds = time.perf_counter() - start_time
    print(f"A CSV of {read:,} rows ({path.stat().st_size / 1e6:.0f} MB), audited in a process of its own:")
    print(f"  peak memory {peak / 1e6:.0f} MB (wanted: under 1000), {seconds:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fairlearn-boot", type=int, default=30)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--memory-rows", type=int, default=10_000_000)
    parser.add_argument("--decimals", type=int, default=4, help="of scores; of more than 5, cells are counted")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # Fairlearn's own, on future pandas
    print(machine())
    if options.fairlearn_boot:
        bootstrap(options.repeats, options.fairlearn_boot)
    with tempfile.TemporaryDirectory() as folder:
        reading(Path(folder), options.repeats, options.rows, options.decimals)
        max_t(Path(folder) / f"{options.rows[0]}.csv", options.repeats)
        if options.memory_rows:
            memory(Path(folder), options.memory_rows)


if __name__ == "__main__":
    main()
