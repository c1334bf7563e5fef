"""Methods that reduce a gap, a file per family. None of them ever sees a group; those that do are in `references`.

Names are imported when first used, so that the registry can be read without torch.
"""

from typing import TYPE_CHECKING

from fairhead import later, make_verb
from fairhead.mitigate.registry import METHODS as METHODS
from fairhead.mitigate.registry import MethodEntry as MethodEntry
from fairhead.mitigate.registry import method as method

if TYPE_CHECKING:
    from fairhead.mitigate.dam import DAM as DAM
    from fairhead.mitigate.encoder_layer import EncoderLayer as EncoderLayer
    from fairhead.mitigate.klaad import KLAAD as KLAAD
    from fairhead.mitigate.language_trainer import LanguageTrainer as LanguageTrainer
    from fairhead.mitigate.row_weights import balance_weights as balance_weights
    from fairhead.mitigate.row_weights import draw_by_weight as draw_by_weight
    from fairhead.mitigate.row_weights import match_weights as match_weights
    from fairhead.mitigate.training_job import Job as Job
    from fairhead.mitigate.training_job import Stage as Stage
    from fairhead.mitigate.training_job import Trained as Trained
    from fairhead.mitigate.training_job import run as run
    from fairhead.mitigate.triplets import TripletData as TripletData
    from fairhead.models import attach as attach
    from fairhead.models import save as save
    from fairhead.models.load import load as load

# Public name -> the module that defines it.
_LATER = {
    name: f"fairhead.{module}"
    for module, names in {
        "mitigate.dam": ("DAM",),
        "mitigate.encoder_layer": ("EncoderLayer",),
        "mitigate.klaad": ("KLAAD",),
        "mitigate.language_trainer": ("LanguageTrainer",),
        "mitigate.row_weights": ("balance_weights", "draw_by_weight", "match_weights"),
        "mitigate.training_job": ("Job", "Stage", "Trained", "run"),
        "mitigate.triplets": ("TripletData",),
        "models": ("attach", "load", "save"),
    }.items()
    for name in names
}

__all__ = ["METHODS", "MethodEntry", "method", *_LATER]

__getattr__ = later(__name__, _LATER)

make_verb(__name__)
