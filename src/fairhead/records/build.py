"""The last step of making `Records`: missing rows out, classes agreed on, scores and weights checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.records import Column, Records
from fairhead.records.columns import (
    Coded,
    check_scores,
    check_weight,
    classes_of,
    find_class,
    known_positive,
    missing_rows,
    recode,
    same_length,
    show,
)
from fairhead.records.layout import Layout


@dataclass(frozen=True)
class Parts:
    """The columns as they were found, missing values included."""

    label: Coded | None  # true classes; None where the task is to predict numbers
    prediction: Coded | None = None  # predicted classes
    # Shape [n, k]: of the positive class (k = 1) or of every class in order; without labels the true and the predicted
    # number; NaN where missing
    scores: NDArray[np.float64] | None = None
    groups: Mapping[str, Coded] = field(default_factory=dict)  # sensitive columns
    id: NDArray[Any] | None = None  # shape [n]
    cluster: Coded | None = None  # what each row belongs to
    weight: NDArray[np.float64] | None = None  # shape [n], NaN where missing
    kept: NDArray[np.bool_] | None = None  # the rows that meet the condition, shape [n]; None for all


class Options(NamedTuple):
    """What the user may say about the columns; see `Records.read`."""

    classes: Sequence[Any] | None = None
    positive: Any = None
    threshold: float | str | None = None  # "median": above the median
    drop_missing: bool = False


class Names(NamedTuple):
    """What messages call the columns."""

    label: str
    prediction: str
    scores: tuple[str, ...]
    groups: Mapping[str, str]
    id: str
    cluster: str
    weight: str


def build(parts: Parts, options: Options, provenance: Mapping[str, Any], layout: Layout | None = None) -> Records:
    """Check the parts against each other and make the records."""
    names = _names(parts, layout)
    if parts.prediction is None and parts.scores is None:
        raise InputError(
            "neither predictions nor scores are given; name one (--prediction or --score; prediction= or score=)"
        )
    masks = _missing(parts, names)
    n = same_length({name: len(mask) for name, mask in masks.items()})
    dropped: dict[str, Any] = {}
    kept = parts.kept
    if kept is not None:
        assert layout is not None
        assert layout.where is not None
        dropped = {"where": layout.where.text, "rows_left_out": n - int(kept.sum())}
        if not kept.any():
            raise InputError(f"no row meets the condition {layout.where.text!r}")
        # Rows keep their numbers until all is checked: messages show them.
        masks = {name: mask & kept for name, mask in masks.items()}
    if parts.scores is not None:
        table = parts.scores if kept is None else np.where(kept[:, None], parts.scores, np.nan)
        if parts.label is not None:
            _check_scores(table, options, names)
        elif np.isinf(table).any():
            raise InputError(f"{' or '.join(names.scores)} holds an infinite value; numbers are expected")
    if parts.weight is not None:
        check_weight(parts.weight if kept is None else np.where(kept, parts.weight, np.nan), names.weight)
    keep, missing = missing_rows(masks, names.groups.values(), options.drop_missing)
    if missing:
        dropped |= {"rows_dropped": 0 if keep is None else n - int(keep.sum()), "missing": missing}
    if kept is not None:
        keep = kept if keep is None else kept & keep
    if keep is not None:
        parts = _take(parts, keep)
    provenance = {**provenance, "rows": n, **dropped, **({"columns": _used(layout)} if layout else {})}
    groups = {name: Column(coded.codes, coded.levels) for name, coded in parts.groups.items()}
    cluster = None if parts.cluster is None else Column(parts.cluster.codes, parts.cluster.levels)
    if parts.label is None:
        assert parts.scores is not None
        nothing = Column(np.zeros(len(parts.scores), dtype=np.int8), ("a number",))
        return Records(nothing, None, None, groups, parts.id, cluster, parts.weight, provenance, parts.scores)

    found = classes_of(parts.label, parts.prediction, options.classes, (names.label, names.prediction))
    positive = options.positive
    if positive is None and options.classes is None and len(found) == 2 and isinstance(found[0], str):
        positive = known_positive(found)
        if positive is None:
            provenance["positive"] = f"{found[1]!r}, the last of two in the alphabet"
    classes = _positive_last(found, positive)
    label = recode(parts.label, classes)
    scores = None if parts.scores is None else _scores(parts.scores, found, classes, names)
    rule: dict[str, str] = {}
    if parts.prediction is not None:
        prediction = recode(parts.prediction, classes)
    else:
        assert parts.scores is not None
        assert scores is not None
        if parts.scores.shape[1] > 2:  # one positive class against the rest: whether its score is the highest
            prediction = recode(Coded(parts.scores.argmax(axis=1), found), classes)
            rule = {"prediction": "highest score"}
        else:
            if isinstance(options.threshold, str):
                middle = float(np.median(scores))
                prediction = (scores > middle).astype(label.dtype)
                rule = {"prediction": f"score > median, {middle:g}"}
            else:
                threshold = 0.5 if options.threshold is None else options.threshold
                prediction = (scores >= threshold).astype(label.dtype)
                rule = {"prediction": f"score >= {threshold:g}"}
    return Records(
        label=Column(label, classes),
        prediction=Column(prediction, classes),
        scores=scores,
        groups=groups,
        id=parts.id,
        cluster=cluster,
        weight=parts.weight,
        provenance={**provenance, **rule},
    )


def _check_scores(scores: NDArray[np.float64], options: Options, names: Names) -> None:
    """Probabilities are expected, or with a threshold one score on whatever scale the threshold is on."""
    threshold = options.threshold
    if threshold is None or scores.shape[1] > 1:
        check_scores(scores, names.scores)
    elif np.isinf(scores).any():
        raise InputError(f"{names.scores[0]} holds an infinite value; numbers are expected")
    if isinstance(threshold, str) and threshold != "median":
        raise InputError(f"the threshold is {threshold!r}; a score or the word median is expected")
    if isinstance(threshold, float | int) and not np.isnan(scores).all():
        low, high = float(np.nanmin(scores)), float(np.nanmax(scores))
        if low >= 0 and high <= 1:
            low, high = 0.0, 1.0
        if not low <= threshold <= high:
            raise InputError(f"the threshold is {threshold:g}, but the scores run from {low:g} to {high:g}")


def _take(parts: Parts, keep: NDArray[np.bool_]) -> Parts:
    """The rows to keep; levels that only the other rows had are gone."""

    def take(coded: Coded) -> Coded:
        codes = coded.codes[keep]
        used = np.bincount(codes[codes >= 0], minlength=len(coded.levels)) > 0
        new = np.append(np.cumsum(used) - 1, -1).astype(codes.dtype)  # a row without a group stays one
        return Coded(new[codes], tuple(level for level, u in zip(coded.levels, used, strict=True) if u))

    return Parts(
        label=None if parts.label is None else take(parts.label),
        prediction=None if parts.prediction is None else take(parts.prediction),
        scores=None if parts.scores is None else parts.scores[keep],
        groups={name: take(coded) for name, coded in parts.groups.items()},
        id=None if parts.id is None else parts.id[keep],
        cluster=None if parts.cluster is None else take(parts.cluster),
        weight=None if parts.weight is None else parts.weight[keep],
    )


def _names(parts: Parts, layout: Layout | None) -> Names:
    """From a file: "column 'y' (label)"; from arrays: "label"."""
    width = 0 if parts.scores is None else parts.scores.shape[1]
    if layout is None:
        scores = ("score",) if width == 1 else tuple(f"score {j}" for j in range(width))
        groups = {name: f"group {name!r}" for name in parts.groups}
        return Names("label", "prediction", scores, groups, "id", "cluster", "weight")
    return Names(
        f"label {layout.label!r}",
        f"prediction {layout.prediction!r}",
        tuple(f"{'score' if layout.label else 'column'} {name!r}" for name in layout.score),
        {name: f"column {name!r}" for name in parts.groups},
        f"id {layout.id!r}",
        f"cluster {layout.cluster!r}",
        f"weight {layout.weight!r}",
    )


def _missing(parts: Parts, names: Names) -> dict[str, NDArray[np.bool_]]:
    """For each column, which of its rows have no value."""
    masks = {} if parts.label is None else {names.label: parts.label.is_missing()}
    if parts.prediction is not None:
        masks[names.prediction] = parts.prediction.is_missing()
    if parts.scores is not None:
        masks |= {name: np.isnan(parts.scores[:, j]) for j, name in enumerate(names.scores)}
    masks |= {names.groups[name]: coded.is_missing() for name, coded in parts.groups.items()}
    if parts.id is not None:
        masks[names.id] = np.asarray(pd.isna(parts.id))
    if parts.cluster is not None:
        masks[names.cluster] = parts.cluster.is_missing()
    if parts.weight is not None:
        masks[names.weight] = np.isnan(parts.weight)
    return masks


def _positive_last(classes: tuple[Any, ...], positive: Any) -> tuple[Any, ...]:
    """Two classes with the positive one last; more than two become "not <positive>" and the positive one."""
    if positive is None:
        return classes
    chosen = find_class(positive, classes)
    rest = [c for c in classes if c != chosen]
    return (rest[0] if len(rest) == 1 else f"not {chosen}", chosen)


def _scores(
    table: NDArray[np.float64], columns: tuple[Any, ...], classes: tuple[Any, ...], names: Names
) -> NDArray[np.float64]:
    """Scores [n, k] as `Records` holds them: [n] for two classes, [n, C] for more.

    Args:
        table: one column for the positive class, or one for each of `columns`.
        columns: the classes in sorted order, or in the order given by the user.
        classes: those of the records, the positive one last if there are two.
        names: for messages.
    """
    width = table.shape[1]
    if width not in ({1, len(columns)} if len(classes) == 2 else {len(columns)}):
        raise InputError(
            f"{width} score column{'' if width == 1 else 's'} for the {len(columns)} classes of {names.label} "
            f"({show(columns)}); one a class is expected, in this order{', or one only' if len(classes) == 2 else ''}"
        )
    if len(classes) == 2:
        return np.ascontiguousarray(table[:, 0 if width == 1 else columns.index(classes[1])])
    return table


def _used(layout: Layout) -> dict[str, Any]:
    """The column names by part, for provenance."""
    parts = {
        "label": layout.label,
        "prediction": layout.prediction,
        "score" if layout.label else "target and prediction": list(layout.score),
        "groups": list(layout.groups),
        "id": layout.id,
        "cluster": layout.cluster,
        "weight": layout.weight,
    }
    return {part: name for part, name in parts.items() if name}


def in_classes(records: Records, name: str) -> Column:
    """The group column `name` as a column of the classes: other predictions, or another of several labels."""
    column = records.groups[name]
    coded, label = Coded(column.codes, column.levels), Coded(records.label.codes, records.classes)
    # One class against the rest: then any other prediction is of the rest.
    if records.classes != (f"not {records.classes[-1]}", records.classes[-1]):
        classes_of(label, coded, records.classes, ("the label", f"column {name!r}"))
    return Column(recode(coded, records.classes), records.classes)
