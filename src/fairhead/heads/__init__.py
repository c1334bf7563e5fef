"""The tap: the one place that touches attention. Reads and edits heads of any Hugging Face model."""

from fairhead.heads.requests import Reading, is_recomputing
from fairhead.heads.routes import AppendedAttention, FirstRow
from fairhead.heads.sites import Site, find_sites, output_weight
from fairhead.heads.tap import Tap, tap

__all__ = ["AppendedAttention", "FirstRow", "Reading", "Site", "Tap", "find_sites", "is_recomputing", "output_weight"]
__all__ += ["tap"]
