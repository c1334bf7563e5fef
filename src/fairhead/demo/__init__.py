"""`fairhead demo`: the whole story on data that ships with scikit-learn."""

from fairhead.demo.story import Demo as Demo
from fairhead.demo.story import DemoPlan as DemoPlan
from fairhead.demo.story import run_demo as run_demo

__all__ = ["Demo", "DemoPlan", "run_demo"]
