"""What can be put in a head's place: nothing, its mean, another row's output, itself without the group, or a gain.

Edits are learned on one half of the rows and act on the heads' own outputs, before W_O. They can be applied as a true
forward pass (`apply`), estimated as a direct effect (`gap_question.py`), or baked into the weights (`bake`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fairhead.errors import InputError, UnsupportedModel
from fairhead.heads import Site, Tap, tap
from fairhead.language.packing import TokenSequence
from fairhead.language.row_layout import quiet
from fairhead.language.scorer import Scorer
from fairhead.locate.head_features import Array, Features, HeadMoments
from fairhead.locate.head_maps import Cells
from fairhead.locate.streams import stream_of

if TYPE_CHECKING:
    from fairhead.locate.decompose import Decomposer

Kind = Literal["zero", "mean", "resample", "project", "splince", "gain"]
KINDS: tuple[str, ...] = get_args(Kind)
GROUPLESS_KINDS = ("mean", "zero", "resample")  # not fitted to a difference between groups
_BANK = 1024  # tokens whose head outputs are kept to resample from


@dataclass(frozen=True)
class HeadEdits:
    """What each kind of edit puts in a head's place: x becomes c + M (x − c).

    "mean" and "zero" have M = 0; "project" and "splince" erase the group, "gain" has M = g · 1. A strength from 0 to 1
    behind the kind ("project@0.5") goes that part of the way from x to there.
    """

    means: Array  # mean own output of each head, every cell of group and label counting the same, [L, H, d]
    # By kind, M of each head, [L, H, d, d]. "project" is LEACE: no linear trace of the group given the label is left,
    # and what is left is as near to x as can be. "splince" also keeps the covariance with the label as it is.
    matrices: Mapping[str, Array]
    shrinkage: float  # how far the covariances behind them were shrunk, at most; near 1 there were too few rows
    n: int  # rows behind them

    @classmethod
    def of_moments(cls, moments: HeadMoments, n: int) -> "HeadEdits":
        """From the moments of the heads' own outputs, in cells 2 · label + group."""
        pooled = moments.pooled()
        by_cell = moments.means()
        group = (by_cell[1::2] - by_cell[0::2]).mean(0)[..., None]  # [L, H, d, 1]
        label = (by_cell[1::2] + by_cell[0::2]) / 2 - pooled.mean  # [labels, L, H, d]
        covariance, amount = shrunk(pooled.covariance, n)
        kept = np.moveaxis(label[:-1], 0, -1)  # the last follows from the others
        matrices = {"project": erasing(covariance, group), "splince": erasing(covariance, group, kept)}
        return cls(pooled.mean, matrices, amount, n)

    def with_gains(self, gains: Array) -> "HeadEdits":
        """The same with a gain for each head, [L, H]."""
        scaled = gains[..., None, None] * np.eye(self.means.shape[-1])
        return replace(self, matrices={**self.matrices, "gain": scaled})

    @classmethod
    def learn(cls, features: Features, cells: Cells) -> "HeadEdits":
        """From the token that the features were read at."""
        return cls.of_moments(features.moments(cells.cell, len(cells.counts), own=True), len(features))

    @classmethod
    def learn_everywhere(
        cls, decomposer: "Decomposer", batches: Iterable[Mapping[str, Tensor]], cells: Cells
    ) -> "HeadEdits":
        """From all tokens, for edits that act on all of them: another pass over the images."""
        taps = tap(decomposer.stream.base)
        sums: dict[int, list[Tensor]] = {}  # by layer: rows [cells], first [cells, H, d] and second [cells, H, d, d]
        now: list[tuple[NDArray[np.intp], Tensor | None]] = []

        def watch(x: Tensor, site: Site) -> Tensor:  # x [B, T, H, d]
            cell, mask = now[-1]
            n_cells, (_, _, heads, d) = len(cells.counts), x.shape
            if site.layer not in sums:
                shapes = ((n_cells,), (n_cells, heads, d), (n_cells, heads, d, d))
                sums[site.layer] = [x.new_zeros(shape, dtype=torch.float64) for shape in shapes]
            count, first, second = sums[site.layer]
            for number in np.unique(cell):
                chosen = torch.from_numpy(np.flatnonzero(cell == number)).to(x.device)
                rows = x[chosen] if mask is None else x[chosen][mask[chosen].bool()]  # not padding
                rows = rows.reshape(-1, heads, d).permute(1, 2, 0).double()  # [H, d, tokens]
                count[number] += rows.shape[-1]
                first[number] += rows.sum(-1)
                second[number] += rows @ rows.mT
            return x

        done = 0
        with torch.no_grad(), taps as heads:
            heads.edit([(s.layer, h) for s in heads.sites for h in range(s.n_heads)], watch)
            for batch in batches:
                size = len(next(iter(batch.values())))
                now.append((cells.cell[done : done + size], batch.get("attention_mask")))
                decomposer.stream.base(**batch)
                done += size
        count, first, second = (
            np.stack([sums[site.layer][i].cpu().numpy() for site in taps.sites], axis=1) for i in range(3)
        )
        return cls.of_moments(HeadMoments(count[:, 0].astype(np.int64), first, second), done)

    def affine(self, kind: str, layer: int) -> tuple[Array, Array]:
        """The middle c [H, d] and the matrix M [H, d, d] of one layer's edit."""
        name, strength = parsed(kind)
        middle = self.means[layer]
        eye = np.eye(middle.shape[-1])
        still = name in ("mean", "zero")
        matrix = np.zeros((len(middle), *eye.shape)) if still else self.matrices[name][layer]
        return 0 * middle if name == "zero" else middle, eye + strength * (matrix - eye)

    def outputs(self, kind: str, x: NDArray[np.floating], layer: int, order: NDArray[np.intp]) -> NDArray[np.floating]:
        """One layer's own outputs x [n, H, d] after an edit; `order` [n] says whose output a resampled row gets."""
        if kind == "resample":
            return x[order]
        middle, matrix = self.affine(kind, layer)
        if not matrix.any():
            return np.broadcast_to(middle, x.shape)
        return middle + np.einsum("hij,nhj->nhi", matrix, x - middle, optimize=True)

    def moved(self, kind: str, x: Tensor, layer: int) -> Tensor:
        """By how much an edit moves one layer's own outputs x [..., H, d]."""
        middle, matrix = (_tensor(part).to(x) for part in self.affine(kind, layer))
        x = x - middle
        return -x if not matrix.any() else torch.einsum("hij,...hj->...hi", matrix, x) - x

    def apply(self, heads: Tap, where: Sequence[tuple[int, int]], kind: str, tokens: int | None = 0) -> None:
        """Ask an open tap for the edit, at the first token or (None) at all of them.

        Resampling gives each row of a batch the output of the row half a batch away: rows should come in random order.
        """
        check_kind(kind)
        if not where:
            return
        if kind == "resample":
            heads.edit(where, _swap, tokens)
            return
        parts = {layer: [*map(_tensor, self.affine(kind, layer))] for layer in {layer for layer, _ in where}}
        if not any(matrix.any() for _, matrix in parts.values()):
            heads.mean(where, {layer: middle for layer, (middle, _) in parts.items()}, tokens)
            return
        middles, matrices = ({(layer, head): parts[layer][i][head] for layer, head in where} for i in (0, 1))
        heads.project(where, matrices, middles, tokens)

    def bake(self, model: nn.Module, where: Sequence[tuple[int, int]], kind: str) -> None:
        """Write an edit of all tokens (any but "resample") into W_O and its bias, for an ordinary model.

        `where` counts the attention layers of `model`; of a CLIP with two towers, give the image tower. A family whose
        configuration can ask for biases of its attention (Llama's `attention_bias`) gets them, all 0 but where an edit
        needs one.
        """
        check_kind(kind)
        if kind == "resample":
            raise InputError(
                "resampling cannot be baked into weights: it needs other images; use zero, mean or project"
            )
        sites = tap(model).sites
        needed = parsed(kind)[0] != "zero"
        if needed and any(getattr(sites[layer].projection, "bias", None) is None for layer, _ in where):
            _give_biases(sites)
        for layer in sorted({layer for layer, _ in where}):
            site = sites[layer]
            projection: Any = site.projection
            if type(projection) not in (nn.Linear, Conv1D):
                raise UnsupportedModel(
                    f"the output projection of layer {layer} ({site.family}) is a {type(projection).__name__}, and an "
                    "edit is baked into a plain linear layer alone: merge adapters or undo quantisation first"
                )
            by_head = projection.weight.data if type(projection) is nn.Linear else projection.weight.data.T
            for head in sorted(h for place, h in where if place == layer):
                columns = slice(head * site.head_dim, (head + 1) * site.head_dim)
                block = by_head[:, columns].double()
                middle, matrix = (torch.tensor(part[head]).to(block) for part in self.affine(kind, layer))
                by_head[:, columns] = (block @ matrix).to(by_head.dtype)
                if needed:
                    projection.bias.data += (block @ (middle - matrix @ middle)).to(projection.bias.dtype)


def shrunk(covariance: Array, n: int) -> tuple[Array, float]:
    """A covariance that can be inverted though there are few rows: shrunk towards its mean variance, and how far.

    The amount is the oracle-approximating one of Chen, Wiesel, Eldar and Hero (2010), which needs only the covariance
    itself and n. Covariances [..., d, d] share no amount; the largest is returned.
    """
    d = covariance.shape[-1]
    trace = np.trace(covariance, axis1=-2, axis2=-1)
    alpha = (covariance**2).mean((-1, -2))
    mu = trace / d
    with np.errstate(invalid="ignore", divide="ignore"):
        amount = np.where(alpha == mu**2 / d, 1.0, np.minimum(1.0, (alpha + mu**2) / ((n + 1.0) * (alpha - mu**2 / d))))
    identity = np.eye(d) * mu[..., None, None]
    matrix = (1 - amount)[..., None, None] * covariance + amount[..., None, None] * identity
    return matrix, float(np.max(amount))


def erasing(covariance: Array, group: Array, kept: Array | None = None) -> Array:
    """The matrix [..., d, d] that takes the directions of the group out of x, given the covariance of x [..., d, d].

    Directions [..., d, k] are covariances of x with the group: M = 1 − G (Gᵀ R G)⁺ Gᵀ R has M G = 0. With R the inverse
    covariance this is LEACE (Belrose et al., 2023), the least change of x that erases them. Directions that are `kept`
    [..., d, c], covariances with the label, stay as they are: M Y = Y, where R is the inverse covariance without what
    it says of Y (SPLINCE, Holstege et al., 2025). Where a group's direction lies among those, it stays, too.
    """
    eye = np.eye(covariance.shape[-1])
    silent = np.trace(covariance, axis1=-2, axis2=-1)[..., None, None] <= 0  # a silent head has nothing to erase
    inverse = np.linalg.inv(np.where(silent, eye, covariance))
    reader = inverse
    if kept is not None and kept.shape[-1]:
        seen = inverse @ kept  # [..., d, c]
        reader = inverse - seen @ np.linalg.pinv(kept.mT @ seen, rcond=1e-8, hermitian=True) @ seen.mT
    size, left = group.mT @ inverse @ group, group.mT @ reader @ group
    left = np.where(left > 1e-6 * size, left, 0.0) if left.shape[-1] == 1 else left
    return np.asarray(eye - group @ np.linalg.pinv(left, rcond=1e-6, hermitian=True) @ group.mT @ reader)


def parsed(kind: str) -> tuple[str, float]:
    """A kind and its strength."""
    name, _, text = kind.partition("@")
    try:
        strength = float(text or 1)
    except ValueError:
        strength = float("nan")
    if not 0 <= strength <= 1:
        raise InputError(f"kind is {kind!r}; a strength behind @ is a number from 0 to 1, such as {name}@0.5")
    if name == "resample" and strength != 1:
        raise InputError(f"kind is {kind!r}: another row's output has no strength; use resample")
    return name, strength


def check_kind(kind: str, kinds: Sequence[str] = KINDS) -> None:
    """Refuse what is not a kind of edit, or not one of those that can be made here."""
    if parsed(kind)[0] not in kinds:
        why = ": a projection needs two groups of rows, and pairs of texts are about many" if kind in KINDS else ""
        raise InputError(f"kind is {kind!r}; expected one of {', '.join(kinds)}{why}")


def _give_biases(sites: Sequence[Site]) -> None:
    """Make room for means in a family that has biases on request: all of its attention layers get them, as zeros."""
    first: Any = sites[0].module
    config: Any = getattr(first, "config", None)
    projection = next((name for name, part in first.named_modules() if part is sites[0].projection), "")
    known = hasattr(config, "attention_bias") and not config.attention_bias
    if known:
        config.attention_bias = True  # so that the saved model is loaded with them
        with torch.device("meta"):
            wanted = {name for name, _ in type(first)(config, layer_idx=0).named_parameters() if name.endswith(".bias")}
        if f"{projection}.bias" not in wanted:
            config.attention_bias, known = False, False
    if not known:
        raise UnsupportedModel(
            f"the output projection of layer {sites[0].layer} ({sites[0].family}) has no bias to hold a mean, and its "
            "family has none; bake 'zero'"
        )
    for site in sites:
        for name in sorted(wanted):
            part: Any = site.module.get_submodule(name.removesuffix(".bias"))
            if part.bias is None:
                part.bias = nn.Parameter(part.weight.new_zeros(part.weight.shape[0]), requires_grad=False)


def _tensor(array: Array) -> Tensor:
    return torch.tensor(array, dtype=torch.float32)


def _swap(x: Tensor, site: Site) -> Tensor:
    if len(x) < 2:
        raise InputError("resampling needs at least two rows in every batch")
    return x.roll(len(x) // 2, 0)


@dataclass(frozen=True)
class TextEdits(HeadEdits):
    """Edits of a language model's heads: zero, their mean over tokens, or their output at a token of another text."""

    bank: NDArray[np.float32]  # own outputs of every head at tokens drawn from the texts, [R, L, H, d]
    seed: int = 0  # of the draws from it
    # What was drawn or brought to a device before; passes ask for the same again and again.
    _kept: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def learn_texts(
        cls, scorer: Scorer, sequences: Sequence[TokenSequence], seed: int = 0, bank: int = _BANK
    ) -> "TextEdits":
        """Means, and a bank of so many head outputs, over all tokens of some texts but the start token.

        Take both texts of each pair, so that neither weighs more.
        """
        batches = list(scorer.planned(sequences))
        # Tokens in the order in which they will be read; those at the root of a tree are start tokens.
        inside = [[row.depth > 0 for row in batch.rows] for batch in batches]
        total = sum(int(rows.sum()) for batch in inside for rows in batch)
        if total < 1:
            raise InputError("the texts have no token besides the start token; there is nothing to take a mean of")
        drawn = np.sort(np.random.default_rng(seed).choice(total, min(bank, total), replace=False))
        base = stream_of(scorer.model).base
        taps = tap(base)
        sums: list[Tensor] = []
        kept: list[Tensor] = []
        done = 0
        for batch, rows in zip(batches, inside, strict=True):
            inputs: Any = batch.layout.inputs(batch.rows)
            mask = torch.zeros(inputs["input_ids"].shape, dtype=torch.bool)
            for i, chosen in enumerate(rows):
                mask[i, : len(chosen)] = torch.from_numpy(chosen)
            size = int(mask.sum())
            here = torch.from_numpy(drawn[(drawn >= done) & (drawn < done + size)] - done)
            with quiet(scorer.model), taps as heads:
                reading = heads.read("output", mask.to(inputs["input_ids"].device))
                base(**inputs, use_cache=False)
                sums.append(torch.stack([x.double().sum(0) for x in reading]).cpu())
                kept.append(torch.stack([x[here.to(x.device)].float() for x in reading], 1).cpu())
            done += size
        means = (torch.stack(sums).sum(0) / total).numpy()  # [L, H, d]
        return cls(means, {}, 0.0, total, torch.cat(kept).numpy(), seed)

    def apply(self, heads: Tap, where: Sequence[tuple[int, int]], kind: str, tokens: int | None = None) -> None:
        """Ask an open tap for the edit. Resampling gives each token the output of one token of the bank."""
        check_kind(kind, GROUPLESS_KINDS)
        if kind != "resample":
            super().apply(heads, where, kind, tokens)
            return
        for layer in sorted({layer for layer, _ in where}):
            chosen = sorted(head for place, head in where if place == layer)
            heads.edit([(layer, head) for head in chosen], self._drawn(layer, chosen), tokens)

    def _drawn(self, layer: int, chosen: list[int]) -> Callable[[Tensor, Site], Tensor]:
        def draw(x: Tensor, site: Site) -> Tensor:
            shape, device = x.shape[:-2], x.device
            if device not in self._kept:
                self._kept[device] = torch.from_numpy(self.bank).to(device)
            # Whose output each token gets: the same in every pass and layer, so that sets differ in their heads alone.
            if (shape, device) not in self._kept:
                generator = torch.Generator().manual_seed(self.seed)
                self._kept[shape, device] = torch.randint(len(self.bank), shape, generator=generator).to(device)
            source = self._kept[device][:, layer][:, chosen]  # [R, h, d]
            return source[self._kept[shape, device]].to(x)

        return draw
