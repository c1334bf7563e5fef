"""Methods that **use the sensitive attribute while training**: what could be reached with it, for comparison only.

They are fenced off: `fairhead.mitigate.run` refuses them, and each is marked `uses_groups`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairhead.errors import InputError
from fairhead.mitigate.losses import cell_numbers
from fairhead.mitigate.references.dfr import DFR as DFR
from fairhead.mitigate.references.dsa import DSA as DSA
from fairhead.mitigate.references.fscl import FSCL as FSCL
from fairhead.mitigate.references.group_dro import GroupDRO as GroupDRO
from fairhead.mitigate.references.job_with_groups import JobWithAttributes as JobWithAttributes
from fairhead.mitigate.references.tadet import TADeT as TADeT
from fairhead.mitigate.training_job import Method, Trained, run_job
from fairhead.train import Epoch, Examples, Selection, TrainingPlan
from fairhead.train.selection import worst_of_cells


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
    """Train with the attribute in view. Any method may be run so, to select its epoch by groups.

    Args:
        config: the settings of a reference, or of a method without attributes.
        build_model: as in `run`.
        train: as in `run`.
        validation: as in `run`.
        groups_train: the group of each training row, numbered from 0, [n].
        groups_validation: the same for the validation rows.
        plan: as in `run`.
        selection: as in `run`, or "worst_group": the lowest accuracy of a (class, group) cell of the validation set.
        on_epoch: as in `run`.
        more: as in `run`.
    """
    groups = [_groups(train, groups_train, "training"), _groups(validation, groups_validation, "validation")]
    if selection == "worst_group":
        selection = worst_of_cells(validation.labels, cell_numbers(validation.labels, groups[1]))
    job = JobWithAttributes(
        build_model,
        train,
        validation,
        plan or TrainingPlan(),
        selection,
        on_epoch,
        **more,
        groups_train=groups[0],
        groups_validation=groups[1],
    )
    return run_job(config, job)


def _groups(examples: Examples, groups: Sequence[int] | Tensor, what: str) -> Tensor:
    numbers = torch.as_tensor(groups).cpu().long()
    if numbers.shape != (len(examples),) or (len(numbers) and numbers.min() < 0):
        raise InputError(
            f"the {what} groups have shape {list(numbers.shape)}; expected one number from 0 for each of the "
            f"{len(examples)} rows"
        )
    return numbers
