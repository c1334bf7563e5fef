"""The significance level, and p-values corrected over a family of tests."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

Correction = Literal["holm", "bh"]

# A finding is significant where its p, corrected over its family, is below this.
ALPHA = 0.05


def adjust(p: Sequence[float | None], correction: Correction = "holm") -> list[float | None]:
    """Correct p-values over a family; those that are None take no part.

    Args:
        p: one a test.
        correction: "holm" (no false finding in the family) or "bh" (Benjamini–Hochberg: share of false findings).

    Example:
        >>> adjust([0.01, 0.04, None])
        [0.02, 0.04, None]
        >>> adjust([0.01, 0.03, 0.04], "bh")
        [0.03, 0.04, 0.04]
    """
    tested = [i for i, value in enumerate(p) if value is not None]
    values = np.array([p[i] for i in tested], dtype=np.float64)
    order = np.argsort(values, kind="stable")
    m = len(values)
    if correction == "holm":
        steps = np.maximum.accumulate(values[order] * (m - np.arange(m)))
    else:
        steps = np.minimum.accumulate((values[order] * m / np.arange(1, m + 1))[::-1])[::-1]
    adjusted: list[float | None] = [None] * len(p)
    for i, step in zip(order, steps, strict=True):
        adjusted[tested[i]] = float(min(step, 1.0))
    return adjusted
