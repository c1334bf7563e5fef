"""`fairhead ablate`: edit named heads in a true forward pass, against random heads, and save the edited model."""

import enum
import json
import re
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from fairhead.cli import locate_options as given
from fairhead.cli.data_options import DataColumns
from fairhead.cli.locate_options import CHOICE, OUTPUT, answered, check_numbers, option
from fairhead.cli.options import options
from fairhead.errors import InputError

EPILOG = """
**Examples**

    fairhead ablate --heads L11H1,L10H5 --model clip --data fairface:FairFace.zip --concept gender --task age

    fairhead ablate --from heads/headmap.json --kind project --save edited --model clip --data celeba:CelebA
    --concept gender --task Attractive

    fairhead ablate --from heads/headmap.json --kind zero --save edited --model SmolLM2-135M --data crows:pairs.csv

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


@options("ablate")
def ablate_command(
    context: typer.Context,
    model: given.ModelPath,
    data: given.Data,
    columns: DataColumns,
    concept: given.Concept = None,
    task: given.TaskColumn = None,
    heads: Annotated[str | None, option("--heads", "Heads, as L11H1,L10H5.", CHOICE, "HEADS")] = None,
    chosen: Annotated[
        str | None,
        option(
            "--from", "Take the heads that `fairhead locate` chose.", CHOICE, "HEADMAP.json", "FAIRHEAD_ABLATE_FROM"
        ),
    ] = None,
    kind: Annotated[Edit, option("--kind", "mean (balanced), zero, resample, or project (LEACE).", CHOICE)] = Edit.mean,
    tokens: Annotated[
        Tokens, option("--tokens", "Edit the first token alone, or all (as a saved model does).", CHOICE)
    ] = Tokens.first,
    limit: given.Limit = None,
    prompts: given.PromptPath = None,
    text_adapter: given.TextAdapter = None,
    text_encoder: given.TextEncoder = None,
    calibrate: given.Calibrate = False,
    draws: given.Draws = 200,
    n_boot: given.Replicates = 2000,
    seed: given.Seed = 0,
    device: given.Device = "auto",
    batch_size: given.BatchSize = 32,
    tf32: given.FastPasses = False,
    features: given.FeatureFolder = None,
    save: Annotated[
        Path | None, option("--save", "Bake the edit (of all tokens) into the weights and save.", OUTPUT, "DIR")
    ] = None,
    out: given.OutFolder = None,
    json_path: Annotated[
        str | None, option("--json", "Write JSON; - prints only JSON.", OUTPUT, "FILE", "FAIRHEAD_ABLATE_JSON")
    ] = None,
    images: given.ShowImages = True,
) -> None:
    """Edit heads, run the model again, and hold what changes against random heads."""
    check_numbers({"--limit": limit, "--draws": draws, "--n-boot": n_boot, "--batch-size": batch_size, "--seed": seed})
    named = _named(heads, chosen)
    if save is not None and kind is Edit.resample:
        raise InputError("--save cannot hold --kind resample, which needs other images; use mean, zero or project")
    if kind is Edit.resample and batch_size < 3:  # an odd number of rows in batches of 2 leaves one by itself
        raise InputError(
            f"--kind resample needs other rows in every batch; --batch-size is {batch_size}, at least 3 is expected"
        )
    answered(context, columns, {"kinds": (kind.value,), "forward": True}, named.heads, named.chosen_on, save)


class _Named(NamedTuple):
    """Heads to edit, and a hash of the rows that they were chosen on where that is known."""

    heads: tuple[tuple[int, int], ...]
    chosen_on: str | None


def _named(text: str | None, path: str | None) -> _Named:
    if (text is None) == (path is None):
        raise InputError("the heads to edit are named by --heads L11H1,L10H5 or by --from headmap.json, one of them")
    if text is not None:
        found = [re.fullmatch(r"\s*[Ll](\d+)[Hh](\d+)\s*", part) for part in text.split(",")]
        if not all(found):
            raise InputError(f"{text!r} does not name heads; write them as L11H4,L10H5 (layer and head from 0)")
        # A head that is named twice is edited once.
        return _Named(tuple(dict.fromkeys((int(match[1]), int(match[2])) for match in found if match)), None)
    assert path is not None
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} is not a head map of fairhead locate: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path} is not a head map of fairhead locate, nor other JSON: {error}") from None
    selected = content.get("selected") if isinstance(content, dict) else None
    if not isinstance(selected, list) or not all(map(_is_head, selected)):
        raise InputError(f"{path} is not a head map of fairhead locate: it has no list “selected” of [layer, head]")
    if not selected:
        raise InputError(f"no head was chosen in {path}, so there is none to edit")
    return _Named(tuple((layer, head) for layer, head in selected), content.get("choosing_sha256"))


def _is_head(found: object) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(type(number) is int and number >= 0 for number in found)
