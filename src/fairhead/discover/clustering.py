"""Clusters of features, and what describes each: its size, its classes, its words, its most typical rows.

Features are one vector a row: by a pretrained encoder as it is, or from a file of features that are ready.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.stats.contingency import association
from torch import Tensor

from fairhead.data import Dataset, Images
from fairhead.data.images import ReadyFeatures
from fairhead.errors import InputError
from fairhead.models.attached import positions_of
from fairhead.models.fresh import Recipe, is_ready
from fairhead.models.inputs import normalising, text_length, tokens_of
from fairhead.models.load import device_named, open_model
from fairhead.models.places import tokenizer_of
from fairhead.records import Column
from fairhead.store import read_arrays, reading
from fairhead.train.features import decoded_pictures, encode
from fairhead.train.kmeans import COUNTS, adjusted_rand, find_clusters, kmeans, stabilities, unit
from fairhead.train.step import Examples

# Called with (stage, done, all).
Tell = Callable[[str, int, int], None]

TYPICAL = {"pictures": 8, "texts": 5}
_WORDS = 8
_LEAST_COUNT = 5  # texts of a cluster that a word must be in
_ROWS = 6000  # that stability over seeds is looked at with
_SEEDS = 3


def features_of(
    encoder: str,  # a folder or a name of the hub, whose task head is left out; or "features:FILE.npz"
    data: Dataset,  # pictures or texts
    *,
    max_length: int = 128,  # tokens that texts are cut to
    device: str = "auto",  # where to compute
    cache: str | Path | None = None,  # folder for decoded pictures and features
    progress: Tell | None = None,  # called with (stage, done, all)
) -> Tensor:
    """The features of all rows of a data set, [n, D]: computed once, then mapped from disk."""
    tell = progress or (lambda stage, done, total: None)
    if is_ready(encoder):
        found = torch.from_numpy(ReadyFeatures.read(encoder).of(data.all.inputs, data.all.ids, data.all.numbered))
    else:
        found = _encoded(encoder, data, max_length, device, cache, tell)
    lost = torch.nonzero(~found.isfinite().all(1)).flatten()
    if len(lost):
        raise InputError(
            f"{encoder}: the features of {len(lost)} of {len(found)} rows are not finite (NaN or infinite); the first "
            f"are those of {data.all.ids[int(lost[0])]}"
        )
    return found


def _encoded(encoder: str, data: Dataset, max_length: int, device: str, cache: str | Path | None, tell: Tell) -> Tensor:
    recipe, rows = Recipe(encoder, data.classes), data.all.inputs
    pictures = isinstance(rows, Images)
    recipe.check()
    if recipe.place is None:
        raise InputError(f"{encoder} has fresh weights, and their features say nothing: give a pretrained encoder")
    model = open_model(encoder, "encoder", dtype="float32").model
    reads_pictures = getattr(model, "main_input_name", "") == "pixel_values"
    if reads_pictures != pictures:
        reads, have = ("pictures", "texts") if reads_pictures else ("texts", "pictures")
        such = "CLIP, DINOv2, ViT" if pictures else "BERT, MiniLM, RoBERTa"
        raise InputError(f"{encoder} reads {reads} and the data are {have}: give an encoder of {have} ({such})")
    if isinstance(rows, Images):
        model = normalising(model, recipe.pictures())
        size, told = recipe.pictures().size, partial(tell, "decode")
        inputs = {"pixel_values": torch.from_numpy(decoded_pictures(rows, size, cache, told))}
    else:
        length = positions_of(model) or text_length(model.config, max_length)
        inputs = tokens_of(tokenizer_of(recipe.place), rows, length)
    examples = Examples(inputs, torch.from_numpy(data.all.labels))
    return encode(model.to(device_named(device)), examples, cache, lambda done, total: tell("encode", done, total))


class Stable(NamedTuple):
    """How stable a number of clusters is: adjusted Rand indices between halves of the rows, and between seeds."""

    clusters: int
    halves: tuple[float, ...]
    seeds: tuple[float, ...]


@dataclass(frozen=True)
class FoundCluster:
    """One cluster."""

    name: str  # "cluster 1" is the largest
    size: int  # its rows
    share: float  # of all rows
    classes: Mapping[str, float]  # class -> its share within the cluster
    groups: Mapping[str, tuple[str, float]]  # group column -> its most frequent group here, and the share of that
    typical: tuple[int, ...]  # positions of the rows nearest to its centre
    words: tuple[str, ...]  # that set it apart, most telling first


class Agreement(NamedTuple):
    """How well clusters agree with a group column."""

    group_by: str  # the column
    purity: float  # share of rows whose cluster has mostly their group
    alone: float  # the same with one cluster for all: the share of the largest group
    adjusted_rand: float  # 1 for the same partition, 0 for chance
    # 0 where clusters and groups are independent, 1 where one says the other; tells also of rare groups
    cramers_v: float


class Grouping(NamedTuple):
    """What was found in the features."""

    column: Column  # the cluster of each row, the largest first
    clusters: tuple[FoundCluster, ...]  # one each
    stability: tuple[Stable, ...]  # of each number of clusters that was looked at
    agreement: tuple[Agreement, ...]  # with each group column that the data have


def group(data: Dataset, features: Tensor, count: int | None, words: str | Path | None, seed: int) -> Grouping:
    """Cluster the rows by their features [n, D] alone; then describe the clusters by all that is known of the rows."""
    if count is not None and count < 2:
        raise InputError(f"clusters is {count}; at least 2 are needed")
    vectors = None if words is None else _Vectors.read(words, features.shape[1])
    persons = data.attributes.cluster
    units = None if persons is None else torch.from_numpy(persons.codes.astype(np.int64))
    found = find_clusters(features, count, seed, units)
    if found.size < 2:
        raise InputError("all rows have the same features, so there are no clusters in them")
    shown = unit(features)
    points = (shown - found.mean) @ found.axes
    sizes = torch.bincount(found.clustering.cluster, minlength=found.size)
    order = [c for c in torch.argsort(sizes, descending=True, stable=True).tolist() if sizes[c]]
    number = np.zeros(found.size, dtype=np.int32)
    number[order] = np.arange(len(order))
    column = Column(number[found.clustering.cluster.numpy()], tuple(f"cluster {i}" for i in range(1, len(order) + 1)))
    # In all dimensions: an odd picture may be near the centre in the few that clusters are found in.
    centres = torch.stack([shown[found.clustering.cluster == c].mean(0) for c in order])
    away = (shown - centres[torch.from_numpy(column.codes.astype(np.int64))]).square().sum(1).numpy()
    if vectors is not None:
        nearest = [vectors.nearest(centre - shown.mean(0)) for centre in centres]
    elif isinstance(data.all.inputs, Images):
        nearest = [()] * len(order)
    else:
        nearest = telling_words([_text(one) for one in data.all.inputs], column)
    kept = TYPICAL["pictures" if isinstance(data.all.inputs, Images) else "texts"]
    clusters = tuple(_described(data, column, c, away, kept, nearest[c]) for c in range(len(order)))
    halves = found.stability or _stabilities(points, len(order), seed, units)
    stability = tuple(Stable(one.clusters, one.agreement, _over_seeds(points, one.clusters, seed)) for one in halves)
    agreement = tuple(agreement_of(name, column, groups) for name, groups in data.groups().items())
    return Grouping(column, clusters, stability, agreement)


def _described(
    data: Dataset, column: Column, c: int, away: NDArray[Any], kept: int, words: tuple[str, ...]
) -> FoundCluster:
    rows = np.flatnonzero(column.codes == c)
    shares = np.bincount(data.all.labels[rows], minlength=len(data.classes)) / len(rows)
    most = {}
    for name, groups in data.groups().items():
        counts = np.bincount(groups.take(rows).complete().codes, minlength=len(groups.levels))
        if counts.any():
            most[name] = (str(groups.levels[counts.argmax()]), float(counts.max() / counts.sum()))
    return FoundCluster(
        name=str(column.levels[c]),
        size=len(rows),
        share=len(rows) / len(data),
        classes=dict(zip(data.classes, shares.tolist(), strict=True)),
        groups=most,
        typical=tuple(rows[np.argsort(away[rows], kind="stable")[:kept]].tolist()),
        words=words,
    )


def _stabilities(points: Tensor, count: int, seed: int, units: Tensor | None) -> Sequence[Any]:
    """Of the usual numbers and the one that was asked for; none where the rows are too few to be halved."""
    try:
        return stabilities(points, sorted({*COUNTS, count}), seed, units=units)
    except InputError:
        return ()


def _over_seeds(points: Tensor, count: int, seed: int) -> tuple[float, ...]:
    """Adjusted Rand indices of each two of several seeds' clusterings of the same rows."""
    drawn = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))[:_ROWS]
    rows = points[drawn]
    found = [kmeans(rows, count, seed + i, restarts=1, rounds=50).cluster for i in range(_SEEDS)]
    return tuple(adjusted_rand(one, other) for one, other in combinations(found, 2))


def agreement_of(name: str, column: Column, groups: Column) -> Agreement:
    """How well clusters agree with a group column, over the rows that have a group.

    Example:
        >>> clusters, sex = Column(np.array([0, 0, 1, 1]), ("a", "b")), Column(np.array([1, 1, 0, 1]), ("f", "m"))
        >>> found = agreement_of("sex", clusters, sex)
        >>> found.purity, found.alone, found.adjusted_rand, round(found.cramers_v, 3)
        (0.75, 0.75, 0.0, 0.577)
    """
    column, groups = column if groups.known is None else column.take(groups.known), groups.complete()
    table = np.zeros((len(column.levels), len(groups.levels)))
    np.add.at(table, (column.codes, groups.codes), 1)
    codes = [torch.from_numpy(one.codes.astype(np.int64)) for one in (column, groups)]
    purity, alone = (float(count / table.sum()) for count in (table.max(1).sum(), table.sum(0).max()))
    seen = table[:, table.any(0)]
    v = float(association(seen.astype(np.int64), "cramer")) if seen.shape[1] > 1 else 0.0
    return Agreement(name, purity, alone, adjusted_rand(*codes), v)


def telling_words(texts: Sequence[str], column: Column) -> list[tuple[str, ...]]:
    """For each cluster, the words whose log-odds of occurring in a text are highest against all other texts.

    Ranked by the log-odds over their standard error, so that a rare word does not win by chance; a word must be in at
    least five texts of the cluster, and clearly more frequent there.

    Example:
        >>> column = Column(np.repeat([0, 1], 8), ("cluster 1", "cluster 2"))
        >>> telling_words(["a cat sleeps"] * 8 + ["a dog sleeps"] * 8, column)
        [('cat',), ('dog',)]
    """
    position: dict[str, int] = {}
    found = [sorted({*re.findall(r"[^\W\d_]{2,}", text.lower())}) for text in texts]
    places = [position.setdefault(word, len(position)) for words in found for word in words]
    if not position:
        return [() for _ in column.levels]
    names, starts = list(position), np.cumsum([0, *map(len, found)])
    table = csr_array((np.ones(len(places)), places, starts), shape=(len(texts), len(names)))
    total = np.asarray(table.sum(axis=0)).ravel()
    words = []
    for c in range(len(column.levels)):
        rows = np.flatnonzero(column.codes == c)
        inside = np.asarray(table[rows].sum(axis=0)).ravel()
        counts = [inside, len(rows) - inside, total - inside, len(texts) - len(rows) - total + inside]
        have, lack, others_have, others_lack = (count + 0.5 for count in counts)
        odds = np.log(have / lack) - np.log(others_have / others_lack)
        z = odds / np.sqrt(1 / have + 1 / lack + 1 / others_have + 1 / others_lack)
        z[inside < _LEAST_COUNT] = -np.inf
        top = np.argsort(-z, kind="stable")[:_WORDS]
        words.append(tuple(names[i] for i in top if z[i] > 2))
    return words


def _text(one: Any) -> str:
    return f"{one.premise} {one.hypothesis}" if hasattr(one, "premise") else str(one)


class _Vectors(NamedTuple):
    """Words and their vectors [m, D] in the space of the features, less the mean of all words, of unit length."""

    texts: tuple[str, ...]
    vectors: Tensor

    @classmethod
    def read(cls, path: str | Path, width: int) -> "_Vectors":
        found = read_arrays(path, "texts", "vectors")
        with reading(path, "has vectors that are no numbers"):
            texts, vectors = found["texts"].astype(str).tolist(), np.asarray(found["vectors"], dtype=np.float32)
        if vectors.ndim != 2 or len(vectors) != len(texts) or vectors.shape[1] != width:
            raise InputError(
                f"{path}: {len(texts)} texts have vectors of the shape {list(vectors.shape)}, and the features are of "
                f"width {width}; words must come from the same space, such as CLIP's text side for CLIP's pictures"
            )
        # [PAD] and the like are no words.
        rows = [i for i, text in enumerate(texts) if not text.startswith(("[", "<", "##"))]
        known = unit(torch.from_numpy(vectors[rows]))
        return cls(tuple(texts[i] for i in rows), unit(known - known.mean(0)))

    def nearest(self, direction: Tensor) -> tuple[str, ...]:
        """The words nearest to a direction [D]."""
        return tuple(self.texts[i] for i in (self.vectors @ direction).topk(min(_WORDS, len(self.texts))).indices)
