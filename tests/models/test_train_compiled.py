"""Compiled layers: the same training, and nothing left behind. The compiler that CUDA needs is not asked for here."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

from fairhead.mitigate import DAM, attach
from fairhead.mitigate.pair import Pair
from fairhead.train import Examples, TrainingPlan, compiled, fit
from fairhead.train.compiled import CompiledLayers, repeated_layers
from fairhead.train.step import say_once

# The compiler looks at what it should not, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

PLAN = TrainingPlan(epochs=2, batch_size=8, learning_rate=1e-3, device="cpu")
ON = TrainingPlan(epochs=2, batch_size=8, learning_rate=1e-3, device="cpu", compile=True)


def tiny_vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    shape = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "intermediate_size": 16}
    return ViTForImageClassification(
        ViTConfig(**shape, num_hidden_layers=3, num_attention_heads=2, hidden_dropout_prob=0.0)
    )


def tiny_bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    shape = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "hidden_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(**shape, num_hidden_layers=3, num_attention_heads=2, attention_probs_dropout_prob=0.0)
    )


def pictures() -> Examples:
    torch.manual_seed(1)
    return Examples({"pixel_values": torch.randn(32, 3, 8, 8)}, torch.arange(32) % 2)


def texts() -> Examples:
    torch.manual_seed(1)
    mask = (torch.arange(9) < torch.randint(3, 10, (32, 1))).long()
    return Examples({"input_ids": torch.randint(0, 30, (32, 9)), "attention_mask": mask}, torch.arange(32) % 2)


@pytest.fixture
def seen(monkeypatch):
    """Let the processor compile, by tracing alone, and count the graphs."""
    graphs = []

    def traced(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "_BACKEND", traced)
    monkeypatch.setattr(compiled, "_cannot_compile", lambda device: None)
    with torch._dynamo.config.patch(recompile_limit=8):  # as PyTorch has it
        yield graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["vit", "bert", "dam"])
def test_training_with_compiled_layers_is_the_same_training(kind, seen):
    def trained(plan):
        model = tiny_bert() if kind == "bert" else tiny_vit()
        model = attach(model, DAM()) if kind == "dam" else model
        data = texts() if kind == "bert" else pictures()
        return fit(model, data, data, plan).history, model

    (plain, twin), (fast, model) = trained(PLAN), trained(ON)
    assert 1 <= len(seen) <= 3  # layers that are alike share one graph; DAM's own is another
    assert fast == plain
    for name, weights in model.state_dict().items():
        torch.testing.assert_close(weights, twin.state_dict()[name], msg=name)
    assert all("forward" not in vars(layer) for layer in repeated_layers(model))


def test_methods_that_follow_each_other_in_one_process_are_all_compiled(seen):
    """However few variants of a layer PyTorch would keep, each is compiled, and trained as it is without."""
    one, data = TrainingPlan(epochs=1, batch_size=8, device="cpu"), pictures()
    with torch._dynamo.config.patch(recompile_limit=2):
        for method in (None, DAM(), DAM(absolute=False)):
            before, histories = len(seen), []
            for plan in (one, replace(one, compile=True)):
                model = tiny_vit() if method is None else attach(tiny_vit(), method)
                histories.append(fit(model, data, data, plan).history)
            assert histories[0] == histories[1]
            assert len(seen) > before
    assert len(seen) > 2


def test_a_hook_in_one_of_the_layers_is_not_left_out(seen):
    def history(plan, hooked):
        model = tiny_vit()
        if hooked:
            repeated_layers(model)[1].mlp.register_forward_hook(lambda module, args, output: 0 * output)
        return fit(model, pictures(), pictures(), plan).history

    assert history(PLAN, hooked=True) != history(PLAN, hooked=False)
    for hooked in (True, False, True):
        assert history(ON, hooked) == history(PLAN, hooked)
    assert len(seen) == 2


def test_layers_that_are_computed_again_on_the_way_back_are_not_compiled(seen):
    model = tiny_vit()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    reason = CompiledLayers(model, torch.device("cpu")).as_they_are
    assert reason is not None
    assert "gradient checkpointing" in reason
    fit(model, pictures(), pictures(), ON)
    assert not seen


def test_both_networks_of_a_pair_are_compiled(seen):
    pair = Pair(tiny_vit(), tiny_vit())
    assert len(repeated_layers(pair)) == 6
    with CompiledLayers(pair, torch.device("cpu")):
        pair(pixel_values=torch.randn(2, 3, 8, 8))
    assert len(seen) == 1


def test_layers_run_as_they_are_after_a_failure_and_between_steps(seen):
    model = tiny_vit()
    layers = CompiledLayers(model, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="stop"), layers:
        raise RuntimeError("stop")
    model(pixel_values=torch.randn(2, 3, 8, 8))
    assert not seen


def test_a_forward_of_somebody_elses_is_left_alone():
    model = tiny_vit()
    first = repeated_layers(model)[0]
    first.forward = lambda *args, **kwargs: None  # as patches of other libraries do
    assert first not in repeated_layers(model)
    assert len(repeated_layers(model)) == 2
    assert repeated_layers(nn.Sequential(nn.Linear(1, 1))) == []


def test_a_processor_does_without(caplog):
    assert CompiledLayers(tiny_vit(), torch.device("cpu")).as_they_are == "only steps on a GPU gain from it"
    data = pictures()
    with caplog.at_level(logging.WARNING, logger="fairhead"):
        assert fit(tiny_vit(), data, data, ON).history == fit(tiny_vit(), data, data, PLAN).history
    assert not caplog.records


def test_a_machine_without_a_compiler_trains_uncompiled():
    def refuses(graph, inputs):
        raise OSError("no compiler here")

    before, compiled._BACKEND = compiled._BACKEND, refuses
    try:
        reason = compiled._try_out(torch.device("cpu"))
    finally:
        compiled._BACKEND = before
    assert reason is not None
    assert "no compiler here" in reason
    say_once.cache_clear()
