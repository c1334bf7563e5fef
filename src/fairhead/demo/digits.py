"""The demo's data: scikit-learn's handwritten digits, with a background shade that follows the label in training.

The task is odd or even. In 90 % of the training pictures the background is light where the digit is odd and dark where
it is even, so the shade is a shortcut. In the test set every digit appears once in each shade: the shade says nothing
about the label there, and the two versions of a digit differ in nothing else.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fairhead.records import Column, Records
from fairhead.train import Examples

CLASSES = ("even", "odd")
SHADES = ("dark", "light")

# How much of the way from black to white a light background goes.
_LIGHT = 0.5


@dataclass(frozen=True)
class ShadedDigits:
    """Training, validation and test pictures. Shades are kept for the test set alone.

    Attributes:
        train: pictures whose shade follows the label in 90 % of cases; no shades.
        validation: the same kind of pictures, to choose the checkpoint by; no shades.
        test: every test digit in both shades.
        test_shade: 0 dark or 1 light, [rows of test].
        test_digit: which digit (row of scikit-learn's table) a test picture shows, [rows of test].
    """

    train: Examples
    validation: Examples
    test: Examples
    test_shade: NDArray[np.int64]
    test_digit: NDArray[np.int64]

    def keep(self, rows: NDArray[np.bool_]) -> "ShadedDigits":
        """The same with some rows of the test set only."""
        test = self.test.take(torch.tensor(rows))
        return replace(self, test=test, test_shade=self.test_shade[rows], test_digit=self.test_digit[rows])

    def records(self, p_odd: NDArray[np.float64]) -> Records:
        """The table of the test set, with a model's probabilities of "odd", [rows of test]."""
        digits, cluster = np.unique(self.test_digit, return_inverse=True)
        names = [f"digit-{d:04d}-{SHADES[s]}" for d, s in zip(self.test_digit, self.test_shade, strict=True)]
        return Records(
            label=Column(self.test.labels.numpy(), CLASSES),
            prediction=Column((p_odd > 0.5).astype(np.int64), CLASSES),
            scores=p_odd,
            groups={"shade": Column(self.test_shade, SHADES)},
            id=np.array(names),
            cluster=Column(cluster, tuple(digits.tolist())),
        )


def shaded_digits(seed: int = 0, bias: float = 0.9) -> ShadedDigits:
    """Half of the 1797 digits to train on, 15 % to choose the checkpoint by, 35 % to test.

    Args:
        seed: of the split and of the shades.
        bias: share of the training and validation pictures whose shade follows the label.

    Example:
        >>> from fairhead.demo.digits import shaded_digits
        >>> digits = shaded_digits()
        >>> len(digits.train), len(digits.validation), len(digits.test)   # each test digit twice
        (898, 270, 1258)
    """
    pictures, labels = _load()
    rng = np.random.default_rng(seed)
    n = len(labels)
    train, validation, test = np.split(rng.permutation(n), [n // 2, n // 2 + round(0.15 * n)])

    def biased(rows: NDArray[np.int64]) -> Examples:
        against = rng.permutation(len(rows)) < round((1 - bias) * len(rows))
        return _examples(pictures[rows], labels[rows], labels[rows] ^ against)

    return ShadedDigits(
        train=biased(train),
        validation=biased(validation),
        test=_examples(pictures[np.repeat(test, 2)], labels[np.repeat(test, 2)], np.tile(np.array([0, 1]), len(test))),
        test_shade=np.tile(np.array([0, 1]), len(test)),
        test_digit=np.repeat(test, 2),
    )


def _load() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Pictures in [0, 1], [1797, 8, 8]; 1 for odd, [1797]."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    return data.images / 16.0, (data.target % 2).astype(np.int64)


def _examples(pictures: NDArray[np.float64], labels: NDArray[np.int64], shade: NDArray[np.integer]) -> Examples:
    background = _LIGHT * shade[:, None, None]
    shaded = background + pictures * (1 - background)
    pixels = torch.tensor(2 * shaded - 1, dtype=torch.float32)[:, None]  # [n, 1, 8, 8] in [-1, 1]
    return Examples({"pixel_values": pixels}, torch.tensor(labels))
