"""Weights and offsets of training rows, without any group.

Balance makes clusters independent of the label; match weights rows towards a deployment sample.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from scipy.stats import mannwhitneyu, norm
from torch import Tensor
from torch.utils.data import Sampler

from fairhead.errors import InputError
from fairhead.models.attached import LinearHead
from fairhead.stats import ALPHA
from fairhead.train.fitting import solve
from fairhead.train.kmeans import find_clusters, independent_weights

# Of the regression. What matters is that the weighted rows are like the sample, which a stronger one would not reach;
# that held-out rows are predicted as well as can be would ask for one.
_PENALTY = 0.01
_FOLDS = 4
_LEAST = 2 * _FOLDS  # rows of a class, in either sample


def balance_weights(
    features: Tensor, labels: Tensor, clusters: int | None = None, *, cap: float = 20.0, seed: int = 0
) -> Tensor:
    """Weights of training rows, for any training loop that can draw or weight rows, [n]; their mean is 1.

    Args:
        features: features of the training rows from a frozen encoder, [n, D].
        labels: [n].
        clusters: number of clusters; by default the one on which two halves of the rows agree best.
        cap: largest weight, as a multiple of the mean.
        seed: seed of the clusters.

    Example:
        >>> import torch
        >>> from fairhead.mitigate import balance_weights
        >>> kind = torch.tensor([0] * 90 + [1] * 10 + [0] * 10 + [1] * 90)      # correlates with the label
        >>> features = torch.randn(200, 4, generator=torch.Generator().manual_seed(0)) + 9 * kind[:, None]
        >>> weights = balance_weights(features - 4.5, torch.arange(200) // 100)
        >>> weights[0].item(), weights[95].item()
        (0.5555555555555556, 5.0)
    """
    found = find_clusters(features, clusters, seed)
    return independent_weights(labels, found.clustering.cluster, cap=cap)


def draw_by_weight(trainer: Any, weights: Tensor) -> None:
    """Let a Hugging Face `Trainer` draw training rows in proportion to their weights, such as `balance_weights`.

    A step has the same rows and the same gradient however many batches and processes it is split into, and resuming
    continues the same sequence.

    Args:
        trainer: a Trainer that has not started training.
        weights: weights of the rows of `trainer.train_dataset`, [n].

    Example:
        >>> draw_by_weight(trainer, balance_weights(features, labels))  # doctest: +SKIP
    """
    rows = len(trainer.train_dataset)
    if weights.shape != (rows,):
        raise InputError(f"the Trainer has {rows} training rows and there are weights of shape {list(weights.shape)}")
    trainer._get_train_sampler = lambda *_: _Drawn(weights, trainer.args)
    # The loss is a mean over a batch. Models whose loss ignores how many rows all batches of a step have (BERT, CLIP)
    # say that they mind it, and their gradient would grow with the number of batches.
    trainer.model_accepts_loss_kwargs = False


class _Drawn(Sampler[int]):
    """As many draws as rows, the same on every process; accelerate calls `set_epoch`."""

    def __init__(self, weights: Tensor, args: Any) -> None:
        self.seed = args.seed if args.data_seed is None else args.data_seed
        self.weights, self.epoch = weights.double().cpu(), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, len(self), replacement=True, generator=generator)
        return iter(drawn.tolist())


def label_offsets(labels: Tensor, groups: Tensor, *, even: bool = False) -> Tensor:
    """Log p(y | g) − log p(y) for the group of each row and every class, [n, C].

    Added to the logits in training (Hong and Yang, 2021): f alone, at test, then has nothing to say about what the
    group says of the label. The shares of the classes stay with f, unless `even`: log p(y | g) as it is. A class that a
    group lacks counts as half a row.
    """
    table = torch.zeros(int(groups.max()) + 1, int(labels.max()) + 1, dtype=torch.float64)
    table.index_put_((groups, labels), torch.ones(len(labels), dtype=torch.float64), accumulate=True)
    prior = (torch.bincount(labels).double() / len(labels)).clamp(min=1e-9).log()
    table = table.clamp(min=0.5)
    given = (table / table.sum(1, keepdim=True)).log()
    return (given if even else given - prior)[groups].float()


class Matched(NamedTuple):
    """Weights of the training rows, and whether there was anything to match."""

    weights: Tensor  # P(use | x, y) / P(training | x, y), mean 1 within each class, [n]
    effective: float  # (Σ w)² / Σ w², as a share of the rows
    # How often a held-out row of the deployment sample looks more like one than a training row does (the mean area
    # under the ROC curve): 0.5 where the samples are alike
    separation: float
    p: float  # of a test that they are alike

    @property
    def differ(self) -> bool:
        """Whether the samples differ significantly."""
        return self.p < ALPHA


def match_weights(
    train: Tensor,
    labels: Tensor,
    use: Tensor,
    use_labels: Tensor,
    units: Tensor | None = None,
    use_units: Tensor | None = None,
    cap: float = 20.0,
    seed: int = 0,
    classes: Mapping[int, str] | None = None,
) -> Matched:
    """Logistic regression of "deployment or training" within each class, cross-fitted.

    Rows of one unit (a person, a document) stay in one fold; a recognised person would look like a difference.

    Args:
        train: features of the training rows, [n, D].
        labels: [n].
        use: features of the deployment sample, [m, D].
        use_labels: [m].
        units: the person or document of each training row, [n]; by default, each row is its own unit.
        use_units: the same for the sample, [m].
        cap: largest weight, as a multiple of the mean.
        seed: seed of the folds.
        classes: names of the labels, for messages.

    Raises:
        InputError: the sample lacks a class, or has too few rows of it.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.ones(len(labels), dtype=torch.float64)
    areas, scores = list[float](), list[float]()
    for label in labels.unique().tolist():
        rows, others = (labels == label).nonzero()[:, 0], (use_labels == label).nonzero()[:, 0]
        if not len(others):
            named = (classes or {}).get(label, label)
            raise InputError(f"the deployment sample has 0 rows of class {named}: give one with all classes")
        if min(len(rows), len(others)) < _LEAST:
            continue  # too few to say anything: their weights stay 1
        own, theirs = (i if unit is None else unit[i] for unit, i in ((units, rows), (use_units, others)))
        unit = torch.cat([own, theirs + own.max() + 1]).unique(return_inverse=True)[1]
        side = _Side(
            torch.cat([train[rows], use[others]]).float(),
            torch.cat([torch.zeros(len(rows)), torch.ones(len(others))]).long(),
            unit,
            torch.randint(0, _FOLDS, (int(unit.max()) + 1,), generator=generator)[unit],
        )
        log_odds = side.log_odds()
        odds = log_odds[: len(rows)].clamp(-10, 10).exp()
        odds = (odds / odds.mean()).clamp(max=cap)
        weights[rows] = odds / odds.mean()
        tests = [side.test(log_odds, held) for held in range(_FOLDS)]
        areas += [area for area, _ in tests]
        scores += [z for _, z in tests]
    if not scores:
        raise InputError(f"the deployment sample has fewer than {_LEAST} rows of every class: give more")
    # Each two folds enter twice, one held out and then the other: their scores agree, and the variance is up to double.
    p = float(norm.sf(sum(scores) / math.sqrt(2 * len(scores))))
    effective = (weights.sum().square() / weights.square().sum() / len(weights)).item()
    return Matched(weights, effective, sum(areas) / len(areas), p)


class _Side(NamedTuple):
    """One class: training rows and rows of the deployment sample, one below the other."""

    points: Tensor  # features of both, [a + b, D]
    here: Tensor  # 0 for a training row, 1 for one of the deployment sample, [a + b]
    unit: Tensor  # who or what a row is of, [a + b]
    fold: Tensor  # the same for all rows of a unit, [a + b]

    def log_odds(self) -> Tensor:
        """Of deployment, for each row by a regression on the other folds, [a + b]."""
        found = torch.zeros(len(self.here), dtype=torch.float64)
        for held in range(_FOLDS):
            head, fitting = LinearHead.of(self.points, ("training", "use")), self.fold != held
            solve(head, self.points[fitting], self.here[fitting], penalty=_PENALTY)
            with torch.no_grad():
                logits = head(self.points[~fitting]).logits.double()
            found[~fitting] = logits[:, 1] - logits[:, 0]
        return found

    def test(self, log_odds: Tensor, held: int) -> tuple[float, float]:
        """The area under the ROC curve, and z of Mann and Whitney's one-sided test; units are what is compared."""
        parts = []
        for side in (0, 1):
            chosen = (self.fold == held) & (self.here == side)
            _, number = self.unit[chosen].unique(return_inverse=True)
            parts.append(torch.bincount(number, weights=log_odds[chosen]) / torch.bincount(number))
        train, use = parts
        if not len(train) or not len(use):
            return 0.5, 0.0
        found = mannwhitneyu(use.numpy(), train.numpy(), alternative="greater")
        area = float(found.statistic) / (len(train) * len(use))
        return area, float(norm.isf(min(max(float(found.pvalue), 1e-300), 1 - 1e-12)))
