"""Where methods enter the loop: the loss of a batch, the rows of an epoch, the choice of an epoch; and processes."""

import os
import warnings
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from several_processes import as_launched, in_processes
from shortcut import SmallNet, build_model, shortcut
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import SubsetRandomSampler
from transformers import ViTConfig, ViTForImageClassification

from fairhead.errors import InputError
from fairhead.mitigate import DAM, attach, method, run
from fairhead.mitigate.hard_rows import PairOutput, TwinLoss
from fairhead.mitigate.references import run_with_attributes
from fairhead.train import LanguagePlan, TrainingPlan
from fairhead.train.fitting import LAST_EPOCH, fit, predict, worst_accuracy
from fairhead.train.loop import gathered
from fairhead.train.step import Examples
from fairhead.train.tuning import Look, tune


@pytest.fixture
def task():
    return shortcut(n=200)


PLAN = TrainingPlan(epochs=2, batch_size=32)


def test_a_loss_sees_what_the_model_returned_the_labels_and_their_rows(task):
    seen = []

    def loss(output, labels, rows):
        assert output.loss is None  # the model was not given the labels
        assert torch.equal(labels, task.train.labels[rows])
        seen.append(rows)
        return cross_entropy(output.logits, labels)

    model, twin = build_model(), build_model()
    fit(model, task.train, task.validation, PLAN, loss=loss)
    for epoch in (torch.cat(seen[:6]), torch.cat(seen[6:])):
        assert len(epoch.unique()) == len(epoch) == 192  # each row once; the last, smaller batch is left out
    # The model's own loss is this one: the same steps, the same weights.
    fit(twin, task.train, task.validation, PLAN)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_loss_may_be_a_method_of_a_class(task):
    class Plain:
        @classmethod
        def loss(cls, output, labels, rows):
            return cross_entropy(output.logits, labels)

    assert fit(build_model(), task.train, task.validation, PLAN, loss=Plain.loss).steps == 12


def test_a_sampler_decides_which_rows_are_shown(task):
    seen = []

    def loss(output, labels, rows):
        seen.append(rows)
        return cross_entropy(output.logits, labels)

    sampler = SubsetRandomSampler([3] * 30 + [5] * 34, generator=torch.Generator().manual_seed(0))
    done = fit(build_model(), task.train, task.validation, PLAN, loss=loss, sampler=sampler)
    assert done.steps == len(seen) == 4
    assert torch.bincount(torch.cat(seen[:2])).tolist() == [0, 0, 0, 30, 0, 34]


def test_frozen_weights_stay_as_they_are(task):
    model = build_model()
    model.hidden.requires_grad_(False)
    before = model.hidden.weight.clone(), model.classifier.weight.clone()
    fit(model, task.train, task.validation, PLAN)
    assert torch.equal(model.hidden.weight, before[0])
    assert not torch.equal(model.classifier.weight, before[1])


def test_data_kept_on_the_device_gives_the_same_model(task):
    weights = []
    for keep in (True, False):
        model = build_model()
        fit(
            model, task.train, task.validation, TrainingPlan(epochs=2, batch_size=32, data_on_device=keep, device="cpu")
        )
        weights.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(*weights)


def test_bf16_trains_in_32_bit_weights(task):
    model = build_model()
    seen = set()
    model.classifier.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    done = fit(
        model, task.train, task.validation, TrainingPlan(epochs=6, batch_size=32, learning_rate=1e-2, precision="bf16")
    )
    assert seen == {torch.bfloat16}
    assert model.classifier.weight.dtype == torch.float32
    assert done.best.validation_accuracy > 0.9
    found = predict(model, task.validation, precision="bf16")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, predict(model, task.validation), rtol=0, atol=0.02)


def test_the_last_epoch_can_be_asked_for(task):
    done = fit(build_model(), task.train, task.validation, PLAN, selection=LAST_EPOCH)
    assert done.best == done.history[-1]


def test_cells_that_nobody_falls_in_do_not_count():
    predicted, labels = torch.tensor([0, 1, 1, 1]), torch.tensor([0, 1, 0, 1])
    assert worst_accuracy(predicted, labels, torch.tensor([7, 7, 100, 100])) == 0.5
    assert worst_accuracy(predicted, labels, labels) == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs is 0; expected a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; expected a number above 0"),
        ({"precision": "fp16"}, "precision is 'fp16'; expected no or bf16"),
    ],
)
def test_plans_that_cannot_be_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        TrainingPlan(**settings)


# Their losses look at a batch as a whole, or remember what they saw: a share of it is not enough.
OF_WHOLE_BATCHES = {"dro_cvar": {}, "dro_chi2": {}, "arl": {"pretrain": 0}, "lff": {}, "eiil": {"step_size": 0.5}}


def in_process(rank, processes, folder, port):
    """Train with several methods as one of several processes, as torchrun would start it."""
    os.environ |= as_launched(rank, processes, port)
    warnings.simplefilter("error")  # what is raised here fails the test
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = Examples({"pixel_values": torch.randn(32, 1, 4, 4)}, torch.arange(32) % 2)
    model, plan = tiny_vit(), TrainingPlan(epochs=2, batch_size=8, weight_decay=0.0)
    done = fit(attach(model, DAM()), data, data, plan)
    found = {"weights": model.state_dict(), "losses": [epoch.loss for epoch in done.history]}
    for name, options in OF_WHOLE_BATCHES.items():
        trained = run(method(name, **options), tiny_vit, data, data, plan)
        found["weights"] |= {f"{name}: {key}": tensor for key, tensor in trained.model.state_dict().items()}
    for name in ("fscl", "tadet", "dsa"):
        groups = torch.arange(32) // 2 % 2
        trained = run_with_attributes(method(name), tiny_vit, data, data, groups, groups, plan)
        found["weights"] |= {f"{name}: {key}": tensor for key, tensor in trained.model.state_dict().items()}
    options = {"candidates": ("balance",), "clusters": 2, "encoder": lambda rows: features_in(rank, len(rows))}
    trained = run(method("auto", **options), tiny_vit, data, data, plan)
    found["weights"] |= {f"balance: {key}": tensor for key, tensor in trained.model.state_dict().items()}
    check_gradient_of_a_sum(rank, processes)
    found["twins"] = turned_labels(rank, processes)
    found["tuned"] = tuned(2 // processes, rank)
    torch.save(found, f"{folder}/{processes}-{rank}.pt")
    if processes > 1:
        torch.distributed.destroy_process_group()


def features_in(rank, n):
    """Two clusters that go along with the label; another two in the second process, as on other hardware."""
    row = torch.arange(n)
    cluster = (row % 2 == 1) | (row % 8 == 0) if rank == 0 else row < n // 2
    return torch.stack([cluster, ~cluster], 1).float() + 0.01 * torch.randn(n, 2)


def check_gradient_of_a_sum(rank, processes):
    """Autograd gives both terms one and the same gradient, which gathering must not change."""
    x, weight = torch.ones(2, requires_grad=True), torch.arange(2.0 * processes)
    ((gathered(x) + gathered(2 * x)) * weight).sum().backward()
    torch.testing.assert_close(x.grad, processes * 3 * weight[2 * rank : 2 * rank + 2])


def tuned(pieces, rank):
    """A language model's loop over 5 examples in batches of 2: the last has nothing for a second process.

    Which weights are kept is for the first process to say; the second would stay with those before training.
    """
    torch.manual_seed(0)
    looks = count()
    net = torch.nn.Linear(3, 1)
    examples = torch.randn(5, 3)

    def loss(batch):
        return {"loss": net(torch.stack(batch)).square().mean(), "size": torch.tensor(float(len(batch)))}

    plan = LanguagePlan(epochs=2, batch_size=2, learning_rate=0.1, accumulate=pieces, checks=3)
    done = tune(net, list(examples), [1] * 5, loss, plan, look=lambda: Look(0.7, 10.0 ** (rank * next(looks))))
    return [done.chosen, *net.weight.flatten().tolist(), *(part["loss"] for part in done.history)]


def turned_labels(rank, processes):
    """XRM's loss, and its labels after the twins have been sure of classes 1 and 0 in turn."""
    loss = TwinLoss(torch.arange(8) // 4, torch.Generator().manual_seed(0))
    rows = torch.arange(8)[rank::processes]
    logits = 40 * torch.nn.functional.one_hot((rows + 1) % 2, 2).float()
    value = loss(PairOutput(logits, logits), loss.labels[rows], rows)
    return [value.item(), *loss.labels.tolist()]


def tiny_vit():
    torch.manual_seed(0)
    shape = {"image_size": 4, "patch_size": 2, "num_channels": 1, "hidden_size": 16, "intermediate_size": 16}
    return ViTForImageClassification(ViTConfig(num_hidden_layers=2, num_attention_heads=4, **shape))


def test_two_processes_train_the_model_of_one(tmp_path):
    found = {}
    for processes in (1, 2):
        in_processes(in_process, processes, tmp_path, count=processes)
        found[processes] = [torch.load(f"{tmp_path}/{processes}-{rank}.pt") for rank in range(processes)]
    (one,) = found[1]
    for half in found[2]:
        for name, tensor in one["weights"].items():
            # Attention does not depend on these biases where q and k are centred: their gradient is rounding alone.
            if not name.endswith(("q_proj.bias", "k_proj.bias")):
                torch.testing.assert_close(half["weights"][name], tensor, rtol=1e-3, atol=1e-4)
        assert half["twins"] == pytest.approx(one["twins"])
        assert half["tuned"] == pytest.approx(one["tuned"], rel=1e-4)
        assert half["tuned"][0] == 6  # the last step
        assert half["losses"] == pytest.approx(one["losses"], rel=1e-4)


def test_a_batch_that_cannot_be_shared_is_refused(task, monkeypatch):
    two = SimpleNamespace(num_processes=2, process_index=0, device=torch.device("cpu"))
    monkeypatch.setattr("fairhead.train.fitting.joined", lambda: two)
    with pytest.raises(InputError, match="a batch of 5 rows cannot be shared evenly by 2 processes"):
        fit(build_model(), task.train, task.validation, TrainingPlan(batch_size=5))


def test_a_small_net_answers_as_a_hugging_face_model():
    assert SmallNet()(torch.zeros(1, 10)).loss is None
