"""KD: learn from the soft labels of a teacher (Chai, Jang and Wang, 2022: fairness without demographics)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fairhead.errors import InputError
from fairhead.mitigate.priors import Choice, LogUniform, Prior
from fairhead.mitigate.training_job import Job
from fairhead.settings import Count, Positive, Share
from fairhead.train.fitting import LAST_EPOCH


@dataclass(frozen=True)
class KD:
    """Knowledge distillation: share · CE(student, teacher) + (1 − share) · CE(student, label).

    Attributes:
        share: of the teacher's probabilities in the target (λ).
        temperature: softens teacher and student alike; its term is multiplied by T², which keeps gradients' size.
        teacher_epochs: None for as many as the student. The teacher keeps its last epoch: it is meant to overfit.
        teacher: the name of another model, usually a larger one, such as "vit-12x8" or "path:FOLDER"; by default the
            teacher is built like the student.
        build_teacher: the same from Python: a function that gives the teacher, which takes the student's inputs.

    Example:
        >>> from fairhead.mitigate import method
        >>> method("kd", share=0.7).share
        0.7
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
        student = job.build_model()
        job.fit("student", student, loss=_DistillationLoss(soft, self.share, self.temperature))
        return student


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
