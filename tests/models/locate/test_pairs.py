"""Pairs of texts: clusters, halves, intervals and plans, with no model."""

import numpy as np
import pytest
from made_language import (
    stereoset_items,
    text_pairs,
)
from scipy import stats

from fairhead.data.sentences import CrowsPair
from fairhead.errors import InputError
from fairhead.locate.head_maps import pair_cells, score
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.pair_question import PairQuestion
from fairhead.locate.pair_rows import halves_of_pairs, pairs_of


def test_holm_controls_the_whole_map() -> None:
    parts = np.random.default_rng(0).normal(size=(60, 3, 4))
    found = score(parts, parts.sum((1, 2)), pair_cells(np.ones(len(parts))), correction="holm")
    t = stats.ttest_1samp(parts.reshape(60, -1), 0)
    np.testing.assert_allclose(found.p.ravel(), t.pvalue)
    ordered = np.sort(t.pvalue)
    assert found.p_adjusted.min() == pytest.approx(min(1, 12 * ordered[0]))
    interval = t.confidence_interval()
    np.testing.assert_allclose(found.low.ravel(), interval.low)
    np.testing.assert_allclose(found.high.ravel(), interval.high)


def test_clusters_widen_the_intervals() -> None:
    parts = np.repeat(np.random.default_rng(0).normal(size=(30, 1, 2)), 4, axis=0)
    total = parts.sum((1, 2))
    alone = score(parts, total, pair_cells(np.ones(120)))
    together = score(parts, total, pair_cells(np.ones(120), np.repeat(np.arange(30), 4)))
    once = score(parts[::4], total[::4], pair_cells(np.ones(30)))
    assert ((together.high - together.low) > 1.9 * (alone.high - alone.low)).all()
    np.testing.assert_allclose(together.high, once.high)


def test_paired_intervals_cover_and_permutations_are_exact() -> None:
    """Of 200 made experiments with a known change of 0.3, the interval holds it about 19 times in 20."""
    rng = np.random.default_rng(0)
    pairs = text_pairs(n=60)
    sums = pairs.sums
    inside, small = 0, 0
    for i in range(200):
        base = rng.normal(1, 1, 60)
        moved = base + rng.normal(0.3, 0.5, 60)
        change = pairs.compare(sums(base), sums(moved), LocatePlan(n_boot=400, seed=i)).differences[0]
        inside += change.low <= 0.3 <= change.high
        same = base + rng.normal(0, 0.5, 60)
        null = pairs.compare(sums(base), sums(same), LocatePlan(n_boot=200, seed=i)).differences[0]
        small += null.p <= 0.05
    assert 180 <= inside <= 198
    assert small <= 20


def test_pairs_that_others_link_belong_together() -> None:
    texts = [("a", "b"), ("c", "d"), ("e", "f"), ("a", "c")]  # the last one links the first two
    pairs = pairs_of([CrowsPair(str(i), more, less, "stereo", "gender", ()) for i, (more, less) in enumerate(texts)])
    first, second, alone, last = pairs.clusters
    assert first == second == last != alone


def test_halves_keep_clusters_whole_and_need_some() -> None:
    pairs = pairs_of(stereoset_items())
    choosing = halves_of_pairs(pairs)
    assert set(pairs.clusters[choosing]).isdisjoint(pairs.clusters[~choosing])
    with pytest.raises(InputError, match="at least 4 are needed"):
        halves_of_pairs(pairs_of(stereoset_items(2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": "concept"}, "it is gap or effect"),
        ({"kinds": ("project",)}, "a projection needs two groups"),
        ({"count": 0}, "at least 1 of each"),
    ],
)
def test_plans_that_cannot_be(options, message) -> None:
    with pytest.raises(InputError, match=message):
        PairQuestion.check(LocatePlan(**options))
