"""Comparisons: signed changes between groups, metrics that go by two names, and p-values of even models."""

import numpy as np
import pytest
from rich.console import Console

import fairhead
from fairhead.audit.audit_results import comparison_verdicts
from fairhead.records import Records
from fairhead.report.wording import said_of_difference
from fairhead.stats.paired import change_of_size


def both(rng, n, rates_a, rates_b, same=0.5):
    """Predictions of two models for n rows a group with label 1; a share of the rows has the same luck in both."""
    group = np.repeat(np.arange(len(rates_a)), n)
    luck = rng.random(len(group))
    other = np.where(rng.random(len(group)) < same, luck, rng.random(len(group)))
    groups = {"sex": np.array(["f", "m", "x", "y"])[group]}
    return [
        Records.from_arrays(
            np.ones(len(group), int), (u < np.array(rates)[group]).astype(int), groups=groups, classes=[0, 1]
        )
        for u, rates in ((luck, rates_a), (other, rates_b))
    ]


def test_a_reversed_gap_is_not_no_difference(capsys):
    """Women go from 20 points behind to 18 ahead: the gap is nearly as large, and something has changed."""
    a, b = both(np.random.default_rng(0), 2000, (0.5, 0.7), (0.7, 0.52))
    found = fairhead.compare(a, b, metrics=["EOp", "DP", "impact_ratio"], reference="m")
    (change,) = [p for p in found.pairs if p.metric == "TPR"]
    assert change.groups == ("f", "m")
    assert change.a == pytest.approx(-0.2, abs=0.05)
    assert change.b == pytest.approx(0.18, abs=0.05)
    assert change.low < 0.38 < change.high
    assert change.p_adjusted < 0.001
    assert change.outcome == "changed"
    gap = next(d for d in found.differences if d.metric == "EOp")
    assert gap.low < -0.02 < gap.high
    verdict = comparison_verdicts(found)
    assert any("reversed in B: TPR by sex, f" in sentence.text for sentence in verdict)
    assert not any("not significant" in sentence.text for sentence in verdict)
    ratio = next(d for d in found.differences if d.metric == "impact_ratio")
    assert ratio.p_adjusted < 0.001
    assert [said_of_difference(d) for d in (gap, ratio)] == ["groups moved, size not significant"] * 2
    assert all("p is of a change between any two groups" in d.to_dict()["note"] for d in (gap, ratio))
    found.show(Console(width=140))
    shown = " ".join(capsys.readouterr().out.split())
    assert "above f" in shown
    assert "above m" in shown
    assert "groups moved" in shown
    assert found.to_dict()["pairs"][0]["groups"] == ("f", "m")


def test_a_small_group_does_not_hide_what_changed_between_large_ones():
    """Women come 8 points nearer to men; a group of 14 rows makes the size of the whole gap uncertain."""
    rng = np.random.default_rng(0)
    group = np.array(["f"] * 1480 + ["m"] * 1506 + ["x"] * 14)
    luck, labels = rng.random(len(group)), (rng.random(len(group)) < 0.5).astype(int)
    a, b = (
        Records.from_arrays(
            labels,
            (luck < np.select([group == "f", group == "m"], [rate, 0.5], 0.6)).astype(int),
            groups={"sex": group},
        )
        for rate in (0.3, 0.38)
    )
    found = fairhead.compare(a, b, metrics=["DP"])
    assert said_of_difference(found.differences[0]) == "groups moved, size not significant"
    texts = [sentence.text for sentence in comparison_verdicts(found)]
    assert any(t.startswith("Between two groups: selection rate by sex, f") and t.endswith("B better.") for t in texts)
    assert any("min_group" in text for text in texts)
    without = [sentence.text for sentence in comparison_verdicts(fairhead.compare(a, b, metrics=["DP"], min_group=30))]
    assert len(without) == 1
    assert without[0].startswith("B has a smaller gap than A")


def test_each_pair_of_groups_has_its_signed_change():
    a, b = both(np.random.default_rng(1), 800, (0.5, 0.7, 0.6, 0.6), (0.6, 0.6, 0.6, 0.6))
    found = fairhead.compare(a, b, metrics=["DP"], reference="m").pairs
    assert len(found) == 6
    rate = [
        {row.group: row.rates["selection_rate"].value for row in side.by_group}
        for side in (fairhead.audit(a), fairhead.audit(b))
    ]
    for p in found:
        one, other = p.groups
        assert one != "m"
        assert p.value == pytest.approx((rate[1][one] - rate[1][other]) - (rate[0][one] - rate[0][other]))
        assert p.nearer.low <= p.nearer.value <= p.nearer.high
        assert p.p <= p.p_adjusted


@pytest.mark.parametrize("correction", ["westfall-young", "holm", "bh"])
def test_a_metric_that_goes_by_two_names_counts_once(correction):
    a, b = both(np.random.default_rng(2), 400, (0.75, 0.6), (0.72, 0.66))
    options = {"correction": correction, "n_perm": 2000}
    once = fairhead.compare(a, b, metrics=["DP"], **options).differences[0]
    twice = fairhead.compare(a, b, metrics=["DP", "fairlearn.demographic_parity_difference"], **options).differences
    assert [d.p_adjusted for d in twice] == pytest.approx([once.p_adjusted] * 2, abs=1e-3)
    assert once.p_adjusted == pytest.approx(once.p, abs=1e-3)


def test_correction_by_westfall_and_young_knows_what_metrics_share():
    """With all metrics Holm loses a difference that is clear."""
    a, b = both(np.random.default_rng(3), 500, (0.8, 0.62), (0.76, 0.68), same=0.9)
    young, holm = (
        {d.metric: d for d in fairhead.compare(a, b, metrics="all", n_perm=2000, correction=how).differences}
        for how in ("westfall-young", "holm")
    )
    assert young["DP"].p_adjusted < holm["DP"].p_adjusted
    for name, d in young.items():
        assert d.p is None or d.p - 1e-3 <= d.p_adjusted <= holm[name].p_adjusted + 0.02


def test_p_of_even_models_is_uniform():
    """Of 150 comparisons 5 % are below 0.05: by the sizes of gaps it was 0.7 to 2.5 %."""
    rng, below = np.random.default_rng(4), 0
    for _ in range(150):
        a, b = both(rng, 300, (0.7, 0.7), (0.7, 0.7), same=0.0)
        below += fairhead.compare(a, b, metrics=["DP"], n_boot=100, n_perm=200).differences[0].p <= 0.2
    assert below / 150 == pytest.approx(0.2, abs=3 * np.sqrt(0.16 / 150))


@pytest.mark.parametrize(("a", "b"), [(6, 0), (2.5, 0), (0, 6), (6, 2.5), (6, -6)])
@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_the_interval_of_a_change_covers_where_a_model_is_even(a, b, correlation):
    """Signed gaps in standard errors: 91 to 92 % was covered where the second model is even."""
    rng = np.random.default_rng(0)
    noise, draws = (
        rng.multivariate_normal([0, 0], [[1, correlation], [correlation, 1]], size=n).T for n in (2000, 1000)
    )
    seen = [gap + error for gap, error in zip((a, b), noise, strict=True)]
    low, high = change_of_size(*seen, *(s + d[:, None] for s, d in zip(seen, draws, strict=True)), 0.95)
    held = np.mean((low <= abs(b) - abs(a)) & (abs(b) - abs(a) <= high))
    assert 0.93 <= held <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("same", [0.0, 0.5, 0.95])
def test_comparisons_cover_where_the_second_model_is_even(same):
    rng, held = np.random.default_rng(5), 0
    for _ in range(1000):
        a, b = both(rng, 600, (0.8, 0.65), (0.75, 0.75), same=same)
        d = fairhead.compare(a, b, metrics=["EOp"], n_boot=1000, n_perm=100).differences[0]
        held += d.low <= -0.15 <= d.high
    assert 0.93 - 0.007 <= held / 1000 <= 0.97 + 0.007


def test_a_small_p_beside_an_interval_that_holds_0_is_explained(capsys):
    """Recalls of 75 and 76 % become 75 and 70 %: rows changed for certain, and by how much the lowest did is not."""
    label, luck = np.repeat([0, 1], 200), np.random.default_rng(2).random(400)
    a, b = (
        Records.from_arrays(
            label, np.where(luck < np.array(recall)[label], label, 1 - label), groups={"sex": ["f", "m"] * 200}
        )
        for recall in ((0.75, 0.76), (0.75, 0.70))
    )
    found = fairhead.compare(a, b, metrics=["worst_class_accuracy", "accuracy"])
    lowest, accuracy = sorted(found.differences, key=lambda d: d.metric, reverse=True)
    assert lowest.p_adjusted < 0.01
    assert lowest.low < 0 < lowest.high
    assert said_of_difference(lowest) == "predictions moved, size not significant"
    assert "both predict alike" in lowest.to_dict()["note"]
    assert "note" not in accuracy.to_dict()
    found.show(Console(width=140))
    assert "of lowest rates: of equal predictions" in " ".join(capsys.readouterr().out.split())
