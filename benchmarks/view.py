"""How long a click on the map of `fairhead view` takes: 144 heads, 5,000 rows, wanted under 100 ms.

Run: python benchmarks/view.py. Figures of random features of CLIP B/16's shape; a click is one edit with its 40 control
sets, by the direct effect. Medians of interleaved repeats, by the clock and of the processor.
"""

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fairhead.locate.directions import Concept, Task
from fairhead.locate.gap_question import GapQuestion
from fairhead.locate.head_features import Features
from fairhead.locate.live import Live
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.rows import Evaluation
from machine import machine

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


class Seconds(NamedTuple):
    """What a click takes."""

    clock: float
    processor: float


def clicked(live: Live, heads: list[list[int]], kind: str) -> Seconds:
    start, used = time.perf_counter(), time.process_time()
    live.edit(heads, kind)
    return Seconds(time.perf_counter() - start, time.process_time() - used)


def said_of(found: Sequence[Seconds]) -> str:
    clock, processor = (1e3 * statistics.median(part) for part in zip(*found, strict=True))
    return f"{clock:.0f} ({processor:.0f}) ms"


def main() -> None:
    """Time clicks."""
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}")
    for classes in (2, 9):
        live = Live(question(classes), LocatePlan(), Path())
        rng = np.random.default_rng(1)
        for kind in ("mean", "project"):
            first = clicked(live, [[11, 3]], kind)
            took: dict[int, list[Seconds]] = {1: [], 4: [], 12: [], 36: []}
            for _ in range(9):
                for size, seconds in took.items():
                    heads = [[i % LAYERS, int(rng.integers(HEADS // 2)) + 6 * (i // 24)] for i in range(size)]
                    seconds.append(clicked(live, heads, kind))
            said = ", ".join(f"{size} heads {said_of(found)}" for size, found in took.items())
            print(f"{classes} classes, {kind:8} first {said_of([first])}; then {said}")
    print("by the clock (of the processor); wanted: under 100 ms")


if __name__ == "__main__":
    main()
