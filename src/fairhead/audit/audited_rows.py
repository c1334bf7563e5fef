"""Records as an audit reads them: codes of classes and groups, and two sets of records on the same rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.score_rates import SCORE_GAPS, Scores
from fairhead.errors import InputError, did_you_mean
from fairhead.records import Column, Records, TableColumns, composed
from fairhead.report.wording import CROSS
from fairhead.stats.clusters import cell_numbers

_IDS, _LEAST = 100, 10  # more groups than half of the rows are ids where none has ten rows
_CROSSED = 2_000  # groups of all intersections together: time and memory go with their pairs
COLUMNS = tuple(TableColumns.__annotations__)


def read_rows(data: Any, positive: Any, columns: Mapping[str, Any]) -> tuple[Records, Any]:
    """Records, or those of a file or a data frame; and the positive class, where they do not know it yet."""
    if isinstance(data, Records):
        if columns:
            raise InputError(f"{', '.join(columns)} are for files and data frames; the records have their columns")
        return data, positive
    for name in columns:
        if name not in COLUMNS:
            raise InputError(f"There is no option {name!r}.{did_you_mean(name, COLUMNS)}")
    if not isinstance(columns.get("label", ""), str):
        return read_labels(data, positive, columns), None
    return Records.read(data, positive=positive, **columns), None


def read_labels(data: Any, positive: Any, columns: Mapping[str, Any]) -> Records:
    """Records of several labels a row: as many columns of labels as of predictions, all with the same two classes."""
    from fairhead.records.build import in_classes  # here: it loads pandas, which an audit of arrays can do without
    from fairhead.records.layout import names_of

    labels, predictions, groups = (names_of(name, columns.get(name)) for name in ("label", "prediction", "groups"))
    if len(labels) != len(predictions):
        raise InputError(f"{len(labels)} labels and {len(predictions)} predictions are named; expected equal numbers")
    # Read as further columns of few values, so that all stay row by row.
    one = {"label": labels[0], "prediction": predictions[0], "groups": [*groups, *labels[1:], *predictions[1:]]}
    records, _ = read_rows(data, positive, {**columns, **one})
    if len(records.classes) != 2:
        raise InputError(f"several labels are true or not each; {labels[0]!r} has the classes {list(records.classes)}")
    records = records.with_known([*labels[1:], *predictions[1:]])
    assert records.prediction is not None
    both = {labels[0]: (records.label, records.prediction)}
    for name, said in zip(labels[1:], predictions[1:], strict=True):
        both[name] = in_classes(records, name), in_classes(records, said)
    kept = {name: column for name, column in records.groups.items() if name in groups}
    return replace(records, groups=kept, labels=both)


def read_both(a: Any, b: Any, positive: Any, columns: Mapping[str, Any]) -> tuple[Records, Records, Any]:
    """Two sets of predictions: two tables, or one with two columns of predictions."""
    prediction = columns.get("prediction")
    if b is None:
        if isinstance(prediction, str) or not isinstance(prediction, Sequence) or len(prediction) != 2:
            raise InputError("expected a second table, or prediction=(old, new) with two columns of the first")
        groups = columns.get("groups", ())
        groups = [*([groups] if isinstance(groups, str) else groups), prediction[1]]
        both, positive = read_rows(a, positive, {**columns, "prediction": prediction[0], "groups": groups})
        return *both.split_prediction(prediction[1]), positive
    known = [isinstance(side, Records) for side in (a, b)]
    # Records have their columns; beside them a table needs its own named.
    of = [columns if all(known) or not is_records else {} for is_records in known]
    first, second = (read_rows(side, positive, named)[0] for side, named in zip((a, b), of, strict=True))
    return first, second, positive if any(known) else None


@dataclass(frozen=True)
class View:
    """Records as the audit reads them: class codes of labels and predictions, with the positive class last."""

    label: NDArray[np.integer]  # shape [n]
    prediction: NDArray[np.integer]  # shape [n]
    classes: tuple[str, ...]  # their names
    scores: NDArray[np.float64] | None  # of the positive class, shape [n], or of each class, shape [n, C]
    weight: NDArray[np.float64] | None  # shape [n], or None
    cluster: NDArray[np.integer] | None  # shape [n], or None
    prediction_rule: str | None  # how predictions came from scores, where there was no prediction column
    numbers: NDArray[np.float64] | None = None  # true and predicted ones, shape [n, 2], where there are no classes
    # Of several labels a row: whether each is true, and whether it is predicted, both [n], by its name in `classes`
    labels: tuple[tuple[NDArray[np.integer], NDArray[np.integer]], ...] = ()

    @classmethod
    def of(cls, records: Records, positive: Any = None) -> "View":
        """Read records; `positive` as in `audit`."""
        if not len(records):
            raise InputError("There are no rows to audit.")
        cluster = None if records.cluster is None else records.cluster.codes
        if records.numbers is not None:
            codes = records.label.codes
            return cls(codes, codes, (), None, records.weight, cluster, None, records.numbers)
        if records.labels:
            both = tuple((label.codes, prediction.codes) for label, prediction in records.labels.values())
            return cls(*both[0], tuple(records.labels), None, records.weight, cluster, None, labels=both)
        levels = list(records.classes)
        if len(levels) < 2:
            raise InputError(f"Labels and predictions have one class only, {levels[0]!r}; at least two are needed.")
        label, scores = records.label.codes, records.scores
        rule = None
        if records.prediction is not None:
            prediction = records.prediction.codes
        elif scores is None:
            raise InputError("The records have neither predictions nor scores; one of them is needed.")
        elif scores.ndim == 1:
            prediction, rule = (scores >= 0.5).astype(np.int8), "score >= 0.5"
        else:
            prediction, rule = scores.argmax(axis=1), "highest score"
        if scores is not None and scores.ndim == 2 and len(levels) == 2:
            scores = scores[:, 1]
        names = tuple(str(level) for level in levels)
        if positive is not None:
            meant = composed(str(positive))
            if meant not in names:
                raise InputError(
                    f"The positive class {positive!r} is not among the classes {list(names)}."
                    f"{did_you_mean(meant, names)}"
                )
            c = names.index(meant)
            if len(names) > 2 or c == 0:
                label, prediction = (label == c).astype(np.int8), (prediction == c).astype(np.int8)
                if scores is not None:
                    scores = scores[:, c] if scores.ndim == 2 else 1 - scores
                names = (names[1] if len(names) == 2 else f"not {names[c]}", names[c])
        return cls(label, prediction, names, scores, records.weight, cluster, rule)

    def take(self, rows: NDArray[np.bool_] | None) -> "View":
        """Some of the rows, or with None all of them."""
        if rows is None:
            return self
        given = {"scores": self.scores, "weight": self.weight, "cluster": self.cluster, "numbers": self.numbers}
        some: dict[str, Any] = {name: None if values is None else values[rows] for name, values in given.items()}
        some["labels"] = tuple((label[rows], prediction[rows]) for label, prediction in self.labels)
        return replace(self, label=self.label[rows], prediction=self.prediction[rows], **some)

    @cached_property
    def score_rates(self) -> tuple[str, ...]:
        """What can be said about the scores: a score that is no probability has an order, but no calibration."""
        if self.scores is None:
            return ()
        return ("AUC", "ECE", "Brier") if self.scores.min() >= 0 and self.scores.max() <= 1 else ("AUC",)

    @property
    def score_gaps(self) -> tuple[str, ...]:
        """What can be said of how far the scores of groups are apart, of one score."""
        return tuple(SCORE_GAPS) if self.scores is not None and self.scores.ndim == 1 else ()

    @cached_property
    def ranked(self) -> Scores | None:
        """The scores, sorted when first needed."""
        return None if self.scores is None else Scores(self.label, self.scores, self.weight, self.cluster)


def group_columns(records: Records, group_by: str | Sequence[str] | None, intersections: bool) -> dict[str, Column]:
    """The group columns to audit, with their intersections ("race × gender") where asked for."""
    names = [group_by] if isinstance(group_by, str) else list(records.groups if group_by is None else group_by)
    for name in names:
        if name not in records.groups:
            known = list(records.groups)
            raise InputError(f"There is no group column {name!r}; there are {known}.{did_you_mean(name, known)}")
        if len(records.groups[name].levels) < 2:
            only = [str(level) for level in records.groups[name].levels]
            raise InputError(f"Group column {name!r} has one group only, {only}; a gap needs at least two.")
        many, long = len(records.groups[name].levels), max(map(str, records.groups[name].levels), key=len)
        if len(long) > 200:  # characters
            raise InputError(f"Group column {name!r} has texts ({len(long):,} characters: {long[:40]}…), not groups.")
        if many > max(_IDS, len(records) / 2) and np.bincount(records.groups[name].complete().codes).max() < _LEAST:
            raise InputError(
                f"Group column {name!r} has {many:,} groups in {len(records):,} rows, as ids have; name a column of "
                "groups, or make groups of its values first."
            )
    columns = {name: records.groups[name] for name in names}
    if intersections:
        crossed = [some for size in range(2, len(names) + 1) for some in combinations(names, size)]
        groups = sum(min(len(records), prod(len(columns[name].levels) for name in some)) for some in crossed)
        if groups > _CROSSED:
            raise InputError(
                f"{len(names)} group columns have {len(crossed)} combinations, of up to {groups:,} groups; at most "
                f"{_CROSSED:,} are audited at once: name fewer columns, or look for the worst combinations with slices."
            )
        columns |= {CROSS.join(some): cross([columns[name] for name in some]) for some in crossed}
    return columns


def cross(columns: Sequence[Column]) -> Column:
    """Every combination that occurs, as one column; a row that lacks one of the groups has none."""
    sizes = [len(column.levels) for column in columns]
    key = cell_numbers([column.codes for column in columns], sizes)
    for column in columns:
        key = key if column.known is None else np.where(column.known, key, prod(sizes))
    present = np.flatnonzero(np.bincount(key, minlength=prod(sizes) + 1)[:-1])
    number = np.full(prod(sizes) + 1, -1, dtype=np.int32)
    number[present] = np.arange(len(present))
    parts = np.unravel_index(present, sizes)
    names = tuple(
        CROSS.join(str(column.levels[part[i]]) for column, part in zip(columns, parts, strict=True))
        for i in range(len(present))
    )
    return Column(number[key], names)


def with_weight(records: Records) -> Records:
    """The rows whose weight is not 0: no figure rests on the others, so they are not counted either."""
    weight = records.weight
    return records if weight is None or (weight > 0).all() else records.take(weight > 0)


def one_group(n: int) -> Column:
    """All rows as one group."""
    return Column(np.zeros(n, dtype=np.int8), ("all",))


def reference_groups(given: Any, columns: Mapping[str, Column], rows: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    """The number of the reference group of each column: the one that is named, or the largest.

    Args:
        given: groups by column, {"race": "White"}; or one group or several, "White" or "race=White" each.
        columns: the group columns. Where one is named in a part of an intersection, its reference is that of the parts.
        rows: by group, label and prediction, [G, C, C], of the columns that have been counted.
    """
    groups = {name: [str(level) for level in column.levels] for name, column in columns.items() if CROSS not in name}
    chosen = {name: composed(str(group)) for name, group in given.items()} if isinstance(given, Mapping) else {}
    for text in () if isinstance(given, Mapping) else [given] if isinstance(given, str) else given or ():
        name, group = _reference(composed(str(text)), groups)
        if chosen.setdefault(name, group) != group:
            raise InputError(f"Column {name!r} has two reference groups, {chosen[name]!r} and {group!r}; name one.")
    chosen = {name: composed(str(group)) for name, group in chosen.items()}
    for name, group in chosen.items():
        if name not in groups or group not in groups[name]:
            have = f"column {name!r}, which has {groups[name]}" if name in groups else f"any of {list(groups)}"
            raise InputError(f"The reference group {group!r} is not in {have}.")
    sizes = {k: rows[k].sum(axis=(1, 2)) if k in rows else np.bincount(c.complete().codes) for k, c in columns.items()}
    found = {name: int(size.argmax()) for name, size in sizes.items()}
    found |= {name: groups[name].index(group) for name, group in chosen.items()}
    for name, column in columns.items():
        parts = name.split(CROSS)
        if len(parts) > 1 and any(part in chosen for part in parts):
            crossed = CROSS.join(groups[part][found[part]] for part in parts)
            found[name] = column.levels.index(crossed) if crossed in column.levels else found[name]
    return found


def _reference(text: str, groups: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """The column and the group that a text names: "White" where one column has it, or "race=White"."""
    having = [name for name, known in groups.items() if composed(text) in known]
    column, sign, group = text.partition("=")
    if not having and sign and column in groups:
        return column, group
    if len(having) == 1:
        return having[0], text
    every = [group for known in groups.values() for group in known]
    why = f"{' and '.join(having)} have it; say which, as {having[0]}={text}" if having else f"groups are {every}"
    raise InputError(f"The reference group is {text!r}, but {why}.{did_you_mean(text, every)}")


class Joined(NamedTuple):
    """Two sets of records with the same rows in the same order, and the rows that were in one only."""

    a: Records
    b: Records
    only_in_a: int
    only_in_b: int


def join(a: Records, b: Records) -> Joined:
    """Bring two sets of records to the same rows in the same order, with the same classes.

    Groups, clusters and weights are a's; where b has them too, they must be the same.
    """
    only_in_a = only_in_b = 0
    if (a.id is None) != (b.id is None):
        raise InputError("Only one of the two sets of records has ids; give both an id column, or neither.")
    if a.id is None or b.id is None:
        if len(a) != len(b):
            raise InputError(f"a has {len(a):,} rows, b {len(b):,}: join them on --id, or give --unpaired for samples.")
    else:
        a_ids, b_ids = _comparable(a.id, b.id)
        _refuse_duplicates(a.provenance.get("path", "a"), a_ids)
        _refuse_duplicates(b.provenance.get("path", "b"), b_ids)
        _, in_a, in_b = np.intersect1d(a_ids, b_ids, assume_unique=True, return_indices=True)
        if not len(in_a):
            raise InputError(f"No id is in both: the first of a is {a.id[0]}, the first of b is {b.id[0]}.")
        only_in_a, only_in_b = len(a) - len(in_a), len(b) - len(in_b)
        in_order = np.argsort(in_a)
        a, b = a.take(in_a[in_order]), b.take(in_b[in_order])
    _check_tasks(a, b)
    a, b = (_with_classes(side, _all_classes(a, b)) for side in (a, b))
    _refuse_differences(a, "label", a.label.codes != b.label.codes)
    if a.groups and b.groups and not set(a.groups) & set(b.groups):
        raise InputError(
            f"a has the group columns {', '.join(a.groups)} and b has {', '.join(b.groups)}: none is in both. Give "
            "both the columns to compare by, or b none, and a's are taken."
        )
    for name in [name for name in a.groups if name in b.groups]:
        _refuse_differences(a, f"group {name!r}", _differ(a.groups[name], b.groups[name]))
    if a.cluster is not None and b.cluster is not None:
        _refuse_differences(a, "cluster", _differ(a.cluster, b.cluster))
    if a.weight is not None and b.weight is not None:
        _refuse_differences(a, "weight", ~np.isclose(a.weight, b.weight, rtol=1e-6, atol=0.0))
    return Joined(a, replace(b, groups=a.groups, cluster=a.cluster, weight=a.weight), only_in_a, only_in_b)


def _check_tasks(a: Records, b: Records) -> None:
    """Numbers are compared with numbers, and several labels a row with the same labels; the true ones are the same."""
    tasks = [
        "numbers" if r.numbers is not None else f"labels {list(r.labels)}" if r.labels else "classes" for r in (a, b)
    ]
    if tasks[0] != tasks[1]:
        raise InputError(f"a predicts {tasks[0]} and b {tasks[1]}; both must predict the same")
    if a.numbers is not None and b.numbers is not None:
        _refuse_differences(a, "target", ~np.isclose(a.numbers[:, 0], b.numbers[:, 0], rtol=1e-9, atol=0.0))
    for name, (label, _) in a.labels.items():
        _refuse_differences(a, f"label {name!r}", _differ(label, b.labels[name][0]))


def _refuse_differences(a: Records, what: str, differ: NDArray[np.bool_]) -> None:
    different = np.flatnonzero(differ)
    if len(different):
        which = f"row {different[0] + 1}" if a.id is None else f"id {a.id[different[0]]}"
        raise InputError(
            f"{len(different)} of {len(a)} joined rows have another {what} in b than in a; the first has {which}. "
            "Both must be predictions for the same rows, which have the same labels, groups, clusters and weights."
        )


def _differ(a: Column, b: Column) -> NDArray[np.bool_]:
    """Rows with another value, [n]; 7 is "7", and no value is no other value."""
    codes = b.codes
    if a.levels != b.levels:  # of clusters there may be millions
        number = {str(level): code for code, level in enumerate(a.levels)}
        codes = np.array([number.get(str(level), len(a.levels)) for level in b.levels], dtype=np.int64)[codes]
    differ = a.codes != codes
    for column in (a, b):
        differ = differ if column.known is None else differ & column.known
    return np.asarray(differ)


def _comparable(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ids of one kind: 7 is "7" where others are text, and integers of different types stay exact."""
    if a.dtype.kind == b.dtype.kind and a.dtype.kind in "iu":
        return a, b
    from fairhead.records.columns import tidy_levels  # here: it loads pandas, which an audit of arrays can do without

    both = np.empty(len(a) + len(b), dtype=object)
    both[:] = tidy_levels([*a.tolist(), *b.tolist()])
    return both[: len(a)], both[len(a) :]


def _refuse_duplicates(where: str, ids: NDArray[Any]) -> None:
    values, first, counts = np.unique(ids, return_index=True, return_counts=True)
    if len(values) < len(ids):
        twice = int(np.argmin(np.where(counts > 1, first, len(ids))))
        raise InputError(
            f"Id {values[twice]} occurs {counts[twice]} times in {where} (ids that occur more than once: "
            f"{int((counts > 1).sum())}); a comparison needs one row per id."
        )


def _all_classes(a: Records, b: Records) -> tuple[Any, ...]:
    """The classes of a in a's order, so that its positive one stays last; sorted anew where b has others too."""
    more = [c for c in b.classes if c not in a.classes]
    classes = (*a.classes, *more)
    return tuple(sorted(classes)) if more and len({type(c) for c in classes}) == 1 else classes


def _with_classes(records: Records, classes: tuple[Any, ...]) -> Records:
    """Records in terms of other classes, in their order: labels, predictions and scores."""
    if records.classes == classes:
        return records

    def recode(column: Column) -> Column:
        number = np.array([classes.index(level) for level in column.levels], dtype=np.int32)
        return Column(number[column.codes], classes)

    scores = records.scores
    if scores is not None:
        if set(classes) != set(records.classes):
            raise InputError(
                f"The scores are for the classes {list(records.classes)}, but the other side has {list(classes)}; "
                "give both the same classes (classes=[...])."
            )
        # Of two classes the score is of the last one.
        scores = 1 - scores if scores.ndim == 1 else scores[:, [records.classes.index(c) for c in classes]]
    prediction = None if records.prediction is None else recode(records.prediction)
    return replace(records, label=recode(records.label), prediction=prediction, scores=scores)
