"""What a step of training sees and does: a model's inputs and the labels, and no place for a group column."""

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, RandomSampler, Sampler

from fairhead.errors import InputError, did_you_mean

# The loss of a batch: (what the model returned, labels [B], rows of the training set [B]) -> a scalar.
Loss = Callable[[Any, Tensor, Tensor], Tensor]
# The parts of a batch's loss by name; "loss" is what is minimised, the others are for the record.
Parts = Mapping[str, Tensor]
B = TypeVar("B")
# Batches that are sorted by length together: longer stretches would pad less and mix worse.
_STRETCH = 32


@dataclass(frozen=True)
class Examples(Dataset):
    """Inputs and labels of n examples in memory: a torch data set whose batches are one indexing operation."""

    # The model's arguments by name, each a tensor of shape [n, ...] ("pixel_values", "input_ids", ...)
    inputs: Mapping[str, Tensor]
    labels: Tensor  # class numbers, shape [n]

    def __post_init__(self) -> None:
        if not self.inputs or "labels" in self.inputs:
            raise InputError(
                f"examples need the model's inputs by name, apart from the labels; found {sorted(self.inputs)}"
            )
        for name, tensor in self.inputs.items():
            if len(tensor) != len(self.labels):
                raise InputError(
                    f"input {name!r} has {len(tensor)} rows but there are {len(self.labels)} labels: "
                    "give one row per example"
                )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.inputs.items()} | {"labels": self.labels[index]}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """One batch, labels included."""
        batch = self.take(torch.as_tensor(indices))
        return {**batch.inputs, "labels": batch.labels}

    def take(self, rows: Tensor) -> "Examples":
        """The chosen rows: indices, or a mask of shape [n]."""
        rows = rows.to(self.labels.device, non_blocking=True)
        return Examples({name: tensor[rows] for name, tensor in self.inputs.items()}, self.labels[rows])

    def to(self, device: torch.device | str) -> "Examples":
        """The same examples in the memory of another device."""
        return Examples({name: tensor.to(device) for name, tensor in self.inputs.items()}, self.labels.to(device))

    @property
    def bytes(self) -> int:
        """The memory that inputs and labels take."""
        return sum(tensor.nbytes for tensor in (*self.inputs.values(), self.labels))


class Batch(NamedTuple):
    """One step's worth: the model's inputs by name, labels [B], and which rows of the training set they are [B]."""

    inputs: dict[str, Tensor]
    labels: Tensor
    rows: Tensor


class Batches:
    """Full, shuffled batches, epoch after epoch; the last, smaller one of an epoch is left out.

    Under several processes each gets its share of every batch, so that a batch is the same rows however many there are.
    """

    def __init__(
        self,
        examples: Examples,
        batch_size: int,
        device: torch.device,
        *,
        seed: int = 0,
        sampler: Sampler[int] | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """`sampler` gives an epoch's rows, all of them in random order by default; `share` is (number, of how many)."""
        self._order = torch.Generator().manual_seed(seed)
        self._sampler: Any = sampler if sampler is not None else RandomSampler(examples, generator=self._order)
        self._examples, self._batch_size, self._device, self._share = examples, batch_size, device, share
        self._rows = torch.zeros(0, dtype=torch.int64)  # of the epoch that is under way

    def __len__(self) -> int:
        return len(self._sampler) // self._batch_size

    def epoch(self, number: int, done: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, without those that are done; where none is, its rows are drawn."""
        if not done:
            # One draw ahead, as torch's DataLoader makes: a seed stands for the same batches there and here.
            torch.empty((), dtype=torch.int64).random_(generator=self._order)
            self._rows = torch.tensor(list(self._sampler))[: len(self) * self._batch_size]
        # An epoch's rows go to the device at once, and to where the examples are if that is elsewhere.
        on_device = self._rows.to(self._device, non_blocking=True)
        at_examples = self._rows.to(self._examples.labels.device, non_blocking=True)
        (mine, of), size = self._share, self._batch_size
        for start in range(done * size, len(self._rows), size):
            chosen = slice(start + mine, start + size, of)
            yield _batch(self._examples.take(at_examples[chosen]), on_device[chosen], self._device)

    def state(self) -> dict[str, Tensor]:
        """What `restore` needs to go on here: the rows of this epoch, and the state of what draws those to come."""
        return {"rows": self._rows, **{name: drawn.get_state() for name, drawn in self._generators().items()}}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken."""
        self._rows = state["rows"]
        for name, generator in self._generators().items():
            generator.set_state(state[name])

    def _generators(self) -> dict[str, torch.Generator]:
        found = {"order": self._order, "sampler": getattr(self._sampler, "generator", None)}
        return {name: generator for name, generator in found.items() if generator is not None}


class LengthBatches(Generic[B]):
    """Batches of examples of like length; which they are depends on the seed and the epoch alone."""

    def __init__(self, examples: Sequence[B], lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self._examples, self._lengths, self._batch_size, self._seed = examples, lengths, batch_size, seed

    def __len__(self) -> int:
        return math.ceil(len(self._examples) / self._batch_size)

    def epoch(self, number: int, done: int = 0) -> Iterator[list[B]]:
        """The batches of an epoch (from 1) after the first `done`."""
        for batch in shuffled_batches(self._lengths, self._batch_size, self._seed, number - 1)[done:]:
            yield [self._examples[i] for i in batch]

    def state(self) -> dict[str, Tensor]:
        """Nothing: the number of the epoch says it all."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to restore."""


def shuffled_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int = 0) -> list[list[int]]:
    """The batches of an epoch, as numbers of examples: in random order, each example once.

    The examples of a batch have about as many tokens (`lengths`), so that there is little padding.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    batches: list[list[int]] = []
    for begin in range(0, len(order), _STRETCH * batch_size):
        stretch = sorted(order[begin : begin + _STRETCH * batch_size].tolist(), key=lambda i: lengths[i])
        batches += [stretch[i : i + batch_size] for i in range(0, len(stretch), batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))]


def in_order(examples: Examples, batch_size: int, device: torch.device, *, full: bool = False) -> Iterator[Batch]:
    """Batches on `device`, in order; the last one is smaller, or made `full` by repeating the last row."""
    for start in range(0, len(examples), batch_size):
        stop = min(start + batch_size, len(examples))
        batch = Examples({name: x[start:stop] for name, x in examples.inputs.items()}, examples.labels[start:stop])
        rows = torch.arange(start, stop, device=device)
        if full and len(batch) < batch_size:
            numbers = torch.arange(batch_size).clamp(max=len(batch) - 1)
            batch, rows = batch.take(numbers), rows[numbers.to(device)]
        yield _batch(batch, rows, device)


def _batch(examples: Examples, rows: Tensor, device: torch.device) -> Batch:
    inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in examples.inputs.items()}
    return Batch(inputs, examples.labels.to(device, non_blocking=True), rows)


def check_inputs(model: nn.Module, examples: Examples) -> None:
    """Refuse inputs that the model's `forward` does not name: a group column can not ride along."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = inspect.signature(model.forward).parameters.values()
    known = [parameter.name for parameter in takes if parameter.kind in named and parameter.name != "labels"]
    if not known:  # a wrapper that passes everything on: the model inside will say what it does not take
        return
    for name in examples.inputs:
        if name not in known:
            raise InputError(
                f"{name!r} is not an input of {type(model).__name__}, which takes {', '.join(known)}."
                f"{did_you_mean(name, known)} Groups are for auditing only: training never sees them"
            )


def class_names(model: nn.Module | None) -> Mapping[int, str]:
    """The names of a model's classes by their numbers, where it has them."""
    return getattr(getattr(model, "config", None), "id2label", None) or {}


def check_classes(examples: Examples, what: str, model: nn.Module | None = None) -> None:
    """Refuse labels of a single class: there is nothing to learn and accuracy would be 1 at once."""
    classes = examples.labels.unique().tolist()
    if len(classes) < 2:
        found = f"only class {class_names(model).get(classes[0], classes[0])}" if classes else "no rows"
        raise InputError(f"the {what} labels have {found}; at least two classes are needed: check the label column")


class ClassifierLoss:
    """The loss of a batch of labelled examples: a method's, or the model's own; `layers` is how layers run in it."""

    def __init__(
        self, model: nn.Module, loss: Loss | None = None, layers: AbstractContextManager[object] | None = None
    ) -> None:
        self._model, self._loss = model, loss
        self._layers = nullcontext() if layers is None else layers

    def __call__(self, batch: Batch) -> Tensor:
        """A scalar."""
        with self._layers:
            if self._loss is not None:
                return self._loss(self._model(**batch.inputs), batch.labels, batch.rows)
            value: Tensor = self._model(**batch.inputs, labels=batch.labels).loss
            return value


class Step(Generic[B]):
    """Forward, loss, backward, clipping and optimizer on one batch."""

    def __init__(
        self,
        loss: Callable[[B], Tensor | Parts],
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None = None,
        precision: str = "no",
        accumulate: int = 1,
        watch: Callable[[Parts], None] | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """`loss` gives a scalar, or its parts by name; see `Plan` for the rest.

        `watch` is called before the weights change, with the parts and, where gradients are clipped, their norm. Of
        several processes that are given the same batches, each takes its `share` (number, of how many) of the pieces.
        """
        self._loss, self._optimizer, self._watch = loss, optimizer, watch
        self._max_grad_norm, self._precision, self.accumulate = max_grad_norm, precision, accumulate
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._mine, self._of = share

    def __call__(self, batch: B) -> Tensor:
        """Train on one batch and return its loss, a scalar without gradients."""
        totals: dict[str, Tensor] = {}
        pieces = _pieces(batch, self.accumulate * self._of)
        for number, (piece, share) in enumerate(islice(pieces, self._mine, None, self._of)):
            with autocast(self._parameters[0].device, self._precision):
                found = self._loss(piece)
            parts = found if isinstance(found, Mapping) else {"loss": found}
            if number == 0:
                self._optimizer.zero_grad()
            # A batch in one piece is not multiplied: the same kernels as without pieces.
            (parts["loss"] if share == 1 else share * parts["loss"]).backward()
            for name, part in parts.items():
                value = part.detach() if share == 1 else share * part.detach()
                totals[name] = totals[name] + value if name in totals else value
        if self._of > 1:
            totals = self._added_up(totals)
        if self._max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
            totals = {**totals, "gradient norm": norm}
        if self._watch is not None:
            self._watch(totals)
        self._optimizer.step()
        return totals["loss"]

    def _added_up(self, totals: Parts) -> dict[str, Tensor]:
        """Add up gradients and parts of the loss over processes; one may have had no piece of a small batch."""
        if not totals:
            self._optimizer.zero_grad()
        device = self._parameters[0].device
        reached = torch.tensor([p.grad is not None for p in self._parameters], device=device).int()
        dist.all_reduce(reached)
        for parameter in compress(self._parameters, reached.tolist()):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        found: list[dict[str, float]] = [{}] * self._of
        dist.all_gather_object(found, {name: float(part) for name, part in totals.items()})
        # The first process has had a piece of every batch.
        return {name: torch.tensor(sum(part.get(name, 0.0) for part in found), device=device) for name in found[0]}


def _pieces(batch: Any, n: int) -> Iterator[tuple[Any, float]]:
    """Up to `n` pieces of a batch that is a `Batch` or a list, each with its share of the rows."""
    if n == 1:
        yield batch, 1
        return
    rows = len(batch.labels) if isinstance(batch, Batch) else len(batch)
    size = math.ceil(rows / n)
    for start in range(0, rows, size):
        chosen = slice(start, min(start + size, rows))
        yield _cut(batch, chosen), (chosen.stop - start) / rows


def _cut(batch: Any, chosen: slice) -> Any:
    if not isinstance(batch, Batch):
        return batch[chosen]
    inputs = {name: tensor[chosen] for name, tensor in batch.inputs.items()}
    return Batch(inputs, batch.labels[chosen], batch.rows[chosen])


def optimizer_of(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW in one kernel, with a learning rate that a recorded step can read: a tensor (see `set_rate`)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = parameters[0].device
    rate = torch.tensor(learning_rate, device=device)
    return torch.optim.AdamW(
        parameters, lr=rate, weight_decay=weight_decay, fused=True, capturable=device.type == "cuda"
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the steps to come."""
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context that "bf16" asks for; "no" leaves everything in 32 bit."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@functools.cache
def say_once(what: str) -> None:
    """Tell the user, the first time."""
    logging.getLogger("fairhead").warning(what)


def free_memory(why: str) -> None:
    """Give back what PyTorch keeps in reserve, after the device had too little memory for something; tell the user."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    say_once(f"the device has too little memory {why}")


def gradient_norms(model: nn.Module, parts: Parts) -> dict[str, float]:
    """How hard each part of a loss pulls: the norm of its gradient with the weight that it has in the loss.

    Parts that the loss does not depend on are left out.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> near, far = model.weight.sum() - 1, model.weight.sum() + 1
        >>> gradient_norms(model, {"loss": 2 * near + 0.5 * far, "near": near, "far": far})
        {'near': 2.0, 'far': 0.5}
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    named = {name: part for name, part in parts.items() if name != "loss" and part.requires_grad}
    found: dict[str, float] = {}
    for name, part in named.items():
        (share,) = torch.autograd.grad(parts["loss"], part, retain_graph=True, allow_unused=True)
        if share is not None:
            pulls = torch.autograd.grad(part, weights, share, retain_graph=True, allow_unused=True)
            norms = [pull.norm().float() for pull in pulls if pull is not None]
            found[name] = float(torch.stack(norms).norm()) if norms else 0.0
    return found
