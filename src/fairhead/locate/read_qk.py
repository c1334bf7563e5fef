"""q, k and the first token's attention of a model on a data set, through the tap."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairhead.data import Examples, Images, read_labelled
from fairhead.errors import InputError, UnsupportedModel, check_known
from fairhead.heads import Tap
from fairhead.locate.assumption import Assumption, check_assumption
from fairhead.locate.locate_settings import AttentionPlan
from fairhead.models import LoadedModel, open_model
from fairhead.models.attached import positions_of
from fairhead.models.inputs import Pictures, normalising, text_length, tokens_of
from fairhead.models.load import device_named
from fairhead.report import Report, Result, harmless, render, terminal
from fairhead.report.sections.attention_sections import AttentionMap, AttentionMaps, MappedPicture, picture_address
from fairhead.report.sections.plain import Text
from fairhead.store import write_json, write_text

if TYPE_CHECKING:
    from rich.console import Console

Array = NDArray[np.float64]
Progress = Callable[[int, int], None]
_BATCH = 64
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


@dataclass(frozen=True)
class GroupedRows:
    """Rows of a data set with the group of each."""

    examples: Examples  # inputs and labels
    groups: NDArray[np.integer]  # [n], into `names`
    names: tuple[str, ...]  # of the groups
    column: str  # what they are groups by


def grouped_rows(
    spec: str,
    column: str | None = None,
    options: Mapping[str, Any] | None = None,
    part: str = "test",
    limit: int | None = None,
    seed: int = 0,
) -> GroupedRows:
    """Rows of one part of a data set, drawn at random where there are more than `limit`."""
    dataset = read_labelled(spec, **(options or {})).with_known_groups()
    columns = list(dataset.attributes.columns)
    if not columns:
        raise InputError(f"{spec} has no group column: name one with --group")
    name = columns[0] if column is None else column
    check_known(name, columns, f"{spec} has no group column {name!r}; there are")
    examples = dataset.examples(part)
    if limit is not None and limit < len(examples):
        examples = examples.take(np.sort(np.random.default_rng(seed).permutation(len(examples))[:limit]))
    groups = dataset.groups(examples.ids)[name]
    return GroupedRows(examples, groups.codes, tuple(str(level) for level in groups.levels), name)


class Seen(NamedTuple):
    """What one layer of a model did with the rows."""

    q: Array  # of the chosen token, [n, H, d]
    k: Array  # of the chosen token, [n, H, d]
    looks: Array  # what the first token looks at, averaged over heads, [n, T]
    layer: int  # its number
    name: str  # of the attention module
    patch_grid: tuple[int, int] | None  # rows and columns of patches, for pictures


@torch.inference_mode()
def look(
    folder: Path | str,  # of a Hugging Face model, with a method of this library in it or not
    examples: Examples,  # what to run it on
    layer: int = -1,  # which attention layer; −1 for the last
    token: int = 0,  # whose q and k are kept
    device: str = "cpu",  # where to run
    max_length: int = 128,  # tokens that texts are cut and padded to
    progress: Progress | None = None,  # called with (done, total)
) -> Seen:
    """Run a model over rows and keep what one attention layer did."""
    loaded = open_model(folder, device=device, dtype="float32")
    model = loaded.model
    inputs, grid = _inputs(loaded, examples, max_length)
    kept: dict[str, list[Tensor]] = {"q": [], "k": [], "weights": []}
    with Tap(model, layers=layer) as tap:
        site = tap.sites[0]
        readings = {what: tap.read(what, tokens=0 if what == "weights" else token) for what in kept}
        for start in range(0, len(examples), _BATCH):
            model(**{name: tensor.to(device) for name, tensor in inputs(start, start + _BATCH).items()})
            for what, reading in readings.items():
                kept[what].append(reading[site.layer].float().cpu())
            if progress is not None:
                progress(min(start + _BATCH, len(examples)), len(examples))
    q, k, weights = (torch.cat(kept[what]).double() for what in ("q", "k", "weights"))
    if k.shape[1] != q.shape[1]:  # heads that share a key
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    looks = weights.mean(1)
    if grid is not None and looks.shape[1] < grid[0] * grid[1] + 1:
        raise UnsupportedModel(
            f"layer {site.layer} of {type(model).__name__} sees {looks.shape[1]} tokens, fewer than the patches of a "
            "picture: its maps cannot be drawn"
        )
    return Seen(q.numpy(), k.numpy(), looks.numpy(), site.layer, site.name, grid)


def _inputs(
    loaded: LoadedModel, examples: Examples, max_length: int
) -> tuple[Callable[[int, int], dict[str, Tensor]], tuple[int, int] | None]:
    """What gives the model's inputs for rows from start to end, and the grid of patches of a picture."""
    if isinstance(examples.inputs, Images):
        pictures = Pictures.of(loaded.files("image processor"))
        normalising(loaded.model, pictures)
        images = examples.inputs
        config = getattr(loaded.model.config, "vision_config", loaded.model.config)
        patch = getattr(config, "patch_size", None)
        side = pictures.size // patch if isinstance(patch, int) else None

        def pixels(start: int, end: int) -> dict[str, Tensor]:
            array = images.take(np.arange(start, min(end, len(images)))).as_array(pictures.size)
            return {"pixel_values": torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2)))}

        return pixels, None if side is None else (side, side)
    texts = list(examples.inputs)
    length = positions_of(loaded.model) or text_length(loaded.model.config, max_length)
    return lambda start, end: tokens_of(loaded.tokenizer, texts[start:end], length), None


@dataclass(frozen=True)
class AttentionByGroup(Result):
    """q and k of one model or two by group, and what the first token looks at."""

    title: str
    assumptions: Mapping[str, Assumption]  # model -> how far its q and k are from what DAM's theory assumes
    about: Mapping[str, str]  # model -> which rows and layer these are of
    pictures: Sequence[MappedPicture]  # with maps, where the rows are pictures
    provenance: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "schema": "fairhead.attention/1",
            "assumption": {name: result.to_dict() for name, result in self.assumptions.items()},
            "maps": [{"picture": shown.title, "maps": [vars(m) for m in shown.maps]} for shown in self.pictures],
            "provenance": dict(self.provenance),
        }

    def rows(self) -> list[dict[str, Any]]:
        """One row a model and side (q, k): the figures over all dimensions."""
        both = [(name, side, getattr(one, side)) for name, one in self.assumptions.items() for side in ("q", "k")]
        return [{"model": name, "side": side, **vars(figures)} for name, side, figures in both]

    def page(self) -> Report:
        """Q and k of each model, then the maps."""
        theory = (
            "DAM's theory assumes that each dimension is normal within a group, and that q and k are independent there."
        )
        sections: list[Any] = []
        for model, result in self.assumptions.items():
            named = zip(result.names, result.shares, strict=True)
            shares = ", ".join(f"{name} has {100 * share:.1f} % of the rows" for name, share in named)
            title = {"kind": "qk_histograms", "title": f"q and k of {model} by group", "text": f"{theory} {shares}."}
            found = {"names": result.names, "chosen": result.chosen, "findings": result.sentences()}
            sections.append({**title, **found})
        if self.pictures:
            sections.append(AttentionMaps(title="What the first token looks at", pictures=self.pictures))
        sections.append(Text(title="How to read this", text="\n\n".join(_NOTES)))
        return Report(
            title=self.title, question="", verdict=[], sections=sections, provenance=self.provenance, brand="attention"
        )

    def show(self, console: "Console | None" = None) -> None:
        """Print what can be said of each model."""
        out = console or terminal()
        for name, result in self.assumptions.items():
            for line in (f"{name}: {self.about[name]}", *(f"- {sentence}" for sentence in result.sentences())):
                out.print(harmless(line), markup=False, highlight=False, soft_wrap=True)

    def write(self, out: Path) -> None:
        """Write report.html and attention.json to a folder."""
        write_text(out / "report.html", render(self.page()))
        write_json(out / "attention.json", self.to_dict())


def attention_by_group(
    models: Mapping[str, Path | str],  # name -> folder
    data: str,  # as reader:path
    column: str | None = None,  # of the groups; None for the first there is
    options: Mapping[str, Any] | None = None,  # of the reader
    plan: AttentionPlan | None = None,  # which rows, tokens and pictures
    *,
    progress: Callable[[str, int, int], None] | None = None,  # called with (model, done, all)
    provenance: Mapping[str, Any] | None = None,  # anything else worth keeping, such as the command
) -> AttentionByGroup:
    """Look at q and k of models by group, and at what the first token attends to.

    Example:
        >>> attention_by_group({"plain": "run/model"}, "utkface:UTKFace.zip", "white").show()  # doctest: +SKIP
    """
    plan = plan or AttentionPlan()
    rows = grouped_rows(data, column, options, plan.part, plan.limit, plan.seed)
    two = _two_groups(rows, plan.groups)
    seen = {}
    for name, folder in models.items():
        tell = None if progress is None else partial(progress, name)
        device = str(device_named(plan.device))
        seen[name] = look(folder, rows.examples, plan.layer, plan.token, device, plan.max_length, tell)
    kept = (rows.groups == two[0]) | (rows.groups == two[1])
    second = rows.groups[kept] == two[1]
    names = rows.names[two[0]], rows.names[two[1]]
    found = {name: check_assumption(s.q[kept], s.k[kept], second, names, plan.dimensions) for name, s in seen.items()}
    which = f"{rows.column}, {names[0]} and {names[1]}, {int(kept.sum())} rows"
    return AttentionByGroup(
        title=f"Attention of {' and '.join(seen)} on {data.partition(':')[0]}, by {rows.column}",
        assumptions=found,
        about={name: f"{which}, layer {s.layer}" for name, s in seen.items()},
        pictures=_pictures(rows, two, seen, plan.pictures, plan.picture),
        provenance={
            **(provenance or {}),
            "rows": len(rows.examples),
            "group": rows.column,
            **{f"layer of {name}": f"{s.layer} ({s.name})" for name, s in seen.items()},
            "token": plan.token,
            "seed": plan.seed,
        },
    )


def _two_groups(rows: GroupedRows, wanted: str | None) -> tuple[int, int]:
    """Numbers of two groups: the larger first."""
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
        check_known(name, rows.names, f"--groups: {rows.column} has no {name!r}; there are")
    return rows.names.index(names[0]), rows.names.index(names[1])


def _pictures(
    rows: GroupedRows, two: tuple[int, int], seen: Mapping[str, Seen], count: int, ids: Sequence[str]
) -> list[MappedPicture]:
    """The pictures asked for by id, or the first of either group in turn."""
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
