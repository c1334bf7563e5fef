"""Commands of one call each: `fairhead demo`, `discover`, `predict`, `attention`, `push` and `lm compare`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from fairhead import __version__
from fairhead.cli.common import DataColumns, Statistics, check_output, command_line, need, progress, write_json
from fairhead.cli.options import options
from fairhead.errors import InputError
from fairhead.locate.locate_settings import AttentionPlan
from fairhead.settings import Count, Option, Replicates, Seed
from fairhead.store import locked, write_text

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
COMPARE_EPILOG = """
Every figure is paired: the models answered the same items, and whole clusters of items (templates, terms, occupations,
pages) are drawn together. *better* and *worse* are about the distance to an even model, need an interval that leaves
out 0, and p < 0.05 after Holm's correction over all figures of all runs; otherwise a difference is *not significant*,
and the smallest difference that the figure alone would have shown is given (none where there are too few clusters).
StereoSet is scored on terms that none of the models was trained on.

Runs of lm-evaluation-harness (`--log_samples`: the folder, or one `samples_*.jsonl`) and of inspect_ai (JSON logs) are
compared in the same way, task by task, joined on their documents. Samples are independent of each other unless
`--cluster` names the field that those of one template or person share.

**Examples**

    fairhead lm compare runs/base runs/klaad --html before-after.html

    fairhead lm compare runs/base runs/klaad runs/ce runs/cda --names base,KLAAD,control,CDA --json all.json

    fairhead lm compare lm-eval/base lm-eval/tuned --category bias_type

    fairhead lm compare runs/ce runs/klaad      # KLAAD against plain fine-tuning on the same sentences
"""


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
    from fairhead.report.model_card import push

    typer.echo(f"model: {push(model, name, private=private)}")


@dataclass(frozen=True)
class Comparing(Statistics):
    """How intervals and p-values are made.

    Attributes:
        n_perm: random swaps of each p-value, at most.
    """

    n_perm: Annotated[Replicates, Option(metavar="N")] = 100_000


@dataclass(frozen=True)
class Logs:
    """How samples of another harness belong together.

    Attributes:
        cluster: field of a document (of inspect_ai: of the metadata) whose equal values are drawn together.
        category: field whose values are also compared one by one.
    """

    panel: ClassVar[str] = "Logs of other harnesses"
    cluster: Annotated[str | None, Option(metavar="FIELD")] = None
    category: Annotated[str | None, Option(metavar="FIELD")] = None


@dataclass(frozen=True)
class Pages:
    """What is written.

    Attributes:
        names: what to call the runs, with commas between.
        html: write a report, and its JSON beside it.
        json: write JSON; - prints only JSON.
        markdown: write Markdown. In a file that is there, only what stands between the two lines
            `<!-- figures: begin -->` and `<!-- figures: end -->` is replaced.
    """

    panel: ClassVar[str] = "Output"
    names: Annotated[str | None, Option(metavar="NAMES")] = None
    html: Annotated[str | None, Option(metavar="FILE")] = None
    json: Annotated[str | None, Option(metavar="FILE")] = None
    markdown: Annotated[Path | None, Option(metavar="FILE")] = None


@options("lm")
def compare_command(
    context: typer.Context,
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of fairhead lm suite, or logs of another harness; the first is before.",
            metavar="BEFORE AFTER...",
        ),
    ],
    statistics: Comparing,
    logs: Logs,
    pages: Pages,
) -> None:
    """What did a change of a model do: stereotypes, spill-over, language, attention? Needs no torch."""
    html, json_path, markdown = pages.html, pages.json, pages.markdown
    for path in (html, json_path, None if markdown is None else str(markdown)):
        check_output(path)
    if html is not None and not html.lower().endswith(".html"):
        raise InputError(f"--html is {html}; a path that ends in .html is expected")
    if html is not None and json_path is not None and Path(html).with_suffix(".json") == Path(json_path):
        raise InputError(f"--html writes the report's own JSON to {json_path}; choose another name for --json")
    around = ("", "") if markdown is None else _page_around(markdown)
    from fairhead.language.before_after import compare_suites
    from fairhead.language.before_after_report import markdown_of
    from fairhead.report.model_card import FIGURES

    called = [name.strip() for name in pages.names.split(",")] if pages.names else None
    found = compare_suites(folders, called, statistics.resampling(), statistics.n_perm, logs.cluster, logs.category)
    if json_path is not None:
        write_json(found.to_dict(), json_path)
    if html is not None:
        from fairhead.report import write

        write(found.page(command_line(context)), html)
    if markdown is not None:
        write_text(markdown, f"{around[0]}{FIGURES[0]}\n\n{markdown_of(found)}\n{FIGURES[1]}{around[1]}")
    if json_path != "-":
        found.show()


def _page_around(path: Path) -> tuple[str, str]:
    """What stands before and after the figures of a Markdown page; found out before the work is done."""
    from fairhead.report.model_card import FIGURES

    if not path.is_file():
        return "", "\n"
    try:
        page = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    begin, end = FIGURES
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise InputError(f"{path} has no place for figures; one line {begin} and one {end} are expected")
    return page.partition(begin)[0], page.partition(end)[2]
