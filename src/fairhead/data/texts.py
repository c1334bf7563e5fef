"""Published texts: HateXplain, posts with what annotators say of them, and MultiNLI, premises with hypotheses."""

import os
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from fairhead.data.datasets import Dataset, TextPair, choose, column, yes_no
from fairhead.data.files import MALFORMED, Skips, Source, texts_field
from fairhead.data.splits import split_by_hash
from fairhead.errors import InputError
from fairhead.records import Column

POST_LABELS = ("hatespeech", "normal", "offensive")
INFERENCES = ("contradiction", "entailment", "neutral")
NEGATION_WORDS = frozenset({"nobody", "no", "never", "nothing"})
# The shares of the group-DRO experiments, which pool all published files.
HALF_FIFTH_REST: Mapping[str, float] = {"train": 0.5, "val": 0.2, "test": 0.3}
_PREFIX = "multinli_1.0_"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def read_hatexplain(
    path: str | os.PathLike[str],
    *,
    target: str = "toxic",
    groups: Sequence[str] = ("Women",),
    on_error: str = "raise",
) -> Dataset:
    """Read HateXplain, posts that three annotators judged each, as a classification task with the official split.

    The label is what at least two of three annotators chose. The authors left posts with three different labels out of
    their split; they are left out here too, and counted as "undecided".

    Args:
        path: a folder or zip archive with `dataset.json` and `post_id_divisions.json`, or the path of `dataset.json`.
        target: "toxic" (toxic = hatespeech or offensive, against normal) or "label" (all three).
        groups: communities, such as "Women", "African", "Islam"; a post belongs to one where most annotators name it.
        on_error: "raise", or "skip" to leave out posts that lack a field.
    """
    choose("target", [target], ("toxic", "label"))
    path = Path(path)
    source, skips = Source(path.parent if path.is_file() and path.suffix == ".json" else path), Skips(on_error)
    name = source.find("dataset.json", "HateXplain")
    published = source.json(name)
    divisions = source.json(source.find("post_id_divisions.json", "HateXplain"))
    objects = isinstance(published, dict) and isinstance(divisions, dict)
    if not objects or not all(isinstance(members, list) for members in divisions.values()):
        raise InputError(f"{source.path}: HateXplain has {{post: ...}} in dataset.json, {{part: [post]}} in divisions")
    part_of = {str(post): part for part, members in divisions.items() for post in members}
    strangers = part_of.keys() - published.keys()
    if strangers:
        raise InputError(
            f"{source.where(name)}: lacks {len(strangers)} posts of post_id_divisions.json, such as {min(strangers)}"
        )
    posts = {}
    for key, post in published.items():
        try:
            posts[key] = _judged(post)
        except MALFORMED as error:
            skips.malformed(source.where(name), key, error)
    groups = choose("community", groups, sorted({c for post in posts.values() for c in post.named}))
    for key, judged in posts.items():
        if judged.label is None:
            skips.drop("undecided: no label has a majority", key)
        elif key not in part_of:
            skips.drop("not in the official split", key)
    kept = {key: post for key, post in posts.items() if post.label is not None and key in part_of}
    classes = POST_LABELS if target == "label" else ("normal", "toxic")
    labels = [post.label if post.label in classes else "toxic" for post in kept.values()]
    return Dataset.of(
        list(kept),
        tuple(post.text for post in kept.values()),
        Column(np.array([classes.index(str(label)) for label in labels], dtype=np.int64), classes),
        [part_of[key] for key in kept],
        {group: yes_no(group, [group in post.targets for post in kept.values()]) for group in groups},
        skipped=skips.found(),
        provenance={"data": "hatexplain", "path": str(source.path), "target": target, "groups": groups},
    )


class _Judged(NamedTuple):
    text: str
    label: str | None  # what more than half of the annotators said; None where there is no such label
    named: frozenset[str]  # the communities that any of them named
    targets: frozenset[str]  # those that more than half of them named


def _judged(post: Mapping[str, Any]) -> _Judged:
    annotators = post["annotators"]
    labels = Counter(a["label"] for a in annotators)
    if not labels or not set(labels) <= set(POST_LABELS):
        raise ValueError(f"labels are {tuple(labels.elements())}, expected {POST_LABELS}")
    (label, count), *_ = labels.most_common(1)
    named = Counter(community for a in annotators for community in {*texts_field(a, "target")} - {"None"})
    return _Judged(
        " ".join(texts_field(post, "post_tokens")),
        label if 2 * count > len(annotators) else None,
        frozenset(named),
        frozenset(community for community, times in named.items() if 2 * times > len(annotators)),
    )


def has_negation(hypothesis: str) -> bool:
    """Whether a text has one of the words nobody, no, never, nothing, without punctuation and in any case."""
    return not NEGATION_WORDS.isdisjoint(hypothesis.translate(_NO_PUNCTUATION).lower().split())


def read_multinli(
    path: str | os.PathLike[str],
    *,
    split: str = "official",
    fractions: Mapping[str, float] = HALF_FIFTH_REST,
    seed: int = 0,
    on_error: str = "raise",
) -> Dataset:
    """Read MultiNLI from `multinli_1.0.zip`, its folder or one of its .jsonl files.

    Pairs without a gold label ("-") are left out and counted. Ids are the part and the published pairID, such as
    "dev_matched/63735n".

    Args:
        path: folder, zip archive or .jsonl file; all of train, dev_matched and dev_mismatched that are there are read.
        split: "official" (train, dev_matched, dev_mismatched) or "random" (all pooled and drawn again, 50/20/30).
        fractions: part -> share of a random split.
        seed: of a random split.
        on_error: "raise", or "skip" to leave out lines that are broken.

    Returns:
        Three classes, in the order contradiction, entailment, neutral; one group column "negation". Pairs with the same
        premise are a cluster.
    """
    choose("split", [split], ("official", "random"))
    source, skips = Source(path), Skips(on_error)
    files = source.matching(f"{_PREFIX}*.jsonl")
    if not files:
        raise source.missing(
            f"{_PREFIX}train.jsonl, {_PREFIX}dev_matched.jsonl or {_PREFIX}dev_mismatched.jsonl", "MultiNLI"
        )
    ids, parts, pairs, labels = list[str](), list[str](), list[TextPair](), list[int]()
    for file in files:
        part = PurePosixPath(file).stem.removeprefix(_PREFIX)
        for line in source.jsonl(file, skips):
            where = f"{part}/{line.row.get('pairID', line.number)}"
            gold, premise, hypothesis = (line.row.get(k) for k in ("gold_label", "sentence1", "sentence2"))
            if gold == "-":
                skips.drop("no gold label", where)
            elif gold not in INFERENCES or not isinstance(premise, str) or not isinstance(hypothesis, str):
                skips.error(
                    "pair is incomplete",
                    where,
                    f"{source.where(file)}, line {line.number}: needs gold_label (one of {', '.join(INFERENCES)}), "
                    f"sentence1 and sentence2; found gold_label {gold!r} and the fields {', '.join(line.row)}",
                )
            else:
                ids.append(where)
                parts.append(part)
                pairs.append(TextPair(premise, hypothesis))
                labels.append(INFERENCES.index(gold))
    # Nothing in the published format promises that pairIDs are distinct: a, a -> a, a#2.
    seen = Counter[str]()
    for row, name in enumerate(ids):
        seen[name] += 1
        ids[row] = name if seen[name] == 1 else f"{name}#{seen[name]}"
    return Dataset.of(
        ids,
        tuple(pairs),
        Column(np.array(labels, dtype=np.int64), INFERENCES),
        parts if split == "official" else split_by_hash(ids, fractions, seed),
        {"negation": yes_no("negation", [has_negation(p.hypothesis) for p in pairs])},
        cluster=column([p.premise for p in pairs]) if pairs else None,
        skipped=skips.found(),
        provenance={"data": "multinli", "path": str(source.path), "files": files, "split": split, "seed": seed},
    )
