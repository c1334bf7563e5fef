"""A linear head on frozen features in a run: features of a model, features that came ready, and what cannot be used."""

import numpy as np
import pytest
import torch
import transformers
from made_faces import make_faces
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

import fairhead
from fairhead.bench import one_run
from fairhead.bench.cell import run_cell
from fairhead.bench.grid import Backbone, Cell, Data, Method
from fairhead.data import read
from fairhead.data.images import ReadyFeatures
from fairhead.errors import InputError
from fairhead.mitigate.two_stages import features_of, find_head
from fairhead.models.attached import FEATURES, LinearHead
from fairhead.models.fresh import Recipe
from fairhead.train.step import Examples


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    return make_faces(tmp_path_factory.mktemp("faces"), n=400)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    shape = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "intermediate_size": 16}
    ViTForImageClassification(ViTConfig(num_hidden_layers=2, num_attention_heads=2, **shape)).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder)
    return folder


@pytest.fixture
def ready(faces, tmp_path):
    """Features by id, [n, 6], in two files: columns that show the label, and others that show nothing."""
    rows = read("utkface", faces).all
    rng = np.random.default_rng(0)
    features = rng.normal(size=(len(rows), 6))
    features[:, 0] += 2 * rows.labels
    for part, chosen in enumerate(np.array_split(np.arange(len(rows)), 2)):
        np.savez(tmp_path / f"part_{part}.npz", features=features[chosen].astype(np.float16), names=rows.ids[chosen])
    return f"features:{tmp_path}/part_*.npz"


def a_cell(faces, model, method="erm", like=None, **options):
    data = Data("faces", f"utkface:{faces}", group="white", split_by_seed=True, like=like)
    return Cell(data, Backbone("m", str(model), "head"), Method(method, method, options), 0, {"weight_decay": 0.05})


@pytest.mark.parametrize("method", ["erm", "auto"])
def test_a_head_on_a_model_s_features_is_saved_as_the_whole_model(method, faces, encoder, tmp_path):
    found = one_run.mitigate(a_cell(faces, encoder, method), tmp_path / "run", cache=tmp_path / "cache")
    model = fairhead.load(tmp_path / "run/model")
    assert isinstance(model, ViTForImageClassification)
    before = fairhead.load(encoder).vit.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.vit.state_dict().items())
    again = fairhead.predict(tmp_path / "run/model", read("utkface", faces, seed=0))
    kept = fairhead.Records.read(tmp_path / "run/records.csv")
    scores = dict(zip(again.id.tolist(), again.scores.tolist(), strict=True))
    np.testing.assert_allclose(kept.scores, [scores[str(name)] for name in kept.id], atol=1e-4)
    assert found.row["stages"][0][2] > 0


def test_features_are_computed_once(faces, encoder, tmp_path):
    heard = []
    for _ in range(2):
        run_cell(a_cell(faces, encoder), "cpu", tmp_path, lambda stage, done, total, note: heard.append(stage))
    assert heard.count("features of test") == 1


def test_ready_features_are_joined_by_name(faces, ready, tmp_path):
    done = run_cell(a_cell(faces, ready), "cpu", tmp_path)
    assert isinstance(done.trained.model, LinearHead)
    table = ReadyFeatures.read(ready)
    test = read("utkface", faces, seed=0).examples("test")
    torch.testing.assert_close(done.task.test.inputs[FEATURES], torch.from_numpy(table.of(test.inputs, test.ids)))
    assert done.row["figures"]["accuracy"]["value"] > 0.75  # Bayes: 84 %
    found = one_run.mitigate(a_cell(faces, ready, "auto"), tmp_path / "run", cache=tmp_path / "cache")
    assert isinstance(found.model, LinearHead)


def pictures_of(folder, shade, n):
    """A table of pictures of one shade, without ids: rows are numbered."""
    folder.mkdir()
    rng, lines = np.random.default_rng(shade), ["picture,label"]
    for i in range(n):
        pixels = np.clip(rng.normal(shade, 20, (8, 8, 3)) + 20 * (i % 2), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        lines.append(f"{i}.png,{'yes' if i % 2 else 'no'}")
    (folder / "labels.csv").write_text("\n".join(lines))
    return folder / "labels.csv"


@pytest.mark.parametrize("train", ["head", "last_encoder", "all"])
def test_a_sample_from_the_place_of_use_is_of_its_own_pictures(train, encoder, tmp_path):
    """Its rows have the numbers of the data's own, and are brighter: they must not be taken for those."""
    dark, bright = pictures_of(tmp_path / "dark", 60, 200), pictures_of(tmp_path / "bright", 180, 80)
    data = Data("own", f"images:{dark}", {"input": "picture", "label": "label"}, split_by_seed=True, like=str(bright))
    plan = {"epochs": 1, "batch_size": 32}
    done = run_cell(Cell(data, Backbone("m", str(encoder), train), Method("m", "match"), 0, plan), "cpu", tmp_path)
    assert done.task.train.inputs["pixel_values"].float().mean() < 90
    assert len(done.task.like) == 80
    assert done.task.like.inputs["pixel_values"].float().mean() > 170
    assert done.row["notes"]["match"]["differ"]
    assert set(done.row["figures"]) == {"accuracy"}  # no group is named: nothing else to audit


def test_ready_features_without_a_row_are_told(faces, tmp_path):
    other = tmp_path / "other.npz"
    np.savez(other, features=np.zeros((2, 3)), names=["a", "b"])
    with pytest.raises(InputError, match=r"\d+ of \d+ rows have no features there"):
        run_cell(a_cell(faces, f"features:{other}"), "cpu", tmp_path)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"vectors": np.zeros((3, 2))}, "with the arrays features, names"),
        ({"features": np.zeros((3, 2)), "names": ["a", "b"]}, r"\[3, 2\] and there are 2 names"),
        ({"features": np.zeros((2, 2)), "names": ["a", "a"]}, "1 names occur twice"),
    ],
)
def test_files_of_features_that_cannot_be_used_are_told(arrays, said, tmp_path):
    np.savez(tmp_path / "f.npz", **arrays)
    with pytest.raises(InputError, match=said):
        ReadyFeatures.read(f"features:{tmp_path}/f.npz")
    with pytest.raises(InputError, match="there is no such file of features"):
        ReadyFeatures.read(f"features:{tmp_path}/none.npz")


def test_features_that_are_not_numbers_are_told(faces, tmp_path):
    rows = read("utkface", faces).all
    features = np.zeros((len(rows), 3), np.float32)
    features[:, 0], features[5, 1] = rows.labels, np.nan
    np.savez(tmp_path / "f.npz", features=features, names=rows.ids)
    with pytest.raises(InputError, match=r"column 1 of the .* features is not finite in 1 of"):
        run_cell(a_cell(faces, f"features:{tmp_path}/f.npz"), "cpu", tmp_path)


@pytest.mark.parametrize("family", ["Roberta", "DistilBert", "Bert"])
def test_a_fresh_layer_before_the_head_hands_the_features_on(family, tmp_path):
    """What a linear head can learn from is what the encoder knows, not random mixtures of it."""
    config = getattr(transformers, f"{family}Config")(
        hidden_size=8, dim=8, num_hidden_layers=1, n_layers=1, num_attention_heads=2, n_heads=2, intermediate_size=8,
        hidden_dim=8, vocab_size=50,
    )  # fmt: skip
    torch.manual_seed(1)
    encoder = getattr(transformers, f"{family}Model")(
        config, **({"add_pooling_layer": False} if family == "Bert" else {})
    )
    encoder.eval().save_pretrained(tmp_path)
    rows = Examples({"input_ids": torch.randint(3, 50, (60, 5))}, torch.arange(60) % 2)
    model = Recipe(f"path:{tmp_path}", ("no", "yes")).build("text", 0, head_only=True)
    with torch.no_grad():
        first = encoder(**rows.inputs).last_hidden_state[:, 0].double()
    for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 0.02)):  # a model may be served in 16 bits
        features = features_of(model.to(dtype), find_head(model, rows), rows).double()
        known = torch.cat([features, torch.ones(60, 1)], 1)
        left = first - known @ torch.linalg.lstsq(known, first).solution
        assert left.square().mean() < most * first.var(0).mean()

    # A layer that has been trained stays as it is.
    trained = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    trained.save_pretrained(tmp_path / "trained")
    again = Recipe(f"path:{tmp_path / 'trained'}", ("no", "yes")).build("text", 0, head_only=True)
    assert torch.equal(
        features_of(again, find_head(again, rows), rows), features_of(trained, find_head(trained, rows), rows)
    )
