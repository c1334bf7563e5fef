"""What was located, as a result: JSON, verdict, report and tables; its edit can be saved as a model."""

import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape

from fairhead import __version__
from fairhead.data import Images
from fairhead.errors import InputError, UnsupportedModel
from fairhead.locate.ablation import WAYS, Controls, edit_words, other_cards
from fairhead.locate.engine import Located, Words
from fairhead.locate.engine import locate as find_heads
from fairhead.locate.locate_settings import LocatePlan, Source
from fairhead.locate.pair_rows import TextPairs
from fairhead.locate.session import Opened, open_question
from fairhead.locate.studies import Curves, Mask, Study, restudied, study
from fairhead.locate.two_models import compare_models
from fairhead.models.places import config_of, find
from fairhead.report import TONES, Result, terminal
from fairhead.report.model_card import Card, name_of
from fairhead.report.page import Report, Sentence, write
from fairhead.report.sections import Section
from fairhead.report.sections.changes import Compared
from fairhead.report.sections.headmap import HeadCard, Headmaps, TopHeads
from fairhead.report.sections.plain import Curve, PlainTable, PlainTables, Step, Steps, Text
from fairhead.report.wording import head_name, metric_name, number, p_value, signed
from fairhead.store import write_json

SCHEMA = "fairhead.headmap/1"
_SAME = 1e-3  # of what a model puts out: what saving and loading it may change
OTHER_HALF = (
    "The heads were chosen on other rows than the choosing half of this run: some of those reported on here may have "
    "been used for the choice. With the data, limit and seed of that run, the halves are the same."
)


@dataclass(frozen=True)
class LocatedHeads(Result):
    """The heads that carry a gap, with the question that they answer."""

    located: Located  # maps, chosen heads, effects of editing them
    opened: Opened  # the question, and what saves an edit
    plan: LocatePlan  # how heads were chosen and tested
    kind: str  # of the edit that is reported first, and saved
    provenance: Mapping[str, Any]  # where model and rows come from

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """The chosen heads as (layer, head), the best first."""
        return tuple((int(layer), int(head)) for layer, head in self.located.ranked)

    def page(self, images: bool = True) -> Report:
        """The report, with or without the images at the ends of each head."""
        shown = self.opened.images if images else None
        return report_of(self.located, self.provenance, images=shown, notes=self.opened.notes)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of the head map."""
        return to_dict(self.located, self.provenance, self.opened.notes)

    def rows(self) -> list[dict[str, Any]]:
        """One row a head: its direct part in the gap of the reporting half."""
        found = self.located.head_map
        layers, heads = found.gap.shape
        return [
            {
                "layer": layer,
                "head": head,
                "name": head_name(layer, head),
                "gap": float(found.gap[layer, head]),
                "low": float(found.low[layer, head]),
                "high": float(found.high[layer, head]),
                "p_adjusted": float(found.p_adjusted[layer, head]),
                "selected": (layer, head) in self.heads,
            }
            for layer in range(layers)
            for head in range(heads)
        ]

    def show(self, console: Console | None = None) -> None:
        """Print the verdict, the chosen heads and what editing them does."""
        console, page = console or terminal(), self.page(images=False)
        for sentence in page.verdict:
            console.print(f"- [{TONES[sentence.tone]}]{escape(sentence.text)}[/]", highlight=False)
        for note in (*self.opened.notes, *self.located.notes):
            console.print(f"- [dim]{escape(note)}[/]", highlight=False)
        for section in page.sections:
            if isinstance(section, TopHeads | PlainTables):  # the others say the same at more length
                section.show(console)

    @property
    def smaller(self) -> bool:
        """Whether the last edit that was studied is shown to leave a smaller gap."""
        studies = self.located.studies
        return bool(studies) and self.located.words.effect(studies[-1]).tone not in ("unclear", "bad")

    def save(self, folder: str | Path) -> Path:
        """Write the model with the chosen heads edited, as an ordinary folder that transformers loads too."""
        self.saved(folder)
        return Path(folder)

    def saved(self, folder: str | Path) -> "LocatedHeads":
        """Write the edited model; the same result with the figures of the edited model being those of the folder.

        What is saved is the edit that is reported: the folder is loaded, run over the reporting half, and compared.
        """
        located, question = self.located, self.opened.question
        check_target(folder, self.provenance["model"])
        if not located.ranked:
            raise InputError("no head was chosen (.heads is empty), so there is no edit to save")
        rows = located.rows.take(question.reported)
        told = next((s for s in located.studies if (s.kind, s.way) == (self.kind, "forward")), None)
        if told is None:  # without controls
            none = Controls((), exhaustive=False)
            passes = question.forward(question.reported, self.kind)
            told = study(passes, located.ranked, rows, none, self.plan, self.kind, "forward")
        self.opened.save(Path(folder), located.ranked, self.kind)
        after = self.opened.reread(Path(folder))
        off = float(np.abs(after - told.after).max())
        if off > _SAME * max(1.0, float(np.abs(told.after).max())):
            raise UnsupportedModel(
                f"what the model in {folder} puts out differs from the edit that was run by {off:.2g}: its family "
                "does something that is lost when it is saved"
            )
        note = f"Figures of the edited model are those of {folder}, loaded again; they differ by {off:.1g} at most."
        others = (s for s in located.studies if s is not told)
        studies = (*others, restudied(told, rows, after, self.plan))
        found = replace(self, located=replace(located, studies=studies, notes=(*located.notes, note)))
        found.card(studies[-1]).write(Path(folder))
        return found

    def card(self, saved: Study) -> Card:
        """The README of the edited model, with the figures of its true forward pass."""
        located, called = self.located, name_of(str(self.provenance["model"]))
        heads = ", ".join(head_name(*head) for head in self.heads)
        edit, compared = edit_words(located.words, saved, True), saved.changes.comparison
        return Card(
            title=f"{called} with {len(self.heads)} edited head{'' if len(self.heads) == 1 else 's'}",
            done=f"Edited heads of {called}: {heads}. {edit}. {located.words.done(located)}",
            findings=[sentence.text for sentence in verdict(located)],
            data=str(self.provenance["data"]),
            base=str(self.provenance["model"]),
            before=called,
            estimates=() if compared is None else compared.b.estimates,
            were=() if compared is None else compared.a.estimates,
            changes=saved.changes.differences,
            limits=[*located.notes, *located.words.limits],
        )

    def write(self, out: Path, images: bool = True) -> None:
        """Write headmap.json, report.html with its JSON, and the records before and after."""
        write_json(out / "headmap.json", self.to_dict())
        write(self.page(images), out / "report.html")
        for name, records in self.opened.question.records(self.located.studies).items():
            records.save(out / f"{name}.csv")


def check_target(folder: str | Path, model: object) -> None:
    """Refuse to write an edited model over the one that it is made from."""
    if isinstance(model, str) and Path(folder).resolve() == Path(model).resolve():
        raise InputError(f"{folder} is the model that is edited, which would be lost: save to another folder")


def answer(
    source: Source,  # model, data and what is asked of them
    plan: LocatePlan,  # how heads are chosen and tested
    *,
    heads: Sequence[tuple[int, int]] | None = None,  # to be tested; None chooses them
    chosen_on: str | None = None,  # a hash of the rows that these were chosen on, where it is known
    features: str | None = None,  # folder that keeps the heads' terms
    progress: Callable[[str, int, int], None] | None = None,  # called with (stage, done, all)
    provenance: Mapping[str, Any] | None = None,  # anything else worth keeping, such as the command
) -> LocatedHeads:
    """Ask a question and answer it."""
    if source.against is not None:  # a mistake there should not wait for the work
        config_of(find(source.against))
    opened = open_question(source, plan, features, progress, heads)
    heads = heads if opened.heads is None else opened.heads
    found = find_heads(opened.question, plan, heads)
    if source.against is not None:
        positive = None if isinstance(found.rows, TextPairs) else found.rows.classes[found.rows.positive]
        same = replace(source, model=source.against, against=None, evidence=positive, beside=None)
        folder = None if features is None else f"{features}-against"
        other = open_question(same, replace(plan, rank="gap", forward=False, kinds=None), folder, progress)
        called = name_of(source.against)
        found = replace(found, beside=compare_models(opened.question, other.question, called, plan.level))
    if chosen_on is not None:
        moved = chosen_on != half_sha256(found.rows.ids, found.choosing)
        notes = (*found.notes, OTHER_HALF) if moved else found.notes
        found = replace(found, origin="taken from a head map", notes=notes)
    kind = (plan.kinds or opened.question.kinds)[0]
    made = {"version": __version__, **(provenance or {}), **opened.provenance}
    return LocatedHeads(found, opened, plan, kind, made)


def to_dict(located: Located, provenance: Mapping[str, Any], notes: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON form: maps [layers][heads] of the reporting half, the chosen heads, and the effects of editing them."""
    # Where others were estimated, the heads that were run.
    run = {} if located.exact is None else {"exact": [list(head) for head in sorted(located.exact)]}
    content = {
        "schema": SCHEMA,
        "provenance": dict(provenance),
        "n": {"choosing": int(located.choosing.sum()), "reporting": int((~located.choosing).sum())},
        "choosing_sha256": half_sha256(located.rows.ids, located.choosing),
        "selected": [list(head) for head in located.ranked],
        "gap": located.head_map.to_dict(),
        "confirmed": [list(head) for head in located.confirmed],
        "single_heads": None if located.effect_map is None else located.effect_map.to_dict() | run,
        "other_terms": located.other_map.to_dict(),
        "effects": [_study(s, located.words.in_table) for s in located.studies],
        "gains": None if located.gains is None else located.gains.tolist(),
        "against": None if located.beside is None else located.beside.to_dict(),
        "doses": None if located.doses is None else located.doses.to_dict(),
        **located.words.to_dict(located),
        "notes": [*notes, *located.notes, *located.words.limits],
    }
    plain: dict[str, Any] = finite(content)
    return plain


def _study(study: Study, main: Sequence[str]) -> dict[str, Any]:
    content: dict[str, Any] = {"kind": study.kind, "way": study.way}
    if study.reported is not None:  # a baseline: its own changes, and from it to the reported edit of heads
        parts = {"changes": study.changes, "heads_beside": study.reported}
        found = {name: [d.to_dict() for d in part.differences if d.metric in main] for name, part in parts.items()}
        return content | found
    if not study.ablations:  # no random heads to compare with
        content["changes"] = [change.to_dict() for change in study.changes.differences]
    content["metrics"] = [ablation.to_dict() for ablation in study.ablations]
    if study.changes.by_cell:
        content["norm_matched"] = [ablation.to_dict() for ablation in study.norm_matched]
        cells = study.changes.by_cell
        content["accuracy_by_cell"] = [{"label": y, "group": group, **d.to_dict()} for y, group, d in cells]
    return content


def report_of(
    located: Located, provenance: Mapping[str, Any], *, images: Images | None = None, notes: Sequence[str] = ()
) -> Report:
    """The report; with `images`, those at the ends of each head's axis are shown."""
    words, maps = located.words, located.words.maps(located)
    sections: list[Section] = [
        Text(title="What was done", text="\n\n".join([words.done(located), *notes, *located.notes, *words.limits])),
        Headmaps(title="Maps of the heads", names=list(maps), maps=list(maps.values())),
        *([] if located.beside is None else located.beside.sections()),
    ]
    if located.ranked:
        effects = PlainTables(title="What editing them changes", tables=[_effects(located)])
        sections += [_cards(located, images), *words.sections(located), effects]
        for shown in _shown(located):
            sections += _study_sections(words, shown)
        beside = words.baseline_table(located.studies)
        sections += [] if beside is None else [PlainTables(title="Baselines: erasure without heads", tables=[beside])]
        sections += [] if located.doses is None else [located.doses.section()]
        sections += [_curve_section(found, way) for way, found in located.curves.items()]
    return Report(
        title=words.title,
        question=words.question(located),
        verdict=verdict(located),
        sections=sections,
        provenance={"fairhead": __version__, "python": platform.python_version(), **provenance},
    )


def verdict(located: Located) -> list[Sentence]:
    """Sentences with their tone, each decided by intervals and controls."""
    effects = (located.words.effect(study) for study in _shown(located))
    beside = [] if located.beside is None else [located.beside.verdict()]
    return [located.words.opening(located), *beside, *effects, *located.words.baseline(located.studies)]


def _cards(located: Located, images: Images | None) -> TopHeads:
    """A card for each head."""
    words, cards = located.words, []
    for ends in located.extremes:
        note = "" if ends.head in located.confirmed else "not confirmed"
        facts = words.facts(located, ends.head)
        cards.append(HeadCard(head=ends.head, facts=facts, note=note, **words.ends(ends, images)))
    return TopHeads(
        title="Chosen heads",
        text="Texts in bold name the attribute." if any(card.texts for card in cards) else "",
        poles=located.rows.poles,
        heads=cards,
        others=[HeadCard(head=head, facts=words.facts(located, head)) for head in other_cards(located)],
    )


def _shown(located: Located) -> list[Study]:
    return [study for study in located.studies if study is located.studies[0] or study.way == "forward"]


def _study_sections(words: Words, study: Study) -> list[Section]:
    title = edit_words(words, study, start=True)
    sections: list[Section] = [
        Section.from_json({"kind": "ablation", "title": f"{title}: {metric_name(metric)}", **a.to_dict()}, metric)
        for metric, a in ((a.change.metric, a) for a in study.ablations)
        if metric in words.shown
    ]
    if study.changes.comparison is not None:
        names = {"a_name": "the model as it is", "b_name": "with the heads changed"}
        told = f"{title}: every metric"
        sections.append(Compared(title=told, comparison=study.changes.comparison, **names))
    return sections


def _curve_section(found: Curves, way: str) -> Curve:
    """The dose–response curve of a report."""
    panels = []
    for metric in found.metrics:
        points = []
        for p in found.added:
            name = f"+ {head_name(*p.heads[-1])}" if p.heads else "no head"
            points.append(Step(name=name, value=None if np.isnan(p.figures[metric]) else p.figures[metric]))
        panels.append(Steps(metric=metric, points=points))
    text = "Heads are changed one after the other, in the order of their rank."
    return Curve(title=f"Dose and response ({WAYS[way][1]})", text=text, panels=panels)


def finite(value: Any) -> Any:
    """None for NaN, which is not JSON: a figure that has no value, such as V where all predictions are the same."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _effects(found: Located) -> PlainTable:
    """The main figures before and after each edit, beside their controls; the JSON has all of them."""
    words = found.words
    rows: list[list[str]] = []
    by_norm = any(edit.norm_matched for edit in found.studies)
    for edit in found.studies:
        by_layer, norm = ({a.change.metric: a for a in sets} for sets in (edit.ablations, edit.norm_matched))
        rows.append([f"{edit.kind}, {edit.way}"])
        for change in (change for change in map(edit.change, words.in_table) if change is not None):
            low = "" if change.low is None else f" ({signed(change.low)} to {signed(change.high)})"
            # Controls test whether a gap is lowered; a fall of accuracy is the cost, not the aim.
            tests = (by_layer, norm) if by_norm else (by_layer,)
            tested = (sets.get(change.metric) if change.metric in words.gaps else None for sets in tests)
            rows.append(
                [
                    {"cramers_v": "V"}.get(change.metric, change.metric.replace("_", " ")),
                    number(change.a),
                    number(change.b),
                    f"{signed(change.value)}{low}",
                    *("" if ablation is None else p_value(ablation.p_controls) for ablation in tested),
                ]
            )
    columns = [words.figure, "before", "after", "change", "p layer", *(["p norm"] if by_norm else [])]
    return PlainTable(caption=f"Effects of editing them; {words.caption}", columns=columns, rows=rows)


def half_sha256(ids: Sequence[Any] | NDArray[Any] | None, choosing: Mask) -> str | None:
    """A hash of who is in the choosing half, to tell later whether heads were chosen on it; None without ids."""
    if ids is None:
        return None
    return hashlib.sha256("\n".join(sorted(map(str, np.asarray(ids)[choosing]))).encode()).hexdigest()
