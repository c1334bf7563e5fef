"""DSA: its parts against values worked out by hand and SciPy's, and a shortcut in one patch that it learns to leave."""

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import entropy
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

from fairhead.errors import InputError, UnsupportedModel
from fairhead.mitigate import method, run
from fairhead.mitigate.references import JobWithAttributes, run_with_attributes
from fairhead.mitigate.references.dsa import attention_divergence, pasted, telling_patches, without_conflict
from fairhead.train import TrainingPlan
from fairhead.train.fitting import predict
from fairhead.train.step import Examples

PLAN = TrainingPlan(epochs=6, batch_size=64, learning_rate=3e-3, weight_decay=0.0, device="cpu")
TELLING = 3  # the patch that shows the group


def rows(n, follows, seed):
    """Pictures of 2 × 2 patches: the label is faint in the first, the group is plain in the last."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (n,), generator=chance)
    groups = labels ^ (torch.rand(n, generator=chance) >= follows).long()
    pixels = 0.5 * torch.randn(n, 1, 8, 8, generator=chance)
    pixels[:, :, :4, :4] += (0.15 * (2.0 * labels - 1)).view(-1, 1, 1, 1)
    pixels[:, :, 4:, 4:] += (1.5 * (2.0 * groups - 1)).view(-1, 1, 1, 1)
    return Examples({"pixel_values": pixels}, labels), groups


def build_model(layers=2):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": layers}
    return ViTForImageClassification(ViTConfig(**shape, image_size=8, patch_size=4, num_channels=1))


@pytest.fixture(scope="module")
def task():
    return rows(1500, 0.95, 0), rows(500, 0.95, 1), rows(1000, 0.5, 2)


def test_the_attack_misleads_the_model_of_the_group_where_it_looks(task):
    (train, groups), (validation, other), _ = task
    config = method("dsa", layer=0)
    job = JobWithAttributes(build_model, train, validation, PLAN, groups_train=groups, groups_validation=other)
    model = config._model_of_groups(job)
    noise, places = config._attacked(model, job)
    assert (places == TELLING).float().mean() > 0.5  # by chance: a quarter
    pixels = train.inputs["pixel_values"]
    double = pasted(pixels, noise, places)
    right = [(predict(model, Examples({"pixel_values": x}, groups)).argmax(-1) == groups) for x in (pixels, double)]
    assert right[0].float().mean() > 0.95
    assert right[1].float().mean() < 0.2
    # The noise shows the other group, and stays among the values of pictures.
    found = places[:, 0] == TELLING
    assert noise[found & (groups == 0)].mean() > 0.5
    assert noise[found & (groups == 1)].mean() < -0.5
    assert noise.min() >= pixels.min()
    assert noise.max() <= pixels.max()


def test_a_shortcut_that_plain_training_takes_is_left(task):
    (train, groups), (validation, other), (test, test_groups) = task
    against = test_groups != test.labels

    def accuracy_against(config):
        trained = run_with_attributes(
            config, build_model, train, validation, groups, other, PLAN, selection="worst_group"
        )
        return (predict(trained.model, test).argmax(-1) == test.labels)[against].float().mean().item(), trained

    plain, _ = accuracy_against(method("erm"))
    even, trained = accuracy_against(method("dsa", layer=0))
    assert even > plain + 0.15
    assert [stage.name for stage in trained.stages] == ["model of the group", "attack", "training with doubles"]
    # What is handed back is the model itself, with two classes and nothing left hanging on it.
    assert type(trained.model) is ViTForImageClassification
    assert not trained.model._forward_pre_hooks
    assert trained.model(pixel_values=test.inputs["pixel_values"][:3]).logits.shape == (3, 2)


def test_the_loss_is_that_of_both_pictures_and_the_attention_between_them():
    (train, groups), (validation, other) = rows(64, 0.9, 0), rows(64, 0.9, 1)
    seen = []
    config = method("dsa", weight=0.7)
    job = JobWithAttributes(
        lambda: build_model(1), train, validation, PLAN, groups_train=groups, groups_validation=other
    )
    whole_fit = job.fit

    def fit(stage, model, *, train=None, loss=None, **more):
        if stage == "training with doubles":
            inputs = train.take(torch.arange(5)).inputs
            output = model.train()(**inputs)
            seen.append((loss(output, train.labels[:5], torch.arange(5)).item(), inputs))
        return whole_fit(stage, model, train=train, loss=loss, **more)

    job.fit = fit
    job.plan = TrainingPlan(epochs=1, batch_size=32, device="cpu")
    config.train(job)
    value, inputs = seen[0]
    eager = build_model(1)
    eager.set_attn_implementation("eager")
    double = pasted(inputs["pixel_values"], inputs["noise"], inputs["places"])
    one, two = (eager(pixel_values=x, output_attentions=True) for x in (inputs["pixel_values"], double))
    by_hand = sum(cross_entropy(output.logits, train.labels[:5]).item() for output in (one, two))
    softened = [softmax(np.log(x.attentions[0].detach().double().numpy()) / 3, axis=-1) for x in (one, two)]
    by_hand += 0.7 * 0.5 * entropy(*softened, axis=-1).mean()
    assert value == pytest.approx(by_hand, rel=1e-5)


def test_the_most_attended_patches_are_found_without_the_first_token():
    weights = torch.zeros(2, 3, 5, 5)
    weights[0, :, :, 0], weights[0, :, :, 4], weights[0, :, 2, 2] = 9.0, 1.0, 1.5
    weights[1, 1, :, 1] = 1.0
    assert telling_patches(weights, 2)[0].tolist() == [3, 1]
    assert telling_patches(weights, 1)[1].tolist() == [0]
    with pytest.raises(InputError, match="replace 5 patches; pictures have 4"):
        telling_patches(weights, 5)


def test_patches_are_pasted_where_they_belong():
    torch.manual_seed(0)
    pixels, noise, places = torch.rand(2, 3, 6, 9), torch.rand(2, 2, 3, 3, 3), torch.tensor([[5, 0], [1, 3]])
    expected = pixels.clone()
    for row in range(2):
        for patch, place in zip(noise[row], places[row].tolist(), strict=True):
            top, left = 3 * (place // 3), 3 * (place % 3)
            expected[row, :, top : top + 3, left : left + 3] = patch
    assert torch.equal(pasted(pixels, noise, places), expected)


def test_what_conflicts_is_taken_out_and_nothing_else():
    torch.manual_seed(0)
    side, main = torch.randn(6, 2, 3), torch.randn(6, 2, 3)
    left = without_conflict(side, main)
    along = [(x * main).sum((1, 2)) for x in (side, left)]
    assert (along[1] > -1e-5).all()
    assert torch.equal(left[along[0] > 0], side[along[0] > 0])
    assert torch.isfinite(without_conflict(side, torch.zeros_like(main))).all()


def test_the_divergence_is_scipy_s():
    torch.manual_seed(0)
    one, other = (torch.randn(2, 2, 4, 4).softmax(-1) for _ in range(2))
    expected = 0.5 * entropy(one.numpy(), other.numpy(), axis=-1).mean()
    assert attention_divergence(one, other, temperature=1.0).item() == pytest.approx(expected, rel=1e-4)
    assert attention_divergence(one, one).item() == pytest.approx(0, abs=1e-6)
    zero = torch.tensor([[[[1.0, 0.0]]]])
    assert torch.isfinite(attention_divergence(zero, zero.flip(-1)))


def test_what_cannot_be_done_is_said(task):
    (train, _), (validation, _), _ = task
    dsa = method("dsa")
    with pytest.raises(InputError, match="uses the sensitive attribute"):
        run(dsa, build_model, train, validation, PLAN)
    ids = torch.ones(8, 4, dtype=torch.long)
    texts = Examples({"input_ids": ids}, torch.arange(8) % 2)

    def build_text():
        return BertForSequenceClassification(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))

    with pytest.raises(UnsupportedModel, match="it needs pictures"):
        run_with_attributes(dsa, build_text, texts, texts, texts.labels, texts.labels, PLAN)
    with pytest.raises(InputError, match="at least 1"):
        method("dsa", patches=0)
