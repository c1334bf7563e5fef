"""TextSpan on moments chooses what the published algorithm chooses on rows; its p-values are what chance gives."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from fairhead.errors import InputError
from fairhead.locate.head_features import HeadMoments, Pool, Spanned, span_of_moments, text_spans


def span_of_rows(rows, texts, m=20, rank=64):
    """TextSpan as published, on a head's terms themselves: rows [n, d'], texts [T, d']."""
    terms = np.asarray(rows, dtype=np.float64).copy()
    _, values, right = np.linalg.svd(terms, full_matrices=False)
    right = right[:rank][values[:rank] > values[0] * 1e-6]
    pool = np.asarray(texts, dtype=np.float64) @ right.T @ right
    terms -= terms.mean(0)
    total = float((terms**2).sum())
    smallest = 1e-8 * float((pool**2).sum(1).max())
    chosen, shares = [], []
    for _ in range(min(m, len(right))):
        best = int(np.argmax((terms @ pool.T).std(0)))
        text, length = pool[best].copy(), float(pool[best] @ pool[best])
        if length <= smallest:
            break
        before = float((terms**2).sum())
        terms -= np.outer(terms @ text / length, text)
        pool -= np.outer(pool @ text / length, text)
        chosen.append(best)
        shares.append((before - float((terms**2).sum())) / total)
    return Spanned(np.array(chosen, dtype=np.intp), np.array(shares), len(right))


def a_head(rng, n, d, width, texts):
    z = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + rng.normal(size=d)
    return z, rng.normal(size=(width, d)), rng.normal(size=(texts, width))


@settings(max_examples=40)
@given(st.integers(0, 100_000), st.integers(3, 60), st.integers(2, 8), st.integers(8, 20))
def test_moments_choose_the_texts_that_rows_choose(seed, n, d, width) -> None:
    rng = np.random.default_rng(seed)
    z, head_map, texts = a_head(rng, n, d, width, 50)
    sizes = np.linalg.svd(z @ head_map.T, compute_uv=False)[: min(n, d)]
    sizes /= sizes[0]
    assume(not ((sizes > 1e-8) & (sizes < 1e-4)).any())  # a direction that is nearly nothing: rounding decides
    expected = span_of_rows(z @ head_map.T, texts, m=6, rank=d)
    found = span_of_moments(z.mean(0), np.cov(z.T, bias=True).reshape(d, d), head_map, texts, m=6)
    assert found.rank == expected.rank == (sizes > 1e-6).sum()
    # Later picks explain nothing: rounding chooses among them.
    steps = min(len(expected.chosen), n - 1, found.rank)
    assert found.chosen[:steps].tolist() == expected.chosen[:steps].tolist()
    np.testing.assert_allclose(found.share[:steps], expected.share[:steps], rtol=1e-6, atol=1e-9)


def test_the_algorithm_on_rows_is_that_of_the_paper() -> None:
    # Written out again, without any of the shortcuts: one text at a time, explicit projections.
    rng = np.random.default_rng(1)
    z, head_map, texts = a_head(rng, 80, 5, 9, 30)
    terms = z @ head_map.T
    right = np.linalg.svd(terms, full_matrices=False)[2][:5]
    pool = np.array([sum((text @ v) * v for v in right) for text in texts])
    terms = terms - terms.mean(0)
    names = []
    for _ in range(4):
        best = int(np.argmax([np.std(terms @ text) for text in pool]))
        names.append(best)
        unit = pool[best] / np.linalg.norm(pool[best])
        project = np.eye(9) - np.outer(unit, unit)
        terms, pool = terms @ project, pool @ project
    assert span_of_rows(z @ head_map.T, texts, m=4, rank=5).chosen.tolist() == names


def test_shares_add_up_to_one_when_texts_span_everything() -> None:
    rng = np.random.default_rng(2)
    z, head_map, texts = a_head(rng, 200, 4, 10, 40)
    found = span_of_moments(z.mean(0), np.cov(z.T, bias=True), head_map, texts, m=20)
    assert len(found.chosen) == 4
    assert found.share.sum() == pytest.approx(1.0)


def moments_of(z):
    return HeadMoments.of(z[:, None, None], np.zeros(len(z), dtype=int), 1).pooled()


def test_a_head_that_writes_the_attribute_is_told_by_its_texts() -> None:
    rng = np.random.default_rng(3)
    width, n = 12, 400
    general = rng.normal(size=(200, width))
    attribute, neutral = rng.normal(size=(10, width)) * 0.1, rng.normal(size=(10, width)) * 0.1
    attribute[:, 0] += np.repeat([3.0, -3.0], 5)
    neutral[:, 1] += 3.0
    texts = [f"g{i}" for i in range(200)], [f"a{i}" for i in range(10)], [f"n{i}" for i in range(10)]
    pool = Pool.of(texts[0], general, texts[1], attribute, texts[2], neutral)
    z = rng.normal(size=(n, 3))
    z[:, 0] *= 10
    (found,) = text_spans(moments_of(z), np.eye(width)[None, None, :, :3], pool, m=3)
    assert found.first == 1
    assert found.is_attribute[0]
    assert found.attribute_share > 0.8
    assert found.p < 0.1
    assert found.p_adjusted == found.p
    assert found.to_dict()["texts"][0]["attribute"] is True


def test_p_values_are_uniform_where_the_attribute_texts_are_like_any_other() -> None:
    rng = np.random.default_rng(4)
    width, heads = 8, 300
    pool = Pool.of([f"{i}" for i in range(60)], rng.normal(size=(60, width)), [f"a{i}" for i in range(60)],
                   rng.normal(size=(60, width)))  # fmt: skip
    maps = rng.normal(size=(1, heads, width, 6))
    z = rng.normal(size=(200, 1, heads, 6))
    moments = HeadMoments.of(z, np.zeros(200, dtype=int), 1).pooled()
    p = [h.p for h in text_spans(moments, maps, pool, m=6, permutations=999)]
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert all(h.p_matched is None for h in text_spans(moments, maps, pool, [(0, 3)]))


def test_the_count_against_neutral_texts_is_hypergeometric() -> None:
    rng = np.random.default_rng(5)
    pool = Pool.of([], np.zeros((0, 6)), ["a", "b", "c"], rng.normal(size=(3, 6)), ["x", "y", "z"],
                   rng.normal(size=(3, 6)))  # fmt: skip
    z = rng.normal(size=(50, 6))
    (found,) = text_spans(moments_of(z), np.eye(6)[None, None], pool, m=4)
    table = [[found.count, 3 - found.count], [4 - found.count, found.count - 1]]
    assert found.p_matched == pytest.approx(stats.fisher_exact(table, alternative="greater").pvalue)


def test_a_pool_needs_a_vector_a_text() -> None:
    with pytest.raises(InputError, match="2 texts and 3 vectors"):
        Pool.of(["a", "b"], np.zeros((3, 4)))
