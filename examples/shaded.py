"""What the examples share: digits whose background goes along with the label in training, and a small classifier."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification


def rows(part: str, bias: float) -> list[dict]:
    """Pictures [1, 8, 8] of odd and even digits; where `bias` is 0.9, nine in ten odd ones are on light ground."""
    digits = load_digits()
    rng = np.random.default_rng(0)
    numbers = np.split(rng.permutation(len(digits.target)), [900, 1200])[("train", "use", "test").index(part)]
    found = []
    for number in numbers:
        odd = int(digits.target[number] % 2)
        light = odd if rng.random() < bias else 1 - odd
        picture = torch.tensor(digits.images[number] / 16, dtype=torch.float32)
        pixels = (0.5 * light + picture * (1 - 0.5 * light))[None]
        found.append({"pixel_values": pixels, "labels": odd, "shade": ["dark", "light"][light]})
    return found


def classifier() -> ViTForImageClassification:
    """A vision transformer of two layers."""
    torch.manual_seed(0)
    shape = {"image_size": 8, "patch_size": 2, "num_channels": 1, "hidden_size": 32, "intermediate_size": 64}
    names = {0: "even", 1: "odd"}
    config = ViTConfig(num_hidden_layers=2, num_attention_heads=4, id2label=names, **shape)
    return ViTForImageClassification(config)


def arguments(folder: str) -> TrainingArguments:
    """Eight passes, an evaluation after each: with fewer, balance and match have learnt nothing yet."""
    return TrainingArguments(
        folder,
        num_train_epochs=8,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=256,
        learning_rate=3e-3,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",  # or "tensorboard", "trackio", "wandb", "mlflow": each gets the gaps as well
        use_cpu=True,
        disable_tqdm=True,
    )
