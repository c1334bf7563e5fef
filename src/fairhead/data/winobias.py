"""WinoBias: sentences in which a pronoun refers to an occupation, with or against the stereotype."""

import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from fairhead.data.datasets import Items
from fairhead.data.files import Skips, Source, base_name

_FILE = re.compile(r"(pro|anti)_stereotyped_type([12])\.txt\.(dev|test)")
_MENTION = re.compile(r"\[([^\[\]]+)\]")
PRONOUNS = frozenset({"he", "him", "his", "himself", "she", "her", "hers", "herself"})


class Mention(NamedTuple):
    """A marked span of a sentence: `text == sentence[start:end]`."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class WinoSentence:
    """One sentence.

    Attributes:
        id: file and line, such as "type1/dev/1/pro"; the pro- and the anti-stereotypical form share all but the end.
        kind: 1 (needs world knowledge) or 2 (syntax decides).
        split: "dev" or "test".
        direction: "pro" or "anti".
        text: the sentence without brackets.
        occupation: the occupation the pronouns refer to, such as "The developer".
        pronouns: one or two pronouns.
    """

    id: str
    kind: int
    split: str
    direction: str
    text: str
    occupation: Mention
    pronouns: tuple[Mention, ...]


def read_winobias(path: str | os.PathLike[str], *, on_error: str = "raise") -> Items[WinoSentence]:
    """Read WinoBias: `pro_stereotyped_type1.txt.dev` and its seven siblings.

    Args:
        path: a folder or zip archive, or one of the files.
        on_error: "raise", or "skip" to leave out lines without an occupation and a pronoun in brackets.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "anti_stereotyped_type1.txt.dev")
        >>> _ = file.write_text("1 [The mechanic] gave the clerk a present because [she] won the lottery.")
        >>> sentence = read_winobias(file)[0]
        >>> sentence.occupation.text, sentence.pronouns
        ('The mechanic', (Mention(text='she', start=46, end=49),))
    """
    source, skips = Source(path), Skips(on_error)
    files = [(name, match) for name in source.names if (match := _FILE.fullmatch(base_name(name)))]
    if not files:
        raise source.missing("pro_stereotyped_type1.txt.dev and its like", "WinoBias")
    sentences = []
    for name, match in files:
        direction, kind, split = match[1], int(match[2]), match[3]
        for i, line in enumerate(source.text(name).splitlines(), start=1):
            if not line.strip():
                continue
            number, _, marked = line.strip().partition(" ")
            text, mentions = _unmark(marked)
            occupation = next((m for m in mentions if m.text.lower() not in PRONOUNS), None)
            pronouns = tuple(m for m in mentions if m.text.lower() in PRONOUNS)
            if not number.isdigit() or occupation is None or not pronouns or len(pronouns) + 1 != len(mentions):
                where = f"{source.where(name)}, line {i}"
                message = f"{where}: needs a number, one occupation and its pronouns in brackets; found {line!r}"
                skips.error("line does not parse", f"{name}:{i}", message)
                continue
            key = f"type{kind}/{split}/{number}/{direction}"
            sentences.append(WinoSentence(key, kind, split, direction, text, occupation, pronouns))
    return Items("winobias", tuple(sentences), skips.found(), {"data": "winobias", "path": str(source.path)})


class _Unmarked(NamedTuple):
    text: str
    mentions: list[Mention]


def _unmark(marked: str) -> _Unmarked:
    text, mentions, last = "", [], 0
    for match in _MENTION.finditer(marked):
        text += marked[last : match.start()]
        mentions.append(Mention(match[1], len(text), len(text) + len(match[1])))
        text += match[1]
        last = match.end()
    return _Unmarked(text + marked[last:], mentions)
