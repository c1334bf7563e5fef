"""From a published data set to what training is given. Groups come back only when records are made.

Also for models beside the one that a cell trains: a teacher, an adversary, or a frozen one whose features are read.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fairhead.bench.grid import NAMING, Cell, Data, expanded
from fairhead.data import Dataset, Images, read_labelled
from fairhead.data import Examples as Published
from fairhead.data.datasets import row_digests
from fairhead.data.files import files_below, stamp_of
from fairhead.data.ready_features import ReadyFeatures
from fairhead.errors import InputError, check_known
from fairhead.mitigate.training_job import AuxiliaryModel
from fairhead.models.fresh import Recipe, is_fresh, is_ready
from fairhead.models.inputs import text_length, tokenizer_of, tokens_of
from fairhead.models.linear_head import FEATURES
from fairhead.models.places import Place, config_of
from fairhead.models.training_rows import unseen
from fairhead.records import Records
from fairhead.train import Examples
from fairhead.train.cache import decoded_pictures
from fairhead.train.features import encode
from fairhead.train.linear import ready_features

Progress = Callable[[int, int], None]
# Options of readers that choose among the same pictures: those are then decoded once for all of them.
_CHOOSING = ("seed", "bias_rate", "fractions", "split", "person", "groups_from")


@dataclass(frozen=True)
class Task:
    """Everything one run needs."""

    train: Examples  # inputs and labels
    validation: Examples  # inputs and labels
    test: Examples  # inputs and labels
    kind: str  # "image" or "text"
    group: str | None  # the group column that the table is about; None where the data have none
    test_ids: NDArray[np.str_]  # of the test rows, [n]
    _dataset: Dataset
    _ids: dict[str, NDArray[np.str_]]
    like: Examples | None = None  # inputs and labels of a deployment sample, where one was given
    like_units: Tensor | None = None  # who or what its rows are of, [n]; None where each stands for itself

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self._dataset.classes

    def records(self, probabilities: Tensor, part: str = "test") -> Records:
        """Join the answers for the rows of a part, [n, C], with their labels and groups."""
        return self._dataset.records(self._ids[part], probabilities)

    @property
    def columns(self) -> tuple[str, ...]:
        """All group columns of the data."""
        return tuple(self._dataset.attributes.columns)

    def check_groups(self, columns: Sequence[str]) -> None:
        """Refuse, before training, test rows that are of one group: there would be nothing to audit."""
        found = self._dataset.groups(self.test_ids)
        for name in columns:
            levels = {*found[name].complete().codes.tolist()}
            if len(levels) < 2:
                only = "".join(str(found[name].levels[code]) for code in levels) or "which is empty"
                raise InputError(
                    f"the test rows have one group only in the column {name!r}, {only}, and a gap needs at least two: "
                    "name another column (--group), or another split"
                )

    def published(self, part: str) -> Published:
        """The rows of a part as they were read."""
        return self._dataset.all.take(self._dataset.attributes.rows(self._ids[part]))

    def units(self, part: str) -> Tensor | None:
        """Who or what the rows of a part are of (persons, documents), [n]; None where each stands for itself."""
        attributes = self._dataset.attributes
        if attributes.cluster is None:
            return None
        return torch.from_numpy(attributes.cluster.codes[attributes.rows(self._ids[part])].astype(np.int64))

    def groups(self, part: str) -> Tensor:
        """Group numbers of the train or validation rows, [n]: for the references that train with groups, only.

        Rows without a group are one more.
        """
        if self.group is None:
            raise InputError(f"{self._dataset.name} has no group column, and groups are asked for: name one (--group)")
        found = self._dataset.groups(self._ids[part])[self.group]
        return torch.from_numpy(np.where(found.codes < 0, len(found.levels), found.codes).astype(np.int64))


def read_task(
    data: Data,  # which data, and how
    # From the names of the classes to the model, which decides size and normalisation or tokens
    recipe_of: Callable[[tuple[str, ...]], Recipe],
    seed: int,  # of the split, where it follows the seed, and of the rows that a limit keeps
    cache: Path | None = None,  # folder for decoded pictures
    progress: Progress | None = None,  # called with (done, total) while pictures are decoded
) -> Task:
    """Read a data set and make its parts ready for a model."""
    dataset = _dataset(data, seed)
    group = _group(dataset, data)
    recipe = recipe_of(dataset.classes)
    recipe.check()
    parts = {
        name: _limited(dataset.examples(published), data.limit, seed)
        for name, published in zip(("train", "validation", "test"), data.parts, strict=True)
    }
    if recipe.place is not None:  # it may have been trained before
        parts["test"] = unseen(recipe.name, parts["test"])
    kind = "image" if isinstance(dataset.all.inputs, Images) else "text"
    if is_ready(recipe.name):
        inputs = _ready(recipe)
    else:
        inputs = _pictures(data, recipe, cache, progress) if kind == "image" else _texts(data, recipe)
    ready = {name: Examples(inputs(part), torch.from_numpy(part.labels)) for name, part in parts.items()}
    ids = {name: part.ids for name, part in parts.items()}
    like = _like(data, dataset, recipe, inputs)
    return Task(ready["train"], ready["validation"], ready["test"], kind, group, ids["test"], dataset, ids, *like)


def _like(
    data: Data, dataset: Dataset, recipe: Recipe, inputs: Callable[[Published], dict[str, Tensor]]
) -> tuple[Examples | None, Tensor | None]:
    """All rows of the deployment sample, and their units; groups are not read."""
    if data.like is None:
        return None, None
    reader = data.read.partition(":")[0]
    spec = data.like if data.like.startswith(f"{reader}:") else f"{reader}:{data.like}"
    options = {name: value for name, value in data.options.items() if name not in ("groups", "groups_from")}
    sample = _dataset(replace(data, read=spec, options=options, split_by_seed=False), None)
    if set(sample.classes) != set(dataset.classes):
        raise InputError(
            f"{data.like}: the deployment sample has the classes {', '.join(sample.classes)} and "
            f"the data {', '.join(dataset.classes)}; they must be the same"
        )
    # Not by ids, where they could be those of other rows: tables without an id column number their rows.
    known = set(dataset.all.ids.tolist())
    there = np.isin(row_digests(sample.all), row_digests(dataset.all))
    if there.all():
        raise InputError(
            f"{data.like}: all {len(sample):,} rows of the deployment sample are among the data: give others"
        )
    if there.any():
        told = "%s: %s of %s rows of the deployment sample are among the data, and are left out"
        logging.getLogger("fairhead").warning(told, data.like, f"{int(there.sum()):,}", f"{len(sample):,}")
    kept = np.flatnonzero(~there)
    rows = sample.all.take(kept)
    if isinstance(rows.inputs, Images) and not is_ready(recipe.name):
        found = {"pixel_values": _channels_first(_images(rows).as_array(recipe.pictures().size))}
    elif is_ready(recipe.name) and not isinstance(rows.inputs, Images) and known & set(rows.ids.tolist()):
        raise InputError(
            f"{data.like}: rows of the sample have ids of the data, by which features are found: use others"
        )
    else:
        found = inputs(rows)
    order = np.array([dataset.classes.index(name) for name in sample.classes])
    cluster = sample.attributes.cluster
    units = None if cluster is None else torch.from_numpy(cluster.codes[kept].astype(np.int64))
    return Examples(found, torch.from_numpy(order[rows.labels])), units


def _ready(recipe: Recipe) -> Callable[[Published], dict[str, Tensor]]:
    table = ReadyFeatures.read(recipe.name)
    return lambda part: {FEATURES: torch.from_numpy(table.of(part))}


@lru_cache(maxsize=16)  # five seeds of two settings and more: a worker comes back to each with the next method
def _read(spec: str, options: str, _stamp: str) -> Dataset:
    return read_labelled(spec, **json.loads(options))


def _dataset(data: Data, seed: int | None) -> Dataset:
    options = dict(data.options)
    if data.split_by_seed and seed is not None:
        options["seed"] = seed
    if data.read.startswith("memory:"):
        return read_labelled(data.read, **options)
    places = [data.read.partition(":")[2], *([options["groups_from"]] if options.get("groups_from") else [])]
    stamp = stamp_of(file for place in places for file in files_below(place))
    return _read(data.read, json.dumps(options, sort_keys=True), stamp)


def _group(dataset: Dataset, data: Data) -> str | None:
    columns = list(dataset.attributes.columns)
    if not columns and data.group is None:
        return None
    if not columns:
        raise InputError(f"{data.name} has no group column: nothing to audit. Name one or more (--group, groups=)")
    group = columns[0] if data.group is None else data.group
    check_known(group, columns, f"{data.name} has no group column {group!r}; there are")
    if data.options.get("target") == group:
        raise InputError(f"{data.name}: {group} is what the model is to predict; name another group column to audit by")
    return group


def _limited(examples: Published, limit: int | None, seed: int) -> Published:
    if limit is None or limit >= len(examples):
        return examples
    return examples.take(np.sort(np.random.default_rng(seed).permutation(len(examples))[:limit]))


def _pictures(
    data: Data, recipe: Recipe, cache: Path | None, progress: Progress | None
) -> Callable[[Published], dict[str, Tensor]]:
    size = recipe.pictures().size

    def alone(part: Published) -> dict[str, Tensor]:
        return {"pixel_values": _channels_first(_images(part).as_array(size))}

    if data.limit is not None:  # a few pictures: quicker decoded than looked up
        return alone
    options = {name: value for name, value in data.options.items() if name not in _CHOOSING}
    if "groups_from" in data.options:  # its columns are not the reader's
        options.pop("groups", None)
    every = _dataset(Data(data.name, data.read, options), None).all
    decoded = decoded_pictures(_images(every), size, cache, progress)
    row_of = {name: row for row, name in enumerate(every.ids.tolist())}

    def inputs(part: Published) -> dict[str, Tensor]:
        rows = [row_of.get(name, -1) for name in part.ids.tolist()]
        if min(rows) < 0:
            return alone(part)
        return {"pixel_values": torch.from_numpy(np.asarray(decoded[rows]))}

    return inputs


def _images(part: Published) -> Images:
    assert isinstance(part.inputs, Images)
    return part.inputs


def _channels_first(pixels: NDArray[np.uint8]) -> Tensor:
    """[n, H, W, 3] to [n, 3, H, W], bytes still: the model normalises them (see `inputs.normalising`)."""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))


def _texts(data: Data, recipe: Recipe) -> Callable[[Published], dict[str, Tensor]]:
    if recipe.place is None:
        raise InputError(f"{data.name} has texts, which {recipe.name} cannot read: give a backbone path:FOLDER")
    tokenizer, length = tokenizer_of(recipe.place), text_length(config_of(recipe.place), data.max_length)
    return lambda part: tokens_of(tokenizer, part.inputs, length)


def check_auxiliary_models(cell: Cell) -> None:
    """Refuse, before any work, an option that names a model which is not there."""
    for name in _named(cell):
        _recipe(cell, name, ("0", "1")).check()


def auxiliary_models_of(
    cell: Cell, task: Task, device: str, cache: Path | None, progress: Progress
) -> Callable[[str], AuxiliaryModel]:
    """What gives a cell's method other models by their names, with the cell's own rows made ready for them.

    Those that its options name are read here, so that decoding their pictures is not counted as training. The rows of
    `task` serve where a model takes the same pictures or tokens.
    """
    own = _inputs_of(Recipe(cell.backbone.model, task.classes, cell.backbone.settings), task.kind)

    def read(name: str) -> Task:
        if _inputs_of(_recipe(cell, name, task.classes), task.kind) == own:
            return task
        return read_task(cell.data, lambda classes: _recipe(cell, name, classes), cell.seed, cache, progress)

    ready = {name: read(name) for name in _named(cell)}

    def named(name: str) -> AuxiliaryModel:
        theirs = ready[name] if name in ready else read(name)
        recipe = _recipe(cell, name, task.classes)

        def build_model() -> nn.Module:
            model: nn.Module = recipe.build(task.kind, cell.seed)
            return model

        features = ready_features if is_ready(recipe.name) else _Frozen(recipe, task.kind, device, cache)
        return AuxiliaryModel(build_model, features, theirs.train, theirs.validation, theirs.like)

    return named


def _named(cell: Cell) -> list[str]:
    """The models that a cell's options name."""
    options = cell.settings()["method"]["options"].items()
    return [value for option, value in options if option in NAMING and isinstance(value, str)]


def _inputs_of(recipe: Recipe, kind: str) -> int | str | Place | None:
    """What decides how rows are made ready for a model: the size of its pictures, or the folder of its tokenizer."""
    if is_ready(recipe.name):
        return recipe.name
    return recipe.pictures().size if kind == "image" else recipe.place


def _recipe(cell: Cell, name: str, classes: tuple[str, ...]) -> Recipe:
    """The cell's own model, or another fresh one, has the settings (width, image size) of the cell's own."""
    name = expanded(name, f"the model of {cell.method.name}")
    alike = name == cell.backbone.model or (is_fresh(name) and is_fresh(cell.backbone.model))
    settings: Mapping[str, Any] = cell.backbone.settings if alike else {}
    return Recipe(name, classes, settings)


@dataclass(frozen=True)
class _Frozen:
    """Features by a pretrained model as it is."""

    recipe: Recipe
    kind: str
    device: str
    cache: Path | None

    def __call__(self, examples: Examples) -> Tensor:
        """[n, D]."""
        return encode(self.recipe.build_trunk(self.kind).to(self.device), examples, self.cache)
