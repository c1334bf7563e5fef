"""The terms of an output, and of one that pools all tokens (SigLIP)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Terms(NamedTuple):
    """A batch of outputs, taken apart. M counts the embedding and the MLPs."""

    heads: Tensor  # z, [B, L, H, d]; `maps[l, h] @ z[b, l, h]` is the term of a head
    others: Tensor  # terms of the embedding (first) and of each layer's MLP (then, and of a pooler's, last), [B, M, d']
    constant: Tensor  # what biases add, [B, d']
    output: Tensor  # the model's own output, [B, d']
    # [B, L]: a head's z is its own output times this. None after a pooler, which reads many tokens.
    scale: Tensor | None


class AttentionPool:
    """A pooling head: a learned query looks at all tokens; an MLP adds to what it sees.

    The pool needs every token of every layer, so a batch holds them all at once: choose smaller batches.
    """

    def __init__(self, module: nn.Module) -> None:
        whole: Any = module
        self._module = whole
        attention: nn.MultiheadAttention = whole.attention
        self._heads = attention.num_heads
        width = attention.embed_dim
        assert attention.in_proj_weight is not None
        w_q, w_k, w_v = attention.in_proj_weight.detach().float().chunk(3)
        b_q, b_k, b_v = attention.in_proj_bias.detach().float().chunk(3)
        split = (self._heads, width // self._heads)
        self._query = (whole.probe.detach().float().reshape(width) @ w_q.T + b_q).unflatten(0, split)  # [P, e]
        self._key, self._key_bias = w_k.unflatten(0, split), b_k.unflatten(0, split)  # [P, e, D]
        self._value = w_v.unflatten(0, split)
        out = attention.out_proj.weight.detach().float()
        self._out = out.unflatten(1, split)  # [D, P, e]
        self._bias = out @ b_v + attention.out_proj.bias.detach().float()  # attention sums to 1, so b_v passes whole

    def output(self, end: Tensor) -> Tensor:
        """The pooled output of tokens [B, T, D], by the module itself: [B, D]."""
        pooled: Tensor = self._module(end)
        return pooled

    def terms(
        self,
        end: Tensor,
        sources: Sequence[tuple[Any, Tensor]],
        heads: Sequence[Any],
        weights: Sequence[Tensor],
        outputs: Sequence[Tensor],
        constants: Sequence[Any],
        scale: Callable[[Any], Tensor],
        unit: bool,
    ) -> Terms:
        """Terms of the pooled output; `end` [B, T, D] is what the pool sees, `outputs` the heads', [B, T, H, d]."""
        logits = torch.einsum("pe,btpe->bpt", self._query, torch.einsum("btD,peD->btpe", end, self._key))
        logits = logits + (self._query * self._key_bias).sum(-1)[:, None]
        look = (logits * self._query.shape[-1] ** -0.5).softmax(-1)  # [B, P, T]
        pooled = self._pool(torch.einsum("bpt,btD->bpD", look, end)) + self._bias
        module = self._module
        mlp = module.mlp(module.layernorm(pooled.to(module.layernorm.weight.dtype))).float()
        output = pooled + mlp
        length = 1 / output.norm(dim=-1) if unit else torch.ones_like(output[:, 0])

        def through(path: Any, x: Tensor) -> Tensor:  # [B, T, D] -> [B, D]
            seen = torch.einsum("bpt,btD->bpD", look * scale(path.norms)[:, None], x.float())
            return self._pool(seen @ path.matrix.T) * length[:, None]

        others = [through(path, x) for path, x in sources]
        others.append(mlp * length[:, None])
        terms = []
        for path, weight, x in zip(heads, weights, outputs, strict=True):
            seen = torch.einsum("bpt,bthd->bphd", look * scale(path.norms)[:, None], x.float())
            written = torch.einsum("bphd,Dhd->bphD", seen, weight) @ path.matrix.T
            terms.append(torch.einsum("bphD,peD,ope->bho", written, self._value, self._out) * length[:, None, None])
        constant = self._bias.expand_as(output) * length[:, None]
        for vector, norms in constants:
            seen = torch.einsum("bpt,D->bpD", look * scale(norms)[:, None], vector)
            constant = constant + self._pool(seen) * length[:, None]
        return Terms(torch.stack(terms, 1), torch.stack(others, 1), constant, output * length[:, None], None)

    def _pool(self, seen: Tensor) -> Tensor:
        """What each pooling head saw [B, P, D] through its value and output matrices: [B, D]."""
        return torch.einsum("bpe,ope->bo", torch.einsum("bpD,peD->bpe", seen, self._value), self._out)
