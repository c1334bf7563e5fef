"""A made task: a core feature that is hard to read, a shortcut that is easy and follows the label in 95 % of rows."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import SequenceClassifierOutput

from fairhead.train import TrainingPlan
from fairhead.train.fitting import predict
from fairhead.train.step import Examples

PLAN = TrainingPlan(epochs=12, batch_size=64, learning_rate=1e-2, weight_decay=0.0)


class Shortcut(NamedTuple):
    """Training and validation rows follow the shortcut; in the test set it says nothing.

    `groups` is whether the shortcut speaks against the label.
    """

    train: Examples
    validation: Examples
    test: Examples
    train_groups: Tensor
    validation_groups: Tensor
    test_groups: Tensor


def shortcut(n=2000, follows=0.95, seed=0) -> Shortcut:
    def rows(n, follows, seed):
        chance = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 2, (n,), generator=chance)
        against = torch.rand(n, generator=chance) >= follows
        sign, shown = 2.0 * labels - 1, 2.0 * (labels ^ against) - 1
        noise = torch.randn(n, 10, generator=chance)
        x = torch.cat([(sign + 0.6 * noise[:, 0])[:, None], (4 * shown + 0.4 * noise[:, 1])[:, None], noise[:, 2:]], 1)
        return Examples({"x": x}, labels), against.long()

    (train, a), (validation, b), (test, c) = (
        rows(n, follows, seed),
        rows(n, follows, seed + 1),
        rows(n, 0.5, seed + 2),
    )
    return Shortcut(train, validation, test, a, b, c)


class SmallNet(nn.Module):
    """x [B, 10] -> two classes, by one hidden layer; answers as a Hugging Face model does."""

    def __init__(self, classes=2):
        super().__init__()
        self.hidden = nn.Linear(10, 16)
        self.classifier = nn.Linear(16, classes)

    def forward(self, x, labels=None):
        logits = self.classifier(self.hidden(x).tanh())
        return SequenceClassifierOutput(
            loss=None if labels is None else cross_entropy(logits, labels),  # type: ignore[arg-type]
            logits=logits,
        )


def build_model():
    torch.manual_seed(0)
    return SmallNet()


def accuracies(model, task):
    """Of the test rows that the shortcut speaks for, and of those that it speaks against."""
    hits = (predict(model, task.test).argmax(-1) == task.test.labels).double()
    return tuple(hits[task.test_groups == group].mean().item() for group in (0, 1))
