"""`fairhead lm suite`: every benchmark on one model, into one folder that `fairhead lm compare` reads."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairhead.cli.lm import Inter, Kind, Prompt, check_numbers, load_model, option, require_torch
from fairhead.cli.output import command_line, terminal
from fairhead.errors import InputError

if TYPE_CHECKING:
    from fairhead.language.suite import Suite

EPILOG = """
The folder of the data has one folder (or zip archive) a benchmark, as published: `stereoset`, `crows_pairs`, `bbq`,
`winobias`, `bold`. What is not there is skipped and named. Perplexity and attention entropy are taken on the Wikipedia
texts that come with BOLD, or on a text file of your own (`--text`, paragraphs being documents).

A run that was killed goes on where it stopped: give the same command again.

**Examples**

    fairhead lm suite --model SmolLM2-135M --data DATA --out runs/base

    fairhead lm suite --model SmolLM2-135M-klaad --data DATA --out runs/klaad

    fairhead lm compare runs/base runs/klaad --html before-after.html
"""
_MODEL, _STATISTICS, _SPECIAL = "Model", "Statistics", "Options of single benchmarks"


def suite_command(
    context: typer.Context,
    model: Annotated[str, option("--model", "Folder of a causal language model; nothing is downloaded.", None, "PATH")],
    data: Annotated[Path, option("--data", "Folder with one folder a benchmark, as published.", None, "DIR")],
    out: Annotated[Path, option("--out", "Folder for journals, tables of items and figures.", None, "DIR")],
    only: Annotated[
        str | None,
        option(
            "--only",
            "Benchmarks, with commas between: stereoset, crows, bbq, bold, winobias, perplexity, attention.",
            None,
            "NAMES",
        ),
    ] = None,
    limit: Annotated[
        int | None, option("--limit", "Only so many items of each benchmark, drawn at random with --seed.", None, "N")
    ] = None,
    held_out_of: Annotated[
        str | None,
        option(
            "--held-out-of",
            "Folder of a trained model: StereoSet without the terms that it was trained on. Not needed for a "
            "comparison, which leaves them out itself.",
            None,
            "MODEL_DIR",
        ),
    ] = None,
    device: Annotated[
        str, option("--device", "cpu, cuda, cuda:1, ...; auto takes a GPU where there is one.", _MODEL)
    ] = "auto",
    dtype: Annotated[Kind, option("--dtype", "auto: float32 on a processor, bfloat16 on a GPU.", _MODEL)] = Kind.auto,
    batch_tokens: Annotated[
        int | None, option("--batch-tokens", "Tokens of a batch, padding included.", _MODEL, "N")
    ] = None,
    text: Annotated[
        str | None,
        option("--text", "perplexity, attention: a text file in place of BOLD's Wikipedia texts.", _SPECIAL, "FILE"),
    ] = None,
    documents: Annotated[
        int, option("--documents", "perplexity: documents drawn from the text; attention takes 200.", _SPECIAL, "N")
    ] = 1000,
    window: Annotated[
        int | None, option("--window", "perplexity: tokens read at a time; by default up to 1 024.", _SPECIAL, "N")
    ] = None,
    inter: Annotated[
        Inter, option("--inter", "stereoset: score the sentence after its context, or the whole text.", _SPECIAL)
    ] = Inter.sentence,
    prompt: Annotated[
        Prompt, option("--prompt", 'bbq: "context question", or with the words Context, Question, Answer.', _SPECIAL)
    ] = Prompt.plain,
    lexicons: Annotated[
        str | None,
        option(
            "--lexicons", "bold: folder with warriner_vad.csv, be5_*.tsv; by default DATA/lexicons.", _SPECIAL, "DIR"
        ),
    ] = None,
    bold_batch: Annotated[int, option("--bold-batch-size", "bold: prompts continued together.", _SPECIAL, "N")] = 64,
    n_boot: Annotated[int, option("--n-boot", "Bootstrap replicates.", _STATISTICS, "N")] = 2000,
    seed: Annotated[int, option("--seed", "Same seed, same items and figures.", _STATISTICS, "N")] = 0,
    level: Annotated[float, option("--level", "Confidence level of intervals.", _STATISTICS, "SHARE")] = 0.95,
) -> None:
    """Run every benchmark on a model, into one folder that can be compared with another."""
    check_numbers(n_boot, level, limit, seed)
    if documents < 1:
        raise InputError(f"--documents is {documents}; at least 1 is expected")
    from fairhead.cli.progress import progress
    from fairhead.language.entries import SuiteOptions
    from fairhead.language.resampling import Resampling
    from fairhead.language.suite import gather_items, run_suite
    from fairhead.store import locked

    require_torch()
    names = tuple(name.strip() for name in (only or "").split(",") if name.strip())
    if lexicons is None and (data / "lexicons").is_dir():
        lexicons = str(data / "lexicons")
    options = SuiteOptions(
        only=names,
        limit=limit,
        seed=seed,
        held_out_of=held_out_of,
        text=text,
        documents=documents,
        window=window,
        prompt=prompt.value,
        inter=inter.value,
        lexicons=lexicons,
        bold_batch=bold_batch,
    )
    # The data first: a mistake there should not wait for the model.
    items = gather_items(data, options)
    context.with_resource(locked(out))
    scorer = load_model(model, device, dtype.value, batch_tokens, "always")
    how = Resampling(n_boot=n_boot, seed=seed, level=level)
    made = {"command": command_line(context), "data_path": str(data), "device": str(scorer.device)}
    with progress() as bars:
        suite = run_suite(scorer, items, out, model, options, how, bars.tell, made)
    _show(suite)


def _show(suite: "Suite") -> None:
    from rich.markup import escape

    console = terminal()
    console.print(f"[bold]{escape(suite.model)}[/] in {escape(str(suite.folder))}", highlight=False)
    for name, facts in suite.done.items():
        left_out = "; ".join(f"left out: {n:,} ({escape(reason)})" for reason, n in facts["left_out"].items())
        seconds = "" if facts["seconds"] is None else f", {facts['seconds']:g} s"
        console.print(
            f"  {name}: {facts['items']:,} items{seconds}{'; ' if left_out else ''}{left_out}", highlight=False
        )
    for name, reason in suite.skipped.items():
        console.print(f"  {name}: skipped, {escape(reason)}", highlight=False)
    console.print(f"Compare with another run: fairhead lm compare {escape(str(suite.folder))} OTHER", highlight=False)
