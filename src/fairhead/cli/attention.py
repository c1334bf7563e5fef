"""`fairhead attention`: q and k by group, and what the first token looks at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairhead.cli.common import DataColumns, command_line, need, progress
from fairhead.cli.options import options
from fairhead.errors import InputError
from fairhead.report.console import harmless
from fairhead.settings import Count, Option, WholeNumber
from fairhead.store import made_folder, write_json, write_text

if TYPE_CHECKING:
    from fairhead.locate.assumption import Assumption, Side
    from fairhead.locate.read_qk import Rows, Seen
    from fairhead.report import Report
    from fairhead.report.sections.attention_maps import MappedPicture

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
    """What is looked at.

    Attributes:
        model: folder of the model, or a name on the hub that is cached.
        data: as reader:path, such as utkface:UTKFace.zip or images:labels.csv.
        against: folder of another model, shown beside it.
        groups: two groups of the column; the two largest by default.
        part: part of the data.
        limit: at most so many rows, drawn at random.
        layer: attention layer; -1 is the last.
        token: whose q and k; 0 is the first.
        dimension: of q or k to draw: q:HEAD:NUMBER; the oddest by default. Give it several times for several.
        pictures: pictures with maps, as many of each group.
        picture: id of a picture to show instead; give it several times for several.
        max_length: tokens that texts are cut and padded to.
        seed: of the rows drawn.
        device: where to compute: cpu, cuda, cuda:1, ...; auto takes a GPU where there is one.
        out: folder for report.html and attention.json.
    """

    model: Annotated[Path, Option(metavar="PATH")]
    data: Annotated[str, Option(metavar="SPEC")]
    against: Annotated[Path | None, Option(metavar="PATH")] = None
    groups: Annotated[str | None, Option(metavar="A,B")] = None
    part: Annotated[str, Option(metavar="NAME")] = "test"
    limit: Annotated[Count, Option(metavar="N")] = 2000
    layer: Annotated[int, Option(metavar="N")] = -1
    token: Annotated[int, Option(metavar="N")] = 0
    dimension: Annotated[tuple[str, ...], Option(metavar="SIDE:HEAD:NUMBER")] = ()
    pictures: Annotated[WholeNumber, Option(metavar="N")] = 6
    picture: Annotated[tuple[str, ...], Option(metavar="ID")] = ()
    max_length: Annotated[Count, Option(metavar="N")] = 128
    seed: Annotated[WholeNumber, Option(metavar="N")] = 0
    device: str = "auto"
    out: Annotated[Path, Option(metavar="DIR")] = Path("fairhead-attention")


@options("attention")
def attention_command(context: typer.Context, asked: Looking, columns: DataColumns) -> None:
    """Look at q and k by group, and at what the first token attends to."""
    need()
    model, against, out = asked.model, asked.against, asked.out
    if out.suffix.lower() == ".html":
        raise InputError(f"--out is {str(out)!r}; a folder is expected, in which report.html is written")
    if against is not None and against.resolve() == model.resolve():
        raise InputError(f"--against is {str(against)!r}, the model itself: give another one, or leave it out")
    chosen = tuple(_dimension(text) for text in asked.dimension)
    made_folder(out)
    from fairhead.locate.assumption import check_assumption
    from fairhead.locate.read_qk import look, read_rows
    from fairhead.models.load import device_named
    from fairhead.report import render

    data, device = asked.data, str(device_named(asked.device))
    rows = read_rows(data, columns.first_group, columns.options(data), asked.part, asked.limit, asked.seed)
    two = _two_groups(rows, asked.groups)
    folders = {_name(folder, model, against): folder for folder in (model, against) if folder is not None}
    seen = {}
    with progress() as shown:
        for name, folder in folders.items():

            def tell(done: int, total: int, name: str = name) -> None:
                shown.tell(name, done, total)

            seen[name] = look(folder, rows.examples, asked.layer, asked.token, device, asked.max_length, tell)
    kept = (rows.groups == two[0]) | (rows.groups == two[1])
    second = rows.groups[kept] == two[1]
    names = rows.names[two[0]], rows.names[two[1]]
    found = {name: check_assumption(s.q[kept], s.k[kept], second, names, chosen) for name, s in seen.items()}
    shown_pictures = _pictures(rows, two, seen, asked.pictures, asked.picture)
    provenance = {
        "command": command_line(context),
        "rows": len(rows.examples),
        "group": rows.column,
        **{f"layer of {name}": f"{s.layer} ({s.name})" for name, s in seen.items()},
        "token": asked.token,
        "seed": asked.seed,
    }
    title = f"Attention of {' and '.join(seen)} on {data.partition(':')[0]}, by {rows.column}"
    write_text(out / "report.html", render(_report(title, found, shown_pictures, provenance)))
    twin = {
        "schema": "fairhead.attention/1",
        "assumption": {name: result.to_dict() for name, result in found.items()},
        "maps": [{"picture": shown.title, "maps": [vars(m) for m in shown.maps]} for shown in shown_pictures],
        "provenance": provenance,
    }
    write_json(out / "attention.json", twin)
    for name, result in found.items():
        what = f"{rows.column}, {names[0]} and {names[1]}, {int(kept.sum())} rows, layer {seen[name].layer}"
        typer.echo(harmless(f"{name}: {what}"))
        for sentence in result.sentences():
            typer.echo(harmless(f"- {sentence}"))
    typer.echo(f"\nreport: {out / 'report.html'}")


_NOTES = (
    "Bars: the rows of each group. Lines: normal distributions with each group's own mean and deviation. The distance "
    "from normal is the largest difference of the two distribution functions, 0 for normal. Shares of dimensions are "
    "corrected over all of them (Holm), and with many rows small departures from normal are significant, too.",
    "Gaps in the logit are averaged over heads, each in the direction that it has in half of the rows; the gaps "
    "themselves, predicted and measured, are those of the other half, so that noise alone makes none.",
    "q and k are those that attention goes on with: in a model with DAM they are normalised and absolute, far from "
    "normal by design.",
    "Maps: the darker a patch, the less of the first token's attention is on it, relative to the most attended patch "
    "of that map; averaged over heads. Attention shows where a layer reads from, not what decides the answer.",
)


def _report(
    title: str, found: "Mapping[str, Assumption]", pictures: "Sequence[MappedPicture]", provenance: Mapping[str, Any]
) -> "Report":
    """The page: q and k of each model, then the maps."""
    from fairhead.report import Report
    from fairhead.report.sections.attention_maps import AttentionMaps
    from fairhead.report.sections.prose import Text

    sections: list[Any] = [
        {
            "kind": "qk_histograms",
            "title": f"q and k of {model} by group",
            "text": "DAM's theory assumes that each dimension is normal within a group, and that q and k are "
            "independent there. "
            + ", ".join(
                f"{n} has {100 * s:.1f} % of the rows" for n, s in zip(result.names, result.shares, strict=True)
            )
            + ".",
            "names": result.names,
            "chosen": result.chosen,
            "findings": result.sentences(),
        }
        for model, result in found.items()
    ]
    if pictures:
        sections.append(AttentionMaps(title="What the first token looks at", pictures=pictures))
    sections.append(Text(title="How to read this", text="\n\n".join(_NOTES)))
    return Report(title=title, question="", verdict=[], sections=sections, provenance=provenance, brand="attention")


def _name(folder: Path, model: Path, against: Path | None) -> str:
    """The folder's own name, and its parent's too where both folders are called alike ("run/model")."""
    full = folder.resolve()
    alike = against is not None and model.resolve().name == against.resolve().name
    return f"{full.parent.name}/{full.name}" if alike else full.name


def _dimension(text: str) -> "tuple[Side, int, int]":
    side, *numbers = text.split(":")
    if side not in ("q", "k") or len(numbers) != 2 or not all(n.isdigit() for n in numbers):
        raise InputError(f"--dimension is {text!r}; expected q or k, head and number, such as q:0:5")
    return "q" if side == "q" else "k", int(numbers[0]), int(numbers[1])


def _two_groups(rows: "Rows", wanted: str | None) -> tuple[int, int]:
    """Numbers of two groups: the larger first."""
    import numpy as np

    from fairhead.errors import did_you_mean

    sizes = np.bincount(rows.groups, minlength=len(rows.names))
    if wanted is None:
        order = np.argsort(-sizes, kind="stable")[:2].tolist()
        if len(order) < 2 or sizes[order[1]] == 0:
            raise InputError(f"all rows have {rows.column} {rows.names[order[0]]}: two groups are needed")
        return order[0], order[1]
    names = [name.strip() for name in wanted.split(",")]
    if len(names) != 2 or names[0] == names[1]:
        raise InputError(f"--groups is {wanted!r}; expected two groups of {rows.column}, such as A,B")
    for name in names:
        if name not in rows.names:
            near = did_you_mean(name, list(rows.names))
            raise InputError(f"--groups: {rows.column} has no {name!r}; there are {', '.join(rows.names)}.{near}")
    return rows.names.index(names[0]), rows.names.index(names[1])


def _pictures(
    rows: "Rows", two: tuple[int, int], seen: "Mapping[str, Seen]", count: int, ids: Sequence[str]
) -> "list[MappedPicture]":
    """The pictures asked for by id, or the first of either group in turn."""
    import numpy as np

    from fairhead.data import Images
    from fairhead.report.sections.attention_maps import AttentionMap, MappedPicture, picture_address

    images = rows.examples.inputs
    if not isinstance(images, Images) or any(s.patch_grid is None for s in seen.values()):
        if ids:
            raise InputError("--picture: there are no maps over texts, or over pictures of models without patches")
        return []
    row_of = {name: row for row, name in enumerate(rows.examples.ids.tolist())}
    for name in ids:
        if name not in row_of:
            raise InputError(f"--picture: there is no row {name!r} among the {len(row_of)} drawn; raise --limit?")
    by_group = [np.flatnonzero(rows.groups == group)[: (count + 1) // 2].tolist() for group in two]
    mixed = [row for turn in zip(*by_group, strict=False) for row in turn][:count]
    found = []
    for row in [row_of[name] for name in ids] or mixed:
        label, group = rows.examples.classes[rows.examples.labels[row]], rows.names[rows.groups[row]]
        maps = []
        for name, s in seen.items():
            assert s.patch_grid is not None
            n_patches = s.patch_grid[0] * s.patch_grid[1]
            patches = s.looks[row, -n_patches:].reshape(s.patch_grid)
            maps.append(AttentionMap(model=name, patches=patches.tolist(), elsewhere=float(1 - patches.sum())))
        title = f"{rows.examples.ids[row]}: {label}, {rows.column} {group}"
        found.append(MappedPicture(title=title, picture=picture_address(images[row]), maps=maps))
    return found
