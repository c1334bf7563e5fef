"""Conditions on rows, groups from numbers, repeated headers, and scores on any scale: tables as people have them."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

import fairhead
from fairhead.errors import InputError
from fairhead.records import Records
from fairhead.records.where import Where


def table(n=400, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "y": rng.integers(0, 2, n),
            "p": rng.integers(0, 2, n),
            "age": rng.integers(18, 70, n),
            "days": np.where(rng.random(n) < 0.1, np.nan, rng.integers(-60, 60, n)),
            "charge": rng.choice(["F", "M", "O"], n),
            "the date": rng.choice(["2013-01-02", "2013-11-30", "2014-02-01"], n),
            "race": rng.choice(["Black", "White"], n),
        }
    )


# Ours, and the same in the language of pandas, where a missing value makes every comparison but != false.
CONDITIONS = {
    "days between -30 and 30": "-30 <= days <= 30",
    "days not between -30 and 30": "(days < -30 or days > 30)",
    "days != 0": "days != 0 and days == days",
    "not days = 0": "days != 0 and days == days",
    "days is missing": "days != days",
    "days is not missing and age >= 25": "days == days and age >= 25",
    "charge in (F, 'M')": "charge in ('F', 'M')",
    "charge not in (F, M) or age < 20": "charge == 'O' or age < 20",
    'charge <> "O" and (age < 25 or age > 45)': "charge != 'O' and (age < 25 or age > 45)",
    "not (charge = O or days > 0)": "charge != 'O' and days <= 0",
    "days > 0 or charge == F": "days > 0 or charge == 'F'",
    "[the date] >= 2013-06-01 AND age <= 40.5": "`the date` >= '2013-06-01' and age <= 40.5",
}


@pytest.mark.parametrize(("ours", "pandas"), CONDITIONS.items(), ids=list(CONDITIONS))
@pytest.mark.parametrize("suffix", ["csv", "parquet", "frame"])
def test_the_rows_are_those_that_pandas_finds(ours, pandas, suffix, tmp_path):
    frame = table().assign(id=range(400))
    wanted = frame.query(pandas)["id"].tolist()
    assert 0 < len(wanted) < 400
    columns = {"label": "y", "prediction": "p", "groups": "race", "id": "id", "where": ours}
    if suffix == "frame":
        found = Records.from_frame(frame, **columns)
    else:
        path = tmp_path / f"table.{suffix}"
        frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
        found = Records.read(path, **columns)
    assert found.id.tolist() == wanted
    assert found.provenance["rows"] == 400
    assert found.provenance["rows_left_out"] == 400 - len(wanted)


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ("", "expected a column, it ends there"),
        ("age >", "expected a value, it ends there"),
        ("age between 1", "expected 'and'"),
        ("age ! 3", "cannot be read from '! 3' on"),
        ("age = 3 race = a", "expected and, or, or the end, found 'race = a'"),
        ("age not 3", "expected between or in"),
        ("(age = 3", r"expected '\)'"),
        ("age in 3", r"expected '\('"),
        ("age.__class__ = 3", "has no column 'age.__class__'"),
        ("aeg = 3", "Did you mean 'age'"),
        ("charge > 3", "'charge' with the number 3, but that column holds text"),
        ("age = old", "'age' with 'old', but that column holds numbers"),
        ("age > 200", "no row meets the condition 'age > 200'"),
        ("not " * 60 + "age = 3", "more than 50 conditions within each other"),
    ],
)
def test_what_is_no_condition_is_refused_in_words(condition, says):
    with pytest.raises(InputError, match=says):
        Records.from_frame(table(), label="y", prediction="p", groups="race", where=condition)


@pytest.mark.parametrize(
    ("written", "condition"),
    [
        ("%d.%m.%Y", "day >= 01.06.2013"),
        ("%d.%m.%Y", "day >= 2013-06-01"),
        ("%m/%d/%Y", "day between 01/01/2013 and 06/30/2013"),
        ("%Y-%m-%d", "day < 1.6.2013"),
        ("%Y-%m-%d", "day < 2013/06/01"),
    ],
)
def test_dates_whose_order_as_text_is_not_that_of_time_are_refused(written, condition):
    days = pd.date_range("2013-01-01", periods=len(table()), freq="D")
    frame = table().assign(day=days.strftime(written))
    with pytest.raises(InputError, match="not in the order of time: write them all as 2025-01-31"):
        Records.from_frame(frame, label="y", prediction="p", groups="race", where=condition)


def test_dates_in_any_writing_can_be_equal_and_years_first_in_order():
    days = pd.date_range("2013-01-01", periods=len(table()), freq="D")
    for written, condition, wanted in (
        ("%d.%m.%Y", "day in (01.01.2013, 02.01.2013, 03.01.2013)", 3),
        ("%Y/%m/%d %H:%M", "day < 2013/01/11", 10),
    ):
        frame = table().assign(day=days.strftime(written))
        assert len(Records.from_frame(frame, label="y", prediction="p", groups="race", where=condition)) == wanted


def test_numbers_that_are_stored_as_text_are_text():
    frame = table().assign(age=lambda t: t.age.astype(str))
    with pytest.raises(InputError, match="'age' with the number 30, but that column holds text"):
        Records.from_frame(frame, label="y", prediction="p", groups="race", where="age > 30")


def test_a_condition_runs_nothing():
    with pytest.raises(InputError):
        Where.parse("__import__('os').system('true')")


def test_rows_keep_their_numbers_in_messages():
    frame = table(20).assign(race="a", p=1)
    frame.loc[12, "race"] = None
    with pytest.raises(InputError, match="first in row 13"):
        Records.from_frame(frame.assign(k=range(20)), label="y", prediction="p", groups="race", where="k >= 10")
    # What is left out need not be complete, nor a probability.
    found = Records.from_frame(
        frame.assign(k=range(20), p=np.where(np.arange(20) == 12, 7.5, 0.5)),
        label="y",
        score="p",
        groups="race",
        where="k != 12",
    )
    assert len(found) == 19


def test_bins_are_groups_in_their_order():
    frame = table()
    found = Records.from_frame(frame, label="y", prediction="p", groups=["age", "race"], bins={"age": [25, 45, 99]})
    theirs = pd.cut(frame["age"], [-np.inf, 25, 45, np.inf], right=False)
    assert found.groups["age"].levels == ("under 25", "25 to under 45", "45 to under 99")
    assert found.groups["age"].codes.tolist() == theirs.cat.codes.tolist()
    days = Records.from_frame(frame, label="y", prediction="p", groups="days", bins={"days": [0.5]}, drop_missing=True)
    assert len(days.groups["days"].complete()) == frame["days"].notna().sum()


@pytest.mark.parametrize(("edges", "says"), [([45, 25], "ascending"), ([], "ascending")])
def test_bins_that_are_none(edges, says):
    with pytest.raises(InputError, match=says):
        Records.from_frame(table(), label="y", prediction="p", groups="age", bins={"age": edges})
    with pytest.raises(InputError, match="no group column"):
        Records.from_frame(table(), label="y", prediction="p", groups="race", bins={"age": [25]})


def test_a_repeated_header_is_numbered(tmp_path):
    path = tmp_path / "twice.csv"
    path.write_text("y,p,g,g\n1,1,a,c\n0,0,b,d\n")
    with pytest.raises(InputError, match=r"2 columns called 'g'; say which: 'g#1' \(column 3\) or 'g#2' \(column 4\)"):
        Records.read(path, label="y", prediction="p", groups="g")
    found = Records.read(path, label="y", prediction="p", groups=["g#2", "g#1"])
    assert found.groups["g#2"].levels == ("c", "d")
    same = Records.from_frame(pd.read_csv(path, header=None, skiprows=1).set_axis(["y", "p", "g", "g"], axis=1),
                              label="y", prediction="p", groups="g#2")  # fmt: skip
    assert same.groups["g#2"].levels == ("c", "d")


def test_a_score_on_any_scale_needs_a_threshold():
    rng = np.random.default_rng(1)
    label, group = rng.integers(0, 2, 600), rng.integers(0, 2, 600)
    decile = np.clip(rng.integers(1, 8, 600) + 3 * label, 1, 10)
    with pytest.raises(InputError, match=r"outside \[0, 1\].*--threshold"):
        Records.from_arrays(label, scores=decile, groups={"g": group})
    with pytest.raises(InputError, match="threshold is 11, but the scores run from 1 to 10"):
        Records.from_arrays(label, scores=decile, threshold=11)
    with pytest.raises(InputError, match="a threshold is given but no score"):
        Records.from_arrays(label, label, threshold=0.4, groups={"g": group})
    records = Records.from_arrays(label, scores=decile, threshold=5, groups={"g": group})
    assert (records.prediction.codes == (decile >= 5)).all()
    found = fairhead.audit(records)
    assert found["AUC"].value == pytest.approx(roc_auc_score(label, decile))
    assert not {"ECE", "Brier", "ECE_gap"} & {e.metric for e in found.estimates}
    assert "ECE" not in found.by_group[0].rates
    with pytest.raises(InputError, match="'ECE' needs probabilities"):
        fairhead.audit(records, metrics=["ECE"])


# Published by ProPublica ("How We Analyzed the COMPAS Recidivism Algorithm", 2016), of 7,214 defendants: by race, those
# who did not and those who did offend again within two years, each with a low and with a high score.
PUBLISHED = {"African-American": (990, 805, 532, 1369), "Caucasian": (1139, 349, 461, 505)}


def test_propublicas_figures_from_one_command(tmp_path, monkeypatch, capsys):
    lines = ["race,decile_score,days_b_screening_arrest,decile_score,two_year_recid"]
    for race, counts in PUBLISHED.items():
        for k, n in enumerate(counts):
            lines += [f"{race},{(2, 8)[k % 2]},{days},{(2, 8)[k % 2]},{k // 2}" for days in range(n)]
    monkeypatch.chdir(tmp_path)
    Path("compas.csv").write_text("\n".join(lines) + "\n")
    from fairhead.cli import main

    columns = ["--label", "two_year_recid", "--score", "decile_score#2", "--threshold", "5", "--group", "race"]
    shown = ["--reference", "Caucasian", "--rate", "FPR", "--rate", "FNR", "--json", "out.json"]
    assert main(["audit", "compas.csv", *columns, *shown]) in (0, None)
    said = capsys.readouterr().out
    found = json.loads(Path("out.json").read_text())
    rates = {
        row["group"]: {k: round(100 * v["value"], 1) for k, v in row["rates"].items()} for row in found["by_group"]
    }
    assert [rates[race]["FPR"] for race in PUBLISHED] == [44.8, 23.5]
    assert [rates[race]["FNR"] for race in PUBLISHED] == [28.0, 47.7]
    assert "44.8" in said
    assert "47.7" in said
    assert found["provenance"]["audit"]["reference"] == {"race": "Caucasian"}
    # False discoveries and negative predictive values: the complements of what the published table has.
    low_high = {race: ((a, c), (b, d)) for race, (a, b, c, d) in PUBLISHED.items()}
    for race, ((kept, missed), (wrong, right)) in low_high.items():
        assert rates[race]["FDR"] == round(100 * wrong / (wrong + right), 1)
        assert rates[race]["NPV"] == round(100 * kept / (kept + missed), 1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("Wite", "Did you mean 'White'"),
        ("x", "race and sex have it; say which, as race=x"),
        ({"race": "z"}, "not in column 'race'"),
        ({"rae": "White"}, "not in any of"),
    ],
)
def test_a_reference_that_is_none(given, says):
    groups = {"race": ["White", "Black", "x"] * 20, "sex": ["f", "m", "x"] * 20}
    records = Records.from_arrays([0, 1, 1] * 20, [0, 1, 0] * 20, groups=groups)
    with pytest.raises(InputError, match=says):
        fairhead.audit(records, reference=given)


def test_intersections_take_the_references_of_their_parts():
    rng = np.random.default_rng(0)
    groups = {"race": rng.choice(["White", "Black"], 500), "sex": rng.choice(["f", "m"], 500)}
    records = Records.from_arrays(rng.integers(0, 2, 500), rng.integers(0, 2, 500), groups=groups)
    for given, other in ((["White", "sex=f"], "f"), ({"race": "White"}, max("fm", key=list(groups["sex"]).count))):
        found = fairhead.audit(records, reference=given, intersections=True, n_boot=100)
        wanted = {"race": "White", "sex": other, "race × sex": f"White × {other}"}
        assert found.provenance["audit"]["reference"] == wanted
