"""Compiled layers: the same training, and nothing left behind. The compiler that CUDA needs is not asked for here."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

from fairhead.mitigate import DAM, attach
from fairhead.mitigate.hard_rows import Pair
from fairhead.train import TrainingPlan, recorded
from fairhead.train.fitting import Epoch, fit
from fairhead.train.recorded import CompiledLayers, Recorded, patch_embeddings, patches, recorder_for, repeated_layers
from fairhead.train.step import Batch, ClassifierLoss, Examples, Step, optimizer_of, say_once

# The compiler looks at what it should not, and says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]

PLAN = TrainingPlan(epochs=2, batch_size=8, learning_rate=1e-3, device="cpu")
ON = TrainingPlan(epochs=2, batch_size=8, learning_rate=1e-3, device="cpu", compile=True)


def tiny_vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    shape = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "intermediate_size": 16}
    return ViTForImageClassification(
        ViTConfig(**shape, num_hidden_layers=3, num_attention_heads=2, hidden_dropout_prob=0.0)
    )


def tiny_bert(dropout: float = 0.0) -> BertForSequenceClassification:
    torch.manual_seed(0)
    shape = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "hidden_dropout_prob": dropout}
    return BertForSequenceClassification(
        BertConfig(**shape, num_hidden_layers=3, num_attention_heads=2, attention_probs_dropout_prob=0.0)
    )


def pictures() -> Examples:
    torch.manual_seed(1)
    return Examples({"pixel_values": torch.randn(32, 3, 8, 8)}, torch.arange(32) % 2)


def losses(history: tuple[Epoch, ...]) -> list[float]:
    return [epoch.loss for epoch in history]


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
    monkeypatch.setattr(recorded, "_BACKEND", traced)
    monkeypatch.setattr(recorded, "_cannot_compile", lambda device: None)
    with torch._dynamo.config.patch(recompile_limit=8):  # as PyTorch has it
        yield graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["vit", "bert", "dam"])
def test_training_with_compiled_layers_is_the_same_training(kind, seen):
    def trained(plan):
        model = tiny_bert() if kind == "bert" else tiny_vit()
        if kind == "dam":
            # DAM takes means off q and k: their biases would get a gradient of rounding errors, and Adam a step of it.
            for part in ("q_proj", "k_proj"):
                getattr(repeated_layers(model)[-1].attention, part).bias.requires_grad_(False)
            model = attach(model, DAM())
        data = texts() if kind == "bert" else pictures()
        return fit(model, data, data, plan).history, model

    (plain, twin), (fast, model) = trained(PLAN), trained(ON)
    # Layers that are alike share one graph, and patches have one; DAM's layer is in two pieces.
    assert len(seen) == {"bert": 1, "vit": 2, "dam": 4}[kind]
    assert losses(fast) == pytest.approx(losses(plain), rel=1e-5)
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
            assert losses(histories[0]) == pytest.approx(losses(histories[1]), rel=1e-5)
            assert len(seen) > before
    assert len(seen) > 3


def test_a_hook_in_one_of_the_layers_is_not_left_out(seen):
    def history(plan, hooked):
        model = tiny_vit()
        if hooked:
            repeated_layers(model)[1].mlp.register_forward_hook(lambda module, args, output: 0 * output)
        return losses(fit(model, pictures(), pictures(), plan).history)

    assert history(PLAN, hooked=True) != pytest.approx(history(PLAN, hooked=False), rel=1e-3)
    for hooked in (True, False, True):
        assert history(ON, hooked) == pytest.approx(history(PLAN, hooked), rel=1e-5)
    assert len(seen) == 3  # with the hook, without it, and the patches


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
    assert len(seen) == 2  # one for all layers, one for the patches


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


@pytest.mark.parametrize(
    ("window", "picture", "bias"), [((4, 4), (8, 12), True), ((2, 3), (7, 8), True), ((5, 5), (5, 5), False)]
)
def test_patches_are_those_of_the_convolution_with_the_same_gradients(window, picture, bias):
    torch.manual_seed(0)
    cut = nn.Conv2d(3, 6, window, stride=window, bias=bias).double()
    assert patch_embeddings(nn.Sequential(cut)) == [cut]
    x = torch.randn(2, 3, *picture, dtype=torch.double, requires_grad=True)
    ways = []
    for forward in (cut, lambda x: patches(cut, x)):
        found = forward(x)
        gradients = torch.autograd.grad(found.square().sum(), [x, *cut.parameters()])
        ways.append((found, *gradients))
    torch.testing.assert_close(ways[0], ways[1])


@pytest.mark.parametrize(
    "other", [{"stride": 2}, {"padding": 1}, {"groups": 3}, {"dilation": 2}, {"kernel_size": 1, "stride": 1}]
)
def test_other_convolutions_are_left_alone(other):
    assert patch_embeddings(nn.Sequential(nn.Conv2d(3, 6, **{"kernel_size": 4, "stride": 4, **other}))) == []


def test_a_convolution_of_another_kind_is_left_alone():
    class Standardised(nn.Conv2d):
        def _conv_forward(self, pictures, weight, bias):
            return super()._conv_forward(pictures, weight - weight.mean(), bias)

    class Padded(nn.Conv2d):
        def forward(self, pictures):
            return super().forward(nn.functional.pad(pictures, (1, 1, 1, 1)))

    class Renamed(nn.Conv2d):
        pass

    kinds = [kind(3, 6, 4, stride=4) for kind in (Standardised, Padded, Renamed)]
    assert patch_embeddings(nn.Sequential(*kinds)) == kinds[2:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("padded", [False, True])
def test_a_gpu_replays_compiled_layers_with_other_dropout_at_every_step(padded):
    """With a rate of nothing and one batch, losses of replayed steps differ by dropout alone."""
    device = torch.device("cuda")
    model = tiny_bert(dropout=0.2).to(device).train()
    found = texts()
    mask = found.inputs["attention_mask"] if padded else torch.ones(32, 9, dtype=torch.long)
    inputs = {"input_ids": found.inputs["input_ids"].to(device), "attention_mask": mask.to(device)}
    batch = Batch(inputs, found.labels.to(device), torch.arange(32, device=device))
    step = Step(ClassifierLoss(model, layers=CompiledLayers(model, device)), optimizer_of(model, 1e-30, 0.0))
    recorded = Recorded(step, recorder_for(device), model)
    values = [recorded(batch).item() for _ in range(30)]
    assert recorded.replays, recorded.as_it_is
    assert len(set(values[10:])) > 15


def test_a_processor_does_without(caplog):
    assert CompiledLayers(tiny_vit(), torch.device("cpu")).as_they_are == "only steps on a GPU gain from it"
    data = pictures()
    with caplog.at_level(logging.WARNING, logger="fairhead"):
        assert fit(tiny_vit(), data, data, ON).history == fit(tiny_vit(), data, data, PLAN).history
    assert not caplog.records


def test_a_machine_without_a_compiler_trains_uncompiled():
    def refuses(graph, inputs):
        raise OSError("no compiler here")

    before, recorded._BACKEND = recorded._BACKEND, refuses
    try:
        reason = recorded._try_out(torch.device("cpu"))
    finally:
        recorded._BACKEND = before
    assert reason is not None
    assert "no compiler here" in reason
    say_once.cache_clear()
