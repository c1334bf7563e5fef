"""What every figure of a benchmark is made of: one row per item.

The table is kept beside the scores: figures can be made again, and runs compared item by item, without the model and
without the data. Needs no torch.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairhead.errors import InputError
from fairhead.stats.bootstrap import Array
from fairhead.store import reading, whole_file

ITEMS_SCHEMA = "fairhead.items/1"


@dataclass(frozen=True)
class ItemTable:
    """The items of a benchmark, as a model answered them.

    Example:
        >>> table = ItemTable.of("crows_pairs", ["0", "1"], ["0", "1"], [["age"], ["race"]], {"gap": [1.5, -2.0]})
        >>> table.part("race").column("gap"), table.order
        (array([-2.]), ('age', 'race'))
    """

    benchmark: str  # its name
    ids: tuple[str, ...]  # distinct, [n]
    clusters: tuple[str, ...]  # items of one cluster (template, term, occupation, document) are drawn together, [n]
    groups: tuple[tuple[str, ...], ...]  # the categories that each item is of, [n]
    fields: tuple[str, ...]  # names of the columns
    values: Array  # one row per item, [n, fields]
    order: tuple[str, ...] = ()  # the categories in the order in which they are reported
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # ids of items without a row, by reason
    texts: tuple[str, ...] = ()  # digests of the sentences by which a training knows items again, [n]; or none

    @classmethod
    def of(
        cls,
        benchmark: str,
        ids: Sequence[str],
        clusters: Sequence[str],
        groups: Sequence[Sequence[str]],
        columns: Mapping[str, ArrayLike],
        order: Iterable[str] | None = None,
        left_out: Mapping[str, tuple[str, ...]] | None = None,
        texts: Sequence[str] = (),
    ) -> "ItemTable":
        """A table from its columns; without an order categories are sorted."""
        if len(set(ids)) != len(ids):
            raise InputError(f"{benchmark}: two items have the same id; expected unique ids")
        there = {group for of_item in groups for group in of_item}
        chosen = sorted(there) if order is None else [group for group in dict.fromkeys(order) if group in there]
        values = [np.asarray(column, dtype=np.float64) for column in columns.values()]
        return cls(
            benchmark,
            tuple(ids),
            tuple(clusters),
            tuple(tuple(of_item) for of_item in groups),
            tuple(columns),
            np.column_stack(values) if len(ids) else np.empty((0, len(columns))),
            tuple(chosen),
            dict(left_out or {}),
            tuple(texts),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def column(self, name: str) -> Array:
        """The values of one field, [n]."""
        return self.values[:, self.fields.index(name)]

    def take(self, rows: Sequence[int] | NDArray[np.intp]) -> "ItemTable":
        """The items at these positions."""
        chosen = np.asarray(rows, dtype=np.intp)
        kept = chosen.tolist()
        ids, clusters = (tuple(of[i] for i in kept) for of in (self.ids, self.clusters))
        groups, texts = tuple(self.groups[i] for i in kept), tuple(self.texts[i] for i in kept if self.texts)
        return replace(self, ids=ids, clusters=clusters, groups=groups, values=self.values[chosen], texts=texts)

    def part(self, group: str | None) -> "ItemTable":
        """The items of one category; None is all of them."""
        return self if group is None else self.take(self._members.get(group, []))

    @cached_property
    def _members(self) -> dict[str, list[int]]:
        members: dict[str, list[int]] = {}
        for i, of_item in enumerate(self.groups):
            for group in of_item:
                members.setdefault(group, []).append(i)
        return members

    def write(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Write JSONL: what the rows are and what made them, then a line per item. The file appears whole or not."""
        header = {
            "schema": ITEMS_SCHEMA,
            "benchmark": self.benchmark,
            "settings": dict(settings),
            "fields": self.fields,
            "order": self.order,
            "left_out": self.left_out,
        }
        with whole_file(path) as part, open(part, "w", encoding="utf-8") as file:
            file.write(json.dumps(header, ensure_ascii=False) + "\n")
            rows = zip(self.ids, self.clusters, self.groups, self.values.tolist(), strict=True)
            for i, (name, cluster, of_item, row) in enumerate(rows):
                line = {"id": name, "cluster": cluster, "groups": of_item, "values": [_short(v) for v in row]}
                if self.texts:
                    line["text"] = self.texts[i]
                file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")


class StoredItems(NamedTuple):
    """A table from a file, and the settings that made it."""

    table: ItemTable
    settings: Mapping[str, Any]


def read_items(path: Path) -> StoredItems:
    """Read what `ItemTable.write` wrote."""
    with reading(path, "is not a table of items that fairhead wrote; run the suite again"):
        lines = path.read_text(encoding="utf-8").splitlines()
        header = json.loads(lines[0])
        if header["schema"] != ITEMS_SCHEMA:
            raise InputError(
                f"{path} has the schema {header['schema']!r}; this version of fairhead reads {ITEMS_SCHEMA!r}"
            )
        rows = [json.loads(line) for line in lines[1:]]
        lists = [header["fields"], header["order"], *(row["groups"] for row in rows)]
        words = [header["benchmark"], *(row[name] for row in rows for name in ("id", "cluster"))]
        words += [word for one in lists for word in one]
        whole = all(isinstance(one, list) for one in lists) and all(isinstance(word, str) for word in words)
        if not whole or not isinstance(header["settings"], dict):
            raise TypeError
        values = np.array([row["values"] for row in rows], dtype=np.float64).reshape(len(rows), len(header["fields"]))
        table = ItemTable.of(
            header["benchmark"],
            [row["id"] for row in rows],
            [row["cluster"] for row in rows],
            [row["groups"] for row in rows],
            dict(zip(header["fields"], values.T, strict=True)),
            header["order"],
            {reason: tuple(names) for reason, names in header["left_out"].items()},
            [str(row["text"]) for row in rows if "text" in row],
        )
        return StoredItems(table, header["settings"])


def _short(value: float) -> float | int:
    """Flags and counts as integers; the rest whole: figures of a table that was read back are those of the first."""
    return int(value) if value == int(value) else value
