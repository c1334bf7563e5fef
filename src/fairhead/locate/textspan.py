"""TextSpan: which texts span what a head writes, greedily, by the variance they explain.

The published algorithm works on the rows: n × d' numbers a head. Everything it asks of them is a quadratic form of
their second moments, so it runs on those alone, in the head's own d dimensions, with the same texts chosen; and as it
removes each chosen text from all others, a step costs one product of the pool with a vector.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fairhead.errors import InputError
from fairhead.locate.head_features import Array, Pooled
from fairhead.locate.head_maps import Head

_NOTHING = 1e-8  # what is left of a text once it is explained, as a share of the longest


class Spanned(NamedTuple):
    """The texts chosen for one head, in order."""

    chosen: NDArray[np.intp]  # positions in the pool, [m]
    share: Array  # of the head's variance that each explains, [m]
    rank: int  # dimensions of the span that texts were projected on


def span_of_moments(
    mean: Array, covariance: Array, head_map: NDArray[np.floating], texts: NDArray[np.floating], m: int = 20
) -> Spanned:
    """TextSpan from a head's moments: mean [d] and covariance [d, d] of z, and its map [d', d] to the output.

    Of the pool [T, d'], m texts are chosen, fewer where they explain nothing more.
    """
    basis, triangle = np.linalg.qr(np.asarray(head_map, dtype=np.float64))  # terms = (triangle z) in this basis
    spread = triangle @ covariance @ triangle.T
    centre = triangle @ mean
    # Rows are not centred when the span is found, as in the published algorithm.
    values, vectors = np.linalg.eigh(spread + np.outer(centre, centre))
    kept = vectors[:, values > values[-1] * 1e-12]
    spread = kept.T @ spread @ kept
    pool = np.asarray(texts, dtype=np.float64) @ basis @ kept  # [T, r]
    return _greedy(pool, spread, m)


def _greedy(pool: Array, spread: Array, m: int) -> Spanned:
    """Choose texts by variance along them, removing each from the others: pool [T, r], spread [r, r]."""
    pool = pool.copy()
    answer = pool @ spread  # kept up to date with the pool
    total = float(np.trace(spread))
    smallest = _NOTHING * float((pool**2).sum(1).max(initial=0.0))
    chosen: list[int] = []
    shares: list[float] = []
    for _ in range(min(m, len(pool), pool.shape[1])):
        scores = np.einsum("tr,tr->t", answer, pool)
        best = int(np.argmax(scores))
        text, length = pool[best].copy(), float(pool[best] @ pool[best])
        if length <= smallest or total <= 0:
            break
        chosen.append(best)
        shares.append(float(scores[best]) / length / total)
        along = pool @ text / length
        pool -= along[:, None] * text
        answer -= along[:, None] * (spread @ text)
    return Spanned(np.array(chosen, dtype=np.intp), np.array(shares), pool.shape[1])


@dataclass(frozen=True)
class Pool:
    """Texts to choose from, with those that name the attribute and their matched neutral controls marked."""

    texts: tuple[str, ...]  # T of them
    vectors: NDArray[np.floating]  # [T, d']
    attribute: NDArray[np.bool_]  # which of them name the attribute, [T] bool: equally many of each pole
    neutral: NDArray[np.bool_]  # which are their controls, [T] bool: made with the same templates

    @classmethod
    def of(
        cls,
        general: Sequence[str],
        general_vectors: NDArray[np.floating],
        attribute: Sequence[str] = (),
        attribute_vectors: NDArray[np.floating] | None = None,
        neutral: Sequence[str] = (),
        neutral_vectors: NDArray[np.floating] | None = None,
    ) -> "Pool":
        """General descriptions, attribute prompts and neutral ones, in one pool."""
        parts = [general_vectors, attribute_vectors, neutral_vectors]
        vectors = np.concatenate([np.asarray(v, dtype=np.float64) for v in parts if v is not None and len(v)])
        texts = (*general, *attribute, *neutral)
        if len(texts) != len(vectors):
            raise InputError(f"the pool has {len(texts)} texts and {len(vectors)} vectors; one a text is expected")
        place = np.repeat([0, 1, 2], [len(general), len(attribute), len(neutral)])
        return cls(texts, vectors, place == 1, place == 2)


@dataclass(frozen=True)
class HeadTexts:
    """What one head's TextSpan says about an attribute."""

    head: Head  # which
    texts: tuple[str, ...]  # chosen, in order
    share: tuple[float, ...]  # of the head's variance that each explains
    is_attribute: tuple[bool, ...]  # whether each names the attribute
    first: int | None  # place of the first that does, from 1; None where none does
    count: int  # how many do
    attribute_share: float  # of the variance, explained by them
    p: float  # of as much under a random relabelling of the pool
    # Of as many attribute texts among all attribute and neutral texts that were chosen; None without neutral texts
    p_matched: float | None
    p_adjusted: float = field(default=float("nan"))  # p after Benjamini–Hochberg over the heads looked at

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "head": list(self.head),
            "texts": [
                {"text": text, "share": share, "attribute": marked}
                for text, share, marked in zip(self.texts, self.share, self.is_attribute, strict=True)
            ],
            "first_attribute": self.first,
            "attribute_count": self.count,
            "attribute_share": self.attribute_share,
            "p": self.p,
            "p_matched": self.p_matched,
            "p_adjusted": self.p_adjusted,
        }


def text_spans(
    moments: Pooled,
    maps: NDArray[np.floating],
    pool: Pool,
    heads: Sequence[Head] | None = None,
    *,
    m: int = 20,
    permutations: int = 2000,
    seed: int = 0,
) -> tuple[HeadTexts, ...]:
    """TextSpan of several heads, with how surprising the attribute texts among the chosen ones are.

    The choice does not know which texts name the attribute; relabelling as many random texts of the pool
    (`permutations` times) gives the share of variance that chance would explain. Against the matched neutral texts the
    count is hypergeometric. Moments are those of z, maps [L, H, d', d]; without `heads` it is asked of all.
    """
    chosen_heads = [Head(*h) for h in heads] if heads is not None else [Head(*h) for h in np.ndindex(maps.shape[:2])]
    rng = np.random.default_rng(seed)
    n_attribute, n_texts = int(pool.attribute.sum()), len(pool.texts)
    found = []
    for head in chosen_heads:
        span = span_of_moments(moments.mean[head], moments.covariance[head], maps[head], pool.vectors, m)
        marked = pool.attribute[span.chosen]
        share = float(span.share[marked].sum())
        # Which of the chosen texts a random relabelling would mark: drawn without replacement from the pool.
        hits = (
            rng.hypergeometric(n_attribute, n_texts - n_attribute, len(span.chosen), permutations)
            if len(span.chosen)
            else np.zeros(permutations, dtype=np.int64)
        )
        order = rng.random((permutations, len(span.chosen))).argsort(1).argsort(1)
        chance = ((order < hits[:, None]) * span.share).sum(1)
        first = np.flatnonzero(marked)
        found.append(
            HeadTexts(
                head,
                tuple(pool.texts[i] for i in span.chosen),
                tuple(span.share.tolist()),
                tuple(bool(x) for x in marked),
                int(first[0]) + 1 if len(first) else None,
                int(marked.sum()),
                share,
                float((1 + (chance >= share - 1e-12).sum()) / (1 + permutations)),
                _against_neutral(pool, span),
            )
        )
    if not found:
        return ()
    adjusted = stats.false_discovery_control([h.p for h in found])
    return tuple(HeadTexts(**{**vars(h), "p_adjusted": float(p)}) for h, p in zip(found, adjusted, strict=True))


def _against_neutral(pool: Pool, span: Spanned) -> float | None:
    marked, neutral = int(pool.attribute[span.chosen].sum()), int(pool.neutral[span.chosen].sum())
    n_marked, n_neutral = int(pool.attribute.sum()), int(pool.neutral.sum())
    if not n_neutral:
        return None
    return float(stats.hypergeom.sf(marked - 1, n_marked + n_neutral, n_marked, marked + neutral))
