"""BBQ's questions: a context, a question about two people and three answers, one of them "unknown". Needs no torch.

`BBQItem.target` is the answer that agrees with the stereotype the item is about, which the bias score counts: the
stereotyped group for a negative question and the *other* person for a non-negative one. The authors publish it as
`target_loc` in `supplemental/additional_metadata.csv`; where that file is not at hand it is derived here.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, NamedTuple

from fairhead.data.datasets import Items, choose
from fairhead.data.files import MALFORMED, Line, Skips, Source, text_field, texts_field
from fairhead.errors import InputError

CATEGORIES = (
    "Age",
    "Disability_status",
    "Gender_identity",
    "Nationality",
    "Physical_appearance",
    "Race_ethnicity",
    "Race_x_SES",
    "Race_x_gender",
    "Religion",
    "SES",
    "Sexual_orientation",
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
    """One question."""

    id: str  # category and published example_id, such as "Age/0"
    category: str  # such as "Age" or "Race_x_SES"
    question_index: str  # number of the template
    polarity: str  # "neg" or "nonneg"
    condition: str  # "ambig" (the context does not tell) or "disambig"
    context: str  # the context
    question: str  # the question
    answers: tuple[Answer, Answer, Answer]  # three answers, one of them unknown
    label: int  # index of the correct answer
    target: int | None  # index of the answer that agrees with the stereotype, or None where it is not known
    stereotyped_groups: tuple[str, ...]  # as published
    subcategory: str  # as published

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
    """Read BBQ: one .jsonl file per category."""
    source, skips = Source(path), Skips(on_error)
    files = _category_files(source)
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


def _category_files(source: Source) -> dict[str, str]:
    if source.is_file and not source.is_archive:
        return {source.path.stem: source.path.name}
    # By name: the authors' repository also holds .jsonl files of results.
    return {c: source.find(f"{c}.jsonl", "BBQ") for c in CATEGORIES if source.matching(f"{c}.jsonl")}


class _Found(NamedTuple):
    item: BBQItem
    no_target: str | None  # why there is no target


def _item(line: Line, published: dict[str, int | None] | None) -> _Found:
    row = line.row
    info: dict[str, Any] = row["answer_info"]
    answers = tuple(Answer(text_field(row, k), str(info[k][0]), str(info[k][-1])) for k in ("ans0", "ans1", "ans2"))
    metadata = row["additional_metadata"]
    polarity, condition, label = row["question_polarity"], row["context_condition"], row["label"]
    if sum(a.is_unknown for a in answers) != 1:
        raise ValueError(f"exactly one answer should be unknown, found the groups {[a.group for a in answers]}")
    if polarity not in ("neg", "nonneg") or condition not in ("ambig", "disambig") or label not in (0, 1, 2):
        raise ValueError(
            f"polarity {polarity!r}, condition {condition!r} or label {label!r} is not one of the published"
        )
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
    return _Found(item, reason)


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
    matches = [
        i for i in people if _plain(answers[i].person if category == "Nationality" else answers[i].group) in wanted
    ]
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
    import pandas as pd  # here: not needed for --help

    name = source.find("additional_metadata.csv", "BBQ")
    try:
        table = pd.read_csv(StringIO(source.text(name)), usecols=["category", "example_id", "target_loc"], dtype=str)
    except (ValueError, pd.errors.ParserError) as error:
        raise InputError(f"{source.where(name)}: is not the authors' additional_metadata.csv: {error}") from None
    rows = zip(table["category"], table["example_id"], table["target_loc"], strict=True)
    # Items without a target are NA, or "x" in the intersectional categories.
    return {f"{c}/{e}": int(t) if t in ("0", "1", "2") else None for c, e, t in rows}
