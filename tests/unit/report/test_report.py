"""The page as a browser's parser sees it: escaped, self-contained, in order, with its twin beside it."""

import json
import os
import re
from base64 import b64encode
from copy import deepcopy
from hashlib import sha256
from importlib.resources import files
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from parsed_page import Page
from report_example import HOSTILE, ablation, audit, example, headmap, many, methods, odd, report, with_strings

import fairhead.audit
from fairhead.errors import InputError
from fairhead.records import Column, Records
from fairhead.report import render, write
from fairhead.report.wording import metric_name, scale_of

REPORTS = {"example": example(), "many": many(), "odd": odd(), "methods": methods()}


@pytest.fixture(params=REPORTS, scope="module")
def page(request: pytest.FixtureRequest) -> Page:
    return Page(render(REPORTS[request.param]))


def test_it_needs_nothing_from_outside(page: Page) -> None:
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & {t for t, _ in page.elements}
    for _, attributes in page.elements:
        assert not {"src", "srcset", "xlink:href", "action"} & attributes.keys()
        assert (attributes.get("href") or "#").startswith("#")
        assert "url(" not in (attributes.get("style") or "")
    style = "".join(data for tag, data in page.texts if tag == "style")
    assert "url(" not in style
    assert "@import" not in style
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    # The one script that runs is the one whose hash the policy names.
    scripts = [data for tag, data in page.texts if tag == "script"]
    hashes = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    assert re.findall(r"script-src 'sha256-([^']+)';", policy) == hashes
    assert all("://" not in script and "innerHTML" not in script and "eval" not in script for script in scripts)


def test_it_can_be_walked_by_a_screen_reader(page: Page) -> None:
    assert page.all("html")[0]["lang"] == "en"
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all("scope" in attributes for attributes in page.all("th"))
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in ids
        if attributes.get("href"):
            assert str(attributes["href"]).removeprefix("#") in ids
    for i, (tag, attributes) in enumerate(page.elements):
        if tag == "svg" and attributes.get("role") == "img":
            assert page.elements[i + 1][0] == "title"
        elif tag == "svg" and "y" not in attributes:  # an inner drawing has its place in an outer one
            assert attributes.get("aria-hidden") == "true"


def test_no_figure_is_left_raw(page: Page) -> None:
    """No nan, None or unrounded float reaches the reader."""
    assert not re.search(r"\bnan\b|\binf\b|\bNone\b|\d\.\d{7,}|\bMarkup\b|\{\{|\}\}", page.visible())
    for _, attributes in page.elements:
        assert not any(re.search(r"\bnan\b|\binf\b|None", value or "") for value in attributes.values())


@pytest.mark.parametrize("build", [example, many, odd, methods])
def test_strings_from_data_change_nothing_but_text(build: Any) -> None:
    """Hostile strings everywhere give the elements and attributes that harmless ones give, one for one."""
    hostile, harmless = (Page(render(with_strings(build(), text))) for text in (HOSTILE, "harmless"))
    assert [(tag, list(a)) for tag, a in hostile.elements] == [(tag, list(a)) for tag, a in harmless.elements]
    assert not any(name.startswith("on") for _, attributes in hostile.elements for name in attributes)
    scripts = [data for tag, data in hostile.texts if tag == "script"]
    assert scripts == [data for tag, data in harmless.texts if tag == "script"], "data never reaches a script"
    assert hostile.comments == []
    assert HOSTILE in hostile.visible()


def test_names_do_not_turn_the_words_around_them() -> None:
    """A right-to-left override in a group's name would else run on to the end of the sentence."""
    shown = render(with_strings(example(), "\u202eegnaro\u2066 עברית"))
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", shown)
    assert r"\u202eegnaro\u2066 עברית" in shown


def test_what_is_empty_has_no_line_in_the_provenance() -> None:
    page = Page(render({**example(), "provenance": {"a_file": {}, "seed": 0, "options": {"level": 0.95}}}))
    entries = [data.strip() for tag, data in page.texts if tag == "dt"]
    assert "a file" not in entries
    assert {"seed", "options", "level"} <= set(entries)


def test_an_audit_of_records_is_shown_whole() -> None:
    """Every figure of the audit's own making, with intersections, scores and a group too small, is on the page."""
    rng = np.random.default_rng(0)
    label, race, sex = rng.integers(0, 2, 900), rng.integers(0, 3, 900), rng.integers(0, 2, 900)
    race[:4] = 3
    scores = np.clip(0.5 + 0.3 * (label - 0.5) + 0.1 * (race - 1) + rng.normal(0, 0.2, 900), 0, 1)
    groups = {"race": Column(race, ("a", "b", "c", "tiny <d>")), "sex": Column(sex, ("f", "m"))}
    records = Records(Column(label, (0, 1)), Column((scores > 0.5).astype(int), (0, 1)), scores, groups)
    made = fairhead.audit.audit(records, intersections=True, n_boot=200)
    section = {"kind": "audit", "title": "A", "name": "m", "audit": made.to_dict()}
    page = Page(render(report([section])))
    seen = [data.strip() for _, data in page.texts]
    for estimate in made.estimates:
        assert metric_name(estimate.metric) in seen
        if estimate.value is None:
            assert any(estimate.undefined in text for text in seen)
        else:
            gap = estimate.ideal == 0 and estimate.group_by is not None
            scale = scale_of(estimate.metric, estimate.value, estimate.low, estimate.high, difference=gap)
            assert scale.write(estimate.value) in seen
    assert {row.group for row in made.by_group} <= set(seen)
    assert "L3H5" not in seen, "an audit has no heads to read"
    assert any("tiny <d> has 4 rows" in text for text in seen), "groups left out of a gap are named"


def test_control_characters_and_lone_surrogates_can_be_written(tmp_path: Any) -> None:
    broken = report([{"kind": "text", "title": "\ud800 \x00 \u202e", "text": "\udcff"}])
    write(broken, tmp_path / "r.html")
    assert Page((tmp_path / "r.html").read_text("utf-8")).all("h1")
    json.loads((tmp_path / "r.json").read_text("utf-8"))


def test_the_twin_holds_what_was_given(tmp_path: Any) -> None:
    given = example()
    write(given, tmp_path / "made" / "report.html")
    twin = json.loads((tmp_path / "made" / "report.json").read_text("utf-8"))
    assert twin == json.loads(json.dumps(given))
    assert (tmp_path / "made" / "report.html").read_text("utf-8") == render(given) == render(twin)
    assert sorted(p.name for p in (tmp_path / "made").iterdir()) == ["report.html", "report.json"]


def test_numpy_figures_are_taken_as_numbers() -> None:
    given = example()
    grid = next(s for s in given["sections"] if s["kind"] == "headmap")
    as_arrays = deepcopy(given)
    for section in as_arrays["sections"]:
        if section["kind"] == "headmap":
            section["values"] = np.array(grid["values"])
            section["selected"] = [(np.int64(layer), np.int64(head)) for layer, head in grid["selected"]]
    assert render(as_arrays) == render(given)


def test_a_failed_write_leaves_the_old_report(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write(example(), tmp_path / "r.html")
    old = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def refuse(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(InputError, match="No space left on device"):
        write(odd(), tmp_path / "r.html")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == old


def test_paths_that_cannot_be_written(tmp_path: Any) -> None:
    with pytest.raises(InputError, match=r"ends in \.html"):
        write(example(), tmp_path / "report.pdf")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        write(example(), tmp_path / "folder.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write(example(), tmp_path / "file" / "report.html")


def _without(key: str) -> dict[str, Any]:
    return {k: v for k, v in report([]).items() if k != key}


def _undefined_without_reason() -> dict[str, Any]:
    found = audit(["a", "b"], "g", 0.1, np.random.default_rng(0)).to_dict()
    found["estimates"][0] |= {"value": None, "undefined": None}
    return {"kind": "audit", "title": "A", "name": "x", "audit": found}


RNG = np.random.default_rng(0)
WRONG = {
    "not a dict": ([1], "report is a list; expected a dict"),
    "missing": (_without("question"), "report has no 'question'"),
    "misspelt": ({**_without("verdict"), "verdikt": []}, "Did you mean 'verdikt'"),
    "schema": (report([], schema="fairhead.report/2"), "reads 'fairhead.report/1'"),
    "tone": (report([], verdict=[{"text": "x", "tone": "god"}]), r"verdict\[0\].tone is 'god'.*Did you mean 'good'"),
    "kind": (report([{"kind": "heatmap", "title": ""}]), "Did you mean 'headmap'"),
    "title": (
        report([{"kind": "text", "title": 3, "text": ""}]),
        r"sections\[0\].title is an integer; expected a string",
    ),
    "text": (report([{"kind": "text", "title": ""}]), "no 'text'"),
    "nan": (report([ablation(RNG, low=float("nan"))]), r"sections\[0\].low is nan.*use None"),
    "set": (report([], provenance={"x": {1}}), "provenance.x is a set; expected JSON values"),
    "key": (report([], provenance={1: 2}), "key 1"),
    "ragged": (report([headmap(1, 2, RNG, [], values=[[1.0], [1.0, 2.0]])]), "values is not a grid"),
    "no layers": (report([headmap(1, 2, RNG, [], values=[])]), "values is not a grid"),
    "words": (report([headmap(1, 2, RNG, [], values=[["a", 1.0]])]), r"values\[0\]\[0\] is a string"),
    "low": (report([headmap(1, 2, RNG, [], low=[[0.0]])]), "low is not 1 layers × 2 heads"),
    "head": (report([headmap(1, 2, RNG, []) | {"selected": [[0, 2]]}]), r"selected\[0\] is \[0, 2\], outside"),
    "pair": (report([headmap(1, 2, RNG, []) | {"selected": [[0, 1.5]]}]), r"expected \[layer, head\]"),
    "percentile": (report([ablation(RNG, percentile=97.5)]), "percentile is 97.5; expected a number from 0 to 1"),
    "control": (report([ablation(RNG, controls=[True])]), r"controls\[0\] is a boolean"),
    "boolean": (report([ablation(RNG, effect=True)]), "effect is a boolean; expected a number"),
    "reason": (report([_undefined_without_reason()]), r"estimates\[0\] has no value and no reason"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    given, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        render(given)


def _luminance(colour: str) -> float:
    """Relative luminance as WCAG 2.2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(a: str, b: str) -> float:
    light, dark = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(mode: str) -> None:
    style = files("fairhead.report").joinpath("templates/style.css").read_text("utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL)[:2]
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", light))
    if mode == "dark":
        colours |= dict(re.findall(r"--([\w-]+): (#\w{6});", dark))
    words = ["ink", "soft", "accent", "better", "worse", "good", "bad", "unclear", "note"]
    pairs = [(word, ground) for word in words for ground in ("paper", "panel")]
    pairs += [("on-pale", f"{sign}{step}") for sign in ("pos", "neg") for step in (1, 2, 3)]
    pairs += [("on-strong", f"{sign}{step}") for sign in ("pos", "neg") for step in (4, 5)] + [("on-pale", "zero")]
    low = {pair: _contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs}
    assert {pair: ratio for pair, ratio in low.items() if ratio < 4.5} == {}
