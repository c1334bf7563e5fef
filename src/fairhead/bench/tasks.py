"""From a published data set to what training is given. Groups come back only when records are made.

Also for models beside the one that a cell trains: a teacher, an adversary, or a frozen one whose features are read.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairhead.bench.grid import NAMING, PARTS, Cell, Data, expanded
from fairhead.data import Dataset, Images, read_labelled
from fairhead.data import Examples as Published
from fairhead.data.datasets import row_digests
from fairhead.data.files import files_below, stamp_of
from fairhead.data.images import ReadyFeatures
from fairhead.errors import InputError, check_known
from fairhead.mitigate.training_job import AuxiliaryModel
from fairhead.models.attached import FEATURES
from fairhead.models.fresh import Recipe, is_fresh, is_ready
from fairhead.models.inputs import text_length, tokens_of
from fairhead.models.places import config_of, tokenizer_of, unseen
from fairhead.records import Records
from fairhead.train.features import decoded_pictures, encode
from fairhead.train.fitting import ready_features
from fairhead.train.step import Examples

Progress = Callable[[int, int], None]
Inputs = Callable[[Published], dict[str, Tensor]]
# Options of readers that leave pictures out by chance: all are then decoded once, for every seed.
_THINNING = ("bias_rate", "seed")


@dataclass(frozen=True)
class Task:
    """Everything one run needs."""

    train: Examples  # inputs and labels
    validation: Examples  # inputs and labels
    test: Examples  # inputs and labels
    kind: str  # "image" or "text"
    group: str | None  # the group column that the table is about; None where the data have none
    _dataset: Dataset
    _ids: dict[str, NDArray[np.str_]]
    like: Examples | None = None  # inputs and labels of a deployment sample, where one was given
    like_units: Tensor | None = None  # persons or documents of its rows, [n]; None if every row is its own

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self._dataset.classes

    def records(self, probabilities: Tensor, part: str = "test") -> Records:
        """Join the answers for the rows of a part, [n, C], with their labels and groups."""
        return self._dataset.records(self._ids[part], probabilities)

    @property
    def test_ids(self) -> NDArray[np.str_]:
        """Ids of the test rows, [n]."""
        return self._ids["test"]

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
        """Persons or documents that the rows of a part belong to, [n]; None if every row is its own."""
        return _units(self._dataset, self._dataset.attributes.rows(self._ids[part]))

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
    recipe_for: Callable[[tuple[str, ...]], Recipe],
    seed: int,  # of the split, where it follows the seed, and of the rows that a limit keeps
    cache: Path | None = None,  # folder for decoded pictures
    progress: Progress | None = None,  # called with (done, total) while pictures are decoded
) -> Task:
    """Read a data set and make its parts ready for a model."""
    dataset = _dataset(data, seed)
    group = _group(dataset, data)
    if len(dataset.classes) == 1:
        raise InputError(
            f"{dataset.name}: every row has the label {dataset.classes[0]!r}; training needs at least two classes: "
            "name another column (--label; label=)"
        )
    recipe = recipe_for(dataset.classes)
    recipe.check()
    parts = {
        name: _limited(dataset.examples(published), data.limit, seed)
        for name, published in zip(PARTS, data.parts, strict=True)
    }
    if recipe.place is not None:  # it may have been trained before
        parts["test"] = unseen(recipe.name, parts["test"])
    kind = "image" if isinstance(dataset.all.inputs, Images) else "text"
    inputs = _inputs(data, dataset, kind, recipe, cache, progress)
    train, validation, test = (Examples(inputs(parts[p]), torch.from_numpy(parts[p].labels)) for p in PARTS)
    ids = {name: part.ids for name, part in parts.items()}
    like, like_units = _like(data, dataset, recipe, inputs)
    return Task(train, validation, test, kind, group, dataset, ids, like, like_units)


@lru_cache(maxsize=16)  # five seeds of two settings and more: a worker comes back to each with the next method
def _read(spec: str, options: str, _stamp: str) -> Dataset:
    return read_labelled(spec, **json.loads(options))


def _dataset(data: Data, seed: int | None) -> Dataset:
    options = dict(data.options)
    if data.split_by_seed and seed is not None:
        options["seed"] = seed
    if data.read.startswith("memory:"):
        return read_labelled(data.read, **options)
    places = [data.read.partition(":")[2], *filter(None, [options.get("groups_from")])]
    stamp = stamp_of(file for place in places for file in files_below(place))
    return _read(data.read, json.dumps(options), stamp)


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


def _units(dataset: Dataset, rows: NDArray[np.integer]) -> Tensor | None:
    cluster = dataset.attributes.cluster
    return None if cluster is None else torch.from_numpy(cluster.codes[rows].astype(np.int64))


def _like(data: Data, dataset: Dataset, recipe: Recipe, inputs: Inputs) -> tuple[Examples | None, Tensor | None]:
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
    pictures, ready = isinstance(rows.inputs, Images), is_ready(recipe.name)
    if ready and not pictures and {*dataset.all.ids.tolist()} & {*rows.ids.tolist()}:
        raise InputError(
            f"{data.like}: rows of the sample have ids of the data, by which features are found: use others"
        )
    found = _decoded(recipe.pictures().size, rows) if pictures and not ready else inputs(rows)
    order = np.array([dataset.classes.index(name) for name in sample.classes])
    return Examples(found, torch.from_numpy(order[rows.labels])), _units(sample, kept)


def _inputs(
    data: Data, dataset: Dataset, kind: str, recipe: Recipe, cache: Path | None, progress: Progress | None
) -> Inputs:
    """What makes rows ready for a model."""
    if is_ready(recipe.name):
        table = ReadyFeatures.read(recipe.name)
        return lambda part: {FEATURES: torch.from_numpy(table.of(part.inputs, part.ids, part.numbered))}
    if kind == "text":
        if recipe.place is None:
            raise InputError(f"{data.name} has texts, which {recipe.name} cannot read: give a backbone path:FOLDER")
        config = config_of(recipe.place)
        if not hasattr(config.get_text_config(), "vocab_size"):
            raise InputError(
                f"{recipe.name} is a {config.model_type} model, which reads no texts, and the data are texts: give an "
                "encoder of texts (BERT, MiniLM, RoBERTa)"
            )
        tokenizer, length = tokenizer_of(recipe.place), text_length(config, data.max_length)
        return lambda part: tokens_of(tokenizer, part.inputs, length)
    size = recipe.pictures().size
    if data.limit is not None:  # a few pictures: quicker decoded than looked up
        return partial(_decoded, size)
    every = dataset.all
    if "bias_rate" in data.options:
        options = {name: value for name, value in data.options.items() if name not in _THINNING}
        every = _dataset(Data(data.name, data.read, options), None).all
    assert isinstance(every.inputs, Images)
    decoded = decoded_pictures(every.inputs, size, cache, progress)
    row_of = {name: row for row, name in enumerate(every.ids.tolist())}

    def looked_up(part: Published) -> dict[str, Tensor]:
        rows = [row_of.get(name, -1) for name in part.ids.tolist()]
        if min(rows) < 0:
            return _decoded(size, part)
        return {"pixel_values": torch.from_numpy(np.asarray(decoded[rows]))}

    return looked_up


def _decoded(size: int, part: Published) -> dict[str, Tensor]:
    """Pictures [n, 3, H, W], bytes still: the model normalises them (see `inputs.normalising`)."""
    assert isinstance(part.inputs, Images)
    pixels = part.inputs.as_array(size).transpose(0, 3, 1, 2)
    return {"pixel_values": torch.from_numpy(np.ascontiguousarray(pixels))}


def recipe_of(cell: Cell, classes: tuple[str, ...] = (), name: str | None = None) -> Recipe:
    """The model that a cell trains, or another by its name: a fresh one has the settings of the cell's own."""
    own = cell.backbone.model
    name = own if name is None else expanded(name, f"the model of {cell.method.name}")
    alike = name == own or (is_fresh(name) and is_fresh(own))
    return Recipe(name, classes, cell.backbone.settings if alike else {})


def named_models(cell: Cell) -> list[str]:
    """The models that a cell's options name."""
    return [cell.options[name] for name in NAMING if isinstance(cell.options.get(name), str)]


def auxiliary_models_of(
    cell: Cell, task: Task, device: str, cache: Path | None, progress: Progress
) -> Callable[[str], AuxiliaryModel]:
    """What gives a cell's method other models by their names, with the cell's own rows made ready for them.

    Those that its options name are read here, so that decoding their pictures is not counted as training. The rows of
    `task` serve where a model takes the same pictures or tokens.
    """

    def inputs_of(recipe: Recipe) -> object:
        """What decides how rows are made ready: the features, the size of pictures, or the folder of a tokenizer."""
        if is_ready(recipe.name):
            return recipe.name
        return recipe.pictures().size if task.kind == "image" else recipe.place

    def read(name: str) -> Task:
        if inputs_of(recipe_of(cell, task.classes, name)) == inputs_of(recipe_of(cell, task.classes)):
            return task
        return read_task(cell.data, lambda classes: recipe_of(cell, classes, name), cell.seed, cache, progress)

    ready = {name: read(name) for name in named_models(cell)}

    def named(name: str) -> AuxiliaryModel:
        theirs = ready[name] if name in ready else read(name)
        recipe = recipe_of(cell, task.classes, name)

        def encoded(examples: Examples) -> Tensor:
            return encode(recipe.build_trunk(task.kind).to(device), examples, cache)

        features = ready_features if is_ready(recipe.name) else encoded
        build_model = partial(recipe.build, task.kind, cell.seed)
        return AuxiliaryModel(build_model, features, theirs.train, theirs.validation, theirs.like)

    return named
