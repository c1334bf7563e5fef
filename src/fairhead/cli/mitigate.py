"""`fairhead mitigate`: train one model with one method, and say what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from fairhead.bench.grid import Method, RunSettings, plan_settings
from fairhead.cli.common import DataColumns, command_line, need, progress
from fairhead.cli.options import options
from fairhead.errors import InputError
from fairhead.mitigate.registry import listed, method_named, names
from fairhead.report.console import harmless
from fairhead.settings import Option
from fairhead.train.plan import TrainingPlan

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
class Asked:
    """What is trained on what.

    Attributes:
        data: as reader:path: utkface:UTKFace.zip, images:labels.csv, texts:posts.csv.
        model: a fresh one (vit-8x8: layers × heads), a folder, or a name on the hub that is cached.
        option: of the method: upweight=20, values=4, ...
        out: folder for model, records, audit and report.
    """

    data: Annotated[str, Option(metavar="SPEC", panel="Data")]
    model: Annotated[str, Option(metavar="NAME")] = "vit-8x8"
    option: Annotated[Mapping[str, Any], Option(metavar="KEY=VALUE")] = field(default_factory=dict)
    out: Annotated[Path, Option(metavar="DIR", panel="Output")] = Path("fairhead-run")
    panel: ClassVar[str] = RunSettings.panel


_PLAN = TrainingPlan(batch_size=256, learning_rate=1e-4)


@options("mitigate")
def mitigate_command(
    context: typer.Context,
    method: Annotated[str, typer.Argument(help="dam, jtt, ...: see below.", metavar="METHOD")],
    asked: Asked,
    columns: DataColumns,
    how: RunSettings,
    plan: TrainingPlan = _PLAN,
) -> None:
    """Train a model with a method that reduces gaps, without groups; then audit it."""
    need()
    columns = replace(columns, group=how.groups_to_read(asked.data, columns.group))
    reader_options = columns.options(asked.data)
    chosen = Method(method, method, asked.option)
    plain = plan_settings(plan)
    cell = how.cell(asked.model, asked.data, chosen, reader_options, columns.first_group, plain, plan.seed)
    from fairhead.bench.one_run import mitigate
    from fairhead.models.load import device_named
    from fairhead.report import write

    out = asked.out
    with progress() as shown:
        found = mitigate(cell, out, how.against, str(device_named(how.device)), how.cache, shown.tell)
    page = found.page(command_line(context))
    write(page, out / "report.html")
    for sentence in page.verdict:
        typer.echo(harmless(f"- {sentence.text}"))
    typer.echo(f"\nmodel: {out / 'model'}\nreport: {out / 'report.html'}")


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
