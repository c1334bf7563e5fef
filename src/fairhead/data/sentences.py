"""Sentences in pairs and in threes: CrowS-Pairs, StereoSet, and a user's own."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fairhead.data.datasets import Items
from fairhead.data.files import Skips
from fairhead.data.own_table import opened
from fairhead.data.splits import joined_keys, split_within
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
    term: str = ""  # what it is about, where known: pairs of one term belong together

    @property
    def target(self) -> str:
        """Its term, or the more stereotypical sentence, where it is one of its own."""
        return self.term or self.more

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
    path: Any,
    *,
    more: str | None = None,
    less: str | None = None,
    category: str | None = None,
    direction: str | None = None,
    term: str | None = None,
    language: str | None = None,
    id: str | None = None,
    on_error: str = "raise",
) -> Items[CrowsPair]:
    r"""Read pairs of sentences of your own from a table (CSV, TSV, JSONL, Parquet), or WinoQueer's as published.

    Args:
        path: the table.
        more: column of the more stereotypical sentence; by default more, stereotype, sent_more or sent_x.
        less: column of the less stereotypical one; by default less, antistereotype, sent_less or sent_y.
        category: column of the kind of bias; by default category, bias_type or Gender_ID_x.
        direction: column with "stereo" or "antistereo", see `CrowsPair`; by default direction or stereo_antistereo.
            "stereo" where there is none.
        term: column of what a pair is about (a job, a group, a template), by default term or target: pairs of one term
            count, and are held out from training, together. Without it each is on its own, unless it has the words of
            another but for those that differ between its sentences.
        language: only rows of this language, by the column language or lang; by default all, and where the file has
            several languages a category is named with its own: "gender (fr)".
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
        together = [pair for pair in MORE_LESS if all(table.find(None, (name,)) for name in pair)]
        firsts, seconds = zip(*(together[:1] or MORE_LESS), strict=True)
        names = table.need("more", more, firsts), table.need("less", less, seconds)
        kind, which = table.find(category, CATEGORY), table.find(direction, ("direction", "stereo_antistereo"))
        of, named = table.find(None, ("language", "lang")), table.find(term, ("term", "target"))
        table.load(*names, kind, which, of, named, key := table.find(id, ("id",)))
        ids, kinds, directions = table.ids(key), table.optional(kind, "all"), table.optional(which, "stereo")
        languages, terms = table.optional(of, ""), table.optional(named, "")
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
                pairs.append(CrowsPair(str(ids[row]), first, second, plain, kinds[row], (), terms[row]))
            else:
                message = f"row {row + 1} has the direction {directions[row]!r}; stereo or antistereo is expected"
                skips.error("no such direction", str(ids[row]), f"{table.name}: {message}")
        return Items("pairs", tuple(pairs), skips.found(), {"data": "pairs", **table.provenance()})


KINDS = ("intrasentence", "intersentence")
GOLD_LABELS = ("stereotype", "anti-stereotype", "unrelated")


class Triplet(NamedTuple):
    """The three texts of an item, ready to be scored or trained on."""

    stereotype: str
    anti_stereotype: str
    unrelated: str


@dataclass(frozen=True)
class StereoSetItem:
    """One item."""

    id: str  # as published
    kind: str  # "intrasentence" (the context has a BLANK) or "intersentence" (a sentence follows the context)
    target: str  # the term whose stereotype is asked for
    bias_type: str  # "gender", "profession", "race" or "religion"
    context: str  # the sentence with BLANK, or the sentence before
    sentences: Triplet  # the three sentences as published; an intrasentence one is the context with its BLANK filled
    source: str = field(default="", repr=False)  # where it is from, where several sources are read together
    of_pair: bool = field(default=False, repr=False)  # whether its third sentence is one of another pair's

    @property
    def texts(self) -> Triplet:
        """The three full texts: the filled sentence, or the context and the sentence that follows it.

        Example:
            >>> item = StereoSetItem("1", "intersentence", "t", "race", "He came.", Triplet("A.", "B.", "C."))
            >>> item.texts.unrelated
            'He came. C.'
        """
        if self.kind == "intrasentence":
            return self.sentences
        return Triplet(*(f"{self.context} {sentence}" for sentence in self.sentences))


class TripletSplit(NamedTuple):
    """Items to train on and items to look at, with no target term in both."""

    train: tuple[StereoSetItem, ...]
    held_out: tuple[StereoSetItem, ...]


def read_triplets(
    path: Any,
    *,
    stereotype: str | None = None,
    anti_stereotype: str | None = None,
    unrelated: str | None = None,
    context: str | None = None,
    category: str | None = None,
    term: str | None = None,
    id: str | None = None,
    on_error: str = "raise",
) -> Items[StereoSetItem]:
    """Read sentences in threes of your own from a table (CSV, TSV, JSONL, Parquet).

    Args:
        path: the table.
        stereotype: column of the stereotypical sentence; by default stereotype.
        anti_stereotype: column of its opposite; by default anti_stereotype or antistereotype.
        unrelated: column of a sentence that has nothing to do with either; by default unrelated.
        context: column of the sentence before them; by default context. Where it is empty or has a BLANK, the three
            sentences stand for themselves.
        category: column of the kind of bias; by default category or bias_type.
        term: column of the term that the stereotype is about, by default term or target: rows of one term count, and
            are held out from training, together. Without it each row is a term of its own.
        id: column of distinct ids; by default id. Rows without one are numbered from 1.
        on_error: "raise", or "skip" to leave out rows that lack a sentence or have the same one twice.
    """
    skips = Skips(on_error)
    with opened(path) as table:
        names = (
            table.need("stereotype", stereotype, ("stereotype",)),
            table.need("anti_stereotype", anti_stereotype, ("anti_stereotype", "antistereotype")),
            table.need("unrelated", unrelated, ("unrelated",)),
        )
        before, named = table.find(context, ("context",)), table.find(term, ("term", "target"))
        kind, key = table.find(category, ("category", "bias_type")), table.find(id, ("id",))
        table.load(*names, before, named, kind, key)
        contexts, terms, kinds = (table.optional(*one) for one in ((before, ""), (named, ""), (kind, "all")))
        ids, items = table.ids(key).tolist(), []
        for row, sentences in table.sentences(names, skips).items():
            which = KINDS[bool(contexts[row]) and "BLANK" not in contexts[row]]
            about = terms[row] or sentences[0]
            items.append(StereoSetItem(ids[row], which, about, kinds[row], contexts[row], Triplet(*sentences)))
        return Items("triplets", tuple(items), skips.found(), {"data": "triplets", **table.provenance()})


def split_by_target(items: Iterable[StereoSetItem], held_out: float = 0.1, seed: int = 0) -> TripletSplit:
    """Split the items of each source so that no target term is trained on and looked at as well.

    A model must never be scored on StereoSet terms that it was trained on. Items that have no term, as pairs, are held
    out together where they say the same of different groups.
    """
    everything = tuple(items)
    keys, sources = _units(everything), [item.source for item in everything]
    part = split_within(keys, sources, {"train": 1 - held_out, "held_out": held_out}, seed)
    return TripletSplit(
        tuple(item for item, p in zip(everything, part, strict=True) if p == "train"),
        tuple(item for item, p in zip(everything, part, strict=True) if p == "held_out"),
    )


def _units(items: Sequence[StereoSetItem]) -> list[str]:
    """What is held out together: a term ("Ethiopia" and "ethiopia" are one), or sentences about different groups.

    Example:
        >>> drive = [Triplet(f"{a} cannot drive.", f"{b} cannot drive.", "") for a, b in (("She", "He"), ("Dee", "Al"))]
        >>> _units([StereoSetItem("", "intrasentence", of.stereotype, "gender", "", of) for of in drive])
        ['dee cannot drive.', 'dee cannot drive.']
    """
    first: dict[object, int] = {}
    rows = []
    for i, item in enumerate(items):
        frame: object = i
        if item.target == item.sentences.stereotype:
            words = [Counter(text.casefold().split()) for text in item.sentences[:2]]
            common = words[0] & words[1]
            # Of sentences that have little in common, an article or a verb would be all.
            if 2 * common.total() >= min(one.total() for one in words):
                frame = tuple(sorted(common.elements()))
        rows.append(first.setdefault(frame, i))
    return joined_keys([item.target.casefold() for item in items], np.array(rows, dtype=np.intp))
