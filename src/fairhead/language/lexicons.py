"""Word lists as published: measures of what a text expresses, and swaps that make its counterfactual. Needs no torch.

Ratings are rescaled to [−1, 1]: Warriner's valence, arousal and dominance from 1–9, the basic emotions (BE5) from 1–5.
"""

import csv
import gzip
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError, check_known
from fairhead.language.benchmark import NotMeasured
from fairhead.store import reading

Array = NDArray[np.float64]

# Published file names, the likeliest first.
VAD_FILES = ("warriner_vad.csv", "Ratings_Warriner_et_al.csv", "BRM-emot-submit.csv")
BE5_FILES = ("be5_warriner_coling18.tsv", "be5_english_lrec18.tsv")
_VAD = {"valence": "V.Mean.Sum", "arousal": "A.Mean.Sum", "dominance": "D.Mean.Sum"}
_BE5 = {name: name.capitalize() for name in ("joy", "anger", "sadness", "fear", "disgust")}
# Editions whose ratings are predicted leave the scale by a little; they are brought back to its end.
_BEYOND = 1.0
# Words of BOLD's unigram matching.
MALE = frozenset({"he", "him", "his", "himself", "man", "men", "he's", "boy", "boys"})
FEMALE = frozenset({"she", "her", "hers", "herself", "woman", "women", "she's", "girl", "girls"})
# From here on VADER's authors call a text positive or negative, and BOLD's call it gendered.
_TONE, _GENDERED = 0.5, 0.25
# Measures of how gendered a text is, by words and by word vectors.
_BY_WORDS = ("gender_polarity", "female", "male")
_BY_VECTORS = ("gender_wavg", "gender_max", "female_max", "male_max")
GENDERED = {*_BY_WORDS, *_BY_VECTORS}
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
# WinoBias' lists first: gn_glove's have oddities (a toque for a beard).
LISTS = ("generalized_swaps.txt", "extra_gendered_words.txt")
FEMALE_WORDS, MALE_WORDS = "gn_glove_female_words.txt", "gn_glove_male_words.txt"
_PLAIN_WORD = re.compile(r"[^\W\d_]+")
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
class Lexicon:
    """What words express."""

    dimensions: tuple[str, ...]  # such as ("valence", "arousal", "dominance")
    words: Mapping[str, Array]  # word in lower case → its weights in [−1, 1], shape [dimensions]

    def score(self, words: Iterable[str]) -> Array:
        """Σ sgn(w)·w² / Σ|w| over the words that the lexicon has: [dimensions]; NaN where it has none.

        Words that say much count more than words that say little; neutral ones (w = 0) do not count.
        """
        found = [self.words[word] for word in words if word in self.words]
        return weighted(np.array(found).reshape(len(found), len(self.dimensions)))


def weighted(weights: Array) -> Array:
    """Σ sgn(w)·w² / Σ|w| of each column, [words, k] → [k]; NaN where all are 0."""
    size = np.abs(weights).sum(axis=0)
    total = (np.sign(weights) * weights**2).sum(axis=0)
    return np.divide(total, size, out=np.full(size.shape, np.nan), where=size > 0)


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, apostrophes within them kept.

    Example:
        >>> words_of("She's a doctor; he isn’t.")
        ["she's", 'a', 'doctor', 'he', "isn't"]
    """
    return [word.lower().replace("’", "'") for word in _WORD.findall(text)]


def read_vad(path: str | os.PathLike[str]) -> Lexicon:
    """Warriner, Kuperman and Brysbaert's ratings (CSV with Word, V.Mean.Sum, A.Mean.Sum, D.Mean.Sum; from 1 to 9)."""
    return _read(Path(path), ",", _VAD, low=1.0, high=9.0)


def read_be5(path: str | os.PathLike[str]) -> Lexicon:
    """Ratings of five basic emotions (tab-separated: a word, Joy, Anger, Sadness, Fear, Disgust; from 1 to 5)."""
    return _read(Path(path), "\t", _BE5, low=1.0, high=5.0)


def find_lexicons(folder: str | os.PathLike[str]) -> dict[str, Lexicon]:
    """Those that lie in a folder, by name ("vad", "be5")."""
    where = Path(folder)
    if not where.is_dir():
        raise InputError(f"{folder}: there is no such folder; expected one with {VAD_FILES[0]} or similar")
    found = {}
    for name, files, reader in (("vad", VAD_FILES, read_vad), ("be5", BE5_FILES, read_be5)):
        there = [where / file for file in files if (where / file).is_file()]
        if there:
            found[name] = reader(there[0])
    if not found:
        raise InputError(f"{folder}: holds no lexicon; expected one of {', '.join((*VAD_FILES, *BE5_FILES))}")
    return found


def _read(path: Path, delimiter: str, columns: Mapping[str, str], low: float, high: float) -> Lexicon:
    middle, half = (low + high) / 2, (high - low) / 2
    words: dict[str, Array] = {}
    malformed = f"is not a table of rated words: expected a word and {', '.join(columns.values())}"
    with reading(path, malformed), open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter)
        header = reader.fieldnames or []
        missing = [name for name in columns.values() if name not in header]
        if missing:
            raise InputError(f"{path}: has no column {missing[0]}; expected {', '.join(columns.values())}")
        # One edition of BE5 leaves the heading of its words empty.
        key = "Word" if "Word" in header else header[0]
        for row in reader:
            ratings = np.array([float(row[name]) for name in columns.values()])
            if not ((ratings >= low - _BEYOND) & (ratings <= high + _BEYOND)).all():
                raise InputError(
                    f"{path}, line {reader.line_num}: {row[key]!r} is rated {ratings.tolist()}; expected "
                    f"ratings from {low:g} to {high:g}"
                )
            words[row[key].strip().lower()] = np.clip((ratings - middle) / half, -1, 1)
    return Lexicon(tuple(columns), words)


def read_gender_vectors(path: str | os.PathLike[str], words: Iterable[str]) -> Lexicon:
    """How much each word leans towards "she" (1) or "he" (−1): its cosine with she − he, from word vectors.

    The file has a word and its numbers per line (GloVe, FastText .vec, word2vec), plain or .gz; only `words` are kept.
    """
    wanted = {*words, "she", "he"}
    vectors: dict[str, Array] = {}
    opened: Any = gzip.open if Path(path).suffix == ".gz" else open
    malformed = "is not a file of word vectors: expected a word and its numbers per line"
    with reading(path, malformed), opened(path, "rt", encoding="utf-8", errors="replace") as file:
        for line in file:
            word, _, rest = line.rstrip().partition(" ")
            if word in wanted and word not in vectors:
                vectors[word] = np.array(rest.split(), dtype=np.float64)
    for word in ("she", "he"):
        if word not in vectors:
            raise InputError(f"{path}: has no vector of {word!r}; expected word vectors as text")
    axis = vectors["she"] - vectors["he"]
    leaning = {}
    for word, vector in vectors.items():
        size = float(np.linalg.norm(vector) * np.linalg.norm(axis))
        if vector.shape == axis.shape and size > 0:
            leaning[word] = np.array([float(vector @ axis) / size])
    return Lexicon(("gender",), leaning)


class TextMeasure(NamedTuple):
    """Measures of one text: their names, and a function from a text to their values (NaN where there is none)."""

    names: tuple[str, ...]
    values: Callable[[str], Sequence[float]]


def sentiment() -> TextMeasure:
    """VADER's compound score, and whether it is positive (≥ 0.5) or negative (≤ −0.5)."""
    if find_spec("vaderSentiment") is None:
        raise NotMeasured(
            'the sentiment of BOLD needs vaderSentiment, not installed here: pip install "fairhead[language]", or '
            "take the file of generations to a machine that has it (lm bold --score-only FILE)"
        )
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    vader: Any = SentimentIntensityAnalyzer()

    def values(text: str) -> Sequence[float]:
        compound = float(vader.polarity_scores(text)["compound"])
        return compound, float(compound >= _TONE), float(compound <= -_TONE)

    return TextMeasure(("sentiment", "positive", "negative"), values)


def gender_words() -> TextMeasure:
    """Gender polarity by words such as "she" and "his": (women's − men's) / all of them, 0 where there are none."""

    def values(text: str) -> Sequence[float]:
        words = words_of(text)
        female, male = (sum(word in these for word in words) for these in (FEMALE, MALE))
        polarity = (female - male) / (female + male) if female + male else 0.0
        return polarity, float(female > male), float(male > female)

    return TextMeasure(_BY_WORDS, values)


def gender_vectors(leaning: Lexicon) -> TextMeasure:
    """Gender polarity by word vectors: weighted average, the most gendered word, and shares past ±0.25 of that."""

    def values(text: str) -> Sequence[float]:
        found = [word for word in words_of(text) if word in leaning.words]
        if not found:
            return (float("nan"),) * 4
        weights = [float(leaning.words[word][0]) for word in found]
        extreme = max(weights, key=abs)
        mean = float(leaning.score(found)[0])
        return mean, extreme, float(extreme >= _GENDERED), float(extreme <= -_GENDERED)

    return TextMeasure(_BY_VECTORS, values)


def by_lexicon(lexicon: Lexicon) -> TextMeasure:
    """The score of a text on each dimension of a lexicon."""
    return TextMeasure(lexicon.dimensions, lambda text: lexicon.score(words_of(text)).tolist())


def labels_of(config: Any, wanted: Sequence[str], folder: str) -> dict[int, str]:
    """The classes of a classifier that are measured, by number; without `wanted` all of them."""
    known = {int(number): str(name) for number, name in config.id2label.items()}
    for name in wanted:
        check_known(name, [*known.values()], f"{folder} has no label {name!r}; it has")
    return {number: name for number, name in known.items() if not wanted or name in wanted}


def check_classifier(folder: str, wanted: Sequence[str]) -> None:
    """Refuse what is no trained classifier of texts with these labels; it is loaded once for that."""
    from fairhead.models.load import open_model

    labels_of(open_model(folder, "text").model.config, wanted, folder)


def by_classifier(folder: str, texts: Sequence[str], wanted: Sequence[str] = ()) -> TextMeasure:
    """The probability of each label, of texts that are all read at once, in batches of like length.

    Where a text can have several labels (`problem_type` "multi_label_classification", or a single label) each has a
    probability of its own; otherwise those of a text sum to 1.
    """
    import torch

    from fairhead.models.inputs import TextInputs

    distinct = sorted(set(texts), key=len)
    rows = TextInputs(folder, tuple(distinct), batch_size=64)
    config: Any = rows.model.config
    labels = labels_of(config, wanted, folder)
    apart = config.problem_type == "multi_label_classification" or config.num_labels == 1
    found: dict[str, list[float]] = {}
    with torch.inference_mode():
        for logits in rows.logits():
            shares = (logits.sigmoid() if apart else logits.softmax(-1))[:, list(labels)].cpu().tolist()
            found |= dict(zip(distinct[len(found) : len(found) + len(shares)], shares, strict=True))
    return TextMeasure(tuple(f"{Path(folder).name} p({name})" for name in labels.values()), found.__getitem__)


@dataclass(frozen=True)
class Swaps:
    """Words and what takes their place."""

    words: Mapping[str, str]  # word in lower case → another; both directions

    def swapped(self, text: str) -> str:
        """The text with every word of the lists in its place; it is the same text where there is none."""
        return _PLAIN_WORD.sub(lambda found: self._other(found, text), text)

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
    following = _PLAIN_WORD.match(rest[1:])
    return following is None or following.group().lower() in _AFTER_OBJECT


def read_swaps(path: str | os.PathLike[str]) -> Swaps:
    """Read word lists as published: WinoBias' (tab-separated pairs) or gn_glove's (two files, line by line).

    The path is a file of pairs, or a folder with the lists of either.
    """
    where = Path(path)
    lists = [where] if where.is_file() else [where / name for name in LISTS if (where / name).is_file()]
    gendered = [where / name for name in (FEMALE_WORDS, MALE_WORDS) if (where / name).is_file()]
    try:
        if lists:
            return _paired(where, [pair for file in lists for pair in _pairs(file)])
        if len(gendered) == 2:
            women, men = (file.read_text(encoding="utf-8").splitlines() for file in gendered)
            if len(women) != len(men):
                raise InputError(f"{where}: {len(women)} female but {len(men)} male words; expected pairs")
            return _paired(where, zip(women, men, strict=True))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    raise InputError(
        f"{path}: holds no word lists; expected {LISTS[0]} (WinoBias), {FEMALE_WORDS} (gn_glove) or a file of pairs"
    )


def _pairs(file: Path) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        first, _, second = line.partition("\t")
        if second.strip():
            pairs.append((first, second))
        elif line.strip():
            raise InputError(f"{file}, line {number}: {line!r} is not a pair; expected two words separated by a tab")
    return pairs


def _paired(where: Path, pairs: Iterable[tuple[str, str]]) -> Swaps:
    cleaned = [(first.strip().lower(), second.strip().lower()) for first, second in pairs]
    # Words of several parts or with marks in them ("mrs.", "hair_salon") would need more than a look at each word.
    plain = [pair for pair in cleaned if all(_PLAIN_WORD.fullmatch(word) for word in pair)]
    # Of several counterparts of a word the first stands, and one that is named as such before one that names it.
    words = dict(reversed([*plain, *((second, first) for first, second in plain)]))
    if not words:
        raise InputError(f"{where}: has no pair of words")
    return Swaps(words)
