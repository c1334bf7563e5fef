"""Methods that reduce a gap, one file each. None of them ever sees a group; those that do are in `references`."""

from fairhead.mitigate.dam import DAM as DAM
from fairhead.mitigate.encoder_layer import EncoderLayer as EncoderLayer
from fairhead.mitigate.klaad import KLAAD as KLAAD
from fairhead.mitigate.language_trainer import LanguageTrainer as LanguageTrainer
from fairhead.mitigate.registry import METHODS as METHODS
from fairhead.mitigate.registry import method as method
from fairhead.mitigate.registry import run as run
from fairhead.mitigate.training_job import Job as Job
from fairhead.mitigate.training_job import Stage as Stage
from fairhead.mitigate.training_job import Trained as Trained
from fairhead.mitigate.triplets import TripletData as TripletData
from fairhead.models import attach as attach
from fairhead.models import load as load
from fairhead.models import save as save

__all__ = [
    "DAM",
    "KLAAD",
    "METHODS",
    "EncoderLayer",
    "Job",
    "LanguageTrainer",
    "Stage",
    "Trained",
    "TripletData",
    "attach",
    "load",
    "method",
    "run",
    "save",
]
