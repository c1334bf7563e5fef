"""`fairhead discover`: groups that nobody named, as clusters of an encoder's features."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from fairhead import __version__
from fairhead.cli.common import DataColumns, command_line, need, progress
from fairhead.cli.options import options
from fairhead.settings import Count, Option, Seed

EPILOG = """
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


@dataclass(frozen=True)
class Asked:
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
def discover_command(context: typer.Context, asked: Asked, columns: DataColumns) -> None:
    """Groups that nobody named: clusters of an encoder's features, what they look like, how a model treats them."""
    need()
    reader_options = columns.options(asked.data)
    from fairhead.store import locked
    from fairhead.verbs import discover

    context.with_resource(locked(asked.out))
    given = {name: value for name, value in vars(asked).items() if name not in ("data", "encoder", "out")}
    with progress() as shown:
        found = discover(asked.data, asked.encoder, **given, progress=shown.tell, **reader_options)
    found = replace(found, provenance={"version": __version__, "command": command_line(context), **found.provenance})
    found.save(asked.out)
    found.show()
    typer.echo(f"\ngroups: {asked.out / 'groups.csv'}\nreport: {asked.out / 'report.html'}")
