"""Gains of heads: one number a head, by which its output is scaled about its mean; all weights are frozen.

Most gains are 1. The logits are linear in them to first order; the slopes come from attribution patching and are taken
anew where the gains stand. There are two objectives:

- `learn_gains` is not told the groups. It minimises the cross-entropy of rows that are weighted so that clusters of the
  model's own outputs are independent of the label (the objective of `balance`). Gains are pulled towards 1, and heads
  enter one by one as the pull grows weaker.
- `learn_told_gains` is told the groups of the selection half, as erasure is, and a gap to bring down.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax

from fairhead.audit import compare
from fairhead.errors import InputError
from fairhead.locate.directions import balanced_weights
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, largest_first, mask_of
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.rows import MIN_CELL, Evaluation, halves
from fairhead.report.wording import metric_name

if TYPE_CHECKING:
    from fairhead.locate.gap_question import GapQuestion

LEARNED = "Learned with clusters of outputs balanced, without any group."
_RIDGE = 1e-3  # pull of the gains towards 1, of the mean loss
_STEPS = 300  # of the solver, at each strength of the pull
_STILL = 1e-5  # the largest move of a gain at which it stops
_PULLS = 24  # strengths of the sparse pull that are tried, from the one that moves no gain on
WEIGHTS = (3.0, 6.0, 12.0, 25.0, 50.0, 100.0)  # of a squared gap of probabilities beside the cross-entropy
_MIDDLE = 20.0  # that at which heads enter
_RANGE = (0.01, 2.0)  # of told gains; from a gain of 0 there would be no slope
_FAR = 0.5  # what a gain moves in a step, at most
# Confidence level of the gap out of fold: its upper end is one standard error away, as is usual in cross-validation.
# An edit whose gap ends just at the target is within it on as many new rows with a chance of about 3 in 4.
_SURE = 0.6827


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
    """Learn gains on the selection half: of at most so many heads, and so many of one layer, or of given `heads`."""
    at = np.flatnonzero(question.choosing)
    labels = question.rows.labels[at]
    weights, clusters = balanced_weights(question.features.output[at], labels, seed)
    best = trial = np.ones(question.shape)
    free = None if heads is None else mask_of(heads, question.shape)
    first = least = float("inf")
    for number in range(rounds + 1):
        # The last round only says where the gains arrived.
        logits, lost = _first_order(question, at, trial, number < rounds)
        loss = float((weights * _loss(logits, labels)).mean())
        first = loss if number == 0 else first
        if loss >= least:  # too far for what is linear
            trial = (trial + best) / 2
            continue
        best, least = trial, loss
        if number < rounds:
            most = count, per_layer or max(1, question.shape[1] // 4)
            moves, free = _solve(logits, lost, labels, weights, most, free)
            trial = best * (1 - moves)
    values = np.where(np.abs(best - 1) < 1e-6, 1.0, best)
    return Gains(values, tuple(_moved(values)), clusters, first, least)


@dataclass(frozen=True)
class ToldGains:
    """Gains that were learned against a gap between the groups, which they were told."""

    values: Array  # [L, H]
    heads: tuple[Head, ...]  # those whose gain is not 1, the farthest from it first
    weight: float  # of the gap in the objective
    metric: str  # the gap
    before: float  # the gap of the model as it is, on the selection half
    gap: float  # out of fold
    upper: float  # end of that gap
    reached: bool  # whether that end is within the target; if not, that of no step is, and this comes nearest
    accuracy: float  # out of fold

    @property
    def sentence(self) -> str:
        """How they were learned, and what is expected of them."""
        missed = "" if self.reached else "; no step is surely within the target, this comes nearest"
        return (
            f"Gains were learned with the groups of the selection half. Out of fold, {metric_name(self.metric)} goes "
            f"there from {self.before:.3f} to {self.gap:.3f} (one-sided {50 + 50 * _SURE:.0f} % bound "
            f"{self.upper:.3f}{missed}) at an accuracy of {100 * self.accuracy:.1f} %."
        )


def learn_told_gains(
    question: "GapQuestion",
    plan: LocatePlan,
    heads: Sequence[tuple[int, int]] | None = None,
    weights: Sequence[float] = WEIGHTS,
) -> ToldGains:
    """Learn gains on the selection half, told its groups, that bring the plan's gap down to its target.

    Minimised is the cross-entropy plus a weight times the squared differences of the groups' mean probabilities, for
    EOd given the label. The weight grows step by step; how far is chosen by cross-fitting within the selection half, in
    true passes: of the steps whose gap out of fold is surely within the target, the most accurate one.
    """
    at = np.flatnonzero(question.choosing)
    rows = question.rows.take(at)
    cells, clusters = len(rows.names) * rows.labels + rows.groups, rows.clusters
    fold = halves(cells, clusters, plan.seed).astype(np.intp)
    for half in (0, 1):
        inside = np.flatnonzero(fold % 2 == half)
        fold[inside] += 2 * halves(cells[inside], None if clusters is None else clusters[inside], plan.seed)
    plain, slopes = _first_order(question, at, np.ones(question.shape))
    follow = partial(follow_gains, question, plan, heads, first=(plain, slopes))
    crossed = [plain.copy() for _ in weights]  # logits out of fold
    for out in range(4):
        for step, (_, logits) in zip(crossed, follow(weights, fitted=fold != out), strict=True):
            step[fold == out] = logits[fold == out]
    number, before, upper, reached = _surest(rows, plain, crossed, plan)
    *_, (values, _) = follow(weights[: number + 1])
    found = rows.figures([crossed[number]])
    figures = before, abs(float(found[plan.target_metric][0])), upper, reached, float(found["accuracy"][0])
    return ToldGains(values, tuple(_moved(values)), weights[number], plan.target_metric, *figures)


def _surest(
    rows: Evaluation, plain: Array, crossed: Sequence[Array], plan: LocatePlan
) -> tuple[int, float, float, bool]:
    """The most accurate step whose gap is surely within the target, or the nearest; the gap before; its end after."""
    metric, target = plan.target_metric, 0.5 if plan.target is None else plan.target
    found = rows.figures([plain, *crossed])
    before = abs(float(found[metric][0]))
    how: dict[str, Any] = {"group_by": rows.group_by, "metrics": [metric], "min_cell": MIN_CELL, "n_perm": 100}
    how |= {"n_boot": plan.n_boot, "seed": plan.seed, "level": _SURE}
    changes = [compare(rows.records(plain), rows.records(step), **how).differences[0] for step in crossed]
    ends = np.array([np.inf if d.high is None else before + d.high for d in changes])
    within = ends <= target * before
    number = int(np.argmax(np.where(within, found["accuracy"][1:], -1)) if within.any() else np.argmin(ends))
    return number, before, float(ends[number]), bool(within.any())


def follow_gains(
    question: "GapQuestion",
    plan: LocatePlan,
    heads: Sequence[tuple[int, int]] | None,
    weights: Sequence[float],
    first: tuple[Array, Array] | None = None,
    fitted: NDArray[np.bool_] | None = None,
) -> Iterator[tuple[Array, Array]]:
    """Told gains [L, H] and logits [n, C] of the selection half, as the weight of the gap grows.

    They are learned from all n rows of it, or from those `fitted` [n]; `first` are logits and slopes with all gains 1.
    """
    shape, at = question.shape, np.flatnonzero(question.choosing)
    logits, lost = first or _first_order(question, at, np.ones(shape))
    fitted = np.ones(len(at), dtype=bool) if fitted is None else fitted
    rows, gains = question.rows.take(at[fitted]), np.ones(shape[0] * shape[1])
    target, contrast = np.eye(logits.shape[1])[rows.labels], _contrast(rows, plan.target_metric)
    chosen = [layer * shape[1] + head for layer, head in heads or ()]
    for number, weight in enumerate(weights):
        parts = lost[fitted].reshape(len(rows), gains.size, -1).transpose(0, 2, 1).reshape(-1, gains.size) / gains
        told = _Told(logits[fitted], parts, gains, target, contrast)
        chosen = chosen or _entering(told, shape, plan)
        gains = told.descend(gains, chosen, weight)
        logits, lost = _first_order(question, at, gains.reshape(shape), number + 1 < len(weights))
        yield gains.reshape(shape), logits


def _contrast(rows: Evaluation, metric: str) -> Array:
    """What makes the groups' mean probabilities less the mean of them out of probabilities of n rows, [cells, n]."""
    groups, lines = 1 - rows.groups, []
    given = rows.labels if metric == "EOd" else np.zeros(len(rows))
    for label in np.unique(given):
        cells = [(given == label) & (groups == group) for group in range(len(rows.names))]
        means = np.array([cell / cell.sum() for cell in cells if cell.sum() >= MIN_CELL])
        lines += [means - means.mean(0)] if len(means) > 1 else []
    if not lines:
        raise InputError(f"gains need {MIN_CELL} {rows.noun} of two groups in three quarters of the selection half")
    return np.concatenate(lines) / np.sqrt(len(lines))


@dataclass(frozen=True)
class _Told:
    """The objective of told gains near where they stand, where logits are linear in them."""

    logits: Array  # there, [n, C]
    parts: Array  # what each head's gain adds to them, [n * C, heads]
    gains: Array  # where they stand, [heads]
    target: Array  # 1 for the label, [n, C]
    contrast: Array  # [cells, n]

    def __call__(self, gains: Array, weight: float) -> tuple[float, Array]:
        """Its value with other gains, and its slopes in them."""
        logs = log_softmax(self.logits + (self.parts @ (gains - self.gains)).reshape(self.logits.shape), axis=1)
        p = np.exp(logs)
        apart = self.contrast @ p
        slope = 2 * weight * self.contrast.T @ apart
        error = (p - self.target) / len(p) + p * (slope - (p * slope).sum(1, keepdims=True))
        value = weight * (apart**2).sum() - (logs * self.target).sum() / len(p) + _RIDGE / 2 * ((gains - 1) ** 2).sum()
        return float(value), error.ravel() @ self.parts + _RIDGE * (gains - 1)

    def descend(self, gains: Array, chosen: list[int], weight: float) -> Array:
        """The best gains of some heads that are no more than a step away from where they stand."""
        moving, found = replace(self, parts=self.parts[:, chosen], gains=self.gains[chosen]), gains.copy()
        ends = (np.clip(moving.gains + far, *_RANGE) for far in (-_FAR, _FAR))
        how: dict[str, Any] = {"method": "L-BFGS-B", "jac": True, "bounds": list(zip(*ends, strict=True))}
        found[chosen] = minimize(partial(moving, weight=weight), gains[chosen], **how).x
        return found


def _entering(told: _Told, shape: tuple[int, int], plan: LocatePlan) -> list[int]:
    """Heads one by one: next comes the one along which the objective falls most steeply."""
    chosen, gains, free = list[int](), told.gains, np.ones(shape, dtype=bool)
    while len(chosen) < plan.count and free.any():
        chosen.append(int(np.argmax(np.where(free.ravel(), np.abs(told(gains, _MIDDLE)[1]), -1))))
        layer, head = divmod(chosen[-1], shape[1])
        free[layer, head] = False
        free[layer] &= sum(n // shape[1] == layer for n in chosen) < (plan.per_layer or max(1, shape[1] // 4))
        gains = told.descend(gains, chosen, _MIDDLE)
    return chosen


def _first_order(
    question: "GapQuestion", at: NDArray[np.intp], gains: Array, slopes: bool = True
) -> tuple[Array, Array]:
    """Logits of some rows with gains [L, H], [n, C], and to first order the whole part of each head in them."""
    passes, task = question.passes, question.task
    if passes is None or passes.everywhere is None:
        raise InputError("gains act on every token and need the model: ask the question with passes over all tokens")
    classes = [1] if len(task.classes) == 2 else list(range(len(task.classes)))
    wanted = [partial(task.slope, positive=c) for c in classes] if slopes else []
    there = replace(passes, everywhere=passes.everywhere.with_gains(gains))
    found = there.estimate(at, question.edits, "mean", wanted, _moved(gains))
    lost = found.lost if len(classes) > 1 else np.concatenate([0 * found.lost, found.lost], -1)
    # Evidence is a logit against the mean of the others: (C − 1) / C of it is the logit, up to what all share.
    return task.logits(found.output), lost * (1.0 if len(classes) == 1 else 1 - 1 / len(classes))


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
