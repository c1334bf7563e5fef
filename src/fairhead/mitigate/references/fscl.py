"""FSCL, the fair supervised contrastive loss (Park et al., 2022). It uses the attribute."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fairhead.mitigate.losses import gathered, row_losses
from fairhead.mitigate.priors import LogUniform, Prior
from fairhead.mitigate.references import with_attributes
from fairhead.mitigate.training_job import Job
from fairhead.mitigate.two_networks import PairOutput, second_head
from fairhead.settings import Count, NotNegative, Positive


@dataclass(frozen=True)
class FSCL:
    """Cross-entropy and a contrastive loss in which the group cannot help to tell rows apart.

    The published method trains the encoder with the contrastive loss first and a linear head afterwards; here both
    losses are minimised together, in one stage of the common loop, which keeps budgets equal.

    Attributes:
        weight: of the contrastive loss.
        temperature: τ.
        even_groups: positives of every group weigh alike, whatever their number (FSCL+).
        width: of the projection that the contrastive loss compares.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("fscl").temperature
        0.1
    """

    uses_groups: ClassVar[bool] = True

    weight: NotNegative = 1.0
    temperature: Positive = 0.1
    even_groups: bool = True
    width: Count = 128

    priors: ClassVar[Mapping[str, Prior]] = {"weight": LogUniform(-1, 1), "temperature": LogUniform(-1.2, -0.5)}

    def train(self, job: Job) -> nn.Module:
        """One stage with both losses."""
        job = with_attributes(job, self)

        def projection(head: nn.Linear) -> nn.Module:
            width = head.in_features
            return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, self.width))

        with second_head(job, projection) as both:
            job.fit("training", both, loss=_Loss(self, job.groups_train))
        return both.first


class _Loss:
    def __init__(self, config: FSCL, groups: Tensor) -> None:
        self.config, self.groups = config, groups

    def __call__(self, output: PairOutput, labels: Tensor, rows: Tensor) -> Tensor:
        assert output.second is not None
        self.groups = self.groups.to(rows.device)
        z, classes, groups = (gathered(part) for part in (normalize(output.second, dim=-1), labels, self.groups[rows]))
        contrast = fair_contrastive(z, classes, groups, self.config.temperature, self.config.even_groups)
        return row_losses(output.logits, labels).mean() + self.config.weight * contrast


def fair_contrastive(z: Tensor, labels: Tensor, groups: Tensor, temperature: float, even_groups: bool) -> Tensor:
    """SupCon with only negatives of another class and of the anchor's own group below the line.

    Args:
        z: unit vectors, [B, width].
        labels: [B].
        groups: [B].
        temperature: τ.
        even_groups: average within each (class, group) cell of positives first, and over anchors' cells last.

    Example:
        >>> import torch
        >>> z = torch.eye(3)[[0, 0, 1]]
        >>> args = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), 1.0, False
        >>> round(fair_contrastive(z, *args).item(), 4)   # row 0 alone has both: −(1 − 0)
        -1.0
    """
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    same_class, same_group = labels[:, None] == labels, groups[:, None] == groups
    positive, negative = same_class & ~itself, ~same_class & same_group
    logits = z @ z.T / temperature
    # Below the line stand the negatives alone; an anchor without any is left out, as is one without a positive.
    has_both = positive.any(1) & negative.any(1)
    hidden = ~negative & has_both[:, None]
    against = logits.masked_fill(hidden, -torch.inf).logsumexp(1, keepdim=True)
    log_share = logits - against
    weight = positive.float()
    if even_groups:
        weight = weight / (weight @ same_group.float()).clamp(min=1)  # one over how many positives share the group
    anchors = has_both.float()
    if even_groups:
        cell = same_class & same_group
        anchors = anchors / (cell.float() @ anchors).clamp(min=1)
    per_row = -(log_share.masked_fill(~positive, 0.0) * weight).sum(1) / weight.sum(1).clamp(min=1e-12)
    return (anchors * per_row).sum() / anchors.sum().clamp(min=1e-12)
