"""The training loop: inputs and labels go in, never a group."""

from fairhead.train.examples import Examples as Examples
from fairhead.train.loop import Epoch as Epoch
from fairhead.train.loop import Fit as Fit
from fairhead.train.loop import TrainingDiverged as TrainingDiverged
from fairhead.train.loop import TrainingPlan as TrainingPlan
from fairhead.train.loop import fit as fit
from fairhead.train.loop import predict as predict
from fairhead.train.selection import Selection as Selection
from fairhead.train.step import Loss as Loss

__all__ = ["Epoch", "Examples", "Fit", "Loss", "Selection", "TrainingDiverged", "TrainingPlan", "fit", "predict"]
