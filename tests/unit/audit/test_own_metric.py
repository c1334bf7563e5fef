"""The worked example of CONTRIBUTING.md ("Add a metric"), as a newcomer would follow it."""

import re
from pathlib import Path

import numpy as np
import pytest
from fairlearn.metrics import MetricFrame
from sklearn.metrics import recall_score

import fairhead
from fairhead.audit.catalogue import METRICS, Metric

PAGE = Path(__file__).parents[3] / "CONTRIBUTING.md"


def test_the_example_is_audited_by_its_name(monkeypatch):
    text = PAGE.read_text(encoding="utf-8").partition("## Add a metric")[2].partition("\n## ")[0]
    line = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    metric = eval(line, {"Metric": Metric})  # noqa: S307  # of the page itself
    monkeypatch.setitem(METRICS, metric.name, metric)
    rng = np.random.default_rng(0)
    label, group = rng.integers(0, 2, 600), rng.choice(["a", "b", "c"], 600)
    said = np.where(rng.random(600) < 0.6 + 0.1 * (group == "a"), label, 1 - label)
    records = fairhead.Records.from_arrays(label, said, groups={"g": group})
    found = fairhead.audit(records, metrics=[metric.name])[metric.name, "g"]
    by_fairlearn = MetricFrame(metrics=recall_score, y_true=label, y_pred=said, sensitive_features=group).group_min()
    assert found.value == pytest.approx(by_fairlearn)
    assert found.low < found.value < found.high
