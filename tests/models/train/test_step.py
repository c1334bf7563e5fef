"""Steps that are recorded once and replayed: the same results as steps run one by one, or no replay at all."""

import gc
import logging
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from tape import Tape
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

import fairhead.train.fitting as fitting
from fairhead.mitigate import method, names, run
from fairhead.mitigate.references import run_with_attributes
from fairhead.train import TrainingPlan
from fairhead.train.fitting import fit
from fairhead.train.recorded import Recorded, _masks_as_when_recorded
from fairhead.train.step import Batch, Batches, ClassifierLoss, Examples, Step, optimizer_of, say_once, set_rate

PLAN = TrainingPlan(epochs=4, batch_size=8, learning_rate=3e-3, device="cpu")


def tiny_vit(dropout=0.0):
    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def pictures(rows=48):
    labels = torch.arange(rows) % 2
    pixels = torch.randn(rows, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return Examples({"pixel_values": pixels + labels[:, None, None, None]}, labels)


@pytest.fixture
def tapes(monkeypatch):
    """Let the loop record on the CPU; the recorders it made."""
    made = []

    def recorder_for(device):
        made.append(Tape())
        return made[-1]

    monkeypatch.setattr(fitting, "recorder_for", recorder_for)
    return made


def replayed_and_not(train, tapes):
    """What `train(plan)` gives with and without a recorder."""
    with_tape = train(PLAN)
    assert {tape.recordings for tape in tapes} >= {1}
    tapes.clear()
    without = train(TrainingPlan(**{**vars(PLAN), "replay": False}))
    assert not tapes
    return with_tape, without


def weights(model):
    return torch.cat([tensor.flatten().double() for tensor in model.state_dict().values()])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", names("classifier", uses_groups=False))
def test_a_gpu_replays_every_method_to_the_same_losses(name):
    options = {"arl": {"pretrain": 8}, "jtt": {"upweight": 3}}.get(name, {})
    data = pictures()
    plans = [TrainingPlan(**{**vars(PLAN), "replay": replay, "device": "cuda"}) for replay in (True, False)]
    replayed, plain = (run(method(name, **options), tiny_vit, data, data, plan) for plan in plans)
    assert replayed.fit.replayed
    assert not plain.fit.replayed
    # Some kernels add in an order that is not fixed: rounding grows over the steps.
    assert [epoch.loss for epoch in replayed.fit.history] == pytest.approx(
        [epoch.loss for epoch in plain.fit.history], rel=1e-2
    )


@pytest.mark.parametrize("name", names("classifier", uses_groups=False))
def test_every_method_trains_the_same_model_when_its_steps_are_replayed(name, tapes):
    # The adversary of ARL gets its say while steps are replayed already; JTT has fewer steps to make.
    options = {"arl": {"pretrain": 8}, "jtt": {"upweight": 3}}.get(name, {})
    data = pictures()
    replayed, plain = replayed_and_not(lambda plan: run(method(name, **options), tiny_vit, data, data, plan), tapes)
    assert replayed.fit.replayed
    assert not plain.fit.replayed
    assert replayed.fit.history == plain.fit.history
    assert torch.equal(weights(replayed.model), weights(plain.model))


@pytest.mark.parametrize("name", names(uses_groups=True))
def test_every_reference_trains_the_same_model_when_its_steps_are_replayed(name, tapes):
    data = pictures()
    groups = (torch.arange(len(data)) % 3 == 0).long()
    config = method(name)

    def train(plan):
        return run_with_attributes(config, tiny_vit, data, data, groups, groups, plan)

    replayed, plain = replayed_and_not(train, tapes)
    assert replayed.fit.replayed
    assert replayed.fit.history == plain.fit.history
    assert torch.equal(weights(replayed.model), weights(plain.model))


def test_three_steps_are_too_few_to_be_replayed(tapes):
    data = pictures(24)
    assert not fit(tiny_vit(), data, data, replace(PLAN, epochs=1)).replayed
    assert [tape.recordings for tape in tapes] == [0, 0]


def tiny_bert(dropout=0.0):
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(**small, vocab_size=20, hidden_dropout_prob=dropout))


def padded_texts(rows=48):
    labels = torch.arange(rows) % 2
    words = torch.randint(2, 20, (rows, 7), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(7) < 3 + labels[:, None]).long()
    return Examples({"input_ids": words, "attention_mask": mask}, labels)


def test_a_text_model_with_padding_and_dropout_is_replayed(tapes):
    data = padded_texts()

    def train(plan):
        model = tiny_bert(dropout=0.3)
        return fit(model, data, data, plan), model

    (replayed, model), (plain, twin) = replayed_and_not(train, tapes)
    assert replayed.history == plain.history  # new dropout in every replay, and the same as without
    assert torch.equal(weights(model), weights(twin))


@pytest.mark.parametrize("rows", [8, 16, 24, 32, 40])
def test_dam_on_padded_text_is_replayed_however_few_steps_an_epoch_has(rows, tapes, caplog):
    # An evaluation between two steps leaves its own mask in the model.
    data = padded_texts(rows)

    def train(plan):
        return run(method("dam"), tiny_bert, data, data, replace(plan, epochs=8))

    replayed, plain = replayed_and_not(train, tapes)
    assert replayed.fit.replayed
    assert not caplog.messages
    assert replayed.fit.history == plain.fit.history
    assert torch.equal(weights(replayed.model), weights(plain.model))


@pytest.mark.parametrize("name", ["erm", "dam", "lff"])
def test_recordings_go_with_the_training_that_made_them(name, monkeypatch):
    # A recording holds all the memory of a step: it must not wait for garbage to be collected.
    alive = []

    def recorder_for(device):
        tape = Tape()
        alive.append(weakref.ref(tape))
        return tape

    monkeypatch.setattr(fitting, "recorder_for", recorder_for)
    data = pictures()
    gc.collect()
    gc.disable()
    try:
        trained = run(method(name), tiny_vit, data, data, PLAN)
        assert trained.fit.replayed
        assert [tape() for tape in alive] == [None] * len(alive)
        assert len(alive) == 2
    finally:
        gc.enable()


def test_the_learning_rate_of_a_replay_is_that_of_its_step():
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    batch = Batch({"input": torch.randn(4, 3)}, torch.zeros(4, dtype=torch.long), torch.arange(4))

    def loss(output, labels, rows):
        return output.square().mean()

    optimizer, reference = optimizer_of(model, 1.0, 0.1), torch.optim.AdamW(twin.parameters(), weight_decay=0.1)
    step = Recorded(Step(ClassifierLoss(model, loss), optimizer), Tape(), model, loss)
    for number in range(8):
        set_rate(optimizer, 0.1 / (number + 1))
        reference.param_groups[0]["lr"] = 0.1 / (number + 1)
        step(batch)
        reference.zero_grad()
        loss(twin(batch.inputs["input"]), None, None).backward()
        reference.step()
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-5, atol=1e-6)


def test_a_dropout_mask_is_new_in_every_replay():
    masks = Recorded(lambda batch: nn.functional.dropout(batch.inputs["x"]), Tape())
    batch = Batch({"x": torch.ones(64)}, torch.zeros(64), torch.arange(64))
    found = [masks(batch) for _ in range(8)]
    assert masks.as_it_is is None
    assert len({tuple(mask.tolist()) for mask in found}) == 8


class Counting:
    """A loss whose state is a number of Python's."""

    def __init__(self):
        self.calls = 0

    def __call__(self, output, labels, rows):
        self.calls += 1
        return output.logits.float().square().mean() / self.calls


class Replacing:
    """A loss whose state is a new tensor at every step."""

    def __init__(self):
        self.total = torch.zeros(())

    def __call__(self, output, labels, rows):
        value = output.logits.float().square().mean()
        self.total = self.total + value.detach()
        return value / self.total


@pytest.mark.parametrize("kind", [Counting, Replacing])
def test_a_loss_with_state_in_python_runs_step_by_step(kind, tapes, caplog):
    data = pictures()

    def train(plan):
        model = tiny_vit()
        return fit(model, data, data, plan, loss=kind()), model

    (done, model), (plain, twin) = replayed_and_not(train, tapes)
    assert not done.replayed
    assert done.history == plain.history
    assert torch.equal(weights(model), weights(twin))


class Weighted:
    """A loss with a setting that somebody changes between epochs."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, output, labels, rows):
        return self.weight * output.logits.float().square().mean()


@pytest.mark.parametrize("weight", [1.0, torch.tensor(1.0)])
@pytest.mark.parametrize("changes", ["loss", "model", "nothing"])
def test_what_is_changed_between_epochs_is_not_lost_in_a_recording(weight, changes, tapes):
    data = pictures()

    def train(plan):
        model, loss = tiny_vit(dropout=0.1), Weighted(weight)

        def on_epoch(epoch):
            if changes == "loss":
                loss.weight = loss.weight * 0.1
            for module in model.modules() if changes == "model" else ():
                if isinstance(module, nn.Dropout):
                    module.p = 0.5

        return fit(model, data, data, plan, on_epoch, loss=loss), model

    (done, model), (plain, twin) = replayed_and_not(train, tapes)
    assert done.replayed == (changes == "nothing")
    assert done.history == plain.history
    assert torch.equal(weights(model), weights(twin))


def test_why_a_step_is_not_replayed_is_said_once(caplog):
    loss = Counting()
    model = tiny_vit()
    step = Recorded(Step(ClassifierLoss(model, loss), optimizer_of(model, 1e-3, 0.0)), Tape(), model, loss)
    for batch in Batches(pictures(), 8, torch.device("cpu")).epoch(1):
        step(batch)
    assert step.as_it_is == "the loss.calls is replaced at every step instead of changed in place"
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="fairhead"):
        say_once(step.as_it_is)
        say_once(step.as_it_is)
    assert [record.message.count("the loss.calls") for record in caplog.records] == [1]


def test_a_hook_of_the_users_own_keeps_being_called(tapes):
    model, data, seen = tiny_vit(), pictures(), []
    model.register_forward_hook(lambda module, args, output: seen.append(module.training))
    done = fit(model, data, data, PLAN)
    assert not done.replayed
    assert sum(seen) == done.steps == 24


def test_a_model_that_asks_for_values_runs_step_by_step(tapes):
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny_vit()

        def forward(self, pixel_values, labels=None):
            assert pixel_values.sum().item() < 1e9
            return self.inner(pixel_values, labels=labels)

    data = pictures()
    assert not fit(Asking(), data, data, PLAN).replayed


def test_batches_of_another_shape_run_as_they_are():
    doubled = Recorded(lambda batch: batch.inputs["x"] * 2, Tape())
    for rows in (3, 3, 3, 3, 3, 2, 3):
        x = torch.randn(rows, 2)
        assert torch.equal(doubled(Batch({"x": x}, torch.zeros(rows), torch.arange(rows))), 2 * x)
    assert doubled.as_it_is is None


def test_threads_that_record_at_the_same_time_leave_transformers_as_it_was():
    from transformers import masking_utils

    before, inside, leave = masking_utils.is_tracing, threading.Event(), threading.Event()

    def other():
        with _masks_as_when_recorded():
            inside.set()
            leave.wait(5)

    thread = threading.Thread(target=other)
    with _masks_as_when_recorded():
        assert masking_utils.is_tracing is not before
        thread.start()
        assert not inside.wait(0.2)  # it has to wait for this one
    leave.set()
    thread.join()
    assert inside.is_set()
    assert masking_utils.is_tracing is before
