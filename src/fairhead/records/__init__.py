"""The table that every verb reads or writes: one row an example.

Categorical columns are held as small integer codes, so that ten million rows fit in memory and every count
metric is a `bincount`. What counts as a number, a class or a missing value is said in `columns.py`; the
formats of files in `table_files.py`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Any, TypedDict, Unpack
from unicodedata import normalize

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairhead.errors import InputError

if TYPE_CHECKING:
    import pandas as pd


class TableColumns(TypedDict, total=False):
    """What may be said of a file or a data frame; `Records.read` documents each."""

    label: str | Sequence[str]  # several only for an audit
    prediction: str | Sequence[str] | None  # as many as labels; or two for `fairhead.compare`
    score: str | Sequence[str] | None
    groups: str | Sequence[str]
    id: str | None
    cluster: str | None
    weight: str | None
    classes: Sequence[Any] | None
    threshold: float | str | None
    drop_missing: bool
    where: str | None
    bins: Mapping[str, Sequence[float]] | None
    target: str | None
    encoding: str | None
    decimal: str | None


@dataclass(frozen=True)
class Column:
    """A categorical column."""

    codes: NDArray[np.integer]  # of shape [n] into `levels`; −1 where a row has no value: in records, a group alone
    levels: tuple[Any, ...]  # the distinct values; in records sorted, of two classes the positive one last

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: Any) -> "Column":
        """The chosen rows (indices, a mask or a slice), with the same levels."""
        return Column(self.codes[rows], self.levels)

    @cached_property
    def known(self) -> NDArray[np.bool_] | None:
        """The rows that have a value, shape [n]; None where all of them have one."""
        return None if np.min(self.codes, initial=0) >= 0 else np.asarray(self.codes >= 0)

    def complete(self) -> "Column":
        """Those rows alone."""
        return self if self.known is None else self.take(self.known)

    def values(self) -> NDArray[Any]:
        """The values themselves, shape [n]; None where there is none.

        Example:
            >>> Column(np.array([1, 0, 1]), ("no", "yes")).values().tolist()
            ['yes', 'no', 'yes']
        """
        levels = np.array(self.levels)
        if levels.dtype.kind not in "bif" or self.known is not None:
            levels = np.array([*self.levels, None], dtype=object)  # the last is that of code −1
        return levels[self.codes]


@dataclass(frozen=True)
class Records:
    """Labels, predictions and groups of n examples.

    Attributes:
        label: true classes. `label.levels` are the classes of the task and `prediction` has the same levels.
        prediction: predicted classes; computed from the scores if only scores are given.
        scores: probability of the positive class, shape [n] (binary), or of each class, shape [n, C].
        groups: sensitive columns by name, for auditing only; a row may lack some of its groups.
        id: a unique value per row, to join two sets of records.
        cluster: rows with the same value are resampled together (same document, same person).
        weight: non-negative sampling weights, shape [n].
        provenance: where the rows came from (path, sha256, rows read, rows dropped, ...).
        numbers: the true and the predicted number, shape [n, 2], for regression; `label` is then empty.
        labels: true and predicted columns by name, if a row can have several labels; `label` is then the first.

    Example:
        >>> records = Records.from_arrays(label=[1, 0, 1], prediction=[1, 0, 0], groups={"race": ["a", "b", "b"]})
        >>> len(records), records.classes, records.groups["race"].levels
        (3, (0, 1), ('a', 'b'))
    """

    label: Column
    prediction: Column | None = None
    scores: NDArray[np.float64] | None = None
    groups: Mapping[str, Column] = field(default_factory=dict)
    id: NDArray[Any] | None = None
    cluster: Column | None = None
    weight: NDArray[np.float64] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    numbers: NDArray[np.float64] | None = None
    labels: Mapping[str, tuple[Column, Column]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.label)

    def __repr__(self) -> str:
        told = "numbers" if self.numbers is not None else f"classes {', '.join(map(str, self.classes[:5]))}"
        groups = ", ".join(f"{name} ({len(column.levels)})" for name, column in self.groups.items())
        return f"Records of {len(self):,} rows: {told}; groups {groups or 'none'}"

    def _repr_html_(self) -> str:
        first = self.take(slice(5)).to_frame().to_html(index=False)  # which escapes what it holds
        return f"<p>{escape(repr(self))}</p>{first}"

    @property
    def classes(self) -> tuple[Any, ...]:
        """The classes of the task, sorted; for a binary task the last one is the positive class."""
        return self.label.levels

    @classmethod
    def from_arrays(
        cls,
        label: ArrayLike,
        prediction: ArrayLike | None = None,
        *,
        scores: ArrayLike | None = None,
        groups: Mapping[str, ArrayLike] | None = None,
        id: ArrayLike | None = None,
        cluster: ArrayLike | None = None,
        weight: ArrayLike | None = None,
        classes: Sequence[Any] | None = None,
        positive: Any = None,
        threshold: float | str | None = None,
        drop_missing: bool = False,
        provenance: Mapping[str, Any] | None = None,
    ) -> "Records":
        """Records from arrays or lists of n values; scores may also be those of every class in order, shape [n, C].

        Labels and predictions are integers, bools, whole floats or text. Groups are given by name. The other arguments
        are those of `read`.

        Example:
            >>> records = Records.from_arrays(["no", "yes", "no"], scores=[0.2, 0.7, 0.5], groups={"sex": "fmm"})
            Traceback (most recent call last):
            ...
            fairhead.errors.InputError: group 'sex' has shape []; expected one value per row, shape [n]
            >>> records = Records.from_arrays(["no", "yes", "no"], scores=[0.2, 0.7, 0.5], groups={"sex": list("fmm")})
            >>> records.prediction.values().tolist()
            ['no', 'yes', 'yes']
        """
        from fairhead.records.build import Options, build
        from fairhead.records.columns import MAX_LEVELS, Encoder, as_floats, one_dimensional

        def encode(values: ArrayLike, name: str, max_levels: int | None = MAX_LEVELS) -> Column:
            encoder = Encoder(name, max_levels)
            encoder.add(values)
            return encoder.finish()

        draft = cls(
            label=encode(label, "label"),
            prediction=None if prediction is None else encode(prediction, "prediction"),
            scores=None if scores is None else _score_table(scores),
            groups={name: encode(values, f"group {name!r}") for name, values in (groups or {}).items()},
            id=None if id is None else np.asarray(one_dimensional(id, "id")),
            cluster=None if cluster is None else encode(cluster, "cluster", None),
            weight=None if weight is None else as_floats(weight, "weight"),
            provenance=provenance or {},
        )
        return build(draft, Options(classes, positive, threshold, drop_missing))

    @classmethod
    def from_frame(cls, frame: Any, *, positive: Any = None, **columns: Unpack[TableColumns]) -> "Records":
        """Records from a data frame; `columns` are the arguments of `read`, but for the encoding and the decimal sign.

        Accepts pandas and polars frames, Arrow tables, a `datasets.Dataset`, and arrays or lists by column name.

        Example:
            >>> import pandas as pd
            >>> frame = pd.DataFrame({"y": [1, 0], "p": [0.9, 0.2], "race": ["a", "b"]})
            >>> Records.from_frame(frame, label="y", score="p", groups="race").prediction.values().tolist()
            [1, 0]
        """
        given: dict[str, Any] = {**columns}
        return cls.read(frame, positive=positive, **given)

    @classmethod
    def read(
        cls,
        path: str | PathLike[str],
        *,
        label: str = "label",
        prediction: str | None = None,
        score: str | Sequence[str] | None = None,
        groups: str | Sequence[str] = (),
        id: str | None = None,
        cluster: str | None = None,
        weight: str | None = None,
        classes: Sequence[Any] | None = None,
        positive: Any = None,
        threshold: float | str | None = None,
        drop_missing: bool = False,
        where: str | None = None,
        bins: Mapping[str, Sequence[float]] | None = None,
        target: str | None = None,
        encoding: str | None = None,
        decimal: str | None = None,
    ) -> "Records":
        r"""Records from a CSV, TSV, JSONL or Parquet file (the first three also as .gz, .bz2 or .xz), by its suffix.

        Only the named columns are kept, and the file is read in chunks. Without prediction, score and groups, the file
        must be one that `save` wrote.

        Args:
            path: the file, or "-" for CSV on standard input.
            label: column of the true classes.
            prediction: column of the predicted classes.
            score: column of the probability of the positive class, or one column for each class in order. Without
                `prediction`, the predictions are `score >= threshold`, or the class with the highest score.
            groups: one or more columns of sensitive attributes.
            id: column of unique values, to join two files.
            cluster: column of the document, person, ... that a row belongs to.
            weight: column of sampling weights.
            classes: all classes, in the order of the score columns, if the labels do not include all of them.
            positive: the positive class. The default is the class whose name says so (yes, true, 1, ...), otherwise the
                last in sorted order, which the audit then states. With more than two classes, that class against the
                rest.
            threshold: with one score (or two), scores of at least this value predict the positive class; by default
                0.5, for probabilities. With a threshold, a single score may have any scale. "median": above the median
                of the scores.
            drop_missing: drop rows with missing values; otherwise they raise an error that counts them. A row without a
                group stays: only figures by that column leave it out.
            where: a condition on rows, such as "age >= 18 and race in (White, Black)"; see `fairhead.records.where`.
                Rows that do not meet it, including those with missing values, are left out.
            bins: edges that turn a numeric group column into groups: {"age": [25, 45]} makes "under 25",
                "25 to under 45" and "45 and over".
            target: for regression, the column of the true numbers, instead of `label`; `prediction` is then the column
                of the predicted numbers.
            encoding: encoding of a text file, by default UTF-8; files from Windows are often cp1252.
            decimal: decimal separator of CSV and TSV files, "." (the default) or ",".

        Example:
            >>> import tempfile, pathlib
            >>> path = pathlib.Path(tempfile.mkdtemp(), "preds.csv")
            >>> _ = path.write_text("y,yhat,race\n1,1,a\n0,1,b\n")
            >>> records = Records.read(path, label="y", prediction="yhat", groups=["race"])
            >>> records.prediction.values().tolist(), records.provenance["rows"]
            ([1, 1], 2)
        """
        from fairhead.records.build import Options, collect
        from fairhead.records.layout import Layout
        from fairhead.records.table_files import open_source

        parts = label, prediction, score, groups, id, cluster, weight, where, bins, target
        with open_source(path, encoding, decimal) as table:
            layout = Layout.of(table.columns, table.name, *parts)
            return collect(table, layout, Options(classes, positive, threshold, drop_missing))

    def save(self, path: str | PathLike[str]) -> None:
        """Write all columns as CSV, TSV, JSONL or Parquet (by suffix; text also as .gz); `Records.read(path)` reads it.

        The columns are called id, label, prediction, score (or score:<class>), cluster, weight, and the groups keep
        their names. CSV does not distinguish the text "1" from the number; JSONL and Parquet do. The file is written
        completely or not at all.

        Example:
            >>> import tempfile, pathlib
            >>> path = pathlib.Path(tempfile.mkdtemp(), "records.csv")
            >>> Records.from_arrays([1, 0], [1, 1], groups={"race": ["a", "b"]}).save(path)
            >>> print(path.read_text(), end="")
            label,prediction,race
            1,1,a
            0,1,b
        """
        from fairhead.records.table_files import write

        write(self, path)

    def to_frame(self) -> "pd.DataFrame":
        """All columns as a pandas DataFrame, named as `save` names them.

        Example:
            >>> list(Records.from_arrays([1, 0], [1, 1], groups={"race": ["a", "b"]}).to_frame())
            ['label', 'prediction', 'race']
        """
        import pandas as pd

        columns: dict[str, Any] = {} if self.id is None else {"id": self.id}
        columns["label"] = self.label.values()
        if self.prediction is not None:
            columns["prediction"] = self.prediction.values()
        if self.scores is not None:
            if self.scores.ndim == 1:
                columns["score"] = self.scores
            else:
                columns |= {f"score:{c}": self.scores[:, j] for j, c in enumerate(self.classes)}
        if self.cluster is not None:
            columns["cluster"] = self.cluster.values()
        if self.weight is not None:
            columns["weight"] = self.weight
        taken = [n for n in self.groups if n in {"id", "label", "prediction", "cluster", "weight"} or n[:5] == "score"]
        if taken:
            raise InputError(
                f"the group {taken[0]!r} has the name of another column of a saved table; rename the group"
            )
        return pd.DataFrame(columns | {name: column.values() for name, column in self.groups.items()}, copy=False)

    def split_prediction(self, name: str) -> "tuple[Records, Records]":
        """Records in which a second column of predictions was read as the group `name`, as two to be compared."""
        from fairhead.records.build import in_classes

        both = self.with_known([name])
        groups = {key: column for key, column in both.groups.items() if key != name}
        # The scores belong to one of the two only.
        first = replace(both, groups=groups, scores=None)
        return first, replace(first, prediction=in_classes(both, name))

    def with_known(self, names: Iterable[str]) -> "Records":
        """The rows that have a value in all of these group columns; the others count as dropped."""
        known = [self.groups[name].known for name in names]
        masks = [mask for mask in known if mask is not None]
        if not masks:
            return self
        found = self.take(np.logical_and.reduce(masks))
        dropped = self.provenance.get("rows_dropped", 0) + len(self) - len(found)
        return replace(found, provenance={**self.provenance, "rows_dropped": dropped})

    def take(self, rows: Any) -> "Records":
        """The chosen rows (indices, a mask or a slice), with the same levels.

        Example:
            >>> records = Records.from_arrays([1, 0, 1], [1, 1, 0])
            >>> records.take([2, 0]).label.values().tolist()
            [1, 1]
        """
        return replace(
            self,
            label=self.label.take(rows),
            prediction=None if self.prediction is None else self.prediction.take(rows),
            scores=None if self.scores is None else self.scores[rows],
            numbers=None if self.numbers is None else self.numbers[rows],
            labels={name: (one.take(rows), other.take(rows)) for name, (one, other) in self.labels.items()},
            groups={name: column.take(rows) for name, column in self.groups.items()},
            id=None if self.id is None else self.id[rows],
            cluster=None if self.cluster is None else self.cluster.take(rows),
            weight=None if self.weight is None else self.weight[rows],
        )


def _score_table(scores: ArrayLike) -> NDArray[np.float64]:
    """Scores as shape [n, k]."""
    try:
        table = np.ma.filled(np.ma.asarray(scores, dtype=np.float64), np.nan)
    except (TypeError, ValueError):
        raise InputError("scores must be numbers of shape [n] or [n, C]") from None
    if table.ndim not in (1, 2):
        raise InputError(f"scores have shape {list(table.shape)}; expected [n] or [n, C]")
    return table[:, None] if table.ndim == 1 else table


def composed(value: Any) -> Any:
    r"""Text as Unicode composes it ("é" is one character) and on one line, as sentences need it; all else as it is.

    Example:
        >>> composed("e\u0301") == "\u00e9", composed("two\n  lines")
        (True, 'two lines')
    """
    odd = isinstance(value, str) and not (value.isascii() and value.isprintable())
    return re.sub(r"\s*[\n\r\t\v\f\x85\u2028\u2029]\s*", " ", normalize("NFC", value)) if odd else value


def keep_freed_memory() -> None:
    """Have glibc keep memory that is freed, for what is needed next.

    It gives arrays of more than 128 KiB back to the system, and getting fresh pages for the next ones takes a fifth of
    an audit and half of reading a CSV. That size grows, up to 32 MiB, with the largest array that was freed: so one is
    made and freed here. It is never touched and takes no memory.
    """
    np.empty(31 << 20, dtype=np.uint8)
