"""Head scores, controls and ablation, on a vision transformer with one planted head."""

import itertools

import numpy as np
import pytest
import torch
from made_vit import HEADS, LAYERS, PLANTED, pictures, planted_vit, vit
from scipy import stats
from transformers import RobertaConfig, RobertaForSequenceClassification

import fairhead
from fairhead.errors import InputError, UnsupportedModel
from fairhead.locate.decompose import Decomposer
from fairhead.locate.directions import classifier_task
from fairhead.locate.edits import HeadEdits
from fairhead.locate.head_features import collect
from fairhead.locate.head_maps import Head, group_cells, score, separation, top_heads
from fairhead.locate.studies import Ablation, layer_matched
from fairhead.stats import Difference


def evidence_gap(model, pixels, bright, labels):
    logits = model(pixels).logits
    evidence = (logits[:, 1] - logits[:, 0]).numpy()
    return np.mean(
        [
            evidence[(labels == y) & (bright == 1)].mean() - evidence[(labels == y) & (bright == 0)].mean()
            for y in (0, 1)
        ]
    )


def features_of(model, pixels, size=5):
    def batches(start):
        return ({"pixel_values": pixels[i : i + size]} for i in range(start, len(pixels), size))

    return collect(Decomposer(model, unit=False), batches, len(pixels))


def selected(scores, count, per_layer=None):
    """Heads on the side of the total gap, in the order of layers."""
    return tuple(sorted(top_heads(scores.value * np.sign(scores.total), scores.p_adjusted, count, per_layer=per_layer)))


def test_head_evidence_and_the_other_terms_sum_to_the_logits():
    model = vit()
    pixels, _, _ = pictures(12)
    features, task = features_of(model, pixels), classifier_task(model)
    evidence = task.parts(features, 1)
    own = task.logits(features.output)
    # Everything else that is added to the first token's stream: embedding, MLPs, biases of the output projections.
    seen = {}

    def keep(name, pick):
        return lambda module, args, out: seen.__setitem__(name, pick(args, out))

    handles = [model.vit.layernorm.register_forward_hook(keep("stream", lambda args, out: args[0][:, 0]))]
    handles.append(model.vit.layers[0].register_forward_pre_hook(lambda m, args: seen.update(start=args[0][:, 0])))
    for number, layer in enumerate(model.vit.layers):
        handles.append(layer.mlp.register_forward_hook(keep(f"mlp {number}", lambda args, out: out[:, 0])))
    logits = model(pixels).logits
    for handle in handles:
        handle.remove()
    rest = seen["start"] + sum(seen[f"mlp {n}"] + model.vit.layers[n].attention.o_proj.bias for n in range(LAYERS))
    norm, classifier = model.vit.layernorm, model.classifier
    sigma = (seen["stream"].var(-1, unbiased=False) + norm.eps).sqrt()
    w = classifier.weight[1] - classifier.weight[0]
    constant = norm.bias @ w + classifier.bias[1] - classifier.bias[0]
    others = ((rest - rest.mean(-1, keepdim=True)) / sigma[:, None] * norm.weight) @ w + constant
    expected = (logits[:, 1] - logits[:, 0]).numpy()
    np.testing.assert_allclose(own[:, 1] - own[:, 0], expected, atol=1e-6)
    np.testing.assert_allclose(evidence.sum((1, 2)) + others.numpy(), expected, atol=1e-4)


def test_means_weigh_every_cell_the_same():
    model = vit()
    pixels, _, _ = pictures(12)
    groups, labels = np.array([0] * 7 + [1] * 5), np.array([0] * 5 + [1] * 2 + [0] * 2 + [1] * 3)
    found = HeadEdits.learn(features_of(model, pixels, size=4), group_cells(groups, labels))
    with fairhead.tap(model) as heads:
        reading = heads.read("output", tokens=0)
        model(pixels)
    cells = 2 * labels + groups
    for layer in range(LAYERS):
        by_cell = torch.stack([reading[layer][torch.tensor(cells == c)].mean(0) for c in range(4)])
        np.testing.assert_allclose(found.means[layer], by_cell.mean(0), rtol=1e-4, atol=1e-5)


def test_the_planted_head_is_found_first_and_its_ablation_closes_the_gap():
    model = planted_vit()
    pixels, bright, labels = pictures()
    features, task = features_of(model, pixels, size=100), classifier_task(model)
    scores = score(task.parts(features, 1), task.total(features.output, 1), group_cells(bright, labels))
    assert selected(scores, 1) == (PLANTED,)
    assert scores.share[PLANTED] > 0.8
    edits = HeadEdits.learn(features, group_cells(bright, labels))
    fresh, bright, labels = pictures(seed=1)
    before = evidence_gap(model, fresh, bright, labels)

    def gap_without(where):
        with fairhead.tap(model) as heads:
            edits.apply(heads, where, "mean")
            return evidence_gap(model, fresh, bright, labels)

    assert abs(gap_without([PLANTED])) < 0.1 * abs(before)
    for heads in layer_matched([PLANTED], HEADS).sets:
        assert gap_without(heads) == pytest.approx(before, rel=0.1)
    assert evidence_gap(model, fresh, bright, labels) == pytest.approx(before, abs=1e-9)  # the tap is gone


def test_scores_agree_with_scipy_where_rows_are_independent():
    rng = np.random.default_rng(0)
    n = 300
    groups = rng.integers(0, 2, n)
    evidence = rng.normal(size=(n, 1, 2)) + 0.4 * groups[:, None, None]
    scores = score(evidence, evidence.sum((1, 2)), group_cells(groups, np.zeros(n, dtype=int)))
    for head in range(2):
        a, b = evidence[groups == 1, 0, head], evidence[groups == 0, 0, head]
        welch = stats.ttest_ind(a, b, equal_var=False)
        assert scores.value[0, head] == pytest.approx(a.mean() - b.mean())
        assert scores.p[0, head] == pytest.approx(welch.pvalue, rel=0.1)
        low, high = welch.confidence_interval()
        assert (scores.low[0, head], scores.high[0, head]) == pytest.approx((low, high), abs=0.01)
        pooled = np.sqrt(((len(a) - 1) * a.var(ddof=1) + (len(b) - 1) * b.var(ddof=1)) / (n - 2))
        assert scores.effect_size[0, head] == pytest.approx((a.mean() - b.mean()) / pooled)
    np.testing.assert_allclose(scores.p_adjusted, stats.false_discovery_control(scores.p[0])[None])


def test_scores_agree_with_a_paired_test_where_each_item_is_in_both_groups():
    rng = np.random.default_rng(1)
    items = rng.normal(size=(150, 1)) * 3
    pairs = items + rng.normal(size=(150, 2)) * 0.5 + np.array([0.0, 0.1])
    groups, clusters = np.tile([0, 1], 150), np.repeat(np.arange(150), 2)
    evidence = pairs.reshape(-1, 1, 1)
    scores = score(evidence, evidence[:, 0, 0], group_cells(groups, np.zeros(300, dtype=int), clusters=clusters))
    paired = stats.ttest_rel(pairs[:, 1], pairs[:, 0])
    assert scores.p[0, 0] == pytest.approx(paired.pvalue, rel=1e-6)
    low, high = paired.confidence_interval()
    assert (scores.low[0, 0], scores.high[0, 0]) == pytest.approx((low, high))
    assert scores.clusters == 150


def test_a_group_that_only_follows_the_label_has_no_gap():
    # Groups have different label shares and the evidence depends on the label alone.
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 2, 2000)
    groups = (rng.random(2000) < np.where(labels == 1, 0.8, 0.2)).astype(int)
    evidence = (labels + 0.1 * rng.normal(size=2000))[:, None, None]
    scores = score(evidence, evidence[:, 0, 0], group_cells(groups, labels))
    assert abs(scores.value[0, 0]) < 0.02 < abs(evidence[groups == 1].mean() - evidence[groups == 0].mean())


def test_p_values_are_uniform_where_there_is_nothing():
    rng = np.random.default_rng(3)
    evidence = rng.normal(size=(400, 10, 50))
    groups, labels = np.arange(400) % 2, np.arange(400) // 200
    scores = score(evidence, evidence.sum((1, 2)), group_cells(groups, labels))
    assert stats.kstest(scores.p.ravel(), "uniform").pvalue > 0.01
    assert selected(scores, 4) == ()


def test_two_cells_are_compared_by_welchs_test():
    """Groups of 10 and 190 rows that spread differently: t with as many degrees as rows would be far too sure."""
    rng = np.random.default_rng(0)
    groups = np.repeat([1, 0], [10, 190])
    evidence = rng.normal(size=(200, 3, 4)) * np.where(groups == 1, 3.0, 1.0)[:, None, None]
    found = score(evidence, evidence.sum((1, 2)), group_cells(groups, np.zeros(200, dtype=int)))
    welch = stats.ttest_ind(evidence[groups == 1], evidence[groups == 0], equal_var=False)
    np.testing.assert_allclose(found.p, welch.pvalue)
    ends = welch.confidence_interval(0.95)
    np.testing.assert_allclose([found.low, found.high], [ends.low, ends.high])
    apart = separation(evidence, group_cells(groups, np.zeros(200, dtype=int)))
    np.testing.assert_allclose(apart.d.p, welch.pvalue)


def _claims(sizes, runs):
    """Runs of 144 heads of noise in which one is significant; `sizes` are the rows of either group, label by label."""
    rng = np.random.default_rng(1)
    groups = np.concatenate([np.repeat([1, 0], pair) for pair in sizes])
    labels = np.repeat(np.arange(len(sizes)), [sum(pair) for pair in sizes])
    found = 0
    for _ in range(runs):
        evidence = rng.normal(size=(len(groups), 12, 12))
        found += bool((score(evidence, evidence.sum((1, 2)), group_cells(groups, labels)).p_adjusted <= 0.05).any())
    return found


SKEWED = ([(10, 190), (190, 10)], [(10, 90), (10, 90)], [(12, 20), (30, 200), (100, 15)])


@pytest.mark.parametrize("sizes", SKEWED)
def test_noise_makes_no_head_significant_where_a_cell_is_small(sizes):
    assert _claims(sizes, 40) <= 5  # 2 are expected


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[(100, 100), (100, 100)], *SKEWED])
def test_noise_makes_a_head_significant_in_one_run_of_twenty(sizes):
    assert _claims(sizes, 400) <= 32  # 20 are expected; beyond 32 in one of 400


def test_selection_follows_the_side_of_the_total_and_the_limits():
    rng = np.random.default_rng(4)
    groups, labels = np.arange(400) % 2, np.arange(400) // 200
    evidence = 0.1 * rng.normal(size=(400, 2, 4))
    for head, size in {(0, 0): -3.0, (1, 0): -2.0, (1, 1): -1.5, (1, 2): -1.0, (0, 3): 5.0}.items():
        evidence[:, head[0], head[1]] += size * groups
    scores = score(evidence, evidence.sum((1, 2)), group_cells(groups, labels))
    assert scores.total < 0
    assert selected(scores, 3) == ((0, 0), (1, 0), (1, 1))
    assert selected(scores, 3, per_layer=1) == ((0, 0), (1, 0))
    assert selected(scores, 10) == ((0, 0), (1, 0), (1, 1), (1, 2))


def test_scores_refuse_what_they_cannot_compare():
    with pytest.raises(InputError, match="'light' has 0 rows of the class 'yes'"):
        group_cells(np.array([0, 0, 1, 1, 0, 0]), np.array([0, 0, 0, 0, 1, 1]), ("light", "dark"), ("no", "yes"))
    with pytest.raises(InputError, match="two groups"):
        group_cells(np.array([0, 1, 2, 0, 1, 2]), np.zeros(6, dtype=int))


def test_controls_are_all_matched_sets_where_those_are_few():
    controls = layer_matched([(0, 1), (2, 0), (2, 3)], n_heads=6)
    assert controls.exhaustive
    expected = {
        ((0, a), (2, b), (2, c))
        for a in range(6)
        for b, c in itertools.combinations(range(6), 2)
        if a != 1 and not {b, c} & {0, 3}
    }
    assert len(controls.sets) == len(expected) == 5 * 6
    assert {tuple(tuple(head) for head in heads) for heads in controls.sets} == expected


def test_controls_are_drawn_without_repeats_where_they_are_many():
    chosen = [(0, 1), (1, 2), (2, 0), (3, 3)]
    controls = layer_matched(chosen, n_heads=12, draws=250, seed=1)
    assert not controls.exhaustive
    assert len(set(controls.sets)) == 250
    for heads in controls.sets:
        assert [layer for layer, _ in heads] == [0, 1, 2, 3]
        assert not set(heads) & set(chosen)
    assert layer_matched(chosen, n_heads=12, draws=250, seed=1) == controls
    assert layer_matched(chosen, n_heads=12, draws=250, seed=2) != controls


def test_controls_need_heads_to_draw_from():
    with pytest.raises(InputError, match="3 of the 4 heads of layer 1 are selected"):
        layer_matched([(1, 0), (1, 1), (1, 2)], n_heads=4)
    with pytest.raises(InputError, match="no heads were selected"):
        layer_matched([], n_heads=4)


def test_an_ablation_knows_its_place_among_the_controls():
    change = Difference("EOd", "shade", 0.3, 0.2, -0.1, -0.15, -0.05, 100, 0.01, 0.02, ideal=0.0)
    found = Ablation((Head(0, 1),), change, controls=(-0.2, 0.2 - 0.3, -0.05, 0.05), exhaustive=True)
    assert found.percentile == 0.5
    assert found.p_controls == pytest.approx(3 / 5)
    assert found.to_dict()["effect"] == -0.1


def test_models_without_the_expected_readout_are_named():
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = RobertaForSequenceClassification(RobertaConfig(vocab_size=9, **small))
    with pytest.raises(UnsupportedModel, match="RobertaForSequenceClassification has no linear layer called classifie"):
        classifier_task(model)
