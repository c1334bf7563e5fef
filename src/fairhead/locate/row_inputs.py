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

from fairhead.data import Dataset, Images, parse_spec
from fairhead.errors import InputError
from fairhead.locate.gap_question import Evaluation
from fairhead.locate.prompts import COLUMNS, CONCEPTS, Pole, Prompts
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
        prompts: the poles in words, where there are any.
        notes: about rows that were left out, in sentences.
    """

    items: Any
    evaluation: Evaluation
    prompts: Prompts | None
    notes: tuple[str, ...]


def labelled_rows(
    spec: str,
    concept: str,
    task: str,
    *,
    prompts: Prompts | None = None,
    held_out: bool = False,
    limit: int | None = None,
    seed: int = 0,
) -> LabelledRows:
    """Read labelled images or texts, with the groups of a concept.

    Args:
        spec: `name:path` of a data set.
        concept: the attribute, or the column that holds it.
        task: the target column.
        prompts: the user's own poles. Without them images have those that ship with fairhead, where the column has
            their values; else its first two values are the poles.
        held_out: leave out rows of the training part.
        limit: rows at most, evenly over the groups.
        seed: of their order.

    Raises:
        InputError: the column does not tell two groups apart, or is the task itself.
    """
    reader, path = parse_spec(spec, "images", "texts")
    column = COLUMNS.get((reader.name, concept), concept)
    if column == task:
        raise InputError(
            f"concept and task are both {column!r}: within a class of it there is one group, so there is no gap to find"
        )
    data = reader.read(path, **reader.named({"label": task, "groups": (column,)}))
    assert isinstance(data, Dataset)
    groups = data.groups()[column]
    levels = [str(level) for level in groups.levels]
    if len(levels) < 2 or len(data.classes) < 2:
        what = (column, levels[0]) if len(levels) < 2 else (task, data.classes[0])
        raise InputError(f"all rows have the {what[0]} {what[1]!r}; at least two groups and two classes are needed")
    if prompts is None and reader.kind == "images":
        known = CONCEPTS.get(concept)
        fits = known is not None and all(set(end.levels) & set(levels) for end in known.poles)
        prompts = known if fits else None
    poles = prompts.poles if prompts is not None else tuple(Pole(level, (), (level,)) for level in levels[:2])
    pole = np.full(len(levels), -1)
    for number, end in enumerate(poles):
        pole[[i for i, level in enumerate(levels) if level in end.levels]] = 1 - number
    if not {0, 1} <= set(pole.tolist()):
        ends = "; ".join(f"{end.name}: {', '.join(end.levels)}" for end in poles)
        raise InputError(
            f"the column {column!r} has the values {', '.join(levels)}, which are not of both poles "
            f"of {concept if prompts is None else prompts.name!r} ({ends})"
        )
    group, usable, notes = pole[groups.codes], np.ones(len(data), dtype=bool), []
    name, noun = concept if prompts is None else prompts.name, reader.kind
    if held_out:
        usable = data.split != "train"
        notes.append(f"{int((~usable).sum())} {noun} of the training part were left out: the model may know them.")
    if (group < 0).any():
        notes.append(f"{int((group < 0).sum())} {noun} belong to neither pole of {name} and were left out.")
    rows = np.random.default_rng(seed).permutation(np.flatnonzero(usable & (group >= 0)))
    if limit is not None and limit < len(rows):
        rows = even_rows(rows, group, limit)
    cluster, inputs = data.attributes.cluster, data.all.inputs
    evaluation = Evaluation(
        labels=data.all.labels[rows],
        classes=data.classes,
        groups=group[rows],
        poles=(poles[0].name, poles[1].name),
        group_by=name,
        ids=data.all.ids[rows],
        clusters=None if cluster is None else np.asarray(cluster.codes)[rows],
        noun=noun,
        target=task if noun == "images" else "",
    )
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
