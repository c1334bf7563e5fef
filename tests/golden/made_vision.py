"""Tiny random vision models, and faces in FairFace's form that they can tell apart."""

import csv

import made_towers
import numpy as np
import torch
import transformers as hf
from PIL import Image

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
VIT = {**SMALL, "image_size": 8, "patch_size": 4}
TEXT = {**SMALL, "vocab_size": 60, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 59}
GENDERS, AGES = ("Female", "Male"), ("20-29", "30-39", "50-59")


def write_faces(folder, n=160):
    """Noise, brighter for one gender, greener with age."""
    (folder / "val").mkdir(parents=True)
    rng = np.random.default_rng(0)
    with (folder / "fairface_label_val.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file", "age", "gender", "race", "service_test"])
        for i in range(n):
            age = int(rng.integers(3))
            pixels = rng.normal(80 + 80 * (i % 2), 40, size=(8, 8, 3)) + np.array([0, 30 * age, 0])
            # PNG whatever the name says: what a JPEG holds depends on the library that reads it.
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"val/{i}.jpg", format="PNG")
            race = ("White", "Black")[i // 2 % 2]
            rows.writerow([f"val/{i}.jpg", AGES[age], GENDERS[i % 2], race, "False"])
    return folder


def write_hard_faces(folder, n=600):
    """Faces in UTKFace's form that are told apart in four of five cases: women are brighter, and White people too."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i in range(n):
        gender, race = i % 2, i // 2 % 2
        light = rng.normal(100 + 30 * gender + 14 * (race == 0), 16)
        pixels = rng.normal(light, 10, (8, 8, 3)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{20 + i % 50}_{gender}_{race}_2017{i:06}.png")
    return folder


def save_clip(folder):
    torch.manual_seed(0)
    towers = {"vision_config": VIT, "text_config": TEXT, "projection_dim": 16}
    _save(hf.CLIPModel(hf.CLIPConfig(**towers)), folder)
    # Words that it does not know would make classes the same, and rounding would decide between them.
    ages = ("in", "their", "twenties", "thirties", "fifties", "adult")
    made_towers.tokenizer("the", "face", *ages).save_pretrained(folder)
    return folder


def save_classifier(folder):
    """Classes in an order of its own."""
    torch.manual_seed(0)
    names = dict(enumerate(("50-59", "20-29", "30-39")))
    config = hf.ViTConfig(**VIT, id2label=names, label2id={name: i for i, name in names.items()})
    return _save(hf.ViTForImageClassification(config), folder)


def save_backbone(folder):
    """No classes of its own."""
    torch.manual_seed(0)
    return _save(hf.Dinov2Model(hf.Dinov2Config(**VIT)), folder)


def _save(model, folder):
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(4.0)
            elif name.endswith("out_proj.bias"):
                weight.normal_(std=0.1)
    model.eval().save_pretrained(folder)
    size = {"height": 8, "width": 8}
    hf.CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False).save_pretrained(folder)
    return folder
