"""From texts to the tokens that are scored. Works with any Hugging Face tokeniser; needs no torch itself.

The text is encoded whole, as the model would read it, and split where the prefix alone would end, as
lm-evaluation-harness does. Where the tokeniser joins the end of the prefix with the start of the continuation, the
split falls inside the joined tokens, and the score is marked as `merged`. Spaces at the end of the prefix belong to the
continuation.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from fairhead.errors import InputError
from fairhead.language.packing import TokenSequence
from fairhead.language.scores import Request

Start = Literal["always", "empty_prefix"]


class StartToken(NamedTuple):
    """The token that stands before the first one of a text.

    Attributes:
        id: its number.
        name: its text, such as "<s>".
        kind: "bos", or "end of text" where the tokeniser has no BOS.
    """

    id: int
    name: str
    kind: str


class Encoded(NamedTuple):
    """The tokens of a request; `merged` as in `Score`."""

    sequence: TokenSequence
    merged: bool


def start_token(tokenizer: Any) -> StartToken:
    """BOS, or end of text where there is none, as GPT-2 was trained.

    Raises:
        InputError: where the tokeniser has neither.
    """
    for kind, attribute in (("bos", "bos_token_id"), ("end of text", "eos_token_id")):
        number = getattr(tokenizer, attribute, None)
        if number is not None:
            return StartToken(int(number), str(tokenizer.convert_ids_to_tokens(int(number))), kind)
    raise InputError(
        f"{type(tokenizer).__name__} has neither a BOS nor an end-of-text token, so the first token of a text cannot "
        "be scored; set tokenizer.bos_token"
    )


def encode(requests: Sequence[Request], tokenizer: Any, start: StartToken, when: Start) -> list[Encoded]:
    """Tokens of each request, the start token first.

    Args:
        requests: what to encode.
        tokenizer: a Hugging Face tokeniser.
        start: the token before the first.
        when: "always", or "empty_prefix": only before texts without a prefix.
    """
    parts = [_move_spaces(request) for request in requests]
    wholes = _ids(tokenizer, [prefix + continuation for prefix, continuation in parts])
    # Many continuations share a prefix: each is encoded once.
    distinct = list(dict.fromkeys(prefix for prefix, _ in parts if prefix))
    prefixes = {"": [], **dict(zip(distinct, _ids(tokenizer, distinct), strict=True))}
    encoded = []
    for request, (prefix, continuation), whole in zip(requests, parts, wholes, strict=True):
        if not continuation or not whole:
            raise InputError(f"request {request.id!r}: the continuation has no token; a text is expected")
        before = prefixes[prefix]
        # A merge can leave no token after the prefix: the last one then holds the continuation.
        split = min(len(before), len(whole) - 1)
        merged = list(whole[: len(before)]) != list(before) or split < len(before)
        # Without a token before it the first could not be scored.
        lead = [start.id] if when == "always" or split == 0 else []
        encoded.append(Encoded(TokenSequence([*lead, *whole], len(lead) + split), merged))
    return encoded


def _move_spaces(request: Request) -> tuple[str, str]:
    prefix = request.prefix.rstrip()
    return prefix, request.prefix[len(prefix) :] + request.continuation


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        return []
    # verbose: the length is checked against the model's context by the scorer, which names the item.
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return ids
