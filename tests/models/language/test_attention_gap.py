"""The attention gap against eager attention by hand, and its figures against SciPy and closed forms."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from language_models import FAMILIES, build, tokenizer
from scipy import stats

from fairhead.data.sentences import CrowsPair, StereoSetItem, Triplet
from fairhead.errors import InputError
from fairhead.language.attention_reading import NO_SPAN, PairGaps, TokenGaps, read_gaps
from fairhead.language.benchmarks.attention_gap import (
    BENCHMARK,
    EQUAL,
    UNEQUAL,
    Options,
    SentencePair,
    sentence_pairs,
    study,
    table,
)
from fairhead.language.packing import align, slots
from fairhead.language.scorer import Scorer
from fairhead.report import render
from fairhead.stats.bootstrap import Resampling

PAIRS = [
    SentencePair("0", "the nurse was kind and went home .", "the nurse was rude and went home .", ("profession",), "a"),
    SentencePair("1", "people said that he was late", "people said that the old pilot was late", ("gender",), "b"),
    SentencePair("2", "the very old poet was cold .", "the poet was kind .", ("age",), "c"),
]


def gaps_by_hand(model, pair, average, start_token, heads=4):
    encode = tokenizer()
    ids = [[0, *encode(text, add_special_tokens=False)["input_ids"]] for text in (pair.first, pair.second)]
    maps = []
    with torch.no_grad():
        for row in ids:
            out = model(torch.tensor([row]), output_attentions=True, use_cache=False)
            maps.append([layer[0].double().numpy() for layer in out.attentions])
    places = list(zip(*slots(*ids), strict=True))[0 if start_token else 1 :]
    rows, columns = [i for i, _, _ in places], [j for _, j, _ in places]
    by_head, by_layer = [], []
    for first, second in zip(*maps, strict=True):
        apart = [first[h][np.ix_(rows, rows)] - second[h][np.ix_(columns, columns)] for h in range(heads)]
        if average == "after":
            apart = [np.abs(one) for one in apart]
        received = np.array([one.mean(axis=0) for one in apart])
        by_head.append(np.abs(received))
        by_layer.append(np.abs(received.mean(axis=0)))
    return by_head, by_layer, np.array([changed for _, _, changed in places])


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize(("average", "start_token"), [("before", True), ("after", False)])
def test_gaps_equal_those_by_hand_from_eager_attention(family, average, start_token):
    found = read_gaps(Scorer(build(family), tokenizer()), PAIRS, average=average, start_token=start_token)
    eager = build(family, "eager")
    assert [pair.id for pair in found.pairs] == ["0", "1", "2"]
    for i, pair in enumerate(found.pairs):
        by_head, by_layer, changed = gaps_by_hand(eager, pair, average, start_token)
        np.testing.assert_array_equal(found.tokens[i].changed, changed)
        np.testing.assert_allclose(found.tokens[i].by_layer, by_layer, atol=1e-5)
        for layer, of_heads in enumerate(by_head):
            np.testing.assert_allclose(found.on[i, layer], of_heads[:, changed].mean(1), atol=1e-5)
            np.testing.assert_allclose(found.off[i, layer], of_heads[:, ~changed].mean(1), atol=1e-5)
            expected = [float(changed[head.argmax()]) for head in of_heads]
            np.testing.assert_allclose(found.hit[i, layer], expected)
    assert [tokens.equal_length for tokens in found.tokens] == [True, False, False]


def test_slots_pair_replaced_tokens_one_by_one():
    assert slots([1, 2, 3, 4], [1, 9, 8, 7, 4]) == ((0, 1, 2, 3), (0, 1, 2, 4), (False, True, True, False))
    assert slots([1, 2], [1, 5, 2]) == ((0, 1), (0, 2), (False, False))
    assert align([1, 2, 3], [4, 5]) == ((), ())


def test_pairs_that_cannot_be_compared_are_named():
    long = SentencePair("long", "old " * 40, "nurse " * 40, (), "d")
    inserted = SentencePair("inserted", "the nurse was kind", "the nurse was very kind", (), "e")
    other = SentencePair("other", "the nurse", "he went", (), "f")
    scorer = Scorer(build("llama"), tokenizer())
    found = read_gaps(scorer, [*PAIRS, long, inserted, other], start_token=False)
    assert len(found.pairs) == 3
    assert found.left_out == {
        "longer than the model's context": ("long",),
        NO_SPAN: ("inserted", "other"),
    }
    with pytest.raises(InputError, match="no pair of sentences to compare: 1 longer"):
        read_gaps(scorer, [long])
    with pytest.raises(InputError, match="none was given"):
        read_gaps(scorer, [])


def test_damaged_weights_are_noticed():
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    scorer = object.__new__(Scorer)
    healthy = Scorer(build("llama"), tokenizer())
    scorer.__dict__.update(healthy.__dict__, model=model)
    with pytest.raises(InputError, match="attention is not finite"):
        read_gaps(scorer, PAIRS)


def made(n=200, seed=0, power=0.0, clusters=None, heads=3, layers=2):
    """Gaps drawn at random, with those of the span raised by `power`."""
    rng = np.random.default_rng(seed)
    pairs, tokens, gaps = [], [], []
    for i in range(n):
        size = int(rng.integers(5, 15))
        changed = np.zeros(size, dtype=bool)
        changed[rng.integers(size)] = True
        of_pair = [rng.random((heads, size)) + power * changed for _ in range(layers)]
        kinds = ("age",) if i % 2 else ("race",)
        pairs.append(SentencePair(str(i), "", "", kinds, str(i if clusters is None else i % clusters)))
        by_layer = np.stack([layer.mean(axis=0) for layer in of_pair])
        tokens.append(TokenGaps(("a",) * size, ("b",) * size, changed, by_layer, i % 3 == 0))
        gaps.append(of_pair)
    return PairGaps.of(pairs, tokens, gaps)


def evaluate(gaps, layer=-1, how=Resampling(), pictures=6, n_perm=2000):  # noqa: B008
    result = BENCHMARK.result(table(gaps, layer), how)
    return replace(result, more=study(gaps, Options(layer=layer, pictures=pictures), how, n_perm))


def test_the_t_statistic_is_scipys():
    gaps = made(power=0.3)
    hit, on, off = (values[:, -1] for values in gaps.of_layers())
    result = evaluate(gaps)
    for name, values in (("above_chance", hit - gaps.chance), ("gap_difference", on - off)):
        expected = stats.ttest_1samp(values, 0, alternative="greater")
        assert result.more["tests"][name]["t"] == pytest.approx(expected.statistic)
        assert result.more["tests"][name]["p"] == pytest.approx(expected.pvalue, rel=1e-6)
        assert result[name].value == pytest.approx(values.mean())
    interval = stats.ttest_1samp(gaps.hit[:, 1, 2] - gaps.chance, 0).confidence_interval(0.95)
    assert result.more["heads"]["low"][1][2] == pytest.approx(interval.low)
    assert result.more["heads"]["high"][1][2] == pytest.approx(interval.high)


def test_shifting_the_span_hits_as_often_as_chance():
    result = evaluate(made(power=5.0), n_perm=500)
    assert result["largest_on_span"].value == 1.0
    assert result.more["tests"]["above_chance"]["p_permutation"] == pytest.approx(1 / 501)


def test_without_an_effect_p_values_are_uniform():
    quick = Resampling(n_boot=100)
    found = [evaluate(made(n=60, seed=seed), -1, quick, 0, n_perm=199).more["tests"] for seed in range(120)]
    for name in ("above_chance", "gap_difference"):
        t = [tests[name]["p"] for tests in found]
        shifted = [tests[name]["p_permutation"] for tests in found]
        assert stats.kstest(t, "uniform").pvalue > 0.001
        assert stats.kstest(shifted, "uniform").pvalue > 0.001


def test_copies_of_pairs_in_a_cluster_add_no_certainty():
    once = made(n=40, power=0.3)
    many = PairGaps(
        tuple(SentencePair(f"{p.id}/{k}", "", "", p.groups, p.cluster) for k in range(5) for p in once.pairs),
        once.tokens * 5,
        *(np.concatenate([values] * 5) for values in (once.hit, once.on, once.off)),
    )
    first, second = (evaluate(g).more["tests"]["above_chance"] for g in (once, many))
    assert second["t"] == pytest.approx(first["t"])


def test_the_table_has_the_groups_and_the_layer_asked_for():
    gaps = made()
    items = table(gaps, layer=0)
    np.testing.assert_allclose(items.column("on"), gaps.on[:, 0].mean(axis=1))
    assert items.order == (EQUAL, UNEQUAL, "age", "race")
    result = evaluate(gaps, layer=0, how=Resampling(n_boot=200))
    assert result["above_chance", "age"].n == 100
    assert result["largest_on_span"].value - result["chance"].value == pytest.approx(result["above_chance"].value)
    with pytest.raises(InputError, match="layer 2 does not exist: the model has 2"):
        evaluate(gaps, layer=2)


def test_heads_are_corrected_together_and_all_of_it_is_json():
    result = evaluate(made(power=0.5), pictures=4)
    single = [
        stats.ttest_1samp(values, 0, alternative="greater").pvalue
        for values in (made(power=0.5).hit - made(power=0.5).chance[:, None, None]).reshape(200, -1).T
    ]
    smallest = int(np.argmin(single))
    assert result.more["heads"]["p_adjusted"][smallest // 3][smallest % 3] == pytest.approx(
        min(1, 6 * single[smallest])
    )
    written = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert [len(written["heads"]["value"]), len(written["heads"]["value"][0])] == [2, 3]
    assert len(written["pairs"]) == 4
    assert {pair["groups"][0] for pair in written["pairs"]} == {"age", "race"}


def test_the_page_of_a_result_has_its_heads_and_pairs():
    page = evaluate(made(power=0.5), pictures=4).page()
    assert [section.kind for section in page.sections] == ["tables", "attention_gap", "headmap", "attention_gap"]
    assert len(page.sections[-1].pairs) == 4
    assert page.verdict[0].tone == "note"
    render(page)


def test_pairs_of_both_data_sets():
    crows = CrowsPair("7", "she cried", "he cried", "antistereo", "gender", ())
    item = StereoSetItem("9", "intersentence", "Nurse", "profession", "x", Triplet("a", "b", "c"))
    first, second = (sentence_pairs([one])[0] for one in (crows, item))
    assert (first.first, first.second, first.groups) == ("she cried", "he cried", ("gender",))
    assert (second.first, second.second, second.cluster) == ("x a", "x b", "profession/nurse")
    with pytest.raises(InputError, match="expected the items of one benchmark; found str"):
        sentence_pairs(["text"])
