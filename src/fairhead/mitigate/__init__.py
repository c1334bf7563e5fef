"""Methods that reduce a gap, one file each. None of them ever sees a group."""

from fairhead.mitigate.attach import attach as attach
from fairhead.mitigate.attach import load as load
from fairhead.mitigate.attach import save as save
from fairhead.mitigate.dam import DAM as DAM

__all__ = ["DAM", "attach", "load", "save"]
