"""Experiment grids as YAML files, and the runner that resumes."""

from fairhead.bench.grid import Grid as Grid
from fairhead.bench.grid_file import read_grid as read_grid
from fairhead.bench.runner import run_grid as run_grid
from fairhead.bench.table import Table as Table
from fairhead.bench.table import table_of as table_of

__all__ = ["Grid", "Table", "read_grid", "run_grid", "table_of"]
