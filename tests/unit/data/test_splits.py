"""Random splits depend on keys and seed alone."""

import shutil
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fairhead.data import dataset, read_labelled
from fairhead.data.splits import shares_of, split_by_hash, split_within
from fairhead.errors import InputError

FRACTIONS = {"train": 0.8, "val": 0.1, "test": 0.1}


@pytest.mark.parametrize("order", [["test", "train", "val"], ["val", "test", "train"]])
def test_the_order_of_the_shares_does_not_matter(order):
    """Commands and grids write them in one order or the other, and must not test on each other's training rows."""
    keys = [f"key {i}" for i in range(40)]
    again = split_by_hash(keys, {part: FRACTIONS[part] for part in order})
    assert again.tolist() == split_by_hash(keys, FRACTIONS).tolist()


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


def test_rows_with_the_same_text_stay_in_one_part(caplog):
    texts = [f"post {i // 2}" for i in range(400)]
    # The 20 last are also there with the other label.
    labels = ["ab"[i // 2 % 2] for i in range(400)]
    data = dataset([*texts, *texts[-20:]], label=[*labels, *("a" if one == "b" else "b" for one in labels[-20:])])
    parts = {}
    for text, part in zip(data.all.inputs, data.split.tolist(), strict=True):
        parts.setdefault(text, set()).add(part)
    assert all(len(found) == 1 for found in parts.values())
    assert 110 <= data.sizes["test"] <= 145
    assert "220 of 420 rows duplicate the input of an earlier row" in caplog.text


def test_rows_of_two_persons_with_the_same_text_stay_in_one_part():
    people = [f"p{i}" for i in range(100)]
    data = dataset([f"post {i // 2}" for i in range(100)], label=["a", "b"] * 50, person=people)
    assert all(data.split[i] == data.split[i + 1] for i in range(0, 100, 2))
    apart = dataset([f"post {i}" for i in range(100)], label=["a", "b"] * 50, person=people)
    assert apart.split.tolist() == split_by_hash(people, shares_of(100)).tolist()


def test_the_same_picture_under_two_names_stays_in_one_part(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(60):
        picture = Image.fromarray(rng.integers(0, 255, (4, 4, 3)).astype("u1"))
        for name in (f"{i}.png", f"{i}-again.png"):
            (tmp_path / f"{'ab'[i % 2]}").mkdir(exist_ok=True)
            picture.save(tmp_path / "ab"[i % 2] / name)
    for where in (tmp_path, shutil.make_archive(str(tmp_path / "zipped"), "zip", tmp_path)):
        data = read_labelled(f"images:{where}")
        part = dict(zip(data.all.ids.tolist(), data.split.tolist(), strict=True))
        assert all(part[name] == part[name.replace(".png", "-again.png")] for name in part if "again" not in name)
        assert {*part.values()} == {"train", "val", "test"}


def test_one_text_that_stands_in_for_features_is_split_by_its_rows():
    data = dataset(["t"] * 100, label=["a", "b"] * 50)
    assert data.sizes == {"train": 56, "val": 14, "test": 30}


def test_rows_that_are_left_out_are_counted(caplog):
    data = dataset(
        {"text": list("abcd"), "y": ["a", "", "b", "a"], "g": ["f", "f", "m", ""]}, label="y", on_error="skip"
    )
    assert len(data) == 3
    assert "1 row is left out, also of training: no value in y" in caplog.text


def test_test_rows_with_the_input_of_a_training_row_are_counted(caplog):
    texts, split = [f"post {i}" for i in range(90)], ["train"] * 60 + ["val"] * 10 + ["test"] * 20
    dataset([*texts[:80], *texts[:10]], label=["a", "b"] * 45, split=split)
    assert "10 of 30 rows outside the training part duplicate a training row: fix the column 'split'" in (caplog.text)
    caplog.clear()
    dataset(texts, label=["a", "b"] * 45, split=split)
    assert not caplog.text


def test_each_class_has_its_share_of_every_part():
    parts = split_within([str(i) for i in range(100)], ["rare"] * 10 + ["common"] * 90)
    assert sorted(parts[:10].tolist()) == ["test", *["train"] * 8, "val"]
    assert parts.tolist().count("test") == 10
