"""`fairhead locate`: which heads of a model carry a gap, how sure that is, and what happens without them."""

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairhead import __version__
from fairhead.cli import locate_options as given
from fairhead.cli.locate_language import PairOptions, PairRun, is_pairs, locate_in_pairs
from fairhead.cli.locate_options import (
    CHOICE,
    OUTPUT,
    TEXT,
    check_folder,
    check_numbers,
    need_torch,
    opened,
    option,
    source_of,
)
from fairhead.cli.output import check_output, command_line, terminal, write_json
from fairhead.errors import InputError

if TYPE_CHECKING:
    from fairhead.locate.run import Located
    from fairhead.locate.session import Session

EPILOG = """
**Examples**

    fairhead locate --model clip-vit-base-patch16 --data fairface:FairFace.zip --concept gender --task age --out heads

    fairhead locate --model dinov2-small --data celeba:CelebA --concept gender --task Attractive --limit 2000

    fairhead locate --model SmolLM2-135M --data crows:crows_pairs_anonymized.csv --forward --rank effect --out heads

    fairhead locate --model toxicity-bert --data hatexplain:HateXplain --concept Women --task toxic --forward

Classes come from the model's own classifier, from prompts where it has a text side (its own tower, or
`--text-adapter` with `--text-encoder`), or else from a probe on labelled images. With `--features` the model runs over
the images once; later questions about them take seconds.

Of a language model, heads are ranked by their part in the log-odds of stereotype against anti-stereotype (`crows`,
`stereoset`; `--concept gender` takes the pairs of that type alone).

`--rank gap` goes by what each head itself writes; later layers may make up for much of that. `--rank effect` (with
`--forward`) takes each head out alone in a true forward pass: one pass a head over the data.
"""


class From(enum.StrEnum):
    """Where the concept's direction comes from."""

    auto = "auto"
    prompts = "prompts"
    means = "means"
    logistic = "logistic"
    leace = "leace"


class Ranking(enum.StrEnum):
    """What heads are ranked by."""

    gap = "gap"
    concept = "concept"
    bias = "bias"
    effect = "effect"


def locate_command(
    context: typer.Context,
    model: given.ModelPath,
    data: given.Data,
    concept: given.Concept = None,
    task: given.TaskColumn = None,
    limit: given.Limit = None,
    prompts: given.PromptPath = None,
    text_adapter: given.TextAdapter = None,
    text_encoder: given.TextEncoder = None,
    calibrate: given.Calibrate = False,
    texts: Annotated[
        str | None, option("--texts", "Texts for TextSpan (.npz with texts, vectors).", TEXT, "FILE")
    ] = None,
    concept_from: Annotated[
        From, option("--concept-from", "auto: prompts where there is a text side, else leace.", TEXT)
    ] = From.auto,
    orthogonal: Annotated[
        bool, option("--orthogonal/--no-orthogonal", "Take the class directions out of the concept.", TEXT)
    ] = False,
    heads: Annotated[int, option("--heads", "Heads to choose at most.", CHOICE, "N")] = 4,
    rank: Annotated[
        Ranking,
        option(
            "--rank",
            "gap: direct part in the gap; effect: what it loses without the head (with --forward); concept: separation "
            "of the groups; bias: that times coupling.",
            CHOICE,
        ),
    ] = Ranking.gap,
    evidence: Annotated[
        str | None,
        option(
            "--class",
            "Class whose evidence is looked at; by default that of the largest gap.",
            CHOICE,
            envvar="FAIRHEAD_LOCATE_CLASS",
        ),
    ] = None,
    forward: Annotated[
        bool, option("--forward/--no-forward", "Also edit the chosen heads in a true forward pass.", CHOICE)
    ] = False,
    draws: given.Draws = 200,
    n_boot: given.Replicates = 2000,
    seed: given.Seed = 0,
    device: given.Device = "auto",
    batch_size: given.BatchSize = 32,
    tf32: given.FastPasses = False,
    features: given.FeatureFolder = None,
    out: given.OutFolder = None,
    json_path: Annotated[
        str | None, option("--json", "Write JSON; - prints only JSON.", OUTPUT, "FILE", "FAIRHEAD_LOCATE_JSON")
    ] = None,
    images: given.ShowImages = True,
) -> None:
    """Map the heads of a model by their part in a gap, choose, and test them against random heads."""
    check_output(json_path)
    check_numbers(
        {
            "--limit": limit,
            "--heads": heads,
            "--draws": draws,
            "--n-boot": n_boot,
            "--batch-size": batch_size,
            "--seed": seed,
        }
    )
    need_torch()
    check_folder(out)
    if is_pairs(data):
        pair_run = PairRun(model, data, concept, limit, device, features, out, json_path)
        how = PairOptions(heads, rank.value, forward, draws, n_boot, seed, tf32)
        locate_in_pairs(context, pair_run, how)
        return
    from fairhead.locate.forward import SessionPasses, edits_everywhere, with_forward
    from fairhead.locate.plan import LocatePlan, halves_of
    from fairhead.locate.run import locate

    if rank is Ranking.effect and not forward:
        raise InputError("heads can be ranked by their effect only with forward passes: add --forward")
    source = source_of(context)
    ranking: Any = rank.value
    plan = LocatePlan(count=heads, rank=ranking, positive=evidence, draws=draws, n_boot=n_boot, seed=seed)
    with opened(source, features) as (session, told):
        choosing = halves_of(session.evaluation, seed)
        directions = session.task(choosing)
        direction = session.concept(directions, choosing)
        passes = None
        if forward:
            # A model that pools all its tokens has no first token to edit.
            everywhere = None if session.decomposer.pool is None else edits_everywhere(session, choosing)
            passes = SessionPasses(session, directions, everywhere, tf32, told.tell)
        found = locate(
            session.features,
            session.evaluation,
            directions,
            direction,
            pool=session.pool(),
            choosing=choosing,
            plan=plan,
            forward=passes,
        )
        if passes is not None:
            found = with_forward(passes, found, plan)
    finish(session, found, context, json_path, out, images)


def finish(
    session: "Session", found: "Located", context: typer.Context, json_path: str | None, out: Path | None, images: bool
) -> None:
    """Write what was asked for, and show the result unless JSON goes to standard output."""
    from fairhead.locate.texts import AdaptedText
    from fairhead.locate.writeup import STAND_IN, report_of, to_dict

    source = session.source
    provenance = {
        "version": __version__,
        "command": command_line(context),
        "model": source.model,
        "model_sha256": session.model.loaded.fingerprint(),
        "data": source.data,
        "images": len(session.evaluation),
        "seed": source.seed,
        "classes_from": found.task.origin,
        "concept_from": found.concept.origin,
    }
    content = to_dict(found, session.evaluation, provenance)
    notes = (*session.notes, *((STAND_IN,) if isinstance(session.text, AdaptedText) else ()))
    content["notes"] = [*notes, *content["notes"]]
    if out is not None:
        from fairhead.data import Images
        from fairhead.report import write

        write_json(content, str(out / "headmap.json"))
        shown = session.images if images and isinstance(session.images, Images) else None
        write(report_of(found, session.evaluation, provenance, images=shown, notes=notes), out / "report.html")
        judged = session.evaluation.take(~found.choosing)
        judged.records(found.task.logits(session.features.output[~found.choosing])).save(out / "records.csv")
        if found.studies:  # a forward pass where there is one, else the first kind of edit
            main = next((s for s in found.studies if s.way == "forward"), found.studies[0])
            judged.records(main.after).save(out / "records-edited.csv")
    if json_path is not None:
        write_json(content, json_path)
    if json_path != "-":
        from fairhead.cli.locate_table import show_located

        show_located(terminal(), found, notes)
        if out is not None:
            typer.echo(f"\nreport: {out / 'report.html'}")
