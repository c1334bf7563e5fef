"""The frontier of fairness and accuracy (DAM, Figure 2): which methods no other one beats in both, as a picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup

from fairhead.report.markup import Axis, fill

# The corner that hyper-volume is measured from: 5 points of accuracy below plain training, and a gap of 50 points.
_ACCURACY_BELOW = 0.05
_GAP_AT_MOST = 0.5
_TOP, _BOTTOM = 14, 300  # of the plot inside the drawing, in pixels
# The width is the reader's; names are placed as for this one, between a phone's and a screen's. Pixels a letter.
_WIDTH, _LETTER = 700, 7


@dataclass(frozen=True)
class Point:
    """One method: mean accuracy and gap over seeds, their test-sampling intervals, and whether it is on the front."""

    method: str
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    gap: float
    gap_low: float
    gap_high: float
    on_front: bool = False

    def beats(self, other: "Point") -> bool:
        """Whether it is as good in both means and better in one."""
        at_least = self.accuracy >= other.accuracy and self.gap <= other.gap
        return at_least and (self.accuracy > other.accuracy or self.gap < other.gap)


@dataclass(frozen=True)
class Frontier:
    """Points of all methods.

    Example:
        >>> means = {"erm": (0.90, 0.20), "dam": (0.88, 0.10), "bad": (0.87, 0.15)}
        >>> found = Frontier.of("EOd", [Point(name, x, x, x, y, y, y) for name, (x, y) in means.items()], "erm")
        >>> [point.method for point in found.front()]
        ['dam', 'erm']
    """

    metric: str  # the gap
    points: Sequence[Point]  # one a method
    # Area between the front and the corner (baseline's accuracy − 5 points, gap of 50 points), as a share of the
    # largest such area there could be; None without the baseline
    hypervolume: float | None

    @classmethod
    def of(cls, metric: str, points: Sequence[Point], baseline: str) -> "Frontier":
        """Mark the points that no other one beats, and measure the area up to them."""
        marked = tuple(replace(p, on_front=not any(other.beats(p) for other in points)) for p in points)
        corner = next((p.accuracy - _ACCURACY_BELOW for p in points if p.method == baseline), None)
        found = cls(metric, marked, None)
        if corner is None:
            return found
        area, reached = 0.0, corner
        for point in found.front():
            if point.accuracy > reached and point.gap < _GAP_AT_MOST:
                area += (point.accuracy - reached) * (_GAP_AT_MOST - point.gap)
                reached = point.accuracy
        return replace(found, hypervolume=area / ((1 - corner) * _GAP_AT_MOST))

    def front(self) -> list[Point]:
        """The points that no other one beats, by accuracy."""
        return sorted((p for p in self.points if p.on_front), key=lambda p: p.accuracy)

    def draw(self) -> Markup:
        """Draw the points with their intervals: accuracy to the right, the gap downwards to even; the front dashed."""
        across = Axis.over([x for p in self.points for x in (p.accuracy_low, p.accuracy_high)])
        up = Axis.over([0.0, *(x for p in self.points for x in (p.gap_low, p.gap_high))])

        def y(gap: float) -> float:
            return _BOTTOM - up.fraction(gap) / 100 * (_BOTTOM - _TOP)

        places = _places([(across.fraction(p.accuracy), y(p.gap), p.method) for p in self.points])
        return fill(
            "frontier.html",
            found=self,
            steps=list(pairwise(self.front())),
            named=[(point, place, place in _APART) for point, place in zip(self.points, places, strict=True)],
            across=across,
            up=up,
            y=y,
            percent=lambda value: f"{100 * value:.3g} %",
            top=_TOP,
            bottom=_BOTTOM,
        )


class _Place(NamedTuple):
    """Where a name stands, seen from its point: pixels, and the end of the text that they lead to."""

    across: int
    down: int
    anchor: str


# Beside the point first; then further off, with a line that leads there.
_BESIDE, _APART = (
    [_Place(side * across, down, "start" if side > 0 else "end") for down in downs for side in (1, -1)]
    for across, downs in ((8, (-8, 17)), (16, (-26, 35, -42, 51, -58, 67)))
)


def _places(points: Sequence[tuple[float, float, str]]) -> list[_Place]:
    """Where names of points (percent of the width, pixels from the top, name) hide nothing, if possible."""
    dots = [(x * _WIDTH / 100, y) for x, y, _ in points]
    taken, found = [_Box(x - 6, y - 6, x + 6, y + 6) for x, y in dots], []
    for dot, (_, _, name) in zip(dots, points, strict=True):
        places = [place for place in _BESIDE if _is_nearest(dot, place, dots)] + _APART
        boxes = [(place, _box(*dot, name, place)) for place in places]
        inside = [(place, box) for place, box in boxes if box.within(_Box(0, 0, _WIDTH, _BOTTOM))]
        free = [both for both in inside if not any(both[1].meets(other) for other in taken)]
        place, box = (free or inside or boxes)[0]
        taken.append(box)
        found.append(place)
    return found


def _is_nearest(dot: tuple[float, float], place: _Place, dots: Sequence[tuple[float, float]]) -> bool:
    """Whether a name at this place would be taken for that of its own point: others are twice as far off."""
    start = (dot[0] + place.across, dot[1] + place.down)
    return all(math.dist(start, other) >= 2 * math.dist(start, dot) for other in dots if other != dot)


class _Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "_Box") -> bool:
        left, right = max(self.left, other.left), min(self.right, other.right)
        return left < right and max(self.top, other.top) < min(self.bottom, other.bottom)

    def within(self, other: "_Box") -> bool:
        beside = other.left <= self.left and self.right <= other.right
        return beside and other.top <= self.top and self.bottom <= other.bottom


def _box(x: float, y: float, name: str, place: _Place) -> _Box:
    """About what a name covers."""
    width = _LETTER * len(name)
    left = x + place.across - (width if place.anchor == "end" else 0)
    return _Box(left, y + place.down - 11, left + width, y + place.down + 3)
