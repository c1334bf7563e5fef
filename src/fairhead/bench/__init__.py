"""Experiment grids as YAML files, and the runner that resumes."""
