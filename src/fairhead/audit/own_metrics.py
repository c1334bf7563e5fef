"""Metrics of a user's own: a function of a group's counts, or a line of a file, `name = expression of counts`.

Counts are those of one class against the rest: true positives `tp`, false positives `fp`, false negatives `fn`, true
negatives `tn`, and all rows `n` (weighted, where there are weights). What the function returns is a rate of each group;
the metric is the gap, largest minus smallest, with an interval like any other. Its name begins with "own.".
"""

import ast
import operator
from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.catalogue import OWN, Metric
from fairhead.audit.metrics import Margins
from fairhead.audit.rates import RATES, Kind, rows_of_groups
from fairhead.errors import InputError, did_you_mean
from fairhead.store import reading

Array = NDArray[np.float64]


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
        raise InputError(f"a metric is called {name!r}; letters, digits and _ are expected")
    text = function if isinstance(function, str) else definition or f"{name}, a function of counts"
    made = _parsed(function, name) if isinstance(function, str) else function

    def rate(margins: Margins) -> Array:
        counts = Counts.of(margins)
        with np.errstate(all="ignore"):  # an empty group has no rate
            found = np.asarray(made(counts), dtype=np.float64)
        if found.shape != counts.n.shape:
            shapes = f"returned the shape {list(found.shape)} for counts of the shape {list(counts.n.shape)}"
            raise InputError(f"the function of metric {name!r} {shapes}; one number a count is expected")
        return np.where(np.isfinite(found), found, np.nan)

    full = f"{OWN}{name}"
    kind = Kind(rate, rows_of_groups, "rows", own=True)
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
            raise InputError(f"{path}: line {number} is {text!r}; name = expression of tp, fp, fn, tn, n is expected")
        if f"{OWN}{name}" in (metric.name for metric in found):
            raise InputError(f"{path}: line {number} defines {name} again; give it another name")
        found.append(define_metric(name, expression))
    if not found:
        raise InputError(f"{path} has no metric; lines such as cost = (5 * fn + fp) / n are expected")
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
