"""Images that are decoded when they are asked for, from a folder or a zip archive, and features that are ready."""

import copy
import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from glob import glob
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from fairhead.data.files import Skips, Source, base_name, mend_or_skip, stamp_of
from fairhead.errors import InputError
from fairhead.store import read_arrays, reading

PREFIX = "features:"  # of features that are ready
Progress = Callable[[int, int], None]
# Enough images per task to make the thread pool's own cost vanish, few enough for a smooth progress bar.
_CHUNK = 128
_ORIENTATION = 0x0112  # of EXIF data


class Images(Sequence[Image.Image]):
    """A sequence of RGB images; nothing is decoded, and nothing but names is held, until an image is asked for.

    Safe to share between threads, to pickle and to fork.
    """

    def __init__(self, source: Source, names: Sequence[str]) -> None:
        self._source = source
        # Private on purpose: the names of some data sets (UTKFace) spell out the sensitive attributes.
        self._names: tuple[Any, ...] = tuple(names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Images({len(self)} in {str(self._source.path)!r})"

    def __getitem__(self, index: int) -> Image.Image:  # type: ignore[override]  # `take` is for several
        return self._decode(self._names[index])

    def __iter__(self) -> Iterator[Image.Image]:
        return (self._decode(name) for name in self._names)

    def take(self, indices: ArrayLike) -> "Images":
        """The images at these positions, still not decoded."""
        taken = copy.copy(self)
        taken._names = tuple(self._names[i] for i in np.asarray(indices, dtype=np.intp))
        return taken

    def positions(self, position: Mapping[str, int]) -> list[int]:
        """Where each picture is in a table by path, or else by file name, if no two share one; −1 where it is not."""
        if any(name in position for name in self._names):
            return [position.get(name, -1) for name in self._names]
        by_file = {base_name(name): row for name, row in position.items()}
        files = [base_name(str(name)) for name in self._names]
        unique = by_file if len(by_file) == len(position) and len({*files}) == len({*self._names}) else {}
        return [unique.get(file, -1) for file in files]

    @property
    def stamp(self) -> str | None:
        """Changes when a file changes: by it decoded pictures are known again. None where that is not known."""
        root = self._source.path
        if self._source.is_file:
            return stamp_of([root], *self._names)
        return stamp_of(root / name for name in self._names)

    def lengths(self) -> list[int]:
        """How many bytes each picture's file has: pictures of different lengths are different; 0 where not known."""
        return [self._source.length(name) for name in self._names]

    def digests(self) -> list[str]:
        """A digest of each picture's file."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return [*pool.map(lambda name: hashlib.blake2b(self._bytes(name), digest_size=8).hexdigest(), self._names)]

    def _bytes(self, name: Any) -> bytes:
        return self._source.read(name)

    def as_array(
        self,
        # Height and width; None keeps the images as they are (they must then all be of one size)
        size: int | None = 64,
        indices: ArrayLike | None = None,  # positions to decode, in this order; None decodes all
        progress: Progress | None = None,  # called with (done, total) as the work goes on
        workers: int | None = None,  # threads; None takes one per core
    ) -> NDArray[np.uint8]:
        """Decode into one array of bytes [n, H, W, 3], resized to size × size without cropping."""
        names = self._names if indices is None else self.take(indices)._names
        if not names:
            return np.empty((0, size or 0, size or 0, 3), dtype=np.uint8)
        height, width = (size, size) if size else np.asarray(self._decode(names[0])).shape[:2]
        out = np.empty((len(names), height, width, 3), dtype=np.uint8)

        def fill(start: int) -> int:
            stop = min(start + _CHUNK, len(names))
            for i in range(start, stop):
                image = self._decode(names[i])
                if size and image.size != (width, height):
                    image = image.resize((width, height), Image.Resampling.BILINEAR)
                if image.size != (width, height):
                    raise InputError(
                        f"{self._where(names[i])}: is {image.width} × {image.height} pixels where others are "
                        f"{width} × {height}; give a size to resize them"
                    )
                out[i] = np.asarray(image)
            return stop - start

        done = 0
        with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
            for count in pool.map(fill, range(0, len(names), _CHUNK)):
                done += count
                if progress:
                    progress(done, len(names))
        return out

    @classmethod
    def listed(
        cls, source: Source, names: Sequence[str], members: Mapping[str, str], listed_in: str, skips: Skips
    ) -> "tuple[NDArray[np.intp], Images]":
        """The images of a list that are there and can be read, and their positions in the list.

        `members` has their names in the source by those in the list, which messages call `listed_in`.
        """
        lost = [name for name in names if name not in members]
        if lost:
            are = f"is not there: {lost[0]}" if len(lost) == 1 else f"are not there, such as {lost[0]}"
            what = f"{len(lost)} of the {len(names)} images in {listed_in} {are}"
            url = lost[0].startswith(("http:/", "https:/"))
            why = "a URL: download the pictures first" if url else f"looked for in {source.path.absolute()}"
            skips.errors("image is missing", lost, f"{what}, {why}")
        rows = np.flatnonzero([name in members for name in names])
        images = cls(source, [members[names[row]] for row in rows.tolist()])
        good = images.decodable(skips)
        return rows[good], images.take(good)

    def decodable(self, skips: Skips) -> NDArray[np.intp]:
        """Positions of the images that can be read, which are all of them unless errors are to be skipped.

        Then every image is decoded once, and the failures are handed to `skips`.
        """
        if skips.on_error == "raise":
            return np.arange(len(self))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            problems = list(pool.map(self._problem, self._names))
        for name, problem in zip(self._names, problems, strict=True):
            if problem:
                skips.error("not a readable image", name, problem)
        return np.flatnonzero([problem is None for problem in problems])

    def _where(self, name: Any) -> str:
        return self._source.where(name)

    def _problem(self, name: Any) -> str | None:
        try:
            self._decode(name)
        except InputError as error:
            return str(error)
        return None

    def _decode(self, name: Any) -> Image.Image:
        return self._opened(self._bytes(name), self._where(name))

    def _opened(self, data: bytes, where: str) -> Image.Image:
        try:
            image = Image.open(io.BytesIO(data))
            # Pillow itself only warns between its limit and twice that.
            if Image.MAX_IMAGE_PIXELS and image.width * image.height > Image.MAX_IMAGE_PIXELS:
                raise Image.DecompressionBombError(f"{image.width} × {image.height} pixels")
            image.load()
            return _upright_rgb(image, where)
        except InputError:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise InputError(
                f"{where}: too large to decode safely ({error}; the limit is PIL.Image.MAX_IMAGE_PIXELS): "
                f"{mend_or_skip()}"
            ) from None
        except UnidentifiedImageError:
            what = f"is not an image that Pillow can read ({len(data)} bytes)"
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            what = f"is a damaged image ({error})"
        raise InputError(f"{where}: {what}: {mend_or_skip()}")


class HeldImages(Images):
    """Pictures in memory, or in a sequence of another library that decodes them when asked: PIL images or arrays."""

    stamp = None

    def __init__(self, pictures: Sequence[Any]) -> None:
        self._pictures = pictures
        self._names = tuple(range(len(pictures)))

    def __repr__(self) -> str:
        return f"HeldImages({len(self)})"

    def lengths(self) -> list[int]:
        """0 for each picture: the lengths of files are unknown."""
        return [0] * len(self)

    def _where(self, name: Any) -> str:
        return f"picture {name + 1}"

    def _bytes(self, name: Any) -> bytes:
        image = self._decode(name)
        return f"{image.size}".encode() + image.tobytes()

    def _decode(self, name: Any) -> Image.Image:
        picture = self._pictures[name]
        if isinstance(picture, dict) and isinstance(picture.get("bytes"), bytes):  # as `datasets` holds files
            return self._opened(picture["bytes"], self._where(name))
        try:
            return _upright_rgb(picture if hasattr(picture, "convert") else Image.fromarray(picture), self._where(name))
        except InputError:
            raise
        except (TypeError, ValueError, AttributeError, OSError) as error:
            what = f"is a {type(picture).__name__} that is no picture ({error})"
            raise InputError(f"{self._where(name)}: {what}; expected PIL images or arrays [H, W, 3] of bytes") from None


def _upright_rgb(image: Image.Image, where: str) -> Image.Image:
    """A picture as viewers show it and `transformers` loads it: turned as its EXIF data say, in 8 bits, RGB."""
    image = ImageOps.exif_transpose(image) if image.getexif().get(_ORIENTATION, 1) != 1 else image
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        # convert() would cut all above 255 off.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = "whole numbers of 32 bits" if image.mode == "I" else "fractions"
        raise InputError(
            f"{where}: its pixels are {kind}, whose black and white are not known; expected 8 or 16 bits: scale it "
            "to 0 to 255 and save it as 8 bits (arrays as uint8)"
        )
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours; straight to RGB, Pillow would warn
    # convert() would copy an image that is RGB already.
    return image if image.mode == "RGB" else image.convert("RGB")


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

    def of(self, inputs: Any, ids: NDArray[np.str_], numbered: bool = False) -> NDArray[np.float32]:
        """The vectors of rows with these inputs and ids, [m, D]: pictures by their paths, texts by their ids.

        Ids may be made up: the `numbered` rows, from 1.
        """
        rows = inputs.positions(self.position) if isinstance(inputs, Images) else [-1]
        if min(rows, default=-1) < 0:
            if numbered and "0" in self.position:  # joined by name, each row would get the features of the next
                raise InputError(
                    f"{self.where}: names are numbers from 0 on; the rows have no ids and are numbered from 1: name "
                    "the features from 1 on, or give the rows a column of ids"
                )
            rows = [self.position.get(name, -1) for name in ids.tolist()]
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


def members(source: Source, names: Sequence[str]) -> dict[str, str]:
    r"""The pictures that are there by their names in a table: also of Windows (`a\1.jpg`) and of a Mac (`u` + `¨`)."""
    there = {*source.names} if source.is_archive else None
    found = {}
    for name in names:
        plain = Path(name.replace("\\", "/")).as_posix()  # an archive knows no "./a"
        for written in dict.fromkeys((name, plain, normalize("NFC", plain), normalize("NFD", plain))):
            if written in there if there is not None else os.path.isfile(source.path / written):
                found[name] = written
                break
    return found
