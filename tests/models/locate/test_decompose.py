"""The terms of the output representation add up to what the model itself puts out, for every family."""

import pytest
import torch
import transformers as hf
from families import FAMILIES as KNOWN
from families import GROUPED, SMALL, TAP_FAMILIES, TEXT, TOWERS, VIT, Family, of
from torch import nn

import fairhead
from fairhead.errors import InputError, UnsupportedModel
from fairhead.heads import tap
from fairhead.locate.decompose import Decomposer, reads_of
from fairhead.locate.directions import classifier_task
from fairhead.locate.streams import Reads

TWO_TOWERS = ("CLIP", "SigLIP")
IMAGES = ("ViT", "DeiT", "DINOv2", "DINOv3", "CLIP vision", *TWO_TOWERS)
GLM = {**GROUPED, "partial_rotary_factor": 0.5}
FAMILIES = {  # and others whose blocks have a form of their own
    **KNOWN,
    "DINOv3": TAP_FAMILIES["DINOv3"],
    "OLMo-2": Family(of("Olmo2Model", "Olmo2Config", **GROUPED), KNOWN["Llama"].inputs),
    "GLM-4": Family(of("Glm4Model", "Glm4Config", **GLM), KNOWN["Llama"].inputs),
    "Phi": Family(of("PhiModel", "PhiConfig", **TEXT), KNOWN["Llama"].inputs),
    "ERNIE": Family(of("ErnieModel", "ErnieConfig", **TEXT), KNOWN["BERT"].inputs),
    "Mixtral": Family(of("MixtralModel", "MixtralConfig", **GROUPED, num_local_experts=4), KNOWN["Llama"].inputs),
}
TEXTS = [name for name in FAMILIES if name not in (*IMAGES, "T5", "BART")]


def whole(decomposer, terms):
    return decomposer.head_terms(terms.heads).sum((1, 2)) + terms.others.sum(1) + terms.constant


def pixels(batch):
    return {"pixel_values": batch["pixel_values"]}


@pytest.mark.parametrize("name", IMAGES)
def test_image_models(name) -> None:
    family = FAMILIES[name]
    model, batch = family.build("sdpa" if "sdpa" in family.implementations else "eager"), pixels(family.inputs())
    with torch.no_grad():
        if name in TWO_TOWERS:
            expected = nn.functional.normalize(model.get_image_features(**batch).pooler_output, dim=-1)
        elif name == "CLIP vision":
            expected = model(**batch).pooler_output
        else:
            expected = model(**batch).last_hidden_state[:, 0]
    decomposer = Decomposer(model)
    terms = decomposer(batch)
    torch.testing.assert_close(terms.output, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(whole(decomposer, terms), expected, atol=1e-5, rtol=1e-5)
    n_others = SMALL["num_hidden_layers"] + 1 + (name == "SigLIP")
    assert terms.heads.shape[:3] == (3, SMALL["num_hidden_layers"], SMALL["num_attention_heads"])
    assert terms.others.shape[1] == n_others


@pytest.mark.parametrize("token", ["first", "last", 3])
@pytest.mark.parametrize("name", TEXTS)
def test_text_models(name, token) -> None:
    family = FAMILIES[name]
    model, batch = family.build(family.implementations[0]), family.inputs()
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    ends = [int(row.nonzero().max()) for row in batch["attention_mask"]]
    places = {"first": [0, 0, 0], "last": ends, 3: [3, 3, 3]}[token]
    expected = torch.stack([states[row, place] for row, place in enumerate(places)])
    decomposer = Decomposer(model, token)
    terms = decomposer(batch)
    torch.testing.assert_close(terms.output, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(whole(decomposer, terms), expected, atol=1e-5, rtol=1e-5)


def test_a_head_term_is_what_the_output_loses_without_later_layers() -> None:
    # Zeroing a head of the last layer, the MLP after it silent, changes the stream by that term alone.
    torch.manual_seed(0)
    model = hf.ViTModel(hf.ViTConfig(**VIT)).eval().requires_grad_(False)
    nn.init.zeros_(model.layers[-1].mlp.fc2.weight)
    nn.init.zeros_(model.layers[-1].mlp.fc2.bias)
    batch = FAMILIES["ViT"].inputs()
    decomposer = Decomposer(model)
    terms = decomposer(batch)
    stream: list[torch.Tensor] = []
    handle = model.layernorm.register_forward_pre_hook(lambda m, args: stream.append(args[0][:, 0]))
    with torch.no_grad(), fairhead.tap(model) as heads:
        heads.zero([(1, 2)])
        model(**batch)
    handle.remove()
    with torch.no_grad():
        model(**batch)
        deviation = []
        handle = model.layernorm.register_forward_pre_hook(
            lambda m, args: deviation.append((args[0][:, 0].var(-1, unbiased=False) + m.eps).sqrt())
        )
        before = model(**batch).last_hidden_state[:, 0]
        handle.remove()
    left = stream[0]
    frozen = (left - left.mean(-1, keepdim=True)) / deviation[0][:, None] * model.layernorm.weight
    expected = before - (frozen + model.layernorm.bias)
    torch.testing.assert_close(decomposer.head_terms(terms.heads)[:, 1, 2], expected, atol=1e-5, rtol=1e-4)


def test_terms_of_the_published_decomposition() -> None:
    """As clip_prs writes them, token by token, from what the heads of a CLIP add to the stream."""
    torch.manual_seed(0)
    model = hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**VIT, projection_dim=6)).eval().requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    batch, tower = pixels(FAMILIES["CLIP"].inputs()), model.vision_model
    with tap(tower) as heads:
        written = heads.read("contribution", tokens=0)
        states = tower(**batch, output_hidden_states=True).hidden_states
        c = torch.stack(list(written), 1)  # [B, L, H, D]
    last, norm = states[-1][:, 0], tower.post_layernorm
    mean, deviation = last.mean(-1), (last.var(-1, unbiased=False) + norm.eps).sqrt()
    n_layers, n_heads = c.shape[1:3]
    m = 2 * n_layers + 1
    bias = torch.stack([layer.self_attn.out_proj.bias for layer in tower.encoder.layers])  # [L, D]
    c = c + bias[None, :, None] / n_heads - mean[:, None, None, None] / (m * n_heads)
    terms = norm.weight * c / deviation[:, None, None, None] + norm.bias / (m * n_heads)
    expected = model(**batch).image_embeds
    terms = terms @ model.visual_projection.weight.T / expected.norm(dim=-1)[:, None, None, None]
    decomposer = Decomposer(model, split="prs")
    found = decomposer(batch)
    torch.testing.assert_close(decomposer.head_terms(found.heads), terms, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(whole(decomposer, found), nn.functional.normalize(expected), atol=1e-5, rtol=1e-4)
    assert not found.constant.any()
    with pytest.raises(UnsupportedModel, match="BertModel is built otherwise"):
        Decomposer(FAMILIES["BERT"].build("sdpa"), split="prs")


def test_unit_length_can_be_switched_off() -> None:
    model, batch = FAMILIES["CLIP"].build("sdpa"), pixels(FAMILIES["CLIP"].inputs())
    with torch.no_grad():
        expected = model.get_image_features(**batch).pooler_output
    decomposer = Decomposer(model, unit=False)
    terms = decomposer(batch)
    torch.testing.assert_close(whole(decomposer, terms), expected, atol=1e-5, rtol=1e-5)
    assert terms.output.norm(dim=-1).sub(1).abs().min() > 1e-3


def test_low_precision_adds_up_as_far_as_it_can() -> None:
    model = FAMILIES["CLIP"].build("sdpa").to(torch.bfloat16)
    batch = {"pixel_values": FAMILIES["CLIP"].inputs()["pixel_values"].to(torch.bfloat16)}
    decomposer = Decomposer(model)
    terms = decomposer(batch)
    assert terms.heads.dtype == torch.float32
    torch.testing.assert_close(whole(decomposer, terms), terms.output, atol=0.03, rtol=0)


def test_nothing_is_left_on_the_model() -> None:
    model, batch = FAMILIES["DINOv2"].build("sdpa"), FAMILIES["DINOv2"].inputs()
    Decomposer(model)(batch)
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_fairhead_tap")]
    assert hooks == []


def test_two_stacks_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"BartModel has 2 lists of attention blocks \(encoder.layers"):
        Decomposer(FAMILIES["BART"].build("eager"))


def test_a_norm_of_a_family_of_its_own_is_named() -> None:
    """Cohere centres and scales without torch's LayerNorm."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = hf.CohereModel(hf.CohereConfig(vocab_size=9, bos_token_id=1, eos_token_id=2, **small)).eval()
    with pytest.raises(UnsupportedModel, match="CohereLayerNorm is a norm of its family's own"):
        Decomposer(model)


def test_attention_that_cannot_be_reached_is_counted_and_named() -> None:
    """The encoder of LongT5 has attention of its own: its layers keep their numbers, and say what they are."""
    config = hf.LongT5Config(vocab_size=9, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, local_radius=3)
    model = hf.LongT5Model(config).eval()
    with tap(model) as heads:
        assert [site.name.split(".")[0] for site in heads.sites] == ["encoder", "decoder", "decoder"]
        with pytest.raises(UnsupportedModel, match=r"LongT5LocalAttention of longt5 .* cannot edit head outputs"):
            heads.zero([(0, 1)])


def test_a_final_norm_elsewhere_is_named() -> None:
    model = FAMILIES["ViT"].build("sdpa")
    model.last_one = model.layernorm
    del model.layernorm
    with pytest.raises(UnsupportedModel, match=r"ViTModel \(ViTLayer\) has no final norm .* found .*last_one"):
        Decomposer(model)


def test_blocks_that_do_more_than_is_known_are_refused() -> None:
    model, batch = FAMILIES["ViT"].build("sdpa"), FAMILIES["ViT"].inputs()
    model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)
    with pytest.raises(UnsupportedModel, match=r"the terms of ViTModel miss its output by .*ViTLayer"):
        Decomposer(model)(batch)


def test_a_model_that_masks_tokens_at_random_is_refused() -> None:
    torch.manual_seed(0)
    model, batch = hf.ViTMAEModel(hf.ViTMAEConfig(**VIT)).eval(), FAMILIES["ViT"].inputs()
    with pytest.raises(UnsupportedModel, match=r"a second pass of ViTMAEModel misses its output .* at random"):
        Decomposer(model)(batch)
    whole = hf.ViTMAEModel(hf.ViTMAEConfig(**VIT, mask_ratio=0.0)).eval()
    assert Decomposer(whole)(batch).heads.shape[0] == 3  # shuffled, but all there


def test_empty_texts_and_unknown_tokens() -> None:
    model, batch = FAMILIES["Llama"].build("sdpa"), FAMILIES["Llama"].inputs()
    batch["attention_mask"][1] = 0
    with pytest.raises(InputError, match="row 1 of the batch has no token"):
        Decomposer(model, "last")(batch)
    with pytest.raises(InputError, match="token is 'middle'"):
        Decomposer(model, "middle")


def test_a_tower_alone_equals_the_tower_in_its_model() -> None:
    torch.manual_seed(0)
    model = hf.CLIPModel(hf.CLIPConfig(**TOWERS)).eval().requires_grad_(False)
    batch = pixels(FAMILIES["CLIP"].inputs())
    inside, alone = Decomposer(model, unit=False)(batch), Decomposer(model.vision_model)(batch)
    projected = alone.output @ model.visual_projection.weight.T
    torch.testing.assert_close(inside.output, projected, atol=1e-6, rtol=1e-5)


FIRST, ALL, PATCHES = (0, 1), (0, None), (1, None)
CLASSIFIERS = {  # what each reads, by the code of transformers
    "ViT": ({}, None),
    "DeiT": ({}, None),
    "ViTMSN": ({}, None),
    "IJepa": ({}, Reads((ALL,))),
    "Dinov2": ({}, Reads((FIRST, PATCHES))),
    "Dinov2WithRegisters": ({"num_register_tokens": 3}, Reads((FIRST, (4, None)))),
    "CLIP": ({"vision_config": VIT}, Reads((PATCHES,), normed=False)),
    "MetaClip2": ({"vision_config": VIT}, Reads((PATCHES,), normed=False)),
    "Siglip": ({"vision_config": VIT}, Reads((ALL,))),
}


def classifier(name, settings):
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(**({} if "vision_config" in settings else VIT), **settings, num_labels=3)
    model = getattr(hf, f"{name}ForImageClassification")(config).eval().requires_grad_(False)
    for parameter in model.parameters():  # biases, norms and layer scales are 0 or 1 in a fresh model
        parameter += 0.2 * torch.randn_like(parameter)
    return model, {"pixel_values": torch.randn(3, 3, 8, 8)}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_are_read_where_they_read(name) -> None:
    """Terms add up to the model's own logits, and an edit of the last layer's heads moves them by its terms."""
    settings, expected = CLASSIFIERS[name]
    model, batch = classifier(name, settings)
    assert reads_of(model, batch) == expected
    decomposer, task = Decomposer(model, expected or "first", unit=False), classifier_task(model)
    terms, logits = decomposer(batch), model(**batch).logits
    for output in (whole(decomposer, terms), decomposer.outputs(batch)):
        torch.testing.assert_close(torch.tensor(task.logits(output.numpy())).float(), logits, atol=1e-4, rtol=1e-4)
    assert terms.heads.shape[1:3] == (SMALL["num_hidden_layers"], SMALL["num_attention_heads"])
    assert (terms.scale is None) == (expected is not None)
    if expected is not None and not expected.normed:  # no norm follows: a silent MLP leaves the heads' terms alone
        last = decomposer.stream.blocks[-1].mlp.get_submodule("fc2")
        nn.init.zeros_(last.weight)
        terms, before = decomposer(batch), decomposer.outputs(batch)
        with fairhead.tap(decomposer.stream.base) as heads:
            heads.zero([(1, 2)])
            after = decomposer.outputs(batch)
        torch.testing.assert_close(before - after, decomposer.head_terms(terms.heads)[:, 1, 2], atol=1e-5, rtol=1e-4)


def test_a_classifier_that_does_more_with_its_tokens_is_refused() -> None:
    model, batch = classifier("Dinov2", {})
    model.classifier.register_forward_pre_hook(lambda module, args: (args[0].tanh(),))
    with pytest.raises(UnsupportedModel, match=r"Dinov2ForImageClassification reads 64 features that are neither"):
        reads_of(model, batch)
