"""How good `auto`'s choice was: its EOd beside that of each candidate, from the results of a grid.

    fairhead bench reduce-frozen --out frozen
    python benchmarks/choice.py frozen

EOd is counted from the records as it is, also where a cell has fewer rows than an audit asks for.
"""

import argparse
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np

from fairhead.audit.rates import Margins
from fairhead.bench.results_folder import Store
from fairhead.records import Records

CANDIDATES = {"plain": "erm", "balance": "balance", "match": "match", "both": "balance + match"}


class Choice(NamedTuple):
    """One data set and seed: EOd of plain training, auto, the best candidate and the reference; cost; what was kept."""

    plain: float
    auto: float
    best: float
    told: float
    accuracy: float
    kept: str


def eod(records: Records) -> float:
    """In points; classes of two."""
    (group,) = list(records.groups.values())[:1]
    assert records.prediction is not None
    counts = np.zeros((len(group.levels), 2, 2))
    np.add.at(counts, (group.codes, records.label.codes, records.prediction.codes), 1)
    margins = Margins.of(counts)
    rates = [margins.true_positive_rate()[1], margins.false_positive_rate()[1]]
    return 100 * float(np.mean([rate.max() - rate.min() for rate in rates]))


def choices(folder: str) -> dict[str, list[Choice]]:
    """By data set; seeds that lack a candidate are left out."""
    store, latest = Store(folder), {}
    for row in store.rows():
        if row["status"] == "done":
            latest[row["data"], row["seed"], row["method"]] = row
    found = defaultdict(list)
    for (data, seed, method), row in latest.items():
        if method != "auto" or "tried" not in row.get("notes", {}):
            continue
        # Weaker forms of a candidate, "balance 0.75", have no row of their own to compare with.
        names = [CANDIDATES[one["name"]] for one in row["notes"]["tried"] if one["name"] in CANDIDATES]
        wanted = {*names, "erm", "group_balanced"}
        named = {name: latest[data, seed, name] for name in wanted if (data, seed, name) in latest}
        if wanted - named.keys():
            continue
        gaps = {name: eod(store.records(one)) for name, one in named.items()}
        right = [one["figures"]["accuracy"]["value"] for one in (row, named["erm"])]
        best = min(gaps[name] for name in names)
        cost = 100 * (right[0] - right[1])
        auto = eod(store.records(row))
        found[data].append(Choice(gaps["erm"], auto, best, gaps["group_balanced"], cost, row["notes"]["kept"]))
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="what fairhead bench wrote")
    found = choices(parser.parse_args().folder)
    every = [one for several in found.values() for one in several]
    print("| data | seeds | plain | auto | best candidate | told the groups | accuracy | within 1.5 | kept |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, several in [*found.items(), ("all", every)]:
        means = [np.mean([one[i] for one in several]) for i in range(5)]
        near = np.mean([one.auto <= one.best + 1.5 for one in several])
        kept = ", ".join(f"{what} {n}" for what, n in Counter(one.kept for one in several).most_common())
        gaps = " | ".join(f"{mean:.1f}" for mean in means[:4])
        cost = f"{means[4]:+.1f}".replace("-", "−")
        print(f"| {name} | {len(several)} | {gaps} | {cost} | {100 * near:.0f} % | {kept} |")
    worse = np.mean([one.auto > one.plain + 1.5 for one in every])
    print(f"\nauto has an EOd that is more than 1.5 points above plain training's in {100 * worse:.0f} % of the cells.")


if __name__ == "__main__":
    main()
