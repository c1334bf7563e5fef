"""BOLD, its lexica and the swap lists as published, and a small model that continues a few prompts."""

import json

import pytest

torch = pytest.importorskip("torch")

from fairhead.cli import main  # noqa: E402
from fairhead.data import read  # noqa: E402
from fairhead.language.benchmarks import bold  # noqa: E402
from fairhead.language.benchmarks.bold import read_bold  # noqa: E402
from fairhead.language.lexicons import (  # noqa: E402
    find_lexicons,
    read_be5,
    read_swaps,
)


def test_lexica_as_published(real_data):
    found = find_lexicons(real_data("lexicons"))
    # aardvark: 6.26, 2.41, 4.27 of 1 to 9.
    assert found["vad"].words["aardvark"].tolist() == pytest.approx([0.315, -0.6475, -0.1825])
    assert len(found["vad"].words) > 13_900
    other = read_be5(real_data("lexicons") / "be5_english_lrec18.tsv")
    assert other.words["aardvark"][0] == pytest.approx((2.588 - 3) / 2)
    # The two editions of the basic emotions are about the same words and agree in direction.
    shared = [w for w in ("murder", "happy", "funeral", "sunshine") if w in other.words and w in found["be5"].words]
    assert len(shared) == 4
    assert all((other.words[w][0] > 0) == (found["be5"].words[w][0] > 0) for w in shared)


def test_sentiment_and_valence_tell_kind_from_cruel_texts(real_data):
    gauges = [bold.sentiment(), bold.by_lexicon(find_lexicons(real_data("lexicons"))["vad"])]
    good, bad = " is a lovely friend who makes people happy", " is a cruel murderer who tortured his victims"
    for gauge in gauges:
        assert gauge.values(good)[0] > 0 > gauge.values(bad)[0]


def test_swap_lists_as_published(real_data):
    swaps = read_swaps(real_data("winobias"))
    assert swaps.swapped("The actress told her husband that he hurt her.") == (
        "The actor told his wife that she hurt him."
    )
    assert len(swaps.words) > 200
    other = read_swaps(real_data("lexicons"))
    assert other.swapped("My grandmother is a queen") == "My grandfather is a king"
    items = read("stereoset", real_data("stereoset"))
    assert sum(swaps.swapped(i.texts.stereotype) != i.texts.stereotype for i in items) > 1000


def test_the_published_prompts_that_have_no_word_are_passed_over(real_data):
    items = list(read_bold(real_data("bold")))
    assert (len(items), len(bold.prompts(items))) == (23_679, 23_674)


def test_a_small_model_is_measured_from_end_to_end(real_model, real_data, tmp_path, capsys):
    items = list(read_bold(real_data("bold"), domains=["gender"]))
    assert {item.group for item in items} == {"American_actors", "American_actresses"}
    arguments = [
        "lm",
        "bold",
        "--data",
        str(real_data("bold")),
        "--domain",
        "gender",
        "--limit",
        "64",
        "--n-boot",
        "100",
    ]
    arguments += ["--lexicons", str(real_data("lexicons")), "--json", "-"]
    generated = ["--model", str(real_model("tinystories-15m")), "--device", "cpu", "--max-new-tokens", "10"]
    main([*arguments, *generated, "--out", str(tmp_path)])
    first = json.loads(capsys.readouterr().out)
    (file,) = (tmp_path / "journals").glob("bold-*.jsonl")
    main([*arguments, "--score-only", str(file)])
    again = json.loads(capsys.readouterr().out)
    assert again["estimates"] == first["estimates"]
    found = {(e["metric"], e["group_by"]): e for e in first["estimates"]}
    assert found["valence", "gender"]["n"] == first["n"] >= 60
    assert 0 < found["sentiment_disparity", "gender"]["detail"]["p"] <= 1
