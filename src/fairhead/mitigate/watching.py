"""Texts beside those that are trained on: those that are watched, and neutral text whose distribution is kept."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from torch import nn

from fairhead.data import parse_spec
from fairhead.data.datasets import TextPair
from fairhead.data.sentences import StereoSetItem, split_by_target
from fairhead.data.splits import shuffle_by_hash
from fairhead.errors import InputError
from fairhead.language.answers import ItemTable
from fairhead.language.benchmarks import benchmark_named, stereoset
from fairhead.language.benchmarks.perplexity import Document, read_documents
from fairhead.language.benchmarks.perplexity import table as perplexity_table
from fairhead.language.packing import start_token, token_ids
from fairhead.language.scorer import Scorer
from fairhead.train.plan import LanguagePlan
from fairhead.train.tuning import Look

# Tokens of a text that are read: the rest would be padding to all others of its batch.
MOST_TOKENS = 64
MOST_WATCHED = 200
_FEW = 16


class Neutral(NamedTuple):
    """Distinct texts, in an order that depends on them alone."""

    trained: tuple[str, ...] = ()  # whose distribution is kept
    watched: tuple[str, ...] = ()  # a tenth, at most 200, to see what training does to others


def read_neutral(source: str | None) -> Neutral:
    """Texts from a text file (its paragraphs), BOLD's folder (its Wikipedia texts), or texts as reader:path.

    Of texts in pairs, as those of MultiNLI, the first are taken.
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
    found = token_ids(tokenizer, texts, start_token(tokenizer).lead)
    return [tuple(ids[: min(context, MOST_TOKENS)]) for ids in found if len(ids) > 1]


class Watched(NamedTuple):
    """Training items, parted by their terms."""

    trained: tuple[StereoSetItem, ...]  # what is left to train on
    watched: tuple[StereoSetItem, ...]


def set_aside(items: Sequence[StereoSetItem], plan: LanguagePlan) -> Watched:
    """Part training items into those trained on and those watched, as the plan says."""
    if not plan.checks and not plan.watched:
        return Watched(tuple(items), ())
    found = Watched(*split_by_target(items, plan.watched, plan.seed))
    if not found.trained or (plan.checks and not found.watched):
        raise InputError(
            f"of {len(items)} items {len(found.watched)} are watched and {len(found.trained)} trained on: give more "
            f"terms, another share (watched, now {plan.watched:g}), or no checks (checks 0)"
        )
    return found


def chosen_category(method: Any, items: Sequence[StereoSetItem], model: nn.Module, tokenizer: Any) -> str | None:
    """The category that a method chooses to train on, by the stereotype scores of training items; None for all."""
    if not hasattr(method, "choose"):
        return None
    found: str | None = method.choose(items, scores_of(Scorer(model, tokenizer)))
    return found


def of_category(items: tuple[StereoSetItem, ...], category: str | None) -> tuple[StereoSetItem, ...]:
    """The items of a category; all of them where there is none, or none of it."""
    return tuple(item for item in items if item.bias_type == category) or items


def looker(
    model: nn.Module, tokenizer: Any, items: Sequence[StereoSetItem], texts: Sequence[str]
) -> Callable[[], Look]:
    """What looks at a model: the stereotype score of items, as StereoSet has it, and the perplexity of texts.

    Without texts, the perplexity is that of the items' unrelated sentences.
    """
    scorer = Scorer(model, tokenizer)
    score, chosen = scores_of(scorer), texts or [item.texts.unrelated for item in items]

    def look() -> Look:
        return Look(score(items), _perplexity(scorer, chosen))

    return look


def wrecked(model: nn.Module, tokenizer: Any, items: Sequence[StereoSetItem]) -> Callable[[], str | None]:
    """What says that training has wrecked a language model: it predicts text worse than a guess of every token.

    That is a perplexity of more than e times the size of the vocabulary, and of what it was, on a few sentences.
    """
    scorer, texts = Scorer(model, tokenizer), [item.texts.unrelated for item in items[:_FEW]]

    def perplexity() -> float:
        try:
            return _perplexity(scorer, texts)
        except InputError:  # of log-probabilities that are not finite
            return math.nan

    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    before, guess = perplexity(), float(embeddings.weight.shape[0])

    def broken() -> str | None:
        found = perplexity()
        if math.isnan(before) or found <= math.e * max(before, guess):
            return None
        return f"the perplexity of {len(texts)} sentences is {found:.3g}"

    return broken


def _perplexity(scorer: Scorer, texts: Sequence[str]) -> float:
    documents = [Document(str(i), text) for i, text in enumerate(dict.fromkeys(texts))]
    return _figure("perplexity", "perplexity", perplexity_table(scorer, documents))


def scores_of(scorer: Scorer) -> Callable[[Sequence[StereoSetItem]], float]:
    """The stereotype score of items under a model; of several sources the mean of theirs."""

    def score(items: Sequence[StereoSetItem]) -> float:
        answers = scorer.score(stereoset.requests(items), on_long="skip")
        parts = [[item for item in items if item.source == source] for source in {item.source for item in items}]
        return fmean(_figure("stereoset", "ss", stereoset.table(part, answers)) for part in parts)

    return score


def seen_by(loss: Any, look: Callable[[], Look]) -> Callable[[], Look]:
    """The same look, told to a loss that has a function `see`."""

    def told() -> Look:
        found = look()
        getattr(loss, "see", lambda seen: None)(found)
        return found

    return told


def _figure(benchmark: str, metric: str, table: ItemTable) -> float:
    measures = benchmark_named(benchmark).measures_of(table)
    measure = next(one for one in measures if one.metric == metric)
    return float(measure.statistic(measure.sums(table).sum(axis=0)))
