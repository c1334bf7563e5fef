"""Arguments of a wrong type, and names from data that are odd to print."""

import io

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from fairhead import Records, audit, compare
from fairhead.audit.audit_results import comparison_verdicts
from fairhead.cli import main
from fairhead.data import dataset
from fairhead.errors import InputError
from fairhead.report import show_page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 3}, "groups is 3; expected the name of a column, or a list of names"),
        ({"groups": [["sex"]]}, r"groups is \[\['sex'\]\]; expected the name of a column"),
        ({"label": 1}, "label is 1; expected the name of a column"),
        ({"label": np.arange(4)}, "label is a ndarray; expected the name of a column"),
        ({"level": "95%"}, "level is '95%'; expected a number"),
        ({"n_boot": None}, "n_boot is None; expected a whole number"),
        ({"n_boot": 100.5}, "n_boot is 100.5; expected a whole number"),
        ({"seed": 0.5}, "seed is 0.5; expected a whole number"),
        ({"level": np.complex128(0.95)}, "level is .*; expected a number"),
        ({"bins": [25, 45]}, r"bins is \[25, 45\]; expected the edges of each column"),
        ({"bins": {"sex": 25}}, "column 'sex' holds 'f' in row 1; expected numbers"),
        ({"bins": {"sex": ["a", "b"]}}, "expected ascending numbers"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(options, message):
    frame = pd.DataFrame({"y": [0, 1] * 20, "p": [0, 1] * 20, "sex": ["f", "f", "m", "m"] * 10})
    with pytest.raises(InputError, match=message):
        audit(frame, **{"label": "y", "prediction": "p", "groups": ["sex"], **options})


@pytest.mark.parametrize("n_perm", [0, -5, "many"])
def test_a_comparison_needs_permutations(n_perm):
    frame = pd.DataFrame({"y": [0, 1] * 20, "p": [0, 1] * 20, "q": [1, 1] * 20, "sex": ["f", "f", "m", "m"] * 10})
    with pytest.raises(InputError, match=r"n_perm is .*; at least 100 permutations are needed"):
        compare(frame, label="y", prediction=("p", "q"), groups="sex", n_perm=n_perm)


def test_no_groups_may_be_said_as_none():
    frame = pd.DataFrame({"y": [0, 1] * 20, "p": [0, 1] * 20})
    assert (
        audit(frame, label="y", prediction="p", groups=None).by_group
        == audit(frame, label="y", prediction="p").by_group
    )


def test_a_group_name_of_two_lines_or_long_words_stays_readable_in_a_terminal():
    names = {"f": "women\nof age", "m": "physical-appearance"}
    rows = [(0, 1, "f"), (1, 1, "f"), (0, 0, "m"), (1, 1, "m")] * 20
    frame = pd.DataFrame([(y, p, names[sex]) for y, p, sex in rows], columns=["y", "p", "sex"])
    result = audit(frame, label="y", prediction="p", groups=["sex"])
    wide, narrow = io.StringIO(), io.StringIO()
    show_page(result.page(), Console(width=1000, file=wide))
    assert ", women of age above physical-appearance" in wide.getvalue().splitlines()[0]
    result.show(Console(width=80, file=narrow))
    assert any(line.startswith("physical-appearance ") for line in narrow.getvalue().splitlines())


def test_names_of_two_lines_are_found_as_they_were_typed():
    names = {0: "no\nloan", 1: "a\nloan", "f": "women\nof age", "m": "men"}
    frame = pd.DataFrame({"y": [0, 1] * 40, "p": [0, 1, 1, 1] * 20, "sex": ["f", "f", "m", "m"] * 20})
    frame = frame.apply(lambda column: column.map(names))
    named = {"label": "y", "prediction": "p", "groups": ["sex"], "n_boot": 100}
    expected = audit(frame, positive="a loan", reference="women of age", **named)
    assert expected.provenance["audit"]["classes"] == ["no loan", "a loan"]
    for reference in (names["f"], f"sex={names['f']}", {"sex": names["f"]}):
        found = audit(frame, positive=names[1], reference=reference, classes=[names[0], names[1]], **named)
        assert found.estimates == expected.estimates
    records = Records.read(frame, label="y", prediction="p", groups="sex")
    assert audit(records, positive=names[1], reference=names["f"], n_boot=100).estimates == expected.estimates
    own = dataset([f"post {i}" for i in range(80)], label=frame["y"], groups={"sex": frame["sex"]})
    assert (own.classes, own.groups()["sex"].levels) == (("a loan", "no loan"), ("men", "women of age"))


def test_a_comparison_names_its_sides_where_names_are_given():
    frame = pd.DataFrame(
        {"y": [0, 1] * 100, "p": [0, 1] * 100, "q": [0, 1, 1, 1] * 50, "sex": ["f", "f", "m", "m"] * 50}
    )
    found = compare(frame, label="y", prediction=("p", "q"), groups=["sex"])
    plain = [sentence.text for sentence in comparison_verdicts(found)]
    named = [sentence.text for sentence in comparison_verdicts(found, ("plain training", "auto"))]
    assert plain[0].startswith("B has a larger gap than A in")
    assert named[0] == plain[0].replace("B has a larger gap than A in", "auto has a larger gap than plain training in")


@pytest.mark.parametrize(
    ("page", "told"),
    [(".", "is a directory"), ("folder", "is a directory"), ("page.htm", "give a path that ends in .html")],
)
def test_a_page_is_a_file_that_ends_in_html(page, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    pd.DataFrame({"y": [0, 1] * 20, "p": [0, 1] * 20, "sex": ["f", "f", "m", "m"] * 10}).to_csv("t.csv", index=False)
    with pytest.raises(SystemExit):
        main(["audit", "t.csv", "--label", "y", "--prediction", "p", "--group", "sex", "--html", page])
    assert told in capsys.readouterr().err


def test_an_address_and_a_workbook_are_answered_with_what_to_do(tmp_path):
    with pytest.raises(InputError, match="it is an address: download the file and give its path"):
        audit("https://example.org/t.csv", label="y", prediction="p")
    (tmp_path / "t.xlsx").touch()
    with pytest.raises(InputError, match="save a sheet of a workbook as CSV"):
        audit(tmp_path / "t.xlsx", label="y", prediction="p")
    result = audit(pd.DataFrame({"y": [0, 1] * 20, "p": [0, 1] * 20}), label="y", prediction="p")
    with pytest.raises(InputError, match=r"written to '5'; give a path that ends in \.html"):
        result.report(5)


@pytest.mark.parametrize(("written", "kept"), [("two\nlines", "two lines"), ("Que\u0301bec", "Qu\u00e9bec")])
def test_a_reference_group_is_found_as_it_was_written(written, kept):
    frame = pd.DataFrame({"y": [0, 1] * 40, "p": [0, 1, 1, 0] * 20, "where": ["north", "north", "north", written] * 20})
    for reference in (written, f"where={written}", {"where": written}, kept):
        found = audit(frame, label="y", prediction="p", groups=["where"], reference=reference, n_boot=100)
        assert found.provenance["audit"]["reference"] == {"where": kept}
