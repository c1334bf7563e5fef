"""From a model and the items of a benchmark to its scores. Needs no torch itself."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from fairhead.errors import InputError, did_you_mean
from fairhead.language.resampling import Resampling
from fairhead.language.results import BenchmarkResult, result_of
from fairhead.language.scores import Journal, Progress, Request, Scores, journal_path
from fairhead.language.tables import ItemTable, Measure

# Each is a module of this folder with `requests(items, **options)`, `table(items, scores)` and `MEASURES`.
BENCHMARKS = ("stereoset", "crows_pairs", "bbq", "winobias")


class ScoresTexts(Protocol):
    """What a benchmark needs of a model; `Scorer` has it."""

    def score(
        self,
        requests: Sequence[Request],
        *,
        journal: Journal | None = None,
        on_long: Literal["raise", "skip"] = "raise",
        progress: Progress | None = None,
    ) -> Scores:
        """Log-probabilities, as `Scorer.score`."""

    def settings(self) -> dict[str, Any]:
        """What the scores depend on, as `Scorer.settings`."""


def run_benchmark(
    name: str,
    scorer: ScoresTexts,
    items: Sequence[Any],
    *,
    out: Path | None = None,
    limit: int | None = None,
    resampling: Resampling | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> BenchmarkResult:
    """Score the items of a benchmark and evaluate the scores.

    Args:
        name: one of `BENCHMARKS`.
        scorer: the model.
        items: as the reader of the benchmark returns them.
        out: a folder for the scores of each text as JSONL; a killed run with the same model and settings goes on there.
        limit: only so many items, drawn at random with the seed of `resampling`; None takes all.
        resampling: how intervals are made.
        progress: called after each batch.
        options: those of the benchmark's `requests`, such as `prompt` of BBQ.

    Example:
        >>> from fairhead.data.crows_pairs import CrowsPair
        >>> from fairhead.language.scores import Score
        >>> class Constant:
        ...     def score(self, requests, **options):
        ...         return Scores({request.id: Score(request.id, -1.0, 1) for request in requests})
        ...     def settings(self):
        ...         return {"model": "constant"}
        >>> pairs = [CrowsPair(str(i), "She cried.", "He cried.", "stereo", "gender", ()) for i in range(20)]
        >>> run_benchmark("crows_pairs", Constant(), pairs)["ss"].value
        0.5
    """
    if name not in BENCHMARKS:
        raise InputError(
            f"there is no benchmark {name!r}; there are {', '.join(BENCHMARKS)}.{did_you_mean(name, BENCHMARKS)}"
        )
    how = resampling or Resampling()
    chosen = list(items) if limit is None else sample(items, limit, how.seed)
    made = scored_table(name, scorer, chosen, out=out, progress=progress, **options)
    result = result_of(made.table, measures_of(made.table), how)
    provenance = {**made.provenance, "limit": limit, "n_boot": how.n_boot, "seed": how.seed, "level": how.level}
    return replace(result, provenance=provenance)


class ScoredTable(NamedTuple):
    """The answers of a model to the items of a benchmark, and where they come from."""

    table: ItemTable
    provenance: dict[str, Any]


def scored_table(
    name: str,
    scorer: ScoresTexts,
    items: Sequence[Any],
    *,
    out: Path | None = None,
    progress: Progress | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> ScoredTable:
    """Score the texts of items; arguments as in `run_benchmark`.

    `settings` are those of the scorer, where they are known already: they hold a hash of all weights.
    """
    benchmark = import_module(f"fairhead.language.benchmarks.{name}")
    requests: list[Request] = benchmark.requests(items, **options)
    made_with = scorer.settings() if settings is None else settings
    path = None if out is None else journal_path(out, name, made_with)
    with nullcontext() if path is None else Journal(path, made_with) as journal:
        scores = scorer.score(requests, journal=journal, on_long="skip", progress=progress)
    provenance = {
        **made_with,
        "items": len(items),
        "texts": len(requests),
        "texts_digest": _digest(requests),
        "merged_boundaries": sum(score.merged for score in scores.values()),
        "scores": None if path is None else str(path),
        **options,
    }
    return ScoredTable(benchmark.table(items, scores), provenance)


def measures_of(table: ItemTable) -> Sequence[Measure]:
    """The figures that can be made of a table: `MEASURES` of the benchmark's module, or its `measures(table)`.

    Example:
        >>> from fairhead.language.benchmarks.crows_pairs import table
        >>> [measure.metric for measure in measures_of(table([], {}))][:2]
        ['ss', 'mean_abs_difference']
    """
    module = import_module(f"fairhead.language.benchmarks.{table.benchmark}")
    found: Sequence[Measure] = module.measures(table) if hasattr(module, "measures") else module.MEASURES
    return found


def sample(items: Sequence[Any], limit: int, seed: int) -> list[Any]:
    """Draw items at random, in their order; the two forms of a WinoBias sentence stay together.

    Example:
        >>> len(sample([f"item {i}" for i in range(100)], 7, seed=0))
        7
    """
    if limit < 1:
        raise InputError(f"a limit of {limit} items: at least 1 is expected")
    units = [str(getattr(item, "id", i)).removesuffix("/pro").removesuffix("/anti") for i, item in enumerate(items)]
    distinct = list(dict.fromkeys(units))
    drawn = np.random.default_rng(seed).permutation(len(distinct))[:limit]
    kept = {distinct[i] for i in drawn}
    return [item for item, unit in zip(items, units, strict=True) if unit in kept]


def _digest(requests: Sequence[Request]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for request in requests:
        digest.update(f"{request.id}\n{request.digest}\n".encode())
    return digest.hexdigest()
