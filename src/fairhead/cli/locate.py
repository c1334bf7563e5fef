"""`fairhead locate`, `ablate` and `view`: which heads carry a gap, and what happens when heads are edited.

`view` shows the heads of a run of `fairhead locate` live in a browser on this machine.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import typer

from fairhead.cli.common import DataColumns, check_output, command_line, need, progress, write_json
from fairhead.cli.options import options, single_command
from fairhead.errors import InputError
from fairhead.locate.locate_settings import LocatePlan, Source
from fairhead.settings import Option, Range
from fairhead.store import locked, refuse_others

EPILOG = """
**Examples**

    fairhead locate --model hub:openai/clip-vit-base-patch16 --data fairface:FairFace.zip --group gender
      --label age --out heads

    fairhead locate --model hub:facebook/dinov2-small --data celeba:CelebA --group gender
      --label Attractive --limit 2000

    fairhead locate --model run/model --data images:labels.csv --label smiling --group sex --out heads

    fairhead locate --model hub:HuggingFaceTB/SmolLM2-135M --data crows:crows_pairs_anonymized.csv
      --forward --rank effect --out heads

    fairhead locate --model run/plain/model --against run/dam/model --data images:labels.csv --group sex
      --label smiling

    fairhead locate --model toxicity-bert --data hatexplain:HateXplain --group Women --label toxic --forward

Classes come from the model's own classifier, from prompts if there is a text encoder (the model's own, or
`--text-adapter` with `--text-encoder`), or otherwise from a probe on labelled images. With `--features` the model runs
over the images only once; later questions about them take seconds.

In a language model, heads are ranked by their contribution to the log-odds of stereotype against anti-stereotype
(`crows`, `stereoset`; `--concept gender` uses only pairs of that type).

`--rank effect` ranks heads by how much the gap shrinks when each head alone is edited in a full forward pass. On a GPU
this takes one pass per head; on a CPU all heads are estimated from gradients and only the best are run (`--exact`).
`--rank gap` ranks heads by their direct contribution: it needs no pass, but misses effects through later layers.
"""
ABLATE_EPILOG = """
**Examples**

    fairhead ablate --heads L11H1,L10H5 --model hub:openai/clip-vit-base-patch16
      --data fairface:FairFace.zip --group gender --label age

    fairhead ablate --from heads/headmap.json --kind project --save edited
      --model hub:openai/clip-vit-base-patch16 --data celeba:CelebA --group gender --label Attractive

    fairhead ablate --from heads/headmap.json --kind zero --save edited
      --model hub:HuggingFaceTB/SmolLM2-135M --data crows:pairs.csv

Each control set takes one pass over the reporting half of the images, from the first edited layer on: choose `--draws`
and `--limit` accordingly.
"""
# Settings of images and labelled texts alone.
_NOT_FOR_PAIRS = (
    *("task", "prompts", "text_adapter", "text_encoder", "calibrate", "texts", "concept_from", "orthogonal"),
    *("evidence", "tokens", "batch_size", "terms"),
)
VIEW_EPILOG = """
**Example**

    fairhead locate --model run/model --data images:labels.csv --label smiling --group sex --out heads

    fairhead view heads

Click heads on the map: the gap, the accuracy and the random controls update immediately, computed from the stored
contributions of the heads. *Prove* runs the edited model in a full forward pass; *Save* writes it as a folder that
transformers can load.

Only this machine can open the page (127.0.0.1), and its address contains a random token. Run `view` in the folder in
which you ran `locate`. The model runs over the rows once, unless you ran `locate` with `--features`. Stop with Ctrl-C.
"""


@dataclass(frozen=True)
class Output:
    """What is written.

    Attributes:
        features: folder that stores the heads' contributions for later runs, of any model and data.
        out: folder for headmap.json, report.html and records.csv.
        json: write JSON; - prints only JSON.
        images: show images in the report.
    """

    features: Annotated[str | None, Option(metavar="DIR")] = None
    out: Annotated[Path | None, Option(metavar="DIR")] = None
    json: Annotated[str | None, Option(metavar="FILE")] = None
    images: bool = True
    panel: ClassVar[str] = "Output"


@dataclass(frozen=True)
class Edit:
    """Which heads are edited, and how.

    Attributes:
        heads: heads to edit, such as L11H1,L10H5 (layer and head, counted from 0).
        chosen: edit the heads that `fairhead locate` selected.
        kind: what replaces a head's output: its mean (balanced over groups), zero, the output for another row
            (resample), or a projection of it: LEACE (project) erases the group, splince also keeps the covariance with
            the label. gain multiplies each head by a factor that is learned with balanced clusters or, with --target,
            to reduce the gap, from the groups of the selection half; without --heads it also selects the heads. The
            gains that a head map has are taken as they are, unless there is a --target.
        strength: strength of the edit, from 0 (none) to 1 (full).
        save: write the edit into the weights and save the model; the report describes the saved model.
    """

    heads: Annotated[str | None, Option(metavar="HEADS")] = None
    chosen: Annotated[str | None, Option("--from", "HEADMAP.json")] = None
    kind: Literal["mean", "zero", "resample", "project", "splince", "gain"] = "mean"
    strength: Annotated[float, Range(0, 1), Option(metavar="SHARE")] = 1.0
    save: Annotated[Path | None, Option(metavar="DIR", panel="Output")] = None
    panel: ClassVar[str] = "Choice of heads"


@options("locate")
def locate_command(
    context: typer.Context, source: Source, columns: DataColumns, plan: LocatePlan, output: Output
) -> None:
    """Map each head's contribution to a gap, select heads, and test them against random heads."""
    _answered(context, source, columns, plan, output)


@options("ablate", without={"plan": ("count", "rank", "exact", "forward")})
def ablate_command(
    context: typer.Context, source: Source, columns: DataColumns, edit: Edit, plan: LocatePlan, output: Output
) -> None:
    """Edit heads, run the model again, and compare the change with that of random heads."""
    need()
    named = _named(edit, learn=plan.target is not None)
    if edit.save is not None and source.tokens == "first":
        raise InputError("--save changes the weights, which affects every token: leave out --tokens first")
    if plan.target is not None and edit.kind != "gain":
        raise InputError(f"--target is for --kind gain, which is learned for it; --kind is {edit.kind}: leave it out")
    if plan.target is not None and edit.strength != 1:
        raise InputError(f"--target finds how strong the gains must be; --strength is {edit.strength:g}: leave it out")
    if edit.kind == "resample":
        if edit.save is not None:
            raise InputError("--save cannot store --kind resample, which needs other rows; use mean, zero or project")
        if source.batch_size < 3:  # an odd number of rows in batches of 2 leaves one by itself
            raise InputError(
                f"--kind resample needs other rows in every batch; --batch-size is {source.batch_size}, expected at "
                "least 3"
            )
    kind = edit.kind if edit.strength == 1 else f"{edit.kind}@{edit.strength:g}"
    plan = replace(plan, kinds=(kind,), forward=True)
    _answered(context, source, columns, plan, output, named, edit.save)


def _answered(
    context: typer.Context,  # of the command
    source: Source,  # what is asked of which model and data
    columns: DataColumns,  # of the data
    plan: LocatePlan,  # how heads are chosen and tested
    output: Output,  # what to write
    named: Mapping[str, Any] | None = None,  # the heads to be tested, from `_named`; None chooses them
    save: Path | None = None,  # folder for the edited model
) -> None:
    """Ask the question that a command's options name; write and show what is found."""
    check_output(output.json)
    need()
    for folder in (output.out, save):
        if folder is not None:  # refuse a folder that cannot be written before the work
            refuse_others(folder, "headmap.json")
            context.with_resource(locked(folder))
    from fairhead.locate.engine import answer
    from fairhead.locate.question import check_target

    if save is not None:
        check_target(save, source.model)
    source = replace(with_columns(source, columns, output.images), seed=plan.seed)
    with progress() as told:
        found = answer(
            source,
            plan,
            **(named or {}),
            features=output.features,
            progress=told.tell,
            provenance={"command": command_line(context)},
        )
        for stage in ("rows", "pairs"):
            told.drop(stage)
        if save is not None:  # first: the report is of the saved model
            found = found.saved(save)
    if output.out is not None:
        found.write(output.out, output.images)
    if output.json is not None:
        write_json(found.to_dict(), output.json)
    if output.json != "-":
        found.show()
        if output.out is not None:
            typer.echo(f"\nreport: {output.out / 'report.html'}")
    if save is not None:
        typer.echo(f"model: {save}{'' if found.smaller else ' (no significantly smaller gap)'}", err=True)


def with_columns(source: Source, columns: DataColumns, images: bool) -> Source:
    """The source with what --group, --label and the other columns of its data say."""
    if source.kind != "pairs":
        if len(columns.group) > 1:
            raise InputError(
                f"--group is {' and '.join(columns.group)}; locate compares the groups of one column: run it "
                "once for each"
            )
        concept = _one(source.concept, "--concept", columns.first_group, "--group")
        source = replace(source, concept=concept, task=_one(source.task, "--task", columns.label, "--label"))
        columns = replace(columns, group=(), label=None)
        if source.start != "default":
            raise InputError("--start applies only to pairs of texts (crows, stereoset): leave it out")
    else:
        given = [name for name in _NOT_FOR_PAIRS if getattr(source, name) != getattr(Source, name)]
        for name in [*given, *([] if images else ["images"])]:
            flag = "--class" if name == "evidence" else f"--{name.replace('_', '-')}"
            raise InputError(f"{flag} does not apply to pairs of texts (crows, stereoset): leave it out")
    return replace(source, options=columns.options(source.data))


def _one(value: str | None, flag: str, other: str | None, other_flag: str) -> str | None:
    """What either of two options names."""
    if None not in (value, other) and value != other:
        raise InputError(f"{other_flag} {other} and {flag} {value} name two columns; give one of the options")
    return other if value is None else value


def _named(edit: Edit, learn: bool) -> dict[str, Any]:
    """The heads to edit, as `answer` takes them: with the gains of a head map, unless gains are to be learned."""
    from fairhead.heads.sites import gains_of, heads_named, read_head_map

    if edit.kind == "gain" and edit.heads is None and edit.chosen is None:
        return {}
    if (edit.heads is None) == (edit.chosen is None):
        raise InputError("name the heads to edit with either --heads L11H1,L10H5 or --from headmap.json")
    if edit.heads is not None:
        return {"heads": heads_named(edit.heads)}
    found = read_head_map(str(edit.chosen))
    gains = gains_of(found, str(edit.chosen)) if edit.kind == "gain" and not learn else {}
    if gains:
        return {"heads": (*gains,), "gains": (*gains.values(),), "chosen_on": found.get("choosing_sha256")}
    if not found["selected"]:
        raise InputError(f"{edit.chosen} has no selected heads to edit: name heads with --heads L11H1,L10H5")
    return {"heads": found["selected"], "chosen_on": found.get("choosing_sha256")}


def view_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder that fairhead locate wrote with --out.")],
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Port of the page; 0 uses a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Edit heads on a map in the browser, see what changes, confirm it in a forward pass, and save the model."""
    need()
    asked = _asked(run)
    from fairhead.locate.live import Live, serve
    from fairhead.locate.session import open_question
    from fairhead.report.model_card import name_of

    with progress() as told:
        question = open_question(asked.source, replace(asked.plan, forward=True), asked.features, told.tell)
    title = f"Heads of {name_of(str(asked.source.called))}, live"
    server = serve(Live(question, asked.plan, run, asked.chosen), title, port)
    typer.echo(f"{server.address}\nCtrl-C ends it.")
    if browser:
        typer.launch(server.address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        typer.echo("ended", err=True)
    finally:
        server.server_close()


class _Asked(NamedTuple):
    """What a run of locate asked, and the heads that it chose."""

    source: Source
    plan: LocatePlan
    features: str | None
    chosen: tuple[tuple[int, int], ...]


def _asked(run: Path) -> _Asked:
    from fairhead.heads.sites import read_head_map

    path = run / "headmap.json"
    try:
        content = read_head_map(path)
        arguments = shlex.split(content["provenance"]["command"])
    except (InputError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f" ({error})" if isinstance(error, InputError) else ": its head map does not contain its command"
        raise InputError(f"{run} is not a run of fairhead locate{why}; give its --out folder") from None
    if arguments[:2] != ["fairhead", "locate"]:
        raise InputError(
            f"{path} was made by {shlex.join(arguments[:2])!r}; view needs a run of fairhead locate with all its "
            "settings on the command line"
        )

    @options("locate")
    def take(source: Source, columns: DataColumns, plan: LocatePlan, output: Output) -> _Asked:
        source = replace(with_columns(source, columns, output.images), seed=plan.seed)
        return _Asked(source, plan, output.features, content["selected"])

    found: _Asked = single_command("locate", "", take)(arguments[2:], standalone_mode=False)
    return found
