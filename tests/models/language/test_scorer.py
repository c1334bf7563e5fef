"""The scoring engine against one-by-one scoring with the model's own forward pass, in float64 where it adds up."""

import math

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from fairhead.errors import InputError, UnsupportedModel
from fairhead.language import scorer as scorer_module
from fairhead.language.answers import Journal, Request, journal_path
from fairhead.language.scorer import Scorer, weights_digest

WORDS = (
    "the a old young man woman nurse doctor said that he she was tired because of work and went home .".split()  # noqa: SIM905
)
VOCABULARY = 120
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LLAMA = {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
NEO = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "max_position_embeddings": 64,
}
OPT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 40}

# Family, configuration, whether it is known to read trees.
FAMILIES = {
    "llama": (hf.LlamaConfig(**LLAMA), True),
    "qwen3": (hf.Qwen3Config(**LLAMA), True),
    "gpt2": (hf.GPT2Config(**GPT2), True),
    "gpt2-eager": (hf.GPT2Config(**GPT2, attn_implementation="eager"), True),
    "gpt-neo": (hf.GPTNeoConfig(**NEO, window_size=32), True),
    "gpt-neo-narrow": (hf.GPTNeoConfig(**NEO, window_size=16), True),
    "gpt-neox": (hf.GPTNeoXConfig(**SMALL, vocab_size=VOCABULARY, max_position_embeddings=64), True),
    "gemma-2": (hf.Gemma2Config(**LLAMA, sliding_window=64, query_pre_attn_scalar=8), True),
    "gemma-2-narrow": (hf.Gemma2Config(**LLAMA, sliding_window=16, query_pre_attn_scalar=8), True),
    "opt": (hf.OPTConfig(**OPT, max_position_embeddings=64, word_embed_proj_dim=32), True),
    "bloom": (hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4), False),
    "mamba": (hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4), False),
}


def build(config, scale=4.0):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "A_log" not in name:
                weight.mul_(scale)
    return model


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-pair encoding that joins letters across spaces, so that a prefix may end inside a token."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    text = [" ".join(np.random.default_rng(i).choice(WORDS, 12)) for i in range(50)]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<s>"], show_progress=False)
    words.train_from_iterator(text, trainer)
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")


def make_requests(n=40, seed=0):
    rng = np.random.default_rng(seed)
    contexts = ["", *(" ".join(rng.choice(WORDS, rng.integers(2, 8))) for _ in range(5))]
    chosen = rng.integers(len(contexts), size=n)
    ends = [" ".join(rng.choice(WORDS, rng.integers(1, 6))) for _ in range(n)]
    return [Request(str(i), contexts[c], f" {end}") for i, (c, end) in enumerate(zip(chosen, ends, strict=True))]


def one_by_one(model, tokenizer, request):
    """Sum and number of tokens by a plain forward pass over one sequence, in float64 from the logits on."""
    whole = tokenizer(request.prefix + request.continuation, add_special_tokens=False)["input_ids"]
    before = tokenizer(request.prefix, add_special_tokens=False)["input_ids"] if request.prefix else []
    ids = torch.tensor([[tokenizer.bos_token_id, *whole]])
    with torch.no_grad():
        logprobs = model(ids).logits.double().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    scored = logprobs[len(before) :]
    return float(scored.sum()), len(scored)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_tokens", [1, 60, 1000])
def test_equals_one_by_one(family, batch_tokens, tokenizer):
    config, trees = FAMILIES[family]
    model = build(config)
    scorer = Scorer(model, tokenizer, batch_tokens=batch_tokens, row_tokens=48)
    requests = make_requests()
    scores = scorer.score(requests, per_token=True)
    assert scorer.reads_trees == trees
    assert list(scores) == [r.id for r in requests]
    spread = np.std([s.logprob for s in scores.values()])
    assert spread > 1  # the model tells texts apart, so that a wrong sum would show
    for request in requests:
        expected, n_tokens = one_by_one(model, tokenizer, request)
        found = scores[request.id]
        assert found.n_tokens == n_tokens == len(found.per_token)
        assert found.logprob == pytest.approx(expected, abs=1e-4)
        assert sum(found.per_token) == pytest.approx(found.logprob, abs=1e-9)


def test_the_last_token_from_which_nothing_is_predicted_is_not_read(tokenizer):
    model, seen = build(FAMILIES["llama"][0]), []
    scorer = Scorer(model, tokenizer)
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].numel()))
    scorer.score([Request("a", "", "the old man said that he was tired")])
    assert sum(seen) == len(tokenizer("the old man said that he was tired", add_special_tokens=False)["input_ids"])


def test_tokens_shared_by_requests_are_computed_once(tokenizer):
    model, seen = build(FAMILIES["llama"][0]), []
    scorer = Scorer(model, tokenizer)
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].numel()))
    context = "the old man said that he was tired because of work and"
    scorer.score([Request(str(i), context, f" {word}") for i, word in enumerate(WORDS)])
    shared = len(tokenizer(context, add_special_tokens=False)["input_ids"])
    separate = sum(len(tokenizer(f"{context} {word}", add_special_tokens=False)["input_ids"]) + 1 for word in WORDS)
    assert sum(seen) <= 1 + shared + 6 * len(WORDS) < separate / 2


def test_only_predicting_tokens_reach_the_vocabulary(tokenizer):
    model, seen = build(FAMILIES["llama"][0]), []
    scorer = Scorer(model, tokenizer)
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    score = scorer.score([Request("a", "the old man said that he was tired", " because")])["a"]
    assert seen == [score.n_tokens]


def test_merges_across_the_boundary_are_marked(tokenizer):
    whole = tokenizer("the old man", add_special_tokens=False)["input_ids"]
    before = tokenizer("the o", add_special_tokens=False)["input_ids"]
    assert whole[: len(before)] != before  # the tokeniser does join here
    scorer = Scorer(build(FAMILIES["gpt2"][0]), tokenizer)
    scores = scorer.score([Request("a", "the o", "ld man"), Request("b", "", "the old man")])
    assert scores["a"].merged
    assert not scores["b"].merged
    assert scores["a"].n_tokens == max(1, len(whole) - len(before))


def test_spaces_before_the_continuation_may_stand_on_either_side(tokenizer):
    scorer = Scorer(build(FAMILIES["gpt2"][0]), tokenizer)
    scores = scorer.score([Request("a", "the old ", "man"), Request("b", "the old", " man")])
    assert scores["a"].logprob == scores["b"].logprob


def test_start_token_only_before_empty_prefixes(tokenizer):
    model = build(FAMILIES["gpt2"][0])
    requests = [Request("a", "the old", " man"), Request("b", "", "the old man")]
    scores = Scorer(model, tokenizer, convention="lm-eval").score(requests)
    always = Scorer(model, tokenizer).score(requests)
    ids = torch.tensor([tokenizer("the old man", add_special_tokens=False)["input_ids"]])
    n = scores["a"].n_tokens
    with torch.no_grad():
        expected = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[-n:].sum()
    assert scores["a"].logprob == pytest.approx(float(expected), abs=1e-4)
    assert scores["a"].logprob != pytest.approx(always["a"].logprob, abs=1e-3)
    assert scores["b"].logprob == pytest.approx(always["b"].logprob, abs=1e-5)


def test_end_of_text_stands_in_for_bos(tokenizer):
    other = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<s>")
    assert Scorer(build(FAMILIES["gpt2"][0]), other).start_token.kind == "end of text"
    neither = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(InputError, match="neither a BOS nor an end-of-text"):
        Scorer(build(FAMILIES["gpt2"][0]), neither)


def test_longer_than_the_context_is_named_and_never_cut(tokenizer):
    scorer = Scorer(build(FAMILIES["llama"][0]), tokenizer)
    requests = [Request("short", "", "the man"), Request("long", "", " ".join(WORDS * 8))]
    with pytest.raises(InputError, match=r"1 of 2 requests are longer .* 64 tokens; the first is 'long'"):
        scorer.score(requests)
    told = []
    scores = scorer.score(requests, on_long="skip", progress=lambda done, total: told.append((done, total)))
    assert scores.too_long == ("long",)
    assert list(scores) == ["short"]
    assert told[-1] == (2, 2)


def test_encoders_are_refused_by_name(tokenizer):
    encoder = hf.BertConfig(**SMALL, vocab_size=VOCABULARY, max_position_embeddings=64)
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModel, match="BertModel"):
        Scorer(hf.BertModel(encoder), tokenizer)
    # It has an output layer, and only a trial shows that its tokens see those after them.
    with pytest.raises(UnsupportedModel, match="BertForMaskedLM lets tokens attend to later ones"):
        Scorer(hf.BertForMaskedLM(encoder).eval(), tokenizer)
    t5 = hf.T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration"):
        Scorer(hf.T5ForConditionalGeneration(t5), tokenizer)


def test_a_result_that_is_not_finite_names_the_request(tokenizer):
    model = build(FAMILIES["gpt2"][0])
    scorer = Scorer(model, tokenizer)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight.fill_(math.nan)
    with pytest.raises(InputError, match=r"request 'only': the log-probability of token 1 of .* is nan"):
        scorer.score([Request("only", "", "the man")])


def test_a_tokeniser_of_another_model_is_noticed(tokenizer):
    model = build(hf.GPT2Config(**{**GPT2, "vocab_size": 20}))
    with pytest.raises(InputError, match="the model has 20; is it this model's tokeniser"):
        Scorer(model, tokenizer).score([Request("a", "", "the old man was tired because of work")])


def test_nothing_to_score_and_twice_the_same_id(tokenizer):
    scorer = Scorer(build(FAMILIES["gpt2"][0]), tokenizer)
    with pytest.raises(InputError, match="'a': the continuation has no token"):
        scorer.score([Request("a", "the", "")])
    with pytest.raises(InputError, match="two requests have the id 'a'"):
        scorer.score([Request("a", "", "the"), Request("a", "", "man")])
    assert len(scorer.score([])) == 0


def test_bfloat16_is_near_and_the_model_is_left_as_it_was(tokenizer):
    model = build(FAMILIES["llama"][0], scale=1.0).train()
    requests = make_requests(10)
    exact = Scorer(model, tokenizer).score(requests)
    assert model.training
    assert not model.lm_head._forward_pre_hooks
    rounded = Scorer(model, tokenizer, dtype=torch.bfloat16).score(requests)
    for name, score in exact.items():
        assert rounded[name].logprob == pytest.approx(score.logprob, rel=0.02)


def test_a_killed_run_goes_on_where_it_stopped(tokenizer, tmp_path):
    scorer = Scorer(build(FAMILIES["gpt2"][0]), tokenizer, batch_tokens=60, row_tokens=20)
    requests, settings = make_requests(), scorer.settings()
    file = journal_path(tmp_path, "toy", settings)
    unbroken = journal_path(tmp_path / "unbroken", "toy", settings)
    with Journal(unbroken, settings) as journal:
        whole = scorer.score(requests, journal=journal)

    class Killed(Exception):
        pass

    def kill(done, total):
        if done >= total // 2:
            raise Killed

    with pytest.raises(Killed), Journal(file, settings) as journal:
        scorer.score(requests, journal=journal, progress=kill)
    written = file.read_text().splitlines()
    assert len(requests) // 2 < len(written) < len(requests)
    file.write_text("\n".join(written)[:-5])  # the last line is cut off
    told = []
    with Journal(file, settings) as journal:
        resumed = scorer.score(requests, journal=journal, progress=lambda done, total: told.append(done))
    assert told[0] == len(written) - 2  # all but the header and the cut-off line
    assert resumed == whole  # to the last bit: what is left is read in the same batches
    assert file.read_text() == unbroken.read_text()


def test_other_weights_are_other_settings(tokenizer, tmp_path):
    model = build(FAMILIES["gpt2"][0])
    before, settings = weights_digest(model), Scorer(model, tokenizer).settings()
    with torch.no_grad():
        model.transformer.h[1].attn.c_proj.weight[3, 3] += 1e-3
    assert weights_digest(model) != before
    other = Scorer(model, tokenizer).settings()
    assert journal_path(tmp_path, "toy", settings) != journal_path(tmp_path, "toy", other)
    with Journal(tmp_path / "scores.jsonl", settings):
        pass
    with (
        pytest.raises(InputError, match="its scores were made with weights"),
        Journal(tmp_path / "scores.jsonl", other),
    ):
        pass


def test_a_batch_that_is_too_large_for_the_device_is_read_in_halves(tokenizer, monkeypatch, caplog):
    scorer_module.say_once.cache_clear()
    model = build(FAMILIES["gpt2"][0])
    requests = [Request(str(i), "", f"the {word} said that he was {word}") for i, word in enumerate(WORDS)]
    expected = Scorer(model, tokenizer).score(requests)
    real, sizes = scorer_module.Planned.start, []

    def little_memory(batch):
        sizes.append(len(batch.rows))
        if len(batch.rows) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(batch)

    monkeypatch.setattr(scorer_module.Planned, "start", little_memory)
    most = 2
    found = Scorer(model, tokenizer, row_tokens=8).score(requests)
    assert max(sizes) > most
    assert {k: v.logprob for k, v in found.items()} == pytest.approx({k: v.logprob for k, v in expected.items()})
    assert "too little memory for a whole batch" in caplog.text
    most = 0  # not even for one row
    with pytest.raises(torch.OutOfMemoryError):
        Scorer(model, tokenizer, row_tokens=8).score(requests)
