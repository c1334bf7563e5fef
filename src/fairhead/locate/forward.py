"""The chosen heads edited in true forward passes over the reporting half, beside the direct effects."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fairhead.locate.edits import HeadEdits
from fairhead.locate.passes import ForwardPasses, matmul_precision
from fairhead.locate.plan import LocatePlan
from fairhead.locate.run import Located
from fairhead.locate.session import Session, shared_labels
from fairhead.locate.studies import study, writing


def with_forward(
    session: Session,
    located: Located,
    plan: LocatePlan,
    kind: str = "mean",
    *,
    everywhere: HeadEdits | None = None,
    tf32: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Located:
    """The same findings with the effect of true forward passes beside the direct effects.

    Args:
        session: what `located` was found in.
        located: the chosen heads; without any, it is returned as it is.
        plan: draws, replicates and seed.
        kind: of edit.
        everywhere: edits of all tokens (`edits_everywhere`); None edits the first token alone.
        tf32: on GPUs that can, multiply in TF32: several times as fast. How many predictions that changes is noted.
        progress: called with (images done, sets of heads that each of them runs through).
    """
    if not located.ranked:
        return located
    rows = np.flatnonzero(~located.choosing)
    passes = ForwardPasses(
        session.decomposer,
        lambda: session.batches(rows),
        located.task,
        everywhere or located.edits,
        kind,
        0 if everywhere is None else None,
        progress,
    )
    judged = session.evaluation.take(rows)
    with matmul_precision(tf32):
        forward = study(passes, located.ranked, judged, writing(session.features), plan, kind, "forward")
        (plain,) = passes([()])
    notes = located.notes
    if tf32:
        exact = located.task.logits(session.features.output[rows])
        moved = int((plain.argmax(1) != exact.argmax(1)).sum())
        notes = (
            *notes,
            f"Forward passes ran in TF32: {moved} of {len(rows)} predictions of the model as it is differ from those "
            "in float32.",
        )
    return replace(located, studies=(*located.studies, forward), notes=notes)


def edits_everywhere(session: Session, located: Located) -> HeadEdits:
    """What is put in a head's place at every token, learned on the choosing half: a pass over its images."""
    rows = np.flatnonzero(located.choosing)
    part = session.evaluation.take(rows)
    return HeadEdits.learn_everywhere(
        session.decomposer, session.batches(rows), part.groups, shared_labels(part), part.poles
    )
