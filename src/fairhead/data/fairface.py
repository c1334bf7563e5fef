"""FairFace: faces with perceived age (9 bins), gender and race (7), balanced over race."""

import os
from collections.abc import Mapping, Sequence
from io import StringIO

import numpy as np
import pandas as pd

from fairhead.data.datasets import Attributes, Dataset, Examples, choose, column
from fairhead.data.files import Skips, Source
from fairhead.data.images import Images
from fairhead.data.splits import EIGHTY_TEN_TEN, check_split, split_by_hash
from fairhead.errors import InputError

COLUMNS = ("age", "gender", "race", "service_test")


def read_fairface(
    path: str | os.PathLike[str],
    *,
    target: str = "gender",
    groups: Sequence[str] = ("race",),
    split: str = "official",
    fractions: Mapping[str, float] = EIGHTY_TEN_TEN,
    seed: int = 0,
    on_error: str = "raise",
) -> Dataset:
    r"""Read FairFace: `fairface_label_train.csv` and/or `fairface_label_val.csv` with the folders `train/` and `val/`.

    Args:
        path: folder or zip archive; in a folder the images may still be in the authors' zip beside the labels.
        target: "gender", "age", "race" or "service_test".
        groups: any of the same.
        split: "official" (train and val, as far as they are there) or "random".
        fractions: part -> share of a random split.
        seed: of a random split.
        on_error: "raise", or "skip" to decode every image once and leave out what is missing or broken.

    Example:
        >>> import pathlib, tempfile
        >>> from PIL import Image
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> (folder / "val").mkdir()
        >>> Image.new("RGB", (4, 4)).save(folder / "val/1.jpg")
        >>> rows = "file,age,gender,race,service_test\nval/1.jpg,3-9,Male,East Asian,False\n"
        >>> _ = (folder / "fairface_label_val.csv").write_text(rows)
        >>> data = read_fairface(folder)
        >>> data.classes, data.sizes, data.groups()["race"].levels
        (('Male',), {'val': 1}, ('East Asian',))
    """
    check_split(split, ("official", "random"))
    choose("target", [target], COLUMNS)
    groups = choose("group", groups, COLUMNS)
    source, skips = Source(path), Skips(on_error)
    parts = [part for part in ("train", "val") if source.matching(f"fairface_label_{part}.csv")]
    if not parts or (source.is_file and not source.is_archive):
        raise source.missing("fairface_label_train.csv or fairface_label_val.csv, with train/ or val/", "FairFace")
    tables = {part: _labels(source, part) for part in parts}
    table = pd.concat([t.assign(part=part) for part, t in tables.items()], ignore_index=True)

    image_source, members = _images(source, table["file"].iloc[0])
    present = table["file"].isin(members).to_numpy()
    for name in table["file"][~present]:
        skips.error("image is missing", name, f"{image_source.path}: {name} is in the label file but not here")
    table = table[present]
    images = Images(image_source, [members[name] for name in table["file"]])
    good = images.decodable(skips)
    table, images = table.iloc[good], images.take(good)

    ids = table["file"].to_numpy(dtype=str)
    label = column(table[target].tolist())
    return Dataset(
        name="fairface",
        all=Examples(ids, images, label.codes.astype(np.int64), label.levels),
        split=table["part"].to_numpy(dtype=str)
        if split == "official"
        else split_by_hash(ids.tolist(), fractions, seed),
        attributes=Attributes(ids, {name: column(table[name].tolist()) for name in groups}),
        skipped=skips.found(),
        provenance={
            "data": "fairface",
            "path": str(source.path),
            "target": target,
            "groups": groups,
            "split": split,
            "seed": seed,
        },
    )


def _labels(source: Source, part: str) -> pd.DataFrame:
    name = source.find(f"fairface_label_{part}.csv", "FairFace")
    try:
        table = pd.read_csv(StringIO(source.text(name)), dtype=str, keep_default_na=False)
    except (ValueError, pd.errors.ParserError) as error:
        raise InputError(f"{source.where(name)}: is not a CSV file: {error}") from None
    lacking = [c for c in ("file", *COLUMNS) if c not in table.columns]
    if lacking:
        raise InputError(f"{source.where(name)}: has no column {lacking[0]!r}; it has {', '.join(table.columns)}")
    if not len(table):
        raise InputError(f"{source.where(name)}: has a header and no row. Is the file cut off?")
    if table["file"].duplicated().any():
        raise InputError(f"{source.where(name)}: {table['file'][table['file'].duplicated()].iloc[0]} is there twice")
    blank = (table[["file", *COLUMNS]] == "").any(axis=1)
    if blank.any():
        raise InputError(
            f"{source.where(name)}: line {int(blank.to_numpy().argmax()) + 2} has an empty field. Is the file cut off?"
        )
    return table


def _images(source: Source, first: str) -> tuple[Source, dict[str, str]]:
    """Where the images lie, and their names there by the names in the label files (`val/1.jpg`)."""
    for candidate in (source, *(() if source.is_archive else map(Source, _archives(source)))):
        if any(n == first or n.endswith("/" + first) for n in candidate.names):
            return candidate, {"/".join(n.split("/")[-2:]): n for n in candidate.names}
    raise source.missing(f"the images of its label file, such as {first}", "FairFace")


def _archives(source: Source) -> list[str]:
    return [str(source.path / name) for name in source.matching("*.zip")]
