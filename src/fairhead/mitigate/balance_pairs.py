"""Balance for pairs of sentences: shift how much likelier stereotypes are than their opposites, keep all else.

Of a pair, Δ = log p(stereotype) − log p(anti-stereotype), of whole sentences. Only its mean over many pairs tells of a
stereotype; that one sentence is likelier than another has many reasons. So the mean is taken off every pair alike, and
each pair keeps its own difference from it. The loss of a batch has three parts:

1. shift: the Huber loss of Δ − (Δ before training − the mean of those, `strength` times);
2. level: the Huber loss of how far the mean log-probability of a pair's two sentences has moved;
3. keep: KL(before ‖ now) of next-token distributions, per token, on unrelated sentences and on neutral text. Pairs have
   no unrelated sentence: a second neutral text stands for it.

What the model said before training is computed once (`refer`): two numbers per pair, and the final hidden states of the
sentences whose distributions are kept, which the output layer as it was turns into distributions again. No second model
is held. KLAAD's two other parts can be added (`kl_weight`, `triplet_weight`); they read the sentences a second time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import huber_loss

from fairhead.data import TextPair, parse_spec
from fairhead.data.sentences import StereoSetItem
from fairhead.data.splits import shuffle_by_hash
from fairhead.errors import InputError
from fairhead.language import packing
from fairhead.language.benchmarks.perplexity import read_documents
from fairhead.language.packing import Row, plain_row, start_token, token_ids
from fairhead.language.row_layout import Layout, Planned, ReadyBatch, at_vocabulary, log_sum_exp, quiet, send
from fairhead.mitigate.klaad import KLAAD
from fairhead.mitigate.sentence_losses import NegativeLogLikelihoods
from fairhead.mitigate.triplets import Example as KlaadExample
from fairhead.mitigate.triplets import Prepared, encode_triplets, layouts_of, tree_of
from fairhead.settings import NotNegative, Option, Positive, check_config
from fairhead.train.step import Parts

STEREOTYPE, ANTI_STEREOTYPE, UNRELATED, NEUTRAL = range(4)
_AT_ONCE = 64  # examples that are read together where nothing is trained
_MOST_TOKENS = 64  # of a neutral text: the rest would be padding to all others of its batch
_MOST_WATCHED = 200


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


class Reference(NamedTuple):
    """What the model said of an example before it was trained."""

    logprobs: tuple[float, float]  # of the stereotype and of the anti-stereotype
    states: Tensor  # what the output layer reads where the distribution is kept, [K, D]
    mean_gap: float  # what is taken off Δ; NaN: the mean of the batch


class Example(NamedTuple):
    """The sentences of an item, with a neutral text where there is one, as one tree."""

    of: tuple[str, str]  # the item's source of data, and its category there
    sentences: tuple[Sequence[int], ...]  # in the order of STEREOTYPE, ANTI_STEREOTYPE, UNRELATED and NEUTRAL
    tree: Row
    reference: Reference | None = None
    klaad: KlaadExample | None = None  # the same item as KLAAD reads it


@dataclass(frozen=True)
class _WithNeutralText:
    """What both methods here do with a neutral text."""

    neutral: Annotated[str | None, Option(metavar="TEXT")] = None

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
        neutral: text whose next-token distribution is preserved: a text file, BOLD's folder, or texts such as
            multinli:PATH. Use texts as long as those you will use the model on, because effects on longer texts go
            unnoticed. Recommended for pairs: without it, sentences of other pairs are preserved instead.
        mean_over: mean to subtract from every pair: over its "batch", over its "category" or "all" pairs of its data
            source; "each" pulls every pair to 0 separately.
        centre: subtract the "mean", or the "median" in its place: it is 0 where as many pairs lean one way as the
            other, which is what the stereotype score counts, however far single pairs lean.
        strength: how many times to subtract that mean ("each": once). Terms that are not trained on follow only
            partly: with a strength above 1, trained terms overshoot so that others come closer to even. Of 1, 2 and 3,
            3 brought watched terms closest to even (SmolLM2, six runs).
        level_weight: weight of the second part of the loss; the first has weight 1.
        keep_weight: weight of the third part of the loss.
        width: where the Huber loss changes from quadratic to linear, in nats.
        kl_weight: weight of KLAAD's divergence of attention maps, in the last layer.
        triplet_weight: weight of KLAAD's triplet loss, with its margin for Llama.
    """

    mean_over: Literal["batch", "category", "all", "each"] = "all"
    centre: Literal["mean", "median"] = "mean"
    strength: Positive = 3.0
    level_weight: NotNegative = 0.5
    keep_weight: NotNegative = 10.0
    width: Positive = 2.0
    kl_weight: NotNegative = 0.0
    triplet_weight: NotNegative = 0.0
    plan: ClassVar[Mapping[str, Any]] = {
        "epochs": 2,
        "batch_size": 16,
        "learning_rate": 5e-5,
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

    def prepare(self, items: Iterable[StereoSetItem], tokenizer: Any, context: int) -> Prepared[Example]:
        """One example per item; neutral texts are dealt out in an order that depends on them alone."""
        listed = list(items)
        triplets, left_out = encode_triplets(listed, tokenizer, context)
        of = {item.id: item for item in listed}
        neutral = encode_neutral(read_neutral(self.neutral).trained, tokenizer, context)
        beside = None if self.klaad is None else self.klaad.prepare(listed, tokenizer, context)
        examples = []
        for i, triplet in enumerate(triplets):
            item = of[triplet.id]
            sentences: tuple[Sequence[int], ...] = triplet[1:]
            if neutral:
                # The third sentence of a pair is one of another pair, which is to move: a neutral text is kept for it.
                third = neutral[(i + len(neutral) // 2) % len(neutral)] if item.of_pair else triplet.unrelated
                sentences = (*triplet[1:3], third, neutral[i % len(neutral)])
            klaad = None if beside is None else beside.examples[i]
            examples.append(Example((item.source, item.bias_type), sentences, tree_of(sentences), klaad=klaad))
        noted = {} if beside is None else beside.noted
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
                for i, (stereotype, anti), own in zip(chosen, pair_logprobs.tolist(), parts, strict=True):
                    said[i] = (stereotype, anti), own.clone()
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

        def loss(examples: Sequence[Example]) -> Parts:
            references = [example.reference for example in examples if example.reference is not None]
            if len(references) < len(examples):
                raise InputError("an example has no reference; pass what was prepared through BalancePairs.refer first")
            batch = batch_of(examples, layout_of)
            device = batch.kept.device
            states = send(torch.cat([reference.states for reference in references]), device)
            with _beside(output, before, states):
                logits = batch.ready.logits().float()
            now, then = logits[: -len(states)], logits[-len(states) :]
            totals = log_sum_exp(logits)
            numbers = [[*reference.logprobs, reference.mean_gap] for reference in references]
            parts = self.parts(
                batch.pair_logprobs(now, totals),
                send(torch.tensor(numbers, dtype=torch.float32), device),
                _divergence(then, now[batch.kept], totals[len(now) :], totals[batch.kept])[batch.counted],
            )
            if klaad_loss is None:
                return parts
            more = klaad_loss([example.klaad for example in examples if example.klaad is not None])
            return {**parts, **more, "loss": parts["loss"] + more["loss"]}

        with nullcontext() if self.klaad is None else self.klaad.session(model) as klaad_loss:
            yield loss

    def parts(self, now: Tensor, before: Tensor, divergence: Tensor) -> Parts:
        """The loss of B pairs from log-probabilities now [2, B], those before and the mean gap [B, 3], and KL [T]."""
        gap, gap_before = now[0] - now[1], before[:, 0] - before[:, 1]
        mean = before[:, 2]
        if self.mean_over == "batch":
            mean = gap_before.quantile(0.5) if self.centre == "median" else gap_before.mean()
        times = 1.0 if self.mean_over == "each" else self.strength
        shift = huber_loss(gap, gap_before - times * mean, delta=self.width)
        level = huber_loss(now.mean(0), before[:, :2].mean(1), delta=self.width)
        keep = divergence.mean()
        total = shift + self.level_weight * level + self.keep_weight * keep
        return {"loss": total, "shift": shift, "level": level, "keep": keep}


@dataclass(frozen=True)
class BalanceControl(_WithNeutralText):
    """Cross-entropy alone on the pairs and neutral texts of `BalancePairs`, in the same batches, without checks.

    It does not train on the unrelated sentences, which are nonsense.

    Attributes:
        neutral: as in `BalancePairs`.
    """

    plan: ClassVar[Mapping[str, Any]] = {**BalancePairs.plan, "checks": 0}
    control_of: ClassVar[str] = "balance_pairs"  # whose options it takes in a grid

    def prepare(self, items: Iterable[StereoSetItem], tokenizer: Any, context: int) -> Prepared[Example]:
        """As `BalancePairs` does."""
        return BalancePairs(self.neutral).prepare(items, tokenizer, context)

    @contextmanager
    def session(self, model: nn.Module) -> Iterator[Callable[[Sequence[Example]], Parts]]:
        """Cross-entropy per token of stereotypes, anti-stereotypes and neutral texts."""
        layout_of = layouts_of(model)

        def loss(examples: Sequence[Example]) -> Parts:
            batch = batch_of(examples, layout_of)
            logits = batch.ready.logits().float()
            return {"loss": -batch.token_logprobs(logits, log_sum_exp(logits))[batch.trained].mean()}

        yield loss


class Batch(NamedTuple):
    """B examples on the model's device: S scored tokens, predicted at P positions."""

    ready: ReadyBatch
    pair_tokens: Tensor  # scored tokens of stereotypes and anti-stereotypes, a sentence after the other, [Q]
    pair_of: Tensor  # which of the 2B sentences each is of, stereotypes first, [Q]
    trained: Tensor  # scored tokens of pairs and neutral texts, [C]
    kept: Tensor  # positions whose distribution is kept, an example after the other, [K]
    kept_of: Tensor  # how many of them each example has, [B]; not on the device
    counted: Tensor  # for each token of unrelated sentences and neutral texts, which of `kept` predicts it, [T]

    def token_logprobs(self, logits: Tensor, totals: Tensor) -> Tensor:
        """Log-probabilities [S] of the scored tokens, from logits [P, V] and their log-sum-exp [P]."""
        return logits[self.ready.source, self.ready.token] - totals[self.ready.source]

    def pair_logprobs(self, logits: Tensor, totals: Tensor) -> Tensor:
        """Log-probabilities of whole sentences, [2, B]: stereotypes, then anti-stereotypes."""
        tokens = self.token_logprobs(logits, totals)[self.pair_tokens]
        return tokens.new_zeros(2 * len(self.kept_of)).index_add(0, self.pair_of, tokens).view(2, -1)


def batch_of(examples: Sequence[Example], layout_of: Callable[[Sequence[Example]], Layout]) -> Batch:
    """Put examples together."""
    layout, n, each = layout_of(examples), len(examples), len(examples[0].sentences)
    rows: list[Row] = []
    for b, example in enumerate(examples):
        if layout.tree:
            paths = (packing.Path(each * b + path.sequence, path.positions) for path in example.tree.paths)
            rows.append(example.tree._replace(paths=tuple(paths)))
        else:
            rows += [plain_row(tokens, sequence=each * b + k) for k, tokens in enumerate(example.sentences)]
    planned = Planned(layout, tuple(rows), range(n * each))
    at = dict(planned.paths())
    ready = planned.ready()
    device = ready.source.device
    pairs = [at[each * b + k] for k in (STEREOTYPE, ANTI_STEREOTYPE) for b in range(n)]
    neutral = [at[each * b + NEUTRAL] for b in range(n) if each > NEUTRAL]
    source, kept, counted = planned.sources(), list[Any](), []
    for b in range(n):
        own = source[np.concatenate([at[each * b + k] for k in range(UNRELATED, each)])]
        places, inverse = np.unique(own, return_inverse=True)
        counted.append(inverse + sum(len(before) for before in kept))
        kept.append(places)

    def moved(values: Any) -> Tensor:
        return send(torch.from_numpy(np.ascontiguousarray(values)), device)

    return Batch(
        ready,
        moved(np.concatenate(pairs)),
        moved(np.repeat(np.arange(2 * n), [len(one) for one in pairs])),
        moved(np.concatenate([*pairs, *neutral])),
        moved(np.concatenate(kept)),
        torch.tensor([len(one) for one in kept]),
        moved(np.concatenate(counted)),
    )


@contextmanager
def _beside(output: nn.Module, before: nn.Module, states: Tensor) -> Iterator[None]:
    """Let an output layer also give, after its own logits, those of `states` by the layer as it was before.

    Whatever the model does to its logits afterwards (soft caps, scales) it does to both.
    """

    def append(module: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        with torch.no_grad():
            # `forward`, not a call: where it is the layer itself, its hooks are not meant for this.
            then = before.forward(states.to(inputs[0].dtype))
        return torch.cat([logits, then[None]], dim=1)

    hook = output.register_forward_hook(append)
    try:
        yield
    finally:
        hook.remove()


def _divergence(before: Tensor, now: Tensor, total_before: Tensor, total_now: Tensor) -> Tensor:
    """KL(before ‖ now) of distributions given by logits [K, V] and their log-sum-exp [K]: [K]."""
    share = (before - total_before[:, None]).exp()
    return (share * (before - now)).sum(-1) - total_before + total_now
