"""What models read (pictures as bytes, texts as tokens, rows of either batch by batch), and what they predict."""

import itertools
import logging
import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fairhead.data import Dataset, Images
from fairhead.data.datasets import column, positive_last
from fairhead.errors import InputError, UnsupportedModel
from fairhead.models.attached import positions_of
from fairhead.models.load import Kind, Model, open_model
from fairhead.models.places import PROCESSOR, Place, read_json
from fairhead.records import Records
from fairhead.report import Report, Result, Sentence
from fairhead.report.sections.plain import PlainTable, PlainTables
from fairhead.report.wording import count
from fairhead.store import write_json

# Families whose positions begin behind that of the padding: so many fewer tokens fit.
_AFTER_PADDING = {"camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta"}
_AFTER_PADDING |= {"roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}
_MOST_WORKERS = 16  # threads that decode images; each holds a batch of pixels
_MOST_TOKENS = 512


def text_columns(text: Any) -> tuple[str, ...]:
    """A text, or the premise and the hypothesis of a pair."""
    return (text.premise, text.hypothesis) if hasattr(text, "premise") else (str(text),)


def text_length(config: Any, wanted: int) -> int:
    """How many tokens of a text a model reads: as many as wanted, or as its positions allow.

    Example:
        >>> from transformers import BertConfig, RobertaConfig
        >>> text_length(BertConfig(), 128), text_length(BertConfig(), 1024), text_length(RobertaConfig(), 1024)
        (128, 512, 510)
    """
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return wanted
    return min(wanted, most - (config.pad_token_id + 1 if config.model_type in _AFTER_PADDING else 0))


def tokens_of(tokenizer: Any, texts: Sequence[Any], length: int) -> dict[str, Tensor]:
    """Texts, or pairs with a premise and a hypothesis, as tokens [n, length]: one length for all.

    DAM keeps statistics for each position, so that every batch needs as many.
    """
    return _encoded(tokenizer, texts, padding="max_length", max_length=length)


def _encoded(tokenizer: Any, texts: Sequence[Any], **how: Any) -> dict[str, Tensor]:
    columns = (list(column) for column in zip(*map(text_columns, texts), strict=True))
    return dict(tokenizer(*columns, truncation=True, return_tensors="pt", **how))


@dataclass(frozen=True)
class Pictures:
    """How pictures are made ready: resized to `size` × `size` without cropping, then (x / 255 − mean) / std."""

    size: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def of(cls, place: Place, size: int | None = None) -> "Pictures":
        """The preprocessing that the model of a folder asks for; `size` replaces its image size."""
        wanted, config = read_json(place.holding(PROCESSOR) / PROCESSOR), read_json(place.folder / "config.json")
        found = size or wanted.get("crop_size") or wanted.get("size") or config.get("image_size")
        if isinstance(found, dict):
            found = found.get("height") or found.get("shortest_edge")
        if not isinstance(found, int) or found < 1:
            raise InputError(
                f"{place.name} is a {config.get('model_type', 'unknown')} model and does not say how large its "
                "pictures are: give an encoder of pictures (ViT, DINOv2, CLIP), or the setting image_size"
            )
        mean, std = (wanted.get(name, [0.5] * 3) for name in ("image_mean", "image_std"))
        try:
            ready = Pictures(found, tuple(map(float, mean)), tuple(map(float, std)))
        except (TypeError, ValueError):
            ready = Pictures(found, (), ())
        if not len(ready.mean) == len(ready.std) == 3 or not all(map(math.isfinite, ready.mean)) or min(ready.std) <= 0:
            raise InputError(
                f"{place.name}: {PROCESSOR} has image_mean {mean!r} and image_std {std!r}; three numbers each are "
                "expected, the latter above 0"
            )
        return ready

    def save(self, folder: Path) -> None:
        """Write the same for the image processors of transformers."""
        settings = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": self.size, "width": self.size},
            "resample": 2,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }
        write_json(folder / PROCESSOR, settings)


def normalising(model: nn.Module, pictures: Pictures) -> nn.Module:
    """Let a model take pictures as bytes [B, 3, H, W], a quarter of the memory, and normalise them on its device."""
    model.register_forward_pre_hook(_normaliser(pictures), with_kwargs=True)
    return model


def _normaliser(pictures: Pictures) -> Callable[..., Any]:
    # One number where the channels agree: a constant of the graph instead of a tensor on some device.
    even = len(set(pictures.mean)) == len(set(pictures.std)) == 1

    @cache  # to send them at every step would be to wait for the device, which a recorded step cannot
    def constants(device: torch.device) -> tuple[Tensor, Tensor]:
        mean, std = (torch.tensor(x, device=device).view(-1, 1, 1) for x in (pictures.mean, pictures.std))
        return mean, std

    def normalise(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pixels = kwargs.get("pixel_values")
        if not isinstance(pixels, Tensor) or pixels.dtype != torch.uint8:
            return None
        if even:
            ready = pixels.float() * (1 / (255 * pictures.std[0])) - pictures.mean[0] / pictures.std[0]
        else:
            mean, std = constants(pixels.device)
            ready = (pixels.float() / 255 - mean) / std
        return args, {**kwargs, "pixel_values": ready}

    return normalise


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

    def logits(self) -> Iterator[Tensor]:
        """Logits of the classes [B, C], batch after batch."""
        for batch in self.batches():
            found = getattr(self.model(**batch), "logits", None)
            if found is None or found.dim() != 2:
                raise UnsupportedModel(
                    f"{type(self.model).__name__} is no classifier: it has no logits of classes. Train one first "
                    "(fairhead mitigate ... --train head --out run) and give its folder, run/model"
                )
            yield found.float()

    def order(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """The order in which some rows are best read, [n]: as they come, where all cost the same."""
        return np.arange(len(rows))


class ImageInputs(RowInputs):
    """Images; threads decode the next batches while the model runs."""

    kind, made_ready_by = "image", "processor"

    def batches(self, rows: NDArray[np.integer] | None = None, start: int = 0) -> Iterator[Mapping[str, Tensor]]:
        """Pixels."""
        images: Images = self.items if rows is None else self.items.take(rows)

        def prepare(part: range) -> Tensor:
            ready = self.loaded.processor([images[i] for i in part], return_tensors="pt")
            more = ", ".join(sorted({*ready} - {"pixel_values"}))
            if more:  # as of SigLIP 2, whose patches differ in number from picture to picture
                raise UnsupportedModel(
                    f"{type(self.model).__name__} reads {more} beside its pixels: models of pictures that all have one "
                    "size are known"
                )
            pixels: Tensor = ready["pixel_values"]
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
        finally:  # also if the caller stops early
            pool.shutdown(cancel_futures=True)


class TextInputs(RowInputs):
    """Texts, cut where the tokenizer says (`mitigate` keeps there what it trained with) or the model's context ends."""

    kind, made_ready_by = "text", "tokenizer"

    def batches(self, rows: NDArray[np.integer] | None = None, start: int = 0) -> Iterator[Mapping[str, Tensor]]:
        """Tokens, padded to the longest text of a batch; a model that knows its positions apart has one length."""
        texts: Sequence[Any] = self.items if rows is None else [self.items[i] for i in rows]
        tokenizer = self.loaded.tokenizer
        longest = text_length(self.model.config, min(_MOST_TOKENS, tokenizer.model_max_length))
        fixed = positions_of(self.model)
        how = {"padding": "max_length", "max_length": fixed} if fixed else {"padding": True, "max_length": longest}
        for part in even_batches(start, len(texts), self.batch_size):
            encoded = _encoded(tokenizer, [texts[i] for i in part], **how)
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


class Predictions(Records, Result):
    """What a classifier predicts for rows with labels: records for `fairhead.audit`, with a page of their own."""

    __repr__ = Records.__repr__

    @classmethod
    def of(cls, model: Any, data: Dataset, ids: Any, logits: Tensor) -> "Predictions":
        """The predictions for these ids from logits [n, C] of all classes of the model; the data may have fewer."""
        names = {str(name) for name in model.config.id2label.values()}
        if {*data.classes} < names:
            data = data.with_classes(positive_last(column(sorted(names))).levels)
        return cls(**vars(data.records(ids, logits[:, class_order(model, data.classes)].softmax(-1))))

    def rows(self) -> list[dict[str, Any]]:
        """One row per example; None where it has no group."""
        frame = self.to_frame().astype(object)
        found: list[dict[str, Any]] = frame.where(frame.notna(), None).to_dict("records")  # type: ignore[assignment]
        return found

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"schema": "fairhead.predictions/1", "classes": [*self.classes], "rows": self.rows()}

    def page(self) -> Report:
        """How often each class was predicted for the rows of each class."""
        assert self.prediction is not None
        cells = np.zeros((len(self.classes), len(self.classes)), dtype=int)
        np.add.at(cells, (self.label.codes, self.prediction.codes), 1)
        rows = [[str(name), *map(count, line)] for name, line in zip(self.classes, cells.tolist(), strict=True)]
        table = PlainTable(caption="Rows by class and prediction", columns=["", *map(str, self.classes)], rows=rows)
        right = f"{count(int(cells.trace()))} of {count(len(self))} predictions are the class of their row."
        return Report(
            title="Predictions",
            question="What does the model predict?",
            verdict=[Sentence(f"{right} fairhead.audit measures gaps between groups, with intervals.", "note")],
            sections=[PlainTables(title="Predictions", tables=[table])],
            provenance=self.provenance,
        )
