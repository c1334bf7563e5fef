"""From records to gaps with intervals. Imports no torch; nothing outside this folder computes a fairness metric."""

import sys
from types import ModuleType
from typing import Any

from fairhead.audit.audit_results import Audit, Comparison, GroupRow
from fairhead.audit.catalogue import METRICS, Metric
from fairhead.audit.comparison import compare
from fairhead.audit.run_audit import audit
from fairhead.stats import Difference, Estimate

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
]


class _CallableModule(ModuleType):
    """`fairhead.audit` is the package and, for its users, a verb: `fairhead.audit(records)`.

    Importing any submodule binds the package to the name `audit` in `fairhead`, whatever was bound there before. With a
    package that can be called, both readings of the name work in every order of imports.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Audit:
        return audit(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
