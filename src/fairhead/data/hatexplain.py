"""HateXplain: posts with the labels, target communities and rationales of three annotators each."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fairhead.data.dataset import Attributes, Benchmark, Dataset, Examples, choose, yes_no
from fairhead.data.files import Skips, Source
from fairhead.errors import InputError

LABELS = ("hatespeech", "normal", "offensive")


@dataclass(frozen=True)
class Post:
    """One post.

    Attributes:
        id: as published, such as "24198545_gab".
        tokens: the words.
        labels: one an annotator: "hatespeech", "offensive" or "normal".
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


def read_posts(path: str | os.PathLike[str], *, on_error: str = "raise") -> Benchmark[Post]:
    """Read every post of HateXplain, undecided ones too, with its annotations.

    Args:
        path: a folder or zip archive with `dataset.json` and `post_id_divisions.json`, or the path of `dataset.json`.
        on_error: "raise", or "skip" to leave out posts that lack a field.

    Example:
        >>> posts = read_posts("hatexplain")  # doctest: +SKIP
        >>> len(posts)  # doctest: +SKIP
        20148
    """
    path = Path(path)
    source, skips = Source(path.parent if path.is_file() and path.suffix == ".json" else path), Skips(on_error)
    name = source.find("dataset.json", "HateXplain")
    published = source.json(name)
    divisions = source.json(source.find("post_id_divisions.json", "HateXplain"))
    if not isinstance(published, dict) or not isinstance(divisions, dict):
        raise InputError(f"{source.path}: dataset.json and post_id_divisions.json of HateXplain should be JSON objects")
    part_of = {post: part for part, members in divisions.items() for post in members}
    strangers = part_of.keys() - published.keys()
    if strangers:
        raise InputError(
            f"{source.where(name)}: lacks {len(strangers)} posts of post_id_divisions.json, such as {min(strangers)}"
        )
    posts = []
    for key, post in published.items():
        try:
            posts.append(_post(key, post, part_of.get(key)))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            skips.malformed(source.where(name), key, error)
    return Benchmark("hatexplain", tuple(posts), skips.found(), {"data": "hatexplain", "path": str(source.path)})


def _post(key: str, post: Mapping[str, Any], split: str | None) -> Post:
    annotators = post["annotators"]
    labels = tuple(a["label"] for a in annotators)
    if not labels or not set(labels) <= set(LABELS):
        raise ValueError(f"labels are {labels}, expected {LABELS}")
    return Post(
        id=key,
        tokens=tuple(post["post_tokens"]),
        labels=labels,
        targets=tuple(frozenset(a["target"]) - {"None"} for a in annotators),
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

    Example:
        >>> data = read_hatexplain("hatexplain", groups=("Women", "Jewish"))  # doctest: +SKIP
        >>> data.classes, data.sizes  # doctest: +SKIP
        (('normal', 'toxic'), {'train': 15383, 'val': 1922, 'test': 1924})
    """
    choose("target", [target], ("toxic", "label"))
    posts = read_posts(path, on_error=on_error)
    communities = sorted({c for p in posts for c in frozenset().union(*p.targets)})
    groups = choose("community", groups, communities)
    kept = [p for p in posts if p.label is not None and p.split is not None]
    undecided = tuple(p.id for p in posts if p.label is None)
    unassigned = tuple(p.id for p in posts if p.label is not None and p.split is None)
    reasons = {"undecided: no label has a majority": undecided, "not in the official split": unassigned}

    ids = np.array([p.id for p in kept], dtype=str)
    names = [p.label if target == "label" else "normal" if p.label == "normal" else "toxic" for p in kept]
    classes = LABELS if target == "label" else ("normal", "toxic")
    return Dataset(
        name="hatexplain",
        all=Examples(ids, tuple(p.text for p in kept), np.array([classes.index(str(n)) for n in names]), classes),
        split=np.array([p.split for p in kept], dtype=str),
        attributes=Attributes(ids, {g: yes_no(g, [g in p.majority_targets for p in kept]) for g in groups}),
        skipped={**posts.skipped, **{reason: names for reason, names in reasons.items() if names}},
        provenance={**posts.provenance, "target": target, "groups": groups},
    )
