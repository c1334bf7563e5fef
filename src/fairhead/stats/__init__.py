"""Statistics that audits, benchmarks and the search for heads share. Imports no torch, and no other room."""

from fairhead.stats.adjustment import ALPHA, Correction, adjust
from fairhead.stats.outcome import OUTCOMES, Difference, Estimate, Outcome, Span

__all__ = ["ALPHA", "OUTCOMES", "Correction", "Difference", "Estimate", "Outcome", "Span", "adjust"]
