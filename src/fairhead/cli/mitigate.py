"""`fairhead mitigate`: train one model with one method, and report the result.

Methods for classifiers share a command; each method for language models has one of its own, made of its settings.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from fairhead.bench.grid import RUN_PLAN, Method, RunSettings, plan_settings
from fairhead.cli.common import DataColumns, SentenceColumns, command_line, is_first, need, progress
from fairhead.cli.options import options, parameter_names, single_command
from fairhead.errors import InputError
from fairhead.mitigate import MethodEntry, listed, method_named, names
from fairhead.report import terminal
from fairhead.settings import Option
from fairhead.store import write_json
from fairhead.train import TrainingPlan

if TYPE_CHECKING:
    from fairhead.mitigate.language_trainer import LanguageRun

# The command that classifiers share, as typer knows it: the method is its argument.
_SHARED = "METHOD"

EPILOG = f"""
**Examples**

Start with `auto`, which needs no group labels and compares its model with plain training. Training a linear head on a
frozen encoder is the quickest:

    fairhead mitigate auto --data images:labels.csv --label smiling --group sex --model hub:facebook/dinov2-small
      --train head --out run

    fairhead mitigate auto --data texts:posts.csv --label toxic --group women --train head --max-length 64
      --model hub:sentence-transformers/all-MiniLM-L6-v2 --option price=1 --out run

Other methods, and references that train with groups:

    fairhead mitigate dam --data utkface:UTKFace.zip --model vit-8x8 --epochs 30 --batch-size 256 --lr 1e-4 --out dam

    fairhead mitigate jtt --data celeba:CelebA --label Attractive --model hub:facebook/dinov2-small
      --train last_encoder --option upweight=20 --against erm --out jtt

    fairhead mitigate group_dro --reference-group white --data utkface:UTKFace.zip --model vit-8x8 --out reference

**Settings of `auto`** (`--option KEY=VALUE`)

- `price`: accuracy that the selected model may cost, in points (2).
- `encoder`: whose features are clustered: `path:FOLDER`, or `features:FILE.npz` (by default the model itself).
- `clusters`: their number (by default the most stable one).
- `candidates`: what is tried (`[plain,balance,match,both]`).

For the settings of another method, give it one that it does not have (`--option x=1`): the error lists them.

**Methods** (none of them sees a group)

{listed("classifier", uses_groups=False)}

**References** that train with groups, for comparison; they need `--reference-group`

{listed("classifier", uses_groups=True)}

**For language models**, each with its own options (`fairhead mitigate klaad --help`)

{listed("language")}

**Several GPUs**: `accelerate launch --num_processes 4 -m fairhead mitigate ...` runs one process per GPU and splits
every batch over them.

**Output files**: `model/` (safetensors; load it with `fairhead.load("model")`), `records.csv`, `audit.json`,
`report.html`, the same as `report.json`, and `run.json` (settings, history, time, memory, energy).
"""
_LANGUAGE_EPILOG = """
**Training data**: triplets (a stereotype, an anti-stereotype and an unrelated sentence) of StereoSet or your own. With
pairs, the third sentence is the less stereotypical sentence of another pair. BBQ (`--data bbq:BBQ`) gives pairs that
tell the same story of two people, once with the people swapped. A tenth of the target terms is held out
(with pairs, a tenth of the pairs; pairs with the same words about different groups stay together). The model folder
lists the training terms, so that `fairhead lm` leaves them out when it scores the model.

**Output files**: an ordinary Hugging Face folder (safetensors) that `fairhead lm ... --model DIR` accepts, and
`fairhead-training.json` (settings, split, the losses of every step). An interrupted run continues where it stopped.

**Memory**: an 8B model (Llama 3.1) with 2,048 tokens per step takes 20 GB with `--lora 16 --precision bf16
--gradient-checkpointing`, and 166 GB if all weights are trained (estimated by
`fairhead.language.loading.training_memory`). `--accumulate` splits a batch, and `accelerate launch
--num_processes 4 -m fairhead mitigate ...` divides it among four GPUs.

**Examples**

    fairhead mitigate balance_pairs --model hub:HuggingFaceTB/SmolLM2-135M --data stereoset:dev.json
      --neutral text.txt --out even

    fairhead mitigate balance_pairs --model hub:HuggingFaceTB/SmolLM2-135M --data stereoset:dev.json
      --data pairs:own.csv --held-out 0.3,0.5 --out both

    fairhead mitigate klaad --model hub:HuggingFaceTB/SmolLM2-135M --data stereoset:dev.json --out klaad

    fairhead mitigate klaad --model hub:HuggingFaceTB/SmolLM2-135M --data pairs:own.csv --lora 8
      --lr 1e-4 --out klaad-lora

    fairhead mitigate klaad --model hub:HuggingFaceTB/SmolLM2-135M --data stereoset:dev.json
      --grid klaad-ablations --out ablations

    fairhead mitigate cda --model hub:HuggingFaceTB/SmolLM2-135M --data stereoset:dev.json --swaps winobias --out cda

    fairhead mitigate self_debias --model hub:HuggingFaceTB/SmolLM2-135M --bias-type gender
      --bias-type race --out self

Compare with a model trained with cross-entropy alone (`balance_control`; for KLAAD, `--kl-weight 0 --triplet-weight 0`)
to separate the effect of the method from that of fine-tuning on the same sentences.
"""


@dataclass(frozen=True)
class Asked:
    """What is trained on what.

    Attributes:
        data: as reader:path: utkface:UTKFace.zip, images:labels.csv, texts:posts.csv.
        model: a new model (vit-8x8: layers × heads), a folder, or a hub name in the local cache (hub:NAME downloads
            it).
        option: a setting of the method, such as price=1 of auto; see below.
        out: folder for model, records, audit and report.
    """

    data: Annotated[str, Option(metavar="SPEC", panel="Data")]
    model: Annotated[str, Option(metavar="NAME")] = "vit-8x8"
    option: Annotated[Mapping[str, Any], Option(metavar="KEY=VALUE")] = field(default_factory=dict)
    out: Annotated[Path, Option(metavar="DIR", panel="Output")] = Path("fairhead-run")
    panel: ClassVar[str] = RunSettings.panel


_PLAN = TrainingPlan(**RUN_PLAN)


@options("mitigate")
def mitigate_command(
    context: typer.Context,
    method: Annotated[str, typer.Argument(help="auto, dam, jtt, ...: see below.", metavar="METHOD")],
    asked: Asked,
    columns: DataColumns,
    how: RunSettings,
    plan: TrainingPlan = _PLAN,
) -> None:
    """Train a model with a method that reduces gaps without using groups, then audit it."""
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
    if not is_first():
        return
    write(found.page(command_line(context)), out / "report.html")
    found.show()
    typer.echo(f"\nmodel: {out / 'model'}\nreport: {out / 'report.html'}")


@dataclass(frozen=True)
class Changed:
    """Which language model is changed, and where to.

    Attributes:
        model: folder of a causal language model, or a hub name in the local cache (hub:NAME downloads it).
        out: folder for the new model.
        device: device: cpu, cuda, cuda:1, ...; auto uses a GPU if there is one.
        keep_adapter: with --lora, also save the adapter in DIR/adapter.
        grid: run the methods of a grid, one folder each: a YAML file or the name of a built-in grid.
        preset: weights and margin for a model family; by default the family of the model.
    """

    model: Annotated[str, Option(metavar="PATH", panel="Data")]
    out: Annotated[Path, Option(metavar="DIR")]
    device: Annotated[str, Option(panel="Training")] = "auto"
    keep_adapter: bool = False
    grid: Annotated[str | None, Option(metavar="FILE")] = None
    preset: Annotated[str | None, Option(metavar="NAME", panel="Method")] = None
    panel: ClassVar[str] = "Output"


def language_command(entry: MethodEntry) -> Callable[..., None]:
    """The command of a method for language models: which settings it takes follows from what the method does."""
    need()
    from fairhead.mitigate.language_trainer import plan_of
    from fairhead.mitigate.triplets import TripletData

    settings = entry.load()
    takes: dict[str, Any] = {"context": typer.Context, "asked": Changed, "settings": settings}
    left_out = []
    if not hasattr(settings, "attach"):
        takes |= {"data": TripletData, "columns": SentenceColumns}
    if hasattr(settings, "session"):
        takes["plan"] = plan_of(settings)
    else:
        left_out += ["keep_adapter", "grid"]
    if not hasattr(settings, "preset"):
        left_out.append("preset")

    def run(context: Any, asked: Any, settings: Any, data: Any = None, columns: Any = None, plan: Any = None) -> None:
        if data is not None:
            data = replace(data, options={k: v for one in data.sources for k, v in columns.options(one).items()})
        given = _given(context, settings)
        if asked.preset is not None:
            given = {**asdict(entry.load().preset(asked.preset)), **given}
        _change(entry, asked, data, given, plan)

    run.__doc__ = f"{entry.about[:1].upper()}{entry.about[1:]}."
    return options("mitigate", {"asked": left_out}, takes)(run)


def _given(context: typer.Context, settings: Any) -> dict[str, Any]:
    """The settings that the user has given; what is left to a default may depend on the model."""
    return {
        name: getattr(settings, name)
        for name, key in parameter_names(type(settings)).items()
        if getattr(context.get_parameter_source(key), "name", "DEFAULT") not in ("DEFAULT", "DEFAULT_MAP")
    }


def _change(entry: MethodEntry, asked: Changed, data: Any, given: Mapping[str, Any], plan: Any) -> None:
    """Change a language model by a method, or by those of a grid; show the result."""
    if plan is not None and plan.lora is not None:
        need("lora")
    if asked.keep_adapter and plan.lora is None:
        raise InputError("--keep-adapter needs --lora: without it there is no adapter")
    from fairhead.mitigate.language_trainer import LanguageRun, mitigate_language

    runs = {"": LanguageRun(entry.name, given, plan)} if asked.grid is None else _runs(asked.grid, entry, given, plan)
    how = {"device": asked.device, "adapter": asked.keep_adapter}
    with progress() as shown:
        found = mitigate_language(asked.model, data, asked.out, runs, progress=shown.tell, **how)
    if not is_first():
        return
    if asked.grid is not None:
        write_json(asked.out / "grid.json", found.to_dict())
    found.show()
    terminal().print(f"model: {asked.out}", highlight=False, soft_wrap=True)


def _runs(grid: str, entry: MethodEntry, given: Mapping[str, Any], plan: Any) -> "dict[str, LanguageRun]":
    """The runs of a grid by name. What is wrong with one is said before any is trained."""
    from fairhead.bench.grid_file import grid_path, read_methods, shipped_grids
    from fairhead.mitigate.language_trainer import LanguageRun, plan_of

    found = {}
    own_grid = f"{entry.name}-{grid}"
    for one in read_methods(grid_path(own_grid if own_grid in shipped_grids() else grid)):
        method = method_named(one.method)
        kind, own = method.load(), one.method == entry.name
        chosen, changes = (dict(given), asdict(plan)) if own else ({}, {})
        if getattr(kind, "control_of", None) == entry.name:  # the same but for what makes it a control
            names = {setting.name for setting in fields(kind)}
            chosen = {name: value for name, value in given.items() if name in names}
            changes = {**asdict(plan), **dict(kind.plan.items() - entry.load().plan.items())}
        chosen.update(one.options)
        method.configure(**chosen)
        found[one.name] = LanguageRun(method.name, chosen, plan_of(kind, **{**changes, **one.plan}))
    return found


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
        return single_command(cmd_name, _LANGUAGE_EPILOG, language_command(method_named(cmd_name)))

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
    help="Train a model with a method that reduces gaps without using groups, then audit it.",
    rich_markup_mode="markdown",
)
mitigate_app.command(_SHARED, epilog=EPILOG)(mitigate_command)
