"""What a trained language model was trained on, kept beside its weights, so that nobody scores it on those terms.

Needs no torch: whoever evaluates a folder reads this first.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fairhead.data.sentence_pairs import CrowsPair
from fairhead.data.sentence_triplets import StereoSetItem
from fairhead.errors import InputError
from fairhead.store import write_json

FILE = "fairhead-training.json"
SCHEMA = "fairhead.training/1"
Item = TypeVar("Item", CrowsPair, StereoSetItem)


@dataclass(frozen=True)
class TrainingRecord:
    """How the model of a folder came about."""

    method: str  # such as "klaad"
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method
    plan: Mapping[str, Any] = field(default_factory=dict)  # of the training: epochs, learning rate, seed, ...
    data: Mapping[str, Any] = field(default_factory=dict)  # its name, its path, and how it was split
    # Terms (of pairs: sentences) that were trained on, in lower case; a score on them says nothing
    training_targets: tuple[str, ...] = ()
    held_out_targets: tuple[str, ...] = ()  # terms that were not
    base: str | None = None  # the model that training began with
    history: tuple[Mapping[str, Any], ...] = ()  # a line a logged step
    results: Mapping[str, Any] = field(default_factory=dict)  # anything that was measured at the end

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Put the record into a model's folder."""
        write_json(Path(folder, FILE), {"schema": SCHEMA, **asdict(self)})

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "TrainingRecord":
        """Read the record of a folder."""
        path = Path(folder, FILE)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError:
            raise InputError(
                f"{folder} has no {FILE}: it was not written by fairhead mitigate, so its training terms are unknown"
            ) from None
        except ValueError as error:
            raise InputError(f"{path} is not JSON: {error}") from None
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            schema = found.get("schema") if isinstance(found, dict) else None
            raise InputError(f"{path} has the schema {schema!r}; this version of fairhead reads {SCHEMA!r}")
        lists = ("training_targets", "held_out_targets", "history")
        values: dict[str, Any] = {
            k: tuple(v) if k in lists else v for k, v in found.items() if k in cls.__dataclass_fields__
        }
        return cls(**values)


def without_training_targets(items: Iterable[Item], folder: str | os.PathLike[str]) -> tuple[Item, ...]:
    """The items whose term (of a pair: whose more stereotypical sentence) the model of `folder` was not trained on."""
    trained = set(TrainingRecord.read(folder).training_targets)
    terms = ((item, item.more if isinstance(item, CrowsPair) else item.target) for item in items)
    return tuple(item for item, term in terms if term.casefold() not in trained)
