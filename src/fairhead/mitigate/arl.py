"""ARL: an adversary looks for regions where the learner errs and puts weight on them (Lahoti et al., 2020)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fairhead.errors import InputError
from fairhead.mitigate.losses import gathered, row_losses
from fairhead.mitigate.priors import Choice, Prior
from fairhead.mitigate.training_job import ADDED_LATER, Job
from fairhead.mitigate.two_networks import PairOutput, fresh_pair
from fairhead.settings import WholeNumber


@dataclass(frozen=True)
class ARL:
    """Adversarially reweighted learning with a second network as the adversary.

    The adversary's score of a row is its output for the row's own class, so it sees inputs and label.

    Attributes:
        pretrain: steps with equal weights before the adversary has a say.
        adversary_loss: what the adversary raises: "plain" losses, or losses already "weighted" (the DAM release).
        uses_label: whether the adversary knows the label; otherwise the output for class 0 is its score.
        adversary: the name of another model, usually a smaller one that takes the same inputs, such as "vit-6x8" (the
            DAM paper's); by default the adversary is built like the learner.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("arl").pretrain
        250
    """

    pretrain: WholeNumber = 250
    adversary_loss: Literal["plain", "weighted"] = "plain"
    uses_label: bool = True
    adversary: str | None = field(default=None, metadata=ADDED_LATER)

    priors: ClassVar[Mapping[str, Prior]] = {"pretrain": Choice((0, 50, 250, 1000))}

    def train(self, job: Job) -> nn.Module:
        """One stage with both networks."""
        pair = fresh_pair(job, None if self.adversary is None else self._smaller(job, self.adversary))
        job.fit("training with an adversary", pair, loss=_AdversarialLoss(self))
        return pair.first

    def _smaller(self, job: Job, name: str) -> Callable[[], nn.Module]:
        other = job.auxiliary_model(name)
        theirs, ours = other.train.inputs, job.train.inputs
        # By what is in them: tokens of another vocabulary have the same shape.
        if theirs.keys() != ours.keys() or not all(torch.equal(theirs[key], ours[key]) for key in ours):
            shapes = [{key: list(x.shape[1:]) for key, x in part.items()} for part in (theirs, ours)]
            raise InputError(
                f"ARL's adversary {name!r} takes {shapes[0]} and the learner {shapes[1]}, not the same rows: both must "
                "read the same inputs, so train all of the learner, and give an adversary for pictures of its size or "
                "with its tokenizer"
            )
        return other.build_model


class _AdversarialLoss:
    def __init__(self, config: ARL) -> None:
        self.config = config
        self.steps = torch.zeros(())  # a tensor: a step that is recorded and replayed must count as well

    def __call__(self, output: PairOutput, labels: Tensor, rows: Tensor) -> Tensor:
        losses = gathered(row_losses(output.logits, labels))
        assert output.second is not None
        asked = labels if self.config.uses_label else torch.zeros_like(labels)
        weights = adversarial_weights(gathered(output.second.float().gather(1, asked[:, None])[:, 0]))
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
