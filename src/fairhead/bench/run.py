"""Running a grid: what is done stays done, what failed or was cut short is run again."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fairhead.bench.grid import Cell, Grid
from fairhead.bench.store import Store, has_result
from fairhead.bench.workers import News, Workplace, run_cells


class Outcome(NamedTuple):
    """How a run went: cells that were done before, are done now, and failed."""

    before: int
    done: int
    failed: int


def run_grid(
    grid: Grid,
    out: Path | str,
    workplace: Workplace | None = None,
    on_news: Callable[[News], None] | None = None,
    on_before: Callable[[int], None] | None = None,
) -> Outcome:
    """Run every cell of a grid that has no result yet in `out`.

    Results are kept as they come (see `Store`): after a kill, call it again. A cell counts as done when its row has the
    same settings, defaults included, and its records are there.

    Args:
        grid: what to run.
        out: folder of the results.
        workplace: device, cells at once, and cache.
        on_news: called as cells go on and end.
        on_before: called with how many cells were done before; for the trials of a search and for what follows them.

    Raises:
        InputError: a method, option or model of the grid does not exist, or the folder cannot be written or is being
            written by another run. A cell that fails is no error: its row says why.
    """
    from fairhead.bench.search import final_cells, trial_cells

    workplace = workplace or Workplace()
    store = Store(out)
    with store.alone():
        tried = _run(trial_cells(grid), store, workplace, on_news, on_before)
        finals = _run(final_cells(grid, store), store, workplace, on_news, on_before)
    return Outcome(*(a + b for a, b in zip(tried, finals, strict=True)))


def _run(
    cells: Sequence[Cell],
    store: Store,
    workplace: Workplace,
    on_news: Callable[[News], None] | None,
    on_before: Callable[[int], None] | None,
) -> Outcome:
    """Run those of the cells that have no result yet."""
    from fairhead.bench.effective import fingerprint

    known = {(row["cell"], row["fingerprint"]) for row in store.rows() if has_result(row)}
    todo = [cell for cell in cells if (cell.name, fingerprint(cell)) not in known]
    check(todo)
    if on_before is not None:
        on_before(len(cells) - len(todo))
    failed = 0
    for news in run_cells(todo, workplace):
        if news.row is not None:
            store.add(news.row, news.records)
            failed += not has_result(news.row)
        if on_news is not None:
            on_news(news)
    return Outcome(len(cells) - len(todo), len(todo) - failed, failed)


def check(cells: Sequence[Cell]) -> None:
    """Refuse, before any work, methods, models and data that do not exist. Data are read in the cells.

    Raises:
        InputError: saying which.
    """
    from fairhead.bench.backbones import Recipe
    from fairhead.bench.effective import method_of
    from fairhead.bench.others import check_others
    from fairhead.data import check_spec
    from fairhead.train import TrainingPlan

    seen = set()
    for cell in cells:
        key = (cell.method.name, cell.data.name, cell.backbone.name, cell.trial)
        if key not in seen:
            seen.add(key)
            method_of(cell)
            TrainingPlan(**cell.plan)
            check_others(cell)
            Recipe(cell.backbone.model, ("0", "1"), cell.backbone.settings).check()
    for spec in dict.fromkeys(
        cell.data.read for cell in cells
    ):  # last: a wrong setting is told also where there are no data yet
        check_spec(spec)
