"""Predicted numbers: errors by group against scikit-learn and Fairlearn, and how often intervals hold the truth."""

import json

import numpy as np
import pandas as pd
import pytest
from fairlearn.metrics import MetricFrame
from scipy.stats import permutation_test
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

import fairhead
from fairhead.audit import define_metric, tables
from fairhead.cli import main
from fairhead.errors import InputError

THEIRS = {
    "mean_error": lambda y, p, sample_weight=None: np.average(p - y, weights=sample_weight),
    "MAE": mean_absolute_error,
    "RMSE": lambda y, p, sample_weight=None: mean_squared_error(y, p, sample_weight=sample_weight) ** 0.5,
    "R2": r2_score,
}


def made(n=1500, seed=0, shift=(0.0, 2.0, -1.0), spread=(5.0, 5.0, 9.0)):
    """Incomes, predicted too high for b and less well for c."""
    rng = np.random.default_rng(seed)
    group = rng.choice(3, n, p=[0.5, 0.3, 0.2])
    income = 1000 + rng.gamma(4, 10, n)
    said = income + np.array(shift)[group] + rng.normal(0, 1, n) * np.array(spread)[group]
    return pd.DataFrame(
        {"income": income, "said": said, "race": np.array(list("abc"))[group], "w": rng.random(n) + 0.5}
    )


COLUMNS = {"target": "income", "prediction": "said", "groups": "race"}


@pytest.mark.parametrize("weight", [None, "w"])
def test_figures_are_those_of_other_libraries(weight):
    frame = made()
    found = fairhead.audit(frame, **COLUMNS, weight=weight, n_boot=300)
    parameters = {name: {"sample_weight": None if weight is None else frame.w} for name in THEIRS}
    theirs = MetricFrame(
        metrics=THEIRS,
        y_true=frame.income,
        y_pred=frame.said,
        sensitive_features=frame.race,
        sample_params=None if weight is None else parameters,
    )
    for name in THEIRS:
        assert found[name].value == pytest.approx(theirs.overall[name])
        gap = found[f"{name}_gap"]
        assert gap.value == pytest.approx(theirs.difference()[name])
        assert gap.low < gap.value < gap.high
        for row in found.by_group:
            rate = row.rates[name]
            assert rate.value == pytest.approx(theirs.by_group[name][row.group])
            assert rate.low < rate.value < rate.high
    assert found["mean_error_gap"].groups == ("b", "c")
    assert found["mean_error_gap"].low > 0


def test_many_rows_and_few_have_the_same_intervals(monkeypatch):
    """Sums of many rows are drawn as normal ones, and clusters of one row as rows."""
    frame = made(3000).assign(one=range(3000))
    drawn = fairhead.audit(frame, **COLUMNS, n_boot=4000)
    monkeypatch.setattr(tables, "_MANY", 10)
    normal = fairhead.audit(frame, **COLUMNS, n_boot=4000)
    clustered = fairhead.audit(frame, **COLUMNS, cluster="one", n_boot=4000)
    for one, *others in zip(drawn.estimates, normal.estimates, clustered.estimates, strict=True):
        for other in others:
            assert (one.low, one.high) == pytest.approx((other.low, other.high), abs=0.12 * (one.high - one.low) + 1e-9)


def test_gaps_are_found_and_chance_is_not():
    """60 tables with even errors, 60 with uneven ones: 95 % intervals of the gap of mean absolute errors."""
    held, found = 0, 0
    for seed in range(60):
        even = fairhead.audit(made(400, seed, (0, 0, 0), (5, 5, 5)), **COLUMNS, metrics=["MAE_gap"], n_boot=200)
        held += even["MAE_gap"].low == 0
        uneven = fairhead.audit(made(400, seed), **COLUMNS, metrics=["MAE_gap"], n_boot=200)["MAE_gap"]
        found += uneven.low > 0
    assert held >= 52
    assert found >= 57


def test_from_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made().to_csv("incomes.csv", index=False)
    columns = ["--target", "income", "--prediction", "said", "--group", "race", "--where", "income > 1010"]
    assert main(["audit", "incomes.csv", *columns, "--json", "out.json", "--html", "page.html"]) in (0, None)
    shown = " ".join(capsys.readouterr().out.split())
    assert "predicted numbers, groups by race (3)" in shown
    assert "The clearest gap is in" in shown
    assert "percent" not in shown.partition("MDE")[0]
    estimates = json.loads((tmp_path / "out.json").read_text())["estimates"]
    assert {e["metric"] for e in estimates} == {*THEIRS, *(f"{name}_gap" for name in THEIRS)}
    assert "Mean absolute error" in (tmp_path / "page.html").read_text("utf-8")


def test_what_does_not_go_together_is_refused():
    with pytest.raises(InputError, match="Metric 'DP' is of classes"):
        fairhead.audit(made(), **COLUMNS, metrics=["DP"])
    with pytest.raises(InputError, match="'MAE_gap' is of predicted numbers"):
        fairhead.audit(fairhead.Records.from_arrays([0, 1], [1, 0], groups={"g": [0, 1]}), metrics=["MAE_gap"])
    with pytest.raises(InputError, match="needs a column of predicted numbers"):
        fairhead.audit(made(), target="income", groups="race")
    with pytest.raises(InputError, match="another target in b than in a"):
        fairhead.compare(made(), made(seed=1), **COLUMNS)
    classes = fairhead.Records.from_arrays([0, 1] * 750, [1, 0] * 750, groups={"race": [0, 1] * 750})
    with pytest.raises(InputError, match="a predicts numbers and b classes"):
        fairhead.compare(fairhead.Records.from_frame(made(), **COLUMNS), classes)


def better(frame, factor):
    """The same rows, with errors of group c times a factor."""
    near = np.where(frame.race == "c", factor, 1.0)
    return frame.assign(said=frame.income + (frame.said - frame.income) * near)


def test_two_sets_of_predicted_numbers_are_compared():
    frame = made()
    found = fairhead.compare(frame, better(frame, 0.5), **COLUMNS, n_boot=1000, n_perm=2000)
    by_name = {d.metric: d for d in found.differences}
    gap = by_name["MAE_gap"]
    assert gap.value == pytest.approx(found.b["MAE_gap"].value - found.a["MAE_gap"].value)
    assert gap.outcome == "better"
    assert gap.low < gap.value < gap.high < 0
    moved = next(d for d in found.pairs if d.metric == "MAE" and d.groups == ("c", "a"))
    assert moved.p_adjusted < 0.01
    same = fairhead.compare(frame, frame, **COLUMNS, n_boot=200, n_perm=200)
    assert all(d.value == 0 and d.p == 1 for d in same.differences)


@pytest.mark.parametrize("way", ["rows", "normal", "clusters"])
def test_p_of_a_smaller_error_is_scipys(monkeypatch, way):
    frame = made(600).assign(one=range(600))
    other = frame.assign(said=frame.income + (frame.said - frame.income) * np.tile([0.6, 1.34], 300))
    if way == "normal":
        monkeypatch.setattr(tables, "_MANY", 10)
    more = {"cluster": "one"} if way == "clusters" else {}
    found = fairhead.compare(frame, other, **COLUMNS, **more, metrics=["MAE"], n_boot=200, n_perm=20_000)
    sizes = [np.abs(table.said - table.income).to_numpy() for table in (frame, other)]
    theirs = permutation_test(
        sizes, lambda a, b, axis: (b - a).mean(axis=axis), permutation_type="samples", n_resamples=20_000, rng=0
    )
    assert 0.01 < theirs.pvalue < 0.9
    assert found.differences[0].p == pytest.approx(theirs.pvalue, abs=0.02)


def test_a_metric_of_counts_is_refused_where_numbers_are_predicted():
    cost = define_metric("cost", lambda counts: counts.fn / counts.n)
    with pytest.raises(InputError, match="'cost' is of classes, not of numbers"):
        fairhead.audit(made(100), **COLUMNS, metrics=[cost], n_boot=100)
