"""The page of an audit in a real browser: nothing is cut off, it prints on few pages, and everybody can use it."""

import re

import numpy as np
import pytest
from browsing import chromium, opened_page, violations, width_of

import fairhead
from fairhead.records import Records
from fairhead.report import write
from fairhead.report.legal_forms import eu_ai_act

RACES = ("African-American", "Asian", "Caucasian", "Hispanic", "Native American", "Other")


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """The page of an audit like that of COMPAS (six races, two of them small; sexes; ages), and a shorter one."""
    rng = np.random.default_rng(0)
    n = 7000
    race = rng.choice(6, n, p=[0.51, 0.005, 0.34, 0.09, 0.003, 0.052])
    sex, age = rng.integers(0, 2, n), rng.integers(0, 3, n)
    label = (rng.random(n) < 0.35 + 0.1 * (race == 0)).astype(int)
    decile = np.clip(np.round(4 + 2 * label + 2.5 * (race == 0) - 0.4 * age + rng.normal(0, 2, n)), 1, 10)
    groups = {
        "race": np.array(RACES)[race],
        "sex": np.array(["Female", "Male"])[sex],
        "age": np.array(["under 25", "25 to under 45", "45 and over"])[age],
    }
    records = Records.from_arrays(label, scores=decile, threshold=5, groups=groups)
    found = []
    for columns in (["race", "sex", "age"], ["sex", "age"]):
        path = tmp_path_factory.mktemp("page") / "audit.html"
        audit = fairhead.audit(records, group_by=columns, intersections=True, n_boot=200)
        found.append(audit.report(path).as_uri())
    return found


@pytest.fixture
def page(browser, addresses):
    with opened_page(browser, addresses[0]) as opened:
        yield opened


@pytest.fixture
def short_page(browser, addresses):
    with opened_page(browser, addresses[1]) as opened:
        yield opened


def test_the_first_screen_holds_the_answer_and_its_picture(page):
    box = page.locator("table.drawn").first.bounding_box()
    assert page.locator(".verdict").bounding_box()["y"] < box["y"]
    assert box["y"] + box["height"] <= 800
    assert page.locator("table.drawn").first.locator("tbody tr").count() == len(RACES)
    assert page.locator("nav a").count() >= 3 + 4 + 2  # columns, crossings, how to read, provenance


def test_on_a_phone_the_picture_begins_on_the_first_screen(page):
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.locator("table.drawn").first.bounding_box()["y"] < 844 - 40


@pytest.mark.parametrize("width", [1280, 1024, 390])
def test_nothing_is_cut_off(page, width):
    assert width_of(page, width) <= width
    if width == 1280:
        wide = "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth).length"
        assert page.evaluate(wide) == 0


def test_it_prints_on_six_pages(page):
    sheets = page.pdf(prefer_css_page_size=True)
    assert 1 < len(re.findall(rb"/Type\s*/Page[^s]", sheets)) <= 6
    assert len(re.findall(rb"/Type\s*/Page[^s]", page.pdf(format="A4"))) <= 6


def groups_shown(table):
    return [text.split("\n")[0] for text in table.locator("tbody tr:visible th").all_inner_texts()]


def test_groups_are_sorted_and_filtered(page):
    table = page.locator("table.drawn").first
    given = groups_shown(table)
    heading = table.get_by_role("button", name="n", exact=True)
    heading.click()
    sizes = [int(cell.get_attribute("data-order")) for cell in table.locator("tbody td:nth-child(2)").all()]
    assert sizes == sorted(sizes, reverse=True)
    assert table.locator("th[aria-sort=descending]").count() == 1
    table.get_by_role("button", name="True positive rate").click()
    assert groups_shown(table)[-1] == "Native American", "what is undefined comes last"
    for _ in range(2):
        table.get_by_role("button", name="True positive rate").click()
    assert groups_shown(table) == given
    page.locator("details.crossed > summary").last.click()
    page.get_by_label("Only groups that hold").last.fill("hispanic")
    for look in ("drawn", "heat"):
        shown = groups_shown(page.locator(f"table.{look}").last)
        assert shown
        assert all(name.startswith("Hispanic") for name in shown)


def test_the_threshold_moves(page):
    page.locator("details.curves > summary").first.click()
    audited = page.locator("table.drawn").first.locator("tbody tr").first
    sweep = page.locator(".sweep").first
    slider, row = sweep.get_by_role("slider"), sweep.locator("tbody tr").first
    assert slider.get_attribute("aria-valuetext") == "5", "it starts where the predictions were made"
    shown = audited.locator("td .value").all_inner_texts()  # selected, TPR, FPR, accuracy, precision
    cells = row.locator("td").all_inner_texts()[1:]  # selected, TPR, FPR, precision, accuracy
    assert cells == [shown[k] for k in (0, 1, 2, 4, 3)]
    slider.press("Home")
    assert row.locator("td").all_inner_texts()[1:4] == ["100.0"] * 3, "from the lowest score on, all are positive"
    slider.press("End")
    assert float(row.locator("td").all_inner_texts()[1]) < float(shown[0])
    small = sweep.locator("tbody tr", has_text="Native American")
    assert "–" in small.locator("td").all_inner_texts(), "too few rows are no rate"


def test_it_is_whole_without_scripts(browser, page, addresses):
    plain = browser.new_page(java_script_enabled=False)
    plain.goto(addresses[0])
    shown, scripted = (one.locator("table.drawn").first.inner_text().split() for one in (plain, page))
    assert shown == scripted
    plain.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_axe_finds_no_violation(short_page, scheme, width):
    assert violations(short_page, scheme, width) == []


def test_a_form_can_be_read_on_a_phone(browser, tmp_path):
    """Of a heading and its entry, the entry is the longer text and needs the larger part of the line."""
    rng = np.random.default_rng(1)
    groups = {"sex": np.array(["Female", "Male"])[rng.integers(0, 2, 400)]}
    records = Records.from_arrays(rng.integers(0, 2, 400), rng.integers(0, 2, 400), groups=groups)
    write(eu_ai_act(fairhead.audit(records, n_boot=200)), tmp_path / "form.html")
    with opened_page(browser, (tmp_path / "form.html").as_uri()) as page:
        assert width_of(page, 390) <= 390
        row = page.locator("table.words tbody tr").first
        heading, entry = (row.locator(cell).bounding_box()["width"] for cell in ("th", "td"))
        assert entry > 1.4 * heading
