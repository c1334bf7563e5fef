"""A user's own table: a file, a data frame, a data set of another library, or lists by column name."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairhead.data.files import Skips
from fairhead.errors import InputError
from fairhead.records import composed


@dataclass(frozen=True)
class Table:
    """Columns by name.

    Example:
        >>> table = Table("posts.csv", ("post", "y"), lambda names: {"post": [" a "], "y": [1.0]})
        >>> table.find(None, ("text", "post")), table.cells("y").tolist(), table.cells("post").tolist()
        ('post', ['1'], ['a'])
        >>> table.find("Y", ())
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: posts.csv has no column 'Y'. Did you mean 'y'? Its columns: post, y
    """

    name: str  # what messages call it
    columns: tuple[str, ...]  # the names of its columns
    read: Callable[[Sequence[str]], Mapping[str, Sequence[Any]]]  # gives the values of some columns, n each
    provenance: Callable[[], Mapping[str, Any]] = dict  # gives what says where the table came from
    _values: dict[str, Sequence[Any]] = field(default_factory=dict)

    def find(self, named: str | None, usual: Sequence[str]) -> str | None:
        """The column that is named, or else the first of the usual names that is there, in any case; or None."""
        if named is None:
            plain = {name.strip().lower().replace("-", "_").replace(" ", "_"): name for name in reversed(self.columns)}
            return next((plain[name] for name in usual if name in plain), None)
        from fairhead.records.layout import find_column  # here: it loads pandas

        find_column(named, self.columns, self.name)
        return named

    def need(self, option: str, named: str | None, usual: Sequence[str]) -> str:
        """The column that `find` finds; an error if there is none."""
        found = self.find(named, usual)
        if found is None:
            called, listed = " or ".join(dict.fromkeys(usual)), ", ".join(self.columns)
            typed = "--label COLUMN" if option == "label" else f"--data-option {option}=COLUMN"
            without = ", or none to predict rows that have no label" if option == "label" else ""
            which = f"say which it is with {typed} (in Python {option}=COLUMN){without}. Its columns: {listed}"
            raise InputError(f"{self.name} has no column called {called}: {which}")
        return found

    def load(self, *names: str | None) -> None:
        """Read columns together, so that a file is gone through once."""
        wanted = [name for name in dict.fromkeys(names) if name is not None and name not in self._values]
        if wanted:
            self._values.update(self.read(wanted))

    def __len__(self) -> int:
        return len(next(iter(self._values.values())))

    def values(self, name: str) -> Sequence[Any]:
        """A column as it is, n values."""
        self.load(name)
        return self._values[name]

    def cells(self, name: str) -> NDArray[np.str_]:
        """A column as stripped text, shape [n]; empty where there is no value."""
        return np.array([text_of(value) for value in self.values(name)], dtype=np.str_)

    def optional(self, name: str | None, otherwise: str) -> list[str]:
        """A column as text, with `otherwise` where there is no value or no such column."""
        return [otherwise] * len(self) if name is None else [text or otherwise for text in self.cells(name).tolist()]

    def names(self, name: str | None, otherwise: str) -> list[str]:
        """As `optional`, each of one line, as sentences and tables need it."""
        return [composed(text) for text in self.optional(name, otherwise)]

    def ids(self, name: str | None) -> NDArray[np.str_]:
        """Distinct ids from a column, shape [n]; rows that have none are numbered from 1."""
        if name is None:
            return np.arange(1, len(self) + 1).astype(np.str_)
        ids = [text or f"row {row}" for row, text in enumerate(self.cells(name).tolist(), start=1)]
        twice = [text for text, count in Counter(ids).items() if count > 1]
        if twice:
            shown = ", ".join(twice[:5]) + (", ..." if len(twice) > 5 else "")
            what = (
                f"{len(twice):,} id{' is' if len(twice) == 1 else 's are'} there more than once in the column {name!r}"
            )
            do = "make them distinct, or name another column (--id; in Python id=)"
            raise InputError(f"{self.name}: {what}: {shown}; {do}")
        return np.array(ids, dtype=np.str_)

    def sentences(self, names: Sequence[str], skips: Skips) -> dict[int, tuple[str, ...]]:
        """Rows that have a sentence in each of these columns, no two of them the same."""
        complete = self.complete(names, skips)
        texts = zip(*(self.cells(name).tolist() for name in names), strict=True)
        found = {row: texts for row, texts in enumerate(texts) if complete[row]}
        same = [row for row, texts in found.items() if len({*texts}) < len(texts)]
        if same:
            rows = [f"row {row + 1}" for row in same]
            skips.errors("the same sentence twice", rows, f"{self.name}: the same sentence stands twice in {rows[0]}")
        return {row: texts for row, texts in found.items() if row not in same}

    def complete(self, names: Sequence[str], skips: Skips) -> NDArray[np.bool_]:
        """Which rows have a value in each of these columns, shape [n]; the others are errors, or are left out."""
        self.load(*names)
        found: NDArray[np.bool_] = np.full(len(self), True)
        for name in names:
            empty = self.cells(name) == ""
            rows = [f"row {row + 1}" for row in np.flatnonzero(empty)]
            if rows:
                what = f"the column {name!r} is empty in {len(rows)} of {len(empty)} rows, the first of them {rows[0]}"
                skips.errors(f"no value in {name}", rows, f"{self.name}: {what}")
            found = found & ~empty
        return found


def text_of(value: Any) -> str:
    """A cell as stripped text; whole numbers have no point, and what is missing is empty."""
    from fairhead.records.columns import plain  # here: it loads pandas

    found = plain(value)
    return "" if found is None else str(found)


@contextmanager
def opened(source: Any) -> Iterator[Table]:
    """The table in a file (CSV, TSV, JSONL, Parquet), a data frame of any library, or lists by name."""
    from fairhead.records.table_files import open_source, values_of  # here: it loads pandas

    if isinstance(source, Mapping) and source and all(hasattr(part, "column_names") for part in source.values()):
        source = _together(source)
    lengths = {name: len(values) for name, values in source.items()} if isinstance(source, dict) else {}
    if len(set(lengths.values())) > 1:
        raise InputError(f"expected columns of one length; found {lengths}")
    with open_source(source) as found:
        name, provenance = found.name, found.provenance
        if not isinstance(source, str | os.PathLike):
            name, provenance = f"the {type(source).__name__}", lambda: {"object": type(source).__name__}
        yield Table(name, tuple(found.columns), lambda names: values_of(found, names), provenance)


def _together(parts: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The columns of a `datasets.DatasetDict`, and one more of the parts."""
    columns: dict[str, list[Any]] = {}
    for part, data in parts.items():
        with opened(data) as table:
            for name in table.columns:
                columns.setdefault(name, []).extend(table.values(name))
        columns.setdefault("split", []).extend([part] * len(data))
    return columns
