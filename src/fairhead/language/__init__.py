"""Language models: a scoring engine and the benchmarks that ask it for log-probabilities.

The engine (`Scorer`, `load_scorer`) needs torch and is imported when first used; what a benchmark asks and how its
score follows from the answers (`stereoset`, `crows_pairs`, `bbq`, `winobias`, `perplexity`) does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fairhead.language.scores import Journal, Request, Score, Scores, journal_path

if TYPE_CHECKING:
    from fairhead.language.load import load_scorer as load_scorer
    from fairhead.language.scorer import Scorer as Scorer

__all__ = ["Journal", "Request", "Score", "Scorer", "Scores", "journal_path", "load_scorer"]

_NEED_TORCH = {"Scorer": "fairhead.language.scorer", "load_scorer": "fairhead.language.load"}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'fairhead.language' has no attribute {name!r}")
    return getattr(import_module(_NEED_TORCH[name]), name)
