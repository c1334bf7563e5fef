"""`fairhead audit` through the real command: what it prints, writes and refuses."""

import json
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import recall_score

import fairhead
from fairhead import Records
from fairhead.cli import main

ARGUMENTS = ["--label", "y", "--pred", "yhat", "--group", "race"]
NUMBER = re.compile(r"\d+\.\d \(\d+\.\d–\d+\.\d\)")


def a_frame(n=1200, seed=0):
    rng = np.random.default_rng(seed)
    race = rng.choice(["white", "black", "asian"], n)
    y = rng.integers(0, 2, n)
    p = np.clip(0.25 + 0.4 * y + 0.25 * (race == "white") + 0.15 * rng.normal(size=n), 0, 1)
    new = np.where(rng.random(n) < 0.8, y, 1 - y)
    return pd.DataFrame(
        {
            "id": rng.permutation(n),
            "y": y,
            "yhat": (p >= 0.5).astype(int),
            "new": new,
            "p": p.round(5),
            "race": race,
            "gender": rng.choice(["female", "male"], n),
            "doc": np.arange(n) // 4,
            "w": rng.random(n).round(4),
        }
    )


@pytest.fixture
def preds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    a_frame().to_csv("preds.csv", index=False)
    return tmp_path / "preds.csv"


def run(*arguments):
    """Exit code of the command in this process."""
    try:
        main([str(a) for a in arguments])
    except SystemExit as stop:
        return stop.code
    return 0


def refused(capsys, *arguments):
    """The one line on stderr of a command that must fail with code 2."""
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fairhead: error: ")
    assert err.count("\n") == 1
    return err


def as_json(capsys, *arguments):
    assert run(*arguments, "--json", "-") == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"JSON holds {name}"))


def test_table_for_people(preds, capsys):
    assert run("audit", "preds.csv", *ARGUMENTS, "--group", "gender", "--n-boot", 200) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == "preds.csv: 1,200 rows, positive class 1, groups by race (3), gender (2)"
    assert lines[1].startswith("The clearest gap is ")
    assert "The four-fifths rule fails by race" in out
    assert "larger than 0" in out
    assert "not significant" in out
    row = next(line for line in lines if line.startswith("white  "))
    frame = a_frame()
    white = frame[frame.race == "white"]
    assert f"{len(white)}" in row
    assert f"{100 * white.yhat.mean():.1f} (" in row
    assert f"{100 * recall_score(white.y, white.yhat):.1f} (" in row
    assert len(NUMBER.findall(row)) >= 4


@pytest.mark.parametrize("width", [60, 80, 140])
def test_table_fits_the_terminal(preds, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert run("audit", "preds.csv", *ARGUMENTS, "--compare-pred", "new", "--n-boot", 200) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert "…" not in out
    # Nothing is cropped at the right edge, where the verdicts stand.
    assert {"verdict", "larger", "better", "than"} <= set(out.split())


def test_json_only(preds, capsys):
    found = as_json(capsys, "audit", "preds.csv", *ARGUMENTS, "--seed", "3", "--n-boot", "200")
    assert found["schema"] == "fairhead.audit/1"
    provenance = found["provenance"]
    assert provenance["version"] == fairhead.__version__
    assert provenance["seed"] == 3
    assert provenance["rows"] == 1200
    assert provenance["command"] == (
        "fairhead audit preds.csv --label y --pred yhat --group race --seed 3 --n-boot 200 --json -"
    )
    assert len(provenance["sha256"]) == 64
    keys = {"metric", "group_by", "value", "low", "high", "n", "ideal", "undefined"}
    assert all(keys <= set(estimate) for estimate in found["estimates"])
    gap = next(e for e in found["estimates"] if e["metric"] == "DP" and e["group_by"] == "race")
    rates = a_frame().groupby("race").yhat.mean()
    assert gap["value"] == pytest.approx(rates.max() - rates.min(), abs=1e-12)
    assert {row["group"]: row["n"] for row in found["by_group"]} == a_frame().race.value_counts().to_dict()


def test_same_as_from_python(preds, capsys):
    found = as_json(capsys, "audit", "preds.csv", *ARGUMENTS, "--score", "p", "--cluster", "doc", "--weight", "w")
    records = Records.read(
        "preds.csv", label="y", prediction="yhat", score="p", groups="race", cluster="doc", weight="w"
    )
    expected = fairhead.audit(records).to_dict()
    assert found["estimates"] == json.loads(json.dumps(expected["estimates"]))


def test_scores_and_threshold(preds, capsys):
    found = as_json(
        capsys, "audit", "preds.csv", "--label", "y", "--score", "p", "--threshold", "0.7", "--group", "race"
    )
    rates = a_frame().assign(yes=lambda d: d.p >= 0.7).groupby("race").yes.mean()
    gap = next(e for e in found["estimates"] if e["metric"] == "DP")
    assert gap["value"] == pytest.approx(rates.max() - rates.min(), abs=1e-12)
    assert any(e["metric"] == "AUC_gap" for e in found["estimates"])


def test_intersections_metrics_positive(preds, capsys):
    found = as_json(
        capsys,
        "audit",
        "preds.csv",
        *ARGUMENTS,
        "--group",
        "gender",
        "--intersections",
        "--metric",
        "EOp",
        "--positive",
        0,
    )
    assert {e["group_by"] for e in found["estimates"]} == {"race", "gender", "race × gender"}
    tnr = a_frame()[lambda d: d.y == 0].groupby("race").yhat.mean()
    gap = next(e for e in found["estimates"] if e["group_by"] == "race")
    assert gap["value"] == pytest.approx(tnr.max() - tnr.min(), abs=1e-12)


def test_many_classes(preds, capsys):
    frame = a_frame()
    names = np.array(["maybe", "no", "yes"])
    frame.assign(y=names[frame.y + (frame.p > 0.8)], yhat=names[frame.yhat]).to_csv("many.csv", index=False)
    assert run("audit", "many.csv", *ARGUMENTS, "--multiclass", "mean", "--n-boot", 200) == 0
    out = capsys.readouterr().out
    assert "3 classes" in out
    assert "TPR[maybe]" in out
    assert "for class" in out


def test_files_are_written(preds, capsys):
    assert run("audit", "preds.csv", *ARGUMENTS, "--json", "a.json", "--html", "report.html", "--n-boot", 200) == 0
    assert "The clearest gap" in capsys.readouterr().out
    assert json.loads((preds.parent / "a.json").read_text())["schema"] == "fairhead.audit/1"
    page = (preds.parent / "report.html").read_text()
    assert "<svg" in page
    assert "The clearest gap is" in page
    assert json.loads((preds.parent / "report.json").read_text())["sections"][0]["kind"] == "audit"


def test_compare_two_columns_and_two_files(preds, capsys):
    frame = a_frame()
    frame.assign(yhat=frame.new).sample(frac=1, random_state=1).to_csv("new.csv", index=False)
    options = ["--n-boot", "200", "--correction", "bh"]
    columns = as_json(capsys, "audit", "preds.csv", *ARGUMENTS, "--compare-pred", "new", *options)
    files = as_json(capsys, "audit", "preds.csv", *ARGUMENTS, "--id", "id", "--compare", "new.csv", *options)
    assert columns["comparison"]["schema"] == "fairhead.comparison/1"
    for found in (columns, files):
        dp = next(d for d in found["comparison"]["differences"] if d["metric"] == "DP")
        rates = frame.groupby("race")[["yhat", "new"]].mean()
        a, b = rates.max() - rates.min()
        assert dp["a"] == pytest.approx(a, abs=1e-12)
        assert dp["b"] == pytest.approx(b, abs=1e-12)
        assert dp["value"] == pytest.approx(b - a, abs=1e-12)
        assert dp["p_adjusted"] < 0.01
    assert run("audit", "preds.csv", *ARGUMENTS, "--compare-pred", "new", *options, "--html", "r.html") == 0
    out = capsys.readouterr().out
    assert "A = yhat, B = new" in out
    assert "B better" in out
    assert "B has a smaller gap than A in demographic parity by race" in (preds.parent / "r.html").read_text()


def test_predictions_go_by_two_names(preds, capsys):
    ours = ["--label", "y", "--group", "race", "--n-boot", 100, "--json", "-"]
    found = []
    for flag in ("--pred", "--prediction"):
        assert run("audit", "preds.csv", flag, "yhat", *ours) == 0
        found.append(json.loads(capsys.readouterr().out)["estimates"])
    assert found[0] == found[1]
    assert run("audit", "preds.csv", "--pred", "yhat", "--prediction", "new", *ours) == 2
    assert "--prediction and --pred are the same option" in capsys.readouterr().err


def test_a_comparison_without_a_defined_gap_says_why(preds, capsys):
    a_frame(12).to_csv("few.csv", index=False)
    assert run("audit", "few.csv", *ARGUMENTS, "--compare-pred", "new", "--n-boot", 100) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "A = yhat, B = new No difference in demographic parity, equal opportunity or equalized odds is defined" in out
    )
    assert re.search(r"is defined: \w+ has \d rows?; at least 10", out)


def test_a_comparison_comes_before_the_audit_of_its_first_file(preds, capsys):
    columns = ("--label", "y", "--prediction", "yhat", "--group", "race", "--n-boot", "200")
    main(["audit", str(preds), *columns, "--compare", str(preds)])
    shown = capsys.readouterr().out
    assert shown.index("B − A, paired") < shown.index("Audit of A, ") < shown.index("Overall: ")


def test_compare_columns_with_rows_dropped(preds, capsys):
    frame = a_frame().astype({"yhat": object, "new": object})
    frame.loc[3, "yhat"] = None
    frame.loc[7, "new"] = None
    frame.to_csv("gaps.csv", index=False)
    arguments = ["audit", "gaps.csv", *ARGUMENTS, "--compare-pred", "new", "--n-boot", "200"]
    assert "prediction 'yhat' 1 (first in row 4), column 'new' 1 (first in row 8)" in refused(capsys, *arguments)
    found = as_json(capsys, *arguments, "--drop-missing")
    assert found["provenance"]["rows_dropped"] == 2
    assert found["comparison"]["differences"][0]["n"] == 1198


def test_a_long_name_does_not_push_words_over_the_edge(preds, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    a_frame().rename(columns={"race": "native-country"}).assign(sex=["f", "m"] * 600).to_csv("long.csv", index=False)
    groups = ["--group", "native-country", "--group", "sex", "--intersections", "--min-cell", "1"]
    columns = ["--label", "y", "--pred", "yhat", "--compare-pred", "new", *groups, "--n-boot", "200"]
    assert run("audit", "long.csv", *columns) == 0
    table = capsys.readouterr().out.partition("B − A, paired")[2]
    assert "significant" in table
    assert not re.search(r"significan\s*$", table, re.MULTILINE)
    assert max(map(len, table.splitlines())) <= 80


def test_rows_in_one_file_only_are_told(preds, capsys):
    a_frame().iloc[:1000].to_csv("fewer.csv", index=False)
    assert run("audit", "preds.csv", *ARGUMENTS, "--id", "id", "--compare", "fewer.csv", "--n-boot", 200) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "preds.csv: the 1,000 rows that are in both files, of 1,200 rows" in out
    assert "Left out: 200 rows that are only in A." in out


def test_ids_of_another_kind_are_refused_in_one_line(preds, capsys):
    a_frame().assign(id=lambda frame: "x" + frame["id"].astype(str)).to_csv("other.csv", index=False)
    message = refused(capsys, "audit", "preds.csv", *ARGUMENTS, "--id", "id", "--compare", "other.csv")
    first = a_frame()["id"][0]
    assert f"No id is in both: the first of a is {first}, the first of b is x{first}." in message


def test_environment_variables(preds, capsys, monkeypatch):
    for name, value in {"LABEL": "y", "PRED": "yhat", "GROUP": "race gender", "SEED": "5", "JSON": "-"}.items():
        monkeypatch.setenv(f"FAIRHEAD_AUDIT_{name}", value)
    assert run("audit", "preds.csv") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["provenance"]["seed"] == 5
    assert {row["group_by"] for row in found["by_group"]} == {"race", "gender"}
    # The command in the provenance can be run again as it stands, without these variables.
    assert shlex.split(found["provenance"]["command"]) == [
        "FAIRHEAD_AUDIT_LABEL=y",
        "FAIRHEAD_AUDIT_GROUP=race gender",
        "FAIRHEAD_AUDIT_PRED=yhat",
        "FAIRHEAD_AUDIT_SEED=5",
        "FAIRHEAD_AUDIT_JSON=-",
        "fairhead",
        "audit",
        "preds.csv",
    ]


def test_of_very_many_groups_the_largest_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    frame = a_frame()
    frame["race"] = [f"r{i % 3}" if i % 2 else f"small{i}" for i in range(len(frame))]
    frame.to_csv("preds.csv", index=False)
    assert run("audit", "preds.csv", *ARGUMENTS, "--metric", "DP", "--n-boot", 100) == 0
    out = capsys.readouterr().out
    shown = [line.split()[0] for line in out.splitlines() if line.startswith(("r0 ", "r1 ", "r2 ", "small"))]
    assert shown[:3] == ["r0", "r1", "r2"]
    assert f"and {3 + len(frame) // 2 - len(shown):,} smaller groups" in out


def test_intervals_are_not_broken_within_a_number(preds, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run("audit", "preds.csv", *ARGUMENTS, "--group", "gender", "--intersections", "--compare-pred", "new") == 0
    out = capsys.readouterr().out
    # A line that ends an interval without opening it has its second end whole.
    for line in out.splitlines():
        end = re.search(r"([-–.\d]+)\)", line)
        if end and "(" not in line[: end.end()]:
            assert re.fullmatch(r"−?\d+\.\d+", end[1]), line


def test_standard_input(preds):
    command = [sys.executable, "-m", "fairhead", "audit", "-", *ARGUMENTS, "--json", "-", "--n-boot", "200"]
    done = subprocess.run(command, input=preds.read_bytes(), capture_output=True, check=True)
    assert json.loads(done.stdout)["provenance"]["path"] == "standard input"


def changed(**columns):
    def write(path):
        frame = a_frame(60)
        frame.assign(**{name: change(frame[name]) for name, change in columns.items()}).to_csv(path, index=False)

    return write


def first(value):
    return lambda column: pd.Series([value, *column[1:]], dtype=object)


BAD_TABLES = {
    "missing column": (changed(), ["--label", "lable", "--pred", "yhat", "--group", "race"], "has no column 'lable'"),
    "nearest name": (changed(), ["--label", "y", "--pred", "yhatt", "--group", "race"], "Did you mean 'yhat'?"),
    "blank label": (changed(y=first("")), ARGUMENTS, "label 'y' 1 (first in row 1); use --drop-missing"),
    "nan label": (changed(y=first("nan")), ARGUMENTS, "label 'y' 1"),
    "blank group": (changed(race=first(" ")), ARGUMENTS, "column 'race' 1 (first in row 1)"),
    "types": (changed(yhat=lambda c: c.map({0: "no", 1: "yes"})), ARGUMENTS, "holds numbers (0, 1) but prediction"),
    "classes": (changed(yhat=lambda c: c + 1), ARGUMENTS, "prediction 'yhat' holds 2, which is not among the classes"),
    "scores as predictions": (changed(), ["--label", "y", "--pred", "p", "--group", "race"], "Then use --score"),
    "one class": (changed(y=lambda c: "a", yhat=lambda c: "a"), ARGUMENTS, "one class only"),
    "one group": (changed(race=lambda c: "white"), ARGUMENTS, "one group only"),
    "score above 1": (changed(p=first(1.5)), [*ARGUMENTS, "--score", "p"], "outside [0, 1] in 1 row"),
    "score below 0": (changed(p=first(-0.5)), [*ARGUMENTS, "--score", "p"], "outside [0, 1] in 1 row"),
    "score text": (changed(p=first("high")), [*ARGUMENTS, "--score", "p"], "'high' in row 1; expected numbers"),
    "negative weight": (changed(w=first(-1)), [*ARGUMENTS, "--weight", "w"], "negative or infinite in 1 row"),
    "group is an id": (changed(), [*ARGUMENTS[:4], "--group", "y"], "'y' is given as --label and as --group"),
    "no prediction": (changed(), ["--label", "y", "--group", "race"], "neither predictions nor scores"),
    "no bootstrap": (changed(), [*ARGUMENTS, "--n-boot", "0"], "--n-boot is 0"),
    "level": (changed(), [*ARGUMENTS, "--level", "95"], "level is 95"),
    "threshold": (changed(), ["--label", "y", "--score", "p", "--group", "race", "--threshold", "2"], "threshold is 2"),
    "positive": (changed(), [*ARGUMENTS, "--positive", "yes"], "positive class 'yes' is not among"),
    "metric": (changed(), [*ARGUMENTS, "--metric", "EOpp"], "Did you mean 'EOp'?"),
    "metric in capitals": (changed(), [*ARGUMENTS, "--metric", "EOD"], "Did you mean 'EOd'?"),
    "not a number": (changed(), [*ARGUMENTS, "--seed", "x"], "Invalid value for '--seed'"),
    "no such option": (changed(), [*ARGUMENTS, "--sede", "1"], "No such option"),
    "not a choice": (changed(), [*ARGUMENTS, "--multiclass", "median"], "median"),
    "no label option": (changed(), ["--pred", "yhat", "--group", "race"], "--label"),
    "json is a folder": (changed(), [*ARGUMENTS, "--json", "."], "is a directory"),
    "json in no folder": (changed(), [*ARGUMENTS, "--json", "nowhere/a.json"], "no folder nowhere"),
    "html in no folder": (changed(), [*ARGUMENTS, "--html", "nowhere/a.html"], "no folder nowhere"),
    "html suffix": (changed(), [*ARGUMENTS, "--html", "a.txt"], "ends in .html"),
    "json and html collide": (changed(), [*ARGUMENTS, "--html", "a.html", "--json", "a.json"], "another name"),
    "two comparisons": (changed(), [*ARGUMENTS, "--compare", "x.csv", "--compare-pred", "new"], "cannot be combined"),
    "comparison not there": (changed(), [*ARGUMENTS, "--compare", "x.csv"], "x.csv: there is no such file"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_tables_and_options(tmp_path, monkeypatch, capsys, case):
    monkeypatch.chdir(tmp_path)
    write, arguments, message = BAD_TABLES[case]
    write("bad.csv")
    assert message in refused(capsys, "audit", "bad.csv", *arguments)


BAD_FILES = {
    "empty.csv": (b"", "is empty"),
    "header.csv": (b"y,yhat,race\n", "a header but no rows"),
    "image.csv": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is not text"),
    "latin.csv": ("y,yhat,race\n1,1,é\n0,0,b\n".encode("latin-1"), "not UTF-8"),
    "ragged.csv": (b"y,yhat,race\n1,1,a\n0,0,b,c\n", "line 3 has 4 fields where the header has 3"),
    "broken.jsonl": (b'{"y": 1, "yhat": 1, "race": "a"}\n{"y"', "line 2 is not JSON"),
    "preds.xlsx": (b"PK", "suffix .xlsx is not known"),
    "preds.parquet": (b"PAR", "not a Parquet file"),
    "preds.csv.gz": (b"y,yhat,race\n", "cannot be read"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    assert message in refused(capsys, "audit", name, *ARGUMENTS)


def test_no_file_and_a_directory(tmp_path, capsys):
    assert "there is no such file" in refused(capsys, "audit", tmp_path / "none.csv", *ARGUMENTS)
    (tmp_path / "folder.csv").mkdir()
    assert "is a directory" in refused(capsys, "audit", tmp_path / "folder.csv", *ARGUMENTS)
    assert "is a directory" in refused(capsys, "audit", tmp_path, *ARGUMENTS)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_no_permission(preds, capsys):
    preds.chmod(0)
    assert "no permission to read" in refused(capsys, "audit", "preds.csv", *ARGUMENTS)


def test_no_permission_even_as_root(preds, capsys, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    assert "no permission to read" in refused(capsys, "audit", "preds.csv", *ARGUMENTS)


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_file_that_is_read_is_not_written_over(preds, capsys, option):
    before = preds.read_bytes()
    preds.with_suffix(".html").symlink_to(preds)
    arguments = [
        "preds.csv",
        *ARGUMENTS,
        option,
        {"--json": "../" + preds.parent.name + "/preds.csv", "--html": "preds.html"}[option],
    ]
    assert "is an input file; give another name to write to" in refused(capsys, "audit", *arguments)
    assert preds.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bins", "age=30", "--bins", "age=40"], "--bins names age twice"),
        (["--bins", "age=nan"], "expected a column and the edges of its groups"),
        (["--bins", "age=30,inf"], "expected a column and the edges of its groups"),
        (["--ll144", "form.html", "--eu-ai-act", "form.html"], "form.html would be written twice"),
        (["--html", "form.html", "--eu-ai-act", "./form.html"], "form.html would be written twice"),
    ],
)
def test_what_contradicts_itself_is_refused(preds, capsys, arguments, message):
    assert message in refused(capsys, "audit", "preds.csv", *ARGUMENTS, *arguments)


@pytest.mark.parametrize("role", ["--cluster", "--id"])
def test_a_column_may_be_a_group_and_something_else(preds, capsys, role):
    main(["audit", "preds.csv", *ARGUMENTS, role, "race"])
    assert "race" in capsys.readouterr().out


def test_duplicate_ids_in_a_comparison(preds, capsys):
    frame = a_frame()
    frame.assign(id=[frame.id[1], *frame.id[1:]]).to_csv("twice.csv", index=False)
    arguments = ["audit", "preds.csv", *ARGUMENTS, "--id", "id", "--compare", "twice.csv"]
    assert str(frame.id[1]) in refused(capsys, *arguments)


def test_no_traceback_from_a_process(tmp_path):
    command = [sys.executable, "-m", "fairhead", "audit", str(tmp_path), *ARGUMENTS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"fairhead: error: .* is a directory; expected a file\n", done.stderr)


def test_reader_that_has_had_enough(preds):
    command = f"{sys.executable} -m fairhead audit preds.csv {' '.join(ARGUMENTS)} --metric all --json - | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=preds.parent)
    assert done.stdout == "{\n"
    assert done.stderr == ""


def test_a_column_may_be_asked_for_twice(preds, capsys):
    assert run("audit", preds, *ARGUMENTS, "--cluster", "race", "--n-boot", 100) == 0
    assert run("audit", preds, *ARGUMENTS, "--id", "race", "--n-boot", 100) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_what_is_read_is_not_written_over(preds, capsys, option):
    before = preds.read_bytes()
    assert "is an input file" in refused(capsys, "audit", preds, *ARGUMENTS, option, preds)
    assert preds.read_bytes() == before


def test_a_search_has_as_many_configurations_as_the_help_says(preds, capsys):
    assert "--search is 3; expected a whole number of at least 10" in refused(capsys, "bench", "utkface", "--search", 3)


def test_a_table_that_fairhead_wrote_needs_no_names_of_columns(preds, capsys):
    """As the help of `predict` and `discover` shows."""
    frame = a_frame()
    names = {"label": "y", "groups": ["race", "gender"], "id": "id", "cluster": "doc"}
    for name, column in {"before.csv": "yhat", "after.csv": "new"}.items():
        Records.from_frame(frame, prediction=column, **names).save(name)
    named = "--label", "y", "--pred", "yhat", "--group", "race", "--group", "gender", "--id", "id", "--cluster", "doc"
    options = "--n-boot", "100", "--compare"
    given = as_json(capsys, "audit", "before.csv", *options, "after.csv")
    frame.assign(yhat=frame.new).to_csv("new.csv", index=False)
    asked = as_json(capsys, "audit", "preds.csv", *named, *options, "new.csv")
    assert given["estimates"] == asked["estimates"]
    assert given["comparison"]["differences"] == asked["comparison"]["differences"]
    one = as_json(capsys, "audit", "before.csv", "--group", "gender", "--n-boot", "100")
    assert {found["group_by"] for found in one["estimates"]} - {None} == {"gender"}
    pd.DataFrame({"id": frame.id, "found": ["a", "b"] * 600}).to_csv("groups.csv", index=False)
    joined = as_json(capsys, "audit", "before.csv", "--groups-from", "groups.csv", "--n-boot", "100")
    assert {found["group_by"] for found in joined["estimates"]} - {None} == {"found"}
    for name in ("sex", "prediction"):  # which is there, and holds no groups
        said = refused(capsys, "audit", "before.csv", "--group", name)
        assert f"before.csv has no column '{name}' of groups; there are race, gender" in said
    assert "no column 'label'. Name its columns (--label" in refused(capsys, "audit", "preds.csv", "--group", "race")
    assert "Missing option '--label'" in refused(capsys, "audit", "before.csv", "--pred", "prediction")
    both = refused(capsys, "audit", "preds.csv", *ARGUMENTS, "--target", "p")
    assert "--label (true classes) and --target (true numbers) cannot be combined" in both
