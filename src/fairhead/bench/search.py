"""Hyper-parameter search: the same number of configurations for every method, chosen on validation rows alone.

Each method is tried with the grid's own settings and with `configs` random ones: learning rate and weight decay (the
same draws for every method) and the options that the method declares priors for. Trials run on seeds of their own and
never look at a test row of their split. The configuration with the best validation score, by the grid's selection, is
what the grid's seeds are then run with. Where the split follows the seed, trials have another split of the same data
than results: a row that tests a result may have had its part in the choice, which the table says.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fairhead.audit import audit
from fairhead.bench.fingerprint import fingerprint, method_of
from fairhead.bench.grid import Backbone, Cell, Data, Grid, Method, Search
from fairhead.bench.results_folder import Store
from fairhead.bench.table import mean_of_all
from fairhead.data import parse_spec
from fairhead.mitigate.priors import PLAN_PRIORS, Prior
from fairhead.report.sections.bench_block import Choice
from fairhead.train import TrainingPlan

# Rows of a store by cell and fingerprint.
Rows = Mapping[tuple[str, str], Mapping[str, Any]]


class Place(NamedTuple):
    """Where a search takes place: each has its own choice."""

    data: str
    backbone: str
    method: str


def trial_cells(grid: Grid) -> tuple[Cell, ...]:
    """Every trial of a grid's search; none where it has no search."""
    if grid.search is None:
        return ()
    return tuple(
        _configured(grid, data, backbone, method, seed, number)
        for data in grid.data
        for backbone in grid.backbones
        for seed in grid.search.seeds
        for number in range(grid.search.configs + 1)
        for method in grid.methods
    )


def final_cells(grid: Grid, store: Store) -> tuple[Cell, ...]:
    """The cells that the table is made of: a grid's own, or those of the configurations that its search has chosen.

    A method whose trials have not all ended has none yet. Where the search is asked to choose with groups as well,
    that choice is a method of its own, unless it is the same configuration.
    """
    if grid.search is None:
        return grid.cells()
    found = choices(grid, store)
    cells = []
    for cell in grid.cells():
        place = Place(cell.data.name, cell.backbone.name, cell.method.name)
        for choice in found.get(place, ()):
            chosen = _configured(grid, cell.data, cell.backbone, cell.method, cell.seed, choice.config)
            method = replace(chosen.method, name=name_of(place.method, choice))
            cells.append(replace(chosen, trial=None, method=replace(method, chosen_with_groups=choice.with_groups)))
    return tuple(cells)


def name_of(method: str, choice: Choice) -> str:
    """How a choice is called in the table."""
    return f"{method} chosen with groups" if choice.with_groups else method


def choices(grid: Grid, store: Store) -> dict[Place, tuple[Choice, ...]]:
    """What the search has chosen, for every method whose trials have all ended; with groups as well where asked for."""
    assert grid.search is not None
    rows = {(row["cell"], row["fingerprint"]): row for row in store.rows()}
    found = {}
    for data in grid.data:
        for backbone in grid.backbones:
            for method in grid.methods:
                chosen = _chosen(grid, grid.search, store, rows, data, backbone, method)
                if chosen:
                    found[Place(data.name, backbone.name, method.name)] = chosen
    return found


def _chosen(
    grid: Grid, search: Search, store: Store, rows: Rows, data: Data, backbone: Backbone, method: Method
) -> tuple[Choice, ...]:
    tried = []  # of each configuration: the rows of its seeds
    for number in range(search.configs + 1):
        cells = [_configured(grid, data, backbone, method, seed, number) for seed in search.seeds]
        own = [rows.get((cell.name, fingerprint(cell))) for cell in cells]
        if any(row is None for row in own):
            return ()
        tried.append([row for row in own if row is not None])
    scores = [mean_of_all([row["validation"][grid.selection] if _done(row) else None for row in own]) for own in tried]
    every = [row for own in tried for row in own]

    def choice(scores: Sequence[float | None], with_groups: bool = False) -> Choice:
        # The first of the best: where nothing is gained, the grid's own settings stay.
        best = max(range(len(scores)), key=lambda number: -1.0 if scores[number] is None else scores[number] or 0.0)
        costs = [row["cost"] for row in every if "cost" in row]
        watt_hours = mean_of_all([cost["energy_wh"] for cost in costs])
        return Choice(
            config=best,
            values=_drawn(grid, data, backbone, method, best),
            score=scores[best] or 0.0,
            own_score=scores[0],
            searched={name: str(prior) for name, prior in _priors(grid, data, backbone, method).items()},
            trials=len(every),
            failed=sum(not _done(row) for row in every),
            seconds=sum(cost["seconds"] for cost in costs),
            watt_hours=None if watt_hours is None else watt_hours * len(costs),
            with_groups=with_groups,
        )

    if all(score is None for score in scores):
        return ()
    plain = choice(scores)
    if not search.with_groups:
        return (plain,)
    by_group = [mean_of_all([_worst_group(store, row) for row in own]) for own in tried]
    if all(score is None for score in by_group):  # too few rows of a group and class
        return (plain,)
    with_groups = choice(by_group, with_groups=True)
    return (plain,) if with_groups.config == plain.config else (plain, with_groups)


def _done(row: Mapping[str, Any]) -> bool:
    return bool(row["status"] == "done")


def _worst_group(store: Store, row: Mapping[str, Any]) -> float | None:
    """The lowest accuracy of a (class, group) cell of the validation rows."""
    if not _done(row):
        return None
    (found,) = audit(store.records(row), group_by=row["group"], metrics=("worst_group_accuracy",), n_boot=100).estimates
    return found.value


def _configured(grid: Grid, data: Data, backbone: Backbone, method: Method, seed: int, number: int) -> Cell:
    """A trial: one configuration of a method on one seed."""
    drawn = _drawn(grid, data, backbone, method, number)
    plan = {name: value for name, value in drawn.items() if name in PLAN_PRIORS["text"]}
    options = {**method.options, **method.data_options.get(data.name, {})}
    options |= {name: value for name, value in drawn.items() if name not in plan}
    return Cell(
        data,
        method.backbone(backbone),
        replace(method, options=options, data_options={}),
        seed,
        {**grid.plan_of(data, backbone, method), **plan},
        grid.selection,
        trial=number,
    )


def _priors(grid: Grid, data: Data, backbone: Backbone, method: Method) -> dict[str, Prior]:
    """What is searched. What the command sets, or what makes a registered variant of a method, stays as it is."""
    kind = "image" if parse_spec(data.read).reader.kind == "images" else "text"
    plan = {name: prior for name, prior in PLAN_PRIORS[kind].items() if name not in grid.overrides}
    config = method_of(Cell(data, backbone, replace(method, options={}, data_options={}), 0, {}))
    plain = type(config)()
    own = {
        name: prior
        for name, prior in getattr(config, "priors", {}).items()
        if getattr(config, name) == getattr(plain, name)
    }
    return {**own, **plan}


def _drawn(grid: Grid, data: Data, backbone: Backbone, method: Method, number: int) -> dict[str, Any]:
    """The values of one configuration; none for 0, which is the grid's own."""
    if number == 0:
        return {}
    assert grid.search is not None
    epochs = int({"epochs": TrainingPlan.epochs, **grid.plan_of(data, backbone, method)}["epochs"])
    drawn = {}
    for name, prior in _priors(grid, data, backbone, method).items():
        # The plan's values do not depend on the method: all of them meet the same learning rates.
        whose = "plan" if name in PLAN_PRIORS["text"] else method.method
        drawn[name] = prior.draw(random.Random(f"{grid.search.seed}/{number}/{whose}/{name}"), epochs)
    return drawn
