"""LfF, learning from failure: what a network that clings to easy rows finds hard counts more (Nam et al., 2020)."""

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from fairhead.mitigate.losses import gathered, row_losses
from fairhead.mitigate.priors import Prior, Uniform
from fairhead.mitigate.training_job import ADDED_LATER, Job
from fairhead.mitigate.two_networks import PairOutput, fresh_pair, second_head
from fairhead.settings import PositiveShare, Share


@dataclass(frozen=True)
class LfF:
    """Learning from failure, with two networks that share nothing unless `shared` says so.

    The biased network is meant to learn the easy rows alone. Where it learns nearly all by heart (few rows, many
    epochs), their weights vanish, and the predicting network may learn the reverse of the task: mind its accuracy.

    Attributes:
        q: of the generalised cross-entropy that makes the second network cling to what it has learnt first.
        memory: share of the past in the running loss of each row (α).
        shared: one encoder with two heads instead of two networks, as DAM's authors ran it: another method, since what
            the biased head learns is then in the features that the predicting head reads.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("lff").q
        0.7
    """

    q: PositiveShare = 0.7
    memory: Share = 0.7
    shared: bool = field(default=False, metadata=ADDED_LATER)

    priors: ClassVar[Mapping[str, Prior]] = {"q": Uniform(0.05, 0.95)}

    def train(self, job: Job) -> nn.Module:
        """One stage with both networks."""
        alike = second_head(job, copy.deepcopy) if self.shared else nullcontext(fresh_pair(job))
        with alike as pair:
            job.fit("training beside a biased network", pair, loss=FailureLoss(job.train.labels, self.q, self.memory))
        return pair.first


class FailureLoss:
    """The sum of both networks' losses. Running losses are kept for every row of the training set, on the device.

    Example:
        >>> import torch
        >>> loss = FailureLoss(torch.tensor([0, 1]))
        >>> out = PairOutput(torch.zeros(2, 2), torch.zeros(2, 2))
        >>> value = loss(out, torch.tensor([0, 1]), torch.tensor([0, 1]))
        >>> round(value.item() / torch.tensor(2.0).log().item(), 4)   # ½ of CE, and q · 0.5^q of CE
        0.9309
    """

    def __init__(self, labels: Tensor, q: float = 0.7, memory: float = 0.7) -> None:
        """`labels` of the training set, [n]."""
        self.q, self.memory = q, memory
        self.labels = labels
        self.running = torch.full((2, len(labels)), torch.nan)  # of the predicting and of the biased network

    def __call__(self, output: PairOutput, labels: Tensor, rows: Tensor) -> Tensor:
        """The loss of a batch; the running losses of its rows move with it."""
        assert output.second is not None
        self.labels, self.running = self.labels.to(rows.device), self.running.to(rows.device)
        own_losses, biased_losses = (row_losses(logits, labels) for logits in (output.logits, output.second))
        # Rows come to another process in the next epoch, and their running losses must be there.
        losses = torch.stack([gathered(own_losses), gathered(biased_losses)])  # [2, B]
        labels, rows = gathered(labels), gathered(rows)
        with torch.no_grad():
            before = self.running[:, rows]
            # The first visit has no past.
            now = torch.where(before.isnan(), losses, self.memory * before + (1 - self.memory) * losses)
            self.running[:, rows] = now
            own, biased = now / self._class_highest(output.logits.shape[-1])[:, labels].clamp(min=1e-12)
            weight = biased / (biased + own + 1e-8)
            p_label = (-losses[1]).exp()
        return (weight * losses[0]).mean() + (self.q * p_label**self.q * losses[1]).mean()

    def _class_highest(self, classes: int) -> Tensor:
        """The highest running loss within each class, [2, C]."""
        start = self.running.new_zeros(2, classes)
        return start.scatter_reduce(1, self.labels.expand(2, -1), self.running.nan_to_num(0.0), "amax")
