"""From results to a table whose bold type means something. Imports no torch.

Every figure is recomputed from the records of the cells. A method is set in bold where it is the best *and* its paired
difference from each other method can be told from noise; a table without bold type is a finding too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fairhead.audit import METRICS
from fairhead.audit.comparison import adjust
from fairhead.audit.seeds import SeedDifference, SeedFigure, SeedPool
from fairhead.bench.frontier import Frontier, frontier
from fairhead.bench.grid import Grid
from fairhead.bench.store import Store
from fairhead.errors import InputError
from fairhead.report.wording import MINUS

TABLE_SCHEMA = "fairhead.bench.table/1"
SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Cost:
    """What a run of a method cost, averaged over seeds; None: not known there.

    Attributes:
        seconds: wall time of training, all stages.
        watt_hours: of the GPU.
        mib: peak memory: PyTorch's tensors on the GPU, or the resident memory of the process.
        mib_of: which of the two.
        shared_by: how many cells shared the device at most: time is longer and energy an equal share.
        steps: optimizer steps, all stages.
    """

    seconds: float
    watt_hours: float | None
    mib: float | None
    mib_of: str
    shared_by: int
    steps: float


@dataclass(frozen=True)
class Line:
    """One method in a block.

    Attributes:
        method: its name.
        uses_groups: it trains with groups: a reference, never in bold.
        seeds: those that are done.
        figures: metric -> figure over seeds.
        differences: metric -> paired difference from the baseline.
        p_adjusted: metric -> p of that difference, corrected over the methods of the block (Holm).
        best: metrics in which it is the best and can be told from all others.
        cost: averaged over seeds.
        failed: seed -> error of the cells that came to nothing.
    """

    method: str
    uses_groups: bool
    seeds: tuple[int, ...]
    figures: Mapping[str, SeedFigure]
    differences: Mapping[str, SeedDifference]
    p_adjusted: Mapping[str, float | None]
    best: frozenset[str]
    cost: Cost | None
    failed: Mapping[int, str]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "method": self.method,
            "uses_groups": self.uses_groups,
            "seeds": list(self.seeds),
            "figures": {name: figure.to_dict() for name, figure in self.figures.items()},
            "differences": {
                name: {**d.to_dict(), "p_adjusted": self.p_adjusted.get(name)} for name, d in self.differences.items()
            },
            "best": sorted(self.best),
            "cost": None if self.cost is None else vars(self.cost),
            "failed": {str(seed): error for seed, error in self.failed.items()},
        }


@dataclass(frozen=True)
class Block:
    """All methods on one data set with one backbone."""

    data: str
    backbone: str
    group: str
    n: int
    lines: tuple[Line, ...]
    frontier: Frontier | None
    findings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "data": self.data,
            "backbone": self.backbone,
            "group": self.group,
            "n": self.n,
            "findings": list(self.findings),
            "methods": [line.to_dict() for line in self.lines],
            "frontier": None if self.frontier is None else self.frontier.to_dict(),
        }


@dataclass(frozen=True)
class Table:
    """The results of a grid."""

    title: str
    about: str
    baseline: str
    metrics: tuple[str, ...]
    blocks: tuple[Block, ...]
    reported: Mapping[str, Any]
    provenance: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; values are fractions."""
        return {
            "schema": TABLE_SCHEMA,
            "title": self.title,
            "about": self.about,
            "baseline": self.baseline,
            "metrics": list(self.metrics),
            "blocks": [block.to_dict() for block in self.blocks],
            "reported": dict(self.reported),
            "provenance": dict(self.provenance),
        }


def table_of(grid: Grid, store: Store, command: str = "") -> Table:
    """Make the table of all cells of a grid that are done.

    Args:
        grid: what was asked for; rows of other settings are left out.
        store: what there is.
        command: what was typed, for provenance.

    Raises:
        InputError: no cell is done.
    """
    wanted = {cell.name: cell.fingerprint for cell in grid.cells()}
    rows = [row for row in store.rows() if wanted.get(row["cell"]) == row["fingerprint"]]
    if not any(row["status"] == "done" for row in rows):
        errors = [f"{row['cell']}: {row['error']}" for row in rows if row["status"] == "failed"]
        raise InputError(f"no cell of {grid.title!r} is done{'; ' + errors[0] if errors else ''}")
    blocks = []
    for data in grid.data:
        for backbone in grid.backbones:
            here = [row for row in rows if (row["data"], row["backbone"]) == (data.name, backbone.name)]
            if any(row["status"] == "done" for row in here):
                blocks.append(_block(grid, store, here))
    done = sum(row["status"] == "done" for row in rows)
    made_with = next(row["made_with"] for row in rows if row["status"] == "done")
    provenance = {
        "command": command,
        "cells": len(wanted),
        "done": done,
        "failed": len(rows) - done,
        "seeds": list(grid.seeds),
        "plan": {**grid.plan, **grid.overrides},
        "selection": f"epoch by validation {grid.selection.replace('_', ' ')}",
        "n_boot": grid.n_boot,
        "made_with": made_with,
    }
    return Table(grid.title, grid.about, grid.baseline, grid.metrics, tuple(blocks), grid.reported, provenance)


def _block(grid: Grid, store: Store, rows: Sequence[Mapping[str, Any]]) -> Block:
    done = [row for row in rows if row["status"] == "done"]
    names = [m.name for m in grid.methods if any(row["method"] == m.name for row in rows)]
    runs = {
        name: {row["seed"]: store.records(row) for row in done if row["method"] == name}
        for name in names
        if any(row["method"] == name for row in done)
    }
    pool = SeedPool(runs, done[0]["group"], n_boot=grid.n_boot)
    uses_groups = {m.name: m.uses_groups for m in grid.methods}
    lines = [_line(name, uses_groups[name], rows, pool, grid) for name in names]
    lines = _corrected(lines, grid.metrics)
    best = {metric: _best(lines, pool, metric) for metric in grid.metrics}
    lines = [
        replace(line, best=frozenset(metric for metric, name in best.items() if name == line.method)) for line in lines
    ]
    first = done[0]
    n = round(sum(row["rows"]["test"] for row in done) / len(done))
    return Block(
        data=first["data"],
        backbone=first["backbone"],
        group=first["group"],
        n=n,
        lines=tuple(lines),
        frontier=frontier({line.method: line.figures for line in lines if line.figures}, grid.baseline),
        findings=tuple(_finding(lines, metric, grid.baseline) for metric in grid.metrics),
    )


def _line(name: str, uses_groups: bool, rows: Sequence[Mapping[str, Any]], pool: SeedPool, grid: Grid) -> Line:
    own = [row for row in rows if row["method"] == name]
    done = [row for row in own if row["status"] == "done"]
    figures = {metric: pool.figure(name, metric) for metric in grid.metrics} if done else {}
    compared = done and name != grid.baseline and grid.baseline in pool.runs
    differences = {metric: pool.difference(grid.baseline, name, metric) for metric in grid.metrics} if compared else {}
    failed = {row["seed"]: row["error"] for row in own if row["status"] == "failed"}
    seeds = tuple(sorted(row["seed"] for row in done))
    cost = _cost(done) if done else None
    return Line(name, uses_groups, seeds, figures, differences, {}, frozenset(), cost, failed)


def _cost(rows: Sequence[Mapping[str, Any]]) -> Cost:
    costs = [row["cost"] for row in rows]
    on_gpu = costs[0]["gpu_allocated_mib"] is not None
    mib = "gpu_allocated_mib" if on_gpu else "peak_rss_mib"
    return Cost(
        seconds=_mean([cost["seconds"] for cost in costs]) or 0.0,
        watt_hours=_mean([cost["energy_wh"] for cost in costs]),
        mib=_mean([cost[mib] for cost in costs]),
        mib_of="GPU, tensors" if on_gpu else "process, resident",
        shared_by=max(cost["shared_by"] for cost in costs),
        steps=_mean([sum(stage[2] for stage in row["stages"]) for row in rows]) or 0.0,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _corrected(lines: Sequence[Line], metrics: Sequence[str]) -> list[Line]:
    """Correct the p-values of each metric over the methods that were held against the baseline."""
    adjusted: dict[str, dict[str, float | None]] = {line.method: {} for line in lines}
    for metric in metrics:
        tested = [line for line in lines if metric in line.differences]
        corrected = adjust([line.differences[metric].p for line in tested], "holm")
        for line, p in zip(tested, corrected, strict=True):
            adjusted[line.method][metric] = p
    return [replace(line, p_adjusted=adjusted[line.method]) for line in lines]


def _best(lines: Sequence[Line], pool: SeedPool, metric: str) -> str | None:
    """The best method without groups, where it can be told from every other one."""
    means = {
        line.method: line.figures[metric].mean
        for line in lines
        if not line.uses_groups and line.figures and line.figures[metric].mean is not None
    }
    if len(means) < 2:
        return None
    ordered = sorted(means, key=lambda name: _badness(metric, means[name]))
    against = [pool.difference(ordered[0], other, metric).p for other in ordered[1:]]
    if any(p is None for p in against):
        return None
    return ordered[0] if all((p or 0.0) < SIGNIFICANCE for p in adjust(against, "holm")) else None


def _badness(metric: str, value: float | None) -> float:
    return abs((value or 0.0) - (METRICS[metric].ideal or 0.0))


def is_better(metric: str, change: float) -> bool:
    """Whether a change of a metric is towards its ideal.

    Example:
        >>> is_better("EOd", -0.02), is_better("accuracy", -0.02)
        (True, False)
    """
    return change > 0 if METRICS[metric].ideal else change < 0


def _signed(value: float | None) -> str:
    return f"{100 * (value or 0.0):+.1f}".replace("-", MINUS)


def _finding(lines: Sequence[Line], metric: str, baseline: str) -> str:
    """One sentence: which methods can be told from the baseline in this metric, and how fine the sample can tell."""
    tested = [line for line in lines if metric in line.differences and line.p_adjusted.get(metric) is not None]
    name = {"accuracy": "accuracy", "worst_group_accuracy": "worst-group accuracy"}.get(metric, metric)
    if not tested:
        reasons = [f.undefined for line in lines for m, f in line.figures.items() if m == metric and f.undefined]
        why = f"undefined ({reasons[0]})" if reasons else f"fewer than two seeds in common with {baseline}"
        return f"{name}: {why}."
    told = [line for line in tested if (line.p_adjusted[metric] or 0.0) < SIGNIFICANCE]
    smallest = [line.differences[metric].mde for line in tested]
    known = [100 * m for m in smallest if m is not None]
    if not known:
        return f"{name}: the same answers as {baseline} everywhere."
    fine = f"differences below about {max(known):.1f} points would be missed"
    if not told:
        who = f"{tested[0].method} cannot" if len(tested) == 1 else f"none of {len(tested)} methods can"
        return f"{name}: {who} be told from {baseline}; {fine}."
    said = [
        f"{line.method} {_signed(line.differences[metric].value)} points"
        f"{' (trains with groups)' if line.uses_groups else ''}"
        for line in told
    ]
    rest = len(tested) - len(told)
    others = f"; the other {rest} cannot be told from it, and {fine}" if rest else ""
    return f"{name}: {', '.join(said)} against {baseline}{others}."
