"""Figures of pairs of texts before and after an edit, paired, with intervals. Needs no torch itself.

Every figure is a function of sums over pairs; how it changes is asked as it is of the benchmarks (`language.paired`).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.language.paired import change_of_sums
from fairhead.language.resampling import Resampling, cluster_sums, divide
from fairhead.locate.pairs import TextPairs
from fairhead.stats import Difference, adjust

Array = NDArray[np.float64]
# Columns of the sums over pairs.
_WEIGHT, _ODDS, _SIZE, _PREFERS, _LOST, _TOKENS, _MEANINGFUL = range(7)
# What an even (or, of the last, an able) model would show.
IDEALS: Mapping[str, float | None] = {
    "log_odds": 0.0,
    "log_odds_size": 0.0,
    "ss": 0.5,
    "nll": None,
    "lms": 1.0,
}


def figure_names(pairs: TextPairs) -> tuple[str, ...]:
    """The figures that these pairs have: lms needs an unrelated text.

    They are: `log_odds`, the mean log-odds of the first pole against the second; `log_odds_size`, their mean absolute
    value; `ss`, the share of pairs in which the first pole is likelier (ties count half); `nll`, the mean negative
    log-probability of a token of all texts, whose rise is damage; `lms`, how often a meaningful text is likelier than
    the unrelated one.

    Example:
        >>> from fairhead.data.crows_pairs import CrowsPair
        >>> from fairhead.locate.pairs import pairs_of
        >>> figure_names(pairs_of([CrowsPair("0", "She cried.", "He cried.", "stereo", "gender", ())]))
        ('log_odds', 'log_odds_size', 'ss', 'nll')
    """
    return tuple(name for name in IDEALS if name != "lms" or pairs.per_pair == 3)


class Read(NamedTuple):
    """What a pass says about n pairs.

    Attributes:
        log_odds: stereotype against anti-stereotype, [n].
        lost: summed negative log-probability of the pair's texts, [n].
        tokens: their tokens, [n].
        meaningful: how often a meaningful text is likelier than the unrelated one, [n]; 0 where there is none.
    """

    log_odds: Array
    lost: Array
    tokens: Array
    meaningful: Array


def read_of(pairs: TextPairs, logprobs: Array, tokens: NDArray[np.integer]) -> Read:
    """From summed log-probabilities and token counts, one a text, [n · per_pair].

    Example:
        >>> from fairhead.data.crows_pairs import CrowsPair
        >>> from fairhead.locate.pairs import pairs_of
        >>> pairs = pairs_of([CrowsPair("0", "She cried.", "He cried.", "stereo", "gender", ())])
        >>> read_of(pairs, np.array([-3.0, -5.0]), np.array([3, 3])).log_odds.tolist()
        [2.0]
    """
    shape = (len(pairs), pairs.per_pair)
    lost, count = -logprobs.reshape(shape), tokens.reshape(shape).astype(np.float64)
    likely = -lost / count if pairs.per_token else -lost
    # Without an unrelated text, none is likelier than it.
    meaningful = (likely[:, :2] > likely[:, 2:3]).sum(1) / 2 if pairs.per_pair == 3 else np.zeros(len(pairs))
    return Read(likely[:, 0] - likely[:, 1], lost.sum(1), count.sum(1), meaningful)


def columns(pairs: TextPairs, read: Read | Array, sign: float = 1.0) -> Array:
    """What each pair adds to the sums behind the figures, [n, 7].

    Args:
        pairs: n of them.
        read: what a pass says, or log-odds alone [n]; nll and lms then have no value.
        sign: −1 for the log-odds of the anti-stereotype.

    Example:
        >>> from fairhead.data.crows_pairs import CrowsPair
        >>> from fairhead.locate.pairs import pairs_of
        >>> pairs = pairs_of([CrowsPair(str(i), f"She {i}.", f"He {i}.", "stereo", "gender", ()) for i in range(2)])
        >>> found = figures(columns(pairs, np.array([3.0, -1.0])).sum(0))
        >>> float(found["log_odds"]), float(found["log_odds_size"]), float(found["ss"])
        (1.0, 2.0, 0.5)
    """
    nothing = np.zeros(len(pairs))
    full = read if isinstance(read, Read) else Read(read, nothing, nothing, nothing)
    odds = sign * full.log_odds
    weight = pairs.weights
    weighted = np.column_stack([np.ones(len(pairs)), odds, np.abs(odds), (1 + np.sign(odds)) / 2]) * weight[:, None]
    return np.column_stack([weighted, full.lost, full.tokens, full.meaningful * weight])


def figures(totals: Array) -> dict[str, Array]:
    """The figures from totals [..., 7], each [...]; see `columns`."""
    weight = totals[..., _WEIGHT]
    return {
        "log_odds": divide(totals[..., _ODDS], weight),
        "log_odds_size": divide(totals[..., _SIZE], weight),
        "ss": divide(totals[..., _PREFERS], weight),
        "nll": divide(totals[..., _LOST], totals[..., _TOKENS]),
        "lms": divide(totals[..., _MEANINGFUL], weight),
    }


def paired_differences(
    before: Array,
    after: Array,
    clusters: NDArray[np.integer],
    names: Sequence[str],
    *,
    n_boot: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[Difference, ...]:
    """Each figure after minus before, with a paired interval and p-value; p-values are corrected by Holm.

    Args:
        before: from `columns`, [n, 7].
        after: the same pairs after an edit.
        clusters: pairs with one number stay together, [n].
        names: figures wanted.
        n_boot: replicates of the bootstrap, and permutations at most.
        level: confidence level.
        seed: of both.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> before = np.abs(rng.normal(size=(80, 7)))
        >>> before[:, 0] = 1 / 80
        >>> after = before.copy()
        >>> after[:, 1] -= 0.02
        >>> change = paired_differences(before, after, np.arange(80), ["log_odds"], n_boot=500)[0]
        >>> round(change.value, 2), change.p < 0.05
        (-1.6, True)
    """
    first, second = (cluster_sums(table, clusters.tolist()) for table in (before, after))
    how = Resampling(n_boot, seed, level, min_items=1)
    found = [
        change_of_sums(
            name, partial(_figure, name=name), first, second, len(before), how, ideal=IDEALS[name], n_perm=n_boot
        )
        for name in names
    ]
    adjusted = adjust([change.p for change in found], "holm")
    return tuple(
        Difference(
            metric=change.metric,
            group_by=None,
            a=change.before,
            b=change.after,
            value=change.value,
            low=change.low,
            high=change.high,
            n=change.n,
            p=change.p,
            p_adjusted=p,
            undefined=change.undefined,
            mde=change.mde,
            ideal=change.ideal,
        )
        for change, p in zip(found, adjusted, strict=True)
    )


def _figure(totals: Array, name: str) -> Array:
    return figures(totals)[name]
