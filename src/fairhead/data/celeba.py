"""CelebA: aligned faces with 40 binary attributes (as perceived) and the identity of the person."""

import os
from collections.abc import Mapping, Sequence
from io import StringIO

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fairhead.data.datasets import Dataset, choose, column, yes_no
from fairhead.data.files import Skips, Source, base_name
from fairhead.data.images import Images
from fairhead.data.splits import EIGHTY_TEN_TEN, split_by_hash
from fairhead.errors import InputError
from fairhead.records import Column

PARTS = ("train", "val", "test")  # in the order of the codes in list_eval_partition.txt


def read_celeba(
    path: str | os.PathLike[str],
    *,
    target: str = "Attractive",
    groups: Sequence[str] = ("Male",),
    split: str = "auto",
    fractions: Mapping[str, float] = EIGHTY_TEN_TEN,
    seed: int = 0,
    on_error: str = "raise",
) -> Dataset:
    """Read CelebA: `list_attr_celeba.txt`, `list_eval_partition.txt`, `identity_CelebA.txt` and the aligned images.

    The lists may lie beside `img_align_celeba/` or in the `Anno/` and `Eval/` folders of the download; the images may
    be unpacked or in `img_align_celeba.zip`. All of it may be one zip archive.

    Args:
        path: folder or zip archive.
        target: any of the 40 attributes; the classes are "no" and "yes".
        groups: any of the 40 attributes; "Male" has the levels "Male" and "not Male".
        split: "official" (the authors' partition), "identity" (random, no person in two parts), or "auto": the official
            one where it has all three parts, else by identity.
        fractions: part -> share of a split by identity.
        seed: of a split by identity.
        on_error: "raise", or "skip" to decode every image once and leave out what is missing or broken.

    Returns:
        The data set; where identities are known they are its cluster column.
    """
    choose("split", [split], ("auto", "official", "identity"))
    source, skips = Source(path), Skips(on_error)
    table = _attributes(source)
    choose("target", [target], list(table.columns))
    groups = choose("group", groups, list(table.columns))
    part = _optional_list(source, "list_eval_partition.txt", table.index)
    identity = _optional_list(source, "identity_CelebA.txt", table.index)

    rows, images = Images.listed(*_images(source, table.index.tolist()), "list_attr_celeba.txt", skips)
    table = table.iloc[rows]
    part, identity = (None if x is None else x[rows] for x in (part, identity))

    complete = part is not None and set(part.tolist()) == {0, 1, 2}
    if split == "official" or (split == "auto" and complete):
        if part is None:
            raise source.missing("list_eval_partition.txt for the official split", "CelebA")
        if not np.isin(part, range(len(PARTS))).all():
            raise InputError(
                f"{source.path}: list_eval_partition.txt has parts other than 0, 1 and 2, such as "
                f"{part[~np.isin(part, range(len(PARTS)))][0]}. Is it another of the lists?"
            )
        parts = np.array(PARTS)[part]
        split = "official"
    else:
        if identity is None:
            raise source.missing("identity_CelebA.txt to split by identity", "CelebA")
        parts = split_by_hash([str(i) for i in identity], fractions, seed)
        split = "identity"

    made = {"data": "celeba", "path": str(source.path), "target": target, "groups": groups, "split": split}
    return Dataset.of(
        table.index.to_numpy(),
        images,
        Column((table[target].to_numpy() > 0).astype(np.int64), ("no", "yes")),
        parts,
        {name: yes_no(name, table[name].to_numpy() > 0) for name in groups},
        cluster=None if identity is None else column(identity),
        skipped=skips.found(),
        provenance={**made, "seed": seed},
    )


def _attributes(source: Source) -> pd.DataFrame:
    """The 40 attributes, −1 or 1, by image name."""
    name = source.find("list_attr_celeba.txt", "CelebA")
    text = source.text(name)
    count, _, rest = text.partition("\n")
    header, _, body = rest.partition("\n")
    columns = header.split()
    if not count.strip().isdigit() or not columns:
        raise InputError(
            f"{source.where(name)}: the first line should be the number of images, the second the attributes"
        )
    try:
        table = pd.read_csv(StringIO(body), sep=r"\s+", header=None, names=["image", *columns], index_col="image")
        values = table.to_numpy(dtype=np.float64)  # a cut-off line gives NaN
    except (ValueError, pd.errors.ParserError) as error:
        raise InputError(f"{source.where(name)}: is not a table of -1 and 1: {error}") from None
    if len(table) != int(count) or not np.isin(values, (-1, 1)).all():
        raise InputError(
            f"{source.where(name)}: announces {int(count)} images and holds {len(table)} rows; values must be -1 or 1. "
            "Is the file cut off?"
        )
    if table.index.has_duplicates:
        raise InputError(f"{source.where(name)}: {table.index[table.index.duplicated()][0]} is there twice")
    return pd.DataFrame(values.astype(np.int8), index=table.index.astype(str), columns=columns)


def _optional_list(source: Source, file: str, images: "pd.Index[str]") -> NDArray[np.int64] | None:
    """The integer that a list gives to each image, shape [n]; None where the list is not there."""
    if not source.matching(file):
        return None
    name = source.find(file, "CelebA")
    try:
        rows = pd.read_csv(StringIO(source.text(name)), sep=r"\s+", header=None, names=["image", "value"])
        if rows["image"].duplicated().any():
            raise ValueError(f"{rows['image'][rows['image'].duplicated()].iloc[0]} is there twice")
        values = rows.set_index("image")["value"].astype(np.int64).reindex(images)
    except (ValueError, pd.errors.ParserError) as error:
        raise InputError(f"{source.where(name)}: each line should be an image name and a number: {error}") from None
    if values.isna().any():
        raise InputError(
            f"{source.where(name)}: has no line for {values.index[values.isna()][0]}. Is the file cut off?"
        )
    return np.asarray(values, dtype=np.int64)


def _images(source: Source, listed: list[str]) -> tuple[Source, list[str], dict[str, str]]:
    """Where the images lie, those of the list, and their names there by base name."""
    archives = source.matching("img_align_celeba.zip")
    names = source.matching("*.jpg", "*.png")
    if not names and archives and not source.is_archive:
        source = Source(source.path / archives[0])
        names = source.matching("*.jpg", "*.png")
    if not names:
        raise source.missing("a folder img_align_celeba or img_align_celeba.zip", "CelebA")
    return source, listed, {base_name(name): name for name in names}
