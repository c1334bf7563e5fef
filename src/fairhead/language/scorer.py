"""The scoring engine: log-probabilities of many continuations of many prefixes, under any causal language model.

Sequences are laid into trees (`packing.py`) and every tree is read in one forward pass: a mask lets each token see the
tokens that lead to it and no others, and positions count along its own branch. A context that a hundred questions share
is thus computed once, without a cache to copy, and only the tokens that predict scored ones reach the vocabulary.
A model that cannot read trees (recurrent ones, position biases of its own) is found out by a trial and given plain
rows.

vLLM reads texts with an engine of its own (`VLLMScorer`); tokens, start tokens, journals and benchmarks are the same.
fairhead does not depend on vLLM, which pins a version of torch: install it into an environment of its own.
"""

import hashlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fairhead.errors import InputError, UnsupportedModel
from fairhead.language.answers import Answers, Journal, Progress, Request, Score, refuse_duplicates
from fairhead.language.packing import (
    Convention,
    Encoded,
    TokenSequence,
    as_chat,
    batches,
    control_token_warning,
    encode,
    pack,
    start_token,
)
from fairhead.language.row_layout import (
    BATCH_TOKENS,
    Layout,
    Planned,
    context_length,
    most_logits,
    quiet,
    read_all,
    reads_trees,
    refuse_other_than_causal,
    vocabulary_of,
    window_of,
)
from fairhead.models.attached import weight_files
from fairhead.models.load import weights_digest
from fairhead.train.step import say_once

# Tokens a row by default. Attention within a row costs its length squared, which a GPU minds less than many rows.
_ROW_TOKENS = {"cpu": 128, "cuda": 256}
_AT_ONCE = 512  # texts between two lines of progress of vLLM, which makes batches of them as its memory allows
Values = NDArray[np.float64]


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
        kind = weight.device.type
        batch_tokens = BATCH_TOKENS.get(kind, 4096) if self.batch_tokens is None else self.batch_tokens
        row_tokens = _ROW_TOKENS.get(kind, 128) if self.row_tokens is None else self.row_tokens
        if batch_tokens < 1 or row_tokens < 1:
            raise InputError(f"batch_tokens {batch_tokens} and row_tokens {row_tokens}: expected at least 1")
        self.batch_tokens, self.row_tokens = batch_tokens, row_tokens
        self.check_start()
        self.vocabulary = vocabulary_of(self.model)
        self.context = context_length(self.model)
        with quiet(self.model):
            self.reads_trees = reads_trees(self.model)
        # Layers with a window hide tokens that are far away: trees and branches must stay within it.
        self._window = window_of(self.model)

    def check_start(self) -> None:
        """Find the token that texts start with; raise where it cannot be had, warn where it is a control token."""
        if self.chat and (self.start not in (None, "default") or self.convention == "bias-bench"):
            raise InputError("a chat template has a start of its own: leave --start and --as bias-bench out")
        self.start_token = start_token(self.tokenizer, self.start)
        if self.convention == "bias-bench" and not self.start_token.lead:
            raise InputError("bias-bench scores the first token of a text after a start token; --start none has none")
        if self.chat:
            as_chat(self.tokenizer, [""])
        elif (told := control_token_warning(self.tokenizer, self.start)) is not None:
            say_once(told)

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
        # A run that goes on reads the batches of an unbroken one: in others the rest might be rounded another way.
        asked = requests if len(found) < len(requests) else []
        encoded = self._encode(asked)
        long = [i for i, one in enumerate(encoded) if len(one.sequence.tokens) > self.context]
        too_long = tuple(asked[i].id for i in long)
        if long and on_long == "raise":
            raise InputError(
                f"{len(long)} of {len(asked)} requests are longer than the model's context of {self.context} tokens; "
                f"the first is {too_long[0]!r} with {len(encoded[long[0]].sequence.tokens)}. Shorten them, or leave "
                "them out with on_long='skip'"
            )
        both = zip(encoded, asked, strict=True)
        fitting = [(one, request) for one, request in both if len(one.sequence.tokens) <= self.context]
        names = [request.id for _, request in fitting]
        wanted = {k for k, name in enumerate(names) if name not in found}
        firsts = self._firsts([one for one, _ in fitting], names)
        if progress is not None:
            progress(len(found), len(requests))
        for read_at_once in self._score_batches([one.sequence for one, _ in fitting], names, wanted):
            batch = [(k, read) for k, read in read_at_once if k in wanted]
            scores = []
            for k, read in batch:
                values = np.concatenate([firsts[k], read]) if k in firsts else read
                kept = tuple(values.tolist()) if per_token else None
                scores.append(Score(names[k], float(values.sum()), len(values), fitting[k][0].merged, kept))
            if journal is not None:
                journal.add([fitting[k][1] for k, _ in batch], scores)
            found |= {score.id: score for score in scores}
            if progress is not None:
                progress(len(found) + len(too_long), len(requests))
        return Answers({r.id: found[r.id] for r in requests if r.id in found}, too_long)

    def _encode(self, requests: Sequence[Request]) -> list[Encoded]:
        start = self.start_token
        if self.chat:  # the space between a prefix and its continuation is the template's affair
            start = start_token(self.tokenizer, "none")
            prefixes = as_chat(self.tokenizer, [request.prefix for request in requests])
            requests = [
                request._replace(prefix=prefix, continuation=request.continuation.lstrip())
                for request, prefix in zip(requests, prefixes, strict=True)
            ]
        encoded = encode(requests, self.tokenizer, start, self.convention)
        self.refuse_unknown([max(one.sequence.tokens) for one in encoded] or [0])
        return encoded

    def _firsts(self, encoded: Sequence[Encoded], names: Sequence[str]) -> dict[int, Values]:
        """The log-probability [1] of each first token that is scored apart from the others; each token is read once."""
        apart = {i: tuple(one.first.tokens) for i, one in enumerate(encoded) if one.first is not None}
        first_of = {tokens: names[i] for i, tokens in reversed(apart.items())}
        distinct = list(dict.fromkeys(apart.values()))
        values = self.score_tokens([TokenSequence(t, 1) for t in distinct], [first_of[t] for t in distinct])
        found = dict(zip(distinct, values, strict=True))
        return {i: found[tokens] for i, tokens in apart.items()}

    def score_tokens(self, sequences: Sequence[TokenSequence], names: Sequence[str]) -> list[Values]:
        """Log-probabilities of the scored tokens of each sequence; `names` are for messages."""
        everything = range(len(sequences))
        found = dict(one for batch in self._score_batches(sequences, names, everything) for one in batch)
        return [found[i] for i in everything]

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
            **self.start_settings(),
        }

    def start_settings(self) -> dict[str, Any]:
        """How texts start."""
        start = {"start": self.start or "default", "as": self.convention}
        start["start_token"] = f"{self.start_token.name} ({self.start_token.kind})"
        return {**start, **({"chat": True} if self.chat else {})}

    def refuse_unknown(self, tokens: Sequence[int]) -> None:
        """Raise where the tokeniser has given a token that the model does not have."""
        if max(tokens) >= self.vocabulary:
            raise InputError(
                f"the tokeniser has token {max(tokens)}, the model has {self.vocabulary}; is it this model's tokeniser?"
            )

    def _score_batches(
        self, sequences: Sequence[TokenSequence], names: Sequence[str], wanted: Container[int]
    ) -> Iterator[list[tuple[int, Values]]]:
        """Batches of (index of the sequence, log-probabilities of its scored tokens), those wanted among them."""
        for read in self._read(sequences, wanted):
            if not np.isfinite(np.concatenate([values for _, values in read])).all():
                for k, values in read:
                    _refuse_infinite(values, names[k])
            yield read

    def _read(self, sequences: Sequence[TokenSequence], wanted: Container[int]) -> Iterator[list[tuple[int, Values]]]:
        return read_all(batch for batch in self.planned(sequences) if any(k in wanted for k, _ in batch.paths()))

    def planned(self, sequences: Sequence[TokenSequence]) -> Iterator[Planned]:
        """The batches in which sequences are read, the largest first."""
        assert self.batch_tokens is not None
        assert self.row_tokens is not None
        device = torch.device(self.device or "cpu")
        limit = self._window or self.context
        packable = [i for i, s in enumerate(sequences) if self.reads_trees and len(s.tokens) <= limit]
        plain = sorted({*range(len(sequences))} - {*packable})
        row_tokens = min(self.row_tokens, self._window or self.row_tokens)
        max_scored = max(1, most_logits(device) // self.vocabulary)
        # To a GPU another batch costs as much as a full one; to a processor little.
        overhead = 16 if device.type == "cpu" else self.batch_tokens
        for members, tree in ((packable, True), (plain, False)):
            rows = pack([sequences[i] for i in members], row_tokens, share=tree, longest=self._window)
            for batch in batches(rows, self.batch_tokens, max_scored, overhead):
                yield Planned(Layout(self.model, tree), tuple(rows[i] for i in batch), members)


def _refuse_infinite(values: Values, name: str) -> None:
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InputError(
            f"request {name!r}: the log-probability of token {bad + 1} of {len(values)} is {values[bad]}. "
            "Are the weights damaged, or is the precision too low? Try float32"
        )


@dataclass
class VLLMScorer(Scorer):
    """Scores texts by vLLM. Its `model` is the engine: attention cannot be read, and it does not continue prompts."""

    model: Any  # `vllm.LLM`
    folder: Path = Path()  # with the weights

    def __post_init__(self) -> None:
        self.check_start()
        config = self.model.llm_engine.model_config
        self.dtype = config.dtype
        self.device = "chosen by vLLM"
        self.vocabulary = config.get_vocab_size()
        self.context = config.max_model_len - 1  # the engine always continues a text, by one token at least

    def _read(self, sequences: Sequence[TokenSequence], wanted: Container[int]) -> Iterator[list[tuple[int, Values]]]:
        chosen = [k for k in range(len(sequences)) if k in wanted]
        how = import_module("vllm").SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        for begin in range(0, len(chosen), _AT_ONCE):
            at_once = chosen[begin : begin + _AT_ONCE]
            part = [(list(map(int, sequences[k].tokens)), sequences[k].scored_from) for k in at_once]
            read = self.model.generate([{"prompt_token_ids": ids} for ids, _ in part], how, use_tqdm=False)
            yield [
                (k, np.array([by_token[token].logprob for token, by_token in pairs[first:]], dtype=np.float64))
                for k, (ids, first), found in zip(at_once, part, read, strict=True)
                for pairs in [list(zip(ids, found.prompt_logprobs, strict=True))]
            ]

    @property
    def attending(self) -> nn.Module:
        """There is none."""
        raise UnsupportedModel("vLLM only scores texts here: to read attention or to generate, leave --engine vllm out")

    def settings(self) -> dict[str, Any]:
        """What a score depends on besides its texts."""
        digest = hashlib.blake2b(digest_size=16)
        for path in weight_files(self.folder):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        architectures: list[str] = self.model.llm_engine.model_config.architectures
        how = {
            "model": architectures[0],
            "weights": digest.hexdigest(),
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        return {**how, **self.start_settings(), "engine": f"vllm {import_module('vllm').__version__}"}
