"""The scoring engine: log-probabilities of many continuations of many prefixes, under any causal language model.

Sequences are laid into trees (`packing.py`) and every tree is read in one forward pass: a mask lets each token see the
tokens that lead to it and no others, and positions count along its own branch. A context that a hundred questions share
is thus computed once, without a cache to copy, and only the tokens that predict scored ones reach the vocabulary.
A model that cannot read trees (recurrent ones, position biases of its own) is found out by a trial and given plain
rows.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fairhead.errors import InputError
from fairhead.language.answers import Answers, Journal, Progress, Request, Score, refuse_duplicates
from fairhead.language.packing import (
    Convention,
    Encoded,
    Row,
    TokenSequence,
    as_chat,
    batches,
    control_token_warning,
    encode,
    pack,
    predicting,
    start_token,
)
from fairhead.language.row_layout import (
    Layout,
    Ready,
    context_length,
    quiet,
    reads_trees,
    refuse_other_than_causal,
    send,
    vocabulary_of,
    window_of,
)
from fairhead.models import method_of, open_model
from fairhead.models.load import DType, LoadIn, weights_digest
from fairhead.train.step import say_once

# Tokens a batch by default: enough to keep a processor or a GPU busy.
BATCH_TOKENS = {"cpu": 768, "cuda": 16384}
# Tokens a row by default. Attention within a row costs its length squared, which a GPU minds less than many rows.
_ROW_TOKENS = {"cpu": 128, "cuda": 256}
# Entries of the logits of one batch: 256 MB in float32 on a processor; on a GPU as memory allows, up to 4 GB.
_LOGITS_CPU, LOGITS_MOST = 1 << 26, 1 << 30


class Planned(NamedTuple):
    """A batch that is read in one forward pass."""

    layout: Layout  # how the rows are handed to the model
    rows: tuple[Row, ...]  # trees of tokens
    members: Sequence[int]  # the sequence that number i of a row's paths stands for is `members[i]`

    def paths(self) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Each sequence, and where its scored tokens lie among those of the batch; sequences share some."""
        taken = 0
        for row in self.rows:
            scored = predicting(row).scored
            for path in row.paths:
                yield self.members[path.sequence], taken + np.searchsorted(scored, path.positions)
            taken += len(scored)

    def logprobs(self) -> list[tuple[int, NDArray[np.float64]]]:
        """Read the batch: each sequence with the log-probabilities of its scored tokens."""
        with quiet(self.layout.model):
            flat = self.ready().logprobs().double().cpu().numpy()
        return [(sequence, flat[at]) for sequence, at in self.paths()]

    def sources(self) -> NDArray[np.int64]:
        """For each scored token, which of the positions that are read predicts it, [S]."""
        places = [predicting(row) for row in self.rows]
        offsets = np.cumsum([0, *(len(place.at) for place in places)])
        return np.concatenate([place.source + o for place, o in zip(places, offsets, strict=False)])

    def ready(self) -> "ReadyBatch":
        """The batch on the model's device."""
        places = [predicting(row) for row in self.rows]
        ready = self.layout.ready(self.rows, [place.at for place in places])
        token = np.concatenate([row.tokens[place.scored] for row, place in zip(self.rows, places, strict=True)])
        device = ready.positions.device
        return ReadyBatch(ready, send(torch.from_numpy(self.sources()), device), send(torch.from_numpy(token), device))


@dataclass
class Scorer:
    """Scores texts under a causal language model."""

    model: nn.Module  # any Hugging Face causal language model
    tokenizer: Any  # its tokeniser
    device: str | torch.device | None = None  # where to compute; None leaves the model where it is
    # To compute in, such as `torch.bfloat16`; None leaves it as it is. Sums are never made in half precision.
    dtype: torch.dtype | None = None
    batch_tokens: int | None = None  # tokens of a batch, padding included; None chooses by device
    # Tokens of a row of a batch, in which what several requests begin with is shared; None chooses by device
    row_tokens: int | None = None
    # The token that texts start with, as in `packing.start_token`: "default", "bos", "eos", "none", or a token
    start: str | None = None
    convention: Convention = "fairhead"  # where it stands
    # Prefixes are a user's messages in the tokeniser's chat template, continuations the answers, as in
    # lm-evaluation-harness; the start token is then the template's
    chat: bool = False

    def __post_init__(self) -> None:
        refuse_other_than_causal(self.model)
        if self.device is not None or self.dtype is not None:
            self.model.to(device=self.device, dtype=self.dtype)
        weight = next(self.model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        if self.batch_tokens is None:
            self.batch_tokens = BATCH_TOKENS.get(weight.device.type, 4096)
        if self.row_tokens is None:
            self.row_tokens = _ROW_TOKENS.get(weight.device.type, 128)
        if self.batch_tokens < 1 or self.row_tokens < 1:
            raise InputError(
                f"batch_tokens {self.batch_tokens} and row_tokens {self.row_tokens}: at least 1 is expected"
            )
        if self.chat and (self.start not in (None, "default") or self.convention == "bias-bench"):
            raise InputError("a chat template has a start of its own: leave --start and --as bias-bench out")
        self.start_token = start_token(self.tokenizer, self.start)
        if self.convention == "bias-bench" and not self.start_token.lead:
            raise InputError("bias-bench scores the first token of a text after a start token; --start none has none")
        if self.chat:
            as_chat(self.tokenizer, [""])
        elif (told := control_token_warning(self.tokenizer, self.start)) is not None:
            say_once(told)
        self.vocabulary = vocabulary_of(self.model)
        self.context = context_length(self.model)
        with quiet(self.model):
            self.reads_trees = reads_trees(self.model, self.vocabulary, self.context)
        # Layers with a window hide tokens that are far away: trees and branches must stay within it.
        self._window = window_of(self.model)

    def score(
        self,
        requests: Sequence[Request],  # with distinct ids
        *,
        per_token: bool = False,  # also keep the log-probability of each token
        # An open `Journal`: what it holds is not computed again, what is computed is written at once
        journal: Journal | None = None,
        # What to do with requests longer than the model's context: "raise", or "skip" and name them
        on_long: Literal["raise", "skip"] = "raise",
        progress: Progress | None = None,  # called after each batch
    ) -> Answers[Score]:
        """Log-probability of each continuation after its prefix."""
        refuse_duplicates(requests, "requests")
        found = {r.id: s for r in requests if journal and (s := journal.find(r, per_token)) is not None}
        open_requests = [r for r in requests if r.id not in found]
        if self.chat:
            none = start_token(self.tokenizer, "none")
            encoded = encode(self._as_chat(open_requests), self.tokenizer, none, self.convention)
        else:
            encoded = encode(open_requests, self.tokenizer, self.start_token, self.convention)
        fitting, too_long = self._split_by_length(open_requests, encoded, on_long)
        sequences = [encoded[i].sequence for i in fitting]
        names = [open_requests[i].id for i in fitting]
        firsts = self._firsts([encoded[i] for i in fitting], names)
        if progress is not None:
            progress(len(found), len(requests))
        for batch in self._score_batches(sequences, names):
            whole = [(k, np.concatenate([firsts[k], values]) if k in firsts else values) for k, values in batch]
            scores = [_score(names[k], encoded[fitting[k]], values, per_token) for k, values in whole]
            if journal is not None:
                journal.add([open_requests[fitting[k]] for k, _ in batch], scores)
            found |= {score.id: score for score in scores}
            if progress is not None:
                progress(len(found) + len(too_long), len(requests))
        return Answers({r.id: found[r.id] for r in requests if r.id in found}, tuple(too_long))

    def _as_chat(self, requests: Sequence[Request]) -> list[Request]:
        """Requests in the chat template; the space between a prefix and its continuation is the template's affair."""
        prefixes = as_chat(self.tokenizer, [request.prefix for request in requests])
        return [
            request._replace(prefix=prefix, continuation=request.continuation.lstrip())
            for request, prefix in zip(requests, prefixes, strict=True)
        ]

    def _firsts(self, encoded: Sequence[Encoded], names: Sequence[str]) -> dict[int, NDArray[np.float64]]:
        """The log-probability [1] of each first token that is scored apart from the others; each token is read once."""
        apart = {i: tuple(one.first.tokens) for i, one in enumerate(encoded) if one.first is not None}
        distinct = list(dict.fromkeys(apart.values()))
        first_of = {tokens: names[i] for i, tokens in reversed(apart.items())}
        values = self.score_tokens([TokenSequence(t, 1) for t in distinct], [first_of[t] for t in distinct])
        found = dict(zip(distinct, values, strict=True))
        return {i: found[tokens] for i, tokens in apart.items()}

    def score_tokens(self, sequences: Sequence[TokenSequence], names: Sequence[str]) -> list[NDArray[np.float64]]:
        """Log-probabilities of the scored tokens of each sequence; `names` are for messages."""
        values: list[NDArray[np.float64]] = [np.empty(0)] * len(sequences)
        for batch in self._score_batches(sequences, names):
            for i, found in batch:
                values[i] = found
        return values

    @property
    def attending(self) -> nn.Module:
        """The model whose attention is read: the one beneath, where a method reads each text several times."""
        model: Any = self.model
        return model.base if hasattr(self.model, "at_decoding") else self.model

    def settings(self) -> dict[str, Any]:
        """What a score depends on besides its texts: the weights, their precision, the start token."""
        return {
            "model": type(self.model).__name__,
            "weights": weights_digest(self.model),
            "dtype": str(self.dtype).removeprefix("torch."),
            "start": self.start or "default",
            "as": self.convention,
            "start_token": f"{self.start_token.name} ({self.start_token.kind})",
            **({"chat": True} if self.chat else {}),
        }

    def refuse_unknown(self, tokens: Sequence[int]) -> None:
        """Raise where the tokeniser has given a token that the model does not have."""
        if max(tokens) >= self.vocabulary:
            raise InputError(
                f"the tokeniser has token {max(tokens)}, the model has {self.vocabulary}; is it this model's tokeniser?"
            )

    def _split_by_length(
        self, requests: Sequence[Request], encoded: Sequence[Encoded], on_long: str
    ) -> tuple[list[int], list[str]]:
        fitting: list[int] = []
        too_long: list[int] = []
        for i, one in enumerate(encoded):
            self.refuse_unknown(one.sequence.tokens)
            (too_long if len(one.sequence.tokens) > self.context else fitting).append(i)
        names = [requests[i].id for i in too_long]
        if names and on_long == "raise":
            tokens = len(encoded[too_long[0]].sequence.tokens)
            raise InputError(
                f"{len(names)} of {len(requests)} requests are longer than the model's context of {self.context} "
                f"tokens; the first is {names[0]!r} with {tokens}. Shorten them, or leave them out with on_long='skip'"
            )
        return fitting, names

    def _score_batches(
        self, sequences: Sequence[TokenSequence], names: Sequence[str]
    ) -> Iterator[list[tuple[int, NDArray[np.float64]]]]:
        """Batches of (index of the sequence, log-probabilities of its scored tokens)."""
        for batch in self.planned(sequences):
            for read in _within_memory(batch):
                yield [(k, _finite(values, names[k])) for k, values in read]

    def planned(self, sequences: Sequence[TokenSequence]) -> Iterator[Planned]:
        """The batches in which sequences are read, the largest first."""
        assert self.batch_tokens is not None
        assert self.row_tokens is not None
        limit = self._window or self.context
        packable = [i for i, s in enumerate(sequences) if self.reads_trees and len(s.tokens) <= limit]
        chosen = set(packable)
        plain = [i for i in range(len(sequences)) if i not in chosen]
        row_tokens = min(self.row_tokens, self._window or self.row_tokens)
        max_scored = max(1, _max_logits(torch.device(self.device or "cpu")) // self.vocabulary)
        for members, tree in ((packable, True), (plain, False)):
            rows = pack([sequences[i] for i in members], row_tokens, share=tree, longest=self._window)
            layout = Layout(self.model, tree)
            # To a GPU another batch costs as much as a full one; to a processor little.
            overhead = 16 if torch.device(self.device or "cpu").type == "cpu" else self.batch_tokens
            for batch in batches(rows, self.batch_tokens, max_scored, overhead):
                yield Planned(layout, tuple(rows[i] for i in batch), members)


def _within_memory(batch: Planned) -> Iterator[list[tuple[int, NDArray[np.float64]]]]:
    """What a batch gives, in halves where the device has too little memory for the whole."""
    try:
        found = batch.logprobs()
    except torch.OutOfMemoryError:
        if len(batch.rows) == 1:
            raise
        found = None
    if found is not None:
        yield found
        return
    # Here, where the failed pass and its tensors are gone.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    say_once("the device has too little memory for a whole batch, which is read in halves; see --batch-tokens")
    half = len(batch.rows) // 2
    for rows in (batch.rows[:half], batch.rows[half:]):
        yield from _within_memory(batch._replace(rows=rows))


def _max_logits(device: torch.device) -> int:
    """Entries that the logits of one batch may have: in float32 an eighth of a GPU's memory."""
    if device.type == "cpu":
        return _LOGITS_CPU
    if device.type != "cuda":
        return 4 * _LOGITS_CPU
    return min(LOGITS_MOST, torch.cuda.get_device_properties(device).total_memory // 32)


class ReadyBatch(NamedTuple):
    """A batch on the model's device, to be read as often as heads are edited."""

    ready: Ready  # the rows
    source: Tensor  # for each scored token, which of the positions that are read predicts it, [S]
    token: Tensor  # the token, [S]

    def logprobs(self) -> Tensor:
        """Log-probability of each scored token, one row after the other, [S]; it stays on the device."""
        logits = self.ready.logits()
        return logits[self.source, self.token].float() - log_sum_exp(logits)[self.source]


def log_sum_exp(logits: Tensor) -> Tensor:
    """In float32, [P, V] → [P], some rows at a time: as many as a processor's cache holds, or a GPU is busy with."""
    rows = max(1, (1 << 18 if logits.device.type == "cpu" else 1 << 24) // logits.shape[-1])
    return torch.cat([torch.logsumexp(part.float(), dim=-1) for part in logits.split(rows)])


def _finite(values: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InputError(
            f"request {name!r}: the log-probability of token {bad + 1} of {len(values)} is {values[bad]}. "
            "Are the weights damaged, or is the precision too low? Try float32"
        )
    return values


def _score(name: str, encoded: Encoded, values: NDArray[np.float64], per_token: bool) -> Score:
    kept = tuple(values.tolist()) if per_token else None
    return Score(name, float(values.sum()), len(values), encoded.merged, kept)


def load_scorer(
    # A folder, a name on the hub that is in the local cache, or a live model: see `fairhead.load`
    model: str | os.PathLike[str] | nn.Module,
    *,
    device: str = "auto",  # "cpu", "cuda", "cuda:1", ...; "auto" takes a GPU where there is one
    dtype: DType = "auto",  # "float32", "bfloat16" or "float16"; "auto" is float32 on a processor and bfloat16 on a GPU
    batch_tokens: int | None = None,  # as in `Scorer`
    start: str | None = None,  # the token that texts start with: "default", "bos", "eos", "none", or a token
    # Where it stands: "fairhead", "lm-eval" or "bias-bench", as in `packing.Convention`
    convention: Convention = "fairhead",
    chat: bool = False,  # as in `Scorer`
    device_map: str | None = None,  # how layers are spread over several GPUs: "auto", "balanced" or "sequential"
    load_in: LoadIn | None = None,  # "8bit" or "4bit", by bitsandbytes on a GPU
    tokenizer: Any = None,  # of a live model; otherwise that of the folder
) -> Scorer:
    """Load a causal language model and its tokenizer for scoring, with the method that it carries."""
    placing: dict[str, Any] = {"device_map": device_map, "load_in": load_in}
    loaded = open_model(model, "causal", device=device, dtype=dtype, tokenizer=tokenizer, **placing)
    own_start = start not in (None, "default") or convention != "fairhead" or chat
    if own_start and method_of(loaded.model) is not None:
        raise InputError(
            f"{model}: self-debiasing puts its sentence after the model's own start token; leave --start, --as and "
            "--chat out"
        )
    how: dict[str, Any] = {"start": start, "convention": convention, "chat": chat}
    return Scorer(loaded.model, loaded.tokenizer, batch_tokens=batch_tokens, **how)
