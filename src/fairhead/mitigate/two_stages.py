"""Methods of two stages: a first model is trained, and its errors, outputs, probabilities or last layer are used.

Here is also what finds, reads and replaces the last layer of a classifier, whatever the family.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import SubsetRandomSampler

from fairhead.errors import InputError, UnsupportedModel
from fairhead.mitigate.training_job import Job, balanced, cell_numbers, row_losses
from fairhead.settings import (
    Choice,
    Count,
    LogUniform,
    NotNegative,
    Positive,
    Prior,
    Range,
    Share,
    ShareOfEpochs,
    Uniform,
)
from fairhead.train.fitting import LAST_EPOCH, accuracy, predict, score_of, worst_accuracy
from fairhead.train.kmeans import kmeans, silhouette
from fairhead.train.step import Examples

_LOOK_EVERY = 10  # steps between two looks at the validation set


def find_head(model: nn.Module, examples: Examples) -> nn.Linear:
    """The linear layer whose output is the logits. One row of `examples` is run to find it."""
    calls: list[tuple[Any, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda module, args, output: calls.append((module, output)))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad():
            logits = model(**examples.take(torch.tensor([0])).to(device).inputs).logits
    finally:
        for handle in handles:
            handle.remove()
    for module, output in reversed(calls):
        if torch.equal(output, logits):
            found: nn.Linear = module
            return found
    raise UnsupportedModel(
        f"the logits of {type(model).__name__} do not come out of a linear layer: nothing to retrain"
    )


def features_of(model: nn.Module, head: nn.Linear, examples: Examples, precision: Any = "no") -> Tensor:
    """What goes into the head for each row, [n, D] on the CPU."""
    seen: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    try:
        predict(model, examples, precision=precision)
    finally:
        handle.remove()
    return torch.cat(seen).float().cpu()


def set_head(head: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    """Replace the head's weight [C, D] and bias [C]; of a head without bias, the new one must be zero."""
    with torch.no_grad():
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.copy_(bias)
        elif bias.abs().max() > 0:
            raise UnsupportedModel("the model's last layer has no bias, and this method needs one to change")


@dataclass(frozen=True)
class JTT:
    """Just train twice (Liu et al., 2021): a second model sees the errors of a first model more often.

    Attributes:
        first_epochs: epochs of the first model (T); it keeps its last epoch.
        upweight: how often an error of the first model appears in an epoch of the second (λ_up); other rows once.
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
        rows = torch.arange(len(wrong)).repeat_interleave(torch.where(wrong, self.upweight, 1)).tolist()
        return job.train_fresh("second model", sampler=SubsetRandomSampler(rows, generator=job.generator()))


@dataclass(frozen=True)
class SPARE:
    """Cluster early outputs within each class, then sample the clusters evenly in training (Yang et al., 2024).

    Attributes:
        early_epochs: epochs before the outputs are clustered.
        most: largest number of clusters to try in a class; the silhouette decides.
        power: rows are sampled in proportion to 1 / (cluster size)^power.
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
        first_epochs: epochs of the reference model.
        step_size: step size of GroupDRO over (class, environment).
        balance: sample every (class, environment) equally often.
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

    The penalty of soft assignments s is (mean s g)² + (mean (1 − s) g)², where g is `scale_gradients`. It is convex in
    Σ s g, so its maximum has all rows with g > 0 on one side. Gradient ascent, as published, takes thousands of steps
    to the same place.
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
        share: weight of the teacher's probabilities in the target (λ).
        temperature: softens both teacher and student; the term is multiplied by T² to keep the size of gradients.
        teacher_epochs: epochs of the teacher; None for as many as the student. The teacher keeps its last epoch, since
            it should overfit.
        teacher: the name of another model, usually a larger one, such as "vit-12x8" or "path:FOLDER"; by default the
            teacher is built like the student.
        build_teacher: in Python, a function that returns the teacher, which takes the student's inputs.
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
        logits = output.logits.float()
        from_teacher = cross_entropy(logits / self.temperature, self.soft[rows]) * self.temperature**2
        return self.share * from_teacher + (1 - self.share) * cross_entropy(logits, labels)


@dataclass(frozen=True)
class ClassScaling:
    """Plain training, then argmax_c s_c · p_c, with the s that is best for the worst class (arXiv 2412.15311).

    The factors s are chosen on the validation set. Multiplying probabilities adds log s to the logits, so s goes into
    the bias of the last layer and the architecture does not change.

    Attributes:
        largest: largest factor; factors from 1/largest to largest are tried.
        steps: number of factors, evenly spaced in the logarithm.
        rounds: passes over the classes; with two classes, one pass finds the best.
    """

    largest: Annotated[float, Range(1, above=True)] = 100.0
    steps: Annotated[int, Range(2)] = 201
    rounds: Count = 3

    def train(self, job: Job) -> nn.Module:
        """Plain training and a sweep."""
        model = job.train_fresh("training")
        with job.timed("sweep of the factors"):
            probabilities = job.predict(model, job.validation)
            tried = torch.logspace(-1, 1, self.steps, base=self.largest)
            factors = best_factors(probabilities, job.validation.labels.cpu(), tried, self.rounds)
            head = find_head(model, job.validation)
            bias = torch.zeros(len(head.weight), device=head.weight.device) if head.bias is None else head.bias
            set_head(head, head.weight, bias + factors.log().to(bias))
        return model


def best_factors(probabilities: Tensor, labels: Tensor, tried: Tensor, rounds: int = 3) -> Tensor:
    """Factors of the classes, [C], with the highest worst-class accuracy, then the highest accuracy.

    Of probabilities [n, C], one class at a time is swept over the factors that are `tried` [S], the others kept; the
    first class of two stays at 1, as only ratios matter.
    """
    classes = probabilities.shape[1]
    factors = torch.ones(classes)

    def worst_then_all(option: Tensor) -> tuple[float, float]:
        said = (probabilities * option).argmax(-1)
        return worst_accuracy(said, labels, labels), accuracy(said, labels)

    tried = torch.cat([torch.ones(1), tried])  # no change comes first, and wins where nothing is gained
    for _ in range(rounds):
        for swept in range(1, classes) if classes == 2 else range(classes):
            options = factors.repeat(len(tried), 1)
            options[:, swept] *= tried
            factors = max(options, key=worst_then_all)
        if classes == 2:
            break
    return factors


@dataclass(frozen=True)
class AFR:
    """Automatic feature reweighting (Qiu et al., 2023): retrain the last layer with more weight on unsure rows.

    Plain training uses one part of the rows; the rest retrain the last layer with weights ∝ β_y · exp(−γ p_y). The
    run's selection criterion picks the step on the validation set, excluding the start.

    Attributes:
        held_out: share of the training rows reserved for the last layer.
        gamma: how much more weight errors of plain training get (γ); 0 only rebalances classes.
        penalty: penalty on the distance from the original last layer (λ).
        steps: full-batch gradient steps.
        learning_rate: learning rate of those steps.
    """

    held_out: Share = 0.2
    gamma: NotNegative = 4.0
    penalty: NotNegative = 0.0
    steps: Count = 500
    learning_rate: Positive = 0.01

    priors: ClassVar[Mapping[str, Prior]] = {"gamma": Uniform(4, 20), "penalty": Choice((0.0, 0.1, 0.2, 0.3, 0.4))}

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise InputError(f"AFR's held_out is a share of the rows, between 0 and 1; found {self.held_out}")

    def train(self, job: Job) -> nn.Module:
        """Plain training, then the last layer."""
        order = torch.randperm(len(job.train), generator=job.generator())
        n_held = round(self.held_out * len(order))
        held = job.train.take(order[:n_held])
        model = job.train_fresh("training", train=job.train.take(order[n_held:]))
        with job.timed("last layer"):
            head = find_head(model, held)
            features = features_of(model, head, held, job.plan.precision).to(head.weight.device)
            shown = features_of(model, head, job.validation, job.plan.precision).to(head.weight.device)
            truth = job.validation.labels.cpu()

            def score(last: nn.Linear) -> float:
                return score_of(job.selection, last(shown).argmax(-1).cpu(), truth)

            self._retrain(head, features, held.labels.to(head.weight.device), score)
        return model

    def _retrain(self, head: nn.Linear, features: Tensor, labels: Tensor, score: Callable[[nn.Linear], float]) -> None:
        """Full-batch gradient descent on the weighted loss, gradients clipped to norm 1; features [m, D]."""
        last = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None).to(features.device)
        last.load_state_dict(head.state_dict())
        start = [parameter.detach().clone() for parameter in last.parameters()]
        with torch.no_grad():
            p_label = (-row_losses(last(features), labels)).exp()
        weights = afr_weights(p_label, labels, self.gamma)
        optimizer = torch.optim.SGD(last.parameters(), lr=self.learning_rate)
        best, kept = -math.inf, last.state_dict()
        for step in range(1, self.steps + 1):
            distance = sum((p - p0).square().sum() for p, p0 in zip(last.parameters(), start, strict=True))
            loss = (weights * row_losses(last(features), labels)).sum() + self.penalty * distance
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(last.parameters(), 1.0)
            optimizer.step()
            if step % _LOOK_EVERY == 0 or step == self.steps:
                found = score(last)
                if found > best:
                    best, kept = found, {name: tensor.clone() for name, tensor in last.state_dict().items()}
        set_head(head, kept["weight"], kept.get("bias", head.weight.new_zeros(head.out_features)))


def afr_weights(p_label: Tensor, labels: Tensor, gamma: float) -> Tensor:
    """β_y · exp(−γ p_y), summing to 1, where β_y is one over the size of the row's class; [m]."""
    sizes = torch.bincount(labels)
    weights = (-gamma * p_label).exp() / sizes[labels]
    return weights / weights.sum()
