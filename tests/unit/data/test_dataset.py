"""Groups stay apart from what training sees, and meet predictions again only in records."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import fairhead
from fairhead.data import READERS, Attributes, Dataset, Examples, dataset, read, read_labelled
from fairhead.data.datasets import column, row_digests
from fairhead.errors import InputError
from fairhead.records import Records

IDS = np.array(["a", "b", "c", "d"])


@pytest.fixture
def data() -> Dataset:
    return Dataset(
        name="toy",
        all=Examples(IDS, ("w", "x", "y", "z"), np.array([0, 1, 1, 0]), ("no", "yes")),
        split=np.array(["train", "test", "train", "test"]),
        attributes=Attributes(IDS, {"race": column(["r", "q", "q", "p"])}, cluster=column([7, 7, 8, 9])),
    )


def test_examples_have_no_way_back_to_a_group(data):
    train = data.examples("train")
    assert {f.name for f in dataclasses.fields(train)} == {"ids", "inputs", "labels", "classes", "numbered"}
    assert (train.ids.tolist(), train.inputs, train.labels.tolist()) == (["a", "c"], ("w", "y"), [0, 1])


def test_groups_follow_the_ids_asked_for(data):
    race = data.groups(["d", "a"])["race"]
    assert race.values().tolist() == ["p", "r"]
    with pytest.raises(InputError, match="1 ids are not in the data set; the first is 'e'"):
        data.groups(["a", "e"])


def test_records_join_answers_with_labels_groups_and_clusters(data):
    records = data.records(["d", "b"], [[0.1, 0.9], [0.8, 0.2]])
    assert records.label.values().tolist() == ["no", "yes"]
    assert records.prediction is not None
    assert records.prediction.values().tolist() == ["yes", "no"]
    assert records.groups["race"].values().tolist() == ["p", "q"]
    assert records.cluster is not None
    assert len(set(records.cluster.codes.tolist())) == 2
    assert records.id is not None
    assert records.id.tolist() == ["d", "b"]
    assert records.classes == ("no", "yes")


@pytest.mark.parametrize("answers", [[0, 1], [[0.5, 0.5]], [[1.0], [1.0]]])
def test_records_refuse_answers_of_another_shape(data, answers):
    with pytest.raises(InputError, match=r"the shape \[.*\]; expected \[2, 2\]"):
        data.records(["a", "b"], answers)


def test_a_part_that_is_not_there_is_refused(data):
    with pytest.raises(InputError, match=r"no 'tets' part.*Did you mean 'test'"):
        data.examples("tets")


def test_ids_must_be_distinct_and_rows_must_agree(data):
    with pytest.raises(InputError, match="distinct"):
        dataclasses.replace(data, all=dataclasses.replace(data.all, ids=np.array(list("aacd"))))
    with pytest.raises(InputError, match="equally many rows"):
        dataclasses.replace(data, split=data.split[:3])


def test_read_finds_readers_and_checks_options(tmp_path):
    with pytest.raises(InputError, match="Did you mean 'stereoset'"):
        read("stereosets", tmp_path)
    with pytest.raises(InputError, match=r"has no option 'bias'.*Did you mean 'bias_rate'"):
        read("utkface", tmp_path, bias=0.9)
    with pytest.raises(InputError, match="reading utkface: bias_rate is 'high'; expected a number or nothing"):
        read("utkface", tmp_path, bias_rate="high")
    with pytest.raises(InputError, match="name:path"):
        read_labelled("utkface")


def test_a_spec_may_have_colons_in_its_path(tmp_path):
    path = tmp_path / "c:d.jsonl"
    path.write_text(json.dumps({"gold_label": "neutral", "sentence1": "a", "sentence2": "b", "pairID": "1n"}))
    assert len(read_labelled(f"MultiNLI:{path}")) == 1


@pytest.mark.parametrize("name", [name for name in READERS if name not in ("texts", "pairs", "triplets")])
def test_every_reader_names_a_folder_that_holds_something_else(tmp_path, name):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError) as error:
        read(name, tmp_path)
    message = str(error.value)
    assert str(tmp_path) in message
    assert "notes.txt" in message
    assert "needs" in message


@pytest.mark.parametrize("name", ["texts", "pairs", "triplets"])
def test_a_reader_of_tables_refuses_a_folder(tmp_path, name):
    with pytest.raises(InputError, match=r"is a directory; expected a file|the suffix .* is not known"):
        read(name, tmp_path)


@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_a_file_of_another_kind(tmp_path, name):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    with pytest.raises(InputError, match=r"picture\.png|tmp"):
        read(name, tmp_path / "picture.png")


def test_readers_import_no_torch():
    code = (
        "import sys, fairhead.data as data\n"
        "for reader in data.READERS.values(): reader.load()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=False).returncode == 0


def test_what_a_prompt_shows_is_one_line(data):
    assert repr(data) == "Dataset 'toy' of 4 rows (train 2, test 2): 2 classes (no, yes); groups race (3)"
    records = data.records(["d", "b"], [[0.1, 0.9], [0.8, 0.2]])
    assert repr(records) == "Records of 2 rows: classes no, yes; groups race (2)"
    assert "<td>0.9</td>" in records._repr_html_()
    found = fairhead.audit(
        Records.from_arrays([0, 1] * 50, [0, 1, 1, 1] * 25, groups={"sex": list("fm") * 50}), n_boot=100
    )
    assert repr(found).startswith("Audit with ")
    assert "\n" not in repr(found)


def test_what_is_written_is_read_back_with_the_same_positive_class(tmp_path):
    """A score is that of the positive class, in the data set, in its records and in the file that they are saved to."""
    rng = np.random.default_rng(0)
    said = rng.choice(["ja", "nein"], 200)
    score = np.clip(np.where(said == "ja", 0.7, 0.3) + rng.normal(0, 0.2, 200), 0, 1)
    posts = {
        "text": [f"post {i}" for i in range(200)],
        "label": said.tolist(),
        "sex": rng.choice(["f", "m"], 200).tolist(),
    }
    data = dataset(posts, groups=["sex"])
    assert data.classes == ("nein", "ja")
    records = data.records(data.all.ids, np.stack([1 - score, score], axis=1))
    records.save(tmp_path / "records.csv")
    for found in (records, Records.read(tmp_path / "records.csv")):
        assert found.classes == ("nein", "ja")
        assert roc_auc_score(said == "ja", found.scores) == pytest.approx(roc_auc_score(said == "ja", score), abs=1e-6)


def test_numbered_classes_are_in_the_order_of_the_numbers():
    data = dataset({"text": [f"post {i}" for i in range(24)], "label": [i % 12 for i in range(24)]})
    assert data.classes == tuple(map(str, range(12)))
    assert data.all.labels.tolist() == [i % 12 for i in range(24)]


def test_a_text_that_many_rows_have_stays_in_one_part_and_is_known_again():
    texts = ["great product"] * 60 + [f"post {i}" for i in range(140)]
    rows = {"text": texts, "label": ["a", "b"] * 100}
    data = dataset(rows)
    assert len({*data.split[:60]}) == 1
    few = dataset({"text": ["great product", "new", "newer"], "label": ["a", "b", "a"]}, split="random")
    known = np.isin(row_digests(few.all), row_digests(data.all))
    assert known.tolist() == [True, False, False]
