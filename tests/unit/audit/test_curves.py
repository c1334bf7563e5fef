"""Thresholds, ROC and calibration curves by group, against scikit-learn."""

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.calibration import calibration_curve
from sklearn.metrics import confusion_matrix, roc_curve

import fairhead
from fairhead.report.sections.audited import draw_roc


def made(decimals):
    rng = np.random.default_rng(0)
    label, group = rng.integers(0, 2, 3000), rng.integers(0, 3, 3000)
    score = (1 / (1 + np.exp(-(2 * label - 1 + 0.2 * group + rng.normal(0, 1.2, 3000))))).round(decimals)
    return label, score, group


@pytest.mark.parametrize("decimals", [1, 6])
def test_each_threshold_gives_the_table_of_scikit_learn(decimals):
    label, score, group = made(decimals)
    records = fairhead.Records.from_arrays(label, scores=score, groups={"g": group})
    (found,) = fairhead.audit(records, n_boot=100).curves
    assert list(found.thresholds) == sorted({*found.thresholds})
    assert 5 < len(found.thresholds) <= 41
    for g, curve in enumerate(found.groups):
        mine = group == g
        for k, threshold in enumerate(found.thresholds):
            _, false, _, true = confusion_matrix(label[mine], score[mine] >= threshold, labels=[0, 1]).ravel()
            assert (curve.false_positives[k], curve.true_positives[k]) == (false, true)
    if decimals == 1:  # every score is a threshold: the whole ROC curve
        across, up, _ = roc_curve(label[group == 0], score[group == 0], drop_intermediate=False)
        points = draw_roc(found, 10).lines["0"]
        points = np.array([point.split(",") for point in points.split()], dtype=float)
        theirs = np.column_stack([100 * across, 100 - 100 * up])
        assert all(np.abs(points - corner).max(axis=1).min() < 0.01 for corner in theirs)


def test_calibration_is_that_of_scikit_learn_with_intervals():
    label, score, group = made(6)
    records = fairhead.Records.from_arrays(label, scores=score, groups={"g": group})
    curve = fairhead.audit(records, n_boot=400).curves[0].groups[1]
    share, mean = calibration_curve(label[group == 1], score[group == 1], n_bins=15, strategy="quantile")
    assert [point.share for point in curve.calibration] == pytest.approx(share.tolist(), abs=0.05)
    assert [point.score for point in curve.calibration] == pytest.approx(mean.tolist(), abs=0.01)
    for point in curve.calibration:
        wilson = binomtest(round(point.share * point.n), point.n).proportion_ci(method="wilson")
        assert (point.low, point.high) == pytest.approx((wilson.low, wilson.high))
    assert sum(point.n for point in curve.calibration) == curve.n == (group == 1).sum()


def test_clustered_rows_are_resampled_for_calibration():
    label, score, group = made(6)
    wide = []
    for cluster in (None, np.argsort(np.argsort(score + 10 * group)) // 50):
        records = fairhead.Records.from_arrays(label, scores=score, groups={"g": group}, cluster=cluster)
        points = fairhead.audit(records, n_boot=400).curves[0].groups[0].calibration
        assert all(point.low <= point.share <= point.high for point in points)
        wide.append(len(points))
    assert wide[0] == wide[1]


def test_scores_that_are_no_probabilities_have_no_calibration():
    label, score, group = made(1)
    records = fairhead.Records.from_arrays(label, scores=10 * score, threshold=5, groups={"g": group})
    found = fairhead.audit(records, n_boot=100)
    assert not found.curves[0].groups[0].calibration
    assert found.curves[0].groups[0].true_positives
    assert "curves" not in fairhead.audit(fairhead.Records.from_arrays(label, label, groups={"g": group})).to_dict()
