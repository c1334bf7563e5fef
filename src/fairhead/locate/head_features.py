"""One pass over the data, kept: every head's z by row, its moments, and the texts that span what it writes.

A row costs (layers × heads × d + M × d') numbers, whatever the number of tokens: 65 kB for CLIP B/16. Moments are sums
by cell, so that batches, processes and resumed runs simply add up. Rows are kept in memory, or in a folder as
`cached_array` keeps what is computed once: a run that was stopped goes on there, and a later one reads them.

TextSpan chooses texts greedily, by the variance they explain. The published algorithm works on the rows: n × d' numbers
a head. Everything it asks of them is a quadratic form of their second moments, so it runs on those alone, in the head's
own d dimensions, with the same texts chosen; and as it removes each chosen text from all others, a step costs one
product of the pool with a vector.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fairhead.errors import InputError
from fairhead.locate.head_maps import Head
from fairhead.train.features import cached_array, key_of

if TYPE_CHECKING:
    from torch import Tensor

    from fairhead.locate.decompose import Decomposer

Array = NDArray[np.float64]
Array32 = NDArray[np.float32]
# Called with the row to start at; gives the arrays of the next rows by name, each [B, ...], block by block
Blocks = Callable[[int], Iterable[Mapping[str, NDArray[Any]]]]
Arrays = dict[str, NDArray[Any]]
Progress = Callable[[int, int], None] | None
_CHUNK = 512
_NOTHING = 1e-8  # what is left of a text once it is explained, as a share of the longest


class Pooled(NamedTuple):
    """Mean and covariance of every head over a mixture of cells."""

    mean: Array  # [L, H, d]
    covariance: Array  # [L, H, d, d], of the mixture (divided by n, not n − 1)
    n: int  # rows behind it


@dataclass
class HeadMoments:
    """Sums over rows by cell (a group and a class), for all heads."""

    count: NDArray[np.int64]  # rows in each cell, [C]
    first: Array  # sums of x, [C, L, H, d]
    second: Array  # sums of x xᵀ, [C, L, H, d, d]

    @classmethod
    def empty(cls, n_cells: int, shape: Sequence[int]) -> "HeadMoments":
        """No rows yet; `shape` is (layers, heads, d)."""
        first = np.zeros((n_cells, *shape))
        return cls(np.zeros(n_cells, dtype=np.int64), first, np.zeros((*first.shape, shape[-1])))

    @classmethod
    def of(cls, x: NDArray[np.floating], cells: NDArray[np.integer], n_cells: int) -> "HeadMoments":
        """The moments of rows x [n, L, H, d] in the given cells [n]."""
        moments = cls.empty(n_cells, x.shape[1:])
        moments.add(x, cells)
        return moments

    def add(self, x: NDArray[np.floating], cells: NDArray[np.integer]) -> None:
        """Count a batch in: x [B, L, H, d], cells [B]."""
        if len(cells) != len(x) or (len(cells) and not 0 <= cells.min() <= cells.max() < len(self.count)):
            raise InputError(
                f"{len(x)} rows came with {len(cells)} cells, from 0 to {len(self.count) - 1} expected: one a row"
            )
        for cell in np.unique(cells):
            rows = np.asarray(x[cells == cell], dtype=np.float64).transpose(1, 2, 3, 0)  # [L, H, d, b]
            self.count[cell] += rows.shape[-1]
            self.first[cell] += rows.sum(-1)
            self.second[cell] += rows @ rows.swapaxes(-1, -2)

    def pooled(self, by: str = "cells") -> Pooled:
        """Mean and covariance; "cells" count the same, so that the larger group does not set the mean, or "rows" do."""
        chosen = np.flatnonzero(self.count)
        if not len(chosen):
            raise InputError("there are no rows to take moments of")
        n = self.count[chosen]
        weight = (n / n.sum() if by == "rows" else np.full(len(chosen), 1 / len(chosen))) / n
        mean = np.tensordot(weight, self.first[chosen], 1)
        second = np.tensordot(weight, self.second[chosen], 1)
        return Pooled(mean, second - mean[..., :, None] * mean[..., None, :], int(n.sum()))

    def means(self) -> Array:
        """Mean of every cell, [C, L, H, d]; NaN where a cell has no rows."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.first / self.count[:, None, None, None]


@dataclass(frozen=True)
class Features:
    """Terms of n outputs, by row."""

    heads: Array32  # z of every head, [n, L, H, d]
    others: Array32  # terms of embedding, MLPs (and a pool's), [n, M, d']
    output: Array32  # the model's outputs, [n, d']
    scale: Array32  # [n, L]; a head's own output is z / scale. All 1 after a pool.
    maps: Array32  # [L, H, d', d], from z to a head's term

    def __len__(self) -> int:
        return len(self.output)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads."""
        return self.heads.shape[1], self.heads.shape[2]

    def take(self, rows: NDArray[Any]) -> "Features":
        """The chosen rows: positions, or a mask."""
        return Features(self.heads[rows], self.others[rows], self.output[rows], self.scale[rows], self.maps)

    def parts(self, directions: NDArray[np.floating]) -> Array:
        """Each head's part in output · direction: directions [k, d'] to [n, L, H, k]."""
        wanted = np.asarray(directions, dtype=np.float32)
        through = np.einsum("ko,lhod->lhdk", wanted, self.maps, optimize=True)
        out = np.empty((len(self), *self.shape, len(directions)))
        for start in range(0, len(self), _CHUNK):
            rows = slice(start, start + _CHUNK)
            out[rows] = (self.heads[rows].transpose(1, 2, 0, 3) @ through).transpose(2, 0, 1, 3)
        return out

    def outputs(self, rows: slice = slice(None)) -> Array32:
        """The heads' own outputs, before any norm: [n, L, H, d]."""
        return self.heads[rows] / self.scale[rows][:, :, None, None]

    def moments(self, cells: NDArray[np.integer], n_cells: int | None = None, *, own: bool = False) -> HeadMoments:
        """First and second moments by cell, of z or (`own`) of the heads' own outputs."""
        found = HeadMoments.empty(int(cells.max()) + 1 if n_cells is None else n_cells, self.heads.shape[1:])
        for start in range(0, len(self), _CHUNK):
            rows = slice(start, start + _CHUNK)
            found.add(self.outputs(rows) if own else self.heads[rows], cells[rows])
        return found


def collect(
    decomposer: "Decomposer",  # of the model
    # Called with the row to start at; gives the model's inputs, batch by batch, from there on
    batches: Callable[[int], Iterable[Mapping[str, "Tensor"]]],
    n: int,  # rows in all
    **kept: Any,  # folder, identity and progress, as `keep_rows` takes them
) -> Features:
    """Run a model over n rows and keep their terms."""
    layers, heads, width, d = decomposer.maps.shape
    shapes = {"heads": (layers, heads, d), "others": (decomposer.n_others, width), "output": (width,)}
    row = np.dtype([(name, np.float32, shape) for name, shape in {**shapes, "scale": (layers,)}.items()])

    def blocks(start: int) -> Iterator[Mapping[str, Array32]]:
        for batch in batches(start):
            terms = decomposer(batch)
            one = terms.output.new_ones(len(terms.output), decomposer.n_layers)
            made = (terms.heads, terms.others, terms.output, one if terms.scale is None else terms.scale)
            yield {name: x.float().cpu().numpy() for name, x in zip(row.names or (), made, strict=True)}

    return Features(**keep_rows(blocks, row, n, **kept), maps=decomposer.maps.float().cpu().numpy())


def keep_rows(
    blocks: Blocks,
    row: np.dtype[Any],  # the arrays by name, with the type and the shape of a row of each
    n: int,  # rows in all
    *,
    folder: str | os.PathLike[str] | None = None,  # where to write them; None keeps them in memory
    identity: Mapping[str, Any] | None = None,  # what the rows are (model, data, ids): the folder may hold others, too
    progress: Progress = None,  # called with (rows done, n)
) -> Arrays:
    """Make arrays of n rows, or take those that the folder has: each [n, ...]."""

    def fill(arrays: Any, done: int) -> Iterator[int]:
        for block in blocks(done):
            size = len(next(iter(block.values())))
            for name, rows in block.items():
                arrays[name][done : done + size] = rows
            done += size
            yield done
            if progress is not None:
                progress(done, n)
        if done != n:
            raise InputError(f"{done} rows came where {n} were announced")

    names = row.names or ()
    if folder is None:
        arrays: Arrays = {name: np.empty((n, *row[name].shape), row[name].base) for name in names}
        deque(fill(arrays, 0), maxlen=0)
        return arrays
    about = dict(identity or {})
    array = cached_array(folder, key_of(str(row), n, about), (n,), row, fill, about)
    return {name: array[name] for name in names}


class Spanned(NamedTuple):
    """The texts chosen for one head, in order."""

    chosen: NDArray[np.intp]  # positions in the pool, [m]
    share: Array  # of the head's variance that each explains, [m]
    rank: int  # dimensions of the span that texts were projected on


def span_of_moments(
    mean: Array, covariance: Array, head_map: NDArray[np.floating], texts: NDArray[np.floating], m: int = 20
) -> Spanned:
    """TextSpan from a head's moments: mean [d] and covariance [d, d] of z, and its map [d', d] to the output.

    Of the pool [T, d'], m texts are chosen by the variance along them, each being removed from the others; fewer where
    they explain nothing more.
    """
    basis, triangle = np.linalg.qr(np.asarray(head_map, dtype=np.float64))  # terms = (triangle z) in this basis
    spread = triangle @ covariance @ triangle.T
    centre = triangle @ mean
    # Rows are not centred when the span is found, as in the published algorithm.
    values, vectors = np.linalg.eigh(spread + np.outer(centre, centre))
    kept = vectors[:, values > values[-1] * 1e-12]
    spread = kept.T @ spread @ kept
    pool = np.asarray(texts, dtype=np.float64) @ basis @ kept  # [T, r]
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
            raise InputError(f"the pool has {len(texts)} texts and {len(vectors)} vectors; expected one per text")
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
    p_adjusted: float = float("nan")  # p after Benjamini–Hochberg over the heads looked at

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
    rng, found = np.random.default_rng(seed), []
    n_marked, n_neutral = int(pool.attribute.sum()), int(pool.neutral.sum())
    for head in (Head(*h) for h in (np.ndindex(maps.shape[:2]) if heads is None else heads)):
        span = span_of_moments(moments.mean[head], moments.covariance[head], maps[head], pool.vectors, m)
        marked, size = pool.attribute[span.chosen], len(span.chosen)
        share = float(span.share[marked].sum())
        # Which of the chosen texts a random relabelling would mark: drawn without replacement from the pool.
        others = len(pool.texts) - n_marked
        hits = rng.hypergeometric(n_marked, others, size, permutations) if size else np.zeros(permutations)
        order = rng.random((permutations, size)).argsort(1).argsort(1)
        chance = ((order < hits[:, None]) * span.share).sum(1)
        first, count = np.flatnonzero(marked), int(marked.sum())
        drawn = count + int(pool.neutral[span.chosen].sum())
        matched = float(stats.hypergeom.sf(count - 1, n_marked + n_neutral, n_marked, drawn)) if n_neutral else None
        texts = tuple(pool.texts[i] for i in span.chosen)
        place = int(first[0]) + 1 if len(first) else None
        p = float((1 + (chance >= share - 1e-12).sum()) / (1 + permutations))
        marks = tuple(bool(x) for x in marked)
        found.append(HeadTexts(head, texts, tuple(span.share.tolist()), marks, place, count, share, p, matched))
    if not found:
        return ()
    adjusted = stats.false_discovery_control([h.p for h in found])
    return tuple(replace(h, p_adjusted=float(p)) for h, p in zip(found, adjusted, strict=True))
