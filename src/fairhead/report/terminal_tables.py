"""Audits and comparisons in a terminal. Percentages are for people; JSON has fractions."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fairhead.report.form import AuditFigures, ComparisonFigures
from fairhead.report.wording import (
    LIBRARIES,
    between,
    change_between,
    is_share,
    left_out,
    main_rates,
    metric_name,
    number,
    p_value,
    said,
    said_of_difference,
)
from fairhead.stats import Difference, Estimate, GroupRow

_RATE_NAMES = {"selection_rate": "selected", "base_rate": "base rate", "mean_error": "mean error"}
# Columns that a rate takes with its interval on the same line or on a second one, and the space between columns.
_RATE_WIDTH = 19
_STACKED_WIDTH = 14
_SPACE = 2
# Below this width, names share a column, and the comparison leaves out the minimum detectable effect.
_NARROW = 80
# What the other columns of a comparison take on such a terminal.
_REST = 60
# From this width on, a difference and its interval stand on one line.
_WIDE = 100
# From this width on, names and verdicts are as wide as they need.
_ROOM_FOR_WORDS = 120
# "(0.672–0.909)": narrower, and an interval would be broken within a number.
_INTERVAL_WIDTH = 13
# Of more groups the largest are shown; that many seldom are groups of people.
_MANY_GROUPS = 60
# Changes between two groups that a comparison shows.
_MOST_PAIRS = 8


def show_audit(console: Console, audit: AuditFigures, wanted: Sequence[str] = ()) -> None:
    """Overall figures, figures of each group (of the rates wanted, or those that fit), gaps."""
    overall = [
        f"{_metric_name(e.metric)} {_figure(e, unit=' %')}"
        for e in audit.estimates
        if e.group_by is None and e.value is not None
    ]
    if overall:
        console.print(f"Overall: {', '.join(overall)}  [dim](n = {audit.estimates[0].n:,})[/]", highlight=False)
    for group_by, of_column in audit.groups().items():
        console.print()
        rows, n_hidden = _shown_groups(of_column)
        word = _longest_word([group_by, *(row.group for row in rows)], console.width // 3)
        left = console.width - (word + _SPACE + max(len(f"{row.n:,}") for row in rows))
        stacked = max(1, left // _STACKED_WIDTH)
        room = max(left // _RATE_WIDTH, min(4, stacked))
        rates = list(wanted) or main_rates(list(rows[0].rates), room)
        for start in range(0, len(rates), stacked):  # where many are wanted, a second table holds what does not fit
            console.print(_group_table(rows, rates[start : start + stacked], group_by, audit.level, word, left))
        if n_hidden:
            console.print(f"[dim]and {n_hidden:,} smaller groups (all in --json)[/]", highlight=False)
        gaps = [e for e in audit.estimates if e.group_by == group_by]
        console.print()
        console.print(_gap_table(gaps, group_by, audit.level, console.width < _NARROW))
        _show_reasons(console, [row.rates[rate] for row in rows for rate in rates])
    _show_legend(console, {e.metric: e.detail.get("definition") for e in audit.estimates if e.group_by is not None})


def show_comparison(console: Console, comparison: ComparisonFigures) -> None:
    """Paired differences of two sets of predictions."""
    alone = [(side, comparison.provenance.get(f"only_in_{side.lower()}", 0)) for side in "AB"]
    if any(count for _, count in alone):
        left_out = " and ".join(f"{count:,} rows that are only in {side}" for side, count in alone if count)
        console.print(f"Left out: {left_out}.", style="yellow", highlight=False)
    sizes = sorted({d.n for d in comparison.differences})
    rows = " to ".join(f"{n:,}" for n in dict.fromkeys([*sizes[:1], *sizes[-1:]]))
    paired = "paired" if comparison.provenance.get("paired", True) else "separate samples"
    table = _table(f"B − A, {paired}, {rows} rows, {100 * comparison.level:g} % intervals")
    narrow, roomy = console.width < _NARROW, console.width >= _WIDE
    longest = None if console.width >= _ROOM_FOR_WORDS else len("significant")
    # A long name of a column shares a column with the metrics, so that it is not broken.
    named = _longest_word((f"({d.group_by})" for d in comparison.differences), console.width - _REST)
    shared = narrow or (longest is not None and named > longest)
    # Just so wide: a least width that other columns do not give way to pushes the last one over the edge.
    table.add_column("metric", overflow="fold", width=max(longest, named) if longest and shared else longest)
    if not shared:
        table.add_column("by", overflow="fold")
    for title in ("A", "B", "B − A", "p adj.") if narrow else ("A", "B", "B − A", "MDE", "p adj."):
        wide = (11 if narrow else _INTERVAL_WIDTH if console.width < _WIDE else 25) if title == "B − A" else None
        table.add_column(title, justify="right", overflow="fold", width=wide)
    table.add_column("verdict", overflow="fold", width=longest)

    for d in comparison.differences:
        word = said_of_difference(d)
        style = {"B better": "green", "B worse": "red"}.get(word, "")
        metric, by = _metric_name(d.metric), escape(d.group_by or "all rows")
        table.add_row(
            *([f"{metric} ({by})"] if shared else [metric, by]),
            _number(d.metric, d.a) + (_attained(comparison.a, d) if roomy else ""),
            _number(d.metric, d.b) + (_attained(comparison.b, d) if roomy else ""),
            _with_interval(d.metric, d.value, d.low, d.high),
            *([] if narrow else [_number(d.metric, d.mde)]),
            p_value(d.p_adjusted),
            f"[{style}]{escape(word)}[/]" if style else escape(word),
        )
    console.print(table)
    correction = comparison.provenance.get("correction")
    if correction:
        kind = "permutation p (of gaps: of the change between any two groups; of lowest rates: of equal predictions)"
        kind = kind if comparison.provenance.get("paired", True) else "p"
        text = f"p adj.: {kind}, corrected over all lines ({correction})."
        text += "" if narrow else " MDE: smallest change, taken alone, that such a sample detects with 80 % power."
        console.print(f"[dim]{text}[/]", highlight=False)
    changed = [p for p in comparison.pairs if p.significant]
    changed.sort(key=lambda p: -abs(p.value or 0.0))
    if changed:
        console.print("[bold]Signed differences between two groups that changed[/]")
    for pair in changed[:_MOST_PAIRS]:
        console.print(f"{escape(change_between(pair))}: {said_of_difference(pair)}", highlight=False)
    if len(changed) > _MOST_PAIRS:
        console.print(f"[dim]and {len(changed) - _MOST_PAIRS} more (all in --json)[/]", highlight=False)


def _attained(audit: AuditFigures, difference: Difference) -> str:
    """The groups that make a gap in one of the two audits, on a line of their own."""
    found = [e for e in audit.estimates if (e.metric, e.group_by) == (difference.metric, difference.group_by)]
    groups = between(found[0]) if found and found[0].value is not None and len(found[0].groups) > 1 else ""
    return f"\n[dim]{escape(groups)}[/]" if groups else ""


def _figure(estimate: Estimate, unit: str = "") -> str:
    """Value and interval: percent for shares, plain numbers for the rest; a dash where there is none."""
    percent = unit if is_share(estimate.metric) else ""
    return _with_interval(estimate.metric, estimate.value, estimate.low, estimate.high, percent)


def _metric_name(metric: str) -> str:
    library, _, rest = metric.rpartition(".")
    words = metric_name(rest) if rest.startswith("cramers") else rest.replace("_group_", "-group ").replace("_", " ")
    return escape(f"{words} ({LIBRARIES.get(library, library)})" if library else words)


def _number(metric: str, value: float | None) -> str:
    if value is None or is_share(metric):
        return number(None if value is None else 100 * value, 1)
    return number(value, 3 if abs(value) < 10 else 1 if abs(value) < 1000 else 0)


def _with_interval(metric: str, value: float | None, low: float | None, high: float | None, unit: str = "") -> str:
    if value is None:
        return "–"
    # An en dash between two numbers reads as a minus when either is negative.
    between_ends = "–" if low is None or low >= 0 else " to "
    return f"{_number(metric, value)}{unit} ({_number(metric, low)}{between_ends}{_number(metric, high)})"


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )


def _longest_word(names: Iterable[str], most: int) -> int:
    """How wide a column must be, at most, so that no word of these names is broken."""
    return min(most, max((cell_len(word) for name in names for word in name.split()), default=1))


def _group_table(
    rows: Sequence[GroupRow], rates: Sequence[str], group_by: str, level: float, word: int, left: int
) -> Table:
    """One line a group: n and its rates, for which so much of the width is left beside the longest word of a name."""
    unit = "percent with " if any(is_share(rate) for rate in rates) else ""
    table = _table(f"{escape(group_by)}: each group, {unit}{100 * level:g} % intervals")
    titles = [_RATE_NAMES.get(rate, rate) for rate in rates]
    figures = [[_figure(row.rates[rate]) for rate in rates] for row in rows]
    wide = sum(_SPACE + max(map(len, column)) for column in zip(titles, *figures, strict=True))
    # Where rates must give way, just so wide: a least width that they do not give way to cuts off the last one.
    table.add_column(escape(group_by), overflow="fold", min_width=word, width=word if wide > left else None)
    table.add_column("n", justify="right", no_wrap=True)
    for title in titles:
        table.add_column(escape(title), justify="right", overflow="fold")
    for row, of_group in zip(rows, figures, strict=True):
        table.add_row(escape(row.group), f"{row.n:,}", *of_group)
    return table


def _shown_groups(rows: Sequence[GroupRow]) -> tuple[list[GroupRow], int]:
    """The rows to show, in their order, and how many are left out: the smallest of very many."""
    if len(rows) <= _MANY_GROUPS:
        return list(rows), 0
    largest = sorted(range(len(rows)), key=lambda i: -rows[i].n)[:_MANY_GROUPS]
    return [rows[i] for i in sorted(largest)], len(rows) - _MANY_GROUPS


def _gap_table(gaps: Sequence[Estimate], group_by: str, level: float, narrow: bool) -> Table:
    """One line a metric: value with interval, between which groups, minimum detectable effect, n, verdict."""
    points = "in points (ratios, V and AUC as they are), " if any(is_share(gap.metric) for gap in gaps) else "with "
    table = _table(f"{escape(group_by)}: gaps {points}{100 * level:g} % intervals")
    table.add_column("metric", overflow="fold", min_width=11)
    table.add_column("value", justify="right", overflow="fold", min_width=_INTERVAL_WIDTH)
    if not narrow:
        table.add_column("groups", overflow="fold")
    table.add_column("MDE", justify="right", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for gap in gaps:
        name, word, groups = _metric_name(gap.metric), said(gap, level), escape(between(gap))
        style = {"larger than 0": "red", "four-fifths rule: fails": "red", "four-fifths rule: holds": "green"}.get(word)
        table.add_row(
            f"{name} ({groups})" if narrow and groups else name,
            _figure(gap),
            *([] if narrow else [groups]),
            "" if gap.mde is None else _number(gap.metric, gap.mde),
            f"{gap.n:,}",
            ", ".join(part for part in (f"[{style}]{word}[/]" if style else escape(word), left_out(gap)) if part),
        )
    return table


def _show_reasons(console: Console, rates: Iterable[Estimate]) -> None:
    reasons = dict.fromkeys(rate.undefined for rate in rates if rate.undefined is not None)
    for reason in list(reasons)[:5]:
        console.print(f"[dim]–: {escape(str(reason))}[/]", highlight=False)
    if len(reasons) > 5:
        console.print(f"[dim]–: {len(reasons) - 5} more for too few rows (all in --json)[/]", highlight=False)


def _show_legend(console: Console, definitions: Mapping[str, Any]) -> None:
    legend = Table.grid(padding=(0, 2))
    for metric, definition in definitions.items():
        if definition:
            legend.add_row(_metric_name(metric), escape(str(definition)))
    if not definitions:  # without groups there are no gaps
        return
    least = "smallest gap between the named groups, taken alone, that such a sample detects with 80 % power"
    legend.add_row("MDE", least)
    console.print()
    console.print(legend, style="dim")
