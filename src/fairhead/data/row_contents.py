"""Rows known by what they hold, whatever their ids and files are called: the same picture or text is the same row."""

import hashlib
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairhead.data.datasets import Examples
from fairhead.data.images import Images

# A text that so many rows have, and a tenth of all, is no input: it stands in for features that are found by id.
_STAND_IN = 10


def digests_of(inputs: Any) -> list[str]:
    """A digest of each picture (the bytes of its file) or text.

    Example:
        >>> digests_of(["a", "b", "a"])[0] == digests_of(["a"])[0]
        True
    """
    if isinstance(inputs, Images):
        return inputs.digests()
    return [_digest(one if isinstance(one, str) else "\0".join(one)) for one in inputs]


def row_digests(examples: Examples) -> NDArray[np.str_]:
    """A digest of each row, [n]: of its input, and of its id as well where the input stands in for features.

    Example:
        >>> rows = Examples(np.array(["1", "2", "3"]), ("a", "b", "a"), np.array([0, 1, 0]), ("no", "yes"))
        >>> len({*row_digests(rows).tolist()})
        2
    """
    found = digests_of(examples.inputs)
    alone = stand_ins(found)
    pairs = zip(examples.ids.tolist(), found, strict=True)
    return np.array([_digest(f"{name}\0{one}") if one in alone else one for name, one in pairs], dtype=np.str_)


def alike(inputs: Any) -> NDArray[np.intp]:
    """Where the first row with the same input is, [n]; rows whose input stands in for features are each their own.

    Example:
        >>> alike(["a", "b", "a"]).tolist()
        [0, 1, 0]
    """
    found: list[Any] = list(range(len(inputs)))
    if isinstance(inputs, Images):  # files of a length that no other has need not be read
        lengths = inputs.lengths()
        shared = Counter(lengths)
        rows = [row for row, length in enumerate(lengths) if shared[length] > 1]
        for row, one in zip(rows, inputs.take(rows).digests(), strict=True):
            found[row] = one
    else:
        found = digests_of(inputs)
    alone, first = stand_ins(found), dict[Any, int]()
    return np.array([row if one in alone else first.setdefault(one, row) for row, one in enumerate(found)], np.intp)


def stand_ins(digests: list[Any]) -> frozenset[Any]:
    """Those of inputs that stand in for features."""
    least = max(_STAND_IN, len(digests) / 10)
    return frozenset(one for one, count in Counter(digests).items() if count > least)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
