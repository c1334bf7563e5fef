"""Moments and features: exact, additive over batches and processes, resumed where they stopped."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.covariance import OAS
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from fairhead.errors import InputError
from fairhead.locate.decompose import Decomposer
from fairhead.locate.edits import shrunk
from fairhead.locate.head_features import HeadMoments, collect

N = 11


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = CLIPVisionConfig(**shape, image_size=8, patch_size=4, projection_dim=12)
    return CLIPVisionModelWithProjection(config).eval()


@pytest.fixture(scope="module")
def images():
    return torch.randn(N, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def batches_of(images, size, calls=None, stop_after=None):
    def batches(start):
        for number, i in enumerate(range(start, len(images), size)):
            if stop_after is not None and number == stop_after:
                raise KeyboardInterrupt
            if calls is not None:
                calls.append(i)
            yield {"pixel_values": images[i : i + size]}

    return batches


def test_parts_of_all_terms_sum_to_the_logits(model, images) -> None:
    decomposer = Decomposer(model)
    features = collect(decomposer, batches_of(images, 4), N)
    directions = np.random.default_rng(0).normal(size=(5, 12))
    with torch.no_grad():
        embeds = torch.nn.functional.normalize(model(images).image_embeds, dim=-1).numpy()
    constant = decomposer({"pixel_values": images}).constant.numpy() @ directions.T
    whole = features.parts(directions).sum((1, 2)) + np.einsum("nmo,ko->nk", features.others, directions) + constant
    np.testing.assert_allclose(whole, embeds @ directions.T, atol=1e-5)


def test_a_heads_own_output_is_what_enters_the_projection(model, images) -> None:
    features = collect(Decomposer(model), batches_of(images, 4), N)
    seen = {}
    layer = model.vision_model.encoder.layers[1].self_attn.out_proj
    handle = layer.register_forward_pre_hook(lambda m, args: seen.update(x=args[0][:, 0]))
    with torch.no_grad():
        model(images)
    handle.remove()
    np.testing.assert_allclose(features.outputs()[:, 1].reshape(N, -1), seen["x"].numpy(), rtol=1e-4, atol=1e-6)


def test_a_stopped_run_goes_on_where_it_was(model, images, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fairhead.train.features._EVERY", 0.0)
    decomposer, kept = Decomposer(model), {"folder": tmp_path / "features", "identity": {"ids": "a"}}
    with pytest.raises(KeyboardInterrupt):
        collect(decomposer, batches_of(images, 3, stop_after=2), N, **kept)
    calls: list[int] = []
    resumed = collect(decomposer, batches_of(images, 3, calls), N, **kept)
    assert calls == [6, 9]
    fresh = collect(decomposer, batches_of(images, 5), N)
    assert_equal(resumed, fresh)
    # Of something else, there are others in the same folder.
    calls.clear()
    assert_equal(collect(decomposer, batches_of(-images, 3, calls), N, **{**kept, "identity": {"ids": "b"}}),
                 collect(decomposer, batches_of(-images, 5), N))  # fmt: skip
    assert calls == [0, 3, 6, 9]
    calls.clear()
    assert_equal(collect(decomposer, batches_of(images, 3, calls), N, **kept), fresh)
    assert calls == []


def assert_equal(one, other) -> None:
    for name in ("heads", "others", "output", "scale", "maps"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-5)


@pytest.mark.parametrize("file", ["manifest.json", "data.bin"])
@pytest.mark.parametrize("share", [0, 0.5])
def test_features_that_are_cut_short_are_made_again(model, images, tmp_path, file, share) -> None:
    calls: list[int] = []
    collect(Decomposer(model), batches_of(images, 3, calls), N, folder=tmp_path)
    (path,) = tmp_path.rglob(file)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    again = collect(Decomposer(model), batches_of(images, 3, calls), N, folder=tmp_path)
    assert_equal(again, collect(Decomposer(model), batches_of(images, 5), N))
    assert calls == 2 * [0, 3, 6, 9]


def test_a_number_of_rows_other_than_announced_is_refused(model, images, tmp_path) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(InputError, match="11 rows came where 12 were announced"):
            collect(Decomposer(model), batches_of(images, 3), N + 1, folder=folder)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_moments_do_not_depend_on_how_rows_are_batched(seed, sizes) -> None:
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    x, cells = rng.normal(size=(n, 2, 3, 4)) + 5, rng.integers(0, 3, n)
    parts = np.split(np.arange(n), np.cumsum(sizes)[:-1])
    added = HeadMoments.empty(3, (2, 3, 4))
    for rows in parts:
        added.add(x[rows], cells[rows])
    np.testing.assert_array_equal(added.count, np.bincount(cells, minlength=3))
    pooled = added.pooled(by="rows")
    np.testing.assert_allclose(pooled.mean, x.mean(0))
    expected = np.cov(x[:, 1, 2].T, bias=True) if n > 1 else np.zeros((4, 4))
    np.testing.assert_allclose(pooled.covariance[1, 2], expected, atol=1e-10)


def test_balanced_moments_weigh_every_cell_the_same() -> None:
    rng = np.random.default_rng(0)
    x, cells = rng.normal(size=(90, 1, 2, 3)), np.repeat([0, 1, 2], [60, 25, 5])
    x[cells == 2] += 4
    pooled = HeadMoments.of(x, cells, 3).pooled()
    np.testing.assert_allclose(pooled.mean, np.mean([x[cells == c].mean(0) for c in range(3)], axis=0))
    weights = 1 / (3 * np.bincount(cells)[cells])
    np.testing.assert_allclose(pooled.covariance[0, 1], np.cov(x[:, 0, 1].T, aweights=weights, bias=True))
    with pytest.raises(InputError, match="no rows to take moments of"):
        HeadMoments.empty(3, (1, 2, 3)).pooled()


def test_shrinkage_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    for n, d in ((5, 8), (40, 8), (3, 2)):
        x = rng.normal(size=(n, d)) * np.arange(1, d + 1)
        reference = OAS().fit(x)
        matrix, amount = shrunk(np.cov(x.T, bias=True), n)
        np.testing.assert_allclose(matrix, reference.covariance_, rtol=1e-10)
        assert amount == pytest.approx(reference.shrinkage_)
