"""Which heads carry a named gap, how sure that is, and what happens when they change.

A pass over the data takes every output apart (`Decomposer`, `collect`, `take_apart`); a question is asked of what it
keeps: the gap between two groups in the evidence for a class (`GapQuestion`), or the log-odds of pairs of texts
(`PairQuestion`). `locate` answers it: scores, choice on one half, effects and controls on the other.
"""

from fairhead.locate.ablation import Ablation, Controls, layer_matched, norm_matched
from fairhead.locate.class_directions import Task, classifier_task, task_from_images, task_from_texts
from fairhead.locate.concepts import Concept, concept_from_images, concept_from_texts, coupling, separation
from fairhead.locate.decompose import Decomposer, Terms
from fairhead.locate.edits import HeadEdits, TextEdits
from fairhead.locate.engine import Located, Study, curves, locate, single_head_effects, study
from fairhead.locate.gap_question import DirectEffect, Evaluation, GapQuestion
from fairhead.locate.head_features import Features, HeadMoments, collect
from fairhead.locate.head_maps import Head, HeadMap, score_heads, score_pairs, top_heads
from fairhead.locate.located_report import report_of, to_dict, verdict
from fairhead.locate.log_odds import PairTerms, take_apart
from fairhead.locate.pair_question import PairQuestion
from fairhead.locate.pairs import TextPairs, read_pairs
from fairhead.locate.passes import ForwardPasses, RowPasses, TextPasses
from fairhead.locate.prompts import AdaptedText, ClipText, Prompts, TextTable, read_prompts
from fairhead.locate.question import LocatePlan, Question
from fairhead.locate.textspan import Pool, text_spans

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
    "GapQuestion",
    "Head",
    "HeadEdits",
    "HeadMap",
    "HeadMoments",
    "LocatePlan",
    "Located",
    "PairQuestion",
    "PairTerms",
    "Pool",
    "Prompts",
    "Question",
    "RowPasses",
    "Study",
    "Task",
    "Terms",
    "TextEdits",
    "TextPairs",
    "TextPasses",
    "TextTable",
    "classifier_task",
    "collect",
    "concept_from_images",
    "concept_from_texts",
    "coupling",
    "curves",
    "layer_matched",
    "locate",
    "norm_matched",
    "read_pairs",
    "read_prompts",
    "report_of",
    "score_heads",
    "score_pairs",
    "separation",
    "single_head_effects",
    "study",
    "take_apart",
    "task_from_images",
    "task_from_texts",
    "text_spans",
    "to_dict",
    "top_heads",
    "verdict",
]
