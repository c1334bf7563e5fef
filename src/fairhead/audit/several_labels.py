"""Several labels a row, each true or not and predicted or not: rates of each label, from whole rows drawn again."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.audited_rows import View
from fairhead.audit.metrics import Margins
from fairhead.audit.rates import RATES, Kind, Tables
from fairhead.errors import InputError
from fairhead.stats.bootstrap import Content, Sample
from fairhead.stats.clusters import divide

Array = NDArray[np.float64]

# Patterns of labels and predictions are told apart as whole numbers of 64 bits.
_MOST_LABELS = 24


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
    view: View,
    group: NDArray[np.integer],
    groups: tuple[str, ...],
    n_boot: int,
    seed: int,
    clusters: NDArray[np.int64] | None,
) -> LabelTables:
    """The tables of one group column, from group codes [n]."""
    n_labels = len(view.labels)
    if n_labels > _MOST_LABELS:
        raise InputError(f"{n_labels} labels are named; at most {_MOST_LABELS} can be audited at once")
    key = group.astype(np.int64)
    for true, said in view.labels:
        key = key * 4 + 2 * true + said
    shape = (len(groups), n_labels, 2, 2)
    kinds, unit = np.unique(key, return_inverse=True)
    # The cells of each pattern: which label, true or not, predicted or not.
    bits = (kinds[:, None] >> (2 * np.arange(n_labels)[::-1])) & 3
    cells = ((kinds >> (2 * n_labels))[:, None] * n_labels + np.arange(n_labels)) * 4 + bits
    times = np.bincount(unit, minlength=len(kinds))
    rows = np.bincount(cells.ravel(), np.repeat(times, n_labels), int(np.prod(shape))).reshape(shape).astype(np.int64)
    if view.weight is None and view.cluster is None:
        content = Content(np.repeat(np.arange(len(kinds)), n_labels), cells.ravel(), None, rows)
        sample = Sample(times, (content,))
    else:
        own = np.arange(len(key)) if view.cluster is None else np.unique(view.cluster, return_inverse=True)[1]
        weight = None if view.weight is None else np.repeat(view.weight, n_labels)
        content = Content(np.repeat(own, n_labels), cells[unit].ravel(), weight, rows)
        sample = Sample(np.ones(int(own.max()) + 1, dtype=np.int64), (content,))
    star = sample.bootstrap(n_boot, np.random.default_rng(seed))[0]
    kinds_of = RATES | {"accuracy": Kind(_share_right, lambda m: m.total, "rows", "none")}
    return LabelTables(groups, view.classes, sample.observed()[0], star, rows, False, clusters, kinds=kinds_of)
