"""HateXplain and MultiNLI in small."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fairhead.data import read
from fairhead.data.texts import has_negation
from fairhead.errors import InputError


def _post(labels: str, targets: list[list[str]]) -> dict[str, Any]:
    names = {"h": "hatespeech", "o": "offensive", "n": "normal"}
    annotators = [{"label": names[c], "annotator_id": 1, "target": t} for c, t in zip(labels, targets, strict=True)]
    return {"post_id": "x", "annotators": annotators, "rationales": [[0, 1]], "post_tokens": ["some", "words"]}


POSTS = {
    "agree": _post("hhn", [["Women"], ["Women", "Jewish"], ["None"]]),
    "mixed": _post("hoo", [["Women"], ["None"], ["Men"]]),
    "calm": _post("nnh", [["Women"], ["Women"], ["Women"]]),
    "undecided": _post("hon", [["Women"], ["Women"], ["Women"]]),
    "outside": _post("nnn", [["None"], ["None"], ["None"]]),
}


@pytest.fixture
def hatexplain(tmp_path: Path) -> Path:
    (tmp_path / "dataset.json").write_text(json.dumps(POSTS))
    (tmp_path / "post_id_divisions.json").write_text(json.dumps({"train": ["agree", "calm"], "test": ["mixed"]}))
    return tmp_path


def test_hatexplain_takes_the_majority_and_counts_the_undecided(hatexplain):
    data = read("hatexplain", hatexplain, groups=("Women", "Jewish"))
    assert dict(zip(data.all.ids.tolist(), data.all.labels.tolist(), strict=True)) == {
        "agree": 1,
        "mixed": 1,
        "calm": 0,
    }
    assert data.groups()["Women"].values().tolist() == ["Women", "not Women", "Women"]
    assert data.groups()["Jewish"].values().tolist() == ["not Jewish"] * 3
    assert data.skipped == {
        "undecided: no label has a majority": ("undecided",),
        "not in the official split": ("outside",),
    }
    assert data.sizes == {"train": 2, "test": 1}
    assert data.examples("test").inputs == ("some words",)
    three = read("hatexplain", hatexplain / "dataset.json", target="label")
    assert [three.classes[y] for y in three.all.labels] == ["hatespeech", "offensive", "normal"]


def test_hatexplain_bad_input_is_named(hatexplain):
    with pytest.raises(InputError, match=r"no community 'women'.*Did you mean 'Women'"):
        read("hatexplain", hatexplain, groups=("women",))
    broken = {**POSTS, "calm": {"annotators": [{"label": "angry", "target": []}], "rationales": [], "post_tokens": []}}
    (hatexplain / "dataset.json").write_text(json.dumps(broken))
    with pytest.raises(InputError, match=r"dataset\.json: calm is not as published: .*angry"):
        read("hatexplain", hatexplain)
    assert read("hatexplain", hatexplain, on_error="skip").skipped_counts["not as published"] == 1
    del broken["calm"]
    (hatexplain / "dataset.json").write_text(json.dumps(broken))
    with pytest.raises(InputError, match=r"lacks 1 posts of post_id_divisions\.json, such as calm"):
        read("hatexplain", hatexplain)
    (hatexplain / "dataset.json").write_text(json.dumps(POSTS)[:-30])
    with pytest.raises(InputError, match=r"dataset\.json: is not complete JSON"):
        read("hatexplain", hatexplain)
    (hatexplain / "post_id_divisions.json").unlink()
    (hatexplain / "dataset.json").write_text(json.dumps(POSTS))
    with pytest.raises(InputError, match=r"HateXplain needs a file post_id_divisions\.json"):
        read("hatexplain", hatexplain)


@pytest.mark.parametrize(
    ("hypothesis", "expected"),
    [
        ("No!", True),
        ("He has NOTHING.", True),
        ("It was never-ending", False),  # punctuation is taken out, not replaced: "neverending"
        ("There is nothin' here; none, not one.", False),
        ("I know nobody", True),
        ("", False),
    ],
)
def test_negation_words(hypothesis, expected):
    assert has_negation(hypothesis) is expected


def _line(gold: str, pair: str, hypothesis: str = "h") -> str:
    return json.dumps({"gold_label": gold, "sentence1": "the same premise", "sentence2": hypothesis, "pairID": pair})


@pytest.fixture
def multinli(tmp_path: Path) -> Path:
    folder = tmp_path / "multinli_1.0"
    folder.mkdir()
    train = [_line("neutral", "1n"), _line("-", "1e"), _line("contradiction", "1c", "no"), _line("neutral", "1n")]
    (folder / "multinli_1.0_train.jsonl").write_text("\n".join(train))
    (folder / "multinli_1.0_dev_matched.jsonl").write_text(_line("entailment", "1e") + "\n")
    (folder / "multinli_1.0_train.txt").write_text("the same once more, tab-separated")
    return folder


def test_multinli_reads_every_part_that_is_there(multinli, tmp_path):
    data = read("multinli", multinli)
    assert data.sizes == {"dev_matched": 1, "train": 3}
    assert data.examples("train").labels.tolist() == [2, 0, 2]
    assert data.examples("train").ids.tolist() == ["train/1n", "train/1c", "train/1n#2"]
    assert data.groups(["train/1c", "train/1n"])["negation"].values().tolist() == ["negation", "not negation"]
    assert data.skipped == {"no gold label": ("train/1e",)}
    assert data.attributes.cluster is not None
    assert data.attributes.cluster.levels == ("the same premise",)
    with zipfile.ZipFile(tmp_path / "multinli_1.0.zip", "w") as z:
        for file in multinli.iterdir():
            z.write(file, f"multinli_1.0/{file.name}")
    archived = read("multinli", tmp_path / "multinli_1.0.zip")
    assert archived.all.ids.tolist() == data.all.ids.tolist()
    single = read("multinli", multinli / "multinli_1.0_dev_matched.jsonl", split="random", fractions={"test": 1.0})
    assert single.sizes == {"test": 1}


def test_multinli_bad_lines_are_named(multinli):
    file = multinli / "multinli_1.0_dev_matched.jsonl"
    file.write_text(_line("entailed", "3e") + "\n" + _line("neutral", "4n")[:-9])
    with pytest.raises(InputError, match=r"dev_matched\.jsonl, line 1: needs gold_label .*found gold_label 'entailed'"):
        read("multinli", multinli)
    skipped = read("multinli", multinli, on_error="skip").skipped_counts
    assert skipped == {"pair is incomplete": 1, "not complete JSON": 1, "no gold label": 1}
