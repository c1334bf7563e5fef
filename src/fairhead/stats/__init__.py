"""Statistics that audits, benchmarks and the search for heads share. Imports no torch, and no other room."""

from fairhead.stats.outcome import (
    ALPHA,
    OUTCOMES,
    CalibrationPoint,
    Correction,
    Curves,
    Difference,
    Estimate,
    GroupCurve,
    GroupRow,
    Outcome,
    Span,
    adjust,
)

__all__ = [
    "ALPHA",
    "OUTCOMES",
    "CalibrationPoint",
    "Correction",
    "Curves",
    "Difference",
    "Estimate",
    "GroupCurve",
    "GroupRow",
    "Outcome",
    "Span",
    "adjust",
]
