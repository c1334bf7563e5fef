"""One cell of a grid: the identity of its result, and its run: read, train, predict, and only then look at groups.

The settings of a cell, with every default filled in, identify its result, so a changed default makes another result.
Versions of PyTorch and transformers are no part of it: parts of a grid may run on several machines. Each row names its
versions (`made_with`), and the table says where they differ.
"""

import copy
import hashlib
import inspect
import json
import logging
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from glob import glob
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairhead import __version__
from fairhead.audit import audit
from fairhead.bench.grid import COUNT_WHERE_SET, METRICS, PLAN_FIELDS, SELECTIONS, Cell, expanded
from fairhead.bench.tasks import Task, auxiliary_models_of, named_models, read_task, recipe_of
from fairhead.data import parse_spec
from fairhead.data.files import content_of, files_below, stamp_of
from fairhead.data.images import PREFIX
from fairhead.errors import InputError
from fairhead.mitigate import Trained, method_named, names, run
from fairhead.mitigate.two_stages import features_of, find_head
from fairhead.models.attached import FEATURES, LinearHead, check_finite
from fairhead.models.fresh import Recipe, is_fresh, is_ready
from fairhead.records import Records
from fairhead.train import TrainingPlan
from fairhead.train.features import frozen_features, kept_features
from fairhead.train.fitting import Epoch, predict, score_of
from fairhead.train.last_encoder import last_encoder
from fairhead.train.loop import TrainingDiverged
from fairhead.train.meters import Meter
from fairhead.train.step import Examples

ROW_SCHEMA = "fairhead.bench/1"
# To be raised when the same settings come to give other results: a method mended, another preprocessing.
REVISION = 2
# Called with a stage, how much of it is done, how much there is, and a word about it.
Tell = Callable[[str, int, int, str], None]


def method_of(cell: Cell) -> Any:
    """The settings of a cell's method; it must use groups exactly where the cell says so."""
    entry = method_named(cell.method.method)
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
    return entry.configure(**cell.options)


def effective(cell: Cell) -> dict[str, Any]:
    """`cell.settings()` with the defaults of the reader, the model, the method and the plan, JSON-ready."""
    found, config = cell.settings(), method_of(cell)
    # What builds a model in Python cannot come from a grid; a setting that was added later counts where it is used.
    options = {
        setting.name: getattr(config, setting.name)
        for setting in fields(config)
        if setting.compare
        and not (setting.metadata.get("added_later", False) and getattr(config, setting.name) == setting.default)
    }
    plan = {f.name: f.default for f in fields(TrainingPlan) if f.name in PLAN_FIELDS and f.name not in COUNT_WHERE_SET}
    plan |= {name: value for name, value in found["plan"].items() if name != "checkpoint_minutes"}
    reader = parse_spec(cell.data.read).reader.options.items()
    defaults = {name: default for name, default in reader if default is not inspect.Parameter.empty}
    full = {
        **found,
        "data": {**found["data"], "options": {**defaults, **found["data"]["options"]}},
        "backbone": {**found["backbone"], "settings": recipe_of(cell).all_settings()},
        "method": {**found["method"], "options": options},
        "plan": plan,
        "revision": REVISION,
    }
    text = json.dumps(full, default=lambda x: dict(x) if isinstance(x, Mapping) else str(x))
    ready: dict[str, Any] = json.loads(text)
    return ready


def fingerprint(cell: Cell) -> str:
    """A short hash of `effective`."""
    return _hash(json.dumps(effective(cell), sort_keys=True))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def contents_of(cell: Cell) -> str | None:
    """A hash of the files that a cell reads: its data, a sample, groups, models; None where one cannot be looked at.

    Apart from the fingerprint, so that results of before this was kept stay what they are.
    """
    data = cell.data
    reader, _, path = data.read.partition(":")
    if reader == "memory":
        return None
    places: list[Any] = [path, *filter(None, [data.options.get("groups_from")])]
    places += [] if data.like is None else [data.like.removeprefix(f"{reader}:")]
    try:
        for model in (expanded(name, "the model") for name in (cell.backbone.model, *named_models(cell))):
            place = Recipe(model, ()).place
            places += sorted(glob(model.removeprefix(PREFIX))) if is_ready(model) else []
            places += [] if place is None else filter(None, [place.folder, place.adapter])
    except InputError:  # the model is not here; running the cell says so
        return None
    found = [content_of(place) for place in places]
    return None if None in found else _hash("".join(map(str, found)))


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


@dataclass(frozen=True)
class Done:
    """What a cell gives."""

    row: dict[str, Any]  # figures, costs and settings, JSON-ready
    records: Records  # the answers for the test rows, with labels and groups
    trained: Trained  # the model and its history
    task: Task  # the data it was trained on


def run_cell(
    cell: Cell,  # what to run
    device: str = "cpu",  # where
    cache: Path | None = None,  # folder for decoded pictures and frozen features
    tell: Tell | None = None,  # called as the work goes on
    sharers: Callable[[], int] | None = None,  # how many cells share the device now; energy is split between them
    checkpoints: Path | None = None,  # folder for the state of the training, which then goes on after a kill
    keep: Callable[[Trained, Task], None] | None = None,  # writes the model, before anything else can go wrong
) -> Done:
    """Train one method once, and audit it on the test rows."""

    def check(task: Task) -> None:
        # A model that is kept is audited by every column.
        task.check_groups(task.columns if keep is not None else (task.group,) if task.group is not None else ())

    ready = _Ready(cell, device, cache, tell, checkpoints, check)
    task = ready.task
    with Meter(device, sharers=sharers) as meter:
        try:
            trained = ready.train()
        except TrainingDiverged as diverged:
            diverged.task = task
            raise
    if keep is not None:
        keep(trained, task)
    records = task.records(predict(trained.model, ready.parts["test"], precision=ready.plan.precision))
    metrics = METRICS if task.group is not None else ("accuracy",)
    audited = audit(records, group_by=task.group, metrics=metrics, n_boot=1000)
    figures = {e.metric: {"value": e.value, "low": e.low, "high": e.high, "n": e.n} for e in audited.estimates}
    row = {**ready.row(trained), "figures": figures, "cost": meter.reading.to_dict()}
    return Done(row, records, trained, task)


def run_trial(
    cell: Cell,
    device: str = "cpu",
    cache: Path | None = None,
    tell: Tell | None = None,
    sharers: Callable[[], int] | None = None,
) -> tuple[dict[str, Any], Records | None]:
    """Train one trial of a search; return its row and its predictions for the validation rows. See `run_cell`.

    A loss that is not finite is a result as well: the row says so, with what it cost.
    """
    ready = _Ready(cell, device, cache, tell)
    trained, diverged = None, None
    with Meter(device, sharers=sharers) as meter:
        try:
            trained = ready.train()
        except TrainingDiverged as error:
            diverged = error
    cost = {"cost": meter.reading.to_dict()}
    if trained is None:
        return {**failed_row(cell, str(diverged)), "diverged": True, **cost}, None
    # The model as the method leaves it, by the same measures for all: some choose their epochs by rules of their own.
    found = predict(trained.model, ready.parts["validation"], precision=ready.plan.precision)
    predicted, labels = found.argmax(-1), ready.task.validation.labels
    scores = {selection: score_of(selection, predicted, labels) for selection in SELECTIONS}
    row = {**ready.row(trained), "trial": cell.trial, "validation": scores, **cost}
    return row, ready.task.records(found, "validation")


class _Ready:
    """A cell whose data are made ready: all that comes before training and is not counted as its cost."""

    def __init__(
        self,
        cell: Cell,
        device: str,
        cache: Path | None,
        tell: Tell | None,
        checkpoints: Path | None = None,
        check: Callable[[Task], None] = lambda task: None,  # refuses data before features are made of them
    ) -> None:
        self.cell, self.device, self.checkpoints = cell, device, checkpoints
        self.tell: Tell = tell or (lambda stage, done, total, note: None)
        self.config, self.contents = method_of(cell), contents_of(cell)
        self.plan = TrainingPlan(**cell.plan, seed=cell.seed, device=device)
        started = time.perf_counter()
        decoding = self._progress("decoding")
        self.task = task = read_task(cell.data, partial(recipe_of, cell), cell.seed, cache, decoding)
        check(task)
        self.recipe = recipe_of(cell, task.classes)
        if is_fresh(self.recipe.name) and cell.backbone.train != "all":
            told = "%s has random weights, of which train=%s leaves most as they are: give a pretrained model"
            logging.getLogger("fairhead").warning(told, self.recipe.name, cell.backbone.train)
        self.auxiliary = auxiliary_models_of(cell, task, device, cache, decoding)
        parts = {"train": task.train, "validation": task.validation}
        parts |= {} if cell.trial is not None else {"test": task.test}
        parts |= {} if task.like is None else {"like": task.like}
        self.read_seconds, started = time.perf_counter() - started, time.perf_counter()
        self.parts = self._features(parts, cache)
        self.like = self.parts.pop("like", None)
        self.feature_seconds = time.perf_counter() - started

    def _progress(self, stage: str) -> Callable[[int, int], None]:
        return lambda done, total: self.tell(stage, done, total, "")

    def _features(self, parts: dict[str, Examples], cache: Path | None) -> dict[str, Examples]:
        """The parts as what is trained reads them: those before it are frozen, and their features are kept."""
        recipe, kind = self.recipe, self.task.kind
        if self.cell.backbone.train == "last_encoder":
            whole = _built(recipe, kind, self.cell.seed).to(self.device)

            def features(name: str, part: Examples) -> Examples:
                how: Any = {"precision": self.plan.precision, "progress": self._progress(f"features of {name}")}
                return frozen_features(whole, part, cache, **how)

            parts = {name: features(name, part) for name, part in parts.items()}
        elif self.cell.backbone.train == "head" and not is_ready(recipe.name):
            model = recipe.build(kind, 0, head_only=True).to(self.device)
            before = partial(features_of, model, find_head(model, parts["train"]))

            def before_head(name: str, part: Examples) -> Examples:
                progress = self._progress(f"features of {name}")
                found = kept_features("before the head", model, part, before, cache, progress)
                return Examples({FEATURES: found}, part.labels)

            parts = {name: before_head(name, part) for name, part in parts.items()}
        for name, part in parts.items():
            if FEATURES in part.inputs:
                check_finite(part.inputs[FEATURES], name)
        return parts

    def _model(self) -> nn.Module:
        """What is trained."""
        if self.cell.backbone.train == "head" or is_ready(self.recipe.name):
            return LinearHead.of(self.parts["train"].inputs[FEATURES], self.task.classes)
        model = _built(self.recipe, self.task.kind, self.cell.seed)
        return last_encoder(model) if self.cell.backbone.train == "last_encoder" else model

    def train(self) -> Trained:
        """Train the method."""
        cell, task, parts = self.cell, self.task, self.parts

        def on_epoch(epoch: Epoch) -> None:
            note = f"loss {epoch.loss:.3f}, validation accuracy {epoch.validation_accuracy:.3f}"
            self.tell("training", epoch.number, self.plan.epochs, note)

        # A circular choice uses the test rows instead of the validation rows.
        chosen_on = "test" if cell.method.circular else "validation"
        given: dict[str, Any] = {
            "plan": self.plan,
            "selection": _smallest_gap(task) if cell.method.circular else cell.method.selection or cell.selection,
            "on_epoch": on_epoch,
            "auxiliary": self.auxiliary,
            "pretrained": None if self.recipe.place is None else self.recipe.name,
            "checkpoints": self.checkpoints,
            "identity": {"cell": effective(cell)},
            "like": self.like,
            "units": (task.units("train"), task.units(chosen_on)),
            "like_units": task.like_units,
        }
        if not cell.method.uses_groups:
            return run(self.config, self._model, parts["train"], parts["validation"], **given)
        from fairhead.mitigate.references import run_with_attributes

        groups = task.groups("train"), task.groups(chosen_on)
        return run_with_attributes(self.config, self._model, parts["train"], parts[chosen_on], *groups, **given)

    def row(self, trained: Trained) -> dict[str, Any]:
        """What the rows of cells and of trials have in common."""
        fit = trained.fit
        on_gpu = self.device.startswith("cuda")
        return {
            **row_of(self.cell, "done"),
            "uses_groups": self.cell.method.uses_groups,
            "rows": {name: len(part) for name, part in self.parts.items()},
            "classes": list(self.task.classes),
            "group": self.task.group,
            "replayed": fit.replayed,
            **({"resumed_at": fit.resumed_at} if fit.resumed_at else {}),
            "best_epoch": fit.best.number,
            "validation_accuracy": fit.best.validation_accuracy,
            "history": [[epoch.number, round(epoch.loss, 5), round(epoch.score, 5)] for epoch in fit.history],
            "stages": [list(stage) for stage in trained.stages],
            **({"notes": dict(trained.notes)} if trained.notes else {}),
            "read_seconds": self.read_seconds,
            "feature_seconds": self.feature_seconds,
            "effective": effective(self.cell),
            "contents": self.contents,
            "made_with": {
                "fairhead": __version__,
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "transformers", "numpy")},
                "device": torch.cuda.get_device_name(self.device) if on_gpu else platform.processor() or "cpu",
            },
        }


def _smallest_gap(task: Task) -> Callable[[Tensor], float]:
    """Choose the epoch by EOd of the test rows, as DAM's released code does: circular."""

    def score(predicted: Tensor) -> float:
        answers = task.records(nn.functional.one_hot(predicted, len(task.classes)))
        (found,) = audit(answers, group_by=task.group, metrics=("EOd",), n_boot=100).estimates
        if found.value is None:
            raise InputError(f"no epoch can be chosen by EOd of the test rows: {found.undefined}")
        return -found.value

    return score


def _built(recipe: Recipe, kind: str, seed: int) -> nn.Module:
    """What `recipe.build` gives, by a copy of the last one: random weights take a processor seconds to draw."""
    settings = json.dumps(dict(recipe.settings), sort_keys=True)
    place = recipe.place
    folders = () if place is None else filter(None, (place.folder, place.adapter))
    stamp = stamp_of(file for folder in folders for file in files_below(folder))
    model, chance = _first_built(recipe.name, recipe.classes, settings, kind, seed, stamp)
    torch.set_rng_state(chance)
    return copy.deepcopy(model)


@lru_cache(maxsize=1)
def _first_built(
    name: str, classes: tuple[str, ...], settings: str, kind: str, seed: int, _stamp: str
) -> tuple[nn.Module, Tensor]:
    """A model, and the state of chance that its building leaves."""
    model: nn.Module = Recipe(name, classes, json.loads(settings)).build(kind, seed)
    return model, torch.get_rng_state()
