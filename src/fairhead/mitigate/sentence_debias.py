"""SentenceDebias (Liang et al. 2020) for causal models: take the direction of a swapped word out of the last states.

Sentences and their counterfactuals (`language.lexicons`) are read; the principal components of the differences of their
mean-pooled last hidden states are the directions that the swap moves. The projection that takes them out stands right
before the vocabulary, so it is folded into the output layer: the result is an ordinary model.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from fairhead.data.sentence_triplets import StereoSetItem
from fairhead.errors import InputError, UnsupportedModel
from fairhead.language.lexicons import Swaps, read_swaps
from fairhead.language.packing import start_token
from fairhead.language.row_layout import context_length, final_states, quiet, refuse_other_than_causal, stack
from fairhead.settings import Count, Option


@dataclass(frozen=True)
class SentenceDebias:
    """The settings.

    Attributes:
        swaps: word lists: a folder of WinoBias or gn_glove, or a file of pairs.
        components: directions that are taken out.
        batch_size: sentences read together.

    Example:
        >>> SentenceDebias("winobias").components
        1
    """

    swaps: Annotated[str, Option(metavar="PATH")]
    components: Count = 1
    batch_size: Count = 32

    def check(self) -> None:
        """Refuse word lists that cannot be read, before a model is loaded."""
        read_swaps(self.swaps)

    def edit(
        self, model: Any, tokenizer: Any, items: Iterable[StereoSetItem], progress: Callable[[int, int], None]
    ) -> dict[str, Any]:
        """Find the directions in the sentences of the items, and take them out of the model, in place."""
        pairs = counterfactual_pairs(items, read_swaps(self.swaps))
        axes = directions(model, tokenizer, pairs, self.components, self.batch_size, progress)
        project_out(model, axes)
        return {"pairs": len(pairs), "components": len(axes)}


def counterfactual_pairs(items: Iterable[StereoSetItem], swaps: Swaps) -> list[tuple[str, str]]:
    """The coherent sentences of items that have a word to swap, each with its counterfactual; none twice."""
    texts = dict.fromkeys(text for item in items for text in (item.texts.stereotype, item.texts.anti_stereotype))
    return [(text, other) for text in texts if (other := swaps.swapped(text)) != text]


def directions(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[tuple[str, str]],
    components: int = 1,
    batch_size: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Unit vectors that the swap moves sentences along, [components, D], in float32 on the CPU.

    Args:
        model: a causal language model.
        tokenizer: its tokeniser.
        pairs: sentences and their counterfactuals; those longer than the model's context are passed over.
        components: how many.
        batch_size: sentences read together.
        progress: called with the pairs read and all of them.
    """
    refuse_other_than_causal(model)
    texts = [text for pair in pairs for text in pair]
    if len(pairs) <= components:
        raise InputError(f"{len(pairs)} sentences have a word to swap; more than {components} are needed")
    lead = start_token(tokenizer).lead
    encoded = [[*lead, *ids] for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]
    limit = context_length(model)
    fits = [k for k in range(len(pairs)) if max(len(encoded[2 * k]), len(encoded[2 * k + 1])) <= limit]
    fits.sort(key=lambda k: len(encoded[2 * k]))
    differences = []
    with quiet(model):
        for begin in range(0, len(fits), batch_size):
            batch = fits[begin : begin + batch_size]
            first, second = (_pooled(model, [encoded[2 * k + side] for k in batch]) for side in (0, 1))
            differences.append((first - second).double().cpu())
            if progress is not None:
                progress(min(begin + batch_size, len(fits)), len(fits))
    table = torch.cat(differences)
    # About 0 and not about their mean: a pair's difference has no sign of its own, and the mean is what is looked for.
    return torch.linalg.svd(torch.cat([table, -table]), full_matrices=False).Vh[:components].float()


def project_out(model: Any, axes: Tensor) -> None:
    """Fold the projection into the output layer, in place: W becomes W (1 − VᵀV). Axes are [k, D], orthonormal.

    An output layer that is the input embedding (tied) becomes a matrix of its own.

    Raises:
        UnsupportedModel: the output layer is not one matrix after the last hidden state.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=5, n_embd=4, n_layer=1, n_head=1)).eval()
        >>> project_out(model, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
        >>> model.lm_head.weight[:, 0].abs().max().item(), model.config.tie_word_embeddings
        (0.0, False)
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModel(
            f"{type(model).__name__} ends in a {type(head).__name__}; one linear layer is expected to project before"
        )
    weight = head.weight.detach()
    v = axes.to(weight.device, torch.float64)
    projected = weight.double() - (weight.double() @ v.T) @ v
    head.weight = nn.Parameter(projected.to(weight.dtype), requires_grad=head.weight.requires_grad)
    model.config.tie_word_embeddings = False
    text = model.config.get_text_config()
    text.tie_word_embeddings = False


def _pooled(model: Any, sentences: Sequence[Sequence[int]]) -> Tensor:
    """Mean over tokens of the states that the output layer reads: [N, D]."""
    device = next(model.parameters()).device
    batch = stack(sentences, device)
    states = final_states(model, {"input_ids": batch.ids, "attention_mask": batch.mask})
    return (states.float() * batch.mask[..., None]).sum(1) / batch.mask.sum(1, keepdim=True)
