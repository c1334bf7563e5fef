"""Methods that train a second network beside the first: learning from failure, an adversary, twins.

The loop sees both as one model: separate networks, or two heads of one encoder.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fairhead.errors import InputError
from fairhead.mitigate.last_layer import find_head
from fairhead.mitigate.losses import cell_numbers, row_losses
from fairhead.mitigate.priors import Choice, LogUniform, Prior, Uniform
from fairhead.mitigate.training_job import ADDED_LATER, Job
from fairhead.settings import Count, NotNegative, PositiveShare, Share, WholeNumber
from fairhead.train import Examples
from fairhead.train.examples import check_inputs
from fairhead.train.fitting import LAST_EPOCH, worst_of_cells
from fairhead.train.launched import gathered


class PairOutput(NamedTuple):
    """Logits of the first network, [B, C], and (while training) what the second gives.

    A tuple: parallel training takes outputs apart and puts them together, and loses what was added to others.
    """

    logits: Tensor
    second: Any


class Pair(nn.Module):
    """The first network is the one that predicts; the second runs while training only."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, **inputs: Any) -> PairOutput:
        """Run both on the same inputs."""
        second = self.second(**inputs).logits if self.training else None
        return PairOutput(self.first(**inputs).logits, second)


def fresh_pair(job: Job, build_second: Callable[[], nn.Module] | None = None) -> Pair:
    """Two new networks that share nothing; the second is built like the first unless `build_second` says how."""
    pair = Pair(job.build_model(), (build_second or job.build_model)())
    check_inputs(pair.first, job.train)  # the pair takes anything: what the networks take must be asked of them
    shared = {id(p) for p in pair.first.parameters()} & {id(p) for p in pair.second.parameters()}
    assert not shared, "build_model must give a fresh model each time"
    return pair


class TwoHeads(nn.Module):
    """A classifier, and beside its head a second part that reads what the head reads, while training only."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.seen: list[Tensor] = []

    def forward(self, **inputs: Any) -> PairOutput:
        """Run the encoder once, and both heads."""
        logits = self.first(**inputs).logits
        second = self.second(self.seen.pop().float()) if self.training else None
        self.seen.clear()
        return PairOutput(logits, second)


@contextmanager
def second_head(job: Job, build: Callable[[nn.Linear], nn.Module]) -> Iterator[TwoHeads]:
    """A new network with a second head, which `build` makes from the first; it is gone from `first` at the end."""
    model = job.build_model()
    check_inputs(model, job.train)
    head = find_head(model, job.train)
    both = TwoHeads(model, build(head))
    handle = head.register_forward_pre_hook(lambda module, args: both.seen.append(args[0]))
    try:
        yield both
    finally:
        handle.remove()


@dataclass(frozen=True)
class LfF:
    """Learning from failure (Nam et al., 2020): what a network that clings to easy rows finds hard counts more.

    The two networks share nothing unless `shared` says so.

    The biased network is meant to learn the easy rows alone. Where it learns nearly all by heart (few rows, many
    epochs), their weights vanish, and the predicting network may learn the reverse of the task: mind its accuracy.

    Attributes:
        q: of the generalised cross-entropy that makes the second network cling to what it has learnt first.
        memory: share of the past in the running loss of each row (α).
        shared: one encoder with two heads instead of two networks, as DAM's authors ran it: another method, since what
            the biased head learns is then in the features that the predicting head reads.
    """

    q: PositiveShare = 0.7
    memory: Share = 0.7
    shared: bool = field(default=False, metadata=ADDED_LATER)

    priors: ClassVar[Mapping[str, Prior]] = {"q": Uniform(0.05, 0.95)}

    def train(self, job: Job) -> nn.Module:
        """One stage with both networks."""
        alike = second_head(job, copy.deepcopy) if self.shared else nullcontext(fresh_pair(job))
        with alike as pair:
            job.fit("training beside a biased network", pair, loss=FailureLoss(job.train.labels, self.q, self.memory))
        return pair.first


class FailureLoss:
    """The sum of both networks' losses. Running losses are kept for every row of the training set, on the device."""

    def __init__(self, labels: Tensor, q: float = 0.7, memory: float = 0.7) -> None:
        """`labels` of the training set, [n]."""
        self.q, self.memory = q, memory
        self.labels = labels
        self.running = torch.full((2, len(labels)), torch.nan)  # of the predicting and of the biased network

    def __call__(self, output: PairOutput, labels: Tensor, rows: Tensor) -> Tensor:
        """The loss of a batch; the running losses of its rows move with it."""
        assert output.second is not None
        self.labels, self.running = self.labels.to(rows.device), self.running.to(rows.device)
        own_losses, biased_losses = (row_losses(logits, labels) for logits in (output.logits, output.second))
        # Rows come to another process in the next epoch, and their running losses must be there.
        losses = torch.stack([gathered(own_losses), gathered(biased_losses)])  # [2, B]
        labels, rows = gathered(labels), gathered(rows)
        with torch.no_grad():
            before = self.running[:, rows]
            # The first visit has no past.
            now = torch.where(before.isnan(), losses, self.memory * before + (1 - self.memory) * losses)
            self.running[:, rows] = now
            own, biased = now / self._class_highest(output.logits.shape[-1])[:, labels].clamp(min=1e-12)
            weight = biased / (biased + own + 1e-8)
            p_label = (-losses[1]).exp()
        return (weight * losses[0]).mean() + (self.q * p_label**self.q * losses[1]).mean()

    def _class_highest(self, classes: int) -> Tensor:
        """The highest running loss within each class, [2, C]."""
        start = self.running.new_zeros(2, classes)
        return start.scatter_reduce(1, self.labels.expand(2, -1), self.running.nan_to_num(0.0), "amax")


@dataclass(frozen=True)
class ARL:
    """Adversarially reweighted learning (Lahoti et al., 2020): the second network puts weight where the first errs.

    The adversary's score of a row is its output for the row's own class, so it sees inputs and label.

    Attributes:
        pretrain: steps with equal weights before the adversary has a say.
        adversary_loss: what the adversary raises: "plain" losses, or losses already "weighted" (the DAM release).
        uses_label: whether the adversary knows the label; otherwise the output for class 0 is its score.
        adversary: the name of another model, usually a smaller one that takes the same inputs, such as "vit-6x8" (the
            DAM paper's); by default the adversary is built like the learner.
    """

    pretrain: WholeNumber = 250
    adversary_loss: Literal["plain", "weighted"] = "plain"
    uses_label: bool = True
    adversary: str | None = field(default=None, metadata=ADDED_LATER)

    priors: ClassVar[Mapping[str, Prior]] = {"pretrain": Choice((0, 50, 250, 1000))}

    def train(self, job: Job) -> nn.Module:
        """One stage with both networks."""
        pair = fresh_pair(job, None if self.adversary is None else self._smaller(job, self.adversary))
        job.fit("training with an adversary", pair, loss=_AdversarialLoss(self))
        return pair.first

    def _smaller(self, job: Job, name: str) -> Callable[[], nn.Module]:
        other = job.auxiliary_model(name)
        theirs, ours = other.train.inputs, job.train.inputs
        # By what is in them: tokens of another vocabulary have the same shape.
        if theirs.keys() != ours.keys() or not all(torch.equal(theirs[key], ours[key]) for key in ours):
            shapes = [{key: list(x.shape[1:]) for key, x in part.items()} for part in (theirs, ours)]
            raise InputError(
                f"ARL's adversary {name!r} takes {shapes[0]} and the learner {shapes[1]}, not the same rows: both must "
                "read the same inputs, so train all of the learner, and give an adversary for pictures of its size or "
                "with its tokenizer"
            )
        return other.build_model


class _AdversarialLoss:
    def __init__(self, config: ARL) -> None:
        self.config = config
        self.steps = torch.zeros(())  # a tensor: a step that is recorded and replayed must count as well

    def __call__(self, output: PairOutput, labels: Tensor, rows: Tensor) -> Tensor:
        losses = gathered(row_losses(output.logits, labels))
        assert output.second is not None
        asked = labels if self.config.uses_label else torch.zeros_like(labels)
        weights = adversarial_weights(gathered(output.second.float().gather(1, asked[:, None])[:, 0]))
        self.steps = self.steps.to(rows.device)
        self.steps += 1
        weights = torch.where(self.steps <= self.config.pretrain, torch.ones_like(weights), weights)
        learner = (weights.detach() * losses).mean()
        fixed = losses.detach() if self.config.adversary_loss == "plain" else (weights * losses).detach()
        adversary = (weights * fixed).mean()
        # Goes down for the learner and up for the adversary; what is shown is the learner's loss.
        return learner + (adversary.detach() - adversary)


def adversarial_weights(scores: Tensor) -> Tensor:
    """1 + σ(score) over its mean, [B]: every row counts, those with high scores more.

    Example:
        >>> adversarial_weights(torch.zeros(3)).tolist()
        [2.0, 2.0, 2.0]
    """
    chance = scores.sigmoid()
    return 1 + chance / chance.mean().clamp(min=1e-4)


@dataclass(frozen=True)
class XRM:
    """Cross-risk minimisation (Pezeshki et al., 2024): twins that learn from each other's held-out mistakes.

    These give environments for training *and* validation rows; GroupDRO over them follows.

    Attributes:
        twin_epochs: of the twins; None for as many as the plan has.
        step_size: of GroupDRO over (class, environment).
        balance: draw every (class, environment) equally often.
        select_by_environments: keep the epoch with the best worst (class, environment) accuracy on the validation set,
            as the paper does, instead of the run's own rule. No attribute is involved either way.
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
        own = worst_of_cells(job.validation.labels, validation_cells) if self.select_by_environments else None
        return job.group_dro("group DRO over environments", cells, self.step_size, balance=self.balance, selection=own)


def _mistaken(job: Job, twins: Pair, examples: Examples) -> Tensor:
    """Where either twin is wrong about the label, [n]."""
    labels = examples.labels.cpu()
    wrong = [job.predict(twin, examples).argmax(-1) != labels for twin in (twins.first, twins.second)]
    return (wrong[0] | wrong[1]).long()


class TwinLoss:
    """Each twin learns its half of the rows; a row's label may turn into what the other, held out, thinks it is."""

    def __init__(self, labels: Tensor, generator: torch.Generator) -> None:
        self.labels = labels.clone()  # as they stand by now, [n]
        self.first_half = torch.rand(len(labels), generator=generator) < 0.5  # rows of the first twin, [n]

    def __call__(self, output: PairOutput, labels: Tensor, rows: Tensor) -> Tensor:
        """The loss of a batch; some of its labels turn."""
        assert output.second is not None
        self.labels, self.first_half = self.labels.to(rows.device), self.first_half.to(rows.device)
        rows = gathered(rows)  # labels must turn in all processes, as classes count in all of the batch
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
