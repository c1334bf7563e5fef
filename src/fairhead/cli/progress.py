"""Progress on stderr: bars on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer


class Progress:
    """Stages that come and go, each with how much is done, how much there is, and a word about it."""

    def __init__(self, bars: Any = None) -> None:
        self._bars = bars
        self._stages: dict[str, Any] = {}
        self._quarters: dict[str, int] = {}  # of a stage, told already

    def tell(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Report on a stage."""
        if self._bars is None:
            # Four lines a stage at most, also where it goes on by many at a time.
            quarter = done * 4 // total
            if quarter > self._quarters.get(stage, 0):
                self._quarters[stage] = quarter
                typer.echo(f"{stage}: {done} of {total}{', ' if note else ''}{note}", err=True)
            return
        if stage not in self._stages:
            self._stages[stage] = self._bars.add_task(stage, total=total, note=note)
        self._bars.update(self._stages[stage], completed=done, total=total, note=note)

    def drop(self, stage: str) -> None:
        """Take a stage off the screen; if it comes again, it starts anew."""
        self._quarters.pop(stage, None)
        if stage in self._stages:
            self._bars.remove_task(self._stages.pop(stage))

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        if self._bars is None:
            typer.echo(line, err=True)
        else:
            self._bars.console.print(line, markup=False, highlight=False)

    @property
    def has_bars(self) -> bool:
        """Whether stages are drawn."""
        return self._bars is not None


@contextmanager
def progress() -> Iterator[Progress]:
    """Open the progress of a command; stdout stays free for its result."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield Progress()
        return
    from rich.progress import Progress as Bars

    with Bars(*_columns(), console=console) as bars:
        yield Progress(bars)


def _columns() -> list[Any]:
    """What a stage shows; where the terminal is narrow, the bar and the note give way, not the figures."""
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
    from rich.table import Column
    from rich.text import Text

    class Note(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(task.fields["note"], no_wrap=True, overflow="ellipsis")

    return [
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        Note(),
    ]
