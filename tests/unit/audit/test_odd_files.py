"""One table written in odd ways, through the real command: the same figures, or one line that says what is odd."""

import gzip
import json

import numpy as np
import pytest

from fairhead import Records
from fairhead.audit import audit, compare
from fairhead.cli import main

OPTIONS = ["--label", "y", "--pred", "yhat", "--group", "race", "--json", "-", "--n-boot", "100"]


def table(separator=",", end="\n", show=str, head="y,yhat,race"):
    """Labels, predictions and groups a and b; `show` writes a number."""
    rng = np.random.default_rng(0)
    y, right, group = rng.integers(2, size=300), rng.random(300) < 0.8, rng.integers(2, size=300)
    rows = [(show(int(a)), show(int(a == ok)), "ab"[g]) for a, ok, g in zip(y, right, group, strict=True)]
    return "".join(separator.join(row) + end for row in [head.split(","), *rows]).encode()


def run(capsys, name, *more):
    main(["audit", name, *OPTIONS, *more])
    found = json.loads(capsys.readouterr().out)
    return found["by_group"], found["estimates"]


SAME = {
    "semicolons": table(";"),
    "bars": table("|"),
    "tabs": table("\t"),
    "blanks around": table(" , "),
    "UTF-8 with its mark": b"\xef\xbb\xbf" + table(),
    "the mark and quotation marks": b"\xef\xbb\xbf" + table(show='"{}"'.format).replace(b"y,", b'"y",', 1),
    "ends of lines of Windows": table(end="\r\n"),
    "ends of lines of old Macs": table(end="\r"),
    "both ends of lines": table().replace(b"\n", b"\r\n", 150),
    "no last end of line": table().rstrip(),
    "blank lines": b"\n" + table().replace(b"\n", b"\n\n", 150) + b"\n\n\n",
    "a comma more on every line": table(end=",\n"),
    "quoted groups": table().replace(b",a", b',"a"'),
    "whole floats": table(show="{}.0".format),
    "plus signs": table(show="+{}".format),
    "two other columns of one name": table(end=",1,2\n").replace(b",1,2", b",x,x", 1),
}


@pytest.mark.parametrize("case", SAME)
def test_odd_ways_to_write_a_table_give_the_same_figures(tmp_path, monkeypatch, capsys, case):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.csv").write_bytes(table())
    (tmp_path / "odd.csv").write_bytes(SAME[case])
    assert run(capsys, "odd.csv") == run(capsys, "plain.csv")


@pytest.mark.parametrize("show", [lambda number: str(bool(number)).upper(), "0{}".format])
def test_truth_values_and_leading_zeros_are_classes(tmp_path, monkeypatch, capsys, show):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.csv").write_bytes(table())
    (tmp_path / "odd.csv").write_bytes(table(show=show))
    plain, odd = (run(capsys, name)[1] for name in ("plain.csv", "odd.csv"))
    assert [e["value"] for e in odd] == [e["value"] for e in plain]


REFUSED = {
    "latin-1": ("odd.csv", table().replace(b",a", ",ä".encode("latin-1")), "is not UTF-8 text"),
    "UTF-16": ("odd.csv", table().decode().encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
    "packed under another name": (
        "odd.csv",
        gzip.compress(table()),
        "is packed; unpack it, or let its name end in",
    ),
    "not packed": ("odd.csv.gz", table(), "Not a gzipped file"),
    "names in capitals": ("odd.csv", table(head="Y,YHAT,RACE"), "has no column 'y'. Did you mean 'Y'?"),
    "one name twice": ("odd.csv", table(end=",c\n").replace(b",c", b",race", 1), "2 columns called 'race'"),
    "a comment": ("odd.csv", b"# made by hand\n" + table(), "line 2 has 3 fields where the header has 1"),
    "another spelling": ("odd.csv", table(show=["no", "yes"].__getitem__).replace(b"\nyes", b"\nYes"), "holds 'yes'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_odd_is_said_in_one_line(tmp_path, monkeypatch, capsys, case):
    name, content, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        run(capsys, name)
    shown = capsys.readouterr()
    assert stop.value.code == 2
    assert not shown.out
    assert shown.err.startswith("fairhead: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


def test_a_decimal_comma_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.csv").write_text("y;p;race\n" + "1;0,75;a\n0;0,5;b\n" * 20)
    with pytest.raises(SystemExit):
        main(["audit", "odd.csv", "--label", "y", "--score", "p", "--group", "race"])
    assert "'0,75' in row 1; expected numbers, with a decimal point: 0.75" in capsys.readouterr().err


def test_a_column_of_measurements_has_a_short_reason(tmp_path, monkeypatch, capsys):
    """Hundreds of groups of two rows: three are named, the JSON has them all. Groups of one row are refused as ids."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.csv").write_text(
        "y,yhat,race\n" + "".join(f"{i % 2},{i % 3 % 2},{i // 2 / 7:.3f}\n" for i in range(600))
    )
    dp = next(e for e in run(capsys, "odd.csv")[1] if e["metric"] == "DP")
    assert dp["undefined"].startswith("0 has 2 rows; at least 10 are needed; ")
    assert dp["undefined"].endswith("; and 297 more like these")
    assert len(dp["detail"]["excluded"]) == 300


def weighted(seed=0, n=600):
    rng = np.random.default_rng(seed)
    y, group = rng.integers(2, size=n), rng.integers(2, size=n)
    p = np.where(rng.random(n) < 0.75, y, 1 - y)
    return y, p, group, np.where(rng.random(n) < 0.3, 0.0, rng.choice([1.0, 2.5], size=n))


def test_rows_without_weight_do_not_count():
    """All figures are those of the table without these rows, the numbers of rows too."""
    y, p, group, weight = weighted()
    score = np.where(p == 1, 0.8, 0.3)
    every = Records.from_arrays(y, p, scores=score, groups={"g": group}, weight=weight)
    kept = weight > 0
    some = Records.from_arrays(y[kept], p[kept], scores=score[kept], groups={"g": group[kept]}, weight=weight[kept])
    one, other = audit(every, metrics="all"), audit(some, metrics="all")
    assert one.estimates == other.estimates
    assert one.by_group == other.by_group
    assert one["accuracy"].n == kept.sum()
    assert one.provenance["audit"]["n"] == len(y)
    flipped = 1 - p
    differences = [
        compare(
            records,
            Records.from_arrays(records.label.values(), guess, groups={"g": records.groups["g"].values()}),
            metrics=["DP", "accuracy"],
        ).differences
        for records, guess in ((every, flipped), (some, flipped[kept]))
    ]
    assert differences[0] == differences[1]


def test_a_group_without_weight_is_undefined():
    y, p, group, weight = weighted()
    found = audit(Records.from_arrays(y, p, groups={"g": group}, weight=np.where(group == 0, 0.0, weight)))
    assert found["DP"].undefined == "0 has 0 rows; at least 10 are needed"
