"""An encoder layer put after a model's own: where the released DAM works, and what last-encoder training can train."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from torch import Tensor, nn

from fairhead.errors import InputError, UnsupportedModel
from fairhead.heads import AppendedAttention, Site, find_sites
from fairhead.mitigate.training_job import ADDED_LATER, Job
from fairhead.models.attached import LinearHead
from fairhead.settings import Count
from fairhead.train.last_encoder import all_tokens

_NAME = "encoder_layer"
Norm = Literal["before", "after"]


class AttachedMethod:
    """A method that a model carries: it is attached, and the model is trained plainly with it."""

    def train(self, job: Job) -> nn.Module:
        """One stage: plain training of a model that carries the method."""
        from fairhead.models import attach

        model = attach(job.build_model(), self)
        job.fit("training", model)
        return model


@dataclass(frozen=True)
class EncoderLayer(AttachedMethod):
    """Append an encoder layer whose feed-forward part is as wide as the model (D → D → D).

    The task head reads the output of the new layer. For last-encoder training, freeze the rest.

    Attributes:
        heads: number of heads; None uses as many as the model's last layer has.
        activation: activation function of the feed-forward part.
        masked: leave padding out of attention. The released code does not.
        freeze: train only the new layer and the task head.
        norm: layer norms "before" attention and feed-forward part, or "after" the residual sums.

    Example:
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> from fairhead.mitigate import EncoderLayer, attach
        >>> config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=16)
        >>> model = attach(ViTForImageClassification(config), EncoderLayer(freeze=True))
        >>> sorted({name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad})
        ['classifier', 'encoder_layer']
    """

    heads: Count | None = None
    activation: Literal["gelu", "relu"] = "gelu"
    masked: bool = True
    freeze: bool = False
    norm: Norm = field(default="before", metadata=ADDED_LATER)

    def attach(self, model: nn.Module) -> nn.Module:
        """Append the layer, in place: see `fairhead.attach`."""
        require_encoder(model)
        last = find_sites(model)[-1]
        base = _base(model, last)
        all_tokens(model)  # the new layer reads all of them
        if self.freeze:
            base.requires_grad_(False)
        width = last.n_heads * last.head_dim
        layer = AppendedLayer(width, self.heads or last.n_heads, self.activation, self.masked, self.norm)
        model.add_module(_NAME, layer.to(next(model.parameters()).device))
        base.register_forward_hook(layer.after_base, with_kwargs=True)
        return model


def require_encoder(model: nn.Module) -> None:
    """Refuse heads without attention, and decoders: their first token, which is read, sees nothing but itself."""
    if isinstance(model, LinearHead):
        raise UnsupportedModel(
            "a linear head has no attention, which this method changes: train all of the model or its last encoder "
            "layer (--train last_encoder)"
        )
    for site in find_sites(model):
        if getattr(site.module, "is_causal", False) or getattr(site.module, "is_decoder", False):
            raise UnsupportedModel(
                f"{type(model).__name__} is no encoder: tokens of {site.family} see only those before them, and the "
                "first one, which is read, only itself. Give an encoder: ViT, DINOv2, CLIP vision, BERT, RoBERTa, "
                "DistilBERT or ModernBERT"
            )


def freeze_backbone(model: nn.Module, kept: Site) -> None:
    """Leave gradients to the encoder layer that `kept` is in and to what stands beside the encoder (the task head)."""
    for site in find_sites(model):
        if not site.name.startswith(_NAME):
            _base(model, site).requires_grad_(False)
    # ["vit", "layers", "7", "attention"]: the encoder layer is what has a number.
    path = kept.name.split(".")
    numbers = [place for place, part in enumerate(path) if part.isdigit()]
    model.get_submodule(".".join(path[: numbers[-1] + 1 if numbers else 1])).requires_grad_(True)


def _base(model: nn.Module, site: Site) -> nn.Module:
    """The encoder inside a model with a task head."""
    name = site.name.split(".")[0]
    base = model.get_submodule(name)
    if name == site.name or not hasattr(base, "config"):
        raise UnsupportedModel(
            f"{type(model).__name__} has no encoder with a task head beside it; expected a model such as "
            "ViTForImageClassification or BertForSequenceClassification"
        )
    return base


class AppendedLayer(nn.Module):
    """x [B, T, D] → x + attention(LN x) → x + feed_forward(LN x), or with each LN around the sum instead."""

    def __init__(self, width: int, heads: int, activation: str, masked: bool, norm: Norm = "before") -> None:
        super().__init__()
        if width % heads:
            raise InputError(f"a width of {width} cannot be divided between {heads} heads")
        self.masked, self.norm = masked, norm
        self.norm_before = nn.LayerNorm(width)
        self.attention = AppendedAttention(width, heads)
        self.norm_after = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, width), nn.GELU() if activation == "gelu" else nn.ReLU(), nn.Linear(width, width)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run the layer; mask [B, T] is 0 where there is padding."""
        if self.norm == "after":
            x = self.norm_before(x + self.attention(x, mask))
            return self.norm_after(x + self.feed_forward(x))
        x = x + self.attention(self.norm_before(x), mask)
        return x + self.feed_forward(self.norm_after(x))

    def after_base(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Put the layer's output in place of the base model's, and pool it again where the base pools."""
        mask = argument(base, "attention_mask", args, kwargs) if self.masked else None
        hidden = self(output[0], mask if mask is not None and mask.dim() == 2 else None)
        pooler = getattr(base, "pooler", None)
        if isinstance(output, tuple):
            return (hidden, *((pooler(hidden),) if pooler is not None else output[1:2]), *output[2:])
        output.last_hidden_state = hidden
        if pooler is not None and getattr(output, "pooler_output", None) is not None:
            output.pooler_output = pooler(hidden)
        return output


def argument(module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument of a forward call by its name, however it was passed, or None."""
    if name in kwargs or not args:
        return kwargs.get(name)
    place = _places(type(module).forward).get(name, len(args))
    return args[place] if place < len(args) else None


@cache
def _places(forward: Callable[..., Any]) -> dict[str, int]:
    """Where each argument of a class's forward stands."""
    return {name: place for place, name in enumerate(list(inspect.signature(forward).parameters)[1:])}
