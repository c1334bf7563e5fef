"""One training of one method: what it is given, the loop it runs through, and the count of all that it cost.

Also what the losses of several methods are made of: row losses, GroupDRO's loss, cells, and even draws of them.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import Sampler, WeightedRandomSampler

from fairhead.errors import InputError
from fairhead.models.attached import LinearHead
from fairhead.settings import check_config
from fairhead.train import TrainingPlan
from fairhead.train.fitting import Epoch, Fit, Selection, fit, fit_linear, predict
from fairhead.train.loop import gathered
from fairhead.train.step import Examples, Loss

# Metadata of a setting that came after results had been kept: those without it stay what they were, and are known by
# the settings that they had. Its default must do what the method did before.
ADDED_LATER = {"added_later": True}


class Stage(NamedTuple):
    """One part of a method's work: its name, wall time, and optimizer steps through the loop."""

    name: str
    seconds: float
    steps: int


@dataclass(frozen=True)
class Trained:
    """A method's result."""

    model: nn.Module  # in evaluation mode, with the weights of its best epoch
    fit: Fit  # the history of the training that made `model`
    stages: tuple[Stage, ...]  # everything that ran, earlier stages and second networks included
    method: Any  # the configuration
    notes: Mapping[str, Any] = field(default_factory=dict)  # what the method found on its way, JSON-ready

    @property
    def seconds(self) -> float:
        """Wall time of all stages."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def steps(self) -> int:
        """Optimizer steps of all stages."""
        return sum(stage.steps for stage in self.stages)


class AuxiliaryModel(NamedTuple):
    """A model beside the one that is trained, and the same rows made ready for it, in the same order."""

    build_model: Callable[[], nn.Module]  # gives it with a task head, to train
    features: Callable[[Examples], Tensor]  # gives [n, D] for examples, by the model as it was pretrained, frozen
    train: Examples
    validation: Examples
    like: Examples | None = None  # the deployment sample, where there is one


class Method(Protocol):
    """A frozen dataclass of a method's settings, which knows how to train with them."""

    def train(self, job: "Job") -> nn.Module:
        """Train through `job.fit` and return the model."""


@dataclass
class Job:
    """What `run` hands to a method: inputs and labels. There is no group in it."""

    build_model: Callable[[], nn.Module]  # gives a fresh model, the same one each time
    train: Examples
    validation: Examples
    plan: TrainingPlan  # how every stage trains, unless the method says otherwise
    selection: Selection = "accuracy"  # how the epoch is chosen, unless the method says otherwise
    on_epoch: Callable[[Epoch], None] | None = None  # called after each epoch of each stage
    stages: list[Stage] = field(default_factory=list)  # what has run so far
    last_fit: Fit | None = None  # the latest training
    auxiliary: Callable[[str], AuxiliaryModel] | None = None  # gives another model by name, such as a larger teacher
    pretrained: str | None = None  # what `build_model` begins with, by its name in `auxiliary`; None: fresh weights
    checkpoints: Path | None = None  # of each stage; a job that was killed goes on from what it finds there
    identity: Mapping[str, Any] = field(default_factory=dict)  # what checkpoints must agree with, beside plan and data
    like: Examples | None = None  # the deployment sample; None where the validation rows are all there is
    # Who or what the training and the validation rows are of (persons, documents), [n] each, numbered from 0; None
    # if every row is its own. Rows of one unit are never on both sides of a cross-fit.
    units: tuple[Tensor | None, Tensor | None] = (None, None)
    like_units: Tensor | None = None  # the same for the rows of `like`
    weights: Tensor | None = None  # of the training rows, [n]; `fit` draws in proportion, or weights where it solves
    offsets: Tensor | None = None  # added to the logits of the training rows while training, [n, C]
    stage_name: str | None = None  # of what `fit` counts, where a method calls it by another name
    notes: dict[str, Any] = field(default_factory=dict)  # what the method found on its way, JSON-ready

    def auxiliary_model(self, name: str) -> AuxiliaryModel:
        """Another model and the rows as it takes them."""
        if self.auxiliary is None:
            raise InputError(
                f"{name!r} names a model, and this training knows none by name: give run(..., auxiliary=...), or use "
                "fairhead mitigate or fairhead bench"
            )
        return self.auxiliary(name)

    def fit(
        self,
        stage: str,
        model: nn.Module,
        *,
        train: Examples | None = None,
        validation: Examples | None = None,
        plan: TrainingPlan | None = None,
        selection: Selection | None = None,
        loss: Loss | None = None,
        sampler: Sampler[int] | None = None,
    ) -> Fit:
        """Train through the loop and count it as a stage; what is not given is the job's.

        A linear head is solved for exactly, unless a loss, a sampler or a number of epochs asks for the loop.
        """
        stage, solved = self.stage_name or stage, plan is None and loss is None and sampler is None
        validation, plan = self.validation if validation is None else validation, plan or self.plan
        weights, offsets = (self.weights, self.offsets) if train is None else (None, None)
        train = self.train if train is None else train
        if solved and isinstance(model, LinearHead):
            done = fit_linear(model, train, validation, plan, weights, offsets)
        else:
            if weights is not None and sampler is None:
                sampler = WeightedRandomSampler(weights.tolist(), len(weights), generator=self.generator())
            if offsets is not None:
                assert loss is None, "a method with a loss of its own leaves no place for offsets"
                loss = Adjusted(offsets)
            done = fit(
                model,
                train,
                validation,
                plan,
                self.on_epoch,
                selection=self.selection if selection is None else selection,
                loss=loss,
                sampler=sampler,
                checkpoints=None if self.checkpoints is None else self.checkpoints / f"stage-{len(self.stages) + 1}",
                identity={**self.identity, "stage": stage},
            )
        self.stages.append(Stage(stage, done.seconds, done.steps))
        self.last_fit = done
        return done

    def train_fresh(self, stage: str, **how: Any) -> nn.Module:
        """A fresh model, trained as `fit` does."""
        model = self.build_model()
        self.fit(stage, model, **how)
        return model

    def group_dro(
        self,
        stage: str,
        cells: Tensor,  # of the training rows, numbered from 0, [n]
        step_size: float = 0.01,  # and `adjustment`: of `GroupLoss`
        adjustment: float = 0.0,
        balance: bool = True,  # draw every cell equally often
        selection: Selection | None = None,
    ) -> nn.Module:
        """A fresh model, trained by GroupDRO over cells that a method has found, or (in `references`) was given."""
        sampler, loss = balanced(cells, self.generator()) if balance else None, GroupLoss(cells, step_size, adjustment)
        return self.train_fresh(stage, loss=loss, sampler=sampler, selection=selection)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Count work outside the loop (predictions, clusters, a last layer) as a stage."""
        started = time.perf_counter()
        yield
        self.stages.append(Stage(stage, time.perf_counter() - started, 0))

    def predict(self, model: nn.Module, examples: Examples) -> Tensor:
        """Class probabilities in the plan's precision, [n, C] on the CPU."""
        return predict(model, examples, precision=self.plan.precision)

    def generator(self) -> torch.Generator:
        """A source of chance that depends on the plan's seed alone."""
        return torch.Generator().manual_seed(self.plan.seed)


@dataclass(frozen=True)
class ERM:
    """Minimise the model's own loss, averaged over rows (empirical risk minimisation): plain training."""

    def train(self, job: Job) -> nn.Module:
        """One stage: the loop as it is."""
        return job.train_fresh("training")


def run(
    config: Method,
    build_model: Callable[[], nn.Module],
    train: Examples,
    validation: Examples,
    plan: TrainingPlan | None = None,
    selection: Selection = "accuracy",
    on_epoch: Callable[[Epoch], None] | None = None,
    **more: Any,
) -> Trained:
    """Train with one method.

    Args:
        config: the method's settings, from `method(...)` or the class itself.
        build_model: gives a fresh, seeded model, the same one each time: some methods train two.
        train: inputs and labels, no groups.
        validation: inputs and labels to choose the epoch by.
        plan: how to train.
        selection: "accuracy" or "worst_class"; the first best epoch is kept.
        on_epoch: called after each epoch of each stage.
        more: attributes of `Job`: `checkpoints` to go on after a kill, `auxiliary` models by name, ...

    Example:
        >>> import torch
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> from fairhead.mitigate import method, run
        >>> from fairhead.train.step import Examples
        >>> from fairhead.train import TrainingPlan
        >>> shape = dict(image_size=4, patch_size=2, num_channels=1, hidden_size=8, intermediate_size=8)
        >>> def build_model():
        ...     torch.manual_seed(0)
        ...     return ViTForImageClassification(ViTConfig(num_hidden_layers=1, num_attention_heads=2, **shape))
        >>> data = Examples({"pixel_values": torch.randn(8, 1, 4, 4)}, torch.arange(8) % 2)
        >>> trained = run(method("dam"), build_model, data, data, TrainingPlan(epochs=2, batch_size=4))
        >>> [(stage.name, stage.steps) for stage in trained.stages]
        [('training', 4)]
    """
    if getattr(config, "uses_groups", False):
        raise InputError(
            f"{type(config).__name__} uses the sensitive attribute, and `run` trains without one: "
            "use fairhead.mitigate.references.run_with_attributes, and say so where the result is shown"
        )
    return run_job(config, Job(build_model, train, validation, plan or TrainingPlan(), selection, on_epoch, **more))


def run_job(config: Method, job: Job) -> Trained:
    """Train, and return the result."""
    if not hasattr(config, "train"):
        raise InputError(f"{type(config).__name__} trains no classifier: see fairhead.mitigate.LanguageTrainer")
    check_config(config)
    settings = {f.name: getattr(config, f.name) for f in fields(cast(Any, config)) if f.compare}
    job.identity = {"method": type(config).__name__, "settings": settings, **job.identity}
    model = config.train(job)
    assert job.last_fit is not None, f"{type(config).__name__} trained nothing through the loop"
    return Trained(model.eval(), job.last_fit, tuple(job.stages), config, job.notes)


def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each row, [B], in 32 bits; logits [B, C], labels [B].

    Example:
        >>> row_losses(torch.zeros(1, 4), torch.tensor([2])).exp().item()
        4.0
    """
    return cross_entropy(logits.float(), labels, reduction="none")


class GroupLoss:
    """GroupDRO's loss (Sagawa et al., 2020): Σ q_g L_g, where q_g grows exponentially with the loss of its group.

    The groups are those that a method has found, or (in `references`) was given.
    """

    def __init__(self, groups: Tensor, step_size: float = 0.01, adjustment: float = 0.0) -> None:
        """Start with equal q for the groups of the training rows, numbered from 0, [n].

        `step_size` is how fast q follows the losses (η); `adjustment` is C of the generalisation adjustment C / √n_g,
        added to a group's loss when q is updated.
        """
        sizes = torch.bincount(groups)
        self.groups, self.step_size, self.adjustment = groups, step_size, adjustment / sizes.clamp(min=1).sqrt()
        self.q = (sizes > 0).float() / (sizes > 0).sum()

    def __call__(self, output: Any, labels: Tensor, rows: Tensor) -> Tensor:
        """The loss of a batch; q moves with it."""
        losses, group = gathered(row_losses(output.logits, labels)), gathered(self.groups[rows])
        counts = torch.zeros_like(self.q).index_add(0, group, torch.ones_like(losses))
        means = torch.zeros_like(self.q).index_add(0, group, losses) / counts.clamp(min=1)
        with torch.no_grad():
            here = counts > 0  # groups that the batch lacks keep their weight
            # In place: a step that is recorded and replayed knows this tensor and no other.
            self.q.mul_(torch.where(here, (self.step_size * (means + self.adjustment)).exp(), 1.0))
            self.q.div_(self.q.sum())
        return (self.q * means).sum()


class Adjusted:
    """Cross-entropy of f + offset, where each training row has offsets of its own: what they say, f need not learn."""

    def __init__(self, offsets: Tensor) -> None:
        """`offsets` [n, C]."""
        self.offsets = offsets

    def __call__(self, output: Any, labels: Tensor, rows: Tensor) -> Tensor:
        """The loss of a batch."""
        unseen = output.logits.shape[-1] - self.offsets.shape[-1]  # the last classes may have no training row
        return row_losses(output.logits.float() + pad(self.offsets[rows], (0, unseen)), labels).mean()


def balanced(cells: Tensor, generator: torch.Generator, power: float = 1.0) -> WeightedRandomSampler:
    """Draw as many rows as there are, equally often from every cell [n], or in proportion to size^(1 − power)."""
    sizes = torch.bincount(cells.cpu()).double()
    chances = sizes[cells.cpu()].pow(-power)
    return WeightedRandomSampler(chances.tolist(), len(cells), generator=generator)


def cell_numbers(labels: Tensor, parts: Tensor) -> Tensor:
    """One number for each (class, part) pair that occurs, from 0 and without holes, [n] on the CPU."""
    labels, parts = labels.cpu().long(), parts.cpu().long()
    return (labels * (parts.max() + 1) + parts).unique(return_inverse=True)[1]
