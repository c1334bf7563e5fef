"""Texts under a causal language model with edited heads: what is put in a head's place, and the passes that score them.

Edits act on every token, as those of a saved model do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairhead.errors import InputError
from fairhead.heads import Site, Tap, tap
from fairhead.language.packing import TokenSequence, predicting
from fairhead.language.scorer import Planned, ReadyBatch, Scorer, quiet
from fairhead.locate.edits import HeadEdits
from fairhead.locate.moments import Array
from fairhead.locate.passes import Sweep
from fairhead.locate.streams import stream_of

TEXT_KINDS = ("mean", "zero", "resample")
_BANK = 1024  # tokens whose head outputs are kept to resample from


@dataclass(frozen=True)
class TextEdits(HeadEdits):
    """Edits of a language model's heads: nothing, their mean over tokens, or their output at a token of another text.

    Attributes:
        bank: own outputs of every head at tokens drawn from the texts, [R, L, H, d].
        seed: of the draws from it.

    Example:
        >>> edits = TextEdits.learn_texts(scorer, encoded_texts(scorer, pairs))  # doctest: +SKIP
        >>> edits.bake(scorer.model, [(3, 1)], "mean")  # doctest: +SKIP
    """

    bank: NDArray[np.float32]
    seed: int = 0
    # What was drawn or brought to a device before; passes ask for the same again and again.
    _kept: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def learn_texts(
        cls, scorer: Scorer, sequences: Sequence[TokenSequence], seed: int = 0, bank: int = _BANK
    ) -> "TextEdits":
        """Means and a bank of head outputs, over all tokens of some texts but the start token.

        Args:
            scorer: the model.
            sequences: the texts; take both of each pair, so that neither weighs more.
            seed: of the bank.
            bank: tokens to keep.
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
        whole = np.broadcast_to(np.eye(means.shape[-1]), (*means.shape, means.shape[-1]))
        return cls(means, whole, 0.0, total, torch.cat(kept).numpy(), seed)

    def apply(self, heads: Tap, where: Sequence[tuple[int, int]], kind: str, tokens: int | None = None) -> None:
        """Ask an open tap for the edit. Resampling gives each token the output of one token of the bank."""
        check_text_kind(kind)
        if kind != "resample":
            super().apply(heads, where, kind, tokens)
            return
        for layer in sorted({layer for layer, _ in where}):
            chosen = sorted(head for place, head in where if place == layer)
            heads.edit([(layer, head) for head in chosen], self._drawn(layer, chosen), tokens)

    def _drawn(self, layer: int, chosen: list[int]) -> Callable[[Tensor, Site], Tensor]:
        def draw(x: Tensor, site: Site) -> Tensor:
            source = self._bank(x.device)[:, layer][:, chosen]  # [R, h, d]
            return source[self._rows(x.shape[:-2], x.device)].to(x)

        return draw

    def _bank(self, device: torch.device) -> Tensor:
        if device not in self._kept:
            self._kept[device] = torch.from_numpy(self.bank).to(device)
        return self._kept[device]

    def _rows(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Whose output each token gets: the same in every pass and layer, so that sets differ in their heads alone."""
        if (shape, device) not in self._kept:
            generator = torch.Generator().manual_seed(self.seed)
            self._kept[shape, device] = torch.randint(len(self.bank), shape, generator=generator).to(device)
        return self._kept[shape, device]


def check_text_kind(kind: str) -> None:
    """Refuse what is not a kind of edit of a language model.

    Example:
        >>> check_text_kind("project")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: kind is 'project'; pairs of texts know mean, zero, resample: a projection needs ...
    """
    if kind not in TEXT_KINDS:
        raise InputError(
            f"kind is {kind!r}; pairs of texts know {', '.join(TEXT_KINDS)}: a projection needs two groups of rows, "
            "and these pairs are about many"
        )


class TextPasses(Sweep):
    """Log-probabilities [texts] with each of many sets of heads edited, all batches read once as they are.

    Args:
        scorer: the model.
        sequences: the texts.
        edits: what is put in a head's place.
        kind: of edit.
        progress: called with (texts done, sets of heads that each runs through).

    Example:
        >>> passes = TextPasses(scorer, texts, edits, "zero")  # doctest: +SKIP
        >>> before, after = passes([(), [(3, 1), (4, 0)]])  # doctest: +SKIP
    """

    def __init__(
        self,
        scorer: Scorer,
        sequences: Sequence[TokenSequence],
        edits: HeadEdits,
        kind: str = "mean",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        check_text_kind(kind)
        with quiet(scorer.model):
            batches = [_TextBatch.of(planned) for planned in scorer.planned(sequences)]
        # The order in which batches give their texts.
        self._place = np.argsort([text for batch in batches for text in batch.texts], kind="stable")
        super().__init__(stream_of(scorer.model), lambda: iter(batches), edits, kind, None, progress)
        self._model = scorer.model

    def __call__(self, sets: Sequence[Sequence[tuple[int, int]]]) -> list[Array]:
        """Sums of log-probabilities, in the order of the texts; the empty set is the model as it is."""
        return [found[self._place] for found in super().__call__(sets)]

    def _read(self, inputs: "_TextBatch") -> Tensor:
        with quiet(self._model):
            return inputs.sums()

    def _values(self, read: NDArray[np.floating]) -> Array:
        if not np.isfinite(read).all():
            raise InputError("a log-probability is not finite with heads edited; try float32")
        return read.astype(np.float64)


class _TextBatch(NamedTuple):
    """A batch of k texts on the model's device.

    Attributes:
        batch: its tokens.
        texts: the number of each text among all, [k].
        token: a scored token of a text, as its place among the scored tokens of the batch, [E]; texts share some.
        text: whose it is, [E].
    """

    batch: ReadyBatch
    texts: tuple[int, ...]
    token: Tensor
    text: Tensor

    @classmethod
    def of(cls, planned: Planned) -> "_TextBatch":
        texts: list[int] = []
        token: list[NDArray[np.intp]] = []
        text: list[NDArray[np.intp]] = []
        taken = 0
        for row in planned.rows:
            scored = predicting(row).scored
            for path in row.paths:
                token.append(taken + np.searchsorted(scored, path.positions))
                text.append(np.full(len(path.positions), len(texts)))
                texts.append(planned.members[path.sequence])
            taken += len(scored)
        batch = planned.ready()
        place = batch.token.device
        return cls(
            batch,
            tuple(texts),
            torch.from_numpy(np.concatenate(token)).to(place),
            torch.from_numpy(np.concatenate(text)).to(place),
        )

    def sums(self) -> Tensor:
        """Sum of the log-probabilities of each text, [k]."""
        logprobs = self.batch.logprobs().double()
        return logprobs.new_zeros(len(self.texts)).index_add_(0, self.text, logprobs[self.token])
