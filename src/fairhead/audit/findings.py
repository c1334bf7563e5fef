"""What the figures of an audit allow one to say, in words: for the terminal and for the head of the report."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fairhead.report.page import Sentence
from fairhead.report.wording import between, points, said, said_of_difference
from fairhead.stats import Estimate

if TYPE_CHECKING:
    from fairhead.audit.results import Audit, Comparison

# The gaps that the headline speaks of: three readings of "treated alike".
HEADLINE = ("DP", "EOp", "EOd")


def audit_verdicts(audit: "Audit") -> list[Sentence]:
    """The headline of an audit, then one sentence on the four-fifths rule for each group column."""
    level = audit.provenance.get("audit", {}).get("level", 0.95)
    gaps = [e for e in audit.estimates if e.metric in HEADLINE and e.group_by is not None]
    verdicts = [_headline(gaps, level)]
    for e in audit.estimates:
        if e.metric == "impact_ratio" and e.value is not None and e.low is not None and e.high is not None:
            figures = f"{e.value:.2f} ({100 * level:g} % interval {e.low:.2f} to {e.high:.2f})"
            tone = {"fails": "bad", "holds": "good", "undecided": "unclear"}[said(e).rpartition(" ")[2]]
            verb = {"bad": "fails", "good": "holds", "unclear": "cannot be decided"}[tone]
            verdicts.append(Sentence(f"The four-fifths rule {verb} by {e.group_by}: impact ratio {figures}.", tone))
    return verdicts


def _headline(gaps: list[Estimate], level: float) -> Sentence:
    defined = [e for e in gaps if e.value is not None and e.low is not None and e.high is not None]
    if not defined:
        reason = gaps[0].undefined if gaps else "none was asked for"
        return Sentence(f"No gap in {_any_of(HEADLINE)} is defined: {reason}.", "unclear")
    shown = [e for e in defined if said(e) == "larger than 0"]
    top = max(shown or defined, key=lambda e: e.value or 0.0)
    assert top.value is not None
    assert top.low is not None
    assert top.high is not None
    figures = f"{points(top.value)} ({100 * level:g} % interval {100 * top.low:.1f} to {100 * top.high:.1f})"
    groups = f", {between(top)}" if top.groups else ""
    if shown:
        return Sentence(f"The largest gap is {top.metric} by {top.group_by}: {figures}{groups}.", "bad")
    power = "" if top.mde is None else f" A sample like this would show one of {points(top.mde)} or more."
    return Sentence(
        f"No gap in {_any_of(HEADLINE)} is significant; the largest is {top.metric} by {top.group_by}, "
        f"{figures}.{power}",
        "unclear",
    )


def comparison_verdicts(comparison: "Comparison") -> list[Sentence]:
    """One sentence on the headline gaps of two sets of predictions."""
    words: dict[str, list[str]] = {}
    asked = [d for d in comparison.differences if d.metric in HEADLINE and d.group_by is not None]
    if asked and all(d.value is None for d in asked):
        return [Sentence(f"No difference in {_any_of(HEADLINE)} is defined: {asked[0].undefined}.", "unclear")]
    for d in asked:
        if d.value is not None:
            change = "" if d.low is None or d.high is None else f", {100 * d.low:+.1f} to {100 * d.high:+.1f}"
            text = f"{d.metric} by {d.group_by} ({100 * d.value:+.1f} points{change})"
            words.setdefault(said_of_difference(d), []).append(text)
    tones = {"B better": "good", "B worse": "bad", "not significant": "unclear"}
    starts = {
        "B better": "B has a smaller gap than A in",
        "B worse": "B has a larger gap than A in",
        "not significant": "The difference between B and A is not significant in",
    }
    return [Sentence(f"{starts[word]} {', '.join(words[word])}.", tones[word]) for word in starts if word in words]


def _any_of(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"
