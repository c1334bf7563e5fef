"""Paired changes of a benchmark's figures, against SciPy and in closed form."""

import numpy as np
import pytest
from scipy import stats

from fairhead.errors import InputError
from fairhead.language.before_after import compare_items, join_items
from fairhead.language.benchmark import Measure
from fairhead.language.benchmarks import winobias
from fairhead.language.item_table import ItemTable, read_items
from fairhead.stats import Difference, Span
from fairhead.stats.bootstrap import Resampling
from fairhead.stats.clusters import ratio
from fairhead.stats.paired import corrected

QUICK = Resampling(n_boot=400)


def ones(name):
    return lambda table: np.column_stack([table.column(name), np.ones(len(table))])


MEAN = Measure("mean", ones("x"), ratio, ideal=0.5)


def tables(before, after, clusters=None):
    names = [f"i{k}" for k in range(len(before))]
    of = names if clusters is None else [str(c) for c in clusters]
    return [ItemTable.of("toy", names, of, [[]] * len(names), {"x": x}) for x in (before, after)]


def test_an_interval_is_that_of_paired_differences():
    rng = np.random.default_rng(0)
    before = rng.normal(0.5, 1, 300)
    after = before + rng.normal(0.02, 0.05, 300)
    found = compare_items(MEAN, None, *tables(before, after), Resampling(n_boot=4000))
    expected = stats.ttest_rel(after, before).confidence_interval(0.95)
    assert found.value == pytest.approx(np.mean(after - before))
    assert [found.low, found.high] == pytest.approx(list(expected), abs=0.08 * (expected.high - expected.low))
    assert (found.a, found.b) == pytest.approx((before.mean(), after.mean()))
    # What 300 pairs show with 80 % power, from the textbook.
    power = (stats.norm.ppf(0.975) + stats.norm.ppf(0.8)) * np.std(after - before) / np.sqrt(300)
    assert found.mde == pytest.approx(power, rel=0.05)


def test_a_p_value_is_that_of_scipys_paired_permutation_test():
    rng = np.random.default_rng(1)
    before, after = rng.normal(0, 1, 11), rng.normal(0.5, 1, 11)
    exact = stats.permutation_test(
        (before, after), lambda a, b: np.mean(b) - np.mean(a), permutation_type="samples", n_resamples=np.inf
    )
    # Drawn to the end, and until a thousand are as large.
    for n_perm, drawn in ((900, 900), (50_000, 1000 / exact.pvalue)):
        found = compare_items(MEAN, None, *tables(before, after), QUICK, n_perm=n_perm)
        assert found.p == pytest.approx(exact.pvalue, abs=4 * np.sqrt(exact.pvalue / drawn))


def test_p_values_are_uniform_where_nothing_changed():
    """Items of a cluster share their answers: only whole clusters may be swapped."""
    rng = np.random.default_rng(2)
    clusters, p = np.repeat(np.arange(12), 5), []
    for _ in range(200):
        before, after = (rng.normal(0, 1, 12)[clusters] + rng.normal(0, 0.2, 60) for _ in range(2))
        p.append(compare_items(MEAN, None, *tables(before, after, clusters), Resampling(n_boot=100), n_perm=199).p)
    assert stats.kstest(p, "uniform").pvalue > 0.01


def wino_pairs(rng, effect):
    """Two models' answers on 40 occupations; the second prefers "he" far more, which the figure cancels."""
    male = np.arange(40) % 2
    names, groups = [str(i) for i in range(40)], [("type1", "male" if m else "female") for m in male]
    before = rng.normal(0.3, 1, 40)
    after = before + 1.5 * (2 * male - 1) + effect + rng.normal(0, 0.3, 40)
    columns = ({"pro": gaps, "anti": np.zeros(40), "male": male} for gaps in (before, after))
    return [ItemTable.of("winobias", names, names, groups, made) for made in columns]


def test_p_values_see_through_what_the_figure_is_blind_to():
    """ "He" moved against "she" as a whole: no change of the figure is told by chance alone, and a real one is."""
    rng = np.random.default_rng(4)
    measure = next(m for m in winobias.BENCHMARK.measures if m.metric == "mean_difference" and m.of(None))
    p = {
        effect: [
            compare_items(measure, None, *wino_pairs(rng, effect), Resampling(n_boot=100), n_perm=199).p
            for _ in range(300)
        ]
        for effect in (0.0, 0.2)
    }
    assert stats.kstest(p[0.0], "uniform").pvalue > 0.01
    # Of 4 standard errors, a test of the right size sees 98 in 100, and one in units of the figure none.
    assert np.mean(np.array(p[0.2]) < 0.05) > 0.95


def test_a_change_that_is_sure_and_one_that_is_none():
    steady = compare_items(MEAN, None, *tables(np.arange(12.0), np.arange(12.0) + 0.5), QUICK, n_perm=9999)
    assert steady.p == pytest.approx(2 / 2**12, abs=4 * np.sqrt(2 / 2**12 / 9999))
    thirds = np.array([1 / 3, 2 / 3, 0.1, 0.2] * 3)
    there_and_back = compare_items(MEAN, None, *tables(thirds, thirds[::-1]), QUICK, n_perm=999)
    assert there_and_back.p == pytest.approx(1, abs=0.01)


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(3)
    clusters, hits = np.repeat(np.arange(15), 4), 0
    for _ in range(300):
        before = rng.normal(0, 1, 60)
        after = before + 0.1 + rng.normal(0, 0.3, 15)[clusters]
        found = compare_items(MEAN, None, *tables(before, after, clusters), Resampling(n_boot=300), n_perm=1)
        hits += found.low <= 0.1 <= found.high
    assert 0.91 <= hits / 300 <= 0.985


def test_the_same_answers_do_not_differ():
    found = compare_items(MEAN, None, *tables([0, 1] * 20, [0, 1] * 20), QUICK)
    assert (found.value, found.low, found.high, found.p, found.mde) == (0.0, 0.0, 0.0, 1.0, None)
    assert (found.outcome, found.direction) == ("not significant", None)


@pytest.mark.parametrize(
    ("before", "after", "outcome", "direction"),
    [
        (0.9, 0.6, "better", "nearer"),
        (0.6, 0.9, "worse", "further"),
        (0.1, 0.4, "better", "nearer"),
        (0.7, 0.3, "changed", None),  # as far from even as before, on the other side
    ],
)
def test_better_is_nearer_to_even(before, after, outcome, direction):
    a, b = ([1.0] * round(400 * share) + [0.0] * round(400 * (1 - share)) for share in (before, after))
    found = compare_items(MEAN, None, *tables(a, b), QUICK)
    assert (found.outcome, found.direction) == (outcome, direction)


def test_ratios_are_compared_as_ratios():
    def nll(table):
        return np.column_stack([table.column("x"), np.ones(len(table))])

    perplexity = Measure("perplexity", nll, lambda t: np.exp(t[..., 0] / t[..., 1]), 1.0, relative=True)
    rng = np.random.default_rng(4)
    losses = rng.normal(3, 0.5, 100)
    found = compare_items(perplexity, None, *tables(losses, losses + np.log(1.1)), QUICK)
    assert np.exp(found.value) == pytest.approx(1.1)
    assert [found.low, found.high] == pytest.approx([np.log(1.1)] * 2)  # the same for every document
    assert found.outcome == "worse"


def test_what_is_undefined_says_why():
    few = compare_items(MEAN, None, *tables([0, 1], [1, 1]), QUICK)
    assert (few.outcome, few.undefined) == ("undefined", "2 items; at least 10 are needed")
    one = compare_items(MEAN, None, *tables([0, 1] * 10, [1, 1] * 10, [0] * 20), QUICK)
    assert "one cluster" in one.undefined
    assert corrected([few, one])[0].p_adjusted is None


def test_a_figure_that_its_interval_alone_would_tell_says_why_it_is_not():
    def moved(clusters, p):
        return Difference("m", None, 0.5, 0.6, 0.1, 0.05, 0.15, 100, p=p, mde=0.04, clusters=clusters)

    # Of 8 clusters no swap is rarer than 2 in 256, which among 63 figures is nothing; among 6 it would be something.
    many = corrected([moved(8, 2 / 256), moved(100, 0.01), moved(100, 0.3), *[moved(100, 0.9)] * 60])
    assert [c.outcome for c in many[:3]] == ["not significant"] * 3
    assert (many[0].note, many[0].mde) == ("only 8 clusters: too few to show any change among 63 figures", None)
    assert many[1].note == "its own interval leaves out 0, but it is not significant among 63 figures"
    assert many[2].note == "its own interval leaves out 0, but its p is not below 0.05"
    assert [c.mde for c in many[1:3]] == [0.04, 0.04]
    few = corrected([moved(8, 2 / 256), *[moved(100, 0.9)] * 5])[0]
    assert (few.outcome, few.note, few.mde) == ("changed", None, 0.04)


def test_items_are_joined_on_their_ids():
    first, second = tables([1, 2, 3], [4, 5, 6])
    a, b = join_items(first, second.take([2, 0]))
    assert a.ids == b.ids == ("i0", "i2")
    assert b.column("x").tolist() == [4, 6]
    other = ItemTable.of("toy", ["z"], ["z"], [[]], {"x": [1]})
    with pytest.raises(InputError, match="no item in common"):
        join_items(first, other)
    moved = ItemTable.of("toy", first.ids, ["c"] * 3, [[]] * 3, {"x": [1, 2, 3]})
    with pytest.raises(InputError, match="describe the same items differently"):
        join_items(first, moved)


def test_a_table_comes_back_from_its_file(tmp_path):
    table = ItemTable.of(
        "toy", ["a", "b"], ["a", "a"], [["x"], ["x", "y"]], {"v": [0.1 + 0.2, 3]}, left_out={"no": ("c",)}
    )
    table.write(tmp_path / "t.jsonl", {"weights": "w"})
    found, settings = read_items(tmp_path / "t.jsonl")
    assert (found.ids, found.groups, found.order, found.left_out) == (
        table.ids,
        table.groups,
        ("x", "y"),
        {"no": ("c",)},
    )
    assert found.values == pytest.approx(table.values, rel=1e-8)
    assert settings == {"weights": "w"}
    for broken in ("", "[]", '{"schema": "fairhead.items/1"}', '{"schema": "other"}'):
        (tmp_path / "t.jsonl").write_text(broken + "\n")
        with pytest.raises(InputError):
            read_items(tmp_path / "t.jsonl")
    with pytest.raises(InputError, match="same id"):
        ItemTable.of("toy", ["a", "a"], ["a", "a"], [[], []], {"v": [1, 2]})


def test_a_change_that_is_not_corrected_is_judged_by_its_own_p():
    nearer = Span(-0.05, -0.08, -0.02)
    moved = Difference("m", None, 0.6, 0.55, -0.05, -0.08, -0.02, 9, p=0.01, ideal=0.5, nearer=nearer)
    assert moved.outcome == "better"
