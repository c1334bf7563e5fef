"""Tasks: classes as directions of the output representation, from a classifier, from prompts or from images.

A text classifier reads its first token through one hidden layer: logits = W act(P h + b) + c. The activation is folded
in as norms are: act(a) = a · (act(a) / a), exactly, with the row's own ratio. So each row has its own direction in h,
and the heads' parts add up to the row's own logit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize
from scipy.special import logsumexp, ndtr
from torch import Tensor, nn

from fairhead.errors import InputError, UnsupportedModel
from fairhead.locate.edits import shrunk
from fairhead.locate.head_features import Array, Features
from fairhead.locate.head_maps import group_cells
from fairhead.locate.prompts import Prompts, TextSide
from fairhead.models.inputs import class_order
from fairhead.train.kmeans import find_clusters, independent_weights

_CHUNK = 256


@dataclass(frozen=True)
class Task:
    """Classes as directions of the output representation: logits = output @ directions.T + bias."""

    classes: tuple[str, ...]  # names
    directions: Array  # [C, d']
    bias: Array  # [C]
    origin: str  # where they come from, in words

    @property
    def linear(self) -> tuple[Array, Array]:
        """The matrix [K, d'] and the bias [K] of the layer that reads the output."""
        return self.directions, self.bias

    def finished(self, x: Array) -> Array:
        """What that layer puts out, [n, K], to logits [n, C]."""
        return x

    def logits(self, output: NDArray[np.floating]) -> Array:
        """Outputs [n, d'] to logits [n, C]."""
        return self.finished(self._before(output))

    def reordered(self, order: list[int]) -> "Task":
        """The same classes in another order."""
        names = tuple(self.classes[i] for i in order)
        return replace(self, classes=names, directions=self.directions[order], bias=self.bias[order])

    def calibrated(self, output: NDArray[np.floating], labels: NDArray[np.integer]) -> "Task":
        """The same directions, shifted so that each class is predicted as often as it occurs among these rows.

        Prompts say where a class lies and nothing about how far from the others: argmax may never choose one of them.
        Take outputs [n, d'] and labels [n] of rows that are not reported on.
        """
        wanted = np.bincount(labels, minlength=len(self.classes)) / len(labels)
        logits = self.logits(output)
        shift = np.where(wanted > 0, 0.0, -np.inf)
        # Softened shares have one solution, found by scaling; ever less soft, it goes over into that of argmax.
        for softness in np.geomspace(1.0, 1e-3, 8) * (logits.std() or 1.0):
            for _ in range(100):
                scaled = (logits + shift) / softness
                share = np.exp(logsumexp(scaled - logsumexp(scaled, axis=1, keepdims=True), axis=0)) / len(labels)
                with np.errstate(divide="ignore", invalid="ignore"):
                    step = np.where(wanted > 0, softness * (np.log(wanted) - np.log(share)), 0.0)
                shift = shift + step
                if np.abs(step).max() < 1e-3 * softness:
                    break
        # Far below all others, but a number: the evidence for one class holds the others' logits.
        shift = np.where(wanted > 0, shift, -1e3 * max(1.0, float(np.abs(logits).max())))
        origin = f"{self.origin}, shifted so that each class is predicted as often as it occurs"
        return Task(self.classes, self.directions, self.bias + shift, origin)

    def evidence(self, positive: int) -> Array:
        """The direction of the evidence for one class: against the other, or against the mean of the others; [d']."""
        return evidence_of(self.directions.T, positive)

    def parts(self, features: Features, positive: int) -> Array:
        """Each head's part in the evidence for one class, [n, L, H]."""
        return features.parts(self.evidence(positive)[None])[..., 0]

    def other_parts(self, features: Features, positive: int) -> Array:
        """The other terms' parts in it, [n, M]."""
        direction = self.row_evidence(features.output, positive)
        return np.einsum("nmo,no->nm", np.asarray(features.others, dtype=np.float64), direction, optimize=True)

    def total(self, output: NDArray[np.floating], positive: int) -> Array:
        """The evidence itself, [n]: the logit against the mean of the others'."""
        return evidence_of(self.logits(output), positive)

    def row_evidence(self, output: NDArray[np.floating], positive: int) -> Array:
        """Each row's direction of the evidence for one class, [n, d']: evidence = output · direction + a constant."""
        return np.broadcast_to(self.evidence(positive), np.shape(output))

    def slope(self, output: NDArray[np.floating], positive: int) -> Array:
        """The gradient of the evidence for one class in outputs [n, d'], [n, d']."""
        return self.row_evidence(output, positive)

    def _before(self, output: NDArray[np.floating]) -> Array:
        weight, shift = self.linear
        return np.asarray(np.asarray(output, dtype=np.float64) @ weight.T + shift)


def evidence_of(logits: NDArray[np.floating], positive: int) -> Array:
    """Evidence for one class in logits [n, C]: against the other, or against the mean of the others; [n]."""
    return np.asarray(logits[:, positive] - np.delete(logits, positive, axis=1).mean(1), dtype=np.float64)


@dataclass(frozen=True)
class PooledTask(Task):
    """Classes behind a hidden layer: logits = out @ act(dense @ output + dense_bias) + out_bias.

    `directions` and `bias` are those of the same layers without the activation: the plane in which classes lie.
    """

    directions: Array = field(init=False)
    bias: Array = field(init=False)
    dense: Array  # [K, d']
    dense_bias: Array  # [K]
    out: Array  # [C, K]
    out_bias: Array  # [C]
    activation: str  # "tanh", "relu" or "gelu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "directions", self.out @ self.dense)
        object.__setattr__(self, "bias", self.out @ self.dense_bias + self.out_bias)

    def reordered(self, order: list[int]) -> "PooledTask":
        """The same classes in another order."""
        names = tuple(self.classes[i] for i in order)
        return replace(self, classes=names, out=self.out[order], out_bias=self.out_bias[order])

    @property
    def linear(self) -> tuple[Array, Array]:
        """The hidden layer's."""
        return self.dense, self.dense_bias

    def finished(self, x: Array) -> Array:
        """Through the activation."""
        return np.asarray(_ACTIVATIONS[self.activation](x) @ self.out.T + self.out_bias)

    def row_directions(self, output: NDArray[np.floating]) -> Array:
        """Each row's own directions, [n, C, d']: logits = output · direction + a constant of the row."""
        return np.einsum("ck,nk,ko->nco", self.out, self._ratio(output), self.dense, optimize=True)

    def parts(self, features: Features, positive: int) -> Array:
        """Each head's part in the evidence of one class, [n, L, H]."""
        found = np.empty((len(features), *features.shape))
        for start in range(0, len(features), _CHUNK):
            rows = slice(start, start + _CHUNK)
            direction = self.row_evidence(features.output[rows], positive)
            through = np.einsum("no,lhod->nlhd", direction, features.maps, optimize=True)
            found[rows] = (through * features.heads[rows]).sum(-1)
        return found

    def slope(self, output: NDArray[np.floating], positive: int) -> Array:
        """The gradient of the evidence for one class in outputs [n, d'], [n, d']."""
        slope = _DERIVATIVES[self.activation](self._before(output))  # [n, K]
        return np.asarray((slope * evidence_of(self.out.T, positive)) @ self.dense)

    def row_evidence(self, output: NDArray[np.floating], positive: int) -> Array:
        """Each row's own, through the activation with its ratio."""
        return evidence_of(self.row_directions(output), positive)

    def _ratio(self, output: NDArray[np.floating]) -> Array:
        a = self._before(output)
        small = np.abs(a) < 1e-9
        at_zero = _DERIVATIVES[self.activation](np.zeros(()))
        return np.where(small, at_zero, _ACTIVATIONS[self.activation](a) / np.where(small, 1.0, a))


_ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "tanh": np.tanh,
    "relu": lambda a: np.maximum(a, 0.0),
    "gelu": lambda a: np.asarray(a * ndtr(a)),
}
_DERIVATIVES: Mapping[str, Callable[[Array], Array]] = {
    "tanh": lambda a: 1 - np.tanh(a) ** 2,
    "relu": lambda a: (a > 0).astype(np.float64),
    "gelu": lambda a: np.asarray(ndtr(a) + a * np.exp(-(a**2) / 2) / np.sqrt(2 * np.pi)),
}


def classifier_task(model: nn.Module) -> Task:
    """The classes of an image classifier: a linear layer called classifier, whatever it reads (`reads_of`)."""
    parts: Any = model
    classifier = getattr(parts, "classifier", None)
    if not isinstance(classifier, nn.Linear):
        raise UnsupportedModel(
            f"{type(model).__name__} has no linear layer called classifier; head evidence can be read from "
            "ViTForImageClassification, Dinov2ForImageClassification, CLIPForImageClassification and models built alike"
        )
    weight = array_of(classifier.weight)
    bias = np.zeros(len(weight)) if classifier.bias is None else array_of(classifier.bias)
    names = tuple(str(parts.config.id2label[i]) for i in range(len(weight)))
    return Task(names, weight, bias, "the model's own classifier")


def text_classifier_task(model: nn.Module) -> PooledTask:
    """The classes of a text classifier that reads its first token through one hidden layer."""
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
    names = tuple(str(whole.config.id2label[i]) for i in range(out.out_features))
    layers = array_of(dense.weight), array_of(dense.bias), array_of(out.weight), array_of(out.bias)
    return PooledTask(names, "the model's own classifier", *layers, activation)


def own_task(model: nn.Module, is_text: bool, classes: tuple[str, ...]) -> Task | None:
    """The model's own classifier, if it has one; its classes must be those of the data."""
    if not is_text and getattr(model, "classifier", None) is None:
        return None
    found = text_classifier_task(model) if is_text else classifier_task(model)
    named = dict(zip(class_order(model, classes), classes, strict=True))
    return replace(found, classes=tuple(named[number] for number in range(len(found.classes))))


def array_of(tensor: Tensor) -> Array:
    """A tensor as an array of doubles."""
    return np.asarray(tensor.detach().double().cpu().numpy())


def task_from_texts(
    words: Mapping[str, Sequence[str]], templates: Sequence[str], text: TextSide, scale: float = 100.0
) -> Task:
    """Zero-shot classes: each the unit mean of its prompts, logits scaled as CLIP does."""
    if len(words) < 2:
        raise InputError(f"a task needs at least two classes; found {', '.join(words) or 'none'}")
    directions = []
    for name, synonyms in words.items():
        texts = [template.format(word) for template in templates for word in synonyms]
        if not texts:
            raise InputError(f"the class {name!r} has no prompt")
        directions.append(unit(unit(np.asarray(text(texts), dtype=np.float64)).mean(0)))
    return Task(tuple(words), scale * np.stack(directions), np.zeros(len(words)), "zero-shot prompts")


def task_from_images(output: NDArray[np.floating], labels: NDArray[np.integer], classes: Sequence[str]) -> Task:
    """Classes as a linear probe on outputs, for models that have neither a classifier nor a text side."""
    weights, bias = fit_logistic(np.asarray(output, dtype=np.float64), labels, len(classes))
    return Task(tuple(classes), weights, bias, f"a linear probe fitted on {len(output)} images")


def balanced_weights(features: NDArray[np.floating], labels: NDArray[np.integer], seed: int = 0) -> tuple[Array, int]:
    """Weights of rows that make clusters of their features independent of the label, [n], and how many clusters."""
    found = find_clusters(torch.tensor(np.asarray(features)), seed=seed)
    weights = independent_weights(torch.tensor(labels).long(), found.clustering.cluster)
    return np.asarray(weights.numpy()), found.size


def fit_logistic(
    x: Array, labels: NDArray[np.integer], n_classes: int, ridge: float = 1.0, weights: Array | float = 1.0
) -> tuple[Array, Array]:
    """Multinomial logistic regression with a ridge on standardised columns: weights [C, d], bias [C].

    Rows may have `weights` [n].
    """
    deviation = x.std(0)
    deviation[deviation == 0] = 1.0
    centre = x.mean(0)
    scaled = (x - centre) / deviation
    target = np.eye(n_classes)[labels]
    d, row = scaled.shape[1], np.reshape(weights, (-1, 1))

    def loss(flat: Array) -> tuple[float, Array]:
        w, b = flat[:-n_classes].reshape(n_classes, d), flat[-n_classes:]
        logits = scaled @ w.T + b
        logs = logits - logsumexp(logits, axis=1, keepdims=True)
        error = (np.exp(logs) - target) * row
        value = -(logs * target * row).sum() + ridge / 2 * (w**2).sum()
        return value, np.concatenate([(error.T @ scaled + ridge * w).ravel(), error.sum(0)])

    found = optimize.minimize(loss, np.zeros(n_classes * (d + 1)), jac=True, method="L-BFGS-B", tol=1e-9)
    w, b = found.x[:-n_classes].reshape(n_classes, d) / deviation, found.x[-n_classes:]
    return w, b - w @ centre


def unit(x: Array) -> Array:
    """Rows of length 1."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@dataclass(frozen=True)
class Concept:
    """A direction with its name."""

    name: str  # "gender", ...
    poles: tuple[str, str]  # the two ends, the one it points to first
    vector: Array  # unit length, [d']
    origin: str  # how it was made, in words
    # What else is worth knowing: prompts, shrinkage, what was taken out
    detail: Mapping[str, Any] = field(default_factory=dict)

    def orthogonal_to(self, task: Task) -> "Concept":
        """The part of the direction that no class of the task shares: that says the attribute and nothing else."""
        span = np.linalg.qr((task.directions - task.directions.mean(0)).T)[0][:, : len(task.classes) - 1]
        rest = self.vector - span @ (span.T @ self.vector)
        left = float(np.linalg.norm(rest))
        if left < 1e-3:
            raise InputError(
                f"nothing is left of the concept {self.name!r} once the classes are taken out: the task "
                f"({', '.join(task.classes)}) asks for the concept itself"
            )
        return replace(self, vector=rest / left, detail={**self.detail, "left_beside_the_classes": left})


def concept_from_texts(prompts: Prompts, text: TextSide) -> Concept:
    """The mean of one pole's prompts minus the other's: templates × synonyms, both poles with equally many."""
    texts = [prompts.texts(pole.words) for pole in prompts.poles]
    first, second = (unit(np.asarray(text(some), dtype=np.float64)).mean(0) for some in texts)
    vector = first - second
    length = np.linalg.norm(vector)
    if length < 1e-6:
        raise InputError(f"both poles of {prompts.name!r} have the same prompts, as the text side sees them")
    poles = prompts.poles[0].name, prompts.poles[1].name
    detail = {"prompts": dict(zip(poles, texts, strict=True))}
    return Concept(prompts.name, poles, vector / length, "prompts", detail)


def concept_from_images(
    output: NDArray[np.floating],
    groups: NDArray[np.integer],
    labels: NDArray[np.integer],
    *,
    name: str,
    poles: tuple[str, str],
    method: str = "means",
    noun: str = "images",
) -> Concept:
    """A direction learned from outputs [n, d'] of images whose group is known: 1 for the first pole, 0 for the second.

    Groups are compared within each label, all counting the same. The method is "means" (difference of the means),
    "logistic" (a probe with a ridge), or "leace" (what linear erasure takes out: the difference, whitened).
    """
    x = np.asarray(output, dtype=np.float64)
    cells = group_cells(groups, labels, poles, least=1)
    difference, within = cells.weight @ x, cells.centred(x)
    detail: dict[str, Any] = {"n": len(x)}
    if method == "means":
        vector: Array = difference
    elif method == "leace":
        covariance, amount = shrunk(within.T @ within / len(x), len(x) - len(cells.counts))
        vector = np.asarray(np.linalg.solve(covariance, difference), dtype=np.float64)
        detail["shrinkage"] = amount
    elif method == "logistic":
        centred = within + np.where(groups == 1, 0.5, -0.5)[:, None] * difference
        weights, _ = fit_logistic(centred, groups.astype(np.int64), 2)
        vector = weights[1] - weights[0]
    else:
        raise InputError(f"method is {method!r}; expected 'means', 'logistic' or 'leace'")
    if len(x) <= x.shape[1] and method != "means":
        detail["few"] = f"{len(x)} {noun} for {x.shape[1]} dimensions: shrunk, and less sure than its figures look"
    length = np.linalg.norm(vector)
    if length == 0:
        raise InputError(f"the two groups ({', '.join(poles)}) have the same outputs, so there is no direction")
    return Concept(name, poles, vector / length, f"labelled {noun} ({method})", detail)
