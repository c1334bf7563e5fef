"""Outputs that are made of many tokens: attention pooling, and classifiers that read means of tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairhead.errors import UnsupportedModel
from fairhead.locate.streams import stream_of

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_LOW_PRECISION = 0.02


class Terms(NamedTuple):
    """A batch of outputs, taken apart. M counts the embedding and the MLPs."""

    heads: Tensor  # z, [B, L, H, d]; `maps[l, h] @ z[b, l, h]` is the term of a head
    others: Tensor  # terms of the embedding (first) and of each layer's MLP (then, and of a pool's, last), [B, M, d']
    constant: Tensor  # what biases add, [B, d']
    output: Tensor  # the model's own output, [B, d']
    # [B, L]: a head's z is its own output times this. None after a pool, which reads many tokens.
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

    def maps(self, maps: Tensor) -> Tensor:
        """A pooled head has no few dimensions of its own: its term is kept as it is, and all maps are one."""
        layers, heads, width, _ = maps.shape
        return torch.eye(width).to(maps).expand(layers, heads, width, width)

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


class Reads(NamedTuple):
    """What a classifier reads: means over spans of tokens, side by side."""

    spans: tuple[tuple[int, int | None], ...]  # from one token to before another, or (None) to the last
    normed: bool = True  # whether the tokens went through the final norm


class MeanPool:
    """Means over spans of tokens, side by side: the output is as wide as K tokens, and a head's z as K of its outputs.

    A mean is linear in what a head writes at each token, so z is the mean of its outputs, each times the scalar of its
    own token. Like `AttentionPool` it needs every token of every layer.
    """

    def __init__(self, reads: Reads) -> None:
        self._spans = [slice(start, stop) for start, stop in reads.spans]

    def maps(self, maps: Tensor) -> Tensor:
        """From z to a head's term, by those of one token, [L, H, D, d]: [L, H, K D, K d]."""
        layers, heads, width, d = maps.shape
        each = len(self._spans)
        found = maps.new_zeros(layers, heads, each, width, each, d)
        for number in range(each):
            found[:, :, number, :, number] = maps
        return found.reshape(layers, heads, each * width, each * d)

    def output(self, end: Tensor) -> Tensor:
        """The means of tokens [B, T, D]: [B, K D]."""
        return torch.cat([end[:, span].mean(1) for span in self._spans], -1)

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
        """Terms of the means; the arguments are those of `AttentionPool.terms`."""
        output = self.output(end)
        length = 1 / output.norm(dim=-1) if unit else torch.ones_like(output[:, 0])

        def means(x: Tensor, norms: Any) -> list[Tensor]:  # of x [B, T, ...], times the scalar of each token
            by_token = scale(norms) * length[:, None]
            return [
                torch.einsum("bt,bt...->b...", by_token[:, span], x[:, span].float()) / by_token[:, span].shape[1]
                for span in self._spans
            ]

        z = [torch.cat(means(x, path.norms), -1) for path, x in zip(heads, outputs, strict=True)]
        others = [torch.cat([mean @ path.matrix.T for mean in means(x, path.norms)], -1) for path, x in sources]
        constant, one = torch.zeros_like(output), torch.ones_like(end[..., :1])
        for vector, norms in constants:
            constant += torch.cat([mean * vector for mean in means(one, norms)], -1)
        return Terms(torch.stack(z, 1), torch.stack(others, 1), constant, output * length[:, None], None)


@torch.no_grad()
def reads_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> Reads | None:
    """What the linear layer `classifier` reads of a model's tokens, seen on a batch; None for the first token alone.

    Known are the first token, the mean of all tokens or of those after the first few, and several of these side by
    side, each before or after the final norm. No family is named: whatever reads so can be taken apart.
    """
    stream, seen = stream_of(model), dict[str, Tensor]()

    def keep(key: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            x = args[0] if key == "read" else output[0] if isinstance(output, tuple) else output
            seen[key] = x

        return hook

    classifier = model.get_submodule("classifier")
    watched = {"read": classifier, "normed": stream.end, "plain": stream.blocks[-1].module}
    handles = [module.register_forward_hook(keep(key)) for key, module in watched.items()]
    try:
        model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    for key in ("normed", "plain"):
        spans = _spans(seen[key].unsqueeze(1) if seen[key].dim() == 2 else seen[key], seen["read"])
        if spans is not None:
            first = key == "normed" and spans == ((0, 1),)
            return None if first else Reads(spans, key == "normed")
    raise UnsupportedModel(
        f"the classifier of {type(model).__name__} reads {seen['read'].shape[-1]} features that are neither its first "
        "token nor a mean of its tokens, nor these side by side: it does something more, which heads cannot be "
        "followed through"
    )


def _spans(tokens: Tensor, read: Tensor) -> tuple[tuple[int, int | None], ...] | None:
    """The spans of tokens [B, T, D] whose means, side by side, are what was read, [B, K D]; None if there are none."""
    width, tolerance = tokens.shape[-1], _TOLERANCE.get(tokens.dtype, _LOW_PRECISION)
    if read.dim() != 2 or read.shape[-1] % width:
        return None
    tokens, found = tokens.double(), list[tuple[int, int | None]]()
    from_here_on = tokens.flip(1).cumsum(1).flip(1) / torch.arange(tokens.shape[1], 0, -1).to(tokens)[:, None]
    known = torch.cat([tokens[:, :1], from_here_on], 1)  # the first, and the mean of those from each one on
    for part in read.double().split(width, -1):
        miss = (known - part[:, None]).abs().amax((0, 2)) / part.abs().max()
        best = int(miss.argmin())
        if not miss[best] <= tolerance:
            return None
        found.append((0, 1) if best == 0 else (best - 1, None))
    return tuple(found)
