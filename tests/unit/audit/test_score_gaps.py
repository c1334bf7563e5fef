"""How far scores of groups are apart, and accuracy where bias does not help, against SciPy and scikit-learn."""

import numpy as np
import pytest
from scipy.stats import norm, wasserstein_distance
from sklearn.metrics import accuracy_score, roc_curve

import fairhead
from fairhead.audit.score_rates import Scores, ScoreTables
from fairhead.errors import InputError
from fairhead.stats.intervals import absolute_sum

WANTED = ["ABROCA", "score_distance", "sufficiency_gap"]


def made(n=3000, effects=(2.0, 1.2, 0.6), seed=0, decimals=None):
    rng = np.random.default_rng(seed)
    group, label = rng.integers(0, len(effects), n), rng.integers(0, 2, n)
    score = 1 / (1 + np.exp(-(label * np.array(effects)[group] + rng.normal(0, 1, n) - 1)))
    return label, score if decimals is None else score.round(decimals), group


def area_between(label, score, first, second):
    at = np.linspace(0, 1, 100_001)
    one, other = (
        np.interp(at, *roc_curve(label[rows], score[rows], drop_intermediate=False)[:2]) for rows in (first, second)
    )
    return np.abs(one - other).mean()


@pytest.mark.parametrize("decimals", [None, 2])
def test_they_are_what_other_libraries_compute(decimals):
    label, score, group = made(decimals=decimals)
    records = fairhead.Records.from_arrays(label, scores=score, groups={"g": group})
    found = fairhead.audit(records, metrics=WANTED, reference={"g": 0}, n_boot=400)
    areas = [area_between(label, score, group == 0, group == g) for g in (1, 2)]
    assert found["ABROCA"].value == pytest.approx(max(areas), abs=2e-3)
    distances = [wasserstein_distance(score[group == 0], score[group == g]) for g in (1, 2)]
    assert found["score_distance"].value == pytest.approx(max(distances), rel=0.02)
    assert found["ABROCA"].groups == ("2", "0")
    for name in WANTED:
        assert 0 < found[name].low < found[name].value < found[name].high < 1
    # The third, by hand: bins of equal mass of all rows.
    bins = (np.argsort(np.argsort(score, kind="stable"), kind="stable") * 10) // len(score)
    if decimals is None:
        shares = np.array([[label[(bins == k) & (group == g)].mean() for g in range(3)] for k in range(10)])
        assert found["sufficiency_gap"].value == pytest.approx(np.ptp(shares, axis=1).max(), abs=0.02)


def test_equal_groups_are_compatible_with_no_distance():
    label, score, group = made(effects=(1.0, 1.0), seed=4)
    records = fairhead.Records.from_arrays(label, scores=score, groups={"g": group})
    found = fairhead.audit(records, metrics=WANTED, n_boot=400)
    assert [found[name].low for name in WANTED] == [0.0, 0.0, 0.0]


def test_scores_on_any_scale_have_distances_on_it():
    label, score, group = made()
    plain = fairhead.Records.from_arrays(label, scores=score, groups={"g": group})
    wide = fairhead.Records.from_arrays(label, scores=100 * score, threshold=50, groups={"g": group})
    one, other = (fairhead.audit(records, metrics=WANTED, n_boot=200) for records in (plain, wide))
    assert other["score_distance"].value == pytest.approx(100 * one["score_distance"].value)
    assert other["score_distance"].high > 1
    assert other["ABROCA"].value == pytest.approx(one["ABROCA"].value)


def test_small_groups_leave_them_undefined():
    label, score, group = made(n=300)
    group[:] = 0
    group[:5] = 1
    records = fairhead.Records.from_arrays(label, scores=score, groups={"g": group})
    found = fairhead.audit(records, metrics=["ABROCA", "score_distance"], n_boot=200)
    assert found["ABROCA"].value is None
    assert "at least 10" in found["ABROCA"].undefined


def test_a_comparison_goes_without_them():
    label, score, group = made(n=600)
    records = fairhead.Records.from_arrays(label, scores=score, groups={"g": group})
    assert "ABROCA" not in {d.metric for d in fairhead.compare(records, records, metrics="all", n_boot=100).differences}
    with pytest.raises(InputError, match="not for comparisons"):
        fairhead.compare(records, records, metrics=["ABROCA"], n_boot=100)


def test_accuracy_where_the_bias_does_not_help():
    """Label and group go together in nine of ten rows; the model follows the group half of the time."""
    rng = np.random.default_rng(0)
    group = rng.integers(0, 2, 4000)
    label = np.where(rng.random(4000) < 0.9, group, 1 - group)
    said = np.where(rng.random(4000) < 0.5, group, label)
    records = fairhead.Records.from_arrays(label, said, groups={"g": group})
    found = fairhead.audit(records, metrics=["bias_conflicting_accuracy", "bias_aligned_accuracy"])
    for name, rows in (("bias_conflicting_accuracy", label != group), ("bias_aligned_accuracy", label == group)):
        assert found[name].value == pytest.approx(accuracy_score(label[rows], said[rows]))
        assert found[name].n == rows.sum()
    assert found["bias_conflicting_accuracy"].low < 0.5 < found["bias_conflicting_accuracy"].high


def test_a_curve_that_crosses_zero_by_chance_does_not_shorten_the_interval():
    """Errors of neighbours are alike: those before and after the crossing seemed to cancel out."""
    rng = np.random.default_rng(0)
    error = 0.02 * rng.normal(size=(4000, 1)) + 0.002 * rng.normal(size=(4000, 50))
    hat = np.linspace(-0.01, 0.02, 50)
    found = absolute_sum(hat, error, curve=True)
    assert found.high == pytest.approx(np.abs(hat).sum() + 1.96 * error.sum(axis=1).std(), rel=0.03)
    assert absolute_sum(hat, error).high < 0.9 * found.high


@pytest.mark.slow
@pytest.mark.parametrize("effect", [1.5, 1.3, 1.2, 0.7])
def test_intervals_cover_the_truth(effect):
    """Two groups with binormal scores, whose areas are known."""
    at = (np.arange(20_000) + 0.5) / 20_000
    truth = np.abs(norm.cdf(1.5 + norm.ppf(at)) - norm.cdf(effect + norm.ppf(at))).mean()
    hits = []
    for seed in range(400):
        label, score, group = made(1500, (1.5, effect), seed)
        records = fairhead.Records.from_arrays(label, scores=score, groups={"g": group})
        found = fairhead.audit(records, metrics=["ABROCA"], n_boot=500, seed=seed, reference={"g": 0})["ABROCA"]
        hits.append(found.low <= truth <= found.high)
    assert 0.93 - 0.012 <= np.mean(hits) <= 0.97 + 0.012  # known to 1.2 points


def share_that_is_compatible_with_0(rows, positives, alike, repeats, of="rows"):
    """How often the interval of a calibration error holds 0, of scores that are the true probabilities."""
    rng, share, held = np.random.default_rng(0), positives / rows, []
    weight = np.where(np.arange(rows) % 20, 1.0, 20.0) if of == "weighted rows" else None
    cluster = {"clusters of one": np.arange(rows), "clusters of five": np.arange(rows) // 5}.get(of)
    while len(held) < repeats:
        score, luck = rng.beta(share * alike, (1 - share) * alike, rows), rng.random(rows)
        if of == "clusters of five":  # they share most of their scores, and half of their luck
            score = np.where(rng.random(rows) < 0.7, score[5 * cluster], score)
            luck = np.where(rng.random(rows) < 0.5, luck[5 * cluster], luck)
        label = (luck < score).astype(np.int8)
        if label.sum() >= 5:
            of_all = ScoreTables(Scores(label, score, weight, cluster), np.zeros(rows, np.int8), 1, 600, len(held))
            held.append(of_all.rates("ECE").sum_interval(0, 0.95).low == 0)
    return np.mean(held)


@pytest.mark.parametrize(("rows", "positives"), [(300, 14), (2000, 14)])
def test_calibrated_scores_of_rare_positives_are_not_refused(rows, positives):
    """A bin without a positive showed no noise: the interval held 0 in 75 to 81 %."""
    assert share_that_is_compatible_with_0(rows, positives, 40, 150) >= 0.89


@pytest.mark.parametrize("of", ["weighted rows", "clusters of one", "clusters of five"])
def test_nor_are_those_of_weighted_rows_and_of_clusters(of):
    """The interval held 0 in 60 to 77 %."""
    assert share_that_is_compatible_with_0(600, 14, 40, 80, of) >= 0.87


@pytest.mark.slow
@pytest.mark.parametrize("alike", [2, 40])
@pytest.mark.parametrize(
    ("rows", "positives"),
    [(60, 30), (300, 14), (300, 90), (1000, 14), (1000, 40), (2000, 14), (2000, 90), (2000, 600), (6000, 40)],
)
def test_calibration_errors_hold_0_however_rare_positives_are(rows, positives, alike):
    """Scores that differ much or little, and groups of which replicates are drawn as counts, or as normal numbers."""
    assert 0.92 <= share_that_is_compatible_with_0(rows, positives, alike, 600) <= 0.985  # known to 0.9 points


@pytest.mark.slow
@pytest.mark.parametrize("of", ["weighted rows", "clusters of one", "clusters of five"])
@pytest.mark.parametrize(("rows", "positives"), [(60, 30), (300, 14), (2000, 14), (2000, 90), (2000, 600)])
def test_weighted_and_clustered_calibration_errors_hold_0(rows, positives, of):
    """How alike rows of a cluster are is known of all bins together alone, which is on the safe side."""
    held = share_that_is_compatible_with_0(rows, positives, 40, 300, of)
    print(f"{positives} positives in {rows} rows, {of}: {100 * held:.1f} %")
    assert held >= 0.92


def test_normal_numbers_do_not_depend_on_what_was_drawn_before():
    """All group columns share them, whichever is audited first."""
    label, score, _ = made(n=100)
    few_first, many_first = Scores(label, score), Scores(label, score)
    few, many = few_first.normal("ECE", 0, 2, 15, 50), few_first.normal("ECE", 0, 8, 15, 50)
    assert np.array_equal(many_first.normal("ECE", 0, 8, 15, 50), many)
    assert np.array_equal(many_first.normal("ECE", 0, 2, 15, 50), few)
    assert np.array_equal(few, many[:2])
    assert not np.array_equal(many_first.normal("AUC", 0, 8, 50), many_first.normal("Brier", 0, 8, 50))
