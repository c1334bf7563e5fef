"""`fairhead ablate`: edit named heads in a true forward pass, against random heads, and save the edited model."""

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from fairhead.cli.locate import (
    CHOICE,
    MODEL,
    OUTPUT,
    STATISTICS,
    TEXT,
    check_numbers,
    finish,
    forward_passes,
    need_torch,
    opened,
    option,
)
from fairhead.cli.output import check_output
from fairhead.errors import InputError

EPILOG = """
**Examples**

    fairhead ablate --heads L11H1,L10H5 --model clip --data fairface:FairFace.zip --concept gender --task age

    fairhead ablate --from heads/headmap.json --kind project --save edited --model clip --data celeba:CelebA
    --concept gender --task Attractive

Each control set is a pass over the reporting half of the images, from the first edited layer on: choose `--draws` and
`--limit` with that in mind.
"""


class Edit(enum.StrEnum):
    """What is put in a head's place."""

    mean = "mean"
    zero = "zero"
    resample = "resample"
    project = "project"


class Tokens(enum.StrEnum):
    """Where."""

    first = "first"
    every = "all"


_option = option("ABLATE")


def ablate_command(
    context: typer.Context,
    model: Annotated[str, _option("--model", "Folder of an image model; nothing is downloaded.", None, "PATH")],
    data: Annotated[str, _option("--data", "Data set, as name:path.", None, "NAME:PATH")],
    concept: Annotated[str, _option("--concept", "The attribute: gender, age, or one of --prompts.", None, "NAME")],
    task: Annotated[str, _option("--task", "The data set's column to classify.", None, "COLUMN")],
    heads: Annotated[str | None, _option("--heads", "Heads, as L11H1,L10H5.", CHOICE, "HEADS")] = None,
    chosen: Annotated[
        str | None, _option("--from", "Take the heads that `fairhead locate` chose.", CHOICE, "HEADMAP.json")
    ] = None,
    kind: Annotated[
        Edit, _option("--kind", "mean (balanced), zero, resample, or project (LEACE).", CHOICE)
    ] = Edit.mean,
    tokens: Annotated[
        Tokens, _option("--tokens", "Edit the first token alone, or all (as a saved model does).", CHOICE)
    ] = Tokens.first,
    limit: Annotated[int | None, _option("--limit", "Only so many images, evenly over groups.", None, "N")] = None,
    prompts: Annotated[str | None, _option("--prompts", "YAML file of prompts.", TEXT, "FILE")] = None,
    text_adapter: Annotated[str | None, _option("--text-adapter", "As in locate.", TEXT, "FILE")] = None,
    text_encoder: Annotated[str | None, _option("--text-encoder", "As in locate.", TEXT, "PATH")] = None,
    draws: Annotated[int, _option("--draws", "Control sets of heads, or all if fewer.", STATISTICS, "N")] = 200,
    n_boot: Annotated[int, _option("--n-boot", "Bootstrap replicates.", STATISTICS, "N")] = 2000,
    seed: Annotated[int, _option("--seed", "Same seed, same figures.", STATISTICS, "N")] = 0,
    device: Annotated[str, _option("--device", "cpu, cuda, ...; auto takes a GPU.", MODEL)] = "auto",
    batch_size: Annotated[int, _option("--batch-size", "Images at a time.", MODEL, "N")] = 32,
    features: Annotated[str | None, _option("--features", "As in locate.", OUTPUT, "DIR")] = None,
    save: Annotated[
        Path | None, _option("--save", "Bake the edit (of all tokens) into the weights and save.", OUTPUT, "DIR")
    ] = None,
    out: Annotated[Path | None, _option("--out", "Folder for headmap.json and report.html.", OUTPUT, "DIR")] = None,
    json_path: Annotated[str | None, _option("--json", "Write JSON; - prints only JSON.", OUTPUT, "FILE")] = None,
) -> None:
    """Edit heads, run the model again, and hold what changes against random heads."""
    check_output(json_path)
    check_numbers({"--limit": limit, "--draws": draws, "--batch-size": batch_size, "--seed": seed + 1})
    where = _heads(heads, chosen)
    if save is not None and kind is Edit.resample:
        raise InputError("--save cannot hold --kind resample, which needs other images; use mean, zero or project")
    need_torch()
    import numpy as np

    from fairhead.cli.progress import progress
    from fairhead.locate.edits import HeadEdits
    from fairhead.locate.run import LocatePlan, halves_of, locate, study, with_forward, writing
    from fairhead.locate.scores import Head
    from fairhead.locate.session import Source

    source = Source(
        model=model,
        data=data,
        concept=concept,
        task=task,
        prompts=prompts,
        text_adapter=text_adapter,
        text_encoder=text_encoder,
        limit=limit,
        batch_size=batch_size,
        device=device,
        seed=seed,
    )
    plan = LocatePlan(draws=draws, n_boot=n_boot, seed=seed, kinds=(kind.value,))
    with opened(source, features) as session:
        layers, per_layer = session.features.shape
        outside = [pair for pair in where if pair[0] >= layers or pair[1] >= per_layer]
        if outside:
            raise InputError(f"head {outside[0]} does not exist: the model has {layers} layers of {per_layer} heads")
        choosing = halves_of(session.evaluation, seed)
        directions = session.task(choosing)
        direction = session.concept(directions, choosing)
        ranked = [Head(*pair) for pair in where]
        found = locate(
            session.features, session.evaluation, directions, direction, choosing=choosing, heads=ranked, plan=plan
        )
        edits = found.edits
        place: int | None = 0
        with progress() as told:
            if tokens is Tokens.every or save is not None:
                learning = np.flatnonzero(choosing)
                everywhere = HeadEdits.learn_everywhere(
                    session.decomposer,
                    session.batches(learning),
                    session.evaluation.groups[learning],
                    np.zeros_like(session.evaluation.labels[learning]),
                    session.evaluation.poles,
                )
                if tokens is Tokens.every:
                    edits, place = everywhere, None
            rows = np.flatnonzero(~choosing)
            without = forward_passes(session, directions, edits, rows, kind.value, place, ranked, told)
            judged = session.evaluation.take(~choosing)
            forward = study(without, found.ranked, judged, writing(session.features), plan, kind.value, "forward")
        found = with_forward(found, forward)
        finish(session, found, context, json_path, out, images=False)
        if save is not None:
            _save(session, everywhere, where, kind.value, save)


def _heads(text: str | None, path: str | None) -> tuple[tuple[int, int], ...]:
    if (text is None) == (path is None):
        raise InputError("the heads to edit are named by --heads L11H1,L10H5 or by --from headmap.json, one of them")
    if text is not None:
        import re

        found = [re.fullmatch(r"\s*[Ll](\d+)[Hh](\d+)\s*", part) for part in text.split(",")]
        if not all(found):
            raise InputError(f"{text!r} does not name heads; write them as L11H4,L10H5 (layer and head from 0)")
        return tuple((int(match[1]), int(match[2])) for match in found if match)
    import json

    assert path is not None
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        pairs = tuple((int(layer), int(head)) for layer, head in content["selected"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a head map of fairhead locate: {error}") from None
    if not pairs:
        raise InputError(f"no head was chosen in {path}, so there is none to edit")
    return pairs


def _save(session: Any, edits: Any, where: Any, kind: str, folder: Path) -> None:
    """Write the edited model beside its processor; `from_pretrained` reads it like any other."""
    from transformers import AutoImageProcessor

    edits.bake(session.decomposer.stream.base, where, kind)
    session.model.model.save_pretrained(folder)
    AutoImageProcessor.from_pretrained(session.model.folder).save_pretrained(folder)
    typer.echo(f"model: {folder}", err=True)
