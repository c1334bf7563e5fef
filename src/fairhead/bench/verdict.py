"""The lines of a table, and in words which methods differ significantly from the baseline and what would be missed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fairhead.audit.seeds import SeedDifference, SeedFigure
from fairhead.mitigate.registry import LADDER
from fairhead.report.sections.bench_block import Choice, Cost
from fairhead.report.wording import in_short, signed
from fairhead.stats.outcome import p_text

# The gap that the verdict is about: the first of these that has a value.
_GAPS = ("EOd", "EOp", "DP")
_NAMES = {"worst_group_accuracy": "worst-group accuracy"}


@dataclass(frozen=True)
class Line:
    """One method in a block."""

    method: str  # its name
    told: int  # its rung on the `LADDER` of what methods are told; never in bold above 2
    seeds: tuple[int, ...]  # those that are done
    figures: Mapping[str, SeedFigure]  # metric -> figure over seeds
    # Metric -> paired difference from the baseline, p corrected over the methods of the block (Holm)
    differences: Mapping[str, SeedDifference]
    best: frozenset[str]  # metrics in which it is significantly better than every other method
    cost: Cost | None  # averaged over seeds
    failed: Mapping[int, str]  # seed -> error of the cells that failed
    remark: str = ""  # how it uses groups, if it does
    search: Choice | None = None  # what a search of its hyper-parameters found; None where there was none

    @property
    def uses_groups(self) -> bool:
        """Whether it trains or was chosen with groups: a reference."""
        return self.told == len(LADDER) - 1

    @property
    def circular(self) -> bool:
        """Whether the rows that test it have chosen its epoch."""
        return "circular" in self.remark

    def aside(self, metric: str, baseline: str) -> str:
        """The remark in brackets, unless the name says it already, and what it was compared with but the baseline."""
        said = f" ({self.remark})" if self.remark and self.remark not in self.method else ""
        other = self.differences[metric].methods[0]
        return said + (f" against {other}" if other not in ("", baseline) else "")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            **vars(self),
            "uses_groups": self.uses_groups,
            "figures": {name: figure.to_dict() for name, figure in self.figures.items()},
            "differences": {name: difference.to_dict() for name, difference in self.differences.items()},
            "best": sorted(self.best),
            "cost": None if self.cost is None else vars(self.cost),
            "failed": {str(seed): error for seed, error in self.failed.items()},
            "search": None if self.search is None else asdict(self.search),
        }


def verdict(lines: Sequence[Line], baseline: str, commonest: float | None = None) -> str:
    """A few sentences on one block: how large the gap is, which methods change it significantly, and at what price.

    `commonest` is the share of the test rows that have the commonest class: the accuracy of an answer without a model.
    """
    plain = next((line for line in lines if line.method == baseline and line.figures), None)
    if plain is None:
        return f"{baseline} has no result: nothing to compare with."
    known = [gap for gap in _GAPS if gap in plain.figures and plain.figures[gap].mean is not None]
    if not known:
        return "No gap is defined: too few rows in a group."
    gap = known[0]
    said = [f"With {baseline}, {gap} is {_percent(plain, gap)} at an accuracy of {_percent(plain, 'accuracy')}."]
    if len(plain.seeds) < 2:
        return f"{said[0]} One seed: the variance of training is unknown, so no difference can be tested."
    tested = [line for line in lines if _p(line, gap) is not None]
    if not tested:
        said.append(f"No other method shares two seeds with {baseline} yet: nothing to compare.")
    circular = [line for line in tested if line.circular]
    free = [line for line in tested if not line.uses_groups]
    references = [line for line in tested if line.uses_groups and not line.circular]
    for outcome, word in (("better", "smaller"), ("worse", "larger")):
        differ = [line for line in free if line.differences[gap].outcome == outcome]
        if differ:
            said.append(f"Significantly {word} {gap}: {_listed(differ, gap)}.")
    vague = [line for line in free if not _differs(line, gap)]
    if vague:
        who = ", ".join(line.method for line in vague) + (" does not differ" if len(vague) == 1 else " do not differ")
        if vague == free and len(free) > 1:
            who = "No method without groups differs"
        said.append(f"{who} significantly from {baseline} in {gap}; {_missed(vague, gap)}.")
        cost = [line for line in vague if _differs(line, "accuracy")]
        if cost:
            changes = ", ".join(f"{line.method} {_points(_change(line, 'accuracy'))}" for line in cost)
            said.append(f"Of these, accuracy differs significantly: {changes} points.")
    differ = [line for line in references if _differs(line, gap)]
    how = "trained or chosen" if any("chosen" in line.remark for line in differ or references) else "trained"
    if differ:
        said.append(f"{how.capitalize()} with the groups: {_listed(differ, gap)}.")
    elif references:
        names = " and ".join(line.method for line in references)
        said.append(
            f"Even {how} with the groups ({names}), {gap} does not differ significantly from that of {baseline}."
        )
    if circular:
        changes = "; ".join(
            f"{line.method} {_points(_change(line, gap))} points against {line.differences[gap].methods[0]} "
            f"({p_text(_p(line, gap))})"
            for line in circular
        )
        said.append(f"Circular, as the test rows chose the epoch by their EOd, and no result: {changes}.")
    return " ".join([*said, *_no_better_than_a_guess(lines, commonest)])


def _no_better_than_a_guess(lines: Sequence[Line], commonest: float | None) -> list[str]:
    """A sentence on the methods whose small gaps may be those of answers that tell nothing, if there are any."""
    low = {line.method: line.figures["accuracy"].low for line in lines if "accuracy" in line.figures}
    names = [] if commonest is None else [name for name, end in low.items() if end is not None and end <= commonest]
    if commonest is None or not names:
        return []
    return [
        f"Not shown to be more often right than the commonest class on its own ({100 * commonest:.1f} %): "
        f"{', '.join(names)}. A small gap is no merit there."
    ]


def _listed(lines: Sequence[Line], gap: str) -> str:
    return "; ".join(f"{line.method} {_points(_change(line, gap))} points ({_price(line)})" for line in lines)


def _price(line: Line) -> str:
    """What a smaller gap costs."""
    if _p(line, "accuracy") is None:
        return "accuracy not compared"
    if not _differs(line, "accuracy"):
        return f"accuracy: not significant, {p_text(_p(line, 'accuracy'))}"
    return f"accuracy {_points(_change(line, 'accuracy'))} points"


def finding(lines: Sequence[Line], metric: str, baseline: str) -> str:
    """One sentence: which methods differ significantly from the baseline in this metric, and what would be missed."""
    tested = [line for line in lines if _p(line, metric) is not None]
    name = _NAMES.get(metric, metric)
    if not tested:
        reasons = [f.undefined for line in lines for m, f in line.figures.items() if m == metric and f.undefined]
        why = f"undefined ({reasons[0]})" if reasons else f"fewer than two seeds in common with {baseline}"
        return f"{name}: {why}."
    differ = [line for line in tested if _differs(line, metric)]
    without = _without(lines, metric)
    if all(line.differences[metric].mde is None for line in tested):
        return f"{name}: the same answers as {baseline} everywhere.{without}"
    if not differ:
        who = f"{tested[0].method} does not differ" if len(tested) == 1 else f"none of {len(tested)} methods differs"
        return f"{name}: {who} significantly from {baseline}; {_missed(tested, metric)}.{without}"
    said = [f"{line.method} {_points(_change(line, metric))} points{line.aside(metric, baseline)}" for line in differ]
    rest = [line for line in tested if line not in differ]
    others = f"; for the other {len(rest)} it is not significant, and {_missed(rest, metric)}" if rest else ""
    return f"{name}: {', '.join(said)} against {baseline}{others}.{without}"


def _without(lines: Sequence[Line], metric: str) -> str:
    """A sentence on the cells that a figure goes without, if there are any: the worst group may be among them."""
    reasons = list(dict.fromkeys(r for line in lines if metric in line.figures for r in line.figures[metric].excluded))
    return f" Left out: {in_short(reasons)}." if reasons else ""


def _missed(lines: Sequence[Line], metric: str) -> str:
    """The smallest difference that would have been found, of each method its own."""
    known = {line.method: 100 * mde for line in lines if (mde := line.differences[metric].mde) is not None}
    if not known:
        return "their answers are the same everywhere"
    if min(known.values()) >= 100:
        return "these seeds and rows are too few to show any difference"
    each = ", ".join(f"{f'{mde:.1f}' if mde < 100 else 'none'} for {name}" for name, mde in known.items())
    return f"the smallest detectable difference in points, each compared alone, is {each}"


def _p(line: Line, metric: str) -> float | None:
    return line.differences[metric].p_adjusted if metric in line.differences else None


def _differs(line: Line, metric: str) -> bool:
    return metric in line.differences and line.differences[metric].significant


def _change(line: Line, metric: str) -> float:
    return line.differences[metric].value or 0.0


def _points(value: float) -> str:
    return signed(100 * value, 1)


def _percent(line: Line, metric: str) -> str:
    figure = line.figures.get(metric)
    return "unknown size" if figure is None or figure.mean is None else f"{100 * figure.mean:.1f} %"
