"""The attention gap in words and as a report. Needs no torch."""

from collections.abc import Mapping
from typing import Any

from fairhead.language.benchmark import TextTable
from fairhead.language.item_table import BenchmarkResult
from fairhead.stats import Estimate

_CAREFUL = (
    "Tokens that differ have keys that differ, in any model and for any words, so that attention differs most on them "
    "is no proof of bias. What tells something is how the figure compares between models, heads and kinds of bias."
)


def verdict(gap: BenchmarkResult) -> list[dict[str, str]]:
    """What was found, in sentences with a tone."""
    share, chance, above = (gap[name] for name in ("largest_on_span", "chance", "above_chance"))
    if share.value is None or chance.value is None:
        return [{"text": f"Nothing can be said: {share.undefined}.", "tone": "unclear"}]
    test = gap.more["tests"]["above_chance"]
    known = above.low is not None and above.low > 0
    found = (
        f"In layer {gap.more['layer']} attention differs most on the words that differ in {share.value:.1%} of {gap.n} "
        f"pairs; by chance it would in {chance.value:.1%}."
    ).replace("%", " %")
    moved = f"against spans moved elsewhere in each sentence p {_p(test['p_permutation'])}"
    student = "" if test["t"] is None or test["p"] is None else f"t = {test['t']:.2f}, p {_p(test['p'])}; "
    on, off = gap["gap_on_span"], gap["gap_elsewhere"]
    return [
        {"text": found, "tone": "note" if known else "unclear"},
        {"text": f"One-sided tests: {student}{moved}.", "tone": "note" if known else "unclear"},
        {"text": f"The mean gap is {_figure(on)} on those words and {_figure(off)} elsewhere.", "tone": "note"},
        {"text": _CAREFUL, "tone": "note"},
    ]


def _p(p: float) -> str:
    return f"= {p:.2g}" if p >= 1e-300 else "< 1e-300"


def _figure(estimate: Estimate) -> str:
    interval = "" if estimate.low is None else f" ({estimate.low:.5f} to {estimate.high:.5f})"
    return f"{estimate.value:.5f}{interval}"


def report(gap: BenchmarkResult, model: str, level: float = 0.95) -> dict[str, Any]:
    """A report of the form `fairhead.report/1`."""
    categories = [e for e in gap.estimates if e.metric == "above_chance" and e.value is not None]
    layers = [
        {"name": f"layer {f['layer']}", "value": f["above_chance"], "low": f["low"], "high": f["high"]}
        for f in gap.more["layers"]
    ]
    caption = "Largest gap on the words that differ, above chance"
    panels: list[Mapping[str, Any]] = [
        {
            "caption": f"{caption} (layer {gap.more['layer']})",
            "unit": "fraction",
            "ideal": 0.0,
            "points": [
                {"name": e.group_by or "all pairs", "value": e.value, "low": e.low, "high": e.high, "n": e.n}
                for e in categories
            ],
        },
        {"caption": f"{caption}, by layer", "unit": "fraction", "ideal": 0.0, "points": layers},
    ]
    return {
        "schema": "fairhead.report/1",
        "title": f"Attention gap of {model}",
        "question": "Two sentences differ in the words that carry a stereotype. Where does the attention that "
        "their tokens get part ways?",
        "verdict": verdict(gap),
        "sections": [
            {
                "kind": "attention_gap",
                "title": "How often the largest gap is on the words that differ",
                "text": f"Intervals hold at {level:.0%}. Pairs of equal length are those whose tokens correspond one "
                "by one.",
                "panels": panels,
                "pairs": [],
            },
            {
                "kind": "headmap",
                "title": "By head",
                "text": "How much oftener than by chance the head's own largest gap is on the words that differ.",
                "measure": "above chance",
                "unit": "fraction",
                "values": gap.more["heads"]["value"],
                **{name: gap.more["heads"][name] for name in ("low", "high", "p_adjusted")},
                "selected": [],
            },
            {
                "kind": "attention_gap",
                "title": "Single pairs, token by token",
                "text": "Pairs whose largest gap stands out most, of each kind of bias in turn: not a sample.",
                "panels": [],
                "pairs": [dict(picture) for picture in gap.more["pairs"]],
            },
        ],
        "provenance": dict(gap.provenance),
    }


def shown(gap: BenchmarkResult, level: float) -> TextTable:
    """The figures of each kind of bias, and the heads that are furthest above chance."""
    rows = []
    for group in dict.fromkeys(e.group_by for e in gap.estimates):
        found = [gap[m, group] for m in ("largest_on_span", "chance", "above_chance", "gap_on_span", "gap_elsewhere")]
        hit, chance, above, on, off = found
        if any(e.value is None for e in found):
            rows.append((group or "all", "–", "–", "too few", "–", "–", str(hit.n)))
            continue
        between = (
            f"{above.value:.1%}" if above.low is None else f"{above.value:.0%} ({above.low:.0%} to {above.high:.0%})"
        )
        figures = (f"{hit.value:.1%}", f"{chance.value:.1%}", between, f"{on.value:.4f}", f"{off.value:.4f}")
        rows.append((group or "all", *figures, str(hit.n)))
    heads = [
        (value, layer, head, gap.more["heads"]["p_adjusted"][layer][head])
        for layer, row in enumerate(gap.more["heads"]["value"])
        for head, value in enumerate(row)
        if value is not None
    ]
    best = ", ".join(f"L{layer}H{head} {value:+.0%}" for value, layer, head, _ in sorted(heads, reverse=True)[:5])
    significant = sum(p is not None and p < 1 - level for *_, p in heads)
    columns = ("on span", "chance", "above chance", "gap on", "off", "pairs")
    note = f"Heads furthest above chance: {best}; {significant} of {len(heads)} significantly so."
    return TextTable(f"with {100 * level:g} % intervals", columns, rows, [note])
