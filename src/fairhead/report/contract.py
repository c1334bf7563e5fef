"""What a report is made of: `checked` turns a report dict into plain JSON values or says what is wrong with it."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from fairhead.audit.results import AUDIT_SCHEMA, COMPARISON_SCHEMA
from fairhead.errors import InputError, did_you_mean

SCHEMA = "fairhead.report/1"
# How a change is written, and what may be said of it.
CHANGE_UNITS = ("share", "number", "ratio")
CHANGE_OUTCOMES = ("better", "worse", "changed", "cannot be told apart", "undefined")
TONES = ("good", "bad", "unclear", "note")


def checked(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `report` in plain JSON values, after checking it against `fairhead.report/1`.

    Example:
        >>> empty = {"schema": SCHEMA, "title": "T", "question": "Q", "verdict": [], "sections": [], "provenance": {}}
        >>> checked(empty) == empty
        True
        >>> checked({**empty, "sections": [{"kind": "adit", "title": "A"}]})
        Traceback (most recent call last):
        fairhead.errors.InputError: report.sections[0].kind is 'adit'; expected one of audit, comparison, headmap, \
ablation, text, curve, top_heads, changes, spillover, attention_gap. Did you mean 'audit'?
    """
    plain = _plain(report, "report")
    if not isinstance(plain, dict):
        raise InputError(f"report is {_kind_of(report)}; expected a dict with schema {SCHEMA!r}")
    _schema(plain, "report", SCHEMA)
    for key in ("title", "question"):
        _take(plain, "report", key, str)
    for i, sentence in enumerate(_take(plain, "report", "verdict", list)):
        where = f"report.verdict[{i}]"
        _take(sentence, where, "text", str)
        _one_of(_take(sentence, where, "tone", str), f"{where}.tone", TONES)
    for i, section in enumerate(_take(plain, "report", "sections", list)):
        where = f"report.sections[{i}]"
        kind = _one_of(_take(section, where, "kind", str), f"{where}.kind", tuple(_SECTIONS))
        _take(section, where, "title", str)
        _take(section, where, "text", str, required=kind == "text")
        _SECTIONS[kind](section, where)
    _take(plain, "report", "provenance", dict)
    return plain


def _plain(value: Any, where: str) -> Any:
    """Copy into dicts, lists, strings, finite numbers, booleans and None; refuse everything else by its place."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, str):
        # A lone surrogate, left by a reader of broken text, could not be written to a file.
        return value.encode("utf-8", "replace").decode("utf-8")
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if not isfinite(value):
            raise InputError(f"{where} is {value}, which JSON cannot hold; use None for a value that is undefined")
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InputError(f"{where} has the key {key!r}, which is {_kind_of(key)}; expected a string")
        return {_plain(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise InputError(f"{where} is {_kind_of(value)}; expected JSON values (dict, list, string, number, boolean, None)")


def _kind_of(value: Any) -> str:
    names = {dict: "a dict", list: "a list", str: "a string", float: "a number", int: "an integer", bool: "a boolean"}
    return "None" if value is None else names.get(type(value), f"a {type(value).__name__}")


def _take(holder: Any, where: str, key: str, kind: type, required: bool = True, nullable: bool = False) -> Any:
    """Return `holder[key]` after checking that it is there and of the right kind (float admits integers)."""
    if not isinstance(holder, dict):
        raise InputError(f"{where} is {_kind_of(holder)}; expected a dict with {key!r}")
    if key not in holder:
        if not required:
            return None
        raise InputError(f"{where} has no {key!r}; add it.{did_you_mean(key, list(holder))}")
    value = holder[key]
    if value is None and (nullable or not required):
        return None
    admitted = (int, float) if kind is float else kind
    if not isinstance(value, admitted) or (kind in (int, float) and isinstance(value, bool)):
        raise InputError(f"{where}.{key} is {_kind_of(value)}; expected {_kind_of(kind())}")
    return value


def _one_of(value: str, where: str, known: Sequence[str]) -> str:
    if value not in known:
        raise InputError(
            f"{where} is {value!r}; expected one of {', '.join(known)}.{did_you_mean(value, tuple(known))}"
        )
    return value


def _schema(holder: Any, where: str, expected: str) -> None:
    found = _take(holder, where, "schema", str)
    if found != expected:
        raise InputError(f"{where}.schema is {found!r}; this version of fairhead reads {expected!r}")


def _numbers(holder: Any, where: str, *keys: str, nullable: bool = True) -> None:
    for key in keys:
        _take(holder, where, key, float, nullable=nullable)


def _estimate(estimate: Any, where: str) -> None:
    _take(estimate, where, "metric", str)
    _take(estimate, where, "group_by", str, nullable=True)
    _numbers(estimate, where, "value", "low", "high", "ideal")
    _take(estimate, where, "mde", float, required=False)
    _take(estimate, where, "n", int)
    _take(estimate, where, "groups", list, required=False)
    _take(estimate, where, "detail", dict, required=False)
    _why_undefined(estimate, where)


def _why_undefined(figure: Any, where: str) -> None:
    reason = _take(figure, where, "undefined", str, required=False)
    if figure["value"] is None and not reason:
        raise InputError(f"{where} has no value and no reason; say in 'undefined' why it is undefined")


def _audit_result(audit: Any, where: str) -> None:
    _schema(audit, where, AUDIT_SCHEMA)
    _take(audit, where, "provenance", dict)
    for i, estimate in enumerate(_take(audit, where, "estimates", list)):
        _estimate(estimate, f"{where}.estimates[{i}]")
    for i, row in enumerate(_take(audit, where, "by_group", list)):
        at = f"{where}.by_group[{i}]"
        for key in ("group_by", "group"):
            _take(row, at, key, str)
        _take(row, at, "n", int)
        for name, rate in _take(row, at, "rates", dict).items():
            _estimate(rate, f"{at}.rates.{name}")


def _audit(section: dict[str, Any], where: str) -> None:
    _take(section, where, "name", str)
    _audit_result(_take(section, where, "audit", dict), f"{where}.audit")


def _comparison(section: dict[str, Any], where: str) -> None:
    for key in ("a_name", "b_name"):
        _take(section, where, key, str)
    comparison = _take(section, where, "comparison", dict)
    where = f"{where}.comparison"
    _schema(comparison, where, COMPARISON_SCHEMA)
    _take(comparison, where, "provenance", dict)
    for i, difference in enumerate(_take(comparison, where, "differences", list)):
        at = f"{where}.differences[{i}]"
        _take(difference, at, "metric", str)
        _take(difference, at, "group_by", str, nullable=True)
        _numbers(difference, at, "a", "b", "value", "low", "high", "p", "p_adjusted")
        for key in ("mde", "ideal"):
            _take(difference, at, key, float, required=False)
        _take(difference, at, "n", int)
        _why_undefined(difference, at)
    for side in ("a", "b"):
        _audit_result(_take(comparison, where, side, dict), f"{where}.{side}")


def _headmap(section: dict[str, Any], where: str) -> None:
    for key in ("measure", "unit"):
        _take(section, where, key, str)
    layers, heads = _grid_shape(_take(section, where, "values", list), f"{where}.values")
    for key in ("low", "high", "p_adjusted"):
        grid = _take(section, where, key, list, required=False)
        if grid is not None and _grid_shape(grid, f"{where}.{key}") != (layers, heads):
            raise InputError(f"{where}.{key} is not {layers} layers × {heads} heads, as 'values' is")
    for i, pair in enumerate(_heads(section, where)):
        if pair[0] >= layers or pair[1] >= heads:
            raise InputError(f"{where}.selected[{i}] is {pair}, outside {layers} layers × {heads} heads (from 0)")


def _grid_shape(grid: list[Any], where: str) -> tuple[int, int]:
    lengths = {len(row) if isinstance(row, list) else -1 for row in grid}
    if len(lengths) != 1 or min(lengths) < 1:
        raise InputError(f"{where} is not a grid; expected one list a layer, all with the same number (≥ 1) of heads")
    for layer, row in enumerate(grid):
        for head, value in enumerate(row):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise InputError(f"{where}[{layer}][{head}] is {_kind_of(value)}; expected a number or None")
    return len(grid), lengths.pop()


def _heads(section: dict[str, Any], where: str) -> list[list[int]]:
    pairs = _take(section, where, "selected", list)
    for i, pair in enumerate(pairs):
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(k) is int and k >= 0 for k in pair)):
            raise InputError(f"{where}.selected[{i}] is {pair!r}; expected [layer, head], both counted from 0")
    return pairs


def _ablation(section: dict[str, Any], where: str) -> None:
    _take(section, where, "metric", str)
    _heads(section, where)
    _numbers(section, where, "before", "after", "effect", nullable=False)
    _numbers(section, where, "low", "high", "p", "percentile")
    _take(section, where, "p_controls", float, required=False)
    if section["percentile"] is not None and not 0 <= section["percentile"] <= 1:
        raise InputError(
            f"{where}.percentile is {section['percentile']}; expected a fraction of the controls, from 0 to 1"
        )
    _take(section, where, "exhaustive", bool)
    for i, control in enumerate(_take(section, where, "controls", list)):
        if isinstance(control, bool) or not isinstance(control, int | float):
            raise InputError(f"{where}.controls[{i}] is {_kind_of(control)}; expected the effect of one head set")
    accuracy = _take(section, where, "accuracy_effect", dict, required=False)
    if accuracy is not None:
        _numbers(accuracy, f"{where}.accuracy_effect", "value", nullable=False)
        _numbers(accuracy, f"{where}.accuracy_effect", "low", "high")


def _curve(section: dict[str, Any], where: str) -> None:
    for i, panel in enumerate(_take(section, where, "panels", list)):
        at = f"{where}.panels[{i}]"
        _take(panel, at, "metric", str)
        for j, point in enumerate(_take(panel, at, "points", list)):
            _take(point, f"{at}.points[{j}]", "name", str)
            _numbers(point, f"{at}.points[{j}]", "value")


_PICTURES = ("data:image/jpeg;base64,", "data:image/png;base64,")


def _top_heads(section: dict[str, Any], where: str) -> None:
    _take(section, where, "poles", list)
    for i, head in enumerate(_take(section, where, "heads", list)):
        at = f"{where}.heads[{i}]"
        pair = _take(head, at, "head", list)
        if len(pair) != 2 or not all(type(k) is int and k >= 0 for k in pair):
            raise InputError(f"{at}.head is {pair!r}; expected [layer, head], both counted from 0")
        for j, fact in enumerate(_take(head, at, "facts", list)):
            for key in ("name", "figure", "note"):
                _take(fact, f"{at}.facts[{j}]", key, str)
        for j, text in enumerate(_take(head, at, "texts", list, required=False) or []):
            _take(text, f"{at}.texts[{j}]", "text", str)
            _numbers(text, f"{at}.texts[{j}]", "share", nullable=False)
            _take(text, f"{at}.texts[{j}]", "attribute", bool)
        for end in ("most", "least"):
            for j, picture in enumerate(_take(head, at, end, list, required=False) or []):
                if not isinstance(picture, str) or not picture.startswith(_PICTURES):
                    raise InputError(f"{at}.{end}[{j}] is not a picture; expected a data: address with JPEG or PNG")


def _change(change: Any, where: str) -> None:
    _numbers(change, where, "before", "after", "value", "low", "high", "p", "p_adjusted", "mde")
    _take(change, where, "n", int)
    _one_of(_take(change, where, "unit", str), f"{where}.unit", CHANGE_UNITS)
    word = _one_of(_take(change, where, "outcome", str), f"{where}.outcome", CHANGE_OUTCOMES)
    if (word == "undefined") != (change["value"] is None):
        raise InputError(f"{where}.outcome is {word!r}; expected 'undefined' where there is no value and only there")
    _why_undefined(change, where)


def _changes(section: dict[str, Any], where: str) -> None:
    _take(section, where, "base", str)
    _numbers(section, where, "level", nullable=False)
    for name in _take(section, where, "definitions", dict, required=False) or {}:
        _take(section["definitions"], f"{where}.definitions", name, str)
    for i, panel in enumerate(_take(section, where, "panels", list)):
        at = f"{where}.panels[{i}]"
        _take(panel, at, "caption", str)
        for j, change in enumerate(_take(panel, at, "changes", list)):
            _take(change, f"{at}.changes[{j}]", "name", str)
            for key in ("note", "better"):
                _take(change, f"{at}.changes[{j}]", key, str, required=False)
            _change(change, f"{at}.changes[{j}]")


def _spillover(section: dict[str, Any], where: str) -> None:
    columns = _take(section, where, "columns", list)
    for i, row in enumerate(_take(section, where, "rows", list)):
        at = f"{where}.rows[{i}]"
        for key in ("benchmark", "category"):
            _take(row, at, key, str)
        cells = _take(row, at, "cells", list)
        if len(cells) != len(columns):
            raise InputError(f"{at} has {len(cells)} cells; expected one a column, {len(columns)}")
        for j, cell in enumerate(cells):
            _take(cell, f"{at}.cells[{j}]", "targeted", bool)
            _take(cell, f"{at}.cells[{j}]", "direction", str, nullable=True)
            _change(cell, f"{at}.cells[{j}]")


def _attention_gap(section: dict[str, Any], where: str) -> None:
    for i, panel in enumerate(_take(section, where, "panels", list)):
        at = f"{where}.panels[{i}]"
        for key in ("caption", "unit"):
            _take(panel, at, key, str)
        _take(panel, at, "ideal", float, nullable=True)
        for j, point in enumerate(_take(panel, at, "points", list)):
            _take(point, f"{at}.points[{j}]", "name", str)
            _numbers(point, f"{at}.points[{j}]", "value", nullable=False)
            for key in ("low", "high"):
                _take(point, f"{at}.points[{j}]", key, float, required=False)
            _take(point, f"{at}.points[{j}]", "n", int, required=False)
    for i, pair in enumerate(_take(section, where, "pairs", list)):
        at = f"{where}.pairs[{i}]"
        lengths = {len(_take(pair, at, key, list)) for key in ("first", "second", "changed", "gaps")}
        if len(lengths) != 1:
            raise InputError(f"{at} has lists of {sorted(lengths)} entries; expected one entry a token in each")
        if len(_take(pair, at, "texts", list)) != 2:
            raise InputError(f"{at}.texts has {len(pair['texts'])} entries; expected the two sentences")


def _text(section: dict[str, Any], where: str) -> None:
    """Nothing beyond the title and text that every section has."""


_SECTIONS: Mapping[str, Callable[[dict[str, Any], str], None]] = {
    "audit": _audit,
    "comparison": _comparison,
    "headmap": _headmap,
    "ablation": _ablation,
    "text": _text,
    "curve": _curve,
    "top_heads": _top_heads,
    "changes": _changes,
    "spillover": _spillover,
    "attention_gap": _attention_gap,
}
