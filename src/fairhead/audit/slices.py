"""Which intersections of groups fare worst: chosen on one half of the rows, confirmed on the other.

The worst of many cells is bad by chance as well as in truth. So cells are ranked on one half, and what is reported of
them, with intervals corrected for how many were chosen, comes from the other half.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from fairhead.audit.audit_results import GroupRow
from fairhead.audit.audited_rows import CROSS, with_weight
from fairhead.audit.drift import span
from fairhead.audit.run_audit import audit
from fairhead.errors import InputError
from fairhead.records import Column, Records
from fairhead.report.wording import Scale, count, metric_name, scale_of
from fairhead.stats.intervals import difference
from fairhead.stats.outcome import Span

if TYPE_CHECKING:
    from fairhead.report.sections.plain_tables import PlainTables

# Rates of which more is better for the person who is predicted, and those of which less is.
_HIGHER, _LOWER = ("accuracy", "TPR", "precision", "NPV", "selection_rate"), ("FPR", "FNR", "FDR")


@dataclass(frozen=True)
class Slice:
    """One intersection.

    Attributes:
        group_by: the columns, as in "race × sex".
        group: the groups, as in "Black × f".
        n: its rows in the half that confirms it.
        chosen: its rate on the half that it was chosen on.
        confirmed: its rate on the other half.
        rest: the rate of all other rows of the other half.
        gap: confirmed minus rest, with an interval corrected for the number of slices.
        is_worse: whether that interval lies on the worse side of 0.
    """

    group_by: str
    group: str
    n: int
    chosen: float
    confirmed: float
    rest: float
    gap: Span
    is_worse: bool


def worst_slices(
    records: Records, rate: str = "accuracy", *, most: int = 5, min_rows: int = 30, seed: int = 0, **options: Any
) -> tuple[Slice, ...]:
    """The intersections of one to three group columns with the worst rate, confirmed on rows that did not choose them.

    Args:
        records: labels, predictions and group columns; rows of one cluster stay in one half.
        rate: accuracy, TPR, precision, NPV or selection_rate (the lowest are worst), or FPR, FNR or FDR (the highest).
        most: slices that are chosen, at most.
        min_rows: rows that a slice needs in each half.
        seed: of the halves and of the bootstrap.
        options: as `audit` takes them.

    Returns:
        Worst first, as the first half ranks them: by the better end of the interval, so that no cell is chosen for its
        noise. Of nested slices with the same rows, the one with fewer columns.

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
    if len(records.classes) > 2:
        raise InputError("slices are for two classes; name the positive one (positive=...), against the rest")
    records = with_weight(records)
    first, second = _halves(records, seed)
    names = [name for name, column in records.groups.items() if len(column.levels) > 1]
    if not names:
        raise InputError("there is no column of two groups or more to cut slices from")
    for label in (label for name in names for label in (name, *map(str, records.groups[name].levels))):
        if CROSS in label:
            raise InputError(f"the name {label!r} holds{CROSS}, which joins the names of slices: give it another")
    sign = 1.0 if rate in _HIGHER else -1.0
    options = {"metrics": ["DP"], "seed": seed, **options, "min_cell": min_rows}
    ranked = sorted(
        (row for row in _rows(first, names, options) if row.n < 0.9 * len(first)),
        key=lambda row: sign * ((row.rates[rate].high if sign > 0 else row.rates[rate].low) or 0.0),
    )
    chosen: list[GroupRow] = []
    for row in (row for row in ranked if row.rates[rate].value is not None):
        if len(chosen) < most and not any(_same(row, other) for other in chosen):
            chosen.append(row)
    level = 1 - (1 - options.pop("level", 0.95)) / max(len(chosen), 1)  # Bonferroni
    found = []
    for row in chosen:
        inside = _inside(second, row)
        if not inside.any() or inside.all():
            continue
        two = Records(
            second.label,
            second.prediction,
            groups={"slice": Column(inside.astype(np.int8), ("rest", "slice"))},
            cluster=second.cluster,
            weight=second.weight,
        )
        rest, confirmed = (r.rates[rate] for r in audit(two, **options, level=level).by_group)
        sides, value = [span(e) for e in (rest, confirmed)], row.rates[rate].value
        if sides[0] is None or sides[1] is None or value is None:
            continue
        gap = difference(sides[0], sides[1], 0.0, None)
        worse = gap.high < 0 if sign > 0 else gap.low > 0
        rates = value, sides[1].value, sides[0].value
        found.append(Slice(row.group_by, row.group, int(inside.sum()), *rates, gap, worse))
    return tuple(found)


def _rows(records: Records, names: Sequence[str], options: dict[str, Any]) -> list[GroupRow]:
    """Each group of each column, and of crossings of two and three of them."""
    found: list[GroupRow] = []
    for size in (1, 2, 3):
        for some in combinations(names, size):
            crossed = audit(records, group_by=some, intersections=size > 1, **options).by_group
            found += [row for row in crossed if row.group_by == CROSS.join(some)]
    return found


def _halves(records: Records, seed: int) -> tuple[Records, Records]:
    """Two halves of the rows at random; a cluster is in one of them."""
    rng = np.random.default_rng(seed)
    if records.cluster is None:
        side = rng.permutation(len(records)) % 2 == 0
    else:
        codes = records.cluster.codes
        side = (rng.permutation(int(codes.max()) + 1) % 2 == 0)[codes]
    return records.take(side), records.take(~side)


def _inside(records: Records, row: GroupRow) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The rows of a slice, shape [n]."""
    found = np.ones(len(records), dtype=bool)
    for name, group in zip(row.group_by.split(CROSS), row.group.split(CROSS), strict=True):
        column = records.groups[name]
        found &= column.codes == [str(level) for level in column.levels].index(group)
    return found


def _same(row: GroupRow, other: GroupRow) -> bool:
    """Whether two slices are nested and hold as many rows: then they hold the same."""
    return row.n == other.n and set(other.group.split(CROSS)) <= set(row.group.split(CROSS))


def slices_section(slices: Sequence[Slice], rate: str, level: float) -> "PlainTables":
    """Slices as a section of a page."""
    from fairhead.report.sections.plain_tables import PlainTable, PlainTables

    rows = []
    for one in slices:
        points = scale_of(rate, one.gap.value, one.gap.low, one.gap.high, difference=True)
        share = Scale(100.0, 1, "%")
        gap = f"{points.write(one.gap.value, signed=True)} ({points.interval(one.gap.low, one.gap.high, signed=True)})"
        said = "worse" if one.is_worse else "not significant"
        figures = (share.write(one.chosen), share.write(one.confirmed), share.write(one.rest))
        rows.append((f"{one.group} ({one.group_by})", count(one.n), *figures, gap, said))
    headings = (
        "Slice",
        "n",
        "Chosen on",
        "Confirmed",
        "All others",
        f"Difference, {100 * level:g} % for all",
        "Outcome",
    )
    caption = f"{metric_name(rate)}: the worst slices of one half of the rows, as the other half has them"
    table = PlainTable(caption=caption, columns=headings, rows=rows)
    return PlainTables(title="Worst slices", tables=[table])
