"""The metrics by name, as data: which rates, how groups are compared, and how rates are put together.

The same idea goes by different formulas in different libraries; each formula has its own name here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fairhead.audit import metrics
from fairhead.audit.rates import Kind
from fairhead.errors import InputError, did_you_mean
from fairhead.stats.clusters import divide

Array = NDArray[np.float64]
Multiclass = Literal["max", "mean", "weighted"]
Compare = Literal[
    "spread", "ratio", "to_overall", "signed", "signed_ratio", "minimum", "mean", "association", "pairwise"
]


@dataclass(frozen=True)
class Metric:
    """One metric."""

    name: str  # as in `Estimate.metric`
    definition: str  # its formula in words
    ideal: float | None  # the value of a perfectly even (or perfect) model
    rates: tuple[str, ...]  # the group rates it is made of, names in `rates.RATES`, or of scores
    # How groups are compared: largest minus smallest, smallest over largest, largest distance from the overall rate,
    # unprivileged minus (or over) privileged, the lowest, the mean, association, or the mean difference of all pairs
    compare: Compare
    combine: Literal["mean", "max"] = "mean"  # how several rates become one figure
    overall: bool = False  # the figure is about all rows, not about groups
    scores: bool = False  # it needs scores
    unit: bool = True  # its rates lie between 0 and 1, and so does a gap of them
    numbers: bool = False  # it is of predicted numbers, not of classes
    kind: Kind | None = None  # of a user's own: its rate, which goes by the name of the metric

    @property
    def of_one_label(self) -> bool:
        """Whether it needs one label and one prediction a row."""
        return self.compare in ("to_overall", "association") or self.name.startswith(("bias_", "aif360."))


_UNPRIVILEGED = "unprivileged − privileged (signed), all other groups pooled"

_ALL = (
    Metric("accuracy", "share of rows predicted correctly", 1.0, ("accuracy",), "mean", overall=True),
    Metric("worst_class_accuracy", "lowest recall over classes; no groups", 1.0, ("recall",), "minimum", overall=True),
    Metric("AUC", "area under the ROC curve", 1.0, ("AUC",), "mean", overall=True, scores=True),
    Metric("Brier", "mean squared error of the scores", 0.0, ("Brier",), "mean", overall=True, scores=True),
    Metric("ECE", "calibration error, 15 bins of equal mass", 0.0, ("ECE",), "mean", overall=True, scores=True),
    Metric("DP", "max − min of P(ŷ=1) over groups", 0.0, ("selection_rate",), "spread"),
    Metric("EOp", "max − min of TPR over groups", 0.0, ("TPR",), "spread"),
    Metric("EOd", "mean of the gaps of TPR and FPR (DAM's definition)", 0.0, ("TPR", "FPR"), "spread"),
    Metric("impact_ratio", "min / max of P(ŷ=1); below 0.8 fails four-fifths", 1.0, ("selection_rate",), "ratio"),
    Metric("worst_group_accuracy", "lowest accuracy over (label, group) cells", 1.0, ("recall",), "minimum"),
    Metric("worst_attribute_accuracy", "lowest accuracy over groups", 1.0, ("accuracy",), "minimum"),
    Metric("group_balanced_accuracy", "mean accuracy over (label, group) cells", 1.0, ("recall",), "mean"),
    Metric(
        "bias_conflicting_accuracy",
        "accuracy on rows whose label is not more frequent in their group than overall",
        1.0,
        ("accuracy",),
        "mean",
    ),
    Metric(
        "bias_aligned_accuracy",
        "accuracy on rows whose label is more frequent in their group than overall",
        1.0,
        ("accuracy",),
        "mean",
    ),
    Metric("accuracy_gap", "max − min of accuracy over groups", 0.0, ("accuracy",), "spread"),
    Metric("FPR_gap", "max − min of FPR over groups", 0.0, ("FPR",), "spread"),
    Metric("precision_gap", "max − min of precision over groups", 0.0, ("precision",), "spread"),
    Metric("NPV_gap", "max − min of the negative predictive value over groups", 0.0, ("NPV",), "spread"),
    Metric("base_rate_gap", "max − min of P(y=1) over groups: the data, not the model", None, ("base_rate",), "spread"),
    Metric("DP_pairwise", "mean over pairs of groups of the gap of P(ŷ=1)", 0.0, ("selection_rate",), "pairwise"),
    Metric("EOp_pairwise", "mean over pairs of groups of the gap of TPR", 0.0, ("TPR",), "pairwise"),
    Metric("EOd_pairwise", "mean over pairs of groups of the gaps of TPR and FPR", 0.0, ("TPR", "FPR"), "pairwise"),
    Metric("cramers_v", "Cramér's V of prediction and group", 0.0, ("association",), "association"),
    Metric("cramers_v_corrected", "V with Bergsma's correction of its bias", 0.0, ("association",), "association"),
    Metric("cramers_v_excess", "V(ŷ, group) − V(y, group)", 0.0, ("association",), "association"),
    Metric("AUC_gap", "max − min of AUC over groups", 0.0, ("AUC",), "spread", scores=True),
    Metric("Brier_gap", "max − min of the Brier score over groups", 0.0, ("Brier",), "spread", scores=True),
    Metric("ECE_gap", "max − min of ECE over groups", 0.0, ("ECE",), "spread", scores=True),
    Metric(
        "ABROCA",
        "largest area between the ROC curve of a group and that of the reference group",
        0.0,
        ("ABROCA",),
        "spread",
        scores=True,
    ),
    Metric(
        "score_distance",
        "largest Wasserstein-1 distance of a group's scores from the reference group's, in 20 bins",
        0.0,
        ("score_distance",),
        "spread",
        scores=True,
        unit=False,
    ),
    Metric(
        "sufficiency_gap",
        "largest max − min over groups of P(y=1 | score), of 10 bins of equal mass",
        0.0,
        ("sufficiency",),
        "spread",
        scores=True,
    ),
    Metric("fairlearn.demographic_parity_difference", "as DP", 0.0, ("selection_rate",), "spread"),
    Metric(
        "fairlearn.demographic_parity_difference_to_overall",
        "largest |P(ŷ=1 | g) − P(ŷ=1)|",
        0.0,
        ("selection_rate",),
        "to_overall",
    ),
    Metric("fairlearn.demographic_parity_ratio", "as impact_ratio", 1.0, ("selection_rate",), "ratio"),
    Metric("fairlearn.equal_opportunity_difference", "as EOp", 0.0, ("TPR",), "spread"),
    Metric("fairlearn.equal_opportunity_ratio", "min / max of TPR", 1.0, ("TPR",), "ratio"),
    Metric(
        "fairlearn.equalized_odds_difference", "larger of the gaps of TPR and FPR", 0.0, ("TPR", "FPR"), "spread", "max"
    ),
    Metric("fairlearn.equalized_odds_difference_mean", "as EOd", 0.0, ("TPR", "FPR"), "spread"),
    Metric(
        "fairlearn.equalized_odds_difference_to_overall",
        "larger of the largest distances of TPR and FPR from the overall rate",
        0.0,
        ("TPR", "FPR"),
        "to_overall",
        "max",
    ),
    Metric(
        "fairlearn.equalized_odds_ratio", "smaller of min / max of TPR and of FPR", 1.0, ("TPR", "FPR"), "ratio", "max"
    ),
    Metric("aif360.statistical_parity_difference", f"P(ŷ=1), {_UNPRIVILEGED}", 0.0, ("selection_rate",), "signed"),
    Metric("aif360.disparate_impact", "P(ŷ=1), unprivileged / privileged", 1.0, ("selection_rate",), "signed_ratio"),
    Metric("aif360.equal_opportunity_difference", f"TPR, {_UNPRIVILEGED}", 0.0, ("TPR",), "signed"),
    Metric("aif360.average_odds_difference", f"mean of TPR and FPR, {_UNPRIVILEGED}", 0.0, ("TPR", "FPR"), "signed"),
    Metric(
        "aif360.average_abs_odds_difference",
        "mean of |ΔTPR| and |ΔFPR|, unprivileged against privileged",
        0.0,
        ("TPR", "FPR"),
        "spread",
    ),
    *(
        made
        for name, definition, ideal in (
            ("mean_error", "mean of predicted − true number", 0.0),
            ("MAE", "mean absolute error", 0.0),
            ("RMSE", "square root of the mean squared error", 0.0),
            ("R2", "share of the variance that is explained", 1.0),
        )
        for made in (
            Metric(name, definition, ideal, (name,), "mean", overall=True, unit=False, numbers=True),
            Metric(f"{name}_gap", f"max − min of {name} over groups", 0.0, (name,), "spread", unit=False, numbers=True),
        )
    ),
)

METRICS = {metric.name: metric for metric in _ALL}

# What the names of a user's own metrics begin with.
OWN = "own."
Chosen = Sequence[str | Metric | None] | str | Metric | None

# What an audit reports unless asked for other metrics; those on scores only where there are scores.
DEFAULT = (
    "accuracy",
    "AUC",
    "ECE",
    "Brier",
    "DP",
    "EOp",
    "EOd",
    "impact_ratio",
    "worst_group_accuracy",
    "accuracy_gap",
    "fairlearn.equalized_odds_difference",
    "cramers_v_corrected",
    "AUC_gap",
    "ECE_gap",
)


def choose_metrics(
    asked: Chosen, score_rates: Sequence[str], numbers: bool = False, several: bool = False
) -> list[Metric]:
    """The metrics asked for, with these rates of scores; an unknown name is an error that proposes the nearest one.

    Where numbers are predicted, and not classes, they are those of numbers; with several labels a row, those that need
    no table of one label against one prediction.
    """
    chosen: list[Metric] = []
    for name in [asked] if asked is None or isinstance(asked, str | Metric) else asked:
        if name is None or name == "all":
            every = [METRICS[known] for known in (METRICS if name or numbers else DEFAULT)]
            every = [metric for metric in every if metric.numbers == numbers and not (several and metric.of_one_label)]
            chosen += [metric for metric in every if not metric.scores or {*metric.rates} <= {*score_rates}]
            continue
        if isinstance(name, Metric):
            chosen.append(name)
            continue
        if name.startswith(OWN):
            raise InputError(f"{name} is a metric of your own: give what define_metric returned, or --metrics-from")
        if name not in METRICS:
            raise InputError(
                f"There is no metric {name!r}.{did_you_mean(name, list(METRICS))} Known: {', '.join(METRICS)}."
            )
        if METRICS[name].numbers != numbers:
            why = "is of predicted numbers (target=)" if METRICS[name].numbers else "is of classes, not of numbers"
            raise InputError(f"Metric {name!r} {why}.")
        if several and METRICS[name].of_one_label:
            raise InputError(f"Metric {name!r} is for one label a row.")
        if METRICS[name].scores and not {*METRICS[name].rates} <= {*score_rates}:
            if not score_rates:
                why = "needs scores, and the records have none"
            elif {*METRICS[name].rates} <= {"ECE", "Brier"}:
                why = "needs probabilities, and the scores lie outside [0, 1]"
            else:
                why = "is for one score of two classes, and not for comparisons"
            raise InputError(f"Metric {name!r} {why}.")
        chosen.append(METRICS[name])
    return list(dict.fromkeys(chosen))


@dataclass(frozen=True)
class Reduction:
    """A metric as a function of rates [..., R, C, G]: R kinds of rate, C classes, G groups; cells left out are NaN."""

    metric: Metric  # what to compute
    multiclass: Multiclass  # how classes are put together: the worst one, their mean, or weighted
    weights: Array  # weight of each class, shape [C]
    followed: int = 0  # the class whose signed difference is reported, where "max" would let signs cancel

    def __call__(self, rates: Array) -> Array:
        """The metric: [..., R, C, G] to [...]."""
        match self.metric.compare:
            case "minimum":
                return np.fmin.reduce(rates, axis=(-1, -2, -3))
            case "mean" if rates.shape[-3:] == (1, 1, 1):
                return rates[..., 0, 0, 0]
            case "mean":
                every = (-1, -2, -3)
                return divide(np.nansum(rates, axis=every), (~np.isnan(rates)).sum(axis=every))
            case _:
                return self.over_classes(self.by_class(rates))

    def by_part(self, rates: Array) -> Array:
        """Compare groups: [..., R, C, G] to [..., R, C]."""
        match self.metric.compare:
            case "ratio":
                return metrics.ratio(rates)
            case "to_overall":
                return np.fmax.reduce(np.abs(rates[..., :-1] - rates[..., -1:]), axis=-1)
            case "pairwise":
                return metrics.mean_pairwise(rates)
            case "signed":
                return rates[..., 0] - rates[..., 1]
            case "signed_ratio":
                return divide(rates[..., 0], rates[..., 1])
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
            return divide(np.nansum(by_class * weights, axis=-1), weights.sum(axis=-1))
        if self.metric.compare in ("signed", "signed_ratio"):
            return by_class[..., self.followed]
        extreme = np.fmin if self.metric.compare == "ratio" else np.fmax
        return extreme.reduce(by_class, axis=-1)

    def gap_of_logarithms(self, log_rates: Array) -> Array:
        """For a ratio that is an extreme over rates and classes: minus its logarithm, from logarithms of the rates."""
        return np.fmax.reduce(metrics.spread(log_rates), axis=(-1, -2))


def table_metrics(counts: Array, names: Sequence[str], min_cell: int = 10) -> dict[str, Array]:
    """Metrics as an audit defines them, of tables that all have the same rows.

    Args:
        counts: rows by group, label and prediction, [S, G, C, C]. Tables may differ in the predictions alone.
        names: metrics of counts: accuracy, gaps, worst groups, associations.
        min_cell: a rate of fewer rows is undefined.

    Returns:
        By name, [S]; NaN where a table leaves a metric undefined.
    """
    n = int(counts[0].sum())
    margins = metrics.Margins.of(counts)
    recall = margins.true_positive_rate()
    rates = {
        "selection_rate": margins.selection_rate(),
        "TPR": recall,
        "FPR": margins.false_positive_rate(),
        "recall": recall,
    }
    # The rows behind each rate are those of the labels, the same in every table.
    true = counts[0].sum(-1).T  # [C, G]
    total = true.sum(0)
    rows = {"selection_rate": total + 0 * true, "TPR": true, "recall": true, "FPR": total - true}
    found = {}
    for name in names:
        metric = METRICS[name]
        if name == "accuracy":
            found[name] = metrics.Margins.of(metrics.pooled(counts)).accuracy()[..., 0, 0]
        elif metric.compare == "association":
            found[name] = metrics.association_value(name, counts, n)
        else:
            stacked = np.stack([np.where(rows[r] >= min_cell, rates[r], np.nan) for r in metric.rates], axis=1)
            if counts.shape[-1] == 2 and metric.compare != "minimum":
                stacked = stacked[..., 1:, :]  # of two classes the positive one
            found[name] = Reduction(metric, "max", np.ones(stacked.shape[-2]))(stacked)
    return found
