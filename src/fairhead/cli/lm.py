"""`fairhead lm`: stereotypes in causal language models, by the published benchmarks."""

import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairhead import __version__
from fairhead.cli.output import check_output, command_line, terminal, write_json
from fairhead.errors import FairheadError, InputError

if TYPE_CHECKING:
    from fairhead.language.results import BenchmarkResult
    from fairhead.language.scorer import Scorer
    from fairhead.language.scores import Progress


class Benchmark(enum.StrEnum):
    """What to measure."""

    stereoset = "stereoset"
    crows = "crows"
    bbq = "bbq"
    winobias = "winobias"
    perplexity = "perplexity"


class Kind(enum.StrEnum):
    """Precision of the computation."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Start(enum.StrEnum):
    """Where BOS stands."""

    always = "always"
    empty_prefix = "empty_prefix"


class Prompt(enum.StrEnum):
    """How a BBQ question is put."""

    plain = "plain"
    qa = "qa"


class Inter(enum.StrEnum):
    """What is scored of an intersentence item."""

    sentence = "sentence"
    text = "text"


EPILOG = """
**Benchmarks**

- `stereoset`: is a stereotype likelier than its opposite (ss, even: 50), and either than nonsense (lms); icat is both.
- `crows`: of two sentences that differ in the group, how often is the more stereotypical one likelier (ss, even: 50).
- `bbq`: accuracy and bias score (even: 0) of answers about two people, with and without the context that tells.
- `winobias`: is a sentence likelier with the pronoun that fits the stereotype of the occupation (even: 50).
- `perplexity`: of a text file, paragraphs being documents; the check that a change has not cost a model its language.

**Examples**

    fairhead lm stereoset --model SmolLM2-135M --data stereoset/dev.json

    fairhead lm bbq --model SmolLM2-135M --data BBQ --category Age --limit 500 --out scores --json bbq.json

With `--out`, each text's score is written as it is made, and a run that was killed goes on where it stopped.
"""


def option(flag: str, help: str, panel: str | None = None, metavar: str | None = None) -> Any:
    """An option that is also an environment variable."""
    variable = f"FAIRHEAD_LM_{flag.strip('-').replace('-', '_').upper()}"
    return typer.Option(flag, help=help, rich_help_panel=panel, metavar=metavar, envvar=variable, show_envvar=False)


_MODEL, _STATISTICS, _OUTPUT, _SPECIAL = "Model", "Statistics", "Output", "Options of single benchmarks"


def lm_command(
    context: typer.Context,
    benchmark: Annotated[Benchmark, typer.Argument(help="What to measure.")],
    model: Annotated[str, option("--model", "Folder of a causal language model; nothing is downloaded.", None, "PATH")],
    data: Annotated[str, option("--data", "File, folder or zip archive as published.", None, "PATH")],
    limit: Annotated[
        int | None, option("--limit", "Only so many items, drawn at random with --seed.", None, "N")
    ] = None,
    device: Annotated[
        str, option("--device", "cpu, cuda, cuda:1, ...; auto takes a GPU where there is one.", _MODEL)
    ] = "auto",
    dtype: Annotated[Kind, option("--dtype", "auto: float32 on a processor, bfloat16 on a GPU.", _MODEL)] = Kind.auto,
    batch_tokens: Annotated[
        int | None, option("--batch-tokens", "Tokens of a batch, padding included.", _MODEL, "N")
    ] = None,
    start: Annotated[
        Start,
        option(
            "--start",
            "BOS (end of text where there is none) before every text, or only where nothing else stands before.",
            _MODEL,
        ),
    ] = Start.always,
    inter: Annotated[
        Inter,
        option("--inter", "stereoset: score the sentence after its context, or the whole text of both.", _SPECIAL),
    ] = Inter.sentence,
    prompt: Annotated[
        Prompt,
        option("--prompt", 'bbq: "context question", or with the words Context, Question and Answer.', _SPECIAL),
    ] = Prompt.plain,
    category: Annotated[
        list[str] | None, option("--category", "bbq: a category; give it several times.", _SPECIAL, "NAME")
    ] = None,
    window: Annotated[
        int | None, option("--window", "perplexity: tokens read at a time; by default up to 1 024.", _SPECIAL, "N")
    ] = None,
    n_boot: Annotated[int, option("--n-boot", "Bootstrap replicates.", _STATISTICS, "N")] = 2000,
    seed: Annotated[int, option("--seed", "Same seed, same figures.", _STATISTICS, "N")] = 0,
    level: Annotated[float, option("--level", "Confidence level of intervals.", _STATISTICS, "SHARE")] = 0.95,
    json_path: Annotated[str | None, option("--json", "Write JSON; - prints only JSON.", _OUTPUT, "FILE")] = None,
    out: Annotated[Path | None, option("--out", "Folder for the score of each text, as JSONL.", _OUTPUT, "DIR")] = None,
) -> None:
    """Measure stereotypes in a causal language model, with intervals."""
    check_numbers(n_boot, level, limit, seed)
    check_output(json_path)
    require_torch()
    from fairhead.language.resampling import Resampling

    options: dict[str, Any] = {"inter": inter.value} if benchmark == "stereoset" else {}
    options |= {"prompt": prompt.value} if benchmark == "bbq" else {}
    # The data first: a mistake there should not wait for the model.
    items = _read(benchmark, data, category)
    scorer = load_model(model, device, dtype.value, batch_tokens, start.value)
    how = Resampling(n_boot=n_boot, seed=seed, level=level)
    if benchmark is Benchmark.perplexity:
        from dataclasses import replace

        from fairhead.language.benchmarks import perplexity

        result = perplexity.evaluate(scorer, items[:limit], window, replace(how, min_items=1))
        result = replace(result, provenance=scorer.settings())
    else:
        from fairhead.language.run import run_benchmark

        with _progress(benchmark.value) as tell:
            result = run_benchmark(
                _READERS[benchmark], scorer, items, out=out, limit=limit, resampling=how, progress=tell, **options
            )
    result = _with_origin(result, model, data, scorer, command_line(context))
    if json_path is not None:
        write_json(result.to_dict(), json_path)
    if json_path != "-":
        _show(result, level)


_READERS = {"stereoset": "stereoset", "crows": "crows_pairs", "bbq": "bbq", "winobias": "winobias"}


def require_torch() -> None:
    """Say what is missing before anything is read."""
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise FairheadError(f'this needs {", ".join(missing)}, not installed here: pip install "fairhead[torch]"')


def check_numbers(n_boot: int, level: float, limit: int | None, seed: int) -> None:
    """Name the first number that makes no sense."""
    for flag, value, least in (("--n-boot", n_boot, 1), ("--seed", seed, 0), ("--limit", limit, 1)):
        if value is not None and value < least:
            raise InputError(f"{flag} is {value}; at least {least} is expected")
    if not 0 < level < 1:
        raise InputError(f"--level is {level:g}; a share between 0 and 1 is expected")


def _read(benchmark: Benchmark, path: str, categories: list[str] | None) -> Any:
    if benchmark is Benchmark.perplexity:
        from fairhead.language.benchmarks.perplexity import split_documents

        try:
            return split_documents(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise InputError(f"{path} is not text in UTF-8; a plain text file is expected") from None
    from fairhead.data import read

    if categories and benchmark is not Benchmark.bbq:
        raise InputError(f"--category is an option of bbq; {benchmark.value} reports every category")
    options = {"categories": categories} if categories else {}
    return read(_READERS[benchmark], path, **options)


def load_model(path: str, device: str, dtype: str, batch_tokens: int | None, start: str) -> "Scorer":
    """A scorer from a folder, without the chatter of the libraries."""
    from transformers.utils import logging

    from fairhead.language.scorer import load_scorer

    # What a user of this command must know is said by it, in one place.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options: dict[str, Any] = {"device": device, "dtype": dtype, "batch_tokens": batch_tokens, "start": start}
    return load_scorer(path, **options)


def _with_origin(result: "BenchmarkResult", model: str, data: str, scorer: "Scorer", command: str) -> "BenchmarkResult":
    from dataclasses import replace

    made: Mapping[str, Any] = {
        "version": __version__,
        "command": command,
        "model_path": model,
        "data_path": data,
        "device": str(scorer.device),
    }
    return replace(result, provenance={**made, **result.provenance})


@contextmanager
def _progress(what: str) -> "Iterator[Progress | None]":
    """A bar on a terminal, silence elsewhere; on stderr, so that stdout has the result alone."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(f"{what}: texts scored", total=None)

        def tell(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total)

        yield tell


def _show(result: "BenchmarkResult", level: float) -> None:

    from fairhead.cli.lm_table import show_benchmark

    show_benchmark(terminal(), result, level)
