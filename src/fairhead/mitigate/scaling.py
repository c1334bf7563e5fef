"""Class-specific scaling: plain training, then factors on the class probabilities (arXiv 2412.15311)."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from fairhead.mitigate.last_layer import find_head, set_head
from fairhead.mitigate.training_job import Job
from fairhead.settings import Count, Range


@dataclass(frozen=True)
class ClassScaling:
    """Plain training, then argmax_c s_c · p_c with the s that makes the worst class best off on the validation set.

    Multiplying probabilities is adding log s to the logits, so s goes into the bias of the last layer and the
    model stays what it was.

    Attributes:
        largest: factors from 1/largest to largest are tried.
        steps: how many of them, evenly in the logarithm.
        rounds: passes over the classes; with two classes one finds the best.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("scaling").steps
        201
    """

    largest: Annotated[float, Range(1, above=True)] = 100.0
    steps: Annotated[int, Range(2)] = 201
    rounds: Count = 3

    def train(self, job: Job) -> nn.Module:
        """Plain training and a sweep."""
        model = job.build_model()
        job.fit("training", model)
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

    One class at a time is swept, the others kept; the first class of two stays at 1, as only ratios matter.

    Args:
        probabilities: [n, C].
        labels: [n].
        tried: factors, [S].
        rounds: passes over the classes.

    Example:
        >>> import torch
        >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
        >>> s = best_factors(p, torch.tensor([0, 0, 1, 1]), torch.tensor([0.5, 1.0, 2.0, 3.0]))
        >>> (p * s).argmax(-1).tolist()
        [0, 0, 1, 1]
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
