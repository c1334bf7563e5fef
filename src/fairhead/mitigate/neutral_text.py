"""Neutral text, whose distribution under a model is to stay as it was while the model is trained."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairhead.data import parse_spec
from fairhead.data.datasets import TextPair
from fairhead.data.splits import shuffle_by_hash
from fairhead.errors import InputError
from fairhead.language.benchmarks.perplexity import read_documents
from fairhead.language.packing import start_token

# Tokens of a text that are read: the rest would be padding to all others of its batch.
MOST_TOKENS = 64
MOST_WATCHED = 200


class Neutral(NamedTuple):
    """Distinct texts, in an order that depends on them alone."""

    trained: tuple[str, ...] = ()  # whose distribution is kept
    watched: tuple[str, ...] = ()  # a tenth, at most 200, to see what training does to others


def read_neutral(source: str | None) -> Neutral:
    r"""Texts from a text file (its paragraphs), BOLD's folder (its Wikipedia texts), or texts as reader:path.

    Of texts in pairs, as those of MultiNLI, the first are taken.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "text.txt")
        >>> _ = file.write_text("\n\n".join(f"Text {i % 20}." for i in range(40)))
        >>> len(read_neutral(str(file)).trained), len(read_neutral(str(file)).watched)
        (18, 2)
    """
    if source is None:
        return Neutral()
    path = Path(source)
    if path.exists():
        texts: list[str] = [document.text for document in read_documents(path)]
    elif ":" in source:
        reader, place = parse_spec(source, "texts")
        data: Any = reader.read(place)
        texts = [text.premise if isinstance(text, TextPair) else text for text in data.all.inputs]
    else:
        raise InputError(f"the neutral text {source} is not there; a text file or texts as reader:path are expected")
    order = shuffle_by_hash([text.strip() for text in texts if text.strip()], seed=0)
    watched = min(len(order) // 10, MOST_WATCHED)
    return Neutral(tuple(order[watched:]), tuple(order[:watched]))


def encode_neutral(texts: Sequence[str], tokenizer: Any, context: int) -> list[tuple[int, ...]]:
    """Tokens of texts, the start token first, of long ones the beginning; texts of one token are left out."""
    if not texts:
        return []
    found: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    lead = start_token(tokenizer).lead
    encoded = [(*lead, *ids)[: min(context, MOST_TOKENS)] for ids in found]
    return [tokens for tokens in encoded if len(tokens) > 1]
