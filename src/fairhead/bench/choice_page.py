"""What balance, match and auto tried and why they kept what they kept, in words and tables for the page of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from fairhead.mitigate.reduce import STRENGTHS
from fairhead.report import Sentence
from fairhead.report.sections import Section
from fairhead.report.sections.plain_tables import PlainTable, PlainTables

NAMES = {
    "plain": "plain training",
    "balance": "balance",
    "logits": "adjusted logits",
    "dro": "GroupDRO over clusters",
    "match": "match",
    "both": "balance and match",
}
NAMES |= {f"{name} {s:g}": f"{said}, {100 * s:.0f} % strength" for name, said in NAMES.items() for s in STRENGTHS}


def choice_verdict(notes: Mapping[str, Any], uses_groups: bool = False) -> list[Sentence]:
    """What was kept, at what cost, in a sentence or two; nothing for a method that chooses nothing."""
    if "kept" not in notes:
        return []
    said, tried = [], {one["name"]: one for one in notes.get("tried", ())}
    kept = notes["kept"]
    if tried:
        first, one = next(iter(tried.values())), tried[kept]
        why = "no other candidate had a smaller sum of spread between clusters and cost within the price"
        if one is not first:
            spreads = f"{_points(one['spread'])} points ({NAMES[first['name']]}: {_points(first['spread'])})"
            less = f"{_points(abs(one['cost']))} points {'lower' if one['cost'] > 0 else 'higher'}"
            why = (
                f"its answers, given the label, have a standard deviation of {spreads} between clusters, and its "
                f"accuracy is {less}"
            )
        blind = "" if uses_groups else " No group was used."
        said.append(f"Kept: {NAMES[kept]}. On rows that no candidate was trained on, {why}.{blind}")
    if _told_by_clusters(notes["clusters"]) >= 0.9:
        said.append(
            "The clusters are nearly the classes, so balancing had little to compare within them: name another "
            "encoder, such as a pretrained one (--option encoder=...)."
        )
    match = notes.get("match")
    if match is not None and {"match", "both"} & set(notes.get("asked", ())):
        differ = "differ" if match["differ"] else "are not shown to differ"
        rest = "" if match["differ"] else ", so nothing was matched"
        said.append(
            f"The training rows and those from the place of use {differ} within classes (area under the ROC curve "
            f"{match['separation']:.2f}, {_p(match['p'])}){rest}."
        )
    for one in notes.get("matched too dear", ()):
        said.append(
            f"{NAMES[one['name']].capitalize()} was left out: with weights towards one half of the sample, a linear "
            f"head on the same features loses {_points(one['cost'])} points of accuracy on the other half."
        )
    if "label taken out" in notes:
        done = "was taken out of the features" if notes["label taken out"] else "was left in the features"
        said.append(f"What tells the classes apart {done} before they were clustered.")
    if "not matched" in notes:
        said.append(f"Nothing was matched: {notes['not matched']}.")
    return [Sentence(text, "note") for text in said]


def choice_section(notes: Mapping[str, Any], classes: Sequence[str]) -> list[Section]:
    """Candidates, clusters and the stability of their number, as tables."""
    if "kept" not in notes:
        return []
    tables = []
    if notes.get("tried"):
        rows = [
            (
                NAMES[one["name"]],
                f"{100 * one['accuracy']:.1f}",
                _points(one["spread"]),
                f"{_points(one['cost'])} ± {_points(one['cost_se'])}",
                "kept" if one["name"] == notes["kept"] else "" if one["affordable"] else "too dear",
            )
            for one in notes["tried"]
        ]
        tables.append(
            PlainTable(
                caption=f"Candidates, on rows that none was trained on; the price is {notes['price']:g} points",
                columns=("candidate", "accuracy, %", "spread between clusters", "cost ± standard error", ""),
                rows=rows,
            )
        )
    clusters = notes["clusters"]
    tables.append(
        PlainTable(
            caption="Clusters of the training rows, found without labels or groups, and the share of each class, %",
            columns=("cluster", "rows", *classes),
            rows=[
                (str(number), str(size), *(f"{100 * rate:.1f}" for rate in rates))
                for number, (size, rates) in enumerate(
                    zip(clusters["rows"], clusters["label_rates"], strict=True), start=1
                )
            ],
        )
    )
    if clusters["stability"]:
        tables.append(
            PlainTable(
                caption="Stability of each number of clusters: adjusted Rand index between halves of the rows",
                columns=("clusters", *clusters["stability"]),
                rows=[("agreement", *(f"{value:.2f}" for value in clusters["stability"].values()))],
            )
        )
    if "match" in notes and notes["match"]["differ"]:
        share = 100 * notes["match"]["effective"]
        size = [("effective sample size", f"{share:.0f} % of the training rows")]
        tables.append(PlainTable(caption="Weights towards the place of use", columns=("", "match"), rows=size))
    return [PlainTables(title="What was tried, and what was kept", tables=tables)]


def _told_by_clusters(clusters: Mapping[str, Any]) -> float:
    """By what share a row's cluster lowers the errors of guessing its class (Goodman and Kruskal's lambda)."""
    of_class = [
        [size * rate for rate in rates] for size, rates in zip(clusters["rows"], clusters["label_rates"], strict=True)
    ]
    wrong = sum(clusters["rows"]) - max(map(sum, zip(*of_class, strict=True)))
    left = sum(clusters["rows"]) - sum(map(max, of_class))
    return 1 - left / wrong if wrong > 0 else 0.0


def _points(share: float) -> str:
    return f"{100 * share:.1f}"


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2f}"
