"""`fairhead lm bold`: what a causal language model writes about people of different groups."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairhead import __version__
from fairhead.cli.lm import Kind, check_numbers, load_model, option, require_torch
from fairhead.cli.output import check_output, command_line, terminal, write_json
from fairhead.cli.progress import progress
from fairhead.errors import InputError

if TYPE_CHECKING:
    from fairhead.data.bold import BoldPrompt
    from fairhead.language.benchmarks.bold import Gauge
    from fairhead.language.generations import Generations, Sampling

EPILOG = """
The model continues every prompt, and only its own words are measured: sentiment (VADER), gender words and, with
`--lexicons`, valence, arousal, dominance and the basic emotions; with `--vectors`, gender polarity by word vectors. The
disparity of a domain is the largest mean of a group less the smallest, with an interval over entities, beside what
groups shuffled over entities would show.

**Examples**

    fairhead lm bold --model SmolLM2-135M --data bold --lexicons lexicons --out runs --json bold.json

    fairhead lm bold --model SmolLM2-135M --data bold --domain gender --limit 500

Where vaderSentiment is not installed, generate there and score elsewhere:

    fairhead lm bold --model SmolLM2-135M --data bold --generate-only --out runs

    fairhead lm bold --data bold --lexicons lexicons --score-only runs/bold-1a2b3c4d.jsonl --json bold.json

With `--out`, each continuation is written as it is made; a run that was killed goes on where it stopped, and writes
what an unbroken one would have written.
"""

_MODEL, _SAMPLING, _STATISTICS, _OUTPUT = "Model", "How continuations are drawn", "Statistics", "Output"


def bold_command(
    context: typer.Context,
    data: Annotated[str, option("--data", "Folder or zip archive as published.", None, "PATH")],
    model: Annotated[
        str | None, option("--model", "Folder of a causal language model; nothing is downloaded.", None, "PATH")
    ] = None,
    domain: Annotated[
        list[str] | None, option("--domain", "gender, race, ...; give it several times.", None, "NAME")
    ] = None,
    limit: Annotated[
        int | None, option("--limit", "Only so many prompts, drawn at random with --seed.", None, "N")
    ] = None,
    lexicons: Annotated[
        Path | None, option("--lexicons", "Folder with warriner_vad.csv, be5_*.tsv.", None, "DIR")
    ] = None,
    vectors: Annotated[
        Path | None, option("--vectors", "Word vectors as text (GloVe, FastText).", None, "FILE")
    ] = None,
    score_only: Annotated[
        Path | None, option("--score-only", "Score this file of generations; no model is needed.", None, "FILE")
    ] = None,
    generate_only: Annotated[bool, typer.Option("--generate-only", help="Write generations, measure nothing.")] = False,
    device: Annotated[
        str, option("--device", "cpu, cuda, cuda:1, ...; auto takes a GPU where there is one.", _MODEL)
    ] = "auto",
    dtype: Annotated[Kind, option("--dtype", "auto: float32 on a processor, bfloat16 on a GPU.", _MODEL)] = Kind.auto,
    batch_size: Annotated[int, option("--batch-size", "Prompts read together.", _SAMPLING, "N")] = 64,
    max_new_tokens: Annotated[int, option("--max-new-tokens", "At most so many tokens each.", _SAMPLING, "N")] = 40,
    temperature: Annotated[float, option("--temperature", "0: the likeliest token each time.", _SAMPLING, "X")] = 1.0,
    top_k: Annotated[int, option("--top-k", "Only the k likeliest tokens; 0: all.", _SAMPLING, "K")] = 50,
    top_p: Annotated[float, option("--top-p", "Only tokens that add up to this share.", _SAMPLING, "P")] = 0.95,
    n_boot: Annotated[int, option("--n-boot", "Bootstrap replicates.", _STATISTICS, "N")] = 1000,
    seed: Annotated[int, option("--seed", "Same seed, same continuations and figures.", _STATISTICS, "N")] = 0,
    level: Annotated[float, option("--level", "Confidence level of intervals.", _STATISTICS, "SHARE")] = 0.95,
    json_path: Annotated[str | None, option("--json", "Write JSON; - prints only JSON.", _OUTPUT, "FILE")] = None,
    out: Annotated[
        Path | None, option("--out", "Folder for the continuations and the table of items, as JSONL.", _OUTPUT, "DIR")
    ] = None,
) -> None:
    """What does a model write about people of different groups?"""
    check_numbers(n_boot, level, limit, seed)
    check_output(json_path)
    if score_only is not None and (generate_only or model is not None):
        raise InputError("--score-only takes stored generations: give neither --model nor --generate-only with it")
    if score_only is None and model is None:
        raise InputError("a model is expected (--model PATH), or stored generations (--score-only FILE)")
    if generate_only and out is None:
        raise InputError("--generate-only needs a folder to write to (--out DIR)")
    from fairhead.data.bold import read_bold
    from fairhead.language.generations import Sampling
    from fairhead.language.resampling import Resampling
    from fairhead.language.run import sample
    from fairhead.store import locked

    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed, batch_size)
    items: list[BoldPrompt] = list(read_bold(data, domains=domain or None))
    items = items if limit is None else sample(items, limit, seed)
    # What is missing for the measures should be said before an hour of generating.
    gauges = [] if generate_only else _gauges(lexicons)
    if out is not None:
        context.with_resource(locked(out))
    settings: dict[str, Any]
    where: str | None
    if score_only is not None:
        found, settings, where = _stored(score_only, items)
    else:
        assert model is not None
        found, settings, where = _generated(model, device, dtype.value, items, sampling, out)
    if generate_only:
        typer.echo(
            f"{len(found):,} continuations of {len(items):,} prompts, {len(found.empty):,} of them empty: {where}"
        )
        return
    if vectors is not None:
        gauges = [*gauges, _by_vectors(vectors, found)]
    from dataclasses import replace

    from fairhead.language.benchmarks import bold

    table = bold.table(items, found, gauges)
    how = Resampling(n_boot=n_boot, seed=seed, level=level)
    origin = {"version": __version__, "command": command_line(context), "model_path": model, "data_path": data}
    statistics = {"n_boot": n_boot, "seed": seed, "level": level, "limit": limit}
    made = {**origin, **settings, "items": len(items), **statistics, "generations": where}
    result = replace(bold.figures(table, how), provenance=made)
    if out is not None:
        table.write(out / "bold.items.jsonl", settings)
    if json_path is not None:
        write_json(result.to_dict(), json_path)
    if json_path != "-":
        from fairhead.cli.lm_bold_table import show_bold

        show_bold(terminal(), result, level)


def _gauges(lexicons: Path | None) -> "list[Gauge]":
    from fairhead.language.benchmarks import bold
    from fairhead.language.lexicons import find_lexicons

    gauges = [bold.sentiment(), bold.gender_words()]
    if lexicons is not None:
        gauges += [bold.by_lexicon(lexicon) for lexicon in find_lexicons(lexicons).values()]
    return gauges


def _by_vectors(path: Path, found: "Generations") -> "Gauge":
    from fairhead.language.benchmarks import bold
    from fairhead.language.lexicons import read_gender_vectors, words_of

    return bold.gender_vectors(read_gender_vectors(path, {w for one in found.values() for w in words_of(one.text)}))


def _stored(path: Path, items: "list[BoldPrompt]") -> "tuple[Generations, dict[str, Any], str]":
    from fairhead.language.benchmarks import bold
    from fairhead.language.generations import read_generations

    stored = read_generations(path)
    found = stored.of(bold.prompts(items))
    if not found:
        raise InputError(f"{path}: has no generation for any of the {len(items):,} prompts of the data")
    return found, dict(stored.settings), str(path)


def _generated(
    model: str, device: str, dtype: str, items: "list[BoldPrompt]", sampling: "Sampling", out: Path | None
) -> "tuple[Generations, dict[str, Any], str | None]":
    require_torch()
    from contextlib import nullcontext

    from fairhead.language.benchmarks import bold
    from fairhead.language.generation import generate
    from fairhead.language.generations import GenerationJournal
    from fairhead.language.scores import journal_path

    scorer = load_model(model, device, dtype, None, "always")
    settings = {**scorer.settings(), **sampling.settings()}
    path = None if out is None else journal_path(out, "bold", settings)
    with progress() as shown, nullcontext() if path is None else GenerationJournal(path, settings) as journal:

        def tell(done: int, total: int) -> None:
            shown.tell("prompts continued", done, total)

        found = generate(scorer, bold.prompts(items), sampling, journal=journal, progress=tell)
    return found, settings, None if path is None else str(path)
