"""What was located, and how it is told: JSON, verdict and report. Each kind of gap adds figures and sentences."""

import hashlib
import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fairhead import __version__
from fairhead.data import Images
from fairhead.locate.edits import HeadEdits, parsed
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, HeadMap
from fairhead.locate.studies import Ablation, Mask, Rows, Study
from fairhead.report.page import Report, Sentence
from fairhead.report.sections import Section
from fairhead.report.sections.changes import Compared
from fairhead.report.sections.headmap import Fact, HeadCard, Headmaps, TopHeads
from fairhead.report.sections.plain import Curve, PlainTable, PlainTables, Step, Steps, Text
from fairhead.report.wording import head_name, metric_name, number, p_value, signed
from fairhead.stats import ALPHA, Difference, p_text

SCHEMA = "fairhead.headmap/1"
# How an edit was made: of one study, and of curves.
WAYS = {
    "direct": ("direct effect only", "direct effect only"),
    "forward": ("full forward pass", "full forward passes"),
    "together": ("of what the selected heads together add to the output", "the selected heads together"),
    "output": ("of the whole output, instead of heads", "the whole output"),
}
_CARDS = 400  # heads that have a card each on a page


class Extremes(NamedTuple):
    """Rows at the ends of a head, by position: most towards the first pole, and towards the second."""

    head: Head
    most: tuple[int, ...]
    least: tuple[int, ...]

    @classmethod
    def of(cls, head: Head, parts: Array, count: int, rows: NDArray[np.intp] | None = None) -> "Extremes":
        """Of the head's parts [n]; `rows` [n] are their positions."""
        order = np.argsort(parts, kind="stable")
        order = order if rows is None else rows[order]
        return cls(head, tuple(order[::-1][:count].tolist()), tuple(order[:count].tolist()))


class Added(Protocol):
    """What is found beside the heads, such as edits that reach a wanted gap."""

    def sections(self) -> Sequence[Section]:
        """On the page."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""


class Beside(Added, Protocol):
    """The head map of another model."""

    def verdict(self) -> Sentence:
        """How the two differ."""


@dataclass(frozen=True, kw_only=True)
class Located(ABC):
    """What `locate` finds. Maps and figures are of the reporting half."""

    rows: Rows  # all rows, of both halves
    choosing: Mask  # those of the selection half, [n] bool
    head_map: HeadMap  # each head's direct contribution in the gap, the selected heads marked
    other_map: HeadMap  # parts of the embedding and the MLPs, [1, M]
    # What the gap loses without each head alone, in forward passes; None unless ranked by it
    effect_map: HeadMap | None
    exact: tuple[Head, ...] | None  # heads whose effect was run and not estimated; None for all of them
    ranked: tuple[Head, ...]  # the selected heads, best first
    studies: tuple[Study, ...]  # effects of editing them; empty where none was chosen
    curves: Mapping[str, dict[str, Any]]  # dose–response curves of the first study of either way, direct and forward
    extremes: tuple[Extremes, ...]  # rows at the ends of each chosen head
    edits: HeadEdits  # what was learned for editing heads, on the selection half
    notes: tuple[str, ...]  # what should be known, in sentences
    gains: Array | None = None  # of the heads, [L, H], where the edit is that
    doses: Added | None = None  # the cheapest edit that reaches a wanted gap, where one was wanted
    beside: Beside | None = None  # the head map of another model, where one was given
    # Of the selected heads, those that are significant in the reporting half, too: Holm over the chosen ones alone
    confirmed: tuple[Head, ...] = ()
    chosen_here: bool = True  # whether the heads were chosen on the selection half
    origin: str = "named"  # what they were where they were not

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
    def question(self) -> str:
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

    def verdict(self) -> list[Sentence]:
        """Sentences with their tone, each decided by intervals and controls."""
        beside = [] if self.beside is None else [self.beside.verdict()]
        return [self.opening(), *beside, *map(self.effect, self._told), *self.baseline()]

    def report(
        self, provenance: Mapping[str, Any], *, images: Images | None = None, notes: Sequence[str] = ()
    ) -> Report:
        """The report; with `images`, those at the ends of each head's axis are shown."""
        maps = self.maps()
        sections: list[Section] = [
            Text(
                title="How heads were selected and tested",
                text="\n\n".join([self.done(), *notes, *self.notes, *self.limits]),
            ),
            Headmaps(title="Head maps", names=list(maps), maps=list(maps.values())),
            *([] if self.beside is None else self.beside.sections()),
        ]
        if self.ranked:
            effects, beside = self._effects(), self.baseline_table()
            sections += [self._cards(images), *self.sections()]
            sections.append(PlainTables(title="Effects of editing the selected heads", tables=[effects]))
            for study in self._told:
                sections += self._study_sections(study)
            if beside is not None:
                sections.append(PlainTables(title="Baselines: erasure without heads", tables=[beside]))
            sections += [] if self.doses is None else list(self.doses.sections())
            sections += [_curve_section(found, way) for way, found in self.curves.items()]
        return Report(
            title=self.title,
            question=self.question,
            verdict=self.verdict(),
            sections=sections,
            provenance={"fairhead": __version__, "python": platform.python_version(), **provenance},
        )

    def to_dict(self, provenance: Mapping[str, Any], notes: Sequence[str] = ()) -> dict[str, Any]:
        """The JSON form: maps [layers][heads], the selected heads, and the effects of editing them."""
        # Where others were estimated, the heads that were run.
        run = {} if self.exact is None else {"exact": [list(head) for head in sorted(self.exact)]}
        content = {
            "schema": SCHEMA,
            "provenance": dict(provenance),
            "n": {"choosing": int(self.choosing.sum()), "reporting": int((~self.choosing).sum())},
            "choosing_sha256": self.half_sha256,
            "selected": [list(head) for head in self.ranked],
            "gap": self.head_map.to_dict(),
            "confirmed": [list(head) for head in self.confirmed],
            "single_heads": None if self.effect_map is None else self.effect_map.to_dict() | run,
            "other_terms": self.other_map.to_dict(),
            "effects": [study.to_dict(self.in_table) for study in self.studies],
            "gains": None if self.gains is None else self.gains.tolist(),
            "against": None if self.beside is None else self.beside.to_dict(),
            "doses": None if self.doses is None else self.doses.to_dict(),
            **self.details(),
            "notes": [*notes, *self.notes, *self.limits],
        }
        plain: dict[str, Any] = finite(content)
        return plain

    @property
    def half_sha256(self) -> str | None:
        """A hash of who is in the selection half, to tell later whether heads were chosen on it; None without ids."""
        if self.rows.ids is None:
            return None
        return hashlib.sha256(
            "\n".join(sorted(map(str, np.asarray(self.rows.ids)[self.choosing]))).encode()
        ).hexdigest()

    def edit_words(self, study: Study, start: bool = True) -> str:
        """An edit in words, by default at the start of a sentence."""
        name, strength = parsed(study.kind)
        part = "" if strength == 1 else f" at a strength of {strength:g}"
        text = f"{self.edit_names[name]}{part} ({WAYS[study.way][0]})"
        return text[:1].upper() + text[1:] if start else text

    def headline(self) -> str:
        """Which heads, and how many of them the other half confirms."""
        chosen, sure = self.ranked, self.confirmed
        which = "" if len(sure) in (0, len(chosen)) else f": {names_of(sure)}"
        count = f"{len(sure) if sure else 'None'} of {len(chosen)}"
        were, are = ("was", "is") if len(chosen) == 1 else ("were", "are")
        if not self.chosen_here:
            how = self.origin if self.gains is None else "given a gain"
            return f"{names_of(chosen)} {were} {how}. {count} {are} significant on the reporting half{which}."
        return (
            f"{count} selected heads confirmed on the other half{which}. ({names_of(chosen)}, of "
            f"{self.head_map.value.size} heads, {were} selected on one half of the {self.rows.noun}.)"
        )

    def mapped(self, found: HeadMap | Mapping[str, Any], title: str, text: str = "") -> Section:
        """A map for the page, with the selected heads marked, and those of them that are confirmed."""
        content = found.to_dict() if isinstance(found, HeadMap) else found
        cards = [*self.ranked, *self._other_cards] if self.ranked else []
        marks = {"selected": sorted(self.ranked), "confirmed": sorted(self.confirmed), "cards": cards}
        lists = {name: [list(head) for head in heads] for name, heads in marks.items()}
        return Section.from_json({"kind": "headmap", "title": title, "text": text, **content, **lists}, title)

    @property
    def _told(self) -> list[Study]:
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
            poles=self.rows.poles,
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
                low = "" if change.low is None else f" ({signed(change.low)} to {signed(change.high)})"
                name = {"cramers_v": "V"}.get(change.metric, change.metric.replace("_", " "))
                # Controls test whether a gap is lowered; a fall of accuracy is the cost, not the aim.
                tests = (by_layer, norm) if by_norm else (by_layer,)
                tested = (sets.get(change.metric) if change.metric in self.gaps else None for sets in tests)
                p = ("" if ablation is None else p_value(ablation.p_controls) for ablation in tested)
                rows.append([name, number(change.a), number(change.b), f"{signed(change.value)}{low}", *p])
        columns = [self.figure, "before", "after", "change", "p layer", *(["p norm"] if by_norm else [])]
        return PlainTable(caption=f"Effects of editing the selected heads; {self.caption}", columns=columns, rows=rows)


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


def outcome(change: Difference, ablation: Ablation | None) -> Sentence:
    """Judge the effect on a gap whose ideal is 0, by its interval, its corrected p and the controls, if any."""
    if change.a is None or change.b is None or change.low is None or change.high is None:
        return Sentence("", "unclear")
    if not change.significant:  # p is about who is where, the interval about the size of the gap
        moved = change.p_adjusted is not None and change.p_adjusted <= ALPHA
        why = "the interval of the change includes 0" if moved else p_text(change.p_adjusted)
        return Sentence(f" Not significant ({why}).", "unclear")
    if abs(change.b) > abs(change.a):
        side = ", on the other side" if change.a * change.b < 0 else ""
        return Sentence(f" The gap is wider than before{side}.", "bad")
    if change.low > 0:  # nearer to 0 from below: controls are asked who lowers the figure
        return Sentence("", "note")
    if ablation is None:
        return Sentence(" It was not compared with random heads.", "note")
    if ablation.p_controls <= ALPHA:
        return Sentence("", "good")
    if ablation.percentile == 0:
        return Sentence(" No control does as much, but there are too few controls to rule out chance.", "note")
    return Sentence(" So the effect is not specific to the selected heads.", "unclear")


def among_controls(ablation: Ablation) -> str:
    """How many control sets do what an edit does to a figure that should fall.

    Example:
        >>> lower = Difference("DP", "sex", 0.16, 0.05, -0.11, -0.17, -0.05, n=500, p=0.01, p_adjusted=0.02)
        >>> among_controls(Ablation((Head(2, 1),), lower, controls=(-0.2, 0.01, 0.0), exhaustive=False))
        'Of 3 control sets of the same layers, 1 lower it as much (p = 0.50).'
    """
    count = round(ablation.percentile * len(ablation.controls))
    falls = ablation.change.value is None or ablation.change.value <= 0
    if len(ablation.controls) == 1:
        return "There is only one control set of the same layers, too few for a test."
    what = "lower it as much" if falls else "raise it less, or lower it"
    sets = f"Of {len(ablation.controls)} control sets of the same layers"
    return f"{sets}, {count} {what} ({p_text(ablation.p_controls)})."


def names_of(heads: Sequence[tuple[int, int]]) -> str:
    """Heads in a sentence."""
    return ", ".join(head_name(*head) for head in heads)


def interval(change: Difference, factor: float = 1, digits: int = 3) -> str:
    """The ends of a change, times a factor."""
    if change.low is None or change.high is None:
        return "no interval"
    ends = sorted((factor * change.low, factor * change.high))
    return f"95 % interval {' to '.join(signed(end, digits) for end in ends)}"


def written(change: Difference | None, factor: float = 1, with_p: bool = False) -> str:
    """A change with its interval in a cell of a table; in points where the factor is 100."""
    if change is None or change.value is None or change.low is None or change.high is None:
        return "–"
    value, low, high = (signed(factor * x, 3 if factor == 1 else 1) for x in (change.value, change.low, change.high))
    return f"{value} ({low} to {high}{f'; {p_text(change.p_adjusted)}' if with_p else ''})"
