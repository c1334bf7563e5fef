"""CrowS-Pairs, and pairs of your own: two sentences that differ only in the group they speak of."""

import ast
import csv
import os
import textwrap
from dataclasses import dataclass
from io import StringIO
from typing import Any

from fairhead.data.datasets import Items
from fairhead.data.files import MALFORMED, Skips, Source
from fairhead.data.own_table import Table, opened
from fairhead.errors import InputError

FILE = "crows_pairs_anonymized.csv"
DIRECTIONS = ("stereo", "antistereo")
_COLUMNS = ("sent_more", "sent_less", "stereo_antistereo", "bias_type", "annotations")


@dataclass(frozen=True)
class CrowsPair:
    """One pair.

    Attributes:
        id: the row number as published.
        more: the more stereotypical sentence, in either direction.
        less: the less stereotypical one.
        direction: "stereo": `more` speaks of a disadvantaged group and shows a stereotype; "antistereo": `less` speaks
            of a disadvantaged group and goes against one.
        bias_type: one of nine, such as "race-color".
        annotations: the bias types that each of the five validators named.
    """

    id: str
    more: str
    less: str
    direction: str
    bias_type: str
    annotations: tuple[tuple[str, ...], ...]

    @property
    def disadvantaged(self) -> str:
        """The sentence about the disadvantaged group."""
        return self.more if self.direction == "stereo" else self.less


def read_crows_pairs(path: str | os.PathLike[str], *, on_error: str = "raise") -> Items[CrowsPair]:
    r"""Read `crows_pairs_anonymized.csv` (1 508 pairs).

    Args:
        path: the file, or a folder or zip archive that holds it.
        on_error: "raise", or "skip" to leave out rows that are broken.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "crows_pairs_anonymized.csv")
        >>> header = ",sent_more,sent_less,stereo_antistereo,bias_type,annotations"
        >>> row = '0,"Well, she cried.","Well, he cried.",stereo,gender,[[\'gender\']]'
        >>> _ = file.write_text(f"{header}\n{row}\n")
        >>> read_crows_pairs(file)[0].disadvantaged
        'Well, she cried.'
    """
    source, skips = Source(path), Skips(on_error)
    name = source.find(FILE, "CrowS-Pairs")
    rows = csv.DictReader(StringIO(source.text(name), newline=""), strict=True)
    pairs = []
    try:
        columns = rows.fieldnames or ()
        lacking = [c for c in _COLUMNS if c not in columns]
        if lacking:
            seen = textwrap.shorten(", ".join(columns), 200, placeholder=" ...")  # of a JSON file: all of it
            raise InputError(f"{source.where(name)}: has no column {lacking[0]!r}; it has {seen}")
        for row in rows:
            try:
                pairs.append(_pair(row))
            except MALFORMED as error:
                skips.malformed(source.where(name), f"line {rows.line_num}", error)
    except csv.Error as error:
        raise InputError(f"{source.where(name)}, after line {rows.line_num}: {error}. Is the file cut off?") from None
    return Items("crows_pairs", tuple(pairs), skips.found(), {"data": "crows_pairs", "path": str(source.path)})


def _pair(row: dict[str, str]) -> CrowsPair:
    if row["stereo_antistereo"] not in DIRECTIONS or not row["sent_more"] or not row["sent_less"]:
        raise ValueError(
            f"needs two sentences and a direction (stereo or antistereo), found {row['stereo_antistereo']!r}"
        )
    annotations = ast.literal_eval(row["annotations"])
    return CrowsPair(
        id=row.get("", ""),
        more=row["sent_more"],
        less=row["sent_less"],
        direction=row["stereo_antistereo"],
        bias_type=row["bias_type"],
        annotations=tuple(tuple(named) for named in annotations),
    )


MORE_LESS = (
    ("more", "less"),
    ("stereotype", "antistereotype"),
    ("stereotype", "anti_stereotype"),
    ("sent_more", "sent_less"),
)
CATEGORY = ("category", "bias_type")


def read_pairs(
    path: Any,
    *,
    more: str | None = None,
    less: str | None = None,
    category: str | None = None,
    direction: str | None = None,
    id: str | None = None,
    on_error: str = "raise",
) -> Items[CrowsPair]:
    r"""Read pairs of sentences of your own from a table (CSV, TSV, JSONL, Parquet).

    Args:
        path: the table.
        more: column of the more stereotypical sentence; by default more, stereotype or sent_more.
        less: column of the less stereotypical one; by default less, antistereotype or sent_less.
        category: column of the kind of bias; by default category or bias_type.
        direction: column with "stereo" or "antistereo", see `CrowsPair`; by default direction or stereo_antistereo.
            "stereo" where there is none.
        id: column of distinct ids; by default id. Rows without one are numbered from 1.
        on_error: "raise", or "skip" to leave out rows that lack a sentence or have the same one twice.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "own.csv")
        >>> _ = file.write_text("more,less,category\nShe cannot drive.,He cannot drive.,gender\n")
        >>> pair = read_pairs(file)[0]
        >>> pair.id, pair.disadvantaged, pair.bias_type
        ('1', 'She cannot drive.', 'gender')
    """
    skips = Skips(on_error)
    with opened(path) as table:
        names = pair_columns(table, more, less)
        kind, which = table.find(category, CATEGORY), table.find(direction, ("direction", "stereo_antistereo"))
        table.load(*names, kind, which, key := table.find(id, ("id",)))
        ids, kinds, directions = table.ids(key), table.optional(kind, "all"), table.optional(which, "stereo")
        pairs = []
        for row, (first, second) in table.sentences(names, skips).items():
            plain = directions[row].lower().replace("-", "").replace("type", "")
            if plain in DIRECTIONS:
                pairs.append(CrowsPair(str(ids[row]), first, second, plain, kinds[row], ()))
            else:
                message = f"row {row + 1} has the direction {directions[row]!r}; stereo or antistereo is expected"
                skips.error("no such direction", str(ids[row]), f"{table.name}: {message}")
        return Items("pairs", tuple(pairs), skips.found(), {"data": "pairs", **table.provenance()})


def pair_columns(table: Table, more: str | None = None, less: str | None = None) -> tuple[str, str]:
    """The columns of the two sentences: those that are named, or two of the usual names that go together."""
    for first, second in MORE_LESS if more is None and less is None else ():
        if (found := table.find(None, (first,))) and (other := table.find(None, (second,))):
            return found, other
    firsts, seconds = (list(dict.fromkeys(names)) for names in zip(*MORE_LESS, strict=True))
    return table.need("more", more, firsts), table.need("less", less, seconds)
