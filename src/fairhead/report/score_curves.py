"""Curves of scores by group, as an audit has them and as a page draws them: ROC, calibration, other thresholds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

# Lines that can be told apart in one drawing.
_MOST_LINES = 6


@dataclass(frozen=True)
class CalibrationPoint:
    """Rows of one group with like scores."""

    score: float  # their mean score
    share: float  # how many of them have the positive label
    low: float  # lower end of its interval
    high: float  # upper end
    n: int  # rows


@dataclass(frozen=True)
class GroupCurve:
    """The scores of one group."""

    group: str  # its name
    n: int  # its rows
    positives: float  # (weighted) rows with the positive label
    negatives: float  # the other rows
    true_positives: tuple[float, ...]  # for each threshold, positives with that score or a higher one
    false_positives: tuple[float, ...]  # the same of negatives
    calibration: tuple[CalibrationPoint, ...]  # in bins of equal mass; empty where scores are no probabilities


@dataclass(frozen=True)
class Curves:
    """The scores of the groups of one column."""

    group_by: str  # the column
    thresholds: tuple[float, ...]  # ascending; a row is predicted positive from its threshold on
    groups: tuple[GroupCurve, ...]  # one curve each

    def start(self, used: float | None) -> int:
        """The number of the threshold nearest to the one that was used, or of the middle one."""
        steps = self.thresholds
        return len(steps) // 2 if used is None else min(range(len(steps)), key=lambda i: (abs(steps[i] - used), i))


class Drawing(NamedTuple):
    """Curves of the largest groups on one square."""

    title: str
    across: str  # what the horizontal axis is
    up: str  # what the vertical axis is
    lines: Mapping[str, str]  # group -> points as SVG has them, on 100 × 100 with the origin at the upper left
    left_out: int


def draw_roc(curves: Curves, least: int) -> Drawing:
    """True against false positive rates of the largest groups, with at least so many rows of either label."""
    lines = {}
    for group in curves.groups:
        if min(group.positives, group.negatives) >= max(least, 1):
            both = zip(group.false_positives, group.true_positives, strict=True)
            pairs = [(false / group.negatives, true / group.positives) for false, true in both]
            lines[group.group] = [(1.0, 1.0), *pairs, (0.0, 0.0)]
    return _drawing("ROC curves", "False positive rate", "True positive rate", lines, curves)


def draw_calibration(curves: Curves) -> Drawing:
    """How many are positive among rows with like scores, of the largest groups."""
    lines = {group.group: [(point.score, point.share) for point in group.calibration] for group in curves.groups}
    return _drawing("Calibration", "Mean score", "Share that is positive", lines, curves)


def _drawing(title: str, across: str, up: str, lines: dict[str, list[tuple[float, float]]], curves: Curves) -> Drawing:
    drawn = [group for group in sorted(curves.groups, key=lambda g: -g.n) if len(lines.get(group.group, ())) > 1]
    made = {
        g.group: " ".join(f"{100 * x:.2f},{100 - 100 * y:.2f}" for x, y in lines[g.group]) for g in drawn[:_MOST_LINES]
    }
    return Drawing(title, across, up, made, len(curves.groups) - len(made))
