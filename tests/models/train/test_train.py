"""The training loop: it learns, it chooses by validation accuracy, it repeats itself, it refuses what it must."""

import math

import pytest
import torch
from sklearn.metrics import accuracy_score
from torch import nn
from transformers import ViTConfig, ViTForImageClassification
from transformers.modeling_outputs import ImageClassifierOutput

from fairhead.errors import InputError
from fairhead.train import LanguagePlan, TrainingPlan
from fairhead.train.fitting import fit, predict
from fairhead.train.loop import TrainingDiverged
from fairhead.train.step import Examples


def tiny_vit(seed=0):
    torch.manual_seed(seed)
    return ViTForImageClassification(
        ViTConfig(
            image_size=4,
            patch_size=2,
            num_channels=1,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )


def bright_or_dark(n, seed=0):
    """Label 1 pictures are brighter: easy to learn."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2
    pixels = torch.randn(n, 1, 4, 4, generator=generator) + 2.0 * labels[:, None, None, None] - 1.0
    return Examples({"pixel_values": pixels}, labels)


PLAN = TrainingPlan(epochs=6, batch_size=16, learning_rate=5e-3)


def test_it_learns_and_holds_the_weights_of_its_best_epoch():
    model, train, validation = tiny_vit(), bright_or_dark(128), bright_or_dark(60, seed=1)
    seen = []
    done = fit(model, train, validation, PLAN, seen.append)
    assert tuple(seen) == done.history
    assert len(seen) == 6
    assert done.best == max(seen, key=lambda epoch: epoch.validation_accuracy)  # max gives the first of equals
    predicted = predict(model, validation).argmax(-1)
    assert accuracy_score(validation.labels, predicted) == done.best.validation_accuracy > 0.95


def test_the_best_epoch_is_restored_not_the_last():
    class Scripted(nn.Module):
        """Predicts class 1 in epoch 2 only; all validation labels but one are 1."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, pixel_values, labels=None):
            if self.training:
                self.steps += 1
            score = (self.steps == 2).float() * 2 - 1
            logits = torch.stack([-score, score]).expand(len(pixel_values), 2) + 0 * self.weight
            return ImageClassifierOutput(loss=logits.sum() * 0 + self.weight.sum(), logits=logits)

    data = Examples({"pixel_values": torch.zeros(4, 1)}, torch.tensor([1, 1, 1, 0]))
    model = Scripted()
    done = fit(model, data, data, TrainingPlan(epochs=4, batch_size=4))
    assert [epoch.validation_accuracy for epoch in done.history] == [0.25, 0.75, 0.25, 0.25]
    assert done.best.number == 2
    assert model.steps == 2


def test_the_same_seed_gives_the_same_model_and_another_seed_another():
    weights = []
    for seed in (0, 0, 1):
        model = tiny_vit()
        torch.manual_seed(99 + len(weights))  # what went before must not matter
        fit(model, bright_or_dark(64), bright_or_dark(20), TrainingPlan(epochs=2, batch_size=16, seed=seed))
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_one_step_is_adamw_on_the_models_loss():
    model, twin, data = tiny_vit(), tiny_vit(), bright_or_dark(8)
    plan = TrainingPlan(epochs=1, batch_size=8, learning_rate=1e-2, weight_decay=0.1, warmup=0, max_grad_norm=None)
    fit(model, data, data, plan)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1)
    twin.train()
    twin(pixel_values=data.inputs["pixel_values"], labels=data.labels).loss.backward()
    optimizer.step()
    for name, parameter in twin.named_parameters():
        # AdamW's first step is the sign of the gradient; where that is zero but for rounding, the sign is chance.
        clear = parameter.grad.abs() > 1e-6
        assert clear.any() or name.endswith("k_proj.bias")
        torch.testing.assert_close(model.get_parameter(name)[clear], parameter[clear], rtol=1e-4, atol=1e-6)


def test_the_schedule_warms_up_and_comes_down_as_a_cosine():
    plan = TrainingPlan(warmup=0.1)
    rates = [plan.rate(step, 100) for step in range(101)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[55] == pytest.approx(0.5 * (1 + math.cos(math.pi * 45 / 90)))
    assert rates[100] == pytest.approx(0, abs=1e-12)
    assert TrainingPlan(schedule="constant", warmup=0.1).rate(80, 100) == 1.0
    linear = LanguagePlan(warmup=0.1)
    assert [linear.rate(step, 100) for step in (0, 9, 55, 99)] == pytest.approx([0.1, 1.0, 0.5, 1 / 90])


def test_a_nan_loss_stops_names_the_step_and_brings_back_the_last_good_weights():
    train = bright_or_dark(32)
    good = tiny_vit()
    fit(good, train, train, TrainingPlan(epochs=1, batch_size=16, warmup=0, schedule="constant"))

    calls = []

    def break_the_fourth_step(module, args, output):
        if module.training:
            calls.append(1)
            if len(calls) == 4:
                output.loss = output.loss * float("nan")
        return output

    model = tiny_vit()
    model.register_forward_hook(break_the_fourth_step)
    with pytest.raises(TrainingDiverged, match=r"loss was nan at step 4 \(epoch 2 of 3\).* back at epoch 1"):
        fit(model, train, train, TrainingPlan(epochs=3, batch_size=16, warmup=0, schedule="constant"))
    for name, parameter in good.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=0, atol=0)


def test_weights_that_the_last_step_spoils_are_not_kept():
    """Every loss is finite: only what comes after shows it."""
    train, model = bright_or_dark(16), tiny_vit()
    plan = TrainingPlan(epochs=1, batch_size=16, warmup=0, schedule="constant", learning_rate=1e30, weight_decay=0)
    with pytest.raises(TrainingDiverged, match=r"predictions were not finite \(epoch 1 of 1\).* back at its first"):
        fit(model, train, train, plan)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tiny_vit().parameters(), strict=True))


def test_nan_pixels_leave_the_first_weights():
    train = bright_or_dark(32)
    train.inputs["pixel_values"][3] = float("nan")
    model = tiny_vit()
    with pytest.raises(TrainingDiverged, match="back at its first weights"):
        fit(model, train, train, TrainingPlan(epochs=1, batch_size=16))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tiny_vit().parameters(), strict=True))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (Examples({"pixel_values": torch.zeros(20, 1, 4, 4)}, torch.ones(20, dtype=torch.long)), "only class LABEL_1"),
        (bright_or_dark(10), "10 rows, fewer than one batch of 16"),
        (
            Examples({"pixel_values": torch.zeros(20, 1, 4, 4), "race": torch.zeros(20)}, torch.arange(20) % 2),
            "'race' is not an input of ViTForImageClassification.*training never sees them",
        ),
    ],
)
def test_bad_training_sets_are_refused(train, message):
    with pytest.raises(InputError, match=message):
        fit(tiny_vit(), train, bright_or_dark(20), PLAN)


def test_examples_must_agree_in_length():
    with pytest.raises(InputError, match="3 rows but there are 2 labels"):
        Examples({"pixel_values": torch.zeros(3, 1)}, torch.tensor([0, 1]))
    with pytest.raises(InputError, match="apart from the labels"):
        Examples({"labels": torch.zeros(2)}, torch.tensor([0, 1]))
