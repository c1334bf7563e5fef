"""The rows that a model was trained on, beside its weights: figures on them say nothing about other rows.

They are digests of the inputs (see `fairhead.data.datasets`), so that rows are known again whatever file, order,
ids or seed of a split they come with.
"""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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


def seen_rows(model: Any, examples: Examples, *parts: str) -> NDArray[np.bool_] | None:
    """Which rows a model was trained on, or chosen by, [n]; None where nothing is known. `parts`: "train" alone."""
    known = training_rows(model)
    if not known:
        return None
    return np.isin(row_digests(examples), sorted(frozenset().union(*(known[part] for part in parts or _PARTS))))


def unseen(model: Any, examples: Examples, go_on: bool = False) -> Examples:
    """The rows that a model was neither trained on nor chosen by; how many are left out is said.

    With `go_on` it is said only, and all are given back.
    """
    seen = seen_rows(model, examples)
    if seen is None or not seen.any():
        return examples
    count = f"{int(seen.sum()):,} of {len(examples):,} rows"
    if go_on:
        logging.getLogger("fairhead").warning("the model was trained on, or chosen by, %s that it is asked", count)
        return examples
    if seen.all():
        raise InputError(f"the model was trained on, or chosen by, all {len(examples):,} rows asked for: give others")
    told = "%s are left out: the model was trained on them, or chosen by them (another seed draws another split)"
    logging.getLogger("fairhead").warning(told, count)
    return examples.take(np.flatnonzero(~seen))
