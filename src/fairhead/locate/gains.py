"""Gains of heads: one number a head, by which its output is scaled about its mean; all weights are frozen.

Most gains are 1. The logits are linear in them to first order; the slopes come from attribution patching and are taken
anew where the gains stand. There are two objectives:

- `learn_gains` uses no groups. It minimises the cross-entropy of rows that are weighted so that clusters of the
  model's own outputs are independent of the label (the objective of `balance`). Gains are pulled towards 1, and heads
  enter one by one as the pull grows weaker.
- `learn_group_aware_gains` uses the groups of the selection half, as erasure does, to bring a gap down.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax

from fairhead.errors import InputError
from fairhead.locate.directions import balanced_weights
from fairhead.locate.gap_question import GapQuestion
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, gained, mask_of
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.rows import MIN_CELL, SURE, Evaluation, halves
from fairhead.report.wording import from_to, metric_name, scale_for

GIVEN = "The gains are those of the head map."
LEARNED = "Learned with clusters of outputs balanced, without any group."
_RIDGE = 1e-3  # pull of the gains towards 1, of the mean loss
_STEPS = 300  # of the solver, at each strength of the pull
_STILL = 1e-5  # the largest move of a gain at which it stops
_PULLS = 24  # strengths of the sparse pull that are tried, from the one that moves no gain on
WEIGHTS = (0.3, 1.0, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0)  # of a squared gap of probabilities beside the cross-entropy
_MIDDLE = 20.0  # that at which heads enter
_RANGE = (0.01, 2.0)  # of group-aware gains; from a gain of 0 there would be no slope
_FAR = 0.5  # what a gain moves in a step, at most


@dataclass(frozen=True)
class Gains:
    """A gain for each head, 1 for most."""

    values: Array  # [L, H]
    heads: tuple[Head, ...]  # those whose gain is not 1, the farthest from it first
    clusters: int  # that the objective is balanced over
    before: float  # the balanced loss with all gains 1, on the rows that they were learned from
    after: float  # with these gains, in a pass of the model


def learn_gains(
    question: GapQuestion,
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
    return Gains(values, gained(values), clusters, first, least)


@dataclass(frozen=True)
class GroupAwareGains:
    """Gains that were learned against a gap between known groups."""

    values: Array  # [L, H]
    heads: tuple[Head, ...]  # those whose gain is not 1, the farthest from it first
    weight: float  # of the gap in the objective
    metric: str  # the gap
    before: float  # the gap of the model as it is, on the selection half
    gap: float  # out of fold
    upper: float  # its end in new rows whose gap before is the same, `Evaluation.predicted`
    reached: bool  # whether that end is within the target; if not, that of no step is, and this comes nearest
    accuracy: float  # out of fold

    @property
    def sentence(self) -> str:
        """How they were learned, and what is expected of them."""
        missed = "" if self.reached else "; no step is surely within the target, this comes nearest"
        bound = scale_for(self.metric).write(self.upper)
        return (
            f"Gains were learned with the groups of the selection half. Out of fold, {metric_name(self.metric)} goes "
            f"there {from_to(self.metric, self.before, self.gap)} (one-sided {100 * SURE:.0f} % prediction bound "
            f"{bound}{missed}) at an accuracy of {100 * self.accuracy:.1f} %."
        )


def learn_group_aware_gains(
    question: GapQuestion,
    plan: LocatePlan,
    heads: Sequence[tuple[int, int]] | None = None,
    weights: Sequence[float] = WEIGHTS,
) -> GroupAwareGains:
    """Learn gains on the selection half, with its groups, that bring the plan's gap down to its target.

    Minimised is the cross-entropy plus a weight times the squared differences of the groups' mean probabilities, for
    EOd given the label. The weight grows step by step, until the gap out of fold is surely within the target: until it
    is predicted to be within it in new rows (`Evaluation.predicted`).
    """
    rows, metric = question.rows.take(question.choosing), plan.target_metric
    steps = group_aware_steps(question, plan, heads, weights, _quarters(rows, plan.seed))
    plain, tried = next(steps).logits, list[GroupAwareGains]()
    for weight, (values, logits) in zip(weights, steps, strict=False):
        figures = rows.figures([plain, logits])
        before, gap = (abs(float(x)) for x in figures[metric])
        upper = rows.predicted(plain, logits, plan, len(question.reported))
        reached, accuracy = upper <= plan.share_left * before, float(figures["accuracy"][1])
        heads_moved = gained(values)
        tried.append(GroupAwareGains(values, heads_moved, weight, metric, before, gap, upper, reached, accuracy))
        if reached:
            return tried[-1]
    return min(tried, key=lambda step: step.upper)


def _quarters(rows: Evaluation, seed: int) -> NDArray[np.intp]:
    """The fold of each row, 0 to 3, [n]: of every cell a quarter each, or a quarter of the clusters."""
    cells, clusters = len(rows.names) * rows.labels + rows.groups, rows.clusters
    fold = halves(cells, clusters, seed).astype(np.intp)
    for half in (0, 1):
        inside = np.flatnonzero(fold % 2 == half)
        fold[inside] += 2 * halves(cells[inside], None if clusters is None else clusters[inside], seed)
    return fold


class GroupAwareStep(NamedTuple):
    """Gains at one weight of the gap."""

    values: Array  # [L, H], learned from the whole selection half
    logits: Array  # of the selection half, each row with gains that were learned from the other folds, [n, C]


def group_aware_steps(
    question: GapQuestion,
    plan: LocatePlan,
    heads: Sequence[tuple[int, int]] | None,
    weights: Sequence[float],
    fold: NDArray[np.intp] | None = None,
) -> Iterator[GroupAwareStep]:
    """Group-aware gains as the weight of the gap grows, from all gains 1 on; without folds [n] they have no logits.

    The slopes at each step are taken once, where the gains of the whole half stand, and every fold's gains are learned
    along them: from the rows, labels and groups of the other folds, with heads of their own.
    """
    shape, at = question.shape, np.flatnonzero(question.choosing)
    masks = [np.ones(len(at), dtype=bool), *(fold != out for out in range(4) if fold is not None)]
    fits = [_Fit.of(question.rows.take(at[mask]), mask, shape, plan.target_metric) for mask in masks]
    logits, lost = _first_order(question, at, np.ones(shape))
    yield GroupAwareStep(np.ones(shape), logits)
    for number, weight in enumerate(weights):
        stand = fits[0].gains
        if number:
            logits, lost = _first_order(question, at, stand.reshape(shape))
        parts = lost.reshape(len(at), stand.size, -1).transpose(0, 2, 1) / stand  # [n, C, heads]
        for fit in fits:
            fit.step(logits, parts, stand, weight, plan, heads)
        crossed = np.empty_like(logits) if fold is not None else logits[:0]
        for out, fit in enumerate(fits[1:]):
            crossed[fold == out], _ = _first_order(question, at[fold == out], fit.gains.reshape(shape), False)
        yield GroupAwareStep(fits[0].gains.reshape(shape), crossed)


@dataclass
class _Fit:
    """Group-aware gains of some rows of the selection half, and where they stand."""

    mask: NDArray[np.bool_]  # which rows, [n]
    shape: tuple[int, int]  # layers, heads
    target: Array  # 1 for the label, [m, C]
    contrast: Array  # [cells, m]
    gains: Array  # [heads]
    chosen: list[int]  # heads that have entered

    @classmethod
    def of(cls, rows: Evaluation, mask: NDArray[np.bool_], shape: tuple[int, int], metric: str) -> "_Fit":
        target = np.eye(len(rows.classes))[rows.labels]
        return cls(mask, shape, target, _contrast(rows, metric), np.ones(shape[0] * shape[1]), [])

    def step(
        self,
        logits: Array,  # [n, C]
        parts: Array,  # their slopes in the gains, [n, C, heads]
        stand: Array,  # the gains there, [heads]
        weight: float,
        plan: LocatePlan,
        heads: Sequence[tuple[int, int]] | None,
    ) -> None:
        """Move the gains to the best ones at a weight."""
        own = parts[self.mask]
        here = logits[self.mask] + own @ (self.gains - stand)
        objective = _Objective(here, own.reshape(-1, stand.size), self.gains, self.target, self.contrast)
        if not self.chosen:
            given = [layer * self.shape[1] + head for layer, head in heads or ()]
            self.chosen = given or _entering(objective, self.shape, plan)
        self.gains = objective.descend(self.gains, self.chosen, weight)


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
class _Objective:
    """The objective of group-aware gains near where they stand, where logits are linear in them."""

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


def _entering(objective: _Objective, shape: tuple[int, int], plan: LocatePlan) -> list[int]:
    """Heads one by one: next comes the one along which the objective falls most steeply."""
    chosen, gains, free = list[int](), objective.gains, np.ones(shape, dtype=bool)
    while len(chosen) < plan.count and free.any():
        chosen.append(int(np.argmax(np.where(free.ravel(), np.abs(objective(gains, _MIDDLE)[1]), -1))))
        layer, head = divmod(chosen[-1], shape[1])
        free[layer, head] = False
        free[layer] &= sum(n // shape[1] == layer for n in chosen) < (plan.per_layer or max(1, shape[1] // 4))
        gains = objective.descend(gains, chosen, _MIDDLE)
    return chosen


def _first_order(question: GapQuestion, at: NDArray[np.intp], gains: Array, slopes: bool = True) -> tuple[Array, Array]:
    """Logits of some rows with gains [L, H], [n, C], and to first order the whole part of each head in them."""
    passes, task = question.passes, question.task
    if passes is None or passes.everywhere is None:
        raise InputError("gains act on every token and need the model: ask the question with passes over all tokens")
    classes = [1] if len(task.classes) == 2 else list(range(len(task.classes)))
    wanted = [partial(task.slope, positive=c) for c in classes] if slopes else []
    there = replace(passes, everywhere=passes.everywhere.with_gains(gains))
    found = there.estimate(at, question.edits, "mean", wanted, gained(gains))
    lost = found.lost if len(classes) > 1 else np.concatenate([0 * found.lost, found.lost], -1)
    # Evidence is a logit against the mean of the others: (C − 1) / C of it is the logit, up to what all share.
    return task.logits(found.output), lost * (1.0 if len(classes) == 1 else 1 - 1 / len(classes))


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
