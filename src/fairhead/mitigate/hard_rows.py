"""Methods by which rows that are hard count more: DRO in the loss, and three that train a second network beside.

The loop sees two networks as one model: separate networks, or two heads of one encoder.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fairhead.errors import InputError
from fairhead.mitigate.training_job import ADDED_LATER, Job, cell_numbers, row_losses
from fairhead.mitigate.two_stages import find_head
from fairhead.settings import (
    Choice,
    Count,
    LogUniform,
    NotNegative,
    Positive,
    PositiveShare,
    Prior,
    Share,
    Uniform,
    WholeNumber,
)
from fairhead.train.fitting import LAST_EPOCH, worst_of_cells
from fairhead.train.loop import gathered
from fairhead.train.step import check_inputs


@dataclass(frozen=True)
class DRO:
    """Distributionally robust training (Hashimoto et al., 2018), in three forms.

    Attributes:
        form: "fixed" minimises mean(max(ℓ − η, 0)^power) with a given η (as the DAM paper does); "chi2" the exact worst
            case over a χ² ball around each batch; "cvar" the exact mean over the worst share of each batch.
        eta: threshold of "fixed"; the DAM paper uses 0.10 on UTKFace, 0.15 on CelebA, 0.25 on text.
        power: exponent of "fixed"; 2 in Hashimoto et al., 1.5 in the DAM release.
        alpha: smallest share of rows to protect: it determines the radius of "chi2" and is the share of "cvar".
    """

    form: Literal["fixed", "chi2", "cvar"] = "fixed"
    eta: NotNegative = 0.25
    power: Positive = 1.5
    alpha: PositiveShare = 0.2

    @property
    def priors(self) -> Mapping[str, Prior]:
        """What a search varies: the one number that the form has."""
        return {"eta": Uniform(0.05, 0.5)} if self.form == "fixed" else {"alpha": LogUniform(-2, 0)}

    def train(self, job: Job) -> nn.Module:
        """One stage with the robust loss."""
        return job.train_fresh("training", loss=self.loss)

    def loss(self, output: Any, labels: Tensor, rows: Tensor) -> Tensor:
        """The robust loss of a batch."""
        losses = gathered(row_losses(output.logits, labels))  # the worst rows of the batch, not of a share of it
        if self.form == "fixed":
            return (losses - self.eta).clamp(min=0).pow(self.power).mean()
        weights = chi2_weights if self.form == "chi2" else cvar_weights
        return (weights(losses.detach(), self.alpha) * losses).sum()


def cvar_weights(losses: Tensor, alpha: float) -> Tensor:
    """The weights, summing to 1, that make Σ wᵢ ℓᵢ the mean over the worst `alpha` of the rows [B]."""
    share = alpha * len(losses)
    rank = losses.argsort(descending=True).argsort().to(losses.dtype)
    return (share - rank).clamp(0, 1) / share


def chi2_weights(losses: Tensor, alpha: float) -> Tensor:
    """The worst weights in the χ² ball: argmax Σ wᵢ ℓᵢ with ½ mean((B wᵢ − 1)²) ≤ (1/alpha − 1)², exactly.

    With C² = 2 (1/alpha − 1)² + 1 the dual is min over η of C · sqrt(mean(max(ℓ − η, 0)²)) + η. Between two
    neighbouring losses it has a stationary point in closed form, so all of them are tried at once: no search, nothing
    that a GPU would have to wait for.
    """
    n, scale = len(losses), math.sqrt(2 * (1 / alpha - 1) ** 2 + 1)
    if scale == 1:
        return torch.full_like(losses, 1 / n)
    ordered = losses.double().sort(descending=True).values
    top = torch.arange(1, n + 1, device=losses.device, dtype=torch.float64)  # how many rows have ℓ > η
    mean = ordered.cumsum(0) / top
    variance = (ordered.square().cumsum(0) / top - mean.square()).clamp(min=0)
    room = scale**2 * top / n - 1
    eta = mean - (variance / room.clamp(min=1e-12)).sqrt()
    above = (ordered[None] - eta[:, None]).clamp(min=0)  # [candidates, B]
    value = torch.where(room > 0, scale * above.square().mean(1).sqrt() + eta, torch.inf)
    best = eta.gather(0, value.argmin(0, keepdim=True))  # indexing by a scalar would wait for the device
    above = (losses.double() - best).clamp(min=0)
    # All weight on the largest loss, where that is inside the ball or nothing varies.
    highest = (losses == losses.max()).double()
    inside = (1 / highest.mean() <= scale**2) | (above.sum() <= 0)
    return torch.where(inside, highest / highest.sum(), above / above.sum().clamp(min=1e-300)).to(losses.dtype)


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
        self.first, self.second = first, second

    def forward(self, **inputs: Any) -> PairOutput:
        """Run both on the same inputs."""
        second = self.second(**inputs).logits if self.training else None
        return PairOutput(self.first(**inputs).logits, second)


def fresh_pair(job: Job, build_second: Callable[[], nn.Module] | None = None) -> Pair:
    """Two new networks; the second is built like the first unless `build_second` says how."""
    pair = Pair(job.build_model(), (build_second or job.build_model)())
    check_inputs(pair.first, job.train)  # the pair takes anything: what the networks take must be asked of them
    assert not {*pair.first.parameters()} & {*pair.second.parameters()}, "build_model must give a fresh model each time"
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
    """Learning from failure (Nam et al., 2020): rows that a biased network finds hard get more weight.

    The biased network should learn only the easy rows. If it memorises nearly all rows (few rows, many epochs), the
    weights vanish and the other network may learn the reverse of the task: check its accuracy.

    Attributes:
        q: exponent of the generalised cross-entropy, which makes the biased network favour what it learns first.
        memory: weight of the past in the running loss of each row (α).
        shared: one encoder with two heads instead of two networks, as DAM's authors ran it. This is another method,
            because the predicting head then uses features that the biased head has learned.
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
        self.labels, self.q, self.memory = labels, q, memory  # of the training set, [n]
        self.running = torch.full((2, len(labels)), torch.nan)  # of the predicting and of the biased network

    def __call__(self, output: PairOutput, labels: Tensor, rows: Tensor) -> Tensor:
        """The loss of a batch; the running losses of its rows move with it."""
        assert output.second is not None
        # Rows come to another process in the next epoch, and their running losses must be there.
        losses = torch.stack([gathered(row_losses(logits, labels)) for logits in output])  # [2, B]
        labels, rows = gathered(labels), gathered(rows)
        with torch.no_grad():
            before = self.running[:, rows]
            # The first visit has no past.
            now = torch.where(before.isnan(), losses, self.memory * before + (1 - self.memory) * losses)
            self.running[:, rows] = now
            start = self.running.new_zeros(2, output.logits.shape[-1])
            # The highest running loss within each class, [2, C]
            highest = start.scatter_reduce(1, self.labels.expand(2, -1), self.running.nan_to_num(0.0), "amax")
            own, biased = now / highest[:, labels].clamp(min=1e-12)
            weight = biased / (biased + own + 1e-8)
            p_label = (-losses[1]).exp()
        return (weight * losses[0]).mean() + (self.q * p_label**self.q * losses[1]).mean()


@dataclass(frozen=True)
class ARL:
    """Adversarially reweighted learning (Lahoti et al., 2020): an adversary puts weight on rows where the learner errs.

    The adversary's score of a row is its output for the row's own class, so it sees inputs and label.

    Attributes:
        pretrain: steps with equal weights before the adversary starts.
        adversary_loss: what the adversary maximises: "plain" losses, or losses already "weighted" (the DAM release).
        uses_label: whether the adversary sees the label; otherwise its score is the output for class 0.
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
        pair = fresh_pair(job, None if self.adversary is None else _adversary(job, self.adversary))
        job.fit("training with an adversary", pair, loss=_AdversarialLoss(self, job.plan.batch_size))
        return pair.first


def _adversary(job: Job, name: str) -> Callable[[], nn.Module]:
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
    def __init__(self, config: ARL, batch_size: int) -> None:
        # Of rows, as a batch may come in pieces; a tensor, as a step that is recorded and replayed counts too
        self.config, self.pretrain, self.seen = config, config.pretrain * batch_size, torch.zeros(())

    def __call__(self, output: PairOutput, labels: Tensor, rows: Tensor) -> Tensor:
        losses = gathered(row_losses(output.logits, labels))
        assert output.second is not None
        asked = labels if self.config.uses_label else torch.zeros_like(labels)
        weights = adversarial_weights(gathered(output.second.float().gather(1, asked[:, None])[:, 0]))
        self.seen += len(losses)
        weights = torch.where(self.seen <= self.pretrain, torch.ones_like(weights), weights)
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
        twin_epochs: epochs of the twins; None for as many as the plan has.
        step_size: step size of GroupDRO over (class, environment).
        balance: sample every (class, environment) equally often.
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
        cells = []
        with job.timed("environments"):
            for examples in (job.train, job.validation):
                answers = [job.predict(twin, examples).argmax(-1) for twin in (twins.first, twins.second)]
                wrong = torch.stack(answers) != examples.labels.cpu()  # an environment: where either twin is wrong
                cells.append(cell_numbers(examples.labels, wrong.any(0)))
        del twins
        own = worst_of_cells(job.validation.labels, cells[1]) if self.select_by_environments else None
        return job.group_dro(
            "group DRO over environments", cells[0], self.step_size, balance=self.balance, selection=own
        )


class TwinLoss:
    """Each twin learns its half of the rows; a row's label may turn into what the other, held out, thinks it is."""

    def __init__(self, labels: Tensor, generator: torch.Generator) -> None:
        self.labels = labels.clone()  # as they stand by now, [n]
        self.first_half = torch.rand(len(labels), generator=generator) < 0.5  # rows of the first twin, [n]

    def __call__(self, output: PairOutput, labels: Tensor, rows: Tensor) -> Tensor:
        """The loss of a batch; some of its labels turn."""
        assert output.second is not None
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
