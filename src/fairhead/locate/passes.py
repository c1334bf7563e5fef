"""True forward passes with edited heads: one sweep over the images or texts for all sets of heads.

Each batch is run once as it is. A set of heads then starts at the first layer that it edits, from the tokens that
entered it: heads of the last two of twelve layers cost a sixth of a pass, and each image is decoded once.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fairhead.errors import InputError
from fairhead.heads import Site, Tap, tap
from fairhead.language.packing import TokenSequence
from fairhead.language.row_layout import Planned, ReadyBatch, quiet
from fairhead.language.scorer import Scorer
from fairhead.locate.decompose import Decomposer
from fairhead.locate.directions import Task
from fairhead.locate.edits import GROUPLESS_KINDS, HeadEdits, check_kind
from fairhead.locate.head_features import Array
from fairhead.locate.streams import Stream, stream_of

_Heads = tuple[tuple[int, int], ...]


@contextmanager
def matmul_precision(tf32: bool) -> Iterator[None]:
    """Inside, float32 is multiplied as such, or in TF32 on GPUs that can."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def has_tf32(device: torch.device) -> bool:
    """Whether TF32 can be asked for on a device: GPUs alone have it, so elsewhere nothing is said to run in it."""
    return device.type == "cuda"


@dataclass(frozen=True)
class Sweep:
    """What is read of a model with each of many sets of heads edited; a set that was run is not run again."""

    stream: Stream  # of the model
    batches: Callable[[], Iterable[Any]]  # gives the batches from the start, each time it is called
    read: Callable[[Any], Tensor]  # runs the model on one batch; rows of what is wanted, [B, ...], where it is
    values: Callable[[NDArray[np.floating]], Array]  # what is handed out for rows that were read, [B, ...]
    edits: HeadEdits  # what is put in a head's place
    kind: str  # of edit
    tokens: int | None = None  # 0 for the first token, None for all
    place: NDArray[np.intp] | None = None  # where each row lies among those that the batches give; None: as it is
    tf32: bool = False  # multiply in TF32
    progress: Callable[[int, int], None] | None = None  # called with (rows done, sets), batch after batch
    _done: dict[_Heads, Array] = field(default_factory=dict, init=False)

    @cached_property
    def _tap(self) -> Tap:
        return tap(self.stream.base)

    def __call__(self, sets: Sequence[Sequence[tuple[int, int]]]) -> list[Array]:
        """What is read with each set of heads edited; the empty set is the model as it is."""
        keys = [tuple(sorted((int(layer), int(head)) for layer, head in heads)) for heads in sets]
        new = [key for key in dict.fromkeys(keys) if key not in self._done]
        if new:
            with matmul_precision(self.tf32):
                self._sweep(new)
        return [self._done[key] for key in keys]

    def _sweep(self, sets: list[_Heads]) -> None:
        found: dict[_Heads, list[Array]] = {heads: [] for heads in sets}
        starts = {heads[0][0] for heads in sets if heads}  # sorted, so the first pair has the first layer
        rows = 0
        for inputs in self.batches():
            plain, kept = self._plain(inputs, starts)
            read = [self._edited(inputs, heads, kept[heads[0][0]]) if heads else plain for heads in sets]
            # Only here does the processor wait for a GPU: all sets of a batch are handed over at once.
            for heads, values in zip(sets, torch.stack(read).cpu().numpy(), strict=True):
                found[heads].append(self.values(values))
            rows += len(plain)
            if self.progress is not None:
                self.progress(rows, len(sets))
        place = slice(None) if self.place is None else self.place
        self._done.update({heads: np.concatenate(parts)[place] for heads, parts in found.items()})

    def _plain(self, inputs: Any, starts: set[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """The batch as it is, and the tokens that enter the layers at which edited passes start."""
        kept: dict[int, Tensor] = {}

        def keep(layer: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                kept[layer] = args[0] if args else kwargs["hidden_states"]

            return hook

        blocks = [(layer, self.stream.blocks[layer].module) for layer in sorted(starts)]
        handles = [block.register_forward_pre_hook(keep(layer), with_kwargs=True) for layer, block in blocks]
        try:
            return self.read(inputs), kept
        finally:
            for handle in handles:
                handle.remove()

    def _edited(self, inputs: Any, heads: _Heads, tokens: Tensor) -> Tensor:
        with self._tap as open_tap, self._starting_at(heads[0][0], tokens):
            self.edits.apply(open_tap, heads, self.kind, self.tokens)
            return self.read(inputs)

    @contextmanager
    def _starting_at(self, layer: int, tokens: Tensor) -> Iterator[None]:
        """Inside, the blocks before `layer` do nothing, and that layer gets the kept tokens."""
        blocks = [part.module for part in self.stream.blocks]

        def nothing(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return hidden_states

        def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (tokens, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": tokens}

        for block in blocks[:layer]:
            block.forward = nothing  # on the instance, so that deleting it brings the class's own back
        handle = blocks[layer].register_forward_pre_hook(replace, with_kwargs=True)
        try:
            with torch.no_grad():
                yield
        finally:
            handle.remove()
            for block in blocks[:layer]:
                del block.forward


class Stages:
    """Names of what is run, for the progress: those that come again are numbered.

    Example:
        >>> stages = Stages(print)
        >>> for tell in (stages.sweep(8), stages.sweep(8)):
        ...     tell(4, 1)
        forward passes of the model 4 8
        forward passes of the model, round 2 4 8
        >>> stages.sweep(8)(4, 17)
        forward passes with 17 sets of heads 4 8
    """

    def __init__(self, progress: Callable[[str, int, int], None] | None) -> None:
        self._progress, self._seen = progress, Counter[str]()

    def begun(self, what: str, total: int) -> Callable[[int], None]:
        """Start a stage of so many rows; call what is returned with how many are done."""
        self._seen[what] += 1
        stage = what if self._seen[what] == 1 else f"{what}, round {self._seen[what]}"
        return lambda done: None if self._progress is None else self._progress(stage, done, total)

    def sweep(self, total: int) -> Callable[[int, int], None]:
        """The progress of a `Sweep` over so many rows, whose calls each are a stage."""
        before, tell = total, None

        def batch(done: int, sets: int) -> None:
            nonlocal before, tell
            if tell is None or done <= before:  # from the start again
                tell = self.begun(
                    f"forward passes {'of the model' if sets == 1 else f'with {sets} sets of heads'}", total
                )
            before = done
            tell(done)

        return batch


class Estimated(NamedTuple):
    """What k figures of each of n rows lose without each head, [n, L, H, k], and the outputs there, [n, d']."""

    lost: Array
    output: Array


@dataclass(frozen=True)
class RowPasses:
    """Forward passes over rows of images or texts, as a `GapQuestion` asks for them."""

    decomposer: Decomposer  # of the model
    batches: Callable[[NDArray[np.intp]], Iterable[Mapping[str, Tensor]]]  # gives the model's inputs for some rows
    task: Task  # classes as directions
    everywhere: HeadEdits | None = None  # edits of all tokens; None edits the first token alone
    # On GPUs that can, multiply in TF32: several times as fast. How many predictions that changes is noted.
    tf32: bool = False
    # Gives the order in which some rows are best read; None for as they come
    order: Callable[[NDArray[np.intp]], NDArray[np.intp]] | None = None
    progress: Callable[[str, int, int], None] | None = None  # called with (stage, rows done, rows)

    @cached_property
    def _stages(self) -> Stages:
        return Stages(self.progress)

    def __post_init__(self) -> None:
        if self.everywhere is None and self.decomposer.pool is not None:
            raise InputError(
                f"{type(self.decomposer.stream.base).__name__} is read at many tokens and has no first token that "
                "stands for the image: add --tokens all"
            )

    def __call__(self, rows: NDArray[np.intp], edits: HeadEdits, kind: str) -> Sweep:
        """Logits of some rows with each of several sets of heads edited; `edits` are those of the first token."""
        # Whose output a resampled row gets must not depend on how long it is.
        as_it_comes = self.order is None or kind == "resample"
        order = np.arange(len(rows)) if as_it_comes or self.order is None else self.order(rows)

        @torch.no_grad()
        def read(inputs: Mapping[str, Tensor]) -> Tensor:
            return self.decomposer.outputs(inputs).float()

        return Sweep(
            self.decomposer.stream,
            lambda: self.batches(rows[order]),
            read,
            self.task.logits,
            self.everywhere or edits,
            kind,
            tokens=0 if self.everywhere is None else None,
            place=np.argsort(order, kind="stable"),
            tf32=self.in_tf32,
            progress=self._stages.sweep(len(rows)),
        )

    def estimate(
        self,
        rows: NDArray[np.intp],
        edits: HeadEdits,
        kind: str,
        slopes: Sequence[Callable[[Array], Array]],
        where: Sequence[tuple[int, int]] = (),
        now: str = "gain",
    ) -> Estimated:
        """What k figures of each row lose without each head alone, to first order: [n, L, H, k].

        Attribution patching: the gradient of a figure in what each head puts out, times what the edit changes there.
        One pass, and one back for each figure, for all heads; a head that saturates what comes after it is estimated
        badly. `slopes` make the gradients of the figures [n, d'] from outputs [n, d']. Heads at `where` may be edited
        already, by the kind `now`: what is estimated is then what another edit would change from there.
        """
        used, tokens = (edits, 0) if self.everywhere is None else (self.everywhere, None)
        opened = tap(self.decomposer.stream.base)
        tell = self._stages.begun("effects of heads by gradients" if slopes else "trying gains", len(rows))
        order = np.arange(len(rows)) if self.order is None else self.order(rows)
        every = [(site.layer, head) for site in opened.sites for head in range(site.n_heads)]
        found: list[Array] = []
        outputs: list[Array] = []
        for inputs in self.batches(rows[order]):
            kept: list[Tensor] = []  # what each layer's heads put out, in order

            def keep(x: Tensor, site: Site, kept: list[Tensor] = kept) -> Tensor:
                x = x if x.requires_grad else x.detach().requires_grad_()  # the first: no weight has a gradient
                kept.append(x)
                return x

            with matmul_precision(self.in_tf32), torch.set_grad_enabled(bool(slopes)), opened as heads:
                used.apply(heads, where, now, tokens)
                heads.edit(every, keep, tokens)
                output = self.decomposer.outputs(inputs)
            outputs.append(output.detach().double().cpu().numpy())
            moved = [used.moved(kind, x.detach(), layer) for layer, x in enumerate(kept)]
            lost = []
            for number, slope in enumerate(slopes):
                wanted = torch.tensor(slope(outputs[-1])).to(output)
                last = number + 1 == len(slopes)
                with matmul_precision(self.in_tf32):
                    gradients = torch.autograd.grad(output, kept, wanted, retain_graph=not last)
                parts = [-(g * m).sum(-1) for g, m in zip(gradients, moved, strict=True)]  # [B, (T,) H]
                lost.append(torch.stack([part if part.dim() == 2 else part.sum(1) for part in parts], 1))
            empty = output.new_zeros(len(output), len(kept), kept[0].shape[-2], 0)
            found.append((torch.stack(lost, -1) if lost else empty).double().cpu().numpy())
            tell(sum(map(len, found)))
        back = np.argsort(order, kind="stable")
        return Estimated(np.concatenate(found)[back], np.concatenate(outputs)[back])

    @property
    def fast(self) -> bool:
        """Whether a pass for each head is affordable."""
        return self.decomposer.maps.device.type == "cuda"

    @property
    def in_tf32(self) -> bool:
        """Whether it was asked for and can be."""
        return self.tf32 and has_tf32(self.decomposer.maps.device)

    @property
    def notes(self) -> list[str]:
        """Where heads are edited, in a sentence."""
        if self.everywhere is None:
            return ["Forward passes edit heads at the first token alone: what they write at others stays as it is."]
        return ["Forward passes edit heads at every token."]


def text_passes(
    scorer: Scorer, sequences: Sequence[TokenSequence], edits: HeadEdits, kind: str = "mean", **how: Any
) -> Sweep:
    """Log-probabilities [texts] with each of many sets of heads edited, all batches read once as they are."""
    check_kind(kind, GROUPLESS_KINDS)
    with quiet(scorer.model):
        batches = [_TextBatch.of(planned) for planned in scorer.planned(sequences)]

    def read(batch: _TextBatch) -> Tensor:
        with quiet(scorer.model):
            return batch.sums()

    def values(read: NDArray[np.floating]) -> Array:
        if not np.isfinite(read).all():
            raise InputError("a log-probability is not finite with heads edited; try float32")
        return read.astype(np.float64)

    place = np.argsort([text for batch in batches for text in batch.texts], kind="stable")
    return Sweep(stream_of(scorer.model), lambda: iter(batches), read, values, edits, kind, place=place, **how)


class _TextBatch(NamedTuple):
    """A batch of k texts on the model's device."""

    batch: ReadyBatch  # its tokens
    texts: tuple[int, ...]  # the number of each text among all, [k]
    token: Tensor  # a scored token of a text, as its place among the scored tokens of the batch, [E]; texts share some
    text: Tensor  # whose it is, [E]

    @classmethod
    def of(cls, planned: Planned) -> "_TextBatch":
        batch, (texts, token) = planned.ready(), zip(*planned.paths(), strict=True)
        text = np.repeat(np.arange(len(texts)), [len(at) for at in token])
        here = (torch.from_numpy(numbers).to(batch.token.device) for numbers in (np.concatenate(token), text))
        return cls(batch, texts, *here)

    def sums(self) -> Tensor:
        """Sum of the log-probabilities of each text, [k]."""
        logprobs = self.batch.logprobs().double()
        return logprobs.new_zeros(len(self.texts)).index_add_(0, self.text, logprobs[self.token])
