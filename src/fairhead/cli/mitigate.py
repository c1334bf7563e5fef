"""`fairhead mitigate`: train one model with one method, and say what came of it."""

import enum
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from fairhead.cli.data_options import DataColumns
from fairhead.cli.options import key_values, options
from fairhead.cli.output import command_line
from fairhead.errors import FairheadError, InputError
from fairhead.mitigate.registry import listed, method_named, names
from fairhead.report.console import harmless

# What an option of a method would be called that wanted a group.
_GROUP_WORDS = ("group", "groups", "attribute", "attributes", "sensitive", "group_by", "protected")

EPILOG = f"""
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


class Train(enum.StrEnum):
    """Which part of the model is trained."""

    all = "all"
    last_encoder = "last_encoder"


class Selection(enum.StrEnum):
    """What the epoch is chosen by, on validation rows; the last one looks at their groups."""

    accuracy = "accuracy"
    worst_class = "worst_class"
    worst_group = "worst_group"


class Precision(enum.StrEnum):
    """Of the computation."""

    no = "no"
    bf16 = "bf16"


_DATA, _MODEL, _TRAINING, _OUTPUT = "Data", "Model and method", "Training", "Output"


def _option(flag: str, help: str, panel: str, metavar: str | None = None) -> Any:
    variable = f"FAIRHEAD_MITIGATE_{flag.strip('-').replace('-', '_').upper()}"
    return typer.Option(flag, help=help, rich_help_panel=panel, metavar=metavar, envvar=variable, show_envvar=False)


@options("mitigate")
def mitigate_command(
    context: typer.Context,
    method: Annotated[str, typer.Argument(help="dam, jtt, ...: see below.", metavar="METHOD")],
    data: Annotated[
        str, _option("--data", "reader:path: utkface:UTKFace.zip, images:labels.csv, texts:posts.csv.", _DATA, "SPEC")
    ],
    columns: DataColumns,
    model: Annotated[
        str,
        _option(
            "--model",
            "vit-8x8 (fresh, layers × heads), or path:FOLDER or a name on the hub (pretrained).",
            _MODEL,
            "NAME",
        ),
    ] = "vit-8x8",
    out: Annotated[Path, _option("--out", "Folder for model, records, audit and report.", _OUTPUT, "DIR")] = Path(
        "fairhead-run"
    ),
    parts: Annotated[
        str, _option("--parts", "The reader's names of train, validation and test.", _DATA, "A,B,C")
    ] = "train,val,test",
    limit: Annotated[int | None, _option("--limit", "At most so many rows in each part.", _DATA, "N")] = None,
    max_length: Annotated[int, _option("--max-length", "Tokens that texts are cut and padded to.", _DATA, "N")] = 128,
    option: Annotated[
        list[str] | None, _option("--option", "Of the method: upweight=20, values=4, ...", _MODEL, "KEY=VALUE")
    ] = None,
    model_option: Annotated[
        list[str] | None,
        _option("--model-option", "Of a fresh model: width, mlp, image_size, patch_size.", _MODEL, "KEY=VALUE"),
    ] = None,
    train: Annotated[
        Train, _option("--train", "all of it, or the last encoder layer on frozen features.", _MODEL)
    ] = Train.all,
    reference_group: Annotated[
        str | None,
        _option(
            "--reference-group",
            "For the references, and for --selection worst_group: the group column they look at.",
            _MODEL,
            "COLUMN",
        ),
    ] = None,
    against: Annotated[
        str | None, _option("--against", "Train this method too, and compare pairwise.", _MODEL, "METHOD")
    ] = None,
    epochs: Annotated[int, _option("--epochs", "Passes over the training rows.", _TRAINING, "N")] = 20,
    batch_size: Annotated[int, _option("--batch-size", "Rows a step.", _TRAINING, "N")] = 256,
    lr: Annotated[float, _option("--lr", "AdamW's learning rate.", _TRAINING, "RATE")] = 1e-4,
    weight_decay: Annotated[float, _option("--weight-decay", "AdamW's.", _TRAINING, "RATE")] = 0.05,
    precision: Annotated[Precision, _option("--precision", "no: 32 bit; bf16: autocast.", _TRAINING)] = Precision.no,
    selection: Annotated[
        Selection,
        _option(
            "--selection",
            "What the epoch is chosen by; never the test rows. worst_group needs --reference-group, and is flagged.",
            _TRAINING,
        ),
    ] = Selection.accuracy,
    seed: Annotated[
        int, _option("--seed", "Of weights, batches and (where it is random) the split.", _TRAINING, "N")
    ] = 0,
    device: Annotated[
        str, _option("--device", "cpu, cuda, cuda:1, ...; auto takes a GPU where there is one.", _TRAINING)
    ] = "auto",
    cache: Annotated[
        Path | None, _option("--cache", "Folder for decoded pictures and frozen features.", _OUTPUT, "DIR")
    ] = None,
) -> None:
    """Train a model with a method that reduces gaps, without groups; then audit it."""
    missing = [name for name in ("torch", "transformers", "accelerate") if find_spec(name) is None]
    if missing:
        raise FairheadError(f'this needs {", ".join(missing)}, not installed here: pip install "fairhead[torch]"')
    from fairhead.bench.grid import Backbone, Cell, Data, Method
    from fairhead.data import parse_spec

    method_options = key_values(option, "--option")
    _refuse_groups(method_options)
    if reference_group is not None and (columns.group or not parse_spec(data).reader.options.get("groups", True)):
        columns = replace(columns, group=tuple(dict.fromkeys((*columns.group, reference_group))))
    reader_options = columns.options(data)
    for flag, number in (("--limit", limit), ("--max-length", max_length)):
        if number is not None and number < 1:
            raise InputError(f"{flag} is {number}; at least 1 is needed")
    by_group = selection is Selection.worst_group
    if against == method and not method_options and not by_group:
        raise InputError(f"--against {against} is the method itself: name another, or give it options of its own")
    three = tuple(part.strip() for part in parts.split(","))
    if len(three) != 3:
        raise InputError(f"--parts is {parts!r}; expected three names, those of train, validation and test")
    cell = Cell(
        data=Data(
            name=data.partition(":")[0],
            read=data,
            options=reader_options,
            group=reference_group or columns.first_group,
            split_by_seed=_splits_by_seed(data, reader_options),
            parts=three,
            max_length=max_length,
            limit=limit,
        ),
        backbone=Backbone(Path(model).name, model, train.value, key_values(model_option, "--model-option")),
        method=Method(
            method,
            method,
            method_options,
            uses_groups=_uses_groups(method, reference_group, by_group),
            selection="worst_group" if by_group else None,
        ),
        seed=seed,
        plan={
            "epochs": epochs,
            "batch_size": batch_size,
            "learning_rate": lr,
            "weight_decay": weight_decay,
            "precision": precision.value,
        },
        selection="accuracy" if by_group else selection.value,
    )
    from fairhead.bench.one_run import mitigate
    from fairhead.cli.progress import progress
    from fairhead.models.load import device_named
    from fairhead.report import write

    with progress() as shown:
        found = mitigate(cell, out, against, str(device_named(device)), cache, shown.tell)
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
