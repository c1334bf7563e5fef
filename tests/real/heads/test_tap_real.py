"""The tap on real pretrained weights: the answers of eager attention, in full size."""

import pytest
import torch
import transformers as hf
from PIL import Image

import fairhead


def sentences(folder) -> dict[str, torch.Tensor]:
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = ["The nurse said that she was tired.", "Once upon a time there was a fox who could not sleep at night."]
    return dict(tokenizer(texts, padding=True, return_tensors="pt"))


def picture(folder) -> dict[str, torch.Tensor]:
    processor = hf.AutoImageProcessor.from_pretrained(folder)
    gradient = Image.linear_gradient("L").convert("RGB")
    return dict(processor([gradient, gradient.rotate(90)], return_tensors="pt"))


@pytest.mark.parametrize(
    ("name", "model_class", "inputs", "n_heads"),
    [
        ("smollm2-135m", "AutoModelForCausalLM", sentences, (30, 9)),
        ("tinystories-15m", "AutoModelForCausalLM", sentences, (6, 6)),
        ("minilm-l6", "AutoModel", sentences, (6, 12)),
        ("gte-small", "AutoModel", sentences, (12, 12)),
        ("clip-b16-vision", "CLIPVisionModelWithProjection", picture, (12, 12)),
        ("dinov2-small", "AutoModel", picture, (12, 6)),
    ],
)
def test_weights_and_contributions_of_real_models(real_model, name, model_class, inputs, n_heads) -> None:
    folder = real_model(name)
    load = getattr(hf, model_class).from_pretrained
    fast = load(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    eager = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
    batch = inputs(folder)
    with torch.no_grad():
        plain = fast(**batch)[0]
        reference = eager(**batch, output_attentions=True)
        with fairhead.tap(fast) as heads:
            row = heads.read("weights", tokens=-1)
            contribution = heads.read("contribution", tokens=-1)
            projected: dict[int, torch.Tensor] = {}
            hooks = [
                site.projection.register_forward_hook(
                    lambda m, a, out, layer=site.layer: projected.update({layer: out})
                )
                for site in heads.sites
            ]
            assert torch.equal(fast(**batch)[0], plain)
        for hook in hooks:
            hook.remove()
    assert (len(heads.sites), heads.sites[0].n_heads) == n_heads
    for site in heads.sites:
        expected = reference.attentions[site.layer][:, :, -1]
        torch.testing.assert_close(row[site.layer], expected, atol=1e-5, rtol=1e-3)
        bias = getattr(site.projection, "bias", None)
        total = contribution[site.layer].sum(1) + (0 if bias is None else bias)
        torch.testing.assert_close(total, projected[site.layer][:, -1], atol=1e-5, rtol=1e-4)
