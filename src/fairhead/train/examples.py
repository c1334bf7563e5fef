"""What training sees: a model's inputs and the labels. There is no place for a group column."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from fairhead.errors import InputError, did_you_mean


@dataclass(frozen=True)
class Examples(Dataset):
    """Inputs and labels of n examples, held in memory.

    A map-style torch data set whose batches are gathered by one indexing operation. A reader that loads from disk
    can take its place: the loop only asks for `len()` and `__getitems__`.

    Attributes:
        inputs: the model's arguments by name, each a tensor of shape [n, ...] ("pixel_values", "input_ids", ...).
        labels: class numbers, shape [n].

    Example:
        >>> import torch
        >>> from fairhead.train import Examples
        >>> examples = Examples({"pixel_values": torch.zeros(4, 1, 8, 8)}, torch.tensor([0, 1, 0, 1]))
        >>> len(examples), sorted(examples.__getitems__([0, 2]))
        (4, ['labels', 'pixel_values'])
    """

    inputs: Mapping[str, Tensor]
    labels: Tensor

    def __post_init__(self) -> None:
        if not self.inputs or "labels" in self.inputs:
            raise InputError(
                f"examples need the model's inputs by name, apart from the labels; found {sorted(self.inputs)}"
            )
        for name, tensor in self.inputs.items():
            if len(tensor) != len(self.labels):
                raise InputError(
                    f"input {name!r} has {len(tensor)} rows but there are {len(self.labels)} labels: "
                    "give one row an example"
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
        order = torch.Generator().manual_seed(seed)
        self._device = device
        self._loader = DataLoader(
            _Numbered(examples, *share),
            batch_size,
            sampler=sampler if sampler is not None else RandomSampler(examples, generator=order),
            drop_last=True,
            generator=order,
            collate_fn=_already_a_batch,
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        for batch, rows in self._loader:
            on_device = {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}
            yield Batch(on_device, on_device.pop("labels"), rows.to(self._device, non_blocking=True))


class _Numbered(Dataset):
    """Batches together with the numbers of their rows."""

    def __init__(self, examples: Examples, share: int, shares: int) -> None:
        self.examples, self.share, self.shares = examples, share, shares

    def __len__(self) -> int:
        return len(self.examples)

    def __getitems__(self, indices: list[int]) -> tuple[dict[str, Tensor], Tensor]:
        mine = indices[self.share :: self.shares]
        return self.examples.__getitems__(mine), torch.tensor(mine)


def _already_a_batch(batch: Any) -> Any:
    return batch


def in_order(examples: Examples, batch_size: int) -> Iterable[dict[str, Tensor]]:
    """The inputs in batches, in order, the last one smaller."""
    for start in range(0, len(examples), batch_size):
        batch = examples.__getitems__(range(start, min(start + batch_size, len(examples))))
        yield {name: tensor for name, tensor in batch.items() if name != "labels"}


def check_inputs(model: nn.Module, examples: Examples) -> None:
    """Refuse inputs that the model's `forward` does not name: a group column can not ride along.

    Raises:
        InputError: naming the input that is not one of the model's.
    """
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


def check_classes(examples: Examples, what: str) -> None:
    """Refuse labels of a single class: there is nothing to learn and accuracy would be 1 at once."""
    classes = examples.labels.unique()
    if len(classes) < 2:
        found = f"only class {classes[0].item()}" if len(classes) else "no rows"
        raise InputError(f"the {what} labels have {found}; at least two classes are needed: check the label column")
