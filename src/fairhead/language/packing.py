"""From texts to the tokens that are scored, and token sequences as trees. Needs no torch.

A text is encoded whole, as the model would read it, and split where the prefix alone would end, as
lm-evaluation-harness does. Where the tokeniser joins the end of the prefix with the start of the continuation, the
split falls inside the joined tokens, and the score is marked as `merged`. Spaces at the end of the prefix belong to the
continuation.

What several sequences begin with is computed once. Sequences are sorted, so that those with a common beginning are
neighbours, and laid into rows one after the other; each adds only the tokens that it does not share with the one
before. A row is thus a tree in preorder: the tokens that follow from position j are exactly those at j, …, end[j] − 1,
and token i may attend to j where j ≤ i < end[j].
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.language.answers import Request

Ints = NDArray[np.int64]
# How the start token and a text are put together: before every text ("fairhead"); only where no prefix stands before
# what is scored ("lm-eval", as lm-evaluation-harness does where the tokeniser adds none itself); the first token after
# the start token, the others without it ("bias-bench", as the published scripts of StereoSet and CrowS-Pairs do).
Convention = Literal["fairhead", "lm-eval", "bias-bench"]

# Sharing the start token and a first word is not worth a longer row.
_LITTLE = 2
# Attributes of a tokeniser that name the token before a text; and where `starting` keeps its choice.
_SPECIAL = (("bos", "bos_token_id"), ("end of text", "eos_token_id"))
_CHOSEN = "fairhead_start"


class TokenSequence(NamedTuple):
    """Tokens of which those from `scored_from` on are scored; the first is never scored, it has nothing before it."""

    tokens: Sequence[int]
    scored_from: int


class StartToken(NamedTuple):
    """The token that stands before the first one of a text."""

    id: int | None  # its number; None: no token stands there
    name: str  # its text, such as "<s>"
    kind: str  # "bos"; "end of text", also where the tokeniser has no BOS; "chosen" or "none"

    @property
    def lead(self) -> tuple[int, ...]:
        """What stands before a text: the token, or nothing."""
        return () if self.id is None else (self.id,)


class Encoded(NamedTuple):
    """The tokens of a request; `merged` as in `Score`."""

    sequence: TokenSequence
    merged: bool
    first: TokenSequence | None = None  # where the first token is scored apart from the others: how


def start_token(tokenizer: Any, start: str | None = None) -> StartToken:
    """The token that texts start with: "bos", "eos" (end of text), "none", or a token of the tokeniser.

    "default" is BOS, or end of text where there is none, as GPT-2 was trained; None is what `starting` has chosen, or
    else "default".
    """
    chosen: str = start or getattr(tokenizer, _CHOSEN, None) or "default"
    if chosen == "none":
        return StartToken(None, "none", "none")
    named = {"bos": _SPECIAL[:1], "eos": _SPECIAL[1:], "default": _SPECIAL}
    for kind, attribute in named.get(chosen, ()):
        number = getattr(tokenizer, attribute, None)
        if number is not None:
            return StartToken(int(number), str(tokenizer.convert_ids_to_tokens(int(number))), kind)
    if chosen == "default":
        raise InputError(
            f"{type(tokenizer).__name__} has neither a BOS nor an end-of-text token, so the first token of a text "
            "cannot be scored; name a token to start with, or none (--start)"
        )
    number = None if chosen in named else tokenizer.get_vocab().get(chosen)
    if number is None:
        raise InputError(
            f"the tokeniser has no token {chosen!r} to start a text with; expected bos, eos, none or a token"
        )
    return StartToken(int(number), chosen, "chosen")


def starting(tokenizer: Any, start: str) -> Any:
    """A copy of a tokeniser for which `start_token` gives this choice; the tokeniser itself stays as it is."""
    start_token(tokenizer, start)
    found = copy.copy(tokenizer)
    setattr(found, _CHOSEN, start)
    return found


def control_token_warning(tokenizer: Any, start: str | None = None) -> str | None:
    """What to tell a user who has not chosen a start token, where it is a control token of the chat template."""
    chosen, template = start or getattr(tokenizer, _CHOSEN, None), getattr(tokenizer, "chat_template", None)
    if chosen not in (None, "default") or not template or (name := start_token(tokenizer).name) not in str(template):
        return None
    return (
        f"texts start with {name}, a control token of this model's chat template, which plain text never follows in "
        "its training: this affects the figures. Choose another with --start: eos, none, or a token such as "
        "'<|endoftext|>'"
    )


def as_chat(tokenizer: Any, texts: Sequence[str]) -> list[str]:
    """Each text as a user's message in the tokeniser's chat template, up to where the answer begins."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"this {type(tokenizer).__name__} has no chat template: leave --chat out")
    messages = [[{"role": "user", "content": text}] for text in texts]
    try:
        found = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program, which raises what it likes
        raise InputError(f"the tokeniser's chat template refuses a user's message: {error}") from None
    return list(map(str, found))


def encode(
    requests: Sequence[Request], tokenizer: Any, start: StartToken, convention: Convention = "fairhead"
) -> list[Encoded]:
    """Tokens of each request, with the start token where the convention has it."""
    parts = []
    for request in requests:
        prefix = request.prefix.rstrip()
        parts.append((prefix, request.prefix[len(prefix) :] + request.continuation))
    # Many continuations share a prefix: each is encoded once.
    distinct = list(dict.fromkeys(prefix for prefix, _ in parts if prefix))
    tokens = token_ids(tokenizer, [*distinct, *(prefix + continuation for prefix, continuation in parts)])
    prefixes: dict[str, list[int]] = {"": [], **dict(zip(distinct, tokens, strict=False))}
    encoded = []
    for request, (prefix, continuation), whole in zip(requests, parts, tokens[len(distinct) :], strict=True):
        if not continuation or not whole:
            raise InputError(f"request {request.id!r}: the continuation has no token; expected a text")
        before = prefixes[prefix]
        # A merge can leave no token after the prefix: the last one then holds the continuation.
        split = min(len(before), len(whole) - 1)
        merged = whole[: len(before)] != before or split < len(before)
        apart = convention == "bias-bench" and split == 0 and len(whole) > 1
        # Without a token before it the first could not be scored.
        lead = [] if apart or (convention != "fairhead" and split > 0) else start.lead
        sequence = TokenSequence([*lead, *whole], max(len(lead) + split, 1))
        if sequence.scored_from == len(sequence.tokens):
            raise InputError(
                f"request {request.id!r}: its only token has none before it, so that nothing is scored; start texts "
                "with a token (--start bos, eos or a token)"
            )
        encoded.append(Encoded(sequence, merged, TokenSequence([*start.lead, whole[0]], 1) if apart else None))
    return encoded


def token_ids(tokenizer: Any, texts: Sequence[str], lead: Sequence[int] = ()) -> list[list[int]]:
    """Tokens of each text, after those of `lead`; the tokeniser adds none of its own."""
    if not texts:
        return []
    # verbose: lengths are checked against the model's context elsewhere, where the item is named.
    how = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
    ids = tokenizer(list(texts), **how, verbose=False)["input_ids"]
    return [[*lead, *of_text] for of_text in ids]


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
    """Token i with token i, as far as both go."""
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


class Path(NamedTuple):
    """Where the scored tokens of a sequence lie in its row."""

    sequence: int
    positions: Ints


class Predicting(NamedTuple):
    """The scored tokens of a row and where they are predicted."""

    at: Ints  # positions whose next-token distribution is needed, shape [P], sorted, distinct
    scored: Ints  # positions of scored tokens, shape [S], sorted, distinct
    source: Ints  # for each scored token the index into `at`, shape [S]
    paths: tuple[Ints, ...]  # for each sequence of the row, the indices of its tokens into `scored`


@dataclass(frozen=True, eq=False)
class Row:
    """One tree of T tokens."""

    tokens: Ints  # shape [T]
    depth: Ints  # number of tokens before, shape [T]: the position that the model is told
    parent: Ints  # where the token before lies, shape [T]; −1 for the first of all
    end: Ints  # one past the last token that follows from this one, shape [T]
    paths: tuple[Path, ...]  # one for each sequence

    @cached_property
    def followed(self) -> NDArray[np.bool_]:
        """Which tokens have another after them, [T]; from the rest nothing is predicted."""
        found = np.zeros(len(self.tokens), dtype=bool)
        found[self.parent[self.parent >= 0]] = True
        return found

    @cached_property
    def predicting(self) -> Predicting:
        """Where the tokens that are scored are predicted: at the token before each."""
        size = len(self.tokens)
        is_scored, is_read = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
        is_scored[np.concatenate([path.positions for path in self.paths])] = True
        scored = np.flatnonzero(is_scored)
        before = self.parent[scored]
        is_read[before] = True
        number = np.cumsum(is_scored) - 1
        paths = tuple(number[path.positions] for path in self.paths)
        return Predicting(np.flatnonzero(is_read), scored, (np.cumsum(is_read) - 1)[before], paths)


def pack(
    sequences: Sequence[TokenSequence], row_tokens: int, share: bool = True, longest: int | None = None
) -> list[Row]:
    """Lay sequences of at least two tokens into rows of about `row_tokens` tokens.

    A row is longer where a sequence is: a long beginning that many share is worth repeating only once it has been
    followed by as many tokens as it has itself. It may also be half as long again before it parts two sequences that
    share more than their first tokens; but no row of several sequences is longer than `longest`. Without `share` each
    sequence has a row of its own, for models that cannot read trees.
    """
    lists = [list(sequence.tokens) for sequence in sequences]
    order = sorted(range(len(sequences)), key=lists.__getitem__)
    if not share:
        return [plain_row(lists[i], sequences[i].scored_from, i) for i in order]
    trees: list[_Tree] = []
    latest: list[int] = []
    for i in order:
        tokens, scored_from = lists[i], sequences[i].scored_from
        shared, latest = _begin_alike(latest, tokens), tokens
        bound = max(row_tokens, 2 * len(tokens))
        bound += bound // 2 if shared > _LITTLE else 0
        bound = bound if longest is None else min(longest, bound)
        if not trees or len(trees[-1].tokens) + len(tokens) - shared > bound:
            trees.append(_Tree())
            shared = 0
        trees[-1].add(i, tokens, shared, scored_from)
    return [tree.row() for tree in trees]


def plain_row(tokens: Sequence[int], scored_from: int = 1, sequence: int = 0) -> Row:
    """One sequence in a row of its own.

    Example:
        >>> plain_row([0, 5, 6]).parent.tolist()
        [-1, 0, 1]
    """
    n = len(tokens)
    number = np.arange(n)
    path = Path(sequence, number[scored_from:])
    return Row(np.asarray(tokens, dtype=np.int64), number, number - 1, np.full(n, n), (path,))


def _begin_alike(first: list[int], second: list[int]) -> int:
    """How many tokens two lists begin with alike."""
    alike, end = 0, min(len(first), len(second)) + 1
    while end - alike > 1:  # the first `alike` are so, the first `end` are not
        middle = (alike + end) // 2
        if first[alike:middle] == second[alike:middle]:
            alike = middle
        else:
            end = middle
    return alike


class _Tree:
    """A row in the making."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._depth: list[int] = []
        self._parent: list[int] = []
        self._ends: dict[int, int] = {}  # of tokens that nothing can follow any more
        self._path: list[int] = []  # where the tokens of the latest sequence lie
        self._paths: list[Path] = []

    def add(self, sequence: int, tokens: Sequence[int], shared: int, scored_from: int) -> None:
        """Add what is new of a sequence."""
        size, new = len(self.tokens), len(tokens) - shared
        self._ends |= dict.fromkeys(self._path[shared:], size)
        self._path = [*self._path[:shared], *range(size, size + new)]
        self._parent += [-1, *self._path][shared : len(tokens)]
        self._depth += range(shared, len(tokens))
        self.tokens += tokens[shared:]
        self._paths.append(Path(sequence, np.array(self._path[scored_from:], dtype=np.int64)))

    def row(self) -> Row:
        """The row as it stands."""
        size = len(self.tokens)
        ends = [self._ends.get(place, size) for place in range(size)]
        columns = (self.tokens, self._depth, self._parent, ends)
        tokens, depth, parent, end = (np.array(of, dtype=np.int64) for of in columns)
        return Row(tokens, depth, parent, end, tuple(self._paths))


def batches(rows: Sequence[Row], batch_tokens: int, max_scored: int, overhead: int = 16) -> list[list[int]]:
    """Group rows of similar length; padded, a batch has at most `batch_tokens` tokens unless one row alone has more.

    Tokens that nothing is predicted from, the last of each sequence, are not read and do not count; `max_scored` at
    most need their next-token distribution. Of all ways to part the rows, sorted by length, the one with the least
    padding and the fewest batches, each of which costs `overhead` tokens, is taken.
    """
    lengths = np.array([np.count_nonzero(row.followed) for row in rows], dtype=np.int64)
    # The longest first: if memory is too small for them, that shows at once.
    order = np.argsort(-lengths, kind="stable")
    lengths = lengths[order]
    scored = np.cumsum([0, *(rows[i].predicting.at.size for i in order)])
    # The least cost of the rows up to each, and where its last batch begins.
    cost, begins = np.zeros(len(rows) + 1), np.zeros(len(rows) + 1, dtype=np.int64)
    for end in range(1, len(rows) + 1):
        first = max(0, end - max(1, batch_tokens // int(lengths[end - 1])))
        first = min(end - 1, max(first, int(np.searchsorted(scored, scored[end] - max_scored))))
        starts = np.arange(first, end)
        padded = (end - starts) * lengths[first:end]
        fits = padded <= batch_tokens
        fits[-1] = True
        total = np.where(fits, cost[first:end] + padded + overhead, np.inf)
        begins[end] = first + int(np.argmin(total))
        cost[end] = total.min()
    found: list[list[int]] = []
    end = len(rows)
    while end > 0:
        found.append(order[begins[end] : end].tolist())
        end = int(begins[end])
    return found[::-1]
