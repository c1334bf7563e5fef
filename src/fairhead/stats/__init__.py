"""Statistics that audits, benchmarks and the search for heads share. Imports no torch, and no other room."""

from fairhead.stats.outcome import ALPHA as ALPHA
from fairhead.stats.outcome import OUTCOMES as OUTCOMES
from fairhead.stats.outcome import CalibrationPoint as CalibrationPoint
from fairhead.stats.outcome import Correction as Correction
from fairhead.stats.outcome import Curves as Curves
from fairhead.stats.outcome import Difference as Difference
from fairhead.stats.outcome import Estimate as Estimate
from fairhead.stats.outcome import GroupCurve as GroupCurve
from fairhead.stats.outcome import GroupRow as GroupRow
from fairhead.stats.outcome import Outcome as Outcome
from fairhead.stats.outcome import Span as Span
from fairhead.stats.outcome import adjust as adjust
