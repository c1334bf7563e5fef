"""Concept directions: where in the output representation a model keeps an attribute such as perceived gender.

From prompts (zero-shot) where there is a text side, or from labelled images where there is none. A direction is a unit
vector [d'] that points from the second pole to the first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.locate.moments import shrunk
from fairhead.locate.prompts import Prompts
from fairhead.locate.tasks import Task, fit_logistic, unit
from fairhead.locate.texts import TextSide

Array = NDArray[np.float64]
Method = Literal["means", "logistic", "leace"]


@dataclass(frozen=True)
class Concept:
    """A direction with its name.

    Attributes:
        name: "gender", ...
        poles: the two ends, the one it points to first.
        vector: unit length, [d'].
        origin: how it was made, in words.
        detail: what else is worth knowing: prompts, shrinkage, what was taken out.

    Example:
        >>> concept = Concept("shade", ("light", "dark"), np.array([0.6, 0.8, 0.0]), "made by hand")
        >>> task = Task(("no", "yes"), np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]), np.zeros(2), "made by hand")
        >>> concept.orthogonal_to(task).vector.tolist()
        [0.0, 1.0, 0.0]
    """

    name: str
    poles: tuple[str, str]
    vector: Array
    origin: str
    detail: Mapping[str, Any] = field(default_factory=dict)

    def orthogonal_to(self, task: Task) -> "Concept":
        """The part of the direction that no class of the task shares: that says the attribute and nothing else.

        Raises:
            InputError: nothing is left, as when the classes are the concept itself.
        """
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
    """The mean of one pole's prompts minus the other's: templates × synonyms, both poles with equally many.

    Example:
        >>> from fairhead.locate.prompts import CONCEPTS
        >>> vectors = np.random.default_rng(0).normal(size=(100, 8))
        >>> some = lambda texts: vectors[[sum(map(ord, t)) % 100 for t in texts]]
        >>> concept = concept_from_texts(CONCEPTS["gender"], some)
        >>> concept.poles, concept.vector.shape
        (('female', 'male'), (8,))
    """
    ends = []
    for pole in prompts.poles:
        ends.append(unit(np.asarray(text(prompts.texts(pole)), dtype=np.float64)).mean(0))
    vector = ends[0] - ends[1]
    length = np.linalg.norm(vector)
    if length < 1e-6:
        raise InputError(f"both poles of {prompts.name!r} have the same prompts, as the text side sees them")
    first, second = prompts.poles
    detail = {"prompts": {pole.name: list(prompts.texts(pole)) for pole in prompts.poles}}
    return Concept(prompts.name, (first.name, second.name), vector / length, "prompts", detail)


def concept_from_images(
    output: NDArray[np.floating],
    groups: NDArray[np.integer],
    labels: NDArray[np.integer],
    *,
    name: str,
    poles: tuple[str, str],
    method: Method = "means",
) -> Concept:
    """A direction learned from the outputs of images whose group is known.

    Args:
        output: [n, d'].
        groups: 1 for the first pole and 0 for the second, [n].
        labels: class numbers, [n]; the groups are compared within each, all counting the same.
        name: of the concept.
        poles: the one that group 1 is, first.
        method: "means" (difference of the means), "logistic" (a probe with a ridge), or "leace" (the direction that
            linear erasure takes out: the difference, whitened).

    Example:
        >>> rng = np.random.default_rng(0)
        >>> groups = np.arange(200) % 2
        >>> output = rng.normal(size=(200, 5)) + 2 * groups[:, None] * np.eye(5)[3]
        >>> found = concept_from_images(output, groups, np.zeros(200, int), name="shade", poles=("light", "dark"))
        >>> int(np.argmax(np.abs(found.vector)))
        3
    """
    x = np.asarray(output, dtype=np.float64)
    difference, within, n_cells = _within(x, groups, labels, poles)
    detail: dict[str, Any] = {"n": len(x)}
    if method == "means":
        vector: Array = difference
    elif method == "leace":
        covariance, amount = shrunk(within.T @ within / len(x), len(x) - n_cells)
        vector = np.asarray(np.linalg.solve(covariance, difference), dtype=np.float64)
        detail["shrinkage"] = amount
    elif method == "logistic":
        centred = within + np.where(groups == 1, 0.5, -0.5)[:, None] * difference
        weights, _ = fit_logistic(centred, groups.astype(np.int64), 2)
        vector = weights[1] - weights[0]
    else:
        raise InputError(f"method is {method!r}; expected 'means', 'logistic' or 'leace'")
    if len(x) <= x.shape[1] and method != "means":
        detail["few"] = f"{len(x)} images for {x.shape[1]} dimensions: shrunk, and less sure than its figures look"
    length = np.linalg.norm(vector)
    if length == 0:
        raise InputError(f"the two groups ({', '.join(poles)}) have the same outputs, so there is no direction")
    return Concept(name, poles, vector / length, f"labelled images ({method})", detail)


def _within(
    x: Array, groups: NDArray[np.integer], labels: NDArray[np.integer], poles: tuple[str, str]
) -> tuple[Array, Array, int]:
    """Mean difference of the groups given the label [d'], rows less their cell's mean [n, d'], cells."""
    levels = np.unique(labels)
    within = np.empty_like(x)
    differences = []
    for label in levels:
        means = []
        for group in (1, 0):
            rows = (labels == label) & (groups == group)
            if not rows.any():
                raise InputError(
                    f"no image of {poles[1 - group]} has label {label}; both groups are needed within every label"
                )
            means.append(x[rows].mean(0))
            within[rows] = x[rows] - means[-1]
        differences.append(means[0] - means[1])
    return np.mean(differences, axis=0), within, 2 * len(levels)
