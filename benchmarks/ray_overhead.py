"""What Ray costs beside a process of this machine: the same cells, seconds from start to end.

    python benchmarks/ray_overhead.py [--seconds 30] [--cells 4]

Cells run one at a time under both engines, which take turns. A cell is a training of a small vision transformer that
lasts about `--seconds`. What starting takes (Ray's cluster, a worker's import of torch) stands apart: a grid pays it
once.
"""

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
import pandas as pd
import yaml
from PIL import Image

from fairhead.bench.engines import Engine, News, Workplace
from fairhead.bench.grid_file import read_grid
from fairhead.bench.runner import run_grid
from machine import machine


def write_grid(folder: Path, epochs: int, cells: int) -> Path:
    """Noise that is brighter for one class."""
    rng, rows = np.random.default_rng(0), []
    for i in range(1200):
        Image.fromarray(rng.integers(60 * (i % 2), 160, (32, 32, 3), np.uint8)).save(folder / f"{i}.png")
        rows.append((f"{i}.png", i % 2, "fm"[i // 2 % 2], "train" if i < 800 else "val" if i < 1000 else "test"))
    pd.DataFrame(rows, columns=["path", "label", "sex", "split"]).to_csv(folder / "labels.csv", index=False)
    shape = {"width": 64, "mlp": 128, "image_size": 32, "patch_size": 4}
    grid = {
        "title": "Overhead",
        "data": [
            {"name": "noise", "read": f"images:{folder / 'labels.csv'}", "options": {"groups": ["sex"]}, "group": "sex"}
        ],
        "backbones": [{"name": "small", "model": "vit-4x4", "settings": shape}],
        "methods": ["erm"],
        "seeds": list(range(cells)),
        "plan": {"epochs": epochs, "batch_size": 64, "learning_rate": 0.001},
    }
    (folder / "grid.yaml").write_text(yaml.safe_dump(grid))
    return folder / "grid.yaml"


class Spent(NamedTuple):
    """Seconds."""

    start: float  # until the first cell's end, without its training
    between: float  # from one cell's end to the next one's, without its training, on average
    trained: float  # a cell, on average


def run(engine: Engine, grid: Path, out: Path) -> Spent:
    ends, trained = [time.perf_counter()], []

    def note(news: News) -> None:
        if news.row is not None:
            ends.append(time.perf_counter())
            trained.append(news.row["cost"]["seconds"])

    assert run_grid(read_grid(grid), out, Workplace(engine=engine, jobs=1), note).failed == 0
    beside = [end - begin - own for (begin, end), own in zip(pairwise(ends), trained, strict=True)]
    return Spent(beside[0], mean(beside[1:]), mean(trained))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--cells", type=int, default=4)
    asked = parser.parse_args()
    engines: tuple[Engine, ...] = ("processes", "ray")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tried = run("processes", write_grid(folder, 2, 2), folder / "try").trained / 2
        grid = write_grid(folder, max(1, round(asked.seconds / tried)), asked.cells)
        print(machine())
        found: dict[str, list[Spent]] = {engine: [] for engine in engines}
        for turn, order in enumerate((engines, engines[::-1])):
            for engine in order:
                spent = run(engine, grid, folder / f"{engine}-{turn}")
                found[engine].append(spent)
                words = (
                    f"start {spent.start:5.1f} s, a cell {spent.trained:5.1f} s and {spent.between:5.2f} s beside it"
                )
                print(f"{engine:<10} {words}", flush=True)
    # The better of two turns each: what else the machine does only adds.
    more = min(one.between for one in found["ray"]) - min(one.between for one in found["processes"])
    print(f"Ray adds {more:.2f} s a cell: {100 * more / asked.seconds:.1f} % of a cell of {asked.seconds:g} s")


if __name__ == "__main__":
    main()
