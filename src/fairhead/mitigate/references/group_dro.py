"""GroupDRO with the true groups (Sagawa et al., 2020). It uses the attribute."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fairhead.mitigate.losses import GroupLoss, balanced, cell_numbers
from fairhead.mitigate.priors import LogUniform, Prior
from fairhead.mitigate.references import with_attributes
from fairhead.mitigate.training_job import Job
from fairhead.settings import NotNegative


@dataclass(frozen=True)
class GroupDRO:
    """The worst (class, group) cell drives training.

    Attributes:
        step_size: how fast the weights of the cells follow their losses (η_q).
        adjustment: C of the generalisation adjustment C / √n.
        balance: draw every cell equally often.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("group_dro").uses_groups
        True
    """

    uses_groups: ClassVar[bool] = True

    step_size: NotNegative = 0.01
    adjustment: NotNegative = 0.0
    balance: bool = True

    priors: ClassVar[Mapping[str, Prior]] = {"step_size": LogUniform(-3, -1)}

    def train(self, job: Job) -> nn.Module:
        """One stage."""
        job = with_attributes(job, self)
        cells = cell_numbers(job.train.labels, job.groups_train)
        model = job.build_model()
        loss = GroupLoss(cells, self.step_size, self.adjustment)
        job.fit("training", model, loss=loss, sampler=balanced(cells, job.generator()) if self.balance else None)
        return model
