"""Gaps over groups of unlike size: small ones must not hide what large ones show, and chance must not show any."""

import numpy as np
import pytest
from scipy.stats import norm

import fairhead
from fairhead.records import Records
from fairhead.stats.intervals import Candidates, gap
from fairhead.stats.max_t import Contrasts, Row

# Rows with label 1 of eight groups, as law school tables have them: two large groups, and some of a few dozen rows.
ROWS = np.array([16_000, 1200, 800, 400, 120, 60, 40, 30])


def rows_with(hits, n=ROWS):
    """Records of rows with label 1, of which so many are hits."""
    group = np.repeat(np.arange(len(n)), n)
    prediction = np.concatenate([np.arange(m) < h for m, h in zip(n, hits, strict=True)]).astype(int)
    return Records.from_arrays(np.ones(len(group), int), prediction, groups={"g": group}, classes=[0, 1])


def newcombe(hits, n, i, j, alpha):
    """The lower end for the difference of two shares (Newcombe 1998, method 10)."""
    z = norm.ppf(1 - alpha / 2)

    def wilson(g):
        p, size = hits[g] / n[g], n[g]
        half = z * np.sqrt(p * (1 - p) / size + z**2 / (4 * size**2))
        return p, (p + z**2 / (2 * size) - half) / (1 + z**2 / size), (p + z**2 / (2 * size) + half) / (1 + z**2 / size)

    (a, low, _), (b, _, high) = wilson(i), wilson(j)
    return a - b - np.hypot(a - low, high - b)


@pytest.mark.parametrize("metric", ["EOp", "DP", "impact_ratio", "fairlearn.equal_opportunity_ratio"])
def test_small_groups_do_not_hide_a_gap_of_large_ones(metric):
    """White 95 %, Black 80 %: with six small groups beside them the gap was "0.0 to 24.4"."""
    hits = np.round(ROWS * [0.95, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9])
    found = fairhead.audit(rows_with(hits), metrics=[metric])[metric]
    alone = fairhead.audit(rows_with(hits[:2], ROWS[:2]), metrics=[metric])[metric]
    if found.ideal == 0:
        assert 0.1 < found.low <= found.value
        assert found.value >= alone.value
        pairs = [(i, j) for i in range(8) for j in range(8) if i != j]
        assert found.low >= max(newcombe(hits, ROWS, i, j, 0.05 / 28) for i, j in pairs)
    else:
        assert found.high < 0.9
        assert found.value <= alone.value


def test_the_lower_end_is_never_below_the_best_simultaneous_limit():
    """Against the limits of all pairs, from the quantile of the largest of their studentised errors."""
    rng = np.random.default_rng(0)
    for groups in (3, 5, 8):
        hat, se = 0.5 + 0.05 * rng.normal(size=groups), 0.01 * np.exp(rng.normal(size=groups))
        error = rng.normal(size=(2000, 1, 1, groups)) * se
        pairs = [(i, j) for i in range(groups) for j in range(i)]
        apart = np.array([np.hypot(se[i], se[j]) for i, j in pairs])
        draws = np.stack([error[:, 0, 0, i] - error[:, 0, 0, j] for i, j in pairs], axis=1)
        largest = np.quantile(np.abs(draws / apart).max(axis=1), 0.95)
        limits = [abs(hat[i] - hat[j]) - largest * s for (i, j), s in zip(pairs, apart, strict=True)]
        contrasts = Contrasts.of([[Row((0, 0), 1.0, hat.tolist(), se.tolist())]])
        around = Candidates(lambda theta, hat=hat: hat[None, None] * theta / np.ptp(hat), contrasts=contrasts)
        found = gap(hat[None, None], error, lambda rates: np.ptp(rates, axis=(-1, -2, -3)), around)
        assert found.low >= max(0.0, *limits) - 0.01 * apart.max()


def shares_found(n, rates, repeats, seed=0, metric="EOp"):
    """How often a gap is significant, and its estimates."""
    rng = np.random.default_rng(seed)
    found = [
        fairhead.audit(rows_with(rng.binomial(n, rates), n), metrics=[metric], n_boot=400)[metric]
        for _ in range(repeats)
    ]
    return np.mean([e.low > 0 for e in found]), found


def test_a_gap_of_large_groups_is_found_and_chance_is_not():
    """60 repeats: with the range of all groups as the null, half of these gaps were missed."""
    n = ROWS // 4
    power, _ = shares_found(n, [0.95, 0.85] + [0.9] * 6, 60)
    assert power > 0.95
    error, _ = shares_found(n, [0.9] * 8, 150)
    assert error < 0.11  # 5 % shows more in 1 case of 500


def test_a_group_of_ten_rows_that_are_all_hits_hides_nothing():
    """Its errors had the shape of a rate of 1, stretched to the size of those of 0.8: seven standard errors far."""
    n = np.array([4000, 300, 200, 100, 30, 15, 10])
    hits = np.array([3200, 262, 160, 80, 24, 12, 10])
    i, j = np.triu_indices(len(n), 1)

    def largest(hits, rate):
        se = np.sqrt(rate * (1 - rate) / n)
        return np.max(np.abs(hits[..., i] / n[i] - hits[..., j] / n[j]) / np.hypot(se[i], se[j]), axis=-1)

    rate = hits.sum() / n.sum()
    drawn = np.random.default_rng(0).binomial(n, rate, size=(20_000, len(n)))
    p = np.mean(largest(drawn, rate) >= largest(hits, rate))
    assert p < 0.035
    found = fairhead.audit(rows_with(hits, n), metrics=["EOp"])["EOp"]
    assert found.low > 0
    assert found.detail["p_adjusted"] < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("n", [ROWS, ROWS // 4, np.full(8, 300), np.array([3000, 300, 60])])
def test_even_groups_are_refused_in_5_percent(n):
    error, _ = shares_found(n, [0.8] * len(n), 2000)
    assert 0.025 < error < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 2000) + 0.005


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_a_gap_as_large_as_the_smallest_detectable_one_is_significant(rate):
    """By the noise of observed rates 7.1 points were, and 30 of 30 beside 90 % of 2000 not significant."""
    n = np.array([30, 2000])
    for hits in range(31):
        found = fairhead.audit(rows_with([hits, rate * 2000], n), metrics=["EOp"])["EOp"]
        assert found.low > 0 or found.value < found.mde


def test_a_gap_of_exactly_0_has_no_groups_and_detects_what_is_significant():
    """Nobody is a hit: 2.0 points were detectable, by the noise of a rate of 0, and 5 of 133 not significant."""
    n = np.array([133, 133])
    none = fairhead.audit(rows_with([0, 0], n), metrics=["EOp"])["EOp"]
    assert (none.value, none.groups) == (0, ())
    hits = next(k for k in range(133) if fairhead.audit(rows_with([k, 0], n), metrics=["EOp"])["EOp"].low > 0)
    assert hits / 133 < none.mde < 2 * hits / 133


def test_gaps_of_scores_without_any_noise_detect_nothing():
    label, group = np.tile([0, 1], 100), np.repeat(["a", "b"], 100)
    same = Records.from_arrays(label, scores=np.full(200, 0.5), groups={"g": group})
    assert [fairhead.audit(same, metrics=[name])[name].mde for name in ("AUC_gap", "Brier_gap")] == [None, None]


def test_a_calibration_gap_of_the_smallest_detectable_size_is_found():
    """Its lower end knows that noise makes calibration errors larger; the detectable size did not: 3 % were found."""
    rng = np.random.default_rng(0)

    def drawn(gap):
        group, score = rng.integers(2, size=600), rng.uniform(0.2, 0.8, 600)
        label = (rng.random(600) < np.minimum(score + gap * group, 1)).astype(int)
        made = Records.from_arrays(label, scores=score, groups={"g": group})
        return fairhead.audit(made, metrics=["ECE_gap"], n_boot=300)["ECE_gap"]

    smallest = np.median([drawn(0.15).mde for _ in range(20)])
    found = [drawn(smallest).low > 0 for _ in range(60)]
    assert 0.6 < np.mean(found) < 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "rate"),
    [
        ([800, 800], 0.5),
        ([2000, 100], 0.8),
        ([2000, 100], 0.2),
        ([100, 2000], 0.2),
        ([3000, 1000, 700, 150], 0.5),
        ([150, 3000, 700, 1000], 0.75),
        ([400] * 6, 0.5),
    ],
)
@pytest.mark.parametrize("rows", ["rows", "weighted", "in clusters"])
def test_a_gap_of_the_smallest_detectable_size_is_found_in_80_percent(n, rate, rows):
    """The first group is higher than the second, the others lie between; rows of a cluster share half of their luck."""
    rng, group = np.random.default_rng(0), np.repeat(np.arange(len(n)), n)
    cluster = np.arange(len(group)) // 4
    more = {"weighted": {"weight": np.exp(rng.normal(0, 0.5, len(group)))}, "in clusters": {"cluster": cluster}}

    def drawn(gap):
        low = np.clip(rate - gap * n[0] / (n[0] + n[1]), 0, 1 - gap)
        luck = rng.random(len(group))
        if rows == "in clusters":
            luck = np.where(rng.random(len(group)) < 0.5, luck[4 * cluster], luck)
        hit = luck < np.r_[low + gap, low, [rate] * (len(n) - 2)][group]
        made = Records.from_arrays(
            np.ones(len(group), int), hit.astype(int), groups={"g": group}, classes=[0, 1], **more.get(rows, {})
        )
        return fairhead.audit(made, metrics=["EOp"], n_boot=400)["EOp"]

    smallest = 0.1
    for _ in range(4):
        printed = [e.mde for e in (drawn(smallest) for _ in range(60)) if e.groups == ("0", "1")]
        smallest = float(np.median(printed))
    power = np.mean([drawn(smallest).low > 0 for _ in range(600)])
    print(f"{n}, {rate}, {rows}: a gap of {100 * smallest:.1f} is found in {100 * power:.1f} %")
    assert 0.74 < power < 0.9
