"""The parts of the methods against values worked out by hand, brute force, SciPy and scikit-learn."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, NonlinearConstraint, minimize
from shortcut import SmallNet, shortcut
from sklearn.cluster import KMeans
from sklearn.datasets import make_blobs
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import silhouette_score
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from fairhead.errors import InputError, UnsupportedModel
from fairhead.mitigate import method
from fairhead.mitigate.afr import AFR, afr_weights
from fairhead.mitigate.arl import _AdversarialLoss
from fairhead.mitigate.clustering import kmeans, nearest, silhouette
from fairhead.mitigate.clusters import independent_weights, without_label, worst_of_all
from fairhead.mitigate.dro import chi2_weights, cvar_weights
from fairhead.mitigate.eiil import environments, scale_gradients
from fairhead.mitigate.group_dro import GroupLoss, balanced, cell_numbers
from fairhead.mitigate.head import features_of, find_head
from fairhead.mitigate.kd import _DistillationLoss
from fairhead.mitigate.lff import FailureLoss
from fairhead.mitigate.pair import PairOutput
from fairhead.mitigate.references.dfr import DFR, even_rows
from fairhead.mitigate.references.fscl import fair_contrastive
from fairhead.mitigate.references.tadet import query_gap, reversed_gradient
from fairhead.mitigate.scaling import best_factors
from fairhead.mitigate.spare import clusters_by_class
from fairhead.mitigate.xrm import TwinLoss
from fairhead.train import Examples

LOSSES = st.lists(st.floats(0, 10), min_size=2, max_size=8).map(lambda x: torch.tensor(x, dtype=torch.float64))


def output(logits):
    return SimpleNamespace(logits=logits)


def some_logits(rows=6, classes=3, seed=0):
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed), requires_grad=True)


# DRO


@settings(max_examples=40, deadline=None)
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
    # SciPy's point may stop short of the edge of the ball; nothing feasible is worse than ours.
    assert (weights @ losses).item() >= -found.fun - 1e-5


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
    loss = _AdversarialLoss(method("arl", pretrain=0))
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
    loss = _AdversarialLoss(method("arl", pretrain=1))
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


# Clusters and last layers


@pytest.mark.parametrize("k", [2, 4, 7])
def test_kmeans_is_as_good_as_scikit_learns(k):
    points, _ = make_blobs(400, centers=5, cluster_std=1.5, random_state=k)
    found = kmeans(torch.tensor(points), k, restarts=8)
    reference = KMeans(k, n_init=8, random_state=0).fit(points)
    assert found.inertia <= reference.inertia_ * 1.001
    assert torch.equal(nearest(torch.tensor(points).float(), found.centres), found.cluster)


def test_kmeans_of_one_point_many_times_is_one_cluster():
    assert kmeans(torch.ones(5, 2), 3).cluster.unique().tolist() == [0]


def test_silhouettes_are_scikit_learns():
    points, _ = make_blobs(120, centers=3, random_state=0)
    points = torch.tensor(points)
    for cluster in (torch.arange(120) % 3, kmeans(points, 3).cluster, torch.tensor([0] * 119 + [1])):
        assert silhouette(points, cluster) == pytest.approx(silhouette_score(points, cluster), abs=1e-6)
    assert silhouette(points, torch.zeros(120, dtype=torch.long)) == -1


def test_clusters_within_classes_are_found_in_their_number():
    points, blobs = make_blobs(300, centers=[[0, 0], [8, 0], [0, 8], [8, 8], [16, 0]], cluster_std=0.5, random_state=0)
    labels = torch.tensor(blobs >= 2).long()  # two blobs of class 0, three of class 1
    cells = clusters_by_class(torch.tensor(points).float(), labels, most=5)
    assert len(cells.unique()) == 5
    assert all(len(np.unique(blobs[cells == cell])) == 1 for cell in cells.unique())


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=4, max_size=60))
def test_under_the_weights_label_and_cluster_are_independent(rows):
    # Every class meets every cluster once: independence cannot be had where a cell is empty.
    rows = rows + [(y, c) for y in range(3) for c in range(4)]
    labels, clusters = (torch.tensor(column) for column in zip(*rows, strict=True))
    weights = independent_weights(labels, clusters)
    table = torch.zeros(3, 4, dtype=torch.float64).index_put_((labels, clusters), weights, accumulate=True) / len(rows)
    torch.testing.assert_close(table, table.sum(1, keepdim=True) * table.sum(0, keepdim=True))
    torch.testing.assert_close(table.sum(1), torch.bincount(labels, minlength=3) / len(rows) * 1.0, check_dtype=False)


def test_what_is_left_says_nothing_linear_of_the_label_but_all_of_the_shortcut():
    task = shortcut()
    x = task.train.inputs["x"]
    left, _ = without_label(x, task.train.labels, task.validation.inputs["x"])
    shown = (x[:, 1] > 0).long()  # which way the shortcut points
    cluster = kmeans(left, 2).cluster
    agreement = (cluster == shown).float().mean().item()
    assert max(agreement, 1 - agreement) > 0.99
    # Among rows of one shortcut the core feature is gone.
    rows = shown == 1
    core = LogisticRegression().fit(left[rows], task.train.labels[rows])
    full = LogisticRegression().fit(x[rows], task.train.labels[rows])
    balanced_rows = [rows & (task.train.labels == y) for y in (0, 1)]

    def recall(model, data):
        return min(model.score(data[r], task.train.labels[r]) for r in balanced_rows)

    assert recall(core, left) < recall(full, x) - 0.2


def test_small_cells_do_not_decide():
    labels = torch.tensor([0] * 10 + [1] * 10)
    cells = torch.tensor([0] * 9 + [1] + [2] * 10)
    predicted = labels.clone()
    predicted[9] = 1
    assert worst_of_all(labels, [cells], least=5)(predicted) == 1.0
    assert worst_of_all(labels, [cells], least=1)(predicted) == 0.0


def test_afr_minimises_the_weighted_loss():
    """Long enough, the last layer is scikit-learn's weighted logistic regression with the same penalty."""
    torch.manual_seed(0)
    features, labels = torch.randn(200, 3), (torch.rand(200) < 0.3).long()
    features[:, 0] += labels
    head = nn.Linear(3, 2)
    with torch.no_grad():
        p_label = softmax(head(features), -1).gather(1, labels[:, None])[:, 0]
        start = head.weight.clone(), head.bias.clone()
    weights = afr_weights(p_label, labels, 4.0)
    AFR(penalty=0.05, steps=4000, learning_rate=0.5)._retrain(head, features, labels, lambda last: 0.0)
    # The first of equals was kept: step 10. With a rising score the last step is.
    early = head.weight.clone()
    with torch.no_grad():
        head.weight.copy_(start[0])
        head.bias.copy_(start[1])
    count = iter(range(10_000))
    AFR(penalty=0.05, steps=4000, learning_rate=0.5)._retrain(head, features, labels, lambda last: next(count))
    assert not torch.equal(early, head.weight)
    head.zero_grad()
    distance = (head.weight - start[0]).square().sum() + (head.bias - start[1]).square().sum()
    ((weights * cross_entropy(head(features), labels, reduction="none")).sum() + 0.05 * distance).backward()
    assert head.weight.grad.abs().max() < 1e-4
    assert head.bias.grad.abs().max() < 1e-4


def test_afr_weights_by_hand():
    weights = afr_weights(torch.tensor([0.9, 0.1, 0.5]), torch.tensor([0, 0, 1]), gamma=2.0)
    raw = [math.exp(-1.8) / 2, math.exp(-0.2) / 2, math.exp(-1.0)]
    assert weights.tolist() == pytest.approx([part / sum(raw) for part in raw])


def test_factors_are_the_best_threshold():
    chance = np.random.default_rng(0)
    labels = (chance.random(300) < 0.2).astype(int)
    p1 = 1 / (1 + np.exp(-(chance.normal(size=300) + 2 * labels - 2)))
    p = torch.tensor(np.stack([1 - p1, p1], 1))
    s = best_factors(p, torch.tensor(labels), torch.logspace(-2, 2, 401))

    def worst(threshold):
        predicted = p1 > threshold
        return min((predicted == labels)[labels == y].mean() for y in (0, 1))

    best = max(worst(threshold) for threshold in np.linspace(0, 1, 2001))
    predicted = (p * s).argmax(-1).numpy()
    assert min((predicted == labels)[labels == y].mean() for y in (0, 1)) == pytest.approx(best, abs=0.02)
    assert s[0] == 1


@pytest.mark.parametrize("family", ["ViT", "DINOv2", "CLIP vision", "BERT", "RoBERTa", "DistilBERT", "ModernBERT"])
def test_the_head_and_its_features_are_found(family):
    from test_dam_families import batch, build

    model = build(family)
    inputs = batch(family)
    examples = Examples({name: tensor for name, tensor in inputs.items() if name != "labels"}, inputs["labels"])
    head = find_head(model, examples)
    with torch.no_grad():
        from_features = head(features_of(model, head, examples))
        torch.testing.assert_close(from_features, model.eval()(**examples.inputs).logits, rtol=1e-4, atol=1e-5)


def test_a_model_without_a_last_layer_is_named():
    class Doubled(SmallNet):
        def forward(self, x, labels=None):
            out = super().forward(x, labels)
            out.logits = 2 * out.logits
            return out

    with pytest.raises(UnsupportedModel, match="logits of Doubled do not come out of a linear layer"):
        find_head(Doubled(), Examples({"x": torch.zeros(2, 10)}, torch.tensor([0, 1])))


# References


def test_dfr_predicts_as_the_regressions_it_averages():
    task = shortcut()
    x, labels = task.validation.inputs["x"].double().numpy(), task.validation.labels.numpy()
    cells = cell_numbers(task.validation.labels, task.validation_groups).numpy()
    weight, bias = DFR(subsets=20, strengths=(0.3,)).last_layer(x, labels, cells)
    # By hand: an even subset, standardised by all rows, one L1 regression in liblinear.
    even = even_rows(cells, np.random.default_rng(5))
    assert len(set(np.bincount(cells[even]))) == 1
    mean, sd = x.mean(0), x.std(0)
    one = LogisticRegression(l1_ratio=1.0, C=0.3, solver="liblinear", random_state=0)
    one.fit((x[even] - mean) / sd, labels[even])
    test = task.test.inputs["x"].double().numpy()
    ours = (test @ weight.T + bias)[:, 0] > 0
    agreement = (ours == (one.predict((test - mean) / sd) == 1)).mean()
    assert agreement > 0.97
    assert abs(weight[0, 0]) > abs(weight[0, 1]) * 4  # the core feature counts, the shortcut (of size 4) does not


def test_dfr_says_which_cell_is_missing():
    with pytest.raises(InputError, match="cell 1 has none"):
        even_rows(np.array([0, 2, 2]), np.random.default_rng(0))


@pytest.mark.parametrize("even_groups", [False, True])
def test_fair_contrast_by_brute_force(even_groups):
    z = nn.functional.normalize(some_logits(12, 4).detach(), dim=-1).double()
    chance = torch.Generator().manual_seed(3)
    labels, groups = (torch.randint(0, 2, (12,), generator=chance) for _ in range(2))
    per_row, cell_of = {}, {}
    for i in range(12):
        positives = [j for j in range(12) if j != i and labels[j] == labels[i]]
        negatives = [j for j in range(12) if labels[j] != labels[i] and groups[j] == groups[i]]
        if not positives or not negatives:
            continue
        below = math.log(sum(math.exp(z[i] @ z[j] / 0.1) for j in negatives))
        terms = {j: -((z[i] @ z[j]).item() / 0.1 - below) for j in positives}
        if even_groups:
            by_group = [[terms[j] for j in positives if groups[j] == g] for g in (0, 1)]
            per_row[i] = np.mean([np.mean(part) for part in by_group if part])
        else:
            per_row[i] = np.mean(list(terms.values()))
        cell_of[i] = (labels[i].item(), groups[i].item())
    if even_groups:
        cells = set(cell_of.values())
        expected = np.mean([np.mean([per_row[i] for i in per_row if cell_of[i] == cell]) for cell in cells])
    else:
        expected = np.mean(list(per_row.values()))
    assert fair_contrastive(z, labels, groups, 0.1, even_groups).item() == pytest.approx(expected, rel=1e-5)


def test_query_gap_by_brute_force():
    queries, chance = some_logits(20, 5).detach(), torch.Generator().manual_seed(1)
    labels, groups = torch.randint(0, 2, (20,), generator=chance), torch.randint(0, 3, (20,), generator=chance)
    gaps = []
    for label in (0, 1):
        middle = queries[labels == label].mean(0)
        for group in range(3):
            rows = (labels == label) & (groups == group)
            if rows.any():
                gaps.append((queries[rows].mean(0) - middle).square().sum().item())
    assert query_gap(queries, labels, groups).item() == pytest.approx(np.mean(gaps), rel=1e-5)


def test_gradients_are_reversed():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = reversed_gradient(x, 0.5)
    assert torch.equal(y, x)
    (y * torch.tensor([3.0, 4.0])).sum().backward()
    assert x.grad.tolist() == [-1.5, -2.0]
