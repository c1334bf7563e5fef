"""Benchmarks on a model, alone or all of them: one way to the table of its answers, and to the figures of the table.

What a trained model was trained on is kept beside its weights, so that nobody scores it on those terms. Needs no torch
itself.
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fairhead import __version__
from fairhead.data import parse_spec
from fairhead.data.sentences import BBQItem, CrowsPair, StereoSetItem
from fairhead.errors import InputError, UnsupportedModel
from fairhead.language.answers import (
    Answers,
    Generation,
    GenerationJournal,
    Progress,
    Sampling,
    journal_in,
    text_digest,
)
from fairhead.language.benchmark import Benchmark, BenchmarkResult, Measured, NotMeasured, Work
from fairhead.language.benchmarks import benchmark_named, choose, on_data
from fairhead.language.suite import FILE, Suite, read_object
from fairhead.stats.bootstrap import Resampling
from fairhead.store import made_folder, write_json

TRAINING_FILE = "fairhead-training.json"
TRAINING_SCHEMA = "fairhead.training/1"
# Of the record of a training: what tells which items a comparison may use, and how the model came about.
_OF_TRAINING = (
    *("method", "settings", "plan", "data", "base"),
    *("training_targets", "held_out_targets", "training_texts"),
)
Item = TypeVar("Item", CrowsPair, StereoSetItem, BBQItem)
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TrainingRecord:
    """How the model of a folder came about."""

    method: str  # such as "klaad"
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method
    plan: Mapping[str, Any] = field(default_factory=dict)  # of the training: epochs, learning rate, seed, ...
    data: Mapping[str, Any] = field(default_factory=dict)  # its name, its path, and how it was split
    # Terms (of pairs without one: sentences) that were trained on, in lower case; a score on them says nothing
    training_targets: tuple[str, ...] = ()
    held_out_targets: tuple[str, ...] = ()  # terms that were not
    training_texts: tuple[str, ...] = ()  # digests of the stereotypes, by which items of any reader are known again
    base: str | None = None  # the model that training began with
    history: tuple[Mapping[str, Any], ...] = ()  # a line per logged step
    results: Mapping[str, Any] = field(default_factory=dict)  # anything that was measured at the end

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Put the record into a model's folder."""
        write_json(Path(folder, TRAINING_FILE), {"schema": TRAINING_SCHEMA, **asdict(self)})

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "TrainingRecord":
        """Read the record of a folder."""
        missing = "it was not written by fairhead mitigate: its training terms are unknown"
        return read_object(cls, Path(folder, TRAINING_FILE), TRAINING_SCHEMA, missing)


def without_training_targets(items: Iterable[Item], folder: str | os.PathLike[str]) -> tuple[Item, ...]:
    """The items whose term or stereotype `folder` was not trained on; of a question the term is the template."""
    record: TrainingRecord = TrainingRecord.read(folder)
    trained = {*record.training_targets, *record.training_texts}

    def known_by(item: Item) -> tuple[str, ...]:
        if isinstance(item, BBQItem):
            return (item.template.casefold(),)
        stereotype = item.more if isinstance(item, CrowsPair) else item.texts.stereotype
        return item.target.casefold(), text_digest(stereotype)

    return tuple(item for item in items if trained.isdisjoint(known_by(item)))


def unseen(items: Sequence[Any], model: Any) -> Sequence[Any]:
    """The items that a model was not trained on, as far as its folder says; how many they are is told."""
    folder = Path(str(model).removeprefix("path:"))
    if not isinstance(model, str | Path) or not (folder / TRAINING_FILE).is_file():
        return items
    if not all(isinstance(item, CrowsPair | StereoSetItem | BBQItem) for item in items):
        return items
    kept = without_training_targets(items, folder)
    if len(kept) == len(items):
        return items
    so = "are left out" if kept else "are scored because there are no others; the score is meaningless"
    told = f"{len(items) - len(kept):,} of {len(items):,} items {so}: {folder} was trained on them or on their terms"
    logging.getLogger("fairhead").warning(told)
    return kept or items


class DrawnItems(NamedTuple):
    """Items, and the benchmark under the name of the data that they are of."""

    benchmark: Benchmark
    items: Sequence[Any]


def read_data(
    benchmark: Benchmark,  # it
    data: str | Path,  # its file, folder or archive as published, or `reader:path` for data of another source
    options: Any,  # of the benchmark
    limit: int | None,  # at most so many
    seed: int,  # of the draw
    columns: Mapping[str, Any] | None = None,  # options of the reader, where data are read by one
    model: Any = None,  # whose training items are left out, where its folder says which
) -> DrawnItems:
    """Items of a benchmark, drawn at random where there is a limit."""
    path, reader = Path(data), None
    if not path.exists() and ":" in str(data) and benchmark.kinds:
        reader, place = parse_spec(str(data), *benchmark.kinds)
        path = Path(place)
    items: Any
    if not columns and (reader is None or reader.name == (benchmark.data or benchmark.name)):
        items = benchmark.read(path, options)
    elif reader is None:
        raise InputError(f"columns are of data given as reader:path, such as pairs:own.csv; found {data}")
    else:
        for name in benchmark.options_with(None):
            if name != "held_out_of" and getattr(options, name) != getattr(benchmark.options(), name):
                raise InputError(f"{name} is an option for the data of {benchmark.title}, not of {reader.name}")
        items = reader.read(path, **(columns or {}))
        benchmark = on_data(benchmark, items.name)
    trained = getattr(options, "held_out_of", None)
    items = unseen(items, model) if trained is None else without_training_targets(items, trained)
    return DrawnItems(benchmark, benchmark.sample(list(items), limit, seed))


def find_data(folder: Path, name: str) -> Path | None:
    """The folder, archive or file of a data set, however its name is spelled: "CrowS-Pairs.zip" is crows_pairs."""
    for path in sorted(folder.iterdir()):
        stem = path.name if path.is_dir() else path.stem
        if stem.lower().replace("-", "").replace("_", "") == name.replace("_", ""):
            return path
    return None


class SuiteItems(NamedTuple):
    """Items and options by benchmark, why others are not there, and what was chosen."""

    items: dict[str, Sequence[Any]]
    options: dict[str, Any]
    skipped: dict[str, str]
    chosen: dict[str, Any]


def gather_items(
    data: Path,
    only: Sequence[str] = (),
    *,
    limit: int | None = None,
    seed: int = 0,
    text: str | None = None,
    documents: int = 1000,
    **options: Any,
) -> SuiteItems:
    """Read the items of every benchmark that is there, before any model is loaded.

    `data` is a folder with one folder, archive or file per benchmark. Benchmarks named in `only` must be there; others
    are skipped with a reason. `limit` bounds the items of each, drawn at random. Perplexity and attention entropy read
    `documents` of a text file, by default of the Wikipedia texts that come with BOLD. Options go to whichever has them.
    """
    if not data.is_dir():
        raise InputError(f"{data} is not a folder; expected a folder with one folder per benchmark (stereoset, bbq, …)")
    chosen = {"only": tuple(only), "limit": limit, "seed": seed, "text": text, "documents": documents, **options}
    found = SuiteItems({}, {}, {}, chosen)
    for benchmark in choose(only):
        name, folder = benchmark.name, benchmark.data or benchmark.name
        path, most = find_data(data, folder), limit
        if benchmark.reads_text:
            path = path if text is None else Path(text)
            most = documents if limit is None else min(limit, documents)
        if path is not None:
            beside = {k: str(data / v) for k, v in benchmark.beside.items() if (data / v).is_dir()}
            given = {k: v for k, v in options.items() if v is not None and hasattr(benchmark.options(), k)}
            found.options[name] = benchmark.chosen(**{**beside, **given})
            found.items[name] = read_data(benchmark, path, found.options[name], most, seed).items
            with suppress(NotMeasured):  # of a package that is not here: continued now, measured elsewhere
                benchmark.ready(found.options[name])
            continue
        found.skipped[name] = f"{data} has no {folder}"
        if {benchmark.flag, name} & set(only):
            raise InputError(f"{benchmark.flag}: {found.skipped[name]}")
    if not found.items:
        raise InputError(f"{data}: no benchmark can be run ({'; '.join(dict.fromkeys(found.skipped.values()))})")
    return found


def run_suite(
    scorer: Any,  # the model, as `load_scorer` returns it
    gathered: SuiteItems,  # as `gather_items` returns them
    out: Path,  # the folder
    model: str,  # path of the model, whose record of training is kept too
    resampling: Resampling | None = None,  # how intervals of single figures are made
    sampling: Sampling | None = None,  # how continuations are drawn, with the seed of `resampling`
    report: Report | None = None,  # called with a benchmark's name, what is done of it and how much there is
    provenance: Mapping[str, Any] | None = None,  # anything else worth keeping
) -> Suite:
    """Run benchmarks on a model into a folder. What the folder holds already is kept, unless it was made otherwise."""
    how = resampling or Resampling()
    settings, drawn = scorer.settings(), replace(sampling or Sampling(), seed=how.seed)
    suite = _open(out, model, settings, gathered.chosen, provenance, how)
    suite.skipped |= {name: reason for name, reason in gathered.skipped.items() if name not in suite.done}
    suite.write()
    for name, items in gathered.items.items():
        benchmark = benchmark_named(name)
        tell = None if report is None else partial(report, name)
        work = Work(scorer, items, gathered.options.get(name, benchmark.options()), settings, drawn, None, tell)
        try:
            result = _run(benchmark, work, how, suite)
        except (NotMeasured, UnsupportedModel) as reason:
            # Attention cannot be read in every model that can be scored.
            suite.skipped[name] = str(reason)
            suite.write()
            continue
        if report is not None:
            report(name, result.n, result.n)
    return suite


def run_benchmark(
    name: str | Benchmark,  # of the benchmark, or the benchmark
    scorer: Any,  # the model; None with stored continuations
    items: Sequence[Any],  # as the benchmark reads them
    *,
    # A folder as `run_suite` writes it; a killed run with the same model and settings goes on there
    out: Path | None = None,
    limit: int | None = None,  # only so many items, drawn at random with the seed of `resampling`; None takes all
    resampling: Resampling | None = None,  # how intervals are made
    progress: Progress | None = None,  # called after each batch
    sampling: Sampling | None = None,  # how continuations are drawn, with the seed of `resampling`
    stored: GenerationJournal | None = None,  # continuations that are there already
    model: str = "",  # path of the model
    provenance: Mapping[str, Any] | None = None,  # anything else worth keeping
    **options: Any,
) -> BenchmarkResult:
    """Run one benchmark on a model, as a suite does, and give all that can be said of it."""
    benchmark = name if isinstance(name, Benchmark) else benchmark_named(name)
    how = resampling or Resampling(n_boot=benchmark.n_boot)
    chosen = benchmark.chosen(**options)
    draws = replace(sampling or Sampling(), seed=how.seed)
    if stored is None:
        settings = scorer.settings()
    else:
        names = {one.name for one in fields(Sampling)}
        settings = {key: value for key, value in stored.settings.items() if key not in names}
        draws = Sampling(**{key: value for key, value in stored.settings.items() if key in names})
    suite = None
    if out is not None:
        said = {"only": (benchmark.flag,), "limit": limit, "seed": how.seed, **asdict(chosen)}
        suite = _open(out, model, settings, said, provenance, how)
    work = Work(scorer, benchmark.sample(items, limit, how.seed), chosen, settings, draws, progress=progress)
    result = _run(benchmark, work, how, suite, stored, study=True)
    known = {"version": __version__, **(provenance or {}), "model_path": model or None, "limit": limit}
    return replace(result, provenance={**known, **result.provenance})


def _open(
    out: Path,
    model: str,
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
    provenance: Mapping[str, Any] | None,
    how: Resampling,
) -> Suite:
    """A suite in a folder, with what the folder holds already; without a model it is that of the folder."""
    made_folder(out)
    training = None
    if Path(model, TRAINING_FILE).is_file():
        training = {k: v for k, v in asdict(TrainingRecord.read(model)).items() if k in _OF_TRAINING}
    origin = {"version": __version__, **(provenance or {}), "n_boot": how.n_boot, "level": how.level}
    suite = Suite(out, model, settings, training, options, provenance=origin)
    if not (out / FILE).exists():
        return suite
    before = Suite.read(out)
    for key in settings:
        if before.settings.get(key) != settings[key]:
            raise InputError(
                f"{out} holds the scores of another model or precision ({key} {before.settings.get(key)!r}, here "
                f"{settings[key]!r}); choose another folder"
            )
    there, here = before.options.get("limit"), options.get("limit")
    if before.done and there != here:
        raise InputError(
            f"{out} was made with limit {there}, here it is {here}: figures of other items are not put beside those; "
            "choose another folder"
        )
    suite.done, suite.skipped = before.done, before.skipped
    if not model:  # stored answers are measured, and which model wrote them is known there
        suite.model, suite.training = before.model, before.training
    return suite


def _run(
    benchmark: Benchmark,
    work: Work,
    how: Resampling,
    suite: Suite | None,
    stored: GenerationJournal | None = None,
    study: bool = False,
) -> BenchmarkResult:
    """The one way to a result: the table that the suite has, or a new one; then its figures."""
    begun = time.monotonic()
    made_with = {**work.settings, **(work.sampling.settings() if benchmark.prompts else {})}
    made_with |= {**benchmark.settings(work.options), "items": digest(work.items)}
    # Further sections show what a table does not hold.
    kept = None if suite is None or (study and benchmark.page_sections) else suite.kept(benchmark.name, made_with)
    if kept is not None and suite is not None:
        measured = Measured(kept, suite.facts(benchmark.name))
    else:
        journals = None if suite is None else suite.folder / "journals"
        measured = _measured(benchmark, replace(work, journals=journals), stored)
        measured = measured._replace(table=replace(measured.table, benchmark=benchmark.name))
        if suite is not None:
            suite.keep(measured, made_with, round(time.monotonic() - begun, 1))
    result = benchmark.result(measured.table, how)
    if study:
        result = replace(result, more=measured.more(how))
    about = {"items": len(work.items), "items_digest": made_with.pop("items"), **measured.facts}
    statistics = {"n_boot": how.n_boot, "seed": how.seed, "level": how.level}
    result = replace(result, provenance={**made_with, **about, **statistics})
    if suite is not None:
        suite.finish(replace(result, provenance={**suite.provenance, "model_path": suite.model, **result.provenance}))
    return result


def _measured(benchmark: Benchmark, work: Work, stored: GenerationJournal | None) -> Measured:
    """The answers of a model, in whichever way the benchmark asks for them."""
    if benchmark.measure is not None:
        return benchmark.measure(work)
    assert benchmark.table is not None
    if benchmark.requests is not None:
        requests = benchmark.requests(work.items, work.options)
        with journal_in(work.journals, benchmark.name, work.settings) as journal:
            scores = work.scorer.score(requests, journal=journal, on_long="skip", progress=work.progress)
        facts = {
            "texts": len(requests),
            "texts_digest": digest((request.id, request.digest) for request in requests),
            "merged_boundaries": sum(score.merged for score in scores.values()),
            "scores": None if journal is None else str(journal.path),
        }
        return Measured(benchmark.table(work.items, scores, work.options), facts)
    assert benchmark.prompts is not None
    if stored is None:
        found, path = continue_prompts(benchmark, work)
    else:
        found, path = stored.of(benchmark.prompts(work.items)), str(stored.path)
        if not found:
            raise InputError(f"{path}: has no generation for any of the {len(work.items):,} prompts of the data")
    try:
        table = benchmark.table(work.items, found, work.options)
    except NotMeasured as missing:
        if work.journals is None:
            raise
        raise NotMeasured(
            f"continued, not measured: {missing}. Where it can be: fairhead lm {benchmark.flag} --data DATA "
            f"--score-only {path} --out {work.journals.parent}"
        ) from None
    return Measured(table, {"generations": path})


def continue_prompts(benchmark: Benchmark, work: Work) -> tuple[Answers[Generation], str | None]:
    """Continuations of a benchmark's prompts, and the file that keeps them; what that holds is not computed again."""
    from fairhead.language.generation import generate

    assert benchmark.prompts is not None
    settings = {**work.settings, **work.sampling.settings()}
    with journal_in(work.journals, benchmark.name, settings, GenerationJournal) as journal:
        prompts = benchmark.prompts(work.items)
        found = generate(work.scorer, prompts, work.sampling, journal=journal, progress=work.progress)
    return found, None if journal is None else str(journal.path)


def digest(items: Iterable[Any]) -> str:
    """A hash of items: a table of other data must not pass for one of these."""
    found = hashlib.blake2b(digest_size=16)
    for item in items:
        text = repr(item).encode(errors="surrogatepass")
        found.update(f"{len(text)}\n".encode() + text)
    return found.hexdigest()
