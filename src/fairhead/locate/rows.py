"""The rows that are compared: labelled images or texts with their groups, and their figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fairhead.audit import compare
from fairhead.audit.metrics import table_metrics
from fairhead.data import Dataset, Images, parse_spec
from fairhead.errors import InputError
from fairhead.locate.directions import evidence_of
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Cells, HeadMap, group_cells, score
from fairhead.locate.locate_settings import LocatePlan, Source
from fairhead.locate.prompts import Pole, Prompts, known_prompts
from fairhead.locate.studies import Changes, Mask
from fairhead.models.places import seen_rows
from fairhead.records import Column, Records
from fairhead.stats import Difference, adjust
from fairhead.stats.clusters import tabulate
from fairhead.stats.paired import in_new_sample

# Rows to locate heads on: where fewer are left, those that a model was chosen by are used as well.
_ENOUGH = 400

MEASURED = ("accuracy", "DP", "EOd", "cramers_v", "cramers_v_corrected", "cramers_v_excess", "worst_group_accuracy")
MIN_CELL = 10  # rows behind a rate, at least
SURE = 0.8  # share of new samples in which an edit that was chosen for a target is to reach it


@dataclass(frozen=True)
class Evaluation:
    """Rows whose predictions are compared: who they are and what they should be called."""

    labels: NDArray[np.integer]  # class numbers, [n]
    classes: tuple[str, ...]  # names
    groups: NDArray[np.integer]  # 1 for the first pole, 0 for the second, −1, −2, ... for the others, [n]
    poles: tuple[str, str]  # names of the two groups that maps of heads compare, that of group 1 first
    group_by: str  # the group column's name
    ids: NDArray[Any] | None = None  # [n], or None
    clusters: NDArray[np.integer] | None = None  # rows with one number belong together, [n]; or None
    noun: str = "images"  # what the rows are, in words: "images" or "texts"
    target: str = ""  # what the classes are of, in words: "age", "Smiling"
    positive: int = 1  # the class whose evidence is looked at
    others: tuple[str, ...] = ()  # further groups, which metrics are over, too: that of −1 first
    sign: float = 1.0  # −1 where the second group has more evidence: the gap is then seen from there

    gap_name: ClassVar[str] = "evidence gap"
    # Figures of dose–response curves
    doses: ClassVar[tuple[str, ...]] = ("DP", "EOd", "cramers_v", "accuracy", "evidence_gap")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: NDArray[Any]) -> Self:
        """The chosen rows: positions, or a mask."""
        ids, clusters = (None if x is None else x[rows] for x in (self.ids, self.clusters))
        return replace(self, labels=self.labels[rows], groups=self.groups[rows], ids=ids, clusters=clusters)

    @property
    def names(self) -> tuple[str, ...]:
        """All groups, the poles first."""
        return (*self.poles, *self.others)

    @property
    def of_poles(self) -> Mask:
        """Rows of either pole, [n] bool."""
        return np.asarray(self.groups >= 0)

    @property
    def cells(self) -> Cells:
        """The rows by label and group, where all are of either pole and each class has some of both."""
        return group_cells(self.groups, self.labels, self.poles, self.classes, clusters=self.clusters)

    def between(self, first: int, second: int) -> "Evaluation":
        """The same rows with other poles, by their places in `names`."""
        order = [first, second, *(i for i in range(len(self.names)) if i not in (first, second))]
        names = [self.names[i] for i in order]
        groups = 1 - np.argsort(order)[1 - self.groups]
        return replace(self, groups=groups, poles=(names[0], names[1]), others=tuple(names[2:]))

    def shared_classes(self, choosing: Mask) -> NDArray[np.intp]:
        """In how many classes both groups of a pair have enough rows in both halves, [groups, groups], 0 of itself."""
        rows = [
            self.take(half).counts(np.zeros((int(half.sum()), len(self.classes)))) for half in (choosing, ~choosing)
        ]
        enough = (np.min([counts.sum(2) for counts in rows], axis=0) >= MIN_CELL).astype(np.intp)  # [groups, C]
        shared = enough @ enough.T
        np.fill_diagonal(shared, 0)
        if not shared.any():
            raise InputError(
                f"no class has {MIN_CELL} {self.noun} of two groups of {self.group_by} in both halves, so no groups "
                f"can be compared within a class: use more {self.noun}, or a column with fewer groups"
            )
        return np.asarray(shared)

    def farthest(self, logits: Array, choosing: Mask) -> tuple[int, int]:
        """The two groups, by their places in `names`, whose rates of some predicted class differ most.

        The predictions, [n, C], are of the selection half. Pairs that cannot be compared within as many classes as
        others can take no part.
        """
        shared = self.shared_classes(choosing)
        predicted = self.take(choosing).counts(logits).sum(1)  # [groups, C]
        rates = predicted / np.maximum(predicted.sum(1), 1)[:, None]
        apart = np.abs(rates[:, None] - rates[None]).max(-1)
        first, second = np.unravel_index(int(np.argmax(np.where(shared == shared.max(), apart, -1.0))), apart.shape)
        return int(first), int(second)

    def score(self, parts: Array, total: Array, level: float = 0.95, measure: str | None = None) -> HeadMap:
        """The gap between the groups given the label, in parts [n, layers, heads] of a whole [n]."""
        name = measure or f"evidence gap given the label, {self.poles[0]} minus {self.poles[1]}"
        return score(parts, total, self.cells, level=level, name=name)

    def evidence(self, read: Array) -> Array:
        """The evidence for the positive class in logits [n, C], [n]."""
        return evidence_of(read, self.positive)

    def figures(self, reads: Sequence[Array]) -> Mapping[str, Array]:
        """The metrics of several logits [n, C] and the gaps of the evidence in them, each [k]."""
        found = dict(table_metrics(np.stack([self.counts(logits) for logits in reads]), MEASURED, MIN_CELL))
        scored = self._gaps(np.stack([self.evidence(logits) for logits in reads], axis=1))
        return {**found, "evidence_gap": np.full(len(reads), np.nan) if scored is None else scored.value[0]}

    def predicted(self, before: Array, after: Array, plan: LocatePlan, rows: int) -> float:
        """The upper end of the plan's gap with an edit in a new sample of so many `rows`, for the gap before seen here.

        To reach the target is to leave `after − share × before` at most 0. That varies here and in the new sample,
        where both gaps are others: an end that is at most the wanted share of the gap before is reached in the share
        `SURE` of new samples. Logits are [n, C]; infinite where the gap is undefined.
        """
        key, cluster = ((1 - self.groups) * len(self.classes) + self.labels) * len(self.classes), self._cluster
        keys, shape = [key + x.argmax(1) for x in (before, after)], (len(self.names), *2 * [len(self.classes)])
        sample = tabulate(keys, [shape, shape], cluster=None if cluster is None else cluster.codes)
        stars = sample.bootstrap(plan.n_boot, np.random.default_rng(plan.seed))
        both = (np.concatenate([seen[None], star]) for seen, star in zip(sample.observed(), stars, strict=True))
        metric, share = plan.target_metric, plan.share_left
        first, second = (np.abs(table_metrics(counts, [metric], MIN_CELL)[metric]) for counts in both)
        over, *star = second - share * first
        drawn = np.asarray(star)
        end = in_new_sample(over, drawn[~np.isnan(drawn)], SURE, len(self) / rows)
        return float("inf") if np.isnan(end) else float(end + share * first[0])

    def _gaps(self, evidence: Array) -> HeadMap | None:
        """The gaps in several evidences [n, k] given the label, [1, k]; None where no label has enough of both."""
        counts = self.counts(np.zeros((len(self), len(self.classes)))).sum(2)  # [groups, C]
        rows = (counts[:2].min(0) >= MIN_CELL)[self.labels] & self.of_poles
        if not rows.any():
            return None
        return self.take(rows).score(self.sign * evidence[rows, None], self.sign * evidence[rows, 0])

    def _evidence_change(self, before: Array, after: Array) -> list[Difference]:
        """How the gap of the evidence changes, paired; its p is its own, not corrected over the metrics."""
        one, other = self.evidence(before), self.evidence(after)
        found = self._gaps(np.column_stack([one, other, other - one]))
        if found is None:
            return []
        a, b, value = (float(x) for x in found.value[0])
        low, high, p = (float(x[0, 2]) for x in (found.low, found.high, found.p))
        return [Difference("evidence_gap", self.group_by, a, b, value, low, high, found.n, p, p, ideal=0.0)]

    def compare(self, before: Array, after: Array, plan: LocatePlan) -> Changes:
        """All metrics of two logits [n, C], paired; accuracy in every cell, its p corrected over cells (Holm)."""
        how: dict[str, Any] = {"n_boot": plan.n_boot, "n_perm": 2000, "seed": plan.seed}
        of_all: dict[str, Any] = {"group_by": self.group_by, "metrics": list(MEASURED), "min_cell": MIN_CELL}
        comparison = compare(self.records(before), self.records(after), **of_all, **how)
        cells, differences = [], []
        for number, label in enumerate(self.classes):
            for place, pole in enumerate(self.names):
                rows = np.flatnonzero((self.labels == number) & (self.groups == 1 - place))
                if len(rows):
                    # Within a cell there is right and wrong, and no other class: tables of 2 instead of C.
                    right = (self.take(rows).right(logits[rows]) for logits in (before, after))
                    cells.append((label, pole))
                    differences.append(compare(*right, metrics=["accuracy"], **how).differences[0])
        adjusted = adjust([d.p for d in differences], "holm")
        changed = (replace(d, p_adjusted=p) for d, p in zip(differences, adjusted, strict=True))
        by_cell = tuple((*cell, d) for cell, d in zip(cells, changed, strict=True))
        return Changes((*comparison.differences, *self._evidence_change(before, after)), comparison, by_cell)

    def records(self, logits: Array) -> Records:
        """Logits [n, C] as records for an audit."""
        return Records(
            label=Column(self.labels.astype(np.int32), self.classes),
            prediction=Column(logits.argmax(1).astype(np.int32), self.classes),
            groups={self.group_by: Column(1 - self.groups.astype(np.int32), self.names)},
            id=self.ids,
            cluster=self._cluster,
        )

    def right(self, logits: Array) -> Records:
        """Whether logits [n, C] are right, as records without groups: their accuracy is that of the classes."""
        right = (logits.argmax(1) == self.labels).astype(np.int32)
        truth, levels = np.ones_like(right), ("wrong", "right")
        return Records(Column(truth, levels), Column(right, levels), groups={}, id=self.ids, cluster=self._cluster)

    @property
    def _cluster(self) -> Column | None:
        if self.clusters is None:
            return None
        levels, codes = np.unique(self.clusters, return_inverse=True)
        return Column(codes, tuple(levels.tolist()))

    def counts(self, logits: Array) -> Array:
        """Rows by group (in the order of `names`), label and prediction, [groups, C, C]."""
        c, size = len(self.classes), len(self.names)
        cell = ((1 - self.groups) * c + self.labels) * c + logits.argmax(1)
        return np.bincount(cell, minlength=size * c * c).reshape(size, c, c).astype(np.float64)


def halves(cells: NDArray[np.integer], clusters: NDArray[np.integer] | None, seed: int = 0) -> Mask:
    """Split rows in two, [n] bool: every cell evenly, or, where there are clusters, whole clusters at random."""
    rng = np.random.default_rng(seed)
    chosen = np.zeros(len(cells), dtype=bool)
    if clusters is not None:
        names = np.unique(clusters)
        return np.isin(clusters, rng.permutation(names)[: len(names) // 2])
    for cell in np.unique(cells):
        rows = rng.permutation(np.flatnonzero(cells == cell))
        chosen[rows[: len(rows) // 2]] = True
    return chosen


def halves_of(evaluation: Evaluation, seed: int = 0) -> Mask:
    """The selection half that is taken by default, [n] bool; one of two groups that a half has not is refused."""
    choosing = halves(len(evaluation.names) * evaluation.labels + evaluation.groups, evaluation.clusters, seed)
    if not evaluation.others:
        check_halves(evaluation, choosing)
    return choosing


def check_halves(evaluation: Evaluation, choosing: Mask) -> None:
    """Refuse halves of which one has a single group."""
    for half, name in ((choosing, "selection"), (~choosing, "reporting")):
        for group, pole in ((1, evaluation.poles[0]), (0, evaluation.poles[1])):
            if not (evaluation.groups[half] == group).any():
                raise InputError(
                    f"{pole} has none of the {int(half.sum())} {evaluation.noun} of the {name} half; both groups are "
                    f"needed in both: use more {evaluation.noun}"
                )


def comparable_rows(evaluation: Evaluation, choosing: Mask) -> tuple[Mask, list[str]]:
    """Rows whose label both groups have in both halves, [n] bool, and a sentence about those left out."""
    check_halves(evaluation, choosing)
    cell = 2 * evaluation.labels + np.maximum(evaluation.groups, 0)
    size, two = 2 * len(evaluation.classes), evaluation.of_poles
    counts = np.stack([np.bincount(cell[half & two], minlength=size) for half in (choosing, ~choosing)])
    enough = counts.reshape(2, -1, 2).min((0, 2)) >= MIN_CELL  # [classes]
    if not enough.any():
        raise InputError(
            f"no class has {MIN_CELL} {evaluation.noun} of both {' and '.join(evaluation.poles)} in both "
            f"halves, so the groups cannot be compared within a class: use more {evaluation.noun}"
        )
    left = [name for name, kept in zip(evaluation.classes, enough, strict=True) if not kept]
    notes = [f"Too few {evaluation.noun} to compare groups within: {', '.join(left)}."] if left else []
    return enough[evaluation.labels] & two, notes


def shared_labels(evaluation: Evaluation) -> NDArray[np.intp]:
    """Labels of rows of either pole for a comparison within them; one for all where some label has a single group."""
    cells = np.bincount(2 * evaluation.labels + evaluation.groups, minlength=2 * len(evaluation.classes))
    seen = cells.reshape(-1, 2)
    whole = ((seen > 0).all(1) | (seen == 0).all(1)).all()
    return np.asarray(evaluation.labels if whole else np.zeros_like(evaluation.labels))


class LabelledRows(NamedTuple):
    """Rows of a data set that are of either pole, in random order."""

    items: Any  # images or texts, not decoded
    evaluation: Evaluation  # their labels and groups
    prompts: Prompts | None  # the poles in words, where there are any
    notes: tuple[str, ...]  # about rows that were left out, in sentences


def labelled_rows(source: Source, prompts: Prompts | None = None, held_out: bool = False) -> LabelledRows:
    """Read labelled images or texts, with the groups of a concept; `held_out` leaves out rows of the training part.

    Poles are those of the user's own prompts. Without them images have those that ship with fairhead, where the column
    has their values. Else all values of the column are groups, and its first two the poles, until the model has said
    between which two its predictions differ most.
    """
    reader, path = parse_spec(source.data, "images", "texts")
    concept, task = str(source.concept), source.task
    column = known_prompts().column(reader.name, concept)
    if column == task:
        raise InputError(
            f"concept and task are both {column!r}: within a class of it there is one group, so there is no gap to find"
        )
    data = reader.read(path, **reader.named({"label": task, "groups": (column,)}), **source.options)
    assert isinstance(data, Dataset)
    data = data.with_known_groups()
    task = task or str(data.provenance["label"])
    groups = data.groups()[column]
    levels = [str(level) for level in groups.levels]
    if len(levels) < 2 or len(data.classes) < 2:
        what = (column, levels[0]) if len(levels) < 2 else (task, data.classes[0])
        raise InputError(f"all rows have the {what[0]} {what[1]!r}; at least two groups and two classes are needed")
    if prompts is None and reader.kind == "images":
        known = known_prompts().concepts.get(concept)
        fits = known is not None and all(set(end.levels) & set(levels) for end in known.poles)
        prompts = known if fits else None
    poles = prompts.poles if prompts is not None else tuple(Pole(level, (), (level,)) for level in levels[:2])
    pole = np.full(len(levels), -1)
    for number, end in enumerate(poles):
        pole[[i for i, level in enumerate(levels) if level in end.levels]] = 1 - number
    if not {0, 1} <= set(pole.tolist()):
        ends = "; ".join(f"{end.name}: {', '.join(end.levels)}" for end in poles)
        raise InputError(
            f"the column {column!r} has the values {', '.join(levels)}, which are not of both poles "
            f"of {concept if prompts is None else prompts.name!r} ({ends})"
        )
    others = () if prompts is not None else tuple(levels[2:])
    pole[2:] = np.where(pole[2:] < 0, -1 - np.arange(len(levels) - 2), pole[2:]) if others else pole[2:]
    group, usable, notes = pole[groups.codes], np.ones(len(data), dtype=bool), []
    name, noun = concept if prompts is None else prompts.name, reader.kind
    seen = seen_rows(source.model, data.all)
    if seen is not None and int((~seen.any).sum()) >= _ENOUGH:
        usable = ~seen.any
        notes.append(f"{int(seen.any.sum())} {noun} were left out: {seen.words}.")
    elif seen is not None:
        usable, kept = ~seen.train, int((seen.validation & ~seen.train).sum())
        notes.append(f"{int(seen.train.sum())} {noun} were left out: the model was trained on them.")
        if kept:
            notes.append(
                f"{kept} {noun} that it was chosen by are used: without them fewer than {_ENOUGH} remain. Accuracy on "
                "them is a little too good."
            )
    elif held_out and data.provenance.get("split", "") is None:
        notes.append(f"Which {noun} the model was trained on is not known; on those, figures are too good.")
    elif held_out:
        usable = data.split != "train"
        notes.append(f"{int((~usable).sum())} {noun} of the training part were left out: the model may know them.")
    if (group < 0).any() and not others:
        notes.append(f"{int((group < 0).sum())} {noun} belong to neither pole of {name} and were left out.")
    rows = np.random.default_rng(source.seed).permutation(np.flatnonzero(usable & (group >= -len(others))))
    if not len(rows):
        raise InputError(
            f"no {noun} remain to locate heads on. {' '.join(notes)} Give rows that the model does not know"
        )
    if source.limit is not None and source.limit < len(rows):
        rows = even_rows(rows, group, source.limit)
    cluster, inputs = data.attributes.cluster, data.all.inputs
    evaluation = Evaluation(
        labels=data.all.labels[rows],
        classes=data.classes,
        groups=group[rows],
        poles=(poles[0].name, poles[1].name),
        group_by=name,
        ids=data.all.ids[rows],
        clusters=None if cluster is None else np.asarray(cluster.codes)[rows],
        noun=noun,
        target=task if noun == "images" else "",
        others=others,
    )
    items = inputs.take(rows) if isinstance(inputs, Images) else [inputs[i] for i in rows]
    return LabelledRows(items, evaluation, prompts, tuple(notes))


def even_rows(rows: NDArray[np.intp], group: NDArray[np.integer], limit: int) -> NDArray[np.intp]:
    """As many rows of each group, in the order given."""
    kept: list[NDArray[np.intp]] = []
    left = np.unique(group[rows])[::-1]
    for i, number in enumerate(left):
        share = -(-(limit - sum(map(len, kept))) // (len(left) - i))
        kept.append(rows[group[rows] == number][:share])
    return rows[np.isin(rows, np.concatenate(kept))]
