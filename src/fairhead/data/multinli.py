"""MultiNLI: premise and hypothesis; the group is whether the hypothesis has a negation word."""

import os
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

import numpy as np

from fairhead.data.datasets import Dataset, TextPair, choose, column, yes_no
from fairhead.data.files import Skips, Source
from fairhead.data.splits import split_by_hash
from fairhead.records import Column

CLASSES = ("contradiction", "entailment", "neutral")
NEGATION_WORDS = frozenset({"nobody", "no", "never", "nothing"})
# The shares of the group-DRO experiments, which pool all published files.
HALF_FIFTH_REST: Mapping[str, float] = {"train": 0.5, "val": 0.2, "test": 0.3}
_PREFIX = "multinli_1.0_"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


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
    ids: list[str] = []
    parts: list[str] = []
    pairs: list[TextPair] = []
    labels: list[int] = []
    for file in files:
        part = PurePosixPath(file).stem.removeprefix(_PREFIX)
        for line in source.jsonl(file, skips):
            where = f"{part}/{line.row.get('pairID', line.number)}"
            gold, premise, hypothesis = (line.row.get(k) for k in ("gold_label", "sentence1", "sentence2"))
            if gold == "-":
                skips.drop("no gold label", where)
            elif gold not in CLASSES or not isinstance(premise, str) or not isinstance(hypothesis, str):
                skips.error(
                    "pair is incomplete",
                    where,
                    f"{source.where(file)}, line {line.number}: needs gold_label (one of {', '.join(CLASSES)}), "
                    f"sentence1 and sentence2; found gold_label {gold!r} and the fields {', '.join(line.row)}",
                )
            else:
                ids.append(where)
                parts.append(part)
                pairs.append(TextPair(premise, hypothesis))
                labels.append(CLASSES.index(gold))
    distinct = _number_repeats(ids)
    return Dataset.of(
        distinct,
        tuple(pairs),
        Column(np.array(labels, dtype=np.int64), CLASSES),
        parts if split == "official" else split_by_hash(distinct, fractions, seed),
        {"negation": yes_no("negation", [has_negation(p.hypothesis) for p in pairs])},
        cluster=column([p.premise for p in pairs]) if pairs else None,
        skipped=skips.found(),
        provenance={"data": "multinli", "path": str(source.path), "files": files, "split": split, "seed": seed},
    )


def _number_repeats(ids: Sequence[str]) -> list[str]:
    """Nothing in the published format promises that pairIDs are distinct: a, a -> a, a#2."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in ids:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return numbered
