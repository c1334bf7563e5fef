"""The page of located heads in a real browser: maps to choose from, cards, and everybody can use it."""

from dataclasses import replace

import pytest
from browsing import chromium, opened_page, violations, width_of
from made_vit import PLANTED, pictures, planted_vit

from fairhead.locate.decompose import Decomposer
from fairhead.locate.directions import classifier_task, concept_from_images
from fairhead.locate.engine import find_dose, locate
from fairhead.locate.gap_question import GapQuestion
from fairhead.locate.head_features import collect
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.passes import RowPasses
from fairhead.locate.rows import Evaluation
from fairhead.report import render

CARD = f"#card-L{PLANTED[0]}H{PLANTED[1]}"


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """With everything that the page can show: both maps, cards, baselines, and the front of edits."""
    model = planted_vit()
    pixels, bright, labels = pictures(240)
    decomposer, task = Decomposer(model, unit=False), classifier_task(model)
    features = collect(decomposer, lambda start: [{"pixel_values": pixels[start:]}], len(pixels))
    rows = Evaluation(labels, task.classes, bright, ("bright", "dark"), "shade")
    concept = concept_from_images(features.output, bright, labels, name="shade", poles=("bright", "dark"))
    passes = RowPasses(decomposer, lambda some: [{"pixel_values": pixels[some]}], task)
    question = GapQuestion(features, rows, task, concept, passes=passes)
    wanted = {"target": 0.5, "target_metric": "DP", "forward": True, "kinds": ("mean",)}
    plan = LocatePlan(n_boot=100, draws=5, count=2, exact=4, **wanted)
    found = locate(question, plan)
    found = replace(found, doses=find_dose(question, found.ranked, plan))
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(replace(found, provenance={"seed": 0}).page()))
    return path.as_uri()


@pytest.fixture
def page(browser, address):
    with opened_page(browser, address) as opened:
        yield opened


def test_one_map_is_shown_at_a_time_with_and_without_scripts(browser, page, address) -> None:
    plain = browser.new_page(java_script_enabled=False)
    plain.goto(address)
    for one in (page, plain):
        maps = one.locator(".pane h3:visible")
        assert maps.all_inner_texts() == ["Each head's contribution to the gap in the evidence for “LABEL_1”"]
        one.get_by_role("radio", name="Effect").check()
        assert maps.all_inner_texts() == ["How much the gap in the evidence for “LABEL_1” shrinks without each head"]
        one.get_by_role("radio", name="Along shade").check()
        assert "separates bright from dark" in maps.all_inner_texts()[0]
    plain.close()


def test_a_click_on_a_head_leads_to_its_card(page) -> None:
    page.locator(f"a[href='{CARD}']:visible").click()
    assert page.url.endswith(CARD)
    assert page.locator(CARD).is_visible()
    assert "AUC" in page.locator(CARD).inner_text()
    other = page.locator("a[href='#card-L0H0']:visible")
    assert not page.locator("#card-L0H0").is_visible(), "cards of heads that were not chosen are shown when asked for"
    other.focus()
    page.keyboard.press("Enter")
    assert page.locator("#card-L0H0").is_visible()


def test_the_front_of_edits_is_drawn_above_its_table(page) -> None:
    names = page.locator("svg.frontier text.name").evaluate_all("every => every.map(one => one.textContent)")
    assert "as it is" in names
    assert sum("(chosen)" in name for name in names) == 1
    rows = page.locator("section", has=page.locator("svg.frontier")).locator("tbody th").all_inner_texts()
    assert set(rows) == set(names) - {"as it is"}


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_no_violation_and_nothing_is_cut_off(page, scheme, width) -> None:
    page.get_by_role("radio", name="Direct contribution" if scheme == "light" else "Effect").check()
    assert violations(page, scheme, width) == []
    assert width_of(page, width) <= width


def test_long_names_are_broken_on_a_phone(page) -> None:
    html = page.content()
    page.set_content(html.replace("shade", "Women_of_colour_in_leadership_positions_in_industry"))
    assert page.get_by_role("radio", name="Along Women_of_colour").is_visible()
    assert width_of(page, 390) <= 390
