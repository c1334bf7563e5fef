"""Before and after, from folders alone: what is compared, what is said, and the report of it."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from parsed_page import Page

from fairhead.cli import main
from fairhead.errors import InputError
from fairhead.language.answers import text_digest
from fairhead.language.before_after import compare_suites, markdown_of
from fairhead.language.before_after_report import verdict
from fairhead.language.benchmarks import benchmark_named
from fairhead.language.item_table import ItemTable, read_items
from fairhead.language.suite import Suite
from fairhead.report import render
from fairhead.report.model_card import Card
from fairhead.stats import Difference, Span
from fairhead.stats.bootstrap import Resampling

QUICK = Resampling(n_boot=400)


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
    assert (held_out.a, held_out.b, held_out.value, held_out.n) == pytest.approx((0.7, 0.7, 0.0, 120))
    assert held_out.outcome == "not significant"
    seen = figure(klaad, "stereoset", "ss", kind="seen")
    assert (seen.a, seen.b) == pytest.approx((0.7, 0.5))
    # Neither are they used for the run that was not trained on them: all columns speak of the same terms.
    assert figure(even, "stereoset", "ss").n == 120
    assert found.left_out_targets == tuple(sorted(TRAINING["training_targets"]))


def test_pairs_whose_sentences_were_trained_on_under_another_term_take_no_part(tmp_path):
    """The one that was trained prefers no stereotype in the half of the pairs that it has seen."""
    n, folders = 240, []
    names, texts = [str(i) for i in range(n)], [text_digest(f"Sentence {i}.") for i in range(n)]
    for name, training in (("base", None), ("own", {"method": "cda", "training_texts": texts[: n // 2]})):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        more = np.where((np.arange(n) < n // 2) & (training is not None), -1.0, 1.0)
        columns = {"more logprob": more, "less logprob": [0.0] * n, "more tokens": [1] * n, "less tokens": [1] * n}
        groups = [("stereo", "age")] * n
        table = ItemTable.of("crows_pairs", names, [f"{i}/term {i}" for i in names], groups, columns, texts=texts)
        table.write(folders[-1] / "crows_pairs.items.jsonl", {})
        Suite(folders[-1], name, {"weights": name}, training, {}).write()
    (run,) = compare_suites(folders, resampling=QUICK, n_perm=200).runs
    held_out, seen = (figure(run, "crows_pairs", "ss", kind=kind) for kind in ("headlines", "seen"))
    assert (held_out.a, held_out.b, held_out.n) == (1, 1, n // 2)
    assert (seen.a, seen.b, seen.n) == (1, 0, n // 2)


def test_templates_of_bbq_that_were_trained_on_take_no_part(tmp_path):
    """The base answers "unknown" everywhere; after training on half of the templates, these alone are answered."""
    n = 480
    templates, told = [f"Age/{i % 24}" for i in range(n)], np.arange(n) % 48 < 24
    trained = [f"age/{i}" for i in range(12)]
    folders = []
    for name, training in (("base", None), ("pairs", {"method": "balance_pairs", "training_targets": trained})):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        right = np.where([t.casefold() in trained and name == "pairs" for t in templates], 0.0, -2.0)
        columns = {f"logprob {i}": value for i, value in enumerate((right, [-3.0] * n, [-1.0] * n))}
        columns |= {f"tokens {i}": [1] * n for i in range(3)} | {"label": np.where(told, 0, 2)}
        columns |= {"target": [0] * n, "unknown": [2] * n}
        groups = [(c, "Age", f"Age × {c}") for c in np.where(told, "disambig", "ambig").tolist()]
        table = ItemTable.of("bbq", [f"Age/{i}" for i in range(n)], templates, groups, columns)
        table.write(folders[-1] / "bbq.items.jsonl", {})
        Suite(folders[-1], name, {"weights": name}, training, {}).write()
    result = compare_suites(folders, resampling=QUICK, n_perm=200)
    (run,) = result.runs
    held_out, seen = (figure(run, "bbq", "accuracy", "disambig", kind) for kind in ("headlines", "seen"))
    assert (held_out.a, held_out.b, held_out.n) == (0, 0, 120)
    assert (seen.a, seen.b, seen.n) == (0, 1, 120)
    assert run.targeted == ("age",)
    assert "BBQ (held-out templates) disambig accuracy" in markdown_of(result)
    everything = read_items(folders[0] / "bbq.items.jsonl").table
    assert benchmark_named("bbq").trained_on(everything, iter(trained[:2])) == [
        i for i in range(n) if templates[i] in ("Age/0", "Age/1")
    ]


def test_figures_and_outcomes(found):
    klaad, even = found.runs
    ppl = figure(klaad, "perplexity", "perplexity")
    assert ppl.b / ppl.a == pytest.approx(1.2)
    assert ppl.outcome == "worse"
    crows = figure(even, "crows_pairs", "ss")
    assert (crows.a, crows.b, crows.outcome) == (0.8, 0.6, "better")
    assert figure(even, "perplexity", "perplexity").outcome == "not significant"
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
    assert benchmark_named("bbq").axis("Race_ethnicity (names) × disambig") == "race"
    training = {"method": "self_debias", "settings": {"bias_types": ["race-color", "religion"]}}
    named = suite(tmp_path / "named", 0.8, 0.7, 0.7, training=training)
    (run,) = compare_suites([folders[0], named], resampling=QUICK, n_perm=20).runs
    assert run.targeted == ("race", "religion")
    lines = found.to_dict()["runs"][0]["by_category"]
    marked = {(c["benchmark"], c["group_by"]) for c in lines if c["targeted"]}
    assert marked == {("stereoset", "race"), ("crows_pairs", "race-color")}
    assert {c["axis"] for c in lines} == {"gender", "race", "religion", "age"}


def test_the_verdict_names_what_it_can(found):
    text = " ".join(sentence.text for sentence in verdict(found))
    assert "klaad is worse in Held-out text perplexity" in text
    assert "+20.0" in text
    assert "even is better in CrowS-Pairs ss" in text
    assert "attention has collapsed in 1 of 2 layers" in text
    assert "does not differ significantly from base" in text


def test_the_verdict_names_categories_that_got_worse_aimed_at_or_not(found):
    worse = Difference("ss", "gender", 0.6, 0.7, 0.1, 0.05, 0.15, 90, 0.001, ideal=0.5, benchmark="crows_pairs")
    worse = replace(worse, nearer=Span(0.1, 0.05, 0.15))
    both = (worse, replace(worse, group_by="age"))
    run = replace(found.runs[0], targeted=("gender",), headlines=(), by_category=both, entropy=None, unpaired={})
    aimed, spill = (line.text for line in verdict(replace(found, runs=(run,))) if "categor" in line.text)
    assert "of 1 category that was aimed at, 1 got significantly worse (CrowS-Pairs gender ss" in aimed
    assert "spill-over: of 1 category that was not aimed at, 1 got significantly worse (CrowS-Pairs age ss" in spill
    # As of own pairs, of whose training nothing but the pairs themselves is known.
    unknown = replace(found, runs=(replace(run, targeted=()),))
    (line,) = (line for line in verdict(unknown) if "categories" in line.text)
    assert line.text.startswith(f"{run.name}: of 2 categories, 2 got significantly worse (CrowS-Pairs gender ss")
    assert line.tone == "bad"
    dull = replace(run, targeted=(), by_category=(replace(worse, p=1.0),))
    assert not [line for line in verdict(replace(found, runs=(dull,))) if "categor" in line.text]


def test_a_single_figure_is_told_of_as_one(found):
    same = next(c for c in found.runs[0].headlines if c.outcome == "not significant")
    run = replace(found.runs[0], headlines=(same,), by_category=(), collapsed=(), unpaired={})
    text = " ".join(line.text for line in verdict(replace(found, runs=(run,))))
    assert "klaad does not differ significantly from base in the figure." in text


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
        page = Page(render(made.page("fairhead lm compare a b")))
        assert not re.search(r"\bnan\b|\bNone\b|\d\.\d{8,}", page.visible())
        assert "script" not in {tag for tag, _ in page.elements}
        assert {"changes", "spillover", "headmap"} == {s.kind for s in made.page().sections}
    assert name in page.visible()


def test_a_comparison_is_a_result_as_those_of_the_verbs_are(found, tmp_path):
    frame = found.to_frame().set_index(["run", "benchmark", "metric"])
    assert len(frame) == sum(len(run.headlines) for run in found.runs)
    first = found.runs[0].headlines[0]
    line = frame.loc[(found.runs[0].name, first.benchmark, first.metric)]
    assert (line["before"], line["after"], line["outcome"]) == (first.a, first.b, first.outcome)
    assert found.report(tmp_path / "page.html").with_suffix(".json").is_file()
    assert "srcdoc" in found._repr_html_()


def test_the_command_writes_page_json_and_markdown(folders, tmp_path, capsys):
    docs = tmp_path / "README.md"  # the card of a model of which nothing was measured
    docs.write_text(Card("Title", "Done.", [], "pairs:own.csv", unmeasured="old").text("model"))
    names = [str(folder) for folder in folders]
    options = ["--n-boot", "100", "--n-perm", "1000", "--names", "before,KLAAD,even"]
    written = ["--html", str(tmp_path / "r.html"), "--json", str(tmp_path / "r2.json"), "--markdown", str(docs)]
    main(["lm", "compare", *names, *options, *written])
    shown = capsys.readouterr().out
    assert "KLAAD is worse in Held-out text perplexity" in " ".join(shown.split())
    assert "KLAAD against before" in shown
    page = docs.read_text()
    assert "# Title\n" in page.partition("<!-- figures: begin -->")[0]
    assert "## Limits" in page.partition("<!-- figures: end -->")[2]
    assert "\nold\n" not in page
    assert "| Held-out text perplexity | KLAAD |" in page
    content = json.loads((tmp_path / "r2.json").read_text())
    assert content["schema"] == "fairhead.before_after/1"
    assert [run["name"] for run in content["runs"]] == ["KLAAD", "even"]
    twin = json.loads((tmp_path / "r.json").read_text())
    assert twin["schema"] == "fairhead.report/1"
    assert twin["provenance"]["command"].startswith("fairhead lm compare")
    # A second time: the figures are replaced, the page stays.
    main(["lm", "compare", *names[:2], "--n-boot", "100", "--n-perm", "100", "--markdown", str(docs)])
    assert docs.read_text().count("figures: begin") == 1
    assert "| even |" not in docs.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{0}"], "1 folder: expected the one before and at least one after"),
        (["{0}", "nowhere"], "nowhere has no run that can be compared"),
        (["{0}", "{1}", "--names", "a"], "a unique name for each"),
        (["{0}", "{1}", "--html", "page.txt"], "ends in .html"),
        (["{0}", "{1}", "--html", "page.html", "--json", "page.json"], "page.json would be written twice"),
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
    table.write(other / "crows_pairs.items.jsonl", {"start": "eos"})
    third = suite(tmp_path / "third", 0.5, 0.5, 0.5)
    table.write(third / "crows_pairs.items.jsonl", {"start": "bos"})
    with pytest.raises(InputError, match=r"crows_pairs was run with start 'bos' in .*third and with 'eos'"):
        compare_suites([third, other], resampling=QUICK, n_perm=50)


def test_one_start_token_may_be_named_in_two_ways(folders, tmp_path):
    """The default of a model may be just the token that was chosen."""
    default, named, none = (suite(tmp_path / name, 0.5, 0.5, 0.5) for name in ("default", "named", "none"))
    table = Suite.read(default).table("crows_pairs")
    for folder, start, token in (
        (default, "default", "<s> (bos)"),
        (named, "<s>", "<s> (chosen)"),
        (none, "none", "none (none)"),
    ):
        table.write(folder / "crows_pairs.items.jsonl", {"start": start, "start_token": token})
    (run,) = compare_suites([default, named], resampling=QUICK, n_perm=50).runs
    assert figure(run, "crows_pairs", "ss").value == 0
    with pytest.raises(InputError, match=r"crows_pairs was run with start 'default' in .* and with 'none'"):
        compare_suites([default, none], resampling=QUICK, n_perm=50)


@pytest.mark.parametrize("strange", [None, 7, "x", ["x"], {"x": 7}])
def test_a_suite_whose_fields_are_of_another_kind_is_refused(tmp_path, strange):
    """Or shown, where they are what they should be."""
    whole = {"model": "m", "settings": {"a": 1}, "training": None, "options": {"limit": 3}, "skipped": {"bbq": "no"}}
    done = {"items": 3, "left_out": {"long": 1}, "seconds": 0.5, "facts": {"texts": 3}}
    file = tmp_path / "suite.json"
    changed = [{**whole, name: strange} for name in whole]
    changed += [{**whole, "done": {"crows_pairs": {**done, name: strange}}} for name in done]
    changed += [{**whole, "done": strange}, {**whole, "done": {"crows_pairs": strange}}, {**whole, "done": {"bbq": {}}}]
    changed += [{name: value for name, value in whole.items() if name != lost} for lost in ("model", "settings")]
    refused = 0
    for content in changed:
        file.write_text(json.dumps({"schema": "fairhead.suite/1", **content}))
        try:
            Suite.read(tmp_path).show()
        except InputError as error:
            refused += str(file) in str(error)
    assert refused >= len(changed) // 2
    file.write_text(json.dumps({"schema": "fairhead.suite/1", **whole, "done": {"crows_pairs": done}}))
    Suite.read(tmp_path).show()


@pytest.mark.parametrize("strange", [None, 7, [{}], {"x": 7}])
def test_a_table_of_items_whose_fields_are_of_another_kind_is_refused(tmp_path, strange):
    file = tmp_path / "crows_pairs.items.jsonl"
    ItemTable.of("crows_pairs", ["0", "1"], ["a", "b"], [["g"], []], {"x": [1, 2]}).write(file, {})
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for number, line in enumerate(lines):
        for name in line:
            changed = [*lines[:number], {**line, name: strange}, *lines[number + 1 :]]
            file.write_text("\n".join(map(json.dumps, changed)))
            if name == "left_out" or (name, strange) == ("settings", {"x": 7}):
                continue
            with pytest.raises(InputError, match=r"crows_pairs\.items\.jsonl"):
                read_items(file)


def test_markdown_has_every_headline(found):
    page = markdown_of(found)
    for run in found.runs:
        assert page.count(f"| {run.name} |") == len(run.headlines) + len(run.seen) + 1  # the head of the matrix


def test_every_row_of_a_markdown_table_has_as_many_cells(found):
    for block in markdown_of(found).split("\n\n"):
        rows = [line.replace(r"\|", "") for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1
