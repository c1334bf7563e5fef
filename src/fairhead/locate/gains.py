"""Head gains: one number a head, learned so that labels are predicted as well whatever the cluster: a map and an edit.

A head's output is scaled about its mean. All weights are frozen; the gains minimise the cross-entropy of rows that are
weighted so that clusters of the model's own outputs are independent of the label (the objective of `balance`), which
needs no group. They are pulled towards 1, and most are 1: heads enter one by one as the pull grows weaker. The logits
are linear in the gains to first order; the slopes come from attribution patching and are taken anew where the gains
stand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

from fairhead.errors import InputError
from fairhead.locate.directions import balanced_weights
from fairhead.locate.gap_question import GapQuestion
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, largest_first, mask_of

_RIDGE = 1e-3  # pull of the gains towards 1, of the mean loss
_STEPS = 300  # of the solver, at each strength of the pull
_STILL = 1e-5  # the largest move of a gain at which it stops
_PULLS = 24  # strengths of the sparse pull that are tried, from the one that moves no gain on


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
