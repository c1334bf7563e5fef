"""What attention is made of, looked at: q and k by group (DAM's Assumption 1), and what the first token looks at."""

from fairhead.attention.assumption import Assumption as Assumption
from fairhead.attention.assumption import check_assumption as check_assumption

__all__ = ["Assumption", "check_assumption"]
