"""Sections as a newcomer adds one, and reports made of dataclasses, of JSON and of both."""

import json
import re
import sys
from dataclasses import fields
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parsed_page import Page
from report_example import ablation, audit, comparison, example, headmap, methods, report

import fairhead
from fairhead.errors import InputError
from fairhead.report import Report, Sentence, render, write
from fairhead.report.form import plain
from fairhead.report.sections import SECTIONS, section_class
from fairhead.report.sections.audited import Audited
from fairhead.report.sections.changes import Compared
from fairhead.report.sections.headmap import Headmap
from fairhead.report.sections.plain import PlainTable, PlainTables, Text
from fairhead.report.wording import MINUS
from fairhead.store import json_text

PAGE = Path(__file__).parents[3] / "CONTRIBUTING.md"
GIVEN = {"kind": "group_sizes", "title": "Groups", "sizes": [{"group": "<f>", "n": 1200}, {"group": "m", "n": 80}]}


@pytest.fixture
def group_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the worked example, where Python finds it."""
    (code,) = re.findall(r"<!-- example: group_sizes.py -->\n```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "group_sizes_example.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield import_module("group_sizes_example")
    sys.modules.pop("group_sizes_example", None)


@pytest.fixture(params=["line", "entry point"])
def registered(request: pytest.FixtureRequest, group_sizes: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, named as the page says: in the registry, or by another package."""
    path = "group_sizes_example:GroupSizes"
    if request.param == "line":
        monkeypatch.setitem(SECTIONS, "group_sizes", path)
    else:
        points = {"fairhead.sections": [EntryPoint("group_sizes", path, "fairhead.sections")]}
        monkeypatch.setattr(fairhead, "entry_points", lambda group: points[group])
    return group_sizes


def test_the_section_of_the_worked_example_is_drawn_from_json_and_from_objects(registered: Any) -> None:
    page = Page(render(report([GIVEN])))
    assert [(a["value"], a["max"]) for a in page.all("meter")] == [("1200", "1200"), ("80", "1200")]
    assert "<f>" in [data for _, data in page.texts]
    made = registered.GroupSizes(
        title="Groups", sizes=[registered.GroupSize(group="<f>", n=1200), registered.GroupSize(group="m", n=80)]
    )
    assert render(report([made])) == render(report([GIVEN]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": []}, r"report.sections\[0\].sizes is empty"),
        ({"sizes": [{"group": "f", "n": -1}]}, r"sections\[0\].sizes\[0\].n is -1; expected a number of at least 0"),
        ({"sizes": [{"group": 3, "n": 1}]}, r"sizes\[0\].group is an integer; expected a string"),
        ({"sizes": {"f": 1}}, "sizes is a dict; expected a list"),
    ],
)
def test_the_section_of_the_worked_example_checks_itself(registered: Any, change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        render(report([GIVEN | change]))


def test_a_kind_that_nobody_registered_is_refused() -> None:
    with pytest.raises(InputError, match="kind is 'group_sizes'; expected one of audit, comparison"):
        render(report([GIVEN]))


@pytest.mark.parametrize("kind", SECTIONS)
def test_every_kind_leads_to_the_class_of_that_kind(kind: str) -> None:
    found = section_class(kind)
    assert found.kind == kind
    assert {"title", "text"} <= {field.name for field in fields(found)}


def test_a_report_of_objects_is_the_report_of_its_json(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = (audit(["x", "y"], "g", gap, rng) for gap in (0.3, 0.1))
    grid = headmap(2, 3, rng, [[1, 2]])
    made = Report(
        title="T",
        question="Q",
        verdict=[Sentence("Even.", "good")],
        sections=[
            Text(title="Data", text="All of it."),
            Audited(title="A", name="a", audit=a),
            Compared(title="Both", a_name="a", b_name="b", comparison=comparison(a, b)),
            Headmap(title="M", measure="m", unit="SD", values=np.array(grid["values"]), selected=[(1, 2)]),
            ablation(rng),
        ],
        provenance={"seed": np.int64(3)},
    )
    write(made, tmp_path / "r.html")
    twin = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert twin == made.to_dict()
    assert list(twin) == ["schema", "title", "question", "verdict", "sections", "provenance"]
    assert twin["sections"][1] == {
        "kind": "audit",
        "title": "A",
        "name": "a",
        "audit": json.loads(json_text(a.to_dict())),
    }
    assert "low" not in twin["sections"][3], "what was not given is not written"
    assert (tmp_path / "r.html").read_text("utf-8") == render(made) == render(twin) == render(Report.from_dict(twin))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verdict": [Sentence("x", "god")]}, r"report.verdict\[0\].tone is 'god'.*Did you mean 'good'"),
        ({"title": 3}, "report.title is an integer; expected a string"),
        ({"sections": [Text(title="T", text=None)]}, r"sections\[0\].text is None; expected a string"),
        ({"sections": [Audited(title="T", name="x", audit={})]}, r"sections\[0\].audit has no 'schema'"),
        (
            {"sections": [Headmap(title="T", measure="", unit="", values=[[1.0]], selected=[(0, 1)])]},
            "outside 1 layers",
        ),
        ({"provenance": {"when": {1}}}, "provenance.when is a set"),
    ],
)
def test_objects_are_checked_as_json_is(change: dict[str, Any], message: str) -> None:
    whole = {"title": "T", "question": "Q", "verdict": [], "sections": [], "provenance": {}}
    with pytest.raises(InputError, match=message):
        render(Report(**whole | change))


def test_a_page_without_a_question_and_a_verdict_goes_without_both() -> None:
    table = PlainTables(
        title="Reported", tables=[PlainTable(caption="c", columns=["method", "EOd"], rows=[["<a>", "1"]])]
    )
    page = Page(render(report([table], question="", verdict=[])))
    assert not {"Question", "Findings"} & {data for _, data in page.texts}
    assert "<a>" in [data for _, data in page.texts]
    assert "How to read the figures" not in page.visible()
    assert "Findings" in Page(render(example())).visible()


def test_pictures_come_with_the_page_and_their_maps_are_grids() -> None:
    pixel = "data:image/png;base64,iVBORw0KGgo="
    found = {"model": "<dam>", "patches": [[0.5, 0.1], [0.2, 0.1]], "elsewhere": 0.1}
    shown = {"title": "id 3", "picture": pixel, "maps": [found]}

    def page(**change: Any) -> Page:
        return Page(render(report([{"kind": "attention_maps", "title": "M", "pictures": [shown | change]}])))

    assert [a["fill-opacity"] for a in page().all("rect")] == ["0.00", "0.68", "0.51", "0.68"]
    assert [a["href"] for a in page().all("image")] == [a["src"] for a in page().all("img")] == [pixel]
    assert "What <dam> looks at" in [data for _, data in page().texts]
    with pytest.raises(InputError, match=r"pictures\[0\].picture is not a picture"):
        page(picture="https://example.org/x.png")
    with pytest.raises(InputError, match=r"maps\[0\].patches is not a grid"):
        page(maps=[found | {"patches": [[0.5], [0.1, 0.2]]}])


def test_a_bench_block_is_markdown_too() -> None:
    given = methods()["sections"][0]
    given["methods"][1]["method"] = "a | b"
    block = section_class("bench").from_json(plain(given, "block"), "block")
    parts = block.markdown()
    figures, differences, search = (part.splitlines() for part in parts if part.startswith("| method"))
    assert figures[0] == "| method | told | seeds | accuracy | EOd | s | Wh | MiB |"
    accuracy, gap = "89.0 ± 1.1 (87.0 to 91.0)", "**5.0 ± 1.1** (3.0 to 7.0)"
    assert figures[3].startswith(rf"| a \| b | 0 | 3 (1 failed) | {accuracy} | {gap} | 61 | not known |")
    assert figures[4].startswith("| dro (trained with groups) | 5 |")
    assert figures[5] == "| broken | 0 | 0 (1 failed) | – | – | – | – | – |"
    assert differences[2] == rf"| a \| b | 0 | – | {MINUS}15.0 ({MINUS}21.0 to {MINUS}9.0), p 0.013, detectable 7.0 |"
    assert [len(table) for table in (figures, differences, search)] == [6, 4, 5]
    assert parts[-1] == "- broken, seed 7: the loss is not finite"


def test_one_of_several_maps_is_shown_and_a_click_opens_a_card() -> None:
    rng = np.random.default_rng(0)
    marked = {"confirmed": [[1, 2]], "cards": [[0, 0], [1, 2]], "p_adjusted": [[0.5, 0.01, 0.2], [0.3, 0.2, 0.001]]}
    maps = [headmap(2, 3, rng, [[1, 2], [0, 1]], title=title, **marked) for title in ("Gap <of>", "Effect")]
    tabs = {"kind": "headmaps", "title": "Maps", "names": ["Gap", "Effect"], "maps": maps}
    card = {"head": [0, 0], "facts": []}
    cards = {"kind": "top_heads", "title": "Heads", "poles": ["a", "b"], "heads": [], "others": [card]}
    page = render(report([tabs, cards]))
    assert page.count('type="radio"') == 2
    assert page.count(" checked") == 1
    assert "<h3>Gap &lt;of&gt;</h3>" in page
    assert page.count('href="#card-L0H0"') == 2
    assert page.count('<div class="head-card other" id="card-L0H0">') == 1
    assert page.count(' faded"') == 2 * 4
    assert page.count('class="selected unconfirmed" rx') == 2  # L0H1, in either map
    assert "<script" not in page
    with pytest.raises(InputError, match="1 names for 2 maps"):
        render(report([{**tabs, "names": ["Gap"]}]))
