"""What a model makes of rows: answers (`fairhead predict`), features (`discover`), queries and keys (`attention`)."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from fairhead import __version__
from fairhead.cli.common import DataColumns, check_output, command_line, need, progress
from fairhead.cli.options import options
from fairhead.errors import InputError
from fairhead.locate.locate_settings import AttentionPlan
from fairhead.settings import Count, Option, Seed
from fairhead.store import locked, refuse_others

PREDICT_EPILOG = """
**Examples**

New posts without labels:

    fairhead predict --model run/model --data texts:new.csv --label none --out answers.csv

The test rows of labelled pictures, before and after an edit, and an audit of both:

    fairhead predict --model run/model --data images:labels.csv --label smiling --group sex --out before.csv

    fairhead predict --model edited --data images:labels.csv --label smiling --group sex --out after.csv

    fairhead audit before.csv --compare after.csv

**Output columns**: id, label (if there is one), prediction, score (of the positive class, or one per class if there are
more than two) and the groups. The suffix of `--out` selects CSV, TSV, JSONL or Parquet.
"""
DISCOVER_EPILOG = """
**Examples**

Which groups does an encoder find in pictures or posts?

    fairhead discover --data images:labels.csv --label smiling --encoder hub:facebook/dinov2-small --out found

    fairhead discover --data texts:posts.csv --label toxic
      --encoder hub:sentence-transformers/all-MiniLM-L6-v2 --clusters 16 --out found

How well do they agree with known groups? (Known groups are optional and never used to find clusters.)

    fairhead discover --data celeba:CelebA --label Attractive --group Male
      --encoder hub:openai/clip-vit-base-patch16 --out found

Does a classifier treat them equally? The pair with the largest gap is selected on one half of the rows and reported on
the other half, which corrects for selecting the worst of many:

    fairhead discover --data images:labels.csv --label smiling --encoder hub:facebook/dinov2-small
      --model run/model --out found

Use the groups in other commands:

    fairhead audit run/records.csv --groups-from found/groups.csv

    fairhead locate --model run/model --data images:labels.csv --label smiling --groups-from found/groups.csv
      --group discovered --out heads

    fairhead mitigate balance --data images:labels.csv --label smiling --groups-from found/groups.csv
      --group discovered --model hub:facebook/dinov2-small --out run

**How it works**: the encoder turns each row into a vector (computed once, then cached), which is scaled to unit length
and standardised. k-means clusters the vectors. Unless `--clusters` is given, the number of clusters is the one on which
two halves of the rows agree best (adjusted Rand index). Clustering uses neither labels nor groups. Clusters follow what
the encoder sees most, which may be a group of people, a pose, or a topic: look at the page before you name them.

**Output files**: `groups.csv` (id, discovered), `report.html`, the same as `report.json`, and `discovered.json`.
"""
ATTENTION_EPILOG = """
**Output files**: a self-contained page, `report.html`, and its figures, `attention.json`.

- **Assumption 1 of DAM**: histograms of selected dimensions of q and k for each group, with the normal curves that the
  theory assumes. Over all dimensions: the distance from a normal distribution, the ratio of the standard deviations,
  and the gap in attention logits, as predicted by the theory and as measured.
- **Attention maps**, for pictures: what the first token attends to, drawn over the picture; with `--against`, for two
  models side by side.

**Examples**

    fairhead attention --model run/model --against plain/model --data utkface:UTKFace.zip --group white --out maps

    fairhead attention --model hub:sentence-transformers/all-MiniLM-L6-v2 --data hatexplain:hatexplain
      --group Women --layer 3 --dimension q:0:5

Models are ordinary Hugging Face folders, or folders written by `fairhead mitigate`.
"""


@dataclass(frozen=True)
class Predicting:
    """What is answered by what.

    Attributes:
        model: a classifier of pictures or texts: a folder, or a hub name in the local cache (hub:NAME downloads it).
        data: as reader:path: images:new.csv, texts:posts.csv, celeba:CelebA.
        part: rows to predict: test, val, ..., or all. The default is test, or all if there is neither a split column
            nor a list of the model's training rows.
        batch_size: rows per batch.
        device: device: cpu, cuda, cuda:1, ...; auto uses a GPU if there is one.
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
    """Predict with a classifier of pictures or texts, for rows with labels (for an audit) or without."""
    need()
    check_output(asked.out, asked.data.partition(":")[2])
    reader_options = columns.options(asked.data)
    from fairhead.records.table_files import file_format, write
    from fairhead.verbs import predict

    file_format(asked.out)  # a suffix that is not known should not wait for the model
    given = {name: value for name, value in vars(asked).items() if name not in ("model", "data", "out")}
    found = predict(asked.model, asked.data, **given, **reader_options)
    write(found, asked.out)
    typer.echo(f"{len(found):,} rows: {asked.out}")


@dataclass(frozen=True)
class Discovering:
    """What is looked for in what.

    Attributes:
        data: as reader:path: celeba:CelebA, images:labels.csv, texts:posts.csv.
        encoder: a folder or a hub name in the local cache (hub:NAME downloads it); or features:FILE.npz with
            precomputed features.
        model: a classifier to audit by cluster (a folder or a name), or its records (a table with ids).
        part: rows to audit the model on: test, val, ..., or all.
        clusters: number of clusters; by default the most stable one.
        words: .npz with texts and their vectors in the feature space, such as those of CLIP's text encoder.
        max_length: truncate texts to this many tokens.
        device: device: cpu, cuda, cuda:1, ...; auto uses a GPU if there is one.
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
    """Find groups without labels: clusters of an encoder's features, their typical rows, and a model's gaps."""
    need()
    reader_options = columns.options(asked.data)
    from fairhead.verbs import discover

    refuse_others(asked.out, "groups.csv")
    context.with_resource(locked(asked.out))
    given = {name: value for name, value in vars(asked).items() if name not in ("data", "encoder", "out")}
    with progress() as shown:
        found = discover(asked.data, asked.encoder, **given, progress=shown.tell, **reader_options)
    found = replace(found, provenance={"version": __version__, "command": command_line(context), **found.provenance})
    found.save(asked.out)
    found.show()
    typer.echo(f"\ngroups: {asked.out / 'groups.csv'}\nreport: {asked.out / 'report.html'}")


@dataclass(frozen=True)
class Looking:
    """What is looked at, and where to.

    Attributes:
        model: folder of the model, or a hub name in the local cache (hub:NAME downloads it).
        data: as reader:path, such as utkface:UTKFace.zip or images:labels.csv.
        against: folder of another model to show side by side.
        out: folder for report.html and attention.json.
    """

    model: Annotated[Path, Option(metavar="PATH")]
    data: Annotated[str, Option(metavar="SPEC")]
    against: Annotated[Path | None, Option(metavar="PATH")] = None
    out: Annotated[Path, Option(metavar="DIR")] = Path("fairhead-attention")


@options("attention")
def attention_command(context: typer.Context, asked: Looking, columns: DataColumns, plan: AttentionPlan) -> None:
    """Show q and k by group, and what the first token attends to."""
    need()
    model, against, out, data = asked.model, asked.against, asked.out, asked.data
    if out.suffix.lower() == ".html":
        raise InputError(f"--out is {str(out)!r}; expected a folder, into which report.html is written")
    if against is not None and against.resolve() == model.resolve():
        raise InputError(f"--against is {str(against)!r}, the model itself: give another one, or leave it out")
    _ = plan.dimensions  # a mistake there should not wait for the work
    refuse_others(out, "attention.json")
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
    """The name of a model as on its card; its whole path where both would be called alike."""
    from fairhead.report.model_card import name_of

    names = [name_of(str(one.resolve())) for one in (model, against) if one is not None]
    return name_of(str(folder.resolve())) if len({*names}) == len(names) else str(folder)
