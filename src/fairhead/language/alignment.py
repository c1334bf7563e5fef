"""Which tokens two versions of a sentence have in common, and which make the difference. Needs no torch."""

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import NamedTuple


class Alignment(NamedTuple):
    """Tokens of two sequences that correspond.

    Attributes:
        first: positions in the first sequence, ascending.
        second: the positions in the second that they correspond to, ascending.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]


def align(first: Sequence[int], second: Sequence[int]) -> Alignment:
    """Unchanged tokens of two sequences, matched in order, as CrowS-Pairs' own scoring does.

    Example:
        >>> align([5, 1, 2, 9], [5, 3, 9])
        Alignment(first=(0, 3), second=(0, 2))
    """
    # Without autojunk: common tokens are as good as rare ones, whatever the length.
    blocks = SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    places = [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]
    return Alignment(tuple(a for a, _ in places), tuple(b for _, b in places))


def align_by_position(first: Sequence[int], second: Sequence[int]) -> Alignment:
    """Token i with token i, as far as both go.

    Example:
        >>> align_by_position([5, 1, 2, 9], [5, 3, 9]).second
        (0, 1, 2)
    """
    both = tuple(range(min(len(first), len(second))))
    return Alignment(both, both)


class Slots(NamedTuple):
    """Places that both versions of a sentence have.

    Attributes:
        first: positions in the first sequence, ascending.
        second: positions in the second, ascending.
        changed: whether another token stands there.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    changed: tuple[bool, ...]


def slots(first: Sequence[int], second: Sequence[int]) -> Slots:
    """Unchanged tokens, and those that took the place of others, one by one.

    Where a stretch was replaced by a longer or shorter one, tokens of the longer that have no counterpart are left out.

    Example:
        >>> slots([5, 1, 2, 9], [5, 3, 9])
        Slots(first=(0, 1, 3), second=(0, 1, 2), changed=(False, True, False))
    """
    places: list[tuple[int, int, bool]] = []
    for kind, a, a_end, b, b_end in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        places += [(i, j, kind != "equal") for i, j in zip(range(a, a_end), range(b, b_end), strict=False)]
    return Slots(tuple(p[0] for p in places), tuple(p[1] for p in places), tuple(p[2] for p in places))
