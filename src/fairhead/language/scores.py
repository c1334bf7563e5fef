"""What is asked of a language model and what comes back, and the file that keeps it. Needs no torch."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from fairhead.store import LineJournal

SCHEMA = "fairhead.scores/1"


class Request(NamedTuple):
    """A continuation whose log-probability after a prefix is wanted; an empty prefix asks for the whole text.

    Attributes:
        id: distinct within a run; scores are found by it.
        prefix: what the model has read; may be empty.
        continuation: what is scored, with the space that parts it from the prefix.
    """

    id: str
    prefix: str
    continuation: str

    @property
    def digest(self) -> str:
        """A hash of both texts: an id alone would let scores of older data pass for those of newer."""
        texts = f"{len(self.prefix)}\n{self.prefix}{self.continuation}"
        return hashlib.blake2b(texts.encode(errors="surrogatepass"), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Score:
    """The log-probability (natural logarithm) of one continuation.

    Attributes:
        id: that of the request.
        logprob: sum over the tokens of the continuation.
        n_tokens: how many there are.
        merged: whether the tokeniser joins the end of the prefix with the start of the continuation.
        per_token: log-probability of each token, where asked for.

    Example:
        >>> Score("a", -6.0, 3).per_token_mean
        -2.0
    """

    id: str
    logprob: float
    n_tokens: int
    merged: bool = False
    per_token: tuple[float, ...] | None = None

    @property
    def per_token_mean(self) -> float:
        """Mean log-probability of a token."""
        return self.logprob / self.n_tokens


@dataclass(frozen=True)
class Scores(Mapping[str, Score]):
    """Scores by request id, and what could not be scored.

    Attributes:
        by_id: the scores.
        too_long: ids of requests longer than the model's context; they are left out, never cut.

    Example:
        >>> scores = Scores({"a": Score("a", -6.0, 3)}, too_long=("b",))
        >>> scores["a"].logprob, len(scores), "b" in scores
        (-6.0, 1, False)
    """

    by_id: Mapping[str, Score]
    too_long: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Score:
        return self.by_id[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_id)

    def __len__(self) -> int:
        return len(self.by_id)


class Progress(Protocol):
    """Called after each batch with the number of requests done and their total."""

    def __call__(self, done: int, total: int) -> None:
        """Take note of it."""


@dataclass
class Journal(LineJournal):
    r"""A JSONL file to which scores are added as they are made, and from which a killed run goes on.

    Args:
        path: the file; made with its folder if it is not there.
        settings: whatever a score depends on besides its texts. A file of other settings is refused.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "scores.jsonl")
        >>> request = Request("a", "", "Hello")
        >>> with Journal(file, {"model": "m"}) as journal:
        ...     journal.add([request], [Score("a", -6.0, 3)])
        >>> _ = file.write_text(file.read_text() + '{"id": "b", "logp')
        >>> with Journal(file, {"model": "m"}) as journal:
        ...     journal.find(request), journal.find(Request("a", "", "Goodbye"))
        (Score(id='a', logprob=-6.0, n_tokens=3, merged=False, per_token=None), None)
    """

    schema: ClassVar[str] = SCHEMA
    what: ClassVar[str] = "scores"
    _kept: dict[tuple[str, str], Score] = field(default_factory=dict, repr=False)

    def find(self, request: Request, per_token: bool = False) -> Score | None:
        """The score of a request, if it is there."""
        score = self._kept.get((request.id, request.digest))
        return None if score is None or (per_token and score.per_token is None) else score

    def add(self, requests: Iterable[Request], scores: Iterable[Score]) -> None:
        """Write the scores of a batch; they are on disk when this returns."""
        lines = []
        for request, score in zip(requests, scores, strict=True):
            line: dict[str, Any] = {"id": score.id, "text": request.digest}
            line |= {"logprob": score.logprob, "tokens": score.n_tokens, "merged": score.merged}
            if score.per_token is not None:
                line["per_token"] = score.per_token
            self._kept[score.id, request.digest] = score
            lines.append(line)
        self.write(lines)

    def take(self, row: Mapping[str, Any]) -> None:
        """Take up a line of the file."""
        per_token = row.get("per_token")
        self._kept[row["id"], row["text"]] = Score(
            row["id"],
            float(row["logprob"]),
            int(row["tokens"]),
            bool(row["merged"]),
            None if per_token is None else tuple(per_token),
        )


def journal_in(
    folder: Path | None, benchmark: str, settings: Mapping[str, Any], kind: type[LineJournal] | None = None
) -> AbstractContextManager[Any]:
    """A journal for a model and settings in a folder, of scores or of another kind; nothing without a folder."""
    if folder is None:
        return nullcontext()
    return (kind or Journal)(journal_path(folder, benchmark, settings), settings)


def journal_path(folder: Path, benchmark: str, settings: Mapping[str, Any]) -> Path:
    """A file name of its own for each model and settings.

    Example:
        >>> journal_path(Path("runs"), "bbq", {"weights": "abc"}).name
        'bbq-0b072019.jsonl'
    """
    text = json.dumps(dict(settings), sort_keys=True)
    return folder / f"{benchmark}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}.jsonl"
