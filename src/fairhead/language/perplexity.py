"""Perplexity of held-out text: the check that a change of a model has not cost it its language. Needs no torch itself.

A text longer than the window is read in windows that do not overlap, each after the start token; every token is scored
once. Smaller windows give higher figures: compare figures of equal windows only, and those per token only between
models with the same tokeniser (bits per byte and perplexity per word compare across tokenisers).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fairhead.errors import InputError
from fairhead.language.packing import TokenSequence
from fairhead.language.resampling import Array, Resampling, divide
from fairhead.language.results import BenchmarkResult

if TYPE_CHECKING:
    from fairhead.language.scorer import Scorer

WINDOW = 1024


def split_documents(text: str) -> list[str]:
    r"""Documents of a plain text file: paragraphs, with empty lines between them.

    Example:
        >>> split_documents("One.\nStill one.\n\n\nTwo.\n")
        ['One.\nStill one.', 'Two.']
    """
    return [part.strip() for part in text.replace("\r\n", "\n").split("\n\n") if part.strip()]


def evaluate(
    scorer: "Scorer", documents: Sequence[str], window: int | None = None, resampling: Resampling | None = None
) -> BenchmarkResult:
    """Perplexity per token and per word, and bits per byte. Documents are resampled as clusters.

    Args:
        scorer: the model.
        documents: texts that the model has not been trained on.
        window: tokens read at a time, the start token included; by default 1 024, or the model's context.
        resampling: how intervals are made.
    """
    width = min(WINDOW, scorer.context) if window is None else window
    if not 2 <= width <= scorer.context:
        raise InputError(f"a window of {width} tokens: from 2 to the model's context of {scorer.context} is expected")
    if not documents:
        raise InputError("there is no text; at least one document is expected")
    tokens = scorer.tokenizer(list(documents), add_special_tokens=False, verbose=False)["input_ids"]
    windows, names, owner = [], [], []
    for i, ids in enumerate(tokens):
        if not ids:
            raise InputError(f"document {i + 1} has no token; a text is expected")
        for start in range(0, len(ids), width - 1):
            windows.append(TokenSequence([scorer.start_token.id, *ids[start : start + width - 1]], 1))
            names.append(f"document {i + 1}, token {start + 1}")
            owner.append(i)
    sums = np.zeros((len(documents), 4))
    np.add.at(sums[:, 0], owner, [values.sum() for values in scorer.score_tokens(windows, names)])
    sums[:, 1] = [len(ids) for ids in tokens]
    sums[:, 2] = [len(text.split()) for text in documents]
    sums[:, 3] = [len(text.encode()) for text in documents]
    how, detail = resampling or Resampling(min_items=1), {"window": width, "tokens": int(sums[:, 1].sum())}
    n = len(documents)
    return BenchmarkResult(
        "perplexity",
        (
            how.estimate("perplexity", None, sums, _per_token, n, detail=detail),
            how.estimate("perplexity_per_word", None, sums, _per_word, n, detail=detail),
            how.estimate("bits_per_byte", None, sums, _bits_per_byte, n, detail=detail),
        ),
        n,
    )


def _per_token(totals: Array) -> Array:
    return np.exp(-divide(totals[..., 0], totals[..., 1]))


def _per_word(totals: Array) -> Array:
    return np.exp(-divide(totals[..., 0], totals[..., 2]))


def _bits_per_byte(totals: Array) -> Array:
    return -divide(totals[..., 0], totals[..., 3]) / np.log(2)
