"""Methods that **use the sensitive attribute while training**: what could be reached with it, for comparison only.

They are fenced off: `fairhead.mitigate.run` refuses them, and each is marked `uses_groups`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fairhead.errors import InputError
from fairhead.mitigate.training_job import Job, Method, Trained, cell_numbers, run_job
from fairhead.train import TrainingPlan
from fairhead.train.fitting import Epoch, Selection, worst_of_cells
from fairhead.train.step import Examples


@dataclass(kw_only=True)
class JobWithAttributes(Job):
    """A job that also has the group of each row, numbered from 0, on the CPU."""

    groups_train: Tensor  # [rows of train]
    groups_validation: Tensor  # [rows of validation]


class Reference:
    """A method that trains with the groups: its `train` takes a `JobWithAttributes`."""

    uses_groups: ClassVar[bool] = True


def run_with_attributes(
    config: Method,
    build_model: Callable[[], nn.Module],
    train: Examples,
    validation: Examples,
    groups_train: Sequence[int] | Tensor,
    groups_validation: Sequence[int] | Tensor,
    plan: TrainingPlan | None = None,
    selection: Selection = "accuracy",
    on_epoch: Callable[[Epoch], None] | None = None,
    **more: Any,
) -> Trained:
    """Train with the group of each row in view, numbered from 0.

    Any method may be run so, to select its epoch by groups. All else is as in `run`; `selection` may be "worst_group":
    the lowest accuracy of a (class, group) cell of the validation set.
    """
    groups = [_groups(train, groups_train, "training"), _groups(validation, groups_validation, "validation")]
    if selection == "worst_group":
        selection = worst_of_cells(validation.labels, cell_numbers(validation.labels, groups[1]))
    more |= {"groups_train": groups[0], "groups_validation": groups[1]}
    plan = plan or TrainingPlan()
    return run_job(config, JobWithAttributes(build_model, train, validation, plan, selection, on_epoch, **more))


def _groups(examples: Examples, groups: Sequence[int] | Tensor, what: str) -> Tensor:
    numbers = torch.as_tensor(groups).cpu().long()
    if numbers.shape != (len(examples),) or (len(numbers) and numbers.min() < 0):
        raise InputError(
            f"the {what} groups have shape {list(numbers.shape)}; expected one number from 0 for each of the "
            f"{len(examples)} rows"
        )
    return numbers
