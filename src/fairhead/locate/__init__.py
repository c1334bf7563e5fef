"""Which heads carry a named gap, against controls."""

from fairhead.locate.ablation import Ablation as Ablation
from fairhead.locate.ablation import ablated as ablated
from fairhead.locate.controls import Controls as Controls
from fairhead.locate.controls import layer_matched as layer_matched
from fairhead.locate.decompose import Decomposer as Decomposer
from fairhead.locate.decompose import Terms as Terms
from fairhead.locate.evidence import HeadEvidence as HeadEvidence
from fairhead.locate.evidence import head_evidence as head_evidence
from fairhead.locate.scores import Head as Head
from fairhead.locate.scores import HeadMap as HeadMap
from fairhead.locate.scores import score_heads as score_heads
from fairhead.locate.scores import select_heads as select_heads

__all__ = [
    "Ablation",
    "Controls",
    "Decomposer",
    "Head",
    "HeadEvidence",
    "HeadMap",
    "Terms",
    "ablated",
    "head_evidence",
    "layer_matched",
    "score_heads",
    "select_heads",
]
