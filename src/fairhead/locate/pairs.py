"""Benchmarks of stereotypes as pairs of texts: which is the stereotype, what is scored, which pairs belong together.

Needs no torch itself. The log-odds of a pair are those that its benchmark defines: CrowS-Pairs compares sums of
log-probabilities, StereoSet means per token, and StereoSet counts every target term the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fairhead.data import read_items
from fairhead.errors import InputError, did_you_mean
from fairhead.language.answers import Request
from fairhead.language.benchmark import sample
from fairhead.language.benchmarks import benchmark_of


@dataclass(frozen=True)
class TextPairs:
    """n pairs of texts, stereotype and anti-stereotype.

    Attributes:
        name: of the benchmark.
        ids: of the pairs.
        texts: the texts to score, as many a pair as `per_pair`: stereotype, anti-stereotype and, in StereoSet, an
            unrelated one, by which damage shows.
        per_pair: texts a pair.
        weights: how much each pair counts, [n], adding up to 1.
        clusters: pairs with one number depend on each other, [n].
        categories: by name ("bias_type"), the category of each pair.
        per_token: whether log-odds are of means per token, not of sums.

    Example:
        >>> from fairhead.data.sentence_pairs import CrowsPair
        >>> pairs = pairs_of([CrowsPair(str(i), f"She {i}.", f"He {i}.", "stereo", "gender", ()) for i in range(4)])
        >>> len(pairs), pairs.take(np.array([1, 3])).ids, pairs.weights.sum()
        (4, ('1', '3'), np.float64(1.0))
    """

    name: str
    ids: tuple[str, ...]
    texts: tuple[Request, ...]
    per_pair: int
    weights: NDArray[np.float64]
    clusters: NDArray[np.intp]
    categories: Mapping[str, tuple[str, ...]]
    per_token: bool

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: NDArray[Any]) -> "TextPairs":
        """The chosen pairs: positions, or a mask; weights add up to 1 again."""
        chosen = np.arange(len(self))[rows]
        weights = self.weights[chosen]
        return replace(
            self,
            ids=tuple(self.ids[i] for i in chosen),
            texts=tuple(self.texts[i * self.per_pair + k] for i in chosen for k in range(self.per_pair)),
            weights=weights / weights.sum(),
            clusters=self.clusters[chosen],
            categories={name: tuple(values[i] for i in chosen) for name, values in self.categories.items()},
        )


def read_pairs(spec: str, bias_type: str | None = None, limit: int | None = None, seed: int = 0) -> TextPairs:
    """Pairs of `crows:PATH` or `stereoset:PATH`, or of your own `pairs:PATH` and `triplets:PATH`.

    Args:
        spec: name and path.
        bias_type: only those about, say, "gender"; None for all.
        limit: only so many, drawn at random.
        seed: of the draw.

    Example:
        >>> read_pairs("bold:BOLD")
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: bold has beginnings of texts; pairs of sentences or sentences in threes are needed \
here: crows_pairs, stereoset, pairs, triplets
    """
    data = read_items(spec, "pairs", "triplets")
    items = list(data)
    if bias_type is not None:
        known = sorted({item.bias_type for item in items})
        if bias_type not in known:
            near = did_you_mean(bias_type, known)
            raise InputError(f"{data.name} has no pairs about {bias_type!r}; it has {', '.join(known)}.{near}")
        items = [item for item in items if item.bias_type == bias_type]
    return pairs_of(items if limit is None else sample(items, limit, seed), data.name)


def pairs_of(items: Sequence[Any], name: str | None = None) -> TextPairs:
    """Items of one benchmark as pairs; `name` it where it is not the published one.

    CrowS-Pairs were written one by one, so each is independent of the others unless they share a sentence. Items of
    StereoSet about the same term depend on each other.

    Example:
        >>> from fairhead.data.sentence_pairs import CrowsPair
        >>> pair = CrowsPair("0", "She cried.", "He cried.", "stereo", "gender", ())
        >>> found = pairs_of([pair, pair])
        >>> found.clusters.tolist(), found.per_token, [text.id for text in found.texts[:2]]
        ([0, 0], False, ['0/more', '0/less'])
    """
    if not items:
        raise InputError("there is no pair of texts; at least 2 are needed")
    benchmark = benchmark_of(items)
    if benchmark.pairs is None or benchmark.requests is None:
        raise InputError(f"{benchmark.title} has no pairs of texts")
    pairs, texts = benchmark.pairs(items), benchmark.requests(items, benchmark.options())
    _, codes, counts = np.unique([pair.cluster for pair in pairs], return_inverse=True, return_counts=True)
    return TextPairs(
        name or benchmark.name,
        tuple(pair.id for pair in pairs),
        tuple(texts),
        len(texts) // len(pairs),
        1 / (counts[codes] * len(counts)),
        codes if counts.max() > 1 else _linked([(pair.first, pair.second) for pair in pairs]),
        {kind: tuple(pair.categories[kind] for pair in pairs) for kind in pairs[0].categories},
        benchmark.per_token,
    )


def _linked(pairs: Sequence[tuple[str, str]]) -> NDArray[np.int64]:
    """A number for each pair; pairs that share a text have the same, and so have those that others link."""
    texts = {text: i for i, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
    ends = np.array([[texts[one], texts[other]] for one, other in pairs])
    links = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(len(texts), len(texts)))
    of_text = connected_components(links, directed=False)[1].astype(np.int64)
    return of_text[ends[:, 0]]
