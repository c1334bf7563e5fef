"""Before and after, from folders alone: paired changes against SciPy and in closed form, and the report of them."""

import doctest
import importlib
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from test_report import Page

from fairhead.cli import main
from fairhead.errors import InputError
from fairhead.language import winobias
from fairhead.language.before_after import compare_suites
from fairhead.language.before_after_report import markdown_of, report_of, verdict
from fairhead.language.figures import axis
from fairhead.language.paired import Change, Span, change, corrected, join
from fairhead.language.resampling import Resampling, ratio
from fairhead.language.suite import Suite
from fairhead.language.tables import ItemTable, Measure, read_items
from fairhead.report import render

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
    found = change(MEAN, None, *tables(before, after), Resampling(n_boot=4000))
    expected = stats.ttest_rel(after, before).confidence_interval(0.95)
    assert found.value == pytest.approx(np.mean(after - before))
    assert [found.low, found.high] == pytest.approx(list(expected), abs=0.08 * (expected.high - expected.low))
    assert (found.before, found.after) == pytest.approx((before.mean(), after.mean()))
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
        found = change(MEAN, None, *tables(before, after), QUICK, n_perm=n_perm)
        assert found.p == pytest.approx(exact.pvalue, abs=4 * np.sqrt(exact.pvalue / drawn))


def test_p_values_are_uniform_where_nothing_changed():
    """Items of a cluster share their answers: only whole clusters may be swapped."""
    rng = np.random.default_rng(2)
    clusters, p = np.repeat(np.arange(12), 5), []
    for _ in range(200):
        before, after = (rng.normal(0, 1, 12)[clusters] + rng.normal(0, 0.2, 60) for _ in range(2))
        p.append(change(MEAN, None, *tables(before, after, clusters), Resampling(n_boot=20), n_perm=199).p)
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
    measure = next(m for m in winobias.MEASURES if m.metric == "mean_difference" and m.of(None))
    p = {
        effect: [
            change(measure, None, *wino_pairs(rng, effect), Resampling(n_boot=20), n_perm=199).p for _ in range(300)
        ]
        for effect in (0.0, 0.2)
    }
    assert stats.kstest(p[0.0], "uniform").pvalue > 0.01
    # Of 4 standard errors, a test of the right size sees 98 in 100, and one in units of the figure none.
    assert np.mean(np.array(p[0.2]) < 0.05) > 0.95


def test_a_change_that_is_sure_and_one_that_is_none():
    steady = change(MEAN, None, *tables(np.arange(12.0), np.arange(12.0) + 0.5), QUICK, n_perm=9999)
    assert steady.p == pytest.approx(2 / 2**12, abs=4 * np.sqrt(2 / 2**12 / 9999))
    thirds = np.array([1 / 3, 2 / 3, 0.1, 0.2] * 3)
    there_and_back = change(MEAN, None, *tables(thirds, thirds[::-1]), QUICK, n_perm=999)
    assert there_and_back.p == pytest.approx(1, abs=0.01)


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(3)
    clusters, hits = np.repeat(np.arange(15), 4), 0
    for _ in range(300):
        before = rng.normal(0, 1, 60)
        after = before + 0.1 + rng.normal(0, 0.3, 15)[clusters]
        found = change(MEAN, None, *tables(before, after, clusters), Resampling(n_boot=300), n_perm=1)
        hits += found.low <= 0.1 <= found.high
    assert 0.91 <= hits / 300 <= 0.985


def test_the_same_answers_cannot_be_told_apart():
    found = change(MEAN, None, *tables([0, 1] * 20, [0, 1] * 20), QUICK)
    assert (found.value, found.low, found.high, found.p, found.mde) == (0.0, 0.0, 0.0, 1.0, None)
    assert (found.outcome, found.direction) == ("cannot be told apart", None)


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
    found = change(MEAN, None, *tables(a, b), QUICK)
    assert (found.outcome, found.direction) == (outcome, direction)


def test_ratios_are_compared_as_ratios():
    def nll(table):
        return np.column_stack([table.column("x"), np.ones(len(table))])

    perplexity = Measure("perplexity", nll, lambda t: np.exp(t[..., 0] / t[..., 1]), 1.0, relative=True)
    rng = np.random.default_rng(4)
    losses = rng.normal(3, 0.5, 100)
    found = change(perplexity, None, *tables(losses, losses + np.log(1.1)), QUICK)
    assert np.exp(found.value) == pytest.approx(1.1)
    assert [found.low, found.high] == pytest.approx([np.log(1.1)] * 2)  # the same for every document
    assert found.outcome == "worse"


def test_what_is_undefined_says_why():
    few = change(MEAN, None, *tables([0, 1], [1, 1]), QUICK)
    assert (few.outcome, few.undefined) == ("undefined", "2 items; at least 10 are needed")
    one = change(MEAN, None, *tables([0, 1] * 10, [1, 1] * 10, [0] * 20), QUICK)
    assert "one cluster" in one.undefined
    assert corrected([few, one])[0].p_adjusted is None


def test_a_figure_that_its_interval_alone_would_tell_says_why_it_is_not():
    def moved(clusters, p):
        return Change("b", "m", None, 0.5, 0.6, 0.1, 0.05, 0.15, 100, clusters, p=p, mde=0.04)

    # Of 8 clusters no swap is rarer than 2 in 256, which among 63 figures is nothing; among 6 it would be something.
    many = corrected([moved(8, 2 / 256), moved(100, 0.01), moved(100, 0.3), *[moved(100, 0.9)] * 60])
    assert [c.outcome for c in many[:3]] == ["cannot be told apart"] * 3
    assert (many[0].note, many[0].mde) == ("only 8 clusters: too few to show any change among 63 figures", None)
    assert many[1].note == "its own interval leaves out 0, but not beyond chance among 63 figures"
    assert many[2].note == "its own interval leaves out 0, but its p is not below 0.05"
    assert [c.mde for c in many[1:3]] == [0.04, 0.04]
    few = corrected([moved(8, 2 / 256), *[moved(100, 0.9)] * 5])[0]
    assert (few.outcome, few.note, few.mde) == ("changed", None, 0.04)


def test_items_are_joined_on_their_ids():
    first, second = tables([1, 2, 3], [4, 5, 6])
    a, b = join(first, second.take([2, 0]))
    assert a.ids == b.ids == ("i0", "i2")
    assert b.column("x").tolist() == [4, 6]
    other = ItemTable.of("toy", ["z"], ["z"], [[]], {"x": [1]})
    with pytest.raises(InputError, match="no item in common"):
        join(first, other)
    moved = ItemTable.of("toy", first.ids, ["c"] * 3, [[]] * 3, {"x": [1, 2, 3]})
    with pytest.raises(InputError, match="describe the same items differently"):
        join(first, moved)


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


TYPES = ("gender", "race-color", "religion", "age")


def suite(folder, crows, stereo, seen, perplexity=3.0, entropy=0.4, training=None, ids="p"):
    """A folder as `fairhead lm suite` leaves it: shares of pairs with the stereotype likelier, and so on."""
    folder.mkdir()
    n = 240
    names = [f"{ids}{i}" for i in range(n)]
    more = np.where(np.arange(n) * 7919 % n < crows * n, 1.0, -1.0)
    columns = {"more logprob": more, "less logprob": np.zeros(n), "more tokens": [1] * n, "less tokens": [1] * n}
    groups = [("stereo", TYPES[i % 4]) for i in range(n)]
    ItemTable.of("crows_pairs", names, names, groups, columns).write(folder / "crows_pairs.items.jsonl", {})
    terms = [f"race/t{i % 24}" for i in range(n)]
    share = np.where([int(t[6:]) < 12 for t in terms], seen, stereo)
    gap = np.where(np.arange(n) // 24 * 10 + 5 < 100 * share, 1.0, -1.0)
    columns = {"stereotype": gap, "anti-stereotype": np.zeros(n), "unrelated": [-9.0] * n}
    groups = [("intrasentence", "race")] * n
    ItemTable.of("stereoset", names, terms, groups, columns).write(folder / "stereoset.items.jsonl", {})
    losses = perplexity + np.sin(np.arange(n)) / 10
    columns = {"logprob": -50 * losses, "tokens": [50] * n, "words": [40] * n, "bytes": [200] * n, "window": [64] * n}
    ItemTable.of("perplexity", names, names, [()] * n, columns).write(folder / "perplexity.items.jsonl", {})
    noise = np.cos(np.arange(n)) / 50
    columns = {f"L{i}H{h}": noise + (entropy if i else 0.4) for i in range(2) for h in range(3)} | {"rows": [20] * n}
    table = ItemTable.of("attention_entropy", names, names, [()] * n, columns)
    table.write(folder / "attention_entropy.items.jsonl", {})
    Suite(folder, f"models/{folder.name}", {"weights": folder.name}, training, {}).write()
    return folder


TRAINING = {"method": "klaad", "training_targets": [f"t{i}" for i in range(12)], "held_out_targets": []}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    base = suite(root / "base", crows=0.8, stereo=0.7, seen=0.7)
    # Only the terms that it was trained on have changed, the attention of layer 1 is flat, and text got harder.
    klaad = suite(
        root / "klaad", crows=0.8, stereo=0.7, seen=0.5, perplexity=3.0 + np.log(1.2), entropy=0.9, training=TRAINING
    )
    even = suite(root / "even", crows=0.6, stereo=0.7, seen=0.7, training={"method": "cda"})
    return [base, klaad, even]


@pytest.fixture(scope="module")
def found(folders):
    return compare_suites(folders, resampling=QUICK, n_perm=2000)


def figure(run, benchmark, metric, group=None, kind="headlines"):
    return next(c for c in getattr(run, kind) if (c.benchmark, c.metric, c.group_by) == (benchmark, metric, group))


def test_terms_that_were_trained_on_take_no_part(found):
    klaad, even = found.runs
    held_out = figure(klaad, "stereoset", "ss")
    assert (held_out.before, held_out.after, held_out.value, held_out.n) == pytest.approx((0.7, 0.7, 0.0, 120))
    assert held_out.outcome == "cannot be told apart"
    seen = figure(klaad, "stereoset", "ss", kind="seen")
    assert (seen.before, seen.after) == pytest.approx((0.7, 0.5))
    # Neither are they used for the run that was not trained on them: all columns speak of the same terms.
    assert figure(even, "stereoset", "ss").n == 120
    assert found.left_out_targets == tuple(sorted(TRAINING["training_targets"]))


def test_figures_and_outcomes(found):
    klaad, even = found.runs
    ppl = figure(klaad, "perplexity", "perplexity")
    assert ppl.after / ppl.before == pytest.approx(1.2)
    assert ppl.outcome == "worse"
    crows = figure(even, "crows_pairs", "ss")
    assert (crows.before, crows.after, crows.outcome) == (0.8, 0.6, "better")
    assert figure(even, "perplexity", "perplexity").outcome == "cannot be told apart"
    assert [c.layer for c in klaad.collapsed] == [1]
    assert klaad.collapsed[0].what == "nearly uniform"
    assert even.collapsed == ()
    # Corrected over both runs: no p can be below what one swap in 2001 gives, times the number of figures.
    family = [c for run in found.runs for c in run.headlines]
    assert crows.p_adjusted >= crows.p
    assert min(c.p_adjusted for c in family) == pytest.approx(len(family) / 2001)


def test_axes_and_targets(found, folders, tmp_path):
    klaad, even = found.runs
    assert (klaad.targeted, even.targeted) == (("race",), ("gender",))
    assert axis("bbq", "Race_ethnicity (names) × disambig") == "race"
    training = {"method": "self_debias", "settings": {"bias_types": ["race-color", "religion"]}}
    named = suite(tmp_path / "named", 0.8, 0.7, 0.7, training=training)
    (run,) = compare_suites([folders[0], named], resampling=QUICK, n_perm=20).runs
    assert run.targeted == ("race", "religion")
    lines = found.to_dict()["runs"][0]["by_category"]
    marked = {(c["benchmark"], c["group_by"]) for c in lines if c["targeted"]}
    assert marked == {("stereoset", "race"), ("crows_pairs", "race-color")}
    assert {c["axis"] for c in lines} == {"gender", "race", "religion", "age"}


def test_the_verdict_names_what_it_can(found):
    text = " ".join(sentence["text"] for sentence in verdict(found))
    assert "klaad is worse in Held-out text perplexity" in text
    assert "+20.0" in text
    assert "even is better in CrowS-Pairs ss" in text
    assert "attention has collapsed in 1 of 2 layers" in text
    assert "cannot be told apart from base" in text


def test_the_verdict_names_categories_that_got_worse_aimed_at_or_not(found):
    worse = Change("crows_pairs", "ss", "gender", 0.6, 0.7, 0.1, 0.05, 0.15, 90, 90, 0.001, ideal=0.5)
    worse = replace(worse, nearer=Span(0.1, 0.05, 0.15))
    both = (worse, replace(worse, group_by="age"))
    run = replace(found.runs[0], targeted=("gender",), headlines=(), by_category=both, entropy=None, unpaired={})
    aimed, spill = (line["text"] for line in verdict(replace(found, runs=(run,))) if "categories" in line["text"])
    assert "of 1 categories that were aimed at, 1 got worse (CrowS-Pairs gender ss" in aimed
    assert "spill-over: of 1 categories that were not aimed at, 1 got worse (CrowS-Pairs age ss" in spill


def test_the_report_is_a_page_and_its_strings_are_escaped(found, tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    name = '<script>alert("x")</script>'
    again = compare_suites(
        [suite(root / "a", 0.6, 0.7, 0.7), suite(root / "b", 0.4, 0.7, 0.5, training=TRAINING)],
        ["base", name],
        QUICK,
        n_perm=50,
    )
    for made in (found, again):
        page = Page(render(report_of(made, "fairhead lm compare a b")))
        assert not re.search(r"\bnan\b|\bNone\b|\d\.\d{8,}", page.visible())
        assert "script" not in {tag for tag, _ in page.elements}
        assert {"changes", "spillover", "headmap"} == {s["kind"] for s in report_of(made)["sections"]}
    assert name in page.visible()


def test_the_command_writes_page_json_and_markdown(folders, tmp_path, capsys):
    docs = tmp_path / "docs.md"
    docs.write_text("# Title\n\n<!-- figures: begin -->\nold\n<!-- figures: end -->\n\nThe end.\n")
    names = [str(folder) for folder in folders]
    options = ["--n-boot", "50", "--n-perm", "1000", "--names", "before,KLAAD,even"]
    written = ["--html", str(tmp_path / "r.html"), "--json", str(tmp_path / "r2.json"), "--markdown", str(docs)]
    main(["lm", "compare", *names, *options, *written])
    shown = capsys.readouterr().out
    assert "KLAAD is worse in Held-out text perplexity" in " ".join(shown.split())
    assert "KLAAD against before" in shown
    page = docs.read_text()
    assert page.startswith("# Title\n")
    assert page.endswith("The end.\n")
    assert "\nold\n" not in page
    assert "| Held-out text perplexity | KLAAD |" in page
    content = json.loads((tmp_path / "r2.json").read_text())
    assert content["schema"] == "fairhead.before_after/1"
    assert [run["name"] for run in content["runs"]] == ["KLAAD", "even"]
    twin = json.loads((tmp_path / "r.json").read_text())
    assert twin["schema"] == "fairhead.report/1"
    assert twin["provenance"]["command"].startswith("fairhead lm compare")
    # A second time: the figures are replaced, the page stays.
    main(["lm", "compare", *names[:2], "--n-boot", "50", "--n-perm", "100", "--markdown", str(docs)])
    assert docs.read_text().count("figures: begin") == 1
    assert "| even |" not in docs.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{0}"], "1 folder: the one before and at least one after"),
        (["{0}", "nowhere"], "nowhere has no suite.json"),
        (["{0}", "{1}", "--names", "a"], "one distinct name each"),
        (["{0}", "{1}", "--html", "page.txt"], "ends in .html"),
        (["{0}", "{1}", "--html", "page.html", "--json", "page.json"], "choose another name for --json"),
        (["{0}", "{1}", "--n-perm", "0"], "--n-perm is 0"),
        (["{0}", "{1}", "--markdown", "{0}/suite.json"], "has no place for figures"),
    ],
)
def test_mistakes_are_one_line(arguments, message, folders, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["lm", "compare", *(a.format(*folders) for a in arguments)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_runs_of_other_data_are_refused(folders, tmp_path):
    other = suite(tmp_path / "other", 0.5, 0.5, 0.5, ids="q")
    with pytest.raises(InputError, match="no item in common"):
        compare_suites([folders[0], other])


def test_answers_to_different_questions_are_not_compared(folders, tmp_path):
    other = suite(tmp_path / "other", 0.5, 0.5, 0.5)
    table = Suite.read(other).table("crows_pairs")
    table.take(range(100)).write(other / "crows_pairs.items.jsonl", {})
    (run,) = compare_suites([folders[0], other], resampling=QUICK, n_perm=50).runs
    assert run.unpaired == {"crows_pairs": 140}
    assert figure(run, "crows_pairs", "ss").n == 100
    table.write(other / "crows_pairs.items.jsonl", {"start": "empty_prefix"})
    third = suite(tmp_path / "third", 0.5, 0.5, 0.5)
    table.write(third / "crows_pairs.items.jsonl", {"start": "always"})
    with pytest.raises(InputError, match=r"crows_pairs was run with start 'always' in .*third and with 'empty_prefix'"):
        compare_suites([third, other], resampling=QUICK, n_perm=50)


def test_markdown_has_every_headline(found):
    page = markdown_of(found)
    for run in found.runs:
        assert page.count(f"| {run.name} |") == len(run.headlines) + len(run.seen) + 1  # the head of the matrix


def test_every_row_of_a_markdown_table_has_as_many_cells(found):
    for block in markdown_of(found).split("\n\n"):
        rows = [line.replace(r"\|", "") for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1


def test_a_change_that_is_not_corrected_is_judged_by_its_own_p():
    moved = Change(
        "b", "m", None, 0.6, 0.55, -0.05, -0.08, -0.02, 9, 9, p=0.01, ideal=0.5, nearer=Span(-0.05, -0.08, -0.02)
    )
    assert moved.outcome == "better"


MODULES = (
    "language.figures",
    "language.paired",
    "language.suite",
    "language.before_after",
    "language.before_after_report",
    "report.changes_view",
)


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_the_docstrings(module):
    outcome = doctest.testmod(importlib.import_module(f"fairhead.{module}"))
    assert outcome.attempted
    assert outcome.failed == 0
