"""What a search of hyper-parameters draws from. Imports no torch.

A method declares the priors of its own options beside them, as `priors`; what is not declared is not searched.
Those of SubpopBench (Yang et al., 2023) are taken as they are; for methods that it does not have they cover what their
papers sweep. Learning rate and weight decay are searched for every method alike.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Prior(Protocol):
    """A distribution of one option."""

    def draw(self, chance: random.Random, epochs: int) -> Any:
        """One value; `epochs` are those of the plan, which some options are shares of."""

    def __str__(self) -> str: ...


@dataclass(frozen=True)
class Uniform:
    """Evenly between two numbers."""

    low: float
    high: float

    def draw(self, chance: random.Random, epochs: int) -> float:
        """One number, to three digits."""
        return rounded(chance.uniform(self.low, self.high))

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class LogUniform:
    """10 to a power that is drawn evenly between two."""

    low: float
    high: float
    whole: bool = False  # round to a whole number

    def draw(self, chance: random.Random, epochs: int) -> float:
        """One number, to three digits."""
        value = 10 ** chance.uniform(self.low, self.high)
        return round(value) if self.whole else rounded(value)

    def __str__(self) -> str:
        return f"10^({self.low:g} to {self.high:g})"


@dataclass(frozen=True)
class Choice:
    """One of a few values, evenly."""

    values: tuple[Any, ...]

    def draw(self, chance: random.Random, epochs: int) -> Any:
        """One value."""
        return chance.choice(self.values)

    def __str__(self) -> str:
        return " or ".join(f"{value:g}" for value in self.values)


@dataclass(frozen=True)
class ShareOfEpochs:
    """A whole number of epochs, an evenly drawn share of the plan's, at least one."""

    low: float
    high: float

    def draw(self, chance: random.Random, epochs: int) -> int:
        """A number of epochs."""
        return max(1, round(chance.uniform(self.low, self.high) * epochs))

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g} of the epochs"


@dataclass(frozen=True)
class ListOf:
    """A list with one drawn value, for options that hold several."""

    prior: LogUniform

    def draw(self, chance: random.Random, epochs: int) -> tuple[float, ...]:
        """One value in a tuple."""
        return (self.prior.draw(chance, epochs),)

    def __str__(self) -> str:
        return str(self.prior)


def rounded(value: float) -> float:
    """To three digits: a configuration that can be written down."""
    return float(f"{value:.3g}")


# Of the plan, for pictures and for texts (SubpopBench).
PLAN_PRIORS: Mapping[str, Mapping[str, Prior]] = {
    "image": {"learning_rate": LogUniform(-4, -2), "weight_decay": LogUniform(-6, -3)},
    "text": {"learning_rate": LogUniform(-5.5, -4), "weight_decay": LogUniform(-6, -3)},
}
