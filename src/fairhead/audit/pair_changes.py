"""How each signed difference between two groups changed from one set of predictions to another.

A gap is a size: a group that was 20 points behind and is 17 ahead has nearly the gap it had. Its signed difference has
changed by 37 points.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.audit_results import REVERSED
from fairhead.audit.metrics import Rules
from fairhead.audit.paired_values import LEAST
from fairhead.audit.tables import Tables
from fairhead.stats import Difference, Span, intervals
from fairhead.stats.paired import change_of_size

Array = NDArray[np.float64]

# Of more groups, each is compared with the reference only.
ALL_PAIRS = 12


class PairChanges(NamedTuple):
    """Changes of one group column, how many standard errors each is, and the largest by chance."""

    differences: list[Difference]
    observed: Array  # shape [changes]
    largest: Array  # in swaps, shape [B]

    @classmethod
    def joined(cls, name: str, parts: "Sequence[PairChanges]") -> "PairChanges":
        """Changes of several rates of the column of this name."""
        found = [replace(d, group_by=name) for part in parts for d in part.differences]
        observed = np.concatenate([np.zeros(0), *(part.observed for part in parts)])
        return cls(found, observed, np.max([part.largest for part in parts], axis=0) if parts else np.zeros(1))


def pair_changes(
    bootstrap: tuple[Tables, Tables], swapped: tuple[Tables, Tables], rate: str, rules: Rules, reference: int
) -> PairChanges:
    """Changes of one rate for each pair of groups with enough rows, b minus a; the reference is second in its pairs.

    Args:
        bootstrap: counts of both predictions, and replicates.
        swapped: the same, with swaps for replicates.
        rate: its name in `rates.RATES`.
        rules: options of the audit.
        reference: number of the group that others are seen against.
    """
    drawn, swaps = [t.rates(rate) for t in bootstrap], [t.rates(rate) for t in swapped]
    enough = drawn[0].enough(rules.min_cell) & drawn[1].enough(rules.min_cell)
    names, groups = bootstrap[0].class_names(rate), bootstrap[0].groups
    found: list[Difference] = []
    observed: list[Array] = [np.zeros(0)]
    largest = np.zeros(len(swaps[0].star))
    for c, label in enumerate(names):
        known = [int(g) for g in np.flatnonzero(enough[c])]
        pairs = [(i, j) for i, j in combinations(known, 2) if len(known) <= ALL_PAIRS or reference in (i, j)]
        if not pairs:
            continue
        one, other = np.array([(j, i) if i == reference else (i, j) for i, j in pairs]).T
        (a, b), (star_a, star_b), (swap_a, swap_b) = (
            [side[..., c, one] - side[..., c, other] for side in sides]
            for sides in ([r.hat for r in drawn], [r.star for r in drawn], [r.star for r in swaps])
        )
        moved = swap_b - swap_a
        se = np.maximum(np.nanstd(moved, axis=0), LEAST)
        observed.append(np.abs(b - a) / se)
        largest = np.maximum(largest, np.nanmax(np.abs(moved) / se, axis=1))
        p = (1 + np.count_nonzero(~(np.abs(moved) < np.abs(b - a) - LEAST), axis=0)) / (1 + len(moved))
        star = star_b - star_a
        tails = [(1 - rules.level) / 2, (1 + rules.level) / 2]
        low, high = np.nanquantile(star, tails, axis=0)
        # The other group is ahead in b, and on neither side may the two be even.
        sides = [np.nanquantile(side, tails, axis=0).prod(axis=0) > 0 for side in (star_a, star_b)]
        turned = sides[0] & sides[1] & (a * b < 0)
        near_low, near_high = change_of_size(a, b, star_a, star_b, rules.level)
        spread = np.nanstd(star, axis=0)
        rows = np.minimum(drawn[0].rows[c], drawn[1].rows[c])
        for k, (i, j) in enumerate(zip(one.tolist(), other.tolist(), strict=True)):
            value, nearer = float(b[k] - a[k]), float(abs(b[k]) - abs(a[k]))
            found.append(
                Difference(
                    rate if len(names) == 1 else f"{rate}[{label}]",
                    None,
                    float(a[k]),
                    float(b[k]),
                    value,
                    min(float(low[k]), value),
                    max(float(high[k]), value),
                    int(rows[i] + rows[j]),
                    float(p[k]),
                    mde=intervals.minimum_detectable(float(spread[k]), rules.level),
                    ideal=0.0,
                    nearer=Span(nearer, min(float(near_low[k]), nearer), max(float(near_high[k]), nearer)),
                    note=REVERSED if turned[k] else None,
                    groups=(groups[i], groups[j]),
                )
            )
    return PairChanges(found, np.concatenate(observed), largest)


def corrected_pairs(columns: Sequence[PairChanges]) -> tuple[Difference, ...]:
    """All changes, with p corrected over pairs, rates and columns (max-T; columns count as independent)."""
    found = []
    for column in columns:
        for d, observed in zip(column.differences, column.observed.tolist(), strict=True):
            none = prod(1 - np.count_nonzero(~(c.largest < observed - LEAST)) / len(c.largest) for c in columns)
            found.append(replace(d, p_adjusted=max(d.p or 0.0, float(1 - none))))
    return tuple(found)
