"""Benchmarks on a model, alone or all of them: one way to the table of its answers, and to the figures of the table.

Needs no torch itself.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from fairhead import __version__
from fairhead.data import parse_spec
from fairhead.errors import InputError, UnsupportedModel
from fairhead.language.answers import Answers, Generation, GenerationJournal, Progress, Sampling, journal_in
from fairhead.language.benchmark import Benchmark, BenchmarkResult, Measured, NotMeasured, Work
from fairhead.language.benchmarks import benchmark_named, choose
from fairhead.language.suite import Suite, unseen, without_training_targets
from fairhead.stats.bootstrap import Resampling

Report = Callable[[str, int, int], None]


def read_data(
    benchmark: Benchmark,  # it
    data: str | Path,  # its file, folder or archive as published, or `reader:path` for data of another source
    options: Any,  # of the benchmark
    limit: int | None,  # at most so many
    seed: int,  # of the draw
    columns: Mapping[str, Any] | None = None,  # options of the reader, where data are read by one
    model: Any = None,  # whose training items are left out, where its folder says which
) -> Sequence[Any]:
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
    if getattr(options, "held_out_of", None) is not None:
        items = without_training_targets(items, options.held_out_of)
    else:
        items = unseen(items, model)
    return benchmark.sample(list(items), limit, seed)


def find_data(folder: Path, name: str) -> Path | None:
    """The folder, archive or file of a data set, however its name is spelled.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> (root / "CrowS-Pairs.zip").touch()
        >>> find_data(root, "crows_pairs").name
        'CrowS-Pairs.zip'
    """
    plain = name.replace("_", "")
    for path in sorted(folder.iterdir()):
        stem = (path.name if path.is_dir() else path.stem).lower().replace("-", "").replace("_", "")
        if stem == plain:
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
        raise InputError(
            f"{data} is not a folder; a folder with one folder per benchmark (stereoset, bbq, …) is expected"
        )
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
            found.items[name] = read_data(benchmark, path, found.options[name], most, seed)
            with suppress(NotMeasured):  # of a package that is not here: continued now, measured elsewhere
                benchmark.ready(found.options[name])
            continue
        found.skipped[name] = f"{data} has no {folder}"
        if {benchmark.flag, name} & set(only):
            raise InputError(f"{benchmark.flag}: {found.skipped[name]}")
    if not found.items:
        raise InputError(f"{data}: no benchmark can be run ({'; '.join(found.skipped.values())})")
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
    settings = scorer.settings()
    suite = Suite.open(out, model, settings, gathered.chosen, _origin(provenance, how))
    suite.skipped |= {name: reason for name, reason in gathered.skipped.items() if name not in suite.done}
    suite.write()
    for name, items in gathered.items.items():
        benchmark = benchmark_named(name)
        chosen = gathered.options.get(name, benchmark.options())
        drawn = replace(sampling or Sampling(), seed=how.seed)
        try:
            result = _run(
                benchmark, Work(scorer, items, chosen, settings, drawn, None, _tell(report, name)), how, suite
            )
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
        suite = Suite.open(out, model, settings, said, _origin(provenance, how))
    work = Work(scorer, benchmark.sample(items, limit, how.seed), chosen, settings, draws, progress=progress)
    result = _run(benchmark, work, how, suite, stored, study=True)
    known = {"version": __version__, **(provenance or {}), "model_path": model or None, "limit": limit}
    return replace(result, provenance={**known, **result.provenance})


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
    # A report shows what a table does not hold.
    kept = None if suite is None or (study and benchmark.report) else suite.kept(benchmark.name, made_with)
    if kept is not None and suite is not None:
        measured = Measured(kept, suite.facts(benchmark.name))
    else:
        journals = None if suite is None else suite.folder / "journals"
        measured = _measured(benchmark, replace(work, journals=journals), stored)
        if suite is not None:
            suite.keep(measured, made_with, round(time.monotonic() - begun, 1))
    result = benchmark.result(measured.table, how, work.options, measured.reading if study else None)
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
        found, path = Continued(stored.of(benchmark.prompts(work.items)), str(stored.path))
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


class Continued(NamedTuple):
    """Continuations, and the file that keeps them, where one does."""

    found: Answers[Generation]
    path: str | None


def continue_prompts(benchmark: Benchmark, work: Work) -> Continued:
    """Continue the prompts of a benchmark; what its journal holds is not computed again."""
    from fairhead.language.generation import generate

    assert benchmark.prompts is not None
    settings = {**work.settings, **work.sampling.settings()}
    with journal_in(work.journals, benchmark.name, settings, GenerationJournal) as journal:
        prompts = benchmark.prompts(work.items)
        found = generate(work.scorer, prompts, work.sampling, journal=journal, progress=work.progress)
    return Continued(found, None if journal is None else str(journal.path))


def _origin(provenance: Mapping[str, Any] | None, how: Resampling) -> dict[str, Any]:
    return {"version": __version__, **(provenance or {}), "n_boot": how.n_boot, "level": how.level}


def digest(items: Iterable[Any]) -> str:
    """A hash of items: a table of other data must not pass for one of these."""
    found = hashlib.blake2b(digest_size=16)
    for item in items:
        text = repr(item).encode(errors="surrogatepass")
        found.update(f"{len(text)}\n".encode() + text)
    return found.hexdigest()


def _tell(report: Report | None, name: str) -> Progress | None:
    if report is None:
        return None

    def tell(done: int, total: int) -> None:
        report(name, done, total)

    return tell
