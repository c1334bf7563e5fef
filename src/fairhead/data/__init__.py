"""Readers of published data sets, in the formats their authors publish.

`read("utkface", path)` returns a `Dataset` (images, HateXplain, MultiNLI) or `Items` (StereoSet, CrowS-Pairs,
BBQ, BOLD, WinoBias). Each reader is one file of this folder, where its options are explained.
"""

import inspect
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from fairhead.data.dataset import Attributes, Dataset, Examples, Items, TextPair
from fairhead.data.images import Images
from fairhead.errors import InputError, did_you_mean
from fairhead.settings import check_settings

__all__ = [
    "READERS",
    "Attributes",
    "Dataset",
    "Examples",
    "Images",
    "Items",
    "TextPair",
    "check_spec",
    "read",
    "read_spec",
]

# Every reader is the function read_<name> of the module <name>.
READERS = (
    "bbq",
    "bold",
    "celeba",
    "crows_pairs",
    "fairface",
    "hatexplain",
    "multinli",
    "stereoset",
    "utkface",
    "winobias",
)


def read(name: str, path: str | os.PathLike[str], **options: Any) -> Dataset | Items[Any]:
    """Read a published data set.

    Args:
        name: one of `READERS`; case and hyphens do not matter ("CrowS-Pairs").
        path: the file, folder or zip archive as downloaded.
        options: those of the reader, such as `target`, `groups`, `seed` or `on_error`.

    Example:
        >>> import pathlib, tempfile
        >>> from PIL import Image
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for i in range(10):
        ...     Image.new("RGB", (4, 4), (20 * i, 0, 0)).save(folder / f"30_{i % 2}_{i % 5}_2017{i:04}.jpg.chip.jpg")
        >>> data = read("utkface", folder)
        >>> train = data.examples("train")  # inputs and labels, no groups
        >>> groups = data.groups(data.examples("test").ids)  # for the audit
        >>> train.inputs.as_array(size=4).shape, list(groups)
        ((8, 4, 4, 3), ['white', 'race'])
    """
    reader = reader_named(name)
    known = [p.name for p in inspect.signature(reader).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise InputError(
                f"{name} has no option {option!r}; it has {', '.join(known)}.{did_you_mean(option, known)}"
            )
    check_settings(reader, options, f"reading {name}")
    return reader(path, **options)


def read_spec(spec: str, **options: Any) -> Dataset | Items[Any]:
    """Read a data set named on the command line as `name:path`.

    Example:
        >>> read_spec("dev.json")
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: a data set is named as name:path, such as utkface:UTKFace.zip; found 'dev.json'
    """
    name, path = _name_and_path(spec)
    return read(name, path, **options)


def check_spec(spec: str) -> None:
    """Refuse a data set without a reader, or at a place where nothing is, before work that will need it.

    Example:
        >>> check_spec("utkface:nowhere.zip")
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: there is no nowhere.zip, where utkface should be
    """
    name, path = _name_and_path(spec)
    reader_named(name)
    if not Path(path).exists():
        raise InputError(f"there is no {path}, where {name} should be")


def _name_and_path(spec: str) -> tuple[str, str]:
    name, colon, path = spec.partition(":")
    if not colon or not path:
        raise InputError(f"a data set is named as name:path, such as utkface:UTKFace.zip; found {spec!r}")
    return name, path


def reader_named(name: str) -> Callable[..., Dataset | Items[Any]]:
    """The function that reads a data set; its keyword arguments are the options.

    Example:
        >>> reader_named("CrowS-Pairs").__name__
        'read_crows_pairs'
    """
    module = name.strip().lower().replace("-", "_")
    if module not in READERS:
        raise InputError(
            f"there is no reader for {name!r}; there are {', '.join(READERS)}.{did_you_mean(module, READERS)}"
        )
    # Imported when used: pandas and Pillow take longer to load than many a data set to read.
    reader: Callable[..., Dataset | Items[Any]] = getattr(import_module(f"fairhead.data.{module}"), f"read_{module}")
    return reader
