"""Somebody's own training script, audited by one added line."""

import sys

from shaded import arguments, classifier, rows
from transformers import Trainer

import fairhead

folder = sys.argv[1] if len(sys.argv) > 1 else "trained"
trainer = Trainer(classifier(), arguments(folder), train_dataset=rows("train", 0.9), eval_dataset=rows("test", 0.5))
trainer.add_callback(fairhead.AuditCallback(trainer, groups=["shade"], metrics=["EOd", "accuracy"]))  # the added line
trainer.train()
