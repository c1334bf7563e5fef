"""Frozen features: the same as recomputing, made once, and never half used."""

import copy
import json
import os
import signal
import time

import numpy as np
import pytest
import torch
import transformers
from several_processes import in_processes
from torch.multiprocessing import ProcessExitedException

from fairhead.errors import InputError, UnsupportedModel
from fairhead.heads import find_sites
from fairhead.mitigate import DAM, attach
from fairhead.models.inputs import Pictures, normalising
from fairhead.train import TrainingPlan, features
from fairhead.train.features import cached_array, encode, frozen_features, key_of, pooled
from fairhead.train.fitting import fit, predict
from fairhead.train.last_encoder import all_tokens, last_encoder, put_back
from fairhead.train.step import Examples

WIDTH = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
IMAGE = {"image_size": 8, "patch_size": 4}


def image_model(name):
    torch.manual_seed(0)
    if name == "vit":
        config = transformers.ViTConfig(**WIDTH, **IMAGE, intermediate_size=16)
        return transformers.ViTForImageClassification(config)
    if name == "dinov2":
        return transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**WIDTH, **IMAGE, mlp_ratio=1))
    vision = transformers.CLIPVisionConfig(**WIDTH, **IMAGE, intermediate_size=16).to_dict()
    return transformers.CLIPForImageClassification(transformers.CLIPConfig(vision_config=vision))


def text_model(name):
    torch.manual_seed(0)
    small = {"vocab_size": 30, **WIDTH, "intermediate_size": 16}
    if name == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**small))
    if name == "roberta":
        return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**small))
    if name == "modernbert":
        config = transformers.ModernBertConfig(**small, pad_token_id=0, global_attn_every_n_layers=1)
        return transformers.ModernBertForSequenceClassification(config)
    config = transformers.DistilBertConfig(vocab_size=30, dim=16, n_layers=3, n_heads=4, hidden_dim=16)
    return transformers.DistilBertForSequenceClassification(config)


def images(n=12):
    generator = torch.Generator().manual_seed(1)
    return Examples({"pixel_values": torch.randn(n, 3, 8, 8, generator=generator)}, torch.arange(n) % 2)


def texts(n=12):
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(n, 7, dtype=torch.long)
    mask[::2, 5:] = 0
    ids = torch.randint(4, 30, (n, 7), generator=generator)
    return Examples({"input_ids": ids, "attention_mask": mask}, torch.arange(n) % 2)


@pytest.mark.parametrize("name", ["vit", "dinov2", "clip"])
def test_features_and_rest_are_the_whole_model_for_images(name, tmp_path):
    model = image_model(name).eval()
    data = images()
    features = frozen_features(model, data, tmp_path, batch_size=5)
    whole, rest = model(**data.inputs).logits, last_encoder(model)(**features.inputs).logits
    torch.testing.assert_close(rest, whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert"])
def test_features_and_rest_are_the_whole_model_for_padded_text(name, tmp_path):
    model = text_model(name).eval()
    data = texts()
    features = frozen_features(model, data, tmp_path, batch_size=5)
    whole, rest = model(**data.inputs).logits, last_encoder(model)(**features.inputs).logits
    torch.testing.assert_close(rest, whole, atol=1e-6, rtol=1e-5)


def tokens_seen(model, features):
    """How many tokens the last linear layer before the task head is given."""
    seen = []
    last = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 16][-1]
    # Behind the hooks that were there before it.
    handle = last.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:-1].numel()))
    model(**features.inputs)
    handle.remove()
    return seen[0] // len(features)


@pytest.mark.parametrize(
    ("build", "name", "alone"),
    [
        (image_model, "vit", True),
        (image_model, "dinov2", False),  # its head reads the mean of the other tokens too
        (text_model, "bert", True),
        (text_model, "roberta", True),
        (text_model, "distilbert", True),
    ],
)
def test_the_first_token_is_computed_alone_where_nothing_reads_the_others(build, name, alone, tmp_path):
    model = build(name).eval()
    features = frozen_features(model, images() if build is image_model else texts(), tmp_path)
    rest = last_encoder(model)
    whole = copy.deepcopy(rest)
    all_tokens(whole)
    hooks = [sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in net.modules()) for net in (rest, whole)]
    assert (hooks[0] > 0) == alone
    assert hooks[1] == 0
    attention = [find_sites(net)[0].module for net in (rest, whole)]
    assert ["forward" in vars(module) for module in attention] == [alone, False]
    if alone:
        assert tokens_seen(rest, features) == 1
    # The same losses and gradients, padding and all.
    for net in (rest, whole):
        net(**features.inputs, labels=features.labels).loss.backward()
    for key, parameter in whole.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(rest.get_parameter(key).grad, parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("zero_head", [False, True])
def test_a_head_that_reads_the_mean_gets_all_tokens_even_while_it_tells_nothing(zero_head):
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        vocab_size=30,
        **WIDTH,
        intermediate_size=16,
        pad_token_id=0,
        global_attn_every_n_layers=1,
        classifier_pooling="mean",
    )
    model = transformers.ModernBertForSequenceClassification(config).eval()
    if zero_head:
        torch.nn.init.zeros_(model.classifier.weight)
    rest = last_encoder(model)
    assert not any(m._forward_pre_hooks for m in rest.modules())
    assert "forward" not in vars(find_sites(rest)[0].module)


@pytest.mark.parametrize("method", [DAM(), DAM(stats_axes="batch_token"), DAM(append=True), DAM(pick="per_head")])
@pytest.mark.parametrize("name", ["vit", "bert"])
def test_dam_on_the_first_token_alone_is_dam_on_all_of_them(name, method, tmp_path):
    model = (image_model if name == "vit" else text_model)(name).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    features = frozen_features(model, images() if name == "vit" else texts(), tmp_path)
    rest = last_encoder(model)
    whole = copy.deepcopy(rest)
    all_tokens(whole)
    losses = []
    for net in (rest, whole):
        torch.manual_seed(0)
        attach(net, method).train()
        losses.append(net(**features.inputs, labels=features.labels).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)
    for key, parameter in whole.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(rest.get_parameter(key).grad, parameter.grad, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(
        rest.eval()(**features.inputs).logits, whole.eval()(**features.inputs).logits, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "distilbert"])
def test_texts_are_encoded_with_little_padding_and_to_the_same_features(name, tmp_path, monkeypatch):
    model, data = text_model(name).base_model.eval(), texts(300)
    with torch.no_grad():
        padded = pooled(model(**data.inputs), data.inputs["attention_mask"])
    seen, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda **inputs: seen.append(inputs["input_ids"].shape) or forward(**inputs))
    found = encode(model, data, tmp_path)
    torch.testing.assert_close(found, padded, atol=1e-5, rtol=1e-4)
    assert seen == [(1, 5), (128, 5), (128, 7), (44, 7)]


def test_cached_features_equal_recomputed_ones(tmp_path):
    model, data = image_model("vit"), images()
    first = frozen_features(model, data, tmp_path / "a").inputs["pixel_values"]
    again = frozen_features(model, data, tmp_path / "a").inputs["pixel_values"]
    anew = frozen_features(model, data, tmp_path / "b").inputs["pixel_values"]
    assert torch.equal(first, again)
    assert torch.equal(first, anew)


def test_training_on_features_trains_the_last_layer_as_training_it_in_place_does(tmp_path):
    model, data = image_model("vit"), images()
    plan = TrainingPlan(epochs=3, batch_size=4, learning_rate=1e-2, weight_decay=0.0)
    rest = last_encoder(model)
    features = frozen_features(model, data, tmp_path)
    fit(rest, features, features, plan)

    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith(("vit.layers.2.", "vit.layernorm", "classifier"))
    fit(model, data, data, plan)
    torch.testing.assert_close(predict(rest, features), predict(model, data), atol=1e-5, rtol=1e-4)


def test_dam_attaches_to_the_rest_and_nothing_frozen_moves(tmp_path):
    model, data = image_model("vit"), images()
    features = frozen_features(model, data, tmp_path)
    rest = attach(last_encoder(model), DAM(hidden=8, width=4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fit(rest, features, features, TrainingPlan(epochs=1, batch_size=4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert rest.dam.q.mean.abs().sum() > 0


def test_what_was_learnt_goes_back_into_the_whole_model(tmp_path):
    model, data = image_model("vit"), images()
    features = frozen_features(model, data, tmp_path)
    rest = last_encoder(model)
    fit(rest, features, features, TrainingPlan(epochs=2, batch_size=4, learning_rate=1e-2))
    torch.testing.assert_close(predict(put_back(model, rest), data), predict(rest, features), atol=1e-5, rtol=1e-4)


def test_other_weights_inputs_and_precision_have_other_entries_but_another_head_has_not(tmp_path):
    def entries():
        return {path.name for path in tmp_path.iterdir() if path.is_dir()}

    model, data = image_model("vit"), images()
    frozen_features(model, data, tmp_path)
    assert len(entries()) == 1
    torch.nn.init.normal_(model.classifier.weight)
    torch.nn.init.normal_(model.vit.layers[-1].layernorm_before.weight)
    frozen_features(model, data, tmp_path)
    assert len(entries()) == 1
    torch.nn.init.normal_(model.vit.layers[0].layernorm_before.weight)
    frozen_features(model, data, tmp_path)
    assert len(entries()) == 2
    frozen_features(model, images(8), tmp_path)
    assert len(entries()) == 3
    frozen_features(model, data, tmp_path, precision="bf16")
    assert len(entries()) == 4


def test_pictures_that_are_normalised_otherwise_have_other_features(tmp_path):
    pixels = torch.randint(0, 256, (4, 3, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    data = Examples({"pixel_values": pixels}, torch.arange(4) % 2)
    for pictures in (Pictures(8), Pictures(8, (0.2, 0.3, 0.4), (0.3, 0.3, 0.2))):
        model = normalising(image_model("vit"), pictures).eval()
        features = frozen_features(model, data, tmp_path)
        rest = last_encoder(model)(**features.inputs).logits
        torch.testing.assert_close(rest, model(**data.inputs).logits, atol=1e-5, rtol=1e-4)


def test_a_damaged_entry_is_made_again(tmp_path):
    def fill(array, done):
        array[:] = np.arange(6)
        yield 6

    cached_array(tmp_path, "key", (6,), "int64", fill)
    data, manifest = tmp_path / "key/data.bin", tmp_path / "key/manifest.json"
    data.write_bytes(data.read_bytes()[:-8])
    assert cached_array(tmp_path, "key", (6,), "int64", fill).tolist() == list(range(6))
    manifest.write_text("{")
    assert cached_array(tmp_path, "key", (6,), "int64", fill).tolist() == list(range(6))
    manifest.unlink()
    assert cached_array(tmp_path, "key", (6,), "int64", fill).tolist() == list(range(6))
    assert json.loads(manifest.read_text())["shape"] == [6]


def killed_in_the_middle(rank, folder, port):
    def fill(array, done):
        array[:3] = 7
        array.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        yield 6

    cached_array(folder, "key", (6,), "int64", fill)


def test_a_cache_whose_maker_was_killed_is_made_anew(tmp_path):
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        in_processes(killed_in_the_middle, tmp_path, count=1)
    assert (tmp_path / "key.part" / "data.bin").exists()
    assert not (tmp_path / "key").exists()

    def fill(array, done):
        array[:] = np.arange(6)
        yield 6

    assert cached_array(tmp_path, "key", (6,), "int64", fill).tolist() == list(range(6))
    assert not (tmp_path / "key.part").exists()


def killed_in_the_middle_of_features(rank, folder, port):
    features._EVERY = 0.0  # what was computed is kept after every batch

    def kill(done, n):
        if done == 10:  # computed and written, but the file that says so was made of the batch before
            os.kill(os.getpid(), signal.SIGKILL)

    frozen_features(text_model("bert").eval(), texts(), folder, batch_size=5, progress=kill)


def test_a_run_that_was_killed_goes_on_with_the_features_that_it_had(tmp_path):
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        in_processes(killed_in_the_middle_of_features, tmp_path / "killed", count=1)
    model, seen = text_model("bert").eval(), []
    found = frozen_features(model, texts(), tmp_path / "killed", batch_size=5, progress=lambda *at: seen.append(at))
    assert seen == [(10, 12), (12, 12)]
    expected = frozen_features(model, texts(), tmp_path / "whole", batch_size=5)
    assert torch.equal(found.inputs["inputs_embeds"], expected.inputs["inputs_embeds"])
    assert [path for path in (tmp_path / "killed").rglob("*") if "part" in path.name or "progress" in path.name] == []


def test_what_was_left_unfinished_for_long_is_removed(tmp_path):
    """The data, and so the key, may have changed since: nobody would ever go on with it."""
    for name, age in {"old": 8, "new": 1}.items():
        (tmp_path / f"{name}.part").mkdir()
        (tmp_path / f"{name}.part" / "progress.json").write_text('{"rows": 3}')
        os.utime(tmp_path / f"{name}.part", (time.time() - age * 86400,) * 2)

    def fill(array, done):
        array[:] = 1
        yield 6

    cached_array(tmp_path, "key", (6,), "int64", fill)
    assert [path.name for path in tmp_path.glob("*.part")] == ["new.part"]


@pytest.mark.parametrize(
    ("progress", "size"),
    [("{", 48), ("[]", 48), ('{"rows": "x"}', 48), ('{"rows": 3}', 8), ('{"rows": 7}', 48), ('{"rows": -2}', 48)],
)
def test_what_a_killed_run_left_is_used_only_if_it_is_whole(tmp_path, progress, size):
    (tmp_path / "key.part").mkdir()
    (tmp_path / "key.part" / "progress.json").write_text(progress)
    (tmp_path / "key.part" / "data.bin").write_bytes(bytes(size))  # 48 are expected

    def fill(array, done):
        array[done:] = np.arange(6)[done:] + 1
        yield 6

    assert cached_array(tmp_path, "key", (6,), "int64", fill).tolist() == [1, 2, 3, 4, 5, 6]


def test_writing_to_the_array_leaves_the_cache_alone(tmp_path):
    def fill(array, done):
        array[:] = 1
        yield 2

    cached_array(tmp_path, "key", (2,), "int64", fill)[:] = 5
    assert cached_array(tmp_path, "key", (2,), "int64", fill).tolist() == [1, 1]


def test_an_error_while_filling_leaves_no_entry(tmp_path):
    def fill(array, done):
        raise RuntimeError("no more")
        yield 2

    with pytest.raises(RuntimeError, match="no more"):
        cached_array(tmp_path, "key", (2,), "int64", fill)
    assert not (tmp_path / "key").exists()


def test_progress_and_a_model_without_an_encoder(tmp_path):
    seen = []
    frozen_features(image_model("vit"), images(), tmp_path, batch_size=5, progress=lambda *at: seen.append(at))
    assert seen == [(5, 12), (10, 12), (12, 12)]
    with pytest.raises(UnsupportedModel, match="Linear has no encoder"):
        last_encoder(torch.nn.Linear(2, 2))


def test_a_cache_that_cannot_be_written_is_read_or_said(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    cached_array(tmp_path, "whole", (1,), "int64", lambda array, done: [array.fill(3) or 1])
    monkeypatch.setattr("fairhead.train.features.made_folder", pytest.fail)
    assert cached_array(tmp_path, "whole", (1,), "int64", pytest.fail).tolist() == [3]
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"cannot be written: .*FAIRHEAD_CACHE"):
        cached_array(tmp_path / "file", "key", (1,), "int64", lambda array, done: [1])


def test_keys_tell_shapes_apart():
    assert key_of(np.zeros((2, 3))) != key_of(np.zeros((3, 2)))
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
