"""How long a click on the map of `fairhead view` takes: 144 heads, 5,000 rows, wanted under 100 ms.

Run: python benchmarks/view.py. Figures of random features of CLIP B/16's shape; a click is one edit with its 40 control
sets, by the direct effect. Median of interleaved repeats.
"""

import platform
import statistics
import time
from pathlib import Path

import numpy as np

from fairhead.locate.directions import Concept, Task
from fairhead.locate.gap_question import GapQuestion
from fairhead.locate.head_features import Features
from fairhead.locate.live import Live
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.rows import Evaluation
from fairhead.locate.session import Opened

ROWS, LAYERS, HEADS, WIDTH, OUT = 5_000, 12, 12, 64, 512


def question(classes: int) -> GapQuestion:
    """A gap in random features."""
    rng = np.random.default_rng(0)
    labels, groups = rng.integers(0, classes, ROWS), rng.integers(0, 2, ROWS)
    heads = rng.normal(size=(ROWS, LAYERS, HEADS, WIDTH)).astype(np.float32)
    heads[:, 11, 3] += 0.5 * groups[:, None]
    maps = rng.normal(scale=0.02, size=(LAYERS, HEADS, OUT, WIDTH)).astype(np.float32)
    others = rng.normal(size=(ROWS, 13, OUT)).astype(np.float32)
    output = np.einsum("nlhd,lhod->no", heads, maps, optimize=True) + others.sum(1)
    names = tuple(f"class {c}" for c in range(classes))
    task = Task(names, rng.normal(size=(classes, OUT)), np.zeros(classes), "random")
    rows = Evaluation(labels, names, groups, ("f", "m"), "sex", np.arange(ROWS).astype(str))
    features = Features(heads, others, output, np.ones((ROWS, LAYERS), dtype=np.float32), maps)
    concept = Concept("sex", ("f", "m"), rng.normal(size=OUT), "random")
    return GapQuestion(features, rows, task, concept)


def main() -> None:
    """Time clicks."""
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    for classes in (2, 9):
        live = Live(Opened(question(classes), {}, lambda *_: None, lambda _: np.zeros(0)), LocatePlan(), Path())
        rng = np.random.default_rng(1)
        for kind in ("mean", "project"):
            start = time.perf_counter()
            live.edit([[11, 3]], kind)
            first = time.perf_counter() - start
            took: dict[int, list[float]] = {1: [], 4: [], 12: [], 36: []}
            for _ in range(9):
                for size, seconds in took.items():
                    heads = [[i % LAYERS, int(rng.integers(HEADS // 2)) + 6 * (i // 24)] for i in range(size)]
                    start = time.perf_counter()
                    live.edit(heads, kind)
                    seconds.append(time.perf_counter() - start)
            said = ", ".join(f"{size} heads {1e3 * statistics.median(s):.0f} ms" for size, s in took.items())
            print(f"{classes} classes, {kind:8} first {1e3 * first:.0f} ms; then {said} (wanted: under 100)")


if __name__ == "__main__":
    main()
