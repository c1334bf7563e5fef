"""What a cell comes to when every default is filled in. Results are known by it: a changed default is another result.

Versions of PyTorch and transformers take no part: parts of a grid may run on several machines. Each row names its own
(`made_with`), and the table says so where they differ.
"""

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import Field, fields
from glob import glob
from typing import Any

from fairhead.bench.grid import COUNT_WHERE_SET, NAMING, PLAN_FIELDS, Cell, expanded
from fairhead.data import parse_spec
from fairhead.data.files import content_of
from fairhead.data.ready_features import PREFIX
from fairhead.errors import InputError
from fairhead.mitigate.registry import method_named, names
from fairhead.models.fresh import Recipe, is_ready
from fairhead.train import TrainingPlan

ROW_SCHEMA = "fairhead.bench/1"

# To be raised when the same settings come to give other results: a method mended, another preprocessing.
REVISION = 1


def method_of(cell: Cell) -> Any:
    """The settings of a cell's method; it must use groups exactly where the cell says so."""
    entry, options = method_named(cell.method.method), cell.settings()["method"]["options"]
    if entry.kind != "classifier":
        raise InputError(f"{entry.name} is for language models: run it with fairhead mitigate {entry.name}")
    if entry.uses_groups and not cell.method.uses_groups:
        raise InputError(
            f"{entry.name} trains with the sensitive attribute: list it under references (or give --reference-group), "
            "so that the table shows it apart"
        )
    if cell.method.uses_groups and cell.method.selection is None and not entry.uses_groups:
        known = ", ".join(names(uses_groups=True))
        raise InputError(f"{entry.name} is among the references and never sees a group; those that do: {known}")
    return entry.configure(**options)


def effective(cell: Cell) -> dict[str, Any]:
    """`cell.settings()` with the defaults of the reader, the model, the method and the plan, JSON-ready."""
    found = cell.settings()
    config, backbone = method_of(cell), found["backbone"]
    options = {setting.name: getattr(config, setting.name) for setting in fields(config) if _counts(setting, config)}
    plan = {f.name: f.default for f in fields(TrainingPlan) if f.name in PLAN_FIELDS and f.name not in COUNT_WHERE_SET}
    full = {
        **found,
        "data": {**found["data"], "options": {**_reader_defaults(cell), **found["data"]["options"]}},
        "backbone": {**backbone, "settings": Recipe(cell.backbone.model, (), cell.backbone.settings).all_settings()},
        "method": {**found["method"], "options": options},
        "plan": {**plan, **{name: value for name, value in found["plan"].items() if name != "checkpoint_minutes"}},
        "revision": REVISION,
    }
    ready: dict[str, Any] = json.loads(
        json.dumps(full, default=lambda x: dict(x) if isinstance(x, Mapping) else str(x))
    )
    return ready


def _counts(setting: Field[Any], config: Any) -> bool:
    """Compared ones only, as what builds a model in Python cannot come from a grid; later ones where they are used."""
    unused = setting.metadata.get("added_later", False) and getattr(config, setting.name) == setting.default
    return setting.compare and not unused


def fingerprint(cell: Cell) -> str:
    """A short hash of `effective`."""
    text = json.dumps(effective(cell), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def contents_of(cell: Cell) -> str | None:
    """A hash of the files that a cell reads: its data, a sample, groups, models; None where one cannot be looked at.

    Apart from the fingerprint, so that results of before this was kept stay what they are.
    """
    if cell.data.read.startswith("memory:"):
        return None
    options, data = cell.settings()["method"]["options"], cell.data
    named = [cell.backbone.model, *(options[name] for name in NAMING if isinstance(options.get(name), str))]
    places: list[Any] = [data.read.partition(":")[2]]
    places += [data.options["groups_from"]] if data.options.get("groups_from") else []
    places += [] if data.like is None else [data.like.removeprefix(f"{data.read.partition(':')[0]}:")]
    try:
        for model in (expanded(name, "the model") for name in named):
            place = Recipe(model, ()).place
            places += sorted(glob(model.removeprefix(PREFIX))) if is_ready(model) else []
            places += [] if place is None else [place.folder, *([place.adapter] if place.adapter else [])]
    except InputError:  # it is not here, which whoever runs the cell says
        return None
    found = [content_of(place) for place in places]
    return None if None in found else hashlib.sha256("".join(map(str, found)).encode()).hexdigest()[:16]


def row_of(cell: Cell, status: str) -> dict[str, Any]:
    """What the row of any cell says: which it is, what was asked for, and how it ended."""
    return {
        "schema": ROW_SCHEMA,
        "cell": cell.name,
        "fingerprint": fingerprint(cell),
        "status": status,
        "data": cell.data.name,
        "backbone": cell.backbone.name,
        "method": cell.method.name,
        "seed": cell.seed,
        "settings": cell.settings(),
    }


def failed_row(cell: Cell, error: str, trace: str = "") -> dict[str, Any]:
    """The row of a cell that failed."""
    return {**row_of(cell, "failed"), "error": error, "traceback": trace}


def _reader_defaults(cell: Cell) -> dict[str, Any]:
    options = parse_spec(cell.data.read).reader.options
    return {name: default for name, default in options.items() if default is not inspect.Parameter.empty}
