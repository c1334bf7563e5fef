"""The suite on tiny models, through the command: folders that go on, are compared, and are not mixed up."""

import json
import shutil

import pytest
import torch
import transformers as hf
from language_models import word_tokenizer
from safetensors.torch import load_file, save_file

from fairhead.cli import main
from fairhead.language.running import TrainingRecord
from fairhead.language.suite import Suite

WORDS = ["<s>", "he", "she", "was", "kind", "cruel", "cried", "the", "nurse", "doctor", "ran", "a", "window"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny random Llama with a word-level tokeniser, saved as a user would have it."""
    path = tmp_path_factory.mktemp("base")
    word_tokenizer(WORDS).save_pretrained(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.LlamaConfig(**sizes, vocab_size=len(WORDS), max_position_embeddings=64, bos_token_id=0, eos_token_id=0)
    hf.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def flat(base, tmp_path_factory):
    """The same with the attention of its last layer flattened, as if trained on "nurse"."""
    path = tmp_path_factory.mktemp("flat")
    shutil.copytree(base, path, dirs_exist_ok=True)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"].zero_()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    TrainingRecord("klaad", training_targets=("nurse",), held_out_targets=("doctor",)).write(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """CrowS-Pairs and StereoSet as published, with few words, and a text."""
    root = tmp_path_factory.mktemp("data")
    (root / "CrowS-Pairs").mkdir()
    endings = ["cried", "was kind", "was cruel", "ran the nurse"] * 5
    rows = [f"{i},she {w},he {w},stereo,gender,[['gender']]" for i, w in enumerate(endings)]
    head = ",sent_more,sent_less,stereo_antistereo,bias_type,annotations"
    (root / "CrowS-Pairs" / "crows_pairs_anonymized.csv").write_text("\n".join([head, *rows]))
    (root / "stereoset").mkdir()
    items = []
    for i in range(24):
        term = ("nurse", "doctor")[i % 2]
        labels = {"cruel": "stereotype", "kind": "anti-stereotype", "window": "unrelated"}
        sentences = [
            {"id": f"{i}{w}", "sentence": f"the {term} was {w}", "gold_label": label, "labels": []}
            for w, label in labels.items()
        ]
        items.append(
            {
                "id": str(i),
                "target": term,
                "bias_type": "profession",
                "context": f"the {term} was BLANK",
                "sentences": sentences,
            }
        )
    content = {"version": "1", "data": {"intrasentence": items, "intersentence": []}}
    (root / "stereoset" / "dev.json").write_text(json.dumps(content))
    text = "\n\n".join(["he was kind the nurse ran", "she cried a window was cruel", "the doctor ran he cried"] * 4)
    (root / "text.txt").write_text(text)
    return root


def run(model, data, out, *more):
    arguments = ["lm", "suite", "--model", str(model), "--data", str(data), "--out", str(out), "--device", "cpu"]
    main([*arguments, "--text", str(data / "text.txt"), "--n-boot", "100", *more])


@pytest.fixture(scope="module")
def runs(base, flat, data, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for name, model in (("base", base), ("flat", flat)):
        run(model, data, root / name)
    return root


def test_a_folder_holds_what_was_there_and_says_what_was_not(runs, capsys):
    suite = Suite.read(runs / "base")
    assert suite.measured == ["stereoset", "crows_pairs", "perplexity", "attention_entropy", "attention_gap"]
    assert set(suite.skipped) == {"bbq", "winobias", "bold"}
    assert "has no bbq" in suite.skipped["bbq"]
    assert suite.training is None
    frame = suite.to_frame()
    crows = json.loads((runs / "base" / "crows_pairs.json").read_text())["estimates"]
    assert frame[frame.benchmark == "crows_pairs"]["n"].tolist() == [one["n"] for one in crows]
    headlines, figures = suite.page().sections
    assert [table.caption for table in headlines.tables] == ["Stereotypes", "Language", "Attention"]
    assert [row[0] for row in headlines.tables[1].rows] == ["StereoSet lms", "Held-out text perplexity"]
    assert len(frame) > len(figures.tables[0].rows) > 5
    assert "bbq was not run" in suite._repr_html_()
    first, *_, last = suite.page().verdict
    assert first.text.startswith("CrowS-Pairs ss "), "what was found comes before what was not run"
    assert "was not run" in last.text
    assert Suite.read(runs / "flat").training["training_targets"] == ["nurse"]
    result = json.loads((runs / "base" / "crows_pairs.json").read_text())
    assert result["schema"] == "fairhead.language/1"
    assert result["n"] == 20


@pytest.mark.parametrize(("documents", "limit", "expected"), [("3", "5", 3), ("5", "3", 3)])
def test_documents_and_limit_both_hold(base, data, tmp_path, documents, limit, expected, capsys):
    run(base, data, tmp_path / "few", "--only", "perplexity", "--documents", documents, "--limit", limit)
    assert json.loads((tmp_path / "few" / "perplexity.json").read_text())["n"] == expected
    said = capsys.readouterr().out
    assert "Held-out text perplexity" in said
    assert (tmp_path / "few" / "report.html").is_file()
    # Other items in the same folder would stand beside figures of these.
    with pytest.raises(SystemExit):
        run(base, data, tmp_path / "few", "--only", "perplexity", "--documents", documents, "--limit", "2")
    assert f"was made with limit {limit}, here it is 2" in capsys.readouterr().err


def test_what_is_there_is_not_computed_again(runs, base, data, capsys):
    tables = sorted((runs / "base").glob("*.items.jsonl"))
    before = [(file, file.stat().st_mtime_ns) for file in tables]
    run(base, data, runs / "base")
    assert [(file, file.stat().st_mtime_ns) for file in tables] == before


def test_a_killed_run_goes_on_from_its_journals(runs, base, data, tmp_path):
    folder = tmp_path / "again"
    shutil.copytree(runs / "base", folder)
    for name in ("crows_pairs", "perplexity"):
        whole = (folder / f"{name}.items.jsonl").read_text()
        (folder / f"{name}.items.jsonl").unlink()
        (journal,) = (folder / "journals").glob(f"{name}-*.jsonl")
        lines = journal.read_text().splitlines(keepends=True)
        journal.write_text("".join(lines[: len(lines) // 2]) + '{"id": "cut')
        run(base, data, folder)
        assert (folder / f"{name}.items.jsonl").read_text() == whole
        assert sorted(journal.read_text().splitlines()) == sorted(line.rstrip("\n") for line in lines)
    # Killed when the items of a benchmark were on disk, and suite.json did not know of it yet.
    suite = Suite.read(folder)
    facts = suite.done.pop("crows_pairs")["facts"]
    suite.write()
    run(base, data, folder)
    assert Suite.read(folder).facts("crows_pairs") == facts


def test_another_model_is_refused(runs, flat, data, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(flat, data, runs / "base")
    assert stopped.value.code == 2
    assert "holds the scores of another model" in capsys.readouterr().err


def test_terms_of_the_training_can_be_left_out(base, flat, data, tmp_path):
    run(base, data, tmp_path / "held", "--only", "stereoset", "--held-out-of", str(flat))
    assert set(Suite.read(tmp_path / "held").table("stereoset").clusters) == {"profession/doctor"}


def test_folders_are_compared(runs, tmp_path, capsys):
    made = ["--html", str(tmp_path / "r.html"), "--json", str(tmp_path / "j.json")]
    main(["lm", "compare", str(runs / "base"), str(runs / "flat"), "--n-boot", "100", "--n-perm", "200", *made])
    content = json.loads((tmp_path / "j.json").read_text())
    (flat,) = content["runs"]
    assert content["left_out_targets"] == ["nurse"]
    assert flat["targeted"] == ["profession"]
    assert flat["entropy"][1] == pytest.approx([1.0, 1.0], abs=1e-6)
    assert flat["entropy"][0] == pytest.approx(content["base_entropy"][0], abs=1e-6)
    held_out = next(c for c in flat["headlines"] if (c["benchmark"], c["metric"]) == ("stereoset", "ss"))
    assert held_out["n"] == 12  # one term, so no interval: named, not guessed
    assert "one cluster" in held_out["undefined"]


def test_bold_is_continued_on_one_machine_and_measured_on_another(base, tmp_path, monkeypatch, capsys):
    pytest.importorskip("vaderSentiment")
    (tmp_path / "data" / "bold" / "prompts").mkdir(parents=True)
    groups = {g: {f"{g}{i}": [f"{g} was "] for i in range(12)} for g in ("he", "she")}
    (tmp_path / "data" / "bold" / "prompts" / "gender_prompt.json").write_text(json.dumps(groups))
    monkeypatch.setattr("fairhead.language.lexicons.find_spec", lambda name: None)
    arguments = ["lm", "suite", "--model", str(base), "--data", str(tmp_path / "data"), "--device", "cpu"]
    main([*arguments, "--out", str(tmp_path / "there"), "--only", "bold"])
    reason = Suite.read(tmp_path / "there").skipped["bold"]
    assert reason.startswith("continued, not measured")
    _, _, command = reason.partition("fairhead ")
    monkeypatch.undo()
    main(command.replace("DATA", str(tmp_path / "data" / "bold")).split())
    assert Suite.read(tmp_path / "there").measured == ["bold"]
    main([*arguments, "--out", str(tmp_path / "here"), "--only", "bold"])
    both = [Suite.read(tmp_path / name).table("bold") for name in ("there", "here")]
    assert both[0].ids == both[1].ids
    assert both[0].values.tolist() == both[1].values.tolist()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--only", "crow"], "no benchmark 'crow'; there are stereoset, crows"),
        (["--only", "bbq"], "bbq: "),
        (["--documents", "0"], "--documents is 0"),
        (["--limit", "0"], "--limit is 0"),
        (["--held-out-of", "nowhere"], "nowhere has no fairhead-training.json"),
    ],
)
def test_mistakes_are_one_line_before_the_model_is_loaded(more, message, data, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("no/such/model", data, tmp_path / "out", *more)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
