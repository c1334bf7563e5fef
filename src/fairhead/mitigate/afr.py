"""AFR, automatic feature reweighting: a last layer retrained where plain training is unsure (Qiu et al., 2023)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fairhead.errors import InputError
from fairhead.mitigate.last_layer import features_of, find_head, set_head
from fairhead.mitigate.losses import row_losses
from fairhead.mitigate.priors import Choice, Prior, Uniform
from fairhead.mitigate.training_job import Job
from fairhead.settings import Count, NotNegative, Positive, Share
from fairhead.train.fitting import score_of

# Steps between two looks at the validation set.
_LOOK_EVERY = 10


@dataclass(frozen=True)
class AFR:
    """Plain training on one part of the rows; on the rest, the last layer again with weights ∝ β_y · exp(−γ p_y).

    The last layer is kept from the step that the run's selection likes best on the validation set, the start excepted.

    Attributes:
        held_out: share of the training rows kept for the last layer.
        gamma: how much more the rows count that plain training gets wrong (γ); 0 rebalances classes only.
        penalty: on the distance from the first last layer (λ).
        steps: full-batch gradient steps.
        learning_rate: of those steps.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("afr", gamma=10).gamma
        10
    """

    held_out: Share = 0.2
    gamma: NotNegative = 4.0
    penalty: NotNegative = 0.0
    steps: Count = 500
    learning_rate: Positive = 0.01

    priors: ClassVar[Mapping[str, Prior]] = {"gamma": Uniform(4, 20), "penalty": Choice((0.0, 0.1, 0.2, 0.3, 0.4))}

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise InputError(f"AFR's held_out is a share of the rows, between 0 and 1; found {self.held_out}")

    def train(self, job: Job) -> nn.Module:
        """Plain training, then the last layer."""
        order = torch.randperm(len(job.train), generator=job.generator())
        kept = order[round(self.held_out * len(order)) :]
        held = job.train.take(order[: round(self.held_out * len(order))])
        model = job.build_model()
        job.fit("training", model, train=job.train.take(kept))
        with job.timed("last layer"):
            head = find_head(model, held)
            features = features_of(model, head, held, job.plan.precision).to(head.weight.device)
            shown = features_of(model, head, job.validation, job.plan.precision).to(head.weight.device)
            truth = job.validation.labels.cpu()

            def score(last: nn.Linear) -> float:
                return score_of(job.selection, last(shown).argmax(-1).cpu(), truth)

            self._retrain(head, features, held.labels.to(head.weight.device), score)
        return model

    def _retrain(self, head: nn.Linear, features: Tensor, labels: Tensor, score: Callable[[nn.Linear], float]) -> None:
        """Full-batch gradient descent on the weighted loss, gradients clipped to norm 1; features [m, D]."""
        last = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None).to(features.device)
        last.load_state_dict(head.state_dict())
        start = [parameter.detach().clone() for parameter in last.parameters()]
        with torch.no_grad():
            p_label = (-row_losses(last(features), labels)).exp()
        weights = afr_weights(p_label, labels, self.gamma)
        optimizer = torch.optim.SGD(last.parameters(), lr=self.learning_rate)
        best, kept = -math.inf, last.state_dict()
        for step in range(1, self.steps + 1):
            distance = sum((p - p0).square().sum() for p, p0 in zip(last.parameters(), start, strict=True))
            loss = (weights * row_losses(last(features), labels)).sum() + self.penalty * distance
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(last.parameters(), 1.0)
            optimizer.step()
            if step % _LOOK_EVERY == 0 or step == self.steps:
                found = score(last)
                if found > best:
                    best, kept = found, {name: tensor.clone() for name, tensor in last.state_dict().items()}
        set_head(head, kept["weight"], kept.get("bias", head.weight.new_zeros(head.out_features)))


def afr_weights(p_label: Tensor, labels: Tensor, gamma: float) -> Tensor:
    """β_y · exp(−γ p_y), summing to 1, where β_y is one over the size of the row's class; [m].

    Example:
        >>> import torch
        >>> afr_weights(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0, 0, 1]), gamma=5.0).tolist()
        [0.25, 0.25, 0.5]
    """
    sizes = torch.bincount(labels)
    weights = (-gamma * p_label).exp() / sizes[labels]
    return weights / weights.sum()
