"""The figures of a grid's table, recomputed from the records of its cells. Imports no torch.

A method is set in bold where it is the best *and* its paired difference from each other method is significant; a table
without bold type is a finding too.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import numpy as np

from fairhead.audit import METRICS
from fairhead.audit.seeds import SeedPool
from fairhead.bench.grid import Cell, Grid, Method
from fairhead.bench.results_folder import Row, Store
from fairhead.bench.table import Table, finding, mean_of_all, name_of, verdict
from fairhead.errors import InputError
from fairhead.mitigate import LADDER
from fairhead.report.sections.bench_block import BenchBlock, Choice, Cost, Frontier, MethodFigures, Point
from fairhead.stats import ALPHA, adjust

# What the rows of results.jsonl must have for the table.
_FIELDS = ("data", "backbone", "method", "seed")
_OF_DONE = ("classes", "group", "rows", "stages", "cost", "made_with")


def table_of(grid: Grid, store: Store, command: str = "") -> Table:
    """The table of all cells of a grid that are done; rows of other settings are left out."""
    cells, rows, found = _shown(grid, store)
    done = [row for row in rows if row["status"] == "done"]
    for row in rows:
        store.need(row, (*_FIELDS, *(_OF_DONE if row["status"] == "done" else ("error",))))
        if row["status"] == "done":
            with store.reading(row):  # what the table takes of it
                _plans([row]), _cost([row]), row["seed"] + row["rows"]["test"]
                ", ".join([*row["made_with"].values(), row["made_with"]["device"], row["group"], *row["classes"]])
    if not done:
        errors = [f"{row['cell']}: {row['error']}" for row in rows]
        raise InputError(f"no cell of {grid.title!r} is done{'; ' + errors[0] if errors else _why_none(grid, store)}")
    methods = {cell.method.name: cell.method for cell in cells}
    blocks = []
    for here in product((data.name for data in grid.data), (backbone.name for backbone in grid.backbones)):
        ended = [row for row in rows if (row["data"], row["backbone"]) == here]
        if any(row["status"] == "done" for row in ended):
            of_method = {place[2]: both for place, both in found.items() if place[:2] == here}
            chosen = {name_of(name, choice): choice for name, both in of_method.items() for choice in both}
            blocks.append(_block(grid, store, ended, methods, chosen))
    made_with = [row["made_with"] for row in done]
    finished = {row["cell"]: row for row in done}
    places = dict.fromkeys((cell.data.name, cell.backbone.name, cell.method.name) for cell in grid.cells())
    undecided = ["/".join(place) for place in places if place not in found]
    provenance = {
        "command": command,
        "cells": len(cells),
        "done": len(done),
        "failed": len(rows) - len(done),
        "seeds": list(grid.seeds),
        **_plans([finished[cell.name] for cell in cells if cell.name in finished]),
        "selection": f"{'epoch and configuration' if grid.search else 'epoch'} by validation "
        f"{'worst-class accuracy' if grid.selection == 'worst_class' else grid.selection}",
        "n_boot": grid.n_boot,
        **({} if grid.search is None else {"search": {**asdict(grid.search), "undecided": undecided}}),
        "made_with": {
            name: " and ".join(dict.fromkeys(made.get(name, "?") for made in made_with)) for name in made_with[0]
        },
        "devices": list(dict.fromkeys(made["device"] for made in made_with)),
    }
    return Table(grid.title, grid.about, grid.baseline, grid.metrics, tuple(blocks), grid.reported, provenance)


def _shown(grid: Grid, store: Store) -> tuple[Sequence[Cell], Sequence[Row], Mapping[Any, Sequence[Choice]]]:
    """The cells of a table, the rows of those that have ended, and what a search chose for (data, backbone, method).

    Rows count that have the same settings and the same defaults; without PyTorch, which is asked for these, the latest
    of the same settings.
    """
    try:
        from fairhead.bench.cell import fingerprint
        from fairhead.bench.runner import choices, final_cells
    except ModuleNotFoundError:
        if grid.search is not None:
            raise InputError(
                'the table of a grid with a search needs torch, not installed here: pip install "fairhead[torch]"'
            ) from None
        known = {c.name: json.dumps(c.settings(), sort_keys=True, default=str) for c in grid.cells()}
        same = [r for r in store.rows() if json.dumps(r.get("settings"), sort_keys=True) == known.get(r["cell"])]
        return grid.cells(), list({row["cell"]: row for row in same}.values()), {}
    cells = final_cells(grid, store)
    wanted = {cell.name: fingerprint(cell) for cell in cells}
    rows = [row for row in store.rows() if wanted.get(row["cell"]) == row["fingerprint"]]
    return cells, rows, choices(grid, store)


def _why_none(grid: Grid, store: Store) -> str:
    """What there is instead of a finished cell, if anything."""
    names = {cell.name for cell in grid.cells()}
    others = sum(row["cell"] in names for row in store.rows())
    if others:
        return f"; {store.folder} has {others} results of its cells with other settings or other defaults"
    return "; its search is not finished" if grid.search and store.rows() else ""


def _plans(rows: Sequence[Row]) -> dict[str, Any]:
    """How models were trained, defaults included: what all have in common, and what some have instead."""
    plans = {}
    for row in rows:
        made = row.get("effective") or row["settings"]
        plan, backbone = made["plan"], made["backbone"]
        # A loss or draws of its own take a method through the loop, epoch after epoch.
        if backbone.get("train") == "head" and len(row.get("history", "1")) == 1:
            plan = {"optimizer": "none, a linear head solved exactly", "weight_decay": plan["weight_decay"]}
        own_plan = {"optimizer": "AdamW", **plan, "model": backbone["model"]}
        plans[row["data"], row["backbone"], row["method"]] = own_plan
    first = next(iter(plans.values()))
    common = {key: value for key, value in first.items() if all(plan.get(key, key) == value for plan in plans.values())}
    own: dict[str, list[tuple[str, ...]]] = {}
    for place, plan in plans.items():
        rest = {key: value for key, value in plan.items() if key not in common}
        own.setdefault(json.dumps(rest), []).append(place)
    # By the method alone, the backbone or the data where that says it all.
    for part in (slice(2, 3), slice(1, 2), slice(0, 1), slice(3)):
        names = [dict.fromkeys("/".join(place[part]) for place in places) for places in own.values()]
        if sum(map(len, names)) == len({name for group in names for name in group}):
            break
    named = {", ".join(group): json.loads(rest) for group, rest in zip(names, own, strict=True)}
    return {"plan": common, "own_plans": {name: rest for name, rest in named.items() if rest}}


def _block(
    grid: Grid, store: Store, rows: Sequence[Row], methods: Mapping[str, Method], chosen: Mapping[str, Choice]
) -> BenchBlock:
    done = [row for row in rows if row["status"] == "done"]
    names = [name for name in methods if any(row["method"] == name for row in rows)]
    runs = {name: {row["seed"]: store.records(row) for row in done if row["method"] == name} for name in names}
    runs = {name: seeds for name, seeds in runs.items() if seeds}
    first = done[0]
    pool = SeedPool(runs, first["group"], n_boot=grid.n_boot)
    lines = [replace(_line(methods[name], rows, pool, grid), search=chosen.get(name)) for name in names]
    lines = _corrected(lines, grid.metrics)
    best = {metric: _best(lines, pool, metric) for metric in grid.metrics}
    lines = [replace(line, best=tuple(sorted(m for m, name in best.items() if name == line.method))) for line in lines]
    # The share of the commonest class, averaged over the test rows of all runs.
    every = [records for seeds in runs.values() for records in seeds.values()]
    commonest = float(np.mean([np.bincount(records.label.codes).max() / len(records) for records in every]))
    n = round(sum(row["rows"]["test"] for row in done) / len(done))
    return BenchBlock(
        title=f"{first['data']}, {first['backbone']}: by {first['group']}, {n} test rows",
        baseline=grid.baseline,
        metrics=grid.metrics,
        data=first["data"],
        backbone=first["backbone"],
        group=first["group"],
        n=n,
        methods=tuple(lines),
        frontier=_frontier(lines, grid.baseline),
        verdict=verdict(lines, grid.baseline, commonest),
        findings=tuple(finding(lines, metric, grid.baseline) for metric in grid.metrics),
    )


def _line(method: Method, rows: Sequence[Row], pool: SeedPool, grid: Grid) -> MethodFigures:
    name = method.name
    own = [row for row in rows if row["method"] == name]
    done = [row for row in own if row["status"] == "done"]
    against = _against(method, grid)
    compared = done and name != against and against in pool.runs
    return MethodFigures(
        method=name,
        told=method.told,
        uses_groups=method.told == len(LADDER) - 1,
        seeds=tuple(sorted(row["seed"] for row in done)),
        figures={metric: pool.figure(name, metric) for metric in grid.metrics} if done else {},
        differences={metric: pool.difference(against, name, metric) for metric in grid.metrics} if compared else {},
        best=(),
        cost=_cost(done) if done else None,
        failed={str(row["seed"]): row["error"] for row in own if row["status"] == "failed"},
        remark=method.remark,
    )


def _against(method: Method, grid: Grid) -> str:
    """The baseline; with an epoch chosen on test rows the baseline whose epoch was chosen so, if there is one."""
    plain = next((other for other in grid.methods if other.name == grid.baseline), None)
    if method.circular and plain is not None:
        for other in grid.methods:
            alike = replace(plain, name=other.name, uses_groups=True, selection=method.selection)
            if other == alike and other != method:
                return other.name
    return grid.baseline


def _corrected(lines: Sequence[MethodFigures], metrics: Sequence[str]) -> list[MethodFigures]:
    """Correct the p-values of each metric over the methods that were compared with the baseline."""
    made = {line.method: dict(line.differences) for line in lines}
    for metric in metrics:
        tested = [of_line for of_line in made.values() if metric in of_line]
        corrected = adjust([of_line[metric].p for of_line in tested], "holm")
        for of_line, p in zip(tested, corrected, strict=True):
            of_line[metric] = replace(of_line[metric], p_adjusted=p)
    return [replace(line, differences=made[line.method]) for line in lines]


def _best(lines: Sequence[MethodFigures], pool: SeedPool, metric: str) -> str | None:
    """The best method of levels 0 to 2 of the ladder, where it differs significantly from every other one there.

    Each of these p counts as often as there are others, or as methods that were compared with the baseline where those
    are more, as with references (Bonferroni): Holm's would set a method in bold whose difference from the baseline,
    corrected among those of all methods, is called noise in the same table.
    """
    means = {
        line.method: line.figures[metric].mean
        for line in lines
        if (line.told or 0) <= 2 and line.figures and line.figures[metric].mean is not None
    }
    if len(means) < 2:
        return None
    ordered = sorted(means, key=lambda name: abs((means[name] or 0.0) - (METRICS[metric].ideal or 0.0)))
    against = [pool.difference(ordered[0], other, metric).p for other in ordered[1:]]
    if any(p is None for p in against):
        return None
    tests = max(len(against), sum(metric in line.differences for line in lines))
    return ordered[0] if all((p or 0.0) * tests < ALPHA for p in against) else None


def _frontier(lines: Sequence[MethodFigures], baseline: str) -> Frontier | None:
    """Accuracy and EOd of the methods that have both with their intervals."""
    points = []
    for line in lines:
        both = [line.figures[name] for name in ("accuracy", "EOd") if name in line.figures]
        known = [x for figure in both for x in (figure.mean, figure.low, figure.high) if x is not None]
        if len(known) == 6:
            accuracy, accuracy_low, accuracy_high, gap, low, high = known
            points.append(Point(line.method, accuracy, accuracy_low, accuracy_high, gap, low, high))
    return Frontier.of("EOd", points, baseline) if points else None


def _cost(rows: Sequence[Row]) -> Cost:
    costs = [row["cost"] for row in rows]
    on_gpu = costs[0]["gpu_allocated_mib"] is not None
    mib = "gpu_allocated_mib" if on_gpu else "peak_rss_mib"
    return Cost(
        seconds=mean_of_all([cost["seconds"] for cost in costs]) or 0.0,
        watt_hours=mean_of_all([cost["energy_wh"] for cost in costs]),
        mib=mean_of_all([cost[mib] for cost in costs]),
        mib_of="GPU, tensors" if on_gpu else "process, resident",
        shared_by=max(cost["shared_by"] for cost in costs),
        steps=mean_of_all([sum(stage[2] for stage in row["stages"]) for row in rows]) or 0.0,
    )
