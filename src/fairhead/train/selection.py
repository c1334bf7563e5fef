"""Which epoch to keep, from labels and predictions on the validation set alone."""

from collections.abc import Callable

import torch
from torch import Tensor

from fairhead.errors import InputError, did_you_mean

# A name of SELECTIONS, or a function of the predicted classes [n] of the validation set: higher is better.
Selection = str | Callable[[Tensor], float]

SELECTIONS = ("accuracy", "worst_class")
# The last epoch, whatever its predictions: for first stages whose length is a setting of the method.
LAST_EPOCH = "last_epoch"


def accuracy(predicted: Tensor, labels: Tensor) -> float:
    """Share of predictions [n] that equal the labels [n]."""
    return (predicted == labels).double().mean().item()


def worst_accuracy(predicted: Tensor, labels: Tensor, cells: Tensor) -> float:
    """The lowest accuracy among the cells that rows fall in; cells nobody falls in do not count.

    Args:
        predicted: classes, [n].
        labels: classes, [n].
        cells: what to divide the rows by, [n]: the labels themselves, or (label, cluster) numbers.

    Example:
        >>> import torch
        >>> worst_accuracy(torch.tensor([1, 1, 1]), torch.tensor([1, 1, 0]), cells=torch.tensor([0, 5, 5]))
        0.5
    """
    _, cell = cells.unique(return_inverse=True)
    hits = torch.bincount(cell, weights=(predicted == labels).double())
    return (hits / torch.bincount(cell)).min().item()


def score_of(selection: Selection, predicted: Tensor, labels: Tensor) -> float:
    """What `selection` thinks of these predictions; higher is better."""
    if callable(selection):
        return float(selection(predicted))
    check_selection(selection)
    return accuracy(predicted, labels) if selection == "accuracy" else worst_accuracy(predicted, labels, labels)


def check_selection(selection: Selection) -> None:
    """Raise `InputError` for a name that is not known."""
    if not callable(selection) and selection not in (*SELECTIONS, LAST_EPOCH):
        raise InputError(
            f"cannot select by {selection!r}; expected {' or '.join(SELECTIONS)}.{did_you_mean(selection, SELECTIONS)} "
            "Both need labels only"
        )


def worst_of_cells(labels: Tensor, cells: Tensor) -> Selection:
    """Select by the lowest accuracy of a cell of the validation set; labels and cells are [n]."""
    labels, cells = labels.cpu(), cells.cpu()
    return lambda predicted: worst_accuracy(predicted, labels, cells)
