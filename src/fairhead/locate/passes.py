"""True forward passes with edited heads, many over the same images: what comes before the first edit is run once.

Control sets matched by layer share their first layer with the chosen heads. The tokens that enter it are kept, and
later passes start there: for heads of the last two of twelve layers, a sixth of the work.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairhead.heads import tap
from fairhead.locate.decompose import Decomposer
from fairhead.locate.edits import HeadEdits
from fairhead.locate.moments import Array
from fairhead.locate.tasks import Task

_MOST_BYTES = 2 << 30  # of tokens and inputs that are kept


class ForwardPasses:
    """Logits [n, C] by the heads that are edited; each set of heads runs once.

    Args:
        decomposer: of the model.
        batches: gives the model's inputs from the start, each time it is called.
        task: classes as directions.
        edits: what is put in a head's place.
        kind: of edit.
        tokens: 0 for the first token, None for all.
        first_layer: passes that edit no earlier layer start there; 0 runs every pass in full.
        progress: called with (passes done, their heads).

    Example:
        >>> import numpy as np, torch
        >>> from transformers import ViTConfig, ViTModel
        >>> shape = dict(image_size=4, patch_size=2, hidden_size=8, intermediate_size=8)
        >>> model = ViTModel(ViTConfig(num_hidden_layers=3, num_attention_heads=2, **shape)).eval()
        >>> edits = HeadEdits(np.zeros((3, 2, 4)), np.zeros((3, 2, 4, 4)), 0.0, 1)
        >>> task = Task(("a", "b"), np.random.default_rng(0).normal(size=(2, 8)), np.zeros(2), "made")
        >>> images = [{"pixel_values": torch.randn(5, 3, 4, 4)}]
        >>> passes = ForwardPasses(Decomposer(model), lambda: images, task, edits, "zero", first_layer=2)
        >>> passes([(2, 1)]).shape
        (5, 2)
    """

    def __init__(
        self,
        decomposer: Decomposer,
        batches: Callable[[], Iterable[Mapping[str, Tensor]]],
        task: Task,
        edits: HeadEdits,
        kind: str = "mean",
        tokens: int | None = 0,
        first_layer: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._decomposer, self._batches, self._task = decomposer, batches, task
        self._edits, self._kind, self._tokens = edits, kind, tokens
        self._first, self._progress = first_layer, progress
        self._kept: list[tuple[Mapping[str, Tensor], Tensor]] | None = None
        self._done: dict[tuple[tuple[int, int], ...], Array] = {}

    def __call__(self, heads: Sequence[tuple[int, int]]) -> Array:
        """Logits with these heads edited."""
        key = tuple(sorted((int(layer), int(head)) for layer, head in heads))
        if key not in self._done:
            self._done[key] = self._run(key)
            if self._progress is not None:
                self._progress(len(self._done))
        return self._done[key]

    def _run(self, heads: tuple[tuple[int, int], ...]) -> Array:
        late = self._first > 0 and all(layer >= self._first for layer, _ in heads)
        found = []
        with tap(self._decomposer.stream.base) as open_tap:
            self._edits.apply(open_tap, heads, self._kind, self._tokens)
            if late and self._kept:
                for inputs, tokens in self._kept:
                    with self._starting_with(tokens):
                        found.append(self._logits(inputs))
            elif late and self._kept is None:
                found = self._run_and_keep()
            else:
                found = [self._logits(inputs) for inputs in self._batches()]
        return np.concatenate(found)

    def _logits(self, inputs: Mapping[str, Tensor]) -> Array:
        return self._task.logits(self._decomposer.outputs(inputs).float().cpu().numpy())

    def _run_and_keep(self) -> list[Array]:
        """A pass in full, keeping what enters the first layer that is ever edited, unless that is too much."""
        kept: list[tuple[Mapping[str, Tensor], Tensor]] = []
        found, size = [], 0
        for inputs in self._batches():
            seen: list[Tensor] = []
            block = self._decomposer.stream.blocks[self._first].module
            handle = block.register_forward_pre_hook(
                lambda module, args, kwargs, seen=seen: seen.append(args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
            try:
                found.append(self._logits(inputs))
            finally:
                handle.remove()
            size += sum(t.nbytes for t in (*inputs.values(), seen[0]))
            if size <= _MOST_BYTES:
                kept.append((inputs, seen[0]))
        self._kept = kept if size <= _MOST_BYTES else []
        return found

    @contextmanager
    def _starting_with(self, tokens: Tensor) -> Iterator[None]:
        """Inside, the blocks before the first edited layer do nothing, and that layer gets the kept tokens."""
        blocks = [part.module for part in self._decomposer.stream.blocks]

        def nothing(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return hidden_states

        def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (tokens, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": tokens}

        for block in blocks[: self._first]:
            block.forward = nothing  # on the instance, so that deleting it brings the class's own back
        handle = blocks[self._first].register_forward_pre_hook(replace, with_kwargs=True)
        try:
            with torch.no_grad():
                yield
        finally:
            handle.remove()
            for block in blocks[: self._first]:
                del block.forward
