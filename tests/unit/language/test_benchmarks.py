"""Benchmarks on fake models whose scores follow in closed form."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from fairhead.data import read_items
from fairhead.data.sentences import Answer, BBQItem, CrowsPair, StereoSetItem, Triplet
from fairhead.errors import InputError
from fairhead.language.answers import TOO_LONG, Answers, Request, Score
from fairhead.language.benchmarks import bbq, crows_pairs, stereoset, winobias
from fairhead.language.benchmarks.winobias import Mention, WinoSentence
from fairhead.language.running import run_benchmark
from fairhead.stats.bootstrap import Resampling

TEXTS = Triplet("He is lazy.", "He is diligent.", "He is a window.")


class Fake:
    """A scorer by a rule: from a request to a log-probability and a number of tokens."""

    def __init__(self, rule):
        self.rule = rule

    def score(self, requests, *, journal=None, on_long="raise", progress=None):
        found = {r.id: answer for r in requests if (answer := self.rule(r)) is not None}
        return Answers({k: Score(k, float(v[0]), v[1]) for k, v in found.items()})

    def settings(self):
        return {"model": "fake"}


def by_text(values, tokens=1):
    return Fake(lambda r: (next(v for text, v in values.items() if r.continuation.strip() == text), tokens))


def by_length():
    return Fake(lambda r: (-len(r.continuation), 1))


def coin(seed=0):
    rng = np.random.default_rng(seed)
    return Fake(lambda r: (rng.normal(), 1))


def stereoset_items(n=400, terms=40):
    kinds = ("intrasentence", "intersentence")
    types = ("gender", "race")
    return [
        StereoSetItem(str(i), kinds[i // 2 % 2], f"term {i % terms}", types[i % terms % 2], "He came.", TEXTS)
        for i in range(n)
    ]


@pytest.mark.parametrize(
    ("stereo", "anti", "unrelated", "ss", "lms", "icat"),
    [
        (-1, -2, -3, 1.0, 1.0, 0.0),  # always the stereotype
        (-2, -1, -3, 0.0, 1.0, 0.0),  # never
        (-1, -3, -2, 1.0, 0.5, 0.0),  # nonsense before the anti-stereotype
        (-2, -3, -1, 1.0, 0.0, 0.0),  # nonsense before all
        (-1, -1, -1, 0.0, 0.0, 0.0),  # ties count against the stereotype and against sense
    ],
)
def test_stereoset_of_models_with_one_order(stereo, anti, unrelated, ss, lms, icat):
    values = dict(zip(TEXTS, (stereo, anti, unrelated), strict=True))
    result = run_benchmark("stereoset", by_text(values), stereoset_items())
    for group in (None, "intrasentence", "intersentence", "gender", "race", "intersentence × race"):
        assert (result["ss", group].value, result["lms", group].value) == (ss, lms)
        assert result["icat", group].value == icat
        clusters = result["ss", group].detail["clusters"]  # in all of them the same: the interval is exact
        exact = binomtest(int(ss * clusters), clusters).proportion_ci(method="exact")
        assert (result["ss", group].low, result["ss", group].high) == pytest.approx((exact.low, exact.high))
    assert result["ss"].n == result.n == 400
    assert result["ss", "gender"].n == 200
    assert result["ss"].detail["clusters"] == 40


def test_stereoset_by_means_and_by_sums():
    """The stereotype has −6 in 6 tokens, its opposite −4 in 1, nonsense −5 in 2."""
    tokens = {"stereotype": (-6.0, 6), "anti-stereotype": (-4.0, 1), "unrelated": (-5.0, 2)}
    items = stereoset_items(40, 10)
    texts = {text: label for item in items for label, text in zip(tokens, item.sentences, strict=True)}
    result = run_benchmark("stereoset", Fake(lambda r: tokens[texts[r.continuation.strip()]]), items)
    assert [result[name].value for name in ("ss", "lms", "ss_sum", "lms_sum")] == [1.0, 0.5, 0.0, 0.5]


def test_stereoset_prefers_the_stereotype_half_of_the_time():
    rule = Fake(
        lambda r: ({"stereotype": (-1, -2)[int(r.id.split("/")[1]) // 20 % 2]}.get(r.id.split("/")[-1], -1.5), 1)
    )
    lower = Fake(lambda r: (-9, 1) if r.id.endswith("unrelated") else rule.rule(r))
    result = run_benchmark("stereoset", lower, stereoset_items())
    assert (result["ss"].value, result["lms"].value, result["icat"].value) == (0.5, 1.0, 1.0)


def test_stereoset_is_a_mean_over_terms_not_over_items():
    items = [
        StereoSetItem(str(i), "intrasentence", f"often {i % 10}" if i < 90 else f"rare {i}", "race", "", TEXTS)
        for i in range(100)
    ]
    rule = Fake(lambda r: (-1.0 if (int(r.id.split("/")[1]) < 90) == r.id.endswith("/stereotype") else -2.0, 1))
    result = run_benchmark("stereoset", rule, items)
    assert result["ss"].value == 0.5  # 1 for one half of the terms, 0 for the other; 0.9 of the items
    assert result["ss"].detail["clusters"] == 20


def test_a_figure_of_fewer_than_ten_clusters_is_undefined():
    """Templates or terms that agree with each other would give an interval without width."""
    rule = Fake(lambda r: (-1.0 if r.id.endswith("/stereotype") else -2.0, 1))
    found = run_benchmark("stereoset", rule, stereoset_items(400, 9))["ss"]
    assert (found.value, found.low, found.high) == (None, None, None)
    assert found.undefined == "9 clusters; at least 10 are needed for an interval"
    assert found.detail["value"] == 1.0
    assert run_benchmark("stereoset", rule, stereoset_items(400, 10))["ss"].value == 1.0


def test_stereoset_compares_means_per_token():
    items = stereoset_items(40, 20)
    longer = Fake(lambda r: (-3.0, 3) if r.id.endswith("/stereotype") else (-2.0, 1))
    assert run_benchmark("stereoset", longer, items)["ss"].value == 1.0  # −1 a token against −2


def test_stereoset_intersentence_by_sentence_or_by_text():
    item = StereoSetItem("1", "intersentence", "t", "race", "He came.", TEXTS)
    assert stereoset.requests([item])[2] == Request("intersentence/1/unrelated", "He came.", " He is a window.")
    whole = stereoset.Options(inter="text")
    assert stereoset.requests([item], whole)[2] == Request("intersentence/1/unrelated", "", "He came. He is a window.")


def pairs(n=300):
    types = ("age", "gender", "religion")
    return [CrowsPair(str(i), "more", "less", "stereo" if i % 5 else "antistereo", types[i % 3], ()) for i in range(n)]


@pytest.mark.parametrize(("more", "less", "ss"), [(-1, -3.5, 1.0), (-3.5, -1, 0.0), (-1, -1, 0.5)])
def test_crows_pairs_of_models_with_one_order(more, less, ss):
    result = run_benchmark("crows_pairs", by_text({"more": more, "less": less}, tokens=5), pairs())
    for group in (None, "stereo", "antistereo", "age"):
        assert result["ss", group].value == result["ss_per_token", group].value == ss
        assert result["mean_abs_difference", group].value == abs(more - less)
        assert result["mean_abs_difference_per_token", group].value == pytest.approx(abs(more - less) / 5)
    assert result["ss", "antistereo"].n == 60
    assert result["ss"].detail["ties"] == (300 if more == less else 0)


def test_crows_pairs_sum_and_mean_part_ways_where_lengths_differ():
    rule = Fake(lambda r: (-6.0, 6) if r.continuation == "more" else (-4.0, 2))
    result = run_benchmark("crows_pairs", rule, pairs())
    assert (result["ss"].value, result["ss_per_token"].value) == (0.0, 1.0)


def test_own_pairs_that_say_the_same_count_as_one(tmp_path):
    """Rows that stand twice, or say the same of another group, add nothing to what is known."""
    rows = [f"{who} never learn rule {i} here.,Others never learn rule {i} here." for i in range(12) for who in "AB"]
    figures = []
    for name, times in (("once", 1), ("often", 4)):
        file = tmp_path / f"{name}.csv"
        file.write_text("\n".join(["more,less", *rows * times]))
        found = run_benchmark("crows_pairs", by_length(), read_items(f"pairs:{file}", "pairs"))["ss"]
        figures.append((found.detail["clusters"], found.low, found.high))
    assert figures[0][0] == 12
    assert figures[0] == figures[1]


def test_own_pairs_that_differ_in_all_words_count_as_one_only_where_they_are_the_same(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text("more,less\nWomen lie.,Men stay honest.\nWomen lie.,Men stay honest.\nWomen cook.,Boys win.\n")
    items = read_items(f"pairs:{file}", "pairs")
    assert [pair.target for pair in items] == ["Women lie.", "Women lie.", "Women cook."]
    assert len({pair.cluster for pair in crows_pairs.BENCHMARK.pairs(items)}) == 2


def test_a_coin_cannot_be_told_from_even():
    crows = run_benchmark("crows_pairs", coin(), pairs(1000))["ss"]
    terms = run_benchmark("stereoset", coin(1), stereoset_items(2000, 40))["ss"]
    for estimate in (crows, terms):
        assert estimate.low < 0.5 < estimate.high
        assert estimate.high - estimate.low < 0.1


def bbq_items(n=480, categories=("Age", "Religion")):
    """Every combination of polarity, condition, label and place of the answers."""
    items = []
    for i in range(n):
        unknown, target = i % 3, (i % 3 + 1 + i // 3 % 2) % 3
        condition = ("ambig", "disambig")[i // 6 % 2]
        other = 3 - unknown - target
        label = unknown if condition == "ambig" else (target, other)[i // 12 % 2]
        answers = [Answer("", "", "")] * 3
        answers[unknown] = Answer("Not known", "Not known", "unknown")
        answers[target], answers[other] = Answer("Ann", "Ann", "x"), Answer("Bob", "Bob", "y")
        category = categories[i // 24 % len(categories)]
        context, places = f"Context {i}.", (tuple(answers), label, target)
        items.append(
            BBQItem(
                f"{category}/{i}", category, str(i // 48), "neg", condition, context, "Who?", *places, ("x",), "None"
            )
        )
    return items


def answering(choose):
    """A model that gives the answer that `choose` picks of an item."""
    by_id = {item.id: item for item in bbq_items()}

    def rule(request):
        name, _, answer = request.id.rpartition("/")
        return (-1.0 if choose(by_id[name]) == int(answer) else -5.0), 1

    return Fake(rule)


@pytest.mark.parametrize(
    ("choose", "ambiguous", "disambiguated", "score_ambiguous", "score_disambiguated", "gap"),
    [
        (lambda item: item.target, 0.0, 0.5, 1.0, 1.0, 1.0),  # always the stereotype
        (lambda item: 3 - item.target - item.unknown, 0.0, 0.5, -1.0, -1.0, -1.0),  # never
        (lambda item: item.unknown, 1.0, 0.0, None, None, 0.0),  # always unknown: no answer names a person
        (lambda item: item.label, 1.0, 1.0, None, 0.0, 0.0),  # always right
    ],
)
def test_bbq_of_models_with_one_rule(choose, ambiguous, disambiguated, score_ambiguous, score_disambiguated, gap):
    result = run_benchmark("bbq", answering(choose), bbq_items())
    for prefix in ("", "Age × "):
        for suffix in ("", "_sum"):
            assert result[f"accuracy{suffix}", f"{prefix}ambig"].value == ambiguous
            assert result[f"accuracy{suffix}", f"{prefix}disambig"].value == disambiguated
            assert result[f"bias_score{suffix}", f"{prefix}ambig"].value == score_ambiguous
            assert result[f"bias_score{suffix}", f"{prefix}disambig"].value == score_disambiguated
            assert result[f"accuracy_gap{suffix}", f"{prefix}disambig"].value == gap
    if score_ambiguous is None:
        assert result["bias_score", "ambig"].undefined == "no item has an answer that it could be made of"
    assert result["accuracy"].value == (ambiguous + disambiguated) / 2
    assert result["accuracy"].n == 480
    assert result["accuracy", "Age × ambig"].n == 120


def test_bbq_ambiguous_score_shrinks_with_accuracy():
    # Unknown in half of the ambiguous items, the stereotype in the others: (1 − ½) · 1.
    result = run_benchmark(
        "bbq", answering(lambda i: i.unknown if int(i.id.split("/")[1]) % 2 else i.target), bbq_items()
    )
    assert result["bias_score", "ambig"].value == 0.5
    assert result["unknown_rate", "ambig"].value == result["unknown_rate", "disambig"].value == 0.5


def test_bbq_per_token_and_sum():
    rule = Fake(lambda r: (-6.0, 6) if r.continuation == " Ann" else (-4.0, 1))
    result = run_benchmark("bbq", rule, bbq_items())
    assert result["bias_score", "disambig"].value == 1.0  # −1 a token: Ann is the target
    assert result["bias_score_sum", "disambig"].value != 1.0


def test_bbq_prompts_share_their_beginning():
    plain, qa = (bbq.requests(bbq_items(1), bbq.Options(prompt=prompt))[0] for prompt in ("plain", "qa"))
    assert plain == Request("Age/0/0", "Context 0. Who?", " Not known")
    assert qa.prefix == "Context 0.\n\nQ: Who?\nA:"


def test_bbq_asks_for_every_wording_of_unknown_as_lm_evaluation_harness_does():
    """Its task bbq: two people and ten wordings of unknown after a space; the likeliest as a whole is the answer."""
    items = bbq_items(1)
    asked = bbq.requests(items, bbq.Options(prompt="qa"))
    people = [answer.text for answer in items[0].answers if not answer.is_unknown]
    assert [r.continuation.removeprefix(" ") for r in asked] == [*people, *bbq.UNKNOWN]
    assert len({r.id for r in asked}) == 12
    # The people have −2; one wording of unknown has −1 in ten tokens, another −3 in one.
    special = {" Undetermined": (-1.0, 10), " Not known": (-3.0, 1)}
    rule = Fake(lambda r: special.get(r.continuation, (-2.0, 2) if r.continuation.strip() in people else (-9.0, 1)))
    found = bbq.table(items, rule.score(asked), bbq.Options(prompt="qa"))
    unknown = items[0].unknown
    assert (found.column(f"logprob {unknown}")[0], found.column(f"mean {unknown}")[0]) == (-1.0, -0.1)
    other = next(i for i in range(3) if i != unknown)
    assert (found.column(f"logprob {other}")[0], found.column(f"mean {other}")[0]) == (-2.0, -1.0)


def test_bbq_leaves_out_items_without_a_target_and_sets_names_apart():
    items = bbq_items()
    odd = [BBQItem(**{**vars(items[0]), "id": "Age/none", "target": None})]
    named = tuple(Answer(a.text, a.person, "F-Black" if a.group == "x" else a.group) for a in items[1].answers)
    proxies = [BBQItem(**{**vars(items[1]), "id": f"Age/n{i}", "answers": named}) for i in range(12)]
    result = run_benchmark("bbq", Fake(lambda r: (-1.0, 1)), items + odd + proxies)
    assert result.left_out == {bbq.NO_TARGET: ("Age/none",)}
    assert result["accuracy", "Age (names)"].n == 12


def wino(n=240):
    found = []
    for i in range(n):
        pro, anti = ("he", "she") if i % 2 else ("she", "he")
        job = f"The {('cook', 'clerk', 'nurse')[i % 3]}{'man' if i % 2 else ''} {i % 48}"
        for direction, pronoun in (("pro", pro), ("anti", anti)):
            mention = Mention(pronoun, 0, 0)
            text = f"{job} left because {pronoun} slept."
            key = f"type{1 + i % 4 // 2}/dev/{i}/{direction}"
            found.append(
                WinoSentence(key, 1 + i % 4 // 2, "dev", direction, text, Mention(job, 0, len(job)), (mention,))
            )
    return found


def test_winobias_of_models_with_one_rule():
    stereotype = Fake(lambda r: (-1.0 if r.id.endswith("/pro") else -2.0, 1))
    result = run_benchmark("winobias", stereotype, wino())
    for group in (None, "type1", "type2", "male", "female"):
        assert result["pro_preferred", group].value == 1.0
        assert result["mean_difference", group].value == pytest.approx(1.0)
    # Who simply prefers "he" follows no stereotype, however uneven the sample is.
    male = Fake(lambda r: (-1.0 if " he " in r.continuation else -2.0, 1))
    uneven = [s for s in wino() if int(s.id.split("/")[2]) % 2 or int(s.id.split("/")[2]) < 40]
    result = run_benchmark("winobias", male, uneven)
    assert result["pro_preferred"].value == 0.5
    assert result["mean_difference"].value == 0.0
    assert (result["pro_preferred", "male"].value, result["pro_preferred", "female"].value) == (1.0, 0.0)


def test_winobias_pairs_must_differ_in_pronouns_alone():
    sentences = wino(20)
    broken = [
        WinoSentence(**{**vars(s), "text": s.text + (" Often." if s.direction == "pro" else "")}) for s in wino(21)[40:]
    ]
    alone = wino(22)[42:43]
    paired = winobias.pair(sentences + broken + alone)
    assert len(paired.pairs) == 20
    assert {reason: len(names) for reason, names in paired.left_out.items()} == {
        "the other form is not in the data": 1,
        "the two forms differ in more than pronouns, or not at all": 1,
    }


def test_items_too_long_are_named_and_counted():
    fake = Fake(lambda r: None if r.id == "7/less" else (-1.0, 1))
    result = run_benchmark("crows_pairs", fake, pairs())
    assert result.left_out == {TOO_LONG: ("7",)}
    assert result["ss"].n == 299
    assert result.to_dict()["left_out"] == {TOO_LONG: ["7"]}


def test_too_few_items_are_undefined_never_zero():
    result = run_benchmark("crows_pairs", coin(), pairs(9))
    estimate = result["ss"]
    assert (estimate.value, estimate.low) == (None, None)
    assert estimate.undefined == "9 items; at least 10 are needed"
    assert "–: at least 10 items are needed" in [sentence.text for sentence in result.page().verdict]


def test_intervals_cover_the_truth():
    """Clusters of items that agree: 95 % intervals hold the true mean about 95 % of the time."""
    rng = np.random.default_rng(0)
    how, hits, naive, runs = Resampling(n_boot=400), 0, 0, 400
    for _ in range(runs):
        rates = rng.beta(2, 2, 15)  # 15 clusters of 20 items, truth ½
        counts = rng.binomial(20, rates)
        sums = np.column_stack([counts, np.full(15, 20)])
        estimate = how.estimate("x", None, sums, lambda t: t[..., 0] / t[..., 1], 300)
        hits += estimate.low <= 0.5 <= estimate.high
        share = counts.sum() / 300
        naive += abs(share - 0.5) <= 1.96 * np.sqrt(share * (1 - share) / 300)
    assert 0.92 <= hits / runs <= 0.98
    assert naive / runs < 0.8  # what ignoring the clusters would give


def test_the_same_seed_gives_the_same_figures():
    first, again = (run_benchmark("crows_pairs", coin(), pairs(), resampling=Resampling(seed=4)) for _ in range(2))
    assert first == again
    other = run_benchmark("crows_pairs", coin(), pairs(), resampling=Resampling(seed=5))
    assert other["ss"].value == first["ss"].value
    assert other["mean_abs_difference"].low != first["mean_abs_difference"].low


def test_a_limit_draws_whole_pairs():
    drawn = winobias.BENCHMARK.sample(wino(), 10, seed=0)
    assert len(drawn) == 20
    assert len(winobias.pair(drawn).pairs) == 10
    assert [s.id for s in drawn] == [s.id for s in wino() if s in drawn]
    with pytest.raises(InputError, match="at least 1"):
        winobias.BENCHMARK.sample(wino(), 0, seed=0)


def test_an_unknown_benchmark_is_named():
    with pytest.raises(InputError, match=r"no benchmark 'crows_pair'.*Did you mean 'crows_pairs'"):
        run_benchmark("crows_pair", coin(), pairs())


def test_results_are_json_and_found_by_name():
    import json

    result = run_benchmark("stereoset", coin(), stereoset_items())
    content = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert content["schema"] == "fairhead.language/1"
    assert content["provenance"]["texts"] == 1200
    per_token = {"ss", "lms", "icat"}
    assert {e["metric"] for e in content["estimates"]} == per_token | {f"{name}_sum" for name in per_token}
    with pytest.raises(KeyError, match="there is no estimate"):
        result["ss", "nowhere"]


def test_every_file_of_the_folder_that_needs_torch_says_so():
    folder = Path(importlib.import_module("fairhead.language").__file__).parent
    with_torch = {file.stem for file in folder.rglob("*.py") if "\nimport torch" in file.read_text()}
    assert with_torch == {
        "attention_reading",
        "generation",
        "loading",
        "row_layout",
        "scorer",
    }
