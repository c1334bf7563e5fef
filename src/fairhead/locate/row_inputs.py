"""Labelled rows of a data set with the groups of a concept, and a loaded model that reads them batch by batch."""

import itertools
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fairhead.data import Images, parse_spec, read_labelled
from fairhead.errors import InputError
from fairhead.locate.gap_question import Evaluation
from fairhead.locate.prompts import COLUMNS, Pole, Prompts
from fairhead.models import open_model
from fairhead.models.attached import positions_of
from fairhead.models.load import Kind

_MOST_WORKERS = 16  # threads that decode images; each holds a batch of pixels
_MOST_TOKENS = 512


class LabelledRows(NamedTuple):
    """Rows of a data set that are of either pole, in random order.

    Attributes:
        items: images or texts, not decoded.
        evaluation: their labels and groups.
        prompts: the poles in words.
        notes: about rows that were left out, in sentences.
    """

    items: Any
    evaluation: Evaluation
    prompts: Prompts
    notes: tuple[str, ...]


def labelled_rows(
    spec: str, concept: str, task: str, prompts: Prompts | None, limit: int | None = None, seed: int = 0
) -> LabelledRows:
    """Read labelled images or texts, with the groups of a concept.

    Args:
        spec: `name:path` of a data set.
        concept: the attribute, or the column that holds it.
        task: the target column.
        prompts: the poles. Without them, as for texts, the first two values of the column are the poles, and rows that
            a model may have been trained on are left out.
        limit: rows at most, evenly over the groups.
        seed: of their order.

    Raises:
        InputError: the column does not tell two groups apart, or is the task itself.
    """
    column = COLUMNS.get((parse_spec(spec).reader.name, concept), concept)
    if column == task:
        raise InputError(
            f"concept and task are both {column!r}: within a class of it there is one group, so there is no gap to find"
        )
    data = read_labelled(spec, target=task, groups=(column,))
    groups = data.groups()[column]
    levels = [str(level) for level in groups.levels]
    usable, notes, noun, target = np.ones(len(data), dtype=bool), [], "images", task
    if prompts is None:
        if len(levels) < 2:
            raise InputError(f"all rows have the {column} {levels[0]!r}; two groups are needed")
        first, second = (Pole(level, (level,), (level,)) for level in levels[:2])
        prompts, noun, target = Prompts(concept, (first, second)), "texts", ""
        usable = data.split != "train"
        notes.append(f"{int((~usable).sum())} texts of the training part were left out: the model may know them.")
    pole = np.full(len(levels), -1)
    for number, end in enumerate(prompts.poles):
        pole[[i for i, level in enumerate(levels) if level in end.levels]] = 1 - number
    if not {0, 1} <= set(pole.tolist()):
        ends = "; ".join(f"{end.name}: {', '.join(end.levels)}" for end in prompts.poles)
        raise InputError(
            f"the column {column!r} has the values {', '.join(levels)}, which are not of both poles "
            f"of {prompts.name!r} ({ends})"
        )
    if len(data.classes) < 2:
        raise InputError(f"all rows have the {task} {data.classes[0]!r}; a task needs at least two classes")
    group = pole[groups.codes]
    if (group < 0).any():
        count = int((group < 0).sum())
        notes.append(f"{count} {noun} belong to neither pole of {prompts.name} and were left out.")
    rows = np.random.default_rng(seed).permutation(np.flatnonzero(usable & (group >= 0)))
    if limit is not None and limit < len(rows):
        rows = even_rows(rows, group, limit)
    cluster = data.attributes.cluster
    evaluation = Evaluation(
        labels=data.all.labels[rows],
        classes=data.classes,
        groups=group[rows],
        poles=(prompts.poles[0].name, prompts.poles[1].name),
        group_by=prompts.name,
        ids=data.all.ids[rows],
        clusters=None if cluster is None else np.asarray(cluster.codes)[rows],
        noun=noun,
        target=target,
    )
    inputs: Any = data.all.inputs
    items = inputs.take(rows) if isinstance(inputs, Images) else [inputs[i] for i in rows]
    return LabelledRows(items, evaluation, prompts, tuple(notes))


def even_rows(rows: NDArray[np.intp], group: NDArray[np.intp], limit: int) -> NDArray[np.intp]:
    """As many rows of each group, in the order given.

    Example:
        >>> even_rows(np.array([4, 2, 1, 0, 3]), np.array([1, 1, 1, 0, 0]), 4).tolist()
        [4, 2, 1, 3]
    """
    first = rows[group[rows] == 1][: (limit + 1) // 2]
    second = rows[group[rows] == 0][: limit - len(first)]
    return rows[np.isin(rows, np.concatenate([first, second]))]


class RowInputs(ABC):
    """A model in evaluation mode, and rows in the form that it reads.

    Args:
        model: folder of the model.
        items: the rows, not decoded.
        batch_size: rows at a time.
        device: "auto", "cpu", "cuda", ...
    """

    kind: ClassVar[Kind]

    def __init__(self, model: str, items: Any, batch_size: int = 32, device: str = "auto") -> None:
        self.loaded = open_model(model, self.kind, device=device, dtype="float32")
        self.model = self.loaded.model.requires_grad_(False)
        self.items, self.batch_size = items, batch_size

    @property
    @abstractmethod
    def beside(self) -> Any:
        """What is saved with the model: its image processor or tokenizer."""

    @abstractmethod
    def batches(self, rows: NDArray[np.integer] | None = None, start: int = 0) -> Iterator[Mapping[str, Tensor]]:
        """The model's inputs for some rows, or for all, from one of them on."""

    def order(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """The order in which some rows are best read, [n]: as they come, where all cost the same."""
        return np.arange(len(rows))


class ImageInputs(RowInputs):
    """Images, of which the next batches are decoded in threads meanwhile."""

    kind = "image"

    @property
    def beside(self) -> Any:
        """The image processor."""
        return self.loaded.processor

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
    """Texts, cut where the model's context ends."""

    kind = "text"

    @property
    def beside(self) -> Any:
        """The tokenizer."""
        return self.loaded.tokenizer

    def batches(self, rows: NDArray[np.integer] | None = None, start: int = 0) -> Iterator[Mapping[str, Tensor]]:
        """Tokens, padded to the longest text of a batch; a model that knows its positions apart has one length."""
        texts: Sequence[Any] = self.items if rows is None else [self.items[i] for i in rows]
        longest = min(_MOST_TOKENS, getattr(self.model.config, "max_position_embeddings", _MOST_TOKENS))
        fixed = positions_of(self.model)
        how = {"padding": "max_length", "max_length": fixed} if fixed else {"padding": True, "max_length": longest}
        for part in even_batches(start, len(texts), self.batch_size):
            columns = zip(*(_columns(texts[i]) for i in part), strict=True)
            encoded = self.loaded.tokenizer(*map(list, columns), truncation=True, return_tensors="pt", **how)
            yield {name: tensor.to(self.loaded.device) for name, tensor in encoded.items()}

    def order(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Texts of like length together, so that a batch has little padding."""
        return np.argsort([sum(map(len, _columns(self.items[row]))) for row in rows], kind="stable")


def _columns(text: Any) -> tuple[str, ...]:
    """A text, or the premise and the hypothesis of a pair."""
    return (text.premise, text.hypothesis) if hasattr(text, "premise") else (str(text),)


def even_batches(start: int, end: int, size: int) -> list[range]:
    """Rows from start to end in batches of at most `size`, none much smaller: of 3 and more, each has at least two.

    Example:
        >>> even_batches(0, 9, 4)
        [range(0, 3), range(3, 6), range(6, 9)]
    """
    count = -(-(end - start) // size)
    bounds = np.linspace(start, end, count + 1).round().astype(int).tolist()
    return [range(*pair) for pair in itertools.pairwise(bounds)]
