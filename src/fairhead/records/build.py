"""Making `Records`: columns are collected, rows with missing values left out, classes agreed on, and all is checked."""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.records import Column, Records
from fairhead.records.columns import (
    Encoder,
    as_floats,
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
from fairhead.records.csv_files import NotPlain, Source
from fairhead.records.layout import Layout, bin_names

Mask = NDArray[np.bool_]


class Options(NamedTuple):
    """What the user may say about the columns; see `Records.read`."""

    classes: Sequence[Any] | None = None
    positive: Any = None
    threshold: float | str | None = None  # "median": above the median
    drop_missing: bool = False


def collect(table: Source, layout: Layout, options: Options) -> Records:
    """The records in a file or a data frame."""
    draft, kept = _draft(table, layout)
    return build(replace(draft, provenance=table.provenance()), options, layout, kept)


def _draft(
    source: Source, layout: Layout, as_text: Collection[str] = (), careful: bool = False
) -> tuple[Records, Mask | None]:
    """A draft of the records, for `build`, and the rows that meet the condition, if there is one."""
    # Of the columns that only a condition names, any may be a measurement.
    encoders = {name: Encoder(f"column {name!r}", max_levels=None) for name in layout.classes}
    encoders |= {name: Encoder(f"column {name!r}") for name in layout.groups if name not in layout.bins}
    if layout.label is not None:
        encoders[layout.label] = Encoder(f"label {layout.label!r}")
    if layout.prediction is not None:
        encoders[layout.prediction] = Encoder(f"prediction {layout.prediction!r}")
    numbers: dict[str, list[NDArray[np.float64]]] = {name: [] for name in layout.numbers}
    ids: dict[str, list[NDArray[Any]]] = {name: [] for name in layout.ids}
    with warnings.catch_warnings():
        # A column of ids that is part number, part text: dealt with below.
        warnings.simplefilter("ignore", pd.errors.DtypeWarning)
        rows = 0
        try:
            for chunk in source.chunks(layout, as_text, careful):
                for name, encoder in encoders.items():
                    encoder.add(chunk[name])
                for name, values in numbers.items():
                    values.append(as_floats(chunk[name], f"column {name!r}", before=rows))
                for name, values in ids.items():
                    values.append(np.asarray(chunk[name]))
                rows += len(chunk[layout.columns[0]])
        except NotPlain:
            return _draft(source, layout, as_text, careful=True)
    if source.text_only:
        # A column that looked like numbers at first and is text after all: "007" must not have become 7 on the way.
        mixed = {name for name, chunks in ids.items() if not {values.dtype.kind for values in chunks} <= {"i", "u"}}
        mixed |= {name for name, encoder in encoders.items() if encoder.is_mixed()}
        if not mixed <= set(as_text):
            return _draft(source, layout, mixed | set(as_text), careful)
    coded = {name: encoder.finish(source.text_only) for name, encoder in encoders.items()}
    found = {name: _joined(values, float) for name, values in numbers.items()}
    keys = {name: _joined(values, object) for name, values in ids.items()}
    coded |= {name: _in_bins(found[name], edges) for name, edges in layout.bins.items()}
    tables = [found[name][:, None] for name in layout.score]
    scores = None if not tables else tables[0] if len(tables) == 1 else np.hstack(tables)
    draft = Records(
        label=Column(np.zeros(rows, dtype=np.int8), ("a number",)) if layout.label is None else coded[layout.label],
        prediction=None if layout.prediction is None else coded[layout.prediction],
        scores=None if layout.label is None else scores,
        groups={name: coded[name] for name in layout.groups},
        id=None if layout.id is None else keys[layout.id],
        cluster=None if layout.cluster is None else _coded(keys[layout.cluster], layout.cluster),
        weight=None if layout.weight is None else found[layout.weight],
        numbers=scores if layout.label is None else None,
    )
    if layout.where is None:
        return draft, None
    asked = {n: coded[n] if n in encoders else _coded((found | keys)[n], n) for n in layout.where.columns}
    return draft, layout.where.rows(asked)


def _joined(chunks: list[NDArray[Any]], empty: type) -> NDArray[Any]:
    if {chunk.dtype.kind for chunk in chunks} == {"i", "u"}:
        # numpy would make floats of these, which cannot tell large integers apart.
        chunks = [chunk.astype(object) for chunk in chunks]
    return np.concatenate(chunks) if chunks else np.zeros(0, dtype=empty)


def _in_bins(values: NDArray[np.float64], edges: Sequence[float]) -> Column:
    """Numbers of shape [n] as the groups between edges; groups without a row are left out."""
    codes = np.where(np.isnan(values), -1, np.searchsorted(edges, values, side="right"))
    return _used(Column(codes, bin_names(edges)))


def _coded(values: NDArray[Any], name: str) -> Column:
    """Clusters may be as many as rows, so integers take a way without Python objects."""
    if values.dtype.kind in "iu":
        levels, codes = np.unique(values, return_inverse=True)
        return Column(codes.astype(np.int32), tuple(levels.tolist()))
    encoder = Encoder(f"cluster {name!r}", max_levels=None)
    encoder.add(values)
    return encoder.finish()


def _used(column: Column) -> Column:
    """The same without the levels that no row has."""
    used = np.bincount(column.codes[column.codes >= 0], minlength=len(column.levels)) > 0
    new = np.append(np.cumsum(used) - 1, -1).astype(column.codes.dtype)  # a row without a group stays one
    return Column(new[column.codes], tuple(level for level, u in zip(column.levels, used, strict=True) if u))


def build(draft: Records, options: Options, layout: Layout | None = None, kept: Mask | None = None) -> Records:
    """Check the columns of a draft against each other and make the records.

    Args:
        draft: the columns as they were found, missing values included; its scores have the shape [n, k]: of the
            positive class (k = 1), or of every class in order.
        options: what the user says about the columns.
        layout: of the table that they are from; None for arrays.
        kept: the rows that meet the condition, shape [n]; None for all.
    """
    if draft.prediction is None and draft.scores is None and draft.numbers is None:
        raise InputError(
            "neither predictions nor scores are given; name one (--prediction or --score; prediction= or score=)"
        )
    masks = _missing(draft, layout)
    n = same_length({name: len(mask) for name, mask in masks.items()})
    told: dict[str, Any] = {"rows": n}
    if kept is not None:
        assert layout is not None
        assert layout.where is not None
        told |= {"where": layout.where.text, "rows_left_out": n - int(kept.sum())}
        if not kept.any():
            raise InputError(f"no row meets the condition {layout.where.text!r}")
        # Rows keep their numbers until all is checked: messages show them.
        masks = {name: mask & kept for name, mask in masks.items()}
    _check_numbers(draft, options, layout, kept)
    groups = [_group(name, layout) for name in draft.groups]
    keep, missing = missing_rows(masks, groups, options.drop_missing)
    if missing:
        told |= {"rows_dropped": 0 if keep is None else n - int(keep.sum()), "missing": missing}
    if kept is not None:
        keep = kept if keep is None else kept & keep
    if keep is not None:
        draft = draft.take(keep)
        draft = replace(
            draft,
            label=_used(draft.label),
            prediction=None if draft.prediction is None else _used(draft.prediction),
            groups={name: _used(column) for name, column in draft.groups.items()},
            cluster=None if draft.cluster is None else _used(draft.cluster),
        )
    draft = replace(
        draft, provenance={**draft.provenance, **told, **({} if layout is None else {"columns": layout.used})}
    )
    return draft if draft.numbers is not None else _classified(draft, options, layout)


def _classified(draft: Records, options: Options, layout: Layout | None) -> Records:
    """The records among classes that label and prediction have in common, of two the positive one last."""
    names = _called("label", layout), _called("prediction", layout)
    found = classes_of(draft.label, draft.prediction, options.classes, names)
    told: dict[str, Any] = {}
    positive = options.positive
    if positive is None and options.classes is None and len(found) == 2 and isinstance(found[0], str):
        positive = known_positive(found)
        if positive is None:
            told["positive"] = f"{found[1]!r}, the last of two in the alphabet"
    classes = found
    if positive is not None:  # more than two classes become "not <positive>" and the positive one
        chosen = find_class(positive, found)
        rest = [c for c in found if c != chosen]
        classes = (rest[0] if len(rest) == 1 else f"not {chosen}", chosen)
    scores = None if draft.scores is None else _scores(draft.scores, found, classes, names[0])
    label = recode(draft.label, classes)
    if draft.prediction is not None:
        prediction = recode(draft.prediction, classes)
    else:
        assert draft.scores is not None
        assert scores is not None
        if draft.scores.shape[1] > 2:  # one positive class against the rest: whether its score is the highest
            prediction = recode(Column(draft.scores.argmax(axis=1), found), classes)
            told["prediction"] = "highest score"
        elif isinstance(options.threshold, str):
            middle = float(np.median(scores))
            prediction = (scores > middle).astype(label.dtype)
            told["prediction"] = f"score > median, {middle:g}"
        else:
            threshold = 0.5 if options.threshold is None else options.threshold
            prediction = (scores >= threshold).astype(label.dtype)
            told["prediction"] = f"score >= {threshold:g}"
    return replace(
        draft,
        label=Column(label, classes),
        prediction=Column(prediction, classes),
        scores=scores,
        provenance={**draft.provenance, **told},
    )


def _called(part: str, layout: Layout | None) -> str:
    """What messages call a column: "label 'y'" of a table, "label" of arrays."""
    return part if layout is None else f"{part} {getattr(layout, part)!r}"


def _group(name: str, layout: Layout | None) -> str:
    return f"{'group' if layout is None else 'column'} {name!r}"


def _score_names(table: NDArray[np.float64], layout: Layout | None) -> list[str]:
    if layout is None:
        return ["score"] if table.shape[1] == 1 else [f"score {j}" for j in range(table.shape[1])]
    return [f"{'score' if layout.label else 'column'} {name!r}" for name in layout.score]


def _missing(draft: Records, layout: Layout | None) -> dict[str, Mask]:
    """By the name of each column, which of its rows have no value."""
    masks = {} if draft.numbers is not None else {_called("label", layout): draft.label.codes < 0}
    if draft.prediction is not None:
        masks[_called("prediction", layout)] = draft.prediction.codes < 0
    table = draft.scores if draft.numbers is None else draft.numbers
    if table is not None:
        masks |= {name: np.isnan(table[:, j]) for j, name in enumerate(_score_names(table, layout))}
    masks |= {_group(name, layout): column.codes < 0 for name, column in draft.groups.items()}
    if draft.id is not None:
        masks[_called("id", layout)] = np.asarray(pd.isna(draft.id))
    if draft.cluster is not None:
        masks[_called("cluster", layout)] = draft.cluster.codes < 0
    if draft.weight is not None:
        masks[_called("weight", layout)] = np.isnan(draft.weight)
    return masks


def _check_numbers(draft: Records, options: Options, layout: Layout | None, kept: Mask | None) -> None:
    """Check scores, numbers and weights of the rows that are kept.

    Scores are probabilities, or with a threshold one score on whatever scale the threshold is on.
    """
    table, threshold = draft.scores if draft.numbers is None else draft.numbers, options.threshold
    if threshold is not None and draft.scores is None:
        raise InputError("a threshold is given but no score; name its column (--score; score=), or leave it out")
    if table is not None:
        names = _score_names(table, layout)
        table = table if kept is None else np.where(kept[:, None], table, np.nan)
        if draft.numbers is None and (threshold is None or table.shape[1] > 1):
            check_scores(table, names)
        elif np.isinf(table).any():
            raise InputError(f"{' or '.join(names)} holds an infinite value; expected numbers")
    if draft.scores is not None and table is not None:
        if isinstance(threshold, str) and threshold != "median":
            raise InputError(f"the threshold is {threshold!r}; expected a score or the word median")
        if isinstance(threshold, float | int) and not np.isnan(table).all():
            low, high = float(np.nanmin(table)), float(np.nanmax(table))
            if low >= 0 and high <= 1:
                low, high = 0.0, 1.0
            if not low <= threshold <= high:
                raise InputError(f"the threshold is {threshold:g}, but the scores run from {low:g} to {high:g}")
    if draft.weight is not None:
        weight = draft.weight if kept is None else np.where(kept, draft.weight, np.nan)
        check_weight(weight, _called("weight", layout))


def _scores(
    table: NDArray[np.float64], columns: tuple[Any, ...], classes: tuple[Any, ...], label: str
) -> NDArray[np.float64]:
    """Scores [n, k], one or one for each of `columns`, as `Records` has them: [n] for two classes, else [n, C]."""
    width = table.shape[1]
    if width not in ({1, len(columns)} if len(classes) == 2 else {len(columns)}):
        raise InputError(
            f"{width} score column{'' if width == 1 else 's'} for the {len(columns)} classes of {label} "
            f"({show(columns)}); expected one per class, in this order{', or one only' if len(classes) == 2 else ''}"
        )
    if len(classes) == 2:
        return np.ascontiguousarray(table[:, 0 if width == 1 else columns.index(classes[1])])
    return table


def in_classes(records: Records, name: str) -> Column:
    """The group column `name` as a column of the classes: other predictions, or another of several labels."""
    column = records.groups[name]
    # One class against the rest: then any other prediction is of the rest.
    if records.classes != (f"not {records.classes[-1]}", records.classes[-1]):
        classes_of(records.label, column, records.classes, ("the label", f"column {name!r}"))
    return Column(recode(column, records.classes), records.classes)
