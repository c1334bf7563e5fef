"""How likely a language model finds sentences: what the losses of several methods are made of, and measured with."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fairhead.data.sentences import StereoSetItem
from fairhead.language.row_layout import Sentences, stack
from fairhead.mitigate.language_trainer import SHARE, Prepared
from fairhead.mitigate.triplets import TokenTriplet, encode_triplets
from fairhead.train.step import Parts


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


@dataclass(frozen=True)
class NegativeLogLikelihoods:
    """Negative log-likelihood per token of each kind of sentence, and how much likelier stereotypes are ("gap").

    The gap is the mean of log p(stereotype) − log p(anti-stereotype) of whole sentences, in nats. Pairs have no
    unrelated sentence.
    """

    def prepare(self, items: Iterable[StereoSetItem], tokenizer: Any, context: int) -> "Prepared[TokenTriplet]":
        """One example per item."""
        listed = list(items)
        triplets, left_out = encode_triplets(listed, tokenizer, context)
        pairs = {item.id for item in listed if item.of_pair}
        triplets = tuple(t._replace(unrelated=()) if t.id in pairs else t for t in triplets)
        return Prepared(triplets, [max(map(len, triplet[1:])) for triplet in triplets], left_out)

    @contextmanager
    def session(self, model: nn.Module) -> "Iterator[Callable[[Sequence[TokenTriplet]], Parts]]":
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
