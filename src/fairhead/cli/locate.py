"""`fairhead locate`: which heads of an image model carry a gap, how sure that is, and what happens without them."""

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairhead import __version__
from fairhead.cli.output import check_output, command_line, write_json
from fairhead.errors import FairheadError, InputError

if TYPE_CHECKING:
    from fairhead.locate.passes import ForwardPasses
    from fairhead.locate.run import Located
    from fairhead.locate.session import Session, Source

EPILOG = """
**Examples**

    fairhead locate --model clip-vit-base-patch16 --data fairface:FairFace.zip --concept gender --task age --out heads

    fairhead locate --model dinov2-small --data celeba:CelebA --concept gender --task Attractive --limit 2000

Classes come from the model's own classifier, from prompts where it has a text side (its own tower, or
`--text-adapter` with `--text-encoder`), or else from a probe on labelled images. With `--features` the model runs over
the images once; later questions about them take seconds.
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


def option(command: str) -> Callable[..., Any]:
    """A maker of options of one command; every option is also an environment variable."""

    def make(flag: str, help: str, panel: str | None = None, metavar: str | None = None) -> Any:
        variable = f"FAIRHEAD_{command}_{flag.partition('/')[0].strip('-').replace('-', '_').upper()}"
        return typer.Option(flag, help=help, rich_help_panel=panel, metavar=metavar, envvar=variable, show_envvar=False)

    return make


_option = option("LOCATE")
TEXT, CHOICE, OUTPUT, STATISTICS, MODEL = "Text side", "Choice of heads", "Output", "Statistics", "Model"


def locate_command(
    context: typer.Context,
    model: Annotated[str, _option("--model", "Folder of an image model; nothing is downloaded.", None, "PATH")],
    data: Annotated[str, _option("--data", "Data set, as name:path (fairface, celeba, utkface).", None, "NAME:PATH")],
    concept: Annotated[str, _option("--concept", "The attribute: gender, age, or one of --prompts.", None, "NAME")],
    task: Annotated[str, _option("--task", "The data set's column to classify.", None, "COLUMN")],
    limit: Annotated[int | None, _option("--limit", "Only so many images, evenly over groups.", None, "N")] = None,
    prompts: Annotated[str | None, _option("--prompts", "YAML file of prompts.", TEXT, "FILE")] = None,
    text_adapter: Annotated[
        str | None, _option("--text-adapter", "Linear stand-in for a text tower (.npz with B, x_mean).", TEXT, "FILE")
    ] = None,
    text_encoder: Annotated[str | None, _option("--text-encoder", "Folder of its encoder.", TEXT, "PATH")] = None,
    texts: Annotated[
        str | None, _option("--texts", "Texts for TextSpan (.npz with texts, vectors).", TEXT, "FILE")
    ] = None,
    concept_from: Annotated[
        From, _option("--concept-from", "auto: prompts where there is a text side, else leace.", TEXT)
    ] = From.auto,
    orthogonal: Annotated[
        bool, _option("--orthogonal/--no-orthogonal", "Take the class directions out of the concept.", TEXT)
    ] = False,
    heads: Annotated[int, _option("--heads", "Heads to choose at most.", CHOICE, "N")] = 4,
    rank: Annotated[
        Ranking,
        _option("--rank", "gap: part in the evidence's gap; concept: separation; bias: that times coupling.", CHOICE),
    ] = Ranking.gap,
    evidence: Annotated[
        str | None, _option("--class", "Class whose evidence is looked at; by default that of the largest gap.", CHOICE)
    ] = None,
    forward: Annotated[
        bool, _option("--forward/--no-forward", "Also edit the chosen heads in a true forward pass.", CHOICE)
    ] = False,
    draws: Annotated[int, _option("--draws", "Control sets of heads, or all if fewer.", STATISTICS, "N")] = 200,
    n_boot: Annotated[int, _option("--n-boot", "Bootstrap replicates.", STATISTICS, "N")] = 2000,
    seed: Annotated[int, _option("--seed", "Same seed, same figures.", STATISTICS, "N")] = 0,
    device: Annotated[str, _option("--device", "cpu, cuda, ...; auto takes a GPU.", MODEL)] = "auto",
    batch_size: Annotated[int, _option("--batch-size", "Images at a time.", MODEL, "N")] = 32,
    features: Annotated[
        str | None, _option("--features", "Folder that keeps the heads' terms for later runs.", OUTPUT, "DIR")
    ] = None,
    out: Annotated[
        Path | None, _option("--out", "Folder for headmap.json, report.html and records.", OUTPUT, "DIR")
    ] = None,
    json_path: Annotated[str | None, _option("--json", "Write JSON; - prints only JSON.", OUTPUT, "FILE")] = None,
    images: Annotated[bool, _option("--images/--no-images", "Show images in the report.", OUTPUT)] = True,
) -> None:
    """Map the heads of an image model by their part in a gap, choose, and test them against random heads."""
    check_output(json_path)
    check_numbers(
        {"--limit": limit, "--heads": heads, "--draws": draws, "--batch-size": batch_size, "--seed": seed + 1}
    )
    need_torch()
    from fairhead.locate.run import LocatePlan, halves_of, locate, study, with_forward, writing
    from fairhead.locate.session import Source

    source = Source(
        model=model,
        data=data,
        concept=concept,
        task=task,
        prompts=prompts,
        text_adapter=text_adapter,
        text_encoder=text_encoder,
        texts=texts,
        concept_from=None if concept_from is From.auto else concept_from.value,
        orthogonal=orthogonal,
        limit=limit,
        batch_size=batch_size,
        device=device,
        seed=seed,
    )
    plan = LocatePlan(count=heads, rank=rank.value, positive=evidence, draws=draws, n_boot=n_boot, seed=seed)
    with opened(source, features) as session:
        choosing = halves_of(session.evaluation, seed)
        directions = session.task(choosing)
        direction = session.concept(directions, choosing)
        found = locate(
            session.features,
            session.evaluation,
            directions,
            direction,
            pool=session.pool(),
            choosing=choosing,
            plan=plan,
        )
        if forward and found.ranked:
            import numpy as np

            from fairhead.cli.progress import progress

            with progress() as told:
                rows = np.flatnonzero(~choosing)
                without = forward_passes(session, directions, found.edits, rows, "mean", 0, found.ranked, told)
                judged = session.evaluation.take(~choosing)
                norms = writing(session.features)
                found = with_forward(found, study(without, found.ranked, judged, norms, plan, "mean", "forward"))
        finish(session, found, context, json_path, out, images)


@contextmanager
def opened(source: "Source", features: str | None) -> "Iterator[Session]":
    """Open a session with progress on stderr and transformers quiet."""
    from transformers.utils import logging

    from fairhead.cli.progress import progress
    from fairhead.locate.session import open_session

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with progress() as told:
        session = open_session(source, features, lambda done, total: told.tell("images", done, total))
    yield session


def forward_passes(
    session: "Session", task: Any, edits: Any, rows: Any, kind: str, tokens: int | None, ranked: Any, told: Any
) -> "ForwardPasses":
    """True forward passes over some rows, with progress; layer-matched controls start where the chosen heads do."""
    from fairhead.locate.passes import ForwardPasses

    return ForwardPasses(
        session.decomposer,
        lambda: session.batches(rows),
        task,
        edits,
        kind,
        tokens,
        first_layer=min(head.layer for head in ranked),
        progress=lambda done: told.say(f"forward passes: {done}") if done % 25 == 0 else None,
    )


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
        "model_sha256": session.model.fingerprint(),
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
        from fairhead.report import write

        out.mkdir(parents=True, exist_ok=True)
        write_json(content, str(out / "headmap.json"))
        shown = session.images if images else None
        write(report_of(found, session.evaluation, provenance, images=shown, notes=notes), out / "report.html")
        judged = session.evaluation.take(~found.choosing)
        judged.records(found.task.logits(session.features.output[~found.choosing])).save(out / "records.csv")
    if json_path is not None:
        write_json(content, json_path)
    if json_path != "-":
        from rich.console import Console

        from fairhead.cli.locate_table import show_located

        show_located(Console(), found, notes)
        if out is not None:
            typer.echo(f"\nreport: {out / 'report.html'}")


def need_torch() -> None:
    """Say what is missing before anything is read."""
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise FairheadError(f'this needs {", ".join(missing)}, not installed here: pip install "fairhead[torch]"')


def check_numbers(values: "dict[str, int | None]") -> None:
    """Refuse counts below 1."""
    for flag, value in values.items():
        if value is not None and value < 1:
            raise InputError(f"{flag} is too small; at least {0 if flag == '--seed' else 1} is expected")
