"""A report such as the demo makes, from simulated predictions, and small builders for odd ones.

`python tests/unit/report_example.py FOLDER` writes the example and the odd ones, to be looked at in a browser.
"""

import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fairhead.audit import METRICS, GroupRow
from fairhead.audit.audit_results import Audit, Comparison
from fairhead.stats import Difference, Estimate

HOSTILE = "\"><img src=x onerror=alert(1)><script>alert('1')</script></style></title>&amp;{{ 7*7 }}"


def estimate(
    metric: str, value: float | None, se: float = 0.02, group_by: str | None = "shade", **more: Any
) -> Estimate:
    """An estimate with a normal interval."""
    known = {"n": 1200, "ideal": 0.0, "mde": 2.8 * se} | more
    if value is None:
        return Estimate(metric, group_by, None, None, None, **{**known, "mde": None})
    if metric in METRICS:
        known.setdefault("detail", {"definition": METRICS[metric].definition})
    return Estimate(metric, group_by, value, value - 1.96 * se, value + 1.96 * se, **known)


def rate(metric: str, hits: int, n: int, group_by: str) -> Estimate:
    if n < 10:
        return estimate(metric, None, group_by=group_by, n=n, ideal=None, undefined=f"{n} rows; at least 10 are needed")
    p = hits / n
    return estimate(metric, p, se=np.sqrt(p * (1 - p) / n), group_by=group_by, n=n, ideal=None, mde=None)


def group_rows(groups: list[str], group_by: str, rng: np.random.Generator, scale: int = 400) -> list[GroupRow]:
    rows = []
    for group in groups:
        n = int(rng.integers(4, 2 * scale))
        rates = {
            name: rate(name, int(rng.binomial(n, p)), n, group_by)
            for name, p in (("selection_rate", 0.42), ("TPR", 0.81), ("FPR", 0.12), ("accuracy", 0.86))
        }
        rows.append(GroupRow(group_by, group, n, rates))
    return rows


def audit(groups: list[str], group_by: str, gap: float, rng: np.random.Generator) -> Audit:
    """Gaps around `gap`, levels, a ratio and an undefined figure, with a row for each group."""
    rows = group_rows(groups, group_by, rng)
    pair = tuple(groups[:2])
    estimates = (
        estimate("accuracy", 0.871 - gap / 4, 0.009, None, ideal=1.0, mde=None),
        estimate("DP", gap, 0.021, group_by, groups=pair),
        estimate("EOp", gap * 1.2, 0.03, group_by, groups=pair),
        estimate("EOd", gap * 0.9, 0.018, group_by, groups=pair),
        estimate("ECE_gap", 0.012, 0.011, group_by, groups=pair),
        estimate("impact_ratio", 1 - gap * 2, 0.04, group_by, ideal=1.0, groups=pair),
        estimate("worst_group_accuracy", 0.80 - gap / 2, 0.02, group_by, ideal=1.0, groups=groups[:1]),
        estimate(
            "AUC_gap",
            None,
            group_by=group_by,
            n=4,
            undefined=f"{groups[-1]} has 4 rows with label 1; at least 10 are needed",
        ),
    )
    return Audit(estimates, tuple(rows), {"rows": 1200, "sha256": "9f2c" * 16, "n_boot": 2000, "seed": 0})


def comparison(a: Audit, b: Audit) -> Comparison:
    differences = []
    for x, y in zip(a.estimates, b.estimates, strict=True):
        if x.value is None or y.value is None:
            differences.append(
                Difference(x.metric, x.group_by, None, None, None, None, None, x.n, None, None, undefined=x.undefined)
            )
            continue
        d, se = y.value - x.value, 0.017
        p = float(np.clip(2 * np.exp(-0.717 * abs(d / se) - 0.416 * (d / se) ** 2), 0, 1))
        differences.append(
            Difference(
                x.metric, x.group_by, x.value, y.value, d, d - 1.96 * se, d + 1.96 * se, x.n, p, min(1.0, 7 * p),
                mde=2.8 * se, ideal=x.ideal,
            )
        )  # fmt: skip
    return Comparison(tuple(differences), a, b, {"rows": 1200, "permutations": 10_000})


def headmap(
    layers: int, heads: int, rng: np.random.Generator, selected: list[list[int]], **more: Any
) -> dict[str, Any]:
    values = rng.normal(0, 0.004, (layers, heads)) + 0.0005
    for layer, head in selected:
        values[layer, head] = rng.uniform(0.02, 0.05)
    p = np.minimum(1, np.exp(-np.abs(values) * 200) * 2)
    section = {
        "kind": "headmap",
        "title": "Where the gap sits",
        "text": "How much of the equalized odds gap each head carries: its fall when that head alone is mean-ablated.",
        "measure": "Fall in EOd",
        "unit": "fraction",
        "values": values.tolist(),
        "low": (values - 0.006).tolist(),
        "high": (values + 0.006).tolist(),
        "p_adjusted": p.tolist(),
        "selected": selected,
    }
    return section | more


def ablation(rng: np.random.Generator, **more: Any) -> dict[str, Any]:
    controls = rng.normal(0.001, 0.011, 240).tolist()
    section = {
        "kind": "ablation",
        "title": "Are those heads the cause?",
        "text": "The selected heads are mean-ablated together, against random sets matched by layer.",
        "metric": "EOd",
        "selected": [[2, 1], [3, 3], [3, 5]],
        "before": 0.1803,
        "after": 0.1212,
        "effect": -0.0591,
        "low": -0.0832,
        "high": -0.0347,
        "p": 0.0004,
        "controls": controls,
        "exhaustive": False,
        "p_controls": 1 / 241,
        "percentile": float(np.mean(np.array(controls) <= -0.0591)),
        "accuracy_effect": {"value": -0.004, "low": -0.013, "high": 0.006},
    }
    return section | more


def report(sections: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    known = {
        "schema": "fairhead.report/1",
        "title": "Digits and their shade: plain training and DAM",
        "question": "Does a small vision transformer lean on the shade of a digit, which attention heads carry it, "
        "and does DAM attention reduce the gap without being told the shade?",
        "verdict": [
            {
                "text": "Plain training leaves an equalized odds gap of 18.0 % (14.5 to 21.5 %) between shades.",
                "tone": "bad",
            },
            {
                "text": "With DAM attention the gap falls by 9.9 points (6.6 to 13.2; adjusted p < 0.001).",
                "tone": "good",
            },
            {"text": "Accuracy may have risen: +2.8 points (−0.5 to 6.1); this sample cannot tell.", "tone": "unclear"},
            {"text": "Simulated figures: an example of the page, not a result.", "tone": "note"},
        ],
        "sections": sections,
        "provenance": {
            "fairhead": "0.1.0",
            "seed": 0,
            "command": "fairhead demo --out demo",
            "machine": {"cores": 2, "memory": "8 GB", "python": "3.11.2"},
            "rows": 20000,
            "wall time (s)": {"train": 61.2318, "locate": 22.7, "report": 0.104},
        },
    }
    return known | more


def example() -> dict[str, Any]:
    """Every kind of section, with figures of the size that the demo has."""
    rng = np.random.default_rng(0)
    groups = ["dark", "light", "mid-grey", "inverted (white paper)"]
    plain, dam = audit(groups, "shade", 0.20, rng), audit(groups, "shade", 0.09, rng)
    return report(
        [
            {"kind": "text", "title": "The data", "text": "1 200 digits, shades even in each class.\n\nHeld out."},
            {"kind": "audit", "title": "Plain training", "audit": plain.to_dict(), "name": "plain training"},
            {"kind": "audit", "title": "DAM attention", "audit": dam.to_dict(), "name": "DAM attention"},
            {
                "kind": "comparison", "title": "Did the gap fall?", "comparison": comparison(plain, dam).to_dict(),
                "a_name": "plain training", "b_name": "DAM attention", "text": "Paired on the same test images.",
            },
            headmap(4, 8, rng, [[2, 1], [3, 3], [3, 5]]),
            ablation(rng),
        ]
    )  # fmt: skip


def many() -> dict[str, Any]:
    """Sixty intersections with long names, and a map of 48 × 48 heads."""
    rng = np.random.default_rng(1)
    ages = ["0–17", "18–29", "30–44", "45–64", "65+"]
    peoples = [
        "Native Hawaiian or Other Pacific Islander",
        "Black",
        "White",
        "East Asian",
        "South Asian",
        "Unknown/declined",
    ]
    groups = [" × ".join(parts) for parts in product(ages, peoples, ["female", "male"])]
    large = audit(groups, "age × race × gender", 0.31, rng)
    selected = [[40, 3], [41, 17], [47, 46], [47, 47]]
    return report(
        [
            {"kind": "audit", "title": "All intersections", "audit": large.to_dict(), "name": "very " * 20 + "long"},
            headmap(48, 48, rng, selected),
            headmap(24, 16, rng, [[23, 4], [23, 6]], title="CLIP"),
            ablation(rng, controls=rng.normal(0, 0.03, 21).tolist(), exhaustive=True, title="Few controls"),
        ]
    )  # fmt: skip


def odd() -> dict[str, Any]:
    """Nothing defined, one head, equal values, huge n, nothing at all."""
    rng = np.random.default_rng(2)
    nothing = Audit(
        (estimate("DP", None, n=3, undefined="dark has 3 rows"),), tuple(group_rows(["a"], "shade", rng, 3)), {}
    )
    huge = Audit((estimate("DP", 0.00123, 0.00004, n=1_234_567_890), estimate("EOp", 0.0, 0.0, mde=None)), (), {})
    empty = Audit((), (), {})
    undefined = comparison(nothing, nothing).to_dict()
    flat: dict[str, Any] = {"low": None, "high": None, "p_adjusted": None}
    return report(
        [
            {"kind": "audit", "title": "All undefined", "audit": nothing.to_dict(), "name": "x"},
            {"kind": "audit", "title": "Huge", "audit": huge.to_dict(), "name": "x"},
            {"kind": "audit", "title": "No groups", "audit": empty.to_dict(), "name": "x"},
            {"kind": "comparison", "title": "No differences", "comparison": undefined, "a_name": "a", "b_name": "b"},
            headmap(1, 1, rng, [[0, 0]], title="One head"),
            headmap(2, 3, rng, [], title="All equal", **flat | {"values": [[0.0] * 3] * 2}),
            headmap(2, 3, rng, [], title="No head defined", **flat | {"values": [[None] * 3] * 2}),
            headmap(2, 3, rng, [], title="All alike", **flat | {"values": [[2.5] * 3] * 2, "unit": "SD"}),
            ablation(rng, controls=[], title="No controls", selected=[]),
            ablation(rng, controls=[0.01] * 200, effect=0.01, low=None, high=None, title="All controls equal"),
        ],
        verdict=[],
        provenance={},
    )  # fmt: skip


def bench_line(method: str, accuracy: float, gap: float, **more: Any) -> dict[str, Any]:
    """A method of a bench block, as table.json has it."""

    def figure(mean: float) -> dict[str, Any]:
        return {"mean": mean, "sd": 0.011, "low": mean - 0.02, "high": mean + 0.02}

    change = {"value": gap - 0.2, "low": gap - 0.26, "high": gap - 0.14, "mde": 0.07, "p_adjusted": 0.013}
    search = {
        "values": {"learning_rate": 0.0001}, "score": 0.91, "own_score": None, "searched": {"learning_rate": "log"},
        "trials": 11, "failed": 2, "seconds": 1234.5, "watt_hours": None, "config": 3,
    }  # fmt: skip
    cost = {"seconds": 61.2, "watt_hours": None, "mib": 2048.4, "mib_of": "process", "shared_by": 1, "steps": 100.0}
    line = {
        "method": method, "uses_groups": False, "told": 0, "seeds": [0, 1, 2], "best": ["EOd"], "cost": cost,
        "search": search, "figures": {"accuracy": figure(accuracy), "EOd": figure(gap)},
        "failed": {"7": "the loss is not finite"},
        "differences": {"EOd": {**change, "outcome": "better"}, "accuracy": dict.fromkeys(change)},
    }  # fmt: skip
    return line | more


def methods() -> dict[str, Any]:
    """What `fairhead bench` and `fairhead attention` show, apart from pictures."""
    points = [
        {"method": m, "accuracy": a, "accuracy_low": a - 0.02, "accuracy_high": a + 0.02, "gap": g, "gap_low": g - 0.02,
         "gap_high": g + 0.02, "on_front": m != "lff"}
        for m, a, g in (("erm", 0.9, 0.2), ("dam", 0.89, 0.05), ("lff", 0.88, 0.19))
    ]  # fmt: skip
    shape = {"n": 90, "mean": 0.5, "sd": 1.0, "distance": 0.04, "counts": [10, 60, 20]}
    dimension = {
        "side": "q", "head": 0, "index": 5, "groups": [shape, {**shape, "sd": 0.0}], "difference": 0.2,
        "spread_ratio": 0.0, "edges": [-2.0, 0.0, 1.0, 3.0],
    }  # fmt: skip
    nothing = {"figures": {}, "differences": {}, "best": [], "seeds": [], "cost": None, "search": None}
    return report(
        [
            {
                "kind": "bench", "title": "faces, tiny", "baseline": "erm", "metrics": ["accuracy", "EOd"],
                "methods": [
                    bench_line("erm", 0.9, 0.2, differences={}),
                    bench_line("dam", 0.89, 0.05),
                    bench_line("dro", 0.85, 0.1, uses_groups=True, told=5, remark="trained with groups", best=[]),
                    bench_line("broken", 0, 0, **nothing),
                ],
                "findings": ["EOd: dam −15.0 points."],
                "frontier": {"metric": "EOd", "points": points, "hypervolume": 0.4},
            },
            {
                "kind": "tables", "title": "Reported",
                "tables": [{"caption": "UTKFace", "columns": ["method", "EOd"], "rows": [["erm", "12.3"]]}],
            },
            {"kind": "qk_histograms", "title": "q", "names": ["f", "m"], "chosen": [dimension], "findings": ["q"]},
        ]
    )  # fmt: skip


def with_strings(value: Any, text: str) -> Any:
    """Every free string, and every key that comes from data, replaced by `text`."""
    fixed = {"schema", "kind", "tone", "side"}
    if isinstance(value, dict):
        return {
            key if key in _KEYS else text + key: item if key in fixed else with_strings(item, text)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [with_strings(item, text) for item in value]
    return text if isinstance(value, str) else value


# Keys of the contract; the others (names of rates, of provenance) come from data and are made hostile too.
_KEYS = frozenset(
    """schema title question verdict text tone sections kind audit name comparison a_name b_name measure unit values
    low high p_adjusted selected metric before after effect p controls exhaustive percentile p_controls
    accuracy_effect value provenance estimates by_group group_by group n rates ideal undefined mde groups detail
    differences a b baseline metrics methods findings frontier method uses_groups seeds best cost search figures failed
    remark mean sd outcome score own_score searched trials seconds watt_hours mib mib_of shared_by steps config points
    accuracy accuracy_low accuracy_high gap gap_low gap_high on_front hypervolume tables caption columns rows names
    chosen side head index difference spread_ratio edges distance counts told""".split()  # noqa: SIM905
)


if __name__ == "__main__":
    from fairhead.report import write

    for name, built in (
        ("example", example()),
        ("many", many()),
        ("odd", odd()),
        ("methods", methods()),
        ("hostile", with_strings(example(), HOSTILE)),
    ):
        write(built, Path(sys.argv[1], f"{name}.html"))
