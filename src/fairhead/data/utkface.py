"""UTKFace: aligned faces whose file names carry age, gender and race (all as perceived)."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fairhead.data.datasets import Dataset, choose, column, yes_no
from fairhead.data.files import Skips, Source, base_name
from fairhead.data.images import Images
from fairhead.data.splits import EIGHTY_TEN_TEN, shuffle_by_hash, split_by_hash
from fairhead.errors import InputError
from fairhead.records import Column

GENDERS = ("male", "female")  # in the order of the codes in the file names
RACES = ("White", "Black", "Asian", "Indian", "Other")
_NAME = re.compile(r"(\d{1,3})_([01])_([0-4])_(\d+)\D*")
_NAME_WITHOUT_RACE = re.compile(r"\d{1,3}_[01]_\d{8,}\D*")


@dataclass(frozen=True)
class _Face:
    name: str
    age: int
    gender: str
    race: str


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
    """Read UTKFace from its folder or a zip of it.

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
    faces = _faces(source, skips)
    if drop_duplicates:
        with_age = "age" in (target, *groups)
        faces = _without_duplicates(faces, source, skips, with_age)
    images = Images(source, [f.name for f in faces])
    good = images.decodable(skips)
    faces, images = [faces[i] for i in good], images.take(good)

    ids = np.array([hashlib.sha256(base_name(f.name).encode()).hexdigest()[:16] for f in faces], dtype=str)
    order = np.argsort(ids)
    for one, other in pairwise(order):
        if ids[one] == ids[other]:
            raise InputError(
                f"{source.path}: {faces[one].name} and {faces[other].name} are two pictures of one name; "
                "give the folder of one of them"
            )
    faces, images, ids = [faces[i] for i in order], images.take(order), ids[order]
    split = split_by_hash(ids.tolist(), fractions, seed)
    if bias_rate is not None:
        kept = _thinned(faces, ids, split, bias_rate, seed)
        for i in np.flatnonzero(~kept):
            skips.drop("left out by bias_rate", faces[i].name)
        rows = np.flatnonzero(kept)
        faces, images, ids, split = [faces[i] for i in rows], images.take(rows), ids[rows], split[rows]

    columns = {name: _column(name, faces, age_bins) for name in {target, *groups}}
    made = {"data": "utkface", "path": str(source.path), "files": len(source.names), "target": target, "groups": groups}
    made |= {"bias_rate": bias_rate, "seed": seed, "drop_duplicates": drop_duplicates}
    chosen = {name: columns[name] for name in groups}
    return Dataset.of(ids, images, columns[target], split, chosen, skipped=skips.found(), provenance=made)


def _faces(source: Source, skips: Skips) -> list[_Face]:
    names = source.matching("*.jpg", "*.jpeg", "*.png")
    if not names or (source.is_file and not source.is_archive):
        raise source.missing("image files named age_gender_race_time.jpg.chip.jpg", "UTKFace")
    faces = []
    unparsed = []
    for name in names:
        base = base_name(name)
        fields = _NAME.fullmatch(base)
        if fields:
            age, gender, race, _ = fields.groups()
            faces.append(_Face(name, int(age), GENDERS[int(gender)], RACES[int(race)]))
        elif _NAME_WITHOUT_RACE.fullmatch(base):
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
    return faces


def _without_duplicates(faces: list[_Face], source: Source, skips: Skips, with_age: bool) -> list[_Face]:
    same: dict[bytes, list[_Face]] = {}
    for face in faces:
        try:
            content = source.read(face.name)
        except InputError as error:
            skips.error("not a readable image", face.name, str(error))
        else:
            same.setdefault(hashlib.sha256(content).digest(), []).append(face)
    kept = []
    for copies in same.values():
        labels = {(f.gender, f.race, f.age if with_age else None) for f in copies}
        if len(labels) == 1:
            kept.append(copies[0])
            dropped, reason = copies[1:], "exact duplicate"
        else:
            dropped, reason = copies, "exact duplicates with conflicting labels"
        for face in dropped:
            skips.drop(reason, face.name)
    return sorted(kept, key=lambda f: f.name)


def _thinned(
    faces: list[_Face], ids: NDArray[np.str_], split: NDArray[np.str_], bias_rate: float, seed: int
) -> NDArray[np.bool_]:
    """Which rows stay, shape [n]: see `bias_rate` of `read_utkface`."""
    white = np.array([f.race == "White" for f in faces])
    male = np.array([f.gender == "male" for f in faces])
    aligned, train = white == male, split == "train"
    kept = ~train | aligned
    for stratum in (white, ~white):
        against = ids[train & stratum & ~aligned].tolist()
        n_kept = int((train & stratum & aligned).sum() * (1 - bias_rate))
        kept |= np.isin(ids, shuffle_by_hash(against, seed)[:n_kept])
    return kept


def _column(name: str, faces: list[_Face], age_bins: Sequence[int]) -> Column:
    if name == "white":
        return yes_no("White", [f.race == "White" for f in faces])
    if name == "age":
        return column(bin_ages([f.age for f in faces], age_bins))
    return column([getattr(f, name) for f in faces])


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
