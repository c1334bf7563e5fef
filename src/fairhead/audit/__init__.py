"""From records to gaps with intervals. Imports no torch; nothing outside this folder computes a fairness metric."""

from fairhead.audit.results import Audit, Comparison, Difference, Estimate, GroupRow

__all__ = ["Audit", "Comparison", "Difference", "Estimate", "GroupRow"]
