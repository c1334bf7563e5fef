"""Axes with round ticks, for the drawings in the templates.

Charts here have no fixed width. Horizontal positions are percentages and everything else is in CSS pixels, so text
keeps its size from a phone to a print, and colours are CSS classes, so they follow the page into dark mode.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, log10


def short(value: float) -> str:
    """Write a number of a drawing with at most two decimals.

    Example:
        >>> short(1.5), short(2.0), short(1 / 3)
        ('1.5', '2', '0.33')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Axis:
    """A horizontal axis: where a value lies between the left (0 %) and the right end (100 %).

    Attributes:
        low: the value at the left end.
        high: the value at the right end.
        ticks: round values in between, ends not necessarily included.

    Example:
        >>> axis = Axis.over([0.0, 0.31], pad=0)
        >>> axis.at(0.0), axis.ticks
        ('0%', (0.0, 0.1, 0.2, 0.3))
    """

    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, values: Iterable[float], pad: float = 0.04) -> "Axis":
        """Return an axis that holds all values, with a little room; equal values get a window around them."""
        values = list(values) or [0.0]
        low, high = min(values), max(values)
        # A difference of rounding errors is no difference: it would make an axis of digits that nobody can read.
        equal = high - low <= 1e-9 * max(1.0, abs(low), abs(high))
        room = (abs(high) / 2 if abs(high) > 1e-6 else 0.01) if equal else (high - low) * pad
        low, high = low - room, high + room
        step = _round_step((high - low) / 4)
        first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
        # Multiply the integer: repeated addition would give ticks such as 0.30000000000000004.
        return cls(low, high, tuple(round(k * step, 12) for k in range(first, last + 1)))

    def fraction(self, value: float) -> float:
        """Return the position in percent of the width, kept inside the axis."""
        return 100 * min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def at(self, value: float) -> str:
        """Return the position as an SVG length."""
        return f"{short(self.fraction(value))}%"


def _round_step(rough: float) -> float:
    """Return the nearest step of the form 1, 2 or 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** floor(log10(rough))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
