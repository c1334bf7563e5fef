"""One loop for every training, of one process or of several that `accelerate launch` or torchrun has started.

`Loop` takes the steps of classifiers (`fairhead.train.fitting`) and of language models (`fairhead.train.tuning`). What
it needs to go on after it was killed is a `Checkpoint`, one safetensors file. Of several processes each has a GPU; what
compares the rows of a batch needs those of all of them: `gathered` and `summed`.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch import distributed as dist

from fairhead import __version__
from fairhead.errors import FairheadError, InputError
from fairhead.store import locked, made_folder, whole_file
from fairhead.train import Plan
from fairhead.train.step import Batches, LengthBatches, set_rate

T = TypeVar("T")
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW
FILE = "state.safetensors"
# Settings of a plan that do not change its result: a run may go on with others.
_SAME_RESULT = ("checkpoint_minutes", "device", "data_on_device")


class TrainingDiverged(FairheadError):
    """The loss became NaN or infinite; the model is back at its last good weights."""

    task: Any = None  # what it was trained on, if the caller sets it

    def __init__(self, message: str, model: nn.Module | None = None) -> None:
        """`model` is the model with those weights; None where nothing good was trained."""
        super().__init__(message)
        self.model = model


class State(NamedTuple):
    """What a checkpoint holds: tensors by name, and facts that JSON can hold."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin so, by the rest of their names."""
        return {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}


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
        text = {"identity": json.dumps(comparable(self.identity)), "facts": json.dumps(facts), "version": __version__}
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
            version = text.get("version", "an older version")
            by = "" if version == __version__ else f", begun by fairhead {version}; this is {__version__}"
            raise InputError(
                f"the checkpoint in {self.folder} is of another run ({difference}{by}): "
                "repeat that run's settings, choose another folder, or remove the checkpoint to start again"
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


class Loop:
    """The steps of a training, epoch after epoch, from its beginning or from a checkpoint.

    Attributes:
        epoch: the epoch that is under way, from 1.
        done: steps so far.
        losses: of the steps of this epoch, scalars that stay on the device.
        history: what the caller adds to it, JSON-ready; a checkpoint keeps it.
        kept: weights to come back to.
        resumed_at: steps that a checkpoint had.
        enough: set to True, it ends the training after the step that is under way.
        slower: what the learning rate is multiplied by.
    """

    def __init__(
        self,
        model: nn.Module,  # what is trained
        optimizer: torch.optim.Optimizer,  # AdamW over its parameters with gradients, in their order
        batches: Batches | LengthBatches[Any],  # what it is trained on
        plan: Plan,  # how
        checkpoint: Checkpoint | None = None,  # where its state is saved
        # An object whose tensors are part of the state, such as running weights of groups; they move to the device
        loss: object = None,
        # Whether `kept` is part of the state, too; else a restored model keeps its own weights first
        saves_kept: bool = True,
    ) -> None:
        """Begin, or go on from the checkpoint if it holds a state."""
        self._model, self._optimizer, self._batches, self._plan = model, optimizer, batches, plan
        self._checkpoint, self._saves_kept = checkpoint, saves_kept
        owner = getattr(loss, "__self__", loss)
        self._of_loss: dict[str, Any] = {} if isinstance(owner, type) else getattr(owner, "__dict__", {})
        self.epoch, self.done, self.resumed_at = 1, 0, 0
        self.enough, self.slower = False, 1.0
        self.losses: list[Tensor] = []
        self.history: list[Any] = []
        self._seconds = self._saving = 0.0
        self._started = self._saved = time.perf_counter()
        state = None if checkpoint is None else checkpoint.read()
        if state is not None:
            self._restore(state)
        moved = {name: value.to(self._device) for name, value in self._of_loss.items() if isinstance(value, Tensor)}
        self._of_loss.update(moved)
        self.kept = copied_weights(model)
        if state is not None:
            self.kept |= {name: tensor.to(self.kept[name].device) for name, tensor in state.part("kept.").items()}

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
        before_epoch: Callable[[], None] = lambda: None,
        after_step: Callable[[], None] = lambda: None,
        after_epoch: Callable[[Tensor], None] = lambda losses: None,  # called with the losses of its steps, [steps]
    ) -> None:
        """Take all steps that are left."""
        while self.epoch <= self._plan.epochs and not self.enough:
            before_epoch()
            for batch in self._batches.epoch(self.epoch, len(self.losses)):
                rate = self._plan.learning_rate * self._plan.rate(self.done, self.steps)
                set_rate(self._optimizer, self.slower * rate)
                self.losses.append(step(batch))
                self.done += 1
                after_step()
                self._save_if_due()
                if self.enough:
                    break
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
        for name, tensor in copied_weights(self._model).items():
            if number > 1 and tensor.is_floating_point():
                self.kept[name] += (tensor - self.kept[name]) / number
            else:
                self.kept[name] = tensor

    def put_back(self) -> None:
        """Come back to the weights that were kept."""
        self._model.load_state_dict(self.kept, strict=False)

    def _save_if_due(self) -> None:
        begun, between = time.perf_counter(), 60 * self._plan.checkpoint_minutes
        if self._checkpoint is None or begun - self._saved < (between and max(between, 20 * self._saving)):
            return
        tensors = {f"kept.{name}": tensor for name, tensor in self.kept.items()} if self._saves_kept else {}
        tensors |= {f"weight.{name}": tensor for name, tensor in _weights(self._model).items()}
        tensors |= {f"batches.{name}": tensor for name, tensor in self._batches.state().items()}
        tensors |= {f"loss.{name}": value for name, value in self._of_loss.items() if isinstance(value, Tensor)}
        for name, parameter in _trained(self._model).items():
            moments = self._optimizer.state.get(parameter, {})  # none where no gradient has come
            tensors |= {f"{key}.{name}": moments[key] for key in _MOMENTS if key in moments}
        tensors["losses"] = torch.stack(self.losses) if self.losses else torch.zeros(0)
        tensors["random.cpu"] = torch.get_rng_state()
        if self._device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self._device)
        facts = {"epoch": self.epoch, "done": self.done, "history": self.history, "seconds": self.seconds}
        self._checkpoint.save(tensors, facts)
        self._saved = time.perf_counter()
        self._saving = self._saved - begun

    def _restore(self, state: State) -> None:
        facts = state.facts
        self.epoch, self.done, self.history = facts["epoch"], facts["done"], facts["history"]
        self.resumed_at, self._seconds = self.done, facts["seconds"]
        self.losses = list(state.tensors["losses"].to(self._device))
        self._model.load_state_dict(state.part("weight."), strict=False)
        self._batches.restore(state.part("batches."))
        self._of_loss.update(state.part("loss."))
        moments = {}
        for number, name in enumerate(_trained(self._model)):
            found = {key: state.tensors.get(f"{key}.{name}") for key in _MOMENTS}
            if found["step"] is not None:
                moments[number] = found
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        torch.set_rng_state(state.tensors["random.cpu"])
        if "random.cuda" in state.tensors and self._device.type == "cuda":
            torch.cuda.set_rng_state(state.tensors["random.cuda"], self._device)

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


def joined() -> PartialState:
    """The processes of this run: those that a launcher started, or this one alone."""
    return PartialState(cpu=not torch.accelerator.is_available())  # with cpu=True it looks for those on the CPU


def agreed(found: T) -> T:
    """What the first process has found, in all of them: what hardware rounds in its own way may decide otherwise."""
    said = [found]
    if joined().num_processes > 1:
        broadcast_object_list(said)
    return said[0]


@contextmanager
def written_by_first(out: Path) -> Iterator[bool]:
    """Whether this process writes to the folder of a run; no other run may write there at the same time.

    All processes leave together, so the next step finds what the first one wrote.
    """
    processes = joined()
    writes = processes.is_main_process
    with locked(out) if writes else nullcontext():
        yield writes
    processes.wait_for_everyone()


def is_spread() -> bool:
    """Whether several processes share each batch."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gathered(x: Tensor) -> Tensor:
    """The rows of all processes, [processes · B, ...]; the last batch of an epoch may be smaller on some of them."""
    if not is_spread():
        return x
    sizes = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(x)], device=x.device))
    parts = [x.new_zeros(int(size), *x.shape[1:]) for size in sizes]
    parts[dist.get_rank()] = x
    return summed(torch.cat(parts))


def summed(x: Tensor) -> Tensor:
    """The sum over all processes."""
    add: Any = _Sum.apply
    return add(x) if is_spread() else x


class _Sum(torch.autograd.Function):
    """What depends on the sum, on any process, depends on every process's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        # A copy: the gradient of a sum is one tensor for both of its terms.
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total
