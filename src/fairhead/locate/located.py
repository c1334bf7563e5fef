"""What was located: JSON, verdict, report, and a saved edit. Each kind of gap adds figures and sentences."""

import hashlib
import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self

import numpy as np
from rich.console import Console
from rich.markup import escape

from fairhead import __version__
from fairhead.data import Images
from fairhead.errors import InputError, UnsupportedModel
from fairhead.locate.edits import parsed
from fairhead.locate.head_maps import Head, HeadMap
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.question import Extremes, Question, R, check_target, edited_title
from fairhead.locate.studies import Controls, Study, study, written
from fairhead.report import TONES, Result, terminal
from fairhead.report.model_card import Card, name_of
from fairhead.report.page import Report, Sentence, write
from fairhead.report.sections import Section
from fairhead.report.sections.changes import Compared
from fairhead.report.sections.headmap import Fact, HeadCard, Headmaps, TopHeads
from fairhead.report.sections.plain import Curve, PlainTable, PlainTables, Step, Steps, Text
from fairhead.report.wording import head_name, head_names, metric_name, p_value, scale_for
from fairhead.store import write_json

SCHEMA = "fairhead.headmap/1"
# How an edit was made: of one study, and of curves.
WAYS = {
    "direct": ("direct effect only", "direct effect only"),
    "forward": ("full forward pass", "full forward passes"),
    "together": ("of what the selected heads together add to the output", "the selected heads together"),
    "output": ("of the whole output, instead of heads", "the whole output"),
}
_CARDS = 400  # heads that have a card each on a page
_SAME = 1e-3  # of what a model puts out: what saving and loading it may change


class Extra(Protocol):
    """What is found beside the heads: edits that reach a wanted gap, or the head map of another model."""

    def verdict(self) -> Sentence:
        """What it says."""

    def sections(self) -> Sequence[Section]:
        """On the page."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""


@dataclass(frozen=True, kw_only=True)
class Located(Result, ABC, Generic[R]):
    """What `locate` finds: it is shown, written, and its edit saved as a model. Figures are of the reporting half."""

    question: Question[R]  # what was asked, of which rows and model
    plan: LocatePlan  # how heads were chosen and tested
    head_map: HeadMap  # each head's direct contribution in the gap, the selected heads marked
    other_map: HeadMap  # parts of the embedding and the MLPs, [1, M]
    # What the gap loses without each head alone, in forward passes; None unless ranked by it
    effect_map: HeadMap | None
    exact: tuple[Head, ...] | None  # heads whose effect was run and not estimated; None for all of them
    ranked: tuple[Head, ...]  # the selected heads, best first
    studies: tuple[Study, ...]  # effects of editing them; empty where none was chosen
    curves: Mapping[str, dict[str, Any]]  # dose–response curves of the first study of either way, direct and forward
    extremes: tuple[Extremes, ...]  # rows at the ends of each chosen head
    notes: tuple[str, ...]  # what should be known, in sentences
    doses: Extra | None = None  # the cheapest edit that reaches a wanted gap, where one was wanted
    against: Extra | None = None  # the head map of another model, where one was given
    # Of the selected heads, those that are significant in the reporting half, too: Holm over the chosen ones alone
    confirmed: tuple[Head, ...] = ()
    chosen_here: bool = True  # whether the heads were chosen on the selection half
    origin: str = "named"  # what they were where they were not
    provenance: Mapping[str, Any] = field(default_factory=dict)  # where model and rows come from, and the command

    shown: ClassVar[tuple[str, ...]]  # figures that have a section of their own
    in_table: ClassVar[tuple[str, ...]]  # those in the table of effects
    gaps: ClassVar[tuple[str, ...]]  # those that random heads are asked about
    figure: ClassVar[str]  # what a figure is called
    caption: ClassVar[str]  # of the table of effects
    edit_names: ClassVar[Mapping[str, str]]  # each kind of edit, in words
    limits: ClassVar[tuple[str, ...]] = ()  # what such a gap cannot say

    @property
    @abstractmethod
    def title(self) -> str:
        """Of the report."""

    @property
    @abstractmethod
    def asked(self) -> str:
        """What is asked."""

    @abstractmethod
    def opening(self) -> Sentence:
        """The gap, which heads, and their part in it."""

    @abstractmethod
    def effect(self, study: Study) -> Sentence:
        """What an edit did."""

    @abstractmethod
    def done(self) -> str:
        """How it was found."""

    @abstractmethod
    def maps(self) -> dict[str, Section]:
        """The maps of the heads, by name."""

    @abstractmethod
    def facts(self, head: Head) -> list[Fact]:
        """The figures of a head."""

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """What the JSON form has beside what every gap has."""

    def baseline(self) -> list[Sentence]:
        """Whether the edit of heads beats one of the whole output."""
        return []

    def baseline_table(self) -> PlainTable | None:
        """Edits of the whole output beside that of heads."""
        return None

    def ends(self, ends: Extremes, images: Images | None) -> dict[str, Any]:
        """What else the card of a chosen head has."""
        return {}

    def sections(self) -> list[Section]:
        """What the page tells below the cards."""
        return []

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """The selected heads as (layer, head), the best first."""
        return tuple((int(layer), int(head)) for layer, head in self.ranked)

    @property
    def kind(self) -> str:
        """Of the edit that is reported first, and saved."""
        return (self.plan.kinds or self.question.kinds)[0]

    def verdict(self) -> list[Sentence]:
        """Sentences with their tone, each decided by intervals and controls."""
        extra = [found.verdict() for found in (self.doses, self.against) if found is not None]
        return [self.opening(), *extra, *map(self.effect, self._main_studies), *self.baseline()]

    def page(self, images: bool = True) -> Report:
        """The report; with `images`, those at the ends of each head's axis are shown, where rows are images."""
        maps, how = self.maps(), "\n\n".join([self.done(), *self.notes, *self.limits])
        sections: list[Section] = [Headmaps(title="Head maps", names=list(maps), maps=list(maps.values()))]
        for found in (self.doses, self.against):
            sections += [] if found is None else found.sections()
        if self.ranked:
            effects, baselines = self._effects(), self.baseline_table()
            sections += [self._cards(self.question.images if images else None), *self.sections()]
            sections.append(PlainTables(title="Effects of editing the selected heads", tables=[effects]))
            for study in self._main_studies:
                sections += self._study_sections(study)
            if baselines is not None:
                sections.append(PlainTables(title="Baselines: erasure without heads", tables=[baselines]))
            sections += [_curve_section(found, way) for way, found in self.curves.items()]
        sections.append(Text(title="How heads were selected and tested", text=how))
        return Report(
            title=self.title,
            question=self.asked,
            verdict=self.verdict(),
            sections=sections,
            provenance={"fairhead": __version__, "python": platform.python_version(), **self.provenance},
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: maps [layers][heads], the selected heads, and the effects of editing them."""
        # Where others were estimated, the heads that were run.
        run = {} if self.exact is None else {"exact": [list(head) for head in sorted(self.exact)]}
        content = {
            "schema": SCHEMA,
            "provenance": dict(self.provenance),
            "n": {"choosing": int(self.question.choosing.sum()), "reporting": int((~self.question.choosing).sum())},
            "choosing_sha256": self.half_sha256,
            "selected": [list(head) for head in self.ranked],
            "gap": self.head_map.to_dict(),
            "confirmed": [list(head) for head in self.confirmed],
            "single_heads": None if self.effect_map is None else self.effect_map.to_dict() | run,
            "other_terms": self.other_map.to_dict(),
            "effects": [study.to_dict(self.in_table) for study in self.studies],
            "gains": None if self.question.gains is None else self.question.gains.tolist(),
            "against": None if self.against is None else self.against.to_dict(),
            "doses": None if self.doses is None else self.doses.to_dict(),
            **self.details(),
            "notes": [*self.notes, *self.limits],
        }
        return dict(finite(content))

    @property
    def half_sha256(self) -> str | None:
        """A hash of who is in the selection half, to tell later whether heads were chosen on it; None without ids."""
        ids = self.question.rows.ids
        if ids is None:
            return None
        return hashlib.sha256("\n".join(sorted(map(str, np.asarray(ids)[self.question.choosing]))).encode()).hexdigest()

    def edit_words(self, study: Study, start: bool = True) -> str:
        """An edit in words, by default at the start of a sentence."""
        name, strength = parsed(study.kind)
        part = "" if strength == 1 else f" at a strength of {strength:g}"
        text = f"{self.edit_names[name]}{part} ({WAYS[study.way][0]})"
        return text[:1].upper() + text[1:] if start else text

    def headline(self) -> str:
        """Which heads, and how many of them the other half confirms."""
        chosen, sure = self.ranked, self.confirmed
        alone, only = len(chosen) == 1, "" if sure else "not "
        which = "" if len(sure) in (0, len(chosen)) else f": {head_names(sure)}"
        count = f"{len(sure) if sure else 'None'} of {len(chosen)}"
        were = "was" if alone else "were"
        if not self.chosen_here:
            how = self.origin if self.question.gains is None else "given a gain"
            many = f"It is {only}" if alone else f"{count} are "
            return f"{head_names(chosen)} {were} {how}. {many}significant on the reporting half{which}."
        many = f"The selected head is {only}" if alone else f"{count} selected heads "
        return (
            f"{many}confirmed on the other half{which}. ({head_names(chosen)}, of {self.head_map.value.size} heads, "
            f"{were} selected on one half of the {self.question.rows.noun}.)"
        )

    def mapped(self, found: HeadMap | Mapping[str, Any], title: str, text: str = "") -> Section:
        """A map for the page, with the selected heads marked, and those of them that are confirmed."""
        content = found.to_dict() if isinstance(found, HeadMap) else found
        cards = [*self.ranked, *self._other_cards] if self.ranked else []
        marks = {"selected": sorted(self.ranked), "confirmed": sorted(self.confirmed), "cards": cards}
        lists = {name: [list(head) for head in heads] for name, heads in marks.items()}
        return Section.from_json({"kind": "headmap", "title": title, "text": text, **content, **lists}, title)

    @property
    def _main_studies(self) -> list[Study]:
        return [study for study in self.studies if study is self.studies[0] or study.way == "forward"]

    @property
    def _other_cards(self) -> list[Head]:
        """Heads that were not chosen and have a card, unless they are too many for one page."""
        shape = self.head_map.value.shape
        every = (Head(*head) for head in np.ndindex(shape))
        return [head for head in every if head not in self.ranked] if np.prod(shape) <= _CARDS else []

    def _cards(self, images: Images | None) -> TopHeads:
        cards = []
        for ends in self.extremes:
            note = "" if ends.head in self.confirmed else "not confirmed"
            cards.append(HeadCard(head=ends.head, facts=self.facts(ends.head), note=note, **self.ends(ends, images)))
        return TopHeads(
            title="Selected heads",
            text="Texts in bold name the attribute." if any(card.texts for card in cards) else "",
            poles=self.question.rows.poles,
            heads=cards,
            others=[HeadCard(head=head, facts=self.facts(head)) for head in self._other_cards],
        )

    def _study_sections(self, study: Study) -> list[Section]:
        title = self.edit_words(study)
        sections: list[Section] = [
            Section.from_json({"kind": "ablation", "title": f"{title}: {metric_name(metric)}", **a.to_dict()}, metric)
            for metric, a in ((a.change.metric, a) for a in study.ablations)
            if metric in self.shown
        ]
        if study.changes.comparison is not None:
            names = {"a_name": "the original model", "b_name": "the edited model"}
            sections.append(Compared(title=f"{title}: every metric", comparison=study.changes.comparison, **names))
        return sections

    def _effects(self) -> PlainTable:
        """The main figures before and after each edit, beside their controls; the JSON has all of them."""
        rows: list[list[str]] = []
        by_norm = any(edit.norm_matched for edit in self.studies)
        for edit in self.studies:
            by_layer, norm = ({a.change.metric: a for a in sets} for sets in (edit.ablations, edit.norm_matched))
            rows.append([f"{edit.kind}, {edit.way}"])
            for change in (change for change in map(edit.change, self.in_table) if change is not None):
                scale = scale_for(change.metric)
                ends = ["–" if end is None else scale.number(end) for end in (change.a, change.b)]
                name = {"cramers_v": "V"}.get(change.metric, change.metric.replace("_", " "))
                # Controls test whether a gap is lowered; a fall of accuracy is the cost, not the aim.
                tests = (by_layer, norm) if by_norm else (by_layer,)
                tested = (sets.get(change.metric) if change.metric in self.gaps else None for sets in tests)
                p = ("" if ablation is None else p_value(ablation.p_controls) for ablation in tested)
                rows.append([name, *ends, written(change), *p])
        columns = [self.figure, "before", "after", "change", "p layer", *(["p norm"] if by_norm else [])]
        return PlainTable(caption=f"Effects of editing the selected heads; {self.caption}", columns=columns, rows=rows)

    def rows(self) -> list[dict[str, Any]]:
        """One row a head: its direct contribution in the gap of the reporting half."""
        return self.head_map.rows()

    def show(self, console: Console | None = None) -> None:
        """Print the verdict, the selected heads and what editing them does."""
        console, page = console or terminal(), self.page(images=False)
        for sentence in page.verdict:
            console.print(f"- [{TONES[sentence.tone]}]{escape(sentence.text)}[/]", highlight=False)
        for note in self.notes:
            console.print(f"- [dim]{escape(note)}[/]", highlight=False)
        for section in page.sections:
            if isinstance(section, TopHeads | PlainTables):  # the others say the same at more length
                section.show(console)

    @property
    def smaller(self) -> bool:
        """Whether the last edit that was studied is shown to leave a smaller gap."""
        studies = self.studies
        return bool(studies) and self.effect(studies[-1]).tone not in ("unclear", "bad")

    def save(self, folder: str | Path) -> Path:
        """Write the model with the selected heads edited, as an ordinary folder that transformers loads too."""
        self.saved(folder)
        return Path(folder)

    def saved(self, folder: str | Path) -> Self:
        """Write the edited model; the same result with the figures of the edited model being those of the folder.

        What is saved is the edit that is reported: the folder is loaded, run over the reporting half, and compared.
        """
        question, heads = self.question, self.ranked
        check_target(folder, self.provenance["model"])
        if not heads:
            raise InputError("no head was chosen (.heads is empty), so there is no edit to save")
        rows = question.rows.take(question.reported)
        run = next((s for s in self.studies if (s.kind, s.way) == (self.kind, "forward")), None)
        if run is None:  # without controls
            passes = question.forward(question.reported, self.kind)
            run = study(passes, heads, rows, Controls(), self.plan, self.kind, "forward")
        question.save(Path(folder), heads, self.kind)
        after = np.asarray(question.of_saved(Path(folder)).forward(question.reported, "mean")([()])[0])
        off = float(np.abs(after - run.after).max())
        if off > _SAME * max(1.0, float(np.abs(run.after).max())):
            raise UnsupportedModel(
                f"what the model in {folder} puts out differs from the edit that was run by {off:.2g}: its family "
                "does something that is lost when it is saved"
            )
        note = f"Figures of the edited model are those of {folder}, loaded again; they differ by {off:.1g} at most."
        others = (s for s in self.studies if s is not run)
        studies = (*others, run.with_after(rows, after, self.plan))
        found = replace(self, studies=studies, notes=(*self.notes, note))
        found.card(studies[-1]).write(Path(folder))
        return found

    def card(self, saved: Study) -> Card:
        """The README of the edited model, with the figures of its full forward pass."""
        base, compared = str(self.provenance["model"]), saved.changes.comparison
        return Card(
            title=edited_title(base, self.ranked),
            done=f"Edited heads of {name_of(base)}: {head_names(self.ranked)}. {self.edit_words(saved)}. {self.done()}",
            findings=[sentence.text for sentence in self.verdict()],
            data=str(self.provenance["data"]),
            base=base,
            before=name_of(base),
            estimates=() if compared is None else compared.b.estimates,
            were=() if compared is None else compared.a.estimates,
            changes=saved.changes.differences,
            limits=[*self.notes, *self.limits],
        )

    def write(self, out: Path, images: bool = True) -> None:
        """Write headmap.json, report.html with its JSON, and the records before and after."""
        write_json(out / "headmap.json", self.to_dict())
        write(self.page(images), out / "report.html")
        for name, records in self.question.records(self.studies).items():
            records.save(out / f"{name}.csv")


def _curve_section(found: Mapping[str, Any], way: str) -> Curve:
    """The dose–response curve of a report."""
    panels = []
    for metric in found["metrics"]:
        points = []
        for point in found["added"]:
            name = f"+ {head_name(*point['heads'][-1])}" if point["heads"] else "no head"
            points.append(Step(name=name, value=finite(point[metric])))
        panels.append(Steps(metric=metric, points=points))
    text = "Heads are edited one after another, in the order of their rank."
    return Curve(title=f"Dose and response ({WAYS[way][1]})", text=text, panels=panels)


def finite(value: Any) -> Any:
    """None for NaN, which is not JSON: a figure that has no value, such as V where all predictions are the same."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
