"""Loading a scorer: by transformers or vLLM, in one process or in several.

Several processes, one per GPU (`accelerate launch -m fairhead lm ...`, or torchrun), score together: the first one runs
the command as it would alone, and texts are divided among all of them (`SharedScorer`).
"""

import atexit
import os
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch.distributed as dist
from torch import nn

from fairhead.errors import FairheadError, InputError, check_known
from fairhead.language.answers import Answers, Journal, Progress, Request, Score, refuse_duplicates
from fairhead.language.packing import Convention
from fairhead.language.scorer import Scorer
from fairhead.language.vllm_scorer import load_vllm
from fairhead.models import method_of, open_model
from fairhead.models.load import DType, LoadIn

_PATIENCE = timedelta(days=7)  # that processes wait for the first, which may be generating or drawing
Engine = Literal["transformers", "vllm"]


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
    engine: Engine = "transformers",  # "vllm" needs the package of that name
) -> Scorer:
    """Load a causal language model and its tokenizer for scoring, with the method that it carries."""
    check_known(engine, get_args(Engine), f"engine {engine!r} is not known; expected one of")
    how: dict[str, Any] = {"start": start, "convention": convention, "chat": chat}
    if engine == "vllm":
        given = {"device": device != "auto", "batch_tokens": batch_tokens, "device_map": device_map, "load_in": load_in}
        if chosen := [name.replace("_", "-") for name, value in given.items() if value]:
            raise InputError(f"vLLM chooses by itself what --{', --'.join(chosen)} would: leave it out")
        return load_vllm(model, dtype, **how)
    placing: dict[str, Any] = {"device_map": device_map, "load_in": load_in}
    loaded = open_model(model, "causal", device=device, dtype=dtype, tokenizer=tokenizer, **placing)
    own_start = start not in (None, "default") or convention != "fairhead" or chat
    if own_start and method_of(loaded.model) is not None:
        raise InputError(
            f"{model}: self-debiasing puts its sentence after the model's own start token; leave --start, --as and "
            "--chat out"
        )
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
