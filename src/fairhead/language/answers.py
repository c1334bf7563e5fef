"""What is asked of a language model, what comes back, and the file that keeps it. Needs neither torch nor numpy."""

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from fairhead.errors import InputError
from fairhead.settings import PYTHON_ONLY, Count, NotNegative, Option, PositiveShare, Seed, WholeNumber, check_config
from fairhead.store import LineJournal, reading

TOO_LONG = "longer than the model's context"

T = TypeVar("T")
Answer = TypeVar("Answer")
Progress = Callable[[int, int], None]  # called after each batch with what is done, and how much there is


class Request(NamedTuple):
    """A continuation whose log-probability after a prefix is wanted; an empty prefix asks for the whole text."""

    id: str  # distinct within a run; scores are found by it
    prefix: str  # what the model has read; may be empty
    continuation: str  # what is scored, with the space that parts it from the prefix

    @property
    def digest(self) -> str:
        """A hash of both texts: an id alone would let scores of older data pass for those of newer."""
        return text_digest(f"{len(self.prefix)}\n{self.prefix}{self.continuation}")


class Prompt(NamedTuple):
    """The beginning of a text."""

    id: str  # distinct within a run; continuations are found by it
    text: str  # what the model reads. Spaces at its end are left to the continuation, as in scoring.

    @property
    def digest(self) -> str:
        """A hash of the text."""
        return text_digest(self.text)


def text_digest(text: str) -> str:
    """What tells a text from another."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def refuse_duplicates(asked: Sequence[Request] | Sequence[Prompt], what: str) -> None:
    """Raise where two of what is asked have the same id: answers are found by it."""
    for name, n in Counter(one.id for one in asked).items():
        if n > 1:
            raise InputError(f"two {what} have the id {name!r}; expected unique ids")


@dataclass(frozen=True)
class Score:
    """The log-probability (natural logarithm) of one continuation."""

    id: str  # that of the request
    logprob: float  # sum over the tokens of the continuation
    n_tokens: int  # how many there are
    merged: bool = False  # whether the tokeniser joins the end of the prefix with the start of the continuation
    per_token: tuple[float, ...] | None = None  # log-probability of each token, where asked for

    @property
    def per_token_mean(self) -> float:
        """Mean log-probability of a token."""
        return self.logprob / self.n_tokens


class Generation(NamedTuple):
    """What a model wrote after a prompt."""

    id: str  # that of the prompt
    text: str  # the continuation alone
    n_tokens: int  # tokens of it, without the one that ends a text

    @property
    def empty(self) -> bool:
        """Whether there is nothing to measure."""
        return not self.text.strip()


class Answers(dict[str, Answer]):
    """Scores or continuations by id."""

    def __init__(self, by_id: Mapping[str, Answer], too_long: Iterable[str] = ()) -> None:
        super().__init__(by_id)
        # Ids of texts that leave no room in the model's context; they are left out, never cut
        self.too_long = tuple(too_long)


class Gathered(NamedTuple):
    """Items with the scores of their texts, in the order in which they were asked for; and ids left out by reason."""

    items: list[Any]
    scores: list[list[Score]]
    left_out: Mapping[str, tuple[str, ...]]


def gather(items: Iterable[T], ids: Callable[[T], Sequence[str]], scores: Mapping[str, Score]) -> Gathered:
    """Bring items and the scores of their texts together; an item that lacks a score is named, not guessed.

    Example:
        >>> scores = {"1/a": Score("1/a", -1.0, 1), "1/b": Score("1/b", -2.0, 1), "2/a": Score("2/a", -1.0, 1)}
        >>> found = gather(["1", "2"], lambda item: [f"{item}/a", f"{item}/b"], scores)
        >>> found.items, found.left_out
        (['1'], {"longer than the model's context": ('2',)})
    """
    names = [(item, ids(item)) for item in items]
    found = [(item, of) for item, of in names if all(name in scores for name in of)]
    missing = tuple(getattr(item, "id", str(item)) for item, of in names if not all(name in scores for name in of))
    by_item = [[scores[name] for name in of] for _, of in found]
    return Gathered([item for item, _ in found], by_item, {TOO_LONG: missing} if missing else {})


@dataclass(frozen=True)
class Sampling:
    """How continuations are drawn. Same settings, same continuations.

    Attributes:
        max_new_tokens: maximum number of tokens per continuation.
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: sample from the k most likely tokens; 0 for all.
        top_p: sample from the most likely tokens whose probabilities add up to p.
        seed: seed; each prompt has its own random generator, seeded with this and its id.
        batch_size: prompts per batch; another size may give other results by rounding.
    """

    panel: ClassVar[str] = "How continuations are drawn"
    max_new_tokens: Annotated[Count, Option(metavar="N")] = 40
    temperature: Annotated[NotNegative, Option(metavar="X")] = 1.0
    top_k: Annotated[WholeNumber, Option(metavar="K")] = 50
    top_p: Annotated[PositiveShare, Option(metavar="P")] = 0.95
    seed: Annotated[Seed, PYTHON_ONLY] = 0
    batch_size: Annotated[Count, Option(metavar="N")] = 64

    def __post_init__(self) -> None:
        check_config(self)

    def settings(self) -> dict[str, Any]:
        """What continuations depend on besides the model and the prompt."""
        return asdict(self)


@dataclass
class Journal(LineJournal):
    """A JSONL file to which scores are added as they are made, and from which a killed run goes on.

    `settings` are whatever a score depends on besides its texts: a file of other settings is refused.
    """

    schema: ClassVar[str] = "fairhead.scores/1"
    what: ClassVar[str] = "scores"
    digest_key: ClassVar[str] = "text"
    _kept: dict[tuple[str, str], Any] = field(default_factory=dict, repr=False)

    def find(self, asked: Request | Prompt, per_token: bool = False) -> Any:
        """The answer, if it is there."""
        found = self._kept.get((asked.id, asked.digest))
        return None if found is None or (per_token and found.per_token is None) else found

    def add(self, asked: Iterable[Request | Prompt], answers: Iterable[Any]) -> None:
        """Write the answers of a batch; they are on disk when this returns."""
        self._keep({(one.id, one.digest): answer for one, answer in zip(asked, answers, strict=True)})

    def take_over(self, path: Path) -> None:
        """Add what another journal of the same settings has, and remove its file."""
        with type(self)(path, self.settings) as other:
            self._keep(other._kept)
        path.unlink()

    def _keep(self, answers: Mapping[tuple[str, str], Any]) -> None:
        self._kept |= answers
        self.write({"id": name, self.digest_key: text, **self.line_of(one)} for (name, text), one in answers.items())

    def take(self, row: Mapping[str, Any]) -> None:
        """Take up a line of the file."""
        self._kept[row["id"], row[self.digest_key]] = self.answer_of(row)

    @staticmethod
    def line_of(answer: Any) -> dict[str, Any]:
        """What a line holds of an answer."""
        line = {"logprob": answer.logprob, "tokens": answer.n_tokens, "merged": answer.merged}
        return line if answer.per_token is None else {**line, "per_token": answer.per_token}

    @staticmethod
    def answer_of(row: Mapping[str, Any]) -> Any:
        """The answer that a line holds."""
        per_token = None if row.get("per_token") is None else tuple(row["per_token"])
        return Score(row["id"], float(row["logprob"]), int(row["tokens"]), bool(row["merged"]), per_token)


@dataclass
class GenerationJournal(Journal):
    """The same for continuations."""

    schema: ClassVar[str] = "fairhead.generations/1"
    what: ClassVar[str] = "generations"
    digest_key: ClassVar[str] = "prompt"

    @staticmethod
    def line_of(answer: Any) -> dict[str, Any]:
        """What a line holds of an answer."""
        return {"text": answer.text, "tokens": answer.n_tokens}

    @staticmethod
    def answer_of(row: Mapping[str, Any]) -> Any:
        """The answer that a line holds."""
        return Generation(str(row["id"]), str(row["text"]), int(row["tokens"]))

    def of(self, prompts: Iterable[Prompt]) -> Answers[Generation]:
        """The continuations of prompts; those without one are not in the result."""
        digests = dict(self._kept.keys())
        asked = [prompt for prompt in prompts if prompt.id in digests]
        for prompt in asked:
            if digests[prompt.id] != prompt.digest:
                raise InputError(
                    f"the continuation of {prompt.id!r} was made after another text than the one in the data; "
                    "score it with the data that it was made from"
                )
        return Answers({prompt.id: self._kept[prompt.id, prompt.digest] for prompt in asked})


def journal_in(
    folder: Path | None, benchmark: str, settings: Mapping[str, Any], kind: type[Journal] = Journal
) -> AbstractContextManager[Any]:
    """A journal for a model and settings in a folder; nothing without a folder."""
    return nullcontext() if folder is None else kind(journal_path(folder, benchmark, settings), settings)


def journal_path(folder: Path, benchmark: str, settings: Mapping[str, Any]) -> Path:
    """A file name of its own for each model and settings."""
    text = json.dumps(dict(settings), sort_keys=True)
    return folder / f"{benchmark}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}.jsonl"


def read_generations(path: Path) -> GenerationJournal:
    """Read a file of continuations, plain or compressed (.gz), to score it where there is no model."""
    with reading(path, "is not a file of generations that fairhead wrote (lm bold --out)"):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = content[: content.rfind(b"\n") + 1].decode(errors="surrogatepass").split("\n")[:-1]
        header = json.loads(lines[0])
        if header["schema"] != GenerationJournal.schema:
            raise InputError(f"{path} has the schema {header['schema']!r}; expected {GenerationJournal.schema!r}")
        stored = GenerationJournal(path, header["settings"])
        for line in lines[1:]:
            stored.take(json.loads(line))
        return stored
