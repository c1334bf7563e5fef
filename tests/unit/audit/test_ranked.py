"""Figures of scores from counts: sorted or not, in bins and exactly, against scikit-learn and the long way."""

import os

import numpy as np
import pytest
from calibration import calibration_error
from scipy.stats import binom, norm
from sklearn.metrics import brier_score_loss, roc_auc_score

from fairhead.audit import ranked, score_rates
from fairhead.stats import bootstrap
from fairhead.stats.clusters import sample_of_table, tabulate


def rows(n=6000, decimals=2, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(2, size=n)
    s = np.clip(0.5 + 0.3 * (y - 0.5) + rng.normal(0, 0.2, n), 0, 1)
    return y == 1, s if decimals is None else s.round(decimals), rng.integers(3, size=n), rng.random(n)


@pytest.mark.parametrize("weighted", [False, True])
def test_counting_decimals_finds_the_entries_that_sorting_finds(monkeypatch, weighted):
    hit, score, group, weight = rows()
    weight = weight if weighted else None
    counted = ranked.Ranked(hit, score, weight)
    assert counted._counted_as is not None
    found = counted.entries(group, 3)
    monkeypatch.setattr(ranked, "_DECIMALS", ())
    expected = ranked.Ranked(hit, score, weight).entries(group, 3)
    for one, other in zip(found, expected, strict=True):
        there = one.rows.sum(axis=0) > 0
        np.testing.assert_array_equal(one.value[there], other.value)
        np.testing.assert_array_equal(one.rows[:, there], other.rows)
        np.testing.assert_allclose(one.mass[:, there], other.mass, rtol=1e-12)
        for part, same in zip(ranked.Binned.of(one)[1:], ranked.Binned.of(other)[1:], strict=True):
            np.testing.assert_array_equal(part, same)


def long_scores(clumped=False):
    """Many rows, scores of 16 digits, a tenth of them 0 or 1."""
    hit, score, group, _ = rows(n=80_000, decimals=None)
    return hit, np.where(score < 1, score * 1e-7, 1.0) if clumped else score, group


def test_scores_of_many_rows_are_counted_in_cells_as_good_as_exact(monkeypatch):
    """An AUC to 3 % of a standard error, by a bound."""
    hit, score, group = long_scores()
    counted = score_rates.ScoreTables(score_rates.Scores(hit.astype(int), score), group, 3, 100, 0)
    cells = len(counted.by_class[0].entries[0].value)
    monkeypatch.setattr(ranked, "_CELLS", 1 << 20)  # too many for these rows
    sorted_ = score_rates.ScoreTables(score_rates.Scores(hit.astype(int), score), group, 3, 100, 0)
    assert cells == (1 << 14) + 2 < len(sorted_.by_class[0].entries[0].value)
    auc, exact = counted.rates("AUC"), sorted_.rates("AUC")
    expected = [roc_auc_score(hit[group == g], score[group == g]) for g in range(3)]
    np.testing.assert_allclose(exact.hat[0], expected, atol=1e-12)
    assert (np.abs(auc.hat - exact.hat) < 0.03 * exact.se).all()
    np.testing.assert_allclose(counted.rates("Brier").hat, sorted_.rates("Brier").hat, atol=1e-6)
    np.testing.assert_allclose(counted.rates("ECE").hat, sorted_.rates("ECE").hat, atol=1e-4)  # bins end elsewhere


def test_scores_that_lie_in_clumps_are_sorted():
    hit, score, group = long_scores(clumped=True)
    tables = score_rates.ScoreTables(score_rates.Scores(hit.astype(int), score), group, 3, 100, 0)
    expected = [roc_auc_score(hit[group == g], score[group == g]) for g in range(3)]
    np.testing.assert_allclose(tables.rates("AUC").hat[0], expected, atol=1e-12)


def test_one_score_with_more_decimals_is_enough_to_sort():
    hit, score, *_ = rows()
    score[17] = 0.123456789
    assert ranked.Ranked(hit, score, None)._counted_as is None


@pytest.mark.parametrize("decimals", [None, 2])
def test_bins_hold_equal_numbers_of_rows_and_equal_scores_share_one(decimals):
    hit, score, *_ = rows(decimals=decimals)
    binned = ranked.Binned.of(ranked.Ranked(hit, score, None).entries(np.zeros(6000, int), 1)[0])
    at = np.searchsorted(binned.edges, score, side="right")
    np.testing.assert_array_equal(binned.rows, [np.bincount(at[hit == h], minlength=15) for h in (False, True)])
    np.testing.assert_array_equal(at, score_rates.equal_bins(score, 15))


@pytest.mark.parametrize("decimals", [None, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_group_figures_are_scikit_learns(decimals, weighted):
    hit, score, group, weight = rows(decimals=decimals)
    tables = score_rates.ScoreTables(
        score_rates.Scores(hit.astype(int), score, weight if weighted else None), group, 3, 100, 0
    )
    for g in range(3):
        own = group == g
        given = {"sample_weight": weight[own]} if weighted else {}
        assert tables.rates("AUC").hat[0, g] == pytest.approx(roc_auc_score(hit[own], score[own], **given), abs=1e-12)
        expected = brier_score_loss(hit[own], score[own], **given)
        assert tables.rates("Brier").hat[0, g] == pytest.approx(expected, abs=1e-12)
        error = calibration_error(hit[own], score[own], weight[own] if weighted else None)
        assert tables.rates("ECE").hat[0, g] == pytest.approx(error, abs=1e-12)


def test_the_variance_of_an_auc_is_that_of_the_placements():
    hit, score, *_ = rows(n=400)
    up, down = score[hit], score[~hit]
    wins = (up[:, None] > down) + 0.5 * (up[:, None] == down)
    expected = wins.mean(axis=1).var() / len(up) + wins.mean(axis=0).var() / len(down)
    found = ranked.auc_of(*ranked.Ranked(hit, score, None).entries(np.zeros(400, int), 1)[0].mass)
    assert found.value == pytest.approx(wins.mean(), abs=1e-12)
    assert found.variance == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", ["AUC", "Brier"])
def test_replicates_in_bins_spread_as_without_them(name):
    """The standard error without bins, in closed form, at scores that tell the classes well apart."""
    rng = np.random.default_rng(1)
    y = np.repeat([0, 1], 5000)
    s = 1 / (1 + np.exp(-rng.normal(3 * y - 1.5, 1.5)))
    found = score_rates.ScoreTables(score_rates.Scores(y, s), np.zeros(10_000, int), 1, 20_000, 0).rates(name)
    if name == "AUC":
        wins = s[y == 1][:, None] > s[y == 0]
        variance = wins.mean(axis=1).var() / 5000 + wins.mean(axis=0).var() / 5000
    else:
        variance = ((s - y) ** 2).var() / 10_000
    assert found.star.std() == pytest.approx(np.sqrt(variance), rel=0.015)  # known to 0.5 %


def test_replicates_spread_as_without_bins_where_positives_are_few():
    """All positives are in the highest of 15 bins, which cannot tell how they differ: DeLong's variance can."""
    rng = np.random.default_rng(3)
    n = 40_000
    y = (np.arange(n) < 0.002 * n).astype(int)
    s = np.where(y == 1, 0.94 + 0.06 * rng.random(n), rng.random(n))
    found = score_rates.ScoreTables(score_rates.Scores(y, s), np.zeros(n, int), 1, 5000, 0).rates("AUC")
    wins = s[y == 1][:, None] > s[y == 0]
    variance = wins.mean(axis=1).var() / y.sum() + wins.mean(axis=0).var() / (n - y.sum())
    assert found.star.std() == pytest.approx(np.sqrt(variance), rel=0.05)


def test_replicates_are_the_same_on_any_number_of_cores(monkeypatch):
    rows_in_cells = np.random.default_rng(0).integers(50, size=(8, 2, 15))
    drawn = []
    for cores in (1, 2, 64):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        drawn.append(sample_of_table(rows_in_cells).bootstrap(1001, np.random.default_rng(7))[0])
    np.testing.assert_array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[0], drawn[2])
    assert drawn[0].shape == (1001, 8, 2, 15)
    assert (drawn[0].sum(axis=(1, 2, 3)) == rows_in_cells.sum()).all()
    assert len({part.tobytes() for part in drawn[0]}) == 1001


def test_a_table_is_the_sample_of_its_rows():
    key = np.random.default_rng(0).integers(6, size=500)
    table = np.bincount(key, minlength=6).reshape(2, 3)
    one, other = sample_of_table(table), tabulate([key], [(2, 3)])
    first, second = (sample.bootstrap(100, np.random.default_rng(0))[0] for sample in (one, other))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(("n", "share"), [(1000, 0.12), (1000, 0.5), (10**6, 1.2e-4), (10**6, 1 - 1.2e-4), (60, 0.3)])
def test_drawn_counts_have_the_binomial_distribution(n, share):
    """Of SciPy: all quantiles to the Monte-Carlo error of 200 000 draws, and two moments."""
    size = 200_000
    drawn = bootstrap.multinomial(n, np.array([share, 1 - share]), size, np.random.default_rng(5))
    assert (drawn.sum(axis=0) == n).all()
    assert (drawn == np.rint(drawn)).all()
    assert drawn.min() >= 0
    exact = binom(n, share)
    values = np.unique(drawn[0])
    found = np.searchsorted(np.sort(drawn[0]), values, side="right") / size
    assert np.abs(found - exact.cdf(values)).max() < 1.63 / np.sqrt(size)  # Kolmogorov's 99 %
    assert drawn[0].mean() == pytest.approx(exact.mean(), abs=4 * exact.std() / np.sqrt(size))
    assert drawn[0].std() == pytest.approx(exact.std(), rel=4 / np.sqrt(2 * size))


class EveryQuantile:
    """Normal numbers, one for each quantile: what is made of them has its distribution without Monte-Carlo error."""

    def standard_normal(self, shape):
        assert shape[0] == 1
        return norm.ppf((np.arange(shape[1]) + 0.5) / shape[1])[None]


@pytest.mark.parametrize(("n", "share"), [(1000, 0.12), (401, 0.5), (10**6, 1.01e-4), (10**6, 1 - 1.01e-4)])
@pytest.mark.parametrize("fewer", [1, 2, 4, 8])
def test_counts_made_from_normal_numbers_are_binomial_to_a_thousandth(n, share, fewer):
    """Far below a thousandth, in fact, also where a count varies by no more than ±3."""
    n //= fewer
    size = 100_000
    drawn = bootstrap.multinomial(n, np.array([share, 1 - share]), size, EveryQuantile())[0]
    values = np.unique(drawn)
    found = np.searchsorted(np.sort(drawn), values, side="right") / size
    assert np.abs(found - binom(n, share).cdf(values)).max() < 2e-4


def test_equal_units_are_drawn_in_order():
    """Sorting that is not stable orders them as the processor likes, and a seed would give other figures there."""
    share = np.full(1000, 1 / 1000)
    drawn = bootstrap.multinomial(10**6, share, 5, np.random.default_rng(0))
    left, z = np.full(5, 1e6), np.random.default_rng(0).standard_normal((1, 5))[0]
    part = 1 / 1000
    first = np.rint(left * part + np.sqrt(left * part * (1 - part)) * z + (1 - 2 * part) / 6 * (z * z - 1))
    np.testing.assert_array_equal(drawn[0], first)


def test_drawn_counts_of_many_units_vary_together_as_a_multinomial_does():
    share = np.array([0.3, 0.002, 0.25, 0.0008, 0.2, 0.1472, 0.1])
    drawn = bootstrap.multinomial(5000, share, 100_000, np.random.default_rng(6))
    expected = 5000 * (np.diag(share) - np.outer(share, share))
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert (np.abs(np.cov(drawn) - expected) / scale).max() < 5 / np.sqrt(100_000)


@pytest.mark.parametrize(("n", "base", "steep"), [(3000, 0.4, 1.0), (3000, 0.4, 4.0), (8000, 0.05, 1.5)])
@pytest.mark.parametrize("power", [1.0, 1.3])  # calibrated, and not
def test_figures_of_many_rows_drawn_as_normal_are_those_of_drawn_counts(monkeypatch, n, base, steep, power):
    """The ends of their intervals to a tenth of a standard error; that of 2000 replicates alone is 0.06 of one."""
    rng = np.random.default_rng(3)
    chance = 1 / (1 + np.exp(-(rng.normal(size=2 * n) * steep + np.log(base / (1 - base)))))
    label, group = (rng.random(2 * n) < chance).astype(int), np.arange(2 * n) % 2
    found = {}
    for many in (150, 10**9):
        monkeypatch.setattr(score_rates, "_MANY", many)
        tables = score_rates.ScoreTables(score_rates.Scores(label, chance**power), group, 2, 40_000, 0)
        found[many] = {name: tables.rates(name) for name in ("AUC", "Brier", "ECE")}
    for name, normal in found[150].items():
        counts = found[10**9][name]
        np.testing.assert_allclose(normal.hat, counts.hat, rtol=1e-12)
        ends = [np.quantile(rates.star[:, 0], [0.025, 0.975], axis=0) for rates in (normal, counts)]
        assert not np.array_equal(*ends)
        assert (np.abs(ends[0] - ends[1]) < 0.1 * counts.se[0]).all(), name
    # Of the terms of a calibration error also how they vary together, against what rows say without any bootstrap.
    first = group == 0
    edges = tables.by_class[0].binned[0].edges
    of_rows = np.eye(15)[np.searchsorted(edges, (chance**power)[first], side="right")]
    exact = np.cov((of_rows * (label - chance**power)[first, None]).T, bias=True) / n
    drawn = np.cov(found[150]["ECE"].terms.star[..., 0].T)
    assert (np.abs(drawn - exact) / np.sqrt(np.outer(np.diag(exact), np.diag(exact)))).max() < 5 / np.sqrt(40_000)


def test_figures_near_the_end_of_their_scale_are_drawn_from_counts(monkeypatch):
    """Of 5 of 4000 positives among the negatives, an AUC of 0.999 does not vary as a normal number does."""
    score = np.concatenate([np.linspace(0, 0.5, 4000), np.linspace(0.51, 1, 3995), np.linspace(0.1, 0.15, 5)])
    drawn = []
    for many in (score_rates._MANY, 10**9):
        monkeypatch.setattr(score_rates, "_MANY", many)
        scores = score_rates.Scores(np.repeat([0, 1], 4000), score)
        drawn.append(score_rates.ScoreTables(scores, np.zeros(8000, dtype=int), 1, 2000, 0).rates("AUC"))
    assert drawn[0].hat.item() == pytest.approx(0.999, abs=1e-3)
    np.testing.assert_array_equal(drawn[0].star, drawn[1].star)


@pytest.mark.parametrize(
    ("n", "classes", "units"),
    [(600, 5, "rows"), (6600, 3, "rows"), (600, 5, "weights"), (600, 5, "clusters of one"), (900, 3, "clusters")],
)
def test_aucs_of_several_classes_vary_together_as_in_other_samples(n, classes, units):
    """Their mean, an overall AUC, has the standard error that it has over 250 samples; so have those of each class."""

    def sample(seed):
        rng = np.random.default_rng(seed)
        label, scores = rng.integers(0, classes, n), rng.normal(size=(n, classes))
        weight = np.full(n, 2.0) if units == "weights" else None
        cluster = np.arange(n) // (3 if units == "clusters" else 1) if units.startswith("clusters") else None
        if units == "clusters":  # whose rows err alike
            scores[:, 0] += rng.normal(size=n // 3)[cluster]
        scores[np.arange(n), label] += 1
        probabilities = 1 / (1 + np.exp(-scores + scores.mean(axis=1, keepdims=True)))
        return score_rates.Scores(label, probabilities, weight, cluster)

    def tables(seed, n_boot):
        return score_rates.ScoreTables(sample(seed), np.zeros(n, dtype=int), 1, n_boot, 0)

    seen = np.array([tables(seed, 1).rates("AUC").hat[:, 0] for seed in range(1, 251)])
    star = tables(0, 4000).rates("AUC").star[..., 0]
    assert star.std(axis=0) == pytest.approx(seen.std(axis=0), rel=0.15)
    assert star.mean(axis=1).std() == pytest.approx(seen.mean(axis=1).std(), rel=0.15)
