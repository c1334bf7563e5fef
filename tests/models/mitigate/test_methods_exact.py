"""Clusters, last layers and the methods with groups against brute force, SciPy and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from classifiers import batch, build
from hypothesis import given
from hypothesis import strategies as st
from shortcut import SmallNet, shortcut
from sklearn.cluster import KMeans
from sklearn.datasets import make_blobs
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import silhouette_score
from torch import nn
from torch.nn.functional import cross_entropy, softmax

from fairhead.errors import InputError, UnsupportedModel
from fairhead.mitigate.auto_balance_match import worst_large_cell
from fairhead.mitigate.references.group_losses import DFR, even_rows, fair_contrastive, query_gap, reversed_gradient
from fairhead.mitigate.training_job import cell_numbers
from fairhead.mitigate.two_stages import AFR, afr_weights, best_factors, clusters_by_class, features_of, find_head
from fairhead.train.kmeans import independent_weights, kmeans, nearest, silhouette
from fairhead.train.step import Examples


def some_rows(rows, width):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


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
    weights = independent_weights(labels, clusters, cap=1e9)
    table = torch.zeros(3, 4, dtype=torch.float64).index_put_((labels, clusters), weights, accumulate=True) / len(rows)
    torch.testing.assert_close(table, table.sum(1, keepdim=True) * table.sum(0, keepdim=True))
    torch.testing.assert_close(table.sum(1), torch.bincount(labels, minlength=3) / len(rows) * 1.0, check_dtype=False)


def test_small_cells_do_not_decide():
    labels = torch.tensor([0] * 10 + [1] * 10)
    clusters = torch.tensor([0] * 9 + [1] + [2] * 10)
    predicted = labels.clone()
    predicted[9] = 1
    assert worst_large_cell(labels, clusters, least=5)(predicted) == 1.0
    assert worst_large_cell(labels, clusters, least=1)(predicted) == 0.0


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
    z = nn.functional.normalize(some_rows(12, 4), dim=-1).double()
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
    queries, chance = some_rows(20, 5), torch.Generator().manual_seed(1)
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
