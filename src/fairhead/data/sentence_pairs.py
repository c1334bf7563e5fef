"""Pairs of sentences that differ only in the group they speak of: those of CrowS-Pairs, and your own."""

from dataclasses import dataclass
from typing import Any

from fairhead.data.datasets import Items
from fairhead.data.files import Skips
from fairhead.data.own_table import opened
from fairhead.errors import InputError

DIRECTIONS = ("stereo", "antistereo")


@dataclass(frozen=True)
class CrowsPair:
    """One pair."""

    id: str  # the row number as published
    more: str  # the more stereotypical sentence, in either direction
    less: str  # the less stereotypical one
    # "stereo": `more` speaks of a disadvantaged group and shows a stereotype; "antistereo": `less` speaks of a
    # disadvantaged group and goes against one
    direction: str
    bias_type: str  # one of nine, such as "race-color"
    annotations: tuple[tuple[str, ...], ...]  # the bias types that each of the five validators named

    @property
    def disadvantaged(self) -> str:
        """The sentence about the disadvantaged group."""
        return self.more if self.direction == "stereo" else self.less


MORE_LESS = (
    ("more", "less"),
    ("stereotype", "antistereotype"),
    ("stereotype", "anti_stereotype"),
    ("sent_more", "sent_less"),
    ("sent_x", "sent_y"),  # of WinoQueer
)
CATEGORY = ("category", "bias_type", "gender_id_x")


def read_pairs(
    path: Any,  # the table
    *,
    # Column of the more stereotypical sentence; by default more, stereotype, sent_more or sent_x
    more: str | None = None,
    # Column of the less stereotypical one; by default less, antistereotype, sent_less or sent_y
    less: str | None = None,
    category: str | None = None,  # column of the kind of bias; by default category, bias_type or Gender_ID_x
    # Column with "stereo" or "antistereo", see `CrowsPair`; by default direction or stereo_antistereo. "stereo" where
    # there is none.
    direction: str | None = None,
    # Only rows of this language, by the column language or lang; by default all, and where the file has several
    # languages a category is named with its own: "gender (fr)"
    language: str | None = None,
    id: str | None = None,  # column of distinct ids; by default id. Rows without one are numbered from 1.
    on_error: str = "raise",  # "raise", or "skip" to leave out rows that lack a sentence or have the same one twice
) -> Items[CrowsPair]:
    r"""Read pairs of sentences of your own from a table (CSV, TSV, JSONL, Parquet), or WinoQueer's as published.

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
        together = [pair for pair in MORE_LESS if all(table.find(None, (name,)) for name in pair)]
        firsts, seconds = zip(*(together[:1] or MORE_LESS), strict=True)
        names = table.need("more", more, firsts), table.need("less", less, seconds)
        kind, which = table.find(category, CATEGORY), table.find(direction, ("direction", "stereo_antistereo"))
        of = table.find(None, ("language", "lang"))
        table.load(*names, kind, which, of, key := table.find(id, ("id",)))
        ids, kinds, directions = table.ids(key), table.optional(kind, "all"), table.optional(which, "stereo")
        languages = table.optional(of, "")
        if language is not None and language not in languages:
            known = ", ".join(sorted({*languages} - {""})) or "no column of languages"
            raise InputError(f"{table.name} has no row of the language {language!r}; it has {known}")
        if language is None and len({*languages}) > 1:
            kinds = [f"{kind} ({one})" if one else kind for kind, one in zip(kinds, languages, strict=True)]
        pairs = []
        for row, (first, second) in table.sentences(names, skips).items():
            if language is not None and languages[row] != language:
                continue
            plain = directions[row].lower().replace("-", "").replace("type", "")
            if plain in DIRECTIONS:
                pairs.append(CrowsPair(str(ids[row]), first, second, plain, kinds[row], ()))
            else:
                message = f"row {row + 1} has the direction {directions[row]!r}; stereo or antistereo is expected"
                skips.error("no such direction", str(ids[row]), f"{table.name}: {message}")
        return Items("pairs", tuple(pairs), skips.found(), {"data": "pairs", **table.provenance()})
