"""What was discovered, as a result: clusters, their stability, their agreement with named groups, and gaps."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fairhead.audit import Audit, audit
from fairhead.audit.metrics import table_metrics
from fairhead.data import Dataset, Images
from fairhead.discover.clustering import Agreement, FoundCluster, Grouping, Stable
from fairhead.errors import InputError
from fairhead.locate.rows import halves
from fairhead.records import Column, Records
from fairhead.report import Report, Result, Sentence
from fairhead.report.model_card import name_of, short_data
from fairhead.report.sections import Section
from fairhead.report.sections.attention_sections import picture_address
from fairhead.report.sections.audited import Audited
from fairhead.report.sections.plain import ClusterCard, ClusterCards, PlainTable, PlainTables
from fairhead.report.wording import count, number, points, said
from fairhead.stats.bootstrap import MIN_ROWS, STABLE_ROWS
from fairhead.store import made_folder, whole_file, write_json

# What the column of clusters is called.
DISCOVERED = "discovered"
SCHEMA = "fairhead.discovered/1"
CHOSEN_BY = "EOd"
_THUMBNAIL = 96  # pixels
_LONGEST = 280  # letters of a post that are shown


class LargestGap(NamedTuple):
    """The pair of clusters with the largest gap, chosen on one half of the rows and reported on the other."""

    pair: tuple[str, str]  # their names
    of: int  # pairs that it was chosen from
    # Its gap in the selection half, which is too large: it was chosen for it. None for the only pair.
    chosen_at: float | None
    chosen_on: int  # rows of that half
    audit: Audit  # of the two, in the other half; of the only pair, in all rows


@dataclass(frozen=True)
class Discovered(Result):
    """Groups that nobody named: what `fairhead.discover` returns."""

    dataset: Dataset  # the data with the clusters as the group column "discovered": for `locate` and `mitigate`
    grouping: Grouping  # the clusters, their stability and their agreement with named groups
    audit: Audit | None  # of a model's answers by cluster, where a model or records were given
    gap: LargestGap | None  # the largest gap between two clusters, paid for
    provenance: Mapping[str, Any]  # data, encoder, options

    @property
    def clusters(self) -> tuple[FoundCluster, ...]:
        """The clusters, the largest first."""
        return self.grouping.clusters

    @property
    def stability(self) -> tuple[Stable, ...]:
        """Of each number of clusters that was looked at."""
        return self.grouping.stability

    @property
    def agreement(self) -> tuple[Agreement, ...]:
        """With each group column that the data have."""
        return self.grouping.agreement

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        ids = self.dataset.all.ids
        return {
            "schema": SCHEMA,
            "provenance": dict(self.provenance),
            "clusters": [asdict(one) | {"typical": ids[list(one.typical)].tolist()} for one in self.clusters],
            "stability": [one._asdict() for one in self.stability],
            "agreement": [one._asdict() for one in self.agreement],
            "audit": None if self.audit is None else self.audit.to_dict(),
            "gap": None if self.gap is None else {**self.gap._asdict(), "audit": self.gap.audit.to_dict()},
        }

    def rows(self) -> list[dict[str, Any]]:
        """One row a cluster."""
        return [
            {
                "cluster": one.name,
                "size": one.size,
                "share": one.share,
                **{f"share of {name}": share for name, share in one.classes.items()},
                **{name: group for name, (group, _) in one.groups.items()},
                "words": ", ".join(one.words),
            }
            for one in self.clusters
        ]

    def save(self, out: str | Path) -> Path:
        """Write groups.csv (id, discovered), report.html with its JSON twin, and discovered.json; return the folder."""
        folder = made_folder(out)
        with whole_file(folder / "groups.csv") as unfinished:
            columns = {"id": self.dataset.all.ids, DISCOVERED: self.grouping.column.values()}
            pd.DataFrame(columns).to_csv(unfinished, index=False, lineterminator="\n")
        write_json(folder / "discovered.json", self.to_dict())
        self.report(folder / "report.html")
        return folder

    def page(self) -> Report:
        """Clusters, their stability, their agreement with named groups, gaps."""
        data = str(self.provenance["data"])
        where = short_data(data) if ":" in data else "rows given in Python"
        sections: list[Section] = [self._cards(), self._tables()]
        name = str(self.provenance.get("model"))
        if self.gap is not None and (self.gap.chosen_at is not None or len(self.clusters) > 2):  # else it is all
            about = (
                f"The pair was selected out of {self.gap.of} on one half of the rows; these figures come from the "
                "other half, which corrects for selecting the worst."
            )
            about = "It is the only pair that can be compared." if self.gap.chosen_at is None else about
            sections.append(Audited(title=" and ".join(self.gap.pair), text=about, name=name, audit=self.gap.audit))
        if self.audit is not None:
            sections.append(Audited(title="The model by clusters", name=name, audit=self.audit))
        return Report(
            title="Discovered groups",
            question=f"Which groups does {name_of(str(self.provenance['encoder']))} find in {where}?",
            verdict=[self._found(), *(_agrees(a) for a in self.agreement), *self._paid()],
            sections=sections,
            provenance=dict(self.provenance),
        )

    def _cards(self) -> ClusterCards:
        label = str(self.provenance["label"])
        inputs, cards = self.dataset.all.inputs, []
        for one in self.clusters:
            shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in one.classes.items())
            mostly = [f"{by}: mostly {group} ({100 * share:.1f} %)" for by, (group, share) in one.groups.items()]
            typical: list[Any] = [inputs[i] for i in one.typical]
            pictures = [picture_address(row, _THUMBNAIL) for row in typical] if isinstance(inputs, Images) else ()
            cards.append(
                ClusterCard(
                    name=one.name,
                    n=one.size,
                    share=one.share,
                    label_rates=f"{label}: {shares}",
                    mostly=mostly,
                    words=one.words,
                    pictures=pictures,
                    posts=() if isinstance(inputs, Images) else [_shortened(row) for row in typical],
                )
            )
        about = "Found from the features alone, without labels or groups."
        return ClusterCards(title="Clusters", text=about, clusters=cards)

    def _tables(self) -> PlainTables:
        rows = [[str(one.clusters), _indices(one.halves), _indices(one.seeds)] for one in self.stability]
        columns = ["Clusters", "Halves of the rows", "Seeds"]
        tables = [PlainTable(caption="Stability (adjusted Rand index: 1 same, 0 chance)", columns=columns, rows=rows)]
        if self.agreement:
            shares = [[f"{100 * share:.1f} %" for share in (a.purity, a.alone)] for a in self.agreement]
            indices = [[_index(index) for index in (a.adjusted_rand, a.cramers_v)] for a in self.agreement]
            rows = [[a.group_by, *s, *i] for a, s, i in zip(self.agreement, shares, indices, strict=True)]
            columns = ["Group column", "Purity", "Largest group", "Adjusted Rand index", "Cramér's V"]
            tables.append(PlainTable(caption="Agreement with known groups", columns=columns, rows=rows))
        about = (
            "Clusters of one half of the rows are compared with those of the other half, and clusters from one seed "
            "with those from another; each figure is a mean, with its range. Purity is the share of rows whose cluster "
            "has mostly their group; it grows with the number of clusters, so the adjusted Rand index is shown as well."
        )
        return PlainTables(title="Stability and agreement", text=about, tables=tables)

    def _found(self) -> Sentence:
        k, n = len(self.clusters), count(len(self.dataset))
        noun = "pictures" if isinstance(self.dataset.all.inputs, Images) else "texts"
        mean = {one.clusters: float(np.mean(one.halves)) for one in self.stability}
        text = f"{n} {noun} form {k} clusters"
        if k not in mean:
            return Sentence(f"{text}; their stability is unknown.", "unclear")
        best = max(mean, key=lambda number: mean[number])
        agree = f"the clusters of two halves of the rows agree with an adjusted Rand index of {mean[k]:.2f}"
        why = "the most stable number" if best == k else f"{best} would be more stable, at {mean[best]:.2f}"
        weak = "" if mean[k] >= 0.5 else ". That is low: other rows would give other clusters"
        return Sentence(f"{text}: {agree} ({why}){weak}.", "note" if mean[k] >= 0.5 else "unclear")

    def _paid(self) -> list[Sentence]:
        if self.audit is None:
            return []
        if self.gap is None:
            text = f"No two clusters have enough rows of each class for {CHOSEN_BY} in both halves of the rows."
            return [Sentence(text, "unclear")]
        found, (one, other) = self.gap.audit[CHOSEN_BY, DISCOVERED], self.gap.pair
        start = f"Between {one} and {other}, {CHOSEN_BY}"
        if self.gap.chosen_at is not None:
            start = (
                f"The largest {CHOSEN_BY} of {self.gap.of} pairs of clusters in one half of the rows is that of "
                f"{one} and {other} ({points(self.gap.chosen_at)}); in the other half it"
            )
        if found.value is None or found.low is None or found.high is None:
            return [Sentence(f"{start} is undefined: {found.undefined}.", "unclear")]
        level = self.gap.audit.provenance["audit"]["level"]
        figures = f"{points(found.value)} ({100 * level:g} % interval {100 * found.low:.1f} to {100 * found.high:.1f})"
        larger = said(found, level) == "larger than 0"
        end = "" if larger else ": not significant"
        return [Sentence(f"{start} is {figures}{end}.", "bad" if larger else "unclear")]


def _agrees(a: Agreement) -> Sentence:
    """What the agreement with a named group amounts to: how much of what can be gained in purity is gained, or V."""
    gained = (a.purity - a.alone) / (1 - a.alone) if a.alone < 1 else 0.0
    how = "nearly" if gained >= 0.8 else "partly" if gained >= 0.3 or a.cramers_v >= 0.3 else "hardly"
    return Sentence(
        f"By {a.group_by}, {100 * a.purity:.1f} % of rows are in a cluster that has mostly their group "
        f"({100 * a.alone:.1f} % without clusters; adjusted Rand index {_index(a.adjusted_rand)}, Cramér's V "
        f"{_index(a.cramers_v)}): the clusters are {how} these groups.",
        "note",
    )


def _index(value: float) -> str:
    return number(value, 2)


def _indices(values: Sequence[float]) -> str:
    return f"{_index(float(np.mean(values)))} ({_index(min(values))} to {_index(max(values))})"


def _shortened(one: Any) -> str:
    text = " ".join((f"{one.premise} / {one.hypothesis}" if hasattr(one, "premise") else str(one)).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def describe(data: Dataset, grouping: Grouping, records: Records | None, asked: Mapping[str, Any]) -> Discovered:
    """The result: the clusters and, where there are records of a model, the audit of it by cluster.

    What was `asked` (data, encoder, model, seed and other options) goes into the provenance.
    """
    left_out = ("model", "part") if records is None else ()
    provenance = {name: _plain(value) for name, value in asked.items() if name not in left_out}
    provenance["label"] = data.provenance.get("target") or data.provenance.get("label") or "label"
    found, seed = data.with_groups({DISCOVERED: grouping.column}), int(asked["seed"])
    if records is None:
        return Discovered(found, grouping, None, None, provenance)
    joined = with_clusters(records, data, grouping.column)
    return Discovered(found, grouping, audit(joined, seed=seed), largest_gap(joined, seed), provenance)


def _plain(value: Any) -> str | int | None:
    """An option as provenance keeps it: objects in memory by what they are."""
    if isinstance(value, Path):
        return str(value)
    return value if value is None or isinstance(value, str | int) else type(value).__name__


def with_clusters(records: Records, data: Dataset, column: Column) -> Records:
    """Records of some rows of the data, with their clusters as the first group column."""
    if records.id is None:
        raise InputError("the records have no ids, by which their rows are found among the data: give an id column")
    rows = data.attributes.rows([str(name) for name in records.id.tolist()])
    others = {name: groups for name, groups in records.groups.items() if name != DISCOVERED}
    return replace(records, groups={DISCOVERED: column.take(rows), **others})


def largest_gap(records: Records, seed: int = 0) -> LargestGap | None:
    """The pair of clusters with the largest gap in one half of the rows, and the audit of it in the other half.

    Rows of one person or document stay together. The pair is one of clusters with 30 rows of each class in both halves,
    or else with 10; None where no two have as many. A single pair need not be chosen: all its rows are reported on.
    """
    column, prediction = records.groups[DISCOVERED], records.prediction
    if prediction is None:
        raise InputError("the records have no predictions, so there is nothing to audit")
    labels, classes = records.label.codes, len(records.classes)
    units = None if records.cluster is None else records.cluster.codes
    choosing = halves(column.codes.astype(np.int64) * classes + labels, units, seed)
    table = np.zeros((2, len(column.levels), classes, classes))  # the reporting half, then the selection half
    np.add.at(table, (choosing.astype(int), column.codes, labels, prediction.codes), 1)
    # Whoever is chosen must have rows of each class to report on: labels say so, and no prediction is looked at there.
    least = table.sum(3).min((0, 2))
    defined: dict[tuple[int, int], float] = {}
    for rows in (STABLE_ROWS, MIN_ROWS):  # a cell of few rows would often win by chance, and wins only without rivals
        enough = [c for c in range(len(column.levels)) if least[c] >= rows]
        gaps = {pair: _gap(table[1, list(pair)]) for pair in combinations(enough, 2)}
        defined = defined or {pair: gap for pair, gap in gaps.items() if np.isfinite(gap)}
    if not defined:
        return None
    pair, several = max(defined, key=lambda one: defined[one]), len(defined) > 1
    reporting = records.take(np.isin(column.codes, pair) & ~(choosing & several))
    names = (str(column.levels[pair[0]]), str(column.levels[pair[1]]))
    two = Column((reporting.groups[DISCOVERED].codes == pair[1]).astype(np.int32), names)
    found = audit(replace(reporting, groups={DISCOVERED: two}), seed=seed)
    return LargestGap(names, len(defined), defined[pair] if several else None, int((choosing & several).sum()), found)


def _gap(table: NDArray[np.float64]) -> float:
    """The gap of two clusters from their counts by label and prediction, [2, C, C]; NaN where it is undefined."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(table_metrics(table[None], [CHOSEN_BY], MIN_ROWS)[CHOSEN_BY][0])
