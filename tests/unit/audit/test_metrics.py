"""Every figure against Fairlearn, AIF360, scikit-learn or SciPy, on random tables."""

import itertools
import logging

import fairlearn.metrics as fl
import numpy as np
import pandas as pd
import pytest
from calibration import calibration_error
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats.contingency import association
from sklearn.metrics import accuracy_score, brier_score_loss, precision_score, recall_score, roc_auc_score

import fairhead
from fairhead.audit import METRICS
from fairhead.audit import metrics as plain
from fairhead.audit.score_rates import Scores, ScoreTables
from fairhead.records import Column, Records

EXACT = 1e-12


def column(codes, levels=None):
    codes = np.asarray(codes)
    return Column(codes.astype(np.int16), tuple(range(int(codes.max()) + 1)) if levels is None else levels)


def make(y, p, groups, **more):
    classes = tuple(range(max(int(np.max(y)), int(np.max(p)), 1) + 1))
    return Records(column(y, classes), column(p, classes), groups={k: column(v) for k, v in groups.items()}, **more)


def random_rows(seed, n_groups=3, n_classes=2, n=300):
    rng = np.random.default_rng(seed)
    group = np.concatenate([np.arange(n_groups).repeat(2 * n_classes), rng.integers(n_groups, size=n)])
    # Every group has every class: Fairlearn calls a missing rate 0, which this library never does.
    y = np.concatenate([np.tile(np.arange(n_classes), 2 * n_groups), rng.integers(n_classes, size=n)])
    p = np.where(rng.random(len(y)) < rng.uniform(0.2, 0.9), y, rng.integers(n_classes, size=len(y)))
    return y, p, group


def values(y, p, group, **options):
    options = {"metrics": "all", "min_cell": 1, "n_boot": 100, **options}
    return {e.metric: e for e in fairhead.audit(make(y, p, {"g": group}), **options).estimates}


FAIRLEARN = {
    "DP": fl.demographic_parity_difference,
    "EOp": fl.equal_opportunity_difference,
    "EOd": lambda *a, **k: fl.equalized_odds_difference(*a, agg="mean", **k),
    "impact_ratio": fl.demographic_parity_ratio,
    "fairlearn.demographic_parity_difference": fl.demographic_parity_difference,
    "fairlearn.demographic_parity_difference_to_overall": lambda *a, **k: fl.demographic_parity_difference(
        *a, method="to_overall", **k
    ),
    "fairlearn.demographic_parity_ratio": fl.demographic_parity_ratio,
    "fairlearn.equal_opportunity_difference": fl.equal_opportunity_difference,
    "fairlearn.equal_opportunity_ratio": fl.equal_opportunity_ratio,
    "fairlearn.equalized_odds_difference": fl.equalized_odds_difference,
    "fairlearn.equalized_odds_difference_mean": lambda *a, **k: fl.equalized_odds_difference(*a, agg="mean", **k),
    "fairlearn.equalized_odds_difference_to_overall": lambda *a, **k: fl.equalized_odds_difference(
        *a, method="to_overall", **k
    ),
    "fairlearn.equalized_odds_ratio": fl.equalized_odds_ratio,
}


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), n_groups=st.integers(2, 6))
def test_equals_fairlearn(seed, n_groups):
    y, p, group = random_rows(seed, n_groups)
    found = values(y, p, group)
    for name, reference in FAIRLEARN.items():
        expected = reference(y, p, sensitive_features=group)
        assert found[name].value == pytest.approx(expected, abs=EXACT), name
    assert {name for name in METRICS if name.startswith("fairlearn.")} <= set(FAIRLEARN)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_weighted_rates_equal_fairlearn(seed):
    y, p, group = random_rows(seed)
    weight = np.random.default_rng(seed).random(len(y))
    found = fairhead.audit(make(y, p, {"g": group}, weight=weight), min_cell=1, n_boot=100)
    expected = fl.demographic_parity_difference(y, p, sensitive_features=group, sample_weight=weight)
    assert found["DP"].value == pytest.approx(expected, abs=EXACT)
    odds = fl.equalized_odds_difference(y, p, sensitive_features=group, sample_weight=weight)
    assert found["fairlearn.equalized_odds_difference"].value == pytest.approx(odds, abs=EXACT)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), n_classes=st.integers(2, 5))
def test_group_rates_equal_scikit_learn(seed, n_classes):
    y, p, group = random_rows(seed, 3, n_classes)
    result = fairhead.audit(make(y, p, {"g": group}), min_cell=1, n_boot=100, metrics=["accuracy"])
    assert result["accuracy"].value == pytest.approx(accuracy_score(y, p), abs=EXACT)
    for g, row in enumerate(result.by_group):
        at = group == g
        recall = recall_score(y[at], p[at], average=None, labels=range(n_classes), zero_division=np.nan)
        precision = precision_score(y[at], p[at], average=None, labels=range(n_classes), zero_division=np.nan)
        classes = [1] if n_classes == 2 else range(n_classes)
        for c in classes:
            suffix = "" if n_classes == 2 else f"[{c}]"
            assert row.rates["TPR" + suffix].value == pytest.approx(recall[c], abs=EXACT)
            if np.isnan(precision[c]):
                assert row.rates["precision" + suffix].undefined
            else:
                assert row.rates["precision" + suffix].value == pytest.approx(precision[c], abs=EXACT)
        assert row.rates["accuracy"].value == pytest.approx(accuracy_score(y[at], p[at]), abs=EXACT)


@pytest.mark.parametrize("how", ["max", "mean", "weighted"])
def test_multiclass_is_one_against_the_rest_as_fairlearn_would_do_it(how):
    y, p, group = random_rows(5, 3, 4, 500)
    one_by_one = np.array(
        [fl.demographic_parity_difference(y == c, p == c, sensitive_features=group) for c in range(4)]
    )
    weights = {"mean": None, "weighted": np.bincount(y)}
    expected = one_by_one.max() if how == "max" else np.average(one_by_one, weights=weights[how])
    found = values(y, p, group, multiclass=how)
    assert found["DP"].value == pytest.approx(expected, abs=EXACT)
    assert found["DP"].detail.get("class") == (str(one_by_one.argmax()) if how == "max" else None)
    single = values(y, p, group, positive=2)["EOd"].value
    assert single == pytest.approx(
        fl.equalized_odds_difference(y == 2, p == 2, sensitive_features=group, agg="mean"), abs=EXACT
    )


def test_worst_groups_by_scikit_learn():
    y, p, group = random_rows(11, 4)
    found = values(y, p, group)
    by_cell = [accuracy_score(y[at], p[at]) for g in range(4) for c in range(2) for at in [(group == g) & (y == c)]]
    by_group = [accuracy_score(y[group == g], p[group == g]) for g in range(4)]
    assert found["worst_group_accuracy"].value == pytest.approx(min(by_cell), abs=EXACT)
    assert found["worst_attribute_accuracy"].value == pytest.approx(min(by_group), abs=EXACT)
    assert found["group_balanced_accuracy"].value == pytest.approx(np.mean(by_cell), abs=EXACT)
    assert found["worst_class_accuracy"].value == pytest.approx(min(recall_score(y, p, average=None)), abs=EXACT)
    assert found["worst_attribute_accuracy"].groups == (str(int(np.argmin(by_group))),)


@pytest.fixture(scope="module")
def aif360_metric():
    """`ClassificationMetric` of AIF360 itself. On import it logs what else could be installed."""
    logging.disable(logging.WARNING)
    from aif360.datasets import BinaryLabelDataset
    from aif360.metrics import ClassificationMetric

    logging.disable(logging.NOTSET)

    def metric(y, p, group, privileged, weight=None):
        frame = pd.DataFrame({"y": y, "g": group, "w": np.ones(len(y)) if weight is None else weight}, dtype=float)
        true = BinaryLabelDataset(
            df=frame,
            label_names=["y"],
            protected_attribute_names=["g"],
            instance_weights_name="w",
            favorable_label=1,
            unfavorable_label=0,
        )
        guessed = true.copy()
        guessed.labels = np.asarray(p, dtype=float)[:, None]
        others = [{"g": float(g)} for g in np.unique(group) if g != privileged]
        return ClassificationMetric(true, guessed, others, [{"g": float(privileged)}])

    return metric


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), n_groups=st.integers(2, 4), weighted=st.booleans())
def test_equals_aif360(aif360_metric, seed, n_groups, weighted):
    """The groups that are not privileged are pooled."""
    y, p, group = random_rows(seed, n_groups)
    weight = np.random.default_rng(seed).random(len(y)) if weighted else None
    privileged = seed % n_groups
    records = make(y, p, {"g": group}, weight=weight)
    result = fairhead.audit(records, metrics="all", min_cell=1, n_boot=100, reference={"g": privileged})
    theirs = aif360_metric(y, p, group, privileged, weight)
    named = [name for name in METRICS if name.startswith("aif360.")]
    assert len(named) == 5
    for name in named:
        expected = getattr(theirs, name.removeprefix("aif360."))()
        assert result[name, "g"].value == pytest.approx(expected, abs=EXACT), name


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), rows=st.integers(2, 5), columns=st.integers(2, 5))
def test_cramers_v_equals_scipy(seed, rows, columns):
    table = np.random.default_rng(seed).integers(1, 40, size=(rows, columns))
    assert plain.cramers_v(table.astype(float)).item() == pytest.approx(association(table, method="cramer"), abs=EXACT)


def test_bias_corrected_v_is_near_zero_without_association():
    rng = np.random.default_rng(0)
    tables = rng.multinomial(200, np.full(12, 1 / 12), size=2000).reshape(-1, 3, 4).astype(float)
    assert plain.cramers_v(tables).mean() > 0.1
    # Bergsma's φ̃² has expectation 0 before it is cut at 0; half of it is cut.
    assert (plain.cramers_v_corrected(tables) == 0).mean() > 0.5


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), digits=st.integers(1, 6))
def test_scores_equal_scikit_learn(seed, digits):
    rng = np.random.default_rng(seed)
    y = np.r_[0, 1, rng.integers(2, size=200)]
    s = np.round(rng.random(202), digits)
    w = rng.random(202)
    for weight in (None, w):
        found = ScoreTables(Scores(y, s, weight), np.zeros(202, int), 1, 100, 0)
        expected = roc_auc_score(y, s, sample_weight=weight), brier_score_loss(y, s, sample_weight=weight)
        assert [found.rates(name).hat.item() for name in ("AUC", "Brier")] == pytest.approx(expected, abs=EXACT)


def test_score_gaps_are_gaps_of_scikit_learns_figures():
    rng = np.random.default_rng(2)
    y, _, group = random_rows(2, 3, n=900)
    s = np.clip(0.5 + 0.3 * (y - 0.5) * (1 + group) / 2 + rng.normal(0, 0.2, len(y)), 0, 1)
    records = make(y, (s > 0.5).astype(int), {"g": group}, scores=s)
    result = fairhead.audit(records, metrics="all", n_boot=100)
    by_group = [roc_auc_score(y[group == g], s[group == g]) for g in range(3)]
    assert result["AUC_gap"].value == pytest.approx(np.ptp(by_group), abs=EXACT)
    assert result["AUC"].value == pytest.approx(roc_auc_score(y, s), abs=EXACT)
    briers = [brier_score_loss(y[group == g], s[group == g]) for g in range(3)]
    assert result["Brier_gap"].value == pytest.approx(np.ptp(briers), abs=EXACT)
    errors = [calibration_error(y[group == g] == 1, s[group == g]) for g in range(3)]
    assert result["ECE_gap"].value == pytest.approx(np.ptp(errors), abs=EXACT)


def test_several_classes_of_scores():
    rng = np.random.default_rng(4)
    y, _, group = random_rows(4, 2, 3, n=600)
    s = rng.dirichlet(np.ones(3), size=len(y)) * 0.5 + 0.5 * np.eye(3)[y] * rng.random((len(y), 1))
    s /= s.sum(axis=1, keepdims=True)
    result = fairhead.audit(make(y, s.argmax(axis=1), {"g": group}, scores=s), metrics="all", n_boot=100)
    gaps = [np.ptp([roc_auc_score(y[group == g] == c, s[group == g, c]) for g in range(2)]) for c in range(3)]
    assert result["AUC_gap"].value == pytest.approx(max(gaps), abs=EXACT)
    assert result["Brier"].value == pytest.approx(((s - np.eye(3)[y]) ** 2).sum(axis=1).mean(), abs=EXACT)


def test_calibrated_scores_have_a_small_calibration_error():
    rng = np.random.default_rng(0)
    s = rng.random(200_000)
    y = rng.random(200_000) < s
    for score, error in ((s, 0.0), (s**2, 1 / 6)):  # ∫ s − s² ds
        found = ScoreTables(Scores(y.astype(int), score), np.zeros(len(y), int), 1, 100, 0).rates("ECE")
        assert found.hat.item() == pytest.approx(error, abs=0.01)


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_order_of_rows_and_names_of_groups_do_not_matter(seed):
    y, p, group = random_rows(seed, 4)
    shuffled = np.random.default_rng(seed).permutation(len(y))
    renamed = np.array([2, 0, 3, 1])[group]
    first = values(y, p, group)
    again = values(y[shuffled], p[shuffled], group[shuffled])
    other = values(y, p, renamed)
    for name, found in first.items():
        assert again[name] == found
        if not name.startswith("aif360."):  # their default reference is the largest group, and there may be ties
            assert other[name].value == pytest.approx(found.value, abs=EXACT), name


def test_mean_pairwise_gaps_are_means_over_pairs():
    """By hand from Fairlearn's rates; an even model's interval holds 0, an uneven one's the truth."""
    rng = np.random.default_rng(0)
    group, y = rng.choice(5, 3000), rng.integers(0, 2, 3000)
    rates = np.array([0.3, 0.3, 0.4, 0.5, 0.5])
    pairs = list(itertools.combinations(range(5), 2))
    for truth in (rates, np.full(5, 0.4)):
        p = (rng.random(3000) < truth[group]).astype(int)
        found = fairhead.audit(Records.from_arrays(y, p, groups={"g": group}), metrics=["DP_pairwise", "EOp_pairwise"])
        shown = fl.MetricFrame(metrics=fl.selection_rate, y_true=y, y_pred=p, sensitive_features=group).by_group
        gap = found["DP_pairwise"]
        assert gap.value == pytest.approx(np.mean([abs(shown[i] - shown[j]) for i, j in pairs]))
        assert gap.low <= np.mean([abs(truth[i] - truth[j]) for i, j in pairs]) <= gap.high
        assert (gap.low > 0) == (truth is rates)
