"""Where a model's residual stream lies: its blocks, the norms that it passes through, and what is read at its end.

A family is data, not code: a table says what blocks with certain parts do to the stream. An output may be made of many
tokens: by attention pooling, or by classifiers that read means of tokens. `Decomposer` checks on real inputs that what
is said here adds up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fairhead.errors import UnsupportedModel
from fairhead.models import method_of

_FINAL_NORMS = ("layernorm", "post_layernorm", "norm", "ln_f", "final_layer_norm", "final_norm", "final_layernorm")


@dataclass(frozen=True)
class Block:
    """What one block does to the stream; names are paths inside the block."""

    mlp: str = "mlp"  # the module whose output joins the stream after attention
    attention_scale: str | None = None  # a norm or LayerScale between the attention output and the stream
    mlp_scale: str | None = None  # the same for the MLP
    attention_norm: str | None = None  # in post-norm blocks, the norm of the stream once attention has joined it
    mlp_norm: str | None = None  # the same for the MLP


# A block is the first of these whose parts it has; `Decomposer` refuses one that does something else with them.
_BLOCKS = (
    Block("output.dense", attention_norm="attention.output.LayerNorm", mlp_norm="output.LayerNorm"),  # BERT and its kin
    Block("output.dense", attention_norm="attention.LayerNorm", mlp_norm="output.LayerNorm"),  # MPNet
    Block("ffn", attention_norm="sa_layer_norm", mlp_norm="output_layer_norm"),  # DistilBERT
    Block(attention_scale="layer_scale1", mlp_scale="layer_scale2"),  # DINOv2 and DINOv3
    Block(attention_scale="post_attention_layernorm", mlp_scale="post_feedforward_layernorm"),  # Gemma-2, OLMo-2
    Block(attention_scale="post_self_attn_layernorm", mlp_scale="post_mlp_layernorm"),  # GLM-4
    Block("mlp.dense_4h_to_h"),  # the MLP of BLOOM itself adds the stream to its output
    Block(),
    Block("fc2"),  # OPT
)


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm that is linear once a row's own deviation is known: x -> gain ⊙ (x − centre) / deviation + shift."""

    module: nn.Module | None  # where the deviation is read off; None for a plain LayerScale, which has none
    gain: Tensor  # [D]
    shift: Tensor | None  # [D], or None
    centred: bool  # whether the mean is taken out (LayerNorm) or not (RMSNorm)
    eps: float  # added under the root

    def through(self, matrix: Tensor) -> Tensor:
        """The linear map `matrix` [d', D] after this norm's own linear part, deviation aside: [d', D]."""
        matrix = matrix * self.gain
        return matrix - matrix.mean(1, keepdim=True) if self.centred else matrix

    def scale(self, x: Tensor) -> Tensor:
        """1 / deviation of x [B, D]: [B]."""
        x = x.float()
        square = x.var(-1, unbiased=False) if self.centred else x.square().mean(-1)
        return (square + self.eps).rsqrt()


class TermPath(NamedTuple):
    """How a term goes to the output: a matrix [d', D] (of a constant, a vector [d']), and the norms that divide it."""

    matrix: Tensor
    norms: tuple[Norm, ...]

    def before(self, norm: Norm | None) -> "TermPath":
        """The path of what goes through a norm first."""
        if norm is None:
            return self
        return TermPath(norm.through(self.matrix), self.norms if norm.module is None else (*self.norms, norm))


@dataclass(frozen=True, eq=False)
class BlockParts:
    """One block's modules, as `Block` names them."""

    module: nn.Module
    mlp: nn.Module
    attention_scale: Norm | None
    mlp_scale: Norm | None
    attention_norm: Norm | None
    mlp_norm: Norm | None


@dataclass(frozen=True, eq=False)
class Stream:
    """A model's residual stream from the first block's input to the output representation."""

    base: nn.Module  # the part of the model that is run
    blocks: tuple[BlockParts, ...]  # in order
    # After the last block; None where every block ends in a norm of its own, or where the tokens are read before it
    final_norm: Norm | None
    projection: nn.Linear | None  # a linear layer after that (CLIP), or None
    pooler: nn.Module | None  # what turns all tokens into one vector (SigLIP), or None where one token is read

    @property
    def end(self) -> nn.Module:
        """The module whose output is read: the last norm, or the last block."""
        last = self.final_norm or self.blocks[-1].mlp_norm
        return self.blocks[-1].module if last is None or last.module is None else last.module


def stream_of(model: nn.Module) -> Stream:
    """Find the residual stream of a transformers model, or of its image tower where it has two."""
    whole: Any = model
    method = type(method_of(model)).__name__
    if "encoder_layer" in model._modules:
        raise UnsupportedModel(
            f"this {type(model).__name__} carries {method} with an encoder layer appended to its own, through which "
            "heads are not followed; give one without (DAM works in the last layer by default)"
        )
    if method == "SelfDebias":
        raise UnsupportedModel(
            "this model carries SelfDebias, whose logits are not a sum over its heads: give the model that it was made "
            "from"
        )
    base: Any = getattr(whole, "vision_model", None) or getattr(whole, "base_model", whole)
    if type(base).__name__.endswith("Encoder") and not type(whole).__name__.endswith("Encoder"):
        base = whole  # the `model` of DINOv3 is the encoder inside it
    name, blocks = _blocks_of(base)
    kind = type(blocks[0]).__name__
    block = _block_of(blocks[0])
    _, *norms = astuple(block)
    parts = []
    for module in blocks:
        found = (None if path is None else norm_of(module.get_submodule(path)) for path in norms)
        parts.append(BlockParts(module, module.get_submodule(block.mlp), *found))
    final = None if block.mlp_norm else _final_norm_of(base, name, kind)
    projection, pooler = getattr(whole, "visual_projection", None), getattr(base, "head", None)
    is_pooler = type(pooler).__name__ == "SiglipMultiheadAttentionPoolingHead"
    is_linear = isinstance(projection, nn.Linear)
    return Stream(base, tuple(parts), final, projection if is_linear else None, pooler if is_pooler else None)


def _blocks_of(base: nn.Module) -> tuple[str, Sequence[nn.Module]]:
    """The list of blocks that are all alike and hold attention, and its path."""
    found = [
        (name, list(module))
        for name, module in base.named_modules()
        if isinstance(module, nn.ModuleList)
        and len({type(child) for child in module}) == 1
        and any("attention" in type(part).__name__.lower() for part in module[0].modules())
    ]
    outer = [(name, blocks) for name, blocks in found if not any(name.startswith(f"{o}.") for o, _ in found)]
    if len(outer) != 1:
        names = ", ".join(name for name, _ in outer) or "none"
        raise UnsupportedModel(
            f"{type(base).__name__} has {len(outer)} lists of attention blocks ({names}); expected one: give the "
            "encoder or the decoder alone"
        )
    return outer[0]


def _block_of(module: nn.Module) -> Block:
    names = {name for name, _ in module.named_modules()}
    for block in _BLOCKS:
        if {path for path in astuple(block) if path is not None} <= names:
            return block
    raise UnsupportedModel(
        f"{type(module).__name__} has no 'mlp', where what joins its residual stream was expected; its parts are "
        f"{', '.join(name for name, _ in module.named_children())}"
    )


def _final_norm_of(base: nn.Module, blocks: str, kind: str) -> Norm:
    path = blocks.rpartition(".")[0]
    while True:  # beside the blocks, or beside what holds them
        owner = base.get_submodule(path)
        for name in _FINAL_NORMS:
            found = getattr(owner, name, None)
            if isinstance(found, nn.Module) and not isinstance(found, nn.Identity):
                return norm_of(found)
        if not path:
            raise UnsupportedModel(
                f"{type(base).__name__} ({kind}) has no final norm where it is expected: looked for "
                f"{', '.join(_FINAL_NORMS)}; found {', '.join(name for name, _ in base.named_children())}"
            )
        path = path.rpartition(".")[0]


@torch.no_grad()
def norm_of(module: nn.Module) -> Norm:
    """The linear form of a LayerNorm, an RMSNorm or a LayerScale."""
    if isinstance(module, nn.LayerNorm):
        shape = module.normalized_shape
        gain = torch.ones(shape) if module.weight is None else module.weight
        return Norm(module, gain.float(), None if module.bias is None else module.bias.float(), True, module.eps)
    weights = [w for w in module.parameters() if w.dim() == 1]
    if len(weights) != 1:
        raise UnsupportedModel(
            f"{type(module).__name__} is neither a LayerNorm, an RMSNorm nor a LayerScale, so the terms before it "
            "cannot be followed through it"
        )
    # Some families keep the gain less one: what the module makes of a row of ones tells.
    one = torch.ones_like(weights[0])[None]
    gain = module(one)[0].float()
    if not type(module).__name__.endswith("RMSNorm"):
        ramp = torch.arange(1, 1 + one.shape[1]).to(one)[None]
        if not torch.allclose(module(ramp)[0].float(), gain * ramp[0].float(), rtol=1e-2):
            raise UnsupportedModel(
                f"{type(module).__name__} is a norm of its family's own, neither torch's LayerNorm nor an RMSNorm, so "
                "the terms before it cannot be followed through it"
            )
        return Norm(None, gain, None, False, 0.0)
    eps = float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)) or 0.0)
    return Norm(module, gain * (1 + eps) ** 0.5, None, False, eps)


class Terms(NamedTuple):
    """A batch of outputs, taken apart. M counts the embedding and the MLPs."""

    heads: Tensor  # z, [B, L, H, d]; `maps[l, h] @ z[b, l, h]` is the term of a head
    others: Tensor  # terms of the embedding (first) and of each layer's MLP (then, and of a pool's, last), [B, M, d']
    constant: Tensor  # what biases add, [B, d']
    output: Tensor  # the model's own output, [B, d']
    # [B, L]: a head's z is its own output times this. None after a pool, which reads many tokens.
    scale: Tensor | None


class Whole(Protocol):
    """A model taken apart, as its pool needs it."""

    unit: bool  # whether outputs have length 1
    heads: list[TermPath]  # from each layer's heads to the output
    weights: list[Tensor]  # W_O of each layer, by head, [D, H, d]
    constants: list[TermPath]  # what biases add


Added = tuple[TermPath, Tensor]  # what is added to the stream, and how it goes to the output
# The product of the scales of some norms, [B] or [B, T].
Scale = Callable[[tuple[Norm, ...]], Tensor]


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
        return self._module(end)

    def terms(
        self, whole: Whole, end: Tensor, sources: Sequence[Added], outputs: Sequence[Tensor], scale: Scale
    ) -> Terms:
        """Terms of the pooled output; `end` [B, T, D] is what the pool sees, `outputs` the heads', [B, T, H, d]."""
        logits = torch.einsum("pe,btpe->bpt", self._query, torch.einsum("btD,peD->btpe", end, self._key))
        logits = logits + (self._query * self._key_bias).sum(-1)[:, None]
        look = (logits * self._query.shape[-1] ** -0.5).softmax(-1)  # [B, P, T]
        pooled = self._pool(torch.einsum("bpt,btD->bpD", look, end)) + self._bias
        module = self._module
        mlp = module.mlp(module.layernorm(pooled.to(module.layernorm.weight.dtype))).float()
        output = pooled + mlp
        length = 1 / output.norm(dim=-1) if whole.unit else torch.ones_like(output[:, 0])

        def through(path: TermPath, x: Tensor) -> Tensor:  # [B, T, D] -> [B, D]
            seen = torch.einsum("bpt,btD->bpD", look * scale(path.norms)[:, None], x.float())
            return self._pool(seen @ path.matrix.T) * length[:, None]

        others = [through(path, x) for path, x in sources]
        others.append(mlp * length[:, None])
        terms = []
        for path, weight, x in zip(whole.heads, whole.weights, outputs, strict=True):
            seen = torch.einsum("bpt,bthd->bphd", look * scale(path.norms)[:, None], x.float())
            written = torch.einsum("bphd,Dhd->bphD", seen, weight) @ path.matrix.T
            terms.append(torch.einsum("bphD,peD,ope->bho", written, self._value, self._out) * length[:, None, None])
        constant = self._bias.expand_as(output) * length[:, None]
        for vector, norms in whole.constants:
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


@torch.no_grad()
def mean_of_patches(model: nn.Module, inputs: Mapping[str, Tensor]) -> Reads | None:
    """The mean of all tokens, where these are the patches of a picture and nothing else, as in I-JEPA; else None."""
    stream = stream_of(model)
    patch = getattr(stream.base.config, "patch_size", None)
    if stream.projection is not None or stream.pooler is not None or not isinstance(patch, int):
        return None
    patches = prod(side // patch for side in inputs["pixel_values"].shape[-2:])
    return Reads(((0, None),)) if stream.base(**inputs).last_hidden_state.shape[1] == patches else None


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
        self, whole: Whole, end: Tensor, sources: Sequence[Added], outputs: Sequence[Tensor], scale: Scale
    ) -> Terms:
        """Terms of the means; the arguments are those of `AttentionPool.terms`."""
        output = self.output(end)
        length = 1 / output.norm(dim=-1) if whole.unit else torch.ones_like(output[:, 0])

        def means(
            x: Tensor, norms: tuple[Norm, ...]
        ) -> list[Tensor]:  # of x [B, T, ...], times the scalar of each token
            by_token = scale(norms) * length[:, None]
            return [
                torch.einsum("bt,bt...->b...", by_token[:, span], x[:, span].float()) / by_token[:, span].shape[1]
                for span in self._spans
            ]

        z = [torch.cat(means(x, path.norms), -1) for path, x in zip(whole.heads, outputs, strict=True)]
        others = [torch.cat([mean @ path.matrix.T for mean in means(x, path.norms)], -1) for path, x in sources]
        constant, one = torch.zeros_like(output), torch.ones_like(end[..., :1])
        for vector, norms in whole.constants:
            constant += torch.cat([mean * vector for mean in means(one, norms)], -1)
        return Terms(torch.stack(z, 1), torch.stack(others, 1), constant, output * length[:, None], None)
