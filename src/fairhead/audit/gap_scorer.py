"""A gap as a scikit-learn scorer, for model selection and cross-validation."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fairhead.audit.catalogue import choose_metrics
from fairhead.audit.run_audit import audit
from fairhead.errors import InputError
from fairhead.records import Records

Scorer = Callable[[Any, Any, Any], float]


def scorer(metric: str, groups: Any, *, threshold: float | None = None, min_cell: int = 10) -> Scorer:
    """A function `scorer(estimator, X, y)` as scikit-learn's `scoring=` takes it: larger is better.

    Args:
        metric: a name in `fairhead.audit.METRICS`. The score is the metric itself where 1 is ideal (accuracies,
            ratios), and minus its distance from 0 where 0 is (gaps). It is NaN where the metric is undefined.
        groups: the name of a column of X; or a pandas Series or DataFrame with the index of X, so that models need not
            see the groups. Rows without a group are left out.
        threshold: by default the estimator's own predictions are judged; with a threshold, its probabilities of the
            last class are compared with it.
        min_cell: as in `audit`.

    Example:
        >>> import pandas as pd
        >>> X = pd.DataFrame({"x": [0, 1] * 40, "race": ["a"] * 40 + ["b"] * 40})
        >>> class Always:
        ...     def predict(self, X): return np.where(X["race"] == "a", X["x"], 1)
        >>> scorer("DP", "race")(Always(), X, X["x"])
        -0.5
    """
    (chosen,) = choose_metrics([metric], ("AUC", "ECE", "Brier"))
    if chosen.overall:
        raise InputError(f"Metric {metric!r} is not about groups; scikit-learn has scorers for it.")

    def score(estimator: Any, X: Any, y: Any) -> float:  # as scikit-learn calls it
        scores = None
        if threshold is not None or chosen.scores:
            scores = np.asarray(estimator.predict_proba(X))[:, 1]
        prediction = None if threshold is not None else np.asarray(estimator.predict(X))
        of_rows = _columns(groups, X)
        records = Records.from_arrays(
            np.asarray(y), prediction, scores=scores, groups=of_rows, threshold=threshold, drop_missing=True
        )
        found = audit(records, metrics=[metric], n_boot=100, min_cell=min_cell)
        values = [np.nan if e.value is None else e.value for e in found.estimates]
        # Of several group columns the worst counts.
        return min(value if chosen.ideal == 1 else -abs(value - (chosen.ideal or 0.0)) for value in values)

    return score


def _columns(groups: Any, X: Any) -> dict[str, Any]:
    """The groups of the rows of X, by column."""
    if isinstance(groups, str) or (isinstance(groups, Sequence) and all(isinstance(name, str) for name in groups)):
        names = [groups] if isinstance(groups, str) else list(groups)
        missing = [name for name in names if name not in X]
        if missing:
            raise InputError(
                f"X has no column {missing[0]!r}; name one of its columns, or give a Series with its index"
            )
        return {name: np.asarray(X[name]) for name in names}
    if not hasattr(groups, "loc") or not hasattr(X, "index"):
        raise InputError("groups are names of columns of X, or a pandas Series or DataFrame with the index of X")
    of_rows = groups.loc[X.index]
    if of_rows.ndim == 1:
        return {str(groups.name or "group"): of_rows.to_numpy()}
    return {str(name): of_rows[name].to_numpy() for name in of_rows}
