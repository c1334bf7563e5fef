"""Bold type agrees with the p-values that stand in the same table."""

from dataclasses import replace
from types import SimpleNamespace

from fairhead.audit.seeds import SeedDifference, SeedFigure
from fairhead.bench.table import _best
from fairhead.bench.verdict import Line
from fairhead.stats import adjust


def lines_and_pool(gaps, p):
    """Methods with the given EOd, and what a pool would say of the best against each other."""
    lines = [
        Line(name, False, (0, 1), {"EOd": SeedFigure("EOd", {}, gap, 0.0, gap, gap, 100)}, {}, frozenset(), None, {})
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
    reference = replace(dam, method="group_dro", uses_groups=True)
    assert adjust([0.03, 0.9], "holm")[0] > 0.05  # dam's, beside a reference that does nothing
    assert _best([erm, dam, reference], pool, "EOd") is None
