"""What `auto` does on many targets that nothing was chosen on: frozen CLIP features, targets drawn by a fixed rule.

    python benchmarks/generality.py prepare FOLDER              # features and attributes, from $FAIRHEAD_DATA
    OMP_NUM_THREADS=1 python benchmarks/generality.py run FOLDER --part 1/2 --out one.jsonl
    OMP_NUM_THREADS=1 python benchmarks/generality.py run FOLDER --part 2/2 --out two.jsonl
    python benchmarks/generality.py table one.jsonl two.jsonl

Every pair of a target and a group that has enough rows in each of its four cells is drawn from: CelebA's attributes by
Male and by Young; gender, age (over 30) and each race of UTKFace and FairFace by each other kind. Three kinds of tasks:
natural, the rows as they are; biased, where target and group agree in 70 to 98 % of the training and validation rows
and test rows are as they are; null, a target of CelebA among women or men alone, with a group that is drawn by chance.
70 % of the persons train, 10 % choose, 20 % test.

"Told" is the weighting with the true group; "told, at the price" is the same with its weights to the largest power (1,
0.75, 0.5, 0.25) whose cost in accuracy on the validation rows is within auto's price, one standard error allowed for.
"""

import argparse
import csv
import hashlib
import io
import json
import os
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairhead.mitigate import method, run
from fairhead.mitigate.choosing import judge
from fairhead.models.attached import FEATURES, LinearHead
from fairhead.train import TrainingPlan
from fairhead.train.fitting import answers, solve
from fairhead.train.kmeans import independent_weights
from fairhead.train.step import Examples

RATES = (0.7, 0.8, 0.9, 0.95, 0.98)  # how often target and group agree in a biased task
DRAWN = {"natural": 44, "biased": 64, "null": 20}
CELLS = {"celeba": (200, 500), "utkface": (200, 500), "fairface": (150, 250)}  # least rows: natural, biased
UTKFACE_ROWS = 11_000  # drawn from all, so that no data set is much larger than the others
PRICE, PENALTY = 2.0, 0.1
COLUMNS = ("plain", "auto", "told", "told, at the price")


class Task(NamedTuple):
    """A target and a group; `rate` is their agreement, `side` its direction, or the sex of a null task."""

    data: str
    target: str
    group: str
    kind: str
    rate: float
    side: int


class Part(NamedTuple):
    """Rows to train on, to choose by, or to test on."""

    examples: Examples
    group: Tensor
    person: Tensor


def prepare(folder: Path) -> None:
    """One file a data set: features, the names of its attributes, their values, and who a row is of."""
    data = Path(os.environ["FAIRHEAD_DATA"])
    folder.mkdir(parents=True, exist_ok=True)
    features, names = _stored(data, "celeba_*.npz")
    with zipfile.ZipFile(data / "images/celeba10k.zip") as archive:
        lines = archive.read("celeba/list_attr_celeba.txt").decode().splitlines()
        persons = dict(line.split() for line in archive.read("celeba/identity_CelebA.txt").decode().splitlines())
    values = {line.split()[0]: [value == "1" for value in line.split()[1:]] for line in lines[2:]}
    files = [name.split("/")[-1] for name in names]
    table, who = np.array([values[name] for name in files]), np.array([int(persons[name]) for name in files])
    np.savez_compressed(folder / "celeba.npz", features=features, attrs=lines[1].split(), table=table, unit=who)

    features, names = _stored(data, "utkface_*.npz")
    with zipfile.ZipFile(data / "images/utkface64.zip") as archive:
        digests = {name: hashlib.md5(archive.read(name)).hexdigest() for name in names}
    told = {i: name.split("/")[-1].split("_") for i, name in enumerate(names)}
    first = {digests[name]: i for i, name in reversed(list(enumerate(names))) if len(told[i]) == 4}
    rows = np.sort(np.random.default_rng(0).permutation(sorted(first.values()))[:UTKFACE_ROWS])
    age, gender, race = np.array([[int(part) for part in told[i][:3]] for i in rows]).T
    table = np.stack([gender == 1, age > 30, *(race == i for i in range(4))], 1)
    attrs = ["female", "over30", "White", "Black", "Asian", "Indian"]
    np.savez_compressed(folder / "utkface.npz", features=features[rows], attrs=attrs, table=table, unit=rows)

    features, names = _stored(data, "fairface_*.npz")
    with zipfile.ZipFile(data / "images/fairface_val5k.zip") as archive:
        lines = archive.read("fairface/fairface_label_val.csv").decode().splitlines()
    people = {row["file"]: row for row in csv.DictReader(io.StringIO("\n".join(lines)))}
    found = [people[name.split("/", 1)[1]] for name in names]
    races = sorted({row["race"] for row in found})
    old = [row["age"].split("-")[0] in ("30", "40", "50", "60", "more than 70") for row in found]
    by_race = [[row["race"] == race for row in found] for race in races]
    table = np.stack([[row["gender"] == "Female" for row in found], old, *by_race], 1)
    attrs = ["female", "over30", *races]
    np.savez_compressed(
        folder / "fairface.npz", features=features, attrs=attrs, table=table, unit=np.arange(len(found))
    )


def _stored(data: Path, pattern: str) -> tuple[NDArray[Any], list[str]]:
    files = [np.load(file) for file in sorted((data / "features").glob(pattern))]
    return np.concatenate([file["features"] for file in files]), [str(n) for file in files for n in file["names"]]


def tasks(folder: Path) -> list[Task]:
    """The tasks, by a fixed rule and a fixed seed."""
    rng = np.random.default_rng(2026)
    found: dict[str, list[Task]] = {kind: [] for kind in DRAWN}
    for data, (few, many) in CELLS.items():
        stored = np.load(folder / f"{data}.npz")
        value = dict(zip((str(name) for name in stored["attrs"]), stored["table"].T, strict=True))
        for target, labels in value.items():
            for group in ("Male", "Young") if data == "celeba" else value:
                if target == group or (data != "celeba" and _attribute(target) == _attribute(group)):
                    continue
                least = np.bincount(2 * labels.astype(int) + value[group], minlength=4).min()
                if least >= few:
                    found["natural"].append(Task(data, target, group, "natural", 0.0, 0))
                if least >= many:
                    rate, side = float(rng.choice(RATES)), int(rng.integers(2))
                    found["biased"].append(Task(data, target, group, "biased", rate, side))
            for sex in (0, 1) if data == "celeba" and target != "Male" else ():
                if 0.1 <= labels[value["Male"] == sex].mean() <= 0.9:
                    found["null"].append(Task(data, target, "by chance", "null", 0.0, sex))
    return [some[i] for kind, some in found.items() for i in sorted(rng.permutation(len(some))[: DRAWN[kind]])]


def _attribute(name: str) -> str:
    return {"female": "gender", "over30": "age"}.get(name, "race")


def drawn(folder: Path, task: Task, seed: int) -> Iterator[Part]:
    """The training, the validation and the test part."""
    stored = np.load(folder / f"{task.data}.npz")
    value = dict(zip((str(name) for name in stored["attrs"]), stored["table"].T.astype(np.int64), strict=True))
    rng = np.random.default_rng([seed, 7])
    labels, person = value[task.target], stored["unit"].astype(np.int64)
    group = rng.integers(0, 2, len(labels)) if task.kind == "null" else value[task.group]
    rows = np.flatnonzero(value["Male"] == task.side) if task.kind == "null" else np.arange(len(labels))
    persons, number = np.unique(person[rows], return_inverse=True)
    place = rng.permutation(len(persons))[number] / len(persons)
    for low, high in ((0.0, 0.7), (0.7, 0.8), (0.8, 1.0)):
        chosen = rows[(place >= low) & (place < high)]
        if task.kind == "biased" and high < 1:
            chosen = np.sort(np.concatenate(list(_biased(chosen, labels, group ^ task.side, task.rate, rng))))
        features = torch.tensor(stored["features"][chosen].astype(np.float32))
        examples = Examples({FEATURES: features}, torch.tensor(labels[chosen]))
        yield Part(examples, torch.tensor(group[chosen]), torch.tensor(person[chosen]))


def _biased(
    rows: NDArray[Any], labels: NDArray[Any], group: NDArray[Any], rate: float, rng: np.random.Generator
) -> Iterator[NDArray[Any]]:
    """As many rows as can be had of which the group agrees with the label in this share, in each class."""
    for label in (0, 1):
        own = rows[labels[rows] == label]
        agree = group[own] == label
        most = min(agree.sum() / rate, (~agree).sum() / (1 - rate))
        yield rng.permutation(own[agree])[: int(most * rate)]
        yield rng.permutation(own[~agree])[: max(int(most * (1 - rate)), 1)]


def measured(parts: Sequence[Part], seed: int) -> dict[str, Any]:
    """EOd and accuracy on the test rows, in points, of plain training, auto and the references."""
    train, validation, test = parts
    features, labels = train.examples.inputs[FEATURES], train.examples.labels

    def build() -> LinearHead:
        return LinearHead.of(features, ("no", "yes"))

    def weighted(power: float) -> LinearHead:
        head, weights = build(), independent_weights(labels, train.group) ** power
        solve(head, features, labels, weights, None, PENALTY)
        return head

    plan = TrainingPlan(weight_decay=PENALTY, seed=seed, device="cpu")
    units = (train.person, validation.person)
    found = run(method("auto", price=PRICE), build, train.examples, validation.examples, plan, units=units)
    assert isinstance(found.model, LinearHead)
    models = {"plain": weighted(0.0), "auto": found.model, "told": weighted(1.0)}
    models[COLUMNS[3]] = models["plain"]
    shown, *rows = validation.examples.inputs[FEATURES], validation.group.numpy(), validation.person.numpy()
    for power in (1.0, 0.75, 0.5, 0.25):
        models["weaker"] = weighted(power)
        given = {name: answers(models[name], shown).numpy() for name in ("plain", "weaker")}
        if judge(given, validation.examples.labels.numpy(), rows[0], rows[1], PRICE / 100)[1].affordable:
            models[COLUMNS[3]] = models["weaker"]
            break
    return {"kept": found.notes["kept"]} | {
        name: _figures(model, test) for name, model in models.items() if name in COLUMNS
    }


def _figures(model: LinearHead, test: Part) -> list[float]:
    said, truth = answers(model, test.examples.inputs[FEATURES]), test.examples.labels
    rates = [[said[(truth == y) & (test.group == g)].double().mean() for g in (0, 1)] for y in (0, 1)]
    gap = sum(abs(float(one - other)) for one, other in rates) / 2
    return [100 * gap, 100 * float((said == truth).double().mean())]


def table(files: Sequence[Path]) -> None:
    """Means over tasks, the standard error of auto's difference from plain training, and what was kept."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    print(f"| tasks | | {' | '.join(COLUMNS)} | auto − plain | worse by 1.5 | kept |")
    print("| --- | --- |" + " --- |" * (len(COLUMNS) + 3))
    for kind in DRAWN:
        some = [row for row in rows if row["task"][3] == kind]
        targets = len({tuple(row["task"]) for row in some})
        kept = Counter(row["kept"].split()[0] for row in some).most_common()
        for which, name in enumerate(("EOd", "accuracy")):
            means = " | ".join(f"{np.mean([row[column][which] for row in some]):.1f}" for column in COLUMNS)
            by_task: dict[Any, list[float]] = {}
            for row in some:
                by_task.setdefault(tuple(row["task"]), []).append(row["auto"][which] - row["plain"][which])
            gains = np.array([np.mean(one) for one in by_task.values()])
            error = gains.std(ddof=1) / len(gains) ** 0.5
            worse = np.mean([row["auto"][0] > row["plain"][0] + 1.5 for row in some])
            end = "" if which else f"{100 * worse:.0f} %"
            what = "" if which else ", ".join(f"{one} {n}" for one, n in kept)
            first = "" if which else f"{kind}, {targets} targets, {len(some)} cells"
            print(
                f"| {first} | {name} | {means} | {gains.mean():+.1f} ± {error:.1f} | {end} | {what} |".replace("-", "−")
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "run", "table"])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--part", default="1/1", help="which part of the cells, such as 1/2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("generality.jsonl"))
    options = parser.parse_args()
    if options.what == "prepare":
        prepare(options.paths[0])
    elif options.what == "table":
        table(options.paths)
    else:
        first, step = map(int, options.part.split("/"))
        torch.set_num_threads(1)
        every = [(task, seed) for seed in range(options.seeds) for task in tasks(options.paths[0])]
        with options.out.open("w") as file:
            for task, seed in every[first - 1 :: step]:
                row = {"task": task, "seed": seed, **measured(list(drawn(options.paths[0], task, seed)), seed)}
                print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
