"""What the figures of an audit allow one to say, in words: for the terminal and for the head of the report."""

from collections.abc import Iterable
from typing import NamedTuple

from fairhead.audit.results import Audit, Comparison
from fairhead.stats import Difference, Estimate

FOUR_FIFTHS = 0.8

# The gaps that the headline speaks of: three readings of "treated alike".
HEADLINE = ("DP", "EOp", "EOd")


_OUTCOMES = {"better": "B better", "worse": "B worse", "changed": "B differs"}


class Verdict(NamedTuple):
    """One sentence with its tone ("good", "bad", "unclear" or "note"), as the report takes it."""

    text: str
    tone: str


def said(estimate: Estimate) -> str:
    """What can be said about a gap or ratio at the level of its interval; empty for a plain level such as accuracy.

    Example:
        >>> said(Estimate("DP", "race", 0.12, 0.08, 0.16, 500, ideal=0.0))
        'larger than 0'
        >>> said(Estimate("impact_ratio", "race", 0.9, 0.7, 1.0, 500, ideal=1.0))
        'four-fifths rule: undecided'
    """
    if estimate.undefined is not None or estimate.low is None or estimate.high is None:
        return f"undefined: {estimate.undefined}"
    if estimate.metric == "impact_ratio":
        if estimate.high < FOUR_FIFTHS:
            return "four-fifths rule: fails"
        return f"four-fifths rule: {'holds' if estimate.low >= FOUR_FIFTHS else 'undecided'}"
    if estimate.ideal != 0 or estimate.group_by is None:
        return ""
    if estimate.low > 0:
        return "larger than 0"
    return "smaller than 0" if estimate.high < 0 else "not significant"


def left_out(estimate: Estimate) -> str:
    """What a figure goes without, if anything: a worst group may be among them.

    Example:
        >>> left_out(Estimate("worst_group_accuracy", "race", 1.0, 0.9, 1.0, 60, ideal=1.0, detail={"excluded": ["a"]}))
        'without 1 cell that is too small'
    """
    n = 0 if estimate.undefined is not None else len(estimate.detail.get("excluded", ()))
    return f"without {n} cells that are too small" if n > 1 else "without 1 cell that is too small" if n else ""


def points(value: float) -> str:
    """A difference of two shares, for people.

    Example:
        >>> points(0.1234)
        '12.3 points'
    """
    return f"{100 * value:.1f} points"


def between(estimate: Estimate) -> str:
    """The groups that attain a gap, highest first, and the class if there are several.

    Example:
        >>> between(Estimate("DP", "race", 0.12, 0.08, 0.16, 500, ideal=0.0, groups=("white", "black")))
        'white above black'
    """
    of_class = f" for class {estimate.detail['class']}" if "class" in estimate.detail else ""
    return " above ".join(dict.fromkeys((*estimate.groups[:1], *estimate.groups[-1:]))) + of_class


def audit_verdicts(audit: Audit, level: float) -> list[Verdict]:
    """The headline of an audit, then one sentence on the four-fifths rule for each group column."""
    gaps = [e for e in audit.estimates if e.metric in HEADLINE and e.group_by is not None]
    verdicts = [_headline(gaps, level)]
    for e in audit.estimates:
        if e.metric == "impact_ratio" and e.value is not None and e.low is not None and e.high is not None:
            figures = f"{e.value:.2f} ({100 * level:g} % interval {e.low:.2f} to {e.high:.2f})"
            tone = {"fails": "bad", "holds": "good", "undecided": "unclear"}[said(e).rpartition(" ")[2]]
            verb = {"bad": "fails", "good": "holds", "unclear": "cannot be decided"}[tone]
            verdicts.append(Verdict(f"The four-fifths rule {verb} by {e.group_by}: impact ratio {figures}.", tone))
    return verdicts


def _headline(gaps: list[Estimate], level: float) -> Verdict:
    defined = [e for e in gaps if e.value is not None and e.low is not None and e.high is not None]
    if not defined:
        reason = gaps[0].undefined if gaps else "none was asked for"
        return Verdict(f"No gap in {_any_of(HEADLINE)} is defined: {reason}.", "unclear")
    shown = [e for e in defined if said(e) == "larger than 0"]
    top = max(shown or defined, key=lambda e: e.value or 0.0)
    assert top.value is not None
    assert top.low is not None
    assert top.high is not None
    figures = f"{points(top.value)} ({100 * level:g} % interval {100 * top.low:.1f} to {100 * top.high:.1f})"
    groups = f", {between(top)}" if top.groups else ""
    if shown:
        return Verdict(f"The largest gap is {top.metric} by {top.group_by}: {figures}{groups}.", "bad")
    power = "" if top.mde is None else f" A sample like this would show one of {points(top.mde)} or more."
    return Verdict(
        f"No gap in {_any_of(HEADLINE)} is significant; the largest is {top.metric} by {top.group_by}, "
        f"{figures}.{power}",
        "unclear",
    )


def said_of_difference(difference: Difference) -> str:
    """What can be said about b against a.

    Example:
        >>> d = Difference("DP", "race", 0.2, 0.1, -0.1, -0.15, -0.05, 900, p=0.001, p_adjusted=0.004, ideal=0.0)
        >>> said_of_difference(d)
        'B better'
    """
    if difference.value is None:
        return f"undefined: {difference.undefined}"
    return _OUTCOMES.get(difference.outcome, difference.outcome)


def comparison_verdicts(comparison: Comparison) -> list[Verdict]:
    """One sentence on the headline gaps of two sets of predictions."""
    words: dict[str, list[str]] = {}
    asked = [d for d in comparison.differences if d.metric in HEADLINE and d.group_by is not None]
    if asked and all(d.value is None for d in asked):
        return [Verdict(f"No difference in {_any_of(HEADLINE)} is defined: {asked[0].undefined}.", "unclear")]
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
    return [Verdict(f"{starts[word]} {', '.join(words[word])}.", tones[word]) for word in starts if word in words]


def _any_of(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"
