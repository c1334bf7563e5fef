"""The table that every verb reads or writes: one row an example.

Categorical columns are held as small integer codes, so that ten million rows fit in memory and every count
metric is a `bincount`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Column:
    """A categorical column.

    Attributes:
        codes: integers of shape [n] into `levels`; never negative (missing values are refused or dropped on reading).
        levels: the distinct values, sorted.
    """

    codes: NDArray[np.integer]
    levels: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(frozen=True)
class Records:
    """Labels, predictions and groups of n examples.

    Attributes:
        label: true classes. `label.levels` are the classes of the task and `prediction` has the same levels.
        prediction: predicted classes, or None where only scores are known.
        scores: probability of the positive class, shape [n] (binary), or of each class, shape [n, C].
        groups: sensitive columns by name, for auditing only.
        id: one distinct value a row, for joining two sets of records.
        cluster: rows with the same value are resampled together (same document, same person).
        weight: non-negative sampling weights, shape [n].
        provenance: where the rows came from (path, sha256, rows read, rows dropped, ...).
    """

    label: Column
    prediction: Column | None = None
    scores: NDArray[np.float64] | None = None
    groups: Mapping[str, Column] = field(default_factory=dict)
    id: NDArray[Any] | None = None
    cluster: Column | None = None
    weight: NDArray[np.float64] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.label)

    @property
    def classes(self) -> tuple[Any, ...]:
        """The classes of the task, sorted; for a binary task the last one is the positive class."""
        return self.label.levels
