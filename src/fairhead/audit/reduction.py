"""How stacked group rates become one number: over groups, then over rates, then over classes."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fairhead.audit import metrics
from fairhead.audit.catalogue import Metric
from fairhead.stats.clusters import divide

Array = NDArray[np.float64]
Multiclass = Literal["max", "mean", "weighted"]


@dataclass(frozen=True)
class Reduction:
    """A metric as a function of rates [..., R, C, G]: R kinds of rate, C classes, G groups; cells left out are NaN.

    Attributes:
        metric: what to compute.
        multiclass: how classes are put together: the worst one, their mean, or weighted.
        weights: weight of each class, shape [C].
        followed: the class whose signed difference is reported, where "max" would let signs cancel.
    """

    metric: Metric
    multiclass: Multiclass
    weights: Array
    followed: int = 0

    def __call__(self, rates: Array) -> Array:
        """The metric: [..., R, C, G] to [...]."""
        match self.metric.compare:
            case "minimum":
                return np.fmin.reduce(rates, axis=(-1, -2, -3))
            case "mean" if rates.shape[-3:] == (1, 1, 1):
                return rates[..., 0, 0, 0]
            case "mean":
                every = (-1, -2, -3)
                return divide(np.nansum(rates, axis=every), (~np.isnan(rates)).sum(axis=every))
            case _:
                return self.over_classes(self.by_class(rates))

    def by_part(self, rates: Array) -> Array:
        """Compare groups: [..., R, C, G] to [..., R, C]."""
        match self.metric.compare:
            case "ratio":
                return metrics.ratio(rates)
            case "to_overall":
                return np.fmax.reduce(np.abs(rates[..., :-1] - rates[..., -1:]), axis=-1)
            case "signed":
                return rates[..., 0] - rates[..., 1]
            case "signed_ratio":
                return divide(rates[..., 0], rates[..., 1])
            case _:
                return metrics.spread(rates)

    def by_class(self, rates: Array) -> Array:
        """Put the kinds of rate together: [..., R, C, G] to [..., C]."""
        parts = self.by_part(rates)
        if parts.shape[-2] == 1:
            return parts[..., 0, :]
        if self.metric.combine == "mean":
            return parts.mean(axis=-2)
        return parts.min(axis=-2) if self.metric.compare == "ratio" else parts.max(axis=-2)

    def over_classes(self, by_class: Array) -> Array:
        """Put classes together, [..., C] to [...]; those without a value count neither in an extreme nor in a mean."""
        if by_class.shape[-1] == 1:
            return by_class[..., 0]
        if self.multiclass != "max":
            weights = np.where(np.isnan(by_class), 0.0, self.weights if self.multiclass == "weighted" else 1.0)
            return divide(np.nansum(by_class * weights, axis=-1), weights.sum(axis=-1))
        if self.metric.compare in ("signed", "signed_ratio"):
            return by_class[..., self.followed]
        extreme = np.fmin if self.metric.compare == "ratio" else np.fmax
        return extreme.reduce(by_class, axis=-1)

    def gap_of_logarithms(self, log_rates: Array) -> Array:
        """For a ratio that is an extreme over rates and classes: minus its logarithm, from logarithms of the rates."""
        return np.fmax.reduce(metrics.spread(log_rates), axis=(-1, -2))
