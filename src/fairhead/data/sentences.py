"""Sentences in pairs (CrowS-Pairs) and in threes (StereoSet), published or a user's own, and BBQ's questions."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fairhead.data.datasets import Items, choose
from fairhead.data.files import MALFORMED, Line, Skips, Source, table_of, text_field, texts_field
from fairhead.data.own_table import opened
from fairhead.data.splits import joined_keys, split_within, words_in_common
from fairhead.errors import InputError
from fairhead.records import composed

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
        """Its term, or the more stereotypical sentence if it has no term."""
        return self.term or self.more


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
            count, and are held out from training, together. Without it, pairs do that have the same words in both of
            their sentences (`words_in_common`).
        language: only rows of this language, by the column language or lang; by default all, and where the file has
            several languages a category is named with its own: "gender (fr)".
        id: column of distinct ids; by default id. Rows without one are numbered from 1.
        on_error: "raise", or "skip" to leave out rows that lack a sentence or have the same one twice.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "own.csv")
        >>> _ = file.write_text("more,less,category\nShe cannot drive.,He cannot drive.,gender\n")
        >>> pair = read_pairs(file)[0]
        >>> pair.id, pair.more, pair.bias_type
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
        ids, kinds, directions = table.ids(key), table.names(kind, "all"), table.optional(which, "stereo")
        languages, terms = table.names(of, ""), table.optional(named, "")
        if language is not None and (language := composed(language)) not in languages:
            known = ", ".join(sorted({*languages} - {""})) or "no column called language or lang"
            raise InputError(f"{table.name} has no row of the language {language!r}; it has {known}")
        if language is None and len({*languages}) > 1:
            kinds = [f"{kind} ({one})" if one else kind for kind, one in zip(kinds, languages, strict=True)]
        pairs = []
        for row, (first, second) in table.sentences(names, skips).items():
            if language is not None and languages[row] != language:
                continue
            plain = directions[row].lower().replace("-", "").replace("type", "")
            if plain in DIRECTIONS:
                about = terms[row] or words_in_common(first, second) or first
                pairs.append(CrowsPair(str(ids[row]), first, second, plain, kinds[row], (), about))
            else:
                message = f"row {row + 1} has the direction {directions[row]!r}; expected stereo or antistereo"
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
        """The three full texts: the filled sentence, or the context and the sentence that follows it."""
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
        contexts, terms, kinds = table.optional(before, ""), table.optional(named, ""), table.names(kind, "all")
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
    train, held = ([everything[i] for i in np.flatnonzero(part == name)] for name in ("train", "held_out"))
    return TripletSplit(tuple(train), tuple(held))


def _units(items: Sequence[StereoSetItem]) -> list[str]:
    """What is held out together: a term ("Ethiopia" and "ethiopia" are one), or sentences about different groups."""
    first: dict[object, int] = {}
    rows = []
    for i, item in enumerate(items):
        frame = words_in_common(*item.sentences[:2]) if item.target == item.sentences.stereotype else ""
        rows.append(first.setdefault(frame or i, i))
    return joined_keys([item.target.casefold() for item in items], np.array(rows, dtype=np.intp))


CATEGORIES = (
    *("Age", "Disability_status", "Gender_identity", "Nationality", "Physical_appearance", "Race_ethnicity"),
    *("Race_x_SES", "Race_x_gender", "Religion", "SES", "Sexual_orientation"),
)
_SAME_GROUP = {"man": "m", "men": "m", "boy": "m", "woman": "f", "women": "f", "girl": "f", "girls": "f"}


class Answer(NamedTuple):
    """One of three answers: its wording in the question, the person's label or name, and the group."""

    text: str
    person: str
    group: str

    @property
    def is_unknown(self) -> bool:
        """Whether it is the answer "cannot be determined", in one of its ten wordings."""
        return self.group == "unknown"


@dataclass(frozen=True)
class BBQItem:
    """One question of BBQ: a context, a question about two people and three answers, one of them "unknown"."""

    id: str  # category and published example_id, such as "Age/0"
    category: str  # such as "Age" or "Race_x_SES"
    question_index: str  # number of the template
    polarity: str  # "neg" or "nonneg"
    condition: str  # "ambig" (the context does not tell) or "disambig"
    context: str  # the context
    question: str  # the question
    answers: tuple[Answer, Answer, Answer]  # three answers, one of them unknown
    label: int  # index of the correct answer
    # Index of the answer that agrees with the stereotype: the stereotyped group for a negative question, the *other*
    # person for a non-negative one; None where it is not known
    target: int | None
    stereotyped_groups: tuple[str, ...]  # as published
    subcategory: str  # as published

    @property
    def template(self) -> str:
        """What it has in common with others but for the people, such as "Age/1"."""
        return f"{self.category}/{self.question_index}"

    @property
    def unknown(self) -> int:
        """Index of the unknown answer."""
        return next(i for i, answer in enumerate(self.answers) if answer.is_unknown)


def read_bbq(
    path: str | os.PathLike[str],  # the repository's folder, its `data/` folder, a zip archive, or one .jsonl file
    *,
    categories: Sequence[str] | None = None,  # those to read; None reads all that are there
    # The authors' `additional_metadata.csv`; None takes it from `path` where it is there, and derives the targets
    # otherwise. Without it the intersectional categories (Race_x_gender, Race_x_SES) have no targets.
    metadata: str | os.PathLike[str] | None = None,
    drop_without_target: bool = True,  # leave out items whose target is not known, and count them; False keeps them
    on_error: str = "raise",  # "raise", or "skip" to leave out lines that are broken
) -> Items[BBQItem]:
    """Read BBQ: one .jsonl file per category.

    The authors publish the targets as `target_loc` in `supplemental/additional_metadata.csv`; where that file is not at
    hand they are derived here.
    """
    source, skips = Source(path), Skips(on_error)
    if source.is_file and not source.is_archive:
        files = {source.path.stem: source.path.name}
    else:  # by name: the authors' repository also holds .jsonl files of results
        files = {c: source.find(f"{c}.jsonl", "BBQ") for c in CATEGORIES if source.matching(f"{c}.jsonl")}
    if not files:
        raise source.missing("one .jsonl file per category, such as Age.jsonl", "BBQ")
    published = _published_targets(source, metadata)
    items = []
    for category in choose("category", tuple(files) if categories is None else categories, tuple(files)):
        for line in source.jsonl(files[category], skips):
            try:
                item, reason = _item(line, published)
            except MALFORMED as error:
                skips.malformed(source.where(files[category]), f"line {line.number}", error)
                continue
            if reason and drop_without_target:
                skips.drop(reason, item.id)
            else:
                items.append(item)
    targets = "derived" if published is None else "additional_metadata.csv"
    return Items("bbq", tuple(items), skips.found(), {"data": "bbq", "path": str(source.path), "targets": targets})


def _item(line: Line, published: dict[str, int | None] | None) -> tuple[BBQItem, str | None]:
    """An item, and why it has no target, if it has none."""
    row = line.row
    info: dict[str, Any] = row["answer_info"]
    answers = tuple(Answer(text_field(row, k), str(info[k][0]), str(info[k][-1])) for k in ("ans0", "ans1", "ans2"))
    metadata = row["additional_metadata"]
    polarity, condition, label = row["question_polarity"], row["context_condition"], row["label"]
    if sum(a.is_unknown for a in answers) != 1:
        raise ValueError(f"exactly one answer should be unknown, found the groups {[a.group for a in answers]}")
    if polarity not in ("neg", "nonneg") or condition not in ("ambig", "disambig") or label not in (0, 1, 2):
        raise ValueError(f"polarity {polarity!r}, condition {condition!r} or label {label!r} is none of the published")
    category = text_field(row, "category")
    key = f"{category}/{row['example_id']}"
    groups = texts_field(metadata, "stereotyped_groups")
    if published is not None:
        target = published.get(key)
        reason = "no target in additional_metadata.csv" if target is None else None
    else:
        target, reason = derive_target(category, polarity, answers, groups)
    item = BBQItem(
        id=key,
        category=category,
        question_index=str(row["question_index"]),
        polarity=polarity,
        condition=condition,
        context=text_field(row, "context"),
        question=text_field(row, "question"),
        answers=(answers[0], answers[1], answers[2]),
        label=label,
        target=target,
        stereotyped_groups=groups,
        subcategory=str(metadata.get("subcategory") or "None"),
    )
    return item, reason


class Target(NamedTuple):
    """The answer (0, 1 or 2) that agrees with the stereotype, or why there is none."""

    answer: int | None
    reason: str | None


def derive_target(category: str, polarity: str, answers: Sequence[Answer], stereotyped: Sequence[str]) -> Target:
    """Find the answer that agrees with the stereotype.

    An answer belongs to the stereotyped groups where its group is one of them: whole names, so that "nonOld" is not
    "old" and "African" not "African American". Nationality names people, not regions, so there the person decides.
    Any group that starts with "trans" is "trans"; names carry their gender as a prefix ("M-Black"), which is dropped.
    """
    if "_x_" in category:
        return Target(None, "intersectional: the target is only in additional_metadata.csv")
    wanted = {_plain(group) for group in stereotyped}
    people = [i for i, answer in enumerate(answers) if not answer.is_unknown]
    named = [answer.person if category == "Nationality" else answer.group for answer in answers]
    matches = [i for i in people if _plain(named[i]) in wanted]
    if len(matches) != 1:
        return Target(None, f"{'both answers match' if matches else 'no answer matches'} the stereotyped groups")
    other = next(i for i in people if i != matches[0])
    return Target(matches[0] if polarity == "neg" else other, None)


def _plain(group: str) -> str:
    name = group.strip(" {}").casefold().replace(" ses", "ses").removeprefix("m-").removeprefix("f-")
    return "trans" if name.startswith("trans") else _SAME_GROUP.get(name, name)


def _published_targets(source: Source, metadata: str | os.PathLike[str] | None) -> dict[str, int | None] | None:
    """The authors' target_loc by item id; None where their file is not at hand."""
    if metadata is not None:
        source = Source(metadata)
    elif (source.is_file and not source.is_archive) or not source.matching("additional_metadata.csv"):
        return None
    name, columns = source.find("additional_metadata.csv", "BBQ"), ["category", "example_id", "target_loc"]
    problem = "is not the authors' additional_metadata.csv"
    table = table_of(source.text(name), source.where(name), problem, usecols=columns, dtype=str)
    rows = zip(*(table[column] for column in columns), strict=True)
    # Items without a target are NA, or "x" in the intersectional categories.
    return {f"{c}/{e}": int(t) if t in ("0", "1", "2") else None for c, e, t in rows}
