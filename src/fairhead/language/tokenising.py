"""From texts to the tokens that are scored, and which tokens two versions of a sentence have in common.

Works with any Hugging Face tokeniser; needs no torch itself.

The text is encoded whole, as the model would read it, and split where the prefix alone would end, as
lm-evaluation-harness does. Where the tokeniser joins the end of the prefix with the start of the continuation, the
split falls inside the joined tokens, and the score is marked as `merged`. Spaces at the end of the prefix belong to the
continuation.
"""

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any, Literal, NamedTuple

from fairhead.errors import InputError
from fairhead.language.answers import Request
from fairhead.language.packing import TokenSequence

Start = Literal["always", "empty_prefix"]


class StartToken(NamedTuple):
    """The token that stands before the first one of a text."""

    id: int  # its number
    name: str  # its text, such as "<s>"
    kind: str  # "bos", or "end of text" where the tokeniser has no BOS


class Encoded(NamedTuple):
    """The tokens of a request; `merged` as in `Score`."""

    sequence: TokenSequence
    merged: bool


def start_token(tokenizer: Any) -> StartToken:
    """BOS, or end of text where there is none, as GPT-2 was trained."""
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


class Alignment(NamedTuple):
    """Tokens of two sequences that correspond."""

    first: tuple[int, ...]  # positions in the first sequence, ascending
    second: tuple[int, ...]  # the positions in the second that they correspond to, ascending


def align(first: Sequence[int], second: Sequence[int]) -> Alignment:
    """Unchanged tokens of two sequences, matched in order, as CrowS-Pairs' own scoring does."""
    # Without autojunk: common tokens are as good as rare ones, whatever the length.
    blocks = SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    places = [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]
    return Alignment(tuple(a for a, _ in places), tuple(b for _, b in places))


def align_by_position(first: Sequence[int], second: Sequence[int]) -> Alignment:
    """Token i with token i, as far as both go.

    Example:
        >>> align_by_position([5, 1, 2, 9], [5, 3, 9]).second
        (0, 1, 2)
    """
    both = tuple(range(min(len(first), len(second))))
    return Alignment(both, both)


class Slots(NamedTuple):
    """Places that both versions of a sentence have."""

    first: tuple[int, ...]  # positions in the first sequence, ascending
    second: tuple[int, ...]  # positions in the second, ascending
    changed: tuple[bool, ...]  # whether another token stands there


def slots(first: Sequence[int], second: Sequence[int]) -> Slots:
    """Unchanged tokens, and those that took the place of others, one by one.

    Where a stretch was replaced by a longer or shorter one, tokens of the longer that have no counterpart are left out.
    """
    places: list[tuple[int, int, bool]] = []
    for kind, a, a_end, b, b_end in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        places += [(i, j, kind != "equal") for i, j in zip(range(a, a_end), range(b, b_end), strict=False)]
    return Slots(tuple(p[0] for p in places), tuple(p[1] for p in places), tuple(p[2] for p in places))
