"""The kernel that audits, benchmarks and the search for heads share: against SciPy and in closed form."""

import numpy as np
import pytest
from scipy import stats

from fairhead.errors import InputError
from fairhead.stats import OUTCOMES, Difference, Span, bootstrap
from fairhead.stats.bootstrap import Resampling
from fairhead.stats.clusters import cluster_errors, cluster_means, ratio
from fairhead.stats.max_t import westfall_young


def test_errors_of_independent_rows_are_those_of_a_t_test():
    x = np.random.default_rng(0).normal(0.3, 1, (40, 3))
    errors = cluster_errors((x - x.mean(0)) / len(x))
    expected = stats.ttest_1samp(x, 0)
    np.testing.assert_allclose(errors.p_values(x.mean(0)), expected.pvalue, rtol=1e-10)
    np.testing.assert_allclose(x.mean(0) - errors.reach(), expected.confidence_interval().low, rtol=1e-10)


def test_means_of_independent_rows_are_those_of_a_one_sided_t_test():
    x = np.random.default_rng(2).normal(0.3, 1, (40, 3))
    found, expected = cluster_means(x, range(40), 0.9), stats.ttest_1samp(x, 0, alternative="greater")
    both_sides = stats.ttest_1samp(x, 0).confidence_interval(0.9)
    for ours, theirs in zip(found, (x.mean(0), *both_sides, expected.statistic, expected.pvalue), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    alone = cluster_means(x, ["a"] * 40)
    assert np.isnan(alone[1:]).all()
    np.testing.assert_allclose(alone.value, x.mean(0))


def test_rows_that_are_copies_of_each_other_count_once():
    x = np.random.default_rng(1).normal(size=(30, 2))
    once = cluster_errors((x - x.mean(0)) / 30)
    thrice = cluster_errors(np.repeat((x - x.mean(0)) / 90, 3, axis=0), np.repeat(np.arange(30), 3))
    assert thrice.clusters == once.clusters == 30
    np.testing.assert_allclose(thrice.se, once.se, rtol=1e-12)
    with pytest.raises(InputError, match="one cluster"):
        cluster_errors(x, np.zeros(30, int))


def test_what_has_no_error_is_certain_or_nothing():
    errors = cluster_errors(np.zeros((5, 2)))
    assert errors.p_values(np.array([0.0, 0.1])).tolist() == [1.0, 0.0]


def test_draws_are_the_same_kept_or_in_blocks(monkeypatch):
    whole = np.concatenate(list(bootstrap.drawn_units(7, 50, seed=3)))
    assert (whole.sum(axis=1) == 7).all()
    monkeypatch.setattr(bootstrap, "_KEPT", 0)
    monkeypatch.setattr(bootstrap, "_DRAWN", 7 * 8)
    blocks = list(bootstrap.drawn_units(7, 50, seed=3))
    assert [len(block) for block in blocks] == [8] * 6 + [2]
    np.testing.assert_array_equal(np.concatenate(blocks), whole)


def test_a_cluster_bootstrap_has_the_standard_error_of_a_mean_of_clusters():
    rng = np.random.default_rng(2)
    sums = np.column_stack([rng.normal(0.5, 0.2, 200), np.ones(200)])
    found = Resampling(n_boot=4000).estimate("mean", None, sums, ratio, n=200)
    assert found.detail["se"] == pytest.approx(sums[:, 0].std() / np.sqrt(200), rel=0.05)
    low, high = stats.t.interval(0.95, 199, sums[:, 0].mean(), stats.sem(sums[:, 0]))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.08 * (high - low))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_that_is_the_same_in_all_clusters_is_not_certain(share):
    """SciPy's exact interval; a bootstrap of clusters that are alike has no spread."""
    sums = np.column_stack([np.full(20, 3 * share), np.full(20, 3)])
    found = Resampling(n_boot=200).estimate("ss", None, sums, ratio, 60, 0.5)
    exact = stats.binomtest(int(20 * share), 20).proportion_ci(0.95, method="exact")
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))
    assert found.value == share
    assert found.mde > found.high - found.low
    others = Resampling(n_boot=200).estimate("mean_difference", None, sums, ratio, 60, 0.0)
    assert (others.low, others.high) == (share, share)  # no share: 0 or 1 are no ends of its scale


def test_one_item_is_no_items():
    assert Resampling().why_undefined(1, 1, 0.5) == "1 item; at least 10 are needed"


def test_every_outcome_has_its_words():
    sure = {"a": 0.2, "b": 0.1, "value": -0.1, "low": -0.15, "high": -0.05, "p": 0.001, "n": 90, "ideal": 0.0}
    cases = {
        "better": {},
        "worse": {"ideal": 1.0},
        "changed": {"ideal": None},
        "not significant": {"p_adjusted": 0.24},
        "undefined": {"value": None, "low": None, "high": None, "undefined": "4 rows"},
    }
    assert tuple(cases) == OUTCOMES
    for outcome, more in cases.items():
        found = Difference("DP", "race", **(sure | more))
        assert found.outcome == outcome
        assert found.significant == (outcome in ("better", "worse", "changed"))
        in_brackets = {"not significant": " (p = 0.24)", "undefined": ": 4 rows"}
        assert found.words == outcome + in_brackets.get(outcome, "")


@pytest.mark.parametrize(
    ("nearer", "outcome", "direction"),
    [
        (Span(-0.1, -0.15, -0.05), "better", "nearer"),
        (Span(0.1, 0.05, 0.15), "worse", "further"),
        (Span(0.02, -0.05, 0.09), "changed", "further"),
        (Span(0.0, -0.05, 0.05), "changed", None),
    ],
)
def test_a_distance_with_an_interval_of_its_own_decides(nearer, outcome, direction):
    found = Difference("ss", None, 0.6, 0.4, -0.2, -0.3, -0.1, 90, 0.001, ideal=0.5, nearer=nearer)
    assert (found.outcome, found.direction) == (outcome, direction)


def test_the_json_of_a_benchmarks_difference_has_more_than_that_of_an_audit():
    of_audit = Difference("DP", "race", 0.2, 0.1, -0.1, -0.15, -0.05, 90, 0.001)
    of_benchmark = Difference("ss", None, 0.6, 0.5, -0.1, -0.2, 0.0, 90, benchmark="crows_pairs", clusters=9)
    assert {"benchmark", "clusters", "nearer", "relative", "note"} == set(of_benchmark.to_dict()) - set(
        of_audit.to_dict()
    )


@pytest.mark.parametrize("seed", range(5))
def test_what_differs_by_rounding_alone_counts_as_equal(seed):
    """Else the order of a sum, and so the processor, would decide on a p: (0.1 + 0.2) + 0.3 > 0.1 + (0.2 + 0.3)."""
    rng = np.random.default_rng(seed)
    terms = rng.integers(1, 5, (3, 4, 400)) / 10
    either = np.where(rng.random((4, 400)) < 0.5, (terms[0] + terms[1]) + terms[2], terms[0] + (terms[1] + terms[2]))
    exact, blocks = terms.sum(axis=0).round(6), ["sex", "sex", "race", "race"]
    observed = [0.6, 0.8, 0.9, 1.1]
    assert westfall_young(observed, list(either), blocks) == westfall_young(observed, list(exact), blocks)


@pytest.mark.parametrize("many", [1, 20])
def test_a_replicate_without_a_value_counts_as_the_largest(many):
    """A figure that cannot be computed in a replicate might have been anything there."""
    draws = np.random.default_rng(0).normal(size=(2, 199))
    unknown, largest = draws.copy(), draws.copy()
    unknown[1, :many], largest[1, :many] = np.nan, np.inf
    found, expected = (westfall_young([2.4, 2.0], list(of), ["sex", "sex"]) for of in (unknown, largest))
    assert found == expected
