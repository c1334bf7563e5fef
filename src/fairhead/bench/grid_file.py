"""Grids as YAML files. Imports no torch.

```yaml
title: UTKFace, gender by race
data:
  - name: natural
    read: utkface:${FAIRHEAD_DATA}/images/utkface64.zip   # reader:path, as on the command line
    options: {bias_rate: null}                            # of the reader
    group: white                                          # the group column of the table
    split_by_seed: true                                   # another split for each seed
backbones: [vit-8x8]           # or path:FOLDER, or {name, model, train: last_encoder, plan}
methods:                       # none of them sees a group
  - erm
  - {name: dam-4, method: dam, options: {values: 4}, plan: {learning_rate: 1e-4}}
  - {method: dro, vary: {eta: [0.1, 0.3], plan.learning_rate: [1e-4, 1e-3]}}    # a method for each combination
  - {name: small, method: erm, model: vit-2x2}            # a fresh model of its own in place of the backbone's
references: [group_dro]        # methods that do see groups, shown apart; {method: erm, selection: worst_group} too,
                               # and selection: test_eod, whose epoch the test rows choose: circular, and marked so
seeds: [0, 1, 2]
plan: {epochs: 30, batch_size: 256}                       # of `TrainingPlan`; data, backbones and methods may differ
search: {configs: 10, seed: 0, seeds: [1000]}             # of hyper-parameters, before the seeds are run; see `search`
```

A grid for language models has a title and methods alone: `fairhead mitigate METHOD --grid FILE` says on which model
and which data they are run.
"""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from fairhead.audit import METRICS as KNOWN
from fairhead.bench.grid import PARTS, PLAN_FIELDS, Backbone, Data, Grid, Method, Search, expanded
from fairhead.errors import InputError, check_known, did_you_mean
from fairhead.mitigate import method_named
from fairhead.settings import check_settings
from fairhead.store import yaml_value
from fairhead.train import LanguagePlan, TrainingPlan

_NAME = re.compile(r"[\w+=-][\w.+= -]*")


def shipped_grids() -> dict[str, Path]:
    """The grids that come with the package, by name."""
    return {file.stem: file for file in sorted(Path(str(files("fairhead.bench"))).glob("*.yaml"))}


def grid_path(grid: str) -> Path:
    """The file of a grid: a YAML file, or one that ships, by its name."""
    path, known = Path(grid), shipped_grids()
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    check_known(grid, known, f"there is no grid {grid!r}: give a .yaml file, or one of")
    return known[grid]


def read_grid(path: Path | str, changes: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Grid:
    """Read a grid from a YAML file.

    Args:
        path: the file.
        changes: "key=value" settings that replace what the file says: any key of a plan (`epochs=1`), `limit`,
            `seeds`, `methods`, `data`, `backbones` (names in the file, separated by commas), `search` (a number of
            configurations) and its keys (`search.seeds=1000,1001`), or another top-level key.
        environment: where `${NAME}` in the file is looked up; the process's own by default.
    """
    asked = _asked(changes)
    plain = {key: value for key, value in asked.items() if key in _PLAIN}
    if "plan" in plain:
        plain["plan"] = _plan(plain["plan"], "--set plan")
    check_settings(Grid, plain, "--set")
    top = {**_content(path), **plain}
    for key in ("data", "backbones", "seeds"):
        _needed(top, key, str(path))
    written = _grid(top, str(path))
    for name in dict.fromkeys(method.method for method in written.methods):
        if method_named(name).kind != "classifier":
            raise InputError(
                f"{path}: {name} is for language models; run the grid with fairhead mitigate {name} --grid"
            )
    grid = _changed(written, asked, os.environ if environment is None else environment)
    names = [method.name for method in written.methods]
    if "baseline" in top or "baseline" in asked:
        check_known(grid.baseline, names, f"{path}: baseline is {grid.baseline!r}; expected one of its methods:")
    if grid.search is None:
        return grid
    shared = sorted({*grid.search.seeds} & {*grid.seeds})
    if shared:
        raise InputError(
            f"{path}: seed {shared[0]} is one of the grid and one of its search; results need seeds that nothing was "
            "chosen on: give others in search.seeds"
        )
    circular = [method.name for method in grid.methods if method.circular]
    if circular:
        raise InputError(
            f"{path}: {circular[0]!r} chooses by test rows, and a search looks at none: leave it out of references"
        )
    # Of all rules that need no groups, the one that a search does best by (SubpopBench).
    says = "selection" in top or "selection" in asked
    return grid if says else replace(grid, selection="worst_class")


def read_methods(path: Path | str) -> tuple[Method, ...]:
    """The methods of a grid of language models."""
    methods = _grid(_content(path), str(path)).methods
    for method in methods:
        if method_named(method.method).kind != "language":
            raise InputError(f"{path}: {method.method} is not for language models: run the grid with fairhead bench")
    return methods


_AXES = ("data", "backbones", "methods", "references")
# Top-level keys with a value of their own, and all of them.
_PLAIN = ("title", "about", "seeds", "plan", "selection", "baseline", "metrics", "n_boot", "reported")
_KEYS = (*_PLAIN, *_AXES, "search", "limit")


def _content(path: Path | str) -> dict[str, Any]:
    """The mapping in a file, with known keys and the needed ones."""
    path = Path(path)
    try:
        content = yaml_value(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"cannot read the grid {str(path)!r}: {reason}") from error
    except ValueError as error:
        raise InputError(f"{path} is not YAML: {error}") from None
    top = dict(_mapping(content, str(path), _KEYS))
    for key in ("title", "methods"):
        _needed(top, key, str(path))
    return top


def _grid(top: Mapping[str, Any], where: str) -> Grid:
    plain: dict[str, Any] = {key: top[key] for key in _PLAIN if key in top}
    if "plan" in plain:
        plain["plan"] = _plan(plain["plan"], f"{where}: plan")
    check_settings(Grid, plain, where)
    plain = {key: tuple(dict.fromkeys(value)) if isinstance(value, list) else value for key, value in plain.items()}
    data, backbones, methods, references = (_list(top.get(key, []), f"{where}: {key}") for key in _AXES)
    grid = Grid(
        **{"seeds": (), **plain},
        data=tuple(_data(entry, f"{where}: data[{i}]", top.get("limit")) for i, entry in enumerate(data)),
        backbones=tuple(_backbone(entry, f"{where}: backbones[{i}]") for i, entry in enumerate(backbones)),
        methods=(
            *(m for i, entry in enumerate(methods) for m in _methods(entry, f"{where}: methods[{i}]", False)),
            *(m for i, entry in enumerate(references) for m in _methods(entry, f"{where}: references[{i}]", True)),
        ),
        search=_search(top.get("search"), f"{where}: search", None),
    )
    for metric in grid.metrics:
        check_known(metric, KNOWN, f"{where}: metrics has {metric!r}; known:")
    for what in ("data", "backbones", "methods"):
        names = [entry.name for entry in getattr(grid, what)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(f"{where}: {what} has {twice[0]!r} twice; give each a name of its own")
    of_data = [data.name for data in grid.data]
    for method in grid.methods:
        for name in method.data_options:
            check_known(name, of_data, f"{where}: method {method.name!r} has data_options for {name!r}; its data are")
    return grid


def _entry(kind: type, value: Any, where: str, main: str, **more: Any) -> dict[str, Any]:
    """The values of an entry, checked: a mapping, or its main value alone; `more` has defaults of the grid."""
    known = [f.name for f in fields(kind) if f.name not in ("written", "uses_groups", "chosen_with_groups")]
    found = {**more, **_mapping({main: value} if isinstance(value, str) else value, where, [*known, *more])}
    _needed(found, main, where)
    check_settings(kind, found, where)
    if "name" in found and not _NAME.fullmatch(found["name"]):
        raise InputError(
            f"{where}.name is {found['name']!r}; expected letters, digits, spaces and - _ . + =: it names files"
        )
    if "plan" in found:
        found["plan"] = _plan(found["plan"], f"{where}.plan")
    return found


def _data(value: Any, where: str, limit: int | None) -> Data:
    found = _entry(Data, value, where, "read", limit=limit)
    name, colon, _ = found["read"].partition(":")
    if not colon:
        raise InputError(f"{where}.read is {found['read']!r}; expected reader:path, such as utkface:UTKFace.zip")
    parts = tuple(found.pop("parts", Data.parts))
    if len(parts) != len(PARTS):
        raise InputError(f"{where}.parts has {len(parts)} names; expected those of train, validation and test")
    return Data(**{"name": name, **found, "parts": parts})


def _backbone(value: Any, where: str) -> Backbone:
    found = _entry(Backbone, value, where, "model")
    return Backbone(**{"name": found["model"].removeprefix("path:").rstrip("/").rpartition("/")[2], **found})


def _methods(value: Any, where: str, uses_groups: bool) -> list[Method]:
    """The methods of an entry: one, or one for each combination of what it varies."""
    found = _entry(Method, value, where, "method", vary={})
    if found.get("selection") is not None and not uses_groups:
        raise InputError(f"{where}.selection: {found['selection']} needs groups; list this method under references")
    if str(found.get("model", "vit")).startswith("path:"):
        raise InputError(f"{where}.model is {found['model']!r}; expected a fresh one, such as vit-8x8")
    chosen = {"worst_group": " epoch chosen with groups", "test_eod": " epoch chosen on test rows"}
    name = found["method"] + chosen.get(found.get("selection", ""), "")
    axes = _mapping(found.pop("vary"), f"{where}.vary")
    method = Method(**{"name": name, **found, "uses_groups": uses_groups})
    made = []
    for values in itertools.product(*(_list(values, f"{where}.vary.{axis}") for axis, values in axes.items())):
        point = dict(zip(axes, values, strict=True))
        of_plan = {key.removeprefix("plan."): value for key, value in point.items() if key.startswith("plan.")}
        options = {key: value for key, value in point.items() if not key.startswith("plan.")}
        made.append(
            replace(
                method,
                name=" ".join([method.name, *(f"{key.removeprefix('plan.')}={value}" for key, value in point.items())]),
                options={**method.options, **options},
                plan={**method.plan, **_plan(of_plan, f"{where}.vary")},
            )
        )
    return made


def _search(value: Any, where: str, before: Search | None) -> Search | None:
    """A search from a mapping or a number of configurations, with what it does not say as it was `before`."""
    if value is None or value is False:
        return None
    found = dict(
        _mapping({"configs": value} if isinstance(value, int) else value, where, [f.name for f in fields(Search)])
    )
    if "seeds" in found:
        found["seeds"] = tuple(_listed(found["seeds"]))
    check_settings(Search, found, where)
    return Search(**{**asdict(before or Search()), **found})


def _plan(value: Any, where: str) -> dict[str, Any]:
    found = dict(_mapping(value, where, PLAN_FIELDS))
    for name, given in found.items():
        if name == "precision" and given is False:  # what YAML takes a bare no for
            found[name] = "no"
        elif isinstance(given, str) and name not in ("schedule", "precision"):
            with suppress(ValueError):  # YAML takes 1e-4 for text: it wants a point there
                found[name] = float(given)
    check_settings(LanguagePlan if "lora" in found else TrainingPlan, found, where)
    return found


def _changed(grid: Grid, asked: Mapping[str, Any], environment: Mapping[str, str]) -> Grid:
    """The grid with what the command has chosen from it, and with variables filled in."""
    for key, value in asked.items():
        if key == "limit":
            check_settings(Data, {"limit": value}, "--set")
            grid = replace(grid, data=tuple(replace(data, limit=value) for data in grid.data))
        elif key == "references":
            references = tuple(method for method in grid.methods if method.uses_groups)
            others = tuple(method for method in grid.methods if not method.uses_groups)
            grid = replace(grid, methods=(*others, *_chosen(references, key, value, none=True)))
        elif key in _AXES:
            changed: dict[str, Any] = {key: _chosen(getattr(grid, key), key, value)}
            grid = replace(grid, **changed)
        elif key.partition(".")[0] == "search":
            given = {key.partition(".")[2]: value} if "." in key else value
            grid = replace(grid, search=_search(given, "--set search", grid.search))
    overrides = _plan({key: value for key, value in asked.items() if key in PLAN_FIELDS}, "--set")
    # Only what is still in the grid needs its variables. Options keep theirs: results are known by what was written.
    for method in grid.methods:
        for options in (method.options, *method.data_options.values()):
            for option, value in options.items():
                if isinstance(value, str):
                    expanded(value, f"option {option} of method {method.name!r}", environment)
    return replace(
        grid,
        overrides=overrides,
        data=tuple(
            replace(
                d,
                read=expanded(d.read, f"data {d.name!r}", environment),
                like=d.like and expanded(d.like, f"like of data {d.name!r}", environment),
                written=d.read,
            )
            for d in grid.data
        ),
        backbones=tuple(
            replace(b, model=expanded(b.model, f"backbone {b.name!r}", environment), written=b.model)
            for b in grid.backbones
        ),
    )


def _chosen(entries: tuple[Any, ...], what: str, value: Any, none: bool = False) -> tuple[Any, ...]:
    """The entries of a grid that are named in a setting; no name at all is an error unless `none` may be left."""
    named = {entry.name: entry for entry in entries}
    known = f"there are {', '.join(named)}" if named else f"this grid has no {what}"
    if value is None:
        if none:
            return ()
        raise InputError(f"--set {what}= names none, and at least one is needed; {known}")
    wanted = [str(name) for name in _listed(value)]
    for name in wanted:
        if name not in named:
            raise InputError(f"--set {what}: there is no {name!r}; {known}.{did_you_mean(name, list(named))}")
    return tuple(named[name] for name in wanted)


def _asked(changes: Sequence[str]) -> dict[str, Any]:
    """What "key=value" settings say."""
    found: dict[str, Any] = {}
    names = [*_KEYS, *(f"search.{f.name}" for f in fields(Search)), *PLAN_FIELDS]
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in names:
            raise InputError(
                f"--set takes key=value, with a key among {', '.join(names)}; found {change!r}."
                f"{did_you_mean(key, names)}"
            )
        several = "," in text and not text.lstrip().startswith(("[", "{"))
        value: Any = text
        if key not in ("title", "about", "baseline"):
            texts = text.split(",") if several else [text]
            try:
                values = [yaml_value(one) if one else None for one in texts]
            except ValueError:
                message = f"--set {key} is {text!r}, which cannot be read: is a bracket or a quote missing?"
                raise InputError(message) from None
            value = values if several else values[0]
        found[key] = _listed(value) if key in ("seeds", "metrics") else value
    return found


def _mapping(value: Any, where: str, known: Sequence[str] | None = None) -> Mapping[str, Any]:
    """A mapping with text as keys, all of them known."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{where} is {value!r}; expected a mapping of names to values")
    for key in value:
        if known is not None:
            check_known(key, known, f"{where} has the unknown key {key!r}; known:")
    return value


def _needed(value: Mapping[str, Any], key: str, where: str) -> None:
    if key not in value or value[key] == []:
        raise InputError(f"{where} has no {key!r}, which it needs.{did_you_mean(key, [k for k in value if k != key])}")


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{where} is {value!r}; expected a list")
    return value


def _listed(value: Any) -> Any:
    """One value stands for a list of one."""
    return value if isinstance(value, list | tuple) else [value]
