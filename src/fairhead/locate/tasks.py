"""Tasks: classes as directions of the output representation, from a classifier, from prompts or from images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy import optimize
from scipy.special import logsumexp

from fairhead.errors import InputError
from fairhead.locate.texts import TextSide

if TYPE_CHECKING:
    from fairhead.locate.features import Features

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Task:
    """Classes as directions of the output representation: logits = output @ directions.T + bias.

    Attributes:
        classes: names.
        directions: [C, d'].
        bias: [C].
        origin: where they come from, in words.

    Example:
        >>> task = Task(("no", "yes"), np.eye(2), np.zeros(2), "made by hand")
        >>> task.logits(np.array([[0.2, 0.7]])).tolist(), task.evidence(1).tolist()
        ([[0.2, 0.7]], [-1.0, 1.0])
    """

    classes: tuple[str, ...]
    directions: NDArray[np.float64]
    bias: NDArray[np.float64]
    origin: str

    def logits(self, output: NDArray[np.floating]) -> NDArray[np.float64]:
        """Outputs [n, d'] to logits [n, C]."""
        return np.asarray(output, dtype=np.float64) @ self.directions.T + self.bias

    def calibrated(self, output: NDArray[np.floating], labels: NDArray[np.integer]) -> "Task":
        """The same directions, shifted so that each class is predicted as often as it occurs among these rows.

        Prompts say where a class lies and nothing about how far from the others: argmax may never choose one of them.

        Args:
            output: [n, d'], of rows that are not reported on.
            labels: their classes, [n].

        Example:
            >>> task = Task(("no", "yes"), np.array([[0.0], [1.0]]), np.zeros(2), "prompts")
            >>> output, labels = np.arange(2.0, 12.0)[:, None], np.repeat([0, 1], [7, 3])
            >>> task.logits(output).argmax(1).sum(), task.calibrated(output, labels).logits(output).argmax(1).sum()
            (np.int64(10), np.int64(3))
        """
        wanted = np.bincount(labels, minlength=len(self.classes)) / len(labels)
        logits = np.asarray(output, dtype=np.float64) @ self.directions.T + self.bias
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

    def evidence(self, positive: int) -> NDArray[np.float64]:
        """The direction of the evidence for one class: against the other, or against the mean of the others; [d']."""
        others = [c for c in range(len(self.classes)) if c != positive]
        return self.directions[positive] - self.directions[others].mean(0)

    def parts(self, features: "Features", positive: int) -> NDArray[np.float64]:
        """Each head's part in the evidence for one class, [n, L, H]."""
        return features.parts(self.evidence(positive)[None])[..., 0]

    def other_parts(self, features: "Features", positive: int) -> NDArray[np.float64]:
        """The other terms' parts in it, [n, M]."""
        return features.other_parts(self.evidence(positive)[None])[..., 0]

    def total(self, output: NDArray[np.floating], positive: int) -> NDArray[np.float64]:
        """The evidence itself, [n], up to a constant."""
        return np.asarray(output, dtype=np.float64) @ self.evidence(positive)

    def push(self, features: "Features", layer: int, moved: Array) -> NDArray[np.float64]:
        """The change of the logits [n, H, C] if each head's z [n, H, d] at a layer changed so, all else held."""
        through = np.einsum("co,hod->hcd", self.directions, features.maps[layer], optimize=True)
        return np.asarray(np.einsum("nhd,hcd->nhc", moved, through, optimize=True))


def evidence_of(logits: NDArray[np.floating], positive: int) -> NDArray[np.float64]:
    """Evidence for one class in logits [n, C]: against the other, or against the mean of the others; [n].

    Example:
        >>> evidence_of(np.array([[1.0, 4.0, 3.0]]), positive=1).tolist()
        [2.0]
    """
    return np.asarray(logits[:, positive] - np.delete(logits, positive, axis=1).mean(1), dtype=np.float64)


def task_from_texts(
    words: Mapping[str, Sequence[str]], templates: Sequence[str], text: TextSide, scale: float = 100.0
) -> Task:
    """Zero-shot classes: each the unit mean of its prompts, logits scaled as CLIP does.

    Example:
        >>> vectors = np.random.default_rng(0).normal(size=(100, 8))
        >>> some = lambda texts: vectors[[sum(map(ord, t)) % 100 for t in texts]]
        >>> task_from_texts({"nurse": ["nurse"], "doctor": ["doctor", "physician"]}, ["a {}"], some).classes
        ('nurse', 'doctor')
    """
    if len(words) < 2:
        raise InputError(f"a task needs at least two classes; found {', '.join(words) or 'none'}")
    directions = []
    for name, synonyms in words.items():
        texts = [template.format(word) for template in templates for word in synonyms]
        if not texts:
            raise InputError(f"the class {name!r} has no prompt")
        directions.append(unit(unit(np.asarray(text(texts), dtype=np.float64)).mean(0)))
    return Task(tuple(words), scale * np.stack(directions), np.zeros(len(words)), "zero-shot prompts")


def task_from_images(
    output: NDArray[np.floating], labels: NDArray[np.integer], classes: Sequence[str], ridge: float = 1.0
) -> Task:
    """Classes as a linear probe on outputs, for models that have neither a classifier nor a text side.

    Example:
        >>> labels = np.arange(90) % 3
        >>> output = np.eye(3)[labels] + 0.1 * np.random.default_rng(0).normal(size=(90, 3))
        >>> task = task_from_images(output, labels, ("a", "b", "c"))
        >>> bool((task.logits(output).argmax(1) == labels).all())
        True
    """
    weights, bias = fit_logistic(np.asarray(output, dtype=np.float64), labels, len(classes), ridge)
    return Task(tuple(classes), weights, bias, f"a linear probe fitted on {len(output)} images")


def fit_logistic(x: Array, labels: NDArray[np.integer], n_classes: int, ridge: float = 1.0) -> tuple[Array, Array]:
    """Multinomial logistic regression with a ridge on standardised columns: weights [C, d], bias [C]."""
    deviation = x.std(0)
    deviation[deviation == 0] = 1.0
    centre = x.mean(0)
    scaled = (x - centre) / deviation
    target = np.eye(n_classes)[labels]
    d = scaled.shape[1]

    def loss(flat: Array) -> tuple[float, Array]:
        w, b = flat[:-n_classes].reshape(n_classes, d), flat[-n_classes:]
        logits = scaled @ w.T + b
        logs = logits - logsumexp(logits, axis=1, keepdims=True)
        error = np.exp(logs) - target
        value = -(logs * target).sum() + ridge / 2 * (w**2).sum()
        return value, np.concatenate([(error.T @ scaled + ridge * w).ravel(), error.sum(0)])

    found = optimize.minimize(loss, np.zeros(n_classes * (d + 1)), jac=True, method="L-BFGS-B", tol=1e-9)
    w, b = found.x[:-n_classes].reshape(n_classes, d) / deviation, found.x[-n_classes:]
    return w, b - w @ centre


def unit(x: Array) -> Array:
    """Rows of length 1."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
