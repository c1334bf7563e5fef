"""Splitting plain lines with numpy, against Python's csv and float: the same fields and the same numbers, or None."""

import csv
import io
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairhead import Records
from fairhead.errors import InputError
from fairhead.records import Column, csv_files
from fairhead.records.csv_files import split_lines

MISSING = frozenset([b"", b"NA"])

names = st.text(st.characters(codec="utf-8", exclude_characters='",\n\r\0'), max_size=20)
numbers = st.one_of(
    st.floats(0, 1).map(repr),
    st.floats(0, 10).map(repr),
    st.floats(0, 1, width=32).map(repr),
    st.decimals(0, 1, places=4, allow_nan=False).map(str),
    st.integers(0, 12).map(str),
    st.sampled_from(["", "NA", "1e-05", "+0.5", ".5", "0.", "12.75"]),
)


def values(column):
    return (column.values() if isinstance(column, Column) else column).tolist()


@given(st.lists(st.tuples(names, numbers, names), min_size=1, max_size=30), st.sampled_from(["\n", "\r\n"]))
def test_fields_are_those_that_python_reads(rows, end):
    text = "".join(",".join(row) + end for row in rows)
    found = split_lines(text.encode(), b",", 3, [0, 2], [1], MISSING)
    read = list(csv.reader(io.StringIO(text, newline="")))
    assert found is not None
    assert values(found[0]) == [row[0] for row in read]
    assert values(found[2]) == [row[2] for row in read]
    expected = [np.nan if row[1] in ("", "NA") else float(row[1]) for row in read]
    np.testing.assert_array_equal(found[1], expected)


@pytest.mark.parametrize("letters", ["1", "01", "fm", "m", "abc", "09"])
def test_columns_of_single_letters_keep_their_values(letters):
    column = [letters[i * i % len(letters)] for i in range(50)]
    found = split_lines("".join(f"{letter},x\n" for letter in column).encode(), b",", 2, [0], [], MISSING)
    assert values(found[0]) == column


def test_every_float_is_rounded_as_python_rounds_it():
    rng = np.random.default_rng(0)
    every = np.concatenate([rng.random(20_000), rng.random(20_000) ** 2, rng.random(20_000).round(6)])
    every = np.append(every, np.arange(8000) % 2)  # scores are often 0 or 1; zeros were left to pandas, with all others
    text = "".join(f"{value!r},x\n" for value in every.tolist())
    found = split_lines(text.encode(), b",", 2, [1], [0], MISSING)
    np.testing.assert_array_equal(found[0], every)


@pytest.mark.parametrize(
    "text",
    [
        "a,0.5\nb\n",  # too few fields
        "a,0.5\nb,0.5,c,d\n",  # too many, though the separators are a multiple
        "a,0.5\n\nb,0.5\n",  # a blank line
        "a\rb,0.5\n",  # a line end within a line
        "a,0.5\r\nb,0.5\n",  # two kinds of line end
        "a,0.5\nb\0,0.5\n",  # bytes that are not text
        "a,high\nb,0.5\n",  # words for numbers
        "a" * 100 + ",0.5\nb,0.5\n",  # long names
    ],
)
def test_what_is_not_plain_is_left_to_pandas(text):
    assert split_lines(text.encode(), b",", 2, [0], [1], MISSING) is None


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_both_readers_make_the_same_records(tmp_path, monkeypatch, end):
    rng = np.random.default_rng(1)
    races = rng.choice(["Asian", "African-American", "Ünïted Kingdom of long names", "007", " 7 "], 500)
    rows = [f"{y},{p:.17g},{r},{y}" for y, p, r in zip(rng.integers(2, size=500), rng.random(500), races, strict=True)]
    file = tmp_path / "rows.csv"
    file.write_bytes(end.join(["y,p,race,yhat", *rows, ""]).encode())
    monkeypatch.setattr(csv_files, "BLOCK", 2000)
    columns = {"label": "y", "prediction": "yhat", "score": "p", "groups": ["race"]}
    quick = Records.read(file, **columns)
    monkeypatch.setattr(csv_files, "split_lines", lambda *_: None)
    slow = Records.read(file, **columns)
    assert quick.groups["race"].levels == slow.groups["race"].levels == tuple(sorted({r.strip() for r in races}))
    np.testing.assert_array_equal(quick.groups["race"].codes, slow.groups["race"].codes)
    np.testing.assert_array_equal(quick.label.codes, slow.label.codes)
    np.testing.assert_allclose(quick.scores, slow.scores, rtol=3e-16)  # pandas rounds the last bit as it likes


def test_threads_have_equally_much_to_read(tmp_path, monkeypatch):
    """Two of them, 10 kB: no block of 4 kB and a rest, but two turns of each."""
    monkeypatch.setattr(csv_files, "BLOCK", 4000)
    monkeypatch.setattr(csv_files, "_LEAST_BLOCK", 100)
    file, rows = tmp_path / "rows.csv", b"1,a\n0,bb\n" * 1100
    file.write_bytes(b"y,g\n" + rows)
    blocks = [block for block, _ in csv_files._Csv(file, "rows", ",", ["y", "g"], ".", True)._blocks(2)]
    assert b"".join(blocks) == rows
    assert len(blocks) == 4
    assert max(map(len, blocks)) - min(map(len, blocks)) < 20


classes = st.sampled_from(
    ["0", "1", "01", "+1", "-0", "1.0", "1.", " 1", "1 ", "1e0", "1_0", "0x1", "", "NA", "None", "a", "é"]
)
odd_numbers = st.sampled_from(
    ["0.5", "1", "", "NA", "None", "nan", "<NA>", ".5", "0.", "+0.5", " 0.5", "0.5 ", "0.5\t", "1E-3", "1e-400", "-0.0",
     "00.5", "0_1", "٠.5", "TRUE", "0.3000000000000000166", "0.12345678901234567890123"]
)  # fmt: skip
people = st.sampled_from(["w", "b", "w ", "", "NA", "1", "01", "x" * 70, "Ünïted names beyond eight bytes", "😀"])


def read_or_refused(file):
    try:
        found = Records.read(file, label="y", prediction="yh", score="p", groups=["g"], drop_missing=True)
    except InputError as error:
        return str(error)
    columns = (found.label, found.prediction, found.groups["g"])
    return [(column.levels, column.codes.tolist()) for column in columns], found.scores


@settings(max_examples=80)
@given(
    st.lists(st.tuples(classes, odd_numbers, people, classes), min_size=1, max_size=12),
    st.sampled_from([",", ";", "|"]),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["", "\ufeff"]),
    st.booleans(),
    st.sampled_from([40, 1 << 20]),
)
def test_whoever_reads_odd_fields_the_records_and_the_messages_are_the_same(
    tmp_path_factory, rows, separator, end, mark, ends_with_a_line, block
):
    lines = [separator.join(row) for row in [("y", "p", "g", "yh"), *rows]]
    file = tmp_path_factory.mktemp("odd") / "rows.csv"
    file.write_bytes((mark + end.join(lines) + (end if ends_with_a_line else "")).encode())
    with patch.object(csv_files, "BLOCK", block):
        quick = read_or_refused(file)
        with patch.object(csv_files, "split_lines", lambda *_: None):
            slow = read_or_refused(file)
    if isinstance(quick, str) or isinstance(slow, str):
        assert quick == slow
    else:
        assert quick[0] == slow[0]
        np.testing.assert_allclose(quick[1], slow[1], rtol=3e-16)


def test_a_word_among_scores_is_named_with_its_row(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("y,p,g\n1,0.5,a\n0,high,b\n")
    with pytest.raises(InputError, match="'high' in row 2"):
        Records.read(file, label="y", score="p", groups=["g"])
