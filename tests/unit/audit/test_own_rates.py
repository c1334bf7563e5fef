"""Metrics that users write themselves, as a function or as a line of a file."""

import numpy as np
import pytest
from fairlearn.metrics import MetricFrame, false_negative_rate
from sklearn.metrics import f1_score

import fairhead
from fairhead.audit import define_metric
from fairhead.audit.catalogue import read_metrics
from fairhead.errors import InputError


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    label, group = rng.integers(0, 2, 900), rng.choice(["a", "b", "c"], 900)
    said = np.where(rng.random(900) < 0.65 + 0.15 * (group == "a"), label, 1 - label)
    return label, said, group


def records_of(data, **more):
    label, said, group = data
    return fairhead.Records.from_arrays(label, said, groups={"g": group}, **more)


@pytest.mark.parametrize(
    ("written", "theirs"),
    [
        ("fn / (tp + fn)", false_negative_rate),
        ("2 * tp / (2 * tp + fp + fn)", f1_score),
        (lambda c: 2 * c.tp / (2 * c.tp + c.fp + c.fn), f1_score),
    ],
)
def test_they_are_what_other_libraries_compute(data, written, theirs):
    label, said, group = data
    metric = define_metric("mine", written)
    found = fairhead.audit(records_of(data), metrics=[metric])
    frame = MetricFrame(metrics=theirs, y_true=label, y_pred=said, sensitive_features=group)
    assert found["own.mine"].value == found["mine", "g"].value == pytest.approx(frame.difference())
    assert found["own.mine"].low < frame.difference() < found["own.mine"].high
    for row in found.by_group:
        assert row.rates["own.mine"].value == pytest.approx(frame.by_group[row.group])


def test_a_definition_equal_to_one_of_ours_has_the_same_interval(data):
    tpr = define_metric("tpr", "tp / (tp + fn)")
    found = fairhead.audit(records_of(data), metrics=["EOp", tpr])
    assert [found["own.tpr"].low, found["own.tpr"].high] == pytest.approx(
        [found["EOp"].low, found["EOp"].high], abs=0.01
    )


@pytest.mark.parametrize("cluster", [None, np.arange(900) // 3])
def test_costs_may_be_larger_than_1_and_keep_their_intervals(data, cluster):
    cost = define_metric("cost", "(50 * fn + fp) / n")
    found = fairhead.audit(records_of(data, cluster=cluster), metrics=[cost])
    gap = found["own.cost"]
    assert 0 < gap.low < gap.value < gap.high
    assert gap.high > 1
    for row in found.by_group:
        rate = row.rates["own.cost"]
        assert 1 < rate.low < rate.value < rate.high < rate.value + 5
    import io

    from rich.console import Console

    shown = io.StringIO()
    found.show(Console(file=shown, width=120))
    assert f"{gap.value:.3f}" in shown.getvalue(), "a number, not a percentage"


def test_a_file_of_them(tmp_path, data):
    path = tmp_path / "metrics.txt"
    path.write_text("# ours\nmiss_rate = fn / (tp + fn)\n\ncost = (5 * fn + fp) / n  # five to one\n")
    miss_rate, cost = read_metrics(path)
    assert [miss_rate.name, cost.name] == ["own.miss_rate", "own.cost"]
    found = fairhead.audit(records_of(data), metrics=["EOp", miss_rate])
    assert found["own.miss_rate"].value == pytest.approx(found["EOp"].value)


@pytest.mark.parametrize(
    ("name", "written", "says"),
    [
        ("x", "__import__('os').system('true')", "is neither a number nor one of tp"),
        ("x", "tp.real", "'tp.real' is neither"),
        ("x", "tpp / n", "Did you mean 'tp'"),
        ("x", "[1][0]", "is neither a number"),
        ("x", "tp /", "is not an expression"),
        ("x", "max(tp)", "cannot be computed"),
        ("a b", "tp / n", "letters, digits and _"),
    ],
)
def test_what_is_no_metric_is_refused(name, written, says):
    with pytest.raises(InputError, match=says):
        define_metric(name, written)


def test_a_function_that_returns_something_else_is_refused(data):
    odd = define_metric("odd", lambda counts: 1.0)
    with pytest.raises(InputError, match="returned the shape"):
        fairhead.audit(records_of(data), metrics=[odd])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1 / 0", "cannot be computed .*division by zero"),
        ("x = 9 ** 9 ** 9 ** 9", "cannot be computed"),
        ("x = tp / n\nx = fp / n", "line 2 defines x again"),
    ],
)
def test_expressions_without_a_value_are_refused(tmp_path, text, message):
    (tmp_path / "metrics.txt").write_text(text)
    with pytest.raises(InputError, match=message):
        read_metrics(tmp_path / "metrics.txt")


def test_a_metric_stays_with_who_defined_it(data):
    """Another audit of the same process does not see it, and a rate without a value says so."""
    empty = define_metric("empty", "tp / (n - n)")
    found = fairhead.audit(records_of(data), metrics=["DP", "DP", empty])
    assert [e.metric for e in found.estimates] == ["DP", "own.empty"]
    assert found["own.empty"].undefined.startswith("the rate of a has no value")
    everything = fairhead.audit(records_of(data), metrics="all", n_boot=100)
    assert not [e for e in everything.estimates if e.metric.startswith("own.")]
    assert not [name for name in everything.by_group[0].rates if name.startswith("own.")]
    with pytest.raises(InputError, match="pass the result of define_metric"):
        fairhead.audit(records_of(data), metrics=["own.empty"])
