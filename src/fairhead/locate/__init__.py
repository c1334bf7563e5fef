"""Which heads carry a named gap, how sure that is, and what happens when they change.

A pass over the images takes every output apart (`Decomposer`, `collect`); everything else is asked of what it keeps.
`locate` does all of it: scores, choice on one half, effects and controls on the other. `locate_pairs` does the same for
the stereotype log-odds of a language model.
"""

from fairhead.locate.ablation import Ablation, Controls, layer_matched, norm_matched
from fairhead.locate.class_directions import Task, classifier_task, task_from_images, task_from_texts
from fairhead.locate.concepts import Concept, concept_from_images, concept_from_texts, coupling, separation
from fairhead.locate.decompose import Decomposer, Terms
from fairhead.locate.edits import HeadEdits
from fairhead.locate.effects import DirectEffect, Evaluation
from fairhead.locate.head_features import Features, HeadMoments, collect
from fairhead.locate.head_maps import Head, HeadMap, score_heads
from fairhead.locate.language import LocatedPairs, PairPlan, locate_pairs
from fairhead.locate.log_odds import PairTerms, take_apart
from fairhead.locate.pairs import TextPairs, read_pairs
from fairhead.locate.passes import ForwardPasses
from fairhead.locate.plan import LocatePlan
from fairhead.locate.prompts import Prompts, read_prompts
from fairhead.locate.run import Located, locate
from fairhead.locate.studies import Study, study
from fairhead.locate.texts import AdaptedText, ClipText, TextTable
from fairhead.locate.textspan import Pool, text_spans
from fairhead.locate.writeup import report_of

__all__ = [
    "Ablation",
    "AdaptedText",
    "ClipText",
    "Concept",
    "Controls",
    "Decomposer",
    "DirectEffect",
    "Evaluation",
    "Features",
    "ForwardPasses",
    "Head",
    "HeadEdits",
    "HeadMap",
    "HeadMoments",
    "LocatePlan",
    "Located",
    "LocatedPairs",
    "PairPlan",
    "PairTerms",
    "Pool",
    "Prompts",
    "Study",
    "Task",
    "Terms",
    "TextPairs",
    "TextTable",
    "classifier_task",
    "collect",
    "concept_from_images",
    "concept_from_texts",
    "coupling",
    "layer_matched",
    "locate",
    "locate_pairs",
    "norm_matched",
    "read_pairs",
    "read_prompts",
    "report_of",
    "score_heads",
    "separation",
    "study",
    "take_apart",
    "task_from_images",
    "task_from_texts",
    "text_spans",
]
