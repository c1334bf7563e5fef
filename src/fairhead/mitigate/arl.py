"""ARL: an adversary looks for regions where the learner errs and puts weight on them (Lahoti et al., 2020)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fairhead.mitigate.job import Job
from fairhead.mitigate.losses import row_losses
from fairhead.mitigate.pair import PairOutput, fresh_pair
from fairhead.mitigate.priors import Choice, Prior
from fairhead.settings import WholeNumber


@dataclass(frozen=True)
class ARL:
    """Adversarially reweighted learning with a second network as the adversary.

    The adversary has the learner's architecture; its score of a row is the output for the row's own class, so it sees
    inputs and label.

    Attributes:
        pretrain: steps with equal weights before the adversary has a say.
        adversary_loss: what the adversary raises: "plain" losses, or losses already "weighted" (the DAM release).
        uses_label: whether the adversary knows the label; otherwise the output for class 0 is its score.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("arl").pretrain
        250
    """

    pretrain: WholeNumber = 250
    adversary_loss: Literal["plain", "weighted"] = "plain"
    uses_label: bool = True

    priors: ClassVar[Mapping[str, Prior]] = {"pretrain": Choice((0, 50, 250, 1000))}

    def train(self, job: Job) -> nn.Module:
        """One stage with both networks."""
        pair = fresh_pair(job)
        job.fit("training with an adversary", pair, loss=_AdversarialLoss(self))
        return pair.first


class _AdversarialLoss:
    def __init__(self, config: ARL) -> None:
        self.config = config
        self.steps = torch.zeros(())  # a tensor: a step that is recorded and replayed must count as well

    def __call__(self, output: PairOutput, labels: Tensor, rows: Tensor) -> Tensor:
        losses = row_losses(output.logits, labels)
        assert output.second is not None
        asked = labels if self.config.uses_label else torch.zeros_like(labels)
        weights = adversarial_weights(output.second.float().gather(1, asked[:, None])[:, 0])
        self.steps = self.steps.to(rows.device)
        self.steps += 1
        weights = torch.where(self.steps <= self.config.pretrain, torch.ones_like(weights), weights)
        learner = (weights.detach() * losses).mean()
        fixed = losses.detach() if self.config.adversary_loss == "plain" else (weights * losses).detach()
        adversary = (weights * fixed).mean()
        # Goes down for the learner and up for the adversary; what is shown is the learner's loss.
        return learner + (adversary.detach() - adversary)


def adversarial_weights(scores: Tensor) -> Tensor:
    """1 + σ(score) over its mean, [B]: every row counts, those with high scores more.

    Example:
        >>> import torch
        >>> adversarial_weights(torch.zeros(3)).tolist()
        [2.0, 2.0, 2.0]
    """
    chance = scores.sigmoid()
    return 1 + chance / chance.mean().clamp(min=1e-4)
