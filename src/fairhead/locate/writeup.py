"""What was located, in words and as data: the JSON of a head map, and the sections of a report."""

import base64
import io
import platform
from collections.abc import Mapping
from typing import Any

import numpy as np

from fairhead import __version__
from fairhead.data import Images
from fairhead.locate.effects import Evaluation
from fairhead.locate.head_maps import Head
from fairhead.locate.plan import half_sha256
from fairhead.locate.run import Located
from fairhead.locate.sentences import (
    ALPHA,
    among_controls,
    curve_section,
    finite,
    interval,
    line,
    outcome,
    p_text,
    signed,
)
from fairhead.locate.studies import Study
from fairhead.report import Report
from fairhead.report.wording import head_name, metric_name, p_value

SCHEMA = "fairhead.headmap/1"
_SHOWN = ("cramers_v", "DP", "EOd")
STAND_IN = (
    "The text side here is a stand-in (a sentence encoder with a linear map), not the model's own text tower. What is "
    "said about the heads of the image tower stands; nothing is said about the text tower. Among the texts of a head, "
    "those of the attribute and the neutral ones have the stand-in's vectors, the others those of the table: trust the "
    "p against neutral prompts."
)


def to_dict(located: Located, evaluation: Evaluation, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON form: maps [layers][heads] of the reporting half, the chosen heads, and the effects of editing them."""
    concept = located.concept
    ids = evaluation.ids
    content = {
        "schema": SCHEMA,
        "provenance": dict(provenance),
        "concept": {"name": concept.name, "poles": list(concept.poles), "origin": concept.origin, **concept.detail},
        "task": {
            "classes": list(located.task.classes),
            "origin": located.task.origin,
            "evidence_for": located.positive,
        },
        "n": {"choosing": int(located.choosing.sum()), "reporting": int((~located.choosing).sum())},
        "choosing_sha256": half_sha256(evaluation.ids, located.choosing),
        "selected": [list(head) for head in located.ranked],
        "gap": located.head_map.to_dict(),
        "single_heads": None if located.effect_map is None else located.effect_map.to_dict(),
        "other_terms": located.other_map.to_dict(),
        "separation": located.separation.d.to_dict(),
        "auc": located.separation.auc.to_dict(),
        "coupling": located.coupling.to_dict(),
        "effects": [_study(s) for s in located.studies],
        "curves": None if located.curves is None else located.curves.to_dict(),
        "forward_curves": None if located.forward_curves is None else located.forward_curves.to_dict(),
        "texts": [span.to_dict() for span in located.spans],
        "extremes": [
            {
                "head": list(e.head),
                "most": [str(ids[i]) if ids is not None else i for i in e.most],
                "least": [str(ids[i]) if ids is not None else i for i in e.least],
            }
            for e in located.extremes
        ],
        "notes": list(located.notes),
    }
    plain: dict[str, Any] = finite(content)
    return plain


def _study(study: Study) -> dict[str, Any]:
    cells = [{"label": c.label, "group": c.group, **c.change.to_dict()} for c in study.by_cell]
    return {
        "kind": study.kind,
        "way": study.way,
        "metrics": [ablation.to_dict() for ablation in study.ablations],
        "norm_matched": [ablation.to_dict() for ablation in study.norm_matched],
        "accuracy_by_cell": cells,
    }


def report_of(
    located: Located,
    evaluation: Evaluation,
    provenance: Mapping[str, Any],
    *,
    images: Images | None = None,
    notes: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The report as `fairhead.report` takes it; with `images`, those at the ends of each head's axis are shown.

    Example:
        >>> from fairhead.report import write
        >>> write(report_of(located, evaluation, {"model": "clip"}), "report.html")  # doctest: +SKIP
    """
    concept = located.concept
    first, second = concept.poles
    sorts = f"sorts {located.noun} by {located.target}" if located.target else f"sorts {located.noun}"
    return {
        "schema": Report.schema,
        "title": f"Heads that carry {concept.name}" + (f" in the task “{located.target}”" if located.target else ""),
        "question": (
            f"A model {sorts} into {', '.join(located.task.classes)} ({located.task.origin}). Which attention heads "
            f"carry a difference between {first} and {second} in the evidence for {located.evidence}, and what "
            "happens to the gaps when those heads are changed? All attributes are perceived ones."
        ),
        "verdict": verdict(located),
        "sections": _sections(located, evaluation, images, (*notes, *located.notes)),
        "provenance": {"fairhead": __version__, "python": platform.python_version(), **provenance},
    }


def verdict(located: Located) -> list[dict[str, str]]:
    """Sentences with their tone, each decided by intervals and controls."""
    if not located.ranked:
        what = (
            "No head carries a part of the gap that can be told from chance"
            if located.effect_map is None
            else "No head, taken out alone in a true forward pass, lowers the gap by more than chance"
        )
        return [line("unclear", f"{what} in the half that heads are chosen on.")]
    names = ", ".join(head_name(*head) for head in located.ranked)
    auc = located.separation.auc
    best = max(located.ranked, key=lambda head: abs(auc.value[head] - 0.5))
    chosen = f"were chosen on one half of the {located.noun}" if located.chosen_here else "were named"
    lines = [
        line(
            "note",
            f"{len(located.ranked)} of {located.head_map.gap.size} heads ({names}) {chosen}. "
            f"{_part(located)}{_alone(located)} Along {located.concept.name}, {head_name(*best)} tells the groups "
            f"apart best of them, with an AUC of "
            f"{auc.value[best]:.2f} ({auc.low[best]:.2f} to {auc.high[best]:.2f}; 0.5 is not at all).",
        )
    ]
    lines += [_effect_line(study) for study in located.studies if study is located.studies[0] or study.way == "forward"]
    return lines


def _part(located: Located) -> str:
    """The chosen heads' part in the gap; as a share where the whole can be told from 0."""
    gap = located.head_map
    whole = f"{signed(gap.total)} logits, 95 % interval {signed(gap.total_low)} to {signed(gap.total_high)}"
    other = "the other half" if located.chosen_here else "the reporting half"
    part = sum(float(gap.gap[head]) for head in located.ranked)
    if gap.has_total:
        return (
            f"In {other} they make up {100 * part / gap.total:.0f} % of the gap in the evidence for "
            f"{located.evidence} ({whole})."
        )
    return (
        f"In {other} they add {signed(part)} logits to the gap in the evidence for {located.evidence}, which as a "
        f"whole cannot be told from 0 ({whole})."
    )


def _alone(located: Located) -> str:
    """How many of the chosen heads lower the gap on their own, where that was asked."""
    lost = located.effect_map
    if lost is None:
        return ""
    side = np.sign(lost.total)
    sure = [head for head in located.ranked if lost.p_adjusted[head] <= ALPHA and side * lost.gap[head] > 0]
    return f" Taken out alone in a true forward pass, {len(sure)} of them lower it there by more than chance."


def _effect_line(study: Study) -> dict[str, str]:
    metric = next((m for m in _SHOWN if any(a.change.metric == m for a in study.ablations)), None)
    if metric is None:
        return line("unclear", f"The effect of {_words(study)} is undefined: too few rows.")
    ablation = study[metric]
    change = ablation.change
    assert change.value is not None
    names = {"cramers_v": "Cramér's V of prediction and group", "DP": "DP", "EOd": "EOd"}
    text = (
        f"{_words(study).capitalize()} changes {names[metric]} from {change.a:.3f} to {change.b:.3f} "
        f"({interval(change)}, corrected p {p_text(change.p_adjusted)}). " + among_controls(ablation)
    )
    if ablation.accuracy is not None and ablation.accuracy.value is not None:
        text += (
            f" Accuracy changes by {signed(100 * ablation.accuracy.value, 1)} points "
            f"({interval(ablation.accuracy, 100, 1)})."
        )
    cost = ablation.accuracy is not None and ablation.accuracy.high is not None and ablation.accuracy.high < 0
    found = outcome(ablation)
    return line("note" if cost and found.tone == "good" else found.tone, text + found.sentence)


def _words(study: Study) -> str:
    edit = {
        "mean": "replacing what they write by its balanced mean",
        "zero": "silencing them",
        "resample": "giving them another row's output",
        "project": "erasing the group from what they write (LEACE)",
    }[study.kind]
    return f"{edit} ({'as a true forward pass' if study.way == 'forward' else 'direct effect alone'})"


def _sections(
    located: Located, evaluation: Evaluation, images: Images | None, notes: tuple[str, ...]
) -> list[dict[str, Any]]:
    first, second = located.concept.poles
    whole = located.head_map.total
    of_heads, of_others = float(located.head_map.gap.sum()), float(located.other_map.gap.sum())
    rest = (
        f"The whole gap is {signed(whole)} logits: {signed(of_heads)} from all heads together, {signed(of_others)} "
        f"from the embedding and the MLPs, {signed(whole - of_heads - of_others)} from biases, which the norms scale "
        "differently from row to row."
    )
    sections: list[dict[str, Any]] = [
        {"kind": "text", "title": "What was done", "text": _what_was_done(located, notes)},
        {
            "kind": "headmap",
            "title": f"Each head's part in the gap of the evidence for {located.evidence}",
            "text": rest,
            **located.head_map.to_dict(),
        },
        *_single_heads(located),
        {
            "kind": "headmap",
            "title": f"How well each head tells {first} from {second} along the concept",
            "measure": f"Cohen's d along {located.concept.name}, {first} minus {second}",
            "unit": "SD",
            "values": located.separation.d.value.tolist(),
            "low": located.separation.d.low.tolist(),
            "high": located.separation.d.high.tolist(),
            "p_adjusted": located.separation.d.p_adjusted.tolist(),
            "selected": [list(head) for head in sorted(located.ranked)],
        },
    ]
    if not located.ranked:
        return sections
    sections.append(
        {
            "kind": "top_heads",
            "title": "The chosen heads",
            "text": "Texts in bold name the attribute." if located.spans else "",
            "poles": [first, second],
            "heads": [_card(located, head, images) for head in located.ranked],
        }
    )
    for study in located.studies:
        if study is located.studies[0] or study.way == "forward":
            sections += _study_sections(study)
    ways = (("direct effect alone", located.curves), ("true forward passes", located.forward_curves))
    sections += [curve_section(found, way) for way, found in ways if found is not None]
    return sections


def _single_heads(located: Located) -> list[dict[str, Any]]:
    if located.effect_map is None:
        return []
    lost, direct = located.effect_map.gap.ravel(), located.head_map.gap.ravel()
    alike = float(np.corrcoef(lost, direct)[0, 1]) if lost.std() and direct.std() else float("nan")
    text = "Each head alone was edited in a true forward pass; heads were ranked by what the gap then lost."
    if not np.isnan(alike):
        text += f" Over all heads this and the direct part above correlate by {signed(alike, 2)}."
    title = f"What the gap of the evidence for {located.evidence} loses without each head"
    return [{"kind": "headmap", "title": title, "text": text, **located.effect_map.to_dict()}]


def _study_sections(study: Study) -> list[dict[str, Any]]:
    title = _words(study).capitalize()
    sections: list[dict[str, Any]] = [
        {"kind": "ablation", "title": f"{title}: {metric_name(a.change.metric)}", **a.to_dict()}
        for a in study.ablations
        if a.change.metric in _SHOWN
    ]
    sections.append(
        {
            "kind": "comparison",
            "title": f"{title}: every metric",
            "a_name": "the model as it is",
            "b_name": "with the heads changed",
            "comparison": study.comparison.to_dict(),
        }
    )
    return sections


def _card(located: Located, head: Head, images: Images | None) -> dict[str, Any]:
    gap, d, auc, coupled = located.head_map, located.separation.d, located.separation.auc, located.coupling
    lost = located.effect_map

    def fact(name: str, value: float, low: float, high: float) -> dict[str, str]:
        figure, *ends = (f"{x:.2f}".replace("-", "−") for x in (value, low, high))
        return {"name": name, "figure": figure, "note": " to ".join(ends)}

    facts = [
        fact("Direct part in the gap, logits", gap.gap[head], gap.low[head], gap.high[head]),
        *([] if lost is None else [fact("Lost without it, logits", lost.gap[head], lost.low[head], lost.high[head])]),
        fact("Cohen's d", d.value[head], d.low[head], d.high[head]),
        fact("AUC", auc.value[head], auc.low[head], auc.high[head]),
        fact("Coupling with the evidence", coupled.value[head], coupled.low[head], coupled.high[head]),
    ]
    card: dict[str, Any] = {"head": list(head), "facts": facts}
    span = next((s for s in located.spans if s.head == head), None)
    if span is not None:
        card["texts"] = span.to_dict()["texts"]
        matched = "" if span.p_matched is None else f"; against neutral prompts {p_value(span.p_matched)}"
        note = f"of its variance, p {p_value(span.p_adjusted)} adjusted{matched}"
        facts.append({"name": "Texts of the attribute", "figure": f"{100 * span.attribute_share:.1f} %", "note": note})
    if images is not None:
        ends = next(e for e in located.extremes if e.head == head)
        card["most"] = [_picture(images, i) for i in ends.most]
        card["least"] = [_picture(images, i) for i in ends.least]
    return card


def _what_was_done(located: Located, notes: tuple[str, ...]) -> str:
    n = int(located.choosing.sum()), int((~located.choosing).sum())
    origin = f"chosen on {n[0]} {located.noun}" if located.chosen_here else "named"
    learned = "the first" if located.chosen_here else f"the other {n[0]}"
    text = (
        f"The output representation was taken apart into an exact sum of terms, one a head. The direction of "
        f"{located.concept.name} comes from {located.concept.origin}. Heads were {origin}; every figure here is of "
        f"{'the other ' if located.chosen_here else ''}{n[1]} {located.noun}. Edits were learned on {learned}."
    )
    if located.spans or located.extremes:
        text += (
            f" TextSpan and the {located.noun} at the ends of a head's axis, which know no groups, are of all {sum(n)}."
        )
    return "\n\n".join([text, *notes])


def _picture(images: Images, row: int) -> str:
    picture = images[row].copy()
    picture.thumbnail((96, 96))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
