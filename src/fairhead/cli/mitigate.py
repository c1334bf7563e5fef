"""`fairhead mitigate`: train one model with one method, and say what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import typer
from typer.core import TyperGroup

from fairhead.cli.data_options import DataColumns
from fairhead.cli.options import options
from fairhead.cli.output import command_line, need
from fairhead.errors import InputError
from fairhead.mitigate.registry import listed, method_named, names
from fairhead.report.console import harmless
from fairhead.settings import Count, Option
from fairhead.train.plan import TrainingPlan

# What an option of a method would be called that wanted a group.
_GROUP_WORDS = ("group", "groups", "attribute", "attributes", "sensitive", "group_by", "protected")

# The command that classifiers share, as typer knows it: the method is its argument.
_SHARED = "METHOD"

EPILOG = f"""
**For language models**, each with options of its own (`fairhead mitigate klaad --help`)

{listed("language")}

**Methods** (none of them sees a group)

{listed("classifier", uses_groups=False)}

**References** that train with the groups, for comparison; they need `--reference-group`

{listed("classifier", uses_groups=True)}

**Examples**

    fairhead mitigate dam --data utkface:UTKFace.zip --model vit-8x8 --epochs 30 --batch-size 256 --lr 1e-4 --out dam

    fairhead mitigate dam --data images:labels.csv --label smiling --group sex --model vit-8x8 --out own

    fairhead mitigate jtt --data celeba:CelebA --label Attractive --model path:dinov2-small
      --train last_encoder --option upweight=20 --against erm --out jtt

    fairhead mitigate group_dro --reference-group white --data utkface:UTKFace.zip --model vit-8x8 --out reference

**What is written**: `model/` (safetensors; `fairhead.load("model")` gives it back), `records.csv`, `audit.json`,
`report.html` with its JSON twin, and `run.json` (settings, history, time, memory, energy).
"""


@dataclass(frozen=True)
class Rows:
    """What is trained and tested on.

    Attributes:
        data: as reader:path: utkface:UTKFace.zip, images:labels.csv, texts:posts.csv.
        parts: the reader's names of train, validation and test.
        limit: at most so many rows in each part.
        max_length: tokens that texts are cut and padded to.
    """

    data: Annotated[str, Option(metavar="SPEC")]
    parts: Annotated[str, Option(metavar="A,B,C")] = "train,val,test"
    limit: Annotated[Count | None, Option(metavar="N")] = None
    max_length: Annotated[Count, Option(metavar="N")] = 128
    panel: ClassVar[str] = "Data"


@dataclass(frozen=True)
class Trained:
    """What is trained.

    Attributes:
        model: a fresh one (vit-8x8: layers × heads) or a pretrained one (path:FOLDER, or a name on the hub).
        model_option: of a fresh model: width, mlp, image_size, patch_size.
        train: all of it, or the last encoder layer on frozen features.
        option: of the method: upweight=20, values=4, ...
        selection: what the epoch is chosen by, on validation rows; worst_group needs --reference-group, and is flagged.
        reference_group: for the references, and for --selection worst_group: the group column they look at.
        against: train this method too, and compare pairwise.
    """

    model: Annotated[str, Option(metavar="NAME")] = "vit-8x8"
    model_option: Annotated[Mapping[str, Any], Option(metavar="KEY=VALUE")] = field(default_factory=dict)
    train: Literal["all", "last_encoder"] = "all"
    option: Annotated[Mapping[str, Any], Option(metavar="KEY=VALUE")] = field(default_factory=dict)
    selection: Literal["accuracy", "worst_class", "worst_group"] = "accuracy"
    reference_group: Annotated[str | None, Option(metavar="COLUMN")] = None
    against: Annotated[str | None, Option(metavar="METHOD")] = None
    panel: ClassVar[str] = "Model and method"


@dataclass(frozen=True)
class Output:
    """Where.

    Attributes:
        out: folder for model, records, audit and report.
        cache: folder for decoded pictures and frozen features.
        device: cpu, cuda, cuda:1, ...; auto takes a GPU where there is one.
    """

    out: Annotated[Path, Option(metavar="DIR")] = Path("fairhead-run")
    cache: Annotated[Path | None, Option(metavar="DIR")] = None
    device: str = "auto"
    panel: ClassVar[str] = "Output"


_PLAN = TrainingPlan(batch_size=256, learning_rate=1e-4)


@options("mitigate")
def mitigate_command(
    context: typer.Context,
    method: Annotated[str, typer.Argument(help="dam, jtt, ...: see below.", metavar="METHOD")],
    rows: Rows,
    columns: DataColumns,
    chosen: Trained,
    output: Output,
    plan: TrainingPlan = _PLAN,
) -> None:
    """Train a model with a method that reduces gaps, without groups; then audit it."""
    need()
    from fairhead.bench.grid import Backbone, Cell, Data, Method, plan_settings
    from fairhead.data import parse_spec

    _refuse_groups(chosen.option)
    given = chosen.reference_group
    if given is not None and (columns.group or not parse_spec(rows.data).reader.options.get("groups", True)):
        columns = replace(columns, group=tuple(dict.fromkeys((*columns.group, given))))
    reader_options = columns.options(rows.data)
    by_group = chosen.selection == "worst_group"
    if chosen.against == method and not chosen.option and not by_group:
        raise InputError(f"--against {method} is the method itself: name another, or give it options of its own")
    three = tuple(part.strip() for part in rows.parts.split(","))
    if len(three) != 3:
        raise InputError(f"--parts is {rows.parts!r}; expected three names, those of train, validation and test")
    cell = Cell(
        data=Data(
            name=rows.data.partition(":")[0],
            read=rows.data,
            options=reader_options,
            group=given or columns.first_group,
            split_by_seed=_splits_by_seed(rows.data, reader_options),
            parts=three,
            max_length=rows.max_length,
            limit=rows.limit,
        ),
        backbone=Backbone(Path(chosen.model).name, chosen.model, chosen.train, chosen.model_option),
        method=Method(
            method,
            method,
            chosen.option,
            uses_groups=_uses_groups(method, given, by_group),
            selection="worst_group" if by_group else None,
        ),
        seed=plan.seed,
        plan=plan_settings(plan),
        selection="accuracy" if by_group else chosen.selection,
    )
    from fairhead.bench.one_run import mitigate
    from fairhead.cli.progress import progress
    from fairhead.models.load import device_named
    from fairhead.report import write

    out, against = output.out, chosen.against
    with progress() as shown:
        found = mitigate(cell, out, against, str(device_named(output.device)), output.cache, shown.tell)
    page = found.page(command_line(context))
    write(page, out / "report.html")
    for sentence in page.verdict:
        typer.echo(harmless(f"- {sentence.text}"))
    typer.echo(f"\nmodel: {out / 'model'}\nreport: {out / 'report.html'}")


def _refuse_groups(options: Mapping[str, Any]) -> None:
    for name in options:
        if name.lower() in _GROUP_WORDS:
            raise InputError(
                f"--option {name}=...: groups are for auditing only, training never sees them. The methods that do "
                f"train with groups ({', '.join(names(uses_groups=True))}) take --reference-group COLUMN"
            )


def _uses_groups(method: str, reference_group: str | None, by_group: bool) -> bool:
    """Whether a run looks at groups, in training or to choose its epoch; a group given to any other is refused."""
    if method_named(method).uses_groups:
        if reference_group is None:
            raise InputError(
                f"{method} trains with the sensitive attribute: say which column with --reference-group, or use a "
                "method that needs none"
            )
        return True
    if by_group:
        if reference_group is None:
            raise InputError(
                "--selection worst_group looks at the groups of validation rows: say which column with "
                "--reference-group, or choose by worst_class, which needs none"
            )
        return True
    if reference_group is not None:
        raise InputError(
            f"{method} never sees a group, and --reference-group {reference_group} would give it one: leave it out. "
            "All group columns of the data are in the audit"
        )
    return False


def _splits_by_seed(data: str, options: Mapping[str, Any]) -> bool:
    """Whether the split follows --seed: where the reader draws one at random and no seed was given to it."""
    from fairhead.data import parse_spec

    return "seed" not in options and "seed" in parse_spec(data).reader.options


def _is_language(name: str) -> bool:
    """Whether it is a method for language models, here or of another package."""
    try:
        return not name.startswith("-") and method_named(name).kind == "language"
    except InputError:  # no method at all, which the shared command says
        return False


class _Methods(TyperGroup):
    """Methods for language models are commands of their own, made when they are asked for; all others share one."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *names("language")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        known = super().get_command(ctx, cmd_name)
        if known is not None or not _is_language(cmd_name):
            return known
        from fairhead.cli.mitigate_language import EPILOG as LANGUAGE_EPILOG
        from fairhead.cli.mitigate_language import language_command

        single = typer.Typer(rich_markup_mode="markdown", add_completion=False)
        single.command(cmd_name, epilog=LANGUAGE_EPILOG)(language_command(method_named(cmd_name)))
        return typer.main.get_command(single)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or not _is_language(args[0]):
            args = [_SHARED, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == _SHARED else name), command, rest  # the name stands in the usage line


mitigate_app = typer.Typer(
    name="mitigate",
    cls=_Methods,
    help="Train a model with a method that reduces gaps, without groups; then audit it.",
    rich_markup_mode="markdown",
)
mitigate_app.command(_SHARED, epilog=EPILOG)(mitigate_command)
