"""Label and true group made independent: by how much a row counts, or in the loss. Both use the attribute."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn
from torch.utils.data import WeightedRandomSampler

from fairhead.mitigate.feature_clusters import independent_weights
from fairhead.mitigate.losses import PriorLoss, WeightedLoss
from fairhead.mitigate.references import with_attributes
from fairhead.mitigate.training_job import Job
from fairhead.settings import Positive


@dataclass(frozen=True)
class GroupBalanced:
    """Rows count in proportion to P(y) P(a) / P(y, a): label and group are independent then.

    Attributes:
        how: "sampling" draws rows that often; "weights" shows each once an epoch and weighs its loss.
        cap: the largest weight, in means; a cell of a row or two would decide everything otherwise.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("group_balanced", how="weights").cap
        20.0
    """

    uses_groups: ClassVar[bool] = True

    how: Literal["sampling", "weights"] = "sampling"
    cap: Positive = 20.0

    def train(self, job: Job) -> nn.Module:
        """One stage."""
        job = with_attributes(job, self)
        weights = independent_weights(job.train.labels.cpu(), job.groups_train).clamp(max=self.cap)
        model = job.build_model()
        if self.how == "weights":
            job.fit("training", model, loss=WeightedLoss(weights))
        else:
            sampler = WeightedRandomSampler(weights.tolist(), len(weights), generator=job.generator())
            job.fit("training", model, sampler=sampler)
        return model


@dataclass(frozen=True)
class BiasBalance:
    """CE(f + log p(y | a)) while training, f alone at test (Hong & Yang, 2021).

    What the group says of the label is given, so that f need not learn it; no row is shown more often than others.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("bias_balance").uses_groups
        True
    """

    uses_groups: ClassVar[bool] = True

    def train(self, job: Job) -> nn.Module:
        """One stage."""
        job = with_attributes(job, self)
        model = job.build_model()
        job.fit("training", model, loss=PriorLoss(job.train.labels, job.groups_train))
        return model
