"""Groups from a file of their own, such as those of `fairhead discover`: joined onto rows by id."""

import csv
import re
from collections.abc import Mapping
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fairhead.errors import InputError
from fairhead.records import Column, composed
from fairhead.store import reading


class GroupFile(NamedTuple):
    r"""A CSV file with a column `id` and one or more columns of groups.

    Attributes:
        path: the file.
        columns: names of the group columns.
        rows: by id, the groups.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "groups.csv")
        >>> _ = path.write_text("id,discovered\n7,cluster 2\n8,cluster 10\n")
        >>> GroupFile.read(path).of(["8", "7"])["discovered"].levels
        ('cluster 2', 'cluster 10')
    """

    path: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls, path: str | PathLike[str]) -> "GroupFile":
        """Read the file.

        Raises:
            InputError: it is not there, lacks the column id or any other, has a blank group, or an id twice.
        """
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
                raise InputError(f"{path}: the id {line[place]} is there twice; one line an id is expected")
            rows[line[place]] = tuple(map(composed, line[:place] + line[place + 1 :]))
        return cls(str(path), tuple(header[:place] + header[place + 1 :]), rows)

    def of(self, ids: ArrayLike | None) -> dict[str, Column]:
        """The group columns of these ids, in their order.

        Raises:
            InputError: there are no ids, or some have no entry.
        """
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
    levels = sorted({*values}, key=_in_order)
    code = {level: number for number, level in enumerate(levels)}
    return Column(np.array([code[value] for value in values], dtype=np.int32), tuple(levels))


def _in_order(level: str) -> list[tuple[Any, ...]]:
    """Numbers within a name count as numbers: "cluster 2" comes before "cluster 10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", level)]
