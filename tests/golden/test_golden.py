"""Figures that the product computes today, held fixed: see `figures.py`; `--write-golden` writes them anew."""

import functools
import json
import operator

import cases_language
import cases_locate
import cases_real
import cases_tables
import cases_training
import pytest
from figures import EXPECTED, NUMPY, check, differences

MADE = {**cases_tables.CASES, **cases_language.CASES, **cases_locate.CASES, **cases_training.CASES}
CASES = {**MADE, **cases_real.CASES}


def _marks(name):
    return [pytest.mark.real] if name in cases_real.CASES else []


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in CASES])
def test_figures_are_the_golden_ones(name, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    case = CASES[name]
    check(name, case.figures(tmp_path), case.tolerance, request.config.getoption("--write-golden"))


def test_each_golden_has_its_case():
    assert {file.stem for file in EXPECTED.glob("*.json")} == set(CASES)


def _leaves(content, path=()):
    if isinstance(content, dict | list):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from _leaves(value, (*path, key))
    else:
        yield path, content


def _moved(value):
    if isinstance(value, bool) or value is None:
        return not value
    return value + "x" if isinstance(value, str) else value + 1 if isinstance(value, int) else 1.01 * value


@pytest.mark.parametrize("name", CASES)
def test_a_changed_figure_is_seen(name):
    """A golden holds figures, and each that is moved, a number by a hundredth, is found where it stands."""
    golden = json.loads((EXPECTED / f"{name}.json").read_text(encoding="utf-8"))
    changed = json.loads(json.dumps(golden))
    assert not list(differences(golden, changed, NUMPY))
    leaves = [(path, value) for path, value in _leaves(golden) if not isinstance(value, float) or abs(value) > 0.1]
    assert len(leaves) >= 5
    for *path, last in (path for path, _ in leaves[:: max(1, len(leaves) // 20)]):
        place = functools.reduce(operator.getitem, path, changed)
        value, place[last] = place[last], _moved(place[last])
        assert len(list(differences(golden, changed, CASES[name].tolerance))) == 1, (*path, last)
        place[last] = value
