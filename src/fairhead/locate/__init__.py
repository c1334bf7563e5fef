"""Which heads carry a named gap, how sure that is, and what happens when they change.

A pass over the images takes every output apart (`Decomposer`, `collect`); everything else is asked of what it keeps.
`locate` does all of it: scores, choice on one half, effects and controls on the other. `locate_pairs` does the same for
the stereotype log-odds of a language model.
"""

from fairhead.locate.ablation import Ablation as Ablation
from fairhead.locate.ablation import ablated as ablated
from fairhead.locate.concepts import Concept as Concept
from fairhead.locate.concepts import concept_from_images as concept_from_images
from fairhead.locate.concepts import concept_from_texts as concept_from_texts
from fairhead.locate.controls import Controls as Controls
from fairhead.locate.controls import layer_matched as layer_matched
from fairhead.locate.controls import norm_matched as norm_matched
from fairhead.locate.decompose import Decomposer as Decomposer
from fairhead.locate.decompose import Terms as Terms
from fairhead.locate.edits import HeadEdits as HeadEdits
from fairhead.locate.effects import DirectEffect as DirectEffect
from fairhead.locate.effects import Evaluation as Evaluation
from fairhead.locate.evidence import HeadEvidence as HeadEvidence
from fairhead.locate.evidence import classifier_task as classifier_task
from fairhead.locate.evidence import head_evidence as head_evidence
from fairhead.locate.features import Features as Features
from fairhead.locate.features import collect as collect
from fairhead.locate.language import LocatedPairs as LocatedPairs
from fairhead.locate.language import PairPlan as PairPlan
from fairhead.locate.language import locate_pairs as locate_pairs
from fairhead.locate.log_odds import PairTerms as PairTerms
from fairhead.locate.log_odds import take_apart as take_apart
from fairhead.locate.measures import coupling as coupling
from fairhead.locate.measures import separation as separation
from fairhead.locate.moments import HeadMoments as HeadMoments
from fairhead.locate.pairs import TextPairs as TextPairs
from fairhead.locate.pairs import read_pairs as read_pairs
from fairhead.locate.passes import ForwardPasses as ForwardPasses
from fairhead.locate.plan import LocatePlan as LocatePlan
from fairhead.locate.prompts import Prompts as Prompts
from fairhead.locate.prompts import read_prompts as read_prompts
from fairhead.locate.run import Located as Located
from fairhead.locate.run import locate as locate
from fairhead.locate.scores import Head as Head
from fairhead.locate.scores import HeadMap as HeadMap
from fairhead.locate.scores import score_heads as score_heads
from fairhead.locate.scores import select_heads as select_heads
from fairhead.locate.studies import Study as Study
from fairhead.locate.studies import study as study
from fairhead.locate.tasks import Task as Task
from fairhead.locate.tasks import task_from_images as task_from_images
from fairhead.locate.tasks import task_from_texts as task_from_texts
from fairhead.locate.texts import AdaptedText as AdaptedText
from fairhead.locate.texts import ClipText as ClipText
from fairhead.locate.texts import TextTable as TextTable
from fairhead.locate.textspan import Pool as Pool
from fairhead.locate.textspan import text_spans as text_spans
from fairhead.locate.writeup import report_of as report_of

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
    "HeadEvidence",
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
    "ablated",
    "classifier_task",
    "collect",
    "concept_from_images",
    "concept_from_texts",
    "coupling",
    "head_evidence",
    "layer_matched",
    "locate",
    "locate_pairs",
    "norm_matched",
    "read_pairs",
    "read_prompts",
    "report_of",
    "score_heads",
    "select_heads",
    "separation",
    "study",
    "take_apart",
    "task_from_images",
    "task_from_texts",
    "text_spans",
]
