"""What was located, as a result: it is shown, written, and its edit saved as a model. Another model goes beside it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from fairhead import __version__
from fairhead.errors import InputError, UnsupportedModel
from fairhead.locate.dose import find_dose
from fairhead.locate.engine import Question
from fairhead.locate.engine import locate as find_heads
from fairhead.locate.gap_question import GapQuestion
from fairhead.locate.head_maps import Head, HeadMap, largest_first
from fairhead.locate.locate_settings import LocatePlan, Source
from fairhead.locate.located import Located, names_of
from fairhead.locate.pair_rows import TextPairs
from fairhead.locate.rows import Evaluation
from fairhead.locate.session import Opened, open_question
from fairhead.locate.studies import Controls, Study, study
from fairhead.models.places import config_of, find
from fairhead.report import TONES, Result, terminal
from fairhead.report.model_card import Card, name_of
from fairhead.report.page import Report, Sentence, write
from fairhead.report.sections import Section
from fairhead.report.sections.headmap import Headmaps, TopHeads
from fairhead.report.sections.plain import PlainTable, PlainTables
from fairhead.report.wording import head_name, p_value, signed
from fairhead.stats import ALPHA
from fairhead.store import write_json

_SAME = 1e-3  # of what a model puts out: what saving and loading it may change
OTHER_HALF = (
    "The heads were chosen on other rows than the selection half of this run: some of those reported on here may have "
    "been used for the choice. With the data, limit and seed of that run, the halves are the same."
)


@dataclass(frozen=True)
class LocatedHeads(Result):
    """The heads that carry a gap, with the question that they answer."""

    located: Located  # maps, selected heads, effects of editing them
    opened: Opened  # the question, and what saves an edit
    plan: LocatePlan  # how heads were chosen and tested
    kind: str  # of the edit that is reported first, and saved
    provenance: Mapping[str, Any]  # where model and rows come from

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """The selected heads as (layer, head), the best first."""
        return tuple((int(layer), int(head)) for layer, head in self.located.ranked)

    def page(self, images: bool = True) -> Report:
        """The report, with or without the images at the ends of each head."""
        shown = self.opened.images if images else None
        return self.located.report(self.provenance, images=shown, notes=self.opened.notes)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form of the head map."""
        return self.located.to_dict(self.provenance, self.opened.notes)

    def rows(self) -> list[dict[str, Any]]:
        """One row a head: its direct contribution in the gap of the reporting half."""
        found = self.located.head_map
        layers, heads = found.value.shape
        return [
            {
                "layer": layer,
                "head": head,
                "name": head_name(layer, head),
                "gap": float(found.value[layer, head]),
                "low": float(found.low[layer, head]),
                "high": float(found.high[layer, head]),
                "p_adjusted": float(found.p_adjusted[layer, head]),
                "selected": (layer, head) in self.heads,
            }
            for layer in range(layers)
            for head in range(heads)
        ]

    def show(self, console: Console | None = None) -> None:
        """Print the verdict, the selected heads and what editing them does."""
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
        return bool(studies) and self.located.effect(studies[-1]).tone not in ("unclear", "bad")

    def save(self, folder: str | Path) -> Path:
        """Write the model with the selected heads edited, as an ordinary folder that transformers loads too."""
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
            passes = question.forward(question.reported, self.kind)
            told = study(passes, located.ranked, rows, Controls(), self.plan, self.kind, "forward")
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
        studies = (*others, told.with_after(rows, after, self.plan))
        found = replace(self, located=replace(located, studies=studies, notes=(*located.notes, note)))
        found.card(studies[-1]).write(Path(folder))
        return found

    def card(self, saved: Study) -> Card:
        """The README of the edited model, with the figures of its full forward pass."""
        located, called = self.located, name_of(str(self.provenance["model"]))
        heads = names_of(located.ranked)
        edit, compared = located.edit_words(saved), saved.changes.comparison
        return Card(
            title=f"{called} with {len(self.heads)} edited head{'' if len(self.heads) == 1 else 's'}",
            done=f"Edited heads of {called}: {heads}. {edit}. {located.done()}",
            findings=[sentence.text for sentence in located.verdict()],
            data=str(self.provenance["data"]),
            base=str(self.provenance["model"]),
            before=called,
            estimates=() if compared is None else compared.b.estimates,
            were=() if compared is None else compared.a.estimates,
            changes=saved.changes.differences,
            limits=[*located.notes, *located.limits],
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
    if plan.target is not None and found.ranked and isinstance(opened.question, GapQuestion) and found.gains is None:
        found = replace(found, doses=find_dose(opened.question, found.ranked, plan))
    if source.against is not None:
        rows = found.rows
        positive = rows.classes[rows.positive] if isinstance(rows, Evaluation) else None
        same = replace(source, model=source.against, against=None, evidence=positive, beside=None)
        folder = None if features is None else f"{features}-against"
        other = open_question(same, replace(plan, rank="gap", forward=False, kinds=None), folder, progress)
        called = name_of(source.against)
        found = replace(found, beside=compare_models(opened.question, other.question, called, plan.level))
    if chosen_on is not None:
        moved = chosen_on != found.half_sha256
        notes = (*found.notes, OTHER_HALF) if moved else found.notes
        found = replace(found, origin="taken from a head map", notes=notes)
    kind = (plan.kinds or opened.question.kinds)[0]
    made = {"version": __version__, **(provenance or {}), **opened.provenance}
    return LocatedHeads(found, opened, plan, kind, made)


@dataclass(frozen=True)
class TwoModels:
    """Direct contributions in the gap of the reporting half, of the model that was asked about and of another."""

    other: str  # what the other is called
    ours: HeadMap
    theirs: HeadMap
    difference: HeadMap  # theirs less ours, paired over rows, corrected over all heads

    @property
    def changed(self) -> list[Head]:
        """Heads whose part differs significantly, the largest difference first."""
        return [h for h in largest_first(np.abs(self.difference.value)) if self.difference.p_adjusted[h] <= ALPHA]

    def verdict(self) -> Sentence:
        """How the gap differs, and in which heads."""
        d, first = self.difference, self.changed
        most = f": {names_of(first[:6])}{', ...' if len(first) > 6 else ''}" if first else ""
        smaller = abs(self.theirs.total) < abs(self.ours.total)
        tone = "unclear" if not d.has_total else "good" if smaller else "bad"
        return Sentence(
            f"In {self.other} the gap is {signed(self.theirs.total)} {d.unit}, in this model {signed(self.ours.total)} "
            f"(difference {signed(d.total)}, 95 % interval {signed(d.total_low)} to {signed(d.total_high)}). The "
            f"direct contribution of {len(first) or 'no'} of {d.value.size} heads differs significantly{most}.",
            tone,
        )

    def sections(self) -> list[Section]:
        """The three maps, and the heads that differ most."""
        named = {"Difference": self.difference, self.other: self.theirs, "This model": self.ours}
        maps = [Section.from_json({"kind": "headmap", "title": n, **m.to_dict()}, n) for n, m in named.items()]
        d, rows = self.difference, []
        for at in largest_first(np.abs(d.value))[:10]:
            ends = f"{signed(d.low[at])} to {signed(d.high[at])}"
            figures = (signed(x.value[at]) for x in (self.ours, self.theirs, d))
            rows.append([head_name(*at), *figures, ends, p_value(float(d.p_adjusted[at]))])
        columns = ["head", "this model", self.other, "difference", "interval", "p adjusted"]
        table = PlainTable(
            caption=f"Heads whose direct contribution differs most, in {d.unit}", columns=columns, rows=rows
        )
        title = f"Beside {self.other}"
        return [
            Headmaps(title=title, text=self.verdict().text, names=list(named), maps=maps),
            PlainTables(title="Where the models differ", tables=[table]),
        ]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        maps = {"theirs": self.theirs, "difference": self.difference}
        changed = [list(head) for head in self.changed]
        return {"model": self.other, "changed": changed, **{name: found.to_dict() for name, found in maps.items()}}


def compare_models(question: Question, other: Question, called: str, level: float = 0.95) -> TwoModels:
    """Compare the heads of two models that were asked the same question about the same rows."""
    if question.shape != other.shape:
        shapes = (f"{layers} layers of {heads} heads" for layers, heads in (question.shape, other.shape))
        raise InputError(f"the models have {' and '.join(shapes)}; head maps are compared head by head")
    rows = ~question.choosing & question.comparable & other.comparable
    part = question.rows.take(rows)
    # Parts of pairs are seen from the pole that each model prefers.
    one, two = question.rows, other.rows
    side = one.sign * two.sign if isinstance(one, TextPairs) and isinstance(two, TextPairs) else 1.0
    first, second = question.rows.poles
    measure = f"difference of direct contributions, {called} less this model, {first} minus {second}"
    ours, theirs = (question.parts[rows], question.total[rows]), (side * other.parts[rows], side * other.total[rows])
    return TwoModels(
        called,
        part.score(*ours, level),
        part.score(*theirs, level),
        part.score(theirs[0] - ours[0], theirs[1] - ours[1], level, measure),
    )
