"""What an audit returns: estimates with intervals, and their JSON form.

These are plain data. The numbers are made in the other files of this folder, the tables in `report/`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairhead import report  # what needs templates is imported when it is used
from fairhead.audit.catalogue import METRICS, OWN, Metric
from fairhead.report import Result
from fairhead.report.form import AuditFigures, ComparisonFigures
from fairhead.report.wording import (
    CROSS,
    FAILS,
    GROUPS_MOVED,
    HOLDS,
    UNDECIDED,
    between,
    change_between,
    count,
    four_fifths,
    in_words,
    is_finding,
    listed,
    said_of_difference,
    scale_of,
)
from fairhead.stats import Difference, Estimate
from fairhead.stats.bootstrap import STABLE_ROWS

if TYPE_CHECKING:
    from rich.console import Console

    from fairhead.report.page import Report

# The gaps that the headline speaks of: three readings of "treated alike".
HEADLINE = ("DP", "EOp", "EOd")
# Of predicted numbers: in the unit of the target, so that they can be ranked.
_OF_NUMBERS = ("mean_error_gap", "MAE_gap")
# Of more columns with a gap, a verdict names those that are clearest; of more gaps that are reversed, the largest.
_MOST_NAMED = 3
# Figures that are sums of absolute values have intervals, and no test that could be corrected with others.
_UNTESTED = {"ECE", "ABROCA", "score_distance"}
# Of a pair of groups in a comparison, as its note.
REVERSED = "reversed"


def headline_of(asked: Iterable[Metric]) -> list[str]:
    """The gaps that a verdict speaks of: DP, EOp and EOd, or where none of them was asked for, each gap that was."""
    gaps = [
        m for m in asked if m.compare in ("spread", "to_overall") and m.ideal == 0 and _UNTESTED.isdisjoint(m.rates)
    ]
    return [m.name for m in gaps if m.name in (*HEADLINE, *_OF_NUMBERS)] or [m.name for m in gaps]


class Audit(AuditFigures, Result):
    """Gaps with intervals: what `fairhead.audit` returns.

    Example:
        >>> gap = Estimate("DP", "race", 0.12, 0.08, 0.16, n=500, ideal=0.0)
        >>> found = Audit((gap,), (), {"rows": 500})
        >>> found["DP"].value, found.to_dict()["estimates"][0]["group_by"]
        (0.12, 'race')
    """

    def __getitem__(self, key: str | tuple[str, str | None]) -> Estimate:
        """`audit["DP"]` where that is unique, or `audit["DP", "race"]`; "F1" is also that of `define_metric`."""
        metric, group_by = (key, ...) if isinstance(key, str) else key
        metric = metric if any(e.metric == metric for e in self.estimates) else OWN + metric
        found = [e for e in self.estimates if e.metric == metric and group_by in (..., e.group_by)]
        if len(found) != 1:
            have = sorted({(e.metric, e.group_by) for e in self.estimates}, key=str)
            raise KeyError(f"{len(found)} estimates are called {key!r}; there are {have}")
        return found[0]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form (schema, provenance, by_group, estimates)."""
        return {
            "schema": self.schema,
            "provenance": dict(self.provenance),
            "by_group": [asdict(row) for row in self.by_group],
            "estimates": [asdict(e) for e in self.estimates],
            **({"curves": [asdict(c) for c in self.curves]} if self.curves else {}),
        }

    def rows(self) -> list[dict[str, Any]]:
        """One row an estimate."""
        left_out = ("detail", "groups")
        return [
            {k: v for k, v in vars(e).items() if k not in left_out} | {"groups": " > ".join(e.groups)}
            for e in self.estimates
        ]

    def page(self, name: str | None = None, rates: Sequence[str] = ()) -> "Report":
        """The audit as a report; `name` says whose predictions they are, `rates` which rates of groups come first."""
        from fairhead.report.page import Report
        from fairhead.report.sections.audited import Audited

        name = name or str(self.provenance.get("path", "the predictions"))
        return Report(
            title=f"Audit of {Path(name).name}",
            question=f"Do the predictions in {name} differ by {listed(_columns(self), 'and')}?",
            verdict=audit_verdicts(self, rates),
            sections=[Audited(title="Groups", name=name, audit=self, rates=rates, first=_first(self))],
            provenance=dict(self.provenance),
        )


def _first(audit: "Audit") -> str | None:
    """The column of the clearest gap, whose picture comes first; crossed columns, which are folded, stay in place."""
    headline, single = audit.options.get("headline", HEADLINE), _columns(audit)
    ranked = clearest(e for e in audit.estimates if e.metric in headline and e.group_by in single)
    return ranked[0].group_by if ranked else None


def _columns(audit: "Audit") -> list[str]:
    """The group columns of an audit, without their intersections."""
    found = dict.fromkeys(e.group_by for e in audit.estimates if e.group_by is not None)
    return [name for name in found if CROSS not in name] or ["no group"]


class Comparison(ComparisonFigures, Result):
    """Paired differences of two sets of predictions: what `fairhead.compare` returns.

    Example:
        >>> alone = Audit((), (), {})
        >>> moved = Difference("DP", "race", 0.2, 0.1, -0.1, -0.15, -0.05, 900, p=0.001, p_adjusted=0.004)
        >>> Comparison((moved,), alone, alone, {}).to_dict()["differences"][0]["value"]
        -0.1
    """

    a: Audit
    b: Audit

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "schema": self.schema,
            "provenance": dict(self.provenance),
            "differences": [d.to_dict() for d in self.differences],
            "pairs": [d.to_dict() for d in self.pairs],
            "a": self.a.to_dict(),
            "b": self.b.to_dict(),
        }

    def rows(self) -> list[dict[str, Any]]:
        """One row a difference, with its outcome."""
        return [{**d.to_dict(), "outcome": d.outcome} for d in self.differences]

    def page(self, names: tuple[str, str] | None = None) -> "Report":
        """The comparison and both audits as a report; `names` are those of the two sets of predictions."""
        from fairhead.report.page import Report
        from fairhead.report.sections.audited import Audited
        from fairhead.report.sections.changes import Compared

        sides = {side: self.provenance.get(side, {}) for side in "ab"}
        known = "model" if all("model" in side for side in sides.values()) else "path"  # models predict the same path
        a, b = names or (str(side.get(known, name.upper())) for name, side in sides.items())
        both = ((f"A, {a}", self.a), (f"B, {b}", self.b))
        alone = [report.Sentence(f"{name}: {s.text}", s.tone) for name, audit in both for s in audit_verdicts(audit)]
        title = f"{b} against {a}"
        return Report(
            title=f"Audit of {Path(a).name}",
            question=f"Do the predictions {b} (B) have smaller gaps by {listed(_columns(self.a), 'and')} than {a} (A)?",
            verdict=[*comparison_verdicts(self), *alone],
            sections=[
                Compared(title=title, comparison=self, a_name=a, b_name=b),
                *(
                    Audited(title=f"Audit of {name}", name=name, audit=audit, first=_first(audit))
                    for name, audit in ((a, self.a), (b, self.b))
                ),
            ],
            provenance=dict(self.provenance),
        )

    def show(self, console: "Console | None" = None, names: tuple[str, str] | None = None) -> None:
        """Print the differences; `result.a.show()` and `result.b.show()` print each audit."""
        from rich.markup import escape

        from fairhead.report import show_verdict, terminal
        from fairhead.report.terminal_tables import show_comparison

        console = console or terminal()
        compared, *_ = self.page(names).sections
        heading = f"A = {compared.a_name}, B = {compared.b_name}"
        console.print(f"[bold]{escape(heading)}[/]", highlight=False)
        show_verdict(console, comparison_verdicts(self))
        show_comparison(console, compared.comparison)


def audit_verdicts(audit: Audit, rates: Sequence[str] = ()) -> list[report.Sentence]:
    """The clearest gap of each group column that has one, then a sentence on the four-fifths rule for each column.

    Where `rates` are asked for and there is such a gap, a sentence says who stands out from the reference in them.
    """
    level, headline = audit.level, audit.options.get("headline", HEADLINE)
    gaps = [e for e in audit.estimates if e.metric in headline and e.group_by is not None]
    without = report.Sentence("No group column was named (--group; groups=), so there is no gap to report.", "note")
    verdicts = _headlines(gaps, level) if audit.by_group or gaps else [without]
    if rates and verdicts[0].tone == "bad":
        verdicts[1:1] = _against_reference(audit, rates)
    for of_all in audit.estimates:
        e = stable(of_all)
        if e.metric == "impact_ratio" and e.span is not None:
            figures = f"{e.value:.2f} ({100 * level:g} % interval {e.low:.2f} to {e.high:.2f})"
            word = e.detail.get("four_fifths", "undecided")
            alone, tone = four_fifths(e.span.low, e.span.high), {FAILS: "bad", HOLDS: "good"}.get(word, "unclear")
            verb = "cannot be decided" if alone == UNDECIDED else alone
            column = f"{e.group_by}, taken alone" if word != alone else e.group_by
            if of_all.value is not None and of_all.value != e.value:
                figures += f", {of_all.value:.2f} with groups of fewer than {STABLE_ROWS} rows"
            verdicts.append(report.Sentence(f"The four-fifths rule {verb} by {column}: impact ratio {figures}.", tone))
    return verdicts + _on_rows(audit) + _on_positive(audit)


def _on_rows(audit: Audit) -> list[report.Sentence]:
    """How many rows lack a group, by column."""
    options = audit.options
    lost = {name: n for name, n in options.get("without_group", {}).items() if CROSS not in name}
    if not lost:
        return []
    each = listed([f"{count(n)} {'has' if n == 1 else 'have'} no {name}" for name, n in lost.items()], "and")
    text = f"Of {count(options['n'])} rows, {each}; figures by a column leave out rows without its group."
    return [report.Sentence(text, "note")]


def _on_positive(audit: Audit) -> list[report.Sentence]:
    """What makes doubtful that the positive class is the one that is meant."""
    said, classes = audit.provenance.get("positive"), audit.options.get("classes", ())
    found = [f"The positive class is {said}."] if said else []
    for e in audit.estimates:
        if e.metric == "AUC" and e.group_by is None and len(classes) == 2 and e.high is not None and e.high < 0.5:
            found.append(f"AUC is below 0.5 ({e.low:.2f} to {e.high:.2f}): the scores may be for the other class.")
    if not found:
        return []
    hint = f"If it should be {classes[0]!r}, set --positive (positive=)."
    return [report.Sentence(" ".join([*found, hint]), "unclear" if len(found) > 1 or not said else "note")]


def _against_reference(audit: Audit, rates: Sequence[str]) -> list[report.Sentence]:
    """The group of the first column with the most rates whose interval does not overlap the reference's."""
    column, references = _first(audit), audit.options.get("reference", {})
    of_groups = {row.group: row.rates for row in audit.by_group if row.group_by == column and row.n >= STABLE_ROWS}
    reference = of_groups.get(references.get(column), {})
    found: list[tuple[int, str, list[str]]] = []
    for group, own in of_groups.items():
        apart = []
        for rate in rates:
            one, other = own.get(rate), reference.get(rate)
            if not (one and other and one.span and other.span) or min(one.n, other.n) < STABLE_ROWS:
                continue
            if one.span.low > other.span.high or other.span.low > one.span.high:
                scale = scale_of(rate, one.value, one.low, one.high)
                apart.append(f"{in_words(rate)} {scale.write(one.span.value)} against {scale.write(other.span.value)}")
        found.append((len(apart), group, apart))
    most = max(found, key=lambda each: each[0], default=(0, "", []))
    text = f"By {column}, {most[1]} against {references.get(column)}, the reference: {', '.join(most[2])}."
    return [report.Sentence(text, "note")] if most[0] else []


def stable(estimate: Estimate) -> Estimate:
    """A figure without its cells of few rows, which is the one that a headline may speak of."""
    without = estimate.detail.get("stable")
    return estimate if without is None else replace(estimate, **{**without, "groups": tuple(without["groups"])})


def clearest(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Gaps that are defined, by what is certain of them: the largest value is often that of the smallest group."""
    defined = [e for e in map(stable, estimates) if e.span is not None]
    return sorted(defined, key=lambda e: (e.low, e.value), reverse=True)


def _headlines(gaps: list[Estimate], level: float) -> list[report.Sentence]:
    """The clearest gap of each column, the clearest first; or that none is significant."""
    if not gaps:
        words = f"The verdict covers gaps in {listed(map(in_words, HEADLINE), 'or')}; none was requested."
        return [report.Sentence(words, "note")]
    names = listed(dict.fromkeys(in_words(e.metric, short=True) for e in gaps), "or")
    ranked = clearest(gaps)
    if not ranked:
        shown_below = any(e.value is not None for e in gaps)  # but with cells of few rows
        said = f"Too few rows for a verdict on gaps in {names}" if shown_below else f"No gap in {names} is defined"
        return [report.Sentence(f"{said}: {stable(gaps[0]).undefined}.", "unclear")]
    shown: dict[str | None, Estimate] = {}
    # A crossing has the gaps of its columns and more; these come first.
    for e in sorted(ranked, key=_is_crossed):
        if is_finding(e, level):
            shown.setdefault(e.group_by, e)
    top = next(iter(shown.values()), ranked[0])
    order = sorted(gaps, key=lambda e: ((e.metric, e.group_by) != (top.metric, top.group_by), _is_crossed(e)))
    cells = list(dict.fromkeys(c for e in order if "stable" in e.detail for c in e.detail.get("unstable", ())))
    more = f", and {len(cells) - 1} more {'cell' if len(cells) == 2 else 'cells'}" if len(cells) > 1 else ""
    text = f"Not counted, with fewer than {STABLE_ROWS} rows: {cells[0]}{more}." if cells else ""
    thin = [report.Sentence(text, "note")] if cells else []
    if not shown:
        power, those = "", "Between these two groups, a" if top.groups else "A"
        if top.mde is not None:
            least = scale_of(top.metric, top.mde, top.low, top.high, difference=True).write(top.mde)
            power = f" {those} sample of this size can detect a gap of {least} or more, taken alone."
        text = f"the clearest is in {in_words(top.metric)} by {top.group_by}, {_figures(top, level)}.{power}"
        known = {e.metric for e in ranked}
        defined = listed(
            [in_words(metric, short=True) for metric in dict.fromkeys(e.metric for e in gaps) if metric in known], "or"
        )
        without = {e.metric: e for e in reversed(gaps) if e.metric not in known and e.value is None}
        missing = [
            report.Sentence(f"No gap in {in_words(m, short=True)} is defined: {e.undefined}.", "note")
            for m, e in without.items()
        ]
        return [report.Sentence(f"No gap in {defined} is significant; {text}", "unclear"), *missing, *thin]
    of = " of a single column" if any((e.low or 0.0) > (top.low or 0.0) for e in shown.values()) else ""
    found = f"The clearest gap{of} is in {in_words(top.metric)} by {top.group_by}: {_figures(top, level)}."
    others = [
        report.Sentence(f"By {e.group_by}: {in_words(e.metric, short=True)} {_figures(e, level)}.", "bad")
        for e in list(shown.values())[1 : 1 + _MOST_NAMED]
    ]
    return [report.Sentence(found, "bad"), *others, *thin]


def _is_crossed(estimate: Estimate) -> bool:
    return CROSS in (estimate.group_by or "")


def _figures(gap: Estimate, level: float) -> str:
    """Value and interval of a gap, the groups that attain it, and those whose difference is most certain."""
    span = gap.span
    assert span is not None
    scale = scale_of(gap.metric, span.value, span.low, span.high, difference=True)
    ends = f"{scale.number(span.low)} to {scale.number(span.high)}"
    text = f"{scale.write(span.value)} ({100 * level:g} % interval {ends})"
    if gap.groups:
        text += f", {between(gap)}"
    certain = gap.detail.get("most_certain", ())
    if any({*pair["groups"]} != {gap.groups[0], gap.groups[-1]} for pair in certain):
        several = gap.metric in METRICS and len(METRICS[gap.metric].rates) > 1
        pairs = [" above ".join(pair["groups"]) + (f" in {pair['rate']}" if several else "") for pair in certain]
        text += f"; most certain of {listed(pairs, 'and')}"
    return text


def comparison_verdicts(comparison: Comparison, names: tuple[str, str] = ("A", "B")) -> list[report.Sentence]:
    """One sentence on the headline gaps of two sets of predictions, which are called by their `names`."""
    words, (a, b) = dict[str, list[str]](), names
    headline = comparison.a.options.get("headline", HEADLINE)
    asked = [d for d in comparison.differences if d.metric in headline and d.group_by is not None]
    if asked and all(d.value is None for d in asked):
        metrics = listed(dict.fromkeys(in_words(d.metric, short=True) for d in asked), "or")
        return [report.Sentence(f"No difference in {metrics} is defined: {asked[0].undefined}.", "unclear")]
    turned = [pair for pair in comparison.pairs if pair.note == REVERSED and pair.significant]
    for d in asked:
        # A gap that turned round is not one that stayed as it was.
        if d.value is not None and not (d.outcome == "not significant" and any(_is_behind(p, d) for p in turned)):
            scale = scale_of(d.metric, d.value, d.low, d.high, difference=True)
            ends = scale.interval(d.low, d.high, signed=True).removesuffix(scale.unit).rstrip()
            change = scale.write(d.value, signed=True) + (f", {ends}" if ends else "")
            text = f"{in_words(d.metric, short=True)} by {d.group_by} ({change})"
            words.setdefault(said_of_difference(d), []).append(text)
    if len(vague := words.get("not significant", [])) > _MOST_NAMED + 1:
        vague[_MOST_NAMED:] = [f"nor in {len(vague) - _MOST_NAMED} more gaps"]
    tones = {"B better": "good", "B worse": "bad"}
    starts = {
        "B better": f"{b} has a smaller gap than {a} in",
        "B worse": f"{b} has a larger gap than {a} in",
        GROUPS_MOVED: "Groups moved against each other, but the gap did not become significantly larger or smaller, in",
        "not significant": f"The difference between {b} and {a} is not significant in",
    }
    said = [
        report.Sentence(f"{start} {', '.join(words[word])}.", tones.get(word, "unclear"))
        for word, start in starts.items()
        if word in words
    ]
    said += [report.Sentence(text, "note") for text in _moved(comparison, asked, turned, names)]
    most = sorted(turned, key=lambda p: -abs(p.value or 0.0))[:_MOST_NAMED]
    return said + [report.Sentence(f"The gap is reversed in {b}: {change_between(p, names)}.", "bad") for p in most]


def _moved(found: Comparison, asked: list[Difference], turned: list[Difference], names: tuple[str, str]) -> list[str]:
    """Between which groups a gap moved whose size did not change significantly, and whether thin groups are why."""
    moved = [d for d in asked if said_of_difference(d) == GROUPS_MOVED and not any(_is_behind(p, d) for p in turned)]
    thin = {(e.metric, e.group_by) for e in found.a.estimates if "unstable" in e.detail}
    behind = [p for p in found.pairs if p.significant and any(_is_behind(p, d) for d in moved)]
    clear = [p for p in behind if p.outcome in ("better", "worse")][:_MOST_NAMED]
    said = [f"Between two groups: {change_between(p, names)}: {names[1]} {p.outcome}." for p in clear]
    if any((d.metric, d.group_by) in thin for d in moved):
        said.append(f"Groups of fewer than {STABLE_ROWS} rows widen these intervals; min_group leaves them out.")
    return said


def _is_behind(pair: Difference, gap: Difference) -> bool:
    """Whether a pair's rate is one that the gap is made of."""
    rates = METRICS[gap.metric].rates if gap.metric in METRICS else (gap.metric,)
    return pair.group_by == gap.group_by and pair.metric.partition("[")[0] in rates
