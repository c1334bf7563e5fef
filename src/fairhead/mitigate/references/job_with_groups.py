"""A job that has the groups, for the methods that may see them."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fairhead.errors import InputError
from fairhead.mitigate.training_job import Job


@dataclass(kw_only=True)
class JobWithAttributes(Job):
    """A job that also has the group of each row, numbered from 0, on the CPU.

    Attributes:
        groups_train: [rows of train].
        groups_validation: [rows of validation].
    """

    groups_train: Tensor
    groups_validation: Tensor


def with_attributes(job: Job, method: Any) -> JobWithAttributes:
    """The job, if it has groups.

    Raises:
        InputError: it has none.
    """
    if not isinstance(job, JobWithAttributes):
        raise InputError(f"{type(method).__name__} needs the groups: use fairhead.mitigate.references")
    return job
