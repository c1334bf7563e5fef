"""KLAAD and the attention gap on SmolLM2 and published sentences: a few steps, a few pairs."""

import pytest
import torch

from fairhead.language import load_scorer
from fairhead.language.attention_reading import read_gaps
from fairhead.language.benchmarks.attention_gap import BENCHMARK, EQUAL, Options, sentence_pairs, study, table
from fairhead.language.benchmarks.crows_pairs import read_crows_pairs
from fairhead.mitigate.klaad import KLAAD
from fairhead.mitigate.language_trainer import LanguageTrainer
from fairhead.mitigate.triplets import TripletData, targets
from fairhead.models import open_model
from fairhead.stats.bootstrap import Resampling
from fairhead.train import LanguagePlan


def early(items, n):
    """Short sentences that go on after the words that differ: those are where attention can differ at all."""
    found = [one for one in items if one.kind == "intrasentence" and one.context.find("BLANK") < 12]
    return tuple(sorted(found, key=lambda one: len(one.context))[20 : 20 + n])


@pytest.mark.slow
def test_a_few_steps_lower_the_divergence_of_attention_on_terms_held_out_too(real_data, real_model):
    loaded = open_model(real_model("smollm2-135m"), "causal", device="cpu", dtype="float32")
    model, tokenizer = loaded.model, loaded.tokenizer
    split = TripletData(f"stereoset:{real_data('stereoset')}").read()
    chosen = split._replace(train=early(split.train, 32), held_out=early(split.held_out, 12))
    assert not set(targets(chosen.train)) & set(targets(chosen.held_out))
    only = KLAAD(ce_weight=0, kl_weight=1, triplet_weight=0)
    run = LanguageTrainer(model, tokenizer, only, LanguagePlan(epochs=2, batch_size=8, learning_rate=3e-5, warmup=0))
    before = run.evaluate(chosen.train)
    run.train(chosen)
    assert run.evaluate(chosen.train)["kl"] < 0.5 * before["kl"]
    held_out = run.record.results["held_out"]
    assert held_out["after"]["kl"] < 0.85 * held_out["before"]["kl"]
    assert torch.isfinite(next(model.parameters())).all()


def test_no_target_of_stereoset_is_in_both_parts(real_data):
    split = TripletData(f"stereoset:{real_data('stereoset')}").read()
    assert len(split.train) + len(split.held_out) == 4229
    assert abs(len(split.held_out) / 4229 - 0.1) < 0.02
    assert not set(targets(split.train)) & set(targets(split.held_out))


def test_attention_parts_ways_on_the_words_that_differ_more_often_than_by_chance(real_data, real_model):
    scorer = load_scorer(real_model("tinystories-15m"), device="cpu", dtype="float32")
    pairs = sentence_pairs(read_crows_pairs(real_data("crows_pairs")))[:120]
    gaps = read_gaps(scorer, pairs)
    how = Resampling(n_boot=200)
    gap = BENCHMARK.result(table(gaps), how)
    assert gap["above_chance"].low > 0
    assert gap["above_chance", EQUAL].n > 30
    tests = study(gaps, Options(), how)["tests"]
    assert tests["above_chance"]["p"] < 1e-6
    assert tests["gap_difference"]["p_permutation"] < 0.01


def test_pairs_of_bbq_swap_people_and_keep_templates_apart(real_data):
    train, held_out = TripletData(f"bbq:{real_data('bbq')}", held_out=0.2).read()
    assert len(train) + len(held_out) == 1231
    assert not set(targets(train)) & set(targets(held_out))
    planted = next(i for i in (*train, *held_out) if i.target == "Religion/1" and "Jewish" in i.sentences.stereotype)
    assert "the Muslim person confessed" in planted.sentences.stereotype
    assert "the Jewish person confessed" in planted.sentences.anti_stereotype
