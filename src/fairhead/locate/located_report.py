"""What was located: the JSON of a head map, the verdict, the sections of a report, and tables for the terminal."""

import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fairhead import __version__
from fairhead.locate.ablation import Ablation
from fairhead.locate.head_maps import Head, HeadMap
from fairhead.locate.question import Words, half_sha256
from fairhead.report import Report
from fairhead.report.terminal import TONES
from fairhead.report.wording import head_name, p_value
from fairhead.stats import ALPHA, Difference
from fairhead.stats.outcome import p_text

if TYPE_CHECKING:
    from fairhead.data import Images
    from fairhead.locate.engine import Curves, Located, Study

SCHEMA = "fairhead.headmap/1"
# How an edit was made: of one study, and of curves.
_WAYS = {
    "direct": ("direct effect alone", "direct effect alone"),
    "forward": ("as a true forward pass", "true forward passes"),
}


def to_dict(located: "Located", provenance: Mapping[str, Any], notes: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON form: maps [layers][heads] of the reporting half, the chosen heads, and the effects of editing them."""
    content = {
        "schema": SCHEMA,
        "provenance": dict(provenance),
        "n": {"choosing": int(located.choosing.sum()), "reporting": int((~located.choosing).sum())},
        "choosing_sha256": half_sha256(located.rows.ids, located.choosing),
        "selected": [list(head) for head in located.ranked],
        "gap": located.head_map.to_dict(),
        "single_heads": None if located.effect_map is None else located.effect_map.to_dict(),
        "other_terms": located.other_map.to_dict(),
        "effects": [_study(s) for s in located.studies],
        **located.words.to_dict(located),
        "notes": [*notes, *located.notes, *located.words.limits],
    }
    plain: dict[str, Any] = _finite(content)
    return plain


def _study(study: "Study") -> dict[str, Any]:
    content = {"kind": study.kind, "way": study.way, "metrics": [ablation.to_dict() for ablation in study.ablations]}
    if study.changes.by_cell:
        content["norm_matched"] = [ablation.to_dict() for ablation in study.norm_matched]
        cells = study.changes.by_cell
        content["accuracy_by_cell"] = [{"label": y, "group": group, **d.to_dict()} for y, group, d in cells]
    return content


def report_of(
    located: "Located", provenance: Mapping[str, Any], *, images: "Images | None" = None, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """The report as `fairhead.report` takes it; with `images`, those at the ends of each head's axis are shown.

    Example:
        >>> from fairhead.report import write
        >>> write(report_of(located, {"model": "clip"}), "report.html")  # doctest: +SKIP
    """
    words = located.words
    done = "\n\n".join([words.done(located), *notes, *located.notes, *words.limits])
    sections = [{"kind": "text", "title": "What was done", "text": done}, *words.maps(located)]
    if located.ranked:
        sections += words.heads(located, images)
        for study in _shown(located):
            sections += _study_sections(words, study)
        sections += [_curve_section(located.curves[way], way) for way in words.dose_ways if way in located.curves]
    return {
        "schema": Report.schema,
        "title": words.title,
        "question": words.question(located),
        "verdict": verdict(located),
        "sections": sections,
        "provenance": {"fairhead": __version__, "python": platform.python_version(), **provenance},
    }


def edit_words(words: Words, study: "Study", start: bool = False) -> str:
    """An edit in words, perhaps at the start of a sentence."""
    text = f"{words.edits[study.kind]} ({_WAYS[study.way][0]})"
    return text[:1].upper() + text[1:] if start else text


def verdict(located: "Located") -> list[dict[str, str]]:
    """Sentences with their tone, each decided by intervals and controls.

    Example:
        >>> [line["tone"] for line in verdict(located)]  # doctest: +SKIP
        ['note', 'unclear', 'good']
    """
    effects = (located.words.effect(study) for study in _shown(located))
    return [located.words.opening(located), *effects]


def _shown(located: "Located") -> list["Study"]:
    return [study for study in located.studies if study is located.studies[0] or study.way == "forward"]


def _study_sections(words: Words, study: "Study") -> list[dict[str, Any]]:
    title = edit_words(words, study, start=True)
    sections: list[dict[str, Any]] = [
        {"kind": "ablation", "title": f"{title}: {words.figure_name(a.change.metric)}", **a.to_dict()}
        for a in study.ablations
        if a.change.metric in words.shown
    ]
    if study.changes.comparison is not None:
        sections.append(
            {
                "kind": "comparison",
                "title": f"{title}: every metric",
                "a_name": "the model as it is",
                "b_name": "with the heads changed",
                "comparison": study.changes.comparison.to_dict(),
            }
        )
    return sections


def _curve_section(found: "Curves", way: str) -> dict[str, Any]:
    """The dose–response curve of a report."""
    panels = []
    for metric in found.metrics:
        points = [
            {
                "name": "no head" if not p.heads else f"+ {head_name(*p.heads[-1])}",
                "value": None if np.isnan(p.figures[metric]) else p.figures[metric],
            }
            for p in found.added
        ]
        panels.append({"metric": metric, "points": points})
    return {
        "kind": "curve",
        "title": f"Dose and response ({_WAYS[way][1]})",
        "text": "Heads are changed one after the other, in the order of their rank.",
        "panels": panels,
    }


class Outcome(NamedTuple):
    """What an edit did to a gap: a sentence (empty, or with a blank before it) and its tone, whatever else it cost."""

    sentence: str
    tone: str


def outcome(ablation: Ablation) -> Outcome:
    """Judge the effect on a gap whose ideal is 0, by its interval, its corrected p and the controls.

    Example:
        >>> wider = Difference("DP", "sex", 0.05, 0.16, 0.11, 0.05, 0.17, n=500, p=0.001, p_adjusted=0.004)
        >>> outcome(Ablation((Head(2, 1),), wider, controls=(0.0, 0.01), exhaustive=True))
        Outcome(sentence=' The gap is wider than before.', tone='bad')
    """
    change = ablation.change
    if change.a is None or change.b is None or change.low is None or change.high is None:
        return Outcome("", "unclear")
    if not change.significant:
        return Outcome(f" Not significant ({p_text(change.p_adjusted)}).", "unclear")
    if abs(change.b) > abs(change.a):
        side = ", on the other side" if change.a * change.b < 0 else ""
        return Outcome(f" The gap is wider than before{side}.", "bad")
    if change.low > 0:  # nearer to 0 from below: controls are asked who lowers the figure
        return Outcome("", "note")
    if ablation.p_controls <= ALPHA:
        return Outcome("", "good")
    if ablation.percentile == 0:
        return Outcome(" No control does as much, but there are too few of them to rule out chance.", "note")
    return Outcome(" So the effect is not special to the chosen heads.", "unclear")


def among_controls(ablation: Ablation) -> str:
    """How many control sets do what an edit does to a figure that should fall.

    Example:
        >>> lower = Difference("DP", "sex", 0.16, 0.05, -0.11, -0.17, -0.05, n=500, p=0.01, p_adjusted=0.02)
        >>> among_controls(Ablation((Head(2, 1),), lower, controls=(-0.2, 0.01, 0.0), exhaustive=False))
        'Of 3 control sets of the same layers, 1 lower it as much (p = 0.50).'
    """
    count = round(ablation.percentile * len(ablation.controls))
    falls = ablation.change.value is None or ablation.change.value <= 0
    what = "lower it as much" if falls else "raise it less, or lower it"
    sets = f"Of {len(ablation.controls)} control sets of the same layers"
    return f"{sets}, {count} {what} ({p_text(ablation.p_controls)})."


def surely_lost(located: "Located", ranking: HeadMap, side: float = 1.0) -> list[Head]:
    """The chosen heads whose part in a map is on one side, and significant there."""
    return [h for h in located.ranked if ranking.p_adjusted[h] <= ALPHA and side * ranking.gap[h] > 0]


def names_of(heads: Sequence[Head]) -> str:
    """Heads in a sentence.

    Example:
        >>> names_of([Head(10, 5), Head(11, 1)])
        'L10H5, L11H1'
    """
    return ", ".join(head_name(*head) for head in heads)


def interval(change: Difference, factor: float = 1, digits: int = 3) -> str:
    """The ends of a change, times a factor."""
    if change.low is None or change.high is None:
        return "no interval"
    low, high = (signed(end, digits) for end in sorted((factor * change.low, factor * change.high)))
    return f"95 % interval {low} to {high}"


def signed(value: float, digits: int = 3) -> str:
    """A figure with its sign; 0 has none.

    Example:
        >>> signed(-0.0004), signed(-0.5, 1)
        ('0.000', '−0.5')
    """
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def line(tone: str, text: str) -> dict[str, str]:
    """A sentence of a verdict."""
    return {"text": text, "tone": tone}


def _finite(value: Any) -> Any:
    """None for NaN, which is not JSON: a figure that has no value, such as V where all predictions are the same."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def show_located(console: Console, found: "Located", notes: Sequence[str]) -> None:
    """Verdict, chosen heads, effects of editing them."""
    for line in verdict(found):
        console.print(f"- [{TONES[line['tone']]}]{escape(line['text'])}[/]", highlight=False)
    for note in (*notes, *found.notes):
        console.print(f"- [dim]{escape(note)}[/]", highlight=False)
    if not found.ranked:
        return
    console.print()
    table = Table(title="Chosen heads, on the reporting half", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("head")
    for title, _ in found.words.columns(found, found.ranked[0]):
        table.add_column(title, justify="right")
    for head in found.ranked:
        table.add_row(head_name(*head), *(cell for _, cell in found.words.columns(found, head)))
    console.print(table)
    console.print(_effects(found))
    for text in found.words.lines():
        console.print(text, highlight=False)


def _effects(found: "Located") -> Table:
    """The main figures before and after each edit, beside their controls; the JSON has all of them."""
    table = Table(title="Effects of editing them", box=box.SIMPLE_HEAD, title_justify="left")
    words = found.words
    by_norm = any(study.norm_matched for study in found.studies)
    for title in ("edit", words.figure, "before", "after", "change", "p layer", *(["p norm"] if by_norm else [])):
        table.add_column(title, justify="left" if title in ("edit", words.figure) else "right")
    for study in found.studies:
        norm = {a.change.metric: p_value(a.p_controls) for a in study.norm_matched}
        known = {a.change.metric: a for a in study.ablations}
        for i, ablation in enumerate(known[name] for name in words.in_table if name in known):
            change = ablation.change
            low = "" if change.low is None or change.high is None else f" ({change.low:+.3f} to {change.high:+.3f})"
            # Controls test whether a gap is lowered; a fall of accuracy is the cost, not the aim.
            tested = change.metric in words.gaps
            last = [norm.get(change.metric, "") if tested else ""] if by_norm else []
            table.add_row(
                "" if i else f"{study.kind}, {study.way}",
                {"cramers_v": "V"}.get(change.metric, change.metric),
                f"{change.a:.3f}",
                f"{change.b:.3f}",
                f"{change.value:+.3f}{low}",
                p_value(ablation.p_controls) if tested else "",
                *last,
            )
    table.caption = words.caption
    return table
