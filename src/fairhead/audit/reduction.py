"""How stacked group rates become one number: over groups, then over rates, then over classes."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fairhead.audit import intervals, metrics
from fairhead.audit.catalogue import Metric

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
            case "mean":
                every = (-1, -2, -3)
                return metrics.divide(np.nansum(rates, axis=every), (~np.isnan(rates)).sum(axis=every))
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
                return metrics.divide(rates[..., 0], rates[..., 1])
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
            return metrics.divide(np.nansum(by_class * weights, axis=-1), weights.sum(axis=-1))
        if self.metric.compare in ("signed", "signed_ratio"):
            return by_class[..., self.followed]
        extreme = np.fmin if self.metric.compare == "ratio" else np.fmax
        return extreme.reduce(by_class, axis=-1)

    def gap_of_logarithms(self, log_rates: Array) -> Array:
        """For a ratio that is an extreme over rates and classes: minus its logarithm, from logarithms of the rates."""
        return np.fmax.reduce(metrics.spread(log_rates), axis=(-1, -2))

    def towards(self, hat: Array, star: Array) -> intervals.Towards | None:
        """For `intervals.gap`: the rates nearest to `hat` [R, C, G] with a smaller gap.

        Gaps that are averaged give way in proportion to their noise, and those of which the largest counts give way
        when they are above it. None where plain scaling has to do.
        """
        width = metrics.spread(hat)  # [R, C]
        if self.metric.compare == "to_overall":
            return None
        averaged_rates = self.metric.combine == "mean" and width.shape[0] > 1
        averaged_classes = self.multiclass != "max" and width.shape[1] > 1
        if self.metric.compare == "ratio" or not (averaged_rates or averaged_classes):
            return lambda theta: intervals.narrow(hat, np.maximum(width - theta, 0.0))
        if self.metric.combine == "max" and width.shape[0] > 1:
            return None
        usable = np.maximum((~np.isnan(hat)).sum(axis=-1), 1)
        noise = np.maximum(np.nansum(np.var(star, axis=0), axis=-1) / usable, 1e-300)
        share = np.full(width.shape, 1.0 / width.shape[0])
        pools: list[tuple[slice, int | slice]] = [(slice(None), c) for c in range(width.shape[1])]
        if averaged_classes:
            weights = self.weights if self.multiclass == "weighted" else np.ones(width.shape[1])
            weights = np.where(np.isnan(width).any(axis=0), 0.0, weights)
            share = share * weights / weights.sum()
            pools = [(slice(None), slice(None))]
        curves = [_give_way(width[pool].ravel(), noise[pool].ravel(), share[pool].ravel()) for pool in pools]

        def rates_at(theta: float) -> Array:
            cut = np.empty(width.shape)
            for pool, (values, steps) in zip(pools, curves, strict=True):
                cut[pool] = np.interp(theta, values, steps) * noise[pool]
            return intervals.narrow(hat, cut)

        return rates_at


def _give_way(width: Array, noise: Array, share: Array) -> tuple[Array, Array]:
    """Knots (values ascending, steps s) of the broken line Σ share·max(0, width − s·noise)."""
    kept = ~np.isnan(width) & (share > 0)
    width, noise, share = width[kept], noise[kept], share[kept]
    if not len(width):
        return np.zeros(1), np.zeros(1)
    steps = np.sort(np.append(width / noise, 0.0))
    values = (share * np.maximum(0.0, width - steps[:, None] * noise)).sum(axis=1)
    return values[::-1], steps[::-1]
