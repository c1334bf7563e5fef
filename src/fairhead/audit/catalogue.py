"""The metrics by name, as data: which rates, how groups are compared, and how rates are put together.

The same idea goes by different formulas in different libraries; each formula has its own name here.

A metric of a user's own is a function of a group's counts, or a line of a file, `name = expression of counts`. Counts
are those of one class against the rest: `tp`, `fp`, `fn`, `tn`, and all rows `n` (weighted, where there are weights).
What the function returns is a rate of each group; the metric is the gap, largest minus smallest, with an interval like
any other. Its name begins with "own.".
"""

import ast
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.rates import RATES, Kind, Margins, rows_of_groups
from fairhead.errors import InputError, did_you_mean
from fairhead.store import reading

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

    def why_not(self, score_rates: Sequence[str], numbers: bool, several: bool) -> str | None:
        """Why it cannot be computed of rows with these rates of scores, of numbers, or of several labels each."""
        if self.numbers != numbers:
            return "is of predicted numbers (target=)" if self.numbers else "is of classes, not of numbers"
        of_one_label = self.compare in ("to_overall", "association") or self.name.startswith(("bias_", "aif360."))
        if several and of_one_label:
            return "is for one label a row"
        if not self.scores or {*self.rates} <= {*score_rates}:
            return None
        if not score_rates:
            return "needs scores, and the records have none"
        if {*self.rates} <= {"ECE", "Brier"}:
            return "needs probabilities, and the scores lie outside [0, 1]"
        return "is for one score of two classes, and not for comparisons"


def _figure(name: str, definition: str, rate: str, compare: Compare = "mean", **more: Any) -> Metric:
    return Metric(name, definition, 1.0, (rate,), compare, **more)


def _gap(name: str, definition: str, rates: str, compare: Compare = "spread", **more: Any) -> Metric:
    return Metric(name, definition, more.pop("ideal", 0.0), tuple(rates.split()), compare, **more)


_UNPRIVILEGED = "unprivileged − privileged (signed), all other groups pooled"
_ALIGNED = "more frequent in their group than overall"
_APART = "from the reference group's, in 20 bins"

_ALL = (
    _figure("accuracy", "share of rows predicted correctly", "accuracy", overall=True),
    _figure("worst_class_accuracy", "lowest recall over classes; no groups", "recall", "minimum", overall=True),
    _figure("AUC", "area under the ROC curve", "AUC", overall=True, scores=True),
    _gap("Brier", "mean squared error of the scores", "Brier", "mean", overall=True, scores=True),
    _gap("ECE", "calibration error, 15 bins of equal mass", "ECE", "mean", overall=True, scores=True),
    _gap("DP", "max − min of P(ŷ=1) over groups", "selection_rate"),
    _gap("EOp", "max − min of TPR over groups", "TPR"),
    _gap("EOd", "mean of the gaps of TPR and FPR (DAM's definition)", "TPR FPR"),
    _figure("impact_ratio", "min / max of P(ŷ=1); below 0.8 fails four-fifths", "selection_rate", "ratio"),
    _figure("worst_group_accuracy", "lowest accuracy over (label, group) cells", "recall", "minimum"),
    _figure("worst_attribute_accuracy", "lowest accuracy over groups", "accuracy", "minimum"),
    _figure("group_balanced_accuracy", "mean accuracy over (label, group) cells", "recall"),
    _figure("bias_conflicting_accuracy", f"accuracy on rows whose label is not {_ALIGNED}", "accuracy"),
    _figure("bias_aligned_accuracy", f"accuracy on rows whose label is {_ALIGNED}", "accuracy"),
    _gap("accuracy_gap", "max − min of accuracy over groups", "accuracy"),
    _gap("FPR_gap", "max − min of FPR over groups", "FPR"),
    _gap("precision_gap", "max − min of precision over groups", "precision"),
    _gap("NPV_gap", "max − min of the negative predictive value over groups", "NPV"),
    _gap("base_rate_gap", "max − min of P(y=1) over groups: the data, not the model", "base_rate", ideal=None),
    _gap("DP_pairwise", "mean over pairs of groups of the gap of P(ŷ=1)", "selection_rate", "pairwise"),
    _gap("EOp_pairwise", "mean over pairs of groups of the gap of TPR", "TPR", "pairwise"),
    _gap("EOd_pairwise", "mean over pairs of groups of the gaps of TPR and FPR", "TPR FPR", "pairwise"),
    _gap("cramers_v", "Cramér's V of prediction and group", "association", "association"),
    _gap("cramers_v_corrected", "V with Bergsma's correction of its bias", "association", "association"),
    _gap("cramers_v_excess", "V(ŷ, group) − V(y, group)", "association", "association"),
    _gap("AUC_gap", "max − min of AUC over groups", "AUC", scores=True),
    _gap("Brier_gap", "max − min of the Brier score over groups", "Brier", scores=True),
    _gap("ECE_gap", "max − min of ECE over groups", "ECE", scores=True),
    _gap(
        "ABROCA", "largest area between the ROC curve of a group and that of the reference group", "ABROCA", scores=True
    ),
    _gap(
        "score_distance",
        f"largest Wasserstein-1 distance of a group's scores {_APART}",
        "score_distance",
        scores=True,
        unit=False,
    ),
    _gap(
        "sufficiency_gap",
        "largest max − min over groups of P(y=1 | score), of 10 bins of equal mass",
        "sufficiency",
        scores=True,
    ),
    _gap("fairlearn.demographic_parity_difference", "as DP", "selection_rate"),
    _gap(
        "fairlearn.demographic_parity_difference_to_overall",
        "largest |P(ŷ=1 | g) − P(ŷ=1)|",
        "selection_rate",
        "to_overall",
    ),
    _figure("fairlearn.demographic_parity_ratio", "as impact_ratio", "selection_rate", "ratio"),
    _gap("fairlearn.equal_opportunity_difference", "as EOp", "TPR"),
    _figure("fairlearn.equal_opportunity_ratio", "min / max of TPR", "TPR", "ratio"),
    _gap("fairlearn.equalized_odds_difference", "larger of the gaps of TPR and FPR", "TPR FPR", combine="max"),
    _gap("fairlearn.equalized_odds_difference_mean", "as EOd", "TPR FPR"),
    _gap(
        "fairlearn.equalized_odds_difference_to_overall",
        "larger of the largest distances of TPR and FPR from the overall rate",
        "TPR FPR",
        "to_overall",
        combine="max",
    ),
    _gap(
        "fairlearn.equalized_odds_ratio",
        "smaller of min / max of TPR and of FPR",
        "TPR FPR",
        "ratio",
        ideal=1.0,
        combine="max",
    ),
    _gap("aif360.statistical_parity_difference", f"P(ŷ=1), {_UNPRIVILEGED}", "selection_rate", "signed"),
    _figure("aif360.disparate_impact", "P(ŷ=1), unprivileged / privileged", "selection_rate", "signed_ratio"),
    _gap("aif360.equal_opportunity_difference", f"TPR, {_UNPRIVILEGED}", "TPR", "signed"),
    _gap("aif360.average_odds_difference", f"mean of TPR and FPR, {_UNPRIVILEGED}", "TPR FPR", "signed"),
    _gap("aif360.average_abs_odds_difference", "mean of |ΔTPR| and |ΔFPR|, unprivileged against privileged", "TPR FPR"),
    *(
        made
        for name, definition, ideal in (
            ("mean_error", "mean of predicted − true number", 0.0),
            ("MAE", "mean absolute error", 0.0),
            ("RMSE", "square root of the mean squared error", 0.0),
            ("R2", "share of the variance that is explained", 1.0),
        )
        for made in (
            _gap(name, definition, name, "mean", ideal=ideal, overall=True, unit=False, numbers=True),
            _gap(f"{name}_gap", f"max − min of {name} over groups", name, unit=False, numbers=True),
        )
    ),
)

METRICS = {metric.name: metric for metric in _ALL}

# What the names of a user's own metrics begin with.
OWN = "own."
Chosen = Sequence[str | Metric | None] | str | Metric | None

# What an audit reports unless asked for other metrics; those on scores only where there are scores.
DEFAULT = (
    *("accuracy", "AUC", "ECE", "Brier", "DP", "EOp", "EOd", "impact_ratio", "worst_group_accuracy", "accuracy_gap"),
    *("fairlearn.equalized_odds_difference", "cramers_v_corrected", "AUC_gap", "ECE_gap"),
)


def choose_metrics(
    asked: Chosen, score_rates: Sequence[str], numbers: bool = False, several: bool = False
) -> list[Metric]:
    """The metrics asked for, with these rates of scores; an unknown name is an error that proposes the nearest one.

    Where numbers are predicted, and not classes, they are those of numbers; with several labels a row, those that need
    no table of one label against one prediction.
    """
    rows = score_rates, numbers, several
    chosen: list[Metric] = []
    for name in [asked] if asked is None or isinstance(asked, str | Metric) else asked:
        if isinstance(name, Metric):
            if numbers and not name.numbers:
                raise InputError(f"Metric {name.name.removeprefix(OWN)!r} is of classes, not of numbers.")
            chosen.append(name)
        elif name is None or name == "all":
            every = [METRICS[known] for known in (METRICS if name or numbers else DEFAULT)]
            chosen += [metric for metric in every if metric.why_not(*rows) is None]
        elif name.startswith(OWN):
            raise InputError(f"{name} is your own metric: pass the result of define_metric, or use --metrics-from")
        elif name not in METRICS:
            near = did_you_mean(name, list(METRICS))
            raise InputError(f"There is no metric {name!r}.{near} Known: {', '.join(METRICS)}.")
        elif why := METRICS[name].why_not(*rows):
            raise InputError(f"Metric {name!r} {why}.")
        else:
            chosen.append(METRICS[name])
    return list(dict.fromkeys(chosen))


class Counts(NamedTuple):
    """Counts of groups, arrays of one shape: of the sample, or of its bootstrap replicates."""

    tp: Array
    fp: Array
    fn: Array
    tn: Array
    n: Array

    @classmethod
    def of(cls, margins: Margins) -> "Counts":
        """Of each class against the rest."""
        tp = margins.hits
        fp, fn = margins.predicted - tp, margins.true - tp
        return cls(tp, fp, fn, margins.total - tp - fp - fn, margins.total + 0 * tp)


Function = Callable[[Counts], Array]
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS = {"min": np.minimum, "max": np.maximum, "abs": np.abs, "sqrt": np.sqrt}


def define_metric(name: str, function: Function | str, definition: str = "") -> Metric:
    """A metric of your own for `metrics=`; in results it is called "own." and its name.

    Args:
        name: letters, digits and _.
        function: from `Counts` to the rate of each group, or an expression of tp, fp, fn, tn and n with + - * / **,
            min, max, abs and sqrt, which is parsed and never run as code.
        definition: in words, for reports.

    Example:
        >>> from fairhead.records import Records
        >>> from fairhead.audit import audit
        >>> cost = define_metric("cost", "(5 * fn + fp) / n")
        >>> records = Records.from_arrays([1, 0] * 30, [1] * 30 + [0] * 30, groups={"g": ["a"] * 30 + ["b"] * 30})
        >>> found = audit(records, metrics=["DP", cost])
        >>> found["own.cost"].value, [row.rates["own.cost"].value for row in found.by_group]
        (2.0, [0.5, 2.5])
    """
    if not name.isidentifier():
        raise InputError(f"a metric is called {name!r}; expected letters, digits and _")
    text = function if isinstance(function, str) else definition or f"{name}, a function of counts"
    made = _parsed(function, name) if isinstance(function, str) else function

    def rate(margins: Margins) -> Array:
        counts = Counts.of(margins)
        with np.errstate(all="ignore"):  # an empty group has no rate
            found = np.asarray(made(counts), dtype=np.float64)
        if found.shape != counts.n.shape:
            shapes = f"returned the shape {list(found.shape)} for counts of the shape {list(counts.n.shape)}"
            raise InputError(f"the function of metric {name!r} {shapes}; expected one number per count")
        return np.where(np.isfinite(found), found, np.nan)

    full = f"{OWN}{name}"
    kind = Kind(rate, rows_of_groups, "rows", "positive", own=True)
    return Metric(full, f"max − min over groups of {definition or text}", 0.0, (full,), "spread", unit=False, kind=kind)


def read_metrics(path: str | PathLike[str]) -> list[Metric]:
    r"""The metrics of a file with one `name = expression` a line; # begins a remark.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "metrics.txt")
        >>> _ = path.write_text("miss_rate = fn / (tp + fn)  # 1 - TPR\n")
        >>> [metric.name for metric in read_metrics(path)]
        ['own.miss_rate']
    """
    with reading(path, "is not UTF-8 text"):
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    found: list[Metric] = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        name, sign, expression = (part.strip() for part in text.partition("="))
        if not text:
            continue
        if not sign:
            raise InputError(f"{path}: line {number} is {text!r}; expected name = expression of tp, fp, fn, tn, n")
        if f"{OWN}{name}" in (metric.name for metric in found):
            raise InputError(f"{path}: line {number} defines {name} again; give it another name")
        found.append(define_metric(name, expression))
    if not found:
        raise InputError(f"{path} has no metric; expected lines such as cost = (5 * fn + fp) / n")
    return found


def with_own(metrics: Iterable[Metric]) -> dict[str, Kind]:
    """All rates by name, those of a user's own metrics among them."""
    return RATES | {metric.name: metric.kind for metric in metrics if metric.kind is not None}


def _parsed(text: str, name: str) -> Function:
    """An expression as a function; only numbers, counts and the operations above may be in it."""
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        raise InputError(f"metric {name}: {text!r} is not an expression such as (5 * fn + fp) / n") from None

    def value(node: ast.AST, counts: Counts) -> Any:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return float(number)
            case ast.Name(id=known) if known in Counts._fields:
                return getattr(counts, known)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left, counts), value(right, counts))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(operand, counts))
            case ast.Call(func=ast.Name(id=called), args=given, keywords=[]) if called in _FUNCTIONS:
                return _FUNCTIONS[called](*(value(one, counts) for one in given))
        part = ast.unparse(node)
        near = did_you_mean(part, [*Counts._fields, *_FUNCTIONS])
        raise InputError(f"metric {name}: {part!r} is neither a number nor one of {', '.join(Counts._fields)}.{near}")

    # Tried once, so that what is wrong shows where it is written.
    try:
        with np.errstate(all="ignore"):
            value(tree, Counts(*(np.ones(1) for _ in Counts._fields)))
    except InputError:
        raise
    except (TypeError, ValueError, RecursionError, ArithmeticError) as error:
        raise InputError(f"metric {name}: {text!r} cannot be computed ({error})") from None
    return lambda counts: value(tree, counts) + 0 * counts.n
