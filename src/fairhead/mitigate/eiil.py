"""EIIL: GroupDRO over the two environments that a first model treats least alike (Creager et al., 2021)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fairhead.mitigate.losses import GroupLoss, balanced, cell_numbers
from fairhead.mitigate.priors import Choice, LogUniform, Prior
from fairhead.mitigate.training_job import Job
from fairhead.settings import Count, NotNegative
from fairhead.train.fitting import LAST_EPOCH


@dataclass(frozen=True)
class EIIL:
    """Environment inference for invariant learning.

    Attributes:
        first_epochs: of the reference model.
        step_size: of GroupDRO over (class, environment).
        balance: draw every (class, environment) equally often.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("eiil").first_epochs
        1
    """

    first_epochs: Count = 1
    step_size: NotNegative = 0.01
    balance: bool = True

    priors: ClassVar[Mapping[str, Prior]] = {"first_epochs": Choice((1, 2)), "step_size": LogUniform(-3, -1)}

    def train(self, job: Job) -> nn.Module:
        """Two stages, with the environments between them."""
        first = job.build_model()
        job.fit("reference model", first, plan=replace(job.plan, epochs=self.first_epochs), selection=LAST_EPOCH)
        with job.timed("environments"):
            labels = job.train.labels.cpu()
            found = environments(job.predict(first, job.train).clamp(min=1e-12).log(), labels)
            cells = cell_numbers(labels, found)
        del first
        model = job.build_model()
        sampler = balanced(cells, job.generator()) if self.balance else None
        job.fit("group DRO over environments", model, loss=GroupLoss(cells, self.step_size), sampler=sampler)
        return model


def environments(logits: Tensor, labels: Tensor) -> Tensor:
    """The hard assignment to two environments, [n], that maximises the IRMv1 penalty of fixed logits [n, C].

    The penalty of soft assignments s is (mean s g)² + (mean (1 − s) g)², where gᵢ = Σ_c p_c f_c − f_y is the
    derivative of row i's loss by a common factor of its logits. It is convex in Σ s g, so its maximum is at an end of
    that range: all rows with g > 0 on one side. Gradient ascent, as published, takes thousands of steps to the
    same place.

    Example:
        >>> import torch
        >>> environments(torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1, 1])).tolist()
        [0, 1, 0]
    """
    return (scale_gradients(logits, labels) > 0).long()


def scale_gradients(logits: Tensor, labels: Tensor) -> Tensor:
    """d/dw of each row's cross-entropy of w · logits at w = 1, [n]; log-probabilities serve as well as logits."""
    expected = (logits.softmax(-1) * logits).sum(-1)
    return expected - logits.gather(1, labels[:, None].to(torch.long))[:, 0]
