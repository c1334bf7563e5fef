"""What every figure of a benchmark is made of: one row per item, and measures that are functions of sums over rows.

The table is kept beside the scores, so that figures can be made again, and runs compared item by item, without the
model and without the data. Needs no torch.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairhead.errors import InputError
from fairhead.report.result import Result
from fairhead.stats import Difference, Estimate
from fairhead.stats.bootstrap import Array, Resampling, Statistic
from fairhead.stats.clusters import cluster_sums
from fairhead.stats.paired import N_PERM, paired_difference
from fairhead.store import reading, whole_file

if TYPE_CHECKING:
    from rich.console import Console

    from fairhead.language.benchmark import Benchmark
    from fairhead.report.page import Report

SCHEMA = "fairhead.items/1"


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
    ) -> "ItemTable":
        """A table from its columns; without an order categories are sorted."""
        if len(set(ids)) != len(ids):
            raise InputError(f"{benchmark}: two items have the same id; distinct ids are expected")
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
        groups = tuple(self.groups[i] for i in kept)
        return replace(self, ids=ids, clusters=clusters, groups=groups, values=self.values[chosen])

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
            "schema": SCHEMA,
            "benchmark": self.benchmark,
            "settings": dict(settings),
            "fields": self.fields,
            "order": self.order,
            "left_out": self.left_out,
        }
        with whole_file(path) as part, open(part, "w", encoding="utf-8") as file:
            file.write(json.dumps(header, ensure_ascii=False) + "\n")
            for name, cluster, of_item, row in zip(
                self.ids, self.clusters, self.groups, self.values.tolist(), strict=True
            ):
                line = {"id": name, "cluster": cluster, "groups": of_item, "values": [_short(v) for v in row]}
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
        if header["schema"] != SCHEMA:
            raise InputError(f"{path} has the schema {header['schema']!r}; this version of fairhead reads {SCHEMA!r}")
        rows = [json.loads(line) for line in lines[1:]]
        lists = [header["fields"], header["order"], *(row["groups"] for row in rows)]
        words = [header["benchmark"], *(row[name] for row in rows for name in ("id", "cluster"))]
        words += [word for one in lists for word in one]
        if not all(isinstance(one, list) for one in lists) or not all(isinstance(word, str) for word in words):
            raise TypeError
        if not isinstance(header["settings"], dict):
            raise TypeError
        values = np.array([row["values"] for row in rows], dtype=np.float64).reshape(len(rows), len(header["fields"]))
        table = ItemTable(
            header["benchmark"],
            tuple(row["id"] for row in rows),
            tuple(row["cluster"] for row in rows),
            tuple(tuple(row["groups"]) for row in rows),
            tuple(header["fields"]),
            values,
            tuple(header["order"]),
            {reason: tuple(names) for reason, names in header["left_out"].items()},
        )
        return StoredItems(table, header["settings"])


def _short(value: float) -> float | int:
    """Flags and counts as integers; the rest whole: figures of a table that was read back are those of the first."""
    return int(value) if value == int(value) else value


@dataclass(frozen=True)
class Measure:
    """A figure as a function of sums over items.

    Example:
        >>> from fairhead.stats.clusters import ratio
        >>> table = ItemTable.of("b", ["0", "1", "2"], ["x", "x", "y"], [[], [], []], {"right": [1, 1, 0]})
        >>> ones = lambda t: np.column_stack([t.column("right"), np.ones(len(t))])
        >>> mean, of_clusters = (Measure("accuracy", ones, ratio, per_cluster=choice) for choice in (False, True))
        >>> float(ratio(mean.sums(table).sum(axis=0))), float(ratio(of_clusters.sums(table).sum(axis=0)))
        (0.6666666666666666, 0.5)
    """

    metric: str  # its name
    columns: Callable[[ItemTable], Array]  # what each item adds, from a table of n items to [n, k]
    statistic: Statistic  # from totals [..., k] to the figure [...]; NaN where it has no value
    ideal: float | None = None  # the value of a model without a preference (or without a mistake), where there is one
    # Which categories it is made for, None being all items; by default all of them
    of: Callable[[str | None], bool] = lambda category: True
    # The figure is a mean over clusters that count alike, however many items each has; the last column is then the
    # number of items
    per_cluster: bool = False
    relative: bool = False  # two models are compared by the ratio of their figures, not by the difference
    detail: Callable[[ItemTable], Mapping[str, Any]] | None = None  # anything else worth knowing about the items

    def sums(self, table: ItemTable) -> Array:
        """What the items of each cluster add up to, [clusters, k], in order of first appearance."""
        sums = cluster_sums(self.columns(table), table.clusters)
        return sums / sums[:, -1:] if self.per_cluster else sums

    def estimate(self, part: ItemTable, group: str | None, how: Resampling) -> Estimate:
        """The figure of the items of one category, with its interval."""
        detail = None if self.detail is None else self.detail(part)
        return how.estimate(self.metric, group, self.sums(part), self.statistic, len(part), self.ideal, detail)


def join_items(first: ItemTable, second: ItemTable) -> tuple[ItemTable, ItemTable]:
    """The items that both tables have, in the same order."""
    places = {name: i for i, name in enumerate(second.ids)}
    here = [i for i, name in enumerate(first.ids) if name in places]
    if not here:
        raise InputError(f"{first.benchmark}: the two runs have no item in common; were they made of the same data?")
    there = [places[first.ids[i]] for i in here]
    a, b = first.take(here), second.take(there)
    if a.clusters != b.clusters or a.fields != b.fields:
        raise InputError(
            f"{first.benchmark}: the two runs describe the same items differently; run both with one version"
        )
    return a, b


def compare_items(
    measure: Measure, group: str | None, before: ItemTable, after: ItemTable, how: Resampling, n_perm: int = N_PERM
) -> Difference:
    """One figure of a category (None: of all items) on two tables of the same items; `n_perm` random swaps at most."""
    one, other = before.part(group), after.part(group)
    found = paired_difference(
        measure.metric,
        measure.statistic,
        measure.sums(one),
        measure.sums(other),
        len(one),
        how,
        ideal=measure.ideal,
        relative=measure.relative,
        n_perm=n_perm,
    )
    return replace(found, benchmark=before.benchmark, group_by=group)


@dataclass(frozen=True)
class BenchmarkResult(Result):
    """The scores of a model on a benchmark."""

    benchmark: str  # its name
    estimates: tuple[Estimate, ...]  # each with interval and n. Shares are fractions, not percent.
    n: int  # items scored
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # items that were not, by reason
    provenance: Mapping[str, Any] = field(default_factory=dict)  # model, data and settings
    more: Mapping[str, Any] = field(default_factory=dict)  # what else was found, JSON-ready, by name

    def __getitem__(self, key: str | tuple[str, str | None]) -> Estimate:
        """`result["ss"]` over all items, or `result["ss", "gender"]`."""
        metric, group_by = (key, None) if isinstance(key, str) else key
        for estimate in self.estimates:
            if (estimate.metric, estimate.group_by) == (metric, group_by):
                return estimate
        have = sorted({(e.metric, e.group_by) for e in self.estimates}, key=str)
        raise KeyError(f"there is no estimate {(metric, group_by)}; there are {have}")

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "schema": "fairhead.language/1",
            "benchmark": self.benchmark,
            "provenance": dict(self.provenance),
            "n": self.n,
            "left_out": {reason: list(ids) for reason, ids in self.left_out.items()},
            "estimates": [asdict(e) for e in self.estimates],
            **self.more,
        }

    def rows(self) -> list[dict[str, Any]]:
        """One row per figure."""
        left_out = ("detail", "groups")
        return [{k: v for k, v in vars(e).items() if k not in left_out} for e in self.estimates]

    def said_by(self) -> "tuple[Benchmark, float]":
        """The benchmark, and the confidence level of the figures."""
        from fairhead.language.benchmarks import benchmark_named

        return benchmark_named(self.benchmark), float(self.provenance.get("level", 0.95))

    def page(self) -> "Report":
        """The figures of each category, with what can be said of them, and what was left out."""
        from fairhead.report.page import Report, Sentence

        benchmark, level = self.said_by()
        model = self.provenance.get("model_path") or self.provenance.get("model", "")
        return Report(
            title=f"{model} on {benchmark.title}",
            question=benchmark.question,
            verdict=[Sentence(text, "note") for text in (*benchmark.sentences(self, level), *self._remarks())],
            sections=[benchmark.figures(self, level)],
            provenance=dict(self.provenance),
        )

    def _remarks(self) -> Iterator[str]:
        """What should be known of the figures, and where the answers lie."""
        # How many there are is in the table: the reason is then the same for all of them.
        reasons = (e.undefined.removeprefix(f"{e.n} items; ") for e in self.estimates if e.undefined)
        yield from (f"–: {reason}" for reason in list(dict.fromkeys(reasons))[:5])
        for reason, names in self.left_out.items():
            yield f"Left out: {len(names):,} ({reason}); the first is {names[0]}"
        if self.provenance.get("merged_boundaries"):
            yield f"{self.provenance['merged_boundaries']:,} texts have a token that spans the end of the prefix"
        for key, what in (("scores", "Scores of each text"), ("generations", "Continuations")):
            if self.provenance.get(key):
                yield f"{what}: {self.provenance[key]}"

    def show(self, console: "Console | None" = None) -> None:
        """Print what was measured, what can be said, one line per category, and what was left out."""
        from fairhead.report.result import show_page, terminal

        out, page = console or terminal(), self.page()
        model = self.provenance.get("model_path") or self.provenance.get("model", "")
        out.print(f"{model} on {self.benchmark}: {self.n:,} items", style="bold", markup=False, highlight=False)
        show_page(page, out)
        if page.sections[0].text:
            out.print(page.sections[0].text, markup=False, highlight=False)
