"""FairFace: faces with perceived age (9 bins), gender and race (7), balanced over race."""

import os
from collections.abc import Mapping, Sequence
from io import StringIO

import pandas as pd

from fairhead.data.datasets import Dataset, choose, column
from fairhead.data.files import Skips, Source
from fairhead.data.images import Images
from fairhead.data.splits import EIGHTY_TEN_TEN, split_by_hash
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
    """Read FairFace: `fairface_label_train.csv` and/or `fairface_label_val.csv` with the folders `train/` and `val/`.

    Args:
        path: folder or zip archive; in a folder the images may still be in the authors' zip beside the labels.
        target: "gender", "age", "race" or "service_test".
        groups: any of the same.
        split: "official" (train and val, as far as they are there) or "random".
        fractions: part -> share of a random split.
        seed: of a random split.
        on_error: "raise", or "skip" to decode every image once and leave out what is missing or broken.
    """
    choose("split", [split], ("official", "random"))
    choose("target", [target], COLUMNS)
    groups = choose("group", groups, COLUMNS)
    source, skips = Source(path), Skips(on_error)
    parts = [part for part in ("train", "val") if source.matching(f"fairface_label_{part}.csv")]
    if not parts or (source.is_file and not source.is_archive):
        raise source.missing("fairface_label_train.csv or fairface_label_val.csv, with train/ or val/", "FairFace")
    tables = {part: _labels(source, part) for part in parts}
    table = pd.concat([t.assign(part=part) for part, t in tables.items()], ignore_index=True)

    rows, images = Images.listed(*_images(source, table["file"].tolist()), "the label file", skips)
    table = table.iloc[rows]
    ids = table["file"].tolist()
    made = {"data": "fairface", "path": str(source.path), "target": target, "groups": groups, "split": split}
    return Dataset.of(
        ids,
        images,
        column(table[target].tolist()),
        table["part"].tolist() if split == "official" else split_by_hash(ids, fractions, seed),
        {name: column(table[name].tolist()) for name in groups},
        skipped=skips.found(),
        provenance={**made, "seed": seed},
    )


def _labels(source: Source, part: str) -> pd.DataFrame:
    name = source.find(f"fairface_label_{part}.csv", "FairFace")
    where = source.where(name)
    try:
        table = pd.read_csv(StringIO(source.text(name)), dtype=str, keep_default_na=False)
    except (ValueError, pd.errors.ParserError) as error:
        raise InputError(f"{where}: is not a CSV file: {error}") from None
    lacking = [c for c in ("file", *COLUMNS) if c not in table.columns]
    if lacking:
        raise InputError(f"{where}: has no column {lacking[0]!r}; it has {', '.join(table.columns)}")
    if not len(table):
        raise InputError(f"{where}: has a header and no row. Is the file cut off?")
    if table["file"].duplicated().any():
        raise InputError(f"{where}: {table['file'][table['file'].duplicated()].iloc[0]} is there twice")
    blank = (table[["file", *COLUMNS]] == "").any(axis=1)
    if blank.any():
        line = int(blank.to_numpy().argmax()) + 2
        raise InputError(f"{where}: line {line} has an empty field. Is the file cut off?")
    return table


def _images(source: Source, listed: list[str]) -> tuple[Source, list[str], dict[str, str]]:
    """Where the images lie, those of the label files (`val/1.jpg`), and their names there by these."""
    archives = [] if source.is_archive else [Source(source.path / name) for name in source.matching("*.zip")]
    for candidate in (source, *archives):
        if any(n == listed[0] or n.endswith("/" + listed[0]) for n in candidate.names):
            return candidate, listed, {"/".join(n.split("/")[-2:]): n for n in candidate.names}
    raise source.missing(f"the images of its label file, such as {listed[0]}", "FairFace")
