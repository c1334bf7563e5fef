"""Scoring by several processes, one per GPU: `accelerate launch -m fairhead lm ...`, or torchrun.

The first process runs the command as it would alone. Texts that it wants scored are divided among all of them, each
with a copy of the model; the others do nothing else. What a process has scored it writes at once into a journal of its
own beside the first one's, which takes those over.
"""

import atexit
import os
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist

from fairhead.errors import FairheadError
from fairhead.language.answers import Answers, Journal, Progress, Request, Score, refuse_duplicates

T = TypeVar("T")
_PATIENCE = timedelta(days=7)  # that processes wait for the first, which may be generating or drawing


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
    while (asked := _told(None)) is not None:
        _answered(scorer, asked)
    dist.destroy_process_group()
    os._exit(0)  # now and then gloo's threads never end, and the process would wait for them


class _Asked(NamedTuple):
    """What all processes are to do together."""

    method: str  # of the scorer
    items: Sequence[Any]  # of which each process takes its share
    more: dict[str, Any]
    journal: tuple[Path, dict[str, Any]] | None = None  # path and settings


class SharedScorer:
    """The scorer of the first process; all but the scoring of texts is as in the one that it has."""

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
        if journal is not None:
            _take_over(journal)  # of a run that was killed
        found = {r.id: s for r in requests if journal and (s := journal.find(r, per_token)) is not None}
        wanted = [r for r in requests if r.id not in found]
        place = None if journal is None else (journal.path, dict(journal.settings))
        asked = _Asked("score", wanted, {"per_token": per_token, "on_long": on_long}, place)
        tell = None if progress is None else _scaled(progress, len(found), len(requests))
        too_long: list[str] = []
        for part in self._all(asked, tell):
            found |= part
            too_long += part.too_long
        if journal is not None:
            _take_over(journal)
        return Answers({r.id: found[r.id] for r in requests if r.id in found}, tuple(too_long))

    def score_tokens(self, sequences: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """As `Scorer.score_tokens`."""
        asked = _Asked("score_tokens", list(zip(sequences, names, strict=True)), {})
        return [values for part in self._all(asked, None) for values in part]

    def _all(self, asked: _Asked, progress: Progress | None) -> list[Any]:
        _told(asked)
        found = _answered(self.scorer, asked, progress)
        for one in found:
            if isinstance(one, FairheadError):
                raise one
        return found


def _told(asked: _Asked | None) -> _Asked | None:
    """What the first process says, in all of them."""
    said = [asked]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def _answered(scorer: Any, asked: _Asked, progress: Progress | None = None) -> list[Any]:
    """What each process has found, in all of them; an error where it has found one."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = shares(asked.items, n)[rank]
    found: Any
    try:
        if asked.method == "score_tokens":
            found = scorer.score_tokens([one for one, _ in mine], [name for _, name in mine])
        else:
            own = None if asked.journal is None else Journal(_own(asked.journal[0], rank), asked.journal[1])
            with own or nullcontext():
                found = scorer.score(mine, **asked.more, journal=own, progress=progress)
    except FairheadError as error:
        found = error
    everything: list[Any] = [None] * n
    dist.all_gather_object(everything, found)
    return everything


def shares(items: Sequence[T], n: int) -> list[list[T]]:
    """Items in n stretches of about as much text: what neighbours begin with alike is then still read once.

    Example:
        >>> shares(["aaaa", "b", "c", "dd"], 2)
        [['aaaa'], ['b', 'c', 'dd']]
    """
    ends = np.cumsum([len(repr(item)) for item in items])
    places = [int(np.searchsorted(ends, ends[-1] * k / n, side="right")) for k in range(1, n)] if len(items) else []
    edges = [0, *(places or [0] * (n - 1)), len(items)]
    return [list(items[begin:end]) for begin, end in pairwise(edges)]


def _own(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _take_over(journal: Journal) -> None:
    """Put what processes have written into the first one's journal, and remove their files."""
    for path in sorted(journal.path.parent.glob(f"{journal.path.stem}.rank*{journal.path.suffix}")):
        journal.take_over(path)


def _scaled(progress: Progress, before: int, total: int) -> Progress:
    """Progress of the first process as that of all of them."""
    whole = total

    def tell(done: int, total: int) -> None:
        progress(before + (whole - before) * done // max(total, 1), whole)

    return tell
