"""Two samples of different rows: gaps and rates that changed, and those that did not."""

import json

import numpy as np
import pytest
from scipy.stats import binomtest, chi2_contingency

import fairhead
from fairhead.audit import drift
from fairhead.audit.audit_results import comparison_verdicts
from fairhead.cli import main
from fairhead.errors import InputError


def made(rates, n=800, seed=0):
    """Predictions with these selection rates of groups a, b, ..."""
    rng = np.random.default_rng(seed)
    group = rng.integers(0, len(rates), n)
    said = (rng.random(n) < np.array(rates)[group]).astype(int)
    return fairhead.Records.from_arrays(rng.integers(0, 2, n), said, groups={"g": np.array(list("abc"))[group]})


def found_of(comparison, metric, of):
    return next(d for d in comparison.differences if (d.metric, d.group_by) == (metric, of))


def test_a_rate_changes_as_newcombe_and_chi_squared_have_it():
    old, new = made([0.3, 0.5]), made([0.45, 0.5], n=600, seed=1)
    found = found_of(drift(old, new, metrics=["DP"], n_boot=4000), "selection_rate", "g: a")
    tables, ends = [], []
    for records in (old, new):
        mine = records.groups["g"].codes == 0
        hits, n = int(records.prediction.codes[mine].sum()), int(mine.sum())
        tables.append([hits, n - hits])
        wilson = binomtest(hits, n).proportion_ci(method="wilson")
        ends.append((hits / n, wilson.low, wilson.high))
    (p1, l1, u1), (p2, l2, u2) = ends
    low = p2 - p1 - np.hypot(u1 - p1, p2 - l2)
    high = p2 - p1 + np.hypot(p1 - l1, u2 - p2)
    assert found.value == pytest.approx(p2 - p1)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.01)
    assert found.p == pytest.approx(chi2_contingency(tables, correction=False).pvalue, rel=0.5)
    assert found.p_adjusted >= found.p
    assert found.n == sum(map(sum, tables))


def test_a_gap_that_grows_and_one_that_turns_around():
    grown = drift(made([0.5, 0.5], 2000), made([0.3, 0.6], 2000, seed=1), metrics=["DP"])
    assert found_of(grown, "DP", "g").outcome == "worse"
    # As large as before, the other way round: the gap says nothing, the rates of both groups do.
    turned = drift(made([0.3, 0.6], 2000), made([0.6, 0.3], 2000, seed=1), metrics=["DP"])
    assert found_of(turned, "DP", "g").outcome == "not significant"
    assert found_of(turned, "selection_rate", "g: a").low > 0.2
    assert found_of(turned, "selection_rate", "g: b").high < -0.2
    (pair,) = turned.pairs
    assert {*pair.groups} == {"a", "b"}
    sign = 1 if pair.groups == ("a", "b") else -1  # it is the first minus the second
    assert (sign * pair.a, sign * pair.b) == pytest.approx((-0.3, 0.3), abs=0.05)
    assert pair.note == "reversed"
    assert pair.p_adjusted < 0.001
    assert sign * pair.value == pytest.approx(0.6, abs=0.06)
    assert pair.low < pair.value < pair.high
    verdict = " ".join(sentence.text for sentence in comparison_verdicts(turned))
    assert "The gap is reversed in B: selection rate by g" in verdict
    assert "not significant" not in verdict
    assert all(p.note is None for p in grown.pairs), "an even side cannot be reversed"


def test_two_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made([0.5, 0.5]).save("march.csv")
    made([0.3, 0.6], 500, seed=1).save("april.csv")
    columns = ["--label", "label", "--pred", "prediction", "--group", "g"]
    shown = ["--compare", "april.csv", "--unpaired", "--json", "out.json", "--html", "page.html"]
    assert main(["audit", "march.csv", *columns, *shown]) in (0, None)
    said = capsys.readouterr().out
    assert "separate samples" in said
    assert "different rows" in (tmp_path / "page.html").read_text("utf-8")
    found = json.loads((tmp_path / "out.json").read_text())["comparison"]
    assert found["provenance"]["paired"] is False
    assert {"selection_rate", "DP"} <= {d["metric"] for d in found["differences"]}


def test_what_has_no_counterpart():
    old, new = made([0.3, 0.5, 0.4]), made([0.3, 0.5])
    found = drift(old, new, metrics=["DP"], n_boot=200)
    assert "g: c" not in {d.group_by for d in found.differences}
    small = drift(old, made([0.3, 0.5], n=12), metrics=["DP"], n_boot=200)
    gap = found_of(small, "DP", "g")
    assert gap.value is None
    assert "in B:" in gap.undefined
    other = fairhead.Records.from_arrays(["x", "y"] * 20, ["x", "y"] * 20, groups={"g": ["a", "b"] * 20})
    with pytest.raises(InputError, match="expected the same"):
        drift(old, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [((0.5, 0.5), (0.5, 0.5)), ((0.4, 0.5), (0.3, 0.5)), ((0.2, 0.6), (0.4, 0.5))]
)
def test_intervals_cover_the_true_drift(before, after):
    truth, hits = abs(after[1] - after[0]) - abs(before[1] - before[0]), []
    for seed in range(400):
        old, new = made(before, 800, 2 * seed), made(after, 600, 2 * seed + 1)
        found = found_of(drift(old, new, metrics=["DP"], n_boot=400, seed=seed), "DP", "g")
        hits.append(found.low <= truth <= found.high)
    print(before, after, "covered", np.mean(hits))
    assert np.mean(hits) >= 0.92


def test_a_headline_names_three_of_many_gaps_that_did_not_change():
    old, new = (made([0.3, 0.5], seed=seed) for seed in (0, 1))
    sides = [
        fairhead.Records.from_arrays(
            one.label.codes, one.prediction.codes, groups=dict.fromkeys(("g", "same"), one.groups["g"].codes)
        )
        for one in (old, new)
    ]
    (text,) = [said.text for said in comparison_verdicts(drift(*sides, n_boot=200)) if "not significant" in said.text]
    assert text.endswith(", nor in 3 more gaps.")
    assert text.count(" by ") == 3
