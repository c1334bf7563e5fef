"""The calibration error by its definition, row by row: what an audit's is held against."""

import numpy as np


def calibration_error(positive, score, weight=None, bins=15):
    """Mean distance of hits from scores over bins of equal numbers of rows; equal scores share a bin."""
    mass = np.ones(len(score)) if weight is None else weight
    ranked = np.sort(score)
    at = np.searchsorted(ranked[np.arange(1, bins) * len(score) // bins], score, side="right")
    return sum(abs((mass * (positive - score))[at == k].sum()) for k in range(bins)) / mass.sum()
