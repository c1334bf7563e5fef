"""Plain training, which every method is held against."""

from dataclasses import dataclass

from torch import nn

from fairhead.mitigate.training_job import Job


@dataclass(frozen=True)
class ERM:
    """Minimise the model's own loss, averaged over rows (empirical risk minimisation)."""

    def train(self, job: Job) -> nn.Module:
        """One stage: the loop as it is."""
        model = job.build_model()
        job.fit("training", model)
        return model
