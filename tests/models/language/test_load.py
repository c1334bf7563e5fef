"""Scorers from folders, the command line on them, and perplexity in closed form."""

import atexit
import functools
import json
import math
import os
import sys

import numpy as np
import pytest
import torch
import transformers as hf
from language_models import word_tokenizer
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from several_processes import as_launched, in_processes

import fairhead
from fairhead.cli import main
from fairhead.errors import InputError, UnsupportedModel
from fairhead.language import Request, Scorer, load_scorer
from fairhead.language.benchmarks.perplexity import Document
from fairhead.language.running import run_benchmark
from fairhead.stats.bootstrap import Resampling

WORDS = ["<s>", "he", "she", "was", "kind", "cruel", "cried", "the", "nurse", "doctor"]
CONTEXT = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Llama with a word-level tokeniser, saved as a user would have it."""
    path = tmp_path_factory.mktemp("tiny")
    word_tokenizer(WORDS).save_pretrained(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.LlamaConfig(
        **sizes, vocab_size=len(WORDS), max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=0
    )
    hf.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def crows(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "crows_pairs_anonymized.csv"
    rows = [
        f"{i},she {w},he {w},stereo,gender,[['gender']]" for i, w in enumerate(["cried", "was kind", "was cruel"] * 5)
    ]
    rows.append(f"15,{'she ' * 20},he,stereo,gender,[['gender']]")
    file.write_text("\n".join([",sent_more,sent_less,stereo_antistereo,bias_type,annotations", *rows]))
    return file


def perplexity(scorer, texts, **options):
    documents = [Document(f"document {i}", text) for i, text in enumerate(texts, start=1)]
    return run_benchmark("perplexity", scorer, documents, **options)


def test_perplexity_of_a_model_without_weights_is_the_size_of_its_vocabulary(folder):
    scorer = load_scorer(folder, device="cpu")
    with torch.no_grad():
        scorer.model.lm_head.weight.zero_()
    documents = ["he was kind", "she cried " * 30] * 5  # the second is longer than the context
    result = perplexity(scorer, documents)
    assert result["perplexity"].value == pytest.approx(len(WORDS))
    assert result["perplexity_per_word"].value == pytest.approx(len(WORDS))  # one token a word
    bits = 5 * (3 + 60) * math.log2(len(WORDS)) / sum(len(d.encode()) for d in documents)
    assert result["bits_per_byte"].value == pytest.approx(bits)
    assert result["perplexity"].detail["tokens"] == 5 * 63


def test_perplexity_equals_the_models_own_loss(folder):
    scorer = load_scorer(folder, device="cpu")
    rng = np.random.default_rng(0)
    documents = [" ".join(rng.choice(WORDS[1:], 9)) for _ in range(12)]
    losses = []
    for text in documents:
        ids = torch.tensor([[0, *scorer.tokenizer(text, add_special_tokens=False)["input_ids"]]])
        with torch.no_grad():
            losses.append(float(scorer.model(ids, labels=ids).loss))
    result = perplexity(scorer, documents, resampling=Resampling(n_boot=100))["perplexity"]
    assert result.value == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert result.low < result.value < result.high


def test_perplexity_windows_and_empty_texts(folder):
    scorer = load_scorer(folder, device="cpu")
    with pytest.raises(InputError, match="a window of 17 tokens: expected 2 up to the model's context of 16"):
        perplexity(scorer, ["he"], window=17)
    with pytest.raises(InputError, match="at least one document"):
        perplexity(scorer, [])
    with pytest.raises(InputError, match="document 2 has no token"):
        perplexity(scorer, ["he", ""])


def test_what_cannot_be_loaded_is_named(folder, tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        load_scorer(tmp_path)
    with pytest.raises(InputError, match="the device is 'nowhere'; expected cpu"):
        load_scorer(folder, device="nowhere")
    with pytest.raises(InputError, match="dtype 'int8' is not known"):
        load_scorer(folder, device="cpu", dtype="int8")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(InputError, match="the weights cannot be loaded"):
        load_scorer(tmp_path, device="cpu")
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "v_proj" not in k}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 that the model needs: model\.layers\.0\.self_attn\.v_proj"):
        load_scorer(tmp_path, device="cpu")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(
        UnsupportedModel, match="holds a LlamaForSequenceClassification; expected a causal language model"
    ):
        load_scorer(tmp_path, device="cpu")


def test_the_command_names_what_it_left_out(folder, crows, tmp_path, capsys):
    arguments = ["lm", "crows", "--model", str(folder), "--data", str(crows), "--device", "cpu"]
    main([*arguments, "--json", str(tmp_path / "r.json"), "--out", str(tmp_path / "scores")])
    shown = capsys.readouterr().out
    assert "15 items" in shown
    assert "Left out: 1 (longer than the model's context); the first is 15" in shown
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["schema"] == "fairhead.language/1"
    assert result["left_out"] == {"longer than the model's context": ["15"]}
    assert result["provenance"]["dtype"] == "float32"
    assert result["provenance"]["command"].startswith("fairhead lm crows")
    overall = next(e for e in result["estimates"] if (e["metric"], e["group_by"]) == ("ss", None))
    assert 0 <= overall["low"] <= overall["value"] <= overall["high"] <= 1
    assert overall["n"] == 15


def test_the_command_takes_pairs_of_your_own(folder, tmp_path, capsys):
    rows = [f"{i},she {w},he {w},gender" for i, w in enumerate(["cried", "was kind", "was cruel"] * 5)]
    (tmp_path / "own.csv").write_text("\n".join(["nr,worse,better,about", *rows]))
    arguments = ["lm", "crows", "--model", str(folder), "--data", f"pairs:{tmp_path / 'own.csv'}", "--device", "cpu"]
    columns = ["--group", "about", "--id", "nr", "--data-option", "more=worse", "--data-option", "less=better"]
    main([*arguments, *columns, "--json", "-"])
    result = json.loads(capsys.readouterr().out)
    assert result["n"] == 15
    assert {e["group_by"] for e in result["estimates"]} == {None, "stereo", "gender"}
    assert result["benchmark"] == "crows_pairs.pairs"
    with pytest.raises(SystemExit):
        main([*arguments, "--group", "kind"])
    assert "nr, worse, better, about" in capsys.readouterr().err


def test_the_command_reads_plain_text(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("he was kind\n\nshe was kind\n\nthe nurse cried\n")
    main(
        [
            "lm",
            "perplexity",
            "--model",
            str(folder),
            "--data",
            str(tmp_path / "text.txt"),
            "--device",
            "cpu",
            "--json",
            "-",
        ]
    )
    result = json.loads(capsys.readouterr().out)
    assert result["n"] == 3
    assert result["estimates"][0]["metric"] == "perplexity"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["crows", "--model", "nowhere", "--data", "nowhere.csv"], "nowhere.csv: there is no such file"),
        (["perplexity", "--model", "nowhere", "--data", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["crows", "--data", "x"], "Missing option '--model'; fairhead lm crows --help explains"),
        (
            ["crows", "--model", "m", "--data", "d", "--limit", "0"],
            "--limit is 0; expected a whole number of at least 1",
        ),
        (
            ["crows", "--model", "m", "--data", "d", "--level", "95"],
            "--level is 95.0; expected a number between 0 and 1",
        ),
        (
            ["crows", "--model", "m", "--data", "d", "--n-boot", "1"],
            "--n-boot is 1; expected a whole number of at least 100",
        ),
        (["crows", "--model", "m", "--data", "d", "--json", "/no/such/folder/x.json"], "there is no folder"),
        (["tea", "--model", "m", "--data", "d"], "No such command 'tea'; fairhead lm --help explains"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["lm", *arguments])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_layers_spread_by_accelerate_and_a_lora_adapter_score_as_the_merged_model(folder, tmp_path):
    requests = [Request("a", "the nurse", " was kind"), Request("b", "", "she cried")]
    base = load_scorer(folder, device="cpu")
    spread = load_scorer(folder, device="cpu", device_map="auto")
    assert spread.score(requests)["a"].logprob == pytest.approx(base.score(requests)["a"].logprob, abs=1e-6)
    adapted = get_peft_model(load_scorer(folder, device="cpu").model, LoraConfig(r=2, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    adapted.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(folder)}))
    found = load_scorer(tmp_path, device="cpu").score(requests)
    expected = Scorer(adapted.merge_and_unload(), base.tokenizer).score(requests)
    assert found["a"].logprob == pytest.approx(expected["a"].logprob, abs=1e-5)
    assert found["a"].logprob != pytest.approx(base.score(requests)["a"].logprob, abs=1e-3)


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_fewer_bits_need_a_gpu(bits, folder, crows, capsys):
    with pytest.raises(SystemExit):
        main(["lm", "crows", "--model", str(folder), "--data", str(crows), "--device", "cpu", "--load-in", bits])
    assert f"loading in {bits} needs a CUDA GPU, and the device is cpu" in capsys.readouterr().err


def one_of_two(rank, arguments, log, port):
    os.environ |= as_launched(rank, 2, port)
    with open(f"{log}-{rank}", "w") as sys.stdout:
        main(arguments)
    atexit._run_exitfuncs()  # the other process is let go
    os._exit(0)


def test_two_processes_find_what_one_does_and_merge_their_journals(folder, crows, tmp_path):
    common = ["lm", "crows", "--model", str(folder), "--data", str(crows), "--device", "cpu", "--n-boot", "100"]
    main([*common, "--out", str(tmp_path / "one")])
    # A process of a run that was killed has left what it had scored.
    (alone,) = (tmp_path / "one" / "journals").glob("*.jsonl")
    header, first, *_ = alone.read_text().splitlines()
    left = tmp_path / "two" / "journals" / f"{alone.stem}.rank1.jsonl"
    left.parent.mkdir(parents=True)
    left.write_text(f"{header}\n{json.dumps({**json.loads(first), 'logprob': -3.25})}\n")
    in_processes(one_of_two, [*common, "--out", str(tmp_path / "two")], str(tmp_path / "log"))
    assert "on CrowS-Pairs: 15 items" in (tmp_path / "log-0").read_text()
    assert (tmp_path / "log-1").read_text() == ""
    (together,) = (tmp_path / "two" / "journals").glob("*.jsonl")
    written = ([json.loads(line) for line in path.read_text().splitlines()[1:]] for path in (alone, together))
    scores = [{row["id"]: row for row in rows} for rows in written]
    kept = json.loads(first)["id"]
    assert scores[1].pop(kept)["logprob"] == -3.25
    scores[0].pop(kept)
    assert scores[0].keys() == scores[1].keys()
    for name, row in scores[0].items():
        assert scores[1][name]["logprob"] == pytest.approx(row["logprob"], abs=1e-5)
    found = [json.loads((tmp_path / name / "crows_pairs.json").read_text()) for name in ("one", "two")]
    assert found[0]["left_out"] == found[1]["left_out"]


def test_another_limit_in_the_same_folder_is_refused_in_python_too(folder, crows, tmp_path):
    run = functools.partial(fairhead.score, folder, "crows", crows, device="cpu", out=tmp_path, n_boot=100)
    assert run(limit=12).provenance["limit"] == 12
    with pytest.raises(InputError, match="was made with limit 12, here it is 13"):
        run(limit=13)
    with pytest.raises(InputError, match="n_boot is 0; expected a whole number of at least 100"):
        run(limit=12, n_boot=0)
