"""The training loop: inputs and labels go in, never a group.

Names are imported when first used, so that plans can be made without torch.
"""

from typing import TYPE_CHECKING

from fairhead import later
from fairhead.train.plan import LanguagePlan as LanguagePlan
from fairhead.train.plan import TrainingPlan as TrainingPlan

if TYPE_CHECKING:
    from fairhead.train.fitting import Epoch as Epoch
    from fairhead.train.fitting import Fit as Fit
    from fairhead.train.fitting import Selection as Selection
    from fairhead.train.fitting import fit as fit
    from fairhead.train.fitting import predict as predict
    from fairhead.train.loop import TrainingDiverged as TrainingDiverged
    from fairhead.train.step import Examples as Examples
    from fairhead.train.step import Loss as Loss

# Public name -> the module that defines it.
_LATER = {
    "Epoch": "fairhead.train.fitting",
    "Examples": "fairhead.train.step",
    "Fit": "fairhead.train.fitting",
    "Loss": "fairhead.train.step",
    "Selection": "fairhead.train.fitting",
    "TrainingDiverged": "fairhead.train.loop",
    "fit": "fairhead.train.fitting",
    "predict": "fairhead.train.fitting",
}

__all__ = ["LanguagePlan", "TrainingPlan", *_LATER]


__getattr__ = later(__name__, _LATER)
