"""Published faces: CelebA, FairFace and UTKFace. All of their attributes are as perceived."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fairhead.data.datasets import Dataset, choose, column, yes_no
from fairhead.data.files import Skips, Source, base_name, table_of
from fairhead.data.images import Images
from fairhead.data.splits import EIGHTY_TEN_TEN, shuffle_by_hash, split_by_hash
from fairhead.errors import InputError
from fairhead.records import Column

CELEBA_PARTS = ("train", "val", "test")  # in the order of the codes in list_eval_partition.txt
FAIRFACE_COLUMNS = ("age", "gender", "race", "service_test")
# Of UTKFace, in the order of the codes in the file names.
GENDERS = ("male", "female")
RACES = ("White", "Black", "Asian", "Indian", "Other")
_NAME = re.compile(r"(\d{1,3})_([01])_([0-4])_(\d+)\D*")
_NAME_WITHOUT_RACE = re.compile(r"\d{1,3}_[01]_\d{8,}\D*")


def _refuse_twice(names: Iterable[str], where: str) -> None:
    every = pd.Index(names)
    if every.has_duplicates:
        raise InputError(f"{where}: {every[every.duplicated()][0]} is there twice")


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
    """Read CelebA: aligned faces with 40 binary attributes and the identity of the person.

    Its lists (`list_attr_celeba.txt`, `list_eval_partition.txt`, `identity_CelebA.txt`) may lie beside
    `img_align_celeba/` or in the `Anno/` and `Eval/` folders of the download; the images may be unpacked or in
    `img_align_celeba.zip`. All of it may be one zip archive.

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
    table = _celeba_attributes(source)
    choose("target", [target], list(table.columns))
    groups = choose("group", groups, list(table.columns))
    part = _celeba_list(source, "list_eval_partition.txt", table.index)
    identity = _celeba_list(source, "identity_CelebA.txt", table.index)

    place = source
    if not source.matching("*.jpg", "*.png") and not source.is_archive:
        place = next((Source(source.path / name) for name in source.matching("img_align_celeba.zip")), source)
    members = {base_name(name): name for name in place.matching("*.jpg", "*.png")}
    if not members:
        raise source.missing("a folder img_align_celeba or img_align_celeba.zip", "CelebA")
    rows, images = Images.listed(place, table.index.tolist(), members, "list_attr_celeba.txt", skips)
    table = table.iloc[rows]
    part, identity = (None if x is None else x[rows] for x in (part, identity))

    complete = part is not None and set(part.tolist()) == {0, 1, 2}
    if split == "official" or (split == "auto" and complete):
        if part is None:
            raise source.missing("list_eval_partition.txt for the official split", "CelebA")
        if strange := set(part.tolist()) - {0, 1, 2}:
            raise InputError(
                f"{source.path}: list_eval_partition.txt has parts other than 0, 1 and 2, such as {min(strange)}. "
                "Is it another of the lists?"
            )
        parts, split = np.array(CELEBA_PARTS)[part], "official"
    else:
        if identity is None:
            raise source.missing("identity_CelebA.txt to split by identity", "CelebA")
        parts, split = split_by_hash([str(i) for i in identity], fractions, seed), "identity"

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


def _celeba_attributes(source: Source) -> pd.DataFrame:
    """The 40 attributes, −1 or 1, by image name."""
    name = source.find("list_attr_celeba.txt", "CelebA")
    where = source.where(name)
    count, _, rest = source.text(name).partition("\n")
    header, _, body = rest.partition("\n")
    columns = header.split()
    if not count.strip().isdigit() or not columns:
        raise InputError(f"{where}: the first line should be the number of images, the second the attributes")
    table = table_of(
        body, where, "is not a table of -1 and 1", sep=r"\s+", header=None, names=["image", *columns], index_col="image"
    )
    if len(table) != int(count) or not table.isin((-1, 1)).all(axis=None):  # a cut-off line has NaN
        raise InputError(
            f"{where}: announces {int(count)} images and holds {len(table)} rows; values must be -1 or 1. "
            "Is the file cut off?"
        )
    _refuse_twice(table.index, where)
    return table.astype(np.int8).set_axis(table.index.astype(str))


def _celeba_list(source: Source, file: str, images: "pd.Index[str]") -> NDArray[np.int64] | None:
    """The integer that a list gives to each image, shape [n]; None where the list is not there."""
    if not source.matching(file):
        return None
    name = source.find(file, "CelebA")
    where = source.where(name)
    rows = table_of(
        source.text(name),
        where,
        "each line should be an image name and a number",
        sep=r"\s+",
        header=None,
        names=["image", "value"],
        dtype={"value": np.int64},
    )
    _refuse_twice(rows["image"], where)
    values = rows.set_index("image")["value"].reindex(images)
    if values.isna().any():
        raise InputError(f"{where}: has no line for {values.index[values.isna()][0]}. Is the file cut off?")
    return np.asarray(values, dtype=np.int64)


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
    """Read FairFace: faces with age (9 bins), gender and race (7), balanced over race.

    It has `fairface_label_train.csv` and/or `fairface_label_val.csv`, with the folders `train/` and `val/`.

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
    choose("target", [target], FAIRFACE_COLUMNS)
    groups = choose("group", groups, FAIRFACE_COLUMNS)
    source, skips = Source(path), Skips(on_error)
    parts = [part for part in ("train", "val") if source.matching(f"fairface_label_{part}.csv")]
    if not parts or (source.is_file and not source.is_archive):
        raise source.missing("fairface_label_train.csv or fairface_label_val.csv, with train/ or val/", "FairFace")
    table = pd.concat([_fairface_labels(source, part).assign(part=part) for part in parts], ignore_index=True)

    listed = table["file"].tolist()  # such as val/1.jpg
    archives = [] if source.is_archive else [Source(source.path / name) for name in source.matching("*.zip")]
    for place in (source, *archives):
        members = {"/".join(name.split("/")[-2:]): name for name in place.names}
        if listed[0] in members:
            break
    else:
        raise source.missing(f"the images of its label file, such as {listed[0]}", "FairFace")
    rows, images = Images.listed(place, listed, members, "the label file", skips)
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


def _fairface_labels(source: Source, part: str) -> pd.DataFrame:
    name = source.find(f"fairface_label_{part}.csv", "FairFace")
    where = source.where(name)
    table = table_of(source.text(name), where, "is not a CSV file", dtype=str, keep_default_na=False)
    lacking = [c for c in ("file", *FAIRFACE_COLUMNS) if c not in table.columns]
    if lacking:
        raise InputError(f"{where}: has no column {lacking[0]!r}; it has {', '.join(table.columns)}")
    if not len(table):
        raise InputError(f"{where}: has a header and no row. Is the file cut off?")
    _refuse_twice(table["file"], where)
    blank = (table[["file", *FAIRFACE_COLUMNS]] == "").any(axis=1).to_numpy()
    if blank.any():
        raise InputError(f"{where}: line {int(blank.argmax()) + 2} has an empty field. Is the file cut off?")
    return table


def read_utkface(
    path: str | os.PathLike[str],
    *,
    target: str = "gender",
    groups: Sequence[str] = ("white", "race"),
    age_bins: Sequence[int] = (0, 20, 40, 60),
    drop_duplicates: bool = True,
    bias_rate: float | None = None,
    fractions: Mapping[str, float] = EIGHTY_TEN_TEN,
    seed: int = 0,
    on_error: str = "raise",
) -> Dataset:
    """Read UTKFace, aligned faces, from its folder or a zip of it.

    File names are `age_gender_race_time.jpg.chip.jpg`. The names that the authors published without a race are always
    left out and counted. There is no official split; the split here is random and depends on file names and seed alone.

    Files with equal bytes are the same photograph. Where their labels disagree on gender or race (or on age, where age
    is the target or a group) nobody knows which is right, and all of them are dropped; where they agree the first by
    name is kept. On the published 23 708 files this leaves 23 211.

    Ids are a hash of the file name, and rows are in the order of ids, because the name itself (or an order by age,
    gender and race, which is that of the names) would hand the groups to training code.

    Args:
        path: the folder `UTKFace`, one that holds it, or a zip archive.
        target: "gender" (female, male), "race" or "age" (binned).
        groups: any of "white" (White / not White), "race", "age", "gender".
        age_bins: lower ends of the age bins.
        drop_duplicates: drop exact duplicates before splitting, as described above.
        bias_rate: None keeps the natural training set. With 0.9 the training set is thinned as Hong and Yang (2021)
            do: among White faces all men stay and int(men · (1 − 0.9)) women; among the others all women stay and
            int(women · (1 − 0.9)) men. Validation and test stay natural.
        fractions: part -> share.
        seed: of the split and of the thinning.
        on_error: "raise", or "skip" to decode every image once and leave out what is broken.
    """
    choose("target", [target], ("gender", "race", "age"))
    groups = choose("group", groups, ("white", "race", "age", "gender"))
    if bias_rate is not None and (target != "gender" or not 0 <= bias_rate <= 1):
        raise InputError(f"bias_rate needs target='gender' and a value from 0 to 1; found {target!r} and {bias_rate}")
    source, skips = Source(path), Skips(on_error)
    faces = _utkface_names(source, skips)
    if drop_duplicates:
        faces = _without_duplicates(faces, source, skips, with_age="age" in (target, *groups))
    faces = faces.iloc[Images(source, faces["name"].tolist()).decodable(skips)]
    ids = [hashlib.sha256(base_name(name).encode()).hexdigest()[:16] for name in faces["name"]]
    faces = faces.assign(id=ids).sort_values("id")
    twice = faces["name"][faces["id"].duplicated(keep=False)].tolist()
    if twice:
        raise InputError(
            f"{source.path}: {twice[0]} and {twice[1]} are two pictures of one name; give the folder of one of them"
        )
    faces = faces.assign(split=split_by_hash(faces["id"].tolist(), fractions, seed))
    if bias_rate is not None:
        kept = _thinned(faces, bias_rate, seed)
        for name in faces["name"][~kept]:
            skips.drop("left out by bias_rate", name)
        faces = faces[kept]

    def named(name: str) -> Column:
        if name == "white":
            return yes_no("White", (faces["race"] == "White").to_numpy())
        return column(bin_ages(faces["age"].tolist(), age_bins) if name == "age" else faces[name].tolist())

    made = {"data": "utkface", "path": str(source.path), "files": len(source.names), "target": target, "groups": groups}
    return Dataset.of(
        faces["id"].tolist(),
        Images(source, faces["name"].tolist()),
        named(target),
        faces["split"].tolist(),
        {name: named(name) for name in groups},
        skipped=skips.found(),
        provenance={**made, "bias_rate": bias_rate, "seed": seed, "drop_duplicates": drop_duplicates},
    )


def _utkface_names(source: Source, skips: Skips) -> pd.DataFrame:
    """What the names of the files say: name, age, gender and race."""
    names = source.matching("*.jpg", "*.jpeg", "*.png")
    if not names or (source.is_file and not source.is_archive):
        raise source.missing("image files named age_gender_race_time.jpg.chip.jpg", "UTKFace")
    faces, unparsed = [], []
    for name in names:
        if fields := _NAME.fullmatch(base_name(name)):
            faces.append((name, int(fields[1]), GENDERS[int(fields[2])], RACES[int(fields[3])]))
        elif _NAME_WITHOUT_RACE.fullmatch(base_name(name)):
            skips.drop("no race in the file name", name)
        else:
            unparsed.append(name)
    if not faces:
        raise InputError(
            f"{source.path}: none of the {len(names)} images is named age_gender_race_time.jpg.chip.jpg as in UTKFace; "
            f"the first is {names[0]}"
        )
    for name in unparsed:
        message = f"{source.where(name)}: the name is not age_gender_race_time.jpg.chip.jpg as in UTKFace"
        skips.error("file name does not parse", name, message)
    return pd.DataFrame(faces, columns=["name", "age", "gender", "race"])


def _without_duplicates(faces: pd.DataFrame, source: Source, skips: Skips, with_age: bool) -> pd.DataFrame:
    same: dict[bytes, list[int]] = {}  # rows by the content of their files
    for row, name in enumerate(faces["name"]):
        try:
            content = source.read(name)
        except InputError as error:
            skips.error("not a readable image", name, str(error))
        else:
            same.setdefault(hashlib.sha256(content).digest(), []).append(row)
    kept = []
    for rows in same.values():
        labels = faces.iloc[rows][["gender", "race", "age"][: 3 if with_age else 2]] if len(rows) > 1 else None
        conflict = labels is not None and len(labels.drop_duplicates()) > 1
        kept += [] if conflict else rows[:1]
        for row in rows if conflict else rows[1:]:
            reason = "exact duplicates with conflicting labels" if conflict else "exact duplicate"
            skips.drop(reason, faces["name"].iloc[row])
    return faces.iloc[sorted(kept)]


def _thinned(faces: pd.DataFrame, bias_rate: float, seed: int) -> NDArray[np.bool_]:
    """Which rows stay, shape [n]: see `bias_rate` of `read_utkface`."""
    white, male = (faces["race"] == "White").to_numpy(), (faces["gender"] == "male").to_numpy()
    aligned, train, ids = white == male, (faces["split"] == "train").to_numpy(), faces["id"].to_numpy(dtype=str)
    kept = ~train | aligned
    for stratum in (white, ~white):
        against = ids[train & stratum & ~aligned].tolist()
        n_kept = int((train & stratum & aligned).sum() * (1 - bias_rate))
        kept |= np.isin(ids, shuffle_by_hash(against, seed)[:n_kept])
    return kept


def bin_ages(ages: Sequence[int], lower_ends: Sequence[int]) -> list[str]:
    """Name the bin of each age, so that the names sort as the ages do.

    Example:
        >>> bin_ages([3, 20, 99], (0, 20, 60))
        ['00-19', '20-59', '60+']
    """
    ends = list(lower_ends)
    if not ends or ends != sorted(set(ends)) or ends[0] > min(ages, default=0):
        raise InputError(f"age bins must rise from the lowest age on; found {ends}, lowest age {min(ages, default=0)}")
    names = [f"{low:02}-{high - 1:02}" for low, high in pairwise(ends)] + [f"{ends[-1]:02}+"]
    return [names[i] for i in np.searchsorted(ends, ages, side="right") - 1]
