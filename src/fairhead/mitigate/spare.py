"""SPARE: clusters of early outputs within each class, then training that shows them evenly (Yang et al., 2024)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fairhead.mitigate.losses import balanced, cell_numbers
from fairhead.mitigate.priors import Choice, Prior
from fairhead.mitigate.training_job import Job
from fairhead.settings import Count, NotNegative, Range
from fairhead.train.fitting import LAST_EPOCH
from fairhead.train.kmeans import kmeans, silhouette


@dataclass(frozen=True)
class SPARE:
    """Separate early and resample.

    Attributes:
        early_epochs: after which the outputs are clustered.
        most: the largest number of clusters tried in a class; the silhouette decides.
        power: rows are drawn in proportion to 1 / (cluster size)^power.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("spare").early_epochs
        1
    """

    early_epochs: Count = 1
    most: Annotated[int, Range(2)] = 5
    power: NotNegative = 1.0

    priors: ClassVar[Mapping[str, Prior]] = {"early_epochs": Choice((1, 2)), "power": Choice((1.0, 2.0, 3.0))}

    def train(self, job: Job) -> nn.Module:
        """A short first stage; the same model goes on with even clusters."""
        model = job.build_model()
        early = replace(job.plan, epochs=self.early_epochs, schedule="constant")
        job.fit("early training", model, plan=early, selection=LAST_EPOCH)
        with job.timed("clusters"):
            outputs = job.predict(model, job.train)
            cells = clusters_by_class(outputs, job.train.labels.cpu(), self.most, job.plan.seed)
        job.fit("training with even clusters", model, sampler=balanced(cells, job.generator(), self.power))
        return model


def clusters_by_class(points: Tensor, labels: Tensor, most: int, seed: int = 0) -> Tensor:
    """k-means within each class, k from 2 to `most` by the silhouette; one number for each (class, cluster), [n].

    Args:
        points: [n, D].
        labels: [n].
        most: the largest k.
        seed: of the starts.
    """
    found = torch.zeros_like(labels)
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        # A class of a few rows, or of one point many times over, stays in one piece.
        options = [kmeans(points[rows], k, seed).cluster for k in range(2, min(most, len(rows) - 1) + 1)]
        if options:
            found[rows] = max(options, key=lambda cluster: silhouette(points[rows], cluster))
    return cell_numbers(labels, found)
