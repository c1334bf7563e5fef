"""Label and true group made independent: by how often a row counts, or in the loss. Both use the attribute."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fairhead.mitigate.balance import label_offsets
from fairhead.mitigate.references import with_attributes
from fairhead.mitigate.training_job import ERM, Job
from fairhead.settings import Positive
from fairhead.train.kmeans import independent_weights


@dataclass(frozen=True)
class GroupBalanced:
    """Rows count in proportion to P(y) P(a) / P(y, a): label and group are independent then.

    Attributes:
        cap: the largest weight, in means; a cell of a row or two would decide everything otherwise.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("group_balanced").cap
        20.0
    """

    uses_groups: ClassVar[bool] = True

    cap: Positive = 20.0

    def train(self, job: Job) -> nn.Module:
        """One stage."""
        job = with_attributes(job, self)
        job.weights = independent_weights(job.train.labels.cpu(), job.groups_train, cap=self.cap)
        return ERM().train(job)


@dataclass(frozen=True)
class BiasBalance:
    """CE(f + log p(y | a)) while training, f alone at test (Hong & Yang, 2021).

    What the group says of the label is given, so that f need not learn it; no row is shown more often than others.

    Attributes:
        even: as published: f answers as if the classes were even, too. Else their shares stay as they are.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("bias_balance").uses_groups
        True
    """

    uses_groups: ClassVar[bool] = True

    even: bool = True

    def train(self, job: Job) -> nn.Module:
        """One stage."""
        job = with_attributes(job, self)
        job.offsets = label_offsets(job.train.labels.cpu(), job.groups_train, even=self.even)
        return ERM().train(job)
