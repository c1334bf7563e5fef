"""DRO: small losses are left alone, so that training works for the rows that fare worst (Hashimoto et al., 2018)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fairhead.mitigate.losses import row_losses
from fairhead.mitigate.priors import LogUniform, Prior, Uniform
from fairhead.mitigate.training_job import Job
from fairhead.settings import NotNegative, Positive, PositiveShare
from fairhead.train.launched import gathered


@dataclass(frozen=True)
class DRO:
    """Distributionally robust training, in three forms.

    Attributes:
        form: "fixed" minimises mean(max(ℓ − η, 0)^power) with a given η (as the DAM paper does); "chi2" the exact worst
            case over a χ² ball around each batch; "cvar" the exact mean over the worst share of each batch.
        eta: of "fixed"; the DAM paper has 0.10 on UTKFace, 0.15 on CelebA, 0.25 on text.
        power: of "fixed"; 2 in Hashimoto et al., 1.5 in the DAM release.
        alpha: the smallest share of rows that must be served: the radius of "chi2" follows from it, and it is the
            share of "cvar".
    """

    form: Literal["fixed", "chi2", "cvar"] = "fixed"
    eta: NotNegative = 0.25
    power: Positive = 1.5
    alpha: PositiveShare = 0.2

    @property
    def priors(self) -> Mapping[str, Prior]:
        """What a search varies: the one number that the form has."""
        return {"eta": Uniform(0.05, 0.5)} if self.form == "fixed" else {"alpha": LogUniform(-2, 0)}

    def train(self, job: Job) -> nn.Module:
        """One stage with the robust loss."""
        return job.train_fresh("training", loss=self.loss)

    def loss(self, output: Any, labels: Tensor, rows: Tensor) -> Tensor:
        """The robust loss of a batch."""
        losses = gathered(row_losses(output.logits, labels))  # the worst rows of the batch, not of a share of it
        if self.form == "fixed":
            return (losses - self.eta).clamp(min=0).pow(self.power).mean()
        weights = chi2_weights if self.form == "chi2" else cvar_weights
        return (weights(losses.detach(), self.alpha) * losses).sum()


def cvar_weights(losses: Tensor, alpha: float) -> Tensor:
    """The weights, summing to 1, that make Σ wᵢ ℓᵢ the mean over the worst `alpha` of the rows [B]."""
    share = alpha * len(losses)
    rank = losses.argsort(descending=True).argsort().to(losses.dtype)
    return (share - rank).clamp(0, 1) / share


def chi2_weights(losses: Tensor, alpha: float) -> Tensor:
    """The worst weights in the χ² ball: argmax Σ wᵢ ℓᵢ with ½ mean((B wᵢ − 1)²) ≤ (1/alpha − 1)², exactly.

    With C² = 2 (1/alpha − 1)² + 1 the dual is min over η of C · sqrt(mean(max(ℓ − η, 0)²)) + η. Between two
    neighbouring losses it has a stationary point in closed form, so all of them are tried at once: no search, nothing
    that a GPU would have to wait for.
    """
    n, scale = len(losses), math.sqrt(2 * (1 / alpha - 1) ** 2 + 1)
    if scale == 1:
        return torch.full_like(losses, 1 / n)
    ordered = losses.double().sort(descending=True).values
    top = torch.arange(1, n + 1, device=losses.device, dtype=torch.float64)  # how many rows have ℓ > η
    mean = ordered.cumsum(0) / top
    variance = (ordered.square().cumsum(0) / top - mean.square()).clamp(min=0)
    room = scale**2 * top / n - 1
    eta = mean - (variance / room.clamp(min=1e-12)).sqrt()
    above = (ordered[None] - eta[:, None]).clamp(min=0)  # [candidates, B]
    value = torch.where(room > 0, scale * above.square().mean(1).sqrt() + eta, torch.inf)
    best = eta.gather(0, value.argmin(0, keepdim=True))  # indexing by a scalar would wait for the device
    above = (losses.double() - best).clamp(min=0)
    # All weight on the largest loss, where that is inside the ball or nothing varies.
    highest = (losses == losses.max()).double()
    inside = (1 / highest.mean() <= scale**2) | (above.sum() <= 0)
    return torch.where(inside, highest / highest.sum(), above / above.sum().clamp(min=1e-300)).to(losses.dtype)
