"""Balance for pairs of sentences: shift how much likelier stereotypes are than their opposites, keep all else.

Of a pair, Δ = log p(stereotype) − log p(anti-stereotype), of whole sentences. Only its mean over many pairs tells of a
stereotype; that one sentence is likelier than another has many reasons. So the mean is taken off every pair alike, and
each pair keeps its own difference from it. The loss of a batch has four parts:

1. shift: the Huber loss of Δ − (Δ before training − the mean of those, taken off `strength` times);
2. level: the Huber loss of how far the mean log-probability of a pair's two sentences has moved;
3. keep: KL(before ‖ now) of next-token distributions, per token, on unrelated sentences and on neutral text. Pairs have
   no unrelated sentence: a second neutral text stands for it, or one of the model's own;
4. written: the same on texts that the model itself wrote before training.

What the model said before training is computed once (`refer`): two numbers per pair, and the final hidden states of the
sentences whose distributions are kept, which the output layer as it was turns into distributions again. No second model
is held. KLAAD's two other parts can be added (`kl_weight`, `triplet_weight`); they read the sentences a second time.

Terms that are not trained on follow only in part. So how often the mean is taken off is steered by the terms that are
watched (`_Steered`), for each source of data by itself, unless a strength is given.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import huber_loss

from fairhead.data import TextPair, parse_spec
from fairhead.data.sentences import StereoSetItem
from fairhead.data.splits import shuffle_by_hash
from fairhead.errors import InputError
from fairhead.language.benchmarks.perplexity import read_documents
from fairhead.language.packing import TokenSequence, start_token, token_ids
from fairhead.language.row_layout import at_vocabulary, log_sum_exp, quiet, send
from fairhead.mitigate.klaad import KLAAD
from fairhead.mitigate.pair_batches import Example, Reference, batch_of, beside, divergence_of
from fairhead.mitigate.sentence_losses import NegativeLogLikelihoods
from fairhead.mitigate.triplets import Prepared, encode_triplets, layouts_of, tree_of
from fairhead.settings import NotNegative, Option, Positive, check_config
from fairhead.train.step import Parts
from fairhead.train.tuning import Look

_AT_ONCE = 16  # examples that are read together before training: as many as in a batch by default
_MOST_TOKENS = 64  # of a neutral text: the rest would be padding to all others of its batch
_MOST_WATCHED = 200
_OWN_TEXTS, _OWN_TOKENS = 512, 32  # texts that a model writes before training, and their tokens


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
        raise InputError(f"the neutral text {source} is not there; expected a text file or texts as reader:path")
    order = shuffle_by_hash([text.strip() for text in texts if text.strip()], seed=0)
    watched = min(len(order) // 10, _MOST_WATCHED)
    return Neutral(tuple(order[watched:]), tuple(order[:watched]))


def encode_neutral(texts: Sequence[str], tokenizer: Any, context: int) -> list[tuple[int, ...]]:
    """Tokens of texts, the start token first, of long ones the beginning; texts of one token are left out."""
    found = token_ids(tokenizer, texts, start_token(tokenizer).lead)
    return [tuple(ids[: min(context, _MOST_TOKENS)]) for ids in found if len(ids) > 1]


@dataclass(frozen=True)
class _WithNeutralText:
    """What both methods here do with a neutral text, and with texts of the model's own."""

    neutral: Annotated[str | None, Option(metavar="TEXT")] = None
    own_weight: NotNegative = field(default=10.0, kw_only=True)

    @property
    def writes(self) -> tuple[int, int]:
        """How many texts the model is to write before training, and their tokens."""
        return (_OWN_TEXTS if self.own_weight else 0), _OWN_TOKENS

    def check(self) -> None:
        """Refuse a neutral text that cannot be read, before a model is loaded."""
        read_neutral(self.neutral)

    def watched_texts(self) -> Sequence[str]:
        """Neutral texts that are not trained on: their perplexity is watched."""
        return read_neutral(self.neutral).watched

    def measuring(self) -> NegativeLogLikelihoods:
        """How likely the three sentences are: the loss itself may need the model before training."""
        return NegativeLogLikelihoods()


@dataclass(frozen=True)
class BalancePairs(_WithNeutralText):
    """The settings.

    Attributes:
        neutral: text whose next-token distribution is preserved beside that of texts which the model itself writes
            before training: a text file, BOLD's folder, or texts such as multinli:PATH. Use texts as long as those you
            will use the model on, because effects on longer texts go unnoticed.
        mean_over: mean to subtract from every pair: over its "batch", over its "category" or "all" pairs of its data
            source; "each" pulls every pair to 0 separately.
        centre: subtract the "mean", or the "median" in its place: it is 0 where as many pairs lean one way as the
            other, which is what the stereotype score counts, however far single pairs lean.
        strength: how many times to subtract that mean ("each": once). Terms that are not trained on follow only
            partly: with a strength above 1, trained terms overshoot so that others come closer to even. By default it
            begins at 1 and, for each data source, rises at each check while watched terms still lean as before
            training, and falls where they lean the other way. It stays 1 where watched terms do not clearly lean.
        level_weight: weight of the second part of the loss; the first has weight 1.
        keep_weight: weight of the third part of the loss.
        own_weight: weight of the fourth part of the loss. With 0 the model writes nothing; its own language may then
            become less likely without a sign of it in the neutral text.
        width: where the Huber loss changes from quadratic to linear, in nats.
        kl_weight: weight of KLAAD's divergence of attention maps, in the last layer.
        triplet_weight: weight of KLAAD's triplet loss, with its margin for Llama.
    """

    mean_over: Literal["batch", "category", "all", "each"] = "all"
    centre: Literal["mean", "median"] = "mean"
    strength: Positive | None = None
    level_weight: NotNegative = 0.5
    keep_weight: NotNegative = 10.0
    width: Positive = 2.0
    kl_weight: NotNegative = 0.0
    triplet_weight: NotNegative = 0.0
    plan: ClassVar[Mapping[str, Any]] = {
        "epochs": 2,
        "batch_size": 16,
        "learning_rate": 1e-4,
        "warmup": 0.0,
        "checks": 8,
        "watched": 0.15,
    }

    def __post_init__(self) -> None:
        check_config(self)

    @property
    def klaad(self) -> KLAAD | None:
        """KLAAD without its cross-entropy; None where it has no part."""
        if not self.kl_weight and not self.triplet_weight:
            return None
        return KLAAD(ce_weight=0, kl_weight=self.kl_weight, triplet_weight=self.triplet_weight)

    def prepare(
        self, items: Iterable[StereoSetItem], tokenizer: Any, context: int, own: Sequence[TokenSequence] = ()
    ) -> Prepared[Example]:
        """One example per item; neutral texts are dealt out in an order that depends on them alone."""
        listed = list(items)
        triplets, left_out = encode_triplets(listed, tokenizer, context)
        of = {item.id: item for item in listed}
        neutral = encode_neutral(read_neutral(self.neutral).trained, tokenizer, context)
        written = [tuple(text.tokens) for text in own]
        klaads = None if self.klaad is None else self.klaad.prepare(listed, tokenizer, context)
        examples = []
        for i, triplet in enumerate(triplets):
            item = of[triplet.id]
            third: Sequence[int] = triplet.unrelated
            if item.of_pair and (others := neutral or written):
                # The third sentence of a pair is one of another pair, which is to move.
                third = others[(i + len(others) // 2) % len(others)]
            beside_pair = (many[i % len(many)] for many in (neutral, written) if many)
            sentences = (*triplet[1:3], third, *beside_pair)
            klaad = None if klaads is None else klaads.examples[i]
            of_item = item.source, item.bias_type
            examples.append(Example(of_item, sentences, tree_of(sentences), bool(written), klaad=klaad))
        noted = {} if klaads is None else klaads.noted
        return Prepared(examples, [len(example.tree.tokens) for example in examples], left_out, noted)

    def refer(self, model: nn.Module, prepared: Prepared[Example]) -> Prepared[Example]:
        """The examples with what the model says of them now."""
        layout_of = layouts_of(model)
        order = sorted(range(len(prepared.examples)), key=lambda i: prepared.lengths[i])
        said: dict[int, tuple[tuple[float, float], Tensor]] = {}
        with quiet(model):
            for begin in range(0, len(order), _AT_ONCE):
                chosen = order[begin : begin + _AT_ONCE]
                batch = batch_of([prepared.examples[i] for i in chosen], layout_of)
                with at_vocabulary(model, batch.ready.positions) as seen:
                    logits = model(**batch.ready.inputs, use_cache=False).logits[0].float()
                states = seen[0].flatten(0, 1)[batch.ready.positions][batch.kept].cpu()
                pair_logprobs = batch.pair_logprobs(logits, log_sum_exp(logits)).T.double().cpu()
                parts = states.split(batch.kept_of.tolist())
                for i, (stereotype, anti), kept in zip(chosen, pair_logprobs.tolist(), parts, strict=True):
                    said[i] = (stereotype, anti), kept.clone()
        gaps = np.array([said[i][0][0] - said[i][0][1] for i in range(len(order))])
        means = self._means(gaps, [example.of for example in prepared.examples])
        references = (Reference(*said[i], float(means[i])) for i in range(len(order)))
        pairs = zip(prepared.examples, references, strict=True)
        return prepared._replace(examples=[example._replace(reference=reference) for example, reference in pairs])

    def _means(self, gaps: np.ndarray[Any, np.dtype[np.float64]], of: Sequence[tuple[str, str]]) -> Any:
        """What is taken off each pair's Δ, [n]."""
        if self.mean_over == "batch":
            return np.full(len(gaps), np.nan)
        if self.mean_over == "each":
            return gaps
        groups = of if self.mean_over == "category" else [source for source, _ in of]
        of_many: Any = np.median if self.centre == "median" else np.mean
        means = {one: of_many(gaps[[group == one for group in groups]]) for one in set(groups)}
        return np.array([means[group] for group in groups])

    @contextmanager
    def session(self, model: nn.Module) -> Iterator[Callable[[Sequence[Example]], Parts]]:
        """The loss of examples that `refer` has seen, against the model as it is now."""
        layout_of = layouts_of(model)
        output: Any = model.get_output_embeddings()  # type: ignore[operator]
        trained = any(weight.requires_grad for weight in output.parameters())
        before = deepcopy(output).requires_grad_(False) if trained else output
        fixed = 1.0 if self.mean_over == "each" else self.strength

        def loss(examples: Sequence[Example], strengths: Mapping[str, float] = MappingProxyType({})) -> Parts:
            references = [example.reference for example in examples if example.reference is not None]
            if len(references) < len(examples):
                raise InputError("an example has no reference; pass what was prepared through BalancePairs.refer first")
            batch = batch_of(examples, layout_of)
            device = batch.kept.device
            states = send(torch.cat([reference.states for reference in references]), device)
            with beside(output, before, states):
                logits = batch.ready.logits().float()
            now, then = logits[: -len(states)], logits[-len(states) :]
            totals = log_sum_exp(logits)
            times = [strengths.get(example.of[0], fixed or 1.0) for example in examples]
            numbers = [[*one.logprobs, one.mean_gap, t] for one, t in zip(references, times, strict=True)]
            divergence = divergence_of(then, now[batch.kept], totals[len(now) :], totals[batch.kept])
            parts = self.parts(
                batch.pair_logprobs(now, totals),
                send(torch.tensor(numbers, dtype=torch.float32), device),
                divergence[batch.counted],
                divergence[batch.counted_own],
            )
            if klaad_loss is None:
                return parts
            more = klaad_loss([example.klaad for example in examples if example.klaad is not None])
            return {**parts, **more, "loss": parts["loss"] + more["loss"]}

        with nullcontext() if self.klaad is None else self.klaad.session(model) as klaad_loss:
            yield loss if fixed is not None else _Steered(loss)

    def parts(self, now: Tensor, before: Tensor, divergence: Tensor, of_own: Tensor) -> Parts:
        """The loss of B pairs from log-probabilities now [2, B] and KL [T], that of texts of the model's own [T'].

        And from those before, the mean gap and how often it is taken off, [B, 4].
        """
        gap, gap_before = now[0] - now[1], before[:, 0] - before[:, 1]
        mean = before[:, 2]
        if self.mean_over == "batch":
            mean = gap_before.quantile(0.5) if self.centre == "median" else gap_before.mean()
        shift = huber_loss(gap, gap_before - before[:, 3] * mean, delta=self.width)
        level = huber_loss(now.mean(0), before[:, :2].mean(1), delta=self.width)
        keep = divergence.mean()
        total = shift + self.level_weight * level + self.keep_weight * keep
        parts = {"loss": total, "shift": shift, "level": level, "keep": keep}
        if len(of_own):
            written = of_own.mean()
            parts |= {"loss": total + self.own_weight * written, "written": written}
        return parts


class _Steered:
    """The loss of examples, with the mean of each source taken off as often as checks of watched terms ask for."""

    steers = True

    def __init__(self, loss: Callable[[Sequence[Example], Mapping[str, float]], Parts]) -> None:
        self._loss = loss
        self._before: Look | None = None  # the first, of the model before training
        self._strengths: dict[str, float] = {}  # by source

    def __call__(self, examples: Sequence[Example]) -> Parts:
        return self._loss(examples, self._strengths)

    def see(self, look: Look) -> None:
        """What a check has seen: add the share of the lean before training that is left of it.

        A source that was not clearly off even keeps its strength: what its score does would be chance.
        """
        if self._before is None:
            self._before = look
            return
        for before, now in zip(self._before.sources, look.sources, strict=True):
            if before.beyond_chance:
                left = (now.ss - 0.5) / (before.ss - 0.5)
                strength = self._strengths.get(now.source, 1.0) + min(max(left, -1.0), 1.0)
                self._strengths[now.source] = max(0.0, strength)

    def record(self) -> dict[str, Any]:
        """What the model folder's record says of the loss."""
        return {"strengths": self._strengths} if self._strengths else {}


@dataclass(frozen=True)
class BalanceControl(_WithNeutralText):
    """Cross-entropy alone on the pairs and neutral texts of `BalancePairs`, in the same batches, without checks.

    It does not train on the unrelated sentences, which are nonsense.

    Attributes:
        neutral: as in `BalancePairs`.
        own_weight: with 0 the model writes no texts, as in `BalancePairs`; what the weight is makes no difference.
    """

    plan: ClassVar[Mapping[str, Any]] = {**BalancePairs.plan, "checks": 0}
    control_of: ClassVar[str] = "balance_pairs"  # whose options it takes in a grid

    def prepare(
        self, items: Iterable[StereoSetItem], tokenizer: Any, context: int, own: Sequence[TokenSequence] = ()
    ) -> Prepared[Example]:
        """As `BalancePairs` does."""
        return BalancePairs(self.neutral).prepare(items, tokenizer, context, own)

    @contextmanager
    def session(self, model: nn.Module) -> Iterator[Callable[[Sequence[Example]], Parts]]:
        """Cross-entropy per token of stereotypes, anti-stereotypes and neutral texts."""
        layout_of = layouts_of(model)

        def loss(examples: Sequence[Example]) -> Parts:
            batch = batch_of(examples, layout_of)
            logits = batch.ready.logits().float()
            return {"loss": -batch.token_logprobs(logits, log_sum_exp(logits))[batch.trained].mean()}

        yield loss
