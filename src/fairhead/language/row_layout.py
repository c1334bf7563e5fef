"""How sentences and rows of tokens are handed to a causal language model, and what its output layer reads of them.

`reads_trees` is the trial that tells which way a model can take rows; the last functions say what else it is like.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fairhead.errors import UnsupportedModel
from fairhead.language.packing import Row, TokenSequence, pack
from fairhead.models.inputs import quiet as quiet
from fairhead.train.step import free_memory

# Two ways to compute the same differ by rounding; a token that sees what it should not differs as contexts do.
_ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-6}
_ROUNDING_OF_HALVES = 0.1
# Tokens a batch by default: enough to keep a processor or a GPU busy.
BATCH_TOKENS = {"cpu": 768, "cuda": 16384}
# Entries of the logits of one batch: 256 MB in float32 on a processor; on a GPU as memory allows, up to 4 GB.
LOGITS_CPU, LOGITS_MOST = 1 << 26, 1 << 30


class Sentences(NamedTuple):
    """A batch of sentences, padded on the right."""

    ids: Tensor  # tokens, [N, T]
    mask: Tensor  # 1 for tokens, 0 for padding, [N, T]


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
        chosen = hidden[:, :0] if positions is None else hidden.flatten(0, 1)[positions.to(hidden.device)][None]
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


@dataclass(frozen=True)
class Layout:
    """A way to hand rows to a model."""

    model: nn.Module  # the model
    tree: bool  # rows are trees, with a mask and positions of their own; else each is one sequence, padded on the right

    def logits(self, rows: Sequence[Row], at: Sequence[NDArray[np.int64]]) -> Tensor:
        """Next-token logits at the chosen positions of each row, one row after the other: [sum of positions, V]."""
        return _logits(self.model, *self.inputs_at(rows, at))

    def inputs_at(self, rows: Sequence[Row], at: Sequence[NDArray[np.int64]]) -> tuple[dict[str, Tensor], Tensor]:
        """What the model is called with to be read at chosen positions of each row, and where they lie in the batch."""
        trimmed = [_needed(row, chosen) for row, chosen in zip(rows, at, strict=True)]
        inputs = self.inputs([row for row, _ in trimmed])
        width = inputs["input_ids"].shape[1]
        chosen = torch.from_numpy(np.concatenate([a + i * width for i, (_, a) in enumerate(trimmed)]))
        return inputs, send(chosen, inputs["input_ids"].device)

    def inputs(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """What the model is called with, tokens [B, T] among it."""
        weight = next(self.model.parameters())
        if not self.tree:
            ids, real = stack([row.tokens for row in rows], weight.device)
            return {"input_ids": ids, "attention_mask": real}
        columns = np.zeros((3, len(rows), max(len(row.tokens) for row in rows)), dtype=np.int64)
        for i, row in enumerate(rows):
            columns[:, i, : len(row.tokens)] = row.tokens, row.depth, row.end
        ids, depth, end = send(torch.from_numpy(columns), weight.device)
        # Padding sees itself alone: a row of a softmax without a single entry would be NaN.
        here = torch.arange(ids.shape[1], device=weight.device)
        end = torch.maximum(end, here + 1)
        # [B, query, key]: the query lies in the subtree of the key.
        seen = (here[None, None, :] <= here[None, :, None]) & (here[None, :, None] < end[:, None, :])
        mask = torch.zeros(seen.shape, dtype=weight.dtype, device=weight.device)
        mask.masked_fill_(~seen, torch.finfo(weight.dtype).min)
        return {"input_ids": ids, "attention_mask": mask[:, None], "position_ids": depth}


class Planned(NamedTuple):
    """A batch that is read in one forward pass."""

    layout: Layout  # how the rows are handed to the model
    rows: tuple[Row, ...]  # trees of tokens
    members: Sequence[int]  # the sequence that number i of a row's paths stands for is `members[i]`

    def paths(self) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Each sequence, and where its scored tokens lie among those of the batch; sequences share some."""
        taken = 0
        for row in self.rows:
            for path, at in zip(row.paths, row.predicting.paths, strict=True):
                yield self.members[path.sequence], taken + at
            taken += len(row.predicting.scored)

    def read(self) -> Iterator["Reading"]:
        """The batch as it is being read, in halves where the device has too little memory for all of it."""
        try:
            found = self.start()
        except torch.OutOfMemoryError:
            if len(self.rows) == 1:
                raise
            found = None
        if found is not None:
            yield found
            return
        # Here, where the failed pass and its tensors are gone.
        free_memory("for a whole batch, which is read in halves; see --batch-tokens")
        half = len(self.rows) // 2
        for rows in (self.rows[:half], self.rows[half:]):
            yield from self._replace(rows=rows).read()

    def start(self) -> "Reading":
        """Read the batch at once; a GPU is not waited for."""
        with quiet(self.layout.model):
            return Reading.of(self, self.ready().logprobs())

    def sources(self) -> NDArray[np.int64]:
        """For each scored token, which of the positions that are read predicts it, [S]."""
        places = [row.predicting for row in self.rows]
        offsets = np.cumsum([0, *(len(place.at) for place in places)])
        return np.concatenate([place.source + o for place, o in zip(places, offsets, strict=False)])

    def ready(self) -> "ReadyBatch":
        """The batch on the model's device."""
        inputs, positions = self.layout.inputs_at(self.rows, [row.predicting.at for row in self.rows])
        token = np.concatenate([row.tokens[row.predicting.scored] for row in self.rows])
        source, token = send(torch.from_numpy(np.stack([self.sources(), token])), positions.device)
        return ReadyBatch(self.layout.model, inputs, positions, source, token)


class Reading(NamedTuple):
    """A batch that a device is at work on; `values` waits for it."""

    batch: Planned
    logprobs: Tensor  # of each scored token of the batch, on their way to the processor's memory, [S]
    arrived: torch.cuda.Event | None  # when they are there; None: they are

    @classmethod
    def of(cls, batch: Planned, logprobs: Tensor) -> "Reading":
        """Send them on their way."""
        if logprobs.device.type != "cuda":  # others have no such events
            return cls(batch, logprobs.cpu(), None)
        found = logprobs.to("cpu", non_blocking=True)
        return cls(batch, found, torch.cuda.current_stream(logprobs.device).record_event())

    def values(self) -> list[tuple[int, NDArray[np.float64]]]:
        """Each sequence with the log-probabilities of its scored tokens."""
        if self.arrived is not None:
            self.arrived.synchronize()
        flat = self.logprobs.numpy().astype(np.float64)  # here, as Apple's GPUs have no float64
        return [(sequence, flat[at]) for sequence, at in self.batch.paths()]


def read_all(batches: Iterable[Planned]) -> Iterator[list[tuple[int, NDArray[np.float64]]]]:
    """What `Reading.values` gives of each batch. A GPU reads the next batch while those of one are taken over."""
    waiting: list[Reading] = []
    for reading in (reading for batch in batches for reading in batch.read()):
        waiting.append(reading)
        if reading.arrived is None or len(waiting) > 1:
            yield waiting.pop(0).values()
    for reading in waiting:
        yield reading.values()


class ReadyBatch(NamedTuple):
    """A batch on the model's device, to be read once, or as often as heads are edited."""

    model: nn.Module  # the model
    inputs: dict[str, Tensor]  # what it is called with
    positions: Tensor  # which of the flattened batch are read, [P]
    source: Tensor  # for each scored token, which of the positions predicts it, [S]
    token: Tensor  # the token, [S]

    def logits(self) -> Tensor:
        """Next-token logits at the positions, [P, V]."""
        return _logits(self.model, self.inputs, self.positions)

    def logprobs(self) -> Tensor:
        """Log-probability of each scored token, one row after the other, [S]; it stays on the device."""
        logits = self.logits()
        return logits[self.source, self.token].float() - log_sum_exp(logits)[self.source]


def _logits(model: nn.Module, inputs: Mapping[str, Tensor], positions: Tensor) -> Tensor:
    with at_vocabulary(model, positions):
        logits: Tensor = model(**inputs, use_cache=False).logits
    return logits[0]


def log_sum_exp(logits: Tensor) -> Tensor:
    """In float32, [P, V] → [P], some rows at a time: as many as a processor's cache holds, or a GPU is busy with."""
    rows = max(1, (1 << 18 if logits.device.type == "cpu" else 1 << 24) // logits.shape[-1])
    return torch.cat([torch.logsumexp(part.float(), dim=-1) for part in logits.split(rows)])


def _needed(row: Row, at: NDArray[np.int64]) -> tuple[Row, NDArray[np.int64]]:
    """A row without the tokens that nothing is read from (the last of each text), and where `at` lies in it."""
    needed = row.followed.copy()
    needed[at] = True
    before = np.concatenate([[0], np.cumsum(needed)])
    parent = np.where(row.parent >= 0, before[row.parent], -1)
    kept = Row(row.tokens[needed], row.depth[needed], parent[needed], before[row.end[needed]], row.paths)
    return kept, before[at]


def reads_trees(model: nn.Module) -> bool:
    """Whether a model gives the same logits in a tree as in plain rows."""
    length = min(6, context_length(model))
    draws = np.random.default_rng(0).integers(vocabulary_of(model), size=(3, length))
    first, second, third = (list(map(int, row)) for row in draws)
    half = length // 2
    # Two that share a beginning, and one of its own with the same last token as the second.
    sequences = [first, first[:half] + second[half:], third[:-1] + second[-1:]]
    plain_rows = [pack([TokenSequence(tokens, 1)], 1, share=False)[0] for tokens in sequences]
    everywhere = np.arange(length)
    plain = Layout(model, tree=False).logits(plain_rows, [everywhere] * 3).float().reshape(3, length, -1)
    # How much it matters what stands before: the same token at the same place after other tokens.
    effect = float((plain[1, -1] - plain[2, -1]).norm())
    tolerance = _ROUNDING.get(next(model.parameters()).dtype, _ROUNDING_OF_HALVES) * effect
    if float((plain[0, :half] - plain[1, :half]).norm()) > tolerance + 1e-6:
        raise UnsupportedModel(
            f"{type(model).__name__} lets tokens attend to later ones, as encoders do; expected a causal language model"
        )
    row = pack([TokenSequence(tokens, 1) for tokens in sequences], 4 * length)[0]
    try:
        tree = Layout(model, tree=True).logits([row], [np.arange(len(row.tokens))]).float()
    except (TypeError, ValueError, RuntimeError, IndexError, NotImplementedError):
        # The family takes no mask or no positions of this kind.
        return False
    error = 0.0
    for path, k in itertools.product(row.paths, range(1, length)):
        error = max(error, float((tree[path.positions[k - 1]] - plain[path.sequence, k]).norm()))
    return error <= tolerance


def refuse_other_than_causal(model: Any) -> None:
    """Raise unless a model predicts the next token from those before it."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        raise UnsupportedModel(f"{name} is not a Hugging Face model; expected a causal language model")
    if getattr(config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise UnsupportedModel(
            f"{name} does not predict the next token of a text; expected a causal language model (…ForCausalLM)"
        )


def vocabulary_of(model: Any) -> int:
    """Tokens that a model knows."""
    return int(model.get_input_embeddings().weight.shape[0])


def text_config(config: Any) -> Any:
    """The part of a configuration that is about text."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def context_length(model: nn.Module) -> int:
    """Tokens that a model can read; recurrent models have no bound.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> context_length(GPT2LMHeadModel(GPT2Config(vocab_size=6, n_embd=8, n_layer=1, n_head=2, n_positions=64)))
        64
    """
    config = text_config(model.config)
    for name in ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 1 << 30


def window_of(model: nn.Module) -> int | None:
    """The narrowest window of any layer, or None."""
    config = text_config(model.config)
    found = [getattr(config, name, None) for name in ("sliding_window", "window_size", "attention_chunk_size")]
    widths = [width for width in found if isinstance(width, int) and width > 0]
    return min(widths) if widths else None


def most_logits(device: torch.device) -> int:
    """Entries that the logits of one batch may have: in float32 an eighth of a GPU's memory."""
    if device.type == "cuda":
        return min(LOGITS_MOST, torch.cuda.get_device_properties(device).total_memory // 32)
    return LOGITS_CPU if device.type == "cpu" else 4 * LOGITS_CPU
