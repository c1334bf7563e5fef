"""`fairhead predict`: what a classifier answers, as a table."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from fairhead.cli.common import DataColumns, check_output, need
from fairhead.cli.options import options
from fairhead.settings import Count, Option

EPILOG = """
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


@dataclass(frozen=True)
class Asked:
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
def predict_command(asked: Asked, columns: DataColumns) -> None:
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
