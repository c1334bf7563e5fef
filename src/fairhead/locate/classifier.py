"""Sessions over labelled texts, with a text classifier."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fairhead.data import parse_spec, read_labelled
from fairhead.errors import InputError, UnsupportedModel
from fairhead.locate.class_directions import Task, array_of, text_classifier_task
from fairhead.locate.concepts import Concept
from fairhead.locate.decompose import Decomposer
from fairhead.locate.effects import Evaluation
from fairhead.locate.head_features import collect
from fairhead.locate.prompts import Pole, PromptFile, Prompts
from fairhead.locate.session import ImageModel, Session, Source, even_batches, even_rows
from fairhead.models.load import Kind

if TYPE_CHECKING:
    pass

Array = NDArray[np.float64]
_MOST_TOKENS = 512
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Texts:
    """Texts of the rows; `take` chooses among them.

    Example:
        >>> Texts(("a", "b", "c")).take(np.array([2, 0])).texts
        ('c', 'a')
    """

    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: NDArray[np.integer]) -> "Texts":
        """The chosen rows."""
        return Texts(tuple(self.texts[i] for i in rows))


class TextModel(ImageModel):
    """A loaded text classifier with its tokeniser."""

    kind: Kind = "text"

    def batches(self, images: Any, size: int, start: int = 0) -> Iterator[Mapping[str, Tensor]]:
        """The model's inputs, batch by batch; texts are cut where the model's context ends."""
        longest = min(_MOST_TOKENS, getattr(self.model.config, "max_position_embeddings", _MOST_TOKENS))
        for rows in even_batches(start, len(images), size):
            texts = list(images.texts[rows.start : rows.stop])
            encoded = self.processor(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
            yield {name: tensor.to(self.device) for name, tensor in encoded.items()}


@dataclass(frozen=True)
class TextSession(Session):
    """A session over labelled texts: the classes are the classifier's, the concept is learned from the rows."""

    def reading_order(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Texts of like length together, so that a batch has little padding."""
        texts: Any = self.images
        return np.argsort([len(texts.texts[row]) for row in rows], kind="stable")

    def task(self, choosing: NDArray[np.bool_]) -> Task:
        """The model's own classes, in the order of the data's."""
        found, classes = text_classifier_task(self.model.model), self.evaluation.classes
        if set(found.classes) != set(classes):
            raise InputError(
                f"the model's classes are {', '.join(found.classes)} and those of the data {', '.join(classes)}; they "
                "must have the same names"
            )
        task = found.reordered([found.classes.index(name) for name in classes], classes)
        # Once: is that what the model does with its first token?
        batch = next(self.batches(np.arange(1)))
        own = array_of(self.model.model(**batch).logits)[:, [found.classes.index(name) for name in classes]]
        ours = task.logits(self.decomposer.outputs(batch).cpu().numpy())
        if np.abs(ours - own).max() > _TOLERANCE * max(1.0, np.abs(own).max()):
            raise UnsupportedModel(
                f"the logits of {type(self.model.model).__name__} are not those of its classifier on the first token: "
                "it does something more that is not known"
            )
        return task

    def concept(self, task: Task, choosing: NDArray[np.bool_]) -> Concept:
        """The direction that tells the group apart, learned from the choosing half."""
        found = super().concept(task, choosing)
        return replace(found, origin=found.origin.replace("images", "texts"))


def open_text_session(
    source: Source, features: str | None = None, progress: Callable[[int, int], None] | None = None
) -> TextSession:
    """Read labelled texts, load a classifier, and run it over them. Rows it may have been trained on are left out.

    Args:
        source: what to read; its concept is a group column (in HateXplain a community, such as Women).
        features: a folder for the features.
        progress: called with (texts done, texts).

    Example:
        >>> source = Source("toxicity-bert", "hatexplain:HateXplain", "Women", "toxic")  # doctest: +SKIP
        >>> open_text_session(source).evaluation.poles  # doctest: +SKIP
        ('Women', 'not Women')
    """
    name = parse_spec(source.data).reader.name
    if source.prompts or source.text_adapter or source.texts:
        raise InputError(f"prompts and text sides are for images; the concept of {name} is learned from its own rows")
    data = read_labelled(source.data, target=source.task, groups=(source.concept,))
    column = data.groups()[source.concept]
    first, second = (str(level) for level in column.levels)
    group = (column.codes == 0).astype(np.intp)  # the first level is the one that has the attribute
    held_out = np.flatnonzero(data.split != "train")
    rows = np.random.default_rng(source.seed).permutation(held_out)
    if source.limit is not None and source.limit < len(rows):
        rows = even_rows(rows, group, source.limit)
    evaluation = Evaluation(
        labels=data.all.labels[rows],
        classes=data.classes,
        groups=group[rows],
        poles=(first, second),
        group_by=source.concept,
        ids=data.all.ids[rows],
        noun="texts",
    )
    model = TextModel(source.model, source.device)
    texts = Texts(tuple(str(data.all.inputs[i]) for i in rows))
    decomposer = Decomposer(model.model, unit=False)
    identity = {
        "model": model.loaded.fingerprint(),
        "ids": hashlib.sha256("\n".join(data.all.ids[rows].tolist()).encode()).hexdigest(),
        "data": name,
        "token": decomposer.token,
    }

    def batches(start: int) -> Iterator[Mapping[str, Tensor]]:
        return model.batches(texts, source.batch_size, start)

    found = collect(decomposer, batches, len(rows), folder=features, identity=identity, progress=progress)
    poles = Pole(first, (first,), (first,)), Pole(second, (second,), (second,))
    notes = (f"{len(data) - len(held_out)} texts of the training part were left out: the model may know them.",)
    anything: Any = texts
    return TextSession(
        source,
        model,
        decomposer,
        anything,
        evaluation,
        found,
        None,
        Prompts(source.concept, poles),
        PromptFile(),
        notes,
    )
