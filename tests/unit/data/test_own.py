"""A user's own pictures, texts, pairs and triplets: from files and objects, and how mistakes in them are answered."""

import csv
import io
import json
import re
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fairhead.data import Dataset, Images, Items, dataset, read, read_items, read_labelled
from fairhead.data.sentences import CrowsPair, StereoSetItem
from fairhead.errors import InputError

POSTS = [
    {"post": f" Post {i}. ", "toxic": "yes" if i % 3 else "no", "about": "women" if i % 2 else "men"} for i in range(60)
]


def picture(number: int) -> Image.Image:
    return Image.new("RGB", (6, 6), (number, 0, 0))


@pytest.fixture
def pictures(tmp_path) -> Path:
    """40 pictures in two folders, and labels.csv beside them."""
    rows = []
    for i in range(40):
        name = f"photos/{'a' if i % 2 else 'b'}/{i}.png"
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        picture(i).save(tmp_path / name)
        rows.append(
            {"file": name, "smiling": "yes" if i % 4 else "no", "sex": "f" if i % 3 else "m", "who": f"p{i // 4}"}
        )
    pd.DataFrame(rows).to_csv(tmp_path / "labels.csv", index=False)
    return tmp_path


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    """A table in the format of its suffix."""
    frame = pd.DataFrame(rows)
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet", ".csv.gz"])
def test_every_format_of_table_gives_the_same_data(tmp_path, suffix):
    path = tmp_path / f"posts{suffix}"
    data = read_labelled(f"texts:{write(path, POSTS)}", label="toxic", groups=["about"])
    assert data.all.inputs == tuple(f"Post {i}." for i in range(60))
    assert data.classes == ("no", "yes")
    assert Dataset.groups(data)["about"].values().tolist() == [row["about"] for row in POSTS]
    assert data.all.ids.tolist() == [str(i + 1) for i in range(60)]
    assert data.sizes == {"train": 33, "val": 9, "test": 18}
    assert data.provenance["path"] == str(path)
    assert len(data.provenance["sha256"]) == 64


def test_a_split_is_drawn_in_every_class_and_follows_the_seed(tmp_path):
    path = write(tmp_path / "posts.csv", POSTS)
    first, second, other = (read_labelled(f"texts:{path}", label="toxic", seed=seed) for seed in (0, 0, 1))
    assert (first.split == second.split).all()
    assert (first.split != other.split).any()
    for part, n_no in {"train": 11, "val": 3, "test": 6}.items():
        assert int((first.examples(part).labels == 0).sum()) == n_no


@pytest.mark.parametrize("named", [True, False])
def test_a_column_of_parts_is_the_split(tmp_path, named):
    parts = ["Train", "validation", "test "] * 20
    rows = [{**row, "split": part} for row, part in zip(POSTS, parts, strict=True)]
    options = {"split": "split"} if named else {}
    data = read_labelled(f"texts:{write(tmp_path / 'posts.csv', rows)}", label="toxic", **options)
    assert data.split.tolist() == ["train", "val", "test"] * 20
    drawn = read_labelled(f"texts:{tmp_path / 'posts.csv'}", label="toxic", split="random")
    assert drawn.sizes == {"train": 33, "val": 9, "test": 18}


def test_validation_rows_are_drawn_from_the_training_rows_where_there_are_none(tmp_path):
    rows = [{**row, "split": "train" if i < 45 else "test"} for i, row in enumerate(POSTS)]
    data = read_labelled(f"texts:{write(tmp_path / 'posts.csv', rows)}", label="toxic")
    assert data.sizes == {"train": 36, "val": 9, "test": 15}
    assert (data.split[45:] == "test").all()


def test_a_column_called_split_that_has_other_values_is_not_the_split_unless_named(tmp_path):
    rows = [{**row, "split": f"fold {i % 3}"} for i, row in enumerate(POSTS)]
    path = write(tmp_path / "posts.csv", rows)
    assert set(read_labelled(f"texts:{path}", label="toxic").sizes) == {"train", "val", "test"}
    assert read_labelled(f"texts:{path}", label="toxic", split="split").sizes == {f"fold {i}": 20 for i in range(3)}


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        (["train", "val", "test", "extra"], {"train": 15, "val": 15, "test": 15, "extra": 15}),
        (["test"], {"test": 60}),
        (["train"], {"train": 33, "val": 9, "test": 18}),
    ],
)
def test_a_split_column_is_followed_whatever_parts_it_has_beside_test(tmp_path, caplog, parts, sizes):
    rows = [{**row, "split": parts[i % len(parts)]} for i, row in enumerate(POSTS)]
    assert read_labelled(f"texts:{write(tmp_path / 'posts.csv', rows)}", label="toxic").sizes == sizes
    assert ("drawing a random split" in caplog.text) == (parts == ["train"])


def test_a_split_column_without_a_test_part_is_refused(tmp_path):
    rows = [{**row, "split": ["train", "eval"][i % 2]} for i, row in enumerate(POSTS)]
    with pytest.raises(InputError, match=r"'split' has the parts eval, train and no test: .*--split random"):
        read_labelled(f"texts:{write(tmp_path / 'posts.csv', rows)}", label="toxic")


def test_rows_without_a_part_are_refused_or_left_out(tmp_path):
    rows = [{**row, "split": "" if i == 7 else ["train", "val", "test"][i % 3]} for i, row in enumerate(POSTS)]
    spec = f"texts:{write(tmp_path / 'posts.csv', rows)}"
    with pytest.raises(InputError, match="the column 'split' is empty in 1 of 60 rows"):
        read_labelled(spec, label="toxic")
    data = read_labelled(spec, label="toxic", on_error="skip")
    assert data.sizes == {"train": 20, "val": 19, "test": 20}


def test_nobody_is_in_two_parts(pictures):
    data = read_labelled(f"images:{pictures / 'labels.csv'}", label="smiling", person="who")
    parts = {}
    for who, part in zip(data.attributes.cluster.values(), data.split, strict=True):
        assert parts.setdefault(who, part) == part
    assert set(data.sizes) == {"train", "val", "test"}


def test_a_split_that_tears_a_person_apart_is_refused(tmp_path):
    rows = [{**row, "split": "train" if i % 2 else "test", "author": f"a{i // 4}"} for i, row in enumerate(POSTS)]
    path = write(tmp_path / "posts.csv", rows)
    with pytest.raises(InputError, match=r"author 'a0' is in both test and train, .*--split random"):
        read_labelled(f"texts:{path}", label="toxic", split="split", person="author")


def test_pictures_are_found_from_the_folder_of_the_table(pictures, monkeypatch):
    monkeypatch.chdir("/")
    data = read_labelled(f"images:{pictures / 'labels.csv'}", label="smiling", groups=["sex"])
    assert isinstance(data.all.inputs, Images)
    assert [np.asarray(image)[0, 0, 0] for image in data.all.inputs] == list(range(40))
    assert data.groups()["sex"].levels == ("f", "m")
    # the folder of the table, and an archive of it, are as good
    again = read_labelled(f"images:{pictures}", label="smiling", groups=["sex"])
    archive = pictures / "all.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in [pictures / "labels.csv", *pictures.rglob("*.png")]:
            file.write(path, f"mine/{path.relative_to(pictures)}")
    packed = read_labelled(f"images:{archive}", label="smiling", groups=["sex"])
    for other in (again, packed):
        assert (other.all.inputs.as_array(4) == data.all.inputs.as_array(4)).all()
        assert (other.split == data.split).all()


def test_absolute_paths_are_taken_as_they_are(pictures, tmp_path_factory):
    frame = pd.read_csv(pictures / "labels.csv")
    frame["file"] = [str(pictures / name) for name in frame["file"]]
    path = tmp_path_factory.mktemp("elsewhere") / "labels.csv"
    frame.to_csv(path, index=False)
    assert len(read_labelled(f"images:{path}", label="smiling").all.inputs.as_array(4)) == 40


@pytest.mark.parametrize("packed", [False, True])
def test_paths_that_windows_or_a_mac_wrote_are_found(tmp_path, packed):
    (tmp_path / "f" / "Sömmer").mkdir(parents=True)
    names = [".\\Sömmer\\1.png", unicodedata.normalize("NFD", "Sömmer/2.png"), "Sömmer/3.png"]
    for i in (1, 2, 3):
        picture(i).save(tmp_path / "f" / "Sömmer" / f"{i}.png")
    rows = [{"file": name, "y": i % 2} for i, name in enumerate(names)]
    pd.DataFrame(rows).to_csv(tmp_path / "f" / "labels.csv", index=False)
    path = tmp_path / "f" / "labels.csv"
    if packed:
        path = tmp_path / "all.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for file in (tmp_path / "f").rglob("*.*"):
                archive.write(file, file.relative_to(tmp_path / "f"))
    data = read_labelled(f"images:{path}", label="y", fractions={"test": 1.0})
    assert data.all.inputs.as_array(6)[:, 0, 0, 0].tolist() == [1, 2, 3]


def test_a_palette_with_transparency_is_read_without_a_warning(tmp_path):
    image = Image.new("RGBA", (4, 4), (200, 10, 20, 128)).convert("P")
    image.save(tmp_path / "a.png", transparency=bytes([128] * 256))
    pd.DataFrame([{"file": "a.png", "y": 1}]).to_csv(tmp_path / "labels.csv", index=False)
    data = read_labelled(f"images:{tmp_path}/labels.csv", label="y", fractions={"test": 1.0})
    expected = np.asarray(image.convert("RGB"))
    assert (data.all.inputs.as_array(4)[0] == expected).all()  # warnings are errors here


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_fields_within_fields_are_columns(tmp_path, suffix):
    rows = [
        {"meta": {"id": f"p{i}", "by": {"sex": "f" if i % 2 else "m"}}, "body": {"text": f"Post {i}."}, "toxic": i % 3}
        for i in range(12)
    ]
    rows[5]["meta"] = {"id": "p5", "by": None}
    path = write(tmp_path / f"posts{suffix}", rows)
    options = {"label": "toxic", "groups": ["meta.by.sex"], "input": "body.text", "id": "meta.id"}
    data = read_labelled(f"texts:{path}", **options)
    assert data.all.inputs[3] == "Post 3."
    assert data.all.ids[3] == "p3"
    sex = data.groups()["meta.by.sex"]
    assert sex.levels == ("f", "m")
    assert (~sex.known).nonzero()[0].tolist() == [5]
    with pytest.raises(
        InputError, match=r"Did you mean 'body.text'\? Its columns: meta, meta.id, meta.by, meta.by.sex"
    ):
        read_labelled(f"texts:{path}", **{**options, "input": "bodytext"})


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("flat_first", [False, True])
def test_a_column_is_itself_where_a_field_within_another_reads_the_same(tmp_path, suffix, flat_first):
    outer = {"a": {"b": "inner"}}
    row = {"a.b": "flat", **outer, "y": 1} if flat_first else {**outer, "a.b": "flat", "y": 1}
    table = read_labelled(f"texts:{write(tmp_path / f'own{suffix}', [row] * 4)}", label="y", input="a.b")
    assert table.all.inputs[0] == "flat"


def test_fields_are_found_below_a_key_with_a_point(tmp_path):
    rows = [{"a": {"x": 1}, "a.b": {"c": "text"}, "y": 1}] * 4
    assert (
        read_labelled(f"texts:{write(tmp_path / 'own.jsonl', rows)}", label="y", input="a.b.c").all.inputs[0] == "text"
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_parts", [False, True])
def test_a_folder_a_class(tmp_path, packed, with_parts):
    root = tmp_path / "faces"
    for i in range(30):
        place = root / ("train" if i < 20 else "test") if with_parts else root
        (place / ("cat" if i % 2 else "dog")).mkdir(parents=True, exist_ok=True)
        picture(i).save(place / ("cat" if i % 2 else "dog") / f"{i}.jpg")
    (root / ".DS_Store").write_text("")
    if packed:
        with zipfile.ZipFile(tmp_path / "faces.zip", "w") as file:
            for path in root.rglob("*.jpg"):
                file.write(path, path.relative_to(tmp_path))
        root = tmp_path / "faces.zip"
    data = read_labelled(f"images:{root}")
    assert data.classes == ("cat", "dog")
    assert len(data) == 30
    if with_parts:
        assert data.sizes["test"] == 10
        assert set(data.sizes) == {"train", "val", "test"}
    numbers = {
        int(name.split("/")[-1].split(".")[0]): label for name, label in zip(data.all.ids, data.all.labels, strict=True)
    }
    assert all((label == 0) == bool(number % 2) for number, label in numbers.items())
    with pytest.raises(InputError, match="has no table, so no column for groups"):
        read_labelled(f"images:{root}", groups=["sex"])


def test_any_folder_of_pictures_can_be_predicted(tmp_path):
    for name in ("new.png", "a/b/new.png", "a/old.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    found = read("images", tmp_path, label="none")
    assert (found.all.ids.tolist(), found.classes) == (["a/b/new.png", "a/old.png", "new.png"], ())
    assert {*found.split} == {"test"}
    with pytest.raises(InputError, match="no table, so no column for groups"):
        read("images", tmp_path, label="none", groups=["sex"])


def test_pictures_that_are_missing_or_broken_are_counted_or_refused(pictures):
    (pictures / "photos/b/0.png").unlink()
    (pictures / "photos/a/1.png").write_bytes(b"nonsense")
    path = f"images:{pictures / 'labels.csv'}"
    lost = r"1 of the 40 images in .*labels.csv is not there: photos/b/0.*, looked for in /"
    with pytest.raises(InputError, match=lost):
        read_labelled(path, label="smiling")
    data = read_labelled(path, label="smiling", on_error="skip")
    assert data.skipped_counts == {"image is missing": 1, "not a readable image": 1}
    assert len(data) == 38
    assert "1" not in data.all.ids.tolist()
    assert data.all.ids.tolist()[0] == "3"


def test_rows_without_a_value_are_counted_or_refused(tmp_path):
    rows = [dict(row) for row in POSTS]
    rows[3]["toxic"], rows[5]["toxic"], rows[4]["post"] = " ", "nan", ""
    path = write(tmp_path / "posts.csv", rows)
    with pytest.raises(InputError, match=r"'toxic' is empty in 2 of 60 rows, the first of them row 4: .*on_error=skip"):
        read_labelled(f"texts:{path}", label="toxic", input="about")
    data = read_labelled(f"texts:{path}", label="toxic", groups=["about"], on_error="skip")
    assert data.skipped == {"no value in post": ("row 5",), "no value in toxic": ("row 4", "row 6")}
    assert len(data) == 57


def test_groups_change_nothing_of_what_is_trained_on(tmp_path, caplog):
    rows = [dict(row) for row in POSTS]
    rows[7]["about"], rows[9]["about"] = "nan", ""
    path = write(tmp_path / "posts.csv", rows)
    data = read_labelled(f"texts:{path}", label="toxic", groups=["about"])
    assert "2 of 60 rows have no value in about: they are used in training and left out of the audit" in caplog.text
    alone = read_labelled(f"texts:{path}", label="toxic")
    assert data.split.tolist() == alone.split.tolist()
    assert data.examples("train").inputs == alone.examples("train").inputs
    records = data.records(data.all.ids, np.eye(2)[data.all.labels])
    assert len(records) == 60
    assert records.groups["about"].levels == ("men", "women")
    assert len(records.with_known(["about"])) == 58
    known = data.with_known_groups()
    assert len(known) == 58
    assert known.groups()["about"].levels == ("men", "women")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "toxc"}, r"has no column 'toxc'. Did you mean 'toxic'\? Its columns: post, toxic, about"),
        (
            {},
            r"has no column called label or class or target or y: say which it is with --label COLUMN \(in Python "
            r"label=COLUMN\), or none to predict rows that have no label. Its columns: post",
        ),
        ({"label": "toxic", "groups": ["sex"]}, "has no column 'sex'"),
        ({"label": "toxic", "split": "part"}, "has no column 'part'"),
        ({"label": "toxic", "id": "ID"}, "has no column 'ID'"),
        ({"label": "toxic", "person": "who"}, "has no column 'who'"),
        ({"label": "toxic", "input": "txt"}, "has no column 'txt'"),
        ({"label": "toxic", "groups": ["toxic"]}, "'toxic' is what is predicted"),
        (
            {"label": "toxic", "id": "about"},
            "2 ids are there more than once in the column 'about': men, women; make them distinct, or name another",
        ),
        ({"lable": "toxic"}, "texts has no option 'lable'.*Did you mean 'label'"),
        ({"label": "toxic", "fractions": {"train": 0.5}}, "must sum to 1"),
    ],
)
def test_a_wrong_column_is_answered_with_those_there_are(tmp_path, options, message):
    path = write(tmp_path / "posts.csv", POSTS)
    with pytest.raises(InputError, match=message):
        read_labelled(f"texts:{path}", **options)


def test_a_column_that_is_there_twice_cannot_be_named(tmp_path):
    (tmp_path / "posts.csv").write_text("text,label,label\na,b,c\n")
    with pytest.raises(InputError, match="has 2 columns called 'label'"):
        read_labelled(f"texts:{tmp_path / 'posts.csv'}", label="label")


def test_ids_are_those_of_the_file_and_rows_without_one_are_numbered(tmp_path):
    rows = [{"id": f"n{i}" if i % 2 else "", **row} for i, row in enumerate(POSTS)]
    data = read_labelled(f"texts:{write(tmp_path / 'posts.csv', rows)}", label="toxic")
    assert data.all.ids.tolist()[:4] == ["row 1", "n1", "row 3", "n3"]


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        (("more", "less"), {}),
        (("Stereotype", "anti-stereotype"), {}),
        (("sent_more", "sent_less"), {}),
        (("a", "b"), {"more": "a", "less": "b"}),
    ],
)
def test_pairs(tmp_path, columns, options):
    rows = [
        {columns[0]: f"She {i}.", columns[1]: f"He {i}. ", "category": "gender", "direction": d}
        for i, d in enumerate(["stereo", "Anti-stereotype", ""])
    ]
    items = read_items(f"pairs:{write(tmp_path / 'own.csv', rows)}", "pairs", **options)
    assert items[1] == CrowsPair("2", "She 1.", "He 1.", "antistereo", "gender", (), term="1.")
    assert [pair.direction for pair in items] == ["stereo", "antistereo", "stereo"]


@pytest.mark.parametrize(
    ("row", "message", "reason"),
    [
        (
            {"more": "a", "less": ""},
            "column 'less' is empty in 1 of 2 rows, the first of them row 2",
            "no value in less",
        ),
        ({"more": "a", "less": "a "}, "the same sentence stands twice in row 2", "the same sentence twice"),
        ({"more": "a", "less": "b", "direction": "up"}, "row 2 has the direction 'up'", "no such direction"),
    ],
)
def test_pairs_that_are_none_are_counted_or_refused(tmp_path, row, message, reason):
    path = write(tmp_path / "own.jsonl", [{"more": "x", "less": "y", "direction": "stereo"}, row])
    with pytest.raises(InputError, match=message):
        read_items(f"pairs:{path}")
    items = read_items(f"pairs:{path}", on_error="skip")
    assert (len(items), items.skipped_counts) == (1, {reason: 1})


def test_the_file_of_winoqueer_is_read_as_it_is(tmp_path):
    file = tmp_path / "winoqueer_final.csv"
    rows = ["0,Gay,Straight,Gay people are loud.,Straight people are loud.", "1,Lesbian,Straight,A b.,C b."]
    file.write_text("\n".join([",Gender_ID_x,Gender_ID_y,sent_x,sent_y", *rows]))
    first, second = read_items(f"pairs:{file}")
    assert (first.more, first.less, first.bias_type) == ("Gay people are loud.", "Straight people are loud.", "Gay")
    assert first.direction == "stereo"
    assert second.bias_type == "Lesbian"


def test_pairs_of_one_language_or_of_several(tmp_path):
    file = tmp_path / "own.tsv"
    rows = ["Elle ment.\tIl ment.\tgender\tfr", "She lies.\tHe lies.\tgender\ten", "Sie lügt.\tEr lügt.\tage\tde"]
    file.write_text("\n".join(["sent_more\tsent_less\tbias_type\tlang", *rows]))
    assert [pair.bias_type for pair in read_items(f"pairs:{file}")] == ["gender (fr)", "gender (en)", "age (de)"]
    (french,) = read_items(f"pairs:{file}", language="fr")
    assert (french.more, french.bias_type) == ("Elle ment.", "gender")
    with pytest.raises(InputError, match="no row of the language 'it'; it has de, en, fr"):
        read_items(f"pairs:{file}", language="it")


@pytest.mark.parametrize("kind", ["pairs", "triplets"])
def test_names_of_categories_are_of_one_line(tmp_path, kind):
    row = {
        "stereotype": "She\nlies.",
        "anti_stereotype": "He lies.",
        "unrelated": "Go.",
        "category": "gender\n and\tage",
    }
    (item,) = read_items(f"{kind}:{write(tmp_path / 'own.jsonl', [row])}")
    assert item.bias_type == "gender and age"
    assert "She\nlies." in (item.more if kind == "pairs" else item.sentences)


def test_triplets(tmp_path):
    rows = [
        {"id": "a", "stereotype": "S.", "antistereotype": "A.", "unrelated": "U.", "term": "nurse", "category": "work"},
        {"id": "", "stereotype": "S.", "antistereotype": "A.", "unrelated": "U.", "context": "He came."},
        {"id": "c", "stereotype": "S.", "antistereotype": "A.", "unrelated": "U.", "context": "It is BLANK."},
    ]
    items = read_items(f"triplets:{write(tmp_path / 'own.csv', rows)}", "triplets")
    assert items[0] == StereoSetItem("a", "intrasentence", "nurse", "work", "", ("S.", "A.", "U."))
    assert items[1].texts.unrelated == "He came. U."
    assert (items[1].id, items[1].target, items[1].bias_type) == ("row 2", "S.", "all")
    assert items[2].texts.stereotype == "S."


def test_objects_are_read_as_files_are(tmp_path):
    path = write(tmp_path / "posts.csv", POSTS)
    from_file = dataset(f"texts:{path}", label="toxic", groups=["about"])
    frame = pd.DataFrame(POSTS)
    lists = {name: frame[name].tolist() for name in frame}
    texts, labels = lists["post"], lists["toxic"]
    for found in (
        dataset(frame, label="toxic", groups=["about"]),
        dataset(lists, label="toxic", groups=["about"]),
        dataset(pl.DataFrame(lists), label="toxic", groups=["about"]),
        dataset(pa.table(lists), label="toxic", groups=["about"]),
        dataset(texts, label=labels, groups={"about": lists["about"]}),
    ):
        assert found.all.inputs == from_file.all.inputs
        assert (found.all.labels == from_file.all.labels).all()
        assert (found.split == from_file.split).all()
        assert found.groups()["about"].levels == ("men", "women")


def test_pictures_in_memory():
    pictures = [picture(i) for i in range(20)]
    labels = [i % 2 for i in range(20)]
    data = dataset(pictures, label=labels, groups={"sex": ["f", "m"] * 10}, id=[f"n{i}" for i in range(20)])
    assert data.all.inputs.as_array(2)[:, 0, 0, 0].tolist() == list(range(20))
    assert data.classes == ("0", "1")
    part = data.examples("test")
    assert part.inputs.as_array(2)[:, 0, 0, 0].tolist() == [int(name[1:]) for name in part.ids]
    stored = io.BytesIO()
    picture(7).save(stored, "PNG")
    frame = pd.DataFrame({"image": [np.asarray(picture(3)), {"bytes": stored.getvalue()}], "label": ["a", "b"]})
    assert dataset(frame).all.inputs.as_array(2)[:, 0, 0, 0].tolist() == [3, 7]
    with pytest.raises(
        InputError, match=r"picture 1: is a int that is no picture.*expected PIL images or arrays \[H, W, 3\]"
    ):
        dataset([3, 4], label=["a", "b"]).all.inputs.as_array(2)


def test_the_kind_of_an_object_is_seen_by_its_columns():
    sentences = {"stereotype": ["S"], "anti_stereotype": ["A"]}
    assert dataset(pd.DataFrame(sentences)).name == "pairs"
    assert dataset(pd.DataFrame({**sentences, "unrelated": ["U"]})).name == "triplets"
    with pytest.raises(InputError, match="could be texts or images: say kind="):
        dataset(pd.DataFrame({"text": ["a"], "path": ["b"], "label": ["c"]}))
    with pytest.raises(InputError, match="has no column that shows its kind: say kind="):
        dataset(pd.DataFrame({"a": [1]}))
    with pytest.raises(InputError, match="has no column that shows its kind: say kind="):
        dataset(pd.DataFrame({"a": [1], "y": ["b"]}), input="a", label="y")
    with pytest.raises(InputError, match="int is not a table"):
        dataset(3)
    with pytest.raises(InputError, match="columns of one length"):
        dataset({"text": ["a", "b"], "label": ["c"]})
    with pytest.raises(InputError, match="beside a list of texts, groups are given as"):
        dataset(["a"], label=["b"], groups=["c"])


def test_the_words_of_own_data_are_understood_by_published_readers(pictures):
    faces = pictures / "faces"
    faces.mkdir()
    for i in range(10):
        picture(i).save(faces / f"30_{i % 2}_{i % 5}_2017{i:04}.jpg.chip.jpg")
    data = dataset(f"utkface:{faces}", label="race", groups=("gender",))
    assert (data.provenance["target"], list(data.groups())) == ("race", ["gender"])
    with pytest.raises(InputError, match="utkface has no option 'id'"):
        dataset(f"utkface:{faces}", id="x")
    with pytest.raises(InputError, match="pairs has one column of groups, their category; found a, b"):
        dataset("pairs:own.csv", groups=("a", "b"))


words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=0, max_size=12)
cells = st.lists(st.tuples(words, words, words), min_size=1, max_size=12)


def test_the_kind_of_an_object_is_seen_by_the_columns_that_are_named(tmp_path):
    """Names of columns say nothing where they are not those that fairhead knows: what is in them does."""
    names = {"input": "Datei", "label": "Art"}
    frame = pd.DataFrame({"Datei": [None, " a post"], "Art": ["x", "y"]})
    assert dataset(frame, **names, on_error="skip").all.inputs == ("a post",)
    picture(5).save(tmp_path / "a.PNG")
    paths = [str(tmp_path / "a.PNG")] * 2
    assert dataset(pd.DataFrame({"Datei": paths, "Art": ["x", "y"]}), **names).name == "images"
    assert dataset({"Datei": [picture(3), picture(4)], "Art": ["x", "y"]}, **names).name == "images"
    file = write(tmp_path / "posts.csv", [{"Datei": "a post", "Art": "x"}])
    assert dataset(file, **names).name == "texts"
    three = pd.DataFrame({"one": ["S"], "two": ["A"], "three": ["U"]})
    assert dataset(three, more="one", less="two").name == "pairs"
    assert dataset(three, stereotype="one", anti_stereotype="two", unrelated="three").name == "triplets"
    with pytest.raises(InputError, match=r"no column 'datei'\. Did you mean 'Datei'"):
        dataset(frame, input="datei", label="Art")


@pytest.mark.parametrize("made", [pd.Series, np.array])
def test_a_series_and_an_array_are_taken_as_a_list(made):
    data = dataset(made(["a", "b"]), label=made(["x", "y"]), groups={"sex": made(["f", "m"])})
    assert (data.all.inputs, data.classes) == (("a", "b"), ("x", "y"))
    pictures = np.stack([np.asarray(picture(shade)) for shade in (3, 7)])
    assert dataset(pictures, label=["x", "y"]).all.inputs.as_array(2)[:, 0, 0, 0].tolist() == [3, 7]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([], {}, "the list is empty; expected pictures or texts"),
        (
            {"text": ["a"], "label": ["x"]},
            {"kind": "crows"},
            "kind is 'crows', which reads files; expected one of images,",
        ),
        ({"text": ["a"], "label": ["x"]}, {"label": pd.Series(["x"])}, "label is a Series; expected text or nothing"),
        ({"text": ["a"], "label": ["x"]}, {"groups": pd.Series(["f"] * 99)}, "the dict has no column 'f'"),
        (pd.DataFrame([["a", "x"]]), {"input": 0, "label": 1}, "input is 0; expected text or nothing"),
        (
            ["a", "b"],
            {"label": ["x", "y"], "groups": ["f", "m"] * 99},
            "groups are given as {name: values}; found a list",
        ),
    ],
)
def test_a_wrong_type_is_answered_with_the_right_one(source, options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        dataset(source, **options)


def test_a_class_has_no_name_as_long_as_a_text():
    with pytest.raises(InputError, match="the label 'y' holds a value of 501 characters, like a text; expected a col"):
        dataset({"text": ["a", "b"], "y": ["x" * 501, "no"]}, label="y")


def test_pictures_that_are_urls_are_to_be_downloaded(tmp_path):
    path = write(tmp_path / "labels.csv", [{"path": "https://x.org/a.jpg", "label": "x"}])
    with pytest.raises(InputError, match=r"not there: https:/.*a URL: download the pictures first"):
        read("images", path)


@given(cells, st.sampled_from(["csv", "tsv", "jsonl"]))
def test_readers_never_invent_a_row_a_group_or_a_class(tmp_path_factory, rows, kind):
    path = tmp_path_factory.mktemp("own") / f"posts.{kind}"
    names = ("text", "label", "group")
    if kind == "jsonl":
        path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, delimiter="," if kind == "csv" else "\t", quoting=csv.QUOTE_ALL)
            table.writerows([names, *rows])
    kept = [tuple(cell.strip() for cell in row) for row in rows]
    whole = [row for row in kept if all(cell.lower() not in ("", "nan", "<na>") for cell in row[:2])]
    whole = [(*row[:2], None if row[2].lower() in ("", "nan", "<na>") else row[2]) for row in whole]
    if not whole:
        with pytest.raises(InputError):
            read("texts", path, groups=["group"], on_error="skip")
        return
    data = read("texts", path, groups=["group"], on_error="skip")
    assert isinstance(data, Dataset)
    classes, groups = np.array(data.classes), data.groups()["group"].values()
    assert [*zip(data.all.inputs, classes[data.all.labels], groups, strict=True)] == whole
    assert set(data.classes) == {row[1] for row in whole}
    # What was accepted is accepted again, and the same.
    again = path.with_suffix(".jsonl")
    lines = [
        dict(zip(names, row, strict=True)) | {"id": id} for row, id in zip(whole, data.all.ids.tolist(), strict=True)
    ]
    again.write_text("".join(json.dumps(line) + "\n" for line in lines))
    second = read("texts", again, groups=["group"])
    assert second.all.inputs == data.all.inputs
    assert second.all.ids.tolist() == data.all.ids.tolist()
    assert (second.split == data.split).all()


@given(cells)
def test_pairs_are_never_invented(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("own") / "own.jsonl"
    names = ("more", "less", "category")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    stripped = [tuple(cell.strip() for cell in row) for row in rows]
    missing = ("", "nan", "<na>")
    whole = [r for r in stripped if r[0].lower() not in missing and r[1].lower() not in missing and r[0] != r[1]]
    if not whole:
        with pytest.raises(InputError):
            read("pairs", path, on_error="skip")
        return
    items = read("pairs", path, on_error="skip")
    assert isinstance(items, Items)
    assert [(pair.more, pair.less) for pair in items] == [row[:2] for row in whole]


def test_messages_name_what_is_typed_on_the_command_line(tmp_path):
    path = write(tmp_path / "posts.csv", [{"body": f"words {i}", "label": i % 2} for i in range(9)])
    with pytest.raises(InputError, match=r"with --data-option input=COLUMN \(in Python input=COLUMN\)"):
        read_labelled(f"texts:{path}")


def test_a_label_of_numbers_is_told(tmp_path):
    path = write(tmp_path / "posts.csv", [{"text": f"words {i}", "label": f"{i / 7:.3f}"} for i in range(100)])
    message = r"the label 'label' has 100 distinct values in 100 rows, like numbers or ids \('0.000', '0.143', '0.286'"
    with pytest.raises(InputError, match=message):
        read_labelled(f"texts:{path}")
    path = write(tmp_path / "posts.csv", [{"text": f"words {i}", "label": i % 11 / 10} for i in range(500)])
    with pytest.raises(InputError, match=r"has 11 distinct values in 500 rows, like numbers or ids \('0.0', '0.1', "):
        read_labelled(f"texts:{path}")
    path = write(tmp_path / "posts.csv", [{"text": f"words {i}", "label": i % 30} for i in range(500)])
    assert len(read_labelled(f"texts:{path}").classes) == 30  # numbers of classes
