"""HateXplain: posts with the labels, target communities and rationales of three annotators each."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fairhead.data.datasets import Dataset, Items, choose, yes_no
from fairhead.data.files import MALFORMED, Skips, Source, texts_field
from fairhead.errors import InputError
from fairhead.records import Column

LABELS = ("hatespeech", "normal", "offensive")


@dataclass(frozen=True)
class Post:
    """One post.

    Attributes:
        id: as published, such as "24198545_gab".
        tokens: the words.
        labels: one per annotator: "hatespeech", "offensive" or "normal".
        targets: the communities each annotator named; none where the annotator said "None".
        rationales: 0 or 1 a token, one list for each annotator who gave one. One published list is shorter than its
            post.
        split: "train", "val" or "test"; None for posts outside the official split (the undecided ones).
    """

    id: str
    tokens: tuple[str, ...]
    labels: tuple[str, ...]
    targets: tuple[frozenset[str], ...]
    rationales: tuple[tuple[int, ...], ...]
    split: str | None

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
    if not labels or not set(labels) <= set(LABELS):
        raise ValueError(f"labels are {labels}, expected {LABELS}")
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
    classes = LABELS if target == "label" else ("normal", "toxic")
    return Dataset.of(
        [p.id for p in kept],
        tuple(p.text for p in kept),
        Column(np.array([classes.index(label) for label in labels], dtype=np.int64), classes),
        [str(p.split) for p in kept],
        {g: yes_no(g, [g in m for m in majority]) for g in groups},
        skipped={**posts.skipped, **skips.found()},
        provenance={**posts.provenance, "target": target, "groups": groups},
    )
