"""Models beside the one that is trained: teachers by name, and frozen models whose features are clustered."""

import json
from dataclasses import replace

import pytest
import torch
from made_faces import make_faces
from shortcut import PLAN, build_model, shortcut
from transformers import (
    BertConfig,
    BertModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    FunnelConfig,
    FunnelModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from fairhead.bench.cell import run_cell
from fairhead.bench.grid import Backbone, Cell, Data, Method
from fairhead.bench.grid_file import read_grid
from fairhead.bench.one_run import whole_model
from fairhead.bench.runner import check
from fairhead.bench.tasks import auxiliary_models_of, read_task
from fairhead.errors import InputError, UnsupportedModel
from fairhead.mitigate import load, method, run, save
from fairhead.mitigate.hard_rows import Pair
from fairhead.mitigate.training_job import AuxiliaryModel
from fairhead.models import method_of
from fairhead.models.fresh import Recipe
from fairhead.train.features import pooled
from fairhead.train.meters import Meter

TINY = {"width": 16, "mlp": 16, "image_size": 8, "patch_size": 4}


def nothing(done, total):
    pass


enter = Meter.__enter__


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    return make_faces(tmp_path_factory.mktemp("faces"))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """The folder of a small CLIP image tower that wants pictures of 12 × 12."""
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPVisionConfig(**shape, image_size=12, patch_size=4, projection_dim=6)
    CLIPVisionModelWithProjection(config).save_pretrained(folder)
    wanted = {"size": {"height": 12, "width": 12}, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
    (folder / "preprocessor_config.json").write_text(json.dumps(wanted))
    return folder


def a_cell(faces, name, train="all", **options):
    return Cell(
        Data("faces", f"utkface:{faces}", group="white", split_by_seed=True),
        Backbone("tiny", "vit-2x2", train, TINY),
        Method(name, name, options),
        0,
        {"epochs": 1, "batch_size": 16},
    )


def task_of(cell, cache):
    return read_task(
        cell.data, lambda classes: Recipe(cell.backbone.model, classes, cell.backbone.settings), cell.seed, cache
    )


def others_for(cell, cache, progress=nothing):
    return auxiliary_models_of(cell, task_of(cell, cache), "cpu", cache, progress)


def test_pictures_for_another_model_are_decoded_before_the_meter_starts(faces, clip, tmp_path, monkeypatch):
    news = []
    monkeypatch.setattr("fairhead.bench.cell.Meter.__enter__", lambda meter: news.append("meter") or enter(meter))
    cell = a_cell(faces, "balance", encoder=f"path:{clip}", clusters=2, candidates=["balance"])
    run_cell(cell, "cpu", tmp_path, lambda stage, done, total, note: done == total and news.append(stage))
    before, after = news[: news.index("meter")], news[news.index("meter") + 1 :]
    # Twice: for the model that is trained (8 × 8) and for the frozen one (12 × 12).
    assert before.count("decoding") == 2
    assert "decoding" not in after
    assert "training" in after


def test_a_model_that_takes_the_same_pictures_is_given_the_same_tensors(faces, clip, tmp_path):
    cell = a_cell(faces, "kd", teacher="vit-3x2")
    task = task_of(cell, tmp_path)
    auxiliary = auxiliary_models_of(cell, task, "cpu", tmp_path, nothing)
    assert auxiliary("vit-3x2").train is task.train
    assert auxiliary(f"path:{clip}").train is not task.train


@pytest.mark.parametrize("train", ["all", "last_encoder"])
def test_a_teacher_may_be_larger_than_the_student(faces, tmp_path, train):
    cell = a_cell(faces, "kd", train, teacher="vit-3x2", teacher_epochs=2)
    teacher = others_for(cell, tmp_path)("vit-3x2")
    assert teacher.build_model().config.num_hidden_layers == 3
    assert teacher.train.inputs["pixel_values"].shape == (128, 3, 8, 8)
    done = run_cell(cell, "cpu", tmp_path)
    assert [(name, steps) for name, _, steps in done.row["stages"]] == [
        ("teacher", 2 * (128 // 16)),
        ("soft labels", 0),
        ("student", 128 // 16),
    ]
    assert done.trained.model.config.num_hidden_layers == (1 if train == "last_encoder" else 2)
    assert done.row["settings"]["method"]["options"]["teacher"] == "vit-3x2"


def test_an_adversary_may_be_smaller_than_the_learner(faces, clip, tmp_path, monkeypatch):
    equal, small = a_cell(faces, "arl", pretrain=0), a_cell(faces, "arl", pretrain=0, adversary="vit-1x2")
    trained, layers = [], []
    monkeypatch.setattr(Pair, "forward", noting(layers, Pair.forward))
    for cell in (equal, small):
        trained.append(run_cell(cell, "cpu", tmp_path).trained.model)
    half = len(layers) // 2
    assert (set(layers[:half]), set(layers[half:])) == ({2}, {1})
    assert [len(model.vit.layers) for model in trained] == [2, 2]
    assert not torch.equal(*(model.classifier.weight for model in trained))  # other weights on the rows
    frozen = replace(small, backbone=replace(small.backbone, train="last_encoder"))
    for cell in (frozen, a_cell(faces, "arl", adversary=f"path:{clip}")):
        with pytest.raises(InputError, match="both must read the same inputs"):
            run_cell(cell, "cpu", tmp_path)
    with pytest.raises(InputError, match="there is no model 'vit6'"):
        check([a_cell(faces, "arl", adversary="vit6")])


def test_an_adversary_with_another_tokenizer_is_refused_though_its_texts_are_as_long():
    data = shortcut(n=64)
    train, validation = data.train, data.validation
    turned = replace(train, inputs={name: tensor.flip(0) for name, tensor in train.inputs.items()})
    other = AuxiliaryModel(build_model, lambda examples: examples.labels, turned, validation)
    with pytest.raises(InputError, match="both must read the same inputs"):
        run(method("arl", adversary="other"), build_model, train, validation, PLAN, auxiliary=lambda name: other)


def noting(layers, forward):
    """A forward of pairs that notes how many layers the second network has."""

    def look(pair, **inputs):
        layers.append(len(pair.second.vit.layers))
        return forward(pair, **inputs)

    return look


def test_frozen_features_are_the_model_s_own_embedding_of_the_same_rows(faces, clip, tmp_path):
    cell = a_cell(faces, "balance", encoder=f"path:{clip}")
    other = others_for(cell, tmp_path)(f"path:{clip}")
    done = run_cell(a_cell(faces, "erm"), "cpu", tmp_path)
    assert torch.equal(other.train.labels, done.task.train.labels)
    assert torch.equal(other.validation.labels, done.task.validation.labels)
    pixels = other.validation.inputs["pixel_values"]
    assert pixels.shape[-1] == 12
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in ([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]))
    with torch.inference_mode():
        by_hand = CLIPVisionModelWithProjection.from_pretrained(clip)((pixels.float() / 255 - mean) / std).image_embeds
    torch.testing.assert_close(other.features(other.validation), by_hand)


def test_clusters_of_a_frozen_model_run_in_a_cell(faces, clip, tmp_path):
    done = run_cell(
        a_cell(faces, "balance", encoder=f"path:{clip}", clusters=2, candidates=["balance"]), "cpu", tmp_path
    )
    # No plain training first, and nothing to match: the features are there already.
    assert [stage[0] for stage in done.row["stages"]] == ["features", "clusters", "training: balance"]


def test_a_text_s_vector_leaves_padding_out():
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertModel(BertConfig(**shape, vocab_size=20)).eval()
    ids, mask = torch.tensor([[1, 5, 6, 2, 0, 0], [1, 7, 8, 9, 10, 2]]), torch.tensor([[1] * 4 + [0] * 2, [1] * 6])
    with torch.inference_mode():
        together = pooled(model(input_ids=ids, attention_mask=mask), mask)
        alone = model(input_ids=ids[:1, :4]).last_hidden_state.mean(1)
    torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=1e-5)


def test_a_name_and_a_function_give_the_same_clusters():
    task = shortcut(n=400)

    def features(examples):
        return examples.inputs["x"]

    def auxiliary(name):
        assert name == "frozen"
        return AuxiliaryModel(build_model, features, task.train, task.validation)

    plan = replace(PLAN, epochs=1)
    ways = [
        run(method("balance", clusters=2, encoder=given), build_model, task.train, task.validation, plan, **more)
        for given, more in ((features, {}), ("frozen", {"auxiliary": auxiliary}))
    ]
    assert ways[0].fit.history == ways[1].fit.history
    with pytest.raises(InputError, match="'frozen' names a model, and this training knows none by name"):
        run(method("balance", encoder="frozen"), build_model, task.train, task.validation, plan)


def test_mistakes_are_found_before_any_work(faces, tmp_path):
    with pytest.raises(InputError, match=r"has no config.json"):
        check([a_cell(faces, "balance", encoder=f"path:{tmp_path}")])
    with pytest.raises(InputError, match="there is no model 'vit-12'"):
        check([a_cell(faces, "kd", teacher="vit-12")])
    with pytest.raises(InputError, match="fresh weights"):
        Recipe("vit-2x2", ("0", "1"), TINY).build_trunk("image")
    with pytest.raises(InputError, match="encoder is 3; expected text or a function or nothing"):
        method("balance", encoder=3)
    with pytest.raises(InputError, match="share is 2; expected a number from 0 to 1"):
        method("kd", share=2)


def test_a_variable_in_an_option_is_filled_in_but_not_in_the_fingerprint(faces, clip, tmp_path, monkeypatch):
    text = """
title: T
data: [{name: faces, read: "utkface:${FACES}", group: white, split_by_seed: true}]
backbones: [{name: tiny, model: vit-2x2, settings: {width: 16, mlp: 16, image_size: 8, patch_size: 4}}]
methods: [erm, {method: balance, options: {encoder: "path:${MODELS}"}}]
seeds: [0]
"""
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(InputError, match=r"option encoder of method 'balance'.*variable MODELS is not set"):
        read_grid(tmp_path / "grid.yaml", [], {"FACES": str(faces)})
    assert read_grid(tmp_path / "grid.yaml", ["methods=erm"], {"FACES": str(faces)}).cells()
    cell = read_grid(tmp_path / "grid.yaml", [], {"FACES": str(faces), "MODELS": str(clip)}).cells()[1]
    assert cell.settings()["method"]["options"] == {"encoder": "path:${MODELS}"}
    monkeypatch.setenv("MODELS", str(clip))
    other = others_for(cell, tmp_path)("path:${MODELS}")
    assert other.features(other.validation).shape == (16, 6)


@pytest.mark.parametrize("train", ["all", "last_encoder"])
def test_an_image_tower_without_its_other_half_is_a_backbone(faces, clip, train, tmp_path):
    cell = replace(a_cell(faces, "dam"), backbone=Backbone("clip", f"path:{clip}", train))
    done = run_cell(cell, cache=tmp_path)
    whole = whole_model(done.trained.model, "image", cell, Recipe(f"path:{clip}", done.task.classes))
    assert type(whole).__name__ == "CLIPForImageClassification"
    pretrained = CLIPVisionModelWithProjection.from_pretrained(clip).vision_model.encoder.layers[0]
    moved = not torch.equal(whole.vision_model.encoder.layers[0].mlp.fc1.weight, pretrained.mlp.fc1.weight)
    assert moved == (train == "all")  # it began with the folder's weights, and those that are frozen still are
    save(whole.eval(), tmp_path / "model")
    pictures = done.task.test.inputs["pixel_values"][:4] / 255
    torch.testing.assert_close(load(tmp_path / "model")(pictures).logits, whole(pictures).logits, rtol=0, atol=0)


@pytest.mark.parametrize("train", ["all", "last_encoder"])
def test_balance_of_a_pretrained_network_clusters_its_features_before_training(faces, clip, train, tmp_path):
    backbone = Backbone("clip", f"path:{clip}", train)
    models = []
    for more in ({"encoder": f"path:{clip}"}, {}):
        cell = replace(a_cell(faces, "balance", clusters=2, candidates=["balance"], **more), backbone=backbone)
        models.append(run_cell(cell, "cpu", tmp_path).trained)
    named, default = models
    assert [stage[0] for stage in default.stages] == [stage[0] for stage in named.stages]  # no plain training first
    assert default.notes["clusters"] == named.notes["clusters"]
    assert all(map(torch.equal, named.model.state_dict().values(), default.model.state_dict().values()))


@pytest.mark.parametrize(("train", "backbone"), [("all", "clip"), ("last_encoder", "clip"), ("all", "vit-2x2")])
def test_weights_are_used_under_dam(faces, clip, train, backbone, tmp_path):
    """Fine-tuned, in the last encoder and from scratch: the model carries DAM, and is another than without weights."""
    own = Backbone("clip", f"path:{clip}", train) if backbone == "clip" else Backbone("tiny", backbone, train, TINY)
    how = {"encoder": f"path:{clip}", "clusters": 2}
    balanced, plain = (
        run_cell(replace(a_cell(faces, "auto", candidates=[name], under="dam", **how), backbone=own), "cpu", tmp_path)
        for name in ("balance", "plain")
    )
    assert type(method_of(balanced.trained.model)).__name__ == "DAM"
    assert balanced.row["notes"]["kept"] == "balance"
    states = (done.trained.model.state_dict().values() for done in (balanced, plain))
    assert not all(map(torch.equal, *states))


def test_a_language_model_that_cannot_pad_is_named(tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=9)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="is a llama model without a padding token"):
        Recipe(f"path:{tmp_path}", ("no", "yes")).build("text", seed=0)


def test_an_encoder_whose_settings_name_no_padding_token_is_a_backbone(tmp_path):
    shape = {"d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 16, "block_sizes": [1], "vocab_size": 9}
    FunnelModel(FunnelConfig(**shape)).save_pretrained(tmp_path)
    model = Recipe(f"path:{tmp_path}", ("no", "yes")).build("text", seed=0)
    assert model(input_ids=torch.ones(2, 4, dtype=torch.long)).logits.shape == (2, 2)


def test_an_encoder_of_pictures_is_refused_for_texts(clip, tmp_path):
    (tmp_path / "posts.csv").write_text("text,label\n" + "".join(f"post {i},{'ab'[i % 2]}\n" for i in range(40)))
    data = Data("own", f"texts:{tmp_path / 'posts.csv'}", {"label": "label"})
    with pytest.raises(InputError, match="is a clip_vision_model model, which reads no texts, and the data are texts"):
        read_task(data, lambda classes: Recipe(f"path:{clip}", classes), 0, tmp_path)
