"""Logs of other harnesses as runs that can be compared: lm-evaluation-harness and inspect_ai. Needs no torch.

lm-evaluation-harness writes one file per task with `--log_samples`, a line per document; inspect_ai one JSON per task,
with the scores of every sample. Each task becomes a table of items, one column per metric, whose figure is the mean.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fairhead.errors import InputError, check_known
from fairhead.language.answers import ItemTable, StoredItems
from fairhead.language.benchmark import Benchmark, Figure, Label, Measure
from fairhead.language.suite import FILE, Suite
from fairhead.stats.clusters import ratio
from fairhead.store import reading

# Metrics with a direction -> the value of a model without a mistake, or without a preference. Of others a comparison
# says whether they changed, and not whether that is better.
IDEALS = {
    **dict.fromkeys(("acc", "acc_norm", "acc_mutual_info", "acc_bytes", "acc_all", "exact_match", "em", "f1"), 1.0),
    **dict.fromkeys(("mc1", "mc2", "accuracy"), 1.0),
    "pct_stereotype": 0.5,
    "likelihood_diff": 0.0,
}
_GRADES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}  # inspect_ai's marks, with the values that it gives them
_SAMPLES = re.compile(r"samples_(?P<task>.+)_\d{4}-\d\d-\d\dT[\d.-]+\.jsonl")
_EXPECTED = (
    "a folder that fairhead lm suite wrote, samples_*.jsonl of lm-evaluation-harness (--log_samples), or JSON logs of "
    "inspect_ai (inspect log convert --to json) is expected"
)


class Sample(NamedTuple):
    """One document or sample of a log."""

    id: str  # the same in every run on the same data
    cluster: str  # samples of one cluster depend on each other: by default epochs of one sample
    about: Mapping[str, Any]  # its fields, by which it can be grouped
    values: dict[str, float]  # metric -> value
    without: Sequence[str] = ()  # metrics whose values are no numbers


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
        found = _read(file, alone=path == file)
        if found is None:
            continue
        name, run.model, samples = found.name, found.model or run.model, found.samples
        if name in origin:
            raise InputError(f"{origin[name]} and {file} are both of {name}: give one file of a task, or one folder")
        origin[name] = file
        run.tables[name] = _table(name, file, samples, cluster, category)
        without = dict.fromkeys(metric for sample in samples for metric in sample.without)
        run.skipped |= {f"{name} {metric}": "its value of a sample is no number" for metric in without}
    if not run.tables:
        packed = path.suffix == ".eval" or (path.is_dir() and any(path.rglob("*.eval")))
        why = "its logs are compressed: inspect log convert --to json" if packed else _EXPECTED
        raise InputError(f"{path} has no run that can be compared; {why}")
    return run


class _Log(NamedTuple):
    name: str  # of the task, with the harness before it
    model: str | None
    samples: Sequence[Sample]


def _read(file: Path, alone: bool) -> _Log | None:
    """The samples of a log; None for a file of another kind in a folder."""
    if file.suffix == ".jsonl":
        named = _SAMPLES.fullmatch(file.name)
        with reading(file, "is not a file of samples that lm-evaluation-harness wrote (--log_samples)"):
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
            samples = _of_lm_eval(lines)
        return _Log(f"lm-eval:{named['task'] if named else 'samples'}", _model_beside(file), samples)
    if file.suffix != ".json":
        return None
    with reading(file, "is not JSON; a log of inspect_ai is expected"):
        log = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(log, dict) or not {"eval", "version"} <= set(log):
        if alone:
            raise InputError(f"{file} is not a log of inspect_ai; {_EXPECTED}")
        return None
    if not log.get("samples"):
        raise InputError(f"{file} has no samples (status {log.get('status')!r}): only a whole log can be compared")
    with reading(file, "is not a log as inspect_ai writes it"):
        return _Log(f"inspect:{log['eval']['task']}", str(log["eval"]["model"]), _of_inspect(log["samples"]))


def _model_beside(file: Path) -> str | None:
    """The model that the file of results beside the samples names."""
    results = file.with_name("results_" + file.stem.rpartition("_")[2] + ".json")
    if not results.is_file():
        return None
    with reading(results, "is not JSON"):
        return json.loads(results.read_text(encoding="utf-8")).get("model_name")


def _of_lm_eval(lines: Iterable[Mapping[str, Any]]) -> list[Sample]:
    """One sample per document; where there are several filters of the answers there is a line for each."""
    found: dict[str, Sample] = {}
    for line in lines:
        name = f"{line['doc_id']}/{line['doc_hash'][:8]}"
        values, without = {}, []
        for metric in line["metrics"]:
            called = metric if line.get("filter", "none") == "none" else f"{line['filter']} {metric}"
            number = _number(line.get(metric))
            if number is None:
                without.append(called)
            else:
                values[called] = number
        doc = line["doc"] if isinstance(line["doc"], Mapping) else {}
        before = found.get(name, Sample(name, name, doc, {}))
        found[name] = before._replace(values={**before.values, **values}, without=(*before.without, *without))
    return list(found.values())


def _of_inspect(samples: Iterable[Mapping[str, Any]]) -> list[Sample]:
    """One sample per epoch; epochs of one sample are one cluster."""
    found = []
    for sample in samples:
        asked = json.dumps([sample["input"], sample["target"]], sort_keys=True)
        name = f"{sample['id']}/{hashlib.blake2b(asked.encode(), digest_size=4).hexdigest()}"
        values, without = {}, []
        for scorer, score in (sample.get("scores") or {}).items():
            value = score["value"]
            for key, one in value.items() if isinstance(value, Mapping) else [("", value)]:
                called = f"{scorer} {key}".strip()
                if isinstance(one, str) and one in _GRADES:
                    values[f"{called} accuracy"] = _GRADES[one]
                elif (number := _number(one)) is not None:
                    values[called] = number
                else:
                    without.append(called)
        cluster, epoch = name, sample.get("epoch", 1)
        about = sample.get("metadata") or {}
        found.append(Sample(f"{name} epoch {epoch}", cluster, about, values, without))
    return found


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else None


def _table(name: str, file: Path, samples: Sequence[Sample], cluster: str | None, category: str | None) -> ItemTable:
    """The table of a task: its metrics are those that most samples have; a sample that lacks one is left out."""
    having = {metric: 0 for sample in samples for metric in sample.values}
    for sample in samples:
        for metric in sample.values:
            having[metric] += 1
    metrics = [metric for metric, n in having.items() if 2 * n > len(samples)]
    if not metrics:
        raise InputError(f"{file}: no metric has a number for most of the {len(samples)} samples")
    kept = [sample for sample in samples if all(metric in sample.values for metric in metrics)]
    lacking = tuple(sample.id for sample in samples if sample not in kept)
    return ItemTable.of(
        name,
        [sample.id for sample in kept],
        [sample.cluster if cluster is None else _field(sample, cluster, file) for sample in kept],
        [[] if category is None else [_field(sample, category, file)] for sample in kept],
        {metric: [sample.values[metric] for sample in kept] for metric in metrics},
        left_out={"without a score": lacking} if lacking else {},
    )


def _field(sample: Sample, name: str, file: Path) -> str:
    check_known(name, sample.about, f"{file}: {sample.id} has no field {name!r}; there are")
    return str(sample.about[name])


def logged_benchmark(name: str) -> Benchmark:
    """A task of a log as a benchmark: the mean of each metric, of all samples and of each category.

    Example:
        >>> task = logged_benchmark("lm-eval:crows_pairs_english")
        >>> task.title, task.label("pct_stereotype").share
        ('crows_pairs_english', True)
    """
    return Benchmark(
        name=name,
        title=name.partition(":")[2],
        question="",
        read=lambda path, options: (),
        measures=lambda table: [Measure(m, _mean_of(m), ratio, ideal=_ideal(m)) for m in table.fields],
        headlines=lambda table: [Figure(metric) for metric in table.fields],
        labels=_Labels(),
        by_category=lambda table: [Figure(metric, group) for group in table.order for metric in table.fields],
        section="Scores",
    )


def _mean_of(metric: str) -> Callable[[ItemTable], Any]:
    return lambda table: np.column_stack([table.column(metric), np.ones(len(table))])


def _ideal(metric: str) -> float | None:
    return IDEALS.get(metric.rpartition(" ")[2])


class _Labels(dict[str, Label]):
    """Metrics are written as their harness writes them."""

    def get(self, metric: str, default: Any = None) -> Label:
        return Label(metric, share=_ideal(metric) in (0.5, 1.0))
