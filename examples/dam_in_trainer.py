"""DAM in a Trainer: the model carries it, the Trainer knows nothing of it."""

import sys

from shaded import arguments, classifier, rows
from transformers import Trainer

import fairhead

folder = sys.argv[1] if len(sys.argv) > 1 else "trained"
model = fairhead.attach(classifier(), fairhead.DAM())
trainer = Trainer(model, arguments(folder), train_dataset=rows("train", 0.9), eval_dataset=rows("test", 0.5))
trainer.add_callback(fairhead.AuditCallback(trainer, groups=["shade"], metrics=["EOd", "accuracy"]))
trainer.train()
trainer.save_model(folder)
fairhead.load(folder)  # gives the model back with DAM; from_pretrained would leave it out
