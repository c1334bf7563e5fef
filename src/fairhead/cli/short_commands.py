"""Commands of one call each: `fairhead demo`, `discover`, `predict`, `attention` and `push`."""

import re
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from fairhead import __version__
from fairhead.cli.common import DataColumns, check_output, command_line, need, progress
from fairhead.cli.options import options
from fairhead.errors import FairheadError, InputError
from fairhead.locate.locate_settings import AttentionPlan
from fairhead.settings import Count, Option, Seed
from fairhead.store import locked

DISCOVER_EPILOG = """
**Examples**

Which groups are there in pictures, or in posts, as an encoder sees them?

    fairhead discover --data images:labels.csv --label smiling --encoder dinov2-small --out found

    fairhead discover --data texts:posts.csv --label toxic --encoder minilm-l6 --clusters 16 --out found

How well do they agree with groups that have names? (Never needed, and never used to find them.)

    fairhead discover --data celeba:CelebA --label Attractive --group Male --encoder clip-vit-base-patch16 --out found

Does a classifier treat them alike? The pair with the largest gap is chosen on one half of the rows and reported on the
other half, so that picking the worst of many is paid for:

    fairhead discover --data images:labels.csv --label smiling --encoder dinov2-small --model run/model --out found

Then take the groups to the other commands:

    fairhead audit run/records.csv --label label --pred prediction --groups-from found/groups.csv

    fairhead locate --model run/model --data images:labels.csv --label smiling --groups-from found/groups.csv
      --group discovered --out heads

    fairhead mitigate balance --data images:labels.csv --label smiling --groups-from found/groups.csv
      --group discovered --model path:dinov2-small --out run

**How it works**: one vector a row (computed once, then kept), of unit length and standardised; k-means; the number of
clusters whose clusters of two halves of the rows agree best (adjusted Rand index), unless `--clusters` is given.
Neither labels nor groups have a part in it. Clusters follow what the encoder sees most, which may be a group of
people, a pose, or a topic: look at the page before you name them.

**What is written**: `groups.csv` (id, discovered), `report.html` with its JSON twin, and `discovered.json`.
"""
PREDICT_EPILOG = """
**Examples**

New posts, which nobody has labelled:

    fairhead predict --model run/model --data texts:new.csv --label none --out answers.csv

The test rows of labelled pictures, before and after an edit, and an audit of both:

    fairhead predict --model run/model --data images:labels.csv --label smiling --group sex --out before.csv

    fairhead predict --model edited --data images:labels.csv --label smiling --group sex --out after.csv

    fairhead audit before.csv --compare after.csv --group sex

**What is written**: id, label (where there is one), prediction, score (of the positive class; one a class where there
are more than two) and the groups, as CSV, TSV, JSONL or Parquet, by the suffix of `--out`.
"""
ATTENTION_EPILOG = """
**What is written**: one self-contained page, `report.html`, and its figures, `attention.json`.

- **Assumption 1 of DAM**: histograms of chosen dimensions of q and k, a group each, with the normal curves that the
  theory assumes. With numbers over all dimensions: the distance from normal, the ratio of the spreads, and the gap
  in attention logits that the theory predicts beside the one that these rows have.
- **Attention maps**, for pictures: what the first token looks at, over the picture, with `--against` for two models
  side by side.

**Examples**

    fairhead attention --model run/model --against plain/model --data utkface:UTKFace.zip --group white --out maps

    fairhead attention --model minilm-l6 --data hatexplain:hatexplain --group Women --layer 3 --dimension q:0:5

Models are folders: ordinary Hugging Face ones, and those that `fairhead mitigate` writes.
"""
PUSH_EPILOG = """
The token is the one of `hf auth login`, or that of the environment variable `HF_TOKEN`.

**Example**

    fairhead push run/model my-name/fairer-faces --private
"""
# What a model is made of; records and reports, which may name persons, stay here.
_FILES = ("README.md", "*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
_NOT = ("fairhead-training.json", "training_rows.json")


def demo_command(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for report, records and models.")] = Path("fairhead-demo"),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the data, the training and the resampling.")] = 0,
) -> None:
    """Find the shade of digits without being told, reduce its gap, locate its heads, and prove it on test digits.

    Writes report.html and report.json, the records behind every figure, and the models, in about a minute.

    The same seed gives the same numbers.
    """
    need("demo")
    from fairhead.demo import DemoPlan, run_demo

    context.with_resource(locked(out))
    with progress() as stages:
        found = run_demo(out, DemoPlan(seed=seed), stages.tell, command_line(context))
    for sentence in found.verdict:
        typer.echo(f"- {sentence}")
    typer.echo(f"\nreport: {found.report}")


@dataclass(frozen=True)
class Discovering:
    """What is looked for in what.

    Attributes:
        data: as reader:path: celeba:CelebA, images:labels.csv, texts:posts.csv.
        encoder: a folder or a name on the hub that is cached; or features:FILE.npz, which are ready.
        model: a classifier to audit by cluster (a folder or a name), or its records (a table with ids).
        part: the rows that the model is audited on: test, val, ..., or all.
        clusters: how many; by default the most stable number.
        words: .npz with texts and vectors in the space of the features, such as CLIP's text side.
        max_length: tokens that texts are cut to.
        device: where to compute: cpu, cuda, cuda:1, ...; auto takes a GPU where there is one.
        cache: folder for decoded pictures and features.
        seed: same seed, same clusters.
        out: folder for groups.csv, report.html and discovered.json.
    """

    data: Annotated[str, Option(metavar="SPEC", panel="Data")]
    encoder: Annotated[str, Option(metavar="NAME")]
    model: Annotated[str | None, Option(metavar="PATH")] = None
    part: Annotated[str, Option(metavar="NAME", panel="Data")] = "test"
    clusters: Annotated[Count | None, Option(metavar="N")] = None
    words: Annotated[str | None, Option(metavar="FILE")] = None
    max_length: Annotated[Count, Option(metavar="N")] = 128
    device: str = "auto"
    cache: Annotated[str | None, Option(metavar="DIR")] = None
    seed: Annotated[Seed, Option(metavar="N")] = 0
    out: Annotated[Path, Option(metavar="DIR", panel="Output")] = Path("fairhead-discovered")
    panel: ClassVar[str] = "Discovery"


@options("discover")
def discover_command(context: typer.Context, asked: Discovering, columns: DataColumns) -> None:
    """Groups that nobody named: clusters of an encoder's features, what they look like, how a model treats them."""
    need()
    reader_options = columns.options(asked.data)
    from fairhead.verbs import discover

    context.with_resource(locked(asked.out))
    given = {name: value for name, value in vars(asked).items() if name not in ("data", "encoder", "out")}
    with progress() as shown:
        found = discover(asked.data, asked.encoder, **given, progress=shown.tell, **reader_options)
    found = replace(found, provenance={"version": __version__, "command": command_line(context), **found.provenance})
    found.save(asked.out)
    found.show()
    typer.echo(f"\ngroups: {asked.out / 'groups.csv'}\nreport: {asked.out / 'report.html'}")


@dataclass(frozen=True)
class Predicting:
    """What is answered by what.

    Attributes:
        model: a classifier of pictures or texts: a folder, or a name on the hub that is cached.
        data: as reader:path: images:new.csv, texts:posts.csv, celeba:CelebA.
        part: the rows to answer: test, val, ..., or all; by default test, and all where there is neither a column of
            parts nor a list of the model's training rows.
        batch_size: rows at a time.
        device: where to compute: cpu, cuda, cuda:1, ...; auto takes a GPU where there is one.
        out: the table to write.
    """

    model: Annotated[str, Option(metavar="PATH")]
    data: Annotated[str, Option(metavar="SPEC", panel="Data")]
    part: Annotated[str | None, Option(metavar="NAME", panel="Data")] = None
    batch_size: Annotated[Count, Option(metavar="N")] = 64
    device: str = "auto"
    out: Annotated[str, Option(metavar="FILE", panel="Output")] = "predictions.csv"
    panel: ClassVar[str] = "Prediction"


@options("predict")
def predict_command(asked: Predicting, columns: DataColumns) -> None:
    """What a classifier of pictures or texts answers, for rows with labels (to be audited) or without."""
    need()
    check_output(asked.out, asked.data.partition(":")[2])
    reader_options = columns.options(asked.data)
    from fairhead.records.table_files import write
    from fairhead.verbs import predict

    given = {name: value for name, value in vars(asked).items() if name not in ("model", "data", "out")}
    found = predict(asked.model, asked.data, **given, **reader_options)
    write(found, asked.out)
    typer.echo(f"{len(found):,} rows: {asked.out}")


@dataclass(frozen=True)
class Looking:
    """What is looked at, and where to.

    Attributes:
        model: folder of the model, or a name on the hub that is cached.
        data: as reader:path, such as utkface:UTKFace.zip or images:labels.csv.
        against: folder of another model, shown beside it.
        out: folder for report.html and attention.json.
    """

    model: Annotated[Path, Option(metavar="PATH")]
    data: Annotated[str, Option(metavar="SPEC")]
    against: Annotated[Path | None, Option(metavar="PATH")] = None
    out: Annotated[Path, Option(metavar="DIR")] = Path("fairhead-attention")


@options("attention")
def attention_command(context: typer.Context, asked: Looking, columns: DataColumns, plan: AttentionPlan) -> None:
    """Look at q and k by group, and at what the first token attends to."""
    need()
    model, against, out, data = asked.model, asked.against, asked.out, asked.data
    if out.suffix.lower() == ".html":
        raise InputError(f"--out is {str(out)!r}; a folder is expected, in which report.html is written")
    if against is not None and against.resolve() == model.resolve():
        raise InputError(f"--against is {str(against)!r}, the model itself: give another one, or leave it out")
    _ = plan.dimensions  # a mistake there should not wait for the work
    context.with_resource(locked(out))
    from fairhead.locate.read_qk import attention_by_group

    models = {_name(folder, model, against): folder for folder in (model, against) if folder is not None}
    made = {"command": command_line(context)}
    with progress() as shown:
        found = attention_by_group(
            models, data, columns.first_group, columns.options(data), plan, progress=shown.tell, provenance=made
        )
    found.write(out)
    found.show()
    typer.echo(f"\nreport: {out / 'report.html'}")


def _name(folder: Path, model: Path, against: Path | None) -> str:
    """The folder's own name, and its parent's too where both folders are called alike ("run/model")."""
    full = folder.resolve()
    alike = against is not None and model.resolve().name == against.resolve().name
    return f"{full.parent.name}/{full.name}" if alike else full.name


def push_command(
    model: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model that fairhead saved.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the model on the hub: you/model.")],
    private: Annotated[bool, typer.Option("--private", help="Only you, and whom you let, can see it.")] = False,
) -> None:
    """Upload a saved model with its card to the Hugging Face hub."""
    need()
    typer.echo(f"model: {push(model, name, private=private)}")


def push(folder: Path, name: str, *, private: bool = False) -> str:
    """Upload a model and return its address."""
    from huggingface_hub import CommitOperationAdd, HfApi

    from fairhead.report.model_card import CARD, renamed

    errors: Any = import_module("huggingface_hub.errors")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InputError(f"{name!r} is no name on the hub; one such as you/model is expected")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: a folder with a model (config.json) is expected; it is not there")
    if not (folder / CARD).is_file():
        raise InputError(f"{folder} has no {CARD}: a model without its card says nothing of its gaps. Write one first")
    files = sorted(file.name for pattern in _FILES for file in folder.glob(pattern) if file.name not in _NOT)
    api = HfApi()
    card = renamed(folder, name).encode()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        operations = [
            CommitOperationAdd(file, card if file == CARD else str(folder / file))  # of the folder nothing is changed
            for file in files
        ]
        api.create_commit(name, operations, commit_message="Upload a model and its card")
    except (errors.HTTPError, errors.LocalTokenNotFoundError, OSError) as error:
        code = getattr(getattr(error, "response", None), "status_code", None)
        if code in (401, 403) or isinstance(error, errors.LocalTokenNotFoundError):
            raise FairheadError(
                f"the hub does not let this token write {name}: log in with `hf auth login`, or set HF_TOKEN to a "
                "token that may write"
            ) from None
        if code is None:
            raise FairheadError(f"{api.endpoint} does not answer ({error}): nothing was uploaded") from None
        raise FairheadError(f"the hub refused {name}: {error}") from None
    return str(address)
