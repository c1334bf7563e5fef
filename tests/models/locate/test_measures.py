"""Separation and coupling of heads against SciPy and scikit-learn; their p-values where there is nothing."""

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from fairhead.errors import InputError
from fairhead.locate.head_maps import coupling, group_cells, separation


def made(seed=0, n=400, heads=3, effect=0.5, labels=2):
    rng = np.random.default_rng(seed)
    groups, label = rng.integers(0, 2, n), rng.integers(0, labels, n)
    parts = rng.normal(size=(n, 1, heads)) + effect * groups[:, None, None] + 2.0 * label[:, None, None]
    return parts, groups, label


def test_auc_is_the_mean_of_scikit_learns_over_labels() -> None:
    parts, groups, labels = made()
    parts = parts.round(1)  # with ties
    found = separation(parts, group_cells(groups, labels))
    for head in range(3):
        areas = [roc_auc_score(groups[labels == y], parts[labels == y, 0, head]) for y in (0, 1)]
        assert found.auc.value[0, head] == pytest.approx(np.mean(areas))


def test_d_and_its_p_value() -> None:
    parts, groups, labels = made(labels=1)
    found = separation(parts, group_cells(groups, labels))
    for head in range(3):
        a, b = parts[groups == 1, 0, head], parts[groups == 0, 0, head]
        pooled = np.sqrt((a.var(ddof=1) * (len(a) - 1) + b.var(ddof=1) * (len(b) - 1)) / (len(a) + len(b) - 2))
        assert found.d.value[0, head] == pytest.approx((a.mean() - b.mean()) / pooled)
        assert found.d.p[0, head] == pytest.approx(stats.ttest_ind(a, b, equal_var=False).pvalue, rel=0.1)
    # Near 0.5 the error of an AUC is that of the Mann–Whitney test, which assumes 0.5.
    parts, groups, labels = made(seed=4, labels=1, effect=0.05)
    found = separation(parts, group_cells(groups, labels))
    for head in range(3):
        expected = stats.mannwhitneyu(parts[groups == 1, 0, head], parts[groups == 0, 0, head]).pvalue
        assert found.auc.p[0, head] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("clustered", [False, True])
def test_intervals_hold_the_truth_as_often_as_they_say(clustered) -> None:
    rng = np.random.default_rng(1)
    repeats, n = 600, 240
    groups = np.repeat(np.arange(n // 2) % 2, 2) if clustered else np.arange(n) % 2
    clusters = np.arange(n) // 2 if clustered else None
    shared = rng.normal(size=(n // 2, 1, repeats)).repeat(2, axis=0)
    noise = (
        0.9**0.5 * shared + 0.1**0.5 * rng.normal(size=(n, 1, repeats))
        if clustered
        else rng.normal(size=(n, 1, repeats))
    )
    truth = 0.6
    parts = noise + truth * groups[:, None, None]
    found = separation(parts, group_cells(groups, np.zeros(n, dtype=int), clusters=clusters))
    area = stats.norm.cdf(truth / np.sqrt(2))
    for measure, value in ((found.d, truth), (found.auc, area)):
        covered = ((measure.low <= value) & (value <= measure.high)).mean()
        assert 0.92 <= covered <= 0.98
    other = 0.7 * noise + 0.51**0.5 * rng.normal(size=noise.shape)
    r = coupling(noise, other, group_cells(groups, np.zeros(n, dtype=int), clusters=clusters))
    true_r = 0.7
    assert 0.91 <= ((r.low <= true_r) & (true_r <= r.high)).mean() <= 0.98


def test_nothing_gives_uniform_p_values() -> None:
    rng = np.random.default_rng(2)
    parts, other = rng.normal(size=(2, 300, 10, 40))
    groups, labels = np.arange(300) % 2, np.arange(300) // 150
    found = separation(parts, group_cells(groups, labels))
    for p in (found.d.p, found.auc.p, coupling(parts, other, group_cells(groups, labels)).p):
        assert stats.kstest(p.ravel(), "uniform").pvalue > 0.01
    assert (found.d.p_adjusted > 0.05).all()


def test_coupling_is_the_correlation_given_the_label() -> None:
    rng = np.random.default_rng(3)
    labels = np.arange(400) % 2
    a = rng.normal(size=(400, 1, 1)) + 5 * labels[:, None, None]
    b = 0.5 * (a - 5 * labels[:, None, None]) + rng.normal(size=(400, 1, 1)) - 9 * labels[:, None, None]
    found = coupling(a, b, group_cells(np.arange(400) // 2 % 2, labels))
    centred = [x[:, 0, 0] - np.array([x[labels == y].mean() for y in (0, 1)])[labels] for x in (a, b)]
    expected = stats.pearsonr(*centred)
    assert found.value[0, 0] == pytest.approx(expected.statistic)
    low, high = expected.confidence_interval()
    assert (found.low[0, 0], found.high[0, 0]) == pytest.approx((low, high), abs=0.03)


def test_a_silent_head_has_no_separation() -> None:
    parts, groups, labels = made(heads=2)
    parts[..., 0] = 0
    found = separation(parts, group_cells(groups, labels))
    assert found.d.value[0, 0] == 0
    assert found.auc.value[0, 0] == 0.5
    assert found.d.p[0, 0] == found.auc.p[0, 0] == 1
    assert coupling(parts, parts, group_cells(groups, labels)).value[0, 0] == 0


def test_what_cannot_be_compared_is_refused() -> None:
    parts, groups, labels = made()
    with pytest.raises(InputError, match="'male' has 0 rows"):
        separation(parts, group_cells(np.ones_like(groups), labels, names=("female", "male")))
    with pytest.raises(InputError, match="one cluster"):
        separation(parts, group_cells(groups, labels, clusters=np.zeros(len(groups), dtype=int)))
