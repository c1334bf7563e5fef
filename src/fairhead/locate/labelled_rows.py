"""Labelled rows of a data set with the groups of a concept."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.data import Dataset, Images, parse_spec
from fairhead.errors import InputError
from fairhead.locate.gap_question import Evaluation
from fairhead.locate.prompts import COLUMNS, CONCEPTS, Pole, Prompts


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
    task: str | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    prompts: Prompts | None = None,
    held_out: bool = False,
    limit: int | None = None,
    seed: int = 0,
) -> LabelledRows:
    """Read labelled images or texts, with the groups of a concept.

    Args:
        spec: `name:path` of a data set.
        concept: the attribute, or the column that holds it.
        task: the target column; None for that of own data that is called label.
        options: of the reader.
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
    data = reader.read(path, **reader.named({"label": task, "groups": (column,)}), **(options or {}))
    assert isinstance(data, Dataset)
    task = task or str(data.provenance["label"])
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
