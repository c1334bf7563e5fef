"""A stranger's own pictures, posts and sentence pairs, through the commands: train, audit, look, locate, score."""

import csv
import json

import numpy as np
import pytest
from language_models import ITEMS, build
from language_models import tokenizer as language_tokenizer
from made_posts import bert, tokenizer
from PIL import Image

import fairhead
from fairhead.cli import main
from fairhead.language.running import TrainingRecord
from fairhead.mitigate.triplets import TripletData
from fairhead.records import Records

TINY = ["--model", "vit-2x2"]
for _key, _value in {"width": 16, "mlp": 16, "image_size": 8, "patch_size": 4}.items():
    TINY += ["--model-option", f"{_key}={_value}"]
TRAINING = ["--epochs", "2", "--batch-size", "8", "--lr", "1e-2", "--device", "cpu"]


def run(*arguments):
    main([str(argument) for argument in arguments])


# Heads are located on test rows alone: leave enough of them.
FEW_TRAINED = ["--data-option", "fractions={train: 0.2, val: 0.1, test: 0.7}"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """160 pictures, and a table of paths, labels, sex and person."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    with (folder / "labels.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["Photo", "smiling", "sex", "person"])
        for i in range(160):
            pixels = np.clip(rng.normal(80 + 90 * (i % 2), 30, (8, 8, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
            table.writerow([f" {i}.png", "yes" if i % 2 else "no", "f" if (i // 2) % 2 else "m", f"p{i // 3}"])
    return folder / "labels.csv"


@pytest.fixture(scope="module")
def photo_options(photos):
    return ["--data", f"images:{photos}", "--data-option", "input=Photo", "--label", "smiling", "--group", "sex"]


@pytest.fixture(scope="module")
def smiling(photo_options, tmp_path_factory):
    out = tmp_path_factory.mktemp("smiling")
    run("mitigate", "erm", *photo_options, *FEW_TRAINED, "--person", "person", *TINY, *TRAINING, "--out", out,
        "--cache", out / "c")  # fmt: skip
    return out


def test_own_pictures_are_trained_on_and_audited(smiling):
    audited = json.loads((smiling / "audit.json").read_text())
    assert {e["group_by"] for e in audited["estimates"]} - {None} == {"sex"}
    records = Records.read(smiling / "records.csv")
    assert records.groups["sex"].levels == ("f", "m")
    assert records.classes == ("no", "yes")
    row = json.loads((smiling / "run.json").read_text())
    assert sum(row["rows"].values()) == 160
    assert row["settings"]["data"]["options"]["groups"] == ["sex"]


def test_what_is_said_of_own_pictures_is_said_once(photos, tmp_path, caplog):
    """Also with options, such as a seed, that do not change which pictures there are."""
    (photos.parent / "twice.csv").write_text(f"{photos.read_text()}0.png,no,m,p0\n")
    run("mitigate", "erm", "--data", f"images:{photos.parent / 'twice.csv'}", "--data-option", "input=Photo",
        "--label", "smiling", *TINY, *TRAINING, "--out", tmp_path / "out", "--cache", tmp_path / "c")  # fmt: skip
    (told,) = [record for record in caplog.records if "duplicate" in record.getMessage()]
    assert "1 of 161 rows" in told.getMessage()


def test_own_pictures_are_looked_at(smiling, photo_options, tmp_path):
    out = tmp_path / "maps"
    run("attention", "--model", smiling / "model", *photo_options, "--part", "train", "--out", out, "--device", "cpu")
    assert json.loads((out / "attention.json").read_text())["provenance"]["group"] == "sex"


def test_a_changed_picture_is_decoded_again(photos, tmp_path):
    from fairhead.bench.grid import Data
    from fairhead.bench.tasks import _dataset, _read, read_task
    from fairhead.models.fresh import Recipe

    folder = tmp_path / "copy"
    folder.mkdir()
    for file in photos.parent.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    data = Data("own", f"images:{folder / 'labels.csv'}", {"input": "Photo", "label": "smiling", "groups": ["sex"]})

    def pixels():
        _read.cache_clear()
        task = read_task(
            data, lambda classes: Recipe("vit-2x2", classes, {"image_size": 8, "patch_size": 4}), 0, tmp_path / "cache"
        )
        ids = _dataset(data, 0).examples("train").ids.tolist()
        return task.train.inputs["pixel_values"][ids.index(first)]

    first = _dataset(data, 0).examples("train").ids.tolist()[0]
    before = pixels()
    Image.new("RGB", (8, 8), "white").save(folder / f"{int(first) - 1}.png")
    assert (pixels() == 255).all()
    assert not (before == 255).all()


def test_a_grid_takes_own_pictures(photos, tmp_path):
    (tmp_path / "grid.yaml").write_text(f"""
title: Own photos
data:
  - {{name: own, read: "images:{photos}", options: {{input: Photo, label: smiling, groups: [sex]}}}}
backbones:
  - {{name: tiny, model: vit-2x2, settings: {{width: 16, mlp: 16, image_size: 8, patch_size: 4}}}}
methods: [erm]
seeds: [0]
plan: {{epochs: 1, batch_size: 8}}
n_boot: 100
""")
    run("bench", tmp_path / "grid.yaml", "--out", tmp_path / "out", "--device", "cpu")
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert (row["status"], row["group"]) == ("done", "sex")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--label", "smile"],
            "has no column 'smile'. Did you mean 'smiling'? Its columns: Photo, smiling",
        ),
        (["--label", "smiling", "--group", "smiling"], "'smiling' is what is predicted"),
        (["--label", "smiling", "--group", "sex", "--data-option", "input=file"], "has no column 'file'"),
    ],
)
def test_mistakes_are_one_line(photos, tmp_path, capsys, options, message):
    given = ["mitigate", "erm", "--data", f"images:{photos}", "--data-option", "input=Photo", *TINY, *options]
    with pytest.raises(SystemExit):
        run(*given, "--out", tmp_path / "out")
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


@pytest.fixture(scope="module")
def posts(tmp_path_factory):
    """200 posts of random words, half of them about women, as JSON lines."""
    rng = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("posts") / "posts.jsonl"
    lines = []
    for i in range(200):
        words = [f"word{k}" for k in rng.choice(30, 6)]
        if i % 2:
            words[0] = "women"
        label = "toxic" if (i // 2) % 2 else "normal"
        lines.append({"comment": " ".join(words), "label": label, "about": "women" if i % 2 else "others"})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def toxicity(posts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    bert().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    out = tmp_path_factory.mktemp("toxicity")
    run("mitigate", "erm", "--data", f"texts:{posts}", "--group", "about", "--model", f"path:{folder}",
        "--max-length", "16", *FEW_TRAINED, *TRAINING, "--out", out)  # fmt: skip
    return out


def test_own_posts_are_trained_on_and_audited(toxicity):
    records = Records.read(toxicity / "records.csv")
    assert records.groups["about"].levels == ("others", "women")
    assert len(records) == 140


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    build("llama").save_pretrained(folder)
    language_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """30 pairs of sentences with a category."""
    file = tmp_path_factory.mktemp("pairs") / "own.csv"
    sentences = [item.texts for item in ITEMS]
    with file.open("w", newline="") as handle:
        table = csv.writer(handle)
        table.writerow(["stereotype", "antistereotype", "about"])
        for i in range(30):
            table.writerow([*sentences[i % len(sentences)][:2], "work" if i % 2 else "home"])
    return file


@pytest.mark.parametrize("method", ["klaad", "bias_unlearn"])
def test_own_pairs_are_trained_on(llama, pairs, tmp_path, method):
    run("mitigate", method, "--model", llama, "--data", f"pairs:{pairs}", "--group", "about", "--held-out", "0.25",
        "--checks", "0", "--batch-size", "4", "--device", "cpu", "--out", tmp_path / "out")  # fmt: skip
    record = TrainingRecord.read(tmp_path / "out")
    assert record.data["source"] == f"pairs:{pairs}"
    assert record.data["options"] == {"category": "about"}
    assert record.training_targets
    assert not set(record.training_targets) & set(record.held_out_targets)


def test_a_reference_looks_at_the_column_it_is_given(photos, tmp_path):
    run("mitigate", "group_dro", "--reference-group", "sex", "--data", f"images:{photos}", "--data-option",
        "input=Photo", "--label", "smiling", *TINY, *TRAINING, "--out", tmp_path / "out")  # fmt: skip
    row = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (row["group"], row["uses_groups"]) == ("sex", True)


def test_own_pairs_are_scored_and_those_trained_on_are_left_out(llama, pairs, tmp_path, capsys):
    scored = ["--data", f"pairs:{pairs}", "--group", "about", "--device", "cpu", "--n-boot", "100", "--json", "-"]
    run("lm", "crows", "--model", llama, *scored)
    result = json.loads(capsys.readouterr().out)
    assert {e["group_by"] for e in result["estimates"]} >= {None, "work", "home"}
    run("mitigate", "klaad", "--model", llama, "--data", f"pairs:{pairs}", "--held-out", "0.25", "--batch-size", "4",
        "--device", "cpu", "--out", tmp_path / "out")  # fmt: skip
    capsys.readouterr()
    run("lm", "crows", "--model", tmp_path / "out", *scored)  # by itself
    held_out = json.loads(capsys.readouterr().out)
    run("lm", "crows", "--model", llama, *scored, "--held-out-of", tmp_path / "out")
    assert json.loads(capsys.readouterr().out)["n"] == held_out["n"]
    total = {r["metric"]: r["n"] for r in held_out["estimates"] if r["group_by"] is None}["ss"]
    assert total == len(TripletData(f"pairs:{pairs}", held_out=0.25).read().held_out) < 30


def test_every_benchmark_has_a_page(llama, pairs, tmp_path, capsys):
    page, how = tmp_path / "own.html", ["--device", "cpu", "--n-boot", "100"]
    run("lm", "crows", "--model", llama, "--data", f"pairs:{pairs}", *how, "--html", page)
    assert "on Own pairs" in page.read_text()


@pytest.mark.parametrize("kind", ["pairs", "triplets"])
def test_attention_on_own_sentences(llama, tmp_path, capsys, kind):
    file = tmp_path / "own.jsonl"
    names = ("stereotype", "anti_stereotype", "unrelated")[: 2 if kind == "pairs" else 3]
    lines = [dict(zip(names, item.texts, strict=False)) for item in ITEMS]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run("lm", "attention", "--model", llama, "--data", f"{kind}:{file}", "--n-boot", "100", "--device", "cpu",
        "--json", "-")  # fmt: skip
    assert json.loads(capsys.readouterr().out)["benchmark"] == "attention_gap"


def test_own_pairs_have_their_own_name_beside_published_ones(llama, pairs, tmp_path, capsys):
    published = tmp_path / "crows_pairs_anonymized.csv"
    rows = [line.split(",")[:2] for line in pairs.read_text().splitlines()[1:]]
    with published.open("w", newline="") as handle:
        table = csv.writer(handle)
        table.writerow(["", "sent_more", "sent_less", "stereo_antistereo", "bias_type", "annotations"])
        table.writerows([i, *row, "stereo", "age", "[]"] for i, row in enumerate(rows))
    for folder in ("one", "other"):
        for data in (published, f"pairs:{pairs}"):
            run("lm", "crows", "--model", llama, "--data", data, "--n-boot", "100", "--device", "cpu", "--start",
                "bos", "--out", tmp_path / folder)  # fmt: skip
    shown = capsys.readouterr().out
    assert shown.count("on CrowS-Pairs: 30 items") == shown.count("on Own pairs: 30 items") == 2
    assert {e.name for e in (tmp_path / "one").glob("*.items.jsonl")} == {
        "crows_pairs.items.jsonl",
        "crows_pairs.pairs.items.jsonl",
    }
    run("lm", "compare", tmp_path / "one", tmp_path / "other", "--markdown", tmp_path / "page.md", "--html",
        tmp_path / "page.html")  # fmt: skip
    page = (tmp_path / "page.md").read_text()
    assert "| CrowS-Pairs ss |" in page
    assert "| Own pairs ss |" in page
    assert "Own pairs" in (tmp_path / "page.html").read_text()
    items = fairhead.dataset(f"pairs:{pairs}")
    assert fairhead.score(str(llama), "crows", items, n_boot=100, device="cpu").benchmark == "crows_pairs.pairs"


def test_own_triplets_are_scored(llama, tmp_path, capsys):
    file = tmp_path / "own.csv"
    with file.open("w", newline="") as handle:
        table = csv.writer(handle)
        table.writerows([["stereotype", "antistereotype", "unrelated"], *(item.texts for item in ITEMS * 3)])
    run("lm", "stereoset", "--model", llama, "--data", f"triplets:{file}", "--n-boot", "100", "--device", "cpu",
        "--json", "-")  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert {e["metric"] for e in found["estimates"]} >= {"ss", "lms", "icat"}
    assert found["benchmark"] == "stereoset.triplets"


def test_heads_are_located_and_edited_in_a_model_of_own_pictures(smiling, photo_options, tmp_path):
    few = ["--n-boot", "100", "--draws", "5", "--device", "cpu"]
    run("locate", "--model", smiling / "model", *photo_options, *FEW_TRAINED, *few, "--out", tmp_path / "heads")
    found = json.loads((tmp_path / "heads" / "headmap.json").read_text())
    assert found["provenance"]["data"].startswith("images:")
    assert (tmp_path / "heads" / "report.html").exists()
    run("ablate", "--heads", "L1H0", "--model", smiling / "model", *photo_options, *FEW_TRAINED, *few, "--kind", "zero",
        "--save", tmp_path / "edited")  # fmt: skip
    assert (tmp_path / "edited" / "config.json").exists()


def test_heads_are_located_in_a_model_of_own_posts(toxicity, posts, tmp_path, capsys):
    run("locate", "--model", toxicity / "model", "--data", f"texts:{posts}", "--group", "about", "--n-boot", "100",
        "--draws", "5", "--device", "cpu", *FEW_TRAINED, "--json", "-")  # fmt: skip
    assert json.loads(capsys.readouterr().out)["provenance"]["data"] == f"texts:{posts}"


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_own_rows_are_predicted_and_their_groups_discovered(kind, smiling, toxicity, photo_options, posts, tmp_path):
    model = (smiling if kind == "images" else toxicity) / "model"
    of_photos = [*photo_options, "--person", "person"]
    rows = of_photos if kind == "images" else ["--data", f"texts:{posts}", "--group", "about"]
    run("predict", "--model", model, *rows, *FEW_TRAINED, "--out", tmp_path / "answers.csv", "--device", "cpu")
    rows_of_run = json.loads((model.parent / "run.json").read_text())["rows"]
    assert len(Records.read(tmp_path / "answers.csv")) == rows_of_run["test"]  # its split: none is left out
    run("discover", "--encoder", model, "--model", model, *rows, *FEW_TRAINED, "--clusters", "2", "--device", "cpu",
        "--out", tmp_path / "found")  # fmt: skip
    assert (tmp_path / "found" / "groups.csv").read_text().startswith("id,")


def test_own_posts_are_looked_at(toxicity, posts, tmp_path):
    out = tmp_path / "maps"
    run("attention", "--model", toxicity / "model", "--data", f"texts:{posts}", "--group", "about", "--part", "train",
        "--out", out, "--device", "cpu")  # fmt: skip
    assert json.loads((out / "attention.json").read_text())["provenance"]["group"] == "about"


@pytest.mark.parametrize("kind", ["pairs", "triplets"])
def test_heads_are_edited_on_own_sentences(kind, llama, tmp_path):
    file = tmp_path / "own.csv"
    names = ["stereotype", "anti_stereotype", "unrelated"][: 2 if kind == "pairs" else 3]
    with file.open("w", newline="") as handle:
        csv.writer(handle).writerows([names, *(item.texts[: len(names)] for item in ITEMS * 8)])
    few = ["--n-boot", "100", "--draws", "5", "--device", "cpu"]
    run("locate", "--model", llama, "--data", f"{kind}:{file}", *few, "--out", tmp_path / "heads")
    page = json.loads((tmp_path / "heads" / "report.json").read_text())
    assert page["title"] == f"Heads that contribute to stereotypes in your own {kind}"
    assert page["question"].startswith(f"A language model reads pairs of texts from your own {kind}, a stereotype and")
    run("ablate", "--heads", "L0H0", "--kind", "zero", "--model", llama, "--data", f"{kind}:{file}", *few,
        "--save", tmp_path / "edited")  # fmt: skip
    assert (tmp_path / "edited" / "config.json").exists()


def test_heads_are_located_in_own_pairs_of_one_category(llama, tmp_path, capsys):
    file = tmp_path / "own.csv"
    rows = [["more", "less", "about"]]
    for i in range(40):
        first, second, _ = ITEMS[i % len(ITEMS)].texts
        rows.append([f"{first} {i}", f"{second} {i}", "work" if i % 2 else "home"])
    with file.open("w", newline="") as handle:
        csv.writer(handle).writerows(rows)
    given = ["locate", "--model", llama, "--data", f"pairs:{file}", "--group", "about", "--n-boot", "100"]
    run(*given, "--concept", "work", "--draws", "5", "--device", "cpu", "--json", "-")
    assert json.loads(capsys.readouterr().out)["provenance"]["pairs"] == 20
    with pytest.raises(SystemExit):
        run(*given, "--label", "about")
    assert "pairs has no option 'label'" in capsys.readouterr().err


def test_two_names_for_one_column_are_refused(smiling, photo_options, capsys):
    with pytest.raises(SystemExit):
        run("locate", "--model", smiling / "model", *photo_options, "--concept", "gender")
    assert "--group sex and --concept gender name two columns" in capsys.readouterr().err


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit):
        run(*arguments)
    return capsys.readouterr().err


def test_a_folder_of_another_command_is_not_written_into(smiling, photo_options, tmp_path, capsys):
    locate = ["locate", "--model", smiling / "model", *photo_options]
    before = (smiling / "records.csv").read_bytes()
    assert "holds the results of fairhead mitigate (run.json)" in refusal(capsys, *locate, "--out", smiling)
    assert (smiling / "records.csv").read_bytes() == before
    (tmp_path / "headmap.json").write_text("{}")
    discover = ["discover", "--encoder", smiling / "model", *photo_options]
    for command in (["mitigate", "erm", *photo_options, *TINY, *TRAINING], discover):
        assert "results of fairhead locate (headmap.json)" in refusal(capsys, *command, "--out", tmp_path)
    assert [file.name for file in tmp_path.iterdir() if file.name != ".lock"] == ["headmap.json"]


def test_mistakes_name_the_way_out(smiling, photo_options, tmp_path, capsys):
    predict = ["predict", *photo_options, "--label", "none", "--out"]
    said = refusal(capsys, *predict, tmp_path / "new.csv", "--model", smiling)
    assert f"it has no config.json: did you mean {smiling / 'model'}?" in said
    said = refusal(capsys, *predict, tmp_path / "new.xlsx", "--model", tmp_path / "none")
    assert "the suffix .xlsx is not known" in said
    said = refusal(
        capsys, "mitigate", "erm", *photo_options, "--split", "person", *TINY, *TRAINING, "--out", tmp_path / "run"
    )
    assert "has no 'train' part, only" in said
    assert "name a column of the parts train, val and test (--split" in said
