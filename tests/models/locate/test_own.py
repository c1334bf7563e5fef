"""`fairhead locate` on a user's own files."""

import csv
import json

import made_language
import made_posts
import numpy as np
import pytest
from made_vit import saved_vit
from PIL import Image

from fairhead.cli import main

QUICK = ["--n-boot", "100", "--draws", "3"]


def written(file, header, rows):
    with file.open("w", newline="") as handle:
        csv.writer(handle).writerows([header, *rows])
    return file


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Own pictures: noise, brighter for one sex; whether somebody smiles has nothing to do with it."""
    folder, rng, rows = tmp_path_factory.mktemp("own"), np.random.default_rng(0), []
    for i in range(160):
        pixels = rng.normal(90 + 80 * (i % 2), 40, size=(8, 8, 3)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        smiling = ("no", "yes")[rng.integers(2)]
        mood = "rare" if i in (5, 18, 41, 82, 99) else smiling
        rows.append([f"{i}.png", smiling, mood, "fm"[i % 2], ("train", "test")[i % 4 > 0]])
    return written(folder / "labels.csv", ["file", "smiling", "mood", "sex", "split"], rows)


@pytest.fixture(scope="module")
def posts(tmp_path_factory):
    rng, rows = np.random.default_rng(0), []
    for i in range(400):
        words = [made_posts.FILLERS[k] for k in rng.choice(len(made_posts.FILLERS), rng.integers(4, 8))]
        words[0] = "women" if i % 2 else words[0]
        rows.append([" ".join(words), ("normal", "toxic")[i // 2 % 2], ("women", "nobody")[i % 2 == 0]])
    return written(tmp_path_factory.mktemp("own") / "posts.csv", ["text", "verdict", "about"], rows)


def located(folder, out, *options):
    main(["locate", "--model", str(folder), *options, *QUICK, "--out", str(out)])
    return json.loads((out / "headmap.json").read_text())


def test_own_pictures_are_compared_by_their_column(pictures, tmp_path) -> None:
    saved_vit(tmp_path / "m")
    options = ["--data", f"images:{pictures}", "--concept", "sex", "--task", "smiling", "--forward"]
    content = located(tmp_path / "m", tmp_path, *options)
    assert content["concept"]["poles"] == ["f", "m"]
    assert content["concept"]["origin"] == "labelled images (leace)"
    assert content["notes"][0].endswith("images of the training part were left out: the model may know them.")
    assert 120 <= sum(content["n"].values()) < 130, "the test part, and the validation rows drawn from the other"


def test_a_class_of_few_rows_takes_no_part_in_edits(pictures, tmp_path) -> None:
    """Once it was in the edits that act on every token: a cell of one row ended the run after its passes."""
    saved_vit(tmp_path / "m", ("no", "rare", "yes"))
    options = ["--data", f"images:{pictures}", "--group", "sex", "--label", "mood"]
    content = located(tmp_path / "m", tmp_path, *options)
    assert "Too few images to compare groups within: rare." in content["notes"]
    assert content["single_heads"] is not None, "ranked by effect"
    edit = ["--heads", "L0H0", "--save", str(tmp_path / "edited")]
    main(["ablate", "--model", str(tmp_path / "m"), *options, *QUICK, *edit])
    assert (tmp_path / "edited" / "config.json").exists()


def test_one_tiny_group_does_not_end_the_run(pictures, tmp_path) -> None:
    """The first by name has three rows: heads are compared between the others, and the page says so."""
    saved_vit(tmp_path / "m")
    lines = pictures.read_text().splitlines()
    names = ["where", *("ab"[i // 2 % 2] if i > 4 else "Arab" for i in range(len(lines) - 1))]
    file = pictures.with_name("where.csv")
    file.write_text("\n".join(f"{line},{name}" for line, name in zip(lines, names, strict=True)))
    content = located(tmp_path / "m", tmp_path, "--data", f"images:{file}", "--group", "where", "--label", "smiling")
    assert sorted(content["concept"]["poles"]) == ["a", "b"]
    assert any(note.endswith("Too few images to compare heads within a class: Arab.") for note in content["notes"])


def test_own_posts_are_compared_by_their_column(posts, tmp_path) -> None:
    made_posts.planted_bert().save_pretrained(tmp_path)
    made_posts.tokenizer().save_pretrained(tmp_path)
    options = ["--data", f"texts:{posts}", "--concept", "about", "--task", "verdict", "--heads", "1"]
    content = located(tmp_path, tmp_path / "out", *options)
    assert content["selected"] == [list(made_posts.PLANTED)]
    # A split that is drawn says nothing about a model that was trained elsewhere.
    assert sum(content["n"].values()) == 400
    assert content["notes"][0].startswith("Which texts the model was trained on is not known")


@pytest.mark.parametrize("kind", ["pairs", "triplets"])
def test_own_pairs_have_log_odds(kind, tmp_path) -> None:
    made_language.planted_llama().save_pretrained(tmp_path)
    made_language.tokenizer().save_pretrained(tmp_path)
    rows = [[pair.more, pair.less, "the the are word1"] for pair in made_language.pairs(n=40)]
    width = {"pairs": 2, "triplets": 3}[kind]
    header = [["more", "less"], ["stereotype", "anti_stereotype", "unrelated"]][width - 2]
    file = written(tmp_path / "own.csv", header, [row[:width] for row in rows])
    content = located(tmp_path, tmp_path / "out", "--data", f"{kind}:{file}", "--heads", "1", "--forward")
    assert content["selected"] == [list(made_language.PLANTED)]
    assert content["benchmark"] == kind
