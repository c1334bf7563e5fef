"""Several labels a row, each true or not and predicted or not: rates of each label, from whole rows drawn again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.audited_rows import View
from fairhead.audit.metrics import Margins
from fairhead.audit.rates import RATES, Kind, Tables, small_groups
from fairhead.errors import InputError
from fairhead.stats.bootstrap import Content, Sample
from fairhead.stats.clusters import divide

Array = NDArray[np.float64]

# Patterns of labels and predictions are told apart as whole numbers of 64 bits, some of which the groups need.
_MOST_BITS = 48


def _share_right(margins: Margins) -> Array:
    """The share of labels that are predicted right (1 − Hamming loss), [..., 1, G]."""
    right = margins.total - margins.true - margins.predicted + 2 * margins.hits
    return divide(right, margins.total + 0 * right).mean(axis=-2, keepdims=True)


@dataclass(frozen=True)
class LabelTables(Tables):
    """Counts [G, L, 2, 2] of each label, and their replicates [B, G, L, 2, 2]; `classes` are the names of labels."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Rows of each group, shape [G]."""
        return np.asarray(self.rows[:, 0].sum(axis=(-1, -2)))

    @property
    def binary(self) -> bool:
        """Each label stands for itself."""
        return False

    @property
    def prevalence(self) -> Array:
        """Share of each label among all labels, shape [L]."""
        true = self.counts[:, :, 1].sum(axis=(0, -1))
        return np.asarray(true / max(true.sum(), 1.0))

    @cached_property
    def _margins(self) -> tuple[Margins, Margins]:
        return _margins_of(self.counts), _margins_of(self.star)

    @cached_property
    def _row_margins(self) -> Margins:
        return _margins_of(self.rows.astype(np.float64))


def _margins_of(counts: Array) -> Margins:
    """Margins of each label, from counts [..., G, L, 2, 2]."""
    true, predicted, hits = counts[..., 1, :].sum(axis=-1), counts[..., 1].sum(axis=-1), counts[..., 1, 1]
    total = counts[..., 0, :, :].sum(axis=(-1, -2))[..., None, :]
    return Margins(true.swapaxes(-1, -2), predicted.swapaxes(-1, -2), hits.swapaxes(-1, -2), total)


def label_tables(
    sample: Sample,  # what `label_sample` makes
    stars: Sequence[Array],  # replicates of its counts, one [B, G, L, 2, 2] for each set of predictions
    labels: tuple[str, ...],  # their names
    groups: tuple[str, ...],  # those of the groups
    clusters: NDArray[np.int64] | None,  # as in `Tables`
    min_group: float,  # rows that a group needs, or a share of all
    settled: bool = False,  # as in `Tables`
) -> list[LabelTables]:
    """The tables of one group column, one for each set of predictions."""
    kinds, found = RATES | {"accuracy": Kind(_share_right, lambda m: m.total, "rows", "none")}, []
    for hat, star, content in zip(sample.observed(), stars, sample.contents, strict=True):
        table = LabelTables(groups, labels, hat, star, content.rows, settled, clusters, kinds=kinds)
        found.append(replace(table, small=small_groups(table.sizes, min_group)))
    return found


def label_sample(views: Sequence[View], group: NDArray[np.integer], n_groups: int) -> Sample:
    """Rows by their patterns of labels and predictions, from group codes [n].

    The views have the same labels; each set of predictions is a content of the sample, with cells [G, L, 2, 2].
    """
    n_labels, sets, view = len(views[0].labels), len(views), views[0]
    bits = 1 + sets
    if n_labels > _MOST_BITS // bits:
        raise InputError(f"{n_labels} labels are named; at most {_MOST_BITS // bits} can be audited at once")
    key = group.astype(np.int64)
    for k, (true, _) in enumerate(view.labels):
        for bit in (true, *(of.labels[k][1] for of in views)):
            key = key * 2 + bit
    kinds, unit = np.unique(key, return_inverse=True)
    pattern = (kinds[:, None] >> (bits * np.arange(n_labels)[::-1])) & ((1 << bits) - 1)  # [kinds, L]
    first = (kinds >> (bits * n_labels))[:, None] * n_labels + np.arange(n_labels)
    times, shape = np.bincount(unit, minlength=len(kinds)), (n_groups, n_labels, 2, 2)
    own, weight = np.arange(len(kinds)), None
    plain = view.weight is None and view.cluster is None
    if not plain:
        own = np.arange(len(key)) if view.cluster is None else np.unique(view.cluster, return_inverse=True)[1]
        weight = None if view.weight is None else np.repeat(view.weight, n_labels)
    contents = []
    for k in range(sets):
        # Which label, true or not, predicted or not.
        cells = first * 4 + 2 * (pattern >> sets) + ((pattern >> (sets - 1 - k)) & 1)
        rows = np.bincount(cells.ravel(), np.repeat(times, n_labels), int(np.prod(shape))).reshape(shape)
        cell = (cells if plain else cells[unit]).ravel()
        contents.append(Content(np.repeat(own, n_labels), cell, weight, rows.astype(np.int64)))
    return Sample(times if plain else np.ones(int(own.max()) + 1, dtype=np.int64), tuple(contents))
