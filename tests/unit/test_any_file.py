"""Any file at all: readers give what it says, row by row, or refuse it; what they accept comes back from disk."""

import csv
import json
import random
import re
import shutil
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mutations import CORPUS, SECONDS, fuzz, mutated, reads_or_refuses

from fairhead.bench.grid_file import read_grid
from fairhead.data.files import Skips, Source
from fairhead.errors import InputError
from fairhead.records import Records
from fairhead.records.layout import GroupFile
from fairhead.store import read_arrays

COLUMNS = ("row", "y", "yhat", "g")
words = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=8)
numbers = st.sampled_from(["0", "1", "01", "1.0", "1.50", "-3", "1e3", " 1", "0x1", "007", "1_0", "٣"])
cells = st.one_of(words, numbers, st.sampled_from(["a", "b", "True", "false", "", "NA", "None", "nan"]))
tables = st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=8)
values = st.one_of(words, st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.booleans(), st.none())


BINARY = (("0", "1"), ("False", "True"))
TRUTH = {"false": 0, "true": 1}


def says(cell, value):
    """Whether a field of a file stands for a value: the same text, or the same number or truth in other letters."""
    if isinstance(cell, str):
        cell = cell.strip()
    if str(cell) == str(value) or (str(value) in ("True", "False") and str(cell).lower() == str(value).lower()):
        return True
    one, other = (TRUTH.get(str(x).lower(), x) for x in (cell, value))  # beside 0 and 1, TRUE is 1
    try:
        return not re.match(r"[+-]?0\d", str(cell)) and float(one) == float(other)
    except (ValueError, OverflowError):
        return False


def read(path):
    return Records.read(path, label="y", prediction="yhat", groups=["g"], id="row", drop_missing=True)


def check_rows(found, rows):
    """Each row that was read is one of the file's, once, with that row's own label, prediction and group."""
    named = [int(str(row).removeprefix("r")) for row in found.id.tolist()]
    assert len(set(named)) == len(named) == len(found)
    columns = [column.values().tolist() for column in (found.label, found.prediction, found.groups["g"])]
    for number, *told in zip(named, *columns, strict=True):
        for cell, value in zip(rows[number], told, strict=True):
            assert says(cell, value), (cell, value)
    classes = {str(value) for column in columns[:2] for value in column}
    # 0 and 1 are the classes where nothing else occurs.
    assert {str(name) for name in found.classes} <= classes | next(({*b} for b in BINARY if classes <= {*b}), set())
    assert {str(level) for level in found.groups["g"].levels} == {str(value) for value in columns[2]}


def check_round_trip(found, folder):
    for suffix in (".jsonl", ".parquet", ".csv", ".tsv"):
        found.save(folder / f"again{suffix}")
        again = Records.read(folder / f"again{suffix}")
        for one, other in ((found.label, again.label), (found.groups["g"], again.groups["g"])):
            told, written = (list(map(str, column.values().tolist())) for column in (other, one))
            assert told == written or (suffix[1:] in ("csv", "tsv") and all(map(says, written, told)))
        assert list(map(str, again.id.tolist())) == list(map(str, found.id.tolist()))


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(tables, st.sampled_from(",;\t|"), st.sampled_from(["\n", "\r\n"]), st.booleans())
@example(rows=[("0", "TRUE", "0")], separator=",", end="\n", quoted=False)
def test_a_csv_file_is_read_as_it_is_written_or_refused(tmp_path_factory, rows, separator, end, quoted):
    folder = tmp_path_factory.mktemp("csv")
    file = folder / ("rows.tsv" if separator == "\t" else "rows.csv")
    with file.open("w", newline="", encoding="utf-8") as handle:
        how = csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL
        writer = csv.writer(handle, delimiter=separator, lineterminator=end, quoting=how)
        writer.writerows([COLUMNS, *((f"r{number}", *row) for number, row in enumerate(rows))])
    try:
        found = read(file)
    except InputError:
        return
    check_rows(found, rows)
    check_round_trip(found, folder)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.tuples(values, values, values), min_size=1, max_size=8), st.sampled_from(["jsonl", "parquet"]))
@example(rows=[(0, 0, 2.0**63)], kind="jsonl")
def test_typed_rows_are_read_as_they_are_written_or_refused(tmp_path_factory, rows, kind):
    folder = tmp_path_factory.mktemp("typed")
    objects = [dict(zip(COLUMNS, (f"r{number}", *row), strict=True)) for number, row in enumerate(rows)]
    if kind == "jsonl":
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in objects), encoding="utf-8")
    else:
        try:
            table = pa.Table.from_pylist(objects)
        except (pa.ArrowException, OverflowError):
            return  # not one type a column
        pq.write_table(table, folder / "rows.parquet")
    try:
        found = read(folder / f"rows.{kind}")
    except InputError:
        return
    check_rows(found, rows)
    check_round_trip(found, folder)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.sampled_from(["0", "1", "a", "b"]), min_size=1, max_size=6), min_size=1, max_size=6))
def test_a_row_with_another_number_of_fields_is_refused(tmp_path_factory, rows):
    file = tmp_path_factory.mktemp("ragged") / "rows.csv"
    file.write_text("\n".join(",".join(row) for row in [COLUMNS, *(["r0", *row] for row in rows)]) + "\n")
    if all(len(row) == 3 for row in rows):
        return
    with pytest.raises(InputError):
        Records.read(file, label="y", prediction="yhat", groups=["g"])


def read_source(path):
    source = Source(path)
    for name in source.names:
        source.read(name)
        list(source.jsonl(name, Skips("skip")))


READERS = {
    "csv": read,
    "tsv": read,
    "jsonl": read,
    "parquet": read,
    "zip": read_source,
    "npz": lambda path: read_arrays(path, "texts", "vectors"),
    "yaml": read_grid,
    "groups": GroupFile.read,
}


def seeds(kind):
    files = sorted((CORPUS / kind).iterdir())
    assert files, f"no file to start from in {CORPUS / kind}"
    return files


@pytest.mark.parametrize("kind", READERS)
def test_damaged_files_are_read_or_refused(kind, tmp_path):
    """Those that once broke a reader among them."""
    chance, outcomes = random.Random(kind), set()
    files = seeds(kind)
    for file in files:
        shutil.copy(file, tmp_path / file.name)
        outcomes.add(reads_or_refuses(READERS[kind], tmp_path / file.name))
    for _ in range(60):
        file = chance.choice(files)
        (tmp_path / file.name).write_bytes(mutated(file.read_bytes(), chance))
        outcomes.add(reads_or_refuses(READERS[kind], tmp_path / file.name))
    assert outcomes == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("kind", READERS)
def test_damaged_files_for_minutes(kind, tmp_path):
    files = seeds(kind)
    damaged = tmp_path / f"file{files[0].suffix}"
    read, refused = fuzz(READERS[kind], files, damaged, SECONDS / 11, kind, CORPUS / kind)
    print(f"{kind}: {read} read, {refused} refused")
    assert read
    assert refused


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}(/[a-z]{1,6})?\.jsonl", fullmatch=True), st.binary(max_size=60)))
def test_an_archive_has_the_files_that_were_put_into_it(tmp_path_factory, files):
    archive = tmp_path_factory.mktemp("zip") / "data.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as handle:
        for name, content in files.items():
            handle.writestr(name, content)
    source = Source(archive)
    assert sorted(source.names) == sorted(files)
    assert {name: source.read(name) for name in source.names} == files
