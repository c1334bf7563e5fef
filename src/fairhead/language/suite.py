"""Runs that can be compared: the folder of a model's benchmarks, or the logs of another harness. Needs no torch.

The folder has `suite.json` (which model, which data, what was left out and why), for each benchmark a table of items
(`crows_pairs.items.jsonl`) and its figures (`crows_pairs.json`), and the journals from which a killed run goes on.

lm-evaluation-harness writes one file per task with `--log_samples`, a line per document; inspect_ai one JSON per task,
with the scores of every sample. Each task becomes a table of items, one column per metric, whose figure is the mean.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar, get_origin

import numpy as np
from rich.console import Console
from rich.markup import escape

from fairhead.errors import InputError, check_known
from fairhead.language.benchmark import SECTIONS, BenchmarkResult, Measured
from fairhead.language.benchmarks import all_benchmarks, benchmark_named
from fairhead.language.item_table import ItemTable, StoredItems, read_items
from fairhead.report import Report, Result, Sentence, terminal
from fairhead.report.model_card import name_of
from fairhead.report.sections.plain import PlainTable, PlainTables
from fairhead.report.wording import number, plain_value
from fairhead.settings import check_settings
from fairhead.store import reading, write_json

SCHEMA = "fairhead.suite/1"
FILE = "suite.json"
_ITEMS = ".items.jsonl"
NOT_WHOLE = "is not as fairhead writes it: it lacks a field, or has another in its place"
T = TypeVar("T")
_GRADES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}  # inspect_ai's marks, with the values that it gives them
_SAMPLES = re.compile(r"samples_(?P<task>.+)_\d{4}-\d\d-\d\dT[\d.-]+\.jsonl")
# Fields of a line of lm-evaluation-harness that are no metric: until 0.4.6 a line does not list its metrics.
_ABOUT = {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "doc_hash", "prompt_hash", "target_hash"}
_EXPECTED = (
    "expected a folder of fairhead lm suite, samples_*.jsonl of lm-evaluation-harness (--log_samples), or JSON logs of "
    "inspect_ai (inspect log convert --to json)"
)


def read_object(kind: type[T], path: Path, schema: str, missing: str, **more: Any) -> T:
    """An object of a dataclass, of what a JSON file of a schema says of its fields; what they are not is an error.

    `missing` says what a folder without the file is not.
    """
    if not path.is_file():
        raise InputError(f"{path.parent} has no {path.name}; {missing}")
    with reading(path, "is not JSON; write it again"):
        found = json.loads(path.read_text(encoding="utf-8"))
    of = found.get("schema") if isinstance(found, dict) else None
    if of != schema:
        raise InputError(f"{path} has the schema {of!r}; this version of fairhead reads {schema!r}")
    fields = kind.__dataclass_fields__  # type: ignore[attr-defined]
    with reading(path, NOT_WHOLE):
        values = {name: value for name, value in found.items() if name in fields}
        values |= {name: tuple(value) for name, value in values.items() if get_origin(fields[name].type) is tuple}
        check_settings(kind, {name: value for name, value in values.items() if value != ()}, str(path))
        return kind(**values, **more)


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
    def read(cls, folder: Path) -> "Suite":
        """Read `suite.json` of a folder."""
        file = folder / FILE
        expected = "expected a folder of fairhead lm suite"
        suite = read_object(cls, file, SCHEMA, expected, folder=folder)
        for name, facts in suite.done.items():
            with reading(file, NOT_WHOLE):
                check_settings(Done, {key: facts[key] for key in Done.__annotations__}, f"{file}: {name}")  # type: ignore[literal-required]
        return suite

    def write(self) -> None:
        """Write `suite.json`."""
        write_json(self.folder / FILE, self._content())

    def _content(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **{k: v for k, v in asdict(self).items() if k != "folder"}}

    @property
    def measured(self) -> list[str]:
        """Benchmarks whose table of items lies in the folder, whoever put it there."""
        there = sorted(file.name.removesuffix(_ITEMS) for file in self.folder.glob(f"*{_ITEMS}"))
        return [name for b in all_benchmarks() for name in there if name.partition(".")[0] == b.name]

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
        return {**self._content(), "figures": self._figures()}

    def rows(self) -> list[dict[str, Any]]:
        """One row per figure of every benchmark."""
        return [
            {"benchmark": name, **{key: value for key, value in one.items() if key not in ("detail", "groups")}}
            for name, estimates in self._figures().items()
            for one in estimates
        ]

    def headlines(self) -> list[dict[str, Any]]:
        """One row per figure that a comparison would give a verdict on: of stereotypes first, then of language."""
        figures, found = self._figures(), []
        for benchmark in map(benchmark_named, self.measured):
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
            for section, rows in self._sections()
        ]
        everything = []
        for row in (row for row in self.rows() if row["group_by"] is None):
            figures = ("–" if row[key] is None else plain_value(float(row[key])) for key in ("value", "low", "high"))
            everything.append([row["benchmark"], row["metric"], *figures, f"{row['n']:,}"])
        columns = ["benchmark", "figure", "value", "low", "high", "n"]
        table = PlainTable(caption="Figures over all items, with their intervals", columns=columns, rows=everything)
        verdict = ["{} {} ({}): {says}.".format(row["figure"], *_written(row), **row) for row in self._stereotypes()]
        verdict += [f"{name} was not run: {reason}." for name, reason in self.skipped.items()]
        return Report(
            title=f"Benchmarks of {name_of(self.model)}",
            question="Does the model prefer stereotypes, and how good is its language?",
            verdict=[Sentence(text, "note") for text in verdict],
            sections=[PlainTables(title="Headlines", tables=tables), PlainTables(title="Figures", tables=[table])],
            provenance=dict(self.provenance),
        )

    def _stereotypes(self) -> list[dict[str, Any]]:
        return [row for row in self.headlines() if row["section"] == SECTIONS[0] and row["value"] is not None]

    def _sections(self) -> Iterable[tuple[str, Iterable[dict[str, Any]]]]:
        return groupby(self.headlines(), key=itemgetter("section"))

    def _figures(self) -> dict[str, list[dict[str, Any]]]:
        """Benchmark -> its figures, as they lie in the folder."""
        files = [self.folder / f"{name}.json" for name in self.measured]
        return {f.stem: json.loads(f.read_text(encoding="utf-8"))["estimates"] for f in files if f.is_file()}

    def show(self, console: Console | None = None) -> None:
        """Print what was run, and what was not."""
        console = console or terminal()
        lines = [f"[bold]{escape(self.model)}[/] in {escape(str(self.folder))}"]
        for name, facts in self.done.items():
            left_out = [f"; left out: {n:,} ({escape(reason)})" for reason, n in facts["left_out"].items()]
            seconds = "" if facts["seconds"] is None else f", {facts['seconds']:g} s"
            lines.append(f"  {name}: {facts['items']:,} items{seconds}{''.join(left_out)}")
        lines += [f"  {name}: skipped, {escape(reason)}" for name, reason in self.skipped.items()]
        for line in lines:
            console.print(line, highlight=False)
        rows: list[Sequence[str]] = []
        for section, found in self._sections():
            rows += [(section,), *((row["figure"], *_written(row)) for row in found)]
        PlainTable(caption="Headlines", columns=("", "", "interval"), rows=rows).show(console)
        folder = escape(str(self.folder))
        console.print(f"Compare with another run: fairhead lm compare {folder} OTHER", highlight=False)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_ITEMS}"


def _written(row: Mapping[str, Any]) -> tuple[str, str]:
    """A figure and its interval; why there is none."""
    if row["value"] is None:
        return "–", str(row["undefined"])
    scale, digits = (100, 1) if row["share"] else (1, 3)
    value, low, high = (number(scale * float(row[key]), digits) for key in ("value", "low", "high"))
    return f"{value}{' %' if row['share'] else ''}", f"{low} to {high}"


class Sample(NamedTuple):
    """One document or sample of a log."""

    id: str  # the same in every run on the same data
    cluster: str  # samples of one cluster depend on each other: by default epochs of one sample
    about: Mapping[str, Any]  # its fields, by which it can be grouped
    values: dict[str, float | None]  # metric -> value; None where it is no number


@dataclass
class LoggedRun(Suite):
    """A run of another harness; its tables lie in memory, not in the folder."""

    tables: dict[str, ItemTable] = field(default_factory=dict)

    @property
    def measured(self) -> list[str]:
        """Tasks."""
        return list(self.tables)

    def stored(self, name: str) -> StoredItems:
        """The samples of a task."""
        return StoredItems(self.tables[name], {})


def read_run(path: Path, cluster: str | None = None, category: str | None = None) -> Suite:
    """A run to compare: a folder of `fairhead lm suite`, or the logs of another harness, a folder or one file.

    Of logs, `cluster` is the field of a document (of inspect_ai: of a sample's metadata) whose equal values are drawn
    together, such as a template, and `category` the field whose values are compared one by one.
    """
    if (path / FILE).is_file():
        if cluster or category:
            raise InputError(f"{path} is of fairhead lm suite, whose items have their clusters and categories already")
        return Suite.read(path)
    files = sorted([*path.rglob("samples_*.jsonl"), *path.rglob("*.json")]) if path.is_dir() else [path]
    run = LoggedRun(path, str(path), {}, None, {})
    origin: dict[str, Path] = {}
    for file in files:
        found = _read_log(file, alone=path == file)
        if found is None:
            continue
        name, model, samples = found
        if name in origin:
            raise InputError(f"{origin[name]} and {file} are both of {name}: give one file of a task, or one folder")
        origin[name], run.model = file, model or run.model
        run.tables[name] = _table(name, file, samples, cluster, category)
        without = dict.fromkeys(metric for sample in samples for metric, v in sample.values.items() if v is None)
        run.skipped |= {f"{name} {metric}": "its value of a sample is no number" for metric in without}
    if not run.tables:
        packed = path.suffix == ".eval" or (path.is_dir() and any(path.rglob("*.eval")))
        why = "its logs are compressed: inspect log convert --to json" if packed else _EXPECTED
        raise InputError(f"{path} has no run that can be compared; {why}")
    return run


def _read_log(file: Path, alone: bool) -> tuple[str, str | None, list[Sample]] | None:
    """The task of a log with the harness before it, its model and its samples; None for another file in a folder."""
    if file.suffix == ".jsonl":
        named = _SAMPLES.fullmatch(file.name)
        with reading(file, "is not a file of samples that lm-evaluation-harness wrote (--log_samples)"):
            text = file.read_text(encoding="utf-8")
            # Until 0.4.2 the file is one list.
            whole = text.startswith("[")
            lines = json.loads(text) if whole else [json.loads(line) for line in text.splitlines() if line.strip()]
            samples = _of_lm_eval(lines)
        model, results = None, file.with_name("results_" + file.stem.rpartition("_")[2] + ".json")
        if results.is_file():
            with reading(results, "is not JSON"):
                model = json.loads(results.read_text(encoding="utf-8")).get("model_name")
        return f"lm-eval:{named['task'] if named else 'samples'}", model, samples
    if file.suffix != ".json":
        return None
    with reading(file, "is not JSON; expected a log of inspect_ai"):
        log = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(log, dict) or not {"eval", "version"} <= set(log):
        if alone:
            raise InputError(f"{file} is not a log of inspect_ai; {_EXPECTED}")
        return None
    if not log.get("samples"):
        raise InputError(f"{file} has no samples (status {log.get('status')!r}): only a whole log can be compared")
    with reading(file, "is not a log as inspect_ai writes it"):
        return f"inspect:{log['eval']['task']}", str(log["eval"]["model"]), _of_inspect(log["samples"])


def _of_lm_eval(lines: Iterable[Mapping[str, Any]]) -> list[Sample]:
    """One sample per document; where there are several filters of the answers there is a line for each.

    Until 0.4.6 lines name no filter: those of a document are numbered.
    """
    found: dict[str, Sample] = {}
    times: Counter[str] = Counter()
    for line in lines:
        told = line.get("doc_hash") or _hash_of(line["doc"])
        name = f"{line['doc_id']}/{told[:8]}"
        times[name] += 1
        filtered = line.get("filter", f"filter {times[name]}" if times[name] > 1 else "none")
        before = "" if filtered == "none" else f"{filtered} "
        doc = line["doc"] if isinstance(line["doc"], Mapping) else {}
        values = found.setdefault(name, Sample(name, name, doc, {})).values
        metrics = line.get("metrics", [key for key in line if key not in _ABOUT])
        values |= {f"{before}{metric}": _number(line.get(metric)) for metric in metrics}
    return list(found.values())


def _hash_of(doc: Any) -> str:
    """As lm-evaluation-harness itself makes it since 0.4.3."""
    return hashlib.sha256(json.dumps(doc, indent=2, ensure_ascii=False).encode()).hexdigest()


def _of_inspect(samples: Iterable[Mapping[str, Any]]) -> list[Sample]:
    """One sample per epoch; epochs of one sample are one cluster."""
    found = []
    for sample in samples:
        asked = json.dumps([sample["input"], sample["target"]], sort_keys=True)
        name = f"{sample['id']}/{hashlib.blake2b(asked.encode(), digest_size=4).hexdigest()}"
        values: dict[str, float | None] = {}
        for scorer, score in (sample.get("scores") or {}).items():
            value = score["value"]
            for key, one in value.items() if isinstance(value, Mapping) else [("", value)]:
                called = f"{scorer} {key}".strip()
                if isinstance(one, str) and one in _GRADES:
                    values[f"{called} accuracy"] = _GRADES[one]
                else:
                    values[called] = _number(one)
        about = sample.get("metadata") or {}
        found.append(Sample(f"{name} epoch {sample.get('epoch', 1)}", name, about, values))
    return found


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else None


def _table(name: str, file: Path, samples: Sequence[Sample], cluster: str | None, category: str | None) -> ItemTable:
    """The table of a task: its metrics are those that most samples have; a sample that lacks one is left out."""
    having = Counter(metric for sample in samples for metric, value in sample.values.items() if value is not None)
    metrics = [metric for metric, n in having.items() if 2 * n > len(samples)]
    if not metrics:
        raise InputError(f"{file}: no metric has a number for most of the {len(samples)} samples")
    kept = [sample for sample in samples if None not in map(sample.values.get, metrics)]
    lacking = tuple(sample.id for sample in samples if None in map(sample.values.get, metrics))

    def about(sample: Sample, field: str) -> str:
        check_known(field, sample.about, f"{file}: {sample.id} has no field {field!r}; there are")
        return str(sample.about[field])

    return ItemTable.of(
        name,
        [sample.id for sample in kept],
        [sample.cluster if cluster is None else about(sample, cluster) for sample in kept],
        [[] if category is None else [about(sample, category)] for sample in kept],
        {metric: np.array([sample.values[metric] for sample in kept], dtype=np.float64) for metric in metrics},
        left_out={"without a score": lacking} if lacking else {},
    )
