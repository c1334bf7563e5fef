"""Records from files and back, against pandas; and files that are not what was expected."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import sys

import numpy as np
import pandas as pd
import pytest

from fairhead import Records
from fairhead.errors import InputError
from fairhead.records import csv_files

COLUMNS = {"label": "y", "prediction": "yhat", "groups": ["race", "sex"]}


def a_frame(n=1000, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "id": rng.permutation(n),
            "y": rng.integers(0, 2, n),
            "yhat": rng.integers(0, 2, n),
            "p": rng.random(n),
            "text": rng.choice(["plain", "words here", "ünïcode"], n),
            "race": rng.choice(["white", "black", "asian"], n),
            "sex": rng.choice(["f", "m"], n),
            "doc": rng.integers(0, 50, n),
            "w": rng.random(n),
        }
    )


def some_records(n=200, **more):
    frame = a_frame(n)
    return Records.from_arrays(
        frame.y,
        frame.yhat,
        groups={"race": frame.race, "age": frame.doc},
        id=[f"row {i}" for i in frame.id],
        cluster=frame.doc,
        weight=frame.w,
        **({"scores": frame.p} | more),
    )


def same(a, b):
    pd.testing.assert_frame_equal(a.to_frame(), b.to_frame())
    assert a.classes == b.classes
    assert {k: c.levels for k, c in a.groups.items()} == {k: c.levels for k, c in b.groups.items()}


SUFFIXES = ["csv", "tsv", "jsonl", "parquet", "csv.gz", "tsv.bz2", "jsonl.xz", "ndjson", "pq"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_save_and_read(tmp_path, suffix):
    if suffix in ("parquet", "pq"):
        pytest.importorskip("pyarrow")
    path = tmp_path / f"records.{suffix}"
    records = some_records()
    records.save(path)
    again = Records.read(path)
    same(again, records)
    assert again.id.tolist() == records.id.tolist()
    assert again.provenance["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_save_and_read_many_classes(tmp_path, suffix):
    rng = np.random.default_rng(0)
    scores = rng.dirichlet([1, 1, 1], 60)
    records = Records.from_arrays(rng.choice(["a", "b", "c"], 60), scores=scores, groups={"g": ["None"] * 60})
    records.save(tmp_path / f"r.{suffix}")
    same(Records.read(tmp_path / f"r.{suffix}"), records)


def test_save_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("fairhead.records.table_files.CHUNK", 7)
    some_records().save(tmp_path / "r.csv")
    same(Records.read(tmp_path / "r.csv"), some_records())


@pytest.mark.parametrize(
    "write",
    [
        lambda frame, path: frame.to_csv(path, index=False),
        lambda frame, path: frame.to_csv(path, index=False, lineterminator="\r\n"),
        lambda frame, path: frame.to_csv(path, index=False, quoting=2),
        lambda frame, path: frame.to_csv(path, index=False, sep=";"),
        lambda frame, path: frame.to_csv(path, index=False, encoding="utf-8-sig"),
        lambda frame, path: path.write_text("\n" + frame.to_csv(index=False) + "\n\n"),
        lambda frame, path: path.write_text(frame.to_csv(index=False).rstrip("\n")),
        lambda frame, path: path.write_text(frame.to_csv(index=False).replace("\n", "\n\n")),
    ],
    ids=["plain", "crlf", "quoted", "semicolon", "bom", "blank ends", "no last line end", "blank lines"],
)
@pytest.mark.parametrize("block", [200, 1 << 22])
def test_csv_is_what_pandas_reads(tmp_path, monkeypatch, write, block):
    monkeypatch.setattr(csv_files, "BLOCK", block)
    monkeypatch.setattr(csv_files, "CHUNK", block)
    frame = a_frame()
    path = tmp_path / "preds.csv"
    write(frame, path)
    records = Records.read(path, score="p", id="id", cluster="doc", weight="w", **COLUMNS)
    expected = pd.DataFrame(
        {
            "id": frame.id,
            "label": frame.y,
            "prediction": frame.yhat,
            "score": frame.p,
            "cluster": frame.doc,
            "weight": frame.w,
            "race": frame.race,
            "sex": frame.sex,
        }
    )
    pd.testing.assert_frame_equal(records.to_frame(), expected, check_dtype=False)


@pytest.mark.parametrize("block", [200, 1 << 22])
@pytest.mark.parametrize("line", ['1,0,"x, y"', '1,0,"x\ny"'])
def test_a_file_whose_first_quotation_mark_comes_late_is_read_anew(tmp_path, monkeypatch, block, line):
    """After blocks that were read as plain lines: the mark may hold a separator or a line end."""
    monkeypatch.setattr(csv_files, "BLOCK", block)
    path = tmp_path / "preds.csv"
    path.write_text("y,yhat,g\n" + "1,1,a\n0,1,b\n" * 10_000 + f"{line}\n0,0,a\n")
    records = Records.read(path, label="y", prediction="yhat", groups="g")
    frame = pd.read_csv(path)
    assert records.groups["g"].values().tolist() == frame["g"].str.replace("\n", " ").tolist()  # names are of one line
    assert records.prediction.values().tolist() == frame["yhat"].tolist()


@pytest.mark.parametrize(("packing", "suffix"), [(gzip, "gz"), (bz2, "bz2"), (lzma, "xz")])
def test_packed_csv(tmp_path, packing, suffix):
    path = tmp_path / f"preds.csv.{suffix}"
    path.write_bytes(packing.compress(a_frame().to_csv(index=False).encode()))
    assert Records.read(path, **COLUMNS).label.values().tolist() == a_frame().y.tolist()


def test_standard_input(monkeypatch):
    text = a_frame().to_csv(index=False).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    records = Records.read("-", **COLUMNS)
    assert records.label.values().tolist() == a_frame().y.tolist()
    assert records.provenance["path"] == "standard input"
    assert records.provenance["sha256"] == hashlib.sha256(text).hexdigest()


def test_parquet_types(tmp_path):
    pytest.importorskip("pyarrow")
    frame = a_frame().astype({"race": "category", "y": "Int8", "yhat": bool})
    frame.to_parquet(tmp_path / "preds.parquet")
    records = Records.read(tmp_path / "preds.parquet", score="p", **COLUMNS)
    assert records.label.values().tolist() == a_frame().y.tolist()
    assert records.prediction.values().tolist() == a_frame().yhat.tolist()
    assert records.groups["race"].values().tolist() == a_frame().race.tolist()


def test_parquet_columns_that_pandas_had_as_an_index_or_with_gaps(tmp_path):
    pytest.importorskip("pyarrow")
    frame = a_frame().astype({"y": "Int64"})
    frame.loc[3, "y"] = pd.NA
    frame.set_index("race").to_parquet(tmp_path / "preds.parquet")
    with pytest.raises(InputError, match=r"label 'y' 1 \(first in row 4\)"):
        Records.read(tmp_path / "preds.parquet", **COLUMNS)
    records = Records.read(tmp_path / "preds.parquet", drop_missing=True, **COLUMNS)
    assert records.groups["race"].values().tolist() == a_frame().race.drop(3).tolist()
    assert records.label.values().tolist() == a_frame().y.drop(3).tolist()


def test_parquet_keeps_large_whole_numbers_apart_where_some_are_missing(tmp_path):
    """As floats, which is what pandas makes of them, the first three clusters would be one."""
    pytest.importorskip("pyarrow")
    people = pd.array([2**60 + 1, 2**60 + 2, 2**60 + 3, None], dtype="Int64")
    pd.DataFrame({"y": [0, 1, 0, 1], "yhat": [0, 1, 1, 1], "who": people}).to_parquet(tmp_path / "preds.parquet")
    some = {"label": "y", "prediction": "yhat", "drop_missing": True}
    for part in ("cluster", "id"):
        found = getattr(Records.read(tmp_path / "preds.parquet", **{part: "who"}, **some), part)
        values = found.values() if part == "cluster" else found
        assert values.tolist() == [2**60 + 1, 2**60 + 2, 2**60 + 3]


def test_two_parquet_columns_of_one_name_are_refused_only_if_named(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = [arrow.array(values) for values in (["a", "b"], ["b", "a"], [0, 1], [1, 1])]
    parquet.write_table(arrow.Table.from_arrays(columns, names=["g", "g", "y", "p"]), tmp_path / "t.parquet")
    assert len(Records.read(tmp_path / "t.parquet", label="y", prediction="p")) == 2
    with pytest.raises(InputError, match="has 2 columns called 'g'"):
        Records.read(tmp_path / "t.parquet", label="y", prediction="p", groups="g")


def test_a_damaged_parquet_file(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    a_frame()[["y", "yhat", "race", "sex"]].to_parquet(tmp_path / "preds.parquet")
    page = parquet.read_metadata(tmp_path / "preds.parquet").row_group(0).column(0).data_page_offset
    content = bytearray((tmp_path / "preds.parquet").read_bytes())
    content[page : page + 30] = b"\xff" * 30
    (tmp_path / "preds.parquet").write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"preds.parquet (is a damaged Parquet file|cannot be read)"):
        Records.read(tmp_path / "preds.parquet", **COLUMNS)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "preds.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r'pip install "fairhead\[parquet\]"'):
        Records.read(tmp_path / "preds.parquet", **COLUMNS)


def read_text(tmp_path, text, name="preds.csv", **columns):
    (tmp_path / name).write_text(text, encoding="utf-8")
    return Records.read(tmp_path / name, **({"label": "y", "prediction": "yhat", "groups": ["g"]} | columns))


def rows(*lines, header="y,yhat,g"):
    return "\n".join([header, *lines]) + "\n"


def test_names_that_look_like_missing_values_stay_names(tmp_path):
    records = read_text(tmp_path, rows("1,1,None", "0,0,NA", "1,0,null", "0,0,christian"))
    assert records.groups["g"].levels == ("NA", "None", "christian", "null")


def test_na_is_missing_among_numbers(tmp_path):
    text = rows("1,1,30", "NA,0,NA", "0,0,40")
    with pytest.raises(InputError, match=r"label 'y' 1 \(first in row 2\), column 'g' 1 \(first in row 2\)"):
        read_text(tmp_path, text)
    records = read_text(tmp_path, text, drop_missing=True)
    assert records.groups["g"].levels == (30, 40)
    assert records.provenance["rows_dropped"] == 1


def test_large_ids_stay_exact_from_block_to_block(tmp_path, monkeypatch):
    """The first block fits in int64, the second in uint64 only; as floats neighbours would be equal."""
    monkeypatch.setattr(csv_files, "BLOCK", 60)
    ids = [2**63 - 10 + i for i in range(20)]
    text = "id,y,yhat,g\n" + "".join(f"{i},{k % 2},1,{'ab'[k % 2]}\n" for k, i in enumerate(ids))
    assert [int(i) for i in read_text(tmp_path, text, id="id").id] == ids


def test_row_of_a_bad_number_counts_from_the_top_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_files, "BLOCK", 30)
    lines = [f"{i % 2},0.5,{'ab'[i % 2]}" for i in range(40)]
    lines[32] = "1,high,a"
    with pytest.raises(InputError, match="column 'p' holds 'high' in row 33; expected numbers"):
        read_text(tmp_path, rows(*lines, header="y,p,g"), prediction=None, score="p")


def test_text_after_numbers_keeps_leading_zeros(tmp_path, monkeypatch):
    # The first block alone would be read as numbers.
    monkeypatch.setattr(csv_files, "BLOCK", 10)
    lines = ["1,1,007,07", "0,1,007,08"] * 60 + ["1,0,x1,x9", "0,0,7,9"]
    records = read_text(tmp_path, rows(*lines, header="y,yhat,g,i"), id="i")
    assert records.groups["g"].levels == ("007", "7", "x1")
    assert records.id.tolist() == ["07", "08"] * 60 + ["x9", "9"]


def test_booleans_and_whole_floats(tmp_path):
    records = read_text(tmp_path, rows("true,1.0,a", "False,0.0,b", "TRUE,0,a"))
    assert records.label.codes.tolist() == [1, 0, 1]
    assert records.prediction.codes.tolist() == [1, 0, 0]


def test_blanks_around_values_and_names_do_not_count(tmp_path):
    records = read_text(tmp_path, rows("1, 1, a", "0, 0,b ", header="y, yhat , g"))
    assert records.groups["g"].levels == ("a", "b")


def test_several_scores(tmp_path):
    text = rows("a,0.2,0.8,x", "b,0.6,0.4,y", header="y,p_a,p_b,g")
    records = read_text(tmp_path, text, prediction=None, score=["p_a", "p_b"])
    assert records.scores.tolist() == [0.8, 0.4]
    assert records.prediction.values().tolist() == ["b", "a"]


def test_jsonl_keeps_types(tmp_path):
    lines = [{"y": "1", "yhat": "1", "g": "01"}, {"y": "0", "yhat": "1", "g": "1", "extra": [1]}]
    records = read_text(tmp_path, "\n\n".join(map(json.dumps, lines)), "preds.jsonl")
    assert records.classes == ("0", "1")
    assert records.groups["g"].levels == ("01", "1")


GOOD = rows("1,1,a", "0,0,b")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.csv", "", "p.csv is empty"),
        ("p.csv", " \n\n", "p.csv is empty"),
        ("p.csv", "y,yhat,g\n", "a header but no rows"),
        ("p.csv", rows("1,1,a", "0,0,b,c"), "line 3 has 4 fields where the header has 3"),
        ("p.csv", rows("1,1,a,b", "0,0,b,c"), "line 2 has 4 fields where the header has 3"),
        ("p.csv", rows("1,1,a", "0,0"), "line 3 has 2 fields where the header has 3"),
        ("p.csv", rows("1,1,a,c", "0,0"), "line 2 has 4 fields where the header has 3"),
        ("p.csv", rows("1,1", "0,0,b,c", "1,0,a"), "line 2 has 2 fields where the header has 3"),
        ("p.csv", rows("1,1,a", '0,0,"b",c'), "line 3 has 4 fields where the header has 3"),
        ("p.csv", rows("1,1,a", '0,0,"b'), "quotation mark opened in row"),
        ("p.csv", rows("1,1,a", "0,0,b", header="y,yhat,gg"), "no column 'g'. Did you mean 'gg'"),
        ("p.csv", rows("1,1,a,b", "0,0,b,c", header="y,yhat,g,g"), "2 columns called 'g'"),
        ("p.csv", rows("1,1,a", "0,0,"), r"column 'g' 1 \(first in row 2\)"),
        ("p.csv", rows("1,1,a", "0,0,b") + "\0", "not text"),
        ("p.csv", rows("1,1,a", f"0,0,{'b' * 140_000}"), "p.csv: field larger than field limit"),
        ("p.jsonl", '{"y": 1, "yhat": 1, "g": "a"}\n{"y": 0,', "line 2 is not JSON"),
        ("p.jsonl", '{"y": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 1 is not JSON .maximum recursion depth"),
        ("p.jsonl", '{"y": 1, "yhat": 1, "g": "a"}\n[1]', "line 2 is not a JSON object"),
        ("p.jsonl", '{"y": 1, "yhat": 1, "g": ["a"]}\n', "column 'g' holds lists"),
        ("p.jsonl", '{"y": 1, "yhat": 1}\n', "no column 'g'"),
        ("p.xlsx", GOOD, "suffix .xlsx is not known"),
        ("p", GOOD, r"suffix \(none\) is not known"),
        ("p.parquet.gz", GOOD, "is not known"),
        ("p.csv.gz", GOOD, "p.csv.gz cannot be read: Not a gzipped file"),
        ("p.parquet", GOOD, "not a Parquet file"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, text, message):
    with pytest.raises(InputError, match=message):
        read_text(tmp_path, text, name)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".jsonl"])
@pytest.mark.parametrize("quote", ["", '"'])
@pytest.mark.parametrize("before", [0, 300])  # lines; the first hundred are looked at before all others
def test_a_line_without_end_is_refused_before_it_is_in_memory(tmp_path, monkeypatch, suffix, quote, before):
    monkeypatch.setattr(csv_files, "LONGEST_LINE", 100_000)
    row = '{"y": 1, "p": 1, "g": "%s"}' if "json" in suffix else f"1,1,{quote}%s{quote}"
    lines = [*["y,p,g"][: "json" not in suffix], *[row % "ab"[i % 2] for i in range(before)], row % ("a" * 3_000_000)]
    file = tmp_path / f"rows{suffix}"
    with gzip.open(file, "wt") if suffix.endswith("gz") else file.open("w") as text:
        text.write("\n".join(lines))
    with pytest.raises(InputError, match=r"rows\S+: a line of more than 0\.1 million bytes"):
        Records.read(file, label="y", prediction="p", groups=["g"])


def test_line_numbers_count_from_the_top_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_files, "BLOCK", 50)
    with pytest.raises(InputError, match="line 1,002 has 4 fields"):
        read_text(tmp_path, rows(*["1,1,a", "0,0,b"] * 500, "1,1,a,b", *["1,0,a"] * 100))


def test_a_score_that_is_no_number(tmp_path):
    with pytest.raises(InputError, match="column 'p' holds 'high' in row 2; expected numbers"):
        read_text(tmp_path, rows("1,0.5,a", "0,high,b", header="y,p,g"), prediction=None, score="p")


def test_latin_1_is_refused(tmp_path):
    (tmp_path / "p.csv").write_bytes(rows("1,1,é", "0,0,b").encode("latin-1"))
    with pytest.raises(InputError, match="not UTF-8 text"):
        Records.read(tmp_path / "p.csv", label="y", prediction="yhat", groups="g")


def test_half_a_gzip_file(tmp_path):
    packed = gzip.compress(a_frame().to_csv(index=False).encode())
    (tmp_path / "p.csv.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(InputError, match=r"p.csv.gz cannot be read"):
        Records.read(tmp_path / "p.csv.gz", **COLUMNS)


def test_save_refuses_what_it_cannot_write(tmp_path):
    records = some_records()
    with pytest.raises(InputError, match="there is no folder"):
        records.save(tmp_path / "nowhere" / "r.csv")
    (tmp_path / "r.csv").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        records.save(tmp_path / "r.csv")
    with pytest.raises(InputError, match="the group 'label' has the name of another column"):
        Records.from_arrays([0, 1], [0, 1], groups={"label": ["a", "b"]}).save(tmp_path / "s.csv")
    assert list(tmp_path.iterdir()) == [tmp_path / "r.csv"]


def test_only_needed_columns_are_kept(tmp_path):
    a_frame().to_csv(tmp_path / "preds.csv", index=False)
    records = Records.read(tmp_path / "preds.csv", **COLUMNS)
    assert records.id is None
    assert records.scores is None
    assert [c.codes.dtype for c in (records.label, records.prediction, *records.groups.values())] == [np.int8] * 4


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_a_file_of_windows_is_read_as_it_is(tmp_path, suffix):
    """Semicolons, decimal commas and cp1252, as a German Excel writes them."""
    text = "Rückzahlung;Score;Größe\nja;0,9;groß\nnein;0,25;klein\nja;1;groß\n"
    path = tmp_path / f"preds.{suffix}"
    path.write_bytes(gzip.compress(text.encode("cp1252")) if suffix.endswith("gz") else text.encode("cp1252"))
    named = {"label": "Rückzahlung", "score": "Score", "groups": ["Größe"]}
    with pytest.raises(InputError, match=r"not UTF-8 text .*iconv -f cp1252 -t utf-8 .*--encoding cp1252"):
        Records.read(path, **named)
    with pytest.raises(InputError, match=r"holds '0,9' in row 1; expected numbers.*--decimal ,"):
        Records.read(path, encoding="cp1252", **named)
    records = Records.read(path, encoding="cp1252", decimal=",", **named)
    assert records.scores.tolist() == [0.9, 0.25, 1.0]
    assert records.groups["Größe"].levels == ("groß", "klein")
    assert records.classes == ("nein", "ja")
    assert records.provenance["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    wrongs = {"klingon": "is not known", "utf-16": "name another encoding"}
    told = [({"encoding": name}, message) for name, message in wrongs.items()]
    for wrong, message in (*told, ({"decimal": ";"}, "a comma or a point")):
        with pytest.raises(InputError, match=message):
            Records.read(path, **{"encoding": "cp1252", **wrong}, **named)


def test_a_column_that_begins_late_in_jsonl_is_there(tmp_path):
    path = tmp_path / "preds.jsonl"
    rows = [{"y": i % 2, "p": i % 2, **({"sex": "fm"[i % 3 == 0]} if i >= 150 else {})} for i in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = Records.read(path, label="y", prediction="p", groups=["sex"], drop_missing=True)
    assert len(records) == 200
    assert len(records.groups["sex"].complete()) == 50
