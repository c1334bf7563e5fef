"""BOLD's measures where the answer is known, and its lexica in their published formats."""

import gzip
import json

import numpy as np
import pytest

from fairhead.errors import FairheadError, InputError
from fairhead.language.answers import Answers, Generation, GenerationJournal, Prompt, read_generations
from fairhead.language.benchmarks import bold
from fairhead.language.benchmarks.bold import BoldPrompt
from fairhead.language.lexicons import Lexicon, find_lexicons, read_be5, read_gender_vectors, read_vad, weighted
from fairhead.stats.bootstrap import Resampling

VAD = """,Word,V.Mean.Sum,V.SD.Sum,A.Mean.Sum,D.Mean.Sum
1,kind,9,1.0,5,7
2,cruel,1,1.0,7,5
3,table,5,1.0,3,5
"""
BE5 = "\tJoy\tAnger\tSadness\tFear\tDisgust\nkind\t     5.0\t     1.0\t     1.0\t     1.0\t     0.9\n"
QUICK = Resampling(n_boot=200)


def evaluate(items, generations, gauges, how):
    return bold.BENCHMARK.result(bold.table(items, generations, gauges), how)


def people(groups, texts, per_group=12, domain="gender"):
    """Items of `per_group` entities a group with two prompts each, and what was written: texts[group]."""
    items = [
        BoldPrompt(f"{domain}/{g}/{e}/{k}", domain, g, f"{g}{e}", "They ", None)
        for g in groups
        for e in range(per_group)
        for k in range(2)
    ]
    return items, {item.id: Generation(item.id, texts[item.group], 5) for item in items}


def test_lexica_are_rescaled_and_scored_by_the_weighted_formula(tmp_path):
    (tmp_path / "warriner_vad.csv").write_text(VAD)
    (tmp_path / "be5_english_lrec18.tsv").write_text(BE5)
    found = find_lexicons(tmp_path)
    assert found["vad"].words["kind"].tolist() == [1.0, 0.0, 0.5]
    assert found["be5"].words["kind"].tolist() == [1.0, -1.0, -1.0, -1.0, -1.0]  # 0.9 lies beyond the scale
    # valence: (1² − 1²) / 2; arousal: 0.5² − 0.5² over 1 (kind is neutral); dominance: kind alone.
    assert found["vad"].score(["kind", "cruel", "table", "unknown"]).tolist() == [0.0, 0.0, 0.5]
    assert np.isnan(found["vad"].score(["unknown"])).all()
    assert np.isnan(found["vad"].score(["table"])).tolist() == [True, False, True]


def test_the_weighted_formula_lets_strong_words_count_more():
    weights = np.array([[0.8], [-0.1], [-0.1]])
    assert weighted(weights)[0] == pytest.approx((0.64 - 0.01 - 0.01) / 1.0)
    assert weighted(np.empty((0, 2))).shape == (2,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Word,V.Mean.Sum\nkind,9\n", "has no column A.Mean.Sum"),
        (VAD + "4,odd,12,1,5,5\n", "line 5: 'odd' is rated"),
        (VAD + "4,odd,x,1,5,5\n", "is not a table of rated words"),
    ],
)
def test_broken_lexica_are_named(text, message, tmp_path):
    (tmp_path / "v.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        read_vad(tmp_path / "v.csv")
    with pytest.raises(InputError, match="cannot be read"):
        read_be5(tmp_path / "nowhere.tsv")
    with pytest.raises(InputError, match="holds no lexicon"):
        find_lexicons(tmp_path)


def test_word_vectors_lean_by_the_cosine_with_she_less_he(tmp_path):
    text = "4 2\nshe 2 0\nhe 0 0\nnurse 3 4\nzero 0 0\n"  # a header, as FastText has it
    (tmp_path / "v.vec.gz").write_bytes(gzip.compress(text.encode()))
    leaning = read_gender_vectors(tmp_path / "v.vec.gz", ["nurse", "zero", "absent"])
    assert leaning.words["nurse"][0] == pytest.approx(0.6)
    assert set(leaning.words) == {"she", "nurse"}  # a vector of length 0 has no direction
    gauge = bold.gender_vectors(leaning)
    assert gauge.values("the nurse")[:2] == pytest.approx((0.6, 0.6))
    assert np.isnan(gauge.values("nothing known")).all()
    (tmp_path / "none.txt").write_text("nurse 1 2\n")
    with pytest.raises(InputError, match="has no vector of 'she'"):
        read_gender_vectors(tmp_path / "none.txt", ["nurse"])


def test_disparity_is_the_largest_less_the_smallest_mean_of_the_groups():
    texts = {"a": " thanked her.", "b": " thanked him.", "c": " left."}
    items, written = people("abc", texts)
    result = evaluate(items, written, [bold.gender_words()], QUICK)
    found = result["gender_polarity_disparity", "gender"]
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)
    assert found.detail["highest"] == "gender × a"
    assert found.detail["lowest"] == "gender × b"
    assert found.detail["clusters"] == 36
    assert found.detail["p"] == pytest.approx(1 / 2000)
    assert found.detail["p_adjusted"] == pytest.approx(3 / 2000)  # three measures were tested
    assert found.n == 72
    assert result["female", "gender × a"].value == 1.0
    assert result["male", "gender"].value == pytest.approx(1 / 3)


def test_a_shuffle_that_leaves_a_group_without_a_value_does_not_count():
    """Two entities with a value each, and three of one group without: most shuffles have one group or none."""
    texts = {"a0": " kind.", "b0": " cruel.", **{f"b{k}": " left." for k in (1, 2, 3)}}
    items = [BoldPrompt(f"{e}/{k}", "gender", e[0], e, "They ", None) for e in texts for k in range(12)]
    valence = bold.by_lexicon(Lexicon(("valence",), {"kind": np.array([1.0]), "cruel": np.array([-1.0])}))
    result = evaluate(items, {i.id: Generation(i.id, texts[i.entity], 5) for i in items}, [valence], QUICK)
    found = result["valence_disparity", "gender"]
    # The one that is in group a then is that with a value: the other has the same figure, and the gap is 2 again.
    assert (found.detail["by_chance"], found.detail["p"]) == (2.0, 1.0)
    assert "NaN" not in json.dumps(result.to_dict())


def test_gendered_words_about_actors_and_actresses_have_no_ideal():
    """ "She" of an actress is no stereotype; of a nurse it may be one."""
    valence = bold.by_lexicon(Lexicon(("valence",), {"thanked": np.array([0.5])}))
    for domain, ideal in (("gender", None), ("profession", 0.0)):
        items, written = people("ab", {"a": " thanked her.", "b": " thanked him."}, domain=domain)
        result = evaluate(items, written, [bold.gender_words(), valence], QUICK)
        assert result["gender_polarity_disparity", domain].ideal == ideal
        assert result["valence_disparity", domain].ideal == 0.0


def test_groups_that_do_not_differ_look_as_chance_would_have_it():
    rng = np.random.default_rng(0)
    items, written = people([f"g{i}" for i in range(8)], {f"g{i}": " left." for i in range(8)}, per_group=25)
    mixed = {i: Generation(i, " met her." if rng.random() < 0.5 else " left.", 3) for i in written}
    found = evaluate(items, mixed, [bold.gender_words()], QUICK)["gender_polarity_disparity", "gender"]
    assert found.value > 0
    assert found.detail["p"] > 0.05
    # Eight means of 50 coins each: their range is about 2.85 standard errors (Tippett).
    assert found.detail["by_chance"] == pytest.approx(2.847 * 0.5 / np.sqrt(50), rel=0.1)


def test_empty_missing_and_too_long_are_named_and_counted():
    items, written = people("ab", {"a": " thanked her.", "b": " left."})
    some = Answers(
        {i: (Generation(i, "  ", 1) if i.endswith("/a/0/0") else one) for i, one in written.items() if "/b/" not in i},
        too_long=("gender/b/0/0",),
    )
    result = evaluate(items, some, [bold.gender_words()], QUICK)
    assert {reason: len(ids) for reason, ids in result.left_out.items()} == {
        bold.EMPTY: 1,
        "longer than the model's context": 1,
        bold.NOT_GENERATED: 23,
    }
    assert result.n == 23
    one_group = result["gender_polarity_disparity", "gender"]
    assert one_group.value is None  # of one group there is no disparity
    assert one_group.undefined


def test_prompts_without_a_word_are_not_continued_and_named():
    items, written = people("ab", {"a": " met her.", "b": " left."})
    silent = BoldPrompt("gender/a/z/0", "gender", "a", "z", " ", None)
    assert len(bold.prompts([*items, silent])) == len(items)
    result = evaluate([*items, silent], written, [bold.gender_words()], QUICK)
    assert result.left_out == {bold.NO_PROMPT: (silent.id,)}


def test_a_group_with_few_texts_is_left_out_of_the_disparity_by_name():
    items, written = people("ab", {"a": " met her.", "b": " met him."})
    few = BoldPrompt("gender/c/z/0", "gender", "c", "z", "They ", None)
    written[few.id] = Generation(few.id, " left.", 2)
    found = evaluate([*items, few], written, [bold.gender_words()], QUICK)
    assert found["gender_polarity_disparity", "gender"].detail["too_few"] == ["gender × c"]
    assert found["gender_polarity", "gender × c"].undefined


def test_texts_without_a_word_of_the_lexicon_do_not_count():
    lexicon = Lexicon(("valence",), {"kind": np.array([0.5]), "cruel": np.array([-1.0])})
    items, written = people("ab", {"a": " is kind.", "b": " is cruel."})
    silent = {i: (Generation(i, " is here.", 2) if i.endswith("/1") else one) for i, one in written.items()}
    table = bold.table(items, silent, [bold.by_lexicon(lexicon)])
    assert table.column("valence n").sum() == 24
    result = evaluate(items, silent, [bold.by_lexicon(lexicon)], QUICK)
    assert result["valence", "gender × a"].value == 0.5  # not 0.25: the silent half has no valence
    assert result["valence_disparity", "gender"].value == 1.5


def test_sentiment_is_vaders_on_the_continuation():
    vader = pytest.importorskip("vaderSentiment.vaderSentiment").SentimentIntensityAnalyzer()
    gauge = bold.sentiment()
    for text in (" is a wonderful, loving friend!", " is a horrible murderer.", " was born in 1970."):
        compound = vader.polarity_scores(text)["compound"]
        assert list(gauge.values(text)) == [compound, float(compound >= 0.5), float(compound <= -0.5)]


def test_without_vader_one_is_told_how_to_go_on(monkeypatch):
    monkeypatch.setattr("fairhead.language.lexicons.find_spec", lambda name: None)
    with pytest.raises(FairheadError, match=r"pip install .*--score-only FILE"):
        bold.sentiment()


def test_generations_are_read_back_compressed_or_not(tmp_path):
    prompt = Prompt("a", "She ")
    with GenerationJournal(tmp_path / "g.jsonl", {"seed": 0}) as journal:
        journal.add([prompt], [Generation("a", " said \u2028 “yes”\n", 4)])
    (tmp_path / "g.jsonl.gz").write_bytes(gzip.compress((tmp_path / "g.jsonl").read_bytes()))
    for name in ("g.jsonl", "g.jsonl.gz"):
        stored = read_generations(tmp_path / name)
        assert stored.of([prompt, Prompt("b", "He ")]) == {"a": Generation("a", " said \u2028 “yes”\n", 4)}
        assert stored.settings == {"seed": 0}
    (tmp_path / "other.jsonl").write_text(json.dumps({"schema": "x"}) + "\n")
    with pytest.raises(InputError, match="has the schema 'x'"):
        read_generations(tmp_path / "other.jsonl")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 1000)[:20])
    with pytest.raises(InputError, match="is not a file of generations"):
        read_generations(tmp_path / "cut.gz")
