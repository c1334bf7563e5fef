"""The rows that are compared: labelled images or texts with their groups, or pairs of texts; and their figures.

The log-odds of a pair are those that its benchmark defines: CrowS-Pairs compares sums of log-probabilities, StereoSet
means per token, and StereoSet counts every target term the same. Every figure is a function of sums over pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fairhead.audit import compare
from fairhead.audit.catalogue import table_metrics
from fairhead.data import Dataset, Images, parse_spec, read_items
from fairhead.errors import InputError, did_you_mean
from fairhead.language.answers import Request
from fairhead.language.benchmark import sample
from fairhead.language.benchmarks import benchmark_of
from fairhead.locate.directions import evidence_of
from fairhead.locate.engine import Changes, Mask
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import HeadMap, score_heads, score_pairs
from fairhead.locate.locate_settings import LocatePlan, Source
from fairhead.locate.prompts import COLUMNS, CONCEPTS, Pole, Prompts
from fairhead.records import Column, Records
from fairhead.stats import adjust
from fairhead.stats.bootstrap import Resampling
from fairhead.stats.clusters import cluster_sums, quotient
from fairhead.stats.paired import paired_difference

MEASURED = ("accuracy", "DP", "EOd", "cramers_v", "cramers_v_corrected", "cramers_v_excess", "worst_group_accuracy")
MIN_CELL = 10  # rows behind a rate, at least
POLES = ("stereotype", "anti-stereotype")
# Columns of the sums over pairs.
_WEIGHT, _ODDS, _SIZE, _PREFERS, _LOST, _TOKENS, _MEANINGFUL = range(7)
# Figure -> the two columns whose quotient it is, and what an even (or, of the last, an able) model would show.
FIGURES: Mapping[str, tuple[int, int, float | None]] = {
    "log_odds": (_ODDS, _WEIGHT, 0.0),
    "log_odds_size": (_SIZE, _WEIGHT, 0.0),
    "ss": (_PREFERS, _WEIGHT, 0.5),
    "nll": (_LOST, _TOKENS, None),
    "lms": (_MEANINGFUL, _WEIGHT, 1.0),
}


@dataclass(frozen=True)
class Evaluation:
    """Rows whose predictions are compared: who they are and what they should be called."""

    labels: NDArray[np.integer]  # class numbers, [n]
    classes: tuple[str, ...]  # names
    groups: NDArray[np.integer]  # 1 for the first pole and 0 for the second, [n]
    poles: tuple[str, str]  # names of the groups, that of group 1 first
    group_by: str  # the group column's name
    ids: NDArray[Any] | None = None  # [n], or None
    clusters: NDArray[np.integer] | None = None  # rows with one number belong together, [n]; or None
    noun: str = "images"  # what the rows are, in words: "images" or "texts"
    target: str = ""  # what the classes are of, in words: "age", "Smiling"
    positive: int = 1  # the class whose evidence is looked at

    gap_name: ClassVar[str] = "evidence gap"
    doses: ClassVar[tuple[str, ...]] = ("DP", "EOd", "cramers_v", "accuracy")  # figures of dose–response curves

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: NDArray[Any]) -> "Evaluation":
        """The chosen rows: positions, or a mask."""
        ids, clusters = (None if x is None else x[rows] for x in (self.ids, self.clusters))
        return replace(self, labels=self.labels[rows], groups=self.groups[rows], ids=ids, clusters=clusters)

    def score(self, parts: Array, total: Array, level: float = 0.95, measure: str | None = None) -> HeadMap:
        """The gap between the groups given the label, in parts [n, layers, heads] of a whole [n]."""
        how: dict[str, Any] = {"clusters": self.clusters, "names": self.poles, "level": level, "measure": measure}
        return score_heads(parts, total, self.groups, self.labels, **how)

    def evidence(self, read: Array) -> Array:
        """The evidence for the positive class in logits [n, C], [n]."""
        return evidence_of(read, self.positive)

    def figures(self, reads: Sequence[Array]) -> Mapping[str, Array]:
        """The metrics of several logits [n, C], each [k]."""
        return table_metrics(np.stack([self.counts(logits) for logits in reads]), MEASURED, MIN_CELL)

    def compare(self, before: Array, after: Array, plan: LocatePlan) -> Changes:
        """All metrics of two logits [n, C], paired; accuracy in every cell, its p corrected over cells (Holm)."""
        how: dict[str, Any] = {"n_boot": plan.n_boot, "n_perm": 2000, "seed": plan.seed}
        of_all: dict[str, Any] = {"group_by": self.group_by, "metrics": list(MEASURED), "min_cell": MIN_CELL}
        comparison = compare(self.records(before), self.records(after), **of_all, **how)
        cells, differences = [], []
        for number, label in enumerate(self.classes):
            for group, pole in ((1, self.poles[0]), (0, self.poles[1])):
                rows = np.flatnonzero((self.labels == number) & (self.groups == group))
                if len(rows):
                    # Within a cell there is right and wrong, and no other class: tables of 2 instead of C.
                    right = (self.take(rows).right(logits[rows]) for logits in (before, after))
                    cells.append((label, pole))
                    differences.append(compare(*right, metrics=["accuracy"], **how).differences[0])
        adjusted = adjust([d.p for d in differences], "holm")
        changed = (replace(d, p_adjusted=p) for d, p in zip(differences, adjusted, strict=True))
        by_cell = tuple((*cell, d) for cell, d in zip(cells, changed, strict=True))
        return Changes(comparison.differences, comparison, by_cell)

    def records(self, logits: Array) -> Records:
        """Logits [n, C] as records for an audit."""
        return Records(
            label=Column(self.labels.astype(np.int32), self.classes),
            prediction=Column(logits.argmax(1).astype(np.int32), self.classes),
            groups={self.group_by: Column(1 - self.groups.astype(np.int32), self.poles)},
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
        """Rows by group, label and prediction, [2, C, C]."""
        c = len(self.classes)
        cell = ((1 - self.groups) * c + self.labels) * c + logits.argmax(1)
        return np.bincount(cell, minlength=2 * c * c).reshape(2, c, c).astype(np.float64)


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
    """The choosing half that is taken by default, [n] bool; a group that is absent from a half is refused."""
    choosing = halves(2 * evaluation.labels + evaluation.groups, evaluation.clusters, seed)
    check_halves(evaluation, choosing)
    return choosing


def check_halves(evaluation: Evaluation, choosing: Mask) -> None:
    """Refuse halves of which one has a single group."""
    for half, name in ((choosing, "choosing"), (~choosing, "reporting")):
        for group, pole in ((1, evaluation.poles[0]), (0, evaluation.poles[1])):
            if not (evaluation.groups[half] == group).any():
                raise InputError(
                    f"{pole} has none of the {int(half.sum())} {evaluation.noun} of the {name} half; both groups are "
                    f"needed in both: use more {evaluation.noun}"
                )


def shared_labels(evaluation: Evaluation) -> NDArray[np.intp]:
    """Labels for a comparison within them; one for all where some label has a single group."""
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
    has their values; else its first two values are the poles.
    """
    reader, path = parse_spec(source.data, "images", "texts")
    concept, task = str(source.concept), source.task
    column = COLUMNS.get((reader.name, concept), concept)
    if column == task:
        raise InputError(
            f"concept and task are both {column!r}: within a class of it there is one group, so there is no gap to find"
        )
    data = reader.read(path, **reader.named({"label": task, "groups": (column,)}), **source.options)
    assert isinstance(data, Dataset)
    task = task or str(data.provenance["label"])
    groups = data.groups()[column]
    levels = [str(level) for level in groups.levels]
    if len(levels) < 2 or len(data.classes) < 2:
        what = (column, levels[0]) if len(levels) < 2 else (task, data.classes[0])
        raise InputError(f"all rows have the {what[0]} {what[1]!r}; at least two groups and two classes are needed")
    if prompts is None and reader.kind == "images":
        known = CONCEPTS.get(concept)
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
    group, usable, notes = pole[groups.codes], np.ones(len(data), dtype=bool), []
    name, noun = concept if prompts is None else prompts.name, reader.kind
    if held_out:
        usable = data.split != "train"
        notes.append(f"{int((~usable).sum())} {noun} of the training part were left out: the model may know them.")
    if (group < 0).any():
        notes.append(f"{int((group < 0).sum())} {noun} belong to neither pole of {name} and were left out.")
    rows = np.random.default_rng(source.seed).permutation(np.flatnonzero(usable & (group >= 0)))
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
    )
    items = inputs.take(rows) if isinstance(inputs, Images) else [inputs[i] for i in rows]
    return LabelledRows(items, evaluation, prompts, tuple(notes))


def even_rows(rows: NDArray[np.intp], group: NDArray[np.intp], limit: int) -> NDArray[np.intp]:
    """As many rows of each group, in the order given."""
    first = rows[group[rows] == 1][: (limit + 1) // 2]
    second = rows[group[rows] == 0][: limit - len(first)]
    return rows[np.isin(rows, np.concatenate([first, second]))]


@dataclass(frozen=True)
class TextPairs:
    """n pairs of texts, stereotype and anti-stereotype, the log-odds of whose poles are compared.

    The figures are: `log_odds`, the mean log-odds of the first pole against the second; `log_odds_size`, their mean
    absolute value; `ss`, the share of pairs in which the first pole is likelier (ties count half); `nll`, the mean
    negative log-probability of a token of all texts, whose rise is damage; `lms`, how often a meaningful text is
    likelier than the unrelated one, where pairs have one.
    """

    name: str  # of the benchmark
    ids: tuple[str, ...]  # of the pairs
    # The texts to score, as many a pair as `per_pair`: stereotype, anti-stereotype and, in StereoSet, an unrelated one,
    # by which damage shows.
    texts: tuple[Request, ...]
    per_pair: int
    weights: NDArray[np.float64]  # how much each pair counts, [n], adding up to 1
    clusters: NDArray[np.intp]  # pairs with one number depend on each other, [n]
    categories: Mapping[str, tuple[str, ...]]  # by name ("bias_type"), the category of each pair
    per_token: bool  # whether log-odds are of means per token, not of sums
    sign: float = 1.0  # −1 where the anti-stereotype is the first pole

    noun: ClassVar[str] = "pairs"
    gap_name: ClassVar[str] = "log-odds"

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def poles(self) -> tuple[str, str]:
        """Which text is set against which."""
        return POLES if self.sign > 0 else (POLES[1], POLES[0])

    @property
    def doses(self) -> tuple[str, ...]:
        """All figures that these pairs have."""
        return tuple(name for name in FIGURES if name != "lms" or self.per_pair == 3)

    def take(self, rows: NDArray[Any]) -> "TextPairs":
        """The chosen pairs: positions, or a mask; weights add up to 1 again."""
        chosen = np.arange(len(self))[rows]
        weights = self.weights[chosen]
        return replace(
            self,
            ids=tuple(self.ids[i] for i in chosen),
            texts=tuple(self.texts[i * self.per_pair + k] for i in chosen for k in range(self.per_pair)),
            weights=weights / weights.sum(),
            clusters=self.clusters[chosen],
            categories={name: tuple(values[i] for i in chosen) for name, values in self.categories.items()},
        )

    def score(self, parts: Array, total: Array, level: float = 0.95, measure: str | None = None) -> HeadMap:
        """The weighted mean of parts [n, layers, heads] of the log-odds [n]."""
        measure = measure or f"direct part in the log-odds, {self.poles[0]} minus {self.poles[1]}"
        how: dict[str, Any] = {"weights": self.weights, "clusters": self.clusters, "names": self.poles}
        return score_pairs(parts, total, level=level, measure=measure, **how)

    def sums(
        self,
        log_odds: Array,  # of the first pole against the second, [n]
        lost: Array | float = 0,  # summed negative log-probability of the pair's texts, [n]
        tokens: Array | float = 0,  # their tokens, [n]; where there are none, nll and lms have no value
        able: Array | float = 0,  # how often a meaningful text is likelier than the unrelated one, [n]
    ) -> Array:
        """What each pair adds to the sums behind the figures, [n, 7]."""
        one, weight = np.ones(len(self)), self.weights
        weighted = np.column_stack([one, log_odds, np.abs(log_odds), (1 + np.sign(log_odds)) / 2]) * weight[:, None]
        return np.column_stack([weighted, lost * one, tokens * one, able * weight])

    def read(self, logprobs: Array, tokens: NDArray[np.integer]) -> Array:
        """The sums [n, 7] of summed log-probabilities and token counts, one a text, [n · per_pair]."""
        shape = (len(self), self.per_pair)
        lost, count = -logprobs.reshape(shape), tokens.reshape(shape).astype(np.float64)
        likely = -lost / count if self.per_token else -lost
        able = (likely[:, :2] > likely[:, 2:3]).sum(1) / 2 if self.per_pair == 3 else 0.0
        return self.sums(self.sign * (likely[:, 0] - likely[:, 1]), lost.sum(1), count.sum(1), able)

    def evidence(self, read: Array) -> Array:
        """The log-odds, [n]."""
        return read[:, _ODDS] / read[:, _WEIGHT]

    def figures(self, reads: Sequence[Array]) -> Mapping[str, Array]:
        """The figures of several reads, each [k]."""
        totals = np.stack([read.sum(0) for read in reads])
        return {name: quotient(above, below)(totals) for name, (above, below, _) in FIGURES.items()}

    def compare(self, before: Array, after: Array, plan: LocatePlan) -> Changes:
        """Each figure that has a value, after minus before, paired; clusters stay together, p corrected by Holm."""
        first, second = (cluster_sums(table, self.clusters.tolist()) for table in (before, after))
        how = Resampling(plan.n_boot, plan.seed, plan.level, min_items=1)
        of_texts = () if before[:, _TOKENS].any() else ("nll", "lms")
        found = [
            paired_difference(
                name, quotient(*columns), first, second, len(before), how, ideal=ideal, n_perm=plan.n_boot
            )
            for name, (*columns, ideal) in FIGURES.items()
            if name in self.doses and name not in of_texts
        ]
        adjusted = adjust([change.p for change in found], "holm")
        return Changes(tuple(replace(change, p_adjusted=p) for change, p in zip(found, adjusted, strict=True)))


def read_pairs(
    spec: str,  # name and path
    bias_type: str | None = None,  # only those about, say, "gender"; None for all
    limit: int | None = None,  # only so many, drawn at random
    seed: int = 0,  # of the draw
    options: Mapping[str, Any] | None = None,  # of the reader
) -> TextPairs:
    """Pairs of `crows:PATH` or `stereoset:PATH`, or of your own `pairs:PATH` and `triplets:PATH`."""
    data = read_items(spec, "pairs", "triplets", **(options or {}))
    items = list(data)
    if bias_type is not None:
        known = sorted({item.bias_type for item in items})
        if bias_type not in known:
            near = did_you_mean(bias_type, known)
            raise InputError(f"{data.name} has no pairs about {bias_type!r}; it has {', '.join(known)}.{near}")
        items = [item for item in items if item.bias_type == bias_type]
    return pairs_of(items if limit is None else sample(items, limit, seed), data.name)


def pairs_of(items: Sequence[Any], name: str | None = None) -> TextPairs:
    """Items of one benchmark as pairs; `name` it where it is not the published one.

    CrowS-Pairs were written one by one, so each is independent of the others unless they share a sentence. Items of
    StereoSet about the same term depend on each other.
    """
    if not items:
        raise InputError("there is no pair of texts; at least 2 are needed")
    benchmark = benchmark_of(items)
    if benchmark.pairs is None or benchmark.requests is None:
        raise InputError(f"{benchmark.title} has no pairs of texts")
    pairs, texts = benchmark.pairs(items), benchmark.requests(items, benchmark.options())
    _, codes, counts = np.unique([pair.cluster for pair in pairs], return_inverse=True, return_counts=True)
    return TextPairs(
        name or benchmark.name,
        tuple(pair.id for pair in pairs),
        tuple(texts),
        len(texts) // len(pairs),
        1 / (counts[codes] * len(counts)),
        codes if counts.max() > 1 else _linked([(pair.first, pair.second) for pair in pairs]),
        {kind: tuple(pair.categories[kind] for pair in pairs) for kind in pairs[0].categories},
        benchmark.per_token,
    )


def _linked(pairs: Sequence[tuple[str, str]]) -> NDArray[np.int64]:
    """A number for each pair; pairs that share a text have the same, and so have those that others link."""
    texts = {text: i for i, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
    ends = np.array([[texts[one], texts[other]] for one, other in pairs])
    links = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(len(texts), len(texts)))
    of_text = connected_components(links, directed=False)[1].astype(np.int64)
    return of_text[ends[:, 0]]


def halves_of_pairs(pairs: TextPairs, seed: int = 0) -> Mask:
    """The choosing half, [n] bool: whole clusters, drawn at random; too few of them are refused."""
    clusters = len(np.unique(pairs.clusters))
    if clusters < 4:
        raise InputError(
            f"{len(pairs)} pairs in {clusters} independent clusters; at least 4 are needed for two halves: use more"
        )
    return halves(np.zeros(len(pairs), dtype=np.intp), pairs.clusters, seed)
