"""How likely a language model finds sentences: what is measured of it, and methods whose loss is made of it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from fairhead.data.files import Skips
from fairhead.data.sentences import StereoSetItem, TripletSplit, split_by_target
from fairhead.errors import InputError
from fairhead.language.answers import TOO_LONG
from fairhead.language.benchmark import Measure
from fairhead.language.benchmarks import benchmark_named, stereoset
from fairhead.language.benchmarks.perplexity import Document
from fairhead.language.benchmarks.perplexity import table as perplexity_table
from fairhead.language.generation import write_after
from fairhead.language.item_table import ItemTable
from fairhead.language.lexicons import read_swaps
from fairhead.language.packing import start_token, token_ids
from fairhead.language.row_layout import Sentences, stack
from fairhead.language.scorer import Scorer
from fairhead.mitigate.triplets import SHARE, Prepared, TokenTriplet, encode_triplets, stack_triplets
from fairhead.settings import NotNegative, Option, Positive, Share, check_config
from fairhead.stats.bootstrap import reach_of_equal
from fairhead.stats.clusters import cluster_means
from fairhead.train import LanguagePlan
from fairhead.train.step import Parts
from fairhead.train.tuning import Look, Score

_FEW = 16  # sentences that say whether training has wrecked the model
_WATCHED, _LONG = 48, 64  # texts that a model writes before training, and their tokens: its language as it was
_MOST_LOST = 700.0  # nats a token, of which there is still a perplexity that a file can hold
NOTHING_TO_SWAP = "no word of the swap lists"


def logits_of(model: Any, batch: Sentences) -> Tensor:
    """Next-token logits of sentences, [N, T, V]."""
    found: Tensor = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits
    return found


def token_losses(logits: Tensor, batch: Sentences) -> Tensor:
    """Negative log-probability of each token after the first, 0 for padding: [N, T, V] → [N, T − 1].

    Example:
        >>> import torch
        >>> batch = stack([[0, 1, 1], [0, 1]])
        >>> token_losses(torch.zeros(2, 3, 4), batch).sum(1).tolist()  # log 4 per token
        [2.7725887298583984, 1.3862943649291992]
    """
    flat = cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch.ids[:, 1:].flatten(), reduction="none")
    return flat.view(batch.ids.shape[0], -1) * batch.mask[:, 1:]


def set_aside(items: Sequence[StereoSetItem], plan: LanguagePlan) -> TripletSplit:
    """Part training items, by their terms, into those trained on and those watched, as the plan says."""
    if not plan.checks and not plan.watched:
        return TripletSplit(tuple(items), ())
    trained, watched = split_by_target(items, plan.watched, plan.seed)
    if not trained or (plan.checks and not watched):
        raise InputError(
            f"of {len(items)} items {len(watched)} are watched and {len(trained)} trained on: give more terms, another "
            f"share (watched, now {plan.watched:g}), or no checks (checks 0)"
        )
    return TripletSplit(trained, watched)


def scores_of(scorer: Scorer) -> Callable[[Sequence[StereoSetItem]], float]:
    """The stereotype score of items, as StereoSet has it; of several sources or categories as `_clearest` says."""
    return lambda items: _clearest(_scores(scorer, items)).ss


def _scores(scorer: Scorer, items: Sequence[StereoSetItem]) -> list[Score]:
    """The scores of all sources and of their categories, whose intervals are corrected for their number (Bonferroni).

    As benchmarks do, of triplets the means per token are compared, of pairs whole sentences.
    """
    answers = scorer.score(stereoset.requests(items), on_long="skip")
    parts: dict[tuple[str, ...], list[StereoSetItem]] = {}
    for item in items:
        for of in ((item.source,), (item.source, item.bias_type)):
            parts.setdefault(of, []).append(item)
    tables = {of: table for of in sorted(parts) if len(table := stereoset.table(parts[of], answers))}
    if not tables:
        raise InputError(f"none of {len(items)} items can be scored: all are too long for the model")
    levels = {1: 0.95, 2: 1 - 0.05 / sum(len(of) == 2 for of in tables)}
    return [
        Score(of[0], *_with_chance(table, "ss_sum" if parts[of][0].of_pair else "ss", levels[len(of)]), *of[1:])
        for of, table in tables.items()
    ]


def _clearest(scores: Sequence[Score]) -> Score:
    """The one that is most clearly off even: whose interval leaves even out farthest.

    Where none does, it is that of the source with the shortest interval. A few terms, whose score varies most, do not
    speak for the others.
    """
    return min(scores, key=lambda score: (-score.beyond_chance, score.category is not None, score.chance))


def _with_chance(table: ItemTable, metric: str, level: float) -> tuple[float, float]:
    """The score of a table, and half the width of its interval: Student's over the terms, so that few of them do.

    Terms that all have the same score have no spread: how far they may be off is that of as many equal answers.
    """
    terms = _measure("stereoset", metric, table).sums(table)[:, :1]
    found = cluster_means(terms, range(len(terms)), level)
    equal = bool((terms == terms[0]).all())
    return float(found.value[0]), reach_of_equal(len(terms), level) if equal else float(found.high[0] - found.value[0])


def looker(
    model: nn.Module, tokenizer: Any, items: Sequence[StereoSetItem], texts: Sequence[str]
) -> Callable[[], Look]:
    """Looks at the score of items and the perplexity of texts (else of unrelated sentences).

    Also at that of texts that the model writes now. Of texts unlike those that it was trained on, perplexity may fall
    while the model forgets its own language; what it wrote itself only grows less likely.
    """
    scorer = Scorer(model, tokenizer)
    chosen = texts or [item.texts.unrelated for item in items]
    own = write_after(scorer, chosen, _WATCHED, _LONG)

    def look() -> Look:
        scores = _scores(scorer, items)
        clearest = _clearest(scores)
        sources = tuple(score for score in scores if score.category is None)
        of_own = scorer.score_tokens(own, ["a text of its own"] * len(own))
        lost = min(-float(np.concatenate(of_own).mean()), _MOST_LOST) if own else 0.0
        perplexity = min(_perplexity(scorer, chosen), math.exp(_MOST_LOST))
        return Look(clearest.ss, perplexity, clearest.chance, sources, math.exp(lost))

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
    table = perplexity_table(scorer, [Document(str(i), text) for i, text in enumerate(dict.fromkeys(texts))])
    measure = _measure("perplexity", "perplexity", table)
    return float(measure.statistic(measure.sums(table).sum(axis=0)))


def _measure(benchmark: str, metric: str, table: ItemTable) -> Measure:
    return next(one for one in benchmark_named(benchmark).measures_of(table) if one.metric == metric)


@dataclass(frozen=True)
class NegativeLogLikelihoods:
    """Negative log-likelihood per token of each kind of sentence, and how much likelier stereotypes are ("gap").

    The gap is the mean of log p(stereotype) − log p(anti-stereotype) of whole sentences, in nats. Pairs have no
    unrelated sentence.
    """

    def prepare(self, items: Iterable[StereoSetItem], tokenizer: Any, context: int) -> Prepared[TokenTriplet]:
        """One example per item."""
        listed = list(items)
        encoded = encode_triplets(listed, tokenizer, context)
        pairs = {item.id for item in listed if item.of_pair}
        triplets = [t._replace(unrelated=()) if t.id in pairs else t for t in encoded.triplets]
        return Prepared(triplets, [max(map(len, triplet[1:])) for triplet in triplets], encoded.left_out)

    @contextmanager
    def session(self, model: nn.Module) -> Iterator[Callable[[Sequence[TokenTriplet]], Parts]]:
        """The means of a batch; "loss" is that of the two coherent kinds."""
        device = next(model.parameters()).device

        def measure(triplets: Sequence[TokenTriplet]) -> Parts:
            parts, sums = {}, []
            for kind in ("stereotype", "anti_stereotype", "unrelated"):
                texts = [tokens for triplet in triplets if (tokens := getattr(triplet, kind))]
                if texts:
                    batch = stack(texts, device)
                    losses = token_losses(logits_of(model, batch), batch)
                    parts[kind] = losses.sum() / batch.mask[:, 1:].sum()
                    sums.append(losses.sum(-1))
                if len(texts) < len(triplets):
                    share = torch.tensor(len(texts) / len(triplets))
                    parts |= {kind: parts.get(kind, share) * share, f"{kind}{SHARE}": share}
            parts["gap"] = (sums[1] - sums[0]).mean()
            return {"loss": (parts["stereotype"] + parts["anti_stereotype"]) / 2, **parts}

        yield measure


@dataclass(frozen=True)
class CDA:
    """Counterfactual data augmentation (Zhao et al. 2018, Webster et al. 2020).

    The training text is the stereotypes and anti-stereotypes of the items. Each sentence with a word of the swap lists
    is used both as it is and with those words swapped, so that both forms occur equally often in every context.
    Sentences without such a word would be plain fine-tuning and are left out by default.

    Attributes:
        swaps: word lists: a folder of WinoBias or gn_glove, or a file of pairs.
        one_sided: train only on swapped sentences, not on the originals.
        all_sentences: also train on sentences without a word to swap.
    """

    swaps: Annotated[str, Option(metavar="PATH")]
    one_sided: bool = False
    all_sentences: bool = False
    plan: ClassVar[Mapping[str, Any]] = {"batch_size": 16}

    def check(self) -> None:
        """Refuse word lists that cannot be read, before a model is loaded."""
        read_swaps(self.swaps)

    def prepare(self, items: Iterable[StereoSetItem], tokenizer: Any, context: int) -> Prepared[tuple[int, ...]]:
        """One example per sentence, the start token first."""
        swaps, lead = read_swaps(self.swaps), start_token(tokenizer).lead
        examples: list[tuple[int, ...]] = []
        left_out = Skips()
        for item in items:
            texts: list[str] = []
            for text in (item.texts.stereotype, item.texts.anti_stereotype):
                other = swaps.swapped(text)
                if other != text:
                    texts += [other] if self.one_sided else [text, other]
                elif self.all_sentences:
                    texts.append(text)
            found = token_ids(tokenizer, texts)
            if not all(found):
                raise InputError(f"item {item.id!r}: a sentence of it has no token; expected a text")
            kept = [(*lead, *ids) for ids in found if len(ids) + len(lead) <= context]
            if not kept:
                left_out.drop(TOO_LONG if found else NOTHING_TO_SWAP, item.id)
            examples += kept
        return Prepared(examples, [len(one) for one in examples], left_out.found())

    @contextmanager
    def session(self, model: nn.Module) -> Iterator[Callable[[Sequence[Sequence[int]]], Parts]]:
        """Cross-entropy of sentences."""
        device = next(model.parameters()).device

        def loss(examples: Sequence[Sequence[int]]) -> Parts:
            batch = stack(examples, device)
            return {"loss": token_losses(logits_of(model, batch), batch).sum() / batch.mask[:, 1:].sum()}

        yield loss


_Unlearned = tuple[TokenTriplet, bool]  # whether the anti-stereotype is to be forgotten too


@dataclass(frozen=True)
class BiasUnlearn:
    """BiasUnlearn (EMNLP 2025) on the triplets that KLAAD trains on: unlearn stereotypes, preserve the rest.

    The loss of a triplet has three parts:

    1. negative preference optimisation on the stereotype, −(2/β) log σ(β (NLL − NLL of the pretrained model)), which
       fades as the stereotype grows less likely than it was;
    2. cross-entropy on the anti-stereotype;
    3. the divergence of the next-token distributions on the unrelated sentence from those of the pretrained model.

    The defaults follow its authors: train on the category farthest from even, also unlearn a quarter of the
    anti-stereotypes, swap stereotypes and anti-stereotypes while the score of watched terms is below even, and stop
    training by that score (`LanguagePlan.checks`).

    Attributes:
        forget_weight: weight of the negative preference optimisation.
        retain_weight: weight of the cross-entropy on the anti-stereotype.
        keep_weight: weight of the divergence from the pretrained model on unrelated sentences.
        beta: how fast the push against the stereotype fades.
        anti_in_forget: share of the triplets, evenly spread, whose anti-stereotype is unlearned too.
        category: train on the category whose stereotype score is farthest from even, or on all categories.
        swap: swap stereotypes and anti-stereotypes while the score of the last check is below even.
    """

    forget_weight: NotNegative = 0.5
    retain_weight: NotNegative = 0.3
    keep_weight: NotNegative = 0.2
    beta: Positive = 0.1
    anti_in_forget: Share = 0.25
    category: Literal["farthest", "all"] = "farthest"
    swap: bool = True
    plan: ClassVar[Mapping[str, Any]] = {"learning_rate": 2e-5, "checks": 8, "watched": 0.15}

    def __post_init__(self) -> None:
        check_config(self)
        weights = (self.forget_weight, self.retain_weight, self.keep_weight)
        if not any(weights):
            raise InputError(f"the weights of the losses are {weights}; expected one above 0")

    def choose(self, items: Sequence[StereoSetItem], score: Callable[[Sequence[StereoSetItem]], float]) -> str | None:
        """The category to train on, by the stereotype scores of the training items; None for all of them."""
        found = sorted({item.bias_type for item in items})
        if self.category == "all" or len(found) < 2:
            return None
        scores = {name: score([item for item in items if item.bias_type == name]) for name in found}
        return max(found, key=lambda name: abs(scores[name] - 0.5))

    def prepare(self, items: Iterable[StereoSetItem], tokenizer: Any, context: int) -> Prepared[_Unlearned]:
        """One example per item."""
        triplets, left_out = encode_triplets(items, tokenizer, context)
        share = self.anti_in_forget
        examples = [(triplet, int((i + 1) * share) > int(i * share)) for i, triplet in enumerate(triplets)]
        return Prepared(examples, [max(map(len, triplet[1:])) for triplet in triplets], left_out)

    @contextmanager
    def session(self, model: nn.Module) -> Iterator[Callable[[Sequence[_Unlearned]], Parts]]:
        """The loss of examples, against the model as it is now."""
        yield _UnlearningLoss(self, model)

    def parts(self, logits: Tensor, before: Tensor, batch: Sentences, mixed: Tensor) -> Parts:
        """The loss from the logits of B triplets [3B, T, V] and those of the pretrained model; `mixed` is [B]."""
        n = len(mixed)
        coherent = Sentences(batch.ids[: 2 * n], batch.mask[: 2 * n])
        now, then = (token_losses(each[: 2 * n], coherent) for each in (logits, before))
        rise = (now - then).sum(-1)  # [2B]
        pull = -2 / self.beta * logsigmoid(self.beta * rise)
        forgotten = torch.cat([torch.ones_like(mixed, dtype=torch.bool), mixed])
        forget = pull[forgotten].mean()
        retain = now[n:].sum() / batch.mask[n : 2 * n, 1:].sum()
        keep = _divergence(before[2 * n :], logits[2 * n :], batch.mask[2 * n :])
        total = self.forget_weight * forget + self.retain_weight * retain + self.keep_weight * keep
        return {"loss": total, "forget": forget, "retain": retain, "keep": keep}

    def measuring(self) -> NegativeLogLikelihoods:
        """How likely the three sentences are: the loss itself needs the pretrained model."""
        return NegativeLogLikelihoods()


class _UnlearningLoss:
    """The loss of a batch; which sentences are to be forgotten depends on the last check."""

    def __init__(self, method: BiasUnlearn, model: nn.Module) -> None:
        self._method, self._model, self.swapped = method, model, False
        # LoRA's model is the pretrained one with its matrices switched off; else a copy is kept.
        lora = hasattr(model, "disable_adapter")
        reference: Any = model if lora else deepcopy(model).requires_grad_(False).eval()
        self._off: Callable[[], AbstractContextManager[Any]] = reference.disable_adapter if lora else nullcontext
        self._reference = reference

    def see(self, look: Look) -> None:
        """What a check has seen."""
        self.swapped = self._method.swap and look.ss < 0.5

    def __call__(self, examples: Sequence[_Unlearned]) -> Parts:
        device = next(self._model.parameters()).device
        triplets = [triplet for triplet, _ in examples]
        if self.swapped:
            triplets = [t._replace(stereotype=t.anti_stereotype, anti_stereotype=t.stereotype) for t in triplets]
        batch = stack_triplets(triplets, device)
        logits = logits_of(self._model, batch)
        with torch.no_grad(), self._off():
            before = logits_of(self._reference, batch)
        return self._method.parts(logits, before, batch, torch.tensor([mix for _, mix in examples], device=device))


def _divergence(before: Tensor, now: Tensor, mask: Tensor) -> Tensor:
    """KL(pretrained ‖ now) of next-token distributions [B, T, V], averaged over the tokens that predict one."""
    old, new = (logits[:, :-1].float().log_softmax(-1) for logits in (before, now))
    return ((old.exp() * (old - new)).sum(-1) * mask[:, 1:]).sum() / mask[:, 1:].sum()
