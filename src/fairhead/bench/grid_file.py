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
methods: [erm, dam]            # or {name, method, options}; none of them sees a group
references: [group_dro]        # methods that do see groups, shown apart; {method: erm, selection: worst_group} too
seeds: [0, 1, 2]
plan: {epochs: 30, batch_size: 256}                       # of `TrainingPlan`; data and backbones may have their own
search: {configs: 10, seed: 0, seeds: [1000]}             # of hyper-parameters, before the seeds are run; see `search`
```
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from fairhead.audit import METRICS as KNOWN
from fairhead.bench.grid import METRICS, PARTS, PLAN_FIELDS, SELECTIONS, Backbone, Data, Grid, Method, Search
from fairhead.bench.values import list_of, mapping, name_of, one_of, text_of, truth_of, whole_numbers, yaml_of
from fairhead.errors import InputError, did_you_mean


def read_grid(path: Path | str, changes: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Grid:
    r"""Read a grid from a YAML file.

    Args:
        path: the file.
        changes: "key=value" settings that replace what the file says: any key of a plan (`epochs=1`), `limit`,
            `seeds`, `methods`, `data`, `backbones` (names in the file, separated by commas), `search` (a number of
            configurations) and its keys (`search.seeds=1000,1001`), or another top-level key.
        environment: where `${NAME}` in the file is looked up; the process's own by default.

    Raises:
        InputError: naming the place in the file, what was found and what was expected.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "grid.yaml")
        >>> text = "title: T\ndata: ['utkface:${D}/u.zip']\nbackbones: [vit-8x8]\nmethods: [erm, dam]\nseeds: [0, 1]\n"
        >>> _ = file.write_text(text)
        >>> grid = read_grid(file, ["epochs=1", "seeds=1"], {"D": "data"})
        >>> [cell.name for cell in grid.cells()], grid.cells()[0].plan
        (['utkface/vit-8x8/erm/1', 'utkface/vit-8x8/dam/1'], {'epochs': 1})
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"cannot read the grid {str(path)!r}: {reason}") from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    known = [f.name for f in fields(Grid) if f.name != "overrides"] + ["references", "limit"]
    top = mapping(content, str(path), known, needed=("title", "data", "backbones", "methods", "seeds"))
    lookup = os.environ if environment is None else environment
    asked = _parsed(changes, known)
    written = _grid(top, str(path))
    grid = _changed(written, asked, lookup)
    _check_table(grid, written, str(path), "baseline" in top or "baseline" in asked)
    if grid.search is None:
        return grid
    shared = sorted({*grid.search.seeds} & {*grid.seeds})
    if shared:
        raise InputError(
            f"{path}: seed {shared[0]} is one of the grid and one of its search; results need seeds that nothing was "
            "chosen on: give others in search.seeds"
        )
    # Of all rules that need no groups, the one that a search does best by (SubpopBench).
    says = "selection" in top or "selection" in asked
    return grid if says else replace(grid, selection="worst_class")


def _grid(top: Mapping[str, Any], where: str) -> Grid:
    limit = top.get("limit")
    grid = Grid(
        title=text_of(top["title"], f"{where}: title"),
        about=text_of(top.get("about", ""), f"{where}: about"),
        data=tuple(_data(entry, f"{where}: data[{i}]", limit) for i, entry in _entries(top, "data", where)),
        backbones=tuple(_backbone(entry, f"{where}: backbones[{i}]") for i, entry in _entries(top, "backbones", where)),
        methods=(
            *(_method(e, f"{where}: methods[{i}]", False) for i, e in _entries(top, "methods", where)),
            *(_method(e, f"{where}: references[{i}]", True) for i, e in _entries(top, "references", where, False)),
        ),
        seeds=whole_numbers(top["seeds"], f"{where}: seeds"),
        plan=_plan(top.get("plan", {}), f"{where}: plan"),
        selection=one_of(top.get("selection", "accuracy"), f"{where}: selection", SELECTIONS),
        baseline=text_of(top.get("baseline", "erm"), f"{where}: baseline"),
        metrics=tuple(
            text_of(m, f"{where}: metrics") for m in list_of(top.get("metrics", METRICS), f"{where}: metrics")
        ),
        n_boot=whole_numbers([top.get("n_boot", 2000)], f"{where}: n_boot")[0],
        reported=mapping(top.get("reported", {}), f"{where}: reported"),
        search=_search(top.get("search"), f"{where}: search", None),
    )
    for what in ("data", "backbones", "methods"):
        names = [entry.name for entry in getattr(grid, what)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(f"{where}: {what} has {twice[0]!r} twice; give each a name of its own")
    of_data = [data.name for data in grid.data]
    for method in grid.methods:
        for name in method.data_options:
            if name not in of_data:
                raise InputError(
                    f"{where}: method {method.name!r} has data_options for {name!r}; its data are {', '.join(of_data)}."
                    f"{did_you_mean(name, of_data)}"
                )
    return grid


def _check_table(grid: Grid, written: Grid, where: str, says_baseline: bool) -> None:
    """Refuse what the table could not show, before anything runs."""
    for metric in grid.metrics:
        if metric not in KNOWN:
            raise InputError(
                f"{where}: metrics has {metric!r}; known: {', '.join(KNOWN)}.{did_you_mean(str(metric), list(KNOWN))}"
            )
    if grid.n_boot < 100:
        raise InputError(f"{where}: n_boot is {grid.n_boot}; at least 100 replicates are needed for an interval")
    names = [method.name for method in written.methods]
    if says_baseline and grid.baseline not in names:
        raise InputError(
            f"{where}: baseline is {grid.baseline!r}; expected one of its methods: {', '.join(names)}."
            f"{did_you_mean(grid.baseline, names)}"
        )


def _data(entry: Any, where: str, limit: int | None) -> Data:
    if isinstance(entry, str):
        entry = {"read": entry}
    known = [f.name for f in fields(Data)]
    found = mapping(entry, where, known, needed=("read",))
    read = text_of(found["read"], f"{where}.read")
    if ":" not in read:
        raise InputError(f"{where}.read is {read!r}; expected reader:path, such as utkface:UTKFace.zip")
    parts = tuple(text_of(part, f"{where}.parts") for part in list_of(found.get("parts", Data.parts), f"{where}.parts"))
    if len(parts) != len(PARTS):
        raise InputError(f"{where}.parts has {len(parts)} names; expected those of train, validation and test")
    return Data(
        name=name_of(found.get("name", read.partition(":")[0]), f"{where}.name"),
        read=read,
        options=mapping(found.get("options", {}), f"{where}.options"),
        group=None if found.get("group") is None else text_of(found["group"], f"{where}.group"),
        split_by_seed=truth_of(found.get("split_by_seed", False), f"{where}.split_by_seed"),
        parts=parts,
        max_length=whole_numbers([found.get("max_length", Data.max_length)], f"{where}.max_length")[0],
        limit=_limit(found.get("limit", limit), f"{where}.limit"),
        plan=_plan(found.get("plan", {}), f"{where}.plan"),
    )


def _search(value: Any, where: str, before: Search | None) -> Search | None:
    """A search from a mapping or a number of configurations, with what it does not say as it was `before`."""
    if value is None or value is False:
        return None
    found = mapping({"configs": value} if isinstance(value, int) else value, where, [f.name for f in fields(Search)])
    before = before or Search()
    configs, seed = (whole_numbers([found.get(n, getattr(before, n))], f"{where}.{n}")[0] for n in ("configs", "seed"))
    if configs < 1:
        raise InputError(f"{where}.configs is {configs}; at least 1 is needed")
    seeds = found.get("seeds", before.seeds)
    with_groups = truth_of(found.get("with_groups", before.with_groups), f"{where}.with_groups")
    return Search(
        configs,
        seed,
        whole_numbers(seeds if isinstance(seeds, list | tuple) else [seeds], f"{where}.seeds"),
        with_groups,
    )


def _limit(value: Any, where: str) -> int | None:
    limit = None if value is None else whole_numbers([value], where)[0]
    if limit == 0:
        raise InputError(f"{where} is 0; at least 1 row is needed")
    return limit


def _backbone(entry: Any, where: str) -> Backbone:
    if isinstance(entry, str):
        entry = {"model": entry}
    found = mapping(entry, where, [f.name for f in fields(Backbone)], needed=("model",))
    model = text_of(found["model"], f"{where}.model")
    return Backbone(
        name=name_of(found.get("name", model.removeprefix("path:").rstrip("/").rpartition("/")[2]), f"{where}.name"),
        model=model,
        train=one_of(found.get("train", "all"), f"{where}.train", ("all", "last_encoder")),
        settings=mapping(found.get("settings", {}), f"{where}.settings"),
        plan=_plan(found.get("plan", {}), f"{where}.plan"),
    )


def _method(entry: Any, where: str, uses_groups: bool) -> Method:
    if isinstance(entry, str):
        entry = {"method": entry}
    known = ("name", "method", "options", "data_options", "selection")
    found = mapping(entry, where, known, needed=("method",))
    method = text_of(found["method"], f"{where}.method")
    selection = found.get("selection")
    if selection is not None:
        one_of(selection, f"{where}.selection", ("worst_group",))
        if not uses_groups:
            raise InputError(f"{where}.selection: {selection} needs groups; list this method under references")
    name = method if selection is None else f"{method} epoch chosen with groups"
    return Method(
        name=name_of(found.get("name", name), f"{where}.name"),
        method=method,
        options=mapping(found.get("options", {}), f"{where}.options"),
        data_options={
            name: mapping(options, f"{where}.data_options.{name}")
            for name, options in mapping(found.get("data_options", {}), f"{where}.data_options").items()
        },
        uses_groups=uses_groups,
        selection=selection,
    )


def _changed(grid: Grid, changes: Mapping[str, Any], environment: Mapping[str, str]) -> Grid:
    """The grid with the command's settings in place of the file's, and variables filled in."""
    for key, value in changes.items():
        if key in PLAN_FIELDS:
            grid = replace(grid, overrides={**grid.overrides, **_plan({key: value}, "--set")})
        elif key == "limit":
            grid = replace(grid, data=tuple(replace(data, limit=_limit(value, "--set limit")) for data in grid.data))
        elif key == "seeds":
            grid = replace(grid, seeds=whole_numbers(value if isinstance(value, list) else [value], "--set seeds"))
        elif key == "references":
            groupless = tuple(method for method in grid.methods if not method.uses_groups)
            references = tuple(method for method in grid.methods if method.uses_groups)
            grid = replace(grid, methods=(*groupless, *_chosen(references, key, value, none=True)))
        elif key in ("data", "backbones", "methods"):
            changed: dict[str, Any] = {key: _chosen(getattr(grid, key), key, value)}
            grid = replace(grid, **changed)
        elif key.partition(".")[0] == "search":
            given = {key.partition(".")[2]: value} if "." in key else value
            grid = replace(grid, search=_search(given, "--set search", grid.search))
        elif key == "n_boot":
            grid = replace(grid, n_boot=whole_numbers([value], "--set n_boot")[0])
        elif key == "selection":
            grid = replace(grid, selection=one_of(value, "--set selection", SELECTIONS))
        elif key == "metrics":
            names = value if isinstance(value, list) else [value]
            grid = replace(grid, metrics=tuple(text_of(name, "--set metrics") for name in names))
        elif key == "plan":
            grid = replace(grid, plan=_plan(value, "--set plan"))
        elif key == "reported":
            grid = replace(grid, reported=mapping(value, "--set reported"))
        else:  # title, about, baseline
            words: dict[str, Any] = {key: str(value)}
            grid = replace(grid, **words)
    # Only what is still in the grid needs its variables. Options keep theirs: results are known by what was written.
    for method in grid.methods:
        for options in (method.options, *method.data_options.values()):
            for option, value in options.items():
                if isinstance(value, str):
                    expanded(value, f"option {option} of method {method.name!r}", environment)
    return replace(
        grid,
        data=tuple(
            replace(d, read=expanded(d.read, f"data {d.name!r}", environment), written=d.read) for d in grid.data
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
    wanted = [str(name) for name in (value if isinstance(value, list) else [value])]
    for name in wanted:
        if name not in named:
            raise InputError(f"--set {what}: there is no {name!r}; {known}.{did_you_mean(name, list(named))}")
    return tuple(named[name] for name in wanted)


def _parsed(changes: Sequence[str], known: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    names = [*known, *(f"search.{f.name}" for f in fields(Search)), *PLAN_FIELDS]
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in names:
            raise InputError(
                f"--set takes key=value, with a key among {', '.join(names)}; found {change!r}."
                f"{did_you_mean(key, names)}"
            )
        if key in ("title", "about"):
            found[key] = text
        elif "," in text and not text.lstrip().startswith(("[", "{")):
            found[key] = [yaml_of(part, f"--set {key}") for part in text.split(",")]
        else:
            found[key] = yaml_of(text, f"--set {key}")
    return found


_VARIABLE = re.compile(r"\$\{(\w+)\}")


def expanded(text: str, where: str, environment: Mapping[str, str] | None = None) -> str:
    """Fill in `${NAME}` from the environment.

    Raises:
        InputError: a variable is not set.

    Example:
        >>> expanded("path:${MODELS}/clip", "the backbone", {"MODELS": "/mnt"})
        'path:/mnt/clip'
    """
    environment = os.environ if environment is None else environment
    for name in _VARIABLE.findall(text):
        if not environment.get(name):
            raise InputError(
                f"{where} is at {text!r}, and the variable {name} is not set: export {name}=FOLDER, "
                "or leave it out with --set"
            )
    return _VARIABLE.sub(lambda match: environment[match[1]], text)


def _plan(value: Any, where: str) -> dict[str, Any]:
    found = mapping(value, where, PLAN_FIELDS)
    for name, number in found.items():
        if name == "precision" and number is False:  # what YAML takes a bare no for
            found[name] = "no"
        # YAML reads 1e-4 as text: it wants a point there.
        elif isinstance(number, str) and name not in ("schedule", "precision"):
            try:
                found[name] = float(number)
            except ValueError:
                raise InputError(f"{where}.{name} is {number!r}; expected a number") from None
    return found


def _entries(top: Mapping[str, Any], key: str, where: str, needed: bool = True) -> list[tuple[int, Any]]:
    entries = list_of(top.get(key, []), f"{where}: {key}")
    if needed and not entries:
        raise InputError(f"{where}: {key} is empty; at least one is needed")
    return list(enumerate(entries))
