"""Published texts: HateXplain, posts with what annotators say of them, and MultiNLI, premises with hypotheses."""

import os
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from fairhead.data.datasets import Dataset, Items, TextPair, choose, column, yes_no
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


@dataclass(frozen=True)
class Post:
    """One post, with the labels, target communities and rationales of three annotators."""

    id: str  # as published, such as "24198545_gab"
    tokens: tuple[str, ...]  # the words
    labels: tuple[str, ...]  # one per annotator: "hatespeech", "offensive" or "normal"
    targets: tuple[frozenset[str], ...]  # the communities each annotator named; none where the annotator said "None"
    rationales: tuple[tuple[int, ...], ...]  # 0 or 1 a token, of each annotator who gave them; one is cut short
    split: str | None  # "train", "val" or "test"; None for posts outside the official split (the undecided ones)

    @property
    def text(self) -> str:
        """The words, joined by spaces."""
        return " ".join(self.tokens)

    @property
    def label(self) -> str | None:
        """What more than half of the annotators said; None where there is no such label."""
        (label, count), *_ = Counter(self.labels).most_common(1)
        return label if 2 * count > len(self.labels) else None

    @property
    def majority_targets(self) -> frozenset[str]:
        """Communities that more than half of the annotators named."""
        counts = Counter(community for named in self.targets for community in named)
        return frozenset(c for c, n in counts.items() if 2 * n > len(self.targets))


def read_posts(path: str | os.PathLike[str], *, on_error: str = "raise") -> Items[Post]:
    """Read every post of HateXplain, undecided ones too, with its annotations.

    Args:
        path: a folder or zip archive with `dataset.json` and `post_id_divisions.json`, or the path of `dataset.json`.
        on_error: "raise", or "skip" to leave out posts that lack a field.
    """
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
    posts = []
    for key, post in published.items():
        try:
            posts.append(_post(key, post, part_of.get(key)))
        except MALFORMED as error:
            skips.malformed(source.where(name), key, error)
    return Items("hatexplain", tuple(posts), skips.found(), {"data": "hatexplain", "path": str(source.path)})


def _post(key: str, post: Mapping[str, Any], split: str | None) -> Post:
    annotators = post["annotators"]
    labels = tuple(a["label"] for a in annotators)
    if not labels or not set(labels) <= set(POST_LABELS):
        raise ValueError(f"labels are {labels}, expected {POST_LABELS}")
    return Post(
        id=key,
        tokens=texts_field(post, "post_tokens"),
        labels=labels,
        targets=tuple(frozenset(texts_field(a, "target")) - {"None"} for a in annotators),
        rationales=tuple(tuple(r) for r in post["rationales"]),
        split=split,
    )


def read_hatexplain(
    path: str | os.PathLike[str],
    *,
    target: str = "toxic",
    groups: Sequence[str] = ("Women",),
    on_error: str = "raise",
) -> Dataset:
    """Read HateXplain as a classification task with the official split.

    The label is what at least two of three annotators chose. The authors left posts with three different labels out of
    their split; they are left out here too, and counted as "undecided".

    Args:
        path: a folder or zip archive with `dataset.json` and `post_id_divisions.json`.
        target: "toxic" (toxic = hatespeech or offensive, against normal) or "label" (all three).
        groups: communities, such as "Women", "African", "Islam"; a post belongs to one where most annotators name it.
        on_error: "raise", or "skip" to leave out posts that lack a field.
    """
    choose("target", [target], ("toxic", "label"))
    posts = read_posts(path, on_error=on_error)
    communities = sorted({c for p in posts for c in frozenset().union(*p.targets)})
    groups = choose("community", groups, communities)
    skips = Skips()
    kept, labels = [], []
    for post in posts:
        label = post.label
        if label is None:
            skips.drop("undecided: no label has a majority", post.id)
        elif post.split is None:
            skips.drop("not in the official split", post.id)
        else:
            kept.append(post)
            labels.append(label if target == "label" or label == "normal" else "toxic")

    majority = [p.majority_targets for p in kept]
    classes = POST_LABELS if target == "label" else ("normal", "toxic")
    return Dataset.of(
        [p.id for p in kept],
        tuple(p.text for p in kept),
        Column(np.array([classes.index(label) for label in labels], dtype=np.int64), classes),
        [str(p.split) for p in kept],
        {g: yes_no(g, [g in m for m in majority]) for g in groups},
        skipped={**posts.skipped, **skips.found()},
        provenance={**posts.provenance, "target": target, "groups": groups},
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
