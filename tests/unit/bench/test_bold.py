"""Bold type agrees with the p-values that stand in the same table."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fairhead.audit.seeds import SeedDifference, SeedFigure
from fairhead.bench.grid import Method
from fairhead.bench.table import Table, markdown, report_of
from fairhead.bench.table_figures import _best, _plans
from fairhead.errors import InputError
from fairhead.mitigate import LADDER, METHODS, MethodEntry
from fairhead.report import render
from fairhead.report.sections.bench_block import BenchBlock, MethodFigures
from fairhead.stats import adjust


def lines_and_pool(gaps, p):
    """Methods with the given EOd, and what a pool would say of the best against each other."""
    lines = [
        MethodFigures(
            method=name,
            told=0,
            uses_groups=False,
            seeds=(0, 1),
            figures={"EOd": SeedFigure("EOd", {}, gap, 0.0, gap, gap, 100)},
            differences={},
            best=(),
        )
        for name, gap in gaps.items()
    ]
    return lines, SimpleNamespace(difference=lambda best, other, metric: SimpleNamespace(p=p[other]))


def test_the_best_is_bold_where_it_can_be_told_from_all():
    lines, pool = lines_and_pool({"erm": 0.2, "lff": 0.1, "dam": 0.19}, {"erm": 0.02, "dam": 0.001})
    assert _best(lines, pool, "EOd") == "lff"


def test_no_bold_where_the_table_calls_the_difference_from_the_baseline_noise():
    p = {"erm": 0.0157, "dro": 0.004, "arl": 0.004, "kd": 0.004, "jtt": 0.004, "dam": 0.004}
    gaps = {"erm": 0.17, "lff": 0.09, **dict.fromkeys(["dro", "arl", "kd", "jtt", "dam"], 0.17)}
    assert max(adjust(list(p.values()), "holm")) < 0.05  # of the best against each: all told apart
    assert adjust([0.0157, 0.9, 0.9, 0.9, 0.9, 0.9], "holm")[0] > 0.05  # of each against erm: not
    assert _best(*lines_and_pool(gaps, p), "EOd") is None


def test_references_count_in_bold_as_they_do_in_the_p_values_beside_it():
    p = {"erm": 0.03, "dam": 0.03}
    lines, pool = lines_and_pool({"erm": 0.2, "dam": 0.1}, p)
    difference = SeedDifference("EOd", "sex", 0.2, 0.1, -0.1, -0.19, -0.01, 100, 0.03)
    erm, dam = lines[0], replace(lines[1], differences={"EOd": difference})
    assert _best([erm, dam], pool, "EOd") == "dam"
    reference = replace(dam, method="group_dro", told=5)
    assert adjust([0.03, 0.9], "holm")[0] > 0.05  # dam's, beside a reference that does nothing
    assert _best([erm, dam, reference], pool, "EOd") is None


@pytest.mark.parametrize(("told", "bold"), [(0, True), (1, True), (2, True), (3, False), (4, False), (5, False)])
def test_bold_is_for_methods_that_are_told_no_attribute(told, bold):
    p = {"erm": 0.001, "dam": 0.001, "kd": 0.001}
    lines, pool = lines_and_pool({"erm": 0.2, "kd": 0.1, "dam": 0.15}, p)
    lines = [replace(line, told=told) if line.method == "kd" else line for line in lines]
    # Where the best may not be bold, the next best of the others is.
    assert _best(lines, pool, "EOd") == ("kd" if bold else "dam")


def test_every_table_says_what_each_method_is_told():
    lines, _ = lines_and_pool({"erm": 0.2, "kd": 0.1}, {})
    change = SeedDifference("EOd", "sex", 0.2, 0.1, -0.1, -0.19, -0.01, 100, 0.03, 0.03, mde=0.02)
    lines[1] = replace(lines[1], told=3, differences={"EOd": change})
    block = BenchBlock(title="faces", baseline="erm", metrics=("EOd",), methods=lines, verdict="V.")
    made = {
        "command": "c",
        "done": 1,
        "cells": 1,
        "failed": 0,
        "made_with": {},
        "devices": [],
        "seeds": [],
        "plan": {"weight_decay": 0.1, "max_grad_norm": None},
        "own_plans": {"kd": {"epochs": 7}},
    }
    table = Table(
        "T",
        "",
        "erm",
        ("EOd",),
        (block,),
        {"Table 1": {"erm": {"EOd": 9.5}}},
        {**made, "selection": "epoch by validation accuracy"},
    )
    text = markdown(table)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [(row[0], row[1]) for row in rows if "---" not in row[1]] == [
        ("| method", "told"), ("| erm", "0"), ("| kd", "3"), ("| method", "told"), ("| kd", "3"),
        ("| method", "EOd |"), ("| erm", "9.5 |"),
    ]  # fmt: skip
    assert "Training plan, defaults included: weight decay 0.1, max grad norm none." in text
    assert "- kd: epochs 7." in text
    page = render(report_of(table))
    assert page.count('<th scope="col" class="number">told</th>') == 2
    assert page.count('<td class="number">3</td>') == 2
    for rung, words in enumerate(LADDER):
        assert f"{rung} {words}" in text
        assert f"{rung} {words}".replace("'", "&#39;") in page


def test_a_method_is_told_what_its_options_and_its_choice_tell_it():
    assert [Method("m", name).told for name in ("erm", "balance", "dam")] == [0, 0, 0]
    assert Method("m", "balance", {"encoder": "path:clip"}).told == 1
    assert Method("m", "balance", data_options={"faces": {"encoder": "path:clip"}}).told == 1
    assert Method("m", "balance", {"without_label": True}).told == 2
    assert [Method("m", "kd", {"teacher": teacher}).told for teacher in ("vit-12x8", "path:clip")] == [0, 1]
    assert Method("m", "erm", uses_groups=True, selection="worst_group").told == 5
    assert Method("m", "erm", chosen_with_groups=True).told == 5
    assert {entry.told for entry in METHODS.values() if entry.uses_groups} == {5}
    with pytest.raises(InputError, match=r"'own': told is 6; expected one of 0 \(inputs and labels\), 1 "):
        MethodEntry("own", "own:Own", "does something", told=6)


def test_only_heads_that_were_solved_are_called_solved():
    """GroupDRO on a head goes through its epochs."""
    settings = {"backbone": {"train": "head", "model": "features:f.npz"}, "plan": {"epochs": 2, "weight_decay": 0.1}}
    place = {"data": "faces", "backbone": "CLIP", "settings": settings}
    rows = [{**place, "method": "erm", "history": [1]}, {**place, "method": "group_dro", "history": [1, 2]}]
    plans = _plans(rows)
    assert plans["plan"] == {"weight_decay": 0.1, "model": "features:f.npz"}
    assert plans["own_plans"]["erm"]["optimizer"] == "none, a linear head solved exactly"
    assert plans["own_plans"]["group_dro"] == {"optimizer": "AdamW", "epochs": 2}
