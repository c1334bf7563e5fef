"""Figures that the product computes today, held fixed: see `figures.py`; `--write-golden` writes them anew."""

import json

import cases_language
import cases_tables
import pytest
from figures import EXPECTED, NUMPY, check, differences

CASES = {**cases_tables.CASES, **cases_language.CASES}


@pytest.mark.parametrize("name", CASES)
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


@pytest.mark.parametrize("name", CASES)
def test_a_changed_figure_is_seen(name):
    """A golden holds numbers, and each that is moved by a hundredth is found where it stands."""
    golden = json.loads((EXPECTED / f"{name}.json").read_text(encoding="utf-8"))
    leaves = [(path, value) for path, value in _leaves(golden) if isinstance(value, float) and abs(value) > 0.05]
    assert len(leaves) >= 5
    assert not list(differences(golden, golden, NUMPY))
    for path, value in leaves[:: max(1, len(leaves) // 50)]:
        changed = json.loads(json.dumps(golden))
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value * 1.01
        assert len(list(differences(golden, changed, CASES[name].tolerance))) == 1, path
