"""One loop for every training: AdamW, a schedule, checkpoints, and a stop where the loss is no longer finite.

`Loop` takes the steps of classifiers (`fairhead.train.fitting`) and of language models (`fairhead.train.tuning`). What
it needs to go on after it was killed is a `Checkpoint`, one safetensors file.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fairhead.errors import FairheadError, InputError
from fairhead.store import made_folder, whole_file
from fairhead.train.plan import Plan
from fairhead.train.step import set_rate

B = TypeVar("B", covariant=True)
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW
FILE = "state.safetensors"
# Settings of a plan that do not change its result: a run may go on with others.
_SAME_RESULT = ("checkpoint_minutes", "device", "data_on_device")


class TrainingDiverged(FairheadError):
    """The loss became NaN or infinite; the model is back at its last good weights."""

    model: nn.Module | None = None  # with those weights; None where nothing good was trained
    task: Any = None  # what it was trained on, where whoever trains says so


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


class BatchSource(Protocol[B]):
    """Gives the batches of an epoch, as many in each, and can go on in the middle of one."""

    def __len__(self) -> int: ...

    def epoch(self, number: int, done: int = 0) -> Iterator[B]:
        """The batches of epoch `number` (from 1) after the first `done`."""

    def state(self) -> Mapping[str, Tensor]:
        """What `restore` needs."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken."""


class Loop(Generic[B]):
    """The steps of a training, epoch after epoch, from its beginning or from a checkpoint.

    Attributes:
        epoch: the epoch that is under way, from 1.
        done: steps so far.
        losses: of the steps of this epoch, scalars that stay on the device.
        history: what the caller adds to it, JSON-ready; a checkpoint keeps it.
        kept: weights to come back to.
        resumed_at: steps that a checkpoint had.
        enough: set to True, it ends the training after the step that is under way.
    """

    def __init__(
        self,
        model: nn.Module,  # what is trained
        optimizer: torch.optim.Optimizer,  # AdamW over its parameters with gradients, in their order
        batches: BatchSource[B],  # what it is trained on
        plan: Plan,  # how
        checkpoint: Checkpoint | None = None,  # where its state is saved
        loss: object = None,  # an object whose tensors are part of the state, such as running weights of groups
        # Whether `kept` is part of the state, too; else a restored model keeps its own weights first
        saves_kept: bool = True,
    ) -> None:
        """Begin, or go on from the checkpoint if it holds a state."""
        self._model, self._optimizer, self._batches, self._plan = model, optimizer, batches, plan
        self._checkpoint, self._saves_kept = checkpoint, saves_kept
        self._loss = getattr(loss, "__self__", loss)
        self.epoch, self.done, self.resumed_at = 1, 0, 0
        self.enough = False
        self.losses: list[Tensor] = []
        self.history: list[Any] = []
        self._seconds = 0.0
        self._started = self._saved = time.perf_counter()
        state = None if checkpoint is None else checkpoint.read()
        if state is not None:
            self._restore(state)
        self.kept = copied_weights(model)
        if state is not None:
            self.kept |= {name: tensor.to(self.kept[name].device) for name, tensor in _part(state, "kept.").items()}

    @property
    def steps(self) -> int:
        """How many there are in all."""
        return self._plan.epochs * len(self._batches)

    @property
    def seconds(self) -> float:
        """Wall time so far, that before the checkpoint included."""
        return self._seconds + time.perf_counter() - self._started

    def run(
        self,
        step: Callable[[Any], Tensor],  # trains on a batch, returns its loss
        *,
        # Called before the first step of an epoch, or the first after a checkpoint
        before_epoch: Callable[[], None] | None = None,
        after_step: Callable[[], None] | None = None,  # called after each
        after_epoch: Callable[[Tensor], None] | None = None,  # called with the losses of its steps, [steps]
    ) -> None:
        """Take all steps that are left."""
        while self.epoch <= self._plan.epochs and not self.enough:
            if before_epoch is not None:
                before_epoch()
            for batch in self._batches.epoch(self.epoch, len(self.losses)):
                set_rate(self._optimizer, self._plan.learning_rate * self._plan.rate(self.done, self.steps))
                self.losses.append(step(batch))
                self.done += 1
                if after_step is not None:
                    after_step()
                self._save_if_due()
                if self.enough:
                    break
            if after_epoch is not None:
                after_epoch(torch.stack(self.losses))
            self.losses.clear()
            self.epoch += 1
            self._save_if_due()
        self._optimizer.zero_grad()  # gradients of a recorded step hold on to all of its memory

    def keep(self) -> None:
        """Let the weights as they are now be those to come back to."""
        self.kept = copied_weights(self._model)

    def keep_mean(self, number: int) -> None:
        """Let the mean of this and the last `number` − 1 kept weights be those to come back to; this one, up to 1."""
        if number <= 1:
            self.keep()
            return
        for name, tensor in copied_weights(self._model).items():
            if tensor.is_floating_point():
                self.kept[name] += (tensor - self.kept[name]) / number
            else:
                self.kept[name] = tensor

    def put_back(self) -> None:
        """Come back to the weights that were kept."""
        self._model.load_state_dict(self.kept, strict=False)

    def _save_if_due(self) -> None:
        if self._checkpoint is None or time.perf_counter() - self._saved < 60 * self._plan.checkpoint_minutes:
            return
        tensors = {f"kept.{name}": tensor for name, tensor in self.kept.items()} if self._saves_kept else {}
        tensors |= {f"weight.{name}": tensor for name, tensor in _weights(self._model).items()}
        tensors |= {f"batches.{name}": tensor for name, tensor in self._batches.state().items()}
        tensors |= {f"loss.{name}": tensor for name, tensor in _tensors_of(self._loss).items()}
        for name, parameter in _trained(self._model).items():
            moments = self._optimizer.state.get(parameter, {})  # none where no gradient has come
            tensors |= {f"{key}.{name}": moments[key] for key in _MOMENTS if key in moments}
        tensors["losses"] = torch.stack(self.losses) if self.losses else torch.zeros(0)
        tensors |= {f"random.{name}": state for name, state in _random_states(self._device).items()}
        facts = {"epoch": self.epoch, "done": self.done, "history": self.history, "seconds": self.seconds}
        self._checkpoint.save(tensors, facts)
        self._saved = time.perf_counter()

    def _restore(self, state: State) -> None:
        facts = state.facts
        self.epoch, self.done, self.history = facts["epoch"], facts["done"], facts["history"]
        self.resumed_at, self._seconds = self.done, facts["seconds"]
        self.losses = list(state.tensors["losses"].to(self._device))
        self._model.load_state_dict(_part(state, "weight."), strict=False)
        self._batches.restore(_part(state, "batches."))
        for name, tensor in _part(state, "loss.").items():
            setattr(self._loss, name, tensor)
        moments = {}
        for number, name in enumerate(_trained(self._model)):
            found = {key: state.tensors.get(f"{key}.{name}") for key in _MOMENTS}
            if found["step"] is not None:
                moments[number] = found
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        _set_random_states(_part(state, "random."), self._device)

    @property
    def _device(self) -> torch.device:
        return next(iter(_trained(self._model).values())).device


def copied_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all that training changes."""
    return {name: tensor.detach().clone() for name, tensor in _weights(model).items()}


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """In the optimizer's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """What training changes: parameters with gradients (those that share memory once), and buffers that are saved."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**_trained(model), **buffers}


def _tensors_of(owner: object) -> dict[str, Tensor]:
    return {name: value for name, value in getattr(owner, "__dict__", {}).items() if isinstance(value, Tensor)}


def _part(state: State, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in state.tensors.items() if name.startswith(prefix)}


def _random_states(device: torch.device) -> dict[str, Tensor]:
    on_gpu = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **on_gpu}


def _set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
