"""Which intersections of groups fare worst: chosen on one half of the rows, confirmed on the other.

The worst of many cells is bad by chance as well as in truth. So cells are ranked on one half, and what is reported of
them, with intervals corrected for how many were chosen, comes from the other half.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.audited_rows import View, cross, read_rows, with_weight
from fairhead.audit.metrics import Rules
from fairhead.audit.run_audit import Part
from fairhead.audit.tables import Draws
from fairhead.errors import InputError
from fairhead.records import Column, Records, TableColumns
from fairhead.report import Result
from fairhead.report.wording import CROSS, Scale, count, in_words, metric_name, scale_of
from fairhead.stats import GroupRow, Span
from fairhead.stats.bootstrap import STABLE_ROWS
from fairhead.stats.intervals import difference

if TYPE_CHECKING:
    from fairhead.report.page import Report
    from fairhead.report.sections.plain import PlainTables

# Rates of which more is better for the person who is predicted, and those of which less is.
_HIGHER, _LOWER = ("accuracy", "TPR", "precision", "NPV", "selection_rate"), ("FPR", "FNR", "FDR")


@dataclass(frozen=True)
class Slice:
    """One intersection."""

    group_by: str  # the columns, as in "race × sex"
    group: str  # the groups, as in "Black × f"
    n: int  # its rows in the half that confirms it
    chosen: float  # its rate on the half that it was chosen on
    confirmed: float  # its rate on the other half
    rest: float  # the rate of all other rows of the other half whose groups are known
    gap: Span  # confirmed minus rest, with an interval corrected for the number of slices
    is_worse: bool  # whether that interval lies on the worse side of 0


@dataclass(frozen=True)
class Slices(Result):
    """What `worst_slices` returns: slices, worst first, to go through, to show and to write."""

    slices: tuple[Slice, ...]  # the intersections that were chosen
    rate: str  # by which rate
    level: float  # of the intervals, for all slices together
    provenance: Mapping[str, Any]  # where the rows came from

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.slices)

    def __len__(self) -> int:
        return len(self.slices)

    def __getitem__(self, number: int) -> Slice:
        return self.slices[number]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"rate": self.rate, "level": self.level, "slices": [asdict(one) for one in self.slices]}

    def rows(self) -> list[dict[str, Any]]:
        """One row a slice."""
        return [{**vars(one), "gap": one.gap.value, "low": one.gap.low, "high": one.gap.high} for one in self.slices]

    def page(self) -> "Report":
        """The slices as a report."""
        from fairhead.report.page import Report, Sentence

        worse = [one.group for one in self.slices if one.is_worse]
        text = f"Confirmed as worse in {in_words(self.rate)}: {', '.join(worse) or 'no slice'}."
        return Report(
            title="Worst slices",
            question=f"Which intersections of groups have the worst {in_words(self.rate)}?",
            verdict=[Sentence(text, "bad" if worse else "unclear")],
            sections=[self.section()],
            provenance=dict(self.provenance),
        )

    def section(self) -> "PlainTables":
        """The slices as a section of a page."""
        from fairhead.report.sections.plain import PlainTable, PlainTables

        rows, share, name = [], Scale(100.0, 1, "%"), metric_name(self.rate)
        for one in self.slices:
            points = scale_of(self.rate, one.gap.value, one.gap.low, one.gap.high, difference=True)
            ends = points.interval(one.gap.low, one.gap.high, signed=True)
            figures = (share.write(one.chosen), share.write(one.confirmed), share.write(one.rest))
            gap, said = points.write(one.gap.value, signed=True), "worse" if one.is_worse else "not significant"
            rows.append((f"{one.group} ({one.group_by})", count(one.n), *figures, f"{gap} ({ends})", said))
        halves = "In the half that chose it", "In the other half", "All others"
        headings = ("Slice", "n", *halves, f"Difference, {100 * self.level:g} % for all", "Outcome")
        caption = f"{name}: the worst slices of one half of the rows, measured on the other half"
        if not rows:
            caption = f"{name}: no slice has enough rows in both halves"
        return PlainTables(title="Worst slices", tables=[PlainTable(caption=caption, columns=headings, rows=rows)])


def worst_slices(
    data: Records | Any,
    rate: str = "accuracy",
    *,
    most: int = 5,
    min_rows: int = STABLE_ROWS,
    n_boot: int = 2000,
    seed: int = 0,
    level: float = 0.95,
    positive: Any = None,
    **columns: Unpack[TableColumns],
) -> Slices:
    """The intersections of one to three group columns with the worst rate, confirmed on rows that did not choose them.

    Args:
        data: as `audit` takes it: labels, predictions and group columns; rows of one cluster stay in one half.
        rate: accuracy, TPR, precision, NPV or selection_rate (the lowest are worst), or FPR, FNR or FDR (the highest).
        most: slices that are chosen, at most.
        min_rows: rows that a slice needs in each half.
        n_boot: bootstrap replicates.
        seed: of the halves and of the bootstrap.
        level: of the intervals, for all slices together.
        positive: as in `audit`.
        columns: of files and data frames, as in `audit`.

    Returns:
        Worst first, as the first half ranks them: by the better end of the interval, so that no cell is chosen for its
        noise. A slice within another that ranks before it, or around it, says the same again and is left out.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> sex, race, label = rng.integers(0, 2, (3, 4000))
        >>> wrong = rng.random(4000) < np.where((sex == 1) & (race == 1), 0.5, 0.1)
        >>> records = Records.from_arrays(label, np.where(wrong, 1 - label, label), groups={"sex": sex, "race": race})
        >>> found = worst_slices(records, most=2)
        >>> found[0].group_by, found[0].group, found[0].is_worse
        ('sex × race', '1 × 1', True)
    """
    if rate not in (*_HIGHER, *_LOWER):
        raise InputError(f"the rate is {rate!r}; expected one of {', '.join((*_HIGHER, *_LOWER))}")
    records, positive = read_rows(data, positive, columns)
    records = with_weight(records)
    view = replace(View.of(records, positive), scores=None)
    if len(view.classes) != 2 or view.labels:
        raise InputError("slices are for two classes; name the positive one (positive=...), against the rest")
    names = [name for name, column in records.groups.items() if len(column.levels) > 1]
    if not names:
        raise InputError("no group column has two or more groups for slices")
    crossed = {
        CROSS.join(some): cross([records.groups[name] for name in some])
        for size in (1, 2, 3)
        for some in combinations(names, size)
    }
    sign, half, draws = 1.0 if rate in _HIGHER else -1.0, _half(view, seed), Draws(n_boot, seed)

    def rows_of(name: str, column: Column, side: NDArray[np.bool_], level: float) -> list[GroupRow]:
        rows = column.take(side)
        part = Part(view.take(side).take(rows.known), name, rows.complete(), draws)
        return part.by_group(Rules(level, min_rows, "max", np.ones(2)))

    found = [
        (row, code)
        for name, column in crossed.items()
        for code, row in enumerate(rows_of(name, column, half, level))
        if row.rates[rate].value is not None and row.n < 0.9 * half.sum()
    ]
    found.sort(key=lambda one: sign * ((one[0].rates[rate].high if sign > 0 else one[0].rates[rate].low) or 0.0))
    chosen: list[tuple[GroupRow, NDArray[np.integer]]] = []
    for row, code in found:
        if len(chosen) == most:
            break
        codes = crossed[row.group_by].codes
        inside = np.where(codes < 0, -1, codes == code)  # of the others, nobody knows
        if not any(_nested(inside == 1, other == 1) for _, other in chosen):
            chosen.append((row, inside))
    shared = 1 - (1 - level) / max(len(chosen), 1)  # Bonferroni
    slices = []
    for row, inside in chosen:
        n = int((inside[~half] == 1).sum())
        if not 0 < n < (inside[~half] >= 0).sum():
            continue
        two = rows_of("slice", Column(inside, ("rest", "slice")), ~half, shared)
        (rest, confirmed), value = (r.rates[rate].span for r in two), row.rates[rate].value
        if rest is None or confirmed is None or value is None:
            continue
        gap = difference(rest, confirmed, 0.0, None)
        worse = gap.high < 0 if sign > 0 else gap.low > 0
        slices.append(Slice(row.group_by, row.group, n, value, confirmed.value, rest.value, gap, worse))
    return Slices(tuple(slices), rate, level, dict(records.provenance))


def _nested(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> bool:
    """Whether all rows of one of two slices, each [n], are in the other."""
    return int((one & other).sum()) == min(int(one.sum()), int(other.sum()))


def _half(view: View, seed: int) -> NDArray[np.bool_]:
    """One half of the rows at random, [n]; a cluster is in one of them."""
    rng = np.random.default_rng(seed)
    if view.cluster is None:
        return np.asarray(rng.permutation(len(view.label)) % 2 == 0)
    return np.asarray((rng.permutation(int(view.cluster.max()) + 1) % 2 == 0)[view.cluster])
