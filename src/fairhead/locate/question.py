"""What `locate` is asked: a gap between two poles, each head's part in it, and passes in which heads are edited.

There are three questions: the gap in the evidence for a class between two groups of images or of texts (`GapQuestion`),
and the log-odds of pairs of texts (`PairQuestion`). Heads are chosen on one half of the rows and reported on the other.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.audit_results import Comparison
from fairhead.errors import InputError
from fairhead.locate.edits import HeadEdits, check_kind
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, HeadMap
from fairhead.locate.locate_settings import RANKS, LocatePlan
from fairhead.records import Records
from fairhead.stats import Difference

if TYPE_CHECKING:
    from fairhead.locate.engine import Study
    from fairhead.locate.gap_words import GapWords
    from fairhead.locate.pair_question import PairWords
    from fairhead.locate.rows import Evaluation, TextPairs

# Who is compared, and the figures that an edit may change. A *read* is what one pass says of all rows: logits [n, C],
# or the sums behind the figures of pairs, [n, 7].
Rows: TypeAlias = "Evaluation | TextPairs"
# What else was found about a kind of gap, and how the report tells it.
Words: TypeAlias = "GapWords | PairWords"
# Sets of heads -> what is read with each of them edited; the empty set is the model as it is.
Edited = Callable[[Sequence[Sequence[tuple[int, int]]]], Sequence[Array]]
Mask = NDArray[np.bool_]
OTHER_HALF = (
    "The heads were chosen on other rows than the choosing half of this run: some of those reported on here may have "
    "been used for the choice. With the data, limit and seed of that run, the halves are the same."
)


class Changes(NamedTuple):
    """What an edit did to the figures of some rows, paired."""

    differences: tuple[Difference, ...]  # one a figure
    comparison: Comparison | None = None  # the same as an audit has it, where rows have labels and groups
    # Accuracy by class and group, as (class, group, change), where rows have them
    by_cell: tuple[tuple[str, str, Difference], ...] = ()


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


class Question(ABC):
    """A gap, each head's direct part in it, and passes in which heads are edited.

    Attributes:
        rows: all n rows.
        choosing: the half that heads are chosen on, [n] bool.
        comparable: rows that a gap can be made of, [n] bool.
        parts: each head's direct part in a row's evidence, [n, L, H].
        other_parts: those of the embedding and the MLPs, [n, M].
        total: the evidence itself, [n].
        edits: what is put in a head's place, learned on the choosing half.
        kinds: of edits that it knows.
        ranks: that it knows.
        norms: how much each head writes, [L, H], for controls matched by it; None for none.
        notes: what was left out, in sentences.
    """

    kinds: tuple[str, ...]
    ranks: tuple[str, ...] = RANKS
    rows: Rows
    choosing: Mask
    comparable: Mask
    parts: Array
    other_parts: Array
    total: Array
    edits: HeadEdits
    norms: Array | None = None
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads."""
        return self.parts.shape[1], self.parts.shape[2]

    @property
    def reported(self) -> NDArray[np.intp]:
        """Positions of the reporting half."""
        return np.flatnonzero(~self.choosing)

    def direct_map(self, rows: Mask, level: float, others: bool = False) -> HeadMap:
        """Each head's direct part in the gap of some rows, or that of the other terms as [1, M]."""
        parts = self.other_parts[:, None] if others else self.parts
        return self.rows.take(rows).score(parts[rows], self.total[rows], level)

    @classmethod
    def check(cls, plan: LocatePlan) -> None:
        """Refuse a plan that this question cannot follow."""
        if plan.rank not in cls.ranks:
            raise InputError(f"rank is {plan.rank!r}; here it is {' or '.join(cls.ranks)}")
        for kind in plan.kinds or ():
            check_kind(kind, cls.kinds)

    def ranking(self, direct: HeadMap, rows: Mask, plan: LocatePlan) -> tuple[Array, Array]:
        """What heads are ranked by on the choosing half, larger being better, and corrected p-values: [L, H] each."""
        return direct.gap * np.sign(direct.total), direct.p_adjusted

    def doubts(self, direct: HeadMap, plan: LocatePlan) -> list[str]:
        """What makes the choice uncertain, in sentences."""
        return []

    def forward_kinds(self, kinds: Sequence[str]) -> Sequence[str]:
        """The kinds of edits that true forward passes are made with."""
        return kinds

    @abstractmethod
    def direct(self, kind: str, seed: int) -> Edited | None:
        """Direct effects on the reporting half; None for a kind that has none without a pass."""

    @abstractmethod
    def forward(self, rows: NDArray[np.intp], kind: str) -> Edited:
        """True forward passes over some rows; a set of heads that was run is not run again."""

    @abstractmethod
    def forward_notes(self, edited: Edited | None) -> list[str]:
        """What should be known of the passes that were made over the reporting half, if any were."""

    def records(self, studies: "Sequence[Study]") -> Mapping[str, Records]:
        """Predictions of the reporting half for an audit, by the name of their file; none where rows have no labels."""
        return {}

    @abstractmethod
    def extremes(self, head: Head, count: int | None) -> Extremes:
        """Rows at the ends of a head."""

    @abstractmethod
    def words(self, ranked: tuple[Head, ...], plan: LocatePlan) -> Words:
        """What else is to be told of the chosen heads, and how the report calls things."""


def halves(cells: NDArray[np.integer], clusters: NDArray[np.integer] | None, seed: int = 0) -> Mask:
    """Split rows in two, [n] bool: every cell evenly, or, where there are clusters, whole clusters at random."""
    rng = np.random.default_rng(seed)
    chosen = np.zeros(len(cells), dtype=bool)
    if clusters is not None:
        names = np.unique(clusters)
        return np.isin(clusters, rng.permutation(names)[: len(names) // 2])
    for cell in np.unique(cells):
        rows = rng.permutation(np.flatnonzero(cells == cell))
        chosen[rows[: len(rows) // 2]] = True
    return chosen


def half_sha256(ids: Sequence[Any] | NDArray[Any] | None, choosing: Mask) -> str | None:
    """A hash of who is in the choosing half, to tell later whether heads were chosen on it; None without ids."""
    if ids is None:
        return None
    return hashlib.sha256("\n".join(sorted(map(str, np.asarray(ids)[choosing]))).encode()).hexdigest()
