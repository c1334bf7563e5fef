"""Where a model's residual stream lies: its blocks, what they add to it, and the norms that it passes through.

A family is data, not code. Blocks that add attention and then an `mlp` to a stream, and end in one final norm, need no
entry; the table below is for the others. `Decomposer` checks on real inputs that what is said here adds up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairhead.errors import UnsupportedModel
from fairhead.models import method_of

_FINAL_NORMS = ("layernorm", "post_layernorm", "norm", "ln_f", "final_layer_norm", "final_norm")
_PROJECTIONS = ("visual_projection",)


@dataclass(frozen=True)
class Block:
    """What one block does to the stream; names are paths inside the block."""

    mlp: str = "mlp"  # the module whose output joins the stream after attention
    attention_scale: str | None = None  # a norm or LayerScale between the attention output and the stream
    mlp_scale: str | None = None  # the same for the MLP
    attention_norm: str | None = None  # in post-norm blocks, the norm of the stream once attention has joined it
    mlp_norm: str | None = None  # the same for the MLP


_BERT = Block(mlp="output.dense", attention_norm="attention.output.LayerNorm", mlp_norm="output.LayerNorm")
_LAYER_SCALE = Block(attention_scale="layer_scale1", mlp_scale="layer_scale2")
_SANDWICH = Block(attention_scale="post_attention_layernorm", mlp_scale="post_feedforward_layernorm")

_BLOCKS = {
    "BertLayer": _BERT,
    "RobertaLayer": _BERT,
    "XLMRobertaLayer": _BERT,
    "ElectraLayer": _BERT,
    "CamembertLayer": _BERT,
    "DebertaV2Layer": _BERT,
    "MPNetLayer": Block(mlp="output.dense", attention_norm="attention.LayerNorm", mlp_norm="output.LayerNorm"),
    "BloomBlock": Block(mlp="mlp.dense_4h_to_h"),  # the MLP itself adds the stream to its output
    "TransformerBlock": Block(mlp="ffn", attention_norm="sa_layer_norm", mlp_norm="output_layer_norm"),  # DistilBERT
    "Dinov2Layer": _LAYER_SCALE,
    "Dinov2WithRegistersLayer": _LAYER_SCALE,
    "Gemma2DecoderLayer": _SANDWICH,
    "Gemma3DecoderLayer": _SANDWICH,
    "OPTDecoderLayer": Block(mlp="fc2"),
}


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
    name, blocks = _blocks_of(base)
    kind = type(blocks[0]).__name__
    block = _BLOCKS.get(kind, Block())
    parts = tuple(_parts_of(module, block) for module in blocks)
    final = None if block.mlp_norm else _final_norm_of(base, name, kind)
    projection = next((getattr(whole, p) for p in _PROJECTIONS if isinstance(getattr(whole, p, None), nn.Linear)), None)
    pooler = getattr(base, "head", None)
    is_pooler = type(pooler).__name__ == "SiglipMultiheadAttentionPoolingHead"
    return Stream(base, parts, final, projection, pooler if is_pooler else None)


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
            f"{type(base).__name__} has {len(outer)} lists of attention blocks ({names}); one is expected: give the "
            "encoder or the decoder alone"
        )
    return outer[0]


def _parts_of(module: nn.Module, block: Block) -> BlockParts:
    def norm(path: str | None) -> Norm | None:
        return None if path is None else norm_of(_part(module, path))

    return BlockParts(
        module,
        _part(module, block.mlp),
        norm(block.attention_scale),
        norm(block.mlp_scale),
        norm(block.attention_norm),
        norm(block.mlp_norm),
    )


def _part(module: nn.Module, path: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError:
        raise UnsupportedModel(
            f"{type(module).__name__} has no {path!r}, where what joins its residual stream was expected; its parts "
            f"are {', '.join(name for name, _ in module.named_children())}"
        ) from None


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
