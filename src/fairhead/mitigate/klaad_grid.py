"""Many KLAAD runs from one YAML file: ablations, or a grid over weights and any other setting.

runs:                       # named runs, each with what it changes
  klaad: {}
  no-kl: {kl_weight: 0}
grid:                       # all combinations
  kl_weight: [0.05, 0.15, 0.25]
  margin: [0.1, 0.3]
"""

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fairhead.errors import InputError, did_you_mean
from fairhead.mitigate.klaad import KLAAD
from fairhead.train.plan import LanguagePlan

# Files that come with the package, by name.
GRIDS = {"ablations": "klaad-ablations.yaml", "study": "klaad-study.yaml", "weights": "klaad-weights.yaml"}
_OF_LOSS = tuple(field.name for field in fields(KLAAD))
_OF_PLAN = tuple(field.name for field in fields(LanguagePlan))


class Run(NamedTuple):
    """One run of a grid: its name, and the settings of the loss and of the plan that it changes."""

    name: str
    loss: Mapping[str, Any]
    plan: Mapping[str, Any]


def preset_for(model_type: str, preset: str | None = None) -> KLAAD:
    """The named preset, or that of a model's family; families without one have Llama's.

    Example:
        >>> preset_for("gpt_neo").margin, preset_for("mamba").margin
        (0.5, 0.3)
    """
    if preset is not None:
        return KLAAD.preset(preset)
    try:
        return KLAAD.preset(model_type)
    except InputError:
        return KLAAD()


def method_for(preset: str | None, settings: Mapping[str, Any]) -> Callable[[str], KLAAD]:
    """What `train_folder` asks for: the loss for a type of model, a preset with some settings changed."""
    return lambda model_type: replace(preset_for(model_type, preset), **settings)


def read_grid(path: str | os.PathLike[str]) -> list[Run]:
    """The runs of a file, or of one of `GRIDS`.

    Raises:
        InputError: no such file, or settings that neither the loss nor the plan has.

    Example:
        >>> [run.name for run in read_grid("ablations")][:2]
        ['klaad', 'ce-only']
    """
    found = str(path)
    try:
        if found in GRIDS:
            text = files("fairhead.mitigate").joinpath(GRIDS[found]).read_text("utf-8")
        else:
            text = Path(path).read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except OSError as error:
        raise InputError(
            f"the grid {found} cannot be read ({error.strerror}); expected a YAML file, or one of {', '.join(GRIDS)}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"the grid {found} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not content or not set(content) <= {"runs", "grid"}:
        raise InputError(f"the grid {found} has no 'runs' and no 'grid'; it is a mapping with one of them or both")
    runs = [_run(name, settings or {}, found) for name, settings in (content.get("runs") or {}).items()]
    axes = content.get("grid") or {}
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"the grid {found}: {key} is {values!r}; expected a list of values")
    if axes:
        for values in itertools.product(*axes.values()):
            settings = dict(zip(axes, values, strict=True))
            runs.append(_run(",".join(f"{key}={value}" for key, value in settings.items()), settings, found))
    return runs


def _run(name: Any, settings: Any, where: str) -> Run:
    if not isinstance(settings, dict):
        raise InputError(f"the grid {where}: run {name} is {settings!r}; expected settings such as {{kl_weight: 0}}")
    if "/" in str(name) or str(name).startswith("."):
        raise InputError(f"the grid {where}: run {name!r} cannot be the name of a folder")
    known = [*_OF_LOSS, *_OF_PLAN]
    for key in settings:
        if key not in known:
            raise InputError(f"the grid {where}: run {name} sets {key!r}, unknown.{did_you_mean(key, known)}")
    values = {key: tuple(value) if isinstance(value, list) else _number(value) for key, value in settings.items()}
    return Run(
        str(name),
        {key: value for key, value in values.items() if key in _OF_LOSS},
        {key: value for key, value in values.items() if key in _OF_PLAN},
    )


def _number(value: Any) -> Any:
    """YAML wants a point in 1e-4 to take it for a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
