"""XRM: twin networks that learn from each other's held-out mistakes find environments (Pezeshki et al., 2024)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fairhead.mitigate.losses import GroupLoss, balanced, cell_numbers, gathered, row_losses
from fairhead.mitigate.priors import LogUniform, Prior
from fairhead.mitigate.training_job import Job
from fairhead.mitigate.two_networks import Pair, PairOutput, fresh_pair
from fairhead.settings import Count, NotNegative
from fairhead.train import Examples
from fairhead.train.fitting import LAST_EPOCH, worst_of_cells


@dataclass(frozen=True)
class XRM:
    """Cross-risk minimisation: environments for training *and* validation rows, then GroupDRO over them.

    Attributes:
        twin_epochs: of the twins; None for as many as the plan has.
        step_size: of GroupDRO over (class, environment).
        balance: draw every (class, environment) equally often.
        select_by_environments: keep the epoch with the best worst (class, environment) accuracy on the validation set,
            as the paper does, instead of the run's own rule. No attribute is involved either way.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("xrm").select_by_environments
        True
    """

    twin_epochs: Count | None = None
    step_size: NotNegative = 0.01
    balance: bool = True
    select_by_environments: bool = True

    priors: ClassVar[Mapping[str, Prior]] = {"step_size": LogUniform(-3, -1)}

    def train(self, job: Job) -> nn.Module:
        """Two stages, with the environments between them."""
        twins = fresh_pair(job)
        plan = replace(job.plan, epochs=self.twin_epochs or job.plan.epochs)
        job.fit("twins", twins, plan=plan, loss=TwinLoss(job.train.labels, job.generator()), selection=LAST_EPOCH)
        with job.timed("environments"):
            cells, validation_cells = (
                cell_numbers(examples.labels, _mistaken(job, twins, examples))
                for examples in (job.train, job.validation)
            )
        del twins
        model = job.build_model()
        own = worst_of_cells(job.validation.labels, validation_cells)
        job.fit(
            "group DRO over environments",
            model,
            loss=GroupLoss(cells, self.step_size),
            sampler=balanced(cells, job.generator()) if self.balance else None,
            selection=own if self.select_by_environments else None,
        )
        return model


def _mistaken(job: Job, twins: Pair, examples: Examples) -> Tensor:
    """Where either twin is wrong about the label, [n]."""
    labels = examples.labels.cpu()
    wrong = [job.predict(twin, examples).argmax(-1) != labels for twin in (twins.first, twins.second)]
    return (wrong[0] | wrong[1]).long()


class TwinLoss:
    """Each twin learns its half of the rows; a row's label may turn into what the other, held out, thinks it is.

    Attributes:
        first_half: whether a training row belongs to the first twin, [n].
        labels: the labels as they stand by now, [n].
    """

    def __init__(self, labels: Tensor, generator: torch.Generator) -> None:
        self.labels = labels.clone()
        self.first_half = torch.rand(len(labels), generator=generator) < 0.5

    def __call__(self, output: PairOutput, labels: Tensor, rows: Tensor) -> Tensor:
        """The loss of a batch; some of its labels turn."""
        assert output.second is not None
        self.labels, self.first_half = self.labels.to(rows.device), self.first_half.to(rows.device)
        rows = gathered(
            rows
        )  # labels that turn must have turned in all processes, as classes count in all of the batch
        in_first, now = self.first_half[rows], self.labels[rows]
        both = torch.stack([gathered(logits.float()) for logits in (output.second, output.logits)])
        classes = both.shape[-1]
        learning = torch.where(in_first[:, None], both[1], both[0])
        with torch.no_grad():
            held_out = torch.where(in_first[:, None], both[0], both[1]).softmax(-1).max(-1)
            chance = (held_out.values - 1 / classes) * classes / (classes - 1)
            draws = gathered(torch.rand(len(rows), device=rows.device))[: len(rows)]  # those of the first process
            flip = draws < chance
            self.labels[rows] = torch.where(flip, held_out.indices, now)
        # Classes count alike within each half of the batch.
        cell = 2 * now + in_first
        sizes = torch.zeros(2 * classes, device=rows.device).index_add(0, cell, torch.ones_like(chance))
        weight = 1 / (sizes[cell] * (sizes > 0).sum())
        return 2 * (weight * row_losses(learning, now)).sum()
