"""Text classifiers: their classes as directions, and sessions over labelled texts.

A text classifier reads its first token through one hidden layer: logits = W act(P h + b) + c. The activation is folded
in as norms are: act(a) = a · (act(a) / a), exactly, with the row's own ratio. So each row has its own direction in h,
and the heads' parts add up to the row's own logit.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from fairhead.data import parse_spec, read_labelled
from fairhead.devices import device_named
from fairhead.errors import InputError, UnsupportedModel
from fairhead.locate.concepts import Concept
from fairhead.locate.decompose import Decomposer
from fairhead.locate.effects import Evaluation
from fairhead.locate.features import collect
from fairhead.locate.prompts import Pole, PromptFile, Prompts
from fairhead.locate.session import ImageModel, Session, Source, even_batches, even_rows, loading
from fairhead.locate.tasks import Task, evidence_of

if TYPE_CHECKING:
    from fairhead.locate.features import Features

Array = NDArray[np.float64]
_MOST_TOKENS = 512
_CHUNK = 256
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class PooledTask(Task):
    """Classes behind a hidden layer: logits = out @ act(dense @ output + dense_bias) + out_bias.

    `directions` and `bias` are those of the same layers without the activation: the plane in which classes lie.

    Attributes:
        dense: [K, d'].
        dense_bias: [K].
        out: [C, K].
        out_bias: [C].
        activation: "tanh", "relu" or "gelu".

    Example:
        >>> rng = np.random.default_rng(0)
        >>> parts = rng.normal(size=(4, 3)), rng.normal(size=4), rng.normal(size=(2, 4)), np.zeros(2)
        >>> task = PooledTask.of(("no", "yes"), *parts, "tanh", "made by hand")
        >>> h = rng.normal(size=(5, 3))
        >>> linear = np.einsum("nco,no->nc", task.row_directions(h), h) + task.row_constants(h)
        >>> bool(np.allclose(linear, task.logits(h)))
        True
    """

    dense: Array = field(default_factory=lambda: np.zeros((0, 0)))
    dense_bias: Array = field(default_factory=lambda: np.zeros(0))
    out: Array = field(default_factory=lambda: np.zeros((0, 0)))
    out_bias: Array = field(default_factory=lambda: np.zeros(0))
    activation: str = "tanh"

    @classmethod
    def of(
        cls,
        classes: Sequence[str],
        dense: Array,
        dense_bias: Array,
        out: Array,
        out_bias: Array,
        activation: str,
        origin: str,
    ) -> "PooledTask":
        """From the two layers."""
        plane = out @ dense, out @ dense_bias + out_bias
        return cls(tuple(classes), *plane, origin, dense, dense_bias, out, out_bias, activation)

    def reordered(self, order: Sequence[int], classes: tuple[str, ...]) -> "PooledTask":
        """The same classes in another order."""
        rows = list(order)
        return PooledTask.of(
            classes, self.dense, self.dense_bias, self.out[rows], self.out_bias[rows], self.activation, self.origin
        )

    def logits(self, output: NDArray[np.floating]) -> Array:
        """Outputs [n, d'] to logits [n, C], through the hidden layer."""
        return np.asarray(_ACTIVATIONS[self.activation](self._before(output)) @ self.out.T + self.out_bias)

    def row_directions(self, output: NDArray[np.floating]) -> Array:
        """Each row's own directions, [n, C, d']: logits = output · direction + a constant of the row."""
        return np.einsum("ck,nk,ko->nco", self.out, self._ratio(output), self.dense, optimize=True)

    def row_constants(self, output: NDArray[np.floating]) -> Array:
        """What the biases add to each row's logits, [n, C]."""
        return (self._ratio(output) * self.dense_bias) @ self.out.T + self.out_bias

    def parts(self, features: "Features", positive: int) -> Array:
        """Each head's part in the evidence of one class, [n, L, H]."""
        found = np.empty((len(features), *features.shape))
        for start in range(0, len(features), _CHUNK):
            rows = slice(start, start + _CHUNK)
            direction = self._evidence(features.output[rows], positive)
            through = np.einsum("no,lhod->nlhd", direction, features.maps, optimize=True)
            found[rows] = (through * features.heads[rows]).sum(-1)
        return found

    def other_parts(self, features: "Features", positive: int) -> Array:
        """The other terms' parts in it, [n, M]."""
        direction = self._evidence(features.output, positive)
        return np.einsum("nmo,no->nm", np.asarray(features.others, dtype=np.float64), direction, optimize=True)

    def total(self, output: NDArray[np.floating], positive: int) -> Array:
        """The evidence itself, [n]: the logit against the mean of the others'."""
        return evidence_of(self.logits(output), positive)

    def push(self, features: "Features", layer: int, moved: Array) -> Array:
        """The change of the logits [n, H, C] if each head's z [n, H, d] at a layer changed so, all else held."""
        terms = np.einsum("nhd,hod->nho", moved, features.maps[layer], optimize=True)
        return np.einsum("nho,nco->nhc", terms, self.row_directions(features.output), optimize=True)

    def _evidence(self, output: NDArray[np.floating], positive: int) -> Array:
        directions = self.row_directions(output)
        return np.asarray(directions[:, positive] - np.delete(directions, positive, axis=1).mean(1))

    def _before(self, output: NDArray[np.floating]) -> Array:
        return np.asarray(output, dtype=np.float64) @ self.dense.T + self.dense_bias

    def _ratio(self, output: NDArray[np.floating]) -> Array:
        a = self._before(output)
        small = np.abs(a) < 1e-9
        return np.where(small, _SLOPES[self.activation], _ACTIVATIONS[self.activation](a) / np.where(small, 1.0, a))


def _gelu(a: Array) -> Array:
    from scipy.special import ndtr

    return np.asarray(a * ndtr(a))


_ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "tanh": np.tanh,
    "relu": lambda a: np.maximum(a, 0.0),
    "gelu": _gelu,
}
_SLOPES = {"tanh": 1.0, "relu": 0.0, "gelu": 0.5}  # at 0


def text_classifier_task(model: nn.Module) -> PooledTask:
    """The classes of a text classifier that reads its first token through one hidden layer.

    Raises:
        UnsupportedModel: it is built in another way.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9)
        >>> model = BertForSequenceClassification(BertConfig(**small, id2label={0: "normal", 1: "toxic"}))
        >>> text_classifier_task(model).classes
        ('normal', 'toxic')
    """
    whole: Any = model
    head: Any = getattr(whole, "classifier", None)
    pooler = getattr(getattr(whole, "base_model", None), "pooler", None)
    if isinstance(head, nn.Linear) and pooler is not None:  # BERT
        dense, out, activation = pooler.dense, head, "tanh"
    elif isinstance(head, nn.Linear) and hasattr(whole, "pre_classifier"):  # DistilBERT
        dense, out, activation = whole.pre_classifier, head, "relu"
    elif hasattr(head, "dense") and hasattr(head, "out_proj"):  # RoBERTa; ELECTRA has an activation of its own
        dense, out, activation = head.dense, head.out_proj, "gelu" if hasattr(head, "activation") else "tanh"
    else:
        raise UnsupportedModel(
            f"{type(model).__name__} has no classifier of two layers on its first token; head evidence can be read "
            "from BERT, RoBERTa, DistilBERT, ELECTRA and models built like them"
        )
    names = [str(whole.config.id2label[i]) for i in range(out.out_features)]
    layers = _numbers(dense.weight), _numbers(dense.bias), _numbers(out.weight), _numbers(out.bias)
    return PooledTask.of(names, *layers, activation, "the model's own classifier")


def _numbers(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().double().cpu().numpy())


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

    def __init__(self, folder: str, device: str = "auto") -> None:
        path = Path(folder)
        if not (path / "config.json").is_file():
            raise InputError(f"{folder} is not the folder of a model: it has no config.json")
        self.folder = path
        self.device = device_named(device)
        with loading(folder, "a text classifier"):
            self.model, found = transformers.AutoModelForSequenceClassification.from_pretrained(
                path, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
            self.processor: Any = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        missing = sorted(found["missing_keys"])
        if missing:  # they would be random numbers
            raise InputError(
                f"{folder} is not a trained classifier: its weights lack {missing[0]}; train one first, as with "
                "fairhead mitigate erm"
            )
        self.model.eval().to(self.device).requires_grad_(False)

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
        own = _numbers(self.model.model(**batch).logits)[:, [found.classes.index(name) for name in classes]]
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
        "model": model.fingerprint(),
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
