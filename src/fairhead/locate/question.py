"""A question about a gap between two poles, as `locate` asks it.

It has each head's direct contribution, parts [n, layers, heads] of a total [n], rows that know their clusters, weights
and figures, and passes in which heads are edited. There are two: the gap in the evidence for a class between two groups
of images or of texts (`GapQuestion`), and the log-odds of pairs of texts (`PairQuestion`).
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fairhead.data import Images
from fairhead.errors import InputError
from fairhead.locate.edits import HeadEdits, check_kind
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, HeadMap, largest_first
from fairhead.locate.locate_settings import RANKS, LocatePlan, Rank
from fairhead.locate.streams import stream_of
from fairhead.locate.studies import Edited, Mask, Rows, Study
from fairhead.models import save
from fairhead.records import Records
from fairhead.report.model_card import Card, name_of
from fairhead.report.page import Sentence
from fairhead.report.sections import Section
from fairhead.report.sections.headmap import Headmaps
from fairhead.report.sections.plain import PlainTable, PlainTables
from fairhead.report.wording import head_name, head_names, p_value, signed
from fairhead.stats import ALPHA, Correction, adjust

R = TypeVar("R", bound=Rows)  # who is compared: an `Evaluation`, or `TextPairs`


class Scores(NamedTuple):
    """What heads are ranked by, with p-values before any correction: [L, H] each."""

    value: Array
    p: Array
    side: float | None = None  # the sign that is sought, or None for either

    @property
    def rank(self) -> Array:
        """Larger is better."""
        return np.abs(self.value) if self.side is None else self.value * self.side

    def confirm(self, heads: Sequence[Head], chosen: "Scores | None") -> tuple[Head, ...]:
        """Of some heads, those that are significant here and on the side that they were chosen for: Holm over them."""
        p = adjust([float(self.p[head]) for head in heads], "holm")
        side = np.full_like(self.value, 1.0 if self.side is None else self.side) if chosen is None else chosen.value
        significant = [q is not None and q <= ALPHA for q in p]
        return tuple(h for h, sure in zip(heads, significant, strict=True) if sure and self.value[h] * side[h] > 0)


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


class Question(ABC, Generic[R]):
    """A gap, each head's direct contribution in it, and passes in which heads are edited."""

    located: type[Any]  # what is found, a `Located`, and how it is shown
    kinds: tuple[str, ...]  # of edits that it knows
    learned: tuple[str, ...] = ()  # further ones, that have to be asked for
    ranks: tuple[str, ...] = RANKS  # that it knows
    correction: Correction = "bh"  # of p-values over all heads, when heads are chosen
    rows: R  # all n rows
    choosing: Mask  # the half that heads are chosen on, [n] bool
    comparable: Mask  # rows that a gap can be made of, [n] bool
    parts: Array  # each head's direct contribution in a row's evidence, [n, L, H]
    other_parts: Array  # those of the embedding and the MLPs, [n, M]
    total: Array  # the evidence itself, [n]
    edits: HeadEdits  # what is put in a head's place, learned on the selection half
    gains: Array | None = None  # of the heads, [L, H], where they were learned
    norms: Array | None = None  # how much each head writes, [L, H], for controls matched by it; None for none
    baselines: tuple[str, ...] = ()  # edits of the whole output, which those of heads are compared with
    notes: tuple[str, ...] = ()  # what was left out, in sentences
    provenance: Mapping[str, Any] = MappingProxyType({})  # where model and rows come from
    images: Images | None = None  # of the rows, where they are images
    side = 1.0  # −1 where the parts are seen from the second pole

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads."""
        return self.parts.shape[1], self.parts.shape[2]

    @property
    def reported(self) -> NDArray[np.intp]:
        """Positions of the reporting half."""
        return np.flatnonzero(~self.choosing)

    def direct_map(self, rows: Mask, level: float, others: bool = False) -> HeadMap:
        """Each head's direct contribution in the gap of some rows, or that of the other terms as [1, M]."""
        parts = self.other_parts[:, None] if others else self.parts
        return self.rows.take(rows).score(parts[rows], self.total[rows], level)

    @classmethod
    def check(cls, plan: LocatePlan) -> None:
        """Refuse a plan that this question cannot follow."""
        if plan.rank not in (None, *cls.ranks):
            raise InputError(f"rank is {plan.rank!r}; here it is {' or '.join(cls.ranks)}")
        for kind in plan.kinds or ():
            check_kind(kind, (*cls.kinds, *cls.learned))

    def scores(self, found: HeadMap, rows: Mask, plan: LocatePlan) -> Scores:
        """What heads are ranked by on some rows, whose map is `found`: direct contributions, or effects."""
        return Scores(found.value, found.p, float(np.sign(found.total)))

    def doubts(self, direct: HeadMap, plan: LocatePlan) -> list[str]:
        """What makes the choice uncertain, in sentences."""
        return []

    def forward_kinds(self, kinds: Sequence[str]) -> Sequence[str]:
        """The kinds of edits that full forward passes are made with."""
        return kinds

    @abstractmethod
    def direct(self, kind: str, seed: int) -> Edited | None:
        """Direct effects on the reporting half; None for a kind that has none without a pass."""

    @abstractmethod
    def forward(self, rows: NDArray[np.intp], kind: str) -> Edited:
        """True forward passes over some rows; a set of heads that was run is not run again."""

    def at_output(self, kind: str, heads: Sequence[Head] | None = None) -> Edited | None:
        """What an edit of the whole output does to the reporting half, or of what some heads together add to it.

        These are baselines of edits of heads; None for none.
        """
        return None

    @property
    @abstractmethod
    def fast(self) -> bool:
        """Whether one pass for each head is affordable: on a GPU it is."""

    @property
    def default_rank(self) -> Rank:
        """What heads are ranked by where nobody says."""
        return "effect" if self.fast else "gap"

    def estimate(self, rows: NDArray[np.intp], kind: str) -> Array | None:
        """What the evidence of some rows loses without each head alone, estimated, [n, L, H]; None where it cannot."""
        return None

    @abstractmethod
    def forward_notes(self, edited: Edited | None) -> list[str]:
        """What should be known of the passes that were made over the reporting half, if any were."""

    def records(self, studies: Sequence[Study]) -> Mapping[str, Records]:
        """Predictions of the reporting half for an audit, by the name of their file; none where rows have no labels."""
        return {}

    @abstractmethod
    def writable(self) -> tuple[nn.Module, Any, HeadEdits]:
        """The model, its tokenizer or image processor, and edits of all tokens; what weights cannot hold is refused."""

    @abstractmethod
    def of_saved(self, folder: Path) -> Self:
        """The same question to a model that was saved, for its forward passes."""

    def save(self, folder: Path, heads: Sequence[tuple[int, int]], kind: str) -> None:
        """Bake an edit of heads into a copy of the weights, and write the model."""
        model, beside, edits = self.writable()
        edited = copy.deepcopy(model)
        edits.bake(stream_of(edited).base, heads, kind)
        base, names = str(self.provenance["model"]), head_names(heads)
        card = Card(
            title=edited_title(base, heads),
            done=f"The heads {names} of {name_of(base)} were edited ({kind}). What that changes was not measured on "
            "this model.",
            findings=(),
            data=str(self.provenance["data"]),
            base=base,
        )
        save(edited, folder, beside.save_pretrained, card.write)

    @abstractmethod
    def extremes(self, head: Head, count: int | None) -> Extremes:
        """Rows at the ends of a head."""

    @abstractmethod
    def details(self, ranked: tuple[Head, ...], plan: LocatePlan) -> dict[str, Any]:
        """What `located` has of the selected heads beside what every gap has, by field."""


def edited_title(model: str, heads: Sequence[tuple[int, int]]) -> str:
    """What a model with edited heads is called."""
    return f"{name_of(model)} with {len(heads)} edited head{'' if len(heads) == 1 else 's'}"


def check_target(folder: str | Path, model: object) -> None:
    """Refuse to write an edited model over the one that it is made from."""
    if isinstance(model, str) and Path(folder).resolve() == Path(model).resolve():
        raise InputError(f"{folder} is the model that is edited, which would be lost: save to another folder")


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
        most = f": {head_names(first[:6])}{', ...' if len(first) > 6 else ''}" if first else ""
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
        title = f"Compared with {self.other}"
        return [
            Headmaps(title=title, text=self.verdict().text, names=list(named), maps=maps),
            PlainTables(title="Where the models differ", tables=[table]),
        ]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        maps = {"theirs": self.theirs, "difference": self.difference}
        changed = [list(head) for head in self.changed]
        return {"model": self.other, "changed": changed, **{name: found.to_dict() for name, found in maps.items()}}


def compare_models(question: Question[Any], other: Question[Any], called: str, level: float = 0.95) -> TwoModels:
    """Compare the heads of two models that were asked the same question about the same rows."""
    if question.shape != other.shape:
        shapes = (f"{layers} layers of {heads} heads" for layers, heads in (question.shape, other.shape))
        raise InputError(f"the models have {' and '.join(shapes)}; head maps are compared head by head")
    rows = ~question.choosing & question.comparable & other.comparable
    part = question.rows.take(rows)
    # Parts of pairs are seen from the pole that each model prefers, those of groups always from the first.
    side = question.side * other.side
    first, second = question.rows.poles
    measure = f"difference of direct contributions, {called} less this model, {first} minus {second}"
    ours, theirs = (question.parts[rows], question.total[rows]), (side * other.parts[rows], side * other.total[rows])
    return TwoModels(
        called,
        part.score(*ours, level),
        part.score(*theirs, level),
        part.score(theirs[0] - ours[0], theirs[1] - ours[1], level, measure),
    )
