"""Methods that learn from a first model: its errors, its early outputs, its environments, or its probabilities."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import SubsetRandomSampler

from fairhead.errors import InputError
from fairhead.mitigate.losses import balanced, cell_numbers
from fairhead.mitigate.priors import Choice, LogUniform, Prior, ShareOfEpochs
from fairhead.mitigate.training_job import Job
from fairhead.settings import Count, NotNegative, Positive, Range, Share
from fairhead.train.fitting import LAST_EPOCH
from fairhead.train.kmeans import kmeans, silhouette


@dataclass(frozen=True)
class JTT:
    """Just train twice (Liu et al., 2021): the rows that a first model gets wrong are shown more often to a second.

    Attributes:
        first_epochs: of the model whose errors are taken (T); it keeps its last epoch.
        upweight: how often a row that it got wrong appears in an epoch of the second (λ_up); others appear once.
    """

    first_epochs: Count = 1
    upweight: Count = 50

    priors: ClassVar[Mapping[str, Prior]] = {
        "first_epochs": ShareOfEpochs(0.2, 0.8),
        "upweight": LogUniform(0, 2.5, whole=True),
    }

    def train(self, job: Job) -> nn.Module:
        """Two stages. The second has more steps: that is the method's cost."""
        plan = replace(job.plan, epochs=self.first_epochs)
        first = job.train_fresh("first model", plan=plan, selection=LAST_EPOCH)
        with job.timed("errors of the first model"):
            wrong = job.predict(first, job.train).argmax(-1) != job.train.labels.cpu()
        del first
        # A sampler of row numbers, some of them many times; the sequence type is torch's own.
        rows = upsampled(wrong, self.upweight).tolist()
        return job.train_fresh("second model", sampler=SubsetRandomSampler(rows, generator=job.generator()))


def upsampled(wrong: Tensor, times: int) -> Tensor:
    """Every row number once, and those of `wrong` [n] `times` times.

    Example:
        >>> upsampled(torch.tensor([False, True]), 3).tolist()
        [0, 1, 1, 1]
    """
    return torch.arange(len(wrong)).repeat_interleave(torch.where(wrong.cpu(), times, 1))


@dataclass(frozen=True)
class SPARE:
    """Clusters of early outputs within each class, then training that shows them evenly (Yang et al., 2024).

    Attributes:
        early_epochs: after which the outputs are clustered.
        most: the largest number of clusters tried in a class; the silhouette decides.
        power: rows are drawn in proportion to 1 / (cluster size)^power.
    """

    early_epochs: Count = 1
    most: Annotated[int, Range(2)] = 5
    power: NotNegative = 1.0

    priors: ClassVar[Mapping[str, Prior]] = {"early_epochs": Choice((1, 2)), "power": Choice((1.0, 2.0, 3.0))}

    def train(self, job: Job) -> nn.Module:
        """A short first stage; the same model goes on with even clusters."""
        early = replace(job.plan, epochs=self.early_epochs, schedule="constant")
        model = job.train_fresh("early training", plan=early, selection=LAST_EPOCH)
        with job.timed("clusters"):
            outputs = job.predict(model, job.train)
            cells = clusters_by_class(outputs, job.train.labels.cpu(), self.most, job.plan.seed)
        job.fit("training with even clusters", model, sampler=balanced(cells, job.generator(), self.power))
        return model


def clusters_by_class(points: Tensor, labels: Tensor, most: int, seed: int = 0) -> Tensor:
    """k-means of points [n, D] within each class, k up to `most` by the silhouette; a number for each cluster, [n]."""
    found = torch.zeros_like(labels)
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        # A class of a few rows, or of one point many times over, stays in one piece.
        options = [kmeans(points[rows], k, seed).cluster for k in range(2, min(most, len(rows) - 1) + 1)]
        if options:
            found[rows] = max(options, key=lambda cluster: silhouette(points[rows], cluster))
    return cell_numbers(labels, found)


@dataclass(frozen=True)
class EIIL:
    """GroupDRO over the two environments that a first model treats least alike (Creager et al., 2021).

    Attributes:
        first_epochs: of the reference model.
        step_size: of GroupDRO over (class, environment).
        balance: draw every (class, environment) equally often.
    """

    first_epochs: Count = 1
    step_size: NotNegative = 0.01
    balance: bool = True

    priors: ClassVar[Mapping[str, Prior]] = {"first_epochs": Choice((1, 2)), "step_size": LogUniform(-3, -1)}

    def train(self, job: Job) -> nn.Module:
        """Two stages, with the environments between them."""
        plan = replace(job.plan, epochs=self.first_epochs)
        first = job.train_fresh("reference model", plan=plan, selection=LAST_EPOCH)
        with job.timed("environments"):
            labels = job.train.labels.cpu()
            found = environments(job.predict(first, job.train).clamp(min=1e-12).log(), labels)
            cells = cell_numbers(labels, found)
        del first
        return job.group_dro("group DRO over environments", cells, self.step_size, balance=self.balance)


def environments(logits: Tensor, labels: Tensor) -> Tensor:
    """The hard assignment to two environments, [n], that maximises the IRMv1 penalty of fixed logits [n, C].

    The penalty of soft assignments s is (mean s g)² + (mean (1 − s) g)², where gᵢ = Σ_c p_c f_c − f_y is the
    derivative of row i's loss by a common factor of its logits. It is convex in Σ s g, so its maximum is at an end of
    that range: all rows with g > 0 on one side. Gradient ascent, as published, takes thousands of steps to the
    same place.
    """
    return (scale_gradients(logits, labels) > 0).long()


def scale_gradients(logits: Tensor, labels: Tensor) -> Tensor:
    """d/dw of each row's cross-entropy of w · logits at w = 1, [n]; log-probabilities serve as well as logits."""
    expected = (logits.softmax(-1) * logits).sum(-1)
    return expected - logits.gather(1, labels[:, None].to(torch.long))[:, 0]


@dataclass(frozen=True)
class KD:
    """Distillation (Chai, Jang and Wang, 2022): share · CE(student, teacher) + (1 − share) · CE(student, label).

    Attributes:
        share: of the teacher's probabilities in the target (λ).
        temperature: softens teacher and student alike; its term is multiplied by T², which keeps gradients' size.
        teacher_epochs: None for as many as the student. The teacher keeps its last epoch: it is meant to overfit.
        teacher: the name of another model, usually a larger one, such as "vit-12x8" or "path:FOLDER"; by default the
            teacher is built like the student.
        build_teacher: the same from Python: a function that gives the teacher, which takes the student's inputs.
    """

    share: Share = 1.0
    temperature: Positive = 1.0
    teacher_epochs: Count | None = None
    teacher: str | None = None
    build_teacher: Callable[[], nn.Module] | None = field(default=None, compare=False)

    priors: ClassVar[Mapping[str, Prior]] = {"share": Choice((0.3, 0.7, 1.0)), "temperature": LogUniform(0, 0.6)}

    def __post_init__(self) -> None:
        if self.teacher is not None and self.build_teacher is not None:
            raise InputError("KD has one teacher: give its name (teacher) or what builds it (build_teacher)")

    def train(self, job: Job) -> nn.Module:
        """Two stages; the teacher's probabilities are computed once."""
        build, train, validation = self.build_teacher or job.build_model, job.train, job.validation
        if self.teacher is not None:
            other = job.auxiliary_model(self.teacher)
            build, train, validation = other.build_model, other.train, other.validation
        teacher = build()
        plan = replace(job.plan, epochs=self.teacher_epochs or job.plan.epochs)
        job.fit("teacher", teacher, train=train, validation=validation, plan=plan, selection=LAST_EPOCH)
        with job.timed("soft labels"):
            soft = job.predict(teacher, train)
        del teacher
        return job.train_fresh("student", loss=_DistillationLoss(soft, self.share, self.temperature))


class _DistillationLoss:
    def __init__(self, soft: Tensor, share: float, temperature: float) -> None:
        """`soft`: the teacher's probabilities for the training set, [n, C]."""
        self.share, self.temperature = share, temperature
        # p^(1/T), normalised: the softmax of the teacher's logits over T.
        self.soft = (soft.clamp(min=1e-12).log() / temperature).softmax(-1)

    def __call__(self, output: Any, labels: Tensor, rows: Tensor) -> Tensor:
        self.soft = self.soft.to(rows.device)
        logits = output.logits.float()
        from_teacher = cross_entropy(logits / self.temperature, self.soft[rows]) * self.temperature**2
        return self.share * from_teacher + (1 - self.share) * cross_entropy(logits, labels)
