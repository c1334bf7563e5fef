"""The scoring engine: log-probabilities of many continuations of many prefixes, under any causal language model.

Sequences are laid into trees (`packing.py`) and every tree is read in one forward pass: a mask lets each token see the
tokens that lead to it and no others, and positions count along its own branch. A context that a hundred questions share
is thus computed once, without a cache to copy, and only the tokens that predict scored ones reach the vocabulary.
A model that cannot read trees (recurrent ones, position biases of its own) is found out by a trial and given plain
rows.

Several processes, one per GPU (`accelerate launch -m fairhead lm ...`, or torchrun), score together: the first one runs
the command as it would alone, and texts are divided among all of them (`SharedScorer`).
"""

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from fairhead.errors import FairheadError, InputError
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
from fairhead.models import method_of, open_model
from fairhead.models.load import DType, LoadIn, weights_digest
from fairhead.train.step import say_once

# Tokens a row by default. Attention within a row costs its length squared, which a GPU minds less than many rows.
_ROW_TOKENS = {"cpu": 128, "cuda": 256}
_PATIENCE = timedelta(days=7)  # that processes wait for the first, which may be generating or drawing
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
            self.reads_trees = reads_trees(self.model)
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
        wanted = [r for r in requests if r.id not in found]
        encoded = self._encode(wanted)
        long = [i for i, one in enumerate(encoded) if len(one.sequence.tokens) > self.context]
        too_long = tuple(wanted[i].id for i in long)
        if long and on_long == "raise":
            raise InputError(
                f"{len(long)} of {len(wanted)} requests are longer than the model's context of {self.context} tokens; "
                f"the first is {too_long[0]!r} with {len(encoded[long[0]].sequence.tokens)}. Shorten them, or leave "
                "them out with on_long='skip'"
            )
        both = zip(encoded, wanted, strict=True)
        fitting = [(one, asked) for one, asked in both if len(one.sequence.tokens) <= self.context]
        names = [asked.id for _, asked in fitting]
        firsts = self._firsts([one for one, _ in fitting], names)
        if progress is not None:
            progress(len(found), len(requests))
        for batch in self._score_batches([one.sequence for one, _ in fitting], names):
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
        found = dict(one for batch in self._score_batches(sequences, names) for one in batch)
        return [found[i] for i in range(len(sequences))]

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

    def _score_batches(
        self, sequences: Sequence[TokenSequence], names: Sequence[str]
    ) -> Iterator[list[tuple[int, Values]]]:
        """Batches of (index of the sequence, log-probabilities of its scored tokens)."""
        for read in read_all(self.planned(sequences)):
            if not np.isfinite(np.concatenate([values for _, values in read])).all():
                for k, values in read:
                    _refuse_infinite(values, names[k])
            yield read

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


def shared(scorer: Any) -> Any:
    """A scorer that divides its texts among the processes of this run; with one process the scorer itself.

    In any process but the first this returns never: it works until the first one ends, and ends as well.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return scorer
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_PATIENCE)
    if dist.get_rank() == 0:
        return SharedScorer(scorer)
    while (task := _told(None)) is not None:
        _answered(scorer, task)
    dist.destroy_process_group()
    os._exit(0)  # now and then gloo's threads never end, and the process would wait for them


class _Task(NamedTuple):
    """What all processes do together."""

    method: str  # of the scorer
    items: Sequence[Any]  # of which each process takes its share
    more: dict[str, Any]
    journal: tuple[Path, dict[str, Any]] | None = None  # path and settings


class SharedScorer:
    """The scorer of the first process; all but the scoring of texts is as in the one that it has.

    Each process writes what it has scored at once into a journal of its own beside the first one's, which takes those
    over.
    """

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer
        atexit.register(self.close)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scorer, name)

    def close(self) -> None:
        """Let the other processes end."""
        if dist.is_initialized():
            _told(None)
            dist.destroy_process_group()

    def score(
        self,
        requests: Sequence[Request],
        *,
        per_token: bool = False,
        journal: Journal | None = None,
        on_long: str = "raise",
        progress: Progress | None = None,
    ) -> Answers[Score]:
        """As `Scorer.score`."""
        refuse_duplicates(requests, "requests")
        _take_over(journal)  # of a run that was killed
        found = {r.id: s for r in requests if journal and (s := journal.find(r, per_token)) is not None}
        known, n = len(found), len(requests)

        def tell(done: int, total: int) -> None:  # progress of the first process stands for that of all
            if progress is not None:
                progress(known + (n - known) * done // max(total, 1), n)

        place = None if journal is None else (journal.path, dict(journal.settings))
        wanted = [r for r in requests if r.id not in found]
        parts = self._all(_Task("score", wanted, {"per_token": per_token, "on_long": on_long}, place), tell)
        for part in parts:
            found |= part
        _take_over(journal)
        too_long = tuple(name for part in parts for name in part.too_long)
        return Answers({r.id: found[r.id] for r in requests if r.id in found}, too_long)

    def score_tokens(self, sequences: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """As `Scorer.score_tokens`."""
        task = _Task("score_tokens", list(zip(sequences, names, strict=True)), {})
        return [values for part in self._all(task) for values in part]

    def _all(self, task: _Task, progress: Progress | None = None) -> list[Any]:
        _told(task)
        found = _answered(self.scorer, task, progress)
        for one in found:
            if isinstance(one, FairheadError):
                raise one
        return found


def _told(task: _Task | None) -> _Task | None:
    """What the first process says, in all of them."""
    said = [task]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def _answered(scorer: Any, task: _Task, progress: Progress | None = None) -> list[Any]:
    """What each process has found, in all of them; an error where it has found one."""
    rank, n = dist.get_rank(), dist.get_world_size()
    # Stretches of about as much text: what neighbours begin with alike is then still read once.
    ends = np.cumsum([len(repr(item)) for item in task.items])
    places = [int(np.searchsorted(ends, ends[-1] * k / n, side="right")) if len(ends) else 0 for k in range(1, n)]
    begin, end = list(pairwise([0, *places, len(task.items)]))[rank]
    mine = list(task.items[begin:end])
    found: Any
    try:
        if task.method == "score_tokens":
            found = scorer.score_tokens([one for one, _ in mine], [name for _, name in mine])
        else:
            own = None
            if task.journal is not None:
                path, settings = task.journal
                own = Journal(path.with_name(f"{path.stem}.rank{rank}{path.suffix}"), settings)
            with own or nullcontext():
                found = scorer.score(mine, **task.more, journal=own, progress=progress)
    except FairheadError as error:
        found = error
    everything: list[Any] = [None] * n
    dist.all_gather_object(everything, found)
    return everything


def _take_over(journal: Journal | None) -> None:
    """Put what processes have written into the first one's journal, and remove their files."""
    if journal is not None:
        for path in sorted(journal.path.parent.glob(f"{journal.path.stem}.rank*{journal.path.suffix}")):
            journal.take_over(path)
