"""Features that are ready: vectors of pictures or texts, computed elsewhere and kept in .npz files."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from glob import glob

import numpy as np
from numpy.typing import NDArray

from fairhead.data.datasets import Examples
from fairhead.data.files import stamp_of
from fairhead.data.images import Images
from fairhead.errors import InputError
from fairhead.store import read_arrays, reading

PREFIX = "features:"


@dataclass(frozen=True)
class ReadyFeatures:
    """Vectors by name: `features` [n, D] and `names` [n], the paths of pictures within their folder or zip, or ids."""

    where: str  # the files, as they were given
    features: NDArray[np.float32]  # [n, D]
    position: Mapping[str, int]  # the row of each name

    @classmethod
    def read(cls, where: str) -> "ReadyFeatures":
        """Read one file, or all that a pattern (`clip_*.npz`) names."""
        files = tuple(sorted(glob(where.removeprefix(PREFIX))))
        if not files:
            raise InputError(f"{where}: there is no such file of features (.npz with the arrays features and names)")
        return cls(where, *_read(files, stamp_of(files)))

    def of(self, part: Examples) -> NDArray[np.float32]:
        """The vectors of these rows, [m, D]: pictures by their paths, texts by their ids."""
        rows = part.inputs.positions(self.position) if isinstance(part.inputs, Images) else [-1]
        if min(rows, default=-1) < 0:
            rows = [self.position.get(name, -1) for name in part.ids.tolist()]
        lost = sum(row < 0 for row in rows)
        if lost:
            raise InputError(
                f"{self.where}: {lost} of {len(rows)} rows have no features there; names are the paths of pictures as "
                "their folder or zip has them, or the ids of rows"
            )
        return self.features[rows]


@lru_cache(maxsize=4)
def _read(files: tuple[str, ...], _stamp: str) -> tuple[NDArray[np.float32], dict[str, int]]:
    features, names = [], []
    for file in files:
        found = read_arrays(file, "features", "names")
        with reading(file, "has features that are no numbers"):
            features.append(np.asarray(found["features"], dtype=np.float32))
            names.append(np.asarray(found["names"]).astype(str))
        if features[-1].ndim != 2 or len(features[-1]) != len(names[-1]):
            raise InputError(
                f"{file}: features has the shape {list(features[-1].shape)} and there are {len(names[-1])} names; "
                "expected one row per name"
            )
    widths = {part.shape[1] for part in features}
    if len(widths) > 1:
        raise InputError(f"{files[0]} and others have features of several widths: {sorted(widths)}")
    every = np.concatenate(names)
    position = {name: row for row, name in enumerate(every.tolist())}
    if len(position) < len(every):
        raise InputError(f"{files[0]}: {len(every) - len(position)} names occur twice; each row needs its own")
    return np.concatenate(features), position
