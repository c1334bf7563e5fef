"""Checkpoints: what a training needs to go on after it was killed, in one safetensors file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fairhead.errors import InputError
from fairhead.store import made_folder, whole_file

FILE = "state.safetensors"
# Settings of a plan that do not change its result: a run may go on with others.
_SAME_RESULT = ("checkpoint_minutes", "device", "data_on_device")


class State(NamedTuple):
    """What a checkpoint holds: tensors by name, and facts that JSON can hold."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """The latest state of one training, in a folder of its own."""

    folder: Path  # of the file; made when it is needed
    identity: Mapping[str, Any]  # what decides the result of the training. A checkpoint of another run is refused.
    writes: bool = True  # whether this process does; of several, one is enough

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Replace the state; a kill in between leaves the one before."""
        if not self.writes:
            return
        text = {"identity": json.dumps(comparable(self.identity)), "facts": json.dumps(facts)}
        with whole_file(made_folder(self.folder) / FILE) as part:
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, part, metadata=text)

    def read(self) -> State | None:
        """The state, on the CPU; None where there is none."""
        path = self.folder / FILE
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as opened:
                text, names = opened.metadata(), list(opened.keys())
                identity, facts = json.loads(text["identity"]), json.loads(text["facts"])
                tensors = {name: opened.get_tensor(name) for name in names}
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise InputError(f"the checkpoint {path} cannot be read ({error}): remove it to start again") from None
        difference = first_difference(identity, comparable(self.identity))
        if difference is not None:
            raise InputError(
                f"the checkpoint in {self.folder} is of another run ({difference}): "
                "repeat that run's settings, choose another folder, or remove the checkpoint"
            )
        return State(tensors, facts)


def first_difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """The first thing in which two settings, as JSON has them, differ; None where they agree.

    Example:
        >>> first_difference({"plan": {"epochs": 1, "seed": 0}}, {"plan": {"epochs": 1, "seed": 3}})
        'seed was 0, now 3'
    """
    for key in {**expected, **found}:
        before, now = found.get(key), expected.get(key)
        if before != now and isinstance(before, dict) and isinstance(now, dict):
            return first_difference(before, now)
        if before != now:
            return f"{key} was {before!r}, now {now!r}"
    return None


def comparable(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is, as it is compared: in JSON's types, without what does not change its result."""
    plain: dict[str, Any] = json.loads(json.dumps(identity, default=str))
    for setting in _SAME_RESULT:
        plain.get("plan", {}).pop(setting, None)
    return plain
