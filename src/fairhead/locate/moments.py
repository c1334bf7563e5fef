"""First and second moments of heads by cell: sums, so that batches, processes and resumed runs simply add up."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError

Array = NDArray[np.float64]


class Pooled(NamedTuple):
    """Mean and covariance of every head over a mixture of cells.

    Attributes:
        mean: [L, H, d].
        covariance: [L, H, d, d], of the mixture (divided by n, not n − 1).
        n: rows behind it.
    """

    mean: Array
    covariance: Array
    n: int

    @property
    def second(self) -> Array:
        """Uncentred second moments, [L, H, d, d]."""
        return self.covariance + self.mean[..., :, None] * self.mean[..., None, :]


@dataclass
class HeadMoments:
    """Sums over rows by cell (a group and a class), for all heads. `a + b` is the moments of both.

    Attributes:
        count: rows in each cell, [C].
        first: sums of x, [C, L, H, d].
        second: sums of x xᵀ, [C, L, H, d, d].

    Example:
        >>> import numpy as np
        >>> x = np.random.default_rng(0).normal(size=(100, 2, 3, 4))       # rows, layers, heads, dimensions
        >>> cells = np.arange(100) % 2
        >>> halves = [HeadMoments.of(x[:60], cells[:60], 2), HeadMoments.of(x[60:], cells[60:], 2)]
        >>> whole = (halves[0] + halves[1]).pooled(by="rows")
        >>> np.allclose(whole.covariance[1, 2], np.cov(x[:, 1, 2].T, bias=True))
        True
    """

    count: NDArray[np.int64]
    first: Array
    second: Array

    @classmethod
    def empty(cls, n_cells: int, shape: Sequence[int]) -> "HeadMoments":
        """No rows yet; `shape` is (layers, heads, d)."""
        layers, heads, d = shape
        return cls(
            np.zeros(n_cells, dtype=np.int64),
            np.zeros((n_cells, layers, heads, d)),
            np.zeros((n_cells, layers, heads, d, d)),
        )

    @classmethod
    def of(cls, x: NDArray[np.floating], cells: NDArray[np.integer], n_cells: int) -> "HeadMoments":
        """The moments of rows x [n, L, H, d] in the given cells [n]."""
        moments = cls.empty(n_cells, x.shape[1:])
        moments.add(x, cells)
        return moments

    def add(self, x: NDArray[np.floating], cells: NDArray[np.integer]) -> None:
        """Count a batch in: x [B, L, H, d], cells [B]."""
        if len(cells) != len(x) or (len(cells) and not 0 <= cells.min() <= cells.max() < len(self.count)):
            raise InputError(
                f"{len(x)} rows came with {len(cells)} cells, from 0 to {len(self.count) - 1} expected: one a row"
            )
        for cell in np.unique(cells):
            rows = np.asarray(x[cells == cell], dtype=np.float64).transpose(1, 2, 3, 0)  # [L, H, d, b]
            self.count[cell] += rows.shape[-1]
            self.first[cell] += rows.sum(-1)
            self.second[cell] += rows @ rows.swapaxes(-1, -2)

    def __add__(self, other: "HeadMoments") -> "HeadMoments":
        if self.first.shape != other.first.shape:
            raise InputError(
                f"moments of shape {self.first.shape} and {other.first.shape} cannot be added: they come from "
                "different models or cells"
            )
        return HeadMoments(self.count + other.count, self.first + other.first, self.second + other.second)

    def pooled(self, by: str = "cells", cells: Sequence[int] | None = None) -> Pooled:
        """Mean and covariance over cells.

        Args:
            by: "cells" counts each cell the same, so that the larger group does not set the mean; "rows" each row.
            cells: a part of them; None for all that have rows.
        """
        chosen = np.flatnonzero(self.count) if cells is None else np.asarray(cells)
        if not len(chosen) or (self.count[chosen] == 0).any():
            raise InputError(f"there are no rows in some of the cells {chosen.tolist()}: {self.count.tolist()} rows")
        n = self.count[chosen]
        weight = (n / n.sum() if by == "rows" else np.full(len(chosen), 1 / len(chosen))) / n
        mean = np.tensordot(weight, self.first[chosen], 1)
        second = np.tensordot(weight, self.second[chosen], 1)
        return Pooled(mean, second - mean[..., :, None] * mean[..., None, :], int(n.sum()))

    def means(self) -> Array:
        """Mean of every cell, [C, L, H, d]; NaN where a cell has no rows."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.first / self.count[:, None, None, None]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the sums as safetensors."""
        from safetensors.numpy import save_file

        save_file({"count": self.count, "first": self.first, "second": self.second}, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "HeadMoments":
        """Read what `save` wrote."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            found = load_file(path)
            return cls(found["count"], found["first"], found["second"])
        except (OSError, SafetensorError, KeyError) as error:
            raise InputError(f"{Path(path)} does not hold the moments of heads: {error}") from None


def shrunk(covariance: Array, n: int) -> tuple[Array, float]:
    """A covariance that can be inverted though there are few rows: shrunk towards its mean variance, and how far.

    The amount is the oracle-approximating one of Chen, Wiesel, Eldar and Hero (2010), which needs only the covariance
    itself and n. Covariances [..., d, d] share no amount; the largest is returned.

    Example:
        >>> import numpy as np
        >>> few = np.random.default_rng(0).normal(size=(5, 8))
        >>> matrix, amount = shrunk(np.cov(few.T, bias=True), 5)
        >>> bool(np.linalg.eigvalsh(matrix)[0] > 0), amount > 0.2
        (True, True)
    """
    d = covariance.shape[-1]
    trace = np.trace(covariance, axis1=-2, axis2=-1)
    alpha = (covariance**2).mean((-1, -2))
    mu = trace / d
    with np.errstate(invalid="ignore", divide="ignore"):
        amount = np.where(alpha == mu**2 / d, 1.0, np.minimum(1.0, (alpha + mu**2) / ((n + 1.0) * (alpha - mu**2 / d))))
    identity = np.eye(d) * mu[..., None, None]
    matrix = (1 - amount)[..., None, None] * covariance + amount[..., None, None] * identity
    return matrix, float(np.max(amount))
