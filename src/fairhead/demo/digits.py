"""The demo's data: scikit-learn's handwritten digits, with a background shade that follows the label in training.

The task is odd or even. In 90 % of the training pictures the background is light where the digit is odd and dark where
it is even, so the shade is a shortcut. In the test set every digit appears once in each shade: the shade says nothing
about the label there, and the two versions of a digit differ in nothing else.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

import fairhead
from fairhead.data import Dataset

CLASSES = ("even", "odd")
SHADES = ("dark", "light")

# How much of the way from black to white a light background goes.
_LIGHT = 0.5


def shaded_digits(seed: int = 0, bias: float = 0.9, parts: Sequence[str] = ("train", "val", "test")) -> Dataset:
    """Half of the 1797 digits to train on, 15 % to choose by, 35 % to test, as a data set with the group "shade".

    Args:
        seed: of the split and of the shades.
        bias: share of the training and validation pictures whose shade follows the label.
        parts: those wanted.

    Example:
        >>> from fairhead.demo.digits import shaded_digits
        >>> shaded_digits().sizes   # each test digit twice
        {'train': 898, 'val': 270, 'test': 1258}
    """
    from sklearn.datasets import load_digits

    loaded: Any = load_digits()
    odd, n = loaded.target % 2, len(loaded.target)
    rng = np.random.default_rng(seed)
    train, validation, test = np.split(rng.permutation(n), [n // 2, n // 2 + round(0.15 * n)])
    rows = []  # digit, shade, part
    for part, digits in (("train", train), ("val", validation)):
        against = rng.permutation(len(digits)) < round((1 - bias) * len(digits))
        rows += [(digit, shade, part) for digit, shade in zip(digits, odd[digits] ^ against, strict=True)]
    rows += [(digit, shade, "test") for digit in test for shade in (0, 1)]
    rows = [row for row in rows if row[2] in parts]
    found = fairhead.dataset(
        [_picture(loaded.images[digit] / 16, shade) for digit, shade, _ in rows],
        label=[CLASSES[odd[digit]] for digit, *_ in rows],
        groups={"shade": [SHADES[shade] for _, shade, _ in rows]},
        split=[part for *_, part in rows],
        id=[f"digit-{digit:04d}-{SHADES[shade]}" for digit, shade, _ in rows],
        person=[f"{digit:04d}" for digit, *_ in rows],
    )
    assert isinstance(found, Dataset)
    return found


def _picture(digit: Any, shade: int) -> Image.Image:
    """A digit [8, 8] in [0, 1], on its background."""
    background = _LIGHT * shade
    return Image.fromarray(np.round(255 * (background + digit * (1 - background))).astype(np.uint8))
