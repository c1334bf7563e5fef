"""True forward passes of a session: the chosen heads edited over the reporting half, beside the direct effects."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fairhead.locate.class_directions import Task
from fairhead.locate.edits import HeadEdits
from fairhead.locate.effects import Edited, curves
from fairhead.locate.head_features import Array
from fairhead.locate.passes import ForwardPasses, has_tf32, matmul_precision
from fairhead.locate.plan import LocatePlan
from fairhead.locate.run import Located
from fairhead.locate.session import Session, shared_labels
from fairhead.locate.studies import study, writing


@dataclass(frozen=True)
class SessionPasses:
    """Forward passes over rows of a session, as `locate` and `with_forward` ask for them.

    Attributes:
        session: the model and its rows.
        task: classes as directions.
        everywhere: edits of all tokens (`edits_everywhere`); None edits the first token alone.
        tf32: on GPUs that can, multiply in TF32: several times as fast. How many predictions that changes is noted.
        progress: called with (stage, rows done, rows).

    Example:
        >>> passes = SessionPasses(session, task)  # doctest: +SKIP
        >>> before, after = passes(rows, edits, "mean")([(), [(3, 1)]])  # doctest: +SKIP
    """

    session: Session
    task: Task
    everywhere: HeadEdits | None = None
    tf32: bool = False
    progress: Callable[[str, int, int], None] | None = None
    _rounds: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False, repr=False)

    def __call__(self, rows: NDArray[np.intp], edits: HeadEdits, kind: str) -> Edited:
        """Logits of some rows with each of several sets of heads edited; `edits` are those of the first token."""
        number = next(self._rounds)

        def tell(done: int, sets: int) -> None:
            if self.progress is not None:
                self.progress(f"forward passes {number}, {sets} sets of heads a row", done, len(rows))

        # Whose output a resampled row gets must not depend on how long it is.
        order = np.arange(len(rows)) if kind == "resample" else self.session.reading_order(rows)
        place = np.argsort(order, kind="stable")
        passes = ForwardPasses(
            self.session.decomposer,
            lambda: self.session.batches(rows[order]),
            self.task,
            self.everywhere or edits,
            kind,
            0 if self.everywhere is None else None,
            tell,
        )

        def edited(sets: Sequence[Sequence[tuple[int, int]]]) -> list[Array]:
            with matmul_precision(self.in_tf32):
                return [logits[place] for logits in passes(sets)]

        return edited

    @property
    def in_tf32(self) -> bool:
        """Whether it was asked for and can be."""
        return self.tf32 and has_tf32(self.session.model.device)

    @property
    def place(self) -> str:
        """Where heads are edited, in a sentence."""
        if self.everywhere is None:
            return "Forward passes edit heads at the first token alone: what they write at others stays as it is."
        return "Forward passes edit heads at every token."


def with_forward(passes: SessionPasses, located: Located, plan: LocatePlan, kind: str = "mean") -> Located:
    """The same findings with the effect of true forward passes beside the direct effects.

    Args:
        passes: of the session that `located` was found in.
        located: the chosen heads; without any there are no effects to add.
        plan: draws, replicates and seed.
        kind: of edit.
    """
    if not located.ranked and located.effect_map is None:  # no pass was made, and none is needed
        return located
    session = passes.session
    rows = np.flatnonzero(~located.choosing)
    edited = passes(rows, located.edits, kind)
    notes = (*located.notes, passes.place)
    if located.ranked:
        judged = session.evaluation.take(rows)
        forward = study(edited, located.ranked, judged, writing(session.features), plan, kind, "forward")
        dose = curves(edited, located.ranked, judged)
        located = replace(located, studies=(*located.studies, forward), forward_curves=dose)
    if passes.in_tf32:
        (plain,) = edited([()])
        exact = located.task.logits(session.features.output[rows])
        moved = int((plain.argmax(1) != exact.argmax(1)).sum())
        notes = (
            *notes,
            f"Forward passes ran in TF32: {moved} of {len(rows)} predictions of the model as it is differ from those "
            "in float32.",
        )
    return replace(located, notes=notes)


def edits_everywhere(session: Session, choosing: NDArray[np.bool_]) -> HeadEdits:
    """What is put in a head's place at every token, learned on the choosing half: a pass over its images."""
    rows = np.flatnonzero(choosing)
    part = session.evaluation.take(rows)
    return HeadEdits.learn_everywhere(
        session.decomposer, session.batches(rows), part.groups, shared_labels(part), part.poles
    )
