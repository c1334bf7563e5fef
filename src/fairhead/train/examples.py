"""What training sees: a model's inputs and the labels. There is no place for a group column."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, RandomSampler, Sampler

from fairhead.errors import InputError, did_you_mean


@dataclass(frozen=True)
class Examples(Dataset):
    """Inputs and labels of n examples, held in memory.

    A map-style torch data set whose batches are gathered by one indexing operation.
    """

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
            batch = self._examples.take(at_examples[chosen])
            inputs = {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.inputs.items()}
            yield Batch(inputs, batch.labels.to(self._device, non_blocking=True), on_device[chosen])

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


def in_order(examples: Examples, batch_size: int, device: torch.device, *, full: bool = False) -> Iterator[Batch]:
    """Batches on `device`, in order; the last one is smaller, or made `full` by repeating the last row."""
    for start in range(0, len(examples), batch_size):
        stop = min(start + batch_size, len(examples))
        batch = Examples({name: x[start:stop] for name, x in examples.inputs.items()}, examples.labels[start:stop])
        rows = torch.arange(start, stop, device=device)
        if full and len(batch) < batch_size:
            numbers = torch.arange(batch_size).clamp(max=len(batch) - 1)
            batch, rows = batch.take(numbers), rows[numbers.to(device)]
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.inputs.items()}
        yield Batch(inputs, batch.labels.to(device, non_blocking=True), rows)


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
