"""A folder in UTKFace's format whose pictures anyone can tell apart: bright is female."""

from pathlib import Path

import numpy as np
from PIL import Image


def make_faces(folder: Path, n: int = 160, seed: int = 0, hard: bool = False) -> Path:
    """Write n pictures of 8 × 8; half of them White, gender and race independent.

    Where it is `hard`, light differs from picture to picture, and those of White people are lighter: a model errs, and
    more often where that misleads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for i in range(n):
        gender, race = i % 2, 0 if (i // 2) % 2 else 1
        light = rng.normal(100 + 30 * gender + 14 * (race == 0), 16) if hard else 90 + 70 * gender
        pixels = np.clip(rng.normal(light, 10 if hard else 40, (8, 8, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{20 + i % 50}_{gender}_{race}_2017{i:06}.png")
    return folder


GRID = """
title: Made faces
data:
  - name: faces
    read: utkface:${FACES}
    group: white
    split_by_seed: true
backbones:
  - {name: tiny, model: vit-2x2, settings: {width: 16, mlp: 16, image_size: 8, patch_size: 4}}
methods: [erm, dam]
seeds: [0, 1]
plan: {epochs: 2, batch_size: 16, learning_rate: 1e-2}
n_boot: 200
"""
