"""What readers return. Sensitive attributes travel apart from what training sees.

`Dataset.examples(split)` is all that training code is given: inputs and labels, and no way back to a group. The groups
stay in `Dataset.attributes` and meet the predictions again in `Dataset.records`, for the audit.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairhead.data.images import Images
from fairhead.errors import InputError, check_known, did_you_mean
from fairhead.records import Column, Records, composed
from fairhead.records.columns import known_positive

T = TypeVar("T")
# Where more rows than these have all the same text, it is no input: it stands in for features that are found by id.
_STAND_IN = 10


class TextPair(NamedTuple):
    """Two texts that are read together, as in natural language inference."""

    premise: str
    hypothesis: str


Inputs = Images | tuple[str, ...] | tuple[TextPair, ...]


@dataclass(frozen=True)
class Examples:
    """What training sees: inputs and labels, and no group."""

    ids: NDArray[np.str_]  # one distinct string per row, shape [n]; says nothing about groups
    inputs: Inputs  # n images (decoded when asked for), texts or text pairs
    labels: NDArray[np.int64]  # integers into `classes`, shape [n]
    classes: tuple[str, ...]  # names of the classes; of two, the last one is the positive class
    numbered: bool = False  # whether the ids are made up: row numbers, from 1

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: ArrayLike) -> "Examples":
        """The rows at these positions."""
        chosen = np.asarray(rows, dtype=np.intp)
        inputs = self.inputs
        taken = inputs.take(chosen) if isinstance(inputs, Images) else tuple(inputs[i] for i in chosen)
        return Examples(self.ids[chosen], taken, self.labels[chosen], self.classes, self.numbered)


@dataclass(frozen=True)
class Attributes:
    """Group columns by id, for auditing only."""

    ids: NDArray[np.str_]  # as in `Examples`, shape [n]
    columns: Mapping[str, Column]  # group columns by name, n rows each
    cluster: Column | None = None  # rows that belong together (the same person, the same premise), or None

    def rows(self, ids: ArrayLike) -> NDArray[np.intp]:
        """Positions of these ids."""
        position = {name: i for i, name in enumerate(self.ids.tolist())}
        wanted = np.asarray(ids).tolist()
        unknown = [name for name in wanted if name not in position]
        if unknown:
            raise InputError(f"{len(unknown)} ids are not in the data set; the first is {unknown[0]!r}")
        return np.array([position[name] for name in wanted], dtype=np.intp)


@dataclass(frozen=True)
class Dataset:
    """A classification data set.

    Example:
        >>> ids = np.array(["a", "b", "c"])
        >>> data = Dataset(
        ...     name="toy",
        ...     all=Examples(ids, ("x", "y", "z"), np.array([0, 1, 1]), ("no", "yes")),
        ...     split=np.array(["train", "train", "test"]),
        ...     attributes=Attributes(ids, {"race": column(["b", "w", "w"])}),
        ... )
        >>> data.examples("train").inputs, data.sizes
        (('x', 'y'), {'train': 2, 'test': 1})
        >>> data.groups(["c", "a"])["race"].codes.tolist()
        [1, 0]
    """

    name: str  # "utkface", "celeba", ...
    all: Examples  # every example, split or not; `examples(split)` is what training code should be handed
    split: NDArray[np.str_]  # the part of each row ("train", "val", "test", or the names its authors use), shape [n]
    attributes: Attributes  # the group columns, apart
    skipped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # what was left out: reason -> names
    provenance: Mapping[str, Any] = field(default_factory=dict)  # where the rows came from and which options made them

    @classmethod
    def of(
        cls,
        ids: ArrayLike,
        inputs: Inputs,
        label: Column,
        split: ArrayLike,
        groups: Mapping[str, Column],
        *,
        cluster: Column | None = None,
        skipped: Mapping[str, tuple[str, ...]],
        provenance: Mapping[str, Any],
    ) -> "Dataset":
        """The data set that a reader has read, called what its provenance says under "data"."""
        names, label = np.asarray(ids, dtype=np.str_), positive_last(label)
        numbered = provenance.get("id", "") is None  # a table without ids
        examples = Examples(names, inputs, label.codes.astype(np.int64), label.levels, numbered)
        parts, attributes = np.asarray(split, dtype=np.str_), Attributes(names, groups, cluster)
        return cls(str(provenance["data"]), examples, parts, attributes, skipped, provenance)

    def __post_init__(self) -> None:
        lengths = {len(self.all), len(self.split), len(self.attributes.ids), len(self.all.inputs), len(self.all.labels)}
        if len(lengths) > 1 or any(len(c) != len(self.all) for c in self.attributes.columns.values()):
            raise InputError(f"{self.name}: ids, inputs, labels, split and groups must have equally many rows")
        if len(set(self.all.ids.tolist())) != len(self.all):
            raise InputError(f"{self.name}: ids must be distinct")
        if not len(self.all):
            raise _nothing_left(self, "example")

    def __len__(self) -> int:
        return len(self.all)

    def __repr__(self) -> str:
        parts = ", ".join(f"{part} {count:,}" for part, count in self.sizes.items())
        groups = ", ".join(f"{name} ({len(c.levels)})" for name, c in self.attributes.columns.items())
        classes = f"{len(self.classes)} classes ({', '.join(map(str, self.classes[:5]))})"
        return f"Dataset {self.name!r} of {len(self):,} rows ({parts}): {classes}; groups {groups or 'none'}"

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.all.classes

    def need_labels(self) -> None:
        """Refuse rows without labels, which a model can answer but nothing can be learned or audited from."""
        if not self.classes:
            raise InputError(f"{self.name}: the rows have no labels (label none), which is for predict only")

    def with_classes(self, classes: tuple[str, ...]) -> "Dataset":
        """The same rows among more classes; rows without labels count as the first of them."""
        number = [classes.index(name) for name in self.classes] or [0]
        labels = np.array(number, dtype=np.int64)[self.all.labels]
        return replace(self, all=replace(self.all, labels=labels, classes=classes))

    @property
    def sizes(self) -> dict[str, int]:
        """Rows in each part of the split, in order of first appearance."""
        return dict(Counter(self.split.tolist()))

    @property
    def skipped_counts(self) -> dict[str, int]:
        """Reason -> how many were left out."""
        return {reason: len(names) for reason, names in self.skipped.items()}

    def examples(self, split: str) -> Examples:
        """Inputs and labels of one part: all that training may see."""
        rows = np.flatnonzero(self.split == split)
        if not len(rows):
            found = ", ".join(f"{part} ({size:,} rows)" for part, size in self.sizes.items())
            hint = did_you_mean(split, list(self.sizes))
            raise InputError(
                f"{self.name} has no {split!r} part, only {found}.{hint} Use more rows, or name a column of the parts "
                "train, val and test (--split; split=)"
            )
        return self.all.take(rows)

    def groups(self, ids: ArrayLike | None = None) -> dict[str, Column]:
        """Group columns of these ids, in their order (of all rows where none are given), for the audit."""
        rows = slice(None) if ids is None else self.attributes.rows(ids)
        return {name: c.take(rows) for name, c in self.attributes.columns.items()}

    def with_known_groups(self) -> "Dataset":
        """The data set without the rows that have no value in a group column."""
        known = [c.known for c in self.groups().values() if c.known is not None]
        if not known:
            return self
        rows, cluster = np.flatnonzero(np.logical_and.reduce(known)), self.attributes.cluster
        groups = {name: c.take(rows) for name, c in self.groups().items()}
        attributes = Attributes(self.all.ids[rows], groups, None if cluster is None else cluster.take(rows))
        return replace(self, all=self.all.take(rows), split=self.split[rows], attributes=attributes)

    def with_groups(self, columns: Mapping[str, Column]) -> "Dataset":
        """The data set with further group columns, n rows each, before those it has."""
        others = {name: c for name, c in self.attributes.columns.items() if name not in columns}
        return replace(self, attributes=replace(self.attributes, columns={**columns, **others}))

    def records(self, ids: ArrayLike, probabilities: ArrayLike) -> Records:
        """Join a model's answers for these ids, [n, C], with their labels and groups: what an audit reads."""
        rows = self.attributes.rows(ids)
        cluster, answers = self.attributes.cluster, np.asarray(probabilities)
        if answers.shape != (len(rows), len(self.classes)):
            wanted = [len(rows), len(self.classes)]
            raise InputError(f"probabilities have the shape {list(answers.shape)}; expected {wanted}")
        # Rounded as the mantissa of 32 bit is: more digits would only fill the disk.
        scores = np.round(answers.astype(np.float64), 7)
        return Records.from_arrays(
            Column(self.all.labels[rows], self.classes).values(),
            Column(answers.argmax(-1), self.classes).values(),
            scores=scores[:, 1] if len(self.classes) == 2 else scores,
            groups={name: column.values() for name, column in self.groups(ids).items()},
            id=self.all.ids[rows],
            cluster=None if cluster is None else cluster.take(rows).values(),
            classes=self.classes,
            drop_missing=bool(np.isfinite(scores).all()),  # of groups alone
            provenance=self.provenance,
        )


@dataclass(frozen=True)
class Items(Sequence[T], Generic[T]):
    """The items of a language benchmark."""

    name: str  # "stereoset", "bbq", ...
    items: tuple[T, ...]  # one dataclass per item
    skipped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # what was left out: reason -> names
    provenance: Mapping[str, Any] = field(default_factory=dict)  # where the items came from and which options made them

    def __post_init__(self) -> None:
        if not self.items:
            raise _nothing_left(self, "item")

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"Items {self.name!r}: {len(self):,}"

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self.items[index]

    @property
    def skipped_counts(self) -> dict[str, int]:
        """Reason -> how many were left out."""
        return {reason: len(names) for reason, names in self.skipped.items()}


def _nothing_left(data: "Dataset | Items[Any]", noun: str) -> InputError:
    where = f"{data.provenance['path']}: " if "path" in data.provenance else ""
    skipped = ", ".join(f"{count} {reason}" for reason, count in data.skipped_counts.items())
    return InputError(f"{where}{data.name} has no {noun} here; left out: {skipped or 'nothing, the files are empty'}")


def column(values: ArrayLike) -> Column:
    """Code values as a `Column`; whole numbers in the order of their size, as records have them.

    Example:
        >>> column(["w", "b", "w"])
        Column(codes=array([1, 0, 1], dtype=int32), levels=('b', 'w'))
        >>> column(["10", "9"]).levels
        ('9', '10')
    """
    levels, codes = np.unique(np.asarray(values), return_inverse=True)
    same, place = np.unique([composed(level) for level in levels.tolist()], return_inverse=True)
    found = Column(place[codes].astype(np.int32), tuple(same.tolist()))
    if same.dtype.kind == "U" and all(re.fullmatch(r"[+-]?\d+", level) for level in found.levels):
        return _reordered(found, tuple(sorted(found.levels, key=lambda level: (int(level), level))))
    return found


def positive_last(label: Column) -> Column:
    """Two classes with the positive one last, where their names say which that is; records have the same rule.

    Example:
        >>> positive_last(column(["ja", "nein"])).levels
        ('nein', 'ja')
    """
    classes = label.levels
    if len(classes) != 2 or known_positive(classes) != classes[0]:
        return label
    return _reordered(label, classes[::-1])


def _reordered(column: Column, levels: tuple[Any, ...]) -> Column:
    number = np.array([levels.index(level) for level in column.levels], dtype=np.int32)
    return Column(number[column.codes], levels)


def group_column(values: ArrayLike) -> Column:
    """Code groups as a `Column`; "" means that a row has no group.

    Example:
        >>> group_column(["w", "", "b"])
        Column(codes=array([ 1, -1,  0], dtype=int32), levels=('b', 'w'))
    """
    found = column(values)
    return Column(found.codes - 1, found.levels[1:]) if "" in found.levels else found


def yes_no(name: str, values: Sequence[bool] | NDArray[np.bool_]) -> Column:
    """A binary column with the levels `name` and `not name`, whether or not both occur.

    Example:
        >>> yes_no("White", [True, False])
        Column(codes=array([0, 1], dtype=int32), levels=('White', 'not White'))
    """
    levels = tuple(sorted((name, f"not {name}")))
    return Column(np.where(values, levels.index(name), levels.index(f"not {name}")).astype(np.int32), levels)


def choose(kind: str, wanted: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Check names that a caller picked; the error lists what there is."""
    if isinstance(wanted, str):
        wanted = (wanted,)
    for name in wanted:
        check_known(name, known, f"there is no {kind} {name!r}; there are")
    return tuple(wanted)


# Rows known by what they hold, whatever their ids and files are called: the same picture or text is the same row.


def digests_of(inputs: Any) -> list[str]:
    """A digest of each picture (the bytes of its file) or text."""
    if isinstance(inputs, Images):
        return inputs.digests()
    return [_digest(one if isinstance(one, str) else "\0".join(one)) for one in inputs]


def row_digests(examples: Examples) -> NDArray[np.str_]:
    """A digest of each row, [n]: of its input, and of its id as well where the input stands in for features."""
    found = digests_of(examples.inputs)
    alone = stand_ins(found)
    pairs = zip(examples.ids.tolist(), found, strict=True)
    return np.array([_digest(f"{name}\0{one}") if one in alone else one for name, one in pairs], dtype=np.str_)


def alike(inputs: Any) -> NDArray[np.intp]:
    """Where the first row with the same input is, [n]; rows whose input stands in for features are each their own.

    Example:
        >>> alike(["a", "b", "a"]).tolist()
        [0, 1, 0]
    """
    found: list[Any] = list(range(len(inputs)))
    if isinstance(inputs, Images):  # files of a length that no other has need not be read
        lengths = inputs.lengths()
        shared = Counter(lengths)
        rows = [row for row, length in enumerate(lengths) if shared[length] > 1]
        for row, one in zip(rows, inputs.take(rows).digests(), strict=True):
            found[row] = one
    else:
        found = digests_of(inputs)
    alone, first = stand_ins(found), dict[Any, int]()
    return np.array([row if one in alone else first.setdefault(one, row) for row, one in enumerate(found)], np.intp)


def stand_ins(digests: list[Any]) -> frozenset[Any]:
    """The input that stands in for features: where all of many rows have one and the same."""
    return frozenset(digests) if len({*digests}) == 1 and len(digests) > _STAND_IN else frozenset()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
