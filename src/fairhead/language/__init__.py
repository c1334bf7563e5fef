"""Language models: a scoring engine and the benchmarks that ask it for log-probabilities.

The engine (`Scorer`, `load_scorer`) needs torch and is imported when first used; what a benchmark asks and how its
score follows from the answers (`stereoset`, `crows_pairs`, `bbq`, `winobias`, `perplexity`) does not. `compare_suites`
says what a change of a model did, from the folders that `fairhead lm suite` wrote.
"""

from typing import TYPE_CHECKING

from fairhead import later
from fairhead.language.answers import Answers, Journal, Request, Score, journal_path

if TYPE_CHECKING:
    from fairhead.language.before_after import compare_suites as compare_suites
    from fairhead.language.loading import load_scorer as load_scorer
    from fairhead.language.scorer import Scorer as Scorer

__all__ = ["Answers", "Journal", "Request", "Score", "Scorer", "compare_suites", "journal_path", "load_scorer"]

# Imported when first used: torch takes long to load, and comparing suites needs most of this folder.
_LATER = {
    "Scorer": "fairhead.language.scorer",
    "compare_suites": "fairhead.language.before_after",
    "load_scorer": "fairhead.language.loading",
}

__getattr__ = later(__name__, _LATER)
