"""The last layer of a classifier, whatever the family, and methods that train plainly and then change it alone."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from fairhead.errors import InputError, UnsupportedModel
from fairhead.mitigate.losses import row_losses
from fairhead.mitigate.priors import Choice, Prior, Uniform
from fairhead.mitigate.training_job import Job
from fairhead.settings import Count, NotNegative, Positive, Range, Share
from fairhead.train import Examples, predict
from fairhead.train.fitting import score_of

# Steps between two looks at the validation set.
_LOOK_EVERY = 10


def find_head(model: nn.Module, examples: Examples) -> nn.Linear:
    """The linear layer whose output is the logits. One row of `examples` is run to find it."""
    calls: list[tuple[nn.Linear, Tensor]] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        calls.append((module, output))

    handles = [module.register_forward_hook(note) for module in model.modules() if isinstance(module, nn.Linear)]
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad():
            logits = model(**examples.take(torch.tensor([0])).to(device).inputs).logits
    finally:
        for handle in handles:
            handle.remove()
    for module, output in reversed(calls):
        if output.shape == logits.shape and torch.equal(output, logits):
            return module
    raise UnsupportedModel(
        f"the logits of {type(model).__name__} do not come out of a linear layer: nothing to retrain"
    )


def features_of(model: nn.Module, head: nn.Linear, examples: Examples, precision: Any = "no") -> Tensor:
    """What goes into the head for each row, [n, D] on the CPU."""
    with _inputs_of(head) as seen:
        predict(model, examples, precision=precision)
    return torch.cat(seen).float().cpu()


@contextmanager
def _inputs_of(head: nn.Linear) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    try:
        yield seen
    finally:
        handle.remove()


def set_head(head: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    """Replace the head's weight [C, D] and bias [C]; of a head without bias, the new one must be zero."""
    with torch.no_grad():
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.copy_(bias)
        elif bias.abs().max() > 0:
            raise UnsupportedModel("the model's last layer has no bias, and this method needs one to change")


@dataclass(frozen=True)
class ClassScaling:
    """Plain training, then argmax_c s_c · p_c, with the s that is best for the worst class (arXiv 2412.15311).

    The validation set decides. Multiplying probabilities is adding log s to the logits, so s goes into the bias of the
    last layer and the model stays what it was.

    Attributes:
        largest: factors from 1/largest to largest are tried.
        steps: how many of them, evenly in the logarithm.
        rounds: passes over the classes; with two classes one finds the best.
    """

    largest: Annotated[float, Range(1, above=True)] = 100.0
    steps: Annotated[int, Range(2)] = 201
    rounds: Count = 3

    def train(self, job: Job) -> nn.Module:
        """Plain training and a sweep."""
        model = job.train_fresh("training")
        with job.timed("sweep of the factors"):
            probabilities = job.predict(model, job.validation)
            tried = torch.logspace(-1, 1, self.steps, base=self.largest)
            factors = best_factors(probabilities, job.validation.labels.cpu(), tried, self.rounds)
            head = find_head(model, job.validation)
            bias = torch.zeros(len(head.weight), device=head.weight.device) if head.bias is None else head.bias
            set_head(head, head.weight, bias + factors.log().to(bias))
        return model


def best_factors(probabilities: Tensor, labels: Tensor, tried: Tensor, rounds: int = 3) -> Tensor:
    """Factors of the classes, [C], with the highest worst-class accuracy, then the highest accuracy.

    Of probabilities [n, C], one class at a time is swept over the factors that are `tried` [S], the others kept; the
    first class of two stays at 1, as only ratios matter.
    """
    classes = probabilities.shape[1]
    factors = torch.ones(classes)
    tried = torch.cat([torch.ones(1), tried])  # no change comes first, and wins where nothing is gained
    for _ in range(rounds):
        for swept in range(1, classes) if classes == 2 else range(classes):
            all_factors = factors.repeat(len(tried), 1)
            all_factors[:, swept] *= tried
            scores = torch.stack([_score(probabilities * f, labels) for f in all_factors])  # [S, 2]
            best = max(range(len(tried)), key=lambda number: tuple(scores[number].tolist()))
            factors = all_factors[best]
        if classes == 2:
            break
    return factors


def _score(scaled: Tensor, labels: Tensor) -> Tensor:
    """Worst-class accuracy and accuracy."""
    hits = (scaled.argmax(-1) == labels).double()
    counts = torch.bincount(labels, minlength=scaled.shape[1])
    by_class = torch.bincount(labels, weights=hits, minlength=scaled.shape[1])[counts > 0] / counts[counts > 0]
    return torch.stack([by_class.min(), hits.mean()])


@dataclass(frozen=True)
class AFR:
    """Automatic feature reweighting (Qiu et al., 2023): a last layer retrained where plain training is unsure.

    Plain training on one part of the rows; on the rest, the last layer again with weights ∝ β_y · exp(−γ p_y).

    The last layer is kept from the step that the run's selection likes best on the validation set, the start excepted.

    Attributes:
        held_out: share of the training rows kept for the last layer.
        gamma: how much more the rows count that plain training gets wrong (γ); 0 rebalances classes only.
        penalty: on the distance from the first last layer (λ).
        steps: full-batch gradient steps.
        learning_rate: of those steps.
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
        model = job.train_fresh("training", train=job.train.take(kept))
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
    """β_y · exp(−γ p_y), summing to 1, where β_y is one over the size of the row's class; [m]."""
    sizes = torch.bincount(labels)
    weights = (-gamma * p_label).exp() / sizes[labels]
    return weights / weights.sum()
