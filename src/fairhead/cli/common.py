"""What commands share: the columns of a user's own data, checks and files of output, progress on stderr."""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from fairhead import store
from fairhead.errors import FairheadError, InputError
from fairhead.settings import Level, Option, Replicates, Seed

if TYPE_CHECKING:
    from fairhead.stats.bootstrap import Resampling

_TORCH = ("torch", "transformers", "accelerate")
_EXTRAS = {"lora": ("peft",), "demo": ("sklearn",)}


@dataclass(frozen=True)
class SentenceColumns:
    """Which column of own pairs or triplets of sentences is what, as it is called in the file.

    Attributes:
        group: column of the category, the type of bias of a row.
        id: column of unique ids; by default, rows are numbered.
        data_option: another option of the reader: more=COLUMN, less=COLUMN, on_error=skip, ...; with several readers,
            pairs.term=COLUMN sets the option of one of them.
    """

    panel: ClassVar[str] = "Data"
    group: Annotated[tuple[str, ...], Option(metavar="COLUMN")] = ()
    id: Annotated[str | None, Option(metavar="COLUMN")] = None
    data_option: Annotated[Mapping[str, Any], Option(metavar="KEY=VALUE")] = field(default_factory=dict)

    @property
    def first_group(self) -> str | None:
        """The first column of groups, if any is named."""
        return self.group[0] if self.group else None

    def options(self, data: str) -> dict[str, Any]:
        """The options of the reader that `name:path` names.

        A reader without an option for groups is not given them; the command checks later whether its group exists.

        Example:
            >>> DataColumns(label="Smiling", data_option={"seed": 3}).options("celeba:CelebA")
            {'target': 'Smiling', 'seed': 3}
        """
        if self == type(self)():
            return {}
        from fairhead.data import parse_spec

        reader = parse_spec(data).reader
        named = {name: getattr(self, name, None) for name in ("label", "split", "id", "person", "groups_from")}
        if {"groups", "category"} & {*reader.options}:
            named["groups"] = self.group
        return {**reader.named(named), **self.data_option}


@dataclass(frozen=True)
class DataColumns(SentenceColumns):
    """Which column of own pictures or texts is what, as it is called in the file; published data have some of these.

    Attributes:
        group: column of the groups to compare, which training never sees; repeat it for several, if the command
            accepts several.
        data_option: another option of the reader: input=COLUMN of paths or texts, on_error=skip, ...
        label: column of the classes.
        split: column of the parts (train, val, test); by default, they are drawn at random.
        person: column of the person or document; all its rows stay in one part (train, validation or test).
        groups_from: CSV file with more group columns by id, such as the groups.csv of `fairhead discover`.
    """

    label: Annotated[str | None, Option(metavar="COLUMN")] = None
    split: Annotated[str | None, Option(metavar="COLUMN")] = None
    person: Annotated[str | None, Option(metavar="COLUMN")] = None
    groups_from: Annotated[str | None, Option(metavar="FILE")] = None


@dataclass(frozen=True)
class Statistics:
    """How intervals are made.

    Attributes:
        n_boot: bootstrap replicates; the default is 2000 (1000 for BOLD).
        seed: same seed, same figures.
        level: confidence level of intervals.
    """

    panel: ClassVar[str] = "Statistics"
    n_boot: Annotated[Replicates | None, Option(metavar="N")] = None
    seed: Annotated[Seed, Option(metavar="N")] = 0
    level: Annotated[Level, Option(metavar="SHARE")] = 0.95

    def resampling(self, n_boot: int = 2000) -> "Resampling":
        """The settings of the bootstrap, with `n_boot` replicates unless a number was given."""
        from fairhead.stats.bootstrap import Resampling

        return Resampling(self.n_boot or n_boot, self.seed, self.level)


@dataclass(frozen=True)
class Output:
    """What is written.

    Attributes:
        json: write JSON; - prints only JSON.
        html: write a self-contained report, and its JSON beside it.
    """

    panel: ClassVar[str] = "Output"
    json: Annotated[str | None, Option(metavar="FILE")] = None
    html: Annotated[str | None, Option(metavar="FILE")] = None

    def check(self, *read: str | None, pages: Iterable[str | None] = ()) -> None:
        """Refuse, before the work, a file that cannot be written, is `read`, or would be written twice."""
        every = [Path(page) for page in (self.html, *pages) if page is not None]
        written = [
            *every,
            *(page.parent / f"{page.stem}.json" for page in every),
            *map(Path, filter(None, [self.json])),
        ]
        for path in written:
            check_output(str(path), *read)
        for page in every:
            if page.suffix.lower() != ".html":
                raise InputError(f"{page} would be a page; give a path that ends in .html")
        twice = [name for name, times in Counter(path.absolute() for path in written).items() if times > 1]
        if twice:
            raise InputError(f"{twice[0].name} would be written twice (a page has a .json too); give another name")


def check_output(path: str | None, *read: str | None) -> None:
    """Say that a path cannot be written before the work is done rather than after; nor over a file that is `read`."""
    if path is None or path == "-":
        return
    for name in read:
        if name and name != "-" and Path(name).is_file() and Path(path).exists() and Path(path).samefile(name):
            raise InputError(f"{path} is an input file; give another name to write to")
    if Path(path).is_dir():
        raise InputError(f"{path} is a directory; expected a file to write to")
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {Path(path).parent}")


def need(extra: str = "torch") -> None:
    """Say which packages of an extra are not installed, before anything is read."""
    missing = [name for name in (*_TORCH, *_EXTRAS.get(extra, ())) if find_spec(name) is None]
    if missing:
        raise FairheadError(f'this needs {", ".join(missing)}, which is not installed: pip install "fairhead[{extra}]"')


def command_line(context: typer.Context) -> str:
    """What was typed, for provenance, behind the environment variables that were read; a shell can run it again."""
    import shlex

    variables = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        name = str(parameter.envvar or f"{context.auto_envvar_prefix}_{parameter.name}".upper())
        if source is not None and source.name == "ENVIRONMENT" and name in os.environ:
            variables.append(f"{name}={shlex.quote(os.environ[name])}")
    return " ".join([*variables, shlex.join(["fairhead", *(context.obj or [])])])


def write_json(content: Mapping[str, Any], path: str) -> None:
    """Write JSON to a file, or to standard output for "-"."""
    if path == "-":
        if sys.stdout is None:
            raise InputError("standard output is closed: give a file instead of -")
        typer.echo(store.json_text(content, sys.stdout.encoding or "ascii"))
    else:
        store.write_json(path, content)


class Progress:
    """Stages that come and go, each with how much is done, how much there is, and a word about it."""

    def __init__(self, bars: Any = None) -> None:
        self._bars = bars
        self._stages: dict[str, Any] = {}
        self._quarters: dict[str, int] = {}  # quarters of a stage that were printed

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
        """Remove a stage from the screen; if it is reported again, it starts from 0."""
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


def is_first() -> bool:
    """Whether this process is the only one, or the first of those that a launcher started: the others are silent."""
    return int(os.environ.get("RANK", 0)) == 0


@contextmanager
def progress() -> Iterator[Progress]:
    """Open the progress of a command; stdout stays free for its result."""
    from rich.console import Console

    console = Console(stderr=True, quiet=not is_first())
    seen = sys.stderr is not None and sys.stderr.isatty()  # the console takes a file for one where colours are forced
    if not seen and is_first():
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
