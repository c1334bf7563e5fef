"""`fairhead attention`: q and k by group, and what the first token looks at."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fairhead.cli.common import DataColumns, command_line, need, progress
from fairhead.cli.options import options
from fairhead.errors import InputError
from fairhead.locate.locate_settings import AttentionPlan
from fairhead.settings import Option
from fairhead.store import locked

EPILOG = """
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
