"""The makers of planted models and of faces stand beside the tests of tests/models."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "models"))
