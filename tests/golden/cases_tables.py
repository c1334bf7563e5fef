"""Tables of predictions: audits, paired comparisons, and methods over seeds."""

import numpy as np
import pandas as pd
from figures import NUMPY, Case, as_json

from fairhead import Records
from fairhead.audit.seeds import SeedPool


def a_table(n=900, seed=0):
    """Predictions with gaps by race and gender, none by religion, of whose groups one is small."""
    rng = np.random.default_rng(seed)
    race = rng.choice(["white", "black", "asian"], n, p=[0.5, 0.3, 0.2])
    gender = rng.choice(["female", "male"], n)
    religion = rng.choice(["none", "christian", "muslim", "jain"], n, p=[0.5, 0.3, 0.19, 0.01])
    person = np.arange(n) // 3
    y = (rng.random(n) < 0.35 + 0.15 * (race == "white")).astype(int)
    lean = 0.18 * (race == "white") + 0.08 * (gender == "male") + 0.1 * rng.normal(size=n // 3)[person]
    p = np.clip(0.2 + 0.4 * y + lean + 0.15 * rng.normal(size=n), 0, 1)
    even = np.clip(0.3 + 0.4 * y + 0.15 * rng.normal(size=n), 0, 1)
    return pd.DataFrame(
        {
            "id": rng.permutation(n),
            "y": y,
            "old": (p >= 0.5).astype(int),
            "new": (even >= 0.5).astype(int),
            "p": p.round(5),
            "race": race,
            "gender": gender,
            "religion": religion,
            "person": person,
            "w": (0.5 + rng.random(n)).round(4),
        }
    )


def a_table_of_three_classes(n=900, seed=1):
    rng = np.random.default_rng(seed)
    race = rng.choice(["white", "black"], n)
    y = rng.integers(0, 3, n)
    logits = rng.normal(size=(n, 3)) + 1.8 * np.eye(3)[y] + 0.8 * (race == "white")[:, None] * np.eye(3)[2]
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    names = np.array(["high", "low", "middle"])
    columns = {f"p_{name}": scores[:, k].round(6) for k, name in enumerate(names)}
    return pd.DataFrame({"y": names[y], "yhat": names[scores.argmax(axis=1)], "race": race, **columns})


def audit_of(table, *arguments):
    table.to_csv("table.csv", index=False)
    return as_json("audit", "table.csv", "--label", "y", "--n-boot", 300, *arguments)


GROUPS = ("--group", "race", "--group", "gender", "--group", "religion")
SCORES = ("--score", "p_high", "--score", "p_low", "--score", "p_middle")


def all_metrics(folder):
    return audit_of(a_table(), *GROUPS, "--pred", "old", "--score", "p", "--metric", "all", "--intersections")


def clusters_and_weights(folder):
    return audit_of(a_table(), *GROUPS, "--pred", "old", "--score", "p", "--metric", "all", "--cluster", "person",
                    "--weight", "w", "--seed", 3, "--level", 0.9)  # fmt: skip


def score_only(folder):
    return audit_of(a_table(), "--group", "race", "--score", "p", "--threshold", 0.4, "--metric", "all")


def classes(how):
    def figures(folder):
        options = ("--pred", "yhat", "--group", "race", "--metric", "all", "--multiclass", how)
        return audit_of(a_table_of_three_classes(), *options, *(SCORES if how == "max" else ()))

    return figures


def one_class_of_three(folder):
    table = a_table_of_three_classes()
    return audit_of(table, "--pred", "yhat", "--group", "race", "--metric", "all", "--positive", "middle")


def two_columns(*options):
    def figures(folder):
        return audit_of(a_table(), "--group", "race", "--group", "gender", "--pred", "old", "--compare-pred", "new",
                        "--metric", "all", *options)  # fmt: skip

    return figures


def two_files(folder):
    """Joined on ids; the second file lacks some rows and has others in another order."""
    table = a_table()
    table.drop(columns="p").to_csv("a.csv", index=False)
    other = table.assign(old=table.new).drop(columns="p").sample(frac=0.8, random_state=0)
    other.to_csv("b.csv", index=False)
    return as_json("audit", "a.csv", "--compare", "b.csv", "--id", "id", "--label", "y", "--pred", "old", "--group",
                   "gender", "--correction", "bh", "--n-boot", 300)  # fmt: skip


def two_scores(folder):
    table = a_table()
    table.to_csv("a.csv", index=False)
    table.assign(p=(0.5 * table.p + 0.25).round(5)).to_csv("b.csv", index=False)
    return as_json("audit", "a.csv", "--compare", "b.csv", "--id", "id", "--label", "y", "--score", "p", "--group",
                   "race", "--metric", "all", "--n-boot", 300)  # fmt: skip


def over_seeds(shared_test):
    """Two methods, three seeds: one test set for all, or one a seed."""

    def figures(folder):
        runs = {"erm": {}, "dam": {}}
        for seed in range(3):
            table = a_table(seed=10 if shared_test else 10 + seed)
            rng = np.random.default_rng(seed)
            flips = rng.random(len(table)) < 0.06
            ids = table.id if shared_test else table.id + 10_000 * seed
            for name, column in (("erm", "old"), ("dam", "new")):
                guess = np.where(flips, 1 - table[column], table[column])
                runs[name][seed] = Records.from_arrays(
                    table.y.to_numpy(), guess, groups={"race": table.race.to_numpy()}, id=ids.to_numpy()
                )
        pool = SeedPool(runs, "race", n_boot=300)
        metrics = ("accuracy", "worst_group_accuracy", "DP", "EOp", "EOd", "impact_ratio")
        return {
            "figures": [pool.figure(name, metric).to_dict() for name in runs for metric in metrics],
            "differences": [pool.difference("erm", "dam", metric).to_dict() for metric in metrics],
        }

    return figures


CASES = {
    "audit_all_metrics": Case(all_metrics, NUMPY),
    "audit_clusters_and_weights": Case(clusters_and_weights, NUMPY),
    "audit_score_only": Case(score_only, NUMPY),
    "audit_three_classes_max": Case(classes("max"), NUMPY),
    "audit_three_classes_mean": Case(classes("mean"), NUMPY),
    "audit_three_classes_weighted": Case(classes("weighted"), NUMPY),
    "audit_one_class_of_three": Case(one_class_of_three, NUMPY),
    "compare_two_columns": Case(two_columns(), NUMPY),
    "compare_clusters": Case(two_columns("--cluster", "person", "--correction", "bh"), NUMPY),
    "compare_two_files": Case(two_files, NUMPY),
    "compare_two_scores": Case(two_scores, NUMPY),
    "seeds_on_one_test_set": Case(over_seeds(True), NUMPY),
    "seeds_on_tests_of_their_own": Case(over_seeds(False), NUMPY),
}
