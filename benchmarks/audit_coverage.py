"""How often intervals hold the truth, gaps are found and chance makes a headline, beside two plain methods.

    python benchmarks/audit_coverage.py [--repeats 1000] [--jobs 1] [--only TEXT] [--out FOLDER]

Made data of which the truth is known: rows with label 1 in groups of given sizes, and hits with given rates. Beside
fairhead stand the percentile bootstrap of the gap, and Newcombe's interval of the observed extreme pair, with
Bonferroni's correction for the number of pairs. Each line of a table goes to a file in --out as soon as it is known; a
line that is there already is not made a second time, so the command alone prints tables that another machine made.
"""

import argparse
import json
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

import fairhead
from fairhead.audit import drift
from fairhead.audit.audit_results import audit_verdicts
from fairhead.records import Records

Array = NDArray[np.float64]
Rng = np.random.Generator
REPLICATES = 2000  # an audit's own default
CHUNK = 50  # repeats at a time, each with random numbers of its own, so that figures do not depend on --jobs
LAW = [4000, 300, 200, 100, 60, 40, 30, 30]
# Rows with label 1 of each group, and their true positive rates.
GAPS = {
    "2 groups, even": ([500, 500], [0.8, 0.8]),
    "2 groups, a gap": ([500, 500], [0.8, 0.7]),
    "2 groups, one small": ([900, 60], [0.8, 0.7]),
    "4 groups, even": ([300] * 4, [0.8] * 4),
    "4 groups, gaps": ([400, 300, 200, 100], [0.9, 0.8, 0.85, 0.7]),
    "8 unequal groups, even": (LAW, [0.85] * 8),
    "8 unequal groups, the large ones differ": (LAW, [0.92, 0.78] + [0.85] * 6),
    "8 unequal groups, the two smallest differ": (LAW, [0.85] * 6 + [0.92, 0.78]),
    "8 unequal groups, the smallest is lower": (LAW, [0.85] * 7 + [0.7]),
    "7 groups, three of 10 to 30 rows, even": ([4000, 300, 200, 100, 30, 15, 10], [0.8] * 7),
    "COMPAS, 6 races": ([1901, 966, 232, 133, 9, 10], [0.72, 0.523, 0.44, 0.323, 0.556, 0.9]),
}
# Rates of both models, and the share of rows on which they have the same luck; 600 rows a group.
CHANGES = {
    "2 groups, the second model even": ([0.8, 0.65], [0.75, 0.75], 0.8),
    "2 groups, the second model even, hardly alike": ([0.8, 0.65], [0.75, 0.75], 0.0),
    "2 groups, a smaller gap": ([0.8, 0.65], [0.78, 0.72], 0.8),
    "2 groups, reversed": ([0.6, 0.75], [0.75, 0.6], 0.8),
    "4 groups, the second model even": ([0.8, 0.75, 0.7, 0.65], [0.75] * 4, 0.8),
    "2 groups, both models even": ([0.75, 0.75], [0.75, 0.75], 0.5),
}
# As of gaps, of the mean gap over all pairs of groups.
PAIRS = {
    "4 groups, even": ([300] * 4, [0.8] * 4),
    "4 groups, gaps": ([400, 300, 200, 100], [0.9, 0.8, 0.85, 0.7]),
    "8 groups, one lower": ([125] * 8, [0.74] + [0.8] * 7),
}
# How far scores of positives lie above those of negatives in a group; in the reference group it is 1.5.
ROC = (1.5, 1.3, 1.2, 0.7)
COLUMNS = ([0.5, 0.5], [0.5, 0.3, 0.15, 0.05], [0.8, 0.2], [0.3, 0.2, 0.2, 0.15, 0.1, 0.05], [0.6, 0.3, 0.1])


class Line(NamedTuple):
    """A line of a table: what a repeat finds, yes or no by column."""

    name: str
    once: Callable[[Rng], list[bool]]


def records(rows: NDArray[np.int64], hit: NDArray[np.bool_]) -> Records:
    group = np.repeat(np.arange(len(rows)), rows)
    label = np.ones(len(group), int)
    return Records.from_arrays(label, hit.astype(int), groups={"g": group}, classes=[0, 1])


def held(found: Any, truth: float) -> bool:
    return bool((found.low or 0.0) - 1e-9 <= truth <= (found.high or 0.0) + 1e-9)


def newcombe(hits: NDArray[Any], rows: NDArray[Any], alpha: float) -> tuple[float, float]:
    z = norm.ppf(1 - alpha / 2)
    p = hits / rows
    half = z * np.sqrt(p * (1 - p) / rows + z**2 / (4 * rows**2))
    low, high = ((p + z**2 / (2 * rows) + sign * half) / (1 + z**2 / rows) for sign in (-1, 1))
    i, j = int(p.argmax()), int(p.argmin())
    gap = p[i] - p[j]
    return gap - np.hypot(p[i] - low[i], high[j] - p[j]), gap + np.hypot(high[i] - p[i], p[j] - low[j])


def one_gap(rng: Rng, rows: Array, rates: Array) -> list[bool]:
    n = rng.multinomial(int(rows.sum()), rows / rows.sum())
    luck = rng.random(int(n.sum())) < np.repeat(rates, n)
    e = fairhead.audit(records(n, luck), metrics=["EOp"], n_boot=REPLICATES)["EOp"]
    kept = n >= 10
    hits, n = np.array([part.sum() for part in np.split(luck, np.cumsum(n)[:-1])])[kept], n[kept]
    star = np.ptp(rng.binomial(n, hits / n, size=(REPLICATES, len(n))) / n, axis=1)
    ends = [
        (e.low or 0.0, e.high or 0.0),
        tuple(np.quantile(star, [0.025, 0.975])),
        newcombe(hits, n, 0.05 / (len(n) * (len(n) - 1) / 2)),
    ]
    truth = float(np.ptp(rates[kept]))
    holds = [max(low, 0.0) - 1e-9 <= truth <= high + 1e-9 for low, high in ends]
    return [*holds, *(low > 0 for low, _ in ends)]


def one_change(rng: Rng, a: Array, b: Array, same: float) -> list[bool]:
    rows, group = np.full(len(a), 600), np.repeat(np.arange(len(a)), 600)
    truth = float(np.ptp(b) - np.ptp(a))
    luck = rng.random(len(group))
    other = np.where(rng.random(len(group)) < same, luck, rng.random(len(group)))
    hits = luck < a[group], other < b[group]
    both = [records(rows, hit) for hit in hits]
    d = fairhead.compare(*both, metrics=["EOp"], n_boot=REPLICATES, n_perm=REPLICATES).differences[0]
    cells = 4 * group + 2 * hits[0] + hits[1]
    counts = np.bincount(cells, minlength=4 * len(a)).reshape(-1, 4)
    star = np.stack([rng.multinomial(600, c / 600, size=REPLICATES) for c in counts], axis=1) / 600
    change = np.ptp(star[..., 1] + star[..., 3], axis=1) - np.ptp(star[..., 2] + star[..., 3], axis=1)
    low, high = np.quantile(change, [0.025, 0.975])
    return [held(d, truth), bool(low <= truth <= high), d.p is not None and d.p <= 0.05]


def mean_of_pairs(rng: Rng, rows: Array, rates: Array) -> list[bool]:
    truth = float(np.abs(rates[:, None] - rates).sum() / (len(rates) * (len(rates) - 1)))
    n = rng.multinomial(int(rows.sum()), rows / rows.sum())
    luck = rng.random(int(n.sum())) < np.repeat(rates, n)
    return [held(fairhead.audit(records(n, luck), metrics=["EOp_pairwise"], n_boot=REPLICATES)["EOp_pairwise"], truth)]


def lowest(rng: Rng, n: int, minority: float, accuracy: float) -> list[bool]:
    """Both labels are as accurate in both groups; where the minority has too few rows, the figure is "at most"."""
    label, group = rng.integers(2, size=n), (rng.random(n) < minority).astype(int)
    said = np.where(rng.random(n) < accuracy, label, 1 - label)
    of = Records.from_arrays(label, said, groups={"g": group})
    found = fairhead.audit(of, metrics=["worst_group_accuracy"], n_boot=REPLICATES)["worst_group_accuracy"]
    return [held(found, accuracy)]


def weighted(rng: Rng) -> list[bool]:
    """A survey that reaches selected rows of one group four times as often as others, and weights that know it."""
    rate, chance = np.array([0.25, 0.55]), np.array([[0.25, 0.5], [0.25, 1.0]])
    group = rng.integers(2, size=12_000)
    said = (rng.random(12_000) < rate[group]).astype(int)
    kept = np.flatnonzero(rng.random(12_000) < chance[group, said])[:1500]
    weight = 1 / chance[group, said][kept]
    of = Records.from_arrays(rng.integers(2, size=1500), said[kept], groups={"g": group[kept]}, weight=weight)
    return [held(fairhead.audit(of, metrics=["DP"], n_boot=REPLICATES)["DP"], 0.3)]


def drifted(rng: Rng, before: Array, after: Array) -> list[bool]:
    """Selection rates of two groups in two samples of different rows, 800 and 600."""
    samples = []
    for rates, n in ((before, 800), (after, 600)):
        group = rng.integers(2, size=n)
        said = (rng.random(n) < rates[group]).astype(int)
        samples.append(Records.from_arrays(rng.integers(2, size=n), said, groups={"g": group}))
    found = drift(*samples, metrics=["DP"], n_boot=REPLICATES).differences
    return [held(next(d for d in found if d.metric == "DP"), float(np.ptp(after) - np.ptp(before)))]


def true_area(effect: float) -> float:
    """The area between two ROC curves of normal scores."""
    at = norm.ppf((np.arange(20_000) + 0.5) / 20_000)
    return float(np.abs(norm.cdf(1.5 + at) - norm.cdf(effect + at)).mean())


def area_between(rng: Rng, effect: float) -> list[bool]:
    """750 rows a group."""
    group, label = rng.integers(2, size=1500), rng.integers(2, size=1500)
    score = 1 / (1 + np.exp(1 - label * np.array([1.5, effect])[group] - rng.normal(size=1500)))
    scored = Records.from_arrays(label, scores=score, groups={"g": group})
    found = fairhead.audit(scored, metrics=["ABROCA"], n_boot=REPLICATES, reference={"g": 0})["ABROCA"]
    return [held(found, true_area(effect))]


def headline(rng: Rng, columns: int, crossed: bool) -> list[bool]:
    y = rng.integers(2, size=2000)
    groups = {f"g{k}": rng.choice(len(share), size=2000, p=share) for k, share in enumerate(COLUMNS[:columns])}
    even = Records.from_arrays(y, np.where(rng.random(2000) < 0.75, y, 1 - y), groups=groups)
    metrics = ["DP", "EOp", "EOd", "impact_ratio"]
    result = fairhead.audit(even, metrics=metrics, n_boot=REPLICATES, intersections=crossed)
    return [any(sentence.tone == "bad" for sentence in audit_verdicts(result))]


def arrays(once: Callable[..., list[bool]], *given: Any) -> Callable[[Rng], list[bool]]:
    return partial(_with_arrays, once, [np.array(part) if isinstance(part, list) else part for part in given])


def _with_arrays(once: Callable[..., list[bool]], given: list[Any], rng: Rng) -> list[bool]:
    return once(rng, *given)


TABLES = {
    "a gap | fairhead covers | bootstrap | Newcombe | fairhead finds | bootstrap | Newcombe": [
        Line(name, arrays(one_gap, *given)) for name, given in GAPS.items()
    ],
    "a change of a gap | fairhead covers | bootstrap | p ≤ 0.05": [
        Line(name, arrays(one_change, *given)) for name, given in CHANGES.items()
    ],
    "another figure | fairhead covers": [
        *(Line(f"mean gap over pairs, {name}", arrays(mean_of_pairs, *given)) for name, given in PAIRS.items()),
        *(Line(f"area between ROC curves, {true_area(e):.3f}", arrays(area_between, e)) for e in ROC),
        Line("lowest accuracy of group and label, 1,000 rows, a minority of 20 %", arrays(lowest, 1000, 0.2, 0.8)),
        Line("lowest accuracy (upper bound), 200 rows, a minority of 5 % is excluded", arrays(lowest, 200, 0.05, 0.8)),
        Line("gap with sampling weights", weighted),
        Line("change of a gap between two files, smaller", arrays(drifted, [0.2, 0.6], [0.4, 0.5])),
        Line("change of a gap between two files, the second even", arrays(drifted, [0.3, 0.5], [0.5, 0.5])),
    ],
    "group columns, all without a gap | false findings": [
        Line(f"{n}{' and their intersections' if crossed else ''}", arrays(headline, n, crossed))
        for n, crossed in ((1, False), (3, False), (5, False), (3, True))
    ],
}


def chunk(once: Callable[[Rng], list[bool]], number: int, repeats: int) -> Any:
    rng = np.random.default_rng([0, number])
    return np.sum([once(rng) for _ in range(repeats)], axis=0)


def shares(line: Line, repeats: int, pool: ProcessPoolExecutor) -> list[float]:
    sizes = [CHUNK] * (repeats // CHUNK) + [repeats % CHUNK] * (repeats % CHUNK > 0)
    counts = pool.map(partial(chunk, line.once), range(len(sizes)), sizes)
    return [float(100 * count / repeats) for count in sum(counts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="lines whose name has this text")
    parser.add_argument("--out", type=Path, help="folder of one JSON file a line")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs) as pool:
        for heading, lines in TABLES.items():
            print(f"\n| {heading} |\n|{'---|' * (heading.count('|') + 1)}")
            for line in lines:
                if options.only not in line.name:
                    continue
                name = "-".join(re.findall(r"\w+", f"{heading.split('|')[0]} {line.name}"))
                path = None if options.out is None else options.out / f"{name}.json"
                if path is not None and path.exists():
                    found = json.loads(path.read_text())["percent"]
                else:
                    found = shares(line, options.repeats, pool)
                if path is not None and not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(json.dumps({"line": line.name, "repeats": options.repeats, "percent": found}))
                print(f"| {' | '.join([line.name, *(f'{share:.1f}' for share in found)])} |", flush=True)


if __name__ == "__main__":
    main()
