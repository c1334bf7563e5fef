"""Settings are held to the types and ranges that they declare."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairhead.errors import InputError
from fairhead.settings import (
    Count,
    NotNegative,
    Positive,
    PositiveShare,
    Range,
    Share,
    WholeNumber,
    check_config,
    check_settings,
)


@dataclass(frozen=True)
class Settings:
    kind: ClassVar[str] = "no setting"

    count: Count = 1
    whole: WholeNumber = 0
    positive: Positive = 1.0
    not_negative: NotNegative = 0.0
    share: Share = 0.5
    positive_share: PositiveShare = 0.5
    maybe: Count | None = None
    form: Literal["a", "b"] = "a"
    flag: bool = True
    name: str = ""
    several: tuple[Annotated[int, Range(2)], ...] = (2,)
    build: Callable[[], int] | None = None
    names: Sequence[str] = ()
    bins: Sequence[int] = ()
    shares: Mapping[str, float] | None = None
    path: str | PathLike[str] = ""
    one_or_more: Sequence[Share] | Share = 0.1


def holds(**values):
    try:
        check_settings(Settings, values, "it")
    except InputError:
        return False
    return True


@pytest.mark.parametrize(
    "values",
    [
        {"count": 1},
        {"count": np.int64(3)},
        {"whole": 0},
        {"positive": 1e-9},
        {"positive": 3},
        {"positive": np.float32(0.5)},
        {"not_negative": 0},
        {"share": 0},
        {"share": 1},
        {"positive_share": 1},
        {"maybe": None},
        {"maybe": 2},
        {"form": "b"},
        {"flag": False},
        {"name": "x"},
        {"several": [2, 3]},
        {"build": None},
        {"build": lambda: 1},
        {"names": "one"},
        {"names": np.array(["a", "b"])},
        {"bins": range(3)},
        {"shares": {"train": 1}},
        {"path": Path("x")},
        {"not_declared": object()},
    ],
)
def test_what_is_within_its_range_is_taken(values):
    check_settings(Settings, values, "it")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "it: count is 0; expected a whole number of at least 1"),
        ({"count": 1.0}, "count is 1.0; expected a whole number"),
        ({"count": True}, "count is True; expected a whole number"),
        ({"whole": -1}, "whole is -1; expected a whole number of at least 0"),
        ({"positive": 0}, "positive is 0; expected a number above 0"),
        ({"positive": float("nan")}, "positive is nan; expected a number above 0"),
        ({"positive": float("inf")}, "positive is inf; expected a number above 0, at most 1e30"),
        ({"positive": 1e300}, r"positive is 1e\+300; expected a number above 0, at most 1e30"),  # not in 32 bits
        ({"not_negative": "0.5"}, "not_negative is '0.5'; expected a number of at least 0"),
        ({"share": 1.01}, "share is 1.01; expected a number from 0 to 1"),
        ({"positive_share": 0}, "expected a number above 0, up to 1"),
        ({"maybe": 0}, "maybe is 0; expected a whole number of at least 1 or nothing"),
        ({"form": "c"}, "form is 'c'; expected a or b"),
        ({"flag": 1}, "flag is 1; expected true or false"),
        ({"name": 3}, "name is 3; expected text"),
        ({"several": [2, 1]}, "expected a list, each entry a whole number of at least 2"),
        ({"several": []}, "several is"),
        ({"several": 2}, "several is 2; expected a list"),
        ({"build": 3}, "build is 3; expected a function or nothing"),
        ({"names": None}, "names is None; expected a list, each entry text"),
        ({"names": ["a", 1]}, "expected a list, each entry text"),
        ({"bins": "12"}, "bins is '12'; expected a list, each entry a whole number"),
        ({"bins": 5}, "bins is 5; expected a list"),
        ({"shares": {"train": "all"}}, "expected names, each with a number or nothing"),
        ({"path": 3}, "path is 3; expected text or a path"),
        ({"one_or_more": 1.5}, "one_or_more is 1.5; expected a number from 0 to 1 or a list of those"),
        ({"name": ["a" * 99] * 3}, "name is a list; expected text"),
    ],
)
def test_what_is_not_is_refused_with_what_was_expected(values, message):
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        check_settings(Settings, values, "it")


@given(st.floats(-1e30, 1e30))
def test_ranges_are_what_they_say(value):
    assert holds(share=value) == (0 <= value <= 1)
    assert holds(positive_share=value) == (0 < value <= 1)
    assert holds(positive=value) == (value > 0)
    assert holds(not_negative=value) == (value >= 0)


def test_a_whole_configuration_is_checked_by_its_name():
    check_config(Settings())
    check_config(object())
    with pytest.raises(InputError, match="Settings: share is 2"):
        check_config(Settings(share=2))
