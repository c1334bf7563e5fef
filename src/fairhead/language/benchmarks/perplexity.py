"""Perplexity of held-out text: the check that a change of a model has not cost it its language. Needs no torch itself.

A text longer than the window is read in windows that do not overlap, each after the start token; every token is scored
once. Smaller windows give higher figures: compare figures of equal windows only, and those per token only between
models with the same tokeniser (bits per byte and perplexity per word compare across tokenisers).
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fairhead.data.bold import BoldPrompt
from fairhead.errors import InputError
from fairhead.language.packing import TokenSequence
from fairhead.language.resampling import Array, Resampling, divide
from fairhead.language.results import BenchmarkResult, result_of
from fairhead.language.scores import Journal, Progress, Request, Score
from fairhead.language.tables import ItemTable, Measure

if TYPE_CHECKING:
    from fairhead.language.scorer import Scorer

WINDOW = 1024
# Windows scored between two lines of the journal: enough for full batches.
_AT_ONCE = 256


def split_documents(text: str) -> list[str]:
    r"""Documents of a plain text file: paragraphs, with empty lines between them.

    Example:
        >>> split_documents("One.\nStill one.\n\n\nTwo.\n")
        ['One.\nStill one.', 'Two.']
    """
    return [part.strip() for part in text.replace("\r\n", "\n").split("\n\n") if part.strip()]


class Document(NamedTuple):
    """A text that the model has not been trained on.

    Attributes:
        id: distinct.
        text: not empty.
        groups: categories that figures are also made for.
    """

    id: str
    text: str
    groups: tuple[str, ...] = ()


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


def table(
    scorer: "Scorer",
    documents: Sequence[Document],
    window: int | None = None,
    journal: Journal | None = None,
    progress: Progress | None = None,
) -> ItemTable:
    """Log-probability, tokens, words and bytes of each document.

    Args:
        scorer: the model.
        documents: with distinct ids.
        window: tokens read at a time, the start token included; by default 1 024, or the model's context.
        journal: an open `Journal`: windows that it holds are not computed again.
        progress: called with the windows done and their total.
    """
    width = min(WINDOW, scorer.context) if window is None else window
    if not 2 <= width <= scorer.context:
        raise InputError(f"a window of {width} tokens: from 2 to the model's context of {scorer.context} is expected")
    if not documents:
        raise InputError("there is no text; at least one document is expected")
    tokens = scorer.tokenizer([d.text for d in documents], add_special_tokens=False, verbose=False)["input_ids"]
    requests: list[Request] = []
    windows: list[TokenSequence] = []
    for document, ids in zip(documents, tokens, strict=True):
        if not ids:
            raise InputError(f"{document.id} has no token; a text is expected")
        for begin in range(0, len(ids), width - 1):
            windows.append(TokenSequence([scorer.start_token.id, *ids[begin : begin + width - 1]], 1))
            # The text and the width of its windows tell what was scored, the name tells which window.
            requests.append(Request(f"{document.id}, token {begin + 1}", f"{width}", document.text))
    found = _score(scorer, requests, windows, journal, progress)
    logprobs = dict.fromkeys((document.id for document in documents), 0.0)
    for request in requests:
        logprobs[request.id.rpartition(", token ")[0]] += found[request.id]
    return ItemTable.of(
        "perplexity",
        [document.id for document in documents],
        [document.id for document in documents],
        [document.groups for document in documents],
        {
            "logprob": list(logprobs.values()),
            "tokens": [len(ids) for ids in tokens],
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
    kept = {r.id: s.logprob for r in requests if journal and (s := journal.find(r)) is not None}
    left = [i for i, request in enumerate(requests) if request.id not in kept]
    for begin in range(0, len(left), _AT_ONCE):
        if progress is not None:
            progress(len(kept), len(requests))
        part = left[begin : begin + _AT_ONCE]
        values = scorer.score_tokens([windows[i] for i in part], [requests[i].id for i in part])
        scores = [Score(requests[i].id, float(v.sum()), len(v)) for i, v in zip(part, values, strict=True)]
        if journal is not None:
            journal.add([requests[i] for i in part], scores)
        kept |= {score.id: score.logprob for score in scores}
    if progress is not None:
        progress(len(kept), len(requests))
    return kept


def evaluate(
    scorer: "Scorer", documents: Sequence[str], window: int | None = None, resampling: Resampling | None = None
) -> BenchmarkResult:
    """Perplexity per token and per word, and bits per byte. Documents are resampled as clusters.

    Args:
        scorer: the model.
        documents: texts that the model has not been trained on.
        window: as in `table`.
        resampling: how intervals are made.
    """
    named = [Document(f"document {i}", text) for i, text in enumerate(documents, start=1)]
    return result_of(table(scorer, named, window), MEASURES, resampling or Resampling(min_items=1))


def _columns(found: ItemTable) -> Array:
    return np.column_stack([found.column(name) for name in ("logprob", "tokens", "words", "bytes")])


def _known(found: ItemTable) -> dict[str, int]:
    width = int(found.column("window")[0]) if len(found) else 0
    return {"window": width, "tokens": int(found.column("tokens").sum())}


def _per_token(totals: Array) -> Array:
    return np.exp(-divide(totals[..., 0], totals[..., 1]))


def _per_word(totals: Array) -> Array:
    return np.exp(-divide(totals[..., 0], totals[..., 2]))


def _bits_per_byte(totals: Array) -> Array:
    return -divide(totals[..., 0], totals[..., 3]) / np.log(2)


MEASURES = (
    Measure("perplexity", _columns, _per_token, 1.0, relative=True, detail=_known),
    Measure("perplexity_per_word", _columns, _per_word, 1.0, relative=True, detail=_known),
    Measure("bits_per_byte", _columns, _bits_per_byte, 0.0, relative=True, detail=_known),
)
