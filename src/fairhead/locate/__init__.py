"""Which heads carry a named gap, how sure that is, and what happens when they change.

A pass over the data takes every output apart (`Decomposer`, `collect`, `take_apart`); a question is asked of what it
keeps: the gap between two groups in the evidence for a class (`GapQuestion`), or the log-odds of pairs of texts
(`PairQuestion`). `locate` answers it: scores, choice on one half, effects and controls on the other.
"""

from fairhead import make_verb

make_verb(__name__)
