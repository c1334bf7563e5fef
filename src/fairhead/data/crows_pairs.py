"""CrowS-Pairs: two sentences that differ only in the group they speak of."""

import ast
import csv
import os
import textwrap
from dataclasses import dataclass
from io import StringIO

from fairhead.data.dataset import Items
from fairhead.data.files import MALFORMED, Skips, Source
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
