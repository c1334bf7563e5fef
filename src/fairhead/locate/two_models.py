"""The head maps of two models on the same rows, and a paired test of each head: did training move the gap out of it?"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fairhead.errors import InputError
from fairhead.locate.ablation import names_of
from fairhead.locate.engine import Question
from fairhead.locate.head_maps import Head, HeadMap, largest_first
from fairhead.locate.pair_rows import TextPairs
from fairhead.report.page import Sentence
from fairhead.report.sections import Section
from fairhead.report.sections.headmap import Headmaps
from fairhead.report.sections.plain import PlainTable, PlainTables
from fairhead.report.wording import head_name, p_value, signed
from fairhead.stats import ALPHA


@dataclass(frozen=True)
class TwoModels:
    """Direct parts in the gap of the reporting half, of the model that was asked about and of another."""

    other: str  # what the other is called
    ours: HeadMap
    theirs: HeadMap
    difference: HeadMap  # theirs less ours, paired over rows, corrected over all heads

    @property
    def changed(self) -> list[Head]:
        """Heads whose part differs significantly, the largest difference first."""
        return [h for h in largest_first(np.abs(self.difference.gap)) if self.difference.p_adjusted[h] <= ALPHA]

    def verdict(self) -> Sentence:
        """How the gap differs, and in which heads."""
        d, first = self.difference, self.changed
        most = f": {names_of(first[:6])}{', ...' if len(first) > 6 else ''}" if first else ""
        smaller = abs(self.theirs.total) < abs(self.ours.total)
        tone = "unclear" if not d.has_total else "good" if smaller else "bad"
        return Sentence(
            f"In {self.other} the gap is {signed(self.theirs.total)} {d.unit}, in this model {signed(self.ours.total)} "
            f"(difference {signed(d.total)}, 95 % interval {signed(d.total_low)} to {signed(d.total_high)}). The "
            f"direct part of {len(first) or 'no'} of {d.gap.size} heads differs significantly{most}.",
            tone,
        )

    def sections(self) -> list[Section]:
        """The three maps, and the heads that differ most."""
        named = {"Difference": self.difference, self.other: self.theirs, "This model": self.ours}
        maps = [Section.from_json({"kind": "headmap", "title": n, **m.to_dict()}, n) for n, m in named.items()]
        d, rows = self.difference, []
        for at in largest_first(np.abs(d.gap))[:10]:
            ends = f"{signed(d.low[at])} to {signed(d.high[at])}"
            figures = (signed(x.gap[at]) for x in (self.ours, self.theirs, d))
            rows.append([head_name(*at), *figures, ends, p_value(float(d.p_adjusted[at]))])
        columns = ["head", "this model", self.other, "difference", "interval", "p adjusted"]
        table = PlainTable(caption=f"Heads whose direct part differs most, in {d.unit}", columns=columns, rows=rows)
        title = f"Beside {self.other}"
        return [
            Headmaps(title=title, text=self.verdict().text, names=list(named), maps=maps),
            PlainTables(title="Where the models differ", tables=[table]),
        ]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        maps = {"theirs": self.theirs, "difference": self.difference}
        changed = [list(head) for head in self.changed]
        return {"model": self.other, "changed": changed, **{name: found.to_dict() for name, found in maps.items()}}


def compare_models(question: Question, other: Question, called: str, level: float = 0.95) -> TwoModels:
    """Compare the heads of two models that were asked the same question about the same rows."""
    if question.shape != other.shape:
        shapes = (f"{layers} layers of {heads} heads" for layers, heads in (question.shape, other.shape))
        raise InputError(f"the models have {' and '.join(shapes)}; head maps are compared head by head")
    rows = ~question.choosing & question.comparable & other.comparable
    part = question.rows.take(rows)
    # Parts of pairs are seen from the pole that each model prefers.
    both_pairs = isinstance(question.rows, TextPairs) and isinstance(other.rows, TextPairs)
    side = question.rows.sign * other.rows.sign if both_pairs else 1.0
    first, second = question.rows.poles
    measure = f"difference of direct parts, {called} less this model, {first} minus {second}"
    ours, theirs = (question.parts[rows], question.total[rows]), (side * other.parts[rows], side * other.total[rows])
    return TwoModels(
        called,
        part.score(*ours, level),
        part.score(*theirs, level),
        part.score(theirs[0] - ours[0], theirs[1] - ours[1], level, measure),
    )
