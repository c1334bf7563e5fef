"""What a golden holds, and how figures are compared with it.

A golden is what a command wrote as JSON, without what is no figure (`NOT_FIGURES`), and with reasons counted rather
than quoted (`REASONS`). A key or an entry that the golden has must be there and equal; further keys are no
fault.
"""

import atexit
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fairhead.cli import main

EXPECTED = Path(__file__).parent / "expected"

# Where a figure came from, how long it took, and sentences about it.
NOT_FIGURES = frozenset(
    [
        "base_model",
        "choosing_sha256",
        "command",
        "correction",
        "cost",
        "data_path",
        "definition",
        "device",
        "findings",
        "interval",
        "measure",
        "model",
        "model_path",
        "notes",
        "options",
        "origin",
        "path",
        "picture",
        "provenance",
        "schema",
        "seconds",
        "settings",
        "sha256",
        "verdict",
        "version",
        "weights",
    ]
)
# Why there is no figure, or not of everything: that there is a reason matters, or for how many, and not the words.
REASONS = {"undefined", "excluded", "unstable", "note", "left_out", "few"}
# When a key, or a word such as an outcome, is called something else: new name -> the name in the goldens.
RENAMED_KEYS: Mapping[str, str] = {}
RENAMED_WORDS: Mapping[str, str] = {"not significant": "cannot be told apart"}


@dataclass(frozen=True)
class Tolerance:
    """How far two numbers may lie apart; integers, strings and booleans are equal or not."""

    relative: float
    absolute: float


NUMPY = Tolerance(1e-6, 1e-9)
TORCH = Tolerance(1e-4, 1e-6)  # another processor rounds a forward pass differently
HEADS = Tolerance(1e-3, 2e-5)  # a head's part is a small difference of large sums
TRAINED = Tolerance(1e-3, 1e-3)  # training amplifies that


@dataclass(frozen=True)
class Case:
    """A golden: `figures` gets an empty folder to work in and returns JSON-ready content."""

    figures: Callable[[Path], Any]
    tolerance: Tolerance


def scratch() -> Path:
    """A folder that several cases share; gone when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="golden-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def as_json(*arguments: object) -> Any:
    """Run a command that takes `--json` in this process; what it wrote."""
    file = Path("figures.json")
    run(*arguments, "--json", file)
    return json.loads(file.read_text(encoding="utf-8"))


def run(*arguments: object) -> None:
    """Run a command in this process."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        if stop.code:
            pytest.fail(f"{arguments[0]} left with code {stop.code}")


def figures_of(content: Any) -> Any:
    """What a golden keeps of JSON-ready content; floats to twelve digits."""
    if isinstance(content, Mapping):
        named = {RENAMED_KEYS.get(str(key), str(key)): value for key, value in content.items()}
        return {
            key: _counted(value) if key in REASONS else figures_of(value)
            for key, value in named.items()
            if key not in NOT_FIGURES
        }
    if isinstance(content, list | tuple):
        return [figures_of(value) for value in content]
    if isinstance(content, str):
        return RENAMED_WORDS.get(content, content)
    return float(f"{content:.12g}") if isinstance(content, float) else content


def _counted(reasons: Any) -> Any:
    """Whether there is a reason; of several, for how many things."""
    if isinstance(reasons, dict):
        return sum(count if isinstance(count, int) else len(count) for count in reasons.values())
    return len(reasons) if isinstance(reasons, list) else reasons is not None


def differences(expected: Any, found: Any, tolerance: Tolerance, where: str = "") -> Iterator[str]:
    """One line for each place in which `found` is not what the golden says."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key, value in expected.items():
            if key in found:
                yield from differences(value, found[key], tolerance, f"{where}.{key}")
            else:
                yield f"{where}.{key} is not there; there are {', '.join(found)}"
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            yield f"{where} has {len(found)} entries, not {len(expected)}"
        for i, pair in enumerate(zip(expected, found, strict=False)):
            yield from differences(*pair, tolerance, f"{where}[{i}]")
    elif not _equal(expected, found, tolerance):
        yield f"{where} is {found!r}, not {expected!r}"


def _equal(expected: Any, found: Any, tolerance: Tolerance) -> bool:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (expected, found))
    if not numbers or (isinstance(expected, int) and isinstance(found, int)):
        return type(expected) is type(found) and expected == found
    return math.isclose(expected, found, rel_tol=tolerance.relative, abs_tol=tolerance.absolute)


def check(name: str, content: Any, tolerance: Tolerance, write: bool) -> None:
    """Compare with the golden of this name, or write it."""
    file = EXPECTED / f"{name}.json"
    found = figures_of(json.loads(json.dumps(content, allow_nan=False)))
    if write:
        file.write_text(_written(found) + "\n", encoding="utf-8")
        return
    if not file.is_file():
        pytest.fail(f"there is no {file.name}; --write-golden writes it")
    wrong = list(differences(json.loads(file.read_text(encoding="utf-8")), found, tolerance))
    more = f"\n... and {len(wrong) - 20} more" if len(wrong) > 20 else ""
    assert not wrong, f"{name}: {len(wrong)} figures have changed:\n" + "\n".join(wrong[:20]) + more


def _written(content: Any, indent: str = "") -> str:
    """JSON with what fits on one line on one line, so that a changed figure is a changed line."""
    line = json.dumps(content, ensure_ascii=False)
    if len(indent + line) <= 120 or not isinstance(content, dict | list) or not content:
        return line
    deeper = indent + " "
    if isinstance(content, dict):
        entries = [
            f"{json.dumps(key, ensure_ascii=False)}: {_written(value, deeper)}" for key, value in content.items()
        ]
    else:
        entries = [_written(value, deeper) for value in content]
    start, end = "{}" if isinstance(content, dict) else "[]"
    return f"{start}\n{deeper}" + f",\n{deeper}".join(entries) + f"\n{indent}{end}"
