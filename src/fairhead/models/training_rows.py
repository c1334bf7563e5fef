"""The rows that a model was trained on, beside its weights: figures on them say nothing about other rows.

They are digests of the inputs (see `fairhead.data.datasets`), so that rows are known again whatever file, order,
ids or seed of a split they come with.
"""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.data import Examples
from fairhead.data.datasets import row_digests
from fairhead.errors import InputError
from fairhead.models.places import find
from fairhead.store import reading, write_json

FILE = "training_rows.json"
_SCHEMA = "fairhead.training_rows/1"
_PARTS = ("train", "validation")


def training_rows(model: Any) -> dict[str, frozenset[str]]:
    """Digests of the training rows and the validation rows of a folder, a name or a live model; empty where unknown."""
    name = model if isinstance(model, str | Path) else getattr(getattr(model, "config", None), "_name_or_path", None)
    try:
        file = find(name).holding(FILE) / FILE if name else Path(FILE)
    except InputError:  # fresh weights, features, or a folder that is gone
        return {}
    if not name or not file.is_file():
        return {}
    with reading(file, "is not a list of training rows: remove it, and the model's rows are not known"):
        found = json.loads(file.read_text(encoding="utf-8"))
        return {part: frozenset(found[part]) for part in _PARTS}


def with_training_rows(model: Any, rows: Mapping[str, Examples] | None = None) -> Callable[[Path], None]:
    """What writes into a folder the rows of `train` and `validation`, and those that the model knows from before."""
    before = training_rows(model)

    def write(folder: Path) -> None:
        own = {part: row_digests(rows[part]).tolist() if rows else () for part in _PARTS}
        both = {part: sorted({*before.get(part, ()), *own[part]}) for part in _PARTS}
        if any(both.values()):
            write_json(folder / FILE, {"schema": _SCHEMA, **both})

    return write


class SeenRows(NamedTuple):
    """Which rows a model was trained on, and which it was chosen by, [n] bool each."""

    train: NDArray[np.bool_]
    validation: NDArray[np.bool_]

    @property
    def any(self) -> NDArray[np.bool_]:
        """Rows of either kind."""
        return self.train | self.validation

    @property
    def words(self) -> str:
        """How many of each."""
        counts = {"trained on": int(self.train.sum()), "chosen by": int((self.validation & ~self.train).sum())}
        return "the model was " + " and ".join(f"{how} {count:,} of them" for how, count in counts.items() if count)


def seen_rows(model: Any, examples: Examples) -> SeenRows | None:
    """Rows that a model has seen; None where it has seen none, or nothing is known."""
    known = training_rows(model)
    if not known:
        return None
    digests = row_digests(examples)
    found = SeenRows(*(np.isin(digests, sorted(known[part])) for part in _PARTS))
    return found if found.any.any() else None


def unseen(model: Any, examples: Examples, go_on: bool = False) -> Examples:
    """The rows that a model was neither trained on nor chosen by; how many are left out is said.

    With `go_on` it is said only, and all are given back.
    """
    seen = seen_rows(model, examples)
    if seen is None:
        return examples
    count = f"{int(seen.any.sum()):,} of {len(examples):,} rows"
    if go_on:
        logging.getLogger("fairhead").warning("the model was trained on, or chosen by, %s that it is asked", count)
        return examples
    if seen.any.all():
        raise InputError(f"the model was trained on, or chosen by, all {len(examples):,} rows asked for: give others")
    told = "%s are left out: %s (another seed draws another split)"
    logging.getLogger("fairhead").warning(told, count, seen.words)
    return examples.take(np.flatnonzero(~seen.any))
