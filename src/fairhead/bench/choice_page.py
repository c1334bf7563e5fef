"""What balance, match and auto say of their choice: which candidates there were, and what clusters they rest on."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fairhead.mitigate.auto_balance_match import IN_GROUPS, STABLE, STRENGTHS
from fairhead.report import Sentence
from fairhead.report.sections import Section
from fairhead.report.sections.plain import PlainTable, PlainTables
from fairhead.stats import p_text

NAMES = {
    "plain": "plain training",
    "balance": "balance",
    "logits": "adjusted logits",
    "dro": "GroupDRO over clusters",
    "match": "match",
    "both": "balance and match",
}
NAMES |= {f"{name} {s:g}": f"{said}, {100 * s:.0f} % strength" for name, said in NAMES.items() for s in STRENGTHS}
_LITTLE = 0.5  # stability under which other rows would give other clusters


def choice_verdict(notes: Mapping[str, Any], uses_groups: bool = False) -> list[Sentence]:
    """What was kept, at what cost, in a sentence or two; nothing for a method that chooses nothing."""
    if "kept" not in notes:
        return []
    texts, tried = [], {one["name"]: one for one in notes.get("tried", ())}
    kept, blind = notes["kept"], "" if uses_groups else " No group was used."
    if tried:
        first, one = next(iter(tried.values())), tried[kept]
        why = (
            "no other candidate within the price had a gain, in spread between clusters and accuracy together, above "
            "one standard error"
        )
        if one is not first:
            spreads = (
                "its accuracy, given the class, has a standard deviation between clusters of "
                f"{_points(one['spread'])} points ({NAMES[first['name']]}: {_points(first['spread'])}), and "
                if one["spread"] is not None
                else ""
            )
            less = f"{_points(abs(one['cost']))} points {'lower' if one['cost'] > 0 else 'higher'}"
            gain = f"{_points(one['gain'])} points, with a standard error of {_points(one['gain_se'])}"
            why = f"{spreads}its accuracy as a whole is {less}: a gain of {gain}"
        texts.append(f"Kept: {NAMES[kept]}. On rows that no candidate was trained on, {why}.{blind}")
    elif kept == "plain" and len(notes.get("asked", ())) > 1:
        texts.append(f"Kept: {NAMES[kept]}, as no other candidate was left.{blind}")
    texts += _cluster_texts(notes)
    match = notes.get("match")
    if match is not None and {"match", "both"} & set(notes.get("asked", ())):
        differ = "differ" if match["differ"] else "are not shown to differ"
        rest = "" if match["differ"] else ", so nothing was matched"
        texts.append(
            f"The training rows and those of the deployment sample {differ} within classes (area under the ROC curve "
            f"{match['separation']:.2f}, {p_text(match['p'])}){rest}."
        )
    for one in notes.get("matching over the price", ()):
        texts.append(
            f"{NAMES[one['name']].capitalize()} was left out: with weights towards one half of the sample, a linear "
            f"head on the same features loses {_points(one['cost'])} points of accuracy on the other half."
        )
    if "label taken out" in notes:
        done = "was taken out of the features" if notes["label taken out"] else "was left in the features"
        texts.append(f"What tells the classes apart {done} before they were clustered.")
    if "not matched" in notes:
        texts.append(f"Nothing was matched: {notes['not matched']}.")
    return [Sentence(text, "note") for text in texts]


def _cluster_texts(notes: Mapping[str, Any]) -> list[str]:
    """Why nothing was balanced on the clusters, or what speaks against them."""
    clusters = notes["clusters"]
    stability = clusters["stability"].get(str(clusters.get("count")))
    agreement = f"those of two halves of the rows agree by an adjusted Rand index of {stability or 0:.2f}"
    if notes.get("not balanced"):
        left_out = " and ".join(NAMES[name] for name in notes["not balanced"])
        if stability is not None and stability < STABLE:
            why = f"The clusters are hardly more stable than chance ({agreement}; {STABLE:g} is asked for)"
        elif _told_by_clusters(clusters) >= 0.9:
            why = "The clusters are nearly the classes (another encoder may show others: --option encoder=...)"
        else:
            share = 100 * (clusters["in_groups"] or 0)
            why = (
                f"Within the classes the clusters are no separate groups ({share:.0f} % of the rows lie in groups that "
                f"are apart; {100 * IN_GROUPS:.0f} % are asked for), and may only part easy rows from hard ones"
            )
        return [f"{why}, so they were not balanced on: {left_out} left out."]
    if _told_by_clusters(clusters) >= 0.9 and (clusters.get("in_groups") or 0) < IN_GROUPS:
        return [
            "The clusters are nearly the classes, so balancing had little to compare within them: name another "
            "encoder, such as a pretrained one (--option encoder=...)."
        ]
    if stability is not None and stability < _LITTLE:
        return [f"The clusters are not very stable ({agreement}): other rows would give other clusters."]
    return []


def choice_section(notes: Mapping[str, Any], classes: Sequence[str]) -> list[Section]:
    """Candidates, clusters and the stability of their number, as tables."""
    if "kept" not in notes:
        return []
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = []  # caption, columns, rows
    if notes.get("tried"):
        rows = [
            (
                NAMES[one["name"]],
                f"{100 * one['accuracy']:.1f}",
                _points(one["spread"]),
                f"{_points(one['cost'])} ± {_points(one['cost_se'])}",
                _points(one["gain"]) + ("" if one["gain"] is None else f" ± {_points(one['gain_se'])}"),
                "kept" if one["name"] == notes["kept"] else "" if one["affordable"] else "over the price",
            )
            for one in notes["tried"]
        ]
        caption = f"Candidates, on rows that none was trained on; the price is {notes['price']:g} points"
        columns = ("candidate", "accuracy, %", "spread between clusters", "cost ± standard error", "gain", "")
        tables.append((caption, columns, rows))
    clusters = notes["clusters"]
    rates = [[f"{100 * rate:.1f}" for rate in rates] for rates in clusters["label_rates"]]
    sizes = enumerate(zip(clusters["rows"], rates, strict=True), start=1)
    caption = "Clusters of the training rows, found without labels or groups, and the share of each class, %"
    tables.append((caption, ("cluster", "rows", *classes), [(str(n), str(size), *row) for n, (size, row) in sizes]))
    stability = clusters["stability"]
    if stability:
        caption = "Stability of each number of clusters: adjusted Rand index between halves of the rows"
        agreement = ("agreement", *(f"{value:.2f}" for value in stability.values()))
        tables.append((caption, ("clusters", *stability), [agreement]))
    if "match" in notes and notes["match"]["differ"]:
        share = f"{100 * notes['match']['effective']:.0f} % of the training rows"
        tables.append(("Weights towards the deployment sample", ("", "match"), [("effective sample size", share)]))
    made = [PlainTable(caption=caption, columns=columns, rows=rows) for caption, columns, rows in tables]
    return [PlainTables(title="What was tried, and what was kept", tables=made)]


def _told_by_clusters(clusters: Mapping[str, Any]) -> float:
    """By what share a row's cluster lowers the errors of guessing its class (Goodman and Kruskal's lambda)."""
    counts = np.array(clusters["rows"])[:, None] * np.array(clusters["label_rates"])  # [clusters, classes]
    wrong, left = (sum(clusters["rows"]) - right for right in (counts.sum(0).max(), counts.max(1).sum()))
    return float(1 - left / wrong) if wrong > 0 else 0.0


def _points(share: float | None) -> str:
    return "undefined" if share is None else f"{100 * share:.1f}"
