"""Data: readers of published data sets, in the formats their authors publish, and of a user's own.

`read("utkface", path)` returns a `Dataset` (labelled images and texts) or `Items` (the pairs, triplets, questions of a
language benchmark). A reader is one function, whose keyword arguments are its options, and one line in `READERS`, which
says what *kind* of data it gives. Another package adds one by an entry point of the group `fairhead.data` that names a
`Reader`.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from fairhead import entry_named
from fairhead.data.datasets import Attributes, Dataset, Examples, Items, TextPair
from fairhead.data.images import Images
from fairhead.data.own import dataset
from fairhead.errors import InputError, check_known
from fairhead.records.layout import GroupFile
from fairhead.settings import check_settings

__all__ = ["READERS", "Attributes", "Dataset", "Examples", "Images", "Items", "Reader", "TextPair", "check_spec"]
__all__ += ["dataset", "hold", "parse_spec", "read", "read_items", "read_labelled", "reader_named"]

ENTRY_POINTS = "fairhead.data"
# What a kind gives: labelled examples with groups (`Dataset`), or the items of a language benchmark (`Items`).
KINDS = {
    "images": "labelled pictures",
    "texts": "labelled texts",
    "pairs": "pairs of sentences",
    "triplets": "sentences in threes",
    "questions": "questions with answers",
    "sentences": "sentences with marked words",
    "prompts": "beginnings of texts",
}


@dataclass(frozen=True)
class Reader:
    """One reader.

    Example:
        >>> READERS["celeba"].options["target"]
        'Attractive'
    """

    name: str  # before the colon of `name:path`
    kind: str  # one of `KINDS`
    # Where it is, as "module:function"; its keyword arguments are the options. Imported when first used.
    function: str = ""
    aliases: tuple[str, ...] = ()  # other names for it

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"reader {self.name!r} is of kind {self.kind!r}; expected one of {', '.join(KINDS)}")

    def load(self) -> Callable[..., Dataset | Items[Any]]:
        """The function that reads."""
        # Imported when used: pandas and Pillow take longer to load than many a data set to read.
        place = self.function or f"fairhead.data.{self.name}:read_{self.name}"
        function: Callable[..., Dataset | Items[Any]] = resolve_name(place)
        return function

    @property
    def options(self) -> dict[str, Any]:
        """Its options and their defaults."""
        parameters = inspect.signature(self.load()).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options by the words that all readers share, as this one calls them; what is not given is left out.

        Example:
            >>> READERS["celeba"].named({"label": "Smiling", "groups": ["Male"], "id": None})
            {'target': 'Smiling', 'groups': ['Male']}
        """
        known, found = self.options, {}
        for name, value in given.items():
            other = {"label": "target", "groups": "category"}.get(name)
            own = other if name not in known and other in known else name
            if value is not None and not (isinstance(value, tuple) and not value):
                one = own == "category" and not isinstance(value, str)
                if one and len(value) > 1:
                    raise InputError(f"{self.name} has one column of groups, their category; found {', '.join(value)}")
                found[own] = value[0] if one else value
        return found

    def read(
        self, path: Any, /, *, groups_from: str | os.PathLike[str] | None = None, **options: Any
    ) -> Dataset | Items[Any]:
        """Read a file, folder or archive; the readers of own data also take objects.

        The options are those of the reader, and `groups_from`: a CSV file of group columns by id, such as `fairhead
        discover` writes, to join onto the rows.
        """
        known = list(self.options)
        joined = None if groups_from is None else GroupFile.read(groups_from)
        if joined is not None and options.get("groups"):  # the reader need not know of those in the file
            asked = [options["groups"]] if isinstance(options["groups"], str) else options["groups"]
            options["groups"] = tuple(name for name in asked if name not in joined.columns)
            if not options["groups"] and "groups" not in known:
                del options["groups"]
        for option in options:
            check_known(option, known, f"{self.name} has no option {option!r}; it has")
        check_settings(self.load(), options, f"reading {self.name}")
        data = self.load()(path, **options)
        if joined is None:
            return data
        if not isinstance(data, Dataset):
            raise InputError(f"{self.name} has {KINDS[self.kind]}; groups_from is for labelled pictures or texts")
        return data.with_groups(joined.of(data.all.ids))


READERS: Mapping[str, Reader] = {
    reader.name: reader
    for reader in (
        Reader("bbq", "questions", "fairhead.data.sentences:read_bbq"),
        Reader("bold", "prompts", "fairhead.language.benchmarks.bold:read_bold"),
        Reader("celeba", "images", "fairhead.data.faces:read_celeba"),
        Reader("crows_pairs", "pairs", "fairhead.language.benchmarks.crows_pairs:read_crows_pairs", aliases=("crows",)),
        Reader("fairface", "images", "fairhead.data.faces:read_fairface"),
        Reader("hatexplain", "texts", "fairhead.data.texts:read_hatexplain"),
        Reader("multinli", "texts", "fairhead.data.texts:read_multinli"),
        Reader("stereoset", "triplets", "fairhead.language.benchmarks.stereoset:read_stereoset"),
        Reader("utkface", "images", "fairhead.data.faces:read_utkface"),
        Reader("winobias", "sentences", "fairhead.language.benchmarks.winobias:read_winobias"),
        # A user's own data.
        Reader("images", "images", "fairhead.data.own:read_images"),
        Reader("texts", "texts", "fairhead.data.own:read_texts"),
        Reader("pairs", "pairs", "fairhead.data.sentences:read_pairs"),
        Reader("triplets", "triplets", "fairhead.data.sentences:read_triplets"),
    )
}


def reader_named(name: str) -> Reader:
    """The reader of this name; case and hyphens do not matter."""
    plain = name.strip().lower().replace("-", "_")
    plain = next((reader.name for reader in READERS.values() if plain in reader.aliases), plain)
    return entry_named(plain, READERS, ENTRY_POINTS, Reader, f"there is no reader for {name!r}; there are")


class Spec(NamedTuple):
    """What `name:path` stands for."""

    reader: Reader
    path: str


# Data sets in memory that a verb works on now, by what stands behind "memory:".
_HELD: "WeakValueDictionary[str, Dataset | Items[Any]]" = WeakValueDictionary()


def hold(data: Dataset | Items[Any]) -> str:
    """A `name:path` for data in memory, for as long as somebody holds them."""
    name = f"{data.name}-{id(data)}"
    _HELD[name] = data
    return f"memory:{name}"


def _read_held(name: str | Path, *, label: str | None = None, groups: Sequence[str] = ()) -> Dataset | Items[Any]:
    """Data in memory; their labels are what they are, and their groups must be among those they have."""
    data = _HELD[str(name)]
    if isinstance(data, Dataset):
        known = list(data.attributes.columns)
        for group in [groups] if isinstance(groups, str) else groups:
            check_known(group, known, f"the data have no group column {group!r}; there are")
    return data


def _kind_of(data: Dataset | Items[Any]) -> str:
    if isinstance(data, Dataset):
        return "images" if isinstance(data.all.inputs, Images) else "texts"
    kind = str(data.provenance.get("data", data.name))
    return reader_named(kind).kind


def parse_spec(spec: str, *kinds: str) -> Spec:
    """The reader and the path of `name:path`; a reader of none of these kinds is refused, where any are given.

    Example:
        >>> parse_spec("celeba:CelebA", "pairs", "triplets")
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: celeba has labelled pictures; pairs of sentences or sentences in threes are needed \
here: crows_pairs, stereoset, pairs, triplets
    """
    name, colon, path = spec.partition(":")
    fitting = [other.name for other in READERS.values() if other.kind in kinds]
    if not colon or not path:
        such = " or ".join(f"{one}:PATH" for one in fitting) or "utkface:UTKFace.zip"
        if Path(spec).exists():
            own = [one for one in ("images", "texts", "pairs", "triplets") if not kinds or one in kinds]
            such = " or ".join(f"{one}:{spec}" for one in own)
        raise InputError(f"a data set is named as name:path, such as {such}; found {spec!r}")
    if name == "memory":
        if path not in _HELD:
            raise InputError(f"{spec}: the data are no longer in memory")
        reader = Reader("memory", _kind_of(_HELD[path]), f"{__name__}:_read_held")
    else:
        reader = reader_named(name)
    if kinds and reader.kind not in kinds:
        wanted = " or ".join(KINDS[kind] for kind in kinds)
        there = "the data set" if name == "memory" else reader.name
        raise InputError(f"{there} has {KINDS[reader.kind]}; {wanted} are needed here: {', '.join(fitting)}")
    return Spec(reader, path)


def check_spec(spec: str) -> None:
    """Refuse a data set without a reader, or at a place where nothing is, before work that will need it.

    Example:
        >>> check_spec("utkface:nowhere.zip")
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: there is no nowhere.zip, where utkface should be
    """
    reader, path = parse_spec(spec)
    if reader.name != "memory" and not Path(path).exists():
        raise InputError(f"there is no {path}, where {reader.name} should be")


def read(name: str, path: str | os.PathLike[str], **options: Any) -> Dataset | Items[Any]:
    r"""Read a data set.

    Args:
        name: one of `READERS`; case and hyphens do not matter ("CrowS-Pairs").
        path: the file, folder or zip archive as downloaded.
        options: those of the reader, such as `target`, `groups`, `seed` or `on_error`.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "posts.csv")
        >>> _ = file.write_text("text,label,sex\nA post.,no,f\n")
        >>> data = read("texts", file, groups=["sex"])
        >>> data.examples("train").inputs, data.groups()["sex"].levels  # training sees the former alone
        (('A post.',), ('f',))
    """
    return reader_named(name).read(path, **options)


def read_labelled(spec: str, **options: Any) -> Dataset:
    """Read the labelled pictures or texts that `name:path` names."""
    reader, path = parse_spec(spec, "images", "texts")
    data = reader.read(path, **options)
    assert isinstance(data, Dataset)
    data.need_labels()
    return data


def read_items(spec: str, *kinds: str, **options: Any) -> Items[Any]:
    """Read the items that `name:path` names: pairs, triplets, ..., of one of these kinds."""
    reader, path = parse_spec(spec, *kinds)
    items = reader.read(path, **options)
    assert isinstance(items, Items)
    return items
