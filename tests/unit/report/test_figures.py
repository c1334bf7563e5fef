"""Figures in words and in drawings: what is written can be read back, what is drawn lies where it should."""

import re
from dataclasses import replace
from math import isclose
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_example import ablation, audit, comparison, estimate, headmap

from fairhead.audit.audit_results import Audit
from fairhead.report.form import plain
from fairhead.report.markup import Axis, Mark, forest
from fairhead.report.sections import Section
from fairhead.report.sections.audited import group_forest, group_heat_map
from fairhead.report.sections.headmap import STEPS, colour_bar, colour_class, control_plot
from fairhead.report.wording import MINUS, THIN_SPACE, Scale, count, is_share, p_value, scale_of
from fairhead.stats import Difference, Estimate, GroupRow

finite = st.floats(-1e6, 1e6).map(lambda x: 0.0 if abs(x) < 1e-6 else x)
shares = st.floats(0, 1)


def made(**values: Any) -> Any:
    """The section of a JSON form."""
    return Section.from_json(plain({"title": "T", **values}, "section"), "section")


def read(text: str) -> float:
    """The number that a reader would take from written text."""
    return float(re.sub(r"[^\d.e-]", "", text.replace(MINUS, "-")))


@given(st.integers(-(10**12), 10**12))
def test_counts_can_be_read_back(n: int) -> None:
    assert read(count(n)) == n


@given(finite, st.sampled_from([1.0, 100.0]), st.integers(0, 6))
def test_numbers_are_rounded_and_nothing_else(value: float, factor: float, digits: int) -> None:
    written = Scale(factor, digits, "").write(value)
    assert abs(read(written) - value * factor) <= 0.5 * 10**-digits * (1 + 1e-6) + 1e-9 * abs(value * factor)
    assert not written.startswith(MINUS) or read(written) < 0, "no minus zero"


@given(st.floats(1e-5, 0.5), shares)
def test_uncertainty_keeps_two_digits(half_width: float, value: float) -> None:
    """Rounding moves neither end of an interval by more than a twentieth of its half-width, or 0.05 points."""
    scale = scale_of("DP", value, value - half_width, value + half_width)
    for end in (value - half_width, value + half_width):
        assert abs(read(scale.number(end)) / 100 - end) <= max(half_width / 20, 0) + 1e-9 or scale.digits == 6


def test_units_follow_from_the_metric() -> None:
    assert scale_of("DP", 0.1234).write(0.1234) == f"12.3{THIN_SPACE}%"
    assert scale_of("DP", 0.1234, difference=True).write(-0.1234) == f"{MINUS}12.3{THIN_SPACE}points"
    assert scale_of("cramers_v", 0.1234).write(0.1234) == "0.123"
    assert is_share("calibration_gap")  # though "ratio" is in its letters
    assert not is_share("impact_ratio")


@pytest.mark.parametrize(("p", "written"), [(0.0, "< 0.001"), (0.00099, "< 0.001"), (0.001, "0.001"), (1.0, "1.00")])
def test_p_values(p: float, written: str) -> None:
    assert p_value(p) == written


@given(st.lists(finite, min_size=1, max_size=20))
def test_an_axis_holds_its_values_in_order(values: list[float]) -> None:
    axis = Axis.over(values)
    assert axis.low <= min(values) <= max(values) <= axis.high
    places = [axis.fraction(v) for v in sorted(values)]
    assert places == sorted(places)
    assert all(0 <= place <= 100 for place in places)
    assert 1 <= len(axis.ticks) <= 12
    assert all(axis.low <= t + 1e-9 * abs(t) and t - 1e-9 * abs(t) <= axis.high for t in axis.ticks)


@given(st.lists(st.tuples(shares, shares, shares), min_size=1, max_size=6))
def test_a_forest_puts_every_row_on_one_axis(triples: list[tuple[float, float, float]]) -> None:
    """Positions read from the drawing are one increasing linear function of the values, the same in all rows."""
    ordered = [sorted(t) for t in triples]
    drawn = forest([Mark(v, low, high, (), "clear", "x") for low, v, high in ordered], Scale(), ideal=0.0)
    points: list[tuple[float, float]] = []
    for (low, value, high), row in zip(ordered, drawn.rows, strict=True):
        points.append((value, float(re.search(r'cx="([\d.]+)%"', row)[1])))  # type: ignore[index]
        ends = re.search(r'x1="([\d.]+)%" x2="([\d.]+)%" y1="0" y2="0"', row)
        assert ends is not None
        points += [(low, float(ends[1])), (high, float(ends[2]))]
        points.append((0.0, float(re.search(r'x1="([\d.]+)%"[^>]*class="ideal"', row)[1])))  # type: ignore[index]
    values, places = np.array(points).T
    if np.ptp(values) > 1e-3:
        slope, start = np.polyfit(values, places, 1)
        assert slope > 0
        np.testing.assert_allclose(places, start + slope * values, atol=0.02)


@given(finite, st.floats(1e-6, 1e6))
def test_colours_know_sign_and_size(value: float, largest: float) -> None:
    look = colour_class(value, max(largest, abs(value)))
    mirror = colour_class(-value, max(largest, abs(value)))
    assert look.translate(str.maketrans("", "", "posneg")) == mirror.translate(str.maketrans("", "", "posneg"))
    assert (look == "zero") == (abs(value) / max(largest, abs(value)) * STEPS < 0.5 - 1e-8) or isclose(
        abs(value) / max(largest, abs(value)) * STEPS, 0.5, abs_tol=1e-7
    )


def test_the_colour_bar_shows_only_colours_that_occur() -> None:
    assert "neg" not in colour_bar(0.0, 1.0)
    assert "pos" not in colour_bar(-1.0, -0.5)
    assert colour_bar(0.0, 0.0).count("<rect") == 1


@pytest.mark.parametrize("controls", [[0.1] * 50, list(np.random.default_rng(0).normal(0, 1, 500)), [0.0] * 30 + [9.0]])
def test_every_control_is_in_the_histogram(controls: list[float]) -> None:
    drawn = control_plot(-2.0, -3.0, -1.0, controls, Scale(), "t")
    assert sum(int(n) for n in re.findall(r"<title>(\d+) of", drawn)) == len(controls)


def test_few_controls_are_dots() -> None:
    assert control_plot(0.0, None, None, [0.0] * 29, Scale(), "t").count('class="bar"') == 29


thousandths = st.integers(-1000, 1000).map(lambda k: k / 1000)


@given(thousandths, thousandths, st.sampled_from([0.0, 1.0]))
def test_better_means_nearer_to_the_ideal(a: float, b: float, ideal: float) -> None:
    d = Difference("m", None, a, b, b - a, 0.1, 0.2, 900, 0.01, ideal=ideal)
    over_the_ideal = min(a, b) < ideal < max(a, b)
    if over_the_ideal:  # the interval is of b - a: it does not say whether |b| is significantly below |a|
        assert d.outcome == "changed"
    elif a != b:
        assert d.outcome == ("better" if abs(b - ideal) < abs(a - ideal) else "worse")


@pytest.mark.parametrize(
    "change",
    [{"p_adjusted": 0.05}, {"low": -0.1}, {"low": 0.0}, {"low": None, "high": None}, {"p": 0.3, "p_adjusted": None}],
)
def test_what_may_be_chance_is_not_called_better(change: dict[str, float]) -> None:
    d = Difference("m", None, 0.5, 0.6, 0.1, 0.05, 0.15, 900, 0.001, 0.01, ideal=1.0)
    assert d.outcome == "better"
    assert replace(d, **change).outcome == "not significant"


def test_without_an_ideal_no_direction_is_claimed() -> None:
    d = Difference("m", None, 0.5, 0.6, 0.1, 0.05, 0.15, 900, 0.001, 0.01, ideal=None)
    assert (d.better_way, d.outcome) == ("", "changed")


def test_every_estimate_is_shown_once_or_listed_as_undefined() -> None:
    rng = np.random.default_rng(0)
    found = audit(["a", "b", "c"], "g", 0.2, rng)
    blocks = made(kind="audit", name="m", audit=found).blocks()
    shown = sum(len(panel.rows) for block in blocks for panel in block.panels)
    listed = sum(len(item.names) for block in blocks for item in block.undefined)
    assert shown == sum(e.value is not None for e in found.estimates)
    assert listed == sum(e.value is None for e in found.estimates) > 0
    assert [block.heading for block in blocks] == ["Overall", "By g"]
    assert blocks[0].groups is None
    for table in (blocks[1].groups, *blocks[1].heat.tables):
        assert [row.name for row in table.rows] == ["a", "b", "c"]


def test_the_heat_map_is_pale_where_a_difference_may_be_chance() -> None:
    """The small group is furthest from the reference by chance; the next one is surely below it."""
    figures = {"large": (0.5, 0.02, 5000), "other": (0.3, 0.02, 5000), "small": (0.8, 0.35, 12)}
    groups = [
        GroupRow(
            group_by="g",
            group=name,
            n=n,
            rates={"TPR": Estimate("TPR", "g", value, value - half, min(1.0, value + half), n, None)},
        )
        for name, (value, half, n) in figures.items()
    ]
    (table,) = group_heat_map(groups, "large").tables
    assert [row.cells[0].look for row in table.rows] == ["zero", "neg5", "zero"]


def test_filled_dots_are_those_whose_interval_leaves_the_ideal_out() -> None:
    found = Audit((estimate("DP", 0.1, 0.02), estimate("EOp", 0.01, 0.02), estimate("EOd", 0.2, ideal=None)), (), {})
    blocks = made(kind="audit", name="m", audit=found).blocks()
    rows = [row for block in blocks for panel in block.panels for row in panel.rows]
    assert ['class="row clear"' in row for row in rows] == [True, False, False]


def test_the_level_of_intervals_is_said() -> None:
    found = Audit((estimate("DP", 0.1),), (), {"audit": {"level": 0.9}})
    assert f"90{THIN_SPACE}%" in made(kind="audit", name="m", audit=found).blocks()[1].columns[0]


def test_a_comparison_counts_its_outcomes() -> None:
    rng = np.random.default_rng(0)
    a, b = (audit(["a", "b"], "g", gap, rng) for gap in (0.3, 0.1))
    compared = comparison(a, b)
    section = made(kind="comparison", comparison=compared, a_name="A", b_name="B")
    words = [change.outcome for panel in section.panels() for change in panel.changes if change.value is not None]
    assert len(words) == sum(d.value is not None for d in compared.differences)
    counted = ", ".join(
        f"{words.count(w)} {w}" for w in ("better", "worse", "changed", "not significant") if w in words
    )
    assert f"on the same rows: {counted}<" in section.draw()


def test_a_map_names_each_head_and_its_figures() -> None:
    section = headmap(48, 48, np.random.default_rng(0), [[47, 46], [47, 47]])
    drawn, top = made(**section).draw(), made(**section).top(made(**section).rows())
    titles = re.findall(r"<title>(L\d+H\d+): ([^,<]*)", drawn)
    assert len(titles) == 48 * 48
    layer, head = np.unravel_index(np.abs(section["values"]).argmax(), (48, 48))
    assert top[0].name == f"L{layer}H{head}"
    assert dict(titles)[top[0].name] == top[0].value
    assert drawn.count('class="selected" rx') == 2
    assert {row.name for row in top if row.selected} == {"L47H46", "L47H47"}


def test_an_ablation_counts_the_controls_beyond_it() -> None:
    rng = np.random.default_rng(0)
    controls = [-0.3, -0.2, -0.1, 0.0, 0.4]
    assert "2 lowered" in made(**ablation(rng, effect=-0.2, controls=controls)).sentence()
    assert "1 raised" in made(**ablation(rng, effect=0.2, controls=controls)).sentence()
    assert "all 5 possible" in made(**ablation(rng, controls=controls, exhaustive=True)).sentence()
    assert "<svg" not in made(**ablation(rng, controls=[])).draw()


def test_a_group_is_marked_where_its_interval_and_the_references_have_nothing_in_common() -> None:
    """Not where it excludes the reference's value alone: two equal groups do so in 17 % of samples."""
    groups = [
        SimpleNamespace(group=name, n=100, rates={"accuracy": estimate("accuracy", value, se=0.05)})
        for name, value in (("a", 0.5), ("b", 0.62), ("c", 0.8))
    ]
    cells = [row.cells[0].drawn for row in group_forest(groups, ["accuracy"], "a").rows]
    assert ["vague" in cell for cell in cells] == [True, True, False]
