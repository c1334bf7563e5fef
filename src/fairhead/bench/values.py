"""Values of a YAML file, checked: every error names the place, what was found and what was expected."""

import re
from collections.abc import Sequence
from typing import Any

import yaml

from fairhead.errors import InputError, did_you_mean


def mapping(value: Any, where: str, known: Sequence[str] | None = None, needed: Sequence[str] = ()) -> dict[str, Any]:
    """A mapping with text as keys, all of them known and the needed ones there."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{where} is {_kind(value)}; expected a mapping of names to values")
    for key in value:
        if known is not None and key not in known:
            raise InputError(
                f"{where} has the unknown key {key!r}; known: {', '.join(known)}.{did_you_mean(key, list(known))}"
            )
    for key in needed:
        if key not in value:
            raise InputError(f"{where} has no {key!r}, which it needs.{did_you_mean(key, list(value))}")
    return value


def list_of(value: Any, where: str) -> list[Any]:
    """A list."""
    if not isinstance(value, list | tuple):
        raise InputError(f"{where} is {_kind(value)}; expected a list")
    return list(value)


def text_of(value: Any, where: str) -> str:
    """Text."""
    if not isinstance(value, str):
        raise InputError(f"{where} is {_kind(value)}; expected text")
    return value


def truth_of(value: Any, where: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise InputError(f"{where} is {value!r}; expected true or false")
    return value


def yaml_of(text: str, where: str) -> Any:
    """What a value on the command line stands for; nothing where it is empty.

    Example:
        >>> yaml_of("[2, 3]", "--option counts"), yaml_of("", "--set references")
        ([2, 3], None)
    """
    try:
        return yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        raise InputError(f"{where} is {text!r}, which cannot be read: is a bracket or a quote missing?") from None


def name_of(value: Any, where: str) -> str:
    """Text that can be part of a file name."""
    text = text_of(value, where)
    if not re.fullmatch(r"[\w.+ -]+", text):
        raise InputError(f"{where} is {text!r}; expected letters, digits, spaces and - _ . + only: it names files")
    return text


def whole_numbers(value: Any, where: str) -> tuple[int, ...]:
    """A list of whole numbers from 0, without repeats."""
    numbers = list_of(value, where)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise InputError(f"{where} has {number!r}; expected whole numbers from 0")
    if not numbers:
        raise InputError(f"{where} is empty; at least one is needed")
    return tuple(dict.fromkeys(numbers))


def one_of(value: Any, where: str, known: Sequence[str]) -> str:
    """One of the known words."""
    if value not in known:
        near = did_you_mean(value, list(known)) if isinstance(value, str) else ""
        raise InputError(f"{where} is {value!r}; expected one of {', '.join(known)}.{near}")
    return str(value)


def _kind(value: Any) -> str:
    names = {type(None): "empty", str: "text", int: "a number", float: "a number", list: "a list", dict: "a mapping"}
    return names.get(type(value), f"a {type(value).__name__}")
