"""The bounds of `fairhead.locate.assumption`: true where they claim to be, and reached where they claim that."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixtures import Mixture, exact_gap, simulated_gap
from scipy.stats import foldnorm

from fairhead.errors import InputError
from fairhead.locate.assumption import absolute_bound, folded_mean, norm_bound, paper_bound

SHARES = st.floats(0.01, 0.99)
MEANS = st.floats(-50, 50)
SDS = st.floats(0.01, 20)
MIXTURES = st.builds(Mixture, MEANS, MEANS, SDS, SDS)


@given(MIXTURES, MIXTURES, SHARES)
def test_no_gap_exceeds_its_bound(q, k, share0):
    assert exact_gap(q, k, share0, "norm") <= norm_bound(share0) * (1 + 1e-9) + 1e-12
    assert exact_gap(q, k, share0, "norm_abs") <= absolute_bound(share0) * (1 + 1e-9)


@given(SHARES)
def test_both_bounds_lie_below_the_papers(share0):
    assert norm_bound(share0) < absolute_bound(share0) < paper_bound(share0)


@given(st.lists(st.tuples(MIXTURES, MIXTURES), min_size=2, max_size=6), SHARES)
def test_many_dimensions_are_bounded_by_the_root_of_their_number(pairs, share0):
    def stacked(mixtures):
        names = ("mean0", "mean1", "sd0", "sd1")
        return Mixture(*(np.array([getattr(m, name) for m in mixtures]) for name in names))

    q, k = (stacked(side) for side in zip(*pairs, strict=True))
    assert exact_gap(q, k, share0, "norm_abs") <= absolute_bound(share0, d=len(pairs)) * (1 + 1e-9)
    assert exact_gap(q, k, share0, "norm") <= norm_bound(share0, d=len(pairs)) * (1 + 1e-9) + 1e-12


@given(MEANS, MEANS, SDS)
def test_groups_of_one_size_and_spread_fold_alike(mean0, mean1, sd):
    means = Mixture(mean0, mean1, sd, sd).group_means(0.5, "norm_abs")
    assert means[0] == pytest.approx(means[1], rel=1e-12)


@given(MIXTURES, MIXTURES)
def test_groups_of_one_size_leave_no_gap_after_normalisation(q, k):
    assert exact_gap(q, k, 0.5, "norm") == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("share0", [0.6, 0.8, 0.929])
@pytest.mark.parametrize("operation", ["norm", "norm_abs"])
def test_the_norm_bound_is_reached_as_spread_vanishes(share0, operation):
    # With absolute values too: each group's mean is then all there is, and squares forget its sign.
    gaps = [exact_gap(*[Mixture(1.0, -1.0, sd, sd)] * 2, share0, operation) for sd in (0.1, 0.01, 0.0)]
    assert gaps[0] < gaps[1] < gaps[2] == pytest.approx(norm_bound(share0))


def test_without_an_operation_the_gap_has_no_bound():
    for size in (1.0, 100.0):
        apart = Mixture(size, 0.0, 1.0, 1.0)
        assert exact_gap(apart, apart, 0.5, "none") == size**2


def test_worst_cases_with_absolute_values_are_those_known():
    """A search over one group's spread: 4/π for even groups (one constant, one all spread), more than norm alone."""
    sds = np.linspace(0, 1, 400)
    worst = max(exact_gap(*[Mixture(0.0, 0.0, sd, np.sqrt(2 - sd**2))] * 2, 0.5) for sd in sds)
    assert worst == pytest.approx(4 / np.pi, rel=1e-6)
    assert norm_bound(0.5) == 0


@given(MEANS, SDS)
def test_folded_means_are_scipys(mean, sd):
    assert folded_mean(mean, sd) == pytest.approx(foldnorm.mean(abs(mean) / sd, scale=sd), rel=1e-9)


@pytest.mark.parametrize("operation", ["none", "norm", "norm_abs"])
@pytest.mark.parametrize("share0", [0.5, 0.7, 0.929])
def test_simulation_finds_the_exact_gap(operation, share0):
    q = Mixture(np.array([1.0, -2.0, 0.3]), np.array([0.0, 1.0, 0.0]), np.array([0.5, 1.0, 2.0]), 1.0)
    k = Mixture(np.array([2.0, -1.0, 0.0]), np.array([0.5, 1.0, 0.1]), 0.7, np.array([1.5, 0.2, 1.0]))
    found = simulated_gap(q, k, share0, operation, n=200_000)
    assert abs(found.value) == pytest.approx(exact_gap(q, k, share0, operation), abs=4 * found.error)
    assert found.error < 0.05


@settings(max_examples=20)
@given(MIXTURES, MIXTURES, SHARES)
def test_swapping_the_groups_changes_nothing(q, k, share0):
    swapped = [Mixture(m.mean1, m.mean0, m.sd1, m.sd0) for m in (q, k)]
    for operation in ("none", "norm", "norm_abs"):
        assert exact_gap(*swapped, 1 - share0, operation) == pytest.approx(
            exact_gap(q, k, share0, operation), rel=1e-7, abs=1e-9
        )


def test_bad_input_is_told():
    with pytest.raises(InputError, match="between 0 and 1; found 1"):
        norm_bound(1.0)
