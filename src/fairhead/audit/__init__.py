"""From records to gaps with intervals. Imports no torch; nothing outside this folder computes a fairness metric."""

from fairhead import make_verb
from fairhead.audit.audit_results import Audit, Comparison
from fairhead.audit.catalogue import METRICS, Metric, define_metric
from fairhead.audit.comparison import compare, drift
from fairhead.audit.run_audit import audit, scorer
from fairhead.audit.slices import worst_slices
from fairhead.stats import Difference, Estimate, GroupRow

__all__ = [
    "METRICS",
    "Audit",
    "Comparison",
    "Difference",
    "Estimate",
    "GroupRow",
    "Metric",
    "audit",
    "compare",
    "define_metric",
    "drift",
    "scorer",
    "worst_slices",
]

make_verb(__name__)
