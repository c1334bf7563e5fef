"""Balance for pairs: its loss against one computed in the plainest way, what training does, and when it stops."""

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from language_models import FAMILIES, ITEMS, build, saved, tokenizer
from safetensors.torch import load_file
from torch import nn
from transformers import GradientCheckpointingLayer

from fairhead.cli import main
from fairhead.data.sentences import CrowsPair, StereoSetItem, Triplet, TripletSplit
from fairhead.errors import InputError
from fairhead.language.generation import write_after
from fairhead.language.loading import training_memory
from fairhead.language.packing import TokenSequence
from fairhead.language.row_layout import final_states
from fairhead.language.running import TrainingRecord
from fairhead.language.scorer import Scorer
from fairhead.mitigate.balance_pairs import BalanceControl, BalancePairs, read_neutral
from fairhead.mitigate.klaad import KLAAD
from fairhead.mitigate.language_result import card_of
from fairhead.mitigate.language_trainer import LanguageTrainer, train_folder
from fairhead.mitigate.sentence_losses import BiasUnlearn, looker
from fairhead.mitigate.triplets import TripletData, triplets_of
from fairhead.train import LanguagePlan
from fairhead.train.loop import Loop
from fairhead.train.tuning import Look, Score, checkpointed, merged, tune

NEUTRAL = [
    f"the {who} went home {when} ."
    for who in ("poet", "pilot", "old baker")
    for when in ("late", "so", "cold", "often")
]

OWN = ["the old poet went home cold .", "the baker went so often ."]  # as if a model had written them


def own_tokens():
    return [TokenSequence((0, *tokenizer()(text)["input_ids"]), 2) for text in OWN]


@pytest.fixture
def neutral(tmp_path):
    file = tmp_path / "neutral.txt"
    file.write_text("\n\n".join(NEUTRAL))
    return str(file)


def perturbed(family):
    """Another model of the same family: what the first one has become."""
    model = build(family)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * weight.std() * torch.randn_like(weight)) if weight.numel() > 1 else None
    return model


def read_alone(model, text):
    """Log-softmax of every position of one text that is read by itself, and its tokens."""
    ids = torch.tensor([[0, *tokenizer()(text)["input_ids"]]])
    return model(input_ids=ids).logits[0, :-1].double().log_softmax(-1), ids[0, 1:]


def huber(x, width):
    return x * x / 2 if abs(x) <= width else width * (abs(x) - width / 2)


def plainly(items, texts, own, before, now, config):
    """The loss, sentence by sentence."""

    def logprob(model, text):
        table, tokens = read_alone(model, text)
        return float(table.gather(1, tokens[:, None]).sum())

    gaps = [
        [logprob(m, i.texts.stereotype) - logprob(m, i.texts.anti_stereotype) for i in items] for m in (now, before)
    ]
    levels = [
        [(logprob(m, i.texts.stereotype) + logprob(m, i.texts.anti_stereotype)) / 2 for i in items]
        for m in (now, before)
    ]
    mean = sum(gaps[1]) / len(items)
    taken = {
        "batch": [mean] * len(items),
        "all": [mean] * len(items),
        "each": gaps[1],
        "category": [
            sum(g for g, j in zip(gaps[1], items, strict=True) if j.bias_type == i.bias_type)
            / sum(j.bias_type == i.bias_type for j in items)
            for i in items
        ],
    }[config.mean_over]
    times = 1 if config.mean_over == "each" else config.strength or 1
    shift = sum(huber(g - (b - times * m), config.width) for g, b, m in zip(*gaps, taken, strict=True)) / len(items)
    level = sum(huber(a - b, config.width) for a, b in zip(*levels, strict=True)) / len(items)

    def moved(texts):
        kl = []
        for text in texts:
            old, new = (read_alone(m, text)[0] for m in (before, now))
            kl += (old.exp() * (old - new)).sum(-1).tolist()
        return sum(kl) / len(kl)

    keep, written = moved([*(i.texts.unrelated for i in items), *texts]), moved(own)
    return {"shift": shift, "level": level, "keep": keep, "written": written} | {
        "loss": shift + config.level_weight * level + config.keep_weight * keep + config.own_weight * written
    }


def of_two_categories():
    return [StereoSetItem(**{**vars(i), "bias_type": ("race", "gender")[k % 2]}) for k, i in enumerate(ITEMS)]


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("mean_over", ["batch", "category", "each"])
def test_the_loss_is_what_it_says(family, mean_over, neutral):
    weights = {"level_weight": 0.7, "keep_weight": 3.0, "own_weight": 2.0}
    config = BalancePairs(neutral, mean_over, strength=1.5, width=0.5, **weights)
    items, before, now = of_two_categories(), build(family), perturbed(family)
    prepared = config.prepare(items, tokenizer(), 32, own_tokens())
    texts, own = ([tokenizer().decode(example.sentences[k][1:]) for example in prepared.examples] for k in (3, 4))
    assert {*own} == {*OWN}
    examples = config.refer(before, prepared).examples
    with torch.no_grad(), config.session(before) as loss:
        assert float(loss(examples)["keep"]) == pytest.approx(0, abs=1e-5)
        assert float(loss(examples)["level"]) == pytest.approx(0, abs=1e-5)
        # The model has changed since: its weights, the output layer's among them.
        before.load_state_dict(now.state_dict())
        found = {name: float(part) for name, part in loss(examples).items()}
    with torch.no_grad():
        expected = plainly(items, texts, own, build(family), now, config)
    assert found == pytest.approx(expected, rel=2e-4, abs=1e-5)


def test_gradients_are_those_of_the_plain_loss(neutral):
    config, now = BalancePairs(neutral), perturbed("llama")
    prepared = config.refer(build("llama"), config.prepare(ITEMS, tokenizer(), 32))
    with config.session(build("llama")) as loss:
        pass
    model = build("llama")
    with config.session(model) as loss:
        model.load_state_dict(now.state_dict())
        loss(prepared.examples)["loss"].backward()
    reference = perturbed("llama")
    texts = [tokenizer().decode(example.sentences[3][1:]) for example in prepared.examples]
    _tensor_loss(ITEMS, texts, build("llama"), reference, config).backward()
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert found.grad.numpy() == pytest.approx(expected.grad.numpy(), rel=1e-2, abs=1e-4), name


def _tensor_loss(items, texts, before, now, config):
    def logprob(model, text):
        table, tokens = read_alone(model, text)
        return table.gather(1, tokens[:, None]).sum()

    sides = [[logprob(m, text) for i in items for text in i.texts[:2]] for m in (now, before)]
    new, old = torch.stack(sides[0]).view(-1, 2), torch.stack(sides[1]).view(-1, 2).detach()
    gap, gap_before = new[:, 0] - new[:, 1], old[:, 0] - old[:, 1]
    huber = nn.HuberLoss(delta=config.width)
    kl = []
    for text in [*(i.texts.unrelated for i in items), *texts]:
        a, b = read_alone(before, text)[0].detach(), read_alone(now, text)[0]
        kl.append((a.exp() * (a - b)).sum(-1))
    shift = huber(gap, gap_before - gap_before.mean())
    return shift + config.level_weight * huber(new.mean(1), old.mean(1)) + config.keep_weight * torch.cat(kl).mean()


def test_the_control_is_cross_entropy_on_the_same_sentences_in_the_same_batches(neutral):
    model, control = build("llama"), BalanceControl(neutral)
    prepared = control.prepare(ITEMS, tokenizer(), 32, own_tokens())
    assert prepared.lengths == BalancePairs(neutral).prepare(ITEMS, tokenizer(), 32, own_tokens()).lengths
    texts = [text for i in ITEMS for text in i.texts[:2]]
    texts += [tokenizer().decode(example.sentences[k][1:]) for example in prepared.examples for k in (3, 4)]
    with torch.no_grad(), control.session(model) as loss:
        found = [read_alone(model, text) for text in texts]
        tokens = torch.cat([table.gather(1, ids[:, None]) for table, ids in found])
        assert float(loss(prepared.examples)["loss"]) == pytest.approx(-float(tokens.mean()), rel=1e-5)


@pytest.mark.parametrize("lora", [None, 4])
def test_training_shifts_the_mean_and_keeps_the_spread(lora, neutral):
    model = build("llama", scale=2.0)
    rate = 2e-3 if lora is None else 2e-2
    plan = LanguagePlan(40, 4, rate, lora=lora)
    trainer = LanguageTrainer(model, tokenizer(), BalancePairs(neutral, strength=1), plan)
    before = trainer.evaluate(ITEMS)
    spread = _gaps(model)
    history = trainer.train(TripletSplit(ITEMS, ())).history
    after = trainer.evaluate(ITEMS)
    assert history[0]["keep"] == pytest.approx(0, abs=1e-5)
    assert history[0]["level"] == pytest.approx(0, abs=1e-5)
    assert abs(after["gap"]) < 0.3 * abs(before["gap"])
    assert abs(after["unrelated"] - before["unrelated"]) < 0.1
    moved = _gaps(trainer.model)
    assert (moved - moved.mean()).numpy() == pytest.approx(
        (spread - spread.mean()).numpy(), abs=0.3 if lora is None else 1
    )


@pytest.mark.parametrize("method", [BalancePairs(), BalanceControl()])
def test_a_model_is_held_to_what_it_wrote_itself(method, monkeypatch):
    seen, told = [], []
    prepare = type(method).prepare

    def watch(self, items, tokenizer, context, own=()):
        seen.append(own)
        return prepare(self, items, tokenizer, context, own)

    monkeypatch.setattr(type(method), "prepare", watch)

    def trained(config):
        trainer = LanguageTrainer(build("llama"), tokenizer(), config, LanguagePlan(1, 4, 1e-3))
        tuned = trainer.train(TripletSplit(ITEMS, ()), on_written=lambda done, total, parts: told.append((done, total)))
        return tuned.history[0], trainer.record.results

    _, results = trained(method)
    assert told == [(len(ITEMS), len(ITEMS))]  # one each, at most 512
    assert results["own_texts"] == len(seen[0]) <= len(ITEMS)
    first = {tokenizer()(item.texts.unrelated)["input_ids"][0] for item in ITEMS}
    assert {text.tokens[:1] for text in seen[0]} == {(0,)}
    assert {text.tokens[1] for text in seen[0]} <= first
    assert {text.scored_from for text in seen[0]} == {2}
    trained(method)
    assert seen[0] == seen[1]  # a run that goes on has the same texts
    history, results = trained(BalancePairs(own_weight=0))
    assert "written" not in history
    assert "own_texts" not in results


def test_texts_are_drawn_from_the_model_token_by_token():
    """How often tokens follow is as the model has it."""
    model = build("llama", scale=2.0)
    scorer, texts = Scorer(model, tokenizer()), ["the poet went home ."]
    (begun, *_), found = scorer.start_token.lead, write_after(Scorer(model, tokenizer()), texts, 3000, 1)
    second = tokenizer()(texts[0])["input_ids"][0]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[begun, second]])).logits[0, -1].softmax(-1).numpy()
    drawn = np.bincount([text.tokens[2] for text in found], minlength=len(expected))
    assert {text.tokens[:2] for text in found} == {(begun, second)}
    ends = {tokenizer().eos_token_id}  # a text that ends at once is none
    expected = np.array([0 if k in ends else p for k, p in enumerate(expected)])
    assert drawn / len(found) == pytest.approx(expected / expected.sum(), abs=0.04)
    assert write_after(scorer, texts, 8, 4, seed=1) != write_after(scorer, texts, 8, 4)


@pytest.mark.parametrize("window", [12, 20, 28])
def test_trees_that_are_too_long_for_a_window_are_read_in_rows(window, neutral):
    """In batches of other examples than those in which the model was asked before training."""
    config = copy.deepcopy(FAMILIES["gpt-neo"])
    config.window_size = window
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    config = BalancePairs(neutral)
    examples = config.refer(model, config.prepare(ITEMS, tokenizer(), 32, own_tokens())).examples
    with torch.no_grad(), config.session(model) as loss:
        for example in examples:
            found = loss([example])
            assert float(found["keep"]) == pytest.approx(0, abs=1e-5)
            assert float(found["written"]) == pytest.approx(0, abs=1e-5)


def test_pairs_without_neutral_text_are_trained_beside_texts_of_the_models_own():
    pairs = triplets_of(
        [CrowsPair(str(i), f"she {w} .", f"he {w} .", "s", "g", ()) for i, w in enumerate(("slept", "ran"))]
    )
    for example in BalancePairs().prepare(pairs, tokenizer(), 32, own_tokens()).examples:
        assert {tokenizer().decode(sentence[1:]) for sentence in example.sentences[2:]} == {*OWN}
    for example in BalancePairs().prepare(pairs, tokenizer(), 32).examples:  # a model that cannot write
        assert len(example.sentences) == 3


def _gaps(model):
    with torch.no_grad():
        tables = [[read_alone(model, text) for text in i.texts[:2]] for i in ITEMS]
    sums = [[float(table.gather(1, ids[:, None]).sum()) for table, ids in pair] for pair in tables]
    return torch.tensor([s - a for s, a in sums])


def test_an_example_without_reference_is_refused(neutral):
    prepared = BalancePairs(neutral).prepare(ITEMS, tokenizer(), 32)
    with BalancePairs(neutral).session(build("llama")) as loss, pytest.raises(InputError, match="refer first"):
        loss(prepared.examples)


def stopped(looks, checks=4, rise=0.01, examples=8, heard=None):
    """Train one number upwards by one a step, with these looks at it; where it is left.

    What the loss hears of the looks is added to `heard`.
    """
    weight = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(weight.weight)
    plan = LanguagePlan(
        1, 1, 1.0, schedule="constant", warmup=0, max_grad_norm=None, checks=checks, perplexity_rise=rise
    )
    seen = iter(looks)

    def loss(batch):
        return {"loss": -weight(torch.tensor(batch)).mean()}

    if heard is not None:
        loss.see = heard.append
    tuned = tune(
        weight,
        [[1.0]] * examples,
        [1] * examples,
        loss,
        plan,
        look=lambda: Look(*next(seen)),
    )
    return tuned, float(weight.weight.detach())


def test_the_last_weights_that_cost_nothing_are_kept():
    tuned, weight = stopped([(0.64, 10.0), (0.51, 10.05), (0.6, 10.0), (0.55, 10.2), (0.33, 10.0)])
    assert (tuned.chosen, tuned.steps) == (4, 8)  # 0.55 costs 2 % of perplexity, 0.33 is further from even than 0.64
    assert weight == pytest.approx(4, rel=0.01)
    assert tuned.history[3]["ss"] == 0.6
    assert "ss" not in tuned.history[0]


def test_training_ends_once_even_is_reached_and_no_cost_is_paid_for_nothing():
    tuned, weight = stopped([(0.64, 10.0), (0.49, 10.0), (0.5, 10.0), (0.4, 10.0)])
    assert (tuned.chosen, tuned.steps, len(tuned.history)) == (4, 4, 4)
    assert weight == pytest.approx(4, rel=0.01)
    # One look may be low by chance.
    assert stopped([(0.64, 10.0), (0.49, 10.0), (0.51, 10.0), (0.49, 10.0), (0.52, 10.0)])[0].steps == 8
    # Nothing was gained within the bound: the model is as it was.
    tuned, weight = stopped([(0.6, 10.0), *[(0.55, 11.0)] * 4])
    assert (tuned.chosen, weight) == (0, 0)
    assert tuned.looks[0] == Look(0.6, 10.0)


def test_a_score_that_is_even_but_for_chance_ends_no_training():
    """As that of few terms: 47 %, 48 % and 51 % may all be of a model that is as it was."""
    noisy = [(0.53, 10.0, 0.08), (0.47, 10.0, 0.08), (0.48, 10.0, 0.08), (0.54, 10.0, 0.08), (0.46, 10.0, 0.08)]
    tuned, _ = stopped(noisy)
    assert (tuned.chosen, tuned.steps) == (8, 8)
    # What is further from even than chance explains is not kept, and perplexity counts as ever.
    assert stopped([*noisy[:3], (0.41, 10.0), (0.46, 10.5)])[0].chosen == 4
    # A score that is clearly off even is what it was.
    assert stopped([(0.64, 10.0, 0.08), (0.49, 10.0), (0.5, 10.0), (0.4, 10.0)])[0].steps == 4


def test_weights_that_lean_as_far_the_other_way_are_not_kept():
    """As of 300 own pairs of one job and another: 85 % of the watched ones before training, 15 % after."""
    turned = [(0.85, 10.0, 0.13), (0.52, 10.0), (0.0, 10.0), (0.15, 10.0)]
    assert stopped(turned)[0].chosen == 2
    assert stopped([turned[0], (0.52, 10.0), (0.2, 10.0), (0.38, 10.0)])[0].chosen == 6  # 12 points: it may be chance
    assert stopped([turned[0], *turned[2:]])[0].chosen == 0
    # The same for one that is below even before.
    assert stopped([(0.15, 10.0, 0.13), (0.48, 10.0), (1.0, 10.0), (0.85, 10.0)])[0].chosen == 2
    # That few terms may be off by more than half does not excuse it, and all of a change may be by chance.
    few = (1.0, 10.0, 0.52)
    assert stopped([few, (1.0, 10.0), (0.0, 10.0), (0.0, 10.0), (0.0, 10.0)])[0].chosen == 2
    assert stopped([few, (1.0, 10.0), (0.4, 10.0), (0.2, 10.0), (0.0, 10.0)])[0].chosen == 6
    near = (0.53, 10.0, 0.08)
    assert stopped([near, (0.52, 10.0), (0.52, 10.0), (0.46, 10.0), (0.44, 10.0)])[0].chosen == 6


def test_weights_that_forget_the_models_own_language_are_not_kept():
    """As of a model of stories, whose perplexity on news falls from 2342 to 1638 while that on its stories rises."""
    looks = [(0.64, 10.0, 0.0, (), 2.0), *((0.6, 9.0 - k, 0.0, (), own) for k, own in enumerate((2.1, 2.3, 2.19, 2.4)))]
    tuned, _ = stopped(looks)
    assert tuned.chosen == 6
    assert [tuned.looks[step].own for step in (0, 4)] == [2.0, 2.3]


def test_a_model_that_forgets_its_language_goes_back_and_learns_more_slowly():
    """Two steps of 1, two taken back, two of a half, two taken back."""
    heard, owns = [], (2.0, 2.1, 2.3, 2.1, 2.4)
    tuned, weight = stopped([Look(0.64, 10.0, own=own) for own in owns], heard=heard)
    assert (tuned.chosen, tuned.taken_back) == (6, 2)
    assert weight == pytest.approx(3, rel=0.01)
    assert [look.own for look in heard] == [2.0, 2.1, 2.1]  # what was taken back steers nothing
    # The perplexity of neutral text, which comes and goes, takes nothing back.
    tuned, weight = stopped([(0.64, 10.0), (0.6, 11.0), (0.6, 10.0), (0.6, 11.0), (0.6, 10.0)])
    assert (tuned.chosen, tuned.taken_back) == (8, 0)
    assert weight == pytest.approx(8, rel=0.01)


def test_what_was_taken_back_ends_no_training():
    looks = [(0.64, 2.0), (0.45, 2.4), (0.48, 2.4), (0.52, 2.1), (0.51, 2.1)]
    tuned, _ = stopped([Look(ss, 10.0, own=own) for ss, own in looks])
    assert (tuned.chosen, tuned.steps, tuned.taken_back) == (8, 8, 2)


def test_checks_see_what_becomes_of_the_models_own_language():
    model = build("llama", scale=2.0)
    look = looker(model, tokenizer(), ITEMS, [])
    before = look()
    assert 1 < before.own < before.perplexity  # what it writes it finds likelier than what others write
    teach = [[0, *tokenizer()(item.texts.unrelated)["input_ids"]] for item in ITEMS]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for ids in map(torch.tensor, teach * 5):
        model(input_ids=ids[None], labels=ids[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = look()
    assert after.perplexity < before.perplexity
    assert after.own > 1.1 * before.own


def test_watched_terms_are_neither_trained_on_nor_scored_later(neutral):
    items = tuple(
        StereoSetItem(f"{k}", "intrasentence", f"term{k}", "race", "", Triplet(*ITEMS[k % 4].texts)) for k in range(12)
    )
    plan = LanguagePlan(1, 4, 1e-3, checks=2, watched=0.25)
    trainer = LanguageTrainer(build("llama"), tokenizer(), BalancePairs(neutral), plan)
    tuned = trainer.train(TripletSplit(items, ()))
    done = trainer.record.results
    assert (done["items"], done["watched"]["items"]) == (9, 3)
    assert len(trainer.record.training_targets) == 12
    assert done["watched"]["chosen"] == tuned.chosen
    with pytest.raises(InputError, match="give more terms"):
        LanguageTrainer(build("llama"), tokenizer(), BalancePairs(neutral), plan).train(TripletSplit(items[:1], ()))


def test_neutral_text_is_read_from_texts_and_files(neutral, tmp_path):
    found = read_neutral(neutral)
    assert {*found.trained, *found.watched} == set(NEUTRAL)
    assert len(found.watched) == 1
    lines = [
        {"gold_label": "neutral", "sentence1": f"Premise {i % 15}.", "sentence2": f"H {i}.", "pairID": f"{i}n"}
        for i in range(30)
    ]
    (tmp_path / "multinli_1.0_dev_matched.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert "Premise 3." in [
        *read_neutral(f"multinli:{tmp_path}").trained,
        *read_neutral(f"multinli:{tmp_path}").watched,
    ]
    with pytest.raises(InputError, match="is not there"):
        BalancePairs("nowhere.txt").check()


def test_own_pairs_are_balanced_by_the_command(tmp_path, neutral, capsys):
    saved(tmp_path / "model")
    rows = [
        f"the {w} {v} was kind .,the {w} {v} was rude .,age"
        for w in ("nurse", "baker", "poet")
        for v in ("often", "never", "so")
    ]
    (tmp_path / "own.csv").write_text("\n".join(["more,less,category", *rows]))
    out = tmp_path / "balanced"
    arguments = ["--model", str(tmp_path / "model"), "--data", f"pairs:{tmp_path / 'own.csv'}", "--neutral", neutral]
    arguments += ["--mean-over", "category", "--watched", "0.3", "--checks", "2", "--device", "cpu", "--lr", "1e-3"]
    main(["mitigate", "balance_pairs", *arguments, "--out", str(out)])
    said = " ".join(capsys.readouterr().out.split())
    assert "watched items the stereotype score (of the source or category most clearly off even) went" in said
    record = json.loads((out / "fairhead-training.json").read_text())
    assert record["plan"]["checks"] == 2
    assert math.isfinite(record["results"]["held_out"]["after"].get("gap", 0.0))
    read = TrainingRecord.read(out)
    for after, said in ((0.4, "from 80.0 to 40.0 %, past 50 %, and"), (0.5, "from 80.0 to 50.0 % and")):
        looks = {when: {"ss": ss, "perplexity": 10.0} for when, ss in (("before", 0.8), ("after", after))}
        kept = replace(read, results={**read.results, "watched": {"items": 3, "chosen": 2, **looks}})
        assert said in card_of(kept, None).done
    # Few terms: how much of the change chance explains stands beside it.
    watched = {"items": 3, "chosen": 2, "before": {"ss": 0.8, "perplexity": 10.0}}
    for after, chance, said in (
        (0.6, 0.3, "from 80.0 to 60.0 % (95 % interval before: 50.0 to 100.0 %; the score after is within it) and"),
        (0.6, 0.1, "from 80.0 to 60.0 % (95 % interval before: 70.0 to 90.0 %) and"),
        (
            0.4,
            0.5,
            "from 80.0 to 40.0 % (95 % interval before: 30.0 to 100.0 %; the score after is within it), past 50 %, and",
        ),
    ):
        looks = {"chance": chance, "after": {"ss": after, "perplexity": 10.0}}
        kept = replace(read, results={**read.results, "watched": watched | looks})
        assert said in card_of(kept, None).done
    assert record["results"]["watched"]["chance"] > 0
    for strengths, said in (({"": 2.31}, "check: 2.3."), ({"a": 2.31, "b": 0.0}, "check: 2.3 for a, 0.0 for b.")):
        kept = replace(read, results={**read.results, "strengths": strengths})
        assert f"strength after the last {said}" in card_of(kept, None).done + "."


@pytest.mark.parametrize("family", ["llama", "gpt-2"])
@pytest.mark.parametrize("method", [BalancePairs(), KLAAD(), BiasUnlearn()])
def test_gradient_checkpointing_gives_the_same_gradients(method, family, monkeypatch):
    found, computed = [], []
    kind = next(part for part in build(family).modules() if isinstance(part, GradientCheckpointingLayer)).__class__
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *given, **more: (computed.append(1), forward(*given, **more))[1])
    for checkpointing in (False, True):
        model = build(family).eval()
        for part in model.modules():  # dropout that were not off would tell the two apart
            if isinstance(part, nn.Dropout):
                part.p = 0.5
        prepared = method.prepare(ITEMS, tokenizer(), 64)
        prepared = method.refer(model, prepared) if hasattr(method, "refer") else prepared
        plan = LanguagePlan(gradient_checkpointing=checkpointing)
        with method.session(model) as loss, checkpointed(model, plan):
            computed.clear()
            loss(prepared.examples[:3])["loss"].backward()
        found.append(([weight.grad for weight in model.parameters()], len(computed)))
    (plain, once), (again, twice) = found
    assert twice > once
    for one, other in zip(plain, again, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_checkpointing_trains_the_same_model_in_bf16(neutral):
    weights = [torch.cat([weight.flatten() for weight in build("llama").parameters()])]
    for checkpointing in (False, True):
        plan = LanguagePlan(epochs=2, learning_rate=1e-3, precision="bf16", gradient_checkpointing=checkpointing)
        trainer = LanguageTrainer(build("llama"), tokenizer(), BalancePairs(neutral), plan)
        trainer.train(TripletSplit(tuple(ITEMS), ()))
        weights.append(torch.cat([weight.flatten() for weight in trainer.model.parameters()]))
    torch.testing.assert_close(weights[1], weights[2])
    assert float((weights[0] - weights[1]).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_of_training_is_near_what_autograd_holds(checkpointing):
    config = hf.LlamaConfig(
        hidden_size=64, intermediate_size=224, num_hidden_layers=24, num_attention_heads=4, vocab_size=500
    )
    model = hf.LlamaForCausalLM(config).eval()
    ids, held = torch.randint(0, 500, (4, 50)), {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    plan = LanguagePlan(gradient_checkpointing=checkpointing)
    with checkpointed(model, plan), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        final_states(model, {"input_ids": ids})
    said = training_memory(config, ids.numel(), checkpointing=checkpointing)
    one_layer = said.layers - 24 * 64 * ids.numel() * 4 if checkpointing else 0  # which the backward pass holds
    assert sum(held.values()) == pytest.approx(said.layers - one_layer, rel=0.25)
    assert said.weights == 4 * model.num_parameters()


def test_weights_under_lora_stay_in_bf16_and_its_step_is_not_lost(tmp_path):
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "pairs.csv").write_text(
        "more,less\n" + "\n".join(f"{t.sentences.stereotype},{t.sentences.anti_stereotype}" for t in ITEMS)
    )
    plan = LanguagePlan(lora=2, precision="bf16", learning_rate=1e-4, checkpoint_minutes=100)
    data = TripletData(f"pairs:{tmp_path / 'pairs.csv'}", held_out=0.2)
    seen = []
    train_folder(
        tmp_path / "base", data, tmp_path / "out", "balance_control", plan=plan, device="cpu",
        on_step=lambda *step: seen.append(step),
    )  # fmt: skip
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (before[name].dtype, after[name].dtype) == (torch.bfloat16, torch.float32)
    moved = (after[name] - before[name].float()).abs()
    assert 0 < float(moved.max()) < 1e-3  # less than bfloat16 could tell from the weights
    assert float((after["model.norm.weight"] - before["model.norm.weight"].float()).abs().max()) == 0


def test_parts_of_klaad_are_added_to_the_loss():
    model, method = build("llama"), BalancePairs(kl_weight=0.5, triplet_weight=2.0)
    prepared = method.refer(model, method.prepare(ITEMS, tokenizer(), 64))
    with method.session(model) as loss:
        found = loss(prepared.examples)
    with BalancePairs().session(model) as loss:
        alone = loss(prepared.examples)
    klaad = KLAAD(ce_weight=1, kl_weight=1, triplet_weight=1)
    with klaad.session(model) as loss:
        parts = loss(klaad.prepare(ITEMS, tokenizer(), 64).examples)
    assert float(found["kl"].detach()) == pytest.approx(float(parts["kl"].detach()), abs=1e-6)
    expected = alone["loss"] + 0.5 * parts["kl"] + 2 * parts["triplet"]
    torch.testing.assert_close(found["loss"], expected)
    assert set(found) == {"loss", "shift", "level", "keep", "kl", "triplet"}


def test_a_grid_gives_its_control_the_options_and_the_plan_of_the_method(neutral, tmp_path):
    saved(tmp_path / "model")
    lines = [f"{t.sentences.stereotype},{t.sentences.anti_stereotype}" for t in ITEMS]
    (tmp_path / "pairs.csv").write_text("more,less\n" + "\n".join(lines))
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        "title: T\nmethods: [{method: balance_pairs, options: {kl_weight: 0.1}}, {method: balance_control}]\n"
    )
    main(
        ["mitigate", "balance_pairs", "--model", str(tmp_path / "model"), "--data", f"pairs:{tmp_path / 'pairs.csv'}",
         "--neutral", neutral, "--width", "3", "--epochs", "1", "--lr", "1e-4", "--checks", "2", "--watched", "0.3",
         "--device", "cpu", "--grid", str(grid), "--out", str(tmp_path / "out")]
    )  # fmt: skip
    runs = json.loads((tmp_path / "out" / "grid.json").read_text())["runs"]
    assert [runs[name]["settings"].get("width") for name in ("balance_pairs", "balance_control")] == [3.0, None]
    assert [runs[name]["settings"]["neutral"] for name in runs] == [neutral] * 2
    assert [runs[name]["plan"]["checks"] for name in runs] == [2, 0]
    assert [runs[name]["plan"]["epochs"] for name in runs] == [1, 1]
    assert runs["balance_pairs"]["settings"]["kl_weight"] == 0.1


@pytest.mark.parametrize(("mean_over", "taken"), [("all", [1.0] * 5), ("category", [0.5, 0.5, 5.0, 5.0, 5.0])])
def test_the_median_is_taken_off_where_it_is_asked_for(mean_over, taken):
    config, gaps = BalancePairs(mean_over=mean_over, centre="median"), [0.0, 1.0, -3.0, 5.0, 90.0]
    found = config._means(np.array(gaps), [("", kind) for kind in "aabbb"])
    assert found.tolist() == taken


def test_the_median_of_a_batch():
    now, before = torch.zeros(2, 3), torch.tensor([[0.0, 0, 0, 1], [1, 0, 0, 1], [50, 0, 0, 1]])
    config = BalancePairs(mean_over="batch", centre="median", width=1000.0, level_weight=0.0)
    shift = config.parts(now, before, torch.zeros(1), torch.zeros(0))["shift"]
    assert float(shift) == pytest.approx((1 + 0 + 49**2) / 6)  # half the mean of the squares of 0, 1 and 50, less 1


def seen(**scores):
    """What a check saw of sources: their scores, with how far they may be off by chance."""
    return Look(0.5, 10.0, sources=tuple(Score(source, *score) for source, score in scores.items()))


def test_watched_terms_steer_how_often_the_mean_of_their_source_is_taken_off(neutral):
    """The shift of an untouched model is that of as many means, by source; a given strength stays as it is."""
    model = build("llama", scale=2.0)
    items = [StereoSetItem(**{**vars(i), "source": "abc"[k % 3]}) for k, i in enumerate(ITEMS)]
    before = seen(a=(0.7, 0.05), b=(0.4, 0.2), c=(0.4, 0.05))
    later = [seen(a=(0.6, 0.05), b=(0.1, 0.2), c=(0.45, 0.05)), seen(a=(0.45, 0.05), b=(0.9, 0.2), c=(0.9, 0.05))]
    expected = {"a": [1, 1.5, 1.25], "b": [1, 1, 1], "c": [1, 1.5, 0.5]}  # b may lean by chance

    def shifts(config):
        prepared = config.refer(model, config.prepare(items, tokenizer(), 32))
        with torch.no_grad(), config.session(model) as loss:
            for look in [before, *later]:
                getattr(loss, "see", lambda look: None)(look)
                yield [float(loss([example])["shift"]) for example in prepared.examples]
            assert hasattr(loss, "see") == (config.strength is None)
            if config.strength is None:
                assert loss.record()["strengths"] == pytest.approx({"a": 1.25, "c": 0.5})

    for config in (BalancePairs(neutral, width=1e3), BalancePairs(neutral, width=1e3, strength=2)):
        with torch.no_grad():
            referred = config.refer(model, config.prepare(items, tokenizer(), 32)).examples
        means = [example.reference.mean_gap for example in referred]
        for check, found in enumerate(shifts(config)):
            times = [expected[item.source][check] if config.strength is None else 2 for item in items]
            assert found == pytest.approx([(t * m) ** 2 / 2 for t, m in zip(times, means, strict=True)], rel=1e-3)


def test_steering_goes_on_past_even_and_after_a_kill(tmp_path, neutral):
    """What checks saw before a kill is told again, so that the strengths are what they were."""
    told = []

    class Loss:
        steers = True

        def __init__(self, weight):
            self.weight, self.killed = weight, None

        def see(self, look):
            told.append(look.sources[0].ss)

        def __call__(self, batch):
            if self.killed is not None and len(told) > self.killed:
                raise KeyboardInterrupt
            return {"loss": -self.weight(torch.tensor(batch)).mean()}

    def train(killed=None):
        weight = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(weight.weight)
        loss = Loss(weight)
        loss.killed = killed
        plan = LanguagePlan(
            1, 1, 1.0, schedule="constant", warmup=0, max_grad_norm=None, checks=4, checkpoint_minutes=0
        )

        def look():
            ss = {0: 0.64}.get(round(float(weight.weight.detach())), 0.5 - float(weight.weight.detach()) / 100)
            return Look(ss, 10.0, 0.2, (Score("a", ss, 0.2),))

        return tune(weight, [[1.0]] * 8, [1] * 8, loss, plan, look=look, checkpoints=tmp_path)

    with pytest.raises(KeyboardInterrupt):
        train(killed=2)
    assert told == pytest.approx([0.64, 0.48, 0.46], abs=2e-3)
    told.clear()
    tuned = train()
    assert told == pytest.approx([0.64, 0.48, 0.46, 0.44, 0.42], abs=2e-3)
    assert tuned.steps == 8  # checks past even ended it before


@pytest.mark.parametrize("killed_after", [3, 4, 5, 7])
def test_a_model_that_went_back_goes_on_as_slowly_after_a_kill(tmp_path, killed_after):
    def train(folder, killed=None):
        weight, steps = nn.Linear(1, 1, bias=False), []
        nn.init.zeros_(weight.weight)

        def loss(batch):
            if len(steps) == killed:
                raise KeyboardInterrupt
            steps.append(batch)
            return {"loss": -weight(torch.tensor(batch)).mean()}

        def look():
            return Look(0.6, 10.0, own=2.3 if float(weight.weight.detach()) > 3.5 else 2.0)

        plan = LanguagePlan(
            1, 1, 1.0, schedule="constant", warmup=0, max_grad_norm=None, checks=4, checkpoint_minutes=0
        )
        tuned = tune(weight, [[1.0]] * 8, [1] * 8, loss, plan, look=look, checkpoints=folder)
        return float(weight.weight.detach()), tuned.chosen, tuned.taken_back, tuned.looks

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", killed_after)
    whole = train(tmp_path / "whole")
    assert whole[1:3] == (6, 2)
    assert train(tmp_path / "killed") == whole


def test_a_model_trained_by_lora_keeps_its_own_way_of_writing(neutral):
    """Checks let the model write beneath an adapter, which hands on what it is told there."""
    model = build("llama")
    model.generation_config.update(eos_token_id=[0, 5], temperature=0.6, do_sample=True)
    plan = LanguagePlan(1, 4, 1e-3, lora=2, checks=1, watched=0.4)
    trainer = LanguageTrainer(model, tokenizer(), BalancePairs(neutral), plan)
    trainer.train(TripletSplit(ITEMS, ()))
    kept = merged(trainer.model).generation_config
    assert (kept.eos_token_id, kept.temperature, kept.do_sample) == ([0, 5], 0.6, True)


def test_a_tokenizer_of_another_model_is_named_before_anything_is_written():
    config = copy.deepcopy(FAMILIES["llama"])
    config.vocab_size = 12
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(InputError, match="is it this model's tokeniser"):
        write_after(Scorer(model, tokenizer()), [item.texts.unrelated for item in ITEMS], 4, 4)


def test_a_training_that_had_ended_is_not_longer_after_a_kill(tmp_path, monkeypatch):
    def train():
        weight = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(weight.weight)
        plan = LanguagePlan(
            2, 1, 1.0, schedule="constant", warmup=0, max_grad_norm=None, checks=8, checkpoint_minutes=0
        )

        def look():
            return Look(0.64 if float(weight.weight.detach()) < 1 else 0.49, 10.0)

        def loss(batch):
            return {"loss": -weight(torch.tensor(batch)).mean()}

        return tune(weight, [[1.0]] * 8, [1] * 8, loss, plan, look=look, checkpoints=tmp_path).steps

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "put_back", lambda loop: 1 / 0)  # killed after the last step
        with pytest.raises(ZeroDivisionError):
            train()
    assert train() == 4


def test_a_model_that_is_lost_has_a_perplexity_still(neutral):
    model = build("llama")
    look = looker(model, tokenizer(), ITEMS, read_neutral(neutral).watched)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e5)
    seen = look()
    assert (seen.own, seen.perplexity) == (math.exp(700), math.exp(700))
