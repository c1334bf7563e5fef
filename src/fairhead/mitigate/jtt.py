"""JTT, just train twice: the rows that a first model gets wrong are shown more often to a second (Liu et al., 2021)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import SubsetRandomSampler

from fairhead.mitigate.priors import LogUniform, Prior, ShareOfEpochs
from fairhead.mitigate.training_job import Job
from fairhead.settings import Count
from fairhead.train.fitting import LAST_EPOCH


@dataclass(frozen=True)
class JTT:
    """Just train twice.

    Attributes:
        first_epochs: of the model whose errors are taken (T); it keeps its last epoch.
        upweight: how often a row that it got wrong appears in an epoch of the second (λ_up); others appear once.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("jtt", upweight=20).upweight
        20
    """

    first_epochs: Count = 1
    upweight: Count = 50

    priors: ClassVar[Mapping[str, Prior]] = {
        "first_epochs": ShareOfEpochs(0.2, 0.8),
        "upweight": LogUniform(0, 2.5, whole=True),
    }

    def train(self, job: Job) -> nn.Module:
        """Two stages. The second has more steps: that is the method's cost."""
        first = job.build_model()
        job.fit("first model", first, plan=replace(job.plan, epochs=self.first_epochs), selection=LAST_EPOCH)
        with job.timed("errors of the first model"):
            wrong = job.predict(first, job.train).argmax(-1) != job.train.labels.cpu()
        del first
        model = job.build_model()
        # A sampler of row numbers, some of them many times; the sequence type is torch's own.
        rows = upsampled(wrong, self.upweight).tolist()
        job.fit("second model", model, sampler=SubsetRandomSampler(rows, generator=job.generator()))
        return model


def upsampled(wrong: Tensor, times: int) -> Tensor:
    """Every row number once, and those of `wrong` [n] `times` times.

    Example:
        >>> import torch
        >>> upsampled(torch.tensor([False, True]), 3).tolist()
        [0, 1, 1, 1]
    """
    return torch.arange(len(wrong)).repeat_interleave(torch.where(wrong.cpu(), times, 1))
