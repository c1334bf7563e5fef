"""Which column of a table plays which part, which rows count, what columns are called; groups joined from a file."""

import csv
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fairhead.errors import InputError, did_you_mean
from fairhead.records import Column, composed
from fairhead.records.where import Where
from fairhead.store import reading


def names_of(option: str, given: Any) -> tuple[str, ...]:
    """The columns that an option names: one, several or none.

    Example:
        >>> names_of("groups", "sex"), names_of("groups", None)
        (('sex',), ())
    """
    names = (given,) if isinstance(given, str) else () if given is None else given
    names = tuple(names) if isinstance(names, Iterable) else (None,)
    if not all(isinstance(name, str) for name in names):
        shown = repr(given) if isinstance(given, int | float | list | tuple | bytes) else f"a {type(given).__name__}"
        raise InputError(f"{option} is {shown}; expected the name of a column, or a list of names")
    return names


@dataclass(frozen=True)
class Layout:
    """Which column of a table plays which part; see `Records.read` for what each one is."""

    label: str | None  # None where the task is to predict numbers: `score` then holds the true and the predicted one
    prediction: str | None = None
    score: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    id: str | None = None
    cluster: str | None = None
    weight: str | None = None
    where: Where | None = None
    bins: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # the edges of group columns of numbers

    @classmethod
    def of(
        cls,
        columns: Sequence[str],
        table: str,
        label: str,
        prediction: str | None,
        score: str | Sequence[str] | None,
        groups: str | Sequence[str],
        id: str | None,
        cluster: str | None,
        weight: str | None,
        where: str | None,
        bins: Mapping[str, Sequence[float]] | None,
        target: str | None,
    ) -> "Layout":
        """What a user says about a table with these columns; where they say nothing, `Records.save` wrote it."""
        scores = (score,) if isinstance(score, str) else tuple(score or ())
        groups = tuple(dict.fromkeys(names_of("groups", groups)))
        if target is not None:
            if prediction is None or scores:
                raise InputError(f"the target {target!r} needs a column of predicted numbers, and no score")
            found = cls(None, None, (target, prediction), groups, id, cluster, weight)
        elif prediction is None and not scores and not groups:
            if label not in columns:
                raise InputError(
                    f"{table} is not a table that fairhead wrote: it has no column {label!r}. Name its columns "
                    "(--label, --prediction or --score, --group; in Python label=, prediction= or score=, groups=): "
                    f"{', '.join(map(str, columns))}"
                )
            scores = tuple(name for name in columns if name == "score" or name.startswith("score:"))
            roles: dict[str, Any] = {
                role: role for role in ("prediction", "id", "cluster", "weight") if role in columns
            }
            others = (name for name in columns if name not in {label, "label", *roles, *scores})
            found = cls(label, score=scores, groups=tuple(others), **roles)
        else:
            found = cls(label, prediction, scores, groups, id, cluster, weight)
        if not isinstance(bins, Mapping | None):
            raise InputError(f"bins is {bins!r}; expected the edges of each column, such as {{'age': [25, 45]}}")
        edges = {name: _edges(name, given, found.groups) for name, given in (bins or {}).items()}
        found = replace(found, where=None if where is None else Where.parse(where), bins=edges)
        for name in (*found.columns, *(found.where.columns if found.where else ())):
            find_column(name, columns, table)
        return found

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns needed, each once."""
        return tuple(dict.fromkeys([*self.classes, *self.numbers, *self.ids]))

    @property
    def numbers(self) -> tuple[str, ...]:
        """Columns that are read as numbers."""
        return tuple(name for name in (*self.score, self.weight, *self.bins) if name is not None)

    @property
    def ids(self) -> tuple[str, ...]:
        """Columns that may have as many values as rows."""
        return tuple(name for name in (self.id, self.cluster) if name is not None)

    @property
    def classes(self) -> tuple[str, ...]:
        """Columns of a few values each, and those of the condition on rows that play no other part."""
        groups = [name for name in self.groups if name not in self.bins]
        parts = tuple(name for name in (self.label, self.prediction, *groups) if name is not None)
        asked = () if self.where is None else self.where.columns
        return parts + tuple(name for name in asked if name not in (*parts, *self.numbers, *self.ids))

    @property
    def used(self) -> dict[str, Any]:
        """The names of columns by their part, for provenance."""
        parts = {
            "label": self.label,
            "prediction": self.prediction,
            "score" if self.label else "target and prediction": list(self.score),
            "groups": list(self.groups),
            "id": self.id,
            "cluster": self.cluster,
            "weight": self.weight,
        }
        return {part: name for part, name in parts.items() if name}


def _edges(name: str, given: Sequence[float], groups: Sequence[str]) -> tuple[float, ...]:
    edges = tuple(given) if isinstance(given, Iterable) else (given,)
    if not edges or not all(isinstance(x, Real) for x in edges) or any(b <= a for a, b in pairwise(edges)):
        raise InputError(f"the bins of {name!r} are {list(edges)}; expected ascending numbers such as 25,45")
    if name not in groups:
        raise InputError(f"bins are given for {name!r}, which is no group column; name it (--group {name}; groups=...)")
    return edges


def bin_names(edges: Sequence[float]) -> tuple[str, ...]:
    """The groups that edges make.

    Example:
        >>> bin_names([25, 45])
        ('under 25', '25 to under 45', '45 and over')
    """
    between = [f"{low:g} to under {high:g}" for low, high in pairwise(edges)]
    return (f"under {edges[0]:g}", *between, f"{edges[-1]:g} and over")


def number_repeated(columns: Sequence[str]) -> list[str]:
    """Names of columns with those that occur more than once numbered, so that each can be named.

    Example:
        >>> number_repeated(["age", "score", "score"])
        ['age', 'score#1', 'score#2']
    """
    times, seen = Counter(columns), Counter[str]()
    found = []
    for name in columns:
        seen[name] += 1
        found.append(name if times[name] == 1 else f"{name}#{seen[name]}")
    return found


def find_column(name: str, columns: Sequence[str], where: str) -> None:
    """Refuse a name that is not among the columns, or that several have.

    Example:
        >>> find_column("score", ["age", "score#1", "score#2"], "preds.csv")
        Traceback (most recent call last):
        ...
        fairhead.errors.InputError: preds.csv has 2 columns called 'score'; say which: 'score#1' (column 2) or \
'score#2' (column 3)
    """
    known = [str(column) for column in columns]
    if known.count(name) == 1:
        return
    if name in known:
        raise InputError(f"{where} has {known.count(name)} columns called {name!r}; expected one")
    alike = [f"{k!r} (column {i})" for i, k in enumerate(known, start=1) if k.rpartition("#")[0] == name]
    if len(alike) > 1:
        raise InputError(f"{where} has {len(alike)} columns called {name!r}; say which: {' or '.join(alike)}")
    raise InputError(f"{where} has no column {name!r}.{did_you_mean(name, known)} Its columns: {', '.join(known)}")


class GroupFile(NamedTuple):
    """A CSV file with a column `id` and columns of groups to join onto rows, such as `fairhead discover` writes."""

    path: str
    columns: tuple[str, ...]  # of groups
    rows: Mapping[str, tuple[str, ...]]  # by id, the groups

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "GroupFile":
        """Read the file; each id needs its groups, and may be there once."""
        with reading(path, "is not a CSV file in UTF-8"), open(path, encoding="utf-8-sig", newline="") as file:
            header, *lines = list(csv.reader(file)) or [[]]
        if "id" not in header or len(header) < 2 or len({*header}) < len(header):
            raise InputError(
                f"{path}: expected a CSV file with a column id and columns of groups; "
                f"found {', '.join(header) or 'none'}"
            )
        place, rows = header.index("id"), {}
        for number, line in enumerate(lines, 2):
            if not line:
                continue
            if len(line) != len(header) or not all(cell.strip() for cell in line):
                raise InputError(f"{path}: line {number} has a blank or missing value; each id needs its groups")
            if line[place] in rows:
                raise InputError(f"{path}: the id {line[place]} is there twice; expected one line per id")
            rows[line[place]] = tuple(map(composed, line[:place] + line[place + 1 :]))
        return cls(str(path), tuple(header[:place] + header[place + 1 :]), rows)

    def of(self, ids: ArrayLike | None) -> dict[str, Column]:
        """The group columns of these ids, in their order; ids without an entry are refused."""
        if ids is None:
            raise InputError(f"{self.path}: groups are joined by id, and the rows have none; name their id column")
        wanted = [str(name) for name in np.asarray(ids).tolist()]
        lost = [name for name in wanted if name not in self.rows]
        if lost:
            raise InputError(
                f"{self.path}: {len(lost)} of {len(wanted)} rows have no entry there; the first has the id {lost[0]}"
            )
        return {name: _column([self.rows[row][i] for row in wanted]) for i, name in enumerate(self.columns)}


def _column(values: list[str]) -> Column:
    """Numbers within the names of groups count as numbers: "cluster 2" comes before "cluster 10"."""

    def place(level: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", level)]

    levels = sorted({*values}, key=place)
    code = {level: number for number, level in enumerate(levels)}
    return Column(np.array([code[value] for value in values], dtype=np.int32), tuple(levels))


def ragged(line: int, found: int, expected: int) -> str:
    """What to say about a line with too many or too few fields."""
    return (
        f"line {line:,} has {found} fields where the header has {expected}; text that holds the separator must be "
        "in quotation marks"
    )
