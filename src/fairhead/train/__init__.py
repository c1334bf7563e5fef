"""The training loop: inputs and labels go in, never a group."""

from fairhead.train.examples import Examples as Examples
from fairhead.train.fitting import Epoch as Epoch
from fairhead.train.fitting import Fit as Fit
from fairhead.train.fitting import fit as fit
from fairhead.train.fitting import predict as predict
from fairhead.train.loop import TrainingDiverged as TrainingDiverged
from fairhead.train.plan import LanguagePlan as LanguagePlan
from fairhead.train.plan import TrainingPlan as TrainingPlan
from fairhead.train.selection import Selection as Selection
from fairhead.train.step import Loss as Loss

__all__ = [
    "Epoch",
    "Examples",
    "Fit",
    "LanguagePlan",
    "Loss",
    "Selection",
    "TrainingDiverged",
    "TrainingPlan",
    "fit",
    "predict",
]
