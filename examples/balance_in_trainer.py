"""Balance in a Trainer: rows are drawn so that clusters of frozen features say nothing of the label. Nobody named them.

Here the pixels are the features. Take those of a pretrained encoder (DINOv2, CLIP, a sentence encoder) for real data.
"""

import sys

import torch
from shaded import arguments, classifier, rows
from torch.utils.data import WeightedRandomSampler
from transformers import Trainer

import fairhead
from fairhead.mitigate import balance_weights

folder = sys.argv[1] if len(sys.argv) > 1 else "trained"
train = rows("train", 0.9)
features = torch.stack([row["pixel_values"].flatten() for row in train])
weights = balance_weights(features, torch.tensor([row["labels"] for row in train]))


class Balanced(Trainer):
    """Draws training rows in proportion to their weights."""

    def _get_train_sampler(self, train_dataset=None):
        return WeightedRandomSampler(weights.tolist(), len(weights))


trainer = Balanced(classifier(), arguments(folder), train_dataset=train, eval_dataset=rows("test", 0.5))
trainer.add_callback(fairhead.AuditCallback(trainer, groups=["shade"]))
trainer.train()
