"""A user's own pictures and texts: a table whose columns are named, a folder per class, or objects (`dataset`).

Tables are CSV, TSV, JSONL or Parquet; in Python also data frames, `datasets.Dataset`s and lists. Cells are
stripped, and rows without an id are numbered from 1. Pairs and triplets of sentences are read in `sentences.py`.
"""

import logging
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.data.datasets import Dataset, Inputs, Items, alike, column, group_column
from fairhead.data.files import PICTURES, Skips, Source
from fairhead.data.images import HeldImages, Images, members
from fairhead.data.own_table import Table, opened
from fairhead.data.sentences import MORE_LESS
from fairhead.data.splits import joined_keys, named_parts, shares_of, split_by_hash, split_within
from fairhead.errors import InputError
from fairhead.records import Column
from fairhead.settings import check_settings

LABEL = ("label", "class", "target", "y")
NO_LABEL = "none"
PATH = ("path", "file", "image", "filename", "file_name", "image_path")
TEXT = ("text", "post", "comment", "sentence")
_TABLES = (".csv", ".tsv", ".jsonl", ".parquet", ".csv.gz", ".tsv.gz", ".jsonl.gz")
_KINDS = ("images", "texts", "pairs", "triplets")
_LONGEST = 500  # characters of the name of a class
_CLASSES = 20  # no more than these may be as many as half of the rows
_log = logging.getLogger("fairhead")


class _How(NamedTuple):
    """Options of the readers of pictures and texts besides the input; `_columns` fills in the names of columns."""

    label: str | None
    groups: Sequence[str]
    split: str | None
    id: str | None
    person: str | None
    fractions: Mapping[str, float] | None
    seed: int
    skips: Skips

    @property
    def needed(self) -> list[str]:
        """The columns in which every row has a value."""
        return [*filter(None, [self.label, self.split])]


def read_images(
    path: Any,
    *,
    label: str | None = None,
    groups: Sequence[str] = (),
    split: str | None = None,
    id: str | None = None,
    person: str | None = None,
    input: str | None = None,
    fractions: Mapping[str, float] | None = None,
    seed: int = 0,
    on_error: str = "raise",
) -> Dataset:
    r"""Read pictures of your own: a table of paths and labels, or a folder (or zip archive) with a folder per class.

    Args:
        path: the table, or the folder or archive that holds one; paths in it are relative to its folder. Without a
            table: `cat/1.jpg`, `dog/2.jpg`, or `train/cat/1.jpg` with the part before the class.
        label: column of the classes; by default label, class, target or y. "none" for rows without, to predict: then
            any folder of pictures will do.
        groups: columns to audit by; training never sees them. Rows without a value are trained on, and not audited.
        split: column of the parts (train, val or validation, test, or names of your own); by default split, where it
            has these. Without a validation part, that is drawn from the training rows. "random", or without such a
            column: drawn within each class; rows with the same picture stay together. Parts with other names are left
            alone.
        id: column of distinct ids; by default id.
        person: column of the person (or the source) of a picture: nobody is in two parts.
        input: column of the paths; by default path, file, image or filename.
        fractions: part -> share of what is drawn; by default 80/10/10, of fewer than 4,000 rows more to test on and of
            fewer than 1,500 more to validate on (55/15/30 of 500).
        seed: of what is drawn.
        on_error: "raise", or "skip" to leave out rows without an input or a label, and pictures that are broken.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> folder = Path(tempfile.mkdtemp())
        >>> Image.new("RGB", (4, 4)).save(folder / "a.png")
        >>> _ = (folder / "labels.csv").write_text("file,smiling,sex\na.png,yes,f\n")
        >>> data = read_images(folder / "labels.csv", label="smiling", groups=["sex"])
        >>> data.classes, data.groups()["sex"].levels, data.all.ids.tolist()
        (('yes',), ('f',), ['1'])
    """
    how = _How(label, groups, split, id, person, fractions, seed, Skips(on_error))
    if not isinstance(path, str | os.PathLike) or str(path).lower().endswith(_TABLES):
        with opened(path) as table:
            return _pictures(table, input, how, Source(Path(table.name).parent, ()))
    source = Source(path)
    tables = [name for name in source.names if name.lower().endswith(_TABLES) and name.count("/") < 2]
    tables = [name for name in tables if name.count("/") == min(other.count("/") for other in tables)]
    if len(tables) > 1:
        raise InputError(f"{source.path}: holds the tables {', '.join(tables)}; give the path of one of them")
    if not tables:
        return _class_folders(source, input, how)
    with _table_in(source, tables[0]) as table:
        return _pictures(table, input, how, source, tables[0].rpartition("/")[0])


@contextmanager
def _table_in(source: Source, name: str) -> Iterator[Table]:
    """A table in a folder or an archive."""
    with tempfile.TemporaryDirectory() as folder:
        file = source.path / name
        if source.is_archive:
            file = Path(folder, Path(name).name)
            file.write_bytes(source.read(name))
        with opened(file) as table:
            found = {**table.provenance(), "path": source.where(name)}
            yield Table(source.where(name), table.columns, table.read, lambda: found)


def _pictures(table: Table, input: str | None, how: _How, source: Source, root: str = "") -> Dataset:
    """The pictures of a table whose paths are relative to `root` in the source."""
    named = table.need("input", input, PATH)
    how, values = _columns(table, named, how), table.values(named)
    if len(values) and not isinstance(values[0], str):
        rows = np.flatnonzero(table.complete(how.needed, how.skips))
        images: Images = HeldImages(values).take(rows)
        good = images.decodable(how.skips)
        rows, images = rows[good], images.take(good)
    else:
        rows = np.flatnonzero(table.complete([named, *how.needed], how.skips))
        names = [str(Path(root, name)) for name in table.cells(named)[rows].tolist()]
        kept, images = Images.listed(source, names, members(source, names), table.name, how.skips)
        rows = rows[kept]
    return _labelled("images", table, rows, images, how)


def _class_folders(source: Source, input: str | None, how: _How) -> Dataset:
    """Pictures in a folder per class, perhaps below a folder per part; with the label "none", wherever they lie."""
    names = [name for name in source.names if name.lower().endswith(PICTURES)]
    if not names or (source.is_file and not source.is_archive):
        raise source.missing("a table (such as labels.csv) or a folder of pictures per class", "images")
    for option, value in {**how._asdict(), "input": input}.items():
        if option in ("label", "groups", "id", "person", "input") and value and (option, value) != ("label", NO_LABEL):
            raise InputError(
                f"{source.path}: has no table, so no column for {option}; give the path of a table (labels.csv), or "
                f"leave {option} out to take each folder for a class"
            )
    cells = {"path": names, "id": names}
    if how.label != NO_LABEL:
        places = [["", "", *name.split("/")] for name in names]
        lost = [name for name, place in zip(names, places, strict=True) if not place[-2]]
        if lost:
            how.skips.errors("in no folder of a class", lost, f"{source.where(lost[0])}: lies in no folder of a class")
        cells["label"], above = [place[-2] for place in places], named_parts([place[-3] for place in places]).tolist()
        cells |= {"split": above} if {"train", "test"} & {*above} else {}
    table = Table(str(source.path), tuple(cells), lambda wanted: cells, lambda: {"path": str(source.path)})
    return _pictures(table, "path", how, source)


def read_texts(
    path: Any,
    *,
    label: str | None = None,
    groups: Sequence[str] = (),
    split: str | None = None,
    id: str | None = None,
    person: str | None = None,
    input: str | None = None,
    fractions: Mapping[str, float] | None = None,
    seed: int = 0,
    on_error: str = "raise",
) -> Dataset:
    """Read labelled texts of your own from a table.

    Args are those of `read_images`, but that `input` is the column of the texts, by default text, post, comment or
    sentence, and `person` that of the author or the document.
    """
    how = _How(label, groups, split, id, person, fractions, seed, Skips(on_error))
    with opened(path) as table:
        named = table.need("input", input, TEXT)
        how = _columns(table, named, how)
        rows = np.flatnonzero(table.complete([named, *how.needed], how.skips))
        return _labelled("texts", table, rows, tuple(table.cells(named)[rows].tolist()), how)


def _columns(table: Table, named: str, how: _How) -> _How:
    """The options with the names of the columns filled in (None where there is no column); reads these columns."""
    wanted = (how.groups,) if isinstance(how.groups, str) else how.groups
    none = how.label == NO_LABEL and NO_LABEL not in table.columns
    label = None if none else table.need("label", how.label, LABEL)
    groups = tuple(str(table.find(name, ())) for name in wanted)
    if label in groups:
        raise InputError(f"{table.name}: {label!r} is what is predicted; name another column to audit by")
    split = None if how.split == "random" and "random" not in table.columns else table.find(how.split, ("split",))
    found = how._replace(label=label, groups=groups, split=split)
    found = found._replace(id=table.find(how.id, ("id",)), person=table.find(how.person, ()))
    table.load(named, label, *groups, split, found.id, found.person)
    if split is not None and how.split is None:
        parts = {*named_parts(table.cells(split).tolist())} - {""}
        listed = ", ".join(sorted(parts)[:5]) + (", ..." if len(parts) > 5 else "")
        if parts <= {"train"} or not parts & {"train", "test"}:  # one part, or something else
            _log.warning(
                "%s: drawing a random split; the column %r does not define one (%s)", table.name, split, listed
            )
            return found._replace(split=None)
        if "test" not in parts:
            raise InputError(
                f"{table.name}: the column {split!r} has the parts {listed} and no test: call one of them test, or "
                "draw a split with --split random (in Python split='random')"
            )
    return found


def _labelled(name: str, table: Table, rows: NDArray[np.intp], inputs: Inputs, how: _How) -> Dataset:
    """The data set of some rows of a table and their inputs."""
    ids = table.ids(how.id)[rows]
    labels = column(np.full(len(rows), "") if how.label is None else table.cells(how.label)[rows])
    if (many := len(labels.levels)) > (_CLASSES / 2 if _real_numbers(labels.levels) else max(_CLASSES, len(rows) / 2)):
        raise InputError(
            f"{table.name}: the label {how.label!r} has {many:,} distinct values in {len(rows):,} rows, like "
            f"numbers or ids ({', '.join(map(repr, labels.levels[:3]))}, ...); expected a column of classes: name "
            "another, or make classes of its values first"
        )
    if (longest := max(map(len, labels.levels), default=0)) > _LONGEST:
        what = f"the label {how.label!r} holds a value of {longest:,} characters, like a text"
        raise InputError(f"{table.name}: {what}; expected a column of classes: name another")
    # A row without a person is a person of its own.
    known = None if how.person is None else table.cells(how.person)[rows].tolist()
    person = None if known is None else np.array([who or f"row {row}" for who, row in zip(known, rows, strict=True)])
    for reason, names in how.skips.found().items():
        left = f"{len(names):,} row{' is' if len(names) == 1 else 's are'}"
        _log.warning("%s: %s left out, also of training: %s", table.name, left, reason)
    groups = {group: group_column(table.cells(group)[rows]) for group in how.groups}
    for group, found in groups.items():
        if found.known is not None:
            told = "%s: %s of %s rows have no value in %s: they are used in training and left out of the audit"
            _log.warning(told, table.name, f"{int((~found.known).sum()):,}", f"{len(rows):,}", group)
    columns = {role: getattr(how, role) for role in ("label", "groups", "split", "id", "person")}
    return Dataset.of(
        ids,
        inputs,
        Column(labels.codes, ()) if how.label is None else labels,
        _split(table, rows, ids, labels.values(), person, inputs, how),
        groups,
        cluster=None if person is None else column(person),
        skipped=how.skips.found(),
        provenance={"data": name, **table.provenance(), **columns, "seed": how.seed},
    )


def _real_numbers(levels: Sequence[str]) -> bool:
    """Whether all are numbers, and some are not whole."""
    try:
        return not all(float(level).is_integer() for level in levels)
    except ValueError:
        return False


def _split(
    table: Table,
    rows: NDArray[np.intp],
    ids: NDArray[np.str_],
    labels: NDArray[Any],
    person: NDArray[np.str_] | None,
    inputs: Inputs,
    how: _How,
) -> NDArray[np.str_]:
    """The part of each row, shape [n]: by a column, by person, or drawn within each class.

    Where parts are drawn, rows with the same input stay together, so that nothing is tested on what was trained on.
    """

    def drawn(which: NDArray[np.intp], shares: Mapping[str, float]) -> NDArray[np.str_]:
        taken = inputs.take(which) if isinstance(inputs, Images) else [inputs[row] for row in which.tolist()]
        first = alike(taken)
        again = int((first != np.arange(len(first))).sum())
        if again:
            told = "%s: %s of %s rows duplicate the input of an earlier row; duplicates stay in the same part"
            _log.warning(told, table.name, f"{again:,}", f"{len(first):,}")
        if person is not None:
            return split_by_hash(joined_keys(person[which].tolist(), first), shares, how.seed)
        # Of rows that are alike, the one with the least id stands for all: their order has no part in it.
        order, (_, same) = np.argsort(ids[which], kind="stable"), np.unique(first, return_inverse=True)
        one = which[order[np.unique(first[order], return_index=True)[1]][same]]
        return split_within(ids[one].tolist(), labels[one].tolist(), shares, how.seed)

    if how.split is None and how.label is None:
        return np.full(len(ids), "test")
    fractions = shares_of(len(rows)) if how.fractions is None else how.fractions
    if how.split is None:
        return drawn(np.arange(len(ids)), fractions)
    parts = named_parts(table.cells(how.split)[rows].tolist()).astype(object)
    train = np.flatnonzero(parts == "train")
    if len(train) and "test" in parts and "val" not in parts:
        shares = {name: fractions.get(name, 0.0) for name in ("train", "val")}
        parts[train] = drawn(train, {name: share / sum(shares.values()) for name, share in shares.items()})
    first = alike(inputs)
    again = int(np.isin(first[parts != "train"], first[parts == "train"]).sum())
    if again:
        told = "%s: %s of %s rows outside the training part duplicate a training row: fix the column %r"
        _log.warning(told, table.name, f"{again:,}", f"{int((parts != 'train').sum()):,}", how.split)
    seen: dict[str, str] = {}
    for who, part in zip([] if person is None else person.tolist(), parts, strict=person is not None):
        if seen.setdefault(who, part) != part:
            raise InputError(
                f"{table.name}: {how.person} {who!r} is in both {seen[who]} and {part}, but may be in only "
                f"one: fix the column {how.split!r}, or draw the split by person with --split random "
                "(in Python split='random')"
            )
    return parts.astype(np.str_)


def dataset(source: Any, *, kind: str | None = None, **options: Any) -> Dataset | Items[Any]:
    """Make data for the verbs: from a published data set, your own files, or objects.

    Args:
        source: "reader:path" ("celeba:CelebA", "images:labels.csv"), a pandas or polars DataFrame, an Arrow table,
            a `datasets.Dataset`, lists by column name, or a list, array or Series of PIL images or texts.
        kind: "images", "texts", "pairs" or "triplets", if neither the columns of an object nor the options show it.
        options: `label`, `groups`, `split`, `id`, `person` and other options of the reader: column names, or with a
            list of images or texts, the values themselves (groups as {name: values}).

    Example:
        >>> data = dataset(["A post.", "Another."], label=["no", "yes"], groups={"sex": ["f", "m"]})
        >>> data.all.inputs, data.classes, data.groups()["sex"].levels
        (('A post.', 'Another.'), ('no', 'yes'), ('f', 'm'))
    """
    from fairhead.data import READERS, parse_spec, reader_named

    if isinstance(source, str):
        reader, path = parse_spec(source)
        return reader.read(path, **reader.named(options))
    if isinstance(source, np.ndarray) or type(source).__name__ == "Series":  # of pandas or polars
        source = list(source)
    if isinstance(source, Sequence):
        if not len(source):
            raise InputError(f"the {type(source).__name__} is empty; expected pictures or texts")
        kind = kind or ("texts" if isinstance(source[0], str) else "images")
        source, options = _lists(source, kind, options)
    if kind and not isinstance(source, os.PathLike) and reader_named(kind).name in {*READERS} - {*_KINDS}:
        raise InputError(f"kind is {kind!r}, which reads files; expected one of {', '.join(_KINDS)}")
    check_settings(read_images, options, "reading a table")
    if kind is None:
        with opened(source) as table:
            kind = _kind(table, {name for name, value in options.items() if value is not None}, options.get("input"))
    return reader_named(kind).read(source, **reader_named(kind).named(options))


def _lists(source: Sequence[Any], kind: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values beside a list as columns of a table, and the names of these."""
    groups = options.get("groups") or {}
    if not isinstance(groups, Mapping):
        found = f"found a {type(groups).__name__}"
        raise InputError(f"beside a list of {kind}, groups are given as {{name: values}}; {found}")
    beside = {role: options[role] for role in ("label", "split", "id", "person") if options.get(role) is not None}
    given = {role: values for role, values in beside.items() if not isinstance(values, str)}
    columns = {"text" if kind == "texts" else "image": source, **given, **groups}
    named = {**options, **{role: role for role in given}, "groups": tuple(map(str, groups))}
    return {str(name): list(values) for name, values in columns.items()}, named


def _kind(table: Table, options: Collection[str], input: str | None) -> str:
    """What a table holds, by the options that are given, by the column that is named as input, or by its columns."""
    for kind, own in (("pairs", ("more", "less")), ("triplets", ("stereotype", "anti_stereotype", "unrelated"))):
        if not {*own}.isdisjoint(options):
            return kind
    if (named := table.find(input, ())) and (held := _held(table.values(named))):
        return held
    fitting = {
        "pairs": any(table.find(None, (more,)) and table.find(None, (less,)) for more, less in MORE_LESS),
        "texts": table.find(None, TEXT),
        "images": table.find(None, PATH),
    }
    found = [kind for kind, fits in fitting.items() if fits]
    if len(found) == 1:
        return "triplets" if found == ["pairs"] and table.find(None, ("unrelated",)) else found[0]
    seen = f"could be {' or '.join(found)}" if found else "has no column that shows its kind"
    raise InputError(f"{table.name} {seen}: say kind= {', '.join(_KINDS)}. Its columns: {', '.join(table.columns)}")


def _held(values: Sequence[Any]) -> str | None:
    """Whether these are pictures (or paths of pictures) or texts, by the first value that is either."""
    for value in values:
        if isinstance(value, str):
            return "images" if value.strip().lower().endswith(PICTURES) else "texts"
        if isinstance(value, bytes | Mapping) or hasattr(value, "__array_interface__"):
            return "images"
    return None
