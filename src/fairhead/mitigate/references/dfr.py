"""DFR, deep feature reweighting: a last layer fitted on group-balanced validation rows (Kirichenko et al., 2023).

It uses the attribute, of the validation rows only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fairhead.errors import InputError
from fairhead.mitigate.last_layer import features_of, find_head, set_head
from fairhead.mitigate.losses import cell_numbers
from fairhead.mitigate.priors import ListOf, LogUniform, Prior
from fairhead.mitigate.references import with_attributes
from fairhead.mitigate.training_job import Job
from fairhead.settings import Count, Positive

Array = NDArray[np.float64]


@dataclass(frozen=True)
class DFR:
    """Plain training, then an L1 logistic regression on the features of even (class, group) cells.

    Attributes:
        strengths: of the regression (scikit-learn's C), chosen on half of the validation rows by worst-cell accuracy.
        subsets: the last layer is the average over this many random even subsets.
    """

    uses_groups: ClassVar[bool] = True

    strengths: tuple[Positive, ...] = (1.0, 0.7, 0.3, 0.1, 0.07, 0.03, 0.01)
    subsets: Count = 20

    priors: ClassVar[Mapping[str, Prior]] = {"strengths": ListOf(LogUniform(-2, 0.5))}

    def train(self, job: Job) -> nn.Module:
        """Plain training, then the last layer."""
        job = with_attributes(job, self)
        model = job.build_model()
        job.fit("training", model)
        with job.timed("last layer"):
            head = find_head(model, job.validation)
            features = features_of(model, head, job.validation, job.plan.precision).double().numpy()
            labels = job.validation.labels.cpu()
            cells = cell_numbers(labels, job.groups_validation).numpy()
            weight, bias = self.last_layer(features, labels.numpy(), cells, seed=job.plan.seed)
            if len(weight) == 1:  # one direction tells two classes apart
                weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
            set_head(head, torch.tensor(weight), torch.tensor(bias))
        return model

    def last_layer(
        self, features: Array, labels: NDArray[np.int64], cells: NDArray[np.int64], seed: int = 0
    ) -> tuple[Array, Array]:
        """Weight [C or 1, D] and bias of the averaged regressions; features [n, D], labels and cells [n]."""
        from sklearn.preprocessing import StandardScaler

        rng = np.random.default_rng(seed)
        order = rng.permutation(len(labels))
        fitting, choosing = order[: len(order) // 2], order[len(order) // 2 :]
        scaler = StandardScaler().fit(features)
        scaled = scaler.transform(features)

        def fitted(rows: NDArray[np.int64], strength: float) -> Any:
            even = even_rows(cells[rows], rng)
            return _regression(strength).fit(scaled[rows][even], labels[rows][even])

        def worst(strength: float) -> float:
            hits = fitted(fitting, strength).predict(scaled[choosing]) == labels[choosing]
            return min(hits[cells[choosing] == cell].mean() for cell in np.unique(cells[choosing]))

        best = max(self.strengths, key=worst)
        every = np.arange(len(labels))
        parts = [_weights(fitted(every, best)) for _ in range(self.subsets)]
        weight = np.mean([part[0] for part in parts], 0) / scaler.scale_
        bias = np.mean([part[1] for part in parts], 0) - weight @ scaler.mean_
        return weight, bias


def even_rows(cells: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """As many random rows of every cell as the smallest has.

    Example:
        >>> even_rows(np.array([0, 0, 0, 1]), np.random.default_rng(0)).size
        2
    """
    sizes = np.bincount(cells)
    if (sizes == 0).any():
        raise InputError(
            f"DFR needs rows of every (class, group) cell in both halves of the validation set; cell "
            f"{int((sizes == 0).argmax())} has none: give more validation rows"
        )
    return np.concatenate([rng.permutation(np.flatnonzero(cells == cell))[: sizes.min()] for cell in range(len(sizes))])


def _regression(strength: float) -> Any:
    import sklearn
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    # The same penalty has two names; each release warns about, or overlooks, the other one.
    is_new = tuple(int(part) for part in sklearn.__version__.split(".")[:2]) >= (1, 8)
    penalty: dict[str, Any] = {"l1_ratio": 1.0} if is_new else {"penalty": "l1"}
    return OneVsRestClassifier(LogisticRegression(C=strength, solver="liblinear", random_state=0, **penalty))


def _weights(regression: Any) -> tuple[Array, Array]:
    """Weight [C or 1, D] and bias [C or 1] of a one-vs-rest regression."""
    parts = regression.estimators_
    return np.concatenate([p.coef_ for p in parts]), np.concatenate([p.intercept_ for p in parts])
