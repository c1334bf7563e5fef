"""What `fairhead locate` and `fairhead ablate` have in common: options, checks, and the way from them to an answer."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairhead.cli.data_options import DataColumns
from fairhead.cli.output import check_output, command_line, need, write_json
from fairhead.cli.progress import progress
from fairhead.errors import InputError
from fairhead.store import made_folder

if TYPE_CHECKING:
    from fairhead.locate.locate_settings import Source

TEXT, CHOICE, OUTPUT, STATISTICS, MODEL = "Text side", "Choice of heads", "Output", "Statistics", "Model"
# Options of images and labelled texts alone.
_NOT_FOR_PAIRS = {
    *("task", "prompts", "text_adapter", "text_encoder", "calibrate", "texts", "concept_from", "orthogonal"),
    *("evidence", "tokens", "batch_size", "images"),
}


def option(
    flag: str, help: str, panel: str | None = None, metavar: str | None = None, envvar: str | None = None
) -> Any:
    """An option, also an environment variable FAIRHEAD_<COMMAND>_<NAME>; `envvar` names it where the flag differs."""
    return typer.Option(flag, help=help, rich_help_panel=panel, metavar=metavar, envvar=envvar, show_envvar=False)


ModelPath = Annotated[str, option("--model", "Folder of a model, or a name on the hub that is cached.", None, "PATH")]
Data = Annotated[
    str,
    option(
        "--data",
        "name:path: fairface, celeba, utkface, hatexplain, crows, stereoset; your own images, texts, pairs, triplets.",
        None,
        "DATA",
    ),
]
Concept = Annotated[
    str | None,
    option("--concept", "The attribute: gender, age, that of --prompts, a community, or --group.", None, "NAME"),
]
TaskColumn = Annotated[str | None, option("--task", "The column to classify, or --label.", None, "COLUMN")]
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


def answered(
    context: typer.Context,
    columns: DataColumns,
    options: Mapping[str, Any],
    heads: Sequence[tuple[int, int]] | None = None,
    chosen_on: str | None = None,
    save: Path | None = None,
) -> None:
    """Ask the question that a command's options name; write and show what is found.

    Args:
        context: of the command; its parameters have the names of the fields of `Source`.
        columns: of the data.
        options: of the plan, beside those that both commands have.
        heads: to be tested; None chooses them.
        chosen_on: a hash of the rows that these were chosen on, where it is known.
        save: folder for the edited model.
    """
    given = context.params
    check_output(given["json_path"])
    need()
    for folder in (given["out"], save):
        if folder is not None:  # a mistake there should not wait for the work
            made_folder(folder)
    from fairhead.locate.answer import answer
    from fairhead.locate.locate_settings import LocatePlan

    source = _source(context, columns)
    plan = LocatePlan(**options, draws=given["draws"], n_boot=given["n_boot"], seed=given["seed"])
    with progress() as told:
        found = answer(
            source,
            plan,
            heads=heads,
            chosen_on=chosen_on,
            features=given["features"],
            progress=told.tell,
            provenance={"command": command_line(context)},
        )
        for stage in ("rows", "pairs"):
            told.drop(stage)
    if given["out"] is not None:
        found.write(given["out"], given["images"])
    if given["json_path"] is not None:
        write_json(found.to_dict(), given["json_path"])
    if given["json_path"] != "-":
        found.show()
        if given["out"] is not None:
            typer.echo(f"\nreport: {given['out'] / 'report.html'}")
    if save is not None:
        found.save(save)
        typer.echo(f"model: {save}", err=True)


def _source(context: typer.Context, columns: DataColumns) -> "Source":
    """What a command reads, from its options."""
    from fairhead.locate.locate_settings import Source

    asked = {f.name: context.params[f.name] for f in fields(Source) if f.name in context.params}
    if asked.get("concept_from") == "auto":
        asked["concept_from"] = None
    source = Source(**asked)
    if source.kind != "pairs":
        concept = _one(source.concept, "--concept", columns.first_group, "--group")
        source = replace(source, concept=concept, task=_one(source.task, "--task", columns.label, "--label"))
        columns = replace(columns, group=(), label=None)
    source = replace(source, options=columns.options(source.data))
    if source.kind == "pairs":
        for parameter in context.command.params:
            how = context.get_parameter_source(parameter.name or "")
            if parameter.name in _NOT_FOR_PAIRS and how is not None and how.name == "COMMANDLINE":
                raise InputError(
                    f"{parameter.opts[0]} has no meaning for pairs of texts (crows, stereoset): leave it out"
                )
    return source


def _one(value: str | None, flag: str, other: str | None, other_flag: str) -> str | None:
    """What either of two options names."""
    if None not in (value, other) and value != other:
        raise InputError(f"{other_flag} {other} and {flag} {value} name two columns; give one of the options")
    return other if value is None else value
