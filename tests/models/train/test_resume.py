"""A training that was killed goes on from its checkpoint to the model that it would have become."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import SubsetRandomSampler
from transformers import ViTConfig, ViTForImageClassification

from fairhead.errors import InputError
from fairhead.mitigate import method, names, run
from fairhead.mitigate.references import run_with_attributes
from fairhead.train import TrainingPlan, loop
from fairhead.train.fitting import fit
from fairhead.train.loop import Checkpoint
from fairhead.train.step import Batches, Examples, optimizer_of

PLAN = TrainingPlan(epochs=3, batch_size=12, learning_rate=3e-3, checkpoint_minutes=0, device="cpu")


def build():
    torch.manual_seed(0)
    shape = {"image_size": 6, "patch_size": 2, "num_channels": 1, "hidden_size": 16, "intermediate_size": 16}
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return ViTForImageClassification(ViTConfig(num_hidden_layers=2, num_attention_heads=4, **shape, **dropout))


def pictures(n=48):
    chance = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % 2
    return Examples({"pixel_values": torch.randn(n, 1, 6, 6, generator=chance) + labels[:, None, None, None]}, labels)


class Killed(Exception):
    pass


class Switch:
    """Raises in the forward pass of a training step, once so many have been made."""

    def __init__(self, after):
        self.after = after

    def build(self):
        model = build()
        model.register_forward_hook(self)
        return model

    def __call__(self, module, args, output):
        if module.training:
            if self.after == 0:
                raise Killed
            self.after -= 1


def weights(model):
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("fairhead.")}


def assert_same(one, other):
    assert one.fit.history == other.fit.history
    assert one.fit.best == other.fit.best
    assert [(stage.name, stage.steps) for stage in one.stages] == [(s.name, s.steps) for s in other.stages]
    ours, theirs = weights(one.model), weights(other.model)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# In the middle of an epoch, at its end, and in a later stage where there is one.
@pytest.mark.parametrize(
    "after", [pytest.param(6, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow), 17]
)
@pytest.mark.parametrize("name", ["erm", "dam", "arl", "kd", "jtt", "lff", "eiil", "xrm", "spare", "afr", "balance"])
def test_every_method_goes_on_to_the_model_that_it_would_have_become(name, after, tmp_path):
    data, options = pictures(), {"arl": {"pretrain": 4}, "jtt": {"upweight": 3}, "balance": {"clusters": 2}}
    config = method(name, **options.get(name, {}))
    whole = run(config, build, data, data, PLAN)
    switch = Switch(after)
    try:
        run(config, switch.build, data, data, PLAN, checkpoints=tmp_path)
    except Killed:
        pass
    else:
        assert whole.steps <= after
    resumed = run(config, build, data, data, PLAN, checkpoints=tmp_path)
    assert_same(resumed, whole)
    assert resumed.fit.resumed_at > 0 or after == 17 or name in ("kd", "jtt", "eiil", "xrm", "spare", "balance")


@pytest.mark.parametrize("name", names(uses_groups=True))
def test_every_reference_goes_on_as_well(name, tmp_path):
    data, groups = pictures(), torch.arange(48) // 2 % 2
    config, rest = method(name), (data, data, groups, groups, PLAN)
    whole = run_with_attributes(config, build, *rest)
    with pytest.raises(Killed):
        run_with_attributes(config, Switch(9).build, *rest, checkpoints=tmp_path)
    assert_same(run_with_attributes(config, build, *rest, checkpoints=tmp_path), whole)


def test_a_training_that_has_ended_is_not_run_again(tmp_path):
    data = pictures()
    first = run(method("dam"), build, data, data, PLAN, checkpoints=tmp_path)
    again = run(method("dam"), Switch(0).build, data, data, PLAN, checkpoints=tmp_path)
    assert_same(again, first)
    assert again.fit.resumed_at == first.fit.steps


def test_samplers_that_draw_from_the_common_chance_go_on_too(tmp_path):
    """The rows of the epoch that was under way are those that were drawn, whatever draws them."""
    data, shown = pictures(), []

    def train(after, folder=None):
        def loss(output, labels, rows):
            if len(shown) == after:
                raise Killed
            shown.append(rows.tolist())
            return nn.functional.cross_entropy(output.logits, labels)

        shown.clear()
        fit(build(), data, data, PLAN, loss=loss, sampler=SubsetRandomSampler(range(24)), checkpoints=folder)

    train(100)
    whole = list(shown)
    with pytest.raises(Killed):
        train(3, tmp_path)
    begun = list(shown)
    train(100, tmp_path)
    assert begun + shown == whole


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    data = pictures()
    with pytest.raises(Killed):
        run(method("jtt"), Switch(6).build, data, data, PLAN, checkpoints=tmp_path)
    for config, plan, rows, message in (
        (method("erm"), PLAN, data, "method was 'JTT', now 'ERM'"),
        (method("jtt", upweight=7), PLAN, data, "upweight was 50, now 7"),
        (method("jtt"), replace(PLAN, learning_rate=1e-4), data, "learning_rate was 0.003, now 0.0001"),
        (method("jtt"), PLAN, data.take(torch.arange(40)), "data was"),
    ):
        with pytest.raises(InputError, match=rf"of another run \({message}"):
            run(config, build, rows, data, plan, checkpoints=tmp_path)
    # How often a checkpoint is written, and where it is computed, do not change the result.
    run(method("jtt"), build, data, data, replace(PLAN, checkpoint_minutes=5, device=None), checkpoints=tmp_path)


def test_a_checkpoint_of_another_version_says_which(tmp_path, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(loop, "__version__", "0.0.1")
        Checkpoint(tmp_path, {"settings": {"strength": 1}}).save({"x": torch.zeros(1)}, {})
    now = Checkpoint(tmp_path, {"settings": {"strength": 1, "centre": "mean"}})
    with pytest.raises(InputError, match=r"centre was None, now 'mean', begun by fairhead 0\.0\.1; this is .*again"):
        now.read()


def test_a_checkpoint_that_cannot_be_read_says_so(tmp_path):
    data = pictures()
    fit(build(), data, data, PLAN, checkpoints=tmp_path)
    file = tmp_path / "state.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InputError, match=r"cannot be read .*remove it to start again"):
        fit(build(), data, data, PLAN, checkpoints=tmp_path)


def test_checkpoints_are_written_as_often_as_the_plan_says(tmp_path):
    data = pictures()
    fit(build(), data, data, replace(PLAN, checkpoint_minutes=10), checkpoints=tmp_path)
    assert not list(tmp_path.iterdir())


def test_large_checkpoints_take_a_twentieth_of_the_time_at_most(tmp_path, monkeypatch):
    """Steps of a minute, and 15 s to write a checkpoint: one every five minutes. With 0 minutes each step has one."""
    clock, data, written = [0.0], pictures(), []
    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock[0])

    class Slow(Checkpoint):
        def save(self, tensors, facts):
            written.append(facts["done"])
            clock[0] += 15

    for minutes, expected in ((1, [1, 6, 11]), (0, list(range(1, 13)))):
        plan = replace(PLAN, checkpoint_minutes=minutes)
        model = build()
        batches = Batches(data, 12, torch.device("cpu"), seed=0)
        training = loop.Loop(model, optimizer_of(model, 1e-3, 0.0), batches, plan, Slow(tmp_path, {}))

        def step(batch):
            clock[0] += 60
            return torch.zeros(())

        training.run(step)
        assert sorted(set(written)) == expected
        written.clear()


def test_a_batch_in_pieces_is_the_same_step_of_less_memory():
    """AdamW on the mean of the pieces' gradients is AdamW on that of the batch, but for rounding."""
    data, found, sizes = pictures(), [], []
    for accumulate in (1, 4, 5):
        torch.manual_seed(0)
        shape = {"image_size": 6, "patch_size": 2, "num_channels": 1, "hidden_size": 16, "intermediate_size": 16}
        model = ViTForImageClassification(ViTConfig(num_hidden_layers=1, num_attention_heads=2, **shape)).double()
        model.register_forward_hook(lambda module, args, out: sizes.append((module.training, len(out.logits))))
        rows = Examples({"pixel_values": data.inputs["pixel_values"].double()}, data.labels)
        fit(model, rows, rows, replace(PLAN, epochs=1, batch_size=24, accumulate=accumulate, warmup=0))
        # The gradient of a key's bias is 0 but for rounding, which AdamW makes a whole step of.
        kept = [p.flatten() for name, p in model.named_parameters() if not name.endswith("k_proj.bias")]
        found.append(torch.cat(kept))
    assert [n for trains, n in sizes if trains] == [24] * 2 + [6] * 8 + ([5] * 4 + [4]) * 2
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-7)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=1e-7)
