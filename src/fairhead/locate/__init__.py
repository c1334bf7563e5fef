"""Which heads carry a named gap, against controls."""

from fairhead.locate.ablation import Ablation as Ablation
from fairhead.locate.ablation import ablated as ablated
from fairhead.locate.controls import Controls as Controls
from fairhead.locate.controls import layer_matched as layer_matched
from fairhead.locate.controls import norm_matched as norm_matched
from fairhead.locate.decompose import Decomposer as Decomposer
from fairhead.locate.decompose import Terms as Terms
from fairhead.locate.evidence import HeadEvidence as HeadEvidence
from fairhead.locate.evidence import classifier_task as classifier_task
from fairhead.locate.evidence import head_evidence as head_evidence
from fairhead.locate.features import Features as Features
from fairhead.locate.features import collect as collect
from fairhead.locate.moments import HeadMoments as HeadMoments
from fairhead.locate.scores import Head as Head
from fairhead.locate.scores import HeadMap as HeadMap
from fairhead.locate.scores import score_heads as score_heads
from fairhead.locate.scores import select_heads as select_heads

__all__ = [
    "Ablation",
    "Controls",
    "Decomposer",
    "Features",
    "Head",
    "HeadEvidence",
    "HeadMap",
    "HeadMoments",
    "Task",
    "Terms",
    "ablated",
    "classifier_task",
    "collect",
    "head_evidence",
    "layer_matched",
    "norm_matched",
    "score_heads",
    "select_heads",
]
