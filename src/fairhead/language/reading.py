"""Sentences handed to a causal language model, and what its output layer reads of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class Sentences(NamedTuple):
    """A batch of sentences, padded on the right.

    Attributes:
        ids: tokens, [N, T].
        mask: 1 for tokens, 0 for padding, [N, T].
    """

    ids: Tensor
    mask: Tensor


def stack(sentences: Sequence[Sequence[int] | NDArray[np.int64]], device: torch.device | str = "cpu") -> Sentences:
    """Pad token sequences to one length: [N, T]. What stands in the padding does not matter; the mask hides it.

    Example:
        >>> stack([[1, 2, 3], [4]]).mask.tolist()
        [[1, 1, 1], [1, 0, 0]]
    """
    width = max(map(len, sentences))
    ids = np.zeros((len(sentences), width), dtype=np.int64)
    mask = np.zeros_like(ids)
    for i, tokens in enumerate(sentences):
        ids[i, : len(tokens)] = tokens
        mask[i, : len(tokens)] = 1
    where = torch.device(device)
    return Sentences(send(torch.from_numpy(ids), where), send(torch.from_numpy(mask), where))


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device. A GPU is not waited for: from ordinary memory it would first finish what it has to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@contextmanager
def at_vocabulary(model: Any, positions: Tensor | None = None) -> Iterator[list[Tensor]]:
    """Catch the final hidden states [N, T, D], and let only some positions reach the vocabulary, or none.

    The positions are those of the flattened batch; [N, T, D] becomes [1, P, D] there. A hook on the output layer leaves
    whatever the model does to its logits afterwards (soft caps, scales) in place.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=5, n_embd=4, n_layer=1, n_head=1)).eval()
        >>> with at_vocabulary(model, torch.tensor([2, 5])) as seen:
        ...     logits = model(torch.ones(2, 3, dtype=torch.long)).logits
        >>> list(logits.shape), list(seen[0].shape)
        ([1, 2, 5], [2, 3, 4])
    """
    seen: list[Tensor] = []

    def choose(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = inputs[0]
        seen.append(hidden)
        chosen = hidden[:, :0] if positions is None else hidden.flatten(0, 1)[positions][None]
        return (chosen, *inputs[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(choose)
    try:
        yield seen
    finally:
        hook.remove()


def final_states(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """What the output layer reads, [N, T, D]; nothing goes through the vocabulary."""
    with at_vocabulary(model) as seen:
        model(**inputs, use_cache=False)
    return seen[0]
