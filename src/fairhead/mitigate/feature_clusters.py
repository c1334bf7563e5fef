"""Clusters: make the label independent of what frozen features cluster by; a method of this library's own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import WeightedRandomSampler

from fairhead.mitigate.last_layer import features_of, find_head
from fairhead.mitigate.losses import cell_numbers
from fairhead.mitigate.priors import LogUniform, Prior
from fairhead.mitigate.training_job import Job
from fairhead.settings import Positive, Range, WholeNumber
from fairhead.train import Examples, Fit, Selection
from fairhead.train.fitting import worst_accuracy


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


class Clustering(NamedTuple):
    """Centres [k, D], the cluster of each point [n], and the sum of squared distances."""

    centres: Tensor
    cluster: Tensor
    inertia: float


def kmeans(points: Tensor, k: int, seed: int = 0, restarts: int = 4, rounds: int = 100) -> Clustering:
    """Lloyd's algorithm from k-means++ starts; the best of several.

    Args:
        points: [n, D].
        k: clusters; no more than there are distinct points are used.
        seed: of the starts.
        restarts: how many starts.
        rounds: at most, each.

    Example:
        >>> import torch
        >>> kmeans(torch.tensor([[0.0], [0.1], [9.0], [9.1]]), 2).cluster.diff().abs().tolist()
        [0, 1, 0]
    """
    points = points.float()
    generator = torch.Generator().manual_seed(seed)
    best: Clustering | None = None
    for _ in range(restarts):
        centres = _spread_out(points, k, generator)
        cluster = nearest(points, centres)
        for _ in range(rounds):
            sums = torch.zeros_like(centres).index_add(0, cluster, points)
            sizes = torch.bincount(cluster, minlength=len(centres))
            centres = torch.where((sizes > 0)[:, None], sums / sizes.clamp(min=1)[:, None], centres)
            before, cluster = cluster, nearest(points, centres)
            if torch.equal(before, cluster):
                break
        inertia = (points - centres[cluster]).square().sum().item()
        if best is None or inertia < best.inertia:
            best = Clustering(centres, cluster, inertia)
    assert best is not None
    return best


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """The nearest centre of each point, [n]."""
    # |x − c|² without |x|², which is the same for all centres
    return (centres.square().sum(1) - 2 * points @ centres.T).argmin(1)


def silhouette(points: Tensor, cluster: Tensor, at_most: int = 2000, seed: int = 0) -> float:
    """Mean over points of (b − a) / max(a, b): a is the mean distance to the own cluster, b to the next one.

    Args:
        points: [n, D].
        cluster: [n].
        at_most: points beyond this many are sampled.
        seed: of that sample.

    Returns:
        Between −1 and 1; −1 where there is but one cluster.
    """
    if len(points) > at_most:
        chosen = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))[:at_most]
        points, cluster = points[chosen.to(points.device)], cluster[chosen.to(cluster.device)]
    _, cluster = cluster.unique(return_inverse=True)
    sizes = torch.bincount(cluster)
    if len(sizes) < 2:
        return -1.0
    member = torch.nn.functional.one_hot(cluster).to(points.dtype)  # [n, k]
    sums = torch.cdist(points, points) @ member
    rows = torch.arange(len(points), device=points.device)
    own = sums[rows, cluster] / (sizes[cluster] - 1).clamp(min=1)
    means = sums / sizes
    means[rows, cluster] = torch.inf
    other = means.min(1).values
    score = (other - own) / torch.maximum(own, other).clamp(min=1e-12)
    return score.masked_fill(sizes[cluster] == 1, 0.0).mean().item()


def _spread_out(points: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """k-means++: each next centre is a point drawn in proportion to its squared distance from those before."""
    first = torch.randint(len(points), (1,), generator=generator).item()
    centres = [points[int(first)]]
    distance = (points - centres[0]).square().sum(1)
    while len(centres) < k and distance.max() > 0:
        chosen = torch.multinomial(distance.cpu().double(), 1, generator=generator).item()
        centres.append(points[int(chosen)])
        distance = torch.minimum(distance, (points - centres[-1]).square().sum(1))
    return torch.stack(centres)
