"""What was located in pairs of texts, in words and as data: the JSON of a head map, and the sections of a report."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fairhead import __version__
from fairhead.locate.head_maps import Head
from fairhead.locate.language import LocatedPairs
from fairhead.locate.pair_studies import PairStudy
from fairhead.locate.pairs import TextPairs
from fairhead.locate.plan import half_sha256
from fairhead.locate.sentences import ALPHA, among_controls, curve_section, finite, interval, line, outcome, signed
from fairhead.locate.writeup import SCHEMA
from fairhead.report import Report
from fairhead.report.wording import head_name, p_value

_BENCHMARKS = {"crows_pairs": "CrowS-Pairs", "stereoset": "StereoSet"}
LIMITS = (
    "A head's direct part is the slope of the log-odds in what the head itself writes to the last layer; what it does "
    "through later layers is not in it, and shows in forward passes alone. What the entropy of the predictions adds "
    "belongs to no head. Log-odds of pairs also hold how common the words of each group are, stereotype or not."
)


def to_dict(located: LocatedPairs, pairs: TextPairs, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON form: maps [layers][heads] of the reporting half, the chosen heads, and the effects of editing them."""
    content = {
        "schema": SCHEMA,
        "provenance": dict(provenance),
        "benchmark": located.benchmark,
        "poles": list(located.poles),
        "n": {"choosing": int(located.choosing.sum()), "reporting": int((~located.choosing).sum())},
        "choosing_sha256": half_sha256(pairs.ids, located.choosing),
        "selected": [list(head) for head in located.ranked],
        "gap": located.head_map.to_dict(),
        "other_terms": located.other_map.to_dict(),
        "log_odds_by_term": located.sums,
        "single_heads": None if located.effect_map is None else located.effect_map.to_dict(),
        "effects": [
            {"kind": s.kind, "way": s.way, "metrics": [a.to_dict() for a in s.ablations]} for s in located.studies
        ],
        "curves": None if located.curves is None else located.curves.to_dict(),
        "by_category": [asdict(part) for part in located.by_category],
        "extremes": [
            {"head": list(e.head), "first": _named(e.first, pairs), "second": _named(e.second, pairs)}
            for e in located.extremes
        ],
        "notes": [*located.notes, LIMITS],
    }
    plain: dict[str, Any] = finite(content)
    return plain


def report_of(located: LocatedPairs, pairs: TextPairs, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The report as `fairhead.report` takes it."""
    name = _BENCHMARKS.get(located.benchmark, located.benchmark)
    return {
        "schema": Report.schema,
        "title": f"Heads that carry the stereotypes of {name}",
        "question": (
            f"A language model reads pairs of texts of {name}, a stereotype and an anti-stereotype. Which attention "
            "heads make the one likelier than the other, and what happens to the log-odds when those heads are changed?"
        ),
        "verdict": verdict(located),
        "sections": _sections(located, pairs),
        "provenance": {"fairhead": __version__, "python": platform.python_version(), **provenance},
    }


def verdict(located: LocatedPairs) -> list[dict[str, str]]:
    """Sentences with their tone, each decided by intervals and controls.

    Example:
        >>> [line["tone"] for line in verdict(located)]  # doctest: +SKIP
        ['note', 'unclear', 'good']
    """
    first, second = located.poles
    whole = located.head_map
    opening = (
        f"The log-odds of {first} against {second} are {signed(whole.total)} nats on average ({whole.n} pairs, 95 % "
        f"interval {signed(whole.total_low)} to {signed(whole.total_high)})"
        + ("" if whole.has_total else ", which cannot be told from 0")
    )
    if not located.ranked:
        text = f"{opening}. No head carries a part of that which can be told from chance after correction."
        return [line("unclear", text)]
    names = ", ".join(head_name(*head) for head in located.ranked)
    ranking = located.effect_map or whole
    part = sum(ranking.gap[head] for head in located.ranked)
    what = "their direct part is" if located.effect_map is None else "what is lost without each alone adds up to"
    sure = [head_name(*head) for head in located.ranked if ranking.p_adjusted[head] <= ALPHA and ranking.gap[head] > 0]
    origin, half = ("chosen on one half of the pairs", "other") if located.chosen_here else ("named", "reporting")
    text = (
        f"{opening}. {len(located.ranked)} of {whole.gap.size} heads ({names}) were {origin}. "
        f"In the {half} half {what} {signed(part)} nats; "
        + (f"{', '.join(sure)} alone can be told from chance there." if sure else "none can be told from chance there.")
    )
    shown = [study for study in located.studies if study is located.studies[0] or study.way == "forward"]
    return [line("note", text), *(_effect_line(study) for study in shown)]


def _effect_line(study: PairStudy) -> dict[str, str]:
    ablation = study["log_odds"]
    change = ablation.change
    assert change.a is not None
    assert change.b is not None
    text = (
        f"{words(study).capitalize()} changes the mean log-odds from {signed(change.a)} to {signed(change.b)} nats "
        f"({interval(change)}). {among_controls(ablation)}"
    )
    cost = False
    if study.way == "forward":
        damage = study["nll"].change
        assert damage.value is not None
        cost = damage.low is not None and damage.low > 0
        how = "less" if damage.value > 0 else "more"
        text += f" The texts become {how} likely: {signed(-damage.value)} nats a token ({interval(damage, -1)})."
    found = outcome(ablation)
    modest = found.tone == "good" and (cost or study.way == "direct")
    return line("note" if modest else found.tone, text + found.sentence)


def words(study: PairStudy) -> str:
    """An edit in words."""
    edit = {
        "mean": "replacing what they write by its mean",
        "zero": "silencing them",
        "resample": "giving them what they wrote at a token of another text",
    }[study.kind]
    return f"{edit} ({'as a true forward pass' if study.way == 'forward' else 'direct effect alone'})"


def _sections(located: LocatedPairs, pairs: TextPairs) -> list[dict[str, Any]]:
    n = int(located.choosing.sum()), int((~located.choosing).sum())
    sums = "; ".join(f"{name} {value:+.3f}" for name, value in located.sums.items())
    origin = f"chosen on {n[0]} pairs" if located.chosen_here else "named"
    done = (
        "The log-odds of each pair were taken apart into a sum of terms, one a head, with each position's own norm. "
        f"Heads were {origin}; every figure here is of {n[1]} pairs. Edits act on all tokens and were learned on the "
        f"other {n[0]}. Mean log-odds by term, in nats: {sums}."
    )
    sections: list[dict[str, Any]] = [
        {"kind": "text", "title": "What was done", "text": "\n\n".join([done, *located.notes, LIMITS])},
        {"kind": "headmap", "title": "Each head's direct part in the log-odds", **located.head_map.to_dict()},
    ]
    if located.effect_map is not None:
        title = "What is lost of the log-odds without each head"
        sections.append({"kind": "headmap", "title": title, **located.effect_map.to_dict()})
    if not located.ranked:
        return sections
    sections.append(
        {
            "kind": "top_heads",
            "title": "The chosen heads",
            "poles": list(located.poles),
            "heads": [_card(located, head) for head in located.ranked],
        }
    )
    sections.append({"kind": "text", "title": "By category, and at the ends", "text": _categories(located, pairs)})
    for study in located.studies:
        if study is located.studies[0] or study.way == "forward":
            title = words(study).capitalize()
            sections += [
                {"kind": "ablation", "title": f"{title}: {a.change.metric}", **a.to_dict()} for a in study.ablations
            ]
    if located.curves is not None:
        sections.append(curve_section(located.curves, "true forward passes"))
    return sections


def _card(located: LocatedPairs, head: Head) -> dict[str, Any]:
    maps = [("Direct part, nats", located.head_map)]
    if located.effect_map is not None:
        maps.append(("Lost without it, nats", located.effect_map))
    facts = []
    for name, found in maps:
        note = f"{found.low[head]:+.3f} to {found.high[head]:+.3f}, adjusted p {p_value(float(found.p_adjusted[head]))}"
        facts.append({"name": name, "figure": f"{found.gap[head]:+.3f}", "note": note})
    return {"head": list(head), "facts": facts}


def _categories(located: LocatedPairs, pairs: TextPairs) -> str:
    lines = [
        f"{part.value} ({part.n} pairs, log-odds {part.log_odds:+.2f}): part of the chosen heads {part.part:+.3f} "
        f"({part.low:+.3f} to {part.high:+.3f}, adjusted p {p_value(part.p_adjusted)})"
        for part in located.by_category
    ]
    ends = [
        f"{head_name(*e.head)} does most for the {pole} in: " + " / ".join(_shown(i, pairs) for i in rows)
        for e in located.extremes
        for pole, rows in zip(located.poles, (e.first, e.second), strict=True)
    ]
    return "\n\n".join([*lines, *ends])


def _shown(row: int, pairs: TextPairs) -> str:
    two = pairs.texts[row * pairs.per_pair : row * pairs.per_pair + 2]
    return " | ".join(f"{text.prefix}{text.continuation}".strip() for text in two)


def _named(rows: Sequence[int], pairs: TextPairs) -> list[dict[str, str]]:
    return [{"id": pairs.ids[row], "texts": _shown(row, pairs)} for row in rows]
