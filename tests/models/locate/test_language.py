"""Heads of language models by their part in stereotype log-odds: made models with a known answer, and every family."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from made_language import (
    HEADS,
    LAYERS,
    PLANTED,
    llama,
    planted_llama,
    scorer,
    stereoset_items,
    text_pairs,
    tokenizer,
)
from made_language import pairs as made
from scipy import stats

from fairhead.data.sentences import CrowsPair
from fairhead.errors import InputError, UnsupportedModel
from fairhead.heads import tap
from fairhead.language.benchmarks import crows_pairs, stereoset
from fairhead.language.scorer import Scorer
from fairhead.locate.edits import TextEdits
from fairhead.locate.engine import locate
from fairhead.locate.head_maps import pair_cells, score
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.log_odds import encoded_texts, take_apart, whole
from fairhead.locate.pair_question import PairQuestion
from fairhead.locate.pair_rows import pairs_of
from fairhead.locate.passes import text_passes
from fairhead.report import render

QUICK = LocatePlan(n_boot=300)


def ask(model, pairs, terms, **options):
    return locate(PairQuestion(model, pairs, terms), replace(QUICK, **options))


@pytest.fixture(scope="module")
def planted():
    model = scorer(planted_llama())
    pairs = text_pairs()
    return model, pairs, take_apart(model, pairs)


@pytest.fixture(scope="module")
def located(planted):
    model, pairs, terms = planted
    return ask(model, pairs, terms, forward=True)


# Families by what is special about them: norms, biases, grouped queries, soft caps, parallel blocks, hooks.
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
VOCABULARY = {"vocab_size": 27, "max_position_embeddings": 64}
LLAMA = {**SMALL, **VOCABULARY, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "llama": hf.LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "qwen3": hf.Qwen3Config(**LLAMA),
    "gemma-2": hf.Gemma2Config(**LLAMA, sliding_window=64, query_pre_attn_scalar=8, final_logit_softcapping=3.0),
    "gpt2": hf.GPT2Config(vocab_size=27, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt-neox": hf.GPTNeoXConfig(**SMALL, **VOCABULARY),
    "gpt-neo": hf.GPTNeoConfig(
        vocab_size=27,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
        window_size=32,
    ),
    "opt": hf.OPTConfig(**VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=40,
                        word_embed_proj_dim=32),
    "bloom": hf.BloomConfig(vocab_size=27, hidden_size=32, n_layer=2, n_head=4),
    "granite": hf.GraniteConfig(**LLAMA, logits_scaling=4.0),
}  # fmt: skip


def random_model(config):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model.requires_grad_(False)


@pytest.mark.parametrize("family", FAMILIES)
def test_terms_sum_to_the_models_own_log_odds_in_every_family(family) -> None:
    model = scorer(random_model(FAMILIES[family]))
    for pairs in (text_pairs(n=6), pairs_of(stereoset_items(6))):
        found = take_apart(model, pairs)
        scores = model.score(list(pairs.texts))
        likely = np.array(
            [scores[t.id].per_token_mean if pairs.per_token else scores[t.id].logprob for t in pairs.texts]
        )
        own = likely.reshape(len(pairs), -1)
        np.testing.assert_allclose(found.log_odds, own[:, 0] - own[:, 1], atol=1e-4)
        np.testing.assert_allclose(sum(values for _, values in whole(found)), found.log_odds, atol=1e-4)
        assert np.abs(found.heads).max() > 1e-3, "heads must take part, or the sum shows nothing"


def test_what_no_term_owns_is_the_entropy() -> None:
    model = random_model(FAMILIES["gpt2"])
    pairs = text_pairs(n=3)
    reader = scorer(model)
    found = take_apart(reader, pairs)
    texts = encoded_texts(reader, pairs)
    expected = []
    for text in texts:
        logits = model(torch.tensor([text.tokens])).logits[0, text.scored_from - 1 : -1]
        expected.append(float(torch.distributions.Categorical(logits=logits).entropy().sum()))
    summed = np.array(expected).reshape(-1, 2)
    np.testing.assert_allclose(found.rest, summed[:, 1] - summed[:, 0], atol=1e-4)


def test_a_part_is_the_slope_of_the_log_odds_in_the_heads_own_term() -> None:
    """Against autograd through the model: the last layer's heads act on the logits directly, up to the final norm."""
    model = random_model(FAMILIES["gpt2"]).double()
    reader = scorer(model)
    pairs = text_pairs(n=2)
    found = take_apart(reader, pairs)
    head = 1
    texts = encoded_texts(reader, pairs)

    streams = []

    def log_odds(factor):
        values = []
        for text in texts:
            tokens = torch.tensor([text.tokens])
            hook = model.transformer.ln_f.register_forward_pre_hook(lambda module, args: streams.append(args[0]))
            with tap(model) as heads:
                reading = heads.read("contribution")
                model(tokens)
            hook.remove()
            stream = streams[-1]
            moved = stream + (factor - 1) * reading[0][:, :, head]  # what the head wrote, alone, grows
            norm = model.transformer.ln_f
            deviation = (stream.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
            centred = moved - moved.mean(-1, keepdim=True)
            logits = model.lm_head(centred / deviation * norm.weight + norm.bias)
            logs = logits.log_softmax(-1)[0, :-1]
            values.append(logs.gather(1, tokens[0, 1:, None])[text.scored_from - 1 :].sum())
        return torch.stack(values).reshape(-1, 2) @ torch.tensor([1.0, -1.0], dtype=torch.float64)

    step = 1e-4
    slope = (log_odds(1 + step) - log_odds(1 - step)) / (2 * step)
    np.testing.assert_allclose(found.heads[:, 0, head], slope.numpy(), atol=1e-5)


def test_a_constant_output_has_the_part_that_its_reader_says() -> None:
    model = random_model(FAMILIES["llama"])
    reader = scorer(model)
    pairs = text_pairs(n=4)
    plain = take_apart(reader, pairs)
    value = torch.randn(4, 8)
    with tap(model) as heads:  # the last layer, so that nothing after it answers but the final norm
        heads.mean([(1, 2)], {1: value})
        stuck = take_apart(reader, pairs)
    expected = np.einsum("nd,d->n", stuck.readers[:, 1, 2], value[2].numpy())
    np.testing.assert_allclose(stuck.heads[:, 1, 2], expected, atol=1e-4)
    assert np.abs(plain.heads[:, 1, 2] - expected).max() > 1e-3


def test_logits_that_are_made_in_unknown_ways_are_refused() -> None:
    class Odd(hf.GPT2LMHeadModel):
        def forward(self, *args, **kwargs):
            found = super().forward(*args, **kwargs)
            found.logits = found.logits**3
            return found

    torch.manual_seed(0)
    with pytest.raises(UnsupportedModel, match="does something to them that is not known"):
        take_apart(scorer(Odd(FAMILIES["gpt2"]).eval()), text_pairs(n=2))
    # Granite scales what its blocks add to the stream, which is not followed: it must be refused, not guessed.
    with pytest.raises(UnsupportedModel, match="add something to the stream that is not known"):
        take_apart(scorer(random_model(hf.GraniteConfig(**LLAMA, residual_multiplier=0.3))), text_pairs(n=2))


def test_the_planted_head_is_found_first_and_its_ablation_closes_the_gap(located) -> None:
    assert located.ranked[0] == PLANTED
    assert np.abs(located.head_map.value).argmax() == PLANTED[0] * HEADS + PLANTED[1]
    assert located.question.rows.poles == ("stereotype", "anti-stereotype")
    assert located.head_map.share[PLANTED] == pytest.approx(1, abs=0.1)
    for study in located.studies:
        change = study["log_odds"].change
        assert change.a == pytest.approx(located.head_map.total, rel=1e-4)
        # Forward, nothing else tells the groups apart: the gap is closed. To first order, nearly.
        bound = 1e-4 if (study.way, study.kind) in {("forward", "mean"), ("forward", "zero")} else 0.15 * change.a
        assert abs(change.b) < bound, (study.kind, study.way)
        assert change.high < 0
        assert change.p < 0.01
        assert study["log_odds"].percentile == 0
        assert min(study["log_odds"].controls) > -0.2, "random heads do not close it"
    assert located.studies[-1].way == "forward"


def test_half_of_an_edit_goes_half_of_the_way(planted) -> None:
    model, pairs, terms = planted
    question = PairQuestion(model, pairs, terms)
    for kind in ("mean", "zero"):
        (plain, whole), (_, half) = (question.direct(k, 0)([(), (PLANTED,)]) for k in (kind, f"{kind}@0.5"))
        before, after, between = (question.rows.evidence(read) for read in (plain, whole, half))
        np.testing.assert_allclose(between, (before + after) / 2)


def test_single_heads_by_forward_pass_find_it_too(planted) -> None:
    model, pairs, terms = planted
    found = ask(model, pairs, terms, rank="effect", forward=True, kinds=("mean",), count=1)
    assert found.ranked == (PLANTED,)
    assert found.effect_map.value[PLANTED] == pytest.approx(found.effect_map.total, abs=1e-4)
    others = np.delete(found.effect_map.value.ravel(), PLANTED[0] * HEADS + PLANTED[1])
    assert np.abs(others).max() < 0.1 * found.effect_map.total


def test_a_model_that_prefers_the_other_side_is_seen_from_there(planted) -> None:
    model, _, _ = planted
    turned = pairs_of([replace(pair, more=pair.less, less=pair.more) for pair in made()])
    found = ask(model, turned, take_apart(model, turned), kinds=("zero",))
    assert found.question.rows.poles == ("anti-stereotype", "stereotype")
    assert found.ranked[0] == PLANTED
    assert found.studies[0]["ss"].change.a == 1.0


def test_a_null_model_gives_uniform_p_values() -> None:
    """Which text is called the stereotype is drawn at random: no head can have a part in that."""
    model = scorer(llama(noise=0.3))
    terms = take_apart(model, text_pairs(n=120))
    rng, alike = np.random.default_rng(1), pair_cells(np.ones(len(terms)))
    p = []
    for _ in range(400):
        sign = rng.choice([-1.0, 1.0], len(terms))
        found = score(sign[:, None, None] * terms.heads, sign * terms.log_odds, alike)
        p.append(found.p.ravel()[rng.integers(LAYERS * HEADS)])  # heads of one draw are not independent
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert np.mean(np.array(p) < 0.05) < 0.09


def test_a_null_model_has_no_head_chosen() -> None:
    model = scorer(llama(noise=0.3))
    pairs = text_pairs(n=80, swapped=True)
    found = ask(model, pairs, take_apart(model, pairs))
    assert found.ranked == ()
    assert "No head contributes significantly" in found.verdict()[0].text
    render(found.page())


@pytest.mark.parametrize("kind", ["zero", "mean", "resample"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma-2", "gpt-neox", "opt", "gpt-neo", "bloom"])
def test_passes_that_start_late_equal_whole_ones(family, kind) -> None:
    model = scorer(random_model(FAMILIES[family]))
    pairs = text_pairs(n=8)
    texts = encoded_texts(model, pairs)
    edits = TextEdits.learn_texts(model, texts, bank=16)
    sets = [(), ((1, 0),), ((0, 1), (1, 3)), ((1, 2), (1, 3))]
    found = text_passes(model, texts, edits, kind)(sets)
    for heads, values in zip(sets, found, strict=True):
        with tap(model.model) as open_tap:
            if heads:
                edits.apply(open_tap, heads, kind)
            whole_pass = [v.sum() for v in model.score_tokens(texts, [str(i) for i in range(len(texts))])]
        np.testing.assert_allclose(values, whole_pass, atol=1e-5)
        assert not heads or np.abs(values - found[0]).max() > 1e-4


def test_means_are_over_every_token_but_the_start() -> None:
    model = random_model(FAMILIES["gpt2"])
    reader = scorer(model)
    texts = encoded_texts(reader, text_pairs(n=1))
    edits = TextEdits.learn_texts(reader, texts)
    seen = []
    distinct = {tuple(text.tokens[: i + 1]) for text in texts for i in range(len(text.tokens))} - {(0,)}
    for beginning in distinct:  # what texts share is counted once
        with tap(model) as heads:
            reading = heads.read("output", tokens=-1)
            model(torch.tensor([beginning]))
        seen.append(reading.stack()[:, 0].numpy())
    np.testing.assert_allclose(edits.means, np.mean(seen, 0), atol=1e-5)
    assert edits.n == len(distinct)


def test_figures_are_those_of_the_benchmarks() -> None:
    model = scorer(random_model(FAMILIES["llama"]))
    for pairs, benchmark, raw in (
        (text_pairs(n=30), crows_pairs, None),
        (pairs_of(stereoset_items(terms=12)), stereoset, stereoset_items(terms=12)),
    ):
        scores = model.score(list(pairs.texts))
        logprobs = np.array([scores[t.id].logprob for t in pairs.texts])
        tokens = np.array([scores[t.id].n_tokens for t in pairs.texts])
        found = {name: values[0] for name, values in pairs.figures([pairs.read(logprobs, tokens)]).items()}
        result = benchmark.BENCHMARK.result(benchmark.table(raw or made(n=30), scores))
        # Of a few terms a benchmark gives no figure, and keeps its value beside the reason.
        of = {e.metric: e.detail.get("value", e.value) for e in result.estimates if e.group_by is None}
        assert float(found["ss"]) == pytest.approx(of["ss"])
        assert float(found["nll"]) == pytest.approx(-logprobs.sum() / tokens.sum())
        if benchmark is stereoset:
            assert float(found["lms"]) == pytest.approx(of["lms"])
        else:
            assert float(found["log_odds_size"]) == pytest.approx(of["mean_abs_difference"])


def test_stopped_runs_go_on_and_other_models_have_terms_of_their_own(planted, tmp_path, monkeypatch) -> None:
    model, pairs, terms = planted
    monkeypatch.setattr("fairhead.train.features._EVERY", 0.0)
    monkeypatch.setattr("fairhead.locate.log_odds._BLOCK", 50)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take_apart(model, pairs, folder=tmp_path, progress=stop)
    told = []
    for _ in range(2):  # it goes on, and then has all of them
        found = take_apart(model, pairs, folder=tmp_path, progress=lambda done, total: told.append(done))
        np.testing.assert_allclose(found.heads, terms.heads, atol=1e-5)
        np.testing.assert_allclose(found.log_odds, terms.log_odds, atol=1e-5)
    assert told == [100, 120]
    other = scorer(llama())
    np.testing.assert_allclose(
        take_apart(other, pairs, folder=tmp_path).log_odds, take_apart(other, pairs).log_odds, atol=1e-5
    )


def test_json_and_report_hold_what_was_found(located) -> None:
    content = replace(located, provenance={"model": "made"}).to_dict()
    json.dumps(content, allow_nan=False)
    assert content["selected"][0] == list(PLANTED)
    assert content["gap"]["unit"] == "nats"
    assert {part["value"] for part in content["by_category"]} >= {"gender", "stereo", "antistereo"}
    page = render(replace(located, provenance={"model": "made"}).page())
    assert "L1H2" in page
    assert "Mean log-odds, in nats" in page
    assert sum(content["log_odds_by_term"].values()) == pytest.approx(content["gap"]["total"], abs=1e-3)


def test_texts_longer_than_the_context_are_named() -> None:
    config = copy.deepcopy(FAMILIES["gpt2"])
    config.n_positions = 8
    pairs = pairs_of([CrowsPair("0", "the women are kind " * 3, "the men are kind", "stereo", "gender", ())])
    with pytest.raises(InputError, match="'0/more' has 13 tokens, the model reads 8"):
        encoded_texts(Scorer(hf.GPT2LMHeadModel(config).eval(), tokenizer()), pairs)
