"""Losses and weights of the methods against values worked out by hand, brute force and SciPy."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, NonlinearConstraint, minimize
from scipy.stats import chi2_contingency
from shortcut import build_model
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from fairhead.mitigate import method, run
from fairhead.mitigate.hard_rows import FailureLoss, PairOutput, TwinLoss, _AdversarialLoss, chi2_weights, cvar_weights
from fairhead.mitigate.row_weights import label_offsets
from fairhead.mitigate.training_job import Adjusted, GroupLoss, balanced
from fairhead.mitigate.two_stages import _DistillationLoss, environments, scale_gradients
from fairhead.train import TrainingPlan
from fairhead.train.kmeans import independent_weights
from fairhead.train.step import Examples

LOSSES = st.lists(st.floats(0, 10), min_size=2, max_size=8).map(lambda x: torch.tensor(x, dtype=torch.float64))


def output(logits):
    return SimpleNamespace(logits=logits)


def some_logits(rows=6, classes=3, seed=0):
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed), requires_grad=True)


# DRO


@settings(max_examples=40)
@given(LOSSES, st.floats(0.15, 0.95))
def test_chi2_weights_are_the_worst_in_the_ball(losses, alpha):
    n, radius = len(losses), (1 / alpha - 1) ** 2
    weights = chi2_weights(losses, alpha)
    assert weights.min() >= 0
    assert weights.sum().item() == pytest.approx(1)
    assert ((n * weights - 1) ** 2).mean().item() / 2 <= radius * (1 + 1e-6) + 1e-9
    ball = NonlinearConstraint(lambda w: ((n * w - 1) ** 2).mean() / 2, -np.inf, radius)
    found = minimize(
        lambda w: -w @ losses.numpy(),
        np.full(n, 1 / n),
        jac=lambda w: -losses.numpy(),
        bounds=[(0, 1)] * n,
        constraints=[ball, LinearConstraint(np.ones(n), 1, 1)],
        method="SLSQP",
        options={"maxiter": 500},
    )
    # SciPy's point may stop short of the edge of the ball, or a little beyond it: there it is drawn back. Nothing
    # within the ball is worse than ours.
    beyond = ((n * found.x - 1) ** 2).mean() / 2
    inside = 1 / n + (found.x - 1 / n) * min(1.0, (radius / max(beyond, 1e-300)) ** 0.5)
    assert (weights @ losses).item() >= inside @ losses.numpy() - 1e-6


def test_chi2_reaches_the_dual_optimum():
    losses = torch.tensor([0.1, 0.2, 0.9, 2.0, 0.4], dtype=torch.float64)
    for alpha in (0.3, 0.5, 0.8):
        scale = math.sqrt(2 * (1 / alpha - 1) ** 2 + 1)
        etas = np.linspace(-50, 2, 200_001)
        dual = (scale * np.sqrt((np.maximum(losses.numpy()[:, None] - etas, 0) ** 2).mean(0)) + etas).min()
        assert (chi2_weights(losses, alpha) @ losses).item() == pytest.approx(dual, rel=1e-6)


@given(LOSSES, st.floats(0.05, 1.0))
def test_cvar_is_the_dual_of_rockafellar_and_uryasev(losses, alpha):
    # CVaR = min over η of η + mean(max(ℓ − η, 0)) / α; the minimum is at one of the losses.
    dual = min((eta + (losses - eta).clamp(min=0).mean() / alpha).item() for eta in losses)
    assert (cvar_weights(losses, alpha) @ losses).item() == pytest.approx(dual, rel=1e-9, abs=1e-9)


def test_fixed_dro_by_hand():
    logits = torch.tensor([[0.0, 0.0], [5.0, 0.0]])
    value = method("dro", eta=0.25, power=2.0).loss(output(logits), torch.tensor([0, 0]), torch.arange(2))
    assert value.item() == pytest.approx((math.log(2) - 0.25) ** 2 / 2)  # the second loss lies below η


def test_the_robust_gradient_is_the_weighted_one():
    logits, labels = some_logits(), torch.tensor([0, 1, 2, 0, 1, 2])
    config = method("dro_cvar", alpha=0.5)
    (robust,) = torch.autograd.grad(config.loss(output(logits), labels, torch.arange(6)), logits)
    losses = cross_entropy(logits, labels, reduction="none")
    (worst,) = torch.autograd.grad(losses.topk(3).values.mean(), logits)
    torch.testing.assert_close(robust, worst)


# ARL, KD, LfF


def test_arl_goes_down_for_the_learner_and_up_for_the_adversary():
    learner, scores, labels = some_logits(), some_logits(seed=1), torch.tensor([0, 1, 2, 0, 1, 2])
    loss = _AdversarialLoss(method("arl", pretrain=0), 6)
    value = loss(PairOutput(learner, scores), labels, torch.arange(6))
    losses = cross_entropy(learner, labels, reduction="none")
    chance = scores.gather(1, labels[:, None])[:, 0].sigmoid()
    weights = 1 + chance / chance.mean()
    assert value.item() == pytest.approx((weights * losses).mean().item())
    found = torch.autograd.grad(value, [learner, scores])
    torch.testing.assert_close(found[0], torch.autograd.grad((weights.detach() * losses).mean(), learner)[0])
    torch.testing.assert_close(found[1], -torch.autograd.grad((weights * losses.detach()).mean(), scores)[0])


def test_arl_waits_for_its_adversary():
    learner, scores, labels = some_logits(), some_logits(seed=1), torch.tensor([0, 1, 2, 0, 1, 2])
    loss = _AdversarialLoss(method("arl", pretrain=1), 6)
    first = loss(PairOutput(learner, scores), labels, torch.arange(6))
    assert first.item() == pytest.approx(cross_entropy(learner, labels).item())
    assert torch.autograd.grad(first, scores)[0].abs().max() == 0
    second = loss(PairOutput(learner, scores), labels, torch.arange(6))
    assert torch.autograd.grad(second, scores)[0].abs().max() > 0


def test_distillation_is_the_divergence_from_the_teacher():
    student, teacher, labels = some_logits(), some_logits(seed=1).detach(), torch.tensor([0, 1, 2, 0, 1, 2])
    rows = torch.tensor([5, 3, 1, 0, 2, 4])
    everyone = torch.empty_like(teacher)
    everyone[rows] = teacher
    for share, temperature in ((1.0, 1.0), (0.3, 1.0), (1.0, 3.0)):
        loss = _DistillationLoss(softmax(everyone, -1), share, temperature)
        (found,) = torch.autograd.grad(loss(output(student), labels, rows), student)
        softened = softmax(teacher / temperature, -1)
        target = kl_div(log_softmax(student / temperature, -1), softened, reduction="batchmean") * temperature**2
        (expected,) = torch.autograd.grad(share * target + (1 - share) * cross_entropy(student, labels), student)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_lff_by_hand_over_two_visits():
    labels = torch.tensor([0, 0, 1])
    loss = FailureLoss(labels, q=0.7, memory=0.7)

    def ce(logits, rows):
        return cross_entropy(logits, labels[rows], reduction="none").detach()

    own1, biased1 = some_logits(3, 2, seed=1), some_logits(3, 2, seed=2)
    rows = torch.arange(3)
    loss(PairOutput(own1, biased1), labels, rows)
    own_memory, biased_memory = ce(own1, rows), ce(biased1, rows)  # the first visit overwrites

    rows = torch.tensor([2, 0])
    own2, biased2 = some_logits(2, 2, seed=3), some_logits(2, 2, seed=4)
    value = loss(PairOutput(own2, biased2), labels[rows], rows)
    own_memory[rows] = 0.7 * own_memory[rows] + 0.3 * ce(own2, rows)
    biased_memory[rows] = 0.7 * biased_memory[rows] + 0.3 * ce(biased2, rows)
    expected = 0.0
    for place, row in enumerate(rows.tolist()):
        mates = labels == labels[row]
        own = own_memory[row] / own_memory[mates].max()
        biased = biased_memory[row] / biased_memory[mates].max()
        p = softmax(biased2, -1)[place, labels[row]]
        expected += biased / (biased + own) * ce(own2, rows)[place] / 2
        expected += 0.7 * p**0.7 * ce(biased2, rows)[place] / 2
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)


def test_lff_clings_by_generalised_cross_entropy():
    labels, q = torch.tensor([0, 1, 0]), 0.7
    own, biased = some_logits(3, 2), some_logits(3, 2, seed=1)
    value = FailureLoss(labels, q=q)(PairOutput(own, biased), labels, torch.arange(3))
    (found,) = torch.autograd.grad(value, biased)
    p = softmax(biased, -1).gather(1, labels[:, None])[:, 0]
    # d/dθ (1 − p^q)/q = p^q dCE: the published loss without its factor q.
    (expected,) = torch.autograd.grad(((1 - p**q) / q).mean() * q, biased)
    torch.testing.assert_close(found, expected)


def test_lff_of_the_release_is_two_heads_on_one_encoder(monkeypatch):
    """Held against a loop written after DAM's released notebook: one encoder, two heads, q = 0.3."""
    data = Examples({"x": torch.randn(64, 10, generator=torch.Generator().manual_seed(0))}, torch.arange(64) % 2)
    plan = TrainingPlan(epochs=3, batch_size=32, weight_decay=0.0, schedule="constant", warmup=0.0, max_grad_norm=None)
    batches = []
    whole = FailureLoss.__call__
    monkeypatch.setattr(FailureLoss, "__call__", lambda *given: batches.append(given[3].clone()) or whole(*given))
    trained = run(method("lff_release"), build_model, data, data, plan, selection="last_epoch")
    assert [stage.steps for stage in trained.stages] == [6] == [len(batches)]

    model = build_model()
    encoder, heads = model.hidden, [model.classifier, copy.deepcopy(model.classifier)]  # predicting, biased
    parameters = [*encoder.parameters(), *heads[0].parameters(), *heads[1].parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=plan.learning_rate, weight_decay=0.0)
    memory, visited = torch.zeros(2, 64), torch.zeros(64)
    for rows in batches:
        labels = data.labels[rows]
        features = encoder(data.inputs["x"][rows]).tanh()
        losses = torch.stack([cross_entropy(head(features), labels, reduction="none") for head in heads])
        with torch.no_grad():
            memory[:, rows] = 0.7 * memory[:, rows] + (1 - 0.7 * visited[rows]) * losses
            visited[rows] = 1
            now = memory[:, rows].clone()
            for label in (0, 1):
                now[:, labels == label] /= memory[:, data.labels == label].amax(1, keepdim=True)
            weight = now[1] / (now[1] + now[0] + 1e-8)
            clinging = 0.3 * (-losses[1]).exp() ** 0.3
        optimizer.zero_grad()
        ((clinging * losses[1]).mean() + (weight * losses[0]).mean()).backward()
        optimizer.step()
    torch.testing.assert_close(trained.model.state_dict(), model.state_dict(), atol=1e-6, rtol=1e-4)
    assert not trained.model.classifier._forward_pre_hooks


# Groups: GroupDRO, EIIL, XRM


def test_group_weights_by_hand():
    groups, labels = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 0, 1, 1])
    loss = GroupLoss(groups, step_size=0.5, adjustment=2.0)
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    value = loss(output(logits), labels[:3], torch.arange(3))  # group 2 is not in the batch
    each = cross_entropy(logits, labels[:3], reduction="none")
    means = [each[:2].mean().item(), each[2].item()]
    raw = [math.exp(0.5 * (means[0] + 2 / math.sqrt(2))), math.exp(0.5 * (means[1] + 2)), 1.0]
    q = [part / sum(raw) for part in raw]
    assert loss.q.tolist() == pytest.approx(q, rel=1e-5)
    assert value.item() == pytest.approx(q[0] * means[0] + q[1] * means[1], rel=1e-5)


def a_table_of_classes_and_groups():
    """Labels and groups of 1000 rows with P(y = 1 | a) of 0.9, 0.5 and 0."""
    counts = {(0, 0): 40, (1, 0): 360, (0, 1): 200, (1, 1): 200, (0, 2): 200}
    pairs = torch.tensor([pair for pair, n in counts.items() for _ in range(n)])
    return pairs[:, 0], pairs[:, 1]


def test_the_shares_of_a_group_are_added_to_the_logits():
    labels, groups = a_table_of_classes_and_groups()
    rows = torch.tensor([0, 100, 500, 999])
    logits = some_logits(4, 2)
    value = Adjusted(label_offsets(labels, groups, even=True))(output(logits), labels[rows], rows)
    shares = np.array([[0.1, 0.9], [0.5, 0.5], [200 / 200.5, 0.5 / 200.5]])[groups[rows].numpy()]
    # Bayes' rule instead of a softmax of sums: p(y) e^f(y), normalised.
    odds = shares * np.exp(logits.detach().numpy())
    chances = (odds / odds.sum(1, keepdims=True))[np.arange(4), labels[rows].numpy()]
    assert value.item() == pytest.approx(-np.log(chances).mean(), rel=1e-5)
    value.backward()
    assert logits.grad.isfinite().all()


def test_classes_without_a_training_row_are_left_as_they_are():
    logits = torch.tensor([[0.3, -0.2, 5.0]])
    offsets = label_offsets(torch.tensor([0, 1]), torch.tensor([0, 0]), even=True)
    value = Adjusted(offsets)(output(logits), torch.tensor([0]), torch.tensor([0]))
    shifted = logits + torch.tensor([[math.log(0.5), math.log(0.5), 0]])
    assert value.item() == pytest.approx(cross_entropy(shifted, torch.tensor([0])).item(), rel=1e-5)


def test_what_the_group_alone_says_of_the_label_is_not_learnt():
    """Of a logit for each (group, class), all that fits the table: f = log p(y|a) + const plainly, and const here."""
    labels, groups = a_table_of_classes_and_groups()
    labels, groups = labels[:800], groups[:800]

    def fitted(loss):
        f = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([f], lr=1, max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            value = loss(f[groups])
            value.backward()
            return value

        optimizer.step(closure)
        return (f[:, 1] - f[:, 0]).detach()

    plain = fitted(lambda logits: cross_entropy(logits, labels))
    assert plain.tolist() == pytest.approx([math.log(9), 0], abs=1e-3)
    prior, rows = Adjusted(label_offsets(labels, groups, even=True)), torch.arange(800)
    assert fitted(lambda logits: prior(output(logits), labels, rows)).tolist() == pytest.approx([0, 0], abs=1e-3)
    # So it is with weights; the classes' own shares, 0.3 and 0.7, stay.
    weights = independent_weights(labels, groups)
    by_weights = fitted(lambda logits: (weights * cross_entropy(logits, labels, reduction="none")).mean())
    assert by_weights.tolist() == pytest.approx([math.log(7 / 3)] * 2, abs=1e-3)
    # And with offsets that leave those shares to the model.
    beside = Adjusted(label_offsets(labels, groups))
    by_offsets = fitted(lambda logits: beside(output(logits), labels, rows))
    assert by_offsets.tolist() == pytest.approx([math.log(7 / 3)] * 2, abs=1e-3)


def test_rows_are_drawn_until_label_and_group_are_independent():
    labels, groups = a_table_of_classes_and_groups()
    labels, groups = labels[:800], groups[:800]
    seen = {}

    class Noting:
        groups_train, train = groups, SimpleNamespace(labels=labels)

        def train_fresh(self, stage):
            seen["weights"] = self.weights

    method("group_balanced").train(Noting())
    drawn = torch.multinomial(seen["weights"], 50 * 800, replacement=True, generator=torch.Generator().manual_seed(0))
    table = np.zeros((2, 2))
    np.add.at(table, (labels[drawn].numpy(), groups[drawn].numpy()), 1)
    assert len(drawn) == 50 * 800
    assert chi2_contingency(table).pvalue > 0.01
    assert (table / table.sum()).sum(1) == pytest.approx([0.3, 0.7], abs=0.01)


def test_balanced_draws_come_from_every_cell_alike():
    cells = torch.tensor([0] * 900 + [1] * 90 + [2] * 10)
    drawn = torch.bincount(cells[list(balanced(cells, torch.Generator().manual_seed(0)))])
    assert drawn.sum() == 1000
    assert drawn.tolist() == pytest.approx([333.3] * 3, abs=5 * math.sqrt(1000 * 2 / 9))


def test_scale_gradients_are_autograds():
    logits, labels = some_logits().detach(), torch.tensor([0, 1, 2, 0, 1, 2])
    expected = []
    for row in range(6):
        w = torch.ones((), requires_grad=True)
        expected.append(torch.autograd.grad(cross_entropy(w * logits[row], labels[row]), w)[0])
    torch.testing.assert_close(scale_gradients(logits, labels), torch.stack(expected))
    torch.testing.assert_close(scale_gradients(logits + 7.0, labels), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_environments_are_where_gradient_ascent_goes():
    """The published search: soft assignments, Adam, the IRMv1 penalty of both environments."""
    logits, labels = some_logits(60, 2).detach() * 2, torch.arange(60) % 2
    torch.manual_seed(0)
    soft = torch.randn(60, requires_grad=True)
    optimizer = torch.optim.Adam([soft], lr=0.05)
    for _ in range(2000):
        penalty = 0.0
        for share in (soft.sigmoid(), 1 - soft.sigmoid()):
            w = torch.ones((), requires_grad=True)
            risk = (share * cross_entropy(w * logits, labels, reduction="none")).mean()
            penalty = penalty + torch.autograd.grad(risk, w, create_graph=True)[0] ** 2
        optimizer.zero_grad()
        (-penalty).backward()
        optimizer.step()
    hard, exact = (soft > 0).long(), environments(logits, labels)
    assert torch.equal(hard, exact) or torch.equal(hard, 1 - exact)


def test_twins_learn_their_own_half_and_classes_count_alike():
    labels = torch.tensor([0, 0, 0, 1, 1, 0])
    loss = TwinLoss(labels, torch.Generator().manual_seed(0))
    loss.first_half = torch.tensor([True, True, True, True, False, False])
    first, second = some_logits(6, 2), some_logits(6, 2, seed=1)
    value = loss(PairOutput(first, second), labels, torch.arange(6))
    by_first, by_second = (cross_entropy(x, labels, reduction="none") for x in (first, second))
    expected = (by_first[:3].mean() + by_first[3]) / 2 + (by_second[4] + by_second[5]) / 2
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = torch.autograd.grad(value, [first, second])
    assert gradients[0][4:].abs().max() == 0
    assert gradients[1][:4].abs().max() == 0


def test_twins_turn_labels_as_often_as_the_other_is_sure():
    n = 20_000
    labels = torch.zeros(n, dtype=torch.long)
    loss = TwinLoss(labels, torch.Generator().manual_seed(0))
    loss.first_half = torch.ones(n, dtype=torch.bool)
    torch.manual_seed(0)
    sure = torch.tensor([0.2, 0.8]).log().expand(n, 2)  # the second twin, held out, says 1 with 0.8
    loss(PairOutput(torch.zeros(n, 2), sure), labels, torch.arange(n))
    assert loss.labels.double().mean().item() == pytest.approx((0.8 - 0.5) * 2, abs=5 * math.sqrt(0.24 / n))
    assert labels.sum() == 0  # the true labels are left alone
