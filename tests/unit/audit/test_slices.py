"""The worst intersections, chosen on one half of the rows and confirmed on the other."""

import json

import numpy as np
import pytest

import fairhead
from fairhead.audit import worst_slices
from fairhead.audit.audited_rows import View
from fairhead.audit.slices import _half
from fairhead.cli import main
from fairhead.errors import InputError


def made(n=4000, seed=0, bad=0.45, usual=0.2, **more):
    """Wrong in a fifth of the rows; in one of twelve intersections, as often as `bad` says."""
    rng = np.random.default_rng(seed)
    groups = {"sex": rng.integers(0, 2, n), "race": rng.integers(0, 3, n), "age": rng.integers(0, 2, n)}
    planted = (groups["sex"] == 1) & (groups["race"] == 2)
    label = rng.integers(0, 2, n)
    wrong = rng.random(n) < np.where(planted, bad, usual)
    return fairhead.Records.from_arrays(label, np.where(wrong, 1 - label, label), groups=groups, **more)


@pytest.mark.parametrize("rate", ["accuracy", "FNR"])
def test_a_planted_slice_is_found_and_confirmed(rate):
    first = worst_slices(made(), rate)[0]
    assert {*first.group_by.split(" × ")} >= {"sex", "race"}
    assert first.is_worse
    assert (first.gap.high < 0) == (rate == "accuracy")
    assert abs(first.confirmed - (0.55 if rate == "accuracy" else 0.45)) < 0.1
    assert abs(first.rest - (0.77 if rate == "accuracy" else 0.22)) < 0.08


def test_no_slice_lies_within_another():
    """A part of a slice, or a slice around it, says the same again."""
    records = made()
    columns = {name: column.values().tolist() for name, column in records.groups.items()}
    found = [dict(zip(one.group_by.split(" × "), one.group.split(" × "), strict=True)) for one in worst_slices(records)]
    rows = [
        {i for i in range(len(records)) if all(str(columns[name][i]) == group for name, group in of.items())}
        for of in found
    ]
    assert len(rows) == 5
    assert not any(a <= b for i, a in enumerate(rows) for j, b in enumerate(rows) if i != j)


def test_halves_follow_from_the_seed_and_keep_clusters_together():
    records = made(usual=0.2, bad=0.2)
    found = worst_slices(records, most=5)
    again = worst_slices(records, most=5)
    assert found == again, "the same seed gives the same halves"
    assert found != worst_slices(records, most=5, seed=1)
    clustered = made(n=2000, cluster=np.arange(2000) // 20)
    half = _half(View.of(clustered), 0)
    assert not {*clustered.cluster.codes[half]} & {*clustered.cluster.codes[~half]}
    assert half.sum() == 1000
    assert len(worst_slices(clustered, n_boot=200)) == 5


@pytest.mark.slow
def test_nothing_is_found_where_there_is_nothing():
    false = [any(one.is_worse for one in worst_slices(made(1500, seed, 0.2), n_boot=300)) for seed in range(200)]
    assert np.mean(false) <= 0.07


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made().save("made.csv")
    columns = ["--label", "label", "--pred", "prediction", "--group", "sex", "--group", "race", "--group", "age"]
    shown = ["--slices", "accuracy", "--n-boot", "300", "--json", "out.json", "--html", "page.html"]
    assert main(["audit", "made.csv", *columns, *shown]) in (0, None)
    assert "worse" in capsys.readouterr().out
    slices = json.loads((tmp_path / "out.json").read_text())["slices"]
    assert slices[0]["is_worse"] is True
    assert "Worst slices" in (tmp_path / "page.html").read_text("utf-8")


def test_slices_are_shown_and_written_like_any_result(tmp_path, capsys):
    found = worst_slices(made(), n_boot=300)
    frame = found.to_frame()
    assert frame.loc[0, ["group_by", "is_worse"]].tolist() == ["sex × race", True]
    assert frame.high[0] < 0
    found.show()
    assert "Confirmed as worse in accuracy: 1 × 2" in " ".join(capsys.readouterr().out.split())
    page = found.report(tmp_path / "slices.html").read_text("utf-8")
    assert "1 × 2 (sex × race)" in page
    assert found.to_dict()["slices"][0]["gap"]


@pytest.mark.parametrize(("rate", "says"), [("AUC", "expected one of accuracy"), ("acuracy", "expected one of")])
def test_a_rate_that_is_none(rate, says):
    with pytest.raises(InputError, match=says):
        worst_slices(made(200), rate)


def test_a_frame_whose_names_hold_the_sign_of_crossings():
    frame = made().to_frame().assign(sex=lambda t: t.sex.map({0: "a × b", 1: "c"}))
    columns = {"label": "label", "prediction": "prediction", "groups": ["sex", "race"]}
    found = worst_slices(frame, "accuracy", n_boot=300, **columns)
    assert (found[0].group_by, found[0].group, found[0].is_worse) == ("sex × race", "c × 2", True)
    some = worst_slices(frame, "accuracy", n_boot=300, where="race != 2", **columns)
    assert not any(one.is_worse for one in some)
