"""Edits that are searched for: the cheapest one that reaches a wanted gap, and gains of the heads.

Dose: every edit (kinds, numbers of heads and strengths) is tried on the choosing half. The one that reaches the wanted
gap there at the highest accuracy is chosen, and reported on the other half with intervals, beside those that no other
edit beats in both gap and accuracy.

Gains: one number a head, by which its output is scaled about its mean. All weights are frozen; the gains minimise the
cross-entropy of rows that are weighted so that clusters of the model's own outputs are independent of the label (the
objective of `balance`), which needs no group. They are pulled towards 1, and most are 1: heads enter one by one as the
pull grows weaker. The logits are linear in the gains to first order; the slopes come from attribution patching and are
taken anew where the gains stand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

from fairhead.errors import InputError
from fairhead.locate.directions import balanced_weights
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, largest_first, mask_of
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.located import written
from fairhead.locate.studies import Changes
from fairhead.report.sections.bench_block import EditFront, Frontier, Point
from fairhead.report.sections.plain import PlainTable, PlainTables
from fairhead.report.wording import metric_name, signed
from fairhead.stats import Difference

if TYPE_CHECKING:
    from fairhead.locate.engine import Question
    from fairhead.locate.gap_question import GapQuestion

STRENGTHS = (0.25, 0.5, 0.75, 1.0)
COUNTS = (1, 2, 3, 4, 6, 8, 12)
_RIDGE = 1e-3  # pull of the gains towards 1, of the mean loss
_STEPS = 300  # of the solver, at each strength of the pull
_STILL = 1e-5  # the largest move of a gain at which it stops
_PULLS = 24  # strengths of the sparse pull that are tried, from the one that moves no gain on


@dataclass(frozen=True)
class Dose:
    """One edit: how it fares on the choosing half, and, where it was run there, on the other."""

    kind: str  # with its strength behind @
    heads: tuple[Head, ...]
    gap: float  # on the choosing half
    accuracy: float
    changes: Changes | None = None  # on the reporting half, against the model as it is

    def change(self, metric: str) -> Difference | None:
        """One figure of the reporting half, before and after."""
        return None if self.changes is None else self.changes.change(metric)

    def beats(self, other: "Dose") -> bool:
        """Whether it is as good in gap, accuracy and number of heads, and better in one."""
        at_least = self.gap <= other.gap and self.accuracy >= other.accuracy
        return at_least and (
            self.gap < other.gap or self.accuracy > other.accuracy or len(self.heads) < len(other.heads)
        )


@dataclass(frozen=True)
class Doses:
    """All edits that were tried."""

    metric: str
    target: float  # share of the gap that may be left
    before: float  # the gap of the model as it is, on the choosing half
    tried: tuple[Dose, ...]
    chosen: Dose | None  # with its figures on the other half; None where no edit reaches the target
    front: tuple[Dose, ...]  # those that no other beats on the choosing half, with their figures on the other

    @property
    def sentence(self) -> str:
        """What was chosen, and whether the other half confirms it."""
        name, share = metric_name(self.metric), round(100 * self.target)
        if self.chosen is None:
            return f"None of {len(self.tried)} edits brings {name} down to {share} % on the choosing half."
        gap, accuracy = self.chosen.change(self.metric), self.chosen.change("accuracy")
        if gap is None or gap.a is None or gap.b is None or accuracy is None or accuracy.value is None:
            return f"{name} of the chosen edit is undefined on the other half: too few rows."
        reached = "confirmed" if abs(gap.b) <= self.target * abs(gap.a) else "not reached"
        return (
            f"Of {len(self.tried)} edits, {self.chosen.kind} of {_many(self.chosen)} is the cheapest that "
            f"brings {name} down to {share} % on the choosing half. On the other half it goes from {gap.a:.3f} to "
            f"{gap.b:.3f} ({reached}), and accuracy changes by {signed(100 * accuracy.value, 1)} points."
        )

    def section(self) -> PlainTables:
        """The front and the chosen edit, on the reporting half: for the page and for the terminal."""
        rows, points = [], []
        for dose in self.front:
            gap, accuracy = dose.change(self.metric), dose.change("accuracy")
            name = f"{dose.kind}, {_many(dose)}{' (chosen)' if dose is self.chosen else ''}"
            rows.append([name, "–" if gap is None else f"{gap.b:.3f}", written(gap), written(accuracy, 100)])
            x, y = _ends(accuracy), _ends(gap)
            if x and y:
                plain = Point("as it is", x[0], x[0], x[0], y[0], y[0], y[0])
                points.append(Point(name, x[1], x[2], x[3], y[1], y[2], y[3]))
        columns = ["edit", metric_name(self.metric), "change", "change of accuracy, points"]
        tables = [PlainTable(caption=self.sentence, columns=columns, rows=rows)]
        title = "The cheapest edit that reaches the wanted gap"
        if not points:
            return PlainTables(title=title, tables=tables)
        return EditFront(title=title, tables=tables, frontier=Frontier.of(self.metric, [plain, *points], ""))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""

        def of(dose: Dose) -> dict[str, Any]:
            changes = (dose.change(name) for name in (self.metric, "accuracy"))
            figures = {"gap": dose.gap, "accuracy": dose.accuracy}
            reported = {"reported": [d.to_dict() for d in changes if d is not None]}
            return {"kind": dose.kind, "heads": [list(h) for h in dose.heads], **figures, **reported}

        return {
            "metric": self.metric,
            "target": self.target,
            "before": self.before,
            "tried": len(self.tried),
            "chosen": None if self.chosen is None else of(self.chosen),
            "front": [of(dose) for dose in self.front],
        }


def _many(dose: Dose) -> str:
    return f"{len(dose.heads)} head{'' if len(dose.heads) == 1 else 's'}"


def _ends(change: Difference | None) -> tuple[float, ...]:
    """A figure before and after, and the interval of its change put where it was before; () where undefined."""
    if change is None or change.a is None or change.b is None or change.low is None or change.high is None:
        return ()
    return change.a, change.b, max(0.0, change.a + change.low), change.a + change.high


def find_dose(
    question: "Question",
    ranked: Sequence[Head],  # best first
    plan: LocatePlan,  # with the metric, and the share of it that may be left
    *,
    kinds: Sequence[str] = ("mean", "project", "splince"),
    strengths: Sequence[float] = STRENGTHS,
    counts: Sequence[int] = COUNTS,
) -> Doses:
    """Try every kind, number of the ranked heads and strength in true forward passes."""
    metric, target = plan.target_metric, 0.5 if plan.target is None else plan.target
    choosing, heads = np.flatnonzero(question.choosing), tuple(ranked)
    sizes = sorted({min(count, len(heads)) for count in counts})
    rows, tried, before = question.rows.take(choosing), [], float("nan")
    for kind in (f"{kind}@{strength:g}" if strength != 1 else kind for kind in kinds for strength in strengths):
        sets = [heads[:size] for size in sizes]
        figures = rows.figures(question.forward(choosing, kind)([(), *sets]))
        before = float(figures[metric][0])
        tried += [
            Dose(kind, some, abs(float(gap)), float(accuracy))
            for some, gap, accuracy in zip(sets, figures[metric][1:], figures["accuracy"][1:], strict=True)
            if np.isfinite(gap)
        ]
    reach = [dose for dose in tried if dose.gap <= target * abs(before)]
    chosen = max(reach, key=lambda dose: (dose.accuracy, -len(dose.heads)), default=None)
    front = sorted((d for d in tried if not any(other.beats(d) for other in tried)), key=lambda d: d.gap)
    wanted = [*dict.fromkeys([*front, *([] if chosen is None else [chosen])])]
    told, reported = question.rows.take(question.reported), {}
    for kind in dict.fromkeys(dose.kind for dose in wanted):
        of_kind = [dose for dose in wanted if dose.kind == kind]
        plain, *after = question.forward(question.reported, kind)([(), *(dose.heads for dose in of_kind)])
        for dose, read in zip(of_kind, after, strict=True):
            reported[dose] = Dose(dose.kind, dose.heads, dose.gap, dose.accuracy, told.compare(plain, read, plan))
    found = tuple(reported[dose] for dose in wanted)
    return Doses(metric, target, before, tuple(tried), None if chosen is None else reported[chosen], found)


@dataclass(frozen=True)
class Gains:
    """A gain for each head, 1 for most."""

    values: Array  # [L, H]
    heads: tuple[Head, ...]  # those whose gain is not 1, the farthest from it first
    clusters: int  # that the objective is balanced over
    before: float  # the balanced loss with all gains 1, on the rows that they were learned from
    after: float  # with these gains, in a pass of the model


def learn_gains(
    question: "GapQuestion",
    count: int = 12,
    heads: Sequence[tuple[int, int]] | None = None,
    per_layer: int | None = None,
    rounds: int = 3,
    seed: int = 0,
) -> Gains:
    """Learn gains on the choosing half: of at most so many heads, and so many of one layer, or of given `heads`."""
    passes, task = question.passes, question.task
    if passes is None or passes.everywhere is None:
        raise InputError("gains act on every token and need the model: ask the question with passes over all tokens")
    at = np.flatnonzero(question.choosing)
    labels = question.rows.labels[at]
    weights, clusters = balanced_weights(question.features.output[at], labels, seed)
    classes = [1] if len(task.classes) == 2 else list(range(len(task.classes)))
    slopes = [partial(task.slope, positive=c) for c in classes]
    best = trial = np.ones(question.shape)
    free = None if heads is None else mask_of(heads, question.shape)
    first = least = float("inf")
    for number in range(rounds + 1):
        now = _moved(trial)
        there = replace(passes, everywhere=passes.everywhere.with_gains(trial))
        # The last round only says where the gains arrived.
        found = there.estimate(at, question.edits, "mean", slopes if number < rounds else [], now)
        logits = task.logits(found.output)
        loss = float((weights * _loss(logits, labels)).mean())
        first = loss if number == 0 else first
        if loss >= least:  # too far for what is linear
            trial = (trial + best) / 2
            continue
        best, least = trial, loss
        if number < rounds:
            lost = found.lost if len(classes) > 1 else np.concatenate([0 * found.lost, found.lost], -1)
            # Evidence is a logit against the mean of the others: (C − 1) / C of it is the logit, up to what all share.
            lost = lost * (1.0 if len(classes) == 1 else 1 - 1 / len(classes))
            most = count, per_layer or max(1, question.shape[1] // 4)
            moves, free = _solve(logits, lost, labels, weights, most, free)
            trial = best * (1 - moves)
    values = np.where(np.abs(best - 1) < 1e-6, 1.0, best)
    return Gains(values, tuple(_moved(values)), clusters, first, least)


def _moved(values: Array) -> list[Head]:
    """Heads whose gain is not 1, the farthest from it first."""
    return [head for head in largest_first(np.abs(values - 1)) if values[head] != 1]


def _solve(
    logits: Array,  # [n, C]
    lost: Array,  # what each head's whole part is of them, [n, L, H, C]
    labels: NDArray[np.integer],  # [n]
    weights: Array,  # [n], mean 1
    most: tuple[int, int],  # heads, and heads of one layer
    free: NDArray[np.bool_] | None,  # [L, H]: heads that may move; None chooses them
) -> tuple[Array, NDArray[np.bool_]]:
    """How much of each head to take away, [L, H], from −1 to 1, and which heads may move."""
    shape = lost.shape[1:3]
    parts = lost.reshape(len(lost), -1, lost.shape[-1])  # [n, heads, C]
    target = np.eye(logits.shape[1])[labels]

    def gradient(moves: Array) -> Array:
        now = logits - np.einsum("nhc,h->nc", parts, moves, optimize=True)
        error = weights[:, None] * (np.exp(log_softmax(now, axis=1)) - target) / len(now)
        return np.asarray(-np.einsum("nc,nhc->h", error, parts, optimize=True) + _RIDGE * moves)

    # A bound of the curvature: that of the softmax is at most a half.
    scaled = (parts * np.sqrt(weights)[:, None, None]).transpose(1, 0, 2).reshape(parts.shape[1], -1)
    step = 1 / (0.5 * float(np.linalg.eigvalsh(scaled @ scaled.T / len(parts))[-1]) + _RIDGE)

    def descend(pull: float, start: Array, mask: Array) -> Array:
        moves, ahead, t = start * mask, start * mask, 1.0
        for _ in range(_STEPS):
            new = ahead - step * gradient(ahead)
            new = np.clip(np.sign(new) * np.maximum(np.abs(new) - step * pull, 0), -1, 1) * mask
            t, before, moved = (1 + np.sqrt(1 + 4 * t * t)) / 2, t, new - moves
            ahead, moves = new + (before - 1) / t * moved, new
            if np.abs(moved).max() < _STILL:
                break
        return moves

    nothing, everywhere = np.zeros(parts.shape[1]), np.ones(parts.shape[1])
    if free is None:
        strongest = float(np.abs(gradient(nothing)).max())
        moves = nothing
        for pull in np.geomspace(strongest, strongest / 200, _PULLS)[1:]:
            tried = descend(float(pull), moves, everywhere)
            in_layer = (tried != 0).reshape(shape).sum(1)
            if in_layer.sum() > most[0] or in_layer.max() > most[1]:
                break
            moves = tried
        free = (moves != 0).reshape(shape)
    return descend(0.0, nothing, free.ravel().astype(np.float64)).reshape(shape), free


def _loss(logits: Array, labels: NDArray[np.integer]) -> Array:
    return np.asarray(-np.take_along_axis(log_softmax(logits, axis=1), labels[:, None], 1)[:, 0])
