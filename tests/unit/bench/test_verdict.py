"""What is said of a table, where the right words are known."""

from dataclasses import replace

import pytest

from fairhead.audit.seeds import SeedDifference, SeedFigure
from fairhead.bench.table import finding, verdict
from fairhead.report.sections.bench_block import MethodFigures


def a_line(method, gap=None, accuracy=None, told=0, seeds=(0, 1), undefined=None, mde=0.03, remark=""):
    """A method beside erm, which has EOd 20 % and accuracy 80 %; `gap`, `accuracy`: (difference, corrected p)."""
    changes = {m: change for m, change in (("EOd", gap), ("accuracy", accuracy)) if change is not None}
    values = {m: base + changes.get(m, (0.0,))[0] for m, base in (("EOd", 0.2), ("accuracy", 0.8))}
    figures = {m: SeedFigure(m, dict.fromkeys(seeds, v), v, 0.0, v, v, 100) for m, v in values.items()}
    if undefined is not None:
        figures["EOd"] = SeedFigure("EOd", {}, None, None, None, None, 100, undefined)
    differences = {
        m: SeedDifference(m, "sex", 0.3, 0.3 + d, d, d, d, 100, p, p, mde=mde, ideal=float(m == "accuracy"))
        for m, (d, p) in changes.items()
    }
    return MethodFigures(
        method=method,
        told=told,
        uses_groups=told == 5,
        seeds=seeds,
        figures=figures,
        differences=differences,
        best=(),
        remark=remark,
    )


ERM = a_line("erm")
START = "With erm, EOd is 20.0 % at an accuracy of 80.0 %."


def test_nothing_can_be_told_apart():
    lines = [ERM, *(a_line(name, (-0.01, 0.6), (0.0, 1.0)) for name in ("dam", "jtt"))]
    assert verdict(lines, "erm") == (
        f"{START} No method without groups differs significantly from erm in EOd; the smallest detectable "
        "difference in points, each compared alone, is 3.0 for dam, 3.0 for jtt."
    )
    assert finding(lines, "EOd", "erm") == (
        "EOd: none of 2 methods differs significantly from erm; the smallest detectable difference in points, "
        "each compared alone, is 3.0 for dam, 3.0 for jtt."
    )


def test_cells_that_a_figure_goes_without_are_named():
    few = "m has 5 rows with label y; at least 10 are needed"
    line = a_line("dam", (-0.01, 0.9))
    line = replace(line, figures={**line.figures, "EOd": replace(line.figures["EOd"], excluded=(few,))})
    assert finding([ERM, line], "EOd", "erm").endswith(f"each compared alone, is 3.0 for dam. Left out: {few}.")
    assert "Left out" not in finding([ERM, line], "accuracy", "erm")


def test_a_sample_that_could_tell_nothing_is_said_to_be_one():
    said = finding([ERM, a_line("dam", (-0.01, 0.9), mde=1.26)], "EOd", "erm")
    assert (
        said
        == "EOd: dam does not differ significantly from erm; these seeds and rows are too few to show any difference."
    )


def test_each_method_has_its_own_smallest_detectable_difference():
    lines = [
        ERM,
        a_line("dam", (-0.01, 0.9), mde=0.021),
        a_line("lff", (0.01, 0.9), mde=0.3),
        a_line("kd", (0.0, 0.9), mde=2),
    ]
    each = (
        "the smallest detectable difference in points, each compared alone, is 2.1 for dam, 30.0 for lff, none for kd"
    )
    assert each in finding(lines, "EOd", "erm")
    assert each in verdict(lines, "erm")


def test_what_the_test_rows_have_chosen_is_called_circular_and_held_against_its_like():
    chosen = a_line("erm on test rows", (-0.1, 0.001), told=5, remark="circular: epoch chosen by EOd of the test rows")
    other = replace(
        chosen,
        method="dam on test rows",
        differences={
            "EOd": replace(
                chosen.differences["EOd"],
                value=0.01,
                p=0.8,
                p_adjusted=0.8,
                methods=("erm on test rows", "dam on test rows"),
            )
        },
    )
    chosen = replace(
        chosen, differences={"EOd": replace(chosen.differences["EOd"], methods=("erm", "erm on test rows"))}
    )
    said = verdict([ERM, a_line("dam", (-0.01, 0.9)), chosen, other], "erm")
    assert said.endswith(
        "Circular, as the test rows chose the epoch by their EOd, and no result: erm on test rows −10.0 points against "
        "erm (p = 0.001); dam on test rows +1.0 points against erm on test rows (p = 0.80)."
    )
    assert "with the groups" not in said
    assert finding([ERM, chosen], "EOd", "erm") == (
        "EOd: erm on test rows −10.0 points (circular: epoch chosen by EOd of the test rows) against erm."
    )
    assert chosen.circular
    assert not ERM.circular


def test_what_was_chosen_with_groups_is_said_apart():
    chosen = a_line("jtt chosen with groups", (-0.1, 0.01), told=5, remark="chosen with groups")
    said = verdict([ERM, a_line("jtt", (0.0, 1.0)), chosen], "erm")
    assert said.endswith(
        "Trained or chosen with the groups: jtt chosen with groups −10.0 points (accuracy not compared)."
    )
    assert finding([ERM, chosen], "EOd", "erm") == "EOd: jtt chosen with groups −10.0 points against erm."
    vague = a_line("jtt chosen with groups", (-0.1, 0.9), told=5, remark="chosen with groups")
    said = verdict([ERM, vague], "erm")
    assert "Even trained or chosen with the groups (jtt chosen with groups), EOd does not differ significantly" in said


@pytest.mark.parametrize(
    ("accuracy", "price"),
    [
        ((-0.05, 0.01), "accuracy −5.0 points"),
        ((-0.05, 0.2), "accuracy: not significant, p = 0.20"),
        (None, "accuracy not compared"),
    ],
)
def test_a_smaller_gap_comes_with_its_price(accuracy, price):
    lines = [ERM, a_line("dam", (-0.1, 0.01), accuracy), a_line("jtt", (0.01, 0.9), (0.0, 1.0))]
    said = verdict(lines, "erm")
    assert f"Significantly smaller EOd: dam −10.0 points ({price})." in said
    assert "jtt does not differ significantly from erm in EOd" in said


@pytest.mark.parametrize(("commonest", "named"), [(0.45, False), (0.51, True), (None, False)])
def test_a_method_that_knows_nothing_is_named(commonest, named):
    lines = [ERM, a_line("lff", (-0.15, 0.001), (-0.3, 0.001))]  # right in half of the cases
    said = verdict(lines, "erm", commonest)
    words = "Not shown to be more often right than the commonest class on its own (51.0 %): lff. "
    assert (words in said) is named


def test_a_larger_gap_and_a_loss_of_accuracy_alone_are_said_too():
    lines = [ERM, a_line("lff", (0.1, 0.01), (-0.2, 0.01)), a_line("jtt", (-0.01, 0.9), (-0.04, 0.01))]
    said = verdict(lines, "erm")
    assert "Significantly larger EOd: lff +10.0 points (accuracy −20.0 points)." in said
    assert "Of these, accuracy differs significantly: jtt −4.0 points." in said


def test_references_are_kept_apart():
    dam = a_line("dam", (-0.01, 0.9), (0.0, 1.0))
    told = a_line("group_dro", (-0.09, 0.01), (0.0, 1.0), told=5)
    assert verdict([ERM, dam, told], "erm").endswith(
        "Trained with the groups: group_dro −9.0 points (accuracy: not significant, p = 1.00)."
    )
    vague = a_line("group_dro", (-0.01, 0.9), (0.0, 1.0), told=5)
    assert "Even trained with the groups (group_dro), EOd does not differ significantly" in verdict(
        [ERM, dam, vague], "erm"
    )


def test_what_cannot_be_known_is_said():
    assert verdict([a_line("erm", seeds=(0,))], "erm").startswith(f"{START} One seed:")
    assert verdict([a_line("erm", undefined="too few")], "erm") == "No gap is defined: too few rows in a group."
    assert verdict([a_line("dam", (0.0, 1.0))], "erm") == "erm has no result: nothing to compare with."
    assert verdict([ERM, a_line("dam")], "erm").endswith(
        "No other method shares two seeds with erm yet: nothing to compare."
    )
    lines = [a_line("erm", undefined="b has 7 rows"), a_line("dam", accuracy=(0.0, 1.0), undefined="b has 7 rows")]
    assert finding(lines, "EOd", "erm") == "EOd: undefined (b has 7 rows)."
