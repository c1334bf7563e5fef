"""Published data and pretrained weights, few rows of each; skipped where they are not at hand."""

import os
from pathlib import Path

import pytest
from figures import HEADS, TORCH, Case, as_json

QUICK = ("--device", "cpu", "--n-boot", 200)


def real(command, model, data, *options):
    """JSON of a command; `{data}`, `{models}` and `{text}` are the folders that the environment names."""

    def figures(folder):
        variables = {"data": "FAIRHEAD_DATA", "models": "FAIRHEAD_MODELS", "text": "FAIRHEAD_CLIP_TEXT"}
        place = {name: os.environ.get(variable, "") for name, variable in variables.items()}
        given = [str(part) for part in (data, *options)]
        for name, variable in variables.items():
            if not place[name] and (name == "models" or any(f"{{{name}}}" in part for part in given)):
                pytest.skip(f"${variable} is not set")
        if not Path(place["models"], model).exists():
            pytest.skip(f"{model} is not under $FAIRHEAD_MODELS")
        given = [part.format(**place) for part in given]
        return as_json(*command.split(), "--model", Path(place["models"], model), "--data", *given, *QUICK)

    return figures


CELEBA = ("celeba:{data}/images/celeba10k.zip", "--concept", "gender", "--task", "Smiling", "--limit")
TEXTS = ("--text-adapter", "{text}/gte_adapter.npz", "--text-encoder", "{models}/gte-small")

CASES = {
    "real_lm_crows": Case(real("lm crows", "smollm2-135m", "{data}/crows_pairs", "--limit", 40), TORCH),
    "real_lm_stereoset": Case(real("lm stereoset", "tinystories-15m", "{data}/stereoset", "--limit", 60), TORCH),
    "real_lm_attention": Case(
        real("lm attention", "tinystories-15m", "crows:{data}/crows_pairs", "--limit", 40, "--pictures", 0), TORCH
    ),
    "real_locate_crows": Case(real("locate", "smollm2-135m", "crows:{data}/crows_pairs", "--limit", 30), HEADS),
    "real_locate_clip": Case(real("locate", "clip-b16-vision", *CELEBA, 100, *TEXTS, "--rank", "gap"), HEADS),
    "real_locate_dinov2": Case(real("locate", "dinov2-small", *CELEBA, 100, "--rank", "gap"), HEADS),
}
