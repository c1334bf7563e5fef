"""Continuations that a model has written, how they were drawn, and the file that keeps them. Needs no torch."""

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from fairhead.errors import InputError
from fairhead.settings import PYTHON_ONLY, Option
from fairhead.store import LineJournal

SCHEMA = "fairhead.generations/1"


class Prompt(NamedTuple):
    """The beginning of a text.

    Attributes:
        id: distinct within a run; continuations are found by it.
        text: what the model reads. Spaces at its end are left to the continuation, as in scoring.
    """

    id: str
    text: str

    @property
    def digest(self) -> str:
        """A hash of the text: an id alone would let continuations of older data pass for those of newer."""
        return hashlib.blake2b(self.text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


class Generation(NamedTuple):
    """What a model wrote after a prompt.

    Attributes:
        id: that of the prompt.
        text: the continuation alone.
        n_tokens: tokens of it, without the one that ends a text.
    """

    id: str
    text: str
    n_tokens: int

    @property
    def empty(self) -> bool:
        """Whether there is nothing to measure.

        Example:
            >>> Generation("a", " ", 1).empty
            True
        """
        return not self.text.strip()


@dataclass(frozen=True)
class Sampling:
    """How continuations are drawn. Same settings, same continuations.

    Attributes:
        max_new_tokens: at most so many tokens a continuation.
        temperature: logits are divided by it; 0 takes the likeliest token each time.
        top_k: only the k likeliest tokens; 0 sets no bound.
        top_p: only the likeliest tokens whose probabilities add up to p.
        seed: each prompt has a source of chance of its own, made of this and its id.
        batch_size: prompts read together. It is a setting: another one may round another way.

    Example:
        >>> Sampling(top_p=0)
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: top_p is 0; more than 0 and at most 1 is expected
    """

    panel: ClassVar[str] = "How continuations are drawn"
    max_new_tokens: Annotated[int, Option(metavar="N")] = 40
    temperature: Annotated[float, Option(metavar="X")] = 1.0
    top_k: Annotated[int, Option(metavar="K")] = 50
    top_p: Annotated[float, Option(metavar="P")] = 0.95
    seed: Annotated[int, PYTHON_ONLY] = 0
    batch_size: Annotated[int, Option(metavar="N")] = 64

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("top_k", 0), ("seed", 0), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; at least {least} is expected")
        if not self.temperature >= 0:
            raise InputError(f"temperature is {self.temperature:g}; at least 0 is expected")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p:g}; more than 0 and at most 1 is expected")

    def settings(self) -> dict[str, Any]:
        """What continuations depend on besides the model and the prompt."""
        return asdict(self)


@dataclass(frozen=True)
class Generations(Mapping[str, Generation]):
    """Continuations by prompt id, and what could not be continued.

    Attributes:
        by_id: the continuations, empty ones among them.
        too_long: ids of prompts that leave no room in the model's context; they are left out, never cut.

    Example:
        >>> found = Generations({"a": Generation("a", " is kind.", 3), "b": Generation("b", "", 0)})
        >>> found["a"].text, found.empty
        (' is kind.', ('b',))
    """

    by_id: Mapping[str, Generation]
    too_long: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Generation:
        return self.by_id[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_id)

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def empty(self) -> tuple[str, ...]:
        """Ids of prompts after which the model wrote nothing."""
        return tuple(key for key, found in self.by_id.items() if found.empty)


@dataclass
class GenerationJournal(LineJournal):
    """A JSONL file to which continuations are added as they are made, and from which a killed run goes on.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "bold.jsonl")
        >>> with GenerationJournal(file, {"model": "m"}) as journal:
        ...     journal.add([Prompt("a", "She ")], [Generation("a", " is kind.", 3)])
        >>> with GenerationJournal(file, {"model": "m"}) as journal:
        ...     journal.find(Prompt("a", "She ")), journal.find(Prompt("a", "He "))
        (Generation(id='a', text=' is kind.', n_tokens=3), None)
    """

    schema: ClassVar[str] = SCHEMA
    what: ClassVar[str] = "generations"
    _kept: dict[tuple[str, str], Generation] = field(default_factory=dict, repr=False)

    def find(self, prompt: Prompt) -> Generation | None:
        """The continuation of a prompt, if it is there."""
        return self._kept.get((prompt.id, prompt.digest))

    def add(self, prompts: Iterable[Prompt], generations: Iterable[Generation]) -> None:
        """Write the continuations of a batch; they are on disk when this returns."""
        lines = []
        for prompt, found in zip(prompts, generations, strict=True):
            self._kept[prompt.id, prompt.digest] = found
            lines.append({"id": prompt.id, "prompt": prompt.digest, "text": found.text, "tokens": found.n_tokens})
        self.write(lines)

    def take(self, row: Mapping[str, Any]) -> None:
        """Take up a line of the file."""
        self._kept[row["id"], row["prompt"]] = _generation(row)


class StoredGenerations(NamedTuple):
    """Continuations from a file, with the digest of each one's prompt, and the settings that made them."""

    path: Path
    generations: Mapping[str, Generation]
    prompts: Mapping[str, str]
    settings: Mapping[str, Any]

    def of(self, prompts: Iterable[Prompt]) -> Generations:
        """Those of the given prompts; prompts without one are not in the result.

        Raises:
            InputError: a continuation was made after another text.
        """
        found = {}
        for prompt in prompts:
            if prompt.id not in self.generations:
                continue
            if self.prompts[prompt.id] != prompt.digest:
                raise InputError(
                    f"the continuation of {prompt.id!r} was made after another text than the one in the data; "
                    "score it with the data that it was made from"
                )
            found[prompt.id] = self.generations[prompt.id]
        return Generations(found)


def read_generations(path: Path) -> StoredGenerations:
    """Read a file of continuations, plain or compressed (.gz), to score it where there is no model.

    Raises:
        InputError: it cannot be read, or is something else.

    Example:
        >>> read_generations(Path("nowhere.jsonl"))
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: nowhere.jsonl cannot be read: No such file or directory
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = content[: content.rfind(b"\n") + 1].decode(errors="surrogatepass").split("\n")[:-1]
        header = json.loads(lines[0])
        if header["schema"] != SCHEMA:
            raise InputError(f"{path} has the schema {header['schema']!r}; {SCHEMA!r} is expected")
        rows = [json.loads(line) for line in lines[1:]]
        digests = {row["id"]: row["prompt"] for row in rows}
        return StoredGenerations(path, {row["id"]: _generation(row) for row in rows}, digests, header["settings"])
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, EOFError):
        raise InputError(f"{path} is not a file of generations that fairhead wrote (lm bold --out)") from None


def _generation(row: Mapping[str, Any]) -> Generation:
    return Generation(str(row["id"]), str(row["text"]), int(row["tokens"]))
