"""Rows with several labels: each label as an audit of its own would have it, and all of them together."""

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import hamming_loss

import fairhead
from fairhead.cli import main
from fairhead.errors import InputError

LABELS, SAID = ["toxic", "insult", "threat"], ["toxic_said", "insult_said", "threat_said"]
COLUMNS = {"label": LABELS, "prediction": SAID, "groups": "race"}


def made(n=1200, seed=0):
    """The second label is missed more often in group b."""
    rng = np.random.default_rng(seed)
    race, common = rng.choice(["a", "b"], n), rng.random(n)
    frame = {"race": race, "w": rng.random(n) + 0.5, "person": np.arange(n) // 2}
    for k, name in enumerate(LABELS):
        label = ((common + rng.random(n)) / 2 < 0.5).astype(int)
        missed = rng.random(n) < np.where((race == "b") & (k == 1), 0.4, 0.15)
        frame |= {name: label, f"{name}_said": np.where(missed, 1 - label, label)}
    return pd.DataFrame(frame)


@pytest.mark.parametrize("more", [{}, {"weight": "w"}, {"cluster": "person"}])
def test_each_label_is_that_of_an_audit_of_its_own(more):
    frame = made()
    found = fairhead.audit(frame, **COLUMNS, **more, metrics="all", n_boot=400)
    alone = [
        fairhead.audit(frame, label=label, prediction=said, groups="race", **more, n_boot=400)
        for label, said in zip(LABELS, SAID, strict=True)
    ]
    for k, label in enumerate(LABELS):
        for row, own in zip(found.by_group, alone[k].by_group, strict=True):
            assert row.n == own.n
            for rate in ("selection_rate", "TPR", "FPR", "precision", "FNR"):
                mine, theirs = row.rates[f"{rate}[{label}]"], own.rates[rate]
                assert mine.value == pytest.approx(theirs.value)
                assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high), abs=0.02)
    for metric in ("DP", "EOp", "EOd"):
        assert found[metric].value == pytest.approx(max(one[metric].value for one in alone))
    assert found["EOp"].detail["class"] == "insult"
    assert found["EOp"].low > 0
    mean = fairhead.audit(frame, **COLUMNS, **more, metrics=["EOp"], multiclass="mean", n_boot=400)["EOp"]
    assert mean.value == pytest.approx(np.mean([one["EOp"].value for one in alone]))


def test_accuracy_is_the_share_of_labels_that_are_right():
    frame = made()
    found = fairhead.audit(frame, **COLUMNS, n_boot=200)
    assert found["accuracy"].value == pytest.approx(1 - hamming_loss(frame[LABELS], frame[SAID]))
    for row in found.by_group:
        own = frame[frame.race == row.group]
        assert row.rates["accuracy"].value == pytest.approx(1 - hamming_loss(own[LABELS], own[SAID]))


def test_labels_of_a_row_are_drawn_together():
    """Three labels that are copies of one have the mean gap of one, with its interval: not that of three tries."""
    frame = made()
    copies = frame.assign(
        insult=frame.toxic, insult_said=frame.toxic_said, threat=frame.toxic, threat_said=frame.toxic_said
    )
    thrice = fairhead.audit(copies, **COLUMNS, metrics=["DP"], multiclass="mean", n_boot=4000)["DP"]
    once = fairhead.audit(copies, label="toxic", prediction="toxic_said", groups="race", metrics=["DP"], n_boot=4000)[
        "DP"
    ]
    assert thrice.value == pytest.approx(once.value)
    assert thrice.high - thrice.low == pytest.approx(once.high - once.low, rel=0.1)


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made().to_csv("posts.csv", index=False)
    columns = [part for name in LABELS for part in ("--label", name, "--prediction", f"{name}_said")]
    assert main(["audit", "posts.csv", *columns, "--group", "race", "--n-boot", "200", "--html", "page.html"]) in (
        0,
        None,
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 labels, groups by race (2)" in shown
    assert "for class insult" in shown


def test_what_does_not_fit_is_refused():
    frame = made(60)
    with pytest.raises(InputError, match="3 labels and 2 predictions"):
        fairhead.audit(frame, label=LABELS, prediction=SAID[:2], groups="race")
    with pytest.raises(InputError, match="holds 7"):
        fairhead.audit(frame.assign(insult=7), **COLUMNS)
    with pytest.raises(InputError, match="'cramers_v' is for one label"):
        fairhead.audit(frame, **COLUMNS, metrics=["cramers_v"])
    with pytest.raises(InputError, match="another label 'insult' in b than in a"):
        fairhead.compare(frame, frame.assign(insult=1 - frame.insult), **COLUMNS)


@pytest.mark.parametrize("more", [{}, {"weight": "w"}, {"cluster": "person"}])
def test_two_sets_of_several_labels_are_compared(more):
    """Of each label as a comparison of that label alone has it."""
    frame, rng = made(), np.random.default_rng(1)
    right = (frame.race == "b") & (rng.random(len(frame)) < 0.5)
    other = frame.assign(insult_said=np.where(right, frame.insult, frame.insult_said))
    found = fairhead.compare(frame, other, **COLUMNS, **more, metrics=["EOp"], n_boot=1000, n_perm=2000)
    gap = found.differences[0]
    assert gap.value == pytest.approx(found.b["EOp"].value - found.a["EOp"].value)
    assert gap.outcome == "better"
    one = {"label": "insult", "prediction": "insult_said", "groups": "race"}
    alone = fairhead.compare(frame, other, **one, **more, metrics=["EOp"], n_boot=1000, n_perm=2000)
    mine, theirs = next(d for d in found.pairs if d.metric == "TPR[insult]"), alone.pairs[0]
    assert (mine.a, mine.b, mine.n) == pytest.approx((theirs.a, theirs.b, theirs.n))
    assert mine.groups == theirs.groups
    assert mine.low == pytest.approx(theirs.low, abs=0.015)
    assert mine.high == pytest.approx(theirs.high, abs=0.015)
    assert next(d for d in found.pairs if d.metric == "TPR[toxic]").value == 0
