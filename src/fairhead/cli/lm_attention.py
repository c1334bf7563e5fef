"""`fairhead lm attention`: where attention parts ways between a stereotyped sentence and its counterpart."""

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairhead import __version__
from fairhead.cli.lm import Kind, check_numbers, load_model, require_torch
from fairhead.cli.output import check_output, command_line, terminal, write_json
from fairhead.errors import InputError

if TYPE_CHECKING:
    from fairhead.language.benchmarks.attention_gap import AttentionGap, SentencePair

EPILOG = """
The gap of a token is how far apart the attention that it gets is in the two sentences of a pair, averaged over heads
and queries. Reported: how often the largest gap is on the words that differ, against chance; the mean gap there and
elsewhere; by kind of bias, layer and head; single pairs token by token.

**Examples**

    fairhead lm attention --model SmolLM2-135M --data crows:crows_pairs_anonymized.csv --html gap.html

    fairhead lm attention --model SmolLM2-135M --data stereoset:dev.json --layer 12 --json gap.json
"""


class Average(enum.StrEnum):
    """Where averages are made."""

    before = "before"
    after = "after"


def _option(flag: str, help: str, metavar: str | None = None) -> Any:
    variable = f"FAIRHEAD_LM_{flag.strip('-').replace('-', '_').upper()}"
    return typer.Option(flag, help=help, metavar=metavar, envvar=variable, show_envvar=False)


def attention_command(
    context: typer.Context,
    model: Annotated[str, _option("--model", "Folder of a causal language model; nothing is downloaded.", "PATH")],
    data: Annotated[str, _option("--data", "crows:PATH or stereoset:PATH, as published.", "SPEC")],
    layer: Annotated[int, _option("--layer", "Whose figures are reported first; -1 is the last.", "N")] = -1,
    average: Annotated[
        Average, _option("--average", "Over heads and queries before or after the absolute difference.")
    ] = Average.before,
    start_token: Annotated[
        bool, typer.Option("--start-token/--no-start-token", help="Count the start token among the tokens.")
    ] = True,
    limit: Annotated[int | None, _option("--limit", "Only so many pairs, drawn at random with --seed.", "N")] = None,
    pictures: Annotated[int, _option("--pictures", "Single pairs to show.", "N")] = 6,
    device: Annotated[str, _option("--device", "cpu, cuda, ...; auto takes a GPU where there is one.")] = "auto",
    dtype: Annotated[Kind, _option("--dtype", "auto: float32 on a processor, bfloat16 on a GPU.")] = Kind.auto,
    n_boot: Annotated[int, _option("--n-boot", "Bootstrap replicates.", "N")] = 2000,
    seed: Annotated[int, _option("--seed", "Same seed, same figures.", "N")] = 0,
    level: Annotated[float, _option("--level", "Confidence level of intervals.", "SHARE")] = 0.95,
    json_path: Annotated[str | None, _option("--json", "Write JSON; - prints only JSON.", "FILE")] = None,
    html: Annotated[Path | None, _option("--html", "Write a report, and its JSON twin.", "FILE")] = None,
) -> None:
    """Where does attention part ways between a stereotyped sentence and its counterpart?"""
    check_numbers(n_boot, level, limit, seed)
    check_output(json_path)
    check_output(None if html is None else str(html))
    if html is not None and json_path is not None and Path(json_path) == html.with_suffix(".json"):
        raise InputError(f"--json {json_path} is where the report's own JSON twin goes: choose another name")
    if pictures < 0:
        raise InputError(f"--pictures is {pictures}; at least 0 is expected")
    require_torch()
    from dataclasses import replace

    from fairhead.cli.progress import progress
    from fairhead.language.attention_report import report
    from fairhead.language.benchmarks.attention_gap import evaluate
    from fairhead.language.resampling import Resampling

    pairs = _pairs(data, limit, seed)
    scorer = load_model(model, device, dtype.value, None, "always")
    from fairhead.language.attention_pairs import read_gaps

    with progress() as shown:

        def tell(done: int, total: int) -> None:
            shown.tell("pairs", done, total)

        gaps = read_gaps(scorer, pairs, average=average.value, start_token=start_token, progress=tell)
    made = {
        "version": __version__,
        "command": command_line(context),
        "model_path": model,
        "data_path": data,
        "device": str(scorer.device),
        **scorer.settings(),
        "average": average.value,
        "counts_start_token": start_token,
        "limit": limit,
        "n_boot": n_boot,
        "seed": seed,
        "level": level,
    }
    gap = replace(evaluate(gaps, layer, Resampling(n_boot, seed, level), pictures), provenance=made)
    if json_path is not None:
        write_json(gap.to_dict(), json_path)
    if html is not None:
        from fairhead.report import write

        write(report(gap, Path(model).name, level), html)
    if json_path != "-":
        _show(gap, level)


def _pairs(data: str, limit: int | None, seed: int) -> "list[SentencePair]":
    from fairhead.data import read_items
    from fairhead.language.benchmarks.attention_gap import sentence_pairs
    from fairhead.language.run import sample

    items: Any = read_items(data, "pairs", "triplets")
    pairs = sentence_pairs(items)
    return pairs if limit is None else sample(pairs, limit, seed)


def _show(gap: "AttentionGap", level: float) -> None:
    from rich import box
    from rich.table import Table

    from fairhead.language.attention_report import verdict

    console = terminal()
    for sentence in verdict(gap):
        console.print(f"- {sentence['text']}", highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, caption=f"with intervals at {level:.0%}", caption_justify="left")
    table.add_column("")
    for name in ("pairs", "on span", "chance", "above chance", "gap on", "off"):
        table.add_column(name, justify="right")
    for group in dict.fromkeys(e.group_by for e in gap.estimates):
        found = [gap[m, group] for m in ("largest_on_span", "chance", "above_chance", "gap_on_span", "gap_elsewhere")]
        if any(e.value is None for e in found):
            table.add_row(group or "all", str(found[0].n), "–", "–", "too few", "–", "–")
            continue
        hit, chance, above, on, off = found
        table.add_row(
            group or "all",
            str(hit.n),
            f"{hit.value:.1%}",
            f"{chance.value:.1%}",
            f"{above.value:.0%} ({above.low:.0%} to {above.high:.0%})"
            if above.low is not None
            else f"{above.value:.1%}",
            f"{on.value:.4f}",
            f"{off.value:.4f}",
        )
    console.print(table)
    heads = [
        (value, layer, head, gap.heads.p_adjusted[layer][head])
        for layer, row in enumerate(gap.heads.value)
        for head, value in enumerate(row)
        if value is not None
    ]
    best = ", ".join(f"L{layer}H{head} {value:+.0%}" for value, layer, head, _ in sorted(heads, reverse=True)[:5])
    beyond = sum(p is not None and p < 1 - level for *_, p in heads)
    console.print(f"Heads furthest above chance: {best}; {beyond} of {len(heads)} beyond chance.", highlight=False)
    for reason, ids in gap.left_out.items():
        console.print(f"Left out, {reason}: {len(ids)}", highlight=False)
