"""Random splits depend on keys and seed alone."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairhead.data.splits import split_by_hash
from fairhead.errors import InputError

FRACTIONS = {"train": 0.8, "val": 0.1, "test": 0.1}


@given(st.lists(st.text(max_size=3), min_size=1), st.integers(0, 5), st.randoms())
def test_rows_of_a_key_stay_together_in_any_order(keys, seed, random):
    part = dict(zip(keys, split_by_hash(keys, FRACTIONS, seed).tolist(), strict=True))
    shuffled = random.sample(keys, len(keys))
    assert split_by_hash(shuffled, FRACTIONS, seed).tolist() == [part[k] for k in shuffled]


@given(st.sets(st.integers(), min_size=1, max_size=300), st.integers(0, 5))
def test_distinct_keys_give_the_sizes_asked_for(keys, seed):
    names = [str(k) for k in keys]
    sizes = Counter(split_by_hash(names, FRACTIONS, seed).tolist())
    for part, share in FRACTIONS.items():
        assert abs(sizes[part] - share * len(names)) <= 1


def test_another_seed_is_another_split_and_parts_are_independent():
    keys = [str(i) for i in range(20_000)]
    a, b = (split_by_hash(keys, FRACTIONS, seed) == "test" for seed in (0, 1))
    both = int((a & b).sum())
    # 2 000 in each, 200 expected in both; hypergeometric sd 12.7, so 5 sd.
    assert abs(both - 200) < 64
    assert not np.array_equal(a, b)


@pytest.mark.parametrize("fractions", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": float("nan"), "b": 1.0}])
def test_shares_must_sum_to_one(fractions):
    with pytest.raises(InputError, match="sum to 1"):
        split_by_hash(["x"], fractions)
