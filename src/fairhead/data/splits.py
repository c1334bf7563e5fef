"""Random splits that anyone can repeat: they depend on the keys and the seed, not on the order of the files."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from fairhead.errors import InputError

_PART_NAMES = {"training": "train", "valid": "val", "validation": "val", "dev": "val", "testing": "test"}
_PART_NAMES |= {name: name for name in ("train", "val", "test")}
EIGHTY_TEN_TEN: Mapping[str, float] = {"train": 0.8, "val": 0.1, "test": 0.1}


def shares_of(rows: int) -> dict[str, float]:
    """The shares of a random split of so many rows: 80/10/10, but 400 rows to test on and 150 to validate on.

    Of few rows that is at most 30 and 15 %. A gap needs some 150 rows to be defined; `locate` wants 400.

    Example:
        >>> shares_of(500), shares_of(2000), shares_of(10_000)["train"].__round__(2)
        ({'train': 0.55, 'val': 0.15, 'test': 0.3}, {'train': 0.7, 'val': 0.1, 'test': 0.2}, 0.8)
    """
    val, test = (min(max(wanted / max(rows, 1), 0.1), most) for wanted, most in ((150, 0.15), (400, 0.3)))
    return {"train": 1 - val - test, "val": val, "test": test}


def shuffle_by_hash(keys: Sequence[str], seed: int) -> list[str]:
    """The distinct keys in an order that depends on the keys and the seed alone."""
    return sorted(set(keys), key=lambda key: hashlib.sha256(f"{seed}\0{key}".encode()).digest())


def split_by_hash(
    keys: Sequence[str], fractions: Mapping[str, float] = EIGHTY_TEN_TEN, seed: int = 0
) -> NDArray[np.str_]:
    """The part of each row, shape [n], at random; rows with the same key (the same person or term) stay together.

    `fractions` are the shares of the parts; with distinct keys the parts have exactly these sizes. In what order they
    are given does not matter, where they are train, val and test.

    Example:
        >>> parts = split_by_hash([f"person {i % 50}" for i in range(1000)], {"train": 0.9, "test": 0.1})
        >>> int((parts == "test").sum())
        100
    """
    fractions = {
        name: fractions[name] for name in (*(part for part in EIGHTY_TEN_TEN if part in fractions), *fractions)
    }
    shares = list(fractions.values())
    if not shares or not all(share >= 0 for share in shares) or not abs(sum(shares) - 1) <= 1e-9:  # NaN is neither
        raise InputError(f"the shares of a split must not be negative and must sum to 1; found {dict(fractions)}")
    rows = Counter(keys)
    ordered = shuffle_by_hash(keys, seed)
    counts = np.array([rows[key] for key in ordered], dtype=np.float64)
    # A key goes where the middle of its rows falls, so a large key at a border moves to the nearer side.
    middle = np.cumsum(counts) - counts / 2
    borders = np.cumsum(shares[:-1]) * len(keys)
    part_of = dict(zip(ordered, np.searchsorted(borders, middle, side="right"), strict=True))
    names = np.array(list(fractions))
    return names[[part_of[key] for key in keys]] if len(keys) else names[:0]


def split_within(
    keys: Sequence[str], strata: Sequence[str], fractions: Mapping[str, float] = EIGHTY_TEN_TEN, seed: int = 0
) -> NDArray[np.str_]:
    """`split_by_hash` within each stratum, such as a class, so that every part has its share of each."""
    found = np.empty(len(keys), dtype=f"U{max(map(len, fractions), default=1)}")
    every = np.asarray(strata)
    for stratum in dict.fromkeys(strata):
        rows = np.flatnonzero(every == stratum)
        found[rows] = split_by_hash([keys[row] for row in rows.tolist()], fractions, seed)
    return found


def joined_keys(keys: Sequence[str], first: NDArray[np.intp]) -> list[str]:
    """One key for all keys that are tied by rows which belong together: `first` is a row of the same kind, [n].

    Example:
        >>> joined_keys(["a", "b", "c"], np.array([0, 0, 2]))
        ['a', 'a', 'c']
    """
    names, codes = np.unique(np.asarray(keys), return_inverse=True)
    ties = csr_array((np.ones(len(codes)), (codes, codes[first])), shape=(len(names), len(names)))
    _, part = connected_components(ties, directed=False)
    _, least = np.unique(part, return_index=True)  # the first name of each
    return [str(name) for name in names[least[part[codes]]]]


def words_in_common(one: str, other: str) -> str:
    """The words that both sentences have, sorted: what a pair says, whichever groups it says it of.

    Empty if they are fewer than half of the words of a sentence: an article or a verb would be all.

    Example:
        >>> words_in_common("Women cannot drive.", "Men cannot drive."), words_in_common("He is bad.", "She drives.")
        ('cannot drive.', '')
    """
    words = [Counter(text.casefold().split()) for text in (one, other)]
    common = words[0] & words[1]
    return " ".join(sorted(common.elements())) if 2 * common.total() >= min(of.total() for of in words) else ""


def named_parts(values: Sequence[str]) -> NDArray[np.str_]:
    """Names of parts as fairhead has them; others stay as they are.

    Example:
        >>> named_parts(["Training", "validation", "fold 3"]).tolist()
        ['train', 'val', 'fold 3']
    """
    return np.array([_PART_NAMES.get(value.strip().lower(), value) for value in values], dtype=np.str_)
