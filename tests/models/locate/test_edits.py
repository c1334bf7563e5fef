"""Edits of heads: what they put in place, their direct effect, and weights that hold them."""

import copy
import itertools

import concept_erasure
import numpy as np
import pytest
import torch
import transformers as hf
from families import FAMILIES, TAP_FAMILIES, TOWERS
from scipy.linalg import sqrtm
from sklearn.covariance import OAS

import fairhead
from fairhead.audit.metrics import table_metrics
from fairhead.errors import InputError, UnsupportedModel
from fairhead.locate.decompose import Decomposer
from fairhead.locate.directions import Task
from fairhead.locate.edits import HeadEdits, check_kind, erasing
from fairhead.locate.gap_question import direct_effect
from fairhead.locate.head_features import HeadMoments, collect
from fairhead.locate.head_maps import Head, group_cells
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.passes import RowPasses
from fairhead.locate.rows import MEASURED, Evaluation
from fairhead.locate.studies import curves, layer_matched, norm_matched

WHERE = [(0, 1), (1, 0), (1, 3)]


@pytest.fixture(scope="module")
def clip():
    torch.manual_seed(0)
    model = hf.CLIPModel(hf.CLIPConfig(**TOWERS)).eval().requires_grad_(False)
    for layer in model.vision_model.encoder.layers:
        torch.nn.init.normal_(layer.self_attn.out_proj.bias, std=0.1)
        torch.nn.init.normal_(layer.self_attn.out_proj.weight, std=0.2)
    return model


@pytest.fixture(scope="module")
def images():
    return torch.randn(80, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def batches_of(images, size=40):
    return lambda start=0: ({"pixel_values": images[i : i + size]} for i in range(start, len(images), size))


def passes_of(decomposer, images, task):
    return RowPasses(decomposer, lambda rows: batches_of(images[rows])(), task)


@pytest.fixture(scope="module")
def groups():
    return np.arange(80) % 2, (np.arange(80) // 2) % 2


@pytest.fixture(scope="module")
def task():
    return Task(("a", "b"), 20 * np.random.default_rng(0).normal(size=(2, 16)), np.array([0.3, 0.0]), "made")


@pytest.fixture(scope="module")
def learned(clip, images, groups):
    features = collect(Decomposer(clip), batches_of(images), 80)
    return features, HeadEdits.learn(features, group_cells(*groups))


def test_projection_is_leace(learned, groups) -> None:
    features, edits = learned
    group, label = groups
    own = features.outputs()[:, 1, 2].astype(np.float64)
    after = edits.outputs("project", features.outputs()[:, 1].astype(np.float64), 1, np.arange(80))[:, 2]
    gaps = [after[(label == y) & (group == 1)].mean(0) - after[(label == y) & (group == 0)].mean(0) for y in (0, 1)]
    np.testing.assert_allclose(np.mean(gaps, axis=0), 0, atol=1e-6)
    # The closed form of Belrose et al.: x − W⁺ U Uᵀ W (x − μ), W the inverse root of the covariance.
    rows = [own[(label == y) & (group == g)] for y in (0, 1) for g in (0, 1)]
    mean = np.mean([r.mean(0) for r in rows], axis=0)
    covariance = np.mean([((r - mean).T @ (r - mean)) / len(r) for r in rows], axis=0)
    amount = OAS().fit(own).shrinkage_  # cells are of equal size here: the balanced covariance is the plain one
    shrunk = (1 - amount) * covariance + amount * np.trace(covariance) / 8 * np.eye(8)
    whiten = np.linalg.inv(sqrtm(shrunk).real)
    difference = np.mean([rows[1].mean(0) - rows[0].mean(0), rows[3].mean(0) - rows[2].mean(0)], axis=0)
    u = whiten @ difference / np.linalg.norm(whiten @ difference)
    expected = own - (own - mean) @ (np.linalg.inv(whiten) @ np.outer(u, u) @ whiten).T
    np.testing.assert_allclose(after, expected, atol=1e-5)


def test_erasure_is_that_of_the_package_of_leaces_authors() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 6)) @ rng.normal(size=(6, 6))
    z = (np.arange(2000) % 2).astype(np.int64)
    x += z[:, None] * rng.normal(size=6)
    eraser = concept_erasure.LeaceFitter.fit(torch.tensor(x), torch.tensor(z), shrinkage=False).eraser
    cells = HeadMoments.of(x[:, None, None], z, 2)
    pooled = cells.pooled()
    group = (cells.means()[1] - cells.means()[0])[..., None]
    found = pooled.mean[0, 0] + (x - pooled.mean[0, 0]) @ erasing(pooled.covariance, group)[0, 0].T
    np.testing.assert_allclose(found, eraser(torch.tensor(x)).numpy(), atol=1e-6)


def test_splince_erases_the_group_and_keeps_the_covariance_with_the_label(learned, groups) -> None:
    features, edits = learned
    group, label = groups
    own = features.outputs()[:, 1].astype(np.float64)
    after = edits.outputs("splince", own, 1, np.arange(80))

    def contrast(x, of, given):
        return np.mean([x[(of == 1) & (given == g)].mean(0) - x[(of == 0) & (given == g)].mean(0) for g in (0, 1)], 0)

    np.testing.assert_allclose(contrast(after, group, label), 0, atol=1e-6)
    np.testing.assert_allclose(contrast(after, label, group), contrast(own, label, group), atol=1e-6)
    leace = edits.outputs("project", own, 1, np.arange(80))
    assert np.abs(contrast(leace, label, group) - contrast(own, label, group)).max() > 1e-3
    # The least change in the norm of the inverse covariance is LEACE's; keeping the label costs some of it.
    half = edits.outputs("splince@0.5", own, 1, np.arange(80))
    np.testing.assert_allclose(half, (own + after) / 2)


@pytest.mark.parametrize("kind", ["zero", "mean", "project"])
def test_direct_effect_of_the_last_layer_without_its_mlp_is_the_forward_pass_up_to_length(
    clip, images, groups, task, kind
) -> None:
    # With the last MLP silent, only the final norm's deviation and the output's length are left to answer. They scale
    # logits, which have no bias here, by one factor a row.
    model = copy.deepcopy(clip)
    mlp = model.vision_model.encoder.layers[-1].mlp.fc2
    torch.nn.init.zeros_(mlp.weight)
    torch.nn.init.zeros_(mlp.bias)
    torch.nn.init.zeros_(model.vision_model.post_layernorm.bias)
    task = Task(task.classes, task.directions, np.zeros(2), "made")
    decomposer = Decomposer(model)
    features = collect(decomposer, batches_of(images), 80)
    edits = HeadEdits.learn(features, group_cells(*groups))
    direct = direct_effect(features, task, edits, kind)([[(1, 0), (1, 3)]])[0]
    (forward,) = passes_of(decomposer, images, task)(np.arange(80), edits, kind)([[(1, 0), (1, 3)]])
    assert np.abs(direct - task.logits(features.output)).max() > 0.01
    np.testing.assert_allclose(direct[:, 0] / direct[:, 1], forward[:, 0] / forward[:, 1], rtol=1e-3)


def test_no_heads_leave_everything_as_it_is(clip, images, learned, task) -> None:
    features, edits = learned
    logits = task.logits(features.output)
    np.testing.assert_allclose(direct_effect(features, task, edits)([()])[0], logits)
    (forward,) = passes_of(Decomposer(clip), images, task)(np.arange(80), edits, "mean")([[]])
    np.testing.assert_allclose(forward, logits, atol=1e-4)


def test_resampling_takes_other_rows(clip, images, learned, task) -> None:
    features, edits = learned
    own = features.outputs()[:, 0]
    order = np.roll(np.arange(80), 1)
    np.testing.assert_array_equal(edits.outputs("resample", own, 0, order)[1:], own[:-1])
    clip_passes = passes_of(Decomposer(clip), images, task)
    with pytest.raises(InputError, match="at least two rows"):
        clip_passes(np.arange(1), edits, "resample")([[(0, 0)]])
    (swapped,) = clip_passes(np.arange(80), edits, "resample")([WHERE])
    assert np.abs(swapped - task.logits(features.output)).max() > 0.01


def test_passes_that_edit_the_first_token_need_a_model_that_is_read_there(images, task) -> None:
    with pytest.raises(InputError, match=r"SiglipVisionModel is read at many tokens .* add --tokens all"):
        passes_of(Decomposer(FAMILIES["SigLIP"].build("sdpa")), images, task)


@pytest.mark.parametrize("kind", ["zero", "mean", "project", "splince@0.7", "gain"])
def test_baked_weights_do_what_the_edit_does(clip, images, groups, kind, tmp_path) -> None:
    decomposer = Decomposer(clip)
    edits = HeadEdits.learn_everywhere(decomposer, batches_of(images)(), group_cells(*groups))
    edits = edits.with_gains(np.full(edits.means.shape[:2], 0.3))
    with torch.no_grad(), fairhead.tap(clip.vision_model) as heads:
        edits.apply(heads, WHERE, kind, tokens=None)
        expected = clip.get_image_features(pixel_values=images).pooler_output
    baked = copy.deepcopy(clip)
    edits.bake(baked.vision_model, WHERE, kind)
    baked.save_pretrained(tmp_path)
    loaded = hf.CLIPModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        plain = clip.get_image_features(pixel_values=images).pooler_output
        torch.testing.assert_close(
            loaded.get_image_features(pixel_values=images).pooler_output, expected, atol=1e-5, rtol=1e-4
        )
    assert (expected - plain).abs().max() > 1e-3


def test_baking_into_conv1d_and_without_a_bias() -> None:
    family = FAMILIES["GPT-2"]
    model, batch = family.build("sdpa"), family.inputs()
    edits = HeadEdits(
        np.random.default_rng(0).normal(size=(2, 4, 8)), {"project": np.tile(np.eye(8), (2, 4, 1, 1))}, 0.0, 9
    )
    with torch.no_grad(), fairhead.tap(model) as heads:
        edits.apply(heads, WHERE, "mean", tokens=None)
        expected = model(**batch).last_hidden_state
    edits.bake(model, WHERE, "mean")
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).last_hidden_state, expected, atol=1e-5, rtol=1e-4)
    llama = FAMILIES["Llama"].build("sdpa")
    edits.bake(llama, WHERE, "zero")
    assert llama.layers[0].self_attn.o_proj.weight[:, 8:16].abs().max() == 0
    with pytest.raises(InputError, match="cannot be baked"):
        edits.bake(llama, WHERE, "resample")
    with pytest.raises(InputError, match="kind is 'remove'"):
        edits.bake(llama, WHERE, "remove")


def test_a_family_without_biases_gets_them_if_it_can_have_them(tmp_path) -> None:
    family = FAMILIES["Llama"]
    model, batch = family.build("sdpa"), family.inputs()
    edits = HeadEdits(
        np.random.default_rng(0).normal(size=(2, 4, 8)), {"project": np.tile(np.eye(8), (2, 4, 1, 1))}, 0.0, 9
    )
    with torch.no_grad(), fairhead.tap(model) as heads:
        edits.apply(heads, WHERE, "mean", tokens=None)
        expected = model(**batch).last_hidden_state
    edits.bake(model, WHERE, "mean")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).last_hidden_state, expected, atol=1e-5, rtol=1e-4)
    mistral = FAMILIES["Mistral"].build("sdpa")
    with pytest.raises(UnsupportedModel, match="has no bias to hold a mean"):
        edits.bake(mistral, WHERE, "mean")
    assert not getattr(mistral.config, "attention_bias", False)
    with pytest.raises(UnsupportedModel, match=r"layer 0 \(CodeGenAttention\) has no bias to hold a mean"):
        edits.bake(TAP_FAMILIES["CodeGen"].build("eager"), WHERE, "mean")  # whose attention has no config


def test_padding_has_no_part_in_means_of_all_tokens() -> None:
    family = FAMILIES["BERT"]
    model, batch = family.build("sdpa"), family.inputs()
    groups, labels = np.array([0, 1, 0, 1, 0, 1]), np.zeros(6, dtype=int)
    edits = HeadEdits.learn_everywhere(Decomposer(model), [batch, batch], group_cells(groups, labels))
    with torch.no_grad(), fairhead.tap(model) as heads:
        reading = heads.read("output")
        model(**batch)
    real = batch["attention_mask"].bool()
    # Rows 0 to 2 come twice, so that each is once in either group.
    expected = torch.stack([x[real].mean(0) for x in reading])
    np.testing.assert_allclose(edits.means, expected, atol=1e-5)


def test_means_of_all_tokens_are_over_all_tokens(clip, images, groups) -> None:
    edits = HeadEdits.learn_everywhere(Decomposer(clip), batches_of(images)(), group_cells(*groups))
    with torch.no_grad(), fairhead.tap(clip.vision_model) as heads:
        reading = heads.read("output")
        clip.vision_model(images)
    by_row = reading[1].mean(1).numpy()  # cells are of equal size, so the balanced mean is the plain one
    np.testing.assert_allclose(edits.means[1], by_row.mean(0), atol=1e-5)


@pytest.mark.parametrize("n_classes", [2, 4])
def test_figures_are_those_of_the_audit(n_classes) -> None:
    rng = np.random.default_rng(n_classes)
    n = 600
    labels, groups = rng.integers(0, n_classes, n), rng.integers(0, 2, n)
    logits = rng.normal(size=(n, n_classes)) + 2 * np.eye(n_classes)[labels]
    logits[:, -1] += groups
    classes = tuple("abcd"[:n_classes])
    evaluation = Evaluation(labels, classes, groups, ("f", "m"), "sex")
    audit = fairhead.audit(evaluation.records(logits), metrics="all", n_boot=100)
    for name, value in table_metrics(evaluation.counts(logits)[None], MEASURED).items():
        assert value[0] == pytest.approx(audit[name].value), name


def test_changes_are_paired_and_split_by_cell() -> None:
    rng = np.random.default_rng(0)
    labels, groups = rng.integers(0, 2, 400), rng.integers(0, 2, 400)
    before = rng.normal(size=(400, 2))
    after = before.copy()
    after[(labels == 1) & (groups == 1)] = [0.0, 5.0]
    evaluation = Evaluation(labels, ("no", "yes"), groups, ("f", "m"), "sex", clusters=np.arange(400) // 2)
    changes = evaluation.compare(before, after, LocatePlan(n_boot=200))
    values = {d.metric: d for d in changes.differences}
    assert values["accuracy"].value > 0 < values["accuracy"].low
    cells = {(y, group): d.value for y, group, d in changes.by_cell}
    right = before[(labels == 1) & (groups == 1)].argmax(1) == 1
    assert cells["yes", "f"] == pytest.approx(1 - right.mean())
    assert cells["yes", "m"] == cells["no", "f"] == cells["no", "m"] == 0


def test_curves_add_and_leave_out(learned, groups, task) -> None:
    features, edits = learned
    effect = direct_effect(features, task, edits)
    group, label = groups
    evaluation = Evaluation(label, task.classes, group, ("f", "m"), "sex")
    heads = [Head(1, 0), Head(0, 1), Head(1, 3)]
    found = curves(effect, heads, evaluation)
    assert [len(p["heads"]) for p in found["added"]] == [0, 1, 2, 3]
    assert [p["heads"] for p in found["alone"]] == [[list(h)] for h in heads]
    assert found["left_out"][0]["heads"] == [[0, 1], [1, 3]]
    last = table_metrics(evaluation.counts(effect([heads])[0])[None], ["accuracy"])["accuracy"][0]
    assert found["added"][-1]["accuracy"] == last


def test_norm_matched_controls() -> None:
    norms = np.exp(np.random.default_rng(0).normal(size=(6, 8)))
    selected = [(5, 1), (4, 2), (5, 3)]
    controls = norm_matched(selected, norms, neighbours=10, draws=250)
    assert len(set(controls.sets)) == 250
    size = np.log(norms)
    free = [h for h in np.ndindex(6, 8) if h not in selected]
    for heads in controls.sets:
        assert len(set(heads)) == 3
        assert not set(heads) & set(selected)
    for head in selected:
        near = sorted(free, key=lambda h: abs(size[h] - size[head]))[:10]
        assert any(set(heads) & set(near) for heads in controls.sets)
    few = norm_matched([(0, 0)], norms, neighbours=5)
    assert few.exhaustive
    assert len(few.sets) == 5
    with pytest.raises(InputError, match="no heads"):
        norm_matched([], norms)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [*itertools.product(["ViT", "DINOv2", "CLIP vision"], [0, None]), ("SigLIP", None)],
)
def test_passes_that_start_late_are_passes_in_full(name, tokens, images) -> None:
    model = FAMILIES[name].build("sdpa").requires_grad_(False)
    decomposer = Decomposer(model)
    rng = np.random.default_rng(0)
    edits = HeadEdits(rng.normal(size=(2, 4, 8)), {"project": rng.normal(size=(2, 4, 8, 8))}, 0.0, 9)
    task = Task(("a", "b"), rng.normal(size=(2, decomposer.width)), np.zeros(2), "made")
    calls: list[int] = []

    def batches(rows):
        calls.append(1)
        return batches_of(images[rows], 6)()

    told: list[int] = []
    everywhere = None if tokens == 0 else edits
    asked = RowPasses(decomposer, batches, task, everywhere, progress=lambda stage, done, rows: told.append(done))
    passes = asked(np.arange(12), edits, "project")
    sets = [[], [(1, 2)], [(1, 0), (1, 3)], [(0, 1), (1, 1)]]
    for where, logits in zip(sets, passes(sets), strict=True):
        with torch.no_grad(), fairhead.tap(decomposer.stream.base) as heads:
            edits.apply(heads, where, "project", tokens)
            full = [decomposer.outputs(batch).numpy() for batch in batches_of(images[:12], 6)()]
        np.testing.assert_allclose(logits, task.logits(np.concatenate(full)), atol=1e-5)
    passes([[(1, 2)], []])
    assert len(calls) == 1  # one sweep for all sets, and none for those that are known
    assert told == [6, 12]
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("draws", "expected"), [(500, 495), (300, 495), (200, 200), (3, 3)])
def test_all_controls_are_taken_unless_they_are_many(draws, expected) -> None:
    selected = [(0, 0), (0, 1), (0, 2), (0, 3)]  # 12 other heads of the layer: 495 sets of four
    controls = layer_matched(selected, 16, draws=draws)
    assert len(set(controls.sets)) == len(controls.sets) == expected
    assert controls.exhaustive == (expected == 495)


@pytest.mark.parametrize("kind", ["mean@1.5", "mean@-1", "mean@nan", "project@half", "resample@0.5"])
def test_a_strength_is_a_number_from_0_to_1(kind) -> None:
    with pytest.raises(InputError, match=f"kind is '{kind}'"):
        check_kind(kind)
