"""The folder of a model's benchmarks: all that a comparison needs. Needs no torch.

It has `suite.json` (which model, which data, what was left out and why), for each benchmark a table of items
(`crows_pairs.items.jsonl`) and its figures (`crows_pairs.json`), and the journals from which a killed run goes on. What
a trained model was trained on is kept beside its weights, so that nobody scores it on those terms.
"""

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from rich.console import Console
from rich.markup import escape

from fairhead.data.sentences import CrowsPair, StereoSetItem
from fairhead.errors import InputError
from fairhead.language.answers import ItemTable, StoredItems, read_items
from fairhead.language.benchmark import SECTIONS, BenchmarkResult, Measured
from fairhead.language.benchmarks import all_benchmarks
from fairhead.report import Report, Result, Sentence
from fairhead.report.result import terminal
from fairhead.report.sections.plain import PlainTable, PlainTables
from fairhead.report.wording import plain_value
from fairhead.settings import check_settings
from fairhead.store import made_folder, reading, write_json

SCHEMA = "fairhead.suite/1"
FILE = "suite.json"
TRAINING_FILE = "fairhead-training.json"
TRAINING_SCHEMA = "fairhead.training/1"
# Of the record of a training: what tells which items a comparison may use, and how the model came about.
_OF_TRAINING = ("method", "settings", "plan", "data", "base", "training_targets", "held_out_targets")
NOT_WHOLE = "is not as fairhead writes it: it lacks a field, or has another in its place"
Item = TypeVar("Item", CrowsPair, StereoSetItem)
Kind = TypeVar("Kind", "TrainingRecord", "Suite")


def _read(path: Path, schema: str, missing: str) -> dict[str, Any]:
    """A JSON file of a schema; `missing` says what a folder without it is not."""
    if not path.is_file():
        raise InputError(f"{path.parent} has no {path.name}; {missing}")
    with reading(path, "is not JSON; write it again"):
        found = json.loads(path.read_text(encoding="utf-8"))
    of = found.get("schema") if isinstance(found, dict) else None
    if of != schema:
        raise InputError(f"{path} has the schema {of!r}; this version of fairhead reads {schema!r}")
    return dict(found)


def _checked(kind: type[Kind], path: Path, found: Mapping[str, Any], **more: Any) -> Kind:
    """An object of a dataclass, of what a file says of its fields; what they are not is an `InputError`."""
    with reading(path, NOT_WHOLE):
        values = {name: value for name, value in found.items() if name in kind.__dataclass_fields__}
        check_settings(kind, {name: value for name, value in values.items() if value != ()}, str(path))
        return kind(**values, **more)


@dataclass(frozen=True)
class TrainingRecord:
    """How the model of a folder came about."""

    method: str  # such as "klaad"
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method
    plan: Mapping[str, Any] = field(default_factory=dict)  # of the training: epochs, learning rate, seed, ...
    data: Mapping[str, Any] = field(default_factory=dict)  # its name, its path, and how it was split
    # Terms (of pairs: sentences) that were trained on, in lower case; a score on them says nothing
    training_targets: tuple[str, ...] = ()
    held_out_targets: tuple[str, ...] = ()  # terms that were not
    base: str | None = None  # the model that training began with
    history: tuple[Mapping[str, Any], ...] = ()  # a line per logged step
    results: Mapping[str, Any] = field(default_factory=dict)  # anything that was measured at the end

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Put the record into a model's folder."""
        write_json(Path(folder, TRAINING_FILE), {"schema": TRAINING_SCHEMA, **asdict(self)})

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "TrainingRecord":
        """Read the record of a folder."""
        path = Path(folder, TRAINING_FILE)
        found = _read(path, TRAINING_SCHEMA, "it was not written by fairhead mitigate: its training terms are unknown")
        lists = ("training_targets", "held_out_targets", "history")
        with reading(path, NOT_WHOLE):
            return _checked(cls, path, {**found, **{name: tuple(found[name]) for name in lists if name in found}})


def without_training_targets(items: Iterable[Item], folder: str | os.PathLike[str]) -> tuple[Item, ...]:
    """The items whose term (of a pair without one: whose more stereotypical sentence) `folder` was not trained on."""
    trained = set(TrainingRecord.read(folder).training_targets)
    return tuple(item for item in items if item.target.casefold() not in trained)


def unseen(items: Sequence[Any], model: Any) -> Sequence[Any]:
    """The items that a model was not trained on, as far as its folder says; how many they are is told."""
    folder = Path(str(model).removeprefix("path:"))
    if not isinstance(model, str | Path) or not (folder / TRAINING_FILE).is_file():
        return items
    if not all(isinstance(item, CrowsPair | StereoSetItem) for item in items):
        return items
    kept = without_training_targets(items, folder)
    if len(kept) == len(items):
        return items
    so = "are left out" if kept else "are scored for want of others, which says nothing"
    told = f"{len(items) - len(kept):,} of {len(items):,} items {so}: {folder} was trained on them or on their terms"
    logging.getLogger("fairhead").warning(told)
    return kept or items


class Done(TypedDict):
    """What is known of a benchmark that was run."""

    items: int
    left_out: Mapping[str, int]  # reason -> items
    seconds: float | None
    facts: Mapping[str, Any]


@dataclass
class Suite(Result):
    """What has been run, and what has not."""

    folder: Path  # where it lies
    model: str  # path of the model
    settings: Mapping[str, Any]  # what scores depend on: digest of the weights, precision, start token
    training: Mapping[str, Any] | None  # what the model's folder says about its training; None where it says nothing
    options: Mapping[str, Any]  # what was chosen
    done: dict[str, Done] = field(default_factory=dict)  # by benchmark
    skipped: dict[str, str] = field(default_factory=dict)  # benchmark -> why it was not run
    provenance: Mapping[str, Any] = field(default_factory=dict)  # version, command, data, device

    @classmethod
    def open(
        cls,
        out: Path,
        model: str,
        settings: Mapping[str, Any],
        options: Mapping[str, Any],
        provenance: Mapping[str, Any],
    ) -> "Suite":
        """A suite in a folder, with what the folder holds already; without a model it is that of the folder."""
        made_folder(out)
        training = None
        if Path(model, TRAINING_FILE).is_file():
            training = {k: v for k, v in asdict(TrainingRecord.read(model)).items() if k in _OF_TRAINING}
        suite = cls(out, model, settings, training, options, provenance=provenance)
        if (out / FILE).exists():
            before = cls.read(out)
            differing = [k for k in settings if before.settings.get(k) != settings[k]]
            if differing:
                key = differing[0]
                raise InputError(
                    f"{out} holds the scores of another model or precision ({key} {before.settings.get(key)!r}, here "
                    f"{settings[key]!r}); choose another folder"
                )
            limits = [chosen.get("limit") for chosen in (before.options, options)]
            if before.done and limits[0] != limits[1]:
                raise InputError(
                    f"{out} was made with limit {limits[0]}, here it is {limits[1]}: figures of other items are not "
                    "put beside those; choose another folder"
                )
            suite.done, suite.skipped = before.done, before.skipped
            if not model:  # stored answers are measured, and which model wrote them is known there
                suite.model, suite.training = before.model, before.training
        return suite

    def write(self) -> None:
        """Write `suite.json`."""
        write_json(self.folder / FILE, {"schema": SCHEMA, **self._content()})

    def _content(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if k != "folder"}

    @classmethod
    def read(cls, folder: Path) -> "Suite":
        """Read `suite.json` of a folder."""
        found = _read(folder / FILE, SCHEMA, "a folder that fairhead lm suite wrote is expected")
        suite = _checked(cls, folder / FILE, found, folder=folder)
        for name, facts in suite.done.items():
            with reading(folder / FILE, NOT_WHOLE):
                check_settings(Done, {key: facts[key] for key in Done.__annotations__}, f"{folder / FILE}: {name}")  # type: ignore[literal-required]
        return suite

    @property
    def measured(self) -> list[str]:
        """Benchmarks whose table of items lies in the folder, whoever put it there."""
        return [benchmark.name for benchmark in all_benchmarks() if self._path(benchmark.name).is_file()]

    def table(self, name: str) -> ItemTable:
        """The items of a benchmark that was run."""
        return self.stored(name).table

    def stored(self, name: str) -> StoredItems:
        """The items of a benchmark that was run, and what they were made with."""
        return read_items(self._path(name))

    def kept(self, name: str, made_with: Mapping[str, Any]) -> ItemTable | None:
        """The items of a benchmark, if they were made with just this, by a run that noted what else it found."""
        if name not in self.done or not self._path(name).exists():
            return None
        stored = self.stored(name)
        return stored.table if stored.settings == json.loads(json.dumps(dict(made_with))) else None

    def keep(self, measured: Measured, made_with: Mapping[str, Any], seconds: float) -> None:
        """Write the items of a benchmark."""
        table = measured.table
        table.write(self._path(table.benchmark), made_with)
        left_out = {reason: len(names) for reason, names in table.left_out.items()}
        facts = dict(measured.facts)
        self.done[table.benchmark] = {"items": len(table), "left_out": left_out, "seconds": seconds, "facts": facts}

    def facts(self, name: str) -> dict[str, Any]:
        """What else is known of the answers to a benchmark."""
        return dict(self.done[name]["facts"]) if name in self.done else {}

    def finish(self, result: BenchmarkResult) -> None:
        """Write the figures of a benchmark, and that it is done."""
        write_json(self.folder / f"{result.benchmark}.json", result.to_dict())
        self.skipped.pop(result.benchmark, None)
        self.write()

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, as `suite.json` has it, with the figures of every benchmark."""
        return {"schema": SCHEMA, **self._content(), "figures": self._figures()}

    def rows(self) -> list[dict[str, Any]]:
        """One row per figure of every benchmark."""
        hidden = ("detail", "groups")
        return [
            {"benchmark": name, **{key: value for key, value in one.items() if key not in hidden}}
            for name, estimates in self._figures().items()
            for one in estimates
        ]

    def headlines(self) -> list[dict[str, Any]]:
        """One row per figure that a comparison would give a verdict on: of stereotypes first, then of language."""
        figures, found = self._figures(), []
        for benchmark in all_benchmarks():
            known = {(one["metric"], one["group_by"]): one for one in figures.get(benchmark.name, ())}
            for metric, group in benchmark.headlines_of(self.table(benchmark.name)) if known else ():
                if (metric, group) in known:
                    label = benchmark.label(metric)
                    name = " ".join(filter(None, (benchmark.title, group, label.name)))
                    row = {"section": benchmark.section_of(metric), "figure": name, "says": label.says}
                    found.append({**row, "share": label.share, **known[metric, group]})
        return sorted(found, key=lambda row: SECTIONS.index(row["section"]))

    def page(self) -> Report:
        """The headlines of every benchmark, then all figures over all items, and what was not run."""
        tables = [
            PlainTable(
                caption=section,
                columns=["", "", "interval", "n", ""],
                rows=[[row["figure"], *_written(row), f"{row['n']:,}", row["says"]] for row in rows],
            )
            for section, rows in groupby(self.headlines(), key=lambda row: str(row["section"]))
        ]
        everything = []
        for row in self.rows():
            if row["group_by"] is None:
                figures = (
                    "–" if row[key] is None else plain_value(float(row[key])) for key in ("value", "low", "high")
                )
                everything.append([row["benchmark"], row["metric"], *figures, f"{row['n']:,}"])
        columns = ["benchmark", "figure", "value", "low", "high", "n"]
        table = PlainTable(caption="Figures over all items, with their intervals", columns=columns, rows=everything)
        skipped = [Sentence(f"{name} was not run: {reason}.", "note") for name, reason in self.skipped.items()]
        return Report(
            title=f"Benchmarks of {self.model}",
            question="",
            verdict=skipped,
            sections=[PlainTables(title="Headlines", tables=tables), PlainTables(title="Figures", tables=[table])],
            provenance=dict(self.provenance),
        )

    def _figures(self) -> dict[str, list[dict[str, Any]]]:
        """Benchmark -> its figures, as they lie in the folder."""
        files = {name: self.folder / f"{name}.json" for name in self.measured}
        return {
            name: json.loads(f.read_text(encoding="utf-8"))["estimates"] for name, f in files.items() if f.is_file()
        }

    def show(self, console: Console | None = None) -> None:
        """Print what was run, and what was not."""
        console = console or terminal()
        console.print(f"[bold]{escape(self.model)}[/] in {escape(str(self.folder))}", highlight=False)
        for name, facts in self.done.items():
            left_out = "; ".join(f"left out: {n:,} ({escape(reason)})" for reason, n in facts["left_out"].items())
            seconds = "" if facts["seconds"] is None else f", {facts['seconds']:g} s"
            console.print(
                f"  {name}: {facts['items']:,} items{seconds}{'; ' if left_out else ''}{left_out}", highlight=False
            )
        for name, reason in self.skipped.items():
            console.print(f"  {name}: skipped, {escape(reason)}", highlight=False)
        rows: list[Sequence[str]] = []
        for section, found in groupby(self.headlines(), key=lambda row: str(row["section"])):
            rows += [(section,), *((row["figure"], *_written(row)) for row in found)]
        table = PlainTable(caption="Headlines", columns=("", "", "interval"), rows=rows)
        PlainTables(title="", tables=[table]).show(console)
        console.print(
            f"Compare with another run: fairhead lm compare {escape(str(self.folder))} OTHER", highlight=False
        )

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.items.jsonl"


def _written(row: Mapping[str, Any]) -> tuple[str, str]:
    """A figure and its interval; why there is none."""
    if row["value"] is None:
        return "–", str(row["undefined"])
    scale, digits = (100, 1) if row["share"] else (1, 3)
    value, low, high = (scale * float(row[key]) for key in ("value", "low", "high"))
    return f"{value:.{digits}f}{' %' if row['share'] else ''}", f"{low:.{digits}f} to {high:.{digits}f}"
