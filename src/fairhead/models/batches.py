"""A loaded model, and rows of pictures or texts that it reads batch by batch."""

import itertools
import logging
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fairhead.data import Images
from fairhead.errors import InputError
from fairhead.models.attached import positions_of
from fairhead.models.inputs import text_columns, text_length
from fairhead.models.load import Kind, Model, open_model

_MOST_WORKERS = 16  # threads that decode images; each holds a batch of pixels
_MOST_TOKENS = 512


class RowInputs(ABC):
    """A model in evaluation mode, and rows in the form that it reads; `items` are the rows, not decoded.

    `beside` is the tokenizer or image processor of a live model that was not loaded from a folder.
    """

    kind: ClassVar[Kind]
    made_ready_by: ClassVar[str]  # its "processor" or "tokenizer"

    def __init__(
        self, model: Model, items: Any, batch_size: int = 32, device: str = "auto", beside: Any = None
    ) -> None:
        self.loaded = open_model(model, self.kind, device=device, dtype="float32", tokenizer=beside, processor=beside)
        self.model = self.loaded.model.requires_grad_(False)
        self.items, self.batch_size = items, batch_size

    @property
    def beside(self) -> Any:
        """What is saved with the model: its image processor or tokenizer."""
        return getattr(self.loaded, self.made_ready_by)

    @abstractmethod
    def batches(self, rows: NDArray[np.integer] | None = None, start: int = 0) -> Iterator[Mapping[str, Tensor]]:
        """The model's inputs for some rows, or for all, from one of them on."""

    def order(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """The order in which some rows are best read, [n]: as they come, where all cost the same."""
        return np.arange(len(rows))


class ImageInputs(RowInputs):
    """Images, of which the next batches are decoded in threads meanwhile."""

    kind, made_ready_by = "image", "processor"

    def batches(self, rows: NDArray[np.integer] | None = None, start: int = 0) -> Iterator[Mapping[str, Tensor]]:
        """Pixels."""
        images: Images = self.items if rows is None else self.items.take(rows)

        def prepare(part: range) -> Tensor:
            pixels: Tensor = self.loaded.processor([images[i] for i in part], return_tensors="pt")["pixel_values"]
            return pixels

        workers = min(os.cpu_count() or 1, _MOST_WORKERS)
        pool = ThreadPoolExecutor(workers)
        try:
            waiting: deque[Future[Tensor]] = deque()
            for part in even_batches(start, len(images), self.batch_size):
                waiting.append(pool.submit(prepare, part))
                if len(waiting) > workers:
                    yield {"pixel_values": waiting.popleft().result().to(self.loaded.device)}
            while waiting:
                yield {"pixel_values": waiting.popleft().result().to(self.loaded.device)}
        finally:  # also where whoever asked for batches has had enough
            pool.shutdown(cancel_futures=True)


class TextInputs(RowInputs):
    """Texts, cut where the tokenizer says (`mitigate` keeps there what it trained with) or the model's context ends."""

    kind, made_ready_by = "text", "tokenizer"

    def batches(self, rows: NDArray[np.integer] | None = None, start: int = 0) -> Iterator[Mapping[str, Tensor]]:
        """Tokens, padded to the longest text of a batch; a model that knows its positions apart has one length."""
        texts: Sequence[Any] = self.items if rows is None else [self.items[i] for i in rows]
        longest = text_length(self.model.config, min(_MOST_TOKENS, self.loaded.tokenizer.model_max_length))
        fixed = positions_of(self.model)
        how = {"padding": "max_length", "max_length": fixed} if fixed else {"padding": True, "max_length": longest}
        for part in even_batches(start, len(texts), self.batch_size):
            columns = zip(*(text_columns(texts[i]) for i in part), strict=True)
            encoded = self.loaded.tokenizer(*map(list, columns), truncation=True, return_tensors="pt", **how)
            yield {name: tensor.to(self.loaded.device) for name, tensor in encoded.items()}

    def order(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Texts of like length together, so that a batch has little padding."""
        return np.argsort([sum(map(len, text_columns(self.items[row]))) for row in rows], kind="stable")


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """No gradients and no dropout; afterwards the model is as it was.

    Example:
        >>> layer = nn.Dropout()
        >>> with quiet(layer):
        ...     layer.training
        False
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


def even_batches(start: int, end: int, size: int) -> list[range]:
    """Rows from start to end in batches of at most `size`, none much smaller: of 3 and more, each has at least two.

    Example:
        >>> even_batches(0, 9, 4)
        [range(0, 3), range(3, 6), range(6, 9)]
    """
    count = -(-(end - start) // size)
    bounds = np.linspace(start, end, count + 1).round().astype(int).tolist()
    return [range(*pair) for pair in itertools.pairwise(bounds)]


def class_order(model: Any, classes: tuple[str, ...]) -> list[int]:
    """Where the classes of the data are among those of the model."""
    names = {int(number): str(name) for number, name in model.config.id2label.items()}
    found = {name: number for number, name in names.items()}
    if set(found) == set(classes):
        return [found[name] for name in classes]
    if len(names) == len(classes) and all(name == f"LABEL_{number}" for number, name in names.items()):
        if not all(name.isdecimal() for name in classes):
            told = "the model's classes have no names: %s are taken for its classes 0 to %d, in this order"
            logging.getLogger("fairhead").warning(told, ", ".join(classes), len(classes) - 1)
        return list(range(len(classes)))
    raise InputError(
        f"the model's classes are {', '.join(found)} and those of the data {', '.join(classes)}; they must have the "
        "same names"
    )
