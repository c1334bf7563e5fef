"""Training with KLAAD: it learns, stops at a NaN, goes on where it stopped, and leaves an ordinary model behind."""

import json
from contextlib import contextmanager

import pytest
import torch
import transformers as hf
from language_models import FAMILIES, ITEMS, build, item, tokenizer

from fairhead.data.sentences import StereoSetItem, Triplet, TripletSplit
from fairhead.errors import InputError, UnsupportedModel
from fairhead.language import load_scorer
from fairhead.language.running import TrainingRecord, without_training_targets
from fairhead.mitigate.balance_pairs import BalancePairs
from fairhead.mitigate.klaad import KLAAD
from fairhead.mitigate.language_trainer import LanguageTrainer
from fairhead.mitigate.triplets import TripletData, encode_triplets
from fairhead.train import LanguagePlan
from fairhead.train.loop import TrainingDiverged
from fairhead.train.step import say_once, shuffled_batches

SPLIT = TripletSplit(ITEMS[:3], ITEMS[3:])
PLAN = LanguagePlan(epochs=4, batch_size=2, learning_rate=1e-3, seed=3)


def trainer(family="llama", config=None, plan=PLAN):
    return LanguageTrainer(build(family), tokenizer(), config or KLAAD(), plan)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_divergence_falls_in_every_family(family):
    run = trainer(family, KLAAD(ce_weight=0, kl_weight=1, triplet_weight=0), LanguagePlan(20, 3, 1e-3))
    before = run.evaluate(ITEMS[:3])
    history = run.train(SPLIT).history
    after = run.evaluate(ITEMS[:3])
    assert set(history[0]) == {"loss", "kl"}
    assert after["kl"] < 0.5 * before["kl"]
    assert set(before) == {"ce", "kl", "kl_pad_common", "triplet"}


def test_the_record_says_how_hard_each_part_pulls_at_first():
    split, plan = TripletSplit(ITEMS[:2], ()), LanguagePlan(epochs=1, batch_size=2, learning_rate=1e-3)
    run = trainer(config=KLAAD(0.5, 2.0, 3.0), plan=plan)
    run.train(split)
    told = run.record.results["first_gradient_norms"]
    assert set(told) == {"ce", "kl", "triplet"}
    for part, alone in (("ce", KLAAD(0.5, 0, 0)), ("kl", KLAAD(0, 2.0, 0)), ("triplet", KLAAD(0, 0, 3.0))):
        model = build("llama").eval()
        prepared = alone.prepare(ITEMS[:2], tokenizer(), 64)
        with alone.session(model) as loss:
            loss(prepared.examples)["loss"].backward()
        gradients = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
        assert told[part] == pytest.approx(float(torch.cat(gradients).norm()), rel=1e-4), part


def test_a_run_without_a_part_has_the_same_batches():
    """Else a control would differ from what it controls by its order, too."""
    lengths = [
        config.prepare(ITEMS, tokenizer(), 64).lengths
        for config in (KLAAD(), KLAAD(triplet_weight=0), KLAAD(kl_weight=0, triplet_weight=0))
    ]
    assert lengths[0] == lengths[1] == lengths[2]
    assert len(set(lengths[0])) > 1


@pytest.mark.parametrize("family", ["llama", "gemma-2"])
def test_autocast_stays_near_32_bit(family):
    exact, rounded = (
        trainer(family, plan=LanguagePlan(2, 2, 1e-3, precision=precision)).train(SPLIT).history
        for precision in ("no", "bf16")
    )
    for name, value in exact[0].items():
        assert rounded[0][name] == pytest.approx(value, rel=0.15, abs=1e-3), name


def test_three_lines_do_it(tmp_path):
    from fairhead.mitigate import KLAAD, LanguageTrainer

    trainer = LanguageTrainer(build("qwen"), tokenizer(), KLAAD.preset("qwen"))
    trainer.train(SPLIT)
    trainer.save(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize("at", ["loss", "optimizer"])
def test_a_batch_that_is_too_large_for_the_device_is_trained_on_in_pieces(monkeypatch, caplog, at):
    """At most 3 examples fit, or the optimizer has no room at first; the model is that of as many pieces."""
    say_once.cache_clear()
    session, sizes, found = BalancePairs.session, [], {}
    room = torch.optim.AdamW.step

    @contextmanager
    def small(self, model):
        with session(self, model) as loss:

            def fits(examples):
                sizes.append(len(examples))
                if at == "loss" and len(examples) > 3:
                    raise torch.OutOfMemoryError
                return loss(examples)

            yield fits

    def first_fails(optimizer, *arguments):
        if 8 in sizes and 4 not in sizes:
            raise torch.OutOfMemoryError
        return room(optimizer, *arguments)

    items = [StereoSetItem(**{**vars(one), "id": f"{k}"}) for k, one in enumerate(ITEMS * 4)]
    for name, accumulate in (("asked for", 4 if at == "loss" else 2), ("found", 1)):
        if name == "found":
            monkeypatch.setattr(BalancePairs, "session", small)
            if at == "optimizer":
                monkeypatch.setattr(torch.optim.AdamW, "step", first_fails)
        plan = LanguagePlan(2, 8, 1e-3, accumulate=accumulate)
        training = trainer(config=BalancePairs(), plan=plan)
        tuned = training.train(TripletSplit(tuple(items), ()))
        assert tuned.steps == len(tuned.history) == 4
        found[name] = training.model.state_dict()
    # The norms of the first batch, its step, and later steps.
    assert sizes == ([8, 4, 2, 8, 4, *[2] * 16] if at == "loss" else [8, 8, *[4] * 8])
    for key, weight in found["asked for"].items():
        torch.testing.assert_close(found["found"][key], weight, rtol=0, atol=1e-5)
    assert caplog.text.count("trained on in pieces; see --accumulate") == 1


def test_a_run_that_was_stopped_equals_one_that_was_not(tmp_path):
    whole = trainer()
    whole.train(SPLIT)

    class Stop(Exception):
        pass

    def stop(done, total, parts):
        if done == 5:
            raise Stop

    often = LanguagePlan(epochs=4, batch_size=2, learning_rate=1e-3, seed=3, checkpoint_minutes=0)
    with pytest.raises(Stop):
        trainer(plan=often).train(SPLIT, tmp_path, stop)
    told = []
    resumed = trainer(plan=often)
    tuned = resumed.train(SPLIT, tmp_path, lambda done, total, parts: told.append(done))
    assert told[0] == 5  # the checkpoint was written before the fifth step was told
    assert tuned.steps == len(tuned.history) == 8
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    resumed.save(tmp_path)
    assert not (tmp_path / "checkpoint").exists()


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    def stop(done, total, parts):
        raise KeyboardInterrupt

    often = LanguagePlan(batch_size=1, checkpoint_minutes=0)
    with pytest.raises(KeyboardInterrupt):
        trainer(plan=often).train(SPLIT, tmp_path, lambda done, *_: stop(done, *_) if done == 2 else None)
    with pytest.raises(InputError, match=r"another run \(kl_weight was 0.15, now 0.5\)"):
        trainer(config=KLAAD(kl_weight=0.5), plan=often).train(SPLIT, tmp_path)
    (tmp_path / "checkpoint" / "state.safetensors").write_bytes(b"half a file")
    with pytest.raises(InputError, match="cannot be read"):
        trainer(plan=often).train(SPLIT, tmp_path)


def test_a_nan_stops_with_its_step_and_keeps_the_last_good_weights():
    run = trainer(plan=LanguagePlan(epochs=3, batch_size=1, learning_rate=1e-3))
    seen = {}

    def spoil(done, total, parts):
        if done == 4:
            with torch.no_grad():
                seen["weight"] = run.model.model.norm.weight.clone()
                run.model.model.norm.weight.fill_(torch.nan)

    with pytest.raises(TrainingDiverged, match=r"step 5 of 9: .*nan.* back at its weights after step 0"):
        run.train(SPLIT, on_step=spoil)
    fresh = build("llama")
    for ours, theirs in zip(run.model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(seen["weight"], fresh.model.norm.weight)


def test_a_model_that_was_damaged_before_is_called_so():
    run = trainer()
    with torch.no_grad():
        run.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(TrainingDiverged, match=r"step 1 of .*nan.*Are the model's weights damaged\?"):
        run.train(SPLIT)


def test_a_rate_that_is_far_too_high_is_noticed():
    with pytest.raises(TrainingDiverged, match="Lower the learning rate"):
        trainer(plan=LanguagePlan(epochs=5, batch_size=1, learning_rate=1e30, warmup=0)).train(SPLIT)


@pytest.mark.parametrize("lora", [None, 4])
def test_the_saved_model_is_an_ordinary_one_with_the_same_outputs(lora, tmp_path):
    run = trainer(plan=LanguagePlan(epochs=2, batch_size=2, learning_rate=1e-2, lora=lora))
    ids = torch.tensor([[0, 1, 3, 7, 9]])
    with torch.no_grad():
        before = build("llama")(ids).logits
    run.train(SPLIT)
    with torch.no_grad():
        trained = run.model.eval()(ids).logits
    run.save(tmp_path, adapter=lora is not None)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, trained, rtol=1e-4, atol=1e-4)
    assert (trained - before).abs().max() > 0.01
    assert type(again).__name__ == "LlamaForCausalLM"
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file() == (lora is not None)
    assert load_scorer(tmp_path, device="cpu").context == 32


def test_lora_trains_its_own_matrices_only():
    run = trainer(plan=LanguagePlan(batch_size=1, learning_rate=1e-2, lora=2))
    own = {name: weight.clone() for name, weight in run.model.named_parameters()}
    run.train(SPLIT)
    for name, weight in run.model.named_parameters():
        if "lora" not in name:
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(weight, own[plain]), name


def test_the_record_tells_what_was_trained_on(tmp_path):
    run = trainer()
    run.train(SPLIT)
    run.save(tmp_path)
    record = TrainingRecord.read(tmp_path)
    assert record.method == "klaad"
    assert record.training_targets == ("baker", "nurse", "pilot")
    assert record.held_out_targets == ("poet",)
    assert record.settings["renorm"] == "none"
    assert record.plan["learning_rate"] == 1e-3
    assert len(record.history) == 8
    assert record.results["held_out"]["before"].keys() == {"ce", "kl", "kl_pad_common", "triplet"}
    assert [one.target for one in without_training_targets(ITEMS, tmp_path)] == ["poet"]
    (tmp_path / "fairhead-training.json").write_text(json.dumps({"schema": "other"}))
    with pytest.raises(InputError, match="schema 'other'"):
        TrainingRecord.read(tmp_path)
    with pytest.raises(InputError, match="was not written by fairhead mitigate"):
        TrainingRecord.read(tmp_path / "elsewhere")


def test_items_longer_than_the_context_are_named_and_none_left_is_an_error():
    long = item("nurse", "kind " * 40, "rude", "blue")
    run = trainer()
    run.train(TripletSplit((*ITEMS[:2], long), ()))
    assert run.record.results["left_out"] == {"longer than the model's context": [long.id]}
    with pytest.raises(InputError, match="no item can be trained on: 1 longer than the model's context"):
        trainer().train(TripletSplit((long,), ()))


def test_bad_input():
    empty = StereoSetItem("7", "intrasentence", "t", "race", "", Triplet("kind", "", "rude"))
    with pytest.raises(InputError, match="item '7': its anti-stereotype sentence is empty"):
        encode_triplets([empty], tokenizer())
    without = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer)
    with pytest.raises(InputError, match="neither a BOS nor an end-of-text"):
        encode_triplets(ITEMS, without)
    bert = hf.BertModel(hf.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    with pytest.raises(UnsupportedModel, match="causal language model"):
        LanguageTrainer(bert, tokenizer(), KLAAD())
    with pytest.raises(InputError, match="nothing has been trained"):
        trainer().save("nowhere")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; expected a whole number of at least 1"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; expected a number above 0"),
        ({"learning_rate": float("inf")}, "learning_rate is inf; expected a number above 0"),
        ({"seed": -1}, "seed is -1; expected a whole number from 0 to 4,294,967,295"),
        ({"weight_decay": -2}, "weight_decay is -2; expected a number of at least 0"),
        ({"lora": 0}, "lora is 0; expected a whole number of at least 1 or nothing"),
    ],
)
def test_plans_that_cannot_be_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        LanguagePlan(**settings)


def test_batches_hold_each_example_once_and_depend_on_the_seed_and_the_epoch():
    lengths = [5 + i % 7 for i in range(100)]
    batches = shuffled_batches(lengths, 8, seed=1)
    assert sorted(i for batch in batches for i in batch) == list(range(100))
    assert shuffled_batches(lengths, 8, seed=1) == batches
    assert shuffled_batches(lengths, 8, seed=2) != batches
    assert shuffled_batches(lengths, 8, seed=1, epoch=1) != batches
    padding = sum(max(lengths[i] for i in batch) - lengths[k] for batch in batches for k in batch)
    assert padding < 0.05 * sum(lengths)


def test_data_is_split_by_target(tmp_path):
    entries = [
        {
            "id": f"{target}{i}",
            "target": target,
            "bias_type": "race" if target < "n" else "gender",
            "context": "it is BLANK",
            "sentences": [
                {"sentence": f"it is {label}", "gold_label": label}
                for label in ("stereotype", "anti-stereotype", "unrelated")
            ],
        }
        for target in ("amber", "brown", "clear", "north", "south")
        for i in range(4)
    ]
    file = tmp_path / "dev.json"
    file.write_text(json.dumps({"data": {"intrasentence": entries}}))
    split = TripletData(f"stereoset:{file}", held_out=0.4).read()
    assert len(split.train) == 12
    assert not {one.target for one in split.train} & {one.target for one in split.held_out}
    only = TripletData(f"stereoset:{file}", bias_type="gender").read()
    assert {one.target for one in (*only.train, *only.held_out)} == {"north", "south"}
    with pytest.raises(InputError, match="no items of bias type 'age'; there are gender, race"):
        TripletData(f"stereoset:{file}", bias_type="age").read()
