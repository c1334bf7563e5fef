"""Match: training rows weighted towards a sample from the place of use, within each class, without any group."""

import math
from typing import NamedTuple

import torch
from scipy.stats import mannwhitneyu, norm
from torch import Tensor

from fairhead.errors import InputError
from fairhead.models.linear_head import LinearHead
from fairhead.stats import ALPHA
from fairhead.train.linear import solve

# Of the regression. What matters is that the weighted rows are like the sample, which a stronger one would not reach;
# that held-out rows are predicted as well as can be would ask for one.
_PENALTY = 0.01
_FOLDS = 4
_LEAST = 2 * _FOLDS  # rows of a class, in either sample


class Matched(NamedTuple):
    """Weights of the training rows, and whether there was anything to match.

    Attributes:
        weights: P(use | x, y) / P(training | x, y), mean 1 within each class, [n].
        effective: (Σ w)² / Σ w², as a share of the rows.
        separation: how often a held-out row from the place of use looks more like one than a training row does (the
            mean area under the ROC curve): 0.5 where the samples are alike.
        p: of a test that they are alike.
    """

    weights: Tensor
    effective: float
    separation: float
    p: float

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
) -> Matched:
    """Logistic regression of "place of use or training" within each class, cross-fitted.

    Rows of one unit (a person, a document) stay in one fold: a person that is recognised would pass for a difference.

    Args:
        train: features of the training rows, [n, D].
        labels: [n].
        use: features of the sample from the place of use, [m, D].
        use_labels: [m].
        units: who or what each training row is of, [n]; each row on its own by default.
        use_units: the same for the sample, [m].
        cap: the largest weight, in means.
        seed: of the folds.

    Raises:
        InputError: the sample lacks a class, or has too few rows of it.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.ones(len(labels), dtype=torch.float64)
    areas, scores = [], []
    for label in labels.unique().tolist():
        rows, others = (labels == label).nonzero()[:, 0], (use_labels == label).nonzero()[:, 0]
        if not len(others):
            raise InputError(f"the sample from the place of use has 0 rows of class {label}: give one with all classes")
        if min(len(rows), len(others)) < _LEAST:
            continue  # too few to say anything: their weights stay 1
        own, theirs = _codes(units, rows), _codes(use_units, others)
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
        for held in range(_FOLDS):
            area, z = side.test(log_odds, held)
            areas.append(area)
            scores.append(z)
    if not scores:
        raise InputError(f"the sample from the place of use has fewer than {_LEAST} rows of every class: give more")
    # Each two folds enter twice, one held out and then the other: their scores agree, and the variance is up to double.
    p = float(norm.sf(sum(scores) / math.sqrt(2 * len(scores))))
    effective = (weights.sum().square() / weights.square().sum() / len(weights)).item()
    return Matched(weights, effective, sum(areas) / len(areas), p)


class _Side(NamedTuple):
    """One class: training rows and rows from the place of use, one below the other.

    Attributes:
        points: features of both, [a + b, D].
        here: 0 for a training row, 1 for one from the place of use, [a + b].
        unit: who or what a row is of, [a + b].
        fold: the same for all rows of a unit, [a + b].
    """

    points: Tensor
    here: Tensor
    unit: Tensor
    fold: Tensor

    def log_odds(self) -> Tensor:
        """Of the place of use, for each row by a regression on the other folds, [a + b]."""
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


def _codes(units: Tensor | None, rows: Tensor) -> Tensor:
    return rows if units is None else units[rows]
