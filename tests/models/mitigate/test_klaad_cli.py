"""`fairhead mitigate klaad` and `fairhead lm attention` as a user runs them, on a tiny model in a folder."""

import json
import re
import shutil

import pytest
import torch
import transformers as hf
from language_models import ITEMS, saved, write_stereoset

from fairhead.bench.grid_file import grid_path, read_methods
from fairhead.cli import main
from fairhead.language.running import TrainingRecord
from fairhead.mitigate import KLAAD, method
from fairhead.models import load


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_stereoset(folder / "dev.json")
    rows = [f'{i},"{one.texts[0]}","{one.texts[1]}",stereo,gender,[]' for i, one in enumerate(ITEMS * 4)]
    header = ",sent_more,sent_less,stereo_antistereo,bias_type,annotations"
    (folder / "crows_pairs_anonymized.csv").write_text("\n".join([header, *rows]))
    return folder


def klaad(model, data, out, *options):
    base = ["--model", str(model), "--data", f"stereoset:{data}", "--out", str(out), "--held-out", "0.25"]
    main(["mitigate", "klaad", *base, "--device", "cpu", "--batch-size", "2", *options])


def failure(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        klaad(*arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("fairhead: error: ")
    return error


def test_a_run_leaves_a_model_that_is_scored_like_any_other(model, data, tmp_path, capsys):
    out = tmp_path / "trained"
    klaad(model, data, out, "--lr", "1e-2", "--epochs", "3", "--kl-weight", "0.5", "--layers=0,-1", "--pooling", "last")
    said = capsys.readouterr()
    assert "held-out" in said.out
    assert "klaad: 6 of 6" in said.err
    record = TrainingRecord.read(out)
    assert record.settings["layers"] == [0, -1]
    assert record.settings["kl_weight"] == 0.5
    assert record.settings["margin"] == 0.3  # of the family's preset
    assert record.plan["learning_rate"] == 1e-2
    assert len(record.training_targets) == 3
    trained, fresh = (hf.AutoModelForCausalLM.from_pretrained(folder) for folder in (out, model))
    assert not torch.equal(trained.lm_head.weight, fresh.lm_head.weight)
    main(["lm", "stereoset", "--model", str(out), "--data", str(data), "--device", "cpu", "--json", "-"])
    assert json.loads(capsys.readouterr().out)["n"] == 1  # three of four terms were trained on
    # The same again does nothing; another run does not overwrite it.
    written = (out / "model.safetensors").stat().st_mtime_ns
    klaad(model, data, out, "--lr", "1e-2", "--epochs", "3", "--kl-weight", "0.5", "--layers=0,-1", "--pooling", "last")
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    assert "layers was [0, -1], now [-1]" in failure(capsys, model, data, out, "--lr", "1e-2", "--kl-weight", "0.5")
    again = ("--lr", "1e-2", "--epochs", "3", "--kl-weight", "0.5", "--layers=0,-1", "--pooling", "last")
    other = tmp_path / "other"
    shutil.copytree(model, other)
    assert f"base was '{model}', now '{other}'" in failure(capsys, other, data, out, *again)
    file = out / "fairhead-training.json"
    found = json.loads(file.read_text())
    for odd in ({**found["results"], "held_out": []}, {**found["results"], "left_out": 3}, {"held_out": {}}):
        file.write_text(json.dumps({**found, "results": odd}))
        assert "is not as fairhead writes it" in failure(capsys, model, data, out, *again)


def test_a_grid_trains_each_run_and_shows_them_side_by_side(model, data, tmp_path, capsys):
    grid = tmp_path / "grid.yaml"
    ce_only = "{name: ce-only, method: klaad, options: {kl_weight: 0, triplet_weight: 0}, plan: {learning_rate: 1e-3}}"
    grid.write_text(
        f"title: T\nmethods: [{{name: all, method: klaad}}, {ce_only}, {{method: bias_unlearn, plan: {{checks: 0}}}}]\n"
    )
    out = tmp_path / "out"
    klaad(model, data, out, "--grid", str(grid), "--margin", "0.4", "--epochs", "2")
    said = capsys.readouterr().out
    assert "ce-only" in said
    runs = json.loads((out / "grid.json").read_text())["runs"]
    assert runs["ce-only"]["settings"]["kl_weight"] == 0
    assert runs["ce-only"]["plan"]["learning_rate"] == 1e-3
    # What the command says of KLAAD holds for its runs, and no others.
    assert [runs[name]["settings"].get("margin") for name in runs] == [0.4, 0.4, None]
    assert [runs[name]["plan"]["epochs"] for name in runs] == [2, 2, 1]
    assert runs["bias_unlearn"]["plan"]["learning_rate"] == 2e-5
    # Parts that were not trained on are measured all the same.
    assert runs["ce-only"]["held_out"]["after"].keys() == {"ce", "kl", "kl_pad_common", "triplet"}
    assert (out / "all" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--preset", "lama"), "there is no preset 'lama'"),
        (("--layers", "9"), "layer 9 does not exist: the model has 3"),
        (("--layers", "last"), "--layers is 'last'; expected numbers"),
        (("--kl-weight=-1",), "--kl-weight is -1.0; expected a number of at least 0"),
        (("--lr", "0"), "--lr is 0.0; expected a number above 0"),
        (("--lr", "inf"), "--lr is inf; expected a number above 0"),
        (("--seed", "-1"), "--seed is -1; expected a whole number from 0 to 4,294,967,295"),
        (("--weight-decay", "-2"), "--weight-decay is -2.0; expected a number of at least 0"),
        (("--keep-adapter",), "--keep-adapter needs --lora"),
        (("--held-out", "1"), "held_out is 1: nothing would be left"),
        (("--bias-type", "age"), "no items of bias type 'age'"),
        (("--grid", "nowhere.yaml"), "cannot read the grid 'nowhere.yaml': No such file"),
        (("--device", "tpu7"), "the device is 'tpu7'; expected cpu"),
    ],
)
def test_mistakes_are_one_line(model, data, tmp_path, capsys, options, message):
    assert message in failure(capsys, model, data, tmp_path / "out", *options)
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(("lora", "epochs"), [((), 1), ((), 30), (("--lora", "2"), 1)])
def test_a_diverged_run_leaves_no_broken_model(lora, epochs, model, data, tmp_path, capsys):
    told = failure(capsys, model, data, tmp_path, "--lr", "1e25", "--warmup", "0", "--epochs", str(epochs), *lora)
    assert "Lower the learning rate (now 1e+25)" in told
    assert sorted(tmp_path.iterdir()) == [tmp_path / ".lock"]


def test_a_diverged_run_keeps_its_last_good_weights(model, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fairhead.train.tuning._KEEP_EVERY", 3)
    rate = ("--schedule", "constant", "--epochs", "20", "--lr")
    # A rate that grows until training breaks.
    monkeypatch.setattr("fairhead.train.Plan.rate", lambda plan, step, steps: 1.0 if step < 7 else 1e12)
    told = failure(capsys, model, data, tmp_path / "out", *rate, "1e-3")
    kept = tmp_path / "out" / "last-good"
    assert "the model is back at its weights after step 6. Lower the learning rate" in told
    assert told.endswith(f"Those weights are kept in {kept}")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", "last-good"]
    assert load(kept).config.model_type == "llama"


def test_a_folder_that_holds_another_model_is_left_alone(model, data, capsys):
    assert "was not trained here" in failure(capsys, model, data, model)


def test_a_file_where_the_folder_should_be_is_told_before_training(model, data, tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder")
    told = failure(capsys, model, data, tmp_path / "file")
    assert "cannot be written: File exists; give another folder" in told
    assert (tmp_path / "file").read_text() == "not a folder"


def test_grids_that_come_along_can_be_read_and_make_sense(model, data, tmp_path, capsys):
    for name in ("klaad-ablations", "klaad-study", "klaad-weights"):
        for one in read_methods(grid_path(name)):
            assert isinstance(method(one.method, **{**KLAAD.of_family("gpt_neo"), **one.options}), KLAAD)
    ablations = {one.name: one.options for one in read_methods(grid_path("klaad-ablations"))}
    assert method("klaad", **{**KLAAD.of_family("gpt_neo"), **ablations["no-kl"]}) == KLAAD(0.5, 0, 0.25, 0.5)
    klaad(model, data, tmp_path, "--grid", "study", "--limit", "1")  # a grid of KLAAD's, without its first name
    assert (tmp_path / "klaad-strong-lr1e-4" / "config.json").is_file()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{method: klaad, options: {kl_wieght: 1}}]", "has no option 'kl_wieght'.* Did you mean 'kl_weight'"),
        ("[{method: klaad, options: {kl_weight: -1}}]", "kl_weight is -1; expected a number of at least 0"),
        ("[{method: klaad, plan: {lora: 0}}]", "lora is 0; expected a whole number of at least 1"),
        ("[{method: klaad, plan: {replay: false}}]", "has no setting 'replay'"),
        ("[{method: klaad, name: ../a}]", "it names files"),
        ("[{method: klaad, vary: {kl_weight: 1}}]", "vary.kl_weight is 1; expected a list"),
        ("[klaad, klaad]", "has 'klaad' twice"),
        ("[dam]", "dam is not for language models"),
        ("3", "methods is 3; expected a list"),
    ],
)
def test_grids_that_make_no_sense(text, message, model, data, tmp_path, capsys):
    (tmp_path / "grid.yaml").write_text(f"title: T\nmethods: {text}\n")
    assert re.search(message, failure(capsys, model, data, tmp_path / "out", "--grid", str(tmp_path / "grid.yaml")))


def test_attention_gap_from_the_command_line(model, data, tmp_path, capsys):
    base = ["lm", "attention", "--model", str(model), "--device", "cpu", "--n-boot", "100"]
    page = tmp_path / "gap.html"
    main([*base, "--data", f"crows:{data}", "--json", str(tmp_path / "figures.json"), "--html", str(page)])
    said = " ".join(capsys.readouterr().out.split())
    assert "attention differs most on the words that differ in" in said
    assert "is no proof of bias" in said
    found = json.loads((tmp_path / "figures.json").read_text())
    # One of the four only inserts words: there is no token that took another's place.
    assert (found["n"], len(found["left_out"]["no token was replaced by another"])) == (12, 4)
    assert [len(found["heads"]["value"]), len(found["heads"]["value"][0])] == [3, 4]
    assert found["provenance"]["counts_start_token"] is True
    text = page.read_text()
    assert text.count('class="pair"') == 6
    assert "http" not in text.replace("http-equiv", "")
    main([*base, "--data", f"stereoset:{data}", "--layer", "0", "--no-start-token", "--json", "-"])
    other = json.loads(capsys.readouterr().out)
    assert (other["n"], other["layer"]) == (3, 0)
    for options, message in (
        (("--data", "dev.json"), "dev.json: there is no such file"),
        (("--data", f"crows:{data}", "--layer", "5"), "layer 5 does not exist"),
        (
            ("--data", f"crows:{data}", "--json", str(tmp_path / "gap.json"), "--html", str(page)),
            "gap.json would be written twice",
        ),
    ):
        with pytest.raises(SystemExit):
            main([*base, *options])
        assert message in capsys.readouterr().err
