"""Rows that lack a group: a column leaves out those without its own group, and no others."""

import numpy as np
import pandas as pd
import pytest

import fairhead
from fairhead.audit.slices import worst_slices
from fairhead.cli import main
from fairhead.records import Records

TASKS = {
    "predictions": {"label": "y", "prediction": "said"},
    "scores": {"label": "y", "score": "p"},
    "weights": {"label": "y", "prediction": "said", "weight": "w"},
    "clusters": {"label": "y", "score": "p", "cluster": "person"},
    "numbers": {"target": "size", "prediction": "guess"},
    "several labels": {"label": ["y", "z"], "prediction": ["said", "z_said"]},
}


def made(n=900, seed=0):
    """Of every third row the city is unknown, of every 50th the sex."""
    rng = np.random.default_rng(seed)
    sex, city, y, z = rng.choice(["f", "m"], n), rng.choice(["x", "y", "z"], n), *rng.integers(0, 2, (2, n))
    p = np.clip(0.5 + 0.2 * (y - 0.5) + 0.1 * (sex == "m") + rng.normal(0, 0.2, n), 0, 1).round(3)
    frame = pd.DataFrame({"y": y, "p": p, "said": (p > 0.5).astype(int), "sex": sex, "city": city, "z": z})
    frame["new"] = np.where(rng.random(n) < 0.2, 1 - frame.said, frame.said)
    frame["z_said"] = np.where(rng.random(n) < 0.3, 1 - z, z)
    frame["w"], frame["person"], frame["size"] = rng.random(n) + 0.5, np.arange(n) // 2, rng.normal(0, 1, n).round(3)
    frame["guess"] = (frame["size"] + rng.normal(0, 1, n) * (1 + (sex == "m"))).round(3)
    frame.loc[::3, "city"], frame.loc[::50, "sex"] = None, None
    return frame


def figures(found, group_by):
    """What an audit says by one column, without what is corrected over all columns."""
    kept = [
        (e.metric, e.value, e.low, e.high, e.n, e.mde, e.groups, e.undefined)
        for e in found.estimates
        if e.group_by == group_by
    ]
    return kept, [row for row in found.by_group if row.group_by == group_by]


@pytest.mark.parametrize("task", TASKS)
def test_each_column_is_audited_as_if_alone(task):
    frame, options = made(), {**TASKS[task], "n_boot": 200}
    if task == "predictions":
        options["metrics"] = "all"
    found = fairhead.audit(frame, **options, groups=["sex", "city"], intersections=True, drop_missing=True)
    known = {"sex": frame.dropna(subset="sex"), "city": frame.dropna(subset="city")}
    for name, rows in known.items():
        assert figures(found, name) == figures(fairhead.audit(rows, **options, groups=name), name)
        assert sum(row.n for row in found.by_group if row.group_by == name) == len(rows)
    both = fairhead.audit(frame.dropna(), **options, groups=["sex", "city"], intersections=True)
    assert figures(found, "sex × city") == figures(both, "sex × city")
    without = {"sex": 18, "city": 300, "sex × city": 312}
    assert found.provenance["audit"]["without_group"] == without
    assert found.provenance["audit"]["n"] == len(frame)
    if "target" not in options:
        overall = fairhead.audit(frame, **options, groups="person")["accuracy", None]
        assert found["accuracy", None].value == pytest.approx(overall.value)
        assert found["accuracy", None].n == overall.n == len(frame)


@pytest.mark.parametrize("scored", [False, True])
def test_each_column_is_compared_as_if_alone(scored):
    frame = made()
    sides = [
        Records.from_arrays(frame.y, frame[said], groups=dict(frame[["sex", "city"]]), drop_missing=True)
        for said in ("said", "new")
    ]
    if scored:
        sides = [
            Records.from_arrays(frame.y, scores=score, groups=dict(frame[["sex", "city"]]), drop_missing=True)
            for score in (frame.p, (frame.p + 0.1 * (frame.new - 0.5)).clip(0, 1))
        ]
    options = {"n_boot": 200, "n_perm": 500, "metrics": "all"}
    found = fairhead.compare(*sides, **options)
    for name in ("sex", "city"):
        known = frame[name].notna().to_numpy()
        alone = fairhead.compare(*(side.take(known) for side in sides), **options, group_by=name)
        for mine, theirs in zip(
            [d for d in found.differences if d.group_by == name],
            [d for d in alone.differences if d.group_by == name],
            strict=True,
        ):
            assert {**mine.to_dict(), "p_adjusted": 0} == {**theirs.to_dict(), "p_adjusted": 0}
        pairs = [[(p.metric, p.groups, p.value, p.p) for p in of.pairs if p.group_by == name] for of in (found, alone)]
        assert pairs[0] == pairs[1] != []


def test_two_columns_of_predictions_and_one_that_is_missing():
    frame = made()
    frame["new"] = frame.new.astype(object).where(frame.index != 7)
    columns = {"label": "y", "prediction": ("said", "new"), "groups": ["sex", "city"], "n_boot": 200, "n_perm": 500}
    found = fairhead.compare(frame, **columns, drop_missing=True)
    assert found.provenance["n"] == len(frame) - 1, "without a prediction there is nothing to compare"
    assert {d.group_by: d.n for d in found.differences if d.metric == "DP"} == {"sex": 881, "city": 599}


def test_an_unknown_group_is_no_contradiction_between_two_files():
    frame = made()
    options = {"label": "y", "id": "id", "groups": ["sex", "city"], "drop_missing": True}
    later = frame.assign(city="x").where(frame.city.isna(), frame).assign(id=range(len(frame)))
    found = fairhead.compare(
        frame.assign(id=range(len(frame))), later, **options, prediction="said", n_boot=200, n_perm=500
    )
    assert {d.group_by: d.n for d in found.differences if d.metric == "DP"} == {"sex": 882, "city": 600}


def test_slices_are_confirmed_on_rows_whose_groups_are_known():
    frame = made(6000)
    worse = (frame.sex == "m") & (frame.city == "x")
    frame["said"] = np.where(worse & (np.arange(6000) % 2 == 0), 1 - frame.y, frame.y)
    columns = {"label": "y", "prediction": "said", "groups": ["sex", "city"]}
    worst = worst_slices(frame, **columns, n_boot=200, drop_missing=True)[0]
    assert (worst.group_by, worst.group, worst.is_worse) == ("sex × city", "m × x", True)
    assert worst.rest == 1.0
    assert abs(worst.n - worse.sum() / 2) < 60


def test_saved_rows_keep_their_gaps(tmp_path):
    records = Records.from_frame(made(), label="y", prediction="said", groups=["sex", "city"], drop_missing=True)
    for name in ("saved.csv", "saved.jsonl", "saved.parquet"):
        records.save(tmp_path / name)
        again = Records.read(tmp_path / name, drop_missing=True)
        for group, column in records.groups.items():
            assert again.groups[group].codes.tolist() == column.codes.tolist()
            assert again.groups[group].levels == column.levels


def test_the_command_says_how_many_rows_a_column_lacks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made().to_csv("made.csv", index=False)
    columns = ["--label", "y", "--prediction", "said", "--group", "sex", "--group", "city", "--n-boot", "200"]
    with pytest.raises(SystemExit):
        main(["audit", "made.csv", *columns])
    assert "column 'sex' 18 (first in row 1), column 'city' 300 (first in row 1)" in capsys.readouterr().err
    forms = ["--intersections", "--ll144", "law.html", "--eu-ai-act", "act.html", "--html", "page.html"]
    assert main(["audit", "made.csv", *columns, "--drop-missing", *forms]) in (0, None)
    told = "Of 900 rows, 18 have no sex and 300 have no city; figures by a column leave out rows without its group."
    assert told in " ".join(capsys.readouterr().out.split())
    assert told in (tmp_path / "page.html").read_text("utf-8")
    assert "18 (sex), 300 (city), 312 (sex × city)" in (tmp_path / "law.html").read_text("utf-8")
    assert "900 rows; without sex 18, without city 300" in (tmp_path / "act.html").read_text("utf-8")
