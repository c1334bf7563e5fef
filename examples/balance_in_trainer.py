"""Balance in a Trainer: rows are drawn so that clusters of frozen features say nothing of the label. Nobody named them.

Here the pixels are the features. Take those of a pretrained encoder (DINOv2, CLIP, a sentence encoder) for real data.
"""

import sys

import torch
from shaded import arguments, classifier, rows
from transformers import Trainer

import fairhead
from fairhead.mitigate import balance_weights, draw_by_weight

folder = sys.argv[1] if len(sys.argv) > 1 else "trained"
train = rows("train", 0.9)
features = torch.stack([row["pixel_values"].flatten() for row in train])
weights = balance_weights(features, torch.tensor([row["labels"] for row in train]))

trainer = Trainer(classifier(), arguments(folder), train_dataset=train, eval_dataset=rows("test", 0.5))
draw_by_weight(trainer, weights)
trainer.add_callback(fairhead.AuditCallback(trainer, groups=["shade"], metrics=["EOd", "accuracy"]))
trainer.train()
