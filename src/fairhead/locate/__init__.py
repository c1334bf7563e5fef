"""Which heads contribute to a gap, how certain that is, and what happens when they change.

A *question* is a gap (`Question`): in the evidence for a class between two groups (`GapQuestion`), or in the log-odds
of pairs of texts (`PairQuestion`). It has each head's part in every row's evidence, and passes with edited heads.
`engine.locate` answers it: it scores heads and chooses some on one half of the rows, and reports on the other half what
editing them does, beside random heads.

To read it all, start with the answer and go down:

1. `locate_settings` (what a user sets), `engine` (choose, confirm, edit), `question` (what it asks for);
2. `head_maps` (gaps per head with their errors), `studies` (edits beside random heads);
3. `streams` and `decompose` (outputs as sums of heads), `head_features` (kept in one pass; TextSpan);
4. `edits` (what is put in a head's place), `passes` (forward passes with it), `gains` (learned edits);
5. groups: `rows`, `prompts`, `directions` (classes and concepts), `gap_question`, `gap_words` (its report);
6. pairs: `pair_rows`, `log_odds`, `pair_question`;
7. `session` (from settings to a question), `located` (the report), `live` (`fairhead view`).

`read_qk` and `assumption` are `fairhead attention`: q and k by group, held against what DAM's theory assumes.
"""

from fairhead import make_verb

make_verb(__name__)
