"""Perplexity of held-out text: the check that a change of a model has not cost it its language. Needs no torch itself.

A text longer than the window is read in windows that do not overlap, each after the start token; every token is scored
once. Smaller windows give higher figures: compare figures of equal windows only, and those per token only between
models with the same tokeniser (bits per byte and perplexity per word compare across tokenisers).
"""

import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np

from fairhead.errors import InputError
from fairhead.language.answers import Journal, Progress, Request, Score, journal_in
from fairhead.language.benchmark import ASKS, Benchmark, Figure, Label, Measure, Measured, Work
from fairhead.language.benchmarks.bold import BoldPrompt, read_bold
from fairhead.language.item_table import ItemTable
from fairhead.language.packing import TokenSequence, token_ids
from fairhead.settings import Option
from fairhead.stats.bootstrap import Array
from fairhead.stats.clusters import divide
from fairhead.store import reading

if TYPE_CHECKING:
    from fairhead.language.scorer import Scorer

WINDOW = 1024
# Windows scored between two lines of the journal: enough for full batches.
_AT_ONCE = 256


@dataclass(frozen=True)
class Options:
    """Of perplexity.

    Attributes:
        window: tokens read at a time; by default up to 1 024.
    """

    window: Annotated[int | None, ASKS, Option(metavar="N")] = None


def split_documents(text: str) -> list[str]:
    r"""Documents of a plain text file: paragraphs, with empty lines between them.

    Example:
        >>> split_documents("One.\nStill one.\n\n\nTwo.\n")
        ['One.\nStill one.', 'Two.']
    """
    return [part.strip() for part in text.replace("\r\n", "\n").split("\n\n") if part.strip()]


class Document(NamedTuple):
    """A text that the model has not been trained on."""

    id: str  # distinct
    text: str  # not empty
    groups: tuple[str, ...] = ()  # categories that figures are also made for


def wikipedia_documents(prompts: Iterable[BoldPrompt]) -> list[Document]:
    """The Wikipedia sentences that come with BOLD, those of one page together, by domain.

    Example:
        >>> texts = enumerate(("Is.", "Was."))
        >>> wikipedia_documents(BoldPrompt(f"race/a/Ann/{i}", "race", "a", "Ann", "", text) for i, text in texts)
        [Document(id='race/a/Ann', text='Is. Was.', groups=('race',))]
    """
    pages: dict[tuple[str, str], list[str]] = {}
    for prompt in prompts:
        if prompt.wikipedia and prompt.wikipedia.strip():
            pages.setdefault((prompt.domain, prompt.id.rpartition("/")[0]), []).append(prompt.wikipedia.strip())
    return [Document(name, " ".join(sentences), (domain,)) for (domain, name), sentences in pages.items()]


def read_documents(path: Path, options: Any = None) -> list[Document]:
    """The paragraphs of a text file, or the Wikipedia texts that come with BOLD, of its folder or archive."""
    if path.is_dir() or zipfile.is_zipfile(path):
        pages = wikipedia_documents(read_bold(path))
        if not pages:
            raise InputError(f"{path} has no Wikipedia texts; give a text file for perplexity and attention entropy")
        return pages
    with reading(path, "is not text in UTF-8; expected a plain text file"):
        texts = split_documents(path.read_text(encoding="utf-8"))
    if not texts:
        raise InputError(f"{path} has no text; expected paragraphs separated by empty lines")
    return [Document(f"paragraph {i}", text) for i, text in enumerate(texts, start=1)]


def table(
    scorer: "Scorer",  # the model
    documents: Sequence[Document],  # with distinct ids
    # Tokens read at a time, the start token included; by default 1 024, or the model's context
    window: int | None = None,
    journal: Journal | None = None,  # an open `Journal`: windows that it holds are not computed again
    progress: Progress | None = None,  # called with the windows done and their total
) -> ItemTable:
    """Log-probability, tokens, words and bytes of each document."""
    width = min(WINDOW, scorer.context) if window is None else window
    if not 2 <= width <= scorer.context:
        raise InputError(f"a window of {width} tokens: expected 2 up to the model's context of {scorer.context}")
    if not documents:
        raise InputError("there is no text; expected at least one document")
    lead = scorer.start_token.lead
    unscored = 1 - len(lead)  # without a start token, the first of a document; windows then overlap by a token
    tokens = token_ids(scorer.tokenizer, [document.text for document in documents])
    requests: list[Request] = []
    windows: list[TokenSequence] = []
    for document, ids in zip(documents, tokens, strict=True):
        if len(ids) <= unscored:
            there = "one token and no start token before it" if ids else "no token"
            raise InputError(f"{document.id} has {there}; expected a text")
        for begin in range(0, len(ids) - unscored, width - 1):
            windows.append(TokenSequence([*lead, *ids[begin : begin + width - len(lead)]], 1))
            # The text and the width of its windows tell what was scored, the name tells which window.
            requests.append(Request(f"{document.id}, token {begin + 1}", f"{width}", document.text))
    found = _score(scorer, requests, windows, journal, progress)
    logprobs = dict.fromkeys((document.id for document in documents), 0.0)
    for request in requests:
        logprobs[request.id.rpartition(", token ")[0]] += found[request.id]
    names = [document.id for document in documents]
    return ItemTable.of(
        "perplexity",
        names,
        names,
        [document.groups for document in documents],
        {
            "logprob": list(logprobs.values()),
            "tokens": [len(ids) - unscored for ids in tokens],
            "words": [len(document.text.split()) for document in documents],
            "bytes": [len(document.text.encode()) for document in documents],
            "window": [width] * len(documents),
        },
    )


def _score(
    scorer: "Scorer",
    requests: Sequence[Request],
    windows: Sequence[TokenSequence],
    journal: Journal | None,
    progress: Progress | None,
) -> dict[str, float]:
    tell = progress or (lambda done, total: None)
    kept = {r.id: s.logprob for r in requests if journal and (s := journal.find(r)) is not None}
    left = [i for i, request in enumerate(requests) if request.id not in kept]
    for begin in range(0, len(left), _AT_ONCE):
        tell(len(kept), len(requests))
        part = left[begin : begin + _AT_ONCE]
        values = scorer.score_tokens([windows[i] for i in part], [requests[i].id for i in part])
        scores = [Score(requests[i].id, float(v.sum()), len(v)) for i, v in zip(part, values, strict=True)]
        if journal is not None:
            journal.add([requests[i] for i in part], scores)
        kept |= {score.id: score.logprob for score in scores}
    tell(len(kept), len(requests))
    return kept


def _measure(work: Work) -> Measured:
    with journal_in(work.journals, "perplexity", work.settings) as journal:
        found = table(work.scorer, work.items, work.options.window, journal, work.progress)
    return Measured(found, {"scores": None if journal is None else str(journal.path)})


def _columns(found: ItemTable) -> Array:
    return np.column_stack([found.column(name) for name in ("logprob", "tokens", "words", "bytes")])


def _known(found: ItemTable) -> dict[str, int]:
    width = int(found.column("window")[0]) if len(found) else 0
    return {"window": width, "tokens": int(found.column("tokens").sum())}


def _perplexity(per: int) -> Callable[[Array], Array]:
    def statistic(totals: Array) -> Array:
        with np.errstate(over="ignore"):  # of a model that is lost it is infinite
            return np.asarray(np.exp(-divide(totals[..., 0], totals[..., per])))

    return statistic


def _bits_per_byte(totals: Array) -> Array:
    return -divide(totals[..., 0], totals[..., 3]) / np.log(2)


BENCHMARK = Benchmark(
    name="perplexity",
    title="Held-out text",
    question="Perplexity of a text (each paragraph is a document): has a change harmed the language model?",
    read=read_documents,
    measure=_measure,
    options=Options,
    data="bold",
    reads_text=True,
    min_items=1,
    section="Language",
    measures=(
        Measure("perplexity", _columns, _perplexity(1), 1.0, relative=True, detail=_known),
        Measure("perplexity_per_word", _columns, _perplexity(2), 1.0, relative=True, detail=_known),
        Measure("bits_per_byte", _columns, _bits_per_byte, 0.0, relative=True, detail=_known),
    ),
    labels={
        "perplexity": Label("perplexity", "of text that was not trained on, per token; lower is better", share=False),
        "perplexity_per_word": Label("per word", share=False),
        "bits_per_byte": Label("bits per byte", share=False),
    },
    headlines=(Figure("perplexity"),),
    examples=("fairhead lm perplexity --model hub:HuggingFaceTB/SmolLM2-135M --data text.txt",),
)
