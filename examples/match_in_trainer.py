"""Match in a Trainer: training rows weighted, within each class, towards a sample from the place of use.

The sample has labels and no groups. Here the background goes along with the label in training and not in use.
"""

import sys

import torch
from shaded import arguments, classifier, rows
from transformers import Trainer

import fairhead
from fairhead.mitigate import draw_by_weight, match_weights

folder = sys.argv[1] if len(sys.argv) > 1 else "trained"


def features_and_labels(found: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row: here its pixels; take a pretrained encoder's features for real data."""
    pixels = torch.stack([row["pixel_values"].flatten() for row in found])
    return pixels, torch.tensor([row["labels"] for row in found])


train, use = rows("train", 0.9), rows("use", 0.5)
matched = match_weights(*features_and_labels(train), *features_and_labels(use))
print(f"training rows and rows of use differ: {matched.differ} (p {matched.p:.2g})")

trainer = Trainer(classifier(), arguments(folder), train_dataset=train, eval_dataset=rows("test", 0.5))
draw_by_weight(trainer, matched.weights)
trainer.add_callback(fairhead.AuditCallback(trainer, groups=["shade"], metrics=["EOd", "accuracy"]))
trainer.train()
