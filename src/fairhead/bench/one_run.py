"""What one run found: its audit, its comparison, its report and the card of its model.

Of balance, match and auto the report also says which candidates there were, and what clusters they rest on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fairhead.audit import Audit, Comparison
from fairhead.audit.audit_results import audit_verdicts, comparison_verdicts
from fairhead.bench.grid import Cell
from fairhead.mitigate.auto_balance_match import IN_GROUPS, STABLE, STRENGTHS
from fairhead.mitigate.registry import method_named
from fairhead.models import load, method_of
from fairhead.models.fresh import is_ready
from fairhead.report import Report, Result, Sentence
from fairhead.report.model_card import Card, name_of
from fairhead.report.sections import Section
from fairhead.report.sections.audited import Audited
from fairhead.report.sections.changes import Compared
from fairhead.report.sections.plain import PlainTable, PlainTables, Text
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


@dataclass(frozen=True)
class Mitigated(Result):
    """What a run found, and where it is kept."""

    cell: Cell  # what was run
    row: Mapping[str, Any]  # its figures, costs and settings
    audit: Audit  # of the test rows
    comparison: Comparison | None  # with another method, if there was one
    against: str | None  # the name of that
    out: Path  # the folder, with the model in `model/`

    @property
    def compared(self) -> Comparison | None:
        """The comparison, unless plain training was kept and is what the run would be compared with."""
        return None if self.against == "erm" and kept_plain(self.cell, self.row) else self.comparison

    @property
    def notes(self) -> Mapping[str, Any]:
        """What the method found on its way."""
        found: Mapping[str, Any] = self.row.get("notes", {})
        return found

    @property
    def model(self) -> nn.Module:
        """The trained model, loaded from its folder."""
        return load(self.out / "model")

    def card(self) -> Card:
        """The README of the model."""
        cell, rows = self.cell, self.row["rows"]
        ready = is_ready(cell.backbone.model)
        trained = {"all": "All of", "last_encoder": "The last encoder of", "head": "The last layer of"}
        method = self.notes.get("kept", cell.method.method)
        carries = None if ready else method_of(load(self.out / "model"))
        choice = {sentence.text for sentence in choice_verdict(self.notes, cell.method.uses_groups)[:1]}
        sentences = self.page().verdict
        before = "plain training" if self.against == "erm" else f"training with {self.against}"
        kept = f"; it kept {NAMES.get(method, method)}" if method != cell.method.method else ""
        return Card(
            title=f"{name_of(cell.backbone.name)} trained with {cell.method.name}",
            done=(
                f"{trained[cell.backbone.train]} {name_of(cell.backbone.name)} was trained with {cell.method.name} "
                f"({method_named(cell.method.method).about}{kept}) to tell {', '.join(self.row['classes'])} apart: "
                f"{rows['train']} training rows, {rows['validation']} validation rows; the figures are of "
                f"{rows['test']} test rows. "
                f"{'Training saw the groups.' if cell.method.trains_with_groups else 'Training saw no group.'}"
                f"{f' B is this model, A the same after {before}.' if self.compared else ''}"
            ),
            findings=[one.text for one in sentences if one.tone != "note" or one.text in choice],
            data=cell.data.read,
            base=cell.backbone.model,
            before=f"after {before}",
            estimates=self.audit.estimates,
            were=self.compared.a.estimates if self.compared else (),
            changes=self.compared.differences if self.compared else (),
            limits=[one.text for one in sentences if one.tone == "note" and one.text not in choice],
            carries="a linear head on ready features" if ready else carries and type(carries).__name__,
        )

    def to_dict(self) -> dict[str, Any]:
        """The audit's JSON form, with the comparison if there is one."""
        found = self.audit.to_dict()
        return found if self.comparison is None else {**found, "comparison": self.comparison.to_dict()}

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """One row per figure: of the comparison where there is one, else of the audit."""
        return (self.comparison or self.audit).rows()

    def page(self, command: str = "") -> Report:
        """The run as a report."""
        cell, method, name = self.cell, self.cell.method, self.cell.method.name
        by = " and ".join(dict.fromkeys(e.group_by for e in self.audit.estimates if e.group_by is not None))
        question = f"Is {cell.backbone.name}, trained with {name} on {cell.data.name}, even by {by}?"
        verdict, sections = audit_verdicts(self.audit), list[Section]()
        if not by:
            question = f"How often is {cell.backbone.name} right, trained with {name}? {cell.data.name} names no group."
        if self.compared is not None and self.against is not None:
            if by:
                trained = f"when trained with {name} (B) than with {self.against} (A)"
                question = f"Is {cell.backbone.name} more even by {by} {trained}?"
            title = f"{name} against {self.against}"
            sections = [Compared(title=title, comparison=self.compared, a_name=self.against, b_name=name)]
            verdict = [*comparison_verdicts(self.compared), *verdict]
        elif self.comparison is not None:
            same = f"Both models are the same: {name} kept plain training, which it would be compared with."
            verdict = [Sentence(same, "unclear"), *verdict]
        notes = [
            "One training run: the intervals cover the choice of test rows, not the luck of the seed. "
            "fairhead bench runs several seeds."
        ]
        how = [f"{name} saw the groups while training"] if method.trains_with_groups else []
        if method.selection is not None:
            rows = "test rows, which is circular" if method.circular else "validation rows"
            how.append(f"The epoch of {name} was chosen by the groups of the {rows}")
        if method.uses_groups:
            notes.append(f"{'. '.join(how)}: what could be reached with them.")
        chosen = choice_verdict(self.notes, method.uses_groups)
        return Report(
            title=f"{name} on {cell.data.name}",
            question=question,
            verdict=[*chosen, *verdict, *(Sentence(note, "note") for note in notes)],
            sections=[
                *sections,
                Audited(title=f"Audit of {name}", name=name, audit=self.audit),
                *choice_section(self.notes, self.row["classes"]),
                Text(title="Training and its cost", text=_cost_text(self.row)),
            ],
            provenance={
                "command": command,
                "settings": json.dumps(self.row["settings"], default=str),
                **self.row["made_with"],
            },
        )


def kept_plain(cell: Cell, row: Mapping[str, Any]) -> bool:
    """Whether balance, match or auto kept plain training, and not that of another method under it."""
    return row.get("notes", {}).get("kept") == "plain" and cell.method.options.get("under", "erm") == "erm"


def _cost_text(row: Mapping[str, Any]) -> str:
    cost = row["cost"]
    stages = ", ".join(f"{name} ({steps} steps, {seconds:.0f} s)" for name, seconds, steps in row["stages"])
    energy = "energy is not known here"
    if cost["energy_wh"] is not None:
        source = "the GPU's energy counter" if cost["energy_counter_wh"] is not None else "integrated power"
        energy = f"{cost['energy_wh']:.2f} Wh by {source}"
    memory = cost["gpu_allocated_mib"]
    peak = f"{memory:.0f} MiB of GPU memory" if memory is not None else f"{cost['peak_rss_mib'] or 0:.0f} MiB resident"
    rows = row["rows"]
    return (
        f"{rows['train']} training rows, {rows['validation']} validation rows, {rows['test']} test rows; groups were "
        f"joined after training.\n\nStages: {stages}. Epoch {row['best_epoch']} was kept, with a validation accuracy "
        f"of {100 * row['validation_accuracy']:.1f} %.\n\n{cost['seconds']:.0f} s, {peak}, {energy}."
    )


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
