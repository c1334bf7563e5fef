"""One cell of a grid: read the data, train, predict, and only then look at groups."""

import copy
import json
import logging
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairhead import __version__
from fairhead.audit import audit
from fairhead.bench.fingerprint import contents_of, effective, failed_row, method_of, row_of
from fairhead.bench.grid import METRICS, SELECTIONS, Cell
from fairhead.bench.tasks import Task, auxiliary_models_of, read_task
from fairhead.data.files import files_below, stamp_of
from fairhead.errors import InputError
from fairhead.mitigate import Trained, run
from fairhead.mitigate.last_layer import features_of, find_head
from fairhead.models.fresh import Recipe, is_fresh, is_ready
from fairhead.models.linear_head import FEATURES, LinearHead, check_finite
from fairhead.records import Records
from fairhead.train import Epoch, Examples, TrainingDiverged, TrainingPlan, predict
from fairhead.train.features import frozen_features, kept_features, last_encoder
from fairhead.train.fitting import score_of
from fairhead.train.meters import Meter

# Called with a stage, how much of it is done, how much there is, and a word about it.
Tell = Callable[[str, int, int, str], None]


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
    ready = _prepared(cell, device, cache, tell or (lambda stage, done, total, note: None), checkpoints)
    task = ready.task
    # Whoever keeps the model audits it by every column.
    task.check_groups(task.columns if keep is not None else (task.group,) if task.group is not None else ())
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
    row = {**_row(cell, ready, trained, device), "figures": figures, "cost": meter.reading.to_dict()}
    return Done(row, records, trained, task)


def run_trial(
    cell: Cell,
    device: str = "cpu",
    cache: Path | None = None,
    tell: Tell | None = None,
    sharers: Callable[[], int] | None = None,
) -> tuple[dict[str, Any], Records | None]:
    """Its row and its answers for the validation rows, which a search looks at alone; arguments as of `run_cell`.

    A loss that is not finite is a result as well: the row says so, with what it cost.
    """
    ready = _prepared(cell, device, cache, tell or (lambda stage, done, total, note: None))
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
    row = {**_row(cell, ready, trained, device), "trial": cell.trial, "validation": scores, **cost}
    return row, ready.task.records(found, "validation")


@dataclass(frozen=True)
class _Ready:
    """A cell's data, made ready, and its training as a function."""

    task: Task
    parts: dict[str, Examples]
    plan: TrainingPlan
    train: Callable[[], Trained]
    read_seconds: float
    feature_seconds: float
    contents: str | None  # of the files that were read


def _prepared(cell: Cell, device: str, cache: Path | None, tell: Tell, checkpoints: Path | None = None) -> _Ready:
    """All that comes before training and is not counted as its cost."""
    config, contents = method_of(cell), contents_of(cell)
    started = time.perf_counter()
    task = read_task(
        cell.data,
        lambda classes: Recipe(cell.backbone.model, classes, cell.backbone.settings),
        cell.seed,
        cache,
        lambda done, total: tell("decoding", done, total, ""),
    )
    recipe = Recipe(cell.backbone.model, task.classes, cell.backbone.settings)
    plan = TrainingPlan(**cell.plan, seed=cell.seed, device=device)

    head_only = trains_head(cell)
    if is_fresh(recipe.name) and cell.backbone.train != "all":
        told = "%s has random weights, of which train=%s leaves most as they are: give a pretrained model"
        logging.getLogger("fairhead").warning(told, recipe.name, cell.backbone.train)

    def build_model() -> nn.Module:
        if head_only:
            return LinearHead.of(parts["train"].inputs[FEATURES], task.classes)
        model = _built(recipe, task.kind, cell.seed)
        return last_encoder(model) if cell.backbone.train == "last_encoder" else model

    auxiliary = auxiliary_models_of(cell, task, device, cache, lambda done, total: tell("decoding", done, total, ""))
    parts = {"train": task.train, "validation": task.validation}
    if cell.trial is None:
        parts["test"] = task.test
    read_seconds, started = time.perf_counter() - started, time.perf_counter()
    if task.like is not None:
        parts["like"] = task.like
    if cell.backbone.train == "last_encoder":
        parts = _frozen(parts, _built(recipe, task.kind, cell.seed).to(device), plan, cache, tell)
    elif head_only and not is_ready(recipe.name):
        parts = _before_head(parts, recipe.build(task.kind, 0, head_only=True).to(device), cache, tell)
    for name, part in parts.items():
        if FEATURES in part.inputs:
            check_finite(part.inputs[FEATURES], name)
    like = parts.pop("like", None)
    feature_seconds = time.perf_counter() - started

    def on_epoch(epoch: Epoch) -> None:
        note = f"loss {epoch.loss:.3f}, validation accuracy {epoch.validation_accuracy:.3f}"
        tell("training", epoch.number, plan.epochs, note)

    given: dict[str, Any] = {
        "plan": plan,
        "selection": cell.method.selection or cell.selection,
        "on_epoch": on_epoch,
        "auxiliary": auxiliary,
        "pretrained": None if recipe.place is None else recipe.name,
        "checkpoints": checkpoints,
        "identity": {"cell": effective(cell)},
        "like": like,
        "units": (task.units("train"), task.units("validation")),
        "like_units": task.like_units,
    }

    def train() -> Trained:
        if not cell.method.uses_groups:
            return run(config, build_model, parts["train"], parts["validation"], **given)
        from fairhead.mitigate.references import run_with_attributes

        chosen_on = "validation"
        if cell.method.circular:  # the test rows stand in for those of the validation
            chosen_on, given["selection"] = "test", _smallest_gap(task)
            given["units"] = (task.units("train"), task.units("test"))
        groups = task.groups("train"), task.groups(chosen_on)
        return run_with_attributes(config, build_model, parts["train"], parts[chosen_on], *groups, **given)

    return _Ready(task, parts, plan, train, read_seconds, feature_seconds, contents)


def _row(cell: Cell, ready: _Ready, trained: Trained, device: str) -> dict[str, Any]:
    """What the rows of cells and of trials have in common."""
    best = trained.fit.best
    return {
        **row_of(cell, "done"),
        "uses_groups": cell.method.uses_groups,
        "rows": {name: len(part) for name, part in ready.parts.items()},
        "classes": list(ready.task.classes),
        "group": ready.task.group,
        "replayed": trained.fit.replayed,
        **({"resumed_at": trained.fit.resumed_at} if trained.fit.resumed_at else {}),
        "best_epoch": best.number,
        "validation_accuracy": best.validation_accuracy,
        "history": [[epoch.number, round(epoch.loss, 5), round(epoch.score, 5)] for epoch in trained.fit.history],
        "stages": [list(stage) for stage in trained.stages],
        **({"notes": dict(trained.notes)} if trained.notes else {}),
        "read_seconds": ready.read_seconds,
        "feature_seconds": ready.feature_seconds,
        "effective": effective(cell),
        "contents": ready.contents,
        "made_with": _made_with(device),
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


def _frozen(
    parts: dict[str, Examples], model: nn.Module, plan: TrainingPlan, cache: Path | None, tell: Tell
) -> dict[str, Examples]:
    def features(name: str, part: Examples) -> Examples:
        return frozen_features(
            model,
            part,
            cache,
            precision=plan.precision,
            progress=lambda done, total: tell(f"features of {name}", done, total, ""),
        )

    return {name: features(name, part) for name, part in parts.items()}


def trains_head(cell: Cell) -> bool:
    """Whether a linear head is all that is trained."""
    return cell.backbone.train == "head" or is_ready(cell.backbone.model)


def _before_head(parts: dict[str, Examples], model: nn.Module, cache: Path | None, tell: Tell) -> dict[str, Examples]:
    """What goes into the last layer of a pretrained classifier, for the rows of each part."""
    head = find_head(model, parts["train"])

    def features(name: str, part: Examples) -> Examples:
        def progress(done: int, total: int) -> None:
            tell(f"features of {name}", done, total, "")

        def before(rows: Examples) -> Tensor:
            return features_of(model, head, rows)

        return Examples({FEATURES: kept_features("before the head", model, part, before, cache, progress)}, part.labels)

    return {name: features(name, part) for name, part in parts.items()}


def _made_with(device: str) -> dict[str, Any]:
    packages = {name: version(name) for name in ("torch", "transformers", "numpy")}
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "cpu"
    return {"fairhead": __version__, "python": platform.python_version(), **packages, "device": where}
