"""Word lists that turn a sentence into its counterfactual: "his sister" becomes "her brother". Needs no torch."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fairhead.errors import InputError

# WinoBias' lists first: gn_glove's have oddities (a toque for a beard).
LISTS = ("generalized_swaps.txt", "extra_gendered_words.txt")
FEMALE_WORDS, MALE_WORDS = "gn_glove_female_words.txt", "gn_glove_male_words.txt"
_WORD = re.compile(r"[^\W\d_]+")
# After one of these, or at the end of a clause, "her" is "him" and not "his".
_AFTER_OBJECT = frozenset(
    """
    a about across after again all alone an and any around as at away back because before behind but by
    did does down every for from had has he how i if in into is it just later like more much never no
    not now of off on once or out over she so some that the then there they this to together too until
    up very was we were what when where while who why will with without would yesterday you
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Swaps:
    """Words and what takes their place."""

    words: Mapping[str, str]  # word in lower case → another; both directions

    def swapped(self, text: str) -> str:
        """The text with every word of the lists in its place; it is the same text where there is none."""
        return _WORD.sub(lambda found: self._other(found, text), text)

    def _other(self, found: "re.Match[str]", text: str) -> str:
        word = found.group()
        other = self.words.get(word.lower())
        if other is None:
            return word
        if word.lower() == "her":
            other = "him" if _is_object(text[found.end() :]) else "his"
        if word.isupper() and len(word) > 1:
            return other.upper()
        return other[:1].upper() + other[1:] if word[:1].isupper() else other


def _is_object(rest: str) -> bool:
    """Whether "her" before `rest` stands for a person rather than before what she has."""
    if not rest.startswith(" "):
        return True
    following = _WORD.match(rest[1:])
    return following is None or following.group().lower() in _AFTER_OBJECT


def read_swaps(path: str | os.PathLike[str]) -> Swaps:
    r"""Read word lists as published: WinoBias' (tab-separated pairs) or gn_glove's (two files, line by line).

    Args:
        path: a file of pairs, or a folder with generalized_swaps.txt and extra_gendered_words.txt, or with
            gn_glove_female_words.txt and gn_glove_male_words.txt.
    """
    where = Path(path)
    try:
        if where.is_file():
            return _paired(where, _pairs(where))
        there = [where / name for name in LISTS if (where / name).is_file()]
        if there:
            return _paired(where, [pair for file in there for pair in _pairs(file)])
        if (where / FEMALE_WORDS).is_file() and (where / MALE_WORDS).is_file():
            women, men = (
                (where / name).read_text(encoding="utf-8").splitlines() for name in (FEMALE_WORDS, MALE_WORDS)
            )
            if len(women) != len(men):
                raise InputError(f"{where}: {len(women)} female but {len(men)} male words; pairs are expected")
            return _paired(where, zip(women, men, strict=True))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    raise InputError(
        f"{path}: holds no word lists; {LISTS[0]} (WinoBias), {FEMALE_WORDS} (gn_glove) or a file of pairs is expected"
    )


def _pairs(file: Path) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        first, tab, second = line.partition("\t")
        if not tab or not second.strip():
            raise InputError(
                f"{file}, line {number}: {line!r} is not a pair; two words with a tab between are expected"
            )
        pairs.append((first, second))
    return pairs


def _paired(where: Path, pairs: Iterable[tuple[str, str]]) -> Swaps:
    words: dict[str, str] = {}
    cleaned = [tuple(word.strip().lower() for word in pair) for pair in pairs]
    # Words of several parts or with marks in them ("mrs.", "hair_salon") would need more than a look at each word.
    plain = [pair for pair in cleaned if all(_WORD.fullmatch(word) for word in pair)]
    for first, second in plain:
        words.setdefault(first, second)
    for first, second in plain:
        words.setdefault(second, first)
    if not words:
        raise InputError(f"{where}: has no pair of words")
    return Swaps(words)
