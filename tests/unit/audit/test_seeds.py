"""Pooling over seeds against known truths, SciPy, and the plain audit."""

import numpy as np
import pytest
from scipy import stats

from fairhead.audit import audit, compare
from fairhead.audit.seeds import SeedPool
from fairhead.errors import InputError
from fairhead.records import Records


def records(rng, hit, n=400, ids=None):
    """A binary task with two even groups; hit[group] is the chance of a right answer."""
    group = np.arange(n) % 2
    label = rng.integers(0, 2, n)
    right = rng.random(n) < np.asarray(hit)[group]
    ids = np.arange(n) if ids is None else ids
    return Records.from_arrays(
        label, np.where(right, label, 1 - label), groups={"g": np.array(["a", "b"])[group]}, id=ids
    )


def shared(rng, chances, n=400):
    """Runs on one test set: labels are common, answers are drawn anew with chance[seed][group]."""
    group, label = np.arange(n) % 2, rng.integers(0, 2, n)
    groups = {"g": np.array(["a", "b"])[group]}
    difficulty = rng.random(n)  # common to all runs: what test sampling acts on
    found = {}
    for seed, chance in enumerate(chances):
        right = difficulty < np.asarray(chance)[group]
        found[seed] = Records.from_arrays(label, np.where(right, label, 1 - label), groups=groups, id=np.arange(n))
    return found


def test_one_seed_on_its_own_is_the_plain_audit():
    run = records(np.random.default_rng(0), (0.9, 0.7), n=2000)
    figure = SeedPool({"m": {0: run}}, "g", n_boot=4000).figure("m", "EOd")
    plain = audit(run, n_boot=4000)["EOd"]
    assert figure.mean == pytest.approx(plain.value, abs=1e-12)
    assert figure.low == pytest.approx(plain.low, abs=0.004)
    assert figure.high == pytest.approx(plain.high, abs=0.004)
    assert figure.sd is None


def test_mean_and_sd_over_seeds():
    rng = np.random.default_rng(1)
    runs = {s: records(rng, (0.9, 0.7)) for s in range(5)}
    figure = SeedPool({"m": runs}, "g", n_boot=200).figure("m", "accuracy")
    values = [audit(r, metrics=["accuracy"], n_boot=100)["accuracy"].value for r in runs.values()]
    assert figure.mean == pytest.approx(np.mean(values), abs=1e-12)
    assert figure.sd == pytest.approx(np.std(values, ddof=1), abs=1e-12)
    assert list(figure.by_seed.values()) == pytest.approx(values, abs=1e-12)


def test_test_error_of_a_shared_test_set_does_not_shrink_with_seeds():
    rng = np.random.default_rng(2)
    same = shared(rng, [(0.9, 0.7)] * 5)
    apart = {s: records(rng, (0.9, 0.7), ids=np.arange(400) + 1000 * s) for s in range(5)}

    def width(runs):
        figure = SeedPool({"m": runs}, "g", n_boot=2000).figure("m", "accuracy")
        return figure.high - figure.low

    one = width({0: same[0]})
    assert width(same) == pytest.approx(one, rel=0.05)
    assert width(apart) == pytest.approx(one / np.sqrt(5), rel=0.15)


def test_difference_on_own_test_sets_is_the_paired_t_test():
    # Every seed has its own rows, many of them: what is left is the spread between seeds.
    rng = np.random.default_rng(3)
    a, b = {}, {}
    for s in range(6):
        ids = np.arange(4000) + 10_000 * s
        a[s] = records(rng, (0.9 + rng.normal(0, 0.03), 0.8), 4000, ids)
        b[s] = Records(a[s].label, a[s].prediction, groups=a[s].groups, id=ids)
        better = records(rng, (0.93 + rng.normal(0, 0.03), 0.85), 4000, ids)
        right = better.prediction.codes == better.label.codes
        guess = np.where(right, a[s].label.codes, 1 - a[s].label.codes)
        b[s] = Records.from_arrays(a[s].label.codes, guess, groups={"g": a[s].groups["g"].values()}, id=ids)
    difference = SeedPool({"a": a, "b": b}, "g", n_boot=1000).difference("a", "b", "accuracy")
    expected = stats.ttest_1samp(list(difference.by_seed.values()), 0.0)
    assert difference.value == pytest.approx(np.mean(list(difference.by_seed.values())))
    assert difference.p == pytest.approx(expected.pvalue, rel=0.02)
    interval = expected.confidence_interval()
    assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high), abs=2e-4)


def test_identical_predictions_differ_by_nothing():
    runs = shared(np.random.default_rng(4), [(0.9, 0.7)] * 3)
    difference = SeedPool({"a": runs, "b": runs}, "g", n_boot=200).difference("a", "b", "EOd")
    assert (difference.value, difference.low, difference.high, difference.p) == (0, 0, 0, 1)


def test_deterministic_training_leaves_the_test_part_which_is_the_paired_bootstrap_s():
    rng = np.random.default_rng(5)
    both = shared(rng, [(0.9, 0.7), (0.85, 0.8)], n=1500)
    again = {name: dict.fromkeys(range(4), run) for name, run in zip("ab", both.values(), strict=True)}
    pool = SeedPool(again, "g", n_boot=4000)
    difference = pool.difference("a", "b", "accuracy")
    plain = next(d for d in compare(both[0], both[1], n_boot=4000).differences if d.metric == "accuracy")
    assert difference.se == difference.se_test
    assert difference.value == pytest.approx(plain.value, abs=1e-12)
    assert difference.high - difference.low == pytest.approx(plain.high - plain.low, rel=0.08)


@pytest.mark.parametrize("own_rows", [False, True], ids=["shared test set", "own test sets"])
def test_intervals_of_differences_cover_the_truth(own_rows):
    """Gaps of 30 and 20 points with a spread of 3 points from training, and test noise; the truth is −10 points."""
    rng = np.random.default_rng(6)
    covered, trials = 0, 250
    for _ in range(trials):
        chances = {
            m: [(0.95, 0.95 - gap + rng.normal(0, 0.03)) for _ in range(5)] for m, gap in (("a", 0.3), ("b", 0.2))
        }
        runs = {"a": {}, "b": {}}
        if own_rows:
            for s in range(5):
                pair = shared(rng, [chances["a"][s], chances["b"][s]])
                for m, r in zip("ab", pair.values(), strict=True):
                    ids = np.arange(400) + 1000 * s
                    runs[m][s] = Records(r.label, r.prediction, groups=r.groups, id=ids)
        else:
            found = shared(rng, [*chances["a"], *chances["b"]])
            runs = {"a": {s: found[s] for s in range(5)}, "b": {s: found[5 + s] for s in range(5)}}
        difference = SeedPool(runs, "g", n_boot=200).difference("a", "b", "accuracy_gap")
        covered += difference.low <= -0.1 <= difference.high
    # 95 % ± three standard errors of 250 trials.
    assert 0.908 <= covered / trials <= 0.992


def test_clusters_are_resampled_together():
    rng = np.random.default_rng(7)
    base = records(rng, (0.9, 0.7), n=200)
    copies = Records.from_arrays(
        np.repeat(base.label.values(), 5),
        np.repeat(base.prediction.values(), 5),
        groups={"g": np.repeat(base.groups["g"].values(), 5)},
        id=np.arange(1000),
        cluster=np.repeat(np.arange(200), 5),
    )
    once = SeedPool({"m": {0: base}}, "g").figure("m", "accuracy")
    five = SeedPool({"m": {0: copies}}, "g").figure("m", "accuracy")
    assert five.high - five.low == pytest.approx(once.high - once.low, rel=0.05)


def test_what_cannot_be_known_is_said():
    rng = np.random.default_rng(8)
    pool = SeedPool({"a": {0: records(rng, (0.9, 0.7))}, "b": {0: records(rng, (0.9, 0.8))}}, "g", n_boot=200)
    alone = pool.difference("a", "b", "EOd")
    assert alone.value is not None
    assert alone.se is None
    assert alone.p is None
    assert "one seed" in alone.undefined
    tiny = SeedPool({"a": {0: records(rng, (0.9, 0.7), n=8)}}, "g", n_boot=200).figure("a", "EOd")
    assert tiny.mean is None
    assert "at least 10 are needed" in tiny.undefined
    with pytest.raises(InputError, match="no method 'd'"):
        pool.figure("d", "EOd")
    no_ids = Records.from_arrays([0, 1], [0, 1], groups={"g": ["a", "b"]})
    with pytest.raises(InputError, match="need ids"):
        SeedPool({"a": {0: no_ids}}, "g").figure("a", "EOd")
