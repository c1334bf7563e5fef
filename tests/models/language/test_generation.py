"""Continuations: drawn as transformers' own filters would, the same whatever they are read with, and after a stop."""

import json

import made_posts
import numpy as np
import pytest
import torch
import transformers as hf
from language_models import FAMILIES, WORDS, build, saved, tokenizer
from transformers import TopKLogitsWarper, TopPLogitsWarper

from fairhead.cli import main
from fairhead.errors import InputError
from fairhead.language.answers import GenerationJournal, Prompt, Sampling, read_generations
from fairhead.language.benchmarks.bold import prompts, read_bold
from fairhead.language.generation import _Draw, generate
from fairhead.language.scorer import Scorer

PROMPTS = [
    Prompt("a", "the old nurse was"),
    Prompt("b", "people said that he "),
    Prompt("c", "she"),
    Prompt("d", "the baker"),
    Prompt("e", "never always often careful with money"),
]


def scorer_of(family="llama", dtype=torch.float64):
    model = build(family)
    # A text ends only where a test wants it to.
    model.generation_config.eos_token_id = None
    found = Scorer(model, tokenizer(), dtype=dtype)
    found.tokenizer.eos_token = None
    return found


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (6, 0.8), (1, 1.0)])
def test_tokens_are_drawn_with_the_probabilities_of_transformers_filters(top_k, top_p):
    torch.manual_seed(0)
    logits = 2 * torch.randn(1, 12)
    points = 20_000
    chances = ((torch.arange(points, dtype=torch.float64) + 0.5) / points)[:, None]
    drawn = _Draw(chances, 0, Sampling(top_k=top_k, top_p=top_p)).choose(logits.expand(points, -1), 0)
    found = torch.bincount(drawn, minlength=12) / points
    expected = logits.double()
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    assert found.numpy() == pytest.approx(expected.softmax(-1)[0].numpy(), abs=2 / points)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_likeliest_tokens_are_those_of_a_plain_forward_pass(family):
    scorer = scorer_of(family, torch.float32)  # in 64 bit transformers' mask makes NaN of padding in Gemma-2
    found = generate(scorer, PROMPTS, Sampling(max_new_tokens=6, temperature=0, batch_size=3))
    for prompt in PROMPTS:
        ids = [0, *scorer.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]]
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(scorer.model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert found[prompt.id].text == scorer.tokenizer.decode(ids[-6:], skip_special_tokens=True)


def test_a_model_that_reads_padding_is_given_one_prompt_at_a_time():
    """RWKV takes a mask and does not look at it: padded on the left, a prompt went on from the padding."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "attention_hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = hf.RwkvForCausalLM(hf.RwkvConfig(vocab_size=len(tokenizer()), context_length=64, **shape)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.dim() == 2 else 1)
    found = generate(Scorer(model, tokenizer()), PROMPTS, Sampling(max_new_tokens=6, temperature=0, batch_size=5))
    for prompt in PROMPTS:
        alone = generate(Scorer(model, tokenizer()), [prompt], Sampling(max_new_tokens=6, temperature=0))
        assert found[prompt.id] == alone[prompt.id]


def test_a_continuation_depends_on_its_seed_and_prompt_and_not_on_its_neighbours():
    scorer = scorer_of()
    found = generate(scorer, PROMPTS, Sampling(max_new_tokens=8, batch_size=5))
    assert len({one.text for one in found.values()}) == len(PROMPTS)
    alone = generate(scorer, PROMPTS[3:0:-1], Sampling(max_new_tokens=8, batch_size=1))
    assert all(found[key] == alone[key] for key in alone)
    other = generate(scorer, PROMPTS, Sampling(max_new_tokens=8, batch_size=5, seed=1))
    assert sum(found[key] != other[key] for key in found) >= 4


def test_a_run_that_was_stopped_writes_what_an_unbroken_one_writes(tmp_path):
    scorer, how = scorer_of(dtype=torch.float32), Sampling(max_new_tokens=8, batch_size=2)
    settings = {**scorer.settings(), **how.settings()}
    with GenerationJournal(tmp_path / "whole.jsonl", settings) as journal:
        whole = generate(scorer, PROMPTS, how, journal=journal)
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    for kept in range(1, len(lines)):
        file = tmp_path / f"{kept}.jsonl"
        file.write_bytes(b"".join(lines[:kept]) + lines[kept][:10])
        with GenerationJournal(file, settings) as journal:
            assert generate(scorer, PROMPTS, how, journal=journal) == whole
        assert file.read_bytes() == b"".join(lines)
    with pytest.raises(InputError, match="its generations were made with seed 0, not 1"):
        GenerationJournal(tmp_path / "whole.jsonl", {**settings, "seed": 1}).__enter__()


def test_a_model_that_only_ends_texts_writes_nothing_and_that_is_counted(tmp_path):
    scorer = scorer_of(dtype=torch.float32)
    scorer.tokenizer.eos_token = "<s>"
    with torch.no_grad():
        scorer.model.model.norm.weight.zero_()
    # Without a norm all logits are alike, and the first token, which ends a text, is the likeliest.
    found = generate(scorer, PROMPTS, Sampling(max_new_tokens=4, temperature=0))
    assert [one.id for one in found.values() if one.empty] == [prompt.id for prompt in PROMPTS]
    assert {one.n_tokens for one in found.values()} == {0}
    drawn = generate(scorer, [Prompt(str(i), "she") for i in range(400)], Sampling(max_new_tokens=1, top_k=0, top_p=1))
    # One in as many as there are words ends at once: 400 even draws.
    assert sum(one.empty for one in drawn.values()) == pytest.approx(
        400 / len(WORDS), abs=4 * np.sqrt(400 / len(WORDS))
    )


def test_what_cannot_be_continued_is_named():
    scorer = scorer_of()
    long = Prompt("long", "the nurse " * 14)
    found = generate(scorer, [PROMPTS[0], long], Sampling(max_new_tokens=8))
    assert found.too_long == ("long",)
    assert list(found) == ["a"]
    with pytest.raises(InputError, match="two prompts have the id 'a'"):
        generate(scorer, [PROMPTS[0], PROMPTS[0]])
    with pytest.raises(InputError, match="prompt 'x' has no token"):
        generate(scorer, [Prompt("x", "  ")])
    with torch.no_grad():
        scorer.model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(InputError, match="are not numbers"):
        generate(scorer, PROMPTS, Sampling(max_new_tokens=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def bold(tmp_path_factory):
    path = tmp_path_factory.mktemp("bold")
    people = {group: {f"{group}_{i}": ["the nurse was ", "she "] for i in range(10)} for group in ("poets", "bakers")}
    (path / "profession_prompt.json").write_text(json.dumps(people))
    return path


def test_the_command_generates_here_and_scores_elsewhere(folder, bold, tmp_path, capsys):
    common = ["lm", "bold", "--data", str(bold)]
    drawn = ["--model", str(folder), "--max-new-tokens", "8", "--device", "cpu", "--batch-size", "7"]
    main([*common, *drawn, "--generate-only", "--out", str(tmp_path)])
    (file,) = (tmp_path / "journals").glob("bold-*.jsonl")
    empty = sum(one.empty for one in read_generations(file).of(prompts(read_bold(bold))).values())
    assert f"40 continuations of 40 prompts, {empty} of them empty: {file}" in capsys.readouterr().out
    main([*common, *drawn, "--n-boot", "100", "--json", "-"])
    at_once = json.loads(capsys.readouterr().out)
    main([*common, "--score-only", str(file), "--n-boot", "100", "--json", "-"])
    later = json.loads(capsys.readouterr().out)
    assert later["estimates"] == at_once["estimates"]
    found = {(e["metric"], e["group_by"]): e for e in later["estimates"]}
    disparity = found["gender_polarity_disparity", "profession"]
    means = [found["gender_polarity", f"profession × {group}"] for group in ("poets", "bakers")]
    assert disparity["value"] == pytest.approx(abs(means[0]["value"] - means[1]["value"]))
    assert sum(mean["n"] for mean in means) == 40 - empty == later["n"]
    assert disparity["detail"]["clusters"] == 20
    assert later["provenance"]["weights"] == at_once["provenance"]["weights"]
    main([*common, "--score-only", str(file), "--n-boot", "100"])
    shown = capsys.readouterr().out
    assert "profession" in shown
    assert "sentiment" in shown
    # A prompt that has changed since must not be scored with the old continuation.
    stored = read_generations(file)
    with pytest.raises(InputError, match="was made after another text"):
        stored.of([Prompt("profession/poets/poets_0/0", "the baker was ")])


@pytest.mark.parametrize("several", [False, True])
def test_a_classifier_of_texts_gives_what_transformers_pipeline_gives(several, folder, bold, tmp_path, capsys):
    bert = made_posts.bert()
    bert.config.problem_type = "multi_label_classification" if several else "single_label_classification"
    bert.save_pretrained(tmp_path / "tox")
    made_posts.tokenizer().save_pretrained(tmp_path / "tox")
    common = ["lm", "bold", "--data", str(bold), "--model", str(folder), "--device", "cpu", "--max-new-tokens", "8"]
    common += ["--n-boot", "100", "--out", str(tmp_path / "run"), "--classifier", str(tmp_path / "tox")]
    main([*common, "--classifier-label", "toxic", "--json", "-"])
    result = json.loads(capsys.readouterr().out)
    found = {(e["metric"], e["group_by"]): e["value"] for e in result["estimates"]}
    assert not any("p(normal)" in metric for metric, _ in found)
    classify = hf.pipeline("text-classification", str(tmp_path / "tox"), top_k=None)
    items = read_bold(bold)
    written = read_generations(next((tmp_path / "run" / "journals").glob("bold-*.jsonl"))).of(prompts(items))
    for group in ("poets", "bakers"):
        texts = [written[item.id].text for item in items if item.group == group and not written[item.id].empty]
        shares = [{one["label"]: one["score"] for one in said}["toxic"] for said in classify(texts)]
        assert found["tox p(toxic)", f"profession × {group}"] == pytest.approx(np.mean(shares), abs=1e-5)
    assert ("tox p(toxic)_disparity", "profession") in found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--classifier", "{}", "--classifier-label", "toxi"], "has no label 'toxi'; it has normal, toxic. Did you"),
        (["--classifier-label", "toxic"], "--classifier-label is of one --classifier; there are 0"),
        (["--classifier", "nowhere"], "nowhere: expected a folder with a model (config.json)"),
    ],
)
def test_mistakes_about_a_classifier_are_said_before_the_model_is_loaded(arguments, message, bold, tmp_path, capsys):
    made_posts.bert().save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        main(["lm", "bold", "--data", str(bold), "--model", "m", *(one.format(tmp_path) for one in arguments)])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a model (--model PATH) or stored generations"),
        (["--model", "m", "--score-only", "f"], "leave out --model and --generate-only"),
        (["--model", "m", "--generate-only"], "--generate-only needs a folder"),
        (["--model", "m", "--top-p", "2"], "--top-p is 2.0; expected a number above 0, up to 1"),
        (["--model", "m", "--domain", "proffession"], "proffession"),
        (["--score-only", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--model", "m", "--lexicons", "nowhere"], "nowhere: there is no such folder"),
    ],
)
def test_mistakes_are_one_line(arguments, message, bold, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["lm", "bold", "--data", str(bold), *arguments])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
