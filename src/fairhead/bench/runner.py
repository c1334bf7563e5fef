"""Running a grid. What is done stays done; what failed or was cut short is run again.

It may begin with a search of hyper-parameters: the same number of configurations for every method, chosen on validation
rows alone. Each method is tried with the grid's own settings and with `configs` random ones: learning rate and weight
decay (the same draws for every method) and the options that the method declares priors for. Trials run on seeds of
their own and never look at a test row of their split. The configuration with the best validation score, by the grid's
selection, is what the grid's seeds are then run with. Where the split follows the seed, trials have another split of
the same data than results: a row that tests a result may have had its part in the choice, which the table says.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fairhead.audit import audit
from fairhead.bench.cell import contents_of, fingerprint, method_of
from fairhead.bench.engines import News, Workplace, run_cells
from fairhead.bench.grid import Cell, Grid
from fairhead.bench.results_folder import Row, Store, has_result
from fairhead.bench.table import mean_of_all, name_of
from fairhead.bench.tasks import named_models, recipe_of
from fairhead.data import check_spec, parse_spec
from fairhead.errors import InputError
from fairhead.report.sections.bench_block import Choice
from fairhead.settings import LogUniform, Prior
from fairhead.train import TrainingPlan

# What a search draws the plan from: those of SubpopBench (Yang et al., 2023), as are the priors of the methods that it
# has. A method declares those of its own options as `priors`; what is not declared is not searched.
PLAN_PRIORS: Mapping[str, Mapping[str, Prior]] = {
    "image": {"learning_rate": LogUniform(-4, -2), "weight_decay": LogUniform(-6, -3)},
    "text": {"learning_rate": LogUniform(-5.5, -4), "weight_decay": LogUniform(-6, -3)},
}


class Outcome(NamedTuple):
    """How a run went: cells that were done before, are done now, and failed."""

    before: int
    done: int
    failed: int


def run_grid(
    grid: Grid,  # what to run
    out: Path | str,  # folder of the results
    workplace: Workplace | None = None,  # device, cells at once, and cache
    on_news: Callable[[News], None] | None = None,  # called as cells go on and end
    # Called with how many cells were done before; for the trials of a search and for what follows them
    on_before: Callable[[int], None] | None = None,
    # (i, n) runs the i-th of n parts of the grid, counted from 1; the parts are put together by `take_in`
    shard: tuple[int, int] = (1, 1),
) -> Outcome:
    """Run every cell of a grid that has no result yet in `out`.

    Results are kept as they come (see `Store`): after a kill, call it again. A cell counts as done when its row has the
    same settings, defaults included, was made of files with the same content, and its records are there.
    """
    store = Store(out)

    def run(cells: Sequence[Cell]) -> Outcome:
        known = {(row["cell"], row["fingerprint"]): row.get("contents") for row in store.rows() if has_result(row)}

        def is_done(cell: Cell) -> bool:
            key = (cell.name, fingerprint(cell))
            # Of rows without it, or without the files, there is nothing to compare.
            return key in known and (known[key] is None or contents_of(cell) in (None, known[key]))

        todo = [cell for cell in cells if not is_done(cell)]
        check(todo)
        if on_before is not None:
            on_before(len(cells) - len(todo))
        failed = 0
        for news in run_cells(todo, workplace or Workplace()):
            if news.row is not None:
                store.add(news.row, news.records)
                failed += not has_result(news.row)
            if on_news is not None:
                on_news(news)
        return Outcome(len(cells) - len(todo), len(todo) - failed, failed)

    with store.alone():
        trials = trial_cells(grid)
        if trials and shard != (1, 1):
            raise InputError("a search needs all its trials in one folder: run it without --shard")
        tried, finals = run(trials), run(final_cells(grid, store)[shard[0] - 1 :: shard[1]])
    return Outcome(*(a + b for a, b in zip(tried, finals, strict=True)))


def check(cells: Sequence[Cell]) -> None:
    """Refuse, before any work, methods, models and data that do not exist. Data are read in the cells."""
    seen = set()
    for cell in cells:
        key = (cell.method.name, cell.data.name, cell.backbone.name, cell.trial)
        if key not in seen:
            seen.add(key)
            method_of(cell)
            TrainingPlan.of(**cell.plan)
            for model in (*named_models(cell), None):
                recipe_of(cell, ("0", "1"), model).check()
    # Last: a wrong setting is reported even where there are no data yet.
    for spec in dict.fromkeys(cell.data.read for cell in cells):
        check_spec(spec)


class Place(NamedTuple):
    """Where a search takes place: each has its own choice."""

    data: str
    backbone: str
    method: str


def trial_cells(grid: Grid) -> tuple[Cell, ...]:
    """Every trial of a grid's search; none where it has no search."""
    if grid.search is None:
        return ()
    numbers = range(grid.search.configs + 1)
    cells = replace(grid, seeds=grid.search.seeds).cells()
    return tuple(_configured(grid, cell, number) for cell in cells for number in numbers)


def final_cells(grid: Grid, store: Store) -> tuple[Cell, ...]:
    """The cells that the table is made of: a grid's own, or those of the configurations that its search has chosen.

    A method whose trials have not all ended has none yet. Where the search is asked to choose with groups as well,
    that choice is a method of its own, unless it is the same configuration.
    """
    if grid.search is None:
        return grid.cells()
    found, cells = choices(grid, store), []
    for cell in grid.cells():
        for choice in found.get(_place(cell), ()):
            chosen = _configured(grid, cell, choice.config)
            name = name_of(cell.method.name, choice)
            method = replace(chosen.method, name=name, chosen_with_groups=choice.with_groups)
            cells.append(replace(chosen, trial=None, method=method))
    return tuple(cells)


def _place(cell: Cell) -> Place:
    return Place(cell.data.name, cell.backbone.name, cell.method.name)


def _configured(grid: Grid, cell: Cell, number: int) -> Cell:
    """A cell as a trial of one configuration; 0 is the grid's own."""
    assert grid.search is not None
    drawn, priors = {}, _priors(grid, cell) if number else {}
    for name, prior in priors.items():
        # The plan's values do not depend on the method: all of them meet the same learning rates.
        whose = "plan" if name in PLAN_PRIORS["text"] else cell.method.method
        chance = random.Random(f"{grid.search.seed}/{number}/{whose}/{name}")
        drawn[name] = prior.draw(chance, int(cell.plan.get("epochs", TrainingPlan.epochs)))
    plan = {name: value for name, value in drawn.items() if name in PLAN_PRIORS["text"]}
    options = {name: value for name, value in drawn.items() if name not in plan}
    method = replace(cell.method, options={**cell.options, **options}, data_options={})
    return replace(cell, method=method, plan={**cell.plan, **plan}, trial=number)


def _priors(grid: Grid, cell: Cell) -> dict[str, Prior]:
    """What is searched. What the command sets, or what makes a registered variant of a method, stays as it is."""
    kind = "image" if parse_spec(cell.data.read).reader.kind == "images" else "text"
    plan = {name: prior for name, prior in PLAN_PRIORS[kind].items() if name not in grid.overrides}
    config = method_of(replace(cell, method=replace(cell.method, options={}, data_options={})))
    plain, own = type(config)(), getattr(config, "priors", {})
    return {**{name: own[name] for name in own if getattr(config, name) == getattr(plain, name)}, **plan}


def choices(grid: Grid, store: Store) -> dict[Place, tuple[Choice, ...]]:
    """What the search has chosen, for every method whose trials have all ended; with groups as well where asked for."""
    if grid.search is None:
        return {}
    rows = {(row["cell"], row["fingerprint"]): row for row in store.rows()}
    trials: dict[Place, list[Cell]] = {}
    for cell in trial_cells(grid):
        trials.setdefault(_place(cell), []).append(cell)
    found = {}
    for place, cells in trials.items():
        ended = [(cell, rows[key]) for cell in cells if (key := (cell.name, fingerprint(cell))) in rows]
        chosen = _chosen(grid, store, ended) if len(ended) == len(cells) else ()
        if chosen:
            found[place] = chosen
    return found


def _chosen(grid: Grid, store: Store, trials: Sequence[tuple[Cell, Row]]) -> tuple[Choice, ...]:
    """The best of a method's trials, on validation rows, and the best with groups where it is asked for and another."""
    configs = {cell.trial: cell for cell, _ in trials}
    costs = [row["cost"] for _, row in trials if "cost" in row]
    watt_hours = mean_of_all([cost["energy_wh"] for cost in costs])

    def best(score_of: Callable[[Row], float | None], with_groups: bool = False) -> Choice | None:
        def score(row: Row) -> float | None:
            return score_of(row) if row["status"] == "done" else None

        # Over the seeds of each configuration; None where one came to nothing.
        means = [mean_of_all([score(row) for cell, row in trials if cell.trial == number]) for number in configs]
        if all(mean is None for mean in means):
            return None
        # The first of the best: where nothing is gained, the grid's own settings stay.
        number = max(range(len(means)), key=lambda number: -1.0 if (mean := means[number]) is None else mean)
        priors, config = _priors(grid, configs[0]), configs[number]
        return Choice(
            config=number,
            values={name: {**config.options, **config.plan}[name] for name in priors if number},
            score=means[number] or 0.0,
            own_score=means[0],
            searched={name: str(prior) for name, prior in priors.items()},
            trials=len(trials),
            failed=sum(row["status"] != "done" for _, row in trials),
            seconds=sum(cost["seconds"] for cost in costs),
            watt_hours=None if watt_hours is None else watt_hours * len(costs),
            with_groups=with_groups,
        )

    def worst_group(row: Row) -> float | None:
        metrics = ("worst_group_accuracy",)
        return audit(store.records(row), group_by=row["group"], metrics=metrics, n_boot=100).estimates[0].value

    assert grid.search is not None
    plain = best(lambda row: row["validation"][grid.selection])
    if plain is None:
        return ()
    other = best(worst_group, with_groups=True) if grid.search.with_groups else None
    return (plain,) if other is None or other.config == plain.config else (plain, other)
