"""How much memory a causal language model needs at its peak, scored or trained, by its configuration alone."""

from dataclasses import dataclass
from typing import Any

import torch

from fairhead.language.row_layout import BATCH_TOKENS, LOGITS_MOST, text_config

_FLOAT, _HALF = 4, 2  # bytes per number


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak."""

    weights: int  # those of the model, and LoRA's
    training: int  # gradients, AdamW's two moments and the copy of the last good weights; 0 where nothing is trained
    layers: int  # what the layers hold of a batch
    logits: int  # what the output layer makes of it

    @property
    def total(self) -> int:
        """All of it; CUDA itself takes about another half gigabyte."""
        return self.weights + self.training + self.layers + self.logits

    def __str__(self) -> str:
        parts = [f"{name} {value / 1e9:.1f}" for name, value in vars(self).items() if value]
        return f"{self.total / 1e9:.1f} GB ({', '.join(parts)})"


def _sizes(config: Any) -> tuple[int, int, int]:
    """Of a configuration: weights, width of the model, and width of its MLP."""
    from transformers import AutoModelForCausalLM

    text = text_config(config)
    with torch.device("meta"):  # no weight is made
        weights = int(AutoModelForCausalLM.from_config(config).num_parameters())
    # What GPT-2's family leaves out is four times the model's width.
    mlp = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
    return weights, text.hidden_size, int(mlp)


def scoring_memory(config: Any, batch_tokens: int = BATCH_TOKENS["cuda"], bits: int = 16) -> Memory:
    """Of scoring in bfloat16 on a GPU, weights in 16, 8 or 4 bits: a layer at a time holds 2·D + 3·F numbers per token.

    D is the width, F that of the MLP. The logits of a batch have at most 2^30 entries.

    Example:
        >>> from transformers import LlamaConfig
        >>> sizes = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        >>> llama = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, **sizes)  # 8B
        >>> print(scoring_memory(llama))
        19.9 GB (weights 16.1, layers 1.7, logits 2.1)
    """
    weights, width, mlp = _sizes(config)
    logits = min(batch_tokens * text_config(config).vocab_size, LOGITS_MOST) * _HALF
    return Memory(weights * bits // 8, 0, (2 * width + 3 * mlp) * batch_tokens * _HALF, logits)


def training_memory(
    config: Any, tokens: int = 2048, *, lora: int | None = None, bf16: bool = False, checkpointing: bool = False
) -> Memory:
    """Of fine-tuning on batches (or pieces of them) of so many tokens, all of which reach the vocabulary.

    All weights are trained in 32 bit: 4 bytes each, and 16 more for the gradient, two moments and the last good copy.
    With LoRA that is so for its matrices alone, and with bf16 the others take 2 bytes. For the gradient a layer holds
    12·D + 4·F numbers per token, in 2 bytes with bf16; with checkpointing each keeps its input alone, and one at a time
    the rest. The logits are there three times: as they are, in 32 bit, and as their gradient.
    """
    (weights, width, mlp), text = _sizes(config), text_config(config)
    depth, number = text.num_hidden_layers, _HALF if bf16 else _FLOAT
    own = weights if lora is None else 2 * depth * lora * 2 * width  # peft puts it on the query and value projections
    held = weights * (_HALF if bf16 and lora is not None else _FLOAT) + (0 if lora is None else own * _FLOAT)
    layer = (12 * width + 4 * mlp) * tokens * number
    layers = layer + depth * width * tokens * number if checkpointing else depth * layer
    return Memory(held, 4 * own * _FLOAT, layers, tokens * text.vocab_size * (number + 2 * _FLOAT))
