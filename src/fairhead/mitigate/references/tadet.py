"""TADeT, targeted alignment of the first token's queries (Sudhakar et al., 2023). It uses the attribute."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fairhead.heads import Tap
from fairhead.mitigate.last_layer import find_head
from fairhead.mitigate.losses import gathered, row_losses
from fairhead.mitigate.priors import LogUniform, Prior
from fairhead.mitigate.references import with_attributes
from fairhead.mitigate.training_job import Job
from fairhead.settings import NotNegative


@dataclass(frozen=True)
class TADeT:
    """Cross-entropy, an adversary that reads the group off the last features, and even queries within each class.

    The second term is ‖mean q(s) − mean q‖² of the first token's queries in one layer, over the groups s of each class
    (for two groups of equal size a quarter of the published ‖mean q(s=0) − mean q(s=1)‖²).

    Attributes:
        layer: whose queries are aligned.
        adversary: weight of the adversary's cross-entropy.
        alignment: weight of the query term.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("tadet").layer
        -1
    """

    uses_groups: ClassVar[bool] = True

    layer: int = -1
    adversary: NotNegative = 1.0
    alignment: NotNegative = 1.0

    priors: ClassVar[Mapping[str, Prior]] = {"adversary": LogUniform(-1, 1), "alignment": LogUniform(-1, 1)}

    def train(self, job: Job) -> nn.Module:
        """One stage."""
        job = with_attributes(job, self)
        model = job.build_model()
        head = find_head(model, job.train)
        n_groups = int(job.groups_train.max()) + 1
        steps = job.plan.epochs * (len(job.train) // job.plan.batch_size)
        with Tap(model, layers=self.layer) as tap:
            watched = _Watched(model, head, tap, n_groups, self.adversary, steps)
            try:
                job.fit("training", watched, loss=_Loss(self, job.groups_train))
            finally:
                watched.handle.remove()
        return model


class _Output(NamedTuple):
    """A tuple: parallel training takes outputs apart and puts them together, and loses what was added to others."""

    logits: Tensor
    guesses: Tensor  # of the group, by the adversary
    queries: Tensor


class _Watched(nn.Module):
    """A model with an adversary on what goes into its head, and its first token's queries in view."""

    def __init__(
        self, model: nn.Module, head: nn.Linear, tap: Tap, n_groups: int, adversary_weight: float, steps: int
    ) -> None:
        super().__init__()
        self.model = model
        self.adversary_weight, self.steps = adversary_weight, steps
        self.step: Tensor
        self.register_buffer("step", torch.zeros(()))  # a tensor: a recorded and replayed step must count as well
        width = head.in_features
        self.adversary = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, n_groups))
        self.queries = tap.read("q", tokens=0)
        self.seen: list[Tensor] = []
        self.handle = head.register_forward_pre_hook(lambda module, args: self.seen.append(args[0]))

    def forward(self, **inputs: Any) -> _Output:
        logits = self.model(**inputs).logits
        features, queries = self.seen[-1], self.queries[self.queries.layers[0]]
        self.seen.clear()
        self.queries.clear()
        # The adversary's say grows from 0 to 1 over the run, as in the reference.
        strength = 2 / (1 + (-10 * self.step / max(1, self.steps)).exp()) - 1
        if self.training:
            self.step += 1
        read = reversed_gradient(features, self.adversary_weight * strength)
        return _Output(logits, self.adversary(read.float()), queries)


class _Loss:
    def __init__(self, config: TADeT, groups: Tensor) -> None:
        self.config, self.groups = config, groups

    def __call__(self, output: _Output, labels: Tensor, rows: Tensor) -> Tensor:
        self.groups = self.groups.to(rows.device)
        groups, queries = self.groups[rows], output.queries.flatten(1).float()
        return (
            row_losses(output.logits, labels).mean()
            + row_losses(output.guesses, groups).mean()
            + self.config.alignment * query_gap(*(gathered(part) for part in (queries, labels, groups)))
        )


def reversed_gradient(x: Tensor, strength: Tensor | float) -> Tensor:
    """Return x, but gradients come back times −strength: what follows learns, what came before unlearns."""
    return x.detach() + strength * (x.detach() - x)


def query_gap(queries: Tensor, labels: Tensor, groups: Tensor) -> Tensor:
    """Mean over the (class, group) cells of a batch of ‖cell mean − class mean‖²; queries [B, D].

    Example:
        >>> import torch
        >>> q = torch.tensor([[0.0], [2.0], [5.0]])
        >>> query_gap(q, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])).item()   # 1, 1 and 0
        0.6666666865348816
    """
    same_class = (labels[:, None] == labels).float()
    same_cell = same_class * (groups[:, None] == groups).float()
    cell_mean = same_cell @ queries / same_cell.sum(1, keepdim=True)
    class_mean = same_class @ queries / same_class.sum(1, keepdim=True)
    gap = (cell_mean - class_mean).square().sum(1)
    return (gap / same_cell.sum(1)).sum() / (1 / same_cell.sum(1)).sum()
