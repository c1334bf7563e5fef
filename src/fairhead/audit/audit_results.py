"""What an audit returns: estimates with intervals, and their JSON form.

These are plain data. The numbers are made in the other files of this folder, the tables in `report/`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from math import hypot
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairhead import report  # what needs templates is imported when it is used
from fairhead.audit.estimate import STABLE_ROWS
from fairhead.report.result import Result
from fairhead.report.wording import between, change_between, points, said, said_of_difference
from fairhead.stats import ALPHA, Difference, Estimate

if TYPE_CHECKING:
    from rich.console import Console

    from fairhead.report.page import Report
    from fairhead.report.score_curves import Curves

AUDIT_SCHEMA = "fairhead.audit/1"
COMPARISON_SCHEMA = "fairhead.comparison/1"
# The gaps that the headline speaks of: three readings of "treated alike".
HEADLINE = ("DP", "EOp", "EOd")
# Of more gaps that are reversed, a verdict names the largest.
_MOST_TURNED = 3
# Of more columns with a gap, a verdict names those that are clearest.
_MOST_COLUMNS = 3
# What verdicts call a finding; their tests are corrected together.
FAMILY = (*HEADLINE, "impact_ratio")


@dataclass(frozen=True)
class GroupRow:
    """One group's own figures.

    Attributes:
        group_by: the group column or intersection.
        group: the group's name.
        n: its rows.
        rates: "selection_rate", "TPR", "FPR", "precision", "accuracy", ... each an `Estimate`.
    """

    group_by: str
    group: str
    n: int
    rates: Mapping[str, Estimate]


@dataclass(frozen=True)
class Audit(Result):
    """Gaps with intervals: what `fairhead.audit` returns.

    Attributes:
        estimates: overall figures first, then those of each group column.
        by_group: the figures of each group of each column.
        provenance: where the rows came from, and the options of the audit.
        curves: for each group column, thresholds, ROC and calibration by group, where there is one score.

    Example:
        >>> gap = Estimate("DP", "race", 0.12, 0.08, 0.16, n=500, ideal=0.0)
        >>> found = Audit((gap,), (), {"rows": 500})
        >>> found["DP"].value, found.to_dict()["estimates"][0]["group_by"]
        (0.12, 'race')
    """

    estimates: tuple[Estimate, ...]
    by_group: tuple[GroupRow, ...]
    provenance: Mapping[str, Any]
    curves: "tuple[Curves, ...]" = ()

    def __getitem__(self, key: str | tuple[str, str | None]) -> Estimate:
        """`audit["DP"]` where that is unique, or `audit["DP", "race"]`."""
        metric, group_by = (key, ...) if isinstance(key, str) else key
        found = [e for e in self.estimates if e.metric == metric and group_by in (..., e.group_by)]
        if len(found) != 1:
            have = sorted({(e.metric, e.group_by) for e in self.estimates}, key=str)
            raise KeyError(f"{len(found)} estimates are called {key!r}; there are {have}")
        return found[0]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form (schema, provenance, by_group, estimates)."""
        return {
            "schema": AUDIT_SCHEMA,
            "provenance": dict(self.provenance),
            "by_group": [asdict(row) for row in self.by_group],
            "estimates": [asdict(e) for e in self.estimates],
            **({"curves": [asdict(c) for c in self.curves]} if self.curves else {}),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The JSON form as text; never NaN, which is not JSON."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False, default=str)

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
            question=f"Are the predictions in {name} even by {' and '.join(_columns(self))}?",
            verdict=audit_verdicts(self),
            sections=[Audited(title="Groups", name=name, audit=self, rates=rates)],
            provenance=dict(self.provenance),
        )


def _columns(audit: "Audit") -> list[str]:
    """The group columns of an audit, without their intersections."""
    found = dict.fromkeys(e.group_by for e in audit.estimates if e.group_by is not None)
    return [name for name in found if " × " not in name] or ["no group"]


@dataclass(frozen=True)
class Comparison(Result):
    """Paired differences of two sets of predictions: what `fairhead.compare` returns.

    Attributes:
        differences: one for each metric and group column, b minus a.
        a: the audit of the first predictions, on the rows that both have.
        b: the audit of the second.
        provenance: where both came from, how they were joined, and the options.
        pairs: changes of signed differences between two groups, of the rates behind the headline metrics.

    Example:
        >>> alone = Audit((), (), {})
        >>> moved = Difference("DP", "race", 0.2, 0.1, -0.1, -0.15, -0.05, 900, p=0.001, p_adjusted=0.004)
        >>> Comparison((moved,), alone, alone, {}).to_dict()["differences"][0]["value"]
        -0.1
    """

    differences: tuple[Difference, ...]
    a: Audit
    b: Audit
    provenance: Mapping[str, Any]
    pairs: tuple[Difference, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "schema": COMPARISON_SCHEMA,
            "provenance": dict(self.provenance),
            "differences": [d.to_dict() for d in self.differences],
            "pairs": [d.to_dict() for d in self.pairs],
            "a": self.a.to_dict(),
            "b": self.b.to_dict(),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The JSON form as text; never NaN, which is not JSON."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False, default=str)

    def rows(self) -> list[dict[str, Any]]:
        """One row a difference, with its outcome."""
        return [{**d.to_dict(), "outcome": d.outcome} for d in self.differences]

    def page(self, names: tuple[str, str] | None = None) -> "Report":
        """The comparison and both audits as a report; `names` are those of the two sets of predictions."""
        from fairhead.report.page import Report
        from fairhead.report.sections.audited import Audited
        from fairhead.report.sections.compared import Compared

        a, b = names or (str(self.provenance.get(side, {}).get("path", side.upper())) for side in "ab")
        both = ((f"A, {a}", self.a), (f"B, {b}", self.b))
        alone = [report.Sentence(f"{name}: {s.text}", s.tone) for name, audit in both for s in audit_verdicts(audit)]
        title = f"{b} against {a}"
        return Report(
            title=f"Audit of {Path(a).name}",
            question=f"Are the predictions {b} (B) more even by {' and '.join(_columns(self.a))} than {a} (A)?",
            verdict=[*comparison_verdicts(self), *alone],
            sections=[
                Compared(title=title, comparison=self, a_name=a, b_name=b),
                *(
                    Audited(title=f"Audit of {name}", name=name, audit=audit)
                    for name, audit in ((a, self.a), (b, self.b))
                ),
            ],
            provenance=dict(self.provenance),
        )

    def show(self, console: "Console | None" = None, names: tuple[str, str] | None = None) -> None:
        """Print the differences; `result.a.show()` and `result.b.show()` print each audit."""
        from rich.markup import escape

        from fairhead.report.console import terminal
        from fairhead.report.terminal import show_comparison, show_verdict

        console = console or terminal()
        compared, *_ = self.page(names).sections
        heading = f"A = {compared.a_name}, B = {compared.b_name}"
        console.print(f"[bold]{escape(heading)}[/]", highlight=False)
        show_verdict(console, comparison_verdicts(self))
        show_comparison(console, compared.comparison)


def audit_verdicts(audit: Audit) -> list[report.Sentence]:
    """The clearest gap of each group column that has one, then a sentence on the four-fifths rule for each column."""
    level = audit.provenance.get("audit", {}).get("level", 0.95)
    gaps = [e for e in audit.estimates if e.metric in HEADLINE and e.group_by is not None]
    verdicts = _headlines(audit, gaps, level)
    for e in map(stable, audit.estimates):
        if e.metric == "impact_ratio" and e.value is not None and e.low is not None and e.high is not None:
            figures = f"{e.value:.2f} ({100 * level:g} % interval {e.low:.2f} to {e.high:.2f})"
            word = said(e).rpartition(" ")[2]
            if word == "fails" and not is_finding(e, level):
                word = "undecided"
            tone = {"fails": "bad", "holds": "good", "undecided": "unclear"}[word]
            verb = {"bad": "fails", "good": "holds", "unclear": "cannot be decided"}[tone]
            text = f"The four-fifths rule {verb} by {e.group_by}: impact ratio {figures}."
            verdicts.append(report.Sentence(text, tone))
    return verdicts


def stable(estimate: Estimate) -> Estimate:
    """A figure without its cells of few rows, which is the one that a headline may speak of."""
    without = estimate.detail.get("stable")
    return estimate if without is None else replace(estimate, **{**without, "groups": tuple(without["groups"])})


def is_finding(estimate: Estimate, level: float = 1 - ALPHA) -> bool:
    """Whether a figure is significant among all that the verdict of its audit might speak of."""
    p = estimate.detail.get("p_adjusted")
    return p is not None and p < 1 - level


def _headlines(audit: Audit, gaps: list[Estimate], level: float) -> list[report.Sentence]:
    """The clearest gap of each column, the clearest first; or that none is significant."""
    defined = [e for e in map(stable, gaps) if e.value is not None and e.low is not None and e.high is not None]
    if not defined:
        reason = stable(gaps[0]).undefined if gaps else "none was asked for"
        return [report.Sentence(f"No gap in {_any_of(HEADLINE)} is defined: {reason}.", "unclear")]
    # By what is certain of them: the largest value is often that of the smallest group.
    ranked = sorted(defined, key=lambda e: (e.low or 0.0, e.value or 0.0), reverse=True)
    order = sorted(gaps, key=lambda e: (e.metric, e.group_by) != (ranked[0].metric, ranked[0].group_by))
    cells = list(dict.fromkeys(c for e in order if "stable" in e.detail for c in e.detail.get("unstable", ())))
    thin = ""
    if cells:
        more = f", and {len(cells) - 1} more" if len(cells) > 1 else ""
        thin = f" Unstable, with fewer than 30 rows, and not counted: {cells[0]}{more}."
    shown: dict[str | None, Estimate] = {}
    for e in ranked:
        if is_finding(e, level):
            shown.setdefault(e.group_by, e)
    if not shown:
        top = ranked[0]
        power = ""
        if top.mde is not None:
            power = f" Between these two groups, a sample like this would show one of {points(top.mde)} or more."
        return [
            report.Sentence(
                f"No gap in {_any_of(HEADLINE)} is significant; the clearest is {top.metric} by {top.group_by}, "
                f"{_figures(audit, top, level)}.{power}{thin}",
                "unclear",
            )
        ]
    first, *others = shown.values()
    found = f"The clearest gap is {first.metric} by {first.group_by}: {_figures(audit, first, level)}.{thin}"
    return [report.Sentence(found, "bad")] + [
        report.Sentence(f"By {e.group_by}: {e.metric} {_figures(audit, e, level)}.", "bad")
        for e in others[:_MOST_COLUMNS]
    ]


def _figures(audit: Audit, gap: Estimate, level: float) -> str:
    """Value and interval of a gap, the groups that attain it, and those whose difference is most certain."""
    assert gap.value is not None
    assert gap.low is not None
    assert gap.high is not None
    text = f"{points(gap.value)} ({100 * level:g} % interval {100 * gap.low:.1f} to {100 * gap.high:.1f})"
    certain = _most_certain(audit, gap)
    if gap.groups:
        text += f", {between(gap)}"
    if certain and set(certain) != {gap.groups[0], gap.groups[-1]}:
        text += f"; most certain of {certain[0]} above {certain[1]}"
    return text


def _most_certain(audit: Audit, gap: Estimate) -> tuple[str, str] | None:
    """Of a gap in one rate, the two groups whose difference has the highest lower end."""
    name = {"DP": "selection_rate", "EOp": "TPR"}.get(gap.metric)
    rates = {row.group: row.rates.get(name or "") for row in audit.by_group if row.group_by == gap.group_by}
    ends = {}
    for group, rate in rates.items():
        if rate is None or rate.value is None or rate.low is None or rate.high is None or rate.n < STABLE_ROWS:
            continue
        ends[group] = rate.value - rate.low, rate.value, rate.high - rate.value
    if len(ends) < 3 or len(gap.groups) < 2:
        return None
    above = {(a, b): ends[a][1] - ends[b][1] - hypot(ends[a][0], ends[b][2]) for a, b in permutations(ends, 2)}
    return max(above, key=above.__getitem__)


def comparison_verdicts(comparison: Comparison) -> list[report.Sentence]:
    """One sentence on the headline gaps of two sets of predictions."""
    words: dict[str, list[str]] = {}
    asked = [d for d in comparison.differences if d.metric in HEADLINE and d.group_by is not None]
    if asked and all(d.value is None for d in asked):
        return [report.Sentence(f"No difference in {_any_of(HEADLINE)} is defined: {asked[0].undefined}.", "unclear")]
    turned = reversed_pairs(comparison)
    for d in asked:
        # A gap that turned round is not one that stayed as it was.
        if d.value is not None and not (d.outcome == "not significant" and any(_is_behind(p, d) for p in turned)):
            change = "" if d.low is None or d.high is None else f", {100 * d.low:+.1f} to {100 * d.high:+.1f}"
            text = f"{d.metric} by {d.group_by} ({100 * d.value:+.1f} points{change})"
            words.setdefault(said_of_difference(d), []).append(text)
    tones = {"B better": "good", "B worse": "bad", "not significant": "unclear"}
    starts = {
        "B better": "B has a smaller gap than A in",
        "B worse": "B has a larger gap than A in",
        "not significant": "The difference between B and A is not significant in",
    }
    said = [
        report.Sentence(f"{starts[word]} {', '.join(words[word])}.", tones[word]) for word in starts if word in words
    ]
    most = sorted(turned, key=lambda p: -abs(p.value or 0.0))[:_MOST_TURNED]
    return said + [report.Sentence(f"The gap is reversed in B: {change_between(p)}.", "bad") for p in most]


def reversed_pairs(comparison: Comparison) -> list[Difference]:
    """Pairs of groups of which the other one is ahead in B, by about as much."""
    return [p for p in comparison.pairs if p.outcome == "changed" and (p.a or 0.0) * (p.b or 0.0) < 0]


def _is_behind(pair: Difference, gap: Difference) -> bool:
    """Whether a pair's rate is one that the gap is made of."""
    rates = {"DP": ("selection_rate",), "EOp": ("TPR",), "EOd": ("TPR", "FPR")}[gap.metric]
    return pair.group_by == gap.group_by and pair.metric.partition("[")[0] in rates


def _any_of(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"
