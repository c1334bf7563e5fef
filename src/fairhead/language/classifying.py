"""Toxicity, regard and the like of what a model wrote, by any classifier of texts that the user names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fairhead.errors import InputError, did_you_mean
from fairhead.language.lexicons import Gauge
from fairhead.models.batches import TextInputs
from fairhead.models.load import open_model


def labels_of(config: Any, wanted: Sequence[str], folder: str) -> dict[int, str]:
    """The classes of a classifier that are measured, by number; without `wanted` all of them."""
    known = {int(number): str(name) for number, name in config.id2label.items()}
    for name in wanted:
        if name not in known.values():
            there = ", ".join(known.values())
            raise InputError(f"{folder} has no label {name!r}; it has {there}.{did_you_mean(name, [*known.values()])}")
    return {number: name for number, name in known.items() if not wanted or name in wanted}


def check_classifier(folder: str, wanted: Sequence[str]) -> None:
    """Refuse what is no trained classifier of texts with these labels; it is loaded once for that."""
    labels_of(open_model(folder, "text").model.config, wanted, folder)


def by_classifier(folder: str, texts: Sequence[str], wanted: Sequence[str] = (), device: str = "auto") -> Gauge:
    """The probability of each label, of texts that are all read at once, in batches of like length.

    Where a text can have several labels (`problem_type` "multi_label_classification", or a single label) each has a
    probability of its own; otherwise those of a text sum to 1.
    """
    distinct = sorted(set(texts), key=len)
    rows = TextInputs(folder, tuple(distinct), 64, device)
    config: Any = rows.model.config
    labels = labels_of(config, wanted, folder)
    apart = config.problem_type == "multi_label_classification" or config.num_labels == 1
    found: dict[str, list[float]] = {}
    with torch.inference_mode():
        for batch in rows.batches():
            logits = rows.model(**batch).logits.float()
            shares = (logits.sigmoid() if apart else logits.softmax(-1))[:, list(labels)].cpu().tolist()
            found |= dict(zip(distinct[len(found) : len(found) + len(shares)], shares, strict=True))
    return Gauge(tuple(f"{Path(folder).name} p({name})" for name in labels.values()), found.__getitem__)
