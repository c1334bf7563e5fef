"""From a model folder and a data set to features, groups, a concept and a task: what the commands share."""

import hashlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fairhead.data import Dataset, Images, parse_spec, read_labelled
from fairhead.errors import InputError, UnsupportedModel
from fairhead.locate.class_directions import Task, classifier_task, task_from_images, task_from_texts
from fairhead.locate.concepts import Concept, concept_from_images, concept_from_texts
from fairhead.locate.decompose import Decomposer
from fairhead.locate.effects import Evaluation
from fairhead.locate.head_features import Features, collect
from fairhead.locate.plan import halves_of
from fairhead.locate.prompts import COLUMNS, PromptFile, Prompts, class_words, concept_prompts, read_prompts
from fairhead.locate.texts import AdaptedText, ClipText, TextSide, TextTable
from fairhead.locate.textspan import Pool
from fairhead.models import open_model
from fairhead.models.load import Kind

Progress = Callable[[int, int], None]
_MOST_WORKERS = 16  # threads that decode images; each holds a batch of pixels


@dataclass(frozen=True)
class Source:
    """What a run reads.

    Attributes:
        model: folder of an image model.
        data: name and path of a data set, as `fairface:PATH`.
        concept: the attribute: "gender", "age", or the name of one in the prompt file.
        task: the data set's target column.
        prompts: a YAML file of prompts.
        text_adapter: an .npz file that maps an encoder's texts to the model's space, where it has no text tower.
        text_encoder: the folder of that encoder.
        texts: an .npz table of text vectors, the pool of TextSpan.
        concept_from: "prompts", "means", "logistic" or "leace"; None takes prompts where there is a text side.
        orthogonal: take the class directions out of the concept.
        calibrate: shift zero-shot classes so that each is predicted as often as it occurs in the choosing half.
        limit: images to use, drawn evenly over groups; None for all.
        batch_size: images at a time.
        device: "auto", "cpu", "cuda", ...
        seed: of the draw.
    """

    model: str
    data: str
    concept: str
    task: str
    prompts: str | None = None
    text_adapter: str | None = None
    text_encoder: str | None = None
    texts: str | None = None
    concept_from: str | None = None
    orthogonal: bool = False
    calibrate: bool = False
    limit: int | None = None
    batch_size: int = 32
    device: str = "auto"
    seed: int = 0


class ImageModel:
    """A loaded image model with its processor."""

    kind: Kind = "image"

    def __init__(self, model: str, device: str = "auto") -> None:
        self.loaded = open_model(model, self.kind, device=device, dtype="float32")
        self.model, self.device = self.loaded.model, self.loaded.device
        self.processor = self.loaded.processor if self.kind == "image" else self.loaded.tokenizer
        self.model.requires_grad_(False)

    def batches(self, images: Images, size: int, start: int = 0) -> Iterator[Mapping[str, Tensor]]:
        """The model's inputs, batch by batch; the next ones are decoded in threads meanwhile."""

        def prepare(rows: range) -> Tensor:
            pictures = [images[i] for i in rows]
            pixels: Tensor = self.processor(pictures, return_tensors="pt")["pixel_values"]
            return pixels

        workers = min(os.cpu_count() or 1, _MOST_WORKERS)
        pool = ThreadPoolExecutor(workers)
        try:
            waiting: deque[Future[Tensor]] = deque()
            for rows in even_batches(start, len(images), size):
                waiting.append(pool.submit(prepare, rows))
                if len(waiting) > workers:
                    yield {"pixel_values": waiting.popleft().result().to(self.device)}
            while waiting:
                yield {"pixel_values": waiting.popleft().result().to(self.device)}
        finally:  # also where whoever asked for batches has had enough
            pool.shutdown(cancel_futures=True)


def even_batches(start: int, end: int, size: int) -> list[range]:
    """Rows from start to end in batches of at most `size`, none much smaller: of 3 and more, each has at least two.

    Example:
        >>> even_batches(0, 9, 4)
        [range(0, 3), range(3, 6), range(6, 9)]
    """
    count = -(-(end - start) // size)
    bounds = np.linspace(start, end, count + 1).round().astype(int).tolist()
    return [range(*pair) for pair in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class Session:
    """Everything that locating and ablating start from.

    Attributes:
        source: what was asked for.
        model: loaded.
        decomposer: of the model.
        images: of the rows, not decoded.
        evaluation: labels and groups of the rows.
        features: of the rows.
        text: the text side, or None.
        prompts: the concept in words, or None.
        prompt_file: what the user's own file says.
        notes: what was left out, in sentences.
    """

    source: Source
    model: ImageModel
    decomposer: Decomposer
    images: Images
    evaluation: Evaluation
    features: Features
    text: TextSide | None
    prompts: Prompts
    prompt_file: PromptFile
    notes: tuple[str, ...]

    def task(self, choosing: NDArray[np.bool_]) -> Task:
        """The classes as directions: the model's classifier, prompts, or a probe fitted on the choosing half."""
        classes = self.evaluation.classes
        if getattr(self.model.model, "classifier", None) is not None:
            found = classifier_task(self.model.model)
            if set(found.classes) != set(classes):
                raise InputError(
                    f"the model's classes are {', '.join(found.classes)} and those of the data {', '.join(classes)}; "
                    "they must have the same names"
                )
            order = [found.classes.index(name) for name in classes]
            return Task(classes, found.directions[order], found.bias[order], found.origin)
        if self.text is not None:
            name = self.source.data.partition(":")[0].strip().lower()
            words = self.prompt_file.classes or class_words(name, self.source.task)
            missing = [c for c in classes if c not in words]
            if missing:
                raise InputError(
                    f"there are no prompts for the class {missing[0]!r}; there are some for {', '.join(words)}"
                )
            prompted = task_from_texts({c: words[c] for c in classes}, self.prompts.templates, self.text)
            if not self.source.calibrate:
                return prompted
            return prompted.calibrated(self.features.output[choosing], self.evaluation.labels[choosing])
        return task_from_images(self.features.output[choosing], self.evaluation.labels[choosing], classes)

    def concept(self, task: Task, choosing: NDArray[np.bool_]) -> Concept:
        """The concept's direction, from prompts or from the choosing half."""
        method = self.source.concept_from or ("prompts" if self.text is not None else "leace")
        if method == "prompts":
            if self.text is None:
                raise InputError("there is no text side to read prompts: give one, or learn the concept from images")
            concept = concept_from_texts(self.prompts, self.text)
        else:
            chosen = self.evaluation.take(choosing)
            kinds: Any = method
            concept = concept_from_images(
                self.features.output[choosing],
                chosen.groups,
                shared_labels(chosen),
                name=self.source.concept,
                poles=chosen.poles,
                method=kinds,
            )
        return concept.orthogonal_to(task) if self.source.orthogonal else concept

    def pool(self) -> Pool | None:
        """The texts for TextSpan, with attribute and neutral prompts among them; None without a table of texts."""
        if self.source.texts is None:
            return None
        table = TextTable.load(self.source.texts)
        if table.vectors.shape[1] != self.features.output.shape[1]:
            raise InputError(
                f"the text vectors of {self.source.texts} have {table.vectors.shape[1]} dimensions, the model's output "
                f"{self.features.output.shape[1]}: they belong to another model"
            )
        if self.text is None:
            return Pool.of(table.texts, table.vectors)
        attribute = [text for pole in self.prompts.poles for text in self.prompts.texts(pole)]
        neutral = self.prompts.neutral_texts()
        return Pool.of(
            table.texts,
            table.vectors,
            attribute,
            self.text(attribute),
            neutral,
            self.text(neutral) if neutral else None,
        )

    def reading_order(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """The order in which some rows are best read, [n]: as they come, where all cost the same."""
        return np.arange(len(rows))

    def batches(self, rows: NDArray[np.integer]) -> Iterator[Mapping[str, Tensor]]:
        """The model's inputs for some rows."""
        return self.model.batches(self.images.take(rows), self.source.batch_size)


def open_session(source: Source, features: str | None = None, progress: Progress | None = None) -> Session:
    """Read, load, and run the model over the images or texts (or take the features that are stored already).

    Args:
        source: what to read.
        features: a folder for the features; the next run with the same model and images takes them from there.
        progress: called with (images done, images).
    """
    if parse_spec(source.data).reader.kind == "texts":
        from fairhead.locate.classifier import open_text_session

        return open_text_session(source, features, progress)
    file = read_prompts(source.prompts) if source.prompts else PromptFile()
    prompts = file.concept if file.concept is not None else concept_prompts(source.concept)
    # The data first: a mistake there should not wait for the model.
    data, evaluation, rows, notes = _rows(source, prompts)
    halves_of(evaluation, source.seed)
    model = ImageModel(source.model, source.device)
    text = _text_side(source, model)
    templates = file.templates
    if templates is None and isinstance(text, AdaptedText):
        templates = ("{}",)  # the stand-in was fitted on bare words
    if templates is not None:
        prompts = replace(prompts, templates=templates)
    images = data.all.inputs
    assert isinstance(images, Images)
    images = images.take(rows)
    decomposer = Decomposer(model.model)
    if isinstance(text, AdaptedText) and text.width != decomposer.width:
        raise InputError(
            f"the text adapter {source.text_adapter} gives vectors of {text.width} dimensions, the model's output has "
            f"{decomposer.width}: it belongs to another model"
        )
    assert evaluation.ids is not None
    identity = {
        "model": model.loaded.fingerprint(),
        "ids": hashlib.sha256("\n".join(evaluation.ids.tolist()).encode()).hexdigest(),
        "data": source.data.partition(":")[0],
        "unit": decomposer.unit,
        "token": decomposer.token,
    }

    def batches(start: int) -> Iterator[Mapping[str, Tensor]]:
        return model.batches(images, source.batch_size, start)

    found = collect(decomposer, batches, len(rows), folder=features, identity=identity, progress=progress)
    return Session(source, model, decomposer, images, evaluation, found, text, prompts, file, tuple(notes))


def _rows(source: Source, prompts: Prompts) -> tuple[Dataset, Evaluation, NDArray[np.intp], list[str]]:
    name = parse_spec(source.data, "images", "texts").reader.name
    column = COLUMNS.get((name, source.concept), source.concept)
    if column == source.task:
        raise InputError(
            f"concept and task are both {column!r}: within a class of it there is one group, so there is no gap to find"
        )
    data = read_labelled(source.data, target=source.task, groups=(column,))
    groups = data.groups()[column]
    pole = np.full(len(groups.levels), -1)
    for number, end in enumerate(prompts.poles):
        for level in end.levels:
            if level in groups.levels:
                pole[groups.levels.index(level)] = 1 - number
    if not {0, 1} <= set(pole.tolist()):
        ends = "; ".join(f"{end.name}: {', '.join(end.levels)}" for end in prompts.poles)
        raise InputError(
            f"the column {column!r} has the values {', '.join(map(str, groups.levels))}, which are not of both poles "
            f"of {prompts.name!r} ({ends})"
        )
    if len(data.classes) < 2:
        raise InputError(f"all rows have the {source.task} {data.classes[0]!r}; a task needs at least two classes")
    rows = np.flatnonzero(pole[groups.codes] >= 0)
    notes = []
    if len(rows) < len(data):
        notes.append(f"{len(data) - len(rows)} images belong to neither pole of {prompts.name} and were left out.")
    rng = np.random.default_rng(source.seed)
    rows = rng.permutation(rows)
    if source.limit is not None and source.limit < len(rows):
        rows = even_rows(rows, pole[groups.codes], source.limit)
    cluster = data.attributes.cluster
    first, second = prompts.poles
    evaluation = Evaluation(
        labels=data.all.labels[rows],
        classes=data.classes,
        groups=pole[groups.codes][rows],
        poles=(first.name, second.name),
        group_by=prompts.name,
        ids=data.all.ids[rows],
        target=source.task,
        clusters=None if cluster is None else np.asarray(cluster.codes)[rows],
    )
    return data, evaluation, rows, notes


def even_rows(rows: NDArray[np.intp], group: NDArray[np.intp], limit: int) -> NDArray[np.intp]:
    """As many rows of each group, in the order given.

    Example:
        >>> even_rows(np.array([4, 2, 1, 0, 3]), np.array([1, 1, 1, 0, 0]), 4).tolist()
        [4, 2, 1, 3]
    """
    first = rows[group[rows] == 1][: (limit + 1) // 2]
    second = rows[group[rows] == 0][: limit - len(first)]
    kept = set(first.tolist()) | set(second.tolist())
    return np.array([row for row in rows if row in kept], dtype=np.intp)


def _text_side(source: Source, model: ImageModel) -> TextSide | None:
    if (source.text_adapter is None) != (source.text_encoder is None):
        raise InputError(
            "a text adapter and the encoder it belongs to are given together (--text-adapter, --text-encoder)"
        )
    if source.text_adapter is not None and source.text_encoder is not None:
        return AdaptedText.load(source.text_adapter, source.text_encoder)
    if hasattr(model.model, "get_text_features"):
        try:
            return ClipText(model.model, model.loaded.tokenizer)
        except InputError as error:
            raise UnsupportedModel(f"the text tower has no tokenizer beside it: {error}") from None
    return None


def shared_labels(evaluation: Evaluation) -> NDArray[np.intp]:
    """Labels for a comparison within them; one for all where some label has a single group."""
    cells = np.bincount(2 * evaluation.labels + evaluation.groups, minlength=2 * len(evaluation.classes))
    seen = cells.reshape(-1, 2)
    whole = ((seen > 0).all(1) | (seen == 0).all(1)).all()
    return np.asarray(evaluation.labels if whole else np.zeros_like(evaluation.labels))
