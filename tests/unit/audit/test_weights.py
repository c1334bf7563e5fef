"""Sampling weights: intervals cover the figures of the population that was sampled from."""

import numpy as np
import pytest

import fairhead

# By group: P(y = 1), P(ŷ = 1 | y = 0) and P(ŷ = 1 | y = 1).
WORLD = {"even": ((0.4, 0.2, 0.7), (0.4, 0.2, 0.7)), "uneven": ((0.3, 0.1, 0.6), (0.5, 0.3, 0.8))}


def sample(world, n, rng):
    """Rows drawn with unequal chances, as a survey that reaches positives of group 1 four times as often has them."""
    base, false, true = np.array(WORLD[world]).T
    group = rng.integers(0, 2, 8 * n)
    label = (rng.random(8 * n) < base[group]).astype(int)
    said = (rng.random(8 * n) < np.where(label, true[group], false[group])).astype(int)
    chance = np.where((group == 1) & (said == 1), 1.0, np.where(label == 1, 0.5, 0.25))
    kept = np.flatnonzero(rng.random(8 * n) < chance)[:n]
    groups = {"g": group[kept]}
    return fairhead.Records.from_arrays(label[kept], said[kept], groups=groups, weight=1 / chance[kept])


def truth(world):
    base, false, true = np.array(WORLD[world]).T
    selected = base * true + (1 - base) * false
    accuracy = base * true + (1 - base) * (1 - false)
    return {"DP": np.ptp(selected), "EOp": np.ptp(true), "FPR_gap": np.ptp(false), "accuracy": accuracy.mean()}


def test_shares_of_training_as_weights_give_the_adjusted_average_accuracy():
    """That of Waterbirds: the accuracy of each label and group, by how frequent they were in training."""
    rng = np.random.default_rng(0)
    label, group = rng.integers(0, 2, (2, 800))
    right = rng.random(800) < np.array([0.9, 0.6, 0.7, 0.95])[2 * label + group]
    training, cell = np.array([0.73, 0.04, 0.01, 0.22]), 2 * label + group
    weight = (training / (np.bincount(cell) / 800))[cell]
    records = fairhead.Records.from_arrays(label, np.where(right, label, 1 - label), groups={"g": group}, weight=weight)
    found = fairhead.audit(records, metrics=["accuracy"])["accuracy"]
    adjusted = sum(share * right[cell == k].mean() for k, share in enumerate(training))
    assert found.value == pytest.approx(adjusted)
    assert found.low < adjusted < found.high
    assert abs(adjusted - right.mean()) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLD)
@pytest.mark.parametrize("n", [400, 1500])
def test_weighted_intervals_cover_the_population(world, n):
    wanted, hits = truth(world), []
    for seed in range(400):
        records = sample(world, n, np.random.default_rng([seed, n]))
        found = fairhead.audit(records, metrics=list(wanted), n_boot=500, seed=seed)
        hits.append([found[name].low <= value <= found[name].high for name, value in wanted.items()])
    covered = dict(zip(wanted, np.mean(hits, axis=0).round(3).tolist(), strict=True))
    print(world, n, covered)
    # A share of 400 samples has a standard error of 1.1 points; of few rows, a percentile interval is a little short.
    assert all((0.93 if n > 1000 else 0.91) <= share <= 0.985 for share in covered.values()), covered


def test_without_the_weights_they_would_not():
    """The same rows without their weights are far from the population: the simulation tests something."""
    rng = np.random.default_rng(0)
    records = sample("uneven", 4000, rng)
    weighted = fairhead.audit(records, metrics=["DP"], n_boot=200)["DP"]
    plain = fairhead.audit(fairhead.Records(records.label, records.prediction, groups=records.groups), n_boot=200)["DP"]
    value = truth("uneven")["DP"]
    assert weighted.low <= value <= weighted.high
    assert plain.low > value + 0.1
