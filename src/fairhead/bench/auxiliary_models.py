"""Models beside the one that a cell trains: a teacher, an adversary, or a frozen one whose features a method reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fairhead.bench.grid import Cell
from fairhead.bench.grid_file import expanded
from fairhead.bench.tasks import Progress, Task, read_task
from fairhead.mitigate.training_job import AuxiliaryModel
from fairhead.models.fresh import Recipe, is_fresh, is_ready
from fairhead.models.linear_head import FEATURES
from fairhead.models.places import Place
from fairhead.train import Examples
from fairhead.train.features import encode

# Options of methods that name a model.
NAMING = ("teacher", "encoder", "adversary")


def check_auxiliary_models(cell: Cell) -> None:
    """Refuse, before any work, an option that names a model which is not there.

    Raises:
        InputError: saying which.
    """
    for name in _named(cell):
        _recipe(cell, name, ("0", "1")).check()


def auxiliary_models_of(
    cell: Cell, task: Task, device: str, cache: Path | None, progress: Progress
) -> Callable[[str], AuxiliaryModel]:
    """What gives a cell's method other models by their names, with the cell's own rows made ready for them.

    Those that its options name are read here, so that decoding their pictures is not counted as training.

    Args:
        cell: whose method names them.
        task: the cell's own rows, which serve where a model takes the same pictures or tokens.
        device: where features are computed.
        cache: folder for decoded pictures.
        progress: called with (done, total) while pictures are decoded.
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
    """A fresh model has the settings (width, image size) of the cell's own fresh one; a pretrained one has its own."""
    name = expanded(name, f"the model of {cell.method.name}")
    settings: Mapping[str, Any] = cell.backbone.settings if is_fresh(name) and is_fresh(cell.backbone.model) else {}
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


def ready_features(examples: Examples) -> Tensor:
    """Features that came as such, [n, D]."""
    return examples.inputs[FEATURES]
