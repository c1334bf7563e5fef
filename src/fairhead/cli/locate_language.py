"""`fairhead locate` and `fairhead ablate` on pairs of texts: which heads of a language model carry its stereotypes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fairhead import __version__
from fairhead.cli.locate_options import check_heads, write_model
from fairhead.cli.output import command_line, terminal, write_json
from fairhead.errors import InputError

if TYPE_CHECKING:
    from fairhead.locate.language import LocatedPairs, PairPlan

# Options of images and labelled texts alone.
_NOT_FOR_PAIRS = {
    *("task", "prompts", "text_adapter", "text_encoder", "calibrate", "texts", "concept_from", "orthogonal"),
    *("evidence", "tokens", "batch_size", "images"),
}


@dataclass(frozen=True)
class PairRun:
    """What the command was asked for.

    Attributes:
        model: folder of a causal language model.
        data: the benchmark, as name:path.
        concept: the bias type whose pairs are used, such as gender; None for all.
        limit: pairs to use; None for all.
        device: where to compute.
        features: folder that keeps the terms.
        out: folder for the results.
        json_path: where JSON goes.
        save: folder for the edited model.
    """

    model: str
    data: str
    concept: str | None
    limit: int | None
    device: str
    features: str | None
    out: Path | None
    json_path: str | None
    save: Path | None = None


@dataclass(frozen=True)
class PairOptions:
    """How heads are chosen and tested, as options say it; `kinds` are the edits, `tf32` is of forward passes."""

    count: int
    rank: str
    forward: bool
    draws: int
    n_boot: int
    seed: int
    tf32: bool = False
    kinds: tuple[str, ...] = ("mean", "zero", "resample")


def is_pairs(spec: str) -> bool:
    """Whether --data names pairs of texts.

    Example:
        >>> is_pairs("crows:pairs.csv"), is_pairs("fairface:FairFace.zip")
        (True, False)
    """
    from fairhead.data import parse_spec

    return parse_spec(spec).reader.kind in ("pairs", "triplets")


def locate_in_pairs(
    context: typer.Context,
    run: PairRun,
    options: PairOptions,
    heads: Sequence[tuple[int, int]] | None = None,
    chosen_on: str | None = None,
) -> None:
    """Find heads, or test those that are given; `chosen_on` is a hash of the pairs that these were chosen on."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in _NOT_FOR_PAIRS and source is not None and source.name == "COMMANDLINE":
            raise InputError(f"{parameter.opts[0]} has no meaning for pairs of texts (crows, stereoset): leave it out")
    from fairhead.locate.language import PairPlan
    from fairhead.locate.pair_studies import Statistics

    rank: Any = options.rank
    plan = PairPlan(
        count=options.count,
        rank=rank,
        kinds=options.kinds,
        forward=options.forward,
        draws=options.draws,
        tf32=options.tf32,
        how=Statistics(options.n_boot, seed=options.seed),
    )
    _run_pairs(context, run, plan, heads, chosen_on)


def _run_pairs(
    context: typer.Context,
    run: PairRun,
    plan: "PairPlan",
    heads: Sequence[tuple[int, int]] | None,
    chosen_on: str | None,
) -> None:
    """Read the pairs, take their log-odds apart, find or test heads, and write what was found."""
    from transformers.utils import logging

    from fairhead.cli.progress import progress
    from fairhead.language.scorer import load_scorer
    from fairhead.locate.head_maps import Head
    from fairhead.locate.language import halves_of_pairs, locate_pairs
    from fairhead.locate.log_odds import take_apart
    from fairhead.locate.pairs import read_pairs
    from fairhead.locate.plan import OTHER_HALF, half_sha256

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    pairs = read_pairs(run.data, run.concept, run.limit, plan.how.seed)
    halves_of_pairs(pairs, plan.how.seed)  # a mistake there should not wait for the model
    with progress() as told:
        scorer = load_scorer(run.model, device=run.device, dtype="float32")
        terms = take_apart(
            scorer, pairs, folder=run.features, progress=lambda done, total: told.tell("pairs", done, total)
        )
        told.drop("pairs")
        check_heads(heads or (), terms.shape)
        chosen = None if heads is None else [Head(*head) for head in heads]
        found = locate_pairs(scorer, pairs, terms, heads=chosen, plan=plan, progress=told.tell)
    if chosen_on not in (None, half_sha256(pairs.ids, found.choosing)):
        found = replace(found, notes=(*found.notes, OTHER_HALF))
    provenance = {
        "version": __version__,
        "command": command_line(context),
        "model": run.model,
        "data": run.data,
        "bias_type": run.concept or "all",
        "pairs": len(pairs),
        "seed": plan.how.seed,
        **scorer.settings(),
    }
    _finish(run, found, pairs, provenance)
    if run.save is not None:
        found.edits.bake(scorer.model, found.ranked, plan.kinds[0])
        write_model(run.save, scorer.model, scorer.tokenizer)


def _finish(run: PairRun, found: "LocatedPairs", pairs: Any, provenance: dict[str, Any]) -> None:
    from fairhead.locate.language_writeup import report_of, to_dict

    content = to_dict(found, pairs, provenance)
    if run.out is not None:
        from fairhead.report import write

        run.out.mkdir(parents=True, exist_ok=True)
        write_json(content, str(run.out / "headmap.json"))
        write(report_of(found, pairs, provenance), run.out / "report.html")
    if run.json_path is not None:
        write_json(content, run.json_path)
    if run.json_path != "-":
        show_pairs(terminal(), found)
        if run.out is not None:
            typer.echo(f"\nreport: {run.out / 'report.html'}")


def show_pairs(console: Any, found: "LocatedPairs") -> None:
    """Verdict, chosen heads, effects of editing them."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from fairhead.locate.language_writeup import verdict
    from fairhead.report.wording import head_name, p_value

    styles = {"good": "green", "bad": "bold red", "unclear": "yellow", "note": "none"}
    for line in verdict(found):
        console.print(f"- [{styles[line['tone']]}]{escape(line['text'])}[/]", highlight=False)
    for note in found.notes:
        console.print(f"- [dim]{escape(note)}[/]", highlight=False)
    if not found.ranked:
        return
    table = Table(title="\nChosen heads, on the reporting half", box=box.SIMPLE_HEAD, title_justify="left")
    maps = [("direct part, nats", found.head_map)]
    maps += [] if found.effect_map is None else [("lost without it, nats", found.effect_map)]
    table.add_column("head")
    for title, _ in maps:
        table.add_column(title, justify="right")
        table.add_column("p adjusted", justify="right")
    for head in found.ranked:
        cells = []
        for _, each in maps:
            cells += [f"{each.gap[head]:+.3f} ({each.low[head]:+.3f} to {each.high[head]:+.3f})"]
            cells += [p_value(float(each.p_adjusted[head]))]
        table.add_row(head_name(*head), *cells)
    console.print(table)
    effects = Table(title="Effects of editing them", box=box.SIMPLE_HEAD, title_justify="left")
    for title in ("edit", "figure", "before", "after", "change", "p layer"):
        effects.add_column(title, justify="left" if title in ("edit", "figure") else "right")
    for study in found.studies:
        for i, ablation in enumerate(study.ablations):
            change = ablation.change
            effects.add_row(
                "" if i else f"{study.kind}, {study.way}",
                change.metric,
                f"{change.a:.3f}",
                f"{change.b:.3f}",
                f"{change.value:+.3f} ({change.low:+.3f} to {change.high:+.3f})",
                # Controls test whether a gap is lowered; what it costs is not a gap.
                p_value(ablation.p_controls) if change.metric in ("log_odds", "log_odds_size", "ss") else "",
            )
    effects.caption = "p layer: of random heads of the same layers lowering it as much"
    console.print(effects)
