"""Intervals of ratios: even groups, groups of which nobody is selected, and means over classes."""

import numpy as np
import pytest
from scipy import optimize
from scipy.stats import fisher_exact

import fairhead
from fairhead.records import Records


@pytest.mark.parametrize("multiclass", ["mean", "weighted"])
def test_ratios_of_several_classes_reach_1_where_groups_are_even(multiclass):
    """Every replicate of a mean of ratios lies below 1, so that percentiles never hold it."""
    rng = np.random.default_rng(0)
    answers = np.array([[0.7, 0.2, 0.1], [0.15, 0.7, 0.15], [0.1, 0.3, 0.6]])
    held = []
    for _ in range(30):
        label, group = rng.integers(3, size=1500), rng.integers(2, size=1500)
        prediction = (rng.random((1500, 1)) > answers[label].cumsum(axis=1)).sum(axis=1)
        records = Records.from_arrays(label, prediction, groups={"g": group})
        found = fairhead.audit(records, metrics=["impact_ratio"], multiclass=multiclass, n_boot=300)["impact_ratio"]
        assert found.low < found.value <= found.high
        held.append(found.high == 1.0)
    assert np.mean(held) > 0.8


@pytest.mark.parametrize(("n", "selected"), [(30, 2), (40, 3), (200, 3), (30, 20), (100, 30), (400, 40)])
def test_a_group_of_which_nobody_is_selected_may_be_even_where_fishers_test_says_so(n, selected):
    """The percentiles of its ratio would end below 1 whatever the other group has."""
    prediction, group = np.arange(2 * n) < selected, np.arange(2 * n) // n
    records = Records.from_arrays(np.arange(2 * n) % 2, prediction.astype(int), groups={"g": group})
    found = fairhead.audit(records, metrics=["impact_ratio"])["impact_ratio"]
    even = fisher_exact([[0, n], [selected, n - selected]]).pvalue
    assert even > 0.2 or even < 0.001
    assert (found.value, found.low) == (0.0, 0.0)
    assert (found.high == 1.0) == (even > 0.2)
    assert found.mde > 0


@pytest.mark.parametrize("metric", ["impact_ratio", "fairlearn.equal_opportunity_ratio"])
def test_noise_of_a_mean_of_ratios_is_its_own_where_groups_differ(metric):
    """That of the gap of rates, as shares of the highest, would be half as much again; and no ratio is below 0."""
    rng = np.random.default_rng(0)
    answers = np.array([[[0.7, 0.2, 0.1], [0.15, 0.7, 0.15], [0.1, 0.3, 0.6]]] * 2)
    answers[1] = 0.3 * answers[1] + [0.7, 0.0, 0.0]
    found = []
    for _ in range(60):
        label, group = rng.integers(3, size=1500), rng.integers(2, size=1500)
        prediction = (rng.random((1500, 1)) > answers[group, label].cumsum(axis=1)).sum(axis=1)
        records = Records.from_arrays(label, prediction, groups={"g": group})
        found.append(fairhead.audit(records, metrics=[metric], multiclass="mean", n_boot=300)[metric])
    noise = np.std([estimate.value for estimate in found])
    assert np.mean([estimate.detail["se"] for estimate in found]) == pytest.approx(noise, rel=0.25)
    few = fairhead.audit(records.take(slice(80)), metrics=[metric], multiclass="mean", n_boot=300, min_cell=2)[metric]
    assert 0 < few.detail["expected_if_even"] < 1


@pytest.mark.parametrize(("n", "rates"), [(300, (0.2, 0.5)), (2000, (0.3, 0.5))])
def test_the_smallest_detectable_ratio_is_that_of_the_test_of_logarithms(n, rates):
    """In closed form, around the rate of both; times the ratio, it could be a distance of more than 1 from 1."""
    prediction = np.concatenate([np.arange(n) < rate * n for rate in rates]).astype(int)
    records = Records.from_arrays(np.arange(2 * n) % 2, prediction, groups={"g": np.arange(2 * n) // n})
    found = fairhead.audit(records, metrics=["impact_ratio"])["impact_ratio"]

    def se(logarithm):
        high = 2 * np.mean(rates) / (1 + np.exp(-logarithm))
        return np.sqrt(sum((1 - rate) / (rate * n) for rate in (high, high * np.exp(-logarithm))))

    critical = optimize.brentq(lambda x: 1.96 * se(x) - x, 0, 1)
    detectable = optimize.brentq(lambda x: critical + 0.84 * se(x) - x, 0, 2)
    assert found.mde == pytest.approx(1 - np.exp(-detectable), rel=0.06)


def test_no_ratio_that_can_be_detected_is_further_than_1_from_1():
    prediction, group = np.arange(24) % 12 < np.repeat([1, 2], 12), np.arange(24) // 12
    records = Records.from_arrays(np.arange(24) % 2, prediction.astype(int), groups={"g": group})
    assert 0.9 < fairhead.audit(records, metrics=["impact_ratio"])["impact_ratio"].mde < 1
