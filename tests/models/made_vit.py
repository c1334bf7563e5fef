"""A small vision transformer, one with a planted head, and pictures of which half are brighter."""

import numpy as np
import torch
import transformers as hf
from families import VIT
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

LAYERS, HEADS, WIDTH = 3, 4, 16
PLANTED = (2, 1)


def vit(seed=0, width=WIDTH):
    torch.manual_seed(seed)
    model = ViTForImageClassification(
        ViTConfig(
            image_size=4,
            patch_size=2,
            num_channels=1,
            hidden_size=width,
            intermediate_size=32,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
        )
    ).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.requires_grad_(False)


def pictures(n=400, seed=0):
    """Noise; half of them brighter. The label has nothing to do with the brightness."""
    generator = torch.Generator().manual_seed(seed)
    bright = np.arange(n) % 2
    labels = (np.arange(n) // 2) % 2
    pixels = torch.randn(n, 1, 4, 4, generator=generator) * 0.3 + torch.tensor(bright)[:, None, None, None]
    return pixels.float(), bright, labels


def planted_vit(at=PLANTED, strength=3.0, seed=0):
    """One head reads the brightness off the patches and writes it along the class evidence; nothing else does."""
    model = vit(seed)
    embeddings = model.vit.embeddings
    nn.init.zeros_(embeddings.patch_embeddings.projection.weight)
    nn.init.zeros_(embeddings.patch_embeddings.projection.bias)
    # A brightness channel: ±1 around the mid brightness, and its opposite so that LayerNorm's mean stays put.
    embeddings.patch_embeddings.projection.weight[0] = 0.5
    embeddings.patch_embeddings.projection.weight[1] = -0.5
    embeddings.patch_embeddings.projection.bias[0] = -1.0
    embeddings.patch_embeddings.projection.bias[1] = 1.0
    for number, layer in enumerate(model.vit.layers):
        for linear in (layer.attention.o_proj, layer.mlp.fc2):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        if number == at[0]:
            rows = slice(at[1] * 4, at[1] * 4 + 4)
            layer.layernorm_before.weight.fill_(1.0)
            layer.layernorm_before.bias.zero_()
            layer.attention.q_proj.weight[rows] = 0  # attend evenly
            layer.attention.q_proj.bias[rows] = 0
            layer.attention.v_proj.weight[rows] = 0
            layer.attention.v_proj.bias[rows] = 0
            layer.attention.v_proj.weight[rows.start, 0] = 1.0
            layer.attention.o_proj.weight[:, rows] = 0
            layer.attention.o_proj.weight[2, rows.start] = strength
            layer.attention.o_proj.weight[3, rows.start] = -strength
    model.vit.layernorm.weight.fill_(1.0)
    model.vit.layernorm.bias.zero_()
    nn.init.zeros_(model.classifier.weight)
    nn.init.zeros_(model.classifier.bias)
    model.classifier.weight[1, 2] = 1.0
    model.classifier.weight[1, 3] = -1.0
    return model


def saved_vit(folder, classes=("no", "yes")):
    torch.manual_seed(0)
    names = dict(enumerate(classes))
    config = hf.ViTConfig(**VIT, id2label=names, label2id={name: number for number, name in names.items()})
    model = hf.ViTForImageClassification(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(4.0)
    model.save_pretrained(folder)
    size = {"height": 8, "width": 8}
    hf.CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False).save_pretrained(folder)
