"""Which heads carry a named gap, how sure that is, and what happens when they change.

A pass over the data takes every output apart (`Decomposer`, `collect`, `take_apart`); a question is asked of what it
keeps: the gap between two groups in the evidence for a class (`GapQuestion`), or the log-odds of pairs of texts
(`PairQuestion`). `locate` answers it: scores, choice on one half, effects and controls on the other.
"""

from fairhead import make_verb
from fairhead.locate.ablation import Ablation, layer_matched, norm_matched
from fairhead.locate.answer import report_of, to_dict, verdict
from fairhead.locate.decompose import Decomposer
from fairhead.locate.directions import Concept, Task, classifier_task, concept_from_images, task_from_images
from fairhead.locate.edits import HeadEdits
from fairhead.locate.engine import Located, locate
from fairhead.locate.gap_question import GapQuestion
from fairhead.locate.head_features import Features, HeadMoments, collect
from fairhead.locate.head_maps import Head, HeadMap, score_heads
from fairhead.locate.log_odds import take_apart
from fairhead.locate.pair_question import PairQuestion
from fairhead.locate.passes import RowPasses
from fairhead.locate.question import LocatePlan, Question
from fairhead.locate.rows import Evaluation, read_pairs

__all__ = [
    "Ablation",
    "Concept",
    "Decomposer",
    "Evaluation",
    "Features",
    "GapQuestion",
    "Head",
    "HeadEdits",
    "HeadMap",
    "HeadMoments",
    "LocatePlan",
    "Located",
    "PairQuestion",
    "Question",
    "RowPasses",
    "Task",
    "classifier_task",
    "collect",
    "concept_from_images",
    "layer_matched",
    "locate",
    "norm_matched",
    "read_pairs",
    "report_of",
    "score_heads",
    "take_apart",
    "task_from_images",
    "to_dict",
    "verdict",
]

make_verb(__name__)
