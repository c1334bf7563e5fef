"""Clusters: make the label independent of what frozen features cluster by; a method of this library's own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import WeightedRandomSampler

from fairhead.mitigate.clustering import kmeans, nearest
from fairhead.mitigate.last_layer import features_of, find_head
from fairhead.mitigate.losses import cell_numbers
from fairhead.mitigate.priors import LogUniform, Prior
from fairhead.mitigate.training_job import Job
from fairhead.settings import Positive, Range, WholeNumber
from fairhead.train import Examples, Fit, Selection
from fairhead.train.selection import worst_accuracy


@dataclass(frozen=True)
class Clusters:
    """Clusters in features, rows drawn in proportion to P(y) P(c) / P(y, c): label and cluster become independent.

    What tells the classes apart is taken out first (the directions of a linear classifier of the label), so that
    clusters are by something else and every class can have rows in each. For every number of clusters a model is
    trained; the one with the best worst (class, cluster) accuracy on the validation set is kept, over the cells of all
    the clusterings.

    Attributes:
        counts: numbers of clusters to try.
        least: cells of the validation set with fewer rows do not count: their accuracy is chance.
        cap: the largest chance of a row, in means; a cell of a row or two would be shown again and again otherwise.
        features: what to cluster by. The name of a frozen foundation model ("path:FOLDER"), or a function that gives
            [n, D] for examples; by default what goes into the last layer of a plainly trained model.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("clusters", counts=[8]).counts
        (8,)
    """

    counts: tuple[Annotated[int, Range(2)], ...] = (4, 8, 16)
    least: WholeNumber = 20
    cap: Positive = 20.0
    features: str | Callable[[Examples], Tensor] | None = None

    priors: ClassVar[Mapping[str, Prior]] = {"cap": LogUniform(0.5, 1.5)}

    def train(self, job: Job) -> nn.Module:
        """One training for each number of clusters, and plain training where features are not given."""
        train, validation = self._features(job)
        labels, validation_labels = job.train.labels.cpu(), job.validation.labels.cpu()
        with job.timed("clusters"):
            found = [kmeans(train, k, job.plan.seed) for k in self.counts]
            cells = [cell_numbers(validation_labels, nearest(validation, c.centres)) for c in found]
        selection = worst_of_all(validation_labels, cells, self.least)
        best: tuple[Fit, nn.Module] | None = None
        for count, clustering in zip(self.counts, found, strict=True):
            chances = independent_weights(labels, clustering.cluster.cpu()).clamp(max=self.cap)
            sampler = WeightedRandomSampler(chances.tolist(), len(labels), generator=job.generator())
            model = job.build_model()
            done = job.fit(f"training with {count} clusters", model, sampler=sampler, selection=selection)
            if best is None or done.best.score > best[0].best.score:
                best = done, model
        assert best is not None
        job.last_fit = best[0]
        return best[1]

    def _features(self, job: Job) -> tuple[Tensor, Tensor]:
        """Of training and validation rows, without what tells the classes apart."""
        examples = job.train, job.validation
        if callable(self.features):
            get = self.features
        elif self.features is not None:
            other = job.auxiliary_model(self.features)
            examples, get = (other.train, other.validation), other.features
        else:
            model = job.build_model()
            job.fit("training", model)
            head = find_head(model, job.train)

            def get(examples: Examples) -> Tensor:
                return features_of(model, head, examples, job.plan.precision)

        with job.timed("features"):
            train, validation = (get(part).float().cpu() for part in examples)
            return without_label(train, job.train.labels.cpu(), validation)


def without_label(train: Tensor, labels: Tensor, validation: Tensor) -> tuple[Tensor, Tensor]:
    """Project the directions of a linear classifier of the label out of the features.

    A classifier's directions rather than the line between class means: where something else goes along with the label,
    the means differ by that as well, and it is what the clusters are to find.

    Args:
        train: [n, D].
        labels: [n].
        validation: [m, D]; moved along with the others, its labels are not used.
    """
    mean, deviation = train.mean(0), train.std(0).clamp(min=1e-6)
    even = (train - mean) / deviation  # for the classifier only: clusters need the features' own scales
    classes = int(labels.max()) + 1
    weight = torch.zeros(classes, train.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(even @ weight.T + bias, labels) + 1e-3 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        # Only differences between classes matter: classes − 1 directions, orthonormal.
        in_features = (weight - weight.mean(0)) / deviation
        directions = torch.linalg.svd(in_features, full_matrices=False).Vh[: classes - 1]
        return train - train @ directions.T @ directions, validation - validation @ directions.T @ directions


def independent_weights(labels: Tensor, clusters: Tensor) -> Tensor:
    """P(y) P(c) / P(y, c) of each row, [n]: under these weights label and cluster are independent.

    Example:
        >>> import torch
        >>> independent_weights(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1])).tolist()
        [0.75, 0.75, 1.5, 0.5]
    """
    cells = cell_numbers(labels, clusters)
    shares = [torch.bincount(numbers)[numbers].double() / len(labels) for numbers in (labels, clusters, cells)]
    return shares[0] * shares[1] / shares[2]


def worst_of_all(labels: Tensor, clusterings: list[Tensor], least: int) -> Selection:
    """The lowest accuracy of a cell of any clustering, among cells with at least `least` rows (all, if none has)."""
    kept = []
    for cells in clusterings:
        large = torch.bincount(cells)[cells] >= least
        kept.append(large if large.any() else torch.ones_like(large))

    def score(predicted: Tensor) -> float:
        return min(
            worst_accuracy(predicted[rows], labels[rows], cells[rows])
            for cells, rows in zip(clusterings, kept, strict=True)
        )

    return score
