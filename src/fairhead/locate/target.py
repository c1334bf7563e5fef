"""The cheapest edit that brings a gap down to a target.

Every edit (kinds, numbers of heads and strengths) is tried on the selection half. Of those that are predicted to reach
the wanted gap in new rows as well (`Evaluation.predicted`), the most accurate one is chosen, and reported on the other
half with intervals, beside those that no other edit beats in both gap and accuracy. Group-aware gains (`gains.py`)
are one more, with their figures out of fold.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fairhead.errors import InputError
from fairhead.locate.gains import GroupAwareGains, learn_group_aware_gains
from fairhead.locate.gap_question import GapQuestion
from fairhead.locate.head_maps import Head
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.rows import SURE
from fairhead.locate.studies import Changes, written
from fairhead.report.page import Sentence
from fairhead.report.sections.bench_block import EditFront, Frontier, Point
from fairhead.report.sections.plain import PlainTable, PlainTables
from fairhead.report.wording import metric_name, signed
from fairhead.stats import Difference

STRENGTHS = (0.25, 0.5, 0.75, 1.0)
COUNTS = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class Dose:
    """One edit: how it fares on the selection half, and, where it was run there, on the other."""

    kind: str  # with its strength behind @
    heads: tuple[Head, ...]
    gap: float  # on the selection half
    accuracy: float
    upper: float  # the end of the gap that is predicted for new rows
    gains: tuple[float, ...] = ()  # of the heads, where the kind is "gain"
    changes: Changes | None = None  # on the reporting half, against the model as it is

    def change(self, metric: str) -> Difference | None:
        """One figure of the reporting half, before and after."""
        return None if self.changes is None else self.changes.change(metric)

    def beats(self, other: "Dose") -> bool:
        """Whether it is as good in gap, accuracy and number of heads, and better in one."""
        at_least = self.gap <= other.gap and self.accuracy >= other.accuracy
        return at_least and (
            self.gap < other.gap or self.accuracy > other.accuracy or len(self.heads) < len(other.heads)
        )


@dataclass(frozen=True)
class Doses:
    """All edits that were tried."""

    metric: str
    target: float  # share of the gap that may be left
    before: float  # the gap of the model as it is, on the selection half
    tried: tuple[Dose, ...]
    chosen: Dose | None  # with its figures on the other half; None where no edit reaches the target
    front: tuple[Dose, ...]  # those that no other beats on the selection half, with their figures on the other

    def verdict(self) -> Sentence:
        """What was chosen, and whether the other half confirms it."""
        name, share = metric_name(self.metric), round(100 * self.target)
        goal = f"predicted to bring {name} down to {share} % in {100 * SURE:.0f} % of new samples."
        if self.chosen is None:
            return Sentence(f"None of {len(self.tried)} edits is {goal}", "unclear")
        gap, accuracy = self.chosen.change(self.metric), self.chosen.change("accuracy")
        if gap is None or gap.a is None or gap.b is None or accuracy is None or accuracy.value is None:
            return Sentence(f"{name} of the chosen edit is undefined on the other half: too few rows.", "unclear")
        reached, name = abs(gap.b) <= self.target * abs(gap.a), f"{self.chosen.kind} of {_many(self.chosen)}"
        return Sentence(
            f"Of {len(self.tried)} edits, {name} is the cheapest that is {goal} On the reporting half it goes from "
            f"{gap.a:.3f} to {gap.b:.3f} ({'confirmed' if reached else 'not reached'}), and accuracy changes by "
            f"{signed(100 * accuracy.value, 1)} points.",
            "good" if reached else "unclear",
        )

    def sections(self) -> list[PlainTables]:
        """The front and the chosen edit, on the reporting half: for the page and for the terminal."""
        rows, points = [], []
        for dose in self.front:
            gap, accuracy = dose.change(self.metric), dose.change("accuracy")
            name = f"{dose.kind}, {_many(dose)}{' (chosen)' if dose is self.chosen else ''}"
            rows.append([name, "–" if gap is None else f"{gap.b:.3f}", written(gap), written(accuracy, 100)])
            x, y = _ends(accuracy), _ends(gap)
            if x and y:
                plain = Point("as it is", x[0], x[0], x[0], y[0], y[0], y[0])
                points.append(Point(name, x[1], x[2], x[3], y[1], y[2], y[3]))
        columns = ["edit", metric_name(self.metric), "change", "change of accuracy, points"]
        caption = "Edits that no other beats on the selection half, with their figures on the reporting half."
        tables = [PlainTable(caption=caption, columns=columns, rows=rows)]
        title = "The cheapest edit that reaches the wanted gap"
        if not points:
            return [PlainTables(title=title, tables=tables)]
        return [EditFront(title=title, tables=tables, frontier=Frontier.of(self.metric, [plain, *points], ""))]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""

        def of(dose: Dose) -> dict[str, Any]:
            changes = (dose.change(name) for name in (self.metric, "accuracy"))
            figures: dict[str, Any] = {"gap": dose.gap, "accuracy": dose.accuracy}
            figures["upper"] = dose.upper if np.isfinite(dose.upper) else None
            figures |= {"gains": list(dose.gains)} if dose.gains else {}
            reported = {"reported": [d.to_dict() for d in changes if d is not None]}
            return {"kind": dose.kind, "heads": [list(h) for h in dose.heads], **figures, **reported}

        return {
            "metric": self.metric,
            "target": self.target,
            "before": self.before,
            "tried": len(self.tried),
            "chosen": None if self.chosen is None else of(self.chosen),
            "front": [of(dose) for dose in self.front],
        }


def _many(dose: Dose) -> str:
    return f"{len(dose.heads)} head{'' if len(dose.heads) == 1 else 's'}"


def _ends(change: Difference | None) -> tuple[float, ...]:
    """A figure before and after, and the interval of its change put where it was before; () where undefined."""
    if change is None or change.a is None or change.b is None or change.low is None or change.high is None:
        return ()
    return change.a, change.b, max(0.0, change.a + change.low), change.a + change.high


def group_aware_gains(question: GapQuestion, plan: LocatePlan) -> GroupAwareGains | None:
    """Group-aware gains, where passes edit every token and there are rows enough."""
    if question.passes is None or question.passes.everywhere is None:
        return None
    try:
        return learn_group_aware_gains(question, plan)
    except InputError as error:  # too few rows for this edit leave the others as they are
        logging.getLogger("fairhead").warning("group-aware gains were not tried: %s", error)
        return None


def find_dose(
    question: GapQuestion,
    ranked: Sequence[Head],  # best first
    plan: LocatePlan,  # with the metric, and the share of it that may be left
    *,
    kinds: Sequence[str] = ("mean", "project", "splince"),
    gains: bool | None = None,
    strengths: Sequence[float] = STRENGTHS,
    counts: Sequence[int] = COUNTS,
) -> Doses:
    """Try every kind, number of the ranked heads and strength in full forward passes.

    Group-aware gains are tried, too, where passes are fast (on a GPU) or they are asked for.
    """
    metric, new = plan.target_metric, len(question.reported)
    choosing, heads = np.flatnonzero(question.choosing), tuple(ranked)
    sizes = sorted({min(count, len(heads)) for count in counts})
    rows, tried, before = question.rows.take(choosing), [], float("nan")
    for kind in (f"{kind}@{strength:g}" if strength != 1 else kind for kind in kinds for strength in strengths):
        sets = [heads[:size] for size in sizes]
        plain, *reads = question.forward(choosing, kind)([(), *sets])
        figures = rows.figures([plain, *reads])
        before = float(figures[metric][0])
        for some, read, gap, accuracy in zip(sets, reads, figures[metric][1:], figures["accuracy"][1:], strict=True):
            if np.isfinite(gap):
                tried.append(Dose(kind, some, abs(gap), accuracy, rows.predicted(plain, read, plan, new)))
    learned = group_aware_gains(question, plan) if (question.fast if gains is None else gains) else None
    if learned is not None and learned.heads:
        question = question.with_gains(learned.values)
        gained = tuple(float(learned.values[head]) for head in learned.heads)
        tried.append(Dose("gain", learned.heads, learned.gap, learned.accuracy, learned.upper, gained))
    reach = [dose for dose in tried if dose.upper <= plan.share_left * abs(before)]
    chosen = max(reach, key=lambda dose: (dose.accuracy, -len(dose.heads)), default=None)
    front = sorted((d for d in tried if not any(other.beats(d) for other in tried)), key=lambda d: d.gap)
    wanted = [*dict.fromkeys([*front, *([] if chosen is None else [chosen])])]
    reporting, reported = question.rows.take(question.reported), {}
    for kind in dict.fromkeys(dose.kind for dose in wanted):
        of_kind = [dose for dose in wanted if dose.kind == kind]
        plain, *after = question.forward(question.reported, kind)([(), *(dose.heads for dose in of_kind)])
        for dose, read in zip(of_kind, after, strict=True):
            reported[dose] = replace(dose, changes=reporting.compare(plain, read, plan))
    found = tuple(reported[dose] for dose in wanted)
    return Doses(metric, plan.share_left, before, tuple(tried), None if chosen is None else reported[chosen], found)
