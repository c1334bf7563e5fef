"""Two samples of different rows, last month's and this month's: how gaps and the rates of groups have changed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import NormalDist
from typing import Any

from fairhead.audit.audit_results import REVERSED, Audit, Comparison
from fairhead.audit.catalogue import METRICS
from fairhead.audit.pair_changes import ALL_PAIRS
from fairhead.audit.run_audit import audit
from fairhead.errors import InputError
from fairhead.records import Records
from fairhead.stats import Difference, Estimate
from fairhead.stats.intervals import difference, minimum_detectable
from fairhead.stats.outcome import Correction, Span, adjust

# Rates of groups that are followed beside the gaps: a gap that turns around may stay as large as it was.
_FOLLOWED = ("selection_rate", "TPR", "FPR", "accuracy")


def drift(a: Records | Any, b: Records | Any, *, correction: Correction = "holm", **options: Any) -> Comparison:
    """How much gaps and rates of groups differ between two samples of different rows, b minus a.

    The samples are independent of each other, so the interval of a difference is put together from those of both sides
    (MOVER, Zou and Donner 2008), and its p-value follows from where that interval would end at 0. P-values are
    corrected over all differences. For predictions of the same rows use `compare`, which is much sharper.

    Args:
        a: the earlier rows, as `audit` takes them: records, a file or a data frame.
        b: the later rows, with the same classes and group columns; groups need not be the same.
        correction: of p-values: "holm" or "bh".
        options: as `audit` takes them.

    Example:
        >>> before, after = ["a"] * 90 + ["b"] * 90, ["a"] * 90 + ["b"] * 90
        >>> old = Records.from_arrays([0, 1] * 90, [0, 1] * 90, groups={"g": before})
        >>> new = Records.from_arrays([0, 1] * 90, [0, 1] * 45 + [1] * 90, groups={"g": after})
        >>> gap = next(d for d in drift(old, new, metrics=["DP"]).differences if d.metric == "DP")
        >>> gap.a, gap.b, gap.outcome
        (0.0, 0.5, 'worse')
    """
    first, second = audit(a, **options), audit(b, **options)
    classes, others = (found.provenance["audit"]["classes"] for found in (first, second))
    if set(classes) != set(others):
        raise InputError(f"a has the classes {classes} and b has {others}; the same are expected")
    level = first.provenance["audit"]["level"]
    found = _corrected([_difference(*pair, level) for pair in _pairs(first, second)], correction)
    pairs = _corrected(list(_signed_changes(first, second, level)), correction)
    provenance = {
        "a": {name: value for name, value in first.provenance.items() if name != "audit"},
        "b": {name: value for name, value in second.provenance.items() if name != "audit"},
        "level": level,
        "correction": correction,
        "paired": False,
    }
    return Comparison(tuple(found), first, second, provenance, tuple(pairs))


def _corrected(found: Sequence[Difference], correction: Correction) -> list[Difference]:
    return [replace(d, p_adjusted=p) for d, p in zip(found, adjust([d.p for d in found], correction), strict=True)]


def _pairs(a: Audit, b: Audit) -> Iterator[tuple[str, str | None, Estimate, Estimate]]:
    """Figures that both audits have: name, of what, and both."""
    later = {(e.metric, e.group_by): e for e in b.estimates}
    for e in a.estimates:
        if (e.metric, e.group_by) in later:
            yield e.metric, e.group_by, e, later[e.metric, e.group_by]
    rows = {(row.group_by, row.group): row for row in b.by_group}
    for row in a.by_group:
        other = rows.get((row.group_by, row.group))
        if other is not None:
            for rate in _FOLLOWED:
                if rate in row.rates and rate in other.rates:
                    yield rate, f"{row.group_by}: {row.group}", row.rates[rate], other.rates[rate]


def _signed_changes(a: Audit, b: Audit, level: float) -> Iterator[Difference]:
    """How the signed difference between two groups changed, in each rate behind the headline gaps.

    Of many groups each is compared with the reference only.
    """
    options = a.provenance["audit"]
    behind = {rate for metric in options["headline"] if metric in METRICS for rate in METRICS[metric].rates}
    later = {(row.group_by, row.group): row.rates for row in b.by_group}
    for column, reference in options["reference"].items():
        rows = [row for row in a.by_group if row.group_by == column and (column, row.group) in later]
        for pair in combinations(rows, 2):
            if len(rows) > ALL_PAIRS and reference not in (pair[0].group, pair[1].group):
                continue
            two, one = sorted(pair, key=lambda row: row.group != reference)  # the reference is second
            for name in (name for name in one.rates if name.partition("[")[0] in behind):
                figures = [one.rates, two.rates, later[column, one.group], later[column, two.group]]
                rates = [known[name] for known in figures if name in known]
                spans = [known for known in map(span, rates) if known is not None]
                if len(spans) < len(figures):
                    continue
                before, after = (difference(spans[k + 1], spans[k], 0.0, None) for k in (0, 2))
                sure = all(side.low > 0 or side.high < 0 for side in (before, after))
                note = REVERSED if sure and before.value * after.value < 0 else None
                found = _changed(name, column, before, after, sum(rate.n for rate in rates), 0.0, None, level)
                yield replace(found, note=note, groups=(one.group, two.group))


def _difference(metric: str, of: str | None, a: Estimate, b: Estimate, level: float) -> Difference:
    n, one, other = a.n + b.n, span(a), span(b)
    if one is None or other is None:
        why = "; ".join(f"in {side}: {e.undefined}" for side, e in (("A", a), ("B", b)) if e.undefined)
        return Difference(metric, of, a.value, b.value, None, None, None, n, undefined=why, ideal=a.ideal)
    return _changed(metric, of, one, other, n, a.ideal, a.ideal, level)


def _changed(
    metric: str, of: str | None, one: Span, other: Span, n: int, ideal: float | None, folded: float | None, level: float
) -> Difference:
    """The change from one figure to another; `folded` is where such figures are folded, if anywhere."""
    found = difference(one, other, 0.0, folded)
    # The standard error on the side of 0, as far as the interval says; half the width where there is no difference.
    normal = NormalDist()
    reach = (found.value - found.low if found.value > 0 else found.high - found.value) or (found.high - found.low) / 2
    se = reach / normal.inv_cdf((1 + level) / 2)
    p = 1.0 if found.value == 0 else 0.0 if se == 0 else 2 * normal.cdf(-abs(found.value) / se)
    ends = found.value, found.low, found.high
    mde = minimum_detectable(se, level)
    return Difference(metric, of, one.value, other.value, *ends, n, p, None, None, mde, ideal)


def span(estimate: Estimate) -> Span | None:
    """A figure with its interval, where it is defined."""
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return None
    return Span(estimate.value, estimate.low, estimate.high)
