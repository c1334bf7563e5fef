"""A located gap between groups: what else was measured of the heads, and the sentences of the report."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fairhead.data import Images
from fairhead.locate.directions import Concept, Task
from fairhead.locate.head_features import HeadTexts
from fairhead.locate.head_maps import Head, HeadMap, Measure, Separation
from fairhead.locate.located import Located
from fairhead.locate.question import Extremes
from fairhead.locate.rows import Evaluation
from fairhead.locate.studies import Changes, Study, among_controls, interval, outcome, written
from fairhead.report.page import Sentence
from fairhead.report.sections import Section
from fairhead.report.sections.attention_sections import picture_address
from fairhead.report.sections.headmap import MOST, Fact, SpanText
from fairhead.report.sections.plain import PlainTable
from fairhead.report.wording import from_to, head_name, is_share, metric_name, p_value, scale_for, signed
from fairhead.stats import Difference, p_text

STAND_IN = (
    "The text encoder here is a substitute (a sentence encoder with a linear map), not the model's own. The results "
    "for the heads of the image encoder are valid; there are none for its text encoder. Among the texts of a head, "
    "those of the attribute and the neutral ones have the substitute's vectors, the others those of the table: rely on "
    "the p-value against neutral prompts."
)


@dataclass(frozen=True, kw_only=True)
class GapLocated(Located[Evaluation]):
    """What is found of a gap between groups."""

    concept: Concept  # the attribute's direction
    task: Task  # classes as directions
    separation: Separation  # Cohen's d and AUC along the concept, on the reporting half
    coupling: Measure  # correlation with the class evidence
    spans: tuple[HeadTexts, ...]  # TextSpan of the selected heads; empty without a pool
    by_class: Mapping[str, HeadMap]  # direct contributions for the other classes, where there are many

    shown: ClassVar[tuple[str, ...]] = ("cramers_v", "DP", "EOd")
    in_table: ClassVar[tuple[str, ...]] = ("evidence_gap", *shown, "accuracy")
    gaps: ClassVar[tuple[str, ...]] = ("evidence_gap", *shown)
    figure: ClassVar[str] = "metric"
    caption: ClassVar[str] = (
        "gaps and accuracy in percent, changes in points (the evidence gap, in logits, and V as they are); "
        "p: random heads lower it as much, matched by layer or by output norm"
    )
    edit_names: ClassVar[Mapping[str, str]] = {
        "mean": "replacing the heads' output by its balanced mean",
        "zero": "setting the heads to zero",
        "resample": "giving the heads another row's output",
        "project": "erasing the group from the heads' output (LEACE)",
        "splince": "erasing the group and keeping the label's covariance (SPLINCE)",
        "gain": "scaling the heads' output around its mean",
        "balance": "refitting the last layer with balanced clusters",
    }

    @property
    def evidence(self) -> str:
        """The class whose evidence was looked at, in words: “yes” (Smiling)."""
        name = f"“{self.question.rows.classes[self.question.rows.positive]}”"
        return f"{name} ({self.question.rows.target})" if self.question.rows.target else name

    @property
    def title(self) -> str:
        """Of the report."""
        task = f" in the task “{self.question.rows.target}”" if self.question.rows.target else ""
        return f"Heads that contribute to the gap by {self.concept.name}{task}"

    @property
    def asked(self) -> str:
        """What is asked."""
        first, second = self.concept.poles
        rows = self.question.rows
        by = f" by {rows.target}" if rows.target else ""
        return (
            f"A model classifies {rows.noun}{by} into {', '.join(self.task.classes)} ({self.task.origin}). Which "
            f"attention heads contribute to a difference between {first} and {second} in the evidence for "
            f"{self.evidence}, and what happens to the gaps when those heads change? All attributes are perceived ones."
        )

    def opening(self) -> Sentence:
        """Which heads, their part in the gap, and the best of them along the concept."""
        if not self.ranked:
            what = (
                "No head contributes significantly to the gap"
                if self.effect_map is None
                else "No head, edited alone in a full forward pass, lowers the gap significantly"
            )
            gap = f"In the other half, the gap in the evidence for {self.evidence} is {self._whole}."
            return Sentence(f"{what} in the selection half. {gap}", "unclear")
        auc = self.separation.auc
        best = max(self.ranked, key=lambda head: abs(auc.value[head] - 0.5))
        return Sentence(
            f"{self.headline()} {self._part()} Along {self.concept.name}, {head_name(*best)} separates the groups "
            f"best, with an AUC of {auc.value[best]:.2f} ({auc.low[best]:.2f} to {auc.high[best]:.2f}; 0.5 is chance).",
            "note" if self.confirmed else "unclear",
        )

    @property
    def _whole(self) -> str:
        """The gap of the reporting half."""
        gap = self.head_map
        return f"{signed(gap.total)} logits, 95 % interval {signed(gap.total_low)} to {signed(gap.total_high)}"

    def _part(self) -> str:
        """The selected heads' part in the gap; as a share where the whole is significant."""
        gap, whole = self.head_map, self._whole
        other = "the other half" if self.chosen_here else "the reporting half"
        part = sum(float(gap.value[head]) for head in self.ranked)
        make, add = ("it makes", "it adds") if len(self.ranked) == 1 else ("they make", "they add")
        if gap.has_total:
            return (
                f"In {other} {make} up {round(100 * part / gap.total)} % of the gap in the evidence for "
                f"{self.evidence} ({whole})."
            )
        return (
            f"In {other} {add} {signed(part)} logits to the gap in the evidence for {self.evidence}, which as a "
            f"whole is not significant ({whole})."
        )

    def effect(self, study: Study) -> Sentence:
        """What an edit did to the first metric that has a value, and to accuracy."""
        change = next((found for found in map(study.change, self.shown) if found is not None), None)
        if change is None:
            edit = self.edit_words(study, start=False)
            return Sentence(f"The effect of {edit} is undefined: too few rows.", "unclear")
        name = {"cramers_v": "Cramér's V of prediction and group"}.get(change.metric, change.metric)
        assert change.a is not None
        assert change.b is not None
        text = (
            f"{self.edit_words(study)} changes {name} {from_to(change.metric, change.a, change.b)} "
            f"({interval(change)}, corrected {p_text(change.p_adjusted)})."
        )
        ablation = next((a for a in study.ablations if a.change is change), None)
        text += "" if ablation is None else " " + among_controls(ablation)
        behind, accuracy = study.change("evidence_gap"), study.change("accuracy")
        if behind is not None and behind.a is not None and behind.b is not None:
            ends = (signed(x).removeprefix("+") for x in (behind.a, behind.b))
            gap = f"from {' to '.join(ends)} logits ({interval(behind)})"
            text += f" The gap in the evidence for {self.evidence} goes {gap}."
        if accuracy is not None and accuracy.value is not None:
            points = f"{signed(100 * accuracy.value, 1)} points ({interval(accuracy)})"
            text += f" Accuracy changes by {points}."
        cost = accuracy is not None and accuracy.high is not None and accuracy.high < 0
        found = outcome(change, ablation)
        return Sentence(text + found.text, "note" if cost and found.tone == "good" else found.tone)

    def baseline(self) -> list[Sentence]:
        """Whether the reported edit of heads beats erasure at the output."""
        said, lost = [], []
        for study, gap, accuracy in self._baselines():
            beaten, how = beats(gap, accuracy)
            said.append(f"{self._named(study)}: {how}")
            lost += [self._named(study)] if study.way == "output" and not beaten else []
        if not said:
            return []
        text = "The edit of heads compared with erasure without heads. " + "; ".join(said) + "."
        if lost:
            text += f" Heads do not beat {' or '.join(lost)}."
        return [Sentence(text, "unclear" if lost else "note")]

    def baseline_table(self) -> PlainTable | None:
        """The baselines with what differs between them and the reported edit of heads, paired."""
        rows, metric = [], ""
        for study, gap, accuracy in self._baselines():
            cost = study.change("accuracy")
            own = "–" if cost is None or cost.value is None else signed(100 * cost.value, 1)
            cells = written(gap, with_p=True), written(accuracy, with_p=True)
            rows.append(
                [self._named(study), "–" if gap.a is None else scale_for(gap.metric).number(gap.a), own, *cells]
            )
            metric = metric_name(gap.metric) + (", %" if is_share(gap.metric) else "")
        columns = ["baseline", metric, "change of accuracy, points", "heads minus baseline", "accuracy, points"]
        caption = "The last two columns are the reported edit of heads minus the baseline, paired over rows."
        return PlainTable(caption=caption, columns=columns, rows=rows) if rows else None

    def _baselines(self) -> Iterator[tuple[Study, Difference, Difference]]:
        """Each baseline, with its first gap that has a value and accuracy: from it to the reported edit of heads."""
        for study in self.studies:
            other = {d.metric: d for d in (study.reported or Changes(())).differences if d.a is not None}
            gap = next((other[m] for m in self.shown if m in other and other[m].value is not None), None)
            if gap is not None and "accuracy" in other:
                yield study, gap, other["accuracy"]

    def _named(self, study: Study) -> str:
        where = {"together": "the selected heads' sum", "output": "the whole output"}[study.way]
        erasure = {"project": f"LEACE of {where}", "splince": f"SPLINCE of {where}"}
        return erasure.get(study.kind, self.edit_names[study.kind])

    def done(self) -> str:
        """How it was found."""
        n, noun = (int(self.question.choosing.sum()), int((~self.question.choosing).sum())), self.question.rows.noun
        origin = f"selected on {n[0]} {noun}" if self.chosen_here else self.origin
        learned = "the first" if self.chosen_here else f"the other {n[0]}"
        text = (
            f"The output representation was decomposed into an exact sum of terms, one per head. The direction of "
            f"{self.concept.name} comes from {self.concept.origin}. Heads were {origin}; every figure here comes from "
            f"{'the other ' if self.chosen_here else ''}{n[1]} {noun}. Edits were learned on {learned}."
        )
        if self.spans or self.extremes:
            used = ["TextSpan"] * bool(self.spans) + [f"the {noun} at the ends of a head's axis"] * bool(self.extremes)
            text += f" All {sum(n)}, without groups, are used for {' and for '.join(used)}."
        return text

    def maps(self) -> dict[str, Section]:
        """The gap, what it loses without each head, and the separation of the groups."""
        first, second = self.concept.poles
        whole = self.head_map.total
        of_heads, of_others = float(self.head_map.value.sum()), float(self.other_map.value.sum())
        rest = (
            f"The whole gap is {signed(whole)} logits: {signed(of_heads)} from all heads together, "
            f"{signed(of_others)} from the embedding and the MLPs, {signed(whole - of_heads - of_others)} from "
            "biases, which the norms scale differently from row to row."
        )
        of = f"the gap in the evidence for {self.evidence}"
        maps = {"Direct contribution": self.mapped(self.head_map, f"Each head's contribution to {of}", rest)}
        if self.effect_map is not None:
            lost, direct = self.effect_map.value.ravel(), self.head_map.value.ravel()
            text = "Each head alone was edited in a full forward pass; heads are ranked by how much the gap shrinks."
            if self.exact is not None:
                text += f" {len(self.exact)} heads were run; the others were estimated from gradients."
            if lost.std() and direct.std():
                alike = signed(float(np.corrcoef(lost, direct)[0, 1]), 2)
                text += f" Over all heads, this and the direct contribution correlate by {alike}."
            maps["Effect"] = self.mapped(self.effect_map, f"How much {of} shrinks without each head", text)
        if self.question.gains is not None:
            text = "Each head's gain minus 1; most gains are 1."
            about = {"measure": "gain − 1", "unit": "", "values": (self.question.gains - 1).tolist()}
            maps["Gain"] = self.mapped(about, "Gains of the heads (the edit)", text)
        d = self.separation.d
        along = {
            "measure": f"Cohen's d along {self.concept.name}, {first} minus {second}",
            "unit": "SD",
            "values": d.value.tolist(),
            "low": d.low.tolist(),
            "high": d.high.tolist(),
            "p_adjusted": d.p_adjusted.tolist(),
        }
        title = f"How well each head separates {first} from {second} along the concept"
        maps[f"Along {self.concept.name}"] = self.mapped(along, title)
        for name, found in self.by_class.items():
            title = f"Each head's contribution to the gap in the evidence for “{name}”"
            maps[f"Direct contribution, “{name}”"] = self.mapped(found, title)
        return dict(list(maps.items())[:MOST])

    def facts(self, head: Head) -> list[Fact]:
        """The figures of a head."""
        maps = [("Direct contribution, logits", self.head_map)]
        if self.effect_map is not None:
            estimated = self.exact is not None and head not in self.exact
            maps.append((f"Lost without it{' (estimated)' if estimated else ''}, logits", self.effect_map))
        found = [_fact(name, m.value[head], m.low[head], m.high[head]) for name, m in maps]
        if self.head_map.has_total:
            share = f"{round(100 * self.head_map.share[head])} %"
            found[0] = replace(found[0], note=f"{found[0].note}; {share} of the gap")
        d, auc = self.separation.d, self.separation.auc
        for name, x in (("Cohen's d", d), ("AUC", auc), ("Coupling with the evidence", self.coupling)):
            found.append(_fact(name, x.value[head], x.low[head], x.high[head]))
        span = next((s for s in self.spans if s.head == head), None)
        if span is not None:
            matched = "" if span.p_matched is None else f"; against neutral prompts {p_value(span.p_matched)}"
            note = f"of its variance, p {p_value(span.p_adjusted)} adjusted{matched}"
            found.append(Fact("Texts of the attribute", f"{100 * span.attribute_share:.1f} %", note))
        return found

    def ends(self, ends: Extremes, images: Images | None) -> dict[str, Any]:
        """What else its card has: the texts of a chosen head, and the images at its ends."""
        span = next((s for s in self.spans if s.head == ends.head), None)
        more: dict[str, Any] = {} if span is None else {"texts": [SpanText(**one) for one in span.to_dict()["texts"]]}
        if images is not None:
            for end, rows in (("most", ends.most), ("least", ends.least)):
                more[end] = [picture_address(images[row], 96, quality=80) for row in rows]
        return more

    def details(self) -> dict[str, Any]:
        """Concept, task, and what was measured along the concept."""
        concept, task, ids = self.concept, self.task, self.question.rows.ids

        def named(rows: tuple[int, ...]) -> list[str | int]:
            return [i if ids is None else str(ids[i]) for i in rows]

        positive = self.question.rows.classes[self.question.rows.positive]
        return {
            "concept": {"name": concept.name, "poles": list(concept.poles), "origin": concept.origin, **concept.detail},
            "task": {"classes": list(task.classes), "origin": task.origin, "evidence_for": positive},
            "separation": self.separation.d.to_dict(),
            "auc": self.separation.auc.to_dict(),
            "coupling": self.coupling.to_dict(),
            "curves": self.curves.get("direct"),
            "forward_curves": self.curves.get("forward"),
            "texts": [span.to_dict() for span in self.spans],
            "extremes": [{"head": list(e.head), "most": named(e.most), "least": named(e.least)} for e in self.extremes],
        }


def _fact(name: str, value: float, low: float, high: float) -> Fact:
    figure, *between = (signed(x, 2).removeprefix("+") for x in (value, low, high))
    return Fact(name, figure, " to ".join(between))


def beats(gap: Difference, accuracy: Difference) -> tuple[bool, str]:
    """Whether an edit beats another, by the changes from the other to it: better in one and not worse in the other."""
    better: list[str] = []
    worse: list[str] = []
    if gap.significant:
        smaller = abs(gap.b or 0) < abs(gap.a or 0)
        (better if smaller else worse).append("a smaller gap" if smaller else "a larger gap")
    if accuracy.significant:
        higher = (accuracy.value or 0) > 0
        (better if higher else worse).append("higher accuracy" if higher else "lower accuracy")
    if not better and not worse:
        return False, "no significant difference"
    found = " but ".join(" and ".join(some) for some in (better, worse) if some)
    return bool(better and not worse), f"the edit of heads has {found}"
