"""What `fairhead locate` and `fairhead ablate` ask for alike: their shared options, checks, and the open session."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairhead.errors import FairheadError, InputError
from fairhead.store import made_folder

if TYPE_CHECKING:
    from fairhead.cli.progress import Progress
    from fairhead.locate.session import Session, Source

TEXT, CHOICE, OUTPUT, STATISTICS, MODEL = "Text side", "Choice of heads", "Output", "Statistics", "Model"


def option(
    flag: str, help: str, panel: str | None = None, metavar: str | None = None, envvar: str | None = None
) -> Any:
    """An option, also an environment variable FAIRHEAD_<COMMAND>_<NAME>; `envvar` names it where the flag differs."""
    return typer.Option(flag, help=help, rich_help_panel=panel, metavar=metavar, envvar=envvar, show_envvar=False)


ModelPath = Annotated[str, option("--model", "Folder of a model; nothing is downloaded.", None, "PATH")]
Data = Annotated[
    str,
    option("--data", "name:path; fairface, celeba, utkface, hatexplain, or pairs: crows, stereoset.", None, "DATA"),
]
Concept = Annotated[
    str | None,
    option("--concept", "The attribute: gender, age, that of --prompts, a community, ...", None, "NAME"),
]
TaskColumn = Annotated[str | None, option("--task", "The data set's column to classify.", None, "COLUMN")]
Limit = Annotated[int | None, option("--limit", "Only so many rows (evenly over groups) or pairs.", None, "N")]
PromptPath = Annotated[str | None, option("--prompts", "YAML file of prompts.", TEXT, "FILE")]
TextAdapter = Annotated[
    str | None, option("--text-adapter", "Linear stand-in for a text tower (.npz with B, x_mean).", TEXT, "FILE")
]
TextEncoder = Annotated[str | None, option("--text-encoder", "Folder of its encoder.", TEXT, "PATH")]
Calibrate = Annotated[
    bool, option("--calibrate/--no-calibrate", "Predict each zero-shot class as often as it occurs.", TEXT)
]
Draws = Annotated[int, option("--draws", "Control sets of heads, or all if fewer.", STATISTICS, "N")]
Replicates = Annotated[int, option("--n-boot", "Bootstrap replicates.", STATISTICS, "N")]
Seed = Annotated[int, option("--seed", "Same seed, same figures.", STATISTICS, "N")]
Device = Annotated[str, option("--device", "cpu, cuda, ...; auto takes a GPU.", MODEL)]
BatchSize = Annotated[int, option("--batch-size", "Images at a time.", MODEL, "N")]
FastPasses = Annotated[
    bool, option("--tf32/--no-tf32", "On a GPU: forward passes in TF32, several times as fast.", MODEL)
]
FeatureFolder = Annotated[
    str | None, option("--features", "Folder that keeps the heads' terms for later runs.", OUTPUT, "DIR")
]
OutFolder = Annotated[
    Path | None, option("--out", "Folder for headmap.json, report.html and records.csv.", OUTPUT, "DIR")
]
ShowImages = Annotated[bool, option("--images/--no-images", "Show images in the report.", OUTPUT)]


def check_numbers(values: "dict[str, int | None]") -> None:
    """Refuse counts below 1, seeds below 0, and too few replicates for an interval."""
    for flag, value in values.items():
        least = {"--seed": 0, "--pictures": 0, "--n-boot": 100}.get(flag, 1)
        if value is not None and value < least:
            raise InputError(f"{flag} is {value}; at least {least} is expected")


def needed(value: str | None, flag: str, data: str) -> str:
    """An option that this data set cannot do without.

    Example:
        >>> needed(None, "--task", "celeba:CelebA")
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: --task is missing: celeba needs it; pairs of texts (crows, stereoset) do not
    """
    if value is None:
        name = data.partition(":")[0]
        raise InputError(f"{flag} is missing: {name} needs it; pairs of texts (crows, stereoset) do not")
    return value


def source_of(context: typer.Context) -> "Source":
    """What a command reads, from its options: they have the names of the source's fields."""
    from dataclasses import fields

    from fairhead.locate.session import Source

    asked = {f.name: context.params[f.name] for f in fields(Source) if f.name in context.params}
    for name in ("concept", "task"):
        asked[name] = needed(asked[name], f"--{name}", asked["data"])
    if asked.get("concept_from") == "auto":
        asked["concept_from"] = None
    return Source(**asked)


def check_heads(heads: Sequence[tuple[int, int]], shape: tuple[int, int]) -> None:
    """Refuse heads that a model does not have.

    Example:
        >>> check_heads([(1, 2), (7, 0)], (2, 4))
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: there is no head L7H0: the model has 2 layers of 4 heads, counted from 0
    """
    for layer, head in heads:
        if layer >= shape[0] or head >= shape[1]:
            raise InputError(
                f"there is no head L{layer}H{head}: the model has {shape[0]} layers of {shape[1]} heads, counted from 0"
            )


def check_folder(path: Path | None) -> None:
    """Find out before the work whether the folder for the results can be made."""
    if path is None:
        return
    made_folder(path)


def need_torch() -> None:
    """Say what is missing before anything is read."""
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise FairheadError(f'this needs {", ".join(missing)}, not installed here: pip install "fairhead[torch]"')


@contextmanager
def opened(source: "Source", features: str | None) -> "Iterator[tuple[Session, Progress]]":
    """Open a session with progress on stderr and transformers quiet."""
    from transformers.utils import logging

    from fairhead.cli.progress import progress
    from fairhead.locate.session import open_session

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with progress() as told:
        session = open_session(source, features, lambda done, total: told.tell("rows", done, total))
        told.drop("rows")
        yield session, told


def write_model(folder: Path, model: Any, reader: Any) -> None:
    """Save an edited model with its tokenizer or image processor."""
    from fairhead.models import save

    save(model, folder, reader.save_pretrained)
    typer.echo(f"model: {folder}", err=True)
