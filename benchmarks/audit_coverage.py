"""How often intervals hold the truth, gaps are found and chance makes a headline, beside two plain methods.

    python benchmarks/audit_coverage.py [--repeats 1000]

Made data of which the truth is known: rows with label 1 in groups of given sizes, and hits with given rates. Beside
fairhead stand the percentile bootstrap of the gap, and Newcombe's interval of the observed extreme pair, with
Bonferroni's correction for the number of pairs.
"""

import argparse
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

import fairhead
from fairhead.audit.audit_results import audit_verdicts
from fairhead.records import Records

Array = NDArray[np.float64]
LAW = np.array([4000, 300, 200, 100, 60, 40, 30, 30])
COMPAS = np.array([1901, 966, 232, 133, 9, 10])
# Rows with label 1 of each group, and their true positive rates.
GAPS = {
    "2 groups, even": ([500, 500], [0.8, 0.8]),
    "2 groups, a gap": ([500, 500], [0.8, 0.7]),
    "2 groups, one small": ([900, 60], [0.8, 0.7]),
    "4 groups, even": ([300] * 4, [0.8] * 4),
    "4 groups, gaps": ([400, 300, 200, 100], [0.9, 0.8, 0.85, 0.7]),
    "8 unequal groups, even": (LAW, [0.85] * 8),
    "8 unequal groups, the large ones differ": (LAW, [0.92, 0.78] + [0.85] * 6),
    "7 groups, three of 10 to 30 rows, even": ([4000, 300, 200, 100, 30, 15, 10], [0.8] * 7),
    "COMPAS, 6 races": (COMPAS, [0.72, 0.523, 0.44, 0.323, 0.556, 0.9]),
}
# The same of the mean gap over all pairs of groups.
PAIRS = {
    "4 groups, even": ([300] * 4, [0.8] * 4),
    "4 groups, gaps": ([400, 300, 200, 100], [0.9, 0.8, 0.85, 0.7]),
    "8 groups, one lower": ([125] * 8, [0.74] + [0.8] * 7),
}
# How far scores of positives lie above those of negatives in a group; in the reference group it is 1.5.
ROC = (1.5, 1.3, 1.2, 0.7)
# Rates of both models, and the share of rows on which they have the same luck; 600 rows a group.
CHANGES = {
    "2 groups, the second model even": ([0.8, 0.65], [0.75, 0.75], 0.8),
    "2 groups, the second model even, hardly alike": ([0.8, 0.65], [0.75, 0.75], 0.0),
    "2 groups, a smaller gap": ([0.8, 0.65], [0.78, 0.72], 0.8),
    "2 groups, reversed": ([0.6, 0.75], [0.75, 0.6], 0.8),
    "4 groups, the second model even": ([0.8, 0.75, 0.7, 0.65], [0.75] * 4, 0.8),
    "2 groups, both models even": ([0.75, 0.75], [0.75, 0.75], 0.5),
}


def records(rows: NDArray[np.int64], hit: NDArray[np.bool_]) -> Records:
    group = np.repeat(np.arange(len(rows)), rows)
    label = np.ones(len(group), int)
    return Records.from_arrays(label, hit.astype(int), groups={"g": group}, classes=[0, 1])


def newcombe(hits: NDArray[Any], rows: NDArray[Any], alpha: float) -> tuple[float, float]:
    z = norm.ppf(1 - alpha / 2)
    p = hits / rows
    half = z * np.sqrt(p * (1 - p) / rows + z**2 / (4 * rows**2))
    low, high = ((p + z**2 / (2 * rows) + sign * half) / (1 + z**2 / rows) for sign in (-1, 1))
    i, j = int(p.argmax()), int(p.argmin())
    gap = p[i] - p[j]
    return gap - np.hypot(p[i] - low[i], high[j] - p[j]), gap + np.hypot(high[i] - p[i], p[j] - low[j])


def one_gap(rows: Array, rates: Array, repeats: int) -> str:
    rng = np.random.default_rng(0)
    held, found, share = np.zeros(3), np.zeros(3), rows / rows.sum()
    for _ in range(repeats):
        n = rng.multinomial(int(rows.sum()), share)
        luck = rng.random(int(n.sum())) < np.repeat(rates, n)
        e = fairhead.audit(records(n, luck), metrics=["EOp"], n_boot=500)["EOp"]
        kept = n >= 10
        hits, n = np.array([part.sum() for part in np.split(luck, np.cumsum(n)[:-1])])[kept], n[kept]
        star = np.ptp(rng.binomial(n, hits / n, size=(500, len(n))) / n, axis=1)
        ends = [
            (e.low or 0.0, e.high or 0.0),
            tuple(np.quantile(star, [0.025, 0.975])),
            newcombe(hits, n, 0.05 / (len(n) * (len(n) - 1) / 2)),
        ]
        truth = float(np.ptp(rates[kept]))
        held += [max(low, 0.0) - 1e-9 <= truth <= high + 1e-9 for low, high in ends]
        found += [low > 0 for low, _ in ends]
    return " | ".join([*(f"{100 * h:.1f}" for h in held / repeats), *(f"{100 * f:.0f}" for f in found / repeats)])


def one_change(a: Array, b: Array, same: float, repeats: int) -> str:
    rng = np.random.default_rng(0)
    rows = np.full(len(a), 600)
    truth = float(np.ptp(b) - np.ptp(a))
    held, below, group = np.zeros(2), 0, np.repeat(np.arange(len(a)), 600)
    for _ in range(repeats):
        luck = rng.random(len(group))
        other = np.where(rng.random(len(group)) < same, luck, rng.random(len(group)))
        hits = luck < a[group], other < b[group]
        both = [records(rows, hit) for hit in hits]
        d = fairhead.compare(*both, metrics=["EOp"], n_boot=500, n_perm=500).differences[0]
        counts = np.array(
            [
                [np.sum((group == g) & (hits[0] == x) & (hits[1] == y)) for x in (0, 1) for y in (0, 1)]
                for g in range(len(a))
            ]
        )
        star = np.stack([rng.multinomial(600, c / 600, size=500) for c in counts], axis=1) / 600
        change = np.ptp(star[..., 1] + star[..., 3], axis=1) - np.ptp(star[..., 2] + star[..., 3], axis=1)
        low, high = np.quantile(change, [0.025, 0.975])
        held += [(d.low or 0.0) - 1e-9 <= truth <= (d.high or 0.0) + 1e-9, low <= truth <= high]
        below += d.p is not None and d.p <= 0.05
    return " | ".join([*(f"{100 * h:.1f}" for h in held / repeats), f"{100 * below / repeats:.1f}"])


def mean_of_pairs(rows: Array, rates: Array, repeats: int) -> float:
    rng = np.random.default_rng(0)
    truth = float(np.abs(rates[:, None] - rates).sum() / (len(rates) * (len(rates) - 1)))
    held = 0
    for _ in range(repeats):
        n = rng.multinomial(int(rows.sum()), rows / rows.sum())
        luck = rng.random(int(n.sum())) < np.repeat(rates, n)
        e = fairhead.audit(records(n, luck), metrics=["EOp_pairwise"], n_boot=500)["EOp_pairwise"]
        held += (e.low or 0.0) - 1e-9 <= truth <= (e.high or 0.0) + 1e-9
    return 100 * held / repeats


def area_between(effect: float, repeats: int) -> tuple[float, float]:
    """The true area between two ROC curves of normal scores, and how often the interval holds it; 750 rows a group."""
    at = norm.ppf((np.arange(20_000) + 0.5) / 20_000)
    truth = float(np.abs(norm.cdf(1.5 + at) - norm.cdf(effect + at)).mean())
    rng, held = np.random.default_rng(0), 0
    for _ in range(repeats):
        group, label = rng.integers(2, size=1500), rng.integers(2, size=1500)
        score = 1 / (1 + np.exp(1 - label * np.array([1.5, effect])[group] - rng.normal(size=1500)))
        scored = Records.from_arrays(label, scores=score, groups={"g": group})
        e = fairhead.audit(scored, metrics=["ABROCA"], n_boot=500, reference={"g": 0})["ABROCA"]
        held += (e.low or 0.0) <= truth <= (e.high or 0.0)
    return truth, 100 * held / repeats


def headlines(columns: int, crossed: bool, repeats: int) -> float:
    rng = np.random.default_rng(columns)
    shares = ([0.5, 0.5], [0.5, 0.3, 0.15, 0.05], [0.8, 0.2], [0.3, 0.2, 0.2, 0.15, 0.1, 0.05], [0.6, 0.3, 0.1])
    found = 0
    for _ in range(repeats):
        y = rng.integers(2, size=2000)
        groups = {f"g{k}": rng.choice(len(share), size=2000, p=share) for k, share in enumerate(shares[:columns])}
        even = Records.from_arrays(y, np.where(rng.random(2000) < 0.75, y, 1 - y), groups=groups)
        metrics = ["DP", "EOp", "EOd", "impact_ratio"]
        result = fairhead.audit(even, metrics=metrics, n_boot=500, intersections=crossed)
        found += any(sentence.tone == "bad" for sentence in audit_verdicts(result))
    return 100 * found / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000)
    repeats = parser.parse_args().repeats
    print("| a gap | fairhead covers | bootstrap | Newcombe | fairhead finds | bootstrap | Newcombe |")
    print("|---|---|---|---|---|---|---|")
    for name, (rows, rates) in GAPS.items():
        print(f"| {name} | {one_gap(np.array(rows), np.array(rates), repeats)} |", flush=True)
    print("\n| a change of a gap | fairhead covers | bootstrap | p ≤ 0.05 |\n|---|---|---|---|")
    for name, (a, b, same) in CHANGES.items():
        print(f"| {name} | {one_change(np.array(a), np.array(b), same, repeats)} |", flush=True)
    print("\n| another figure | fairhead covers |\n|---|---|")
    for name, (rows, rates) in PAIRS.items():
        share = mean_of_pairs(np.array(rows), np.array(rates), repeats)
        print(f"| mean gap over pairs, {name} | {share:.1f} |", flush=True)
    for effect in ROC:
        truth, share = area_between(effect, repeats)
        print(f"| area between ROC curves, {truth:.3f} | {share:.1f} |", flush=True)
    print("\n| columns, all even | false headlines |\n|---|---|")
    for columns, crossed in ((1, False), (3, False), (5, False), (3, True)):
        print(
            f"| {columns}{' and their crossings' if crossed else ''} | {headlines(columns, crossed, repeats):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
