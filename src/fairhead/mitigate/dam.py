"""DAM, the debiasing attention mechanism without demographics (Lu et al., ICLR 2024), on the tap.

Two parts, both in one attention layer (the last), neither of which sees a group:

1. q and k are standardised over the batch and taken in absolute value before they meet, so that no group's queries
   and keys can lie far out on one side (section 3.1). Running statistics take the batch's place at evaluation.
2. the values that the first token attends to most are drawn together within a class, and apart between classes, by a
   supervised contrastive loss (section 3.2). It is added to the model's own loss while training.

Departures from the paper's released code, which has defects there: running statistics are buffers that are saved with
the model; ε guards the division; anchors without a positive are left out; the first token is not one of its own values;
padding counts nowhere. `dam_release` in the registry follows the released code instead (and `dam_release_text` that for
HateXplain, whose layer norms come after the sums; MultiNLI's come before, as for pictures). Not followed even there:
HateXplain's second centring at evaluation only and its missing unit length, the MultiNLI queue without gradients, ReLU
in the appended layer of the frozen and the text form (GELU here), eight heads in it whatever the model has, and a
projection of text as wide as the model.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fairhead.errors import InputError, UnsupportedModel
from fairhead.heads import Site, Tap
from fairhead.mitigate.dam_parts import RunningStandardise, SideStream
from fairhead.mitigate.encoder_layer import (
    AttachedMethod,
    EncoderLayer,
    Norm,
    argument,
    freeze_backbone,
    require_encoder,
)
from fairhead.mitigate.priors import Choice, LogUniform, Prior
from fairhead.mitigate.training_job import ADDED_LATER
from fairhead.settings import Count, NotNegative, Positive, Share
from fairhead.train.first_token import all_tokens
from fairhead.train.launched import gathered


@dataclass(frozen=True)
class DAM(AttachedMethod):
    """What DAM does and where; the defaults are the paper's, with its defects mended.

    Attributes:
        layer: the attention layer, counted from 0 or from -1 backwards.
        append: put a new encoder layer after the model's own and work there; see `EncoderLayer`.
        norm: of that new layer, "before" attention and feed-forward part or "after" them.
        freeze: train that encoder layer (or the one that `layer` is in) and the task head only (section 3.4).
        normalise: standardise q and k.
        divide: by the deviation; without it they are only centred.
        absolute: take their absolute values.
        stats_axes: "batch" has one mean and deviation for each head, position and dimension (the paper; every batch
            must have the same number of tokens); "batch_token" shares them between positions. Padding counts in
            neither.
        running: what is averaged over batches, "std" (the paper) or "var" (batch normalisation).
        detach_stats: keep gradients out of the batch's statistics.
        momentum: share of a new batch in the running statistics.
        eps: added to variances.
        temperature: attention logits are divided by it.
        values: how many of the first token's most attended values are aligned (the paper's t).
        pick: those with the highest weight on average over heads ("mean"), or those of each head ("per_head").
        first_token: whether the first token may be one of them: "out", "in", or "shifted" (out, but the value taken
            is that of the token before the one that was picked: a slip of the released text code).
        mask_padding: leave padding out of statistics and picks (and of attention in an appended layer).
        alignment_weight: of the contrastive loss; 0 leaves the second part out.
        alignment_temperature: of the contrastive loss (the paper's τ).
        hidden: width of the hidden layer between the values and the contrastive loss.
        width: width of what the contrastive loss compares.

    Example:
        >>> from fairhead.mitigate import DAM
        >>> DAM(absolute=False).layer    # normalisation only, in the last layer
        -1
    """

    layer: int = -1
    append: bool = False
    freeze: bool = False
    normalise: bool = True
    divide: bool = True
    absolute: bool = True
    stats_axes: Literal["batch", "batch_token"] = "batch"
    running: Literal["std", "var"] = "std"
    detach_stats: bool = False
    momentum: Share = 0.1
    eps: NotNegative = 1e-5
    temperature: Positive = 1.0
    values: Count = 2
    pick: Literal["mean", "per_head"] = "mean"
    first_token: Literal["out", "in", "shifted"] = "out"
    mask_padding: bool = True
    alignment_weight: NotNegative = 1.0
    alignment_temperature: Positive = 0.07
    hidden: Count = 512
    width: Count = 128
    norm: Norm = field(default="before", metadata=ADDED_LATER)

    @property
    def priors(self) -> dict[str, Prior]:
        """What a search varies: nothing where the alignment is left out."""
        return {"values": Choice((2, 4, 6)), "alignment_weight": LogUniform(-2, 0.5)} if self.alignment_weight else {}

    def attach(self, model: nn.Module) -> nn.Module:
        """Make `model` a DAM model, in place: see `fairhead.attach`."""
        require_encoder(model)
        if self.append:
            EncoderLayer(masked=self.mask_padding, norm=self.norm).attach(model)
        elif self.stats_axes == "batch_token":
            all_tokens(model)  # the statistics of q are over all of them
        tap = Tap(model, layers=self.layer).open()
        if self.freeze:
            freeze_backbone(model, tap.sites[0])
        parts = DAMParts(self, tap)
        model.add_module("dam", parts)
        parts.to(next(model.parameters()).device)
        # Bound methods rather than closures: a copy of the model then has hooks of its own.
        if self.normalise or self.absolute or self.temperature != 1.0:
            tap.transform(parts.transform)
        model.register_forward_pre_hook(parts.before, with_kwargs=True)
        if self.alignment_weight:
            # Both terms of the loss are means over a batch. A Hugging Face Trainer would divide the task's alone by the
            # rows of all accumulated batches and processes.
            model.accepts_loss_kwargs = False  # type: ignore[assignment]
            parts.site.module.register_forward_hook(parts.side_stream.mark)
            model.register_forward_hook(parts.after, with_kwargs=True)
        return model


class DAMParts(nn.Module):
    """What DAM adds to a model: running statistics of q and k, and the head of the alignment loss."""

    def __init__(self, config: DAM, tap: Tap) -> None:
        super().__init__()
        self.config, (self.site,) = config, tap.sites
        self.mask: Tensor | None = None  # of the batch that is under way, [B, T]
        heads, head_dim = self.site.n_heads, self.site.head_dim
        key_heads = getattr(self.site.module.config, "num_key_value_heads", None) or heads
        if key_heads != heads:
            raise UnsupportedModel(
                f"{self.site.family} groups {heads} query heads over {key_heads} key heads; DAM needs an encoder "
                "whose query and key heads pair up (ViT, BERT, CLIP, ...)"
            )
        if config.normalise:
            settings = (config.stats_axes, config.momentum, config.eps, config.running, config.divide)
            self.q, self.k = (RunningStandardise(heads, head_dim, *settings, detach=config.detach_stats) for _ in "qk")
        if config.alignment_weight:
            self.side_stream = SideStream()
            self.weights, self.values = tap.read("weights", tokens=0), tap.read("v")
            self.project = nn.Sequential(
                nn.Linear(config.values * heads * head_dim, config.hidden, bias=False),
                nn.ReLU(),
                nn.Linear(config.hidden, config.width, bias=False),
            )

    @property
    def positions(self) -> int | None:
        """Token positions that there are statistics for, where each has its own."""
        known = self.q.mean.shape[1] if self.config.normalise else 1
        return known if known > 1 else None

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the padding of the batch. It stays until the next batch: checkpointing asks again on the way back."""
        mask = argument(model, "attention_mask", args, kwargs) if self.config.mask_padding else None
        self.mask = mask if mask is not None and mask.dim() == 2 else None

    def transform(self, q: Tensor, k: Tensor, site: Site) -> tuple[Tensor, Tensor]:
        """q, k [B, H, T, d] → m∘n(q), m∘n(k) of the paper's Theorem 1."""
        if self.config.normalise:
            q, k = self.q(q, self.mask), self.k(k, self.mask)
        if self.config.absolute:
            q, k = q.abs(), k.abs()
        return q / self.config.temperature if self.config.temperature != 1.0 else q, k

    def after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Add the alignment loss to the model's own."""
        labels = argument(model, "labels", args, kwargs)
        if model.training and labels is not None:
            layer = self.site.layer
            with self.side_stream.work():
                extra = self.alignment(self.weights[layer], self.values[layer], labels)
            output = _with_added_loss(output, self.config.alignment_weight * extra)
        elif model.training:
            logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
            if isinstance(logits, Tensor) and logits.requires_grad:
                logits.register_hook(_refuse_training_without_labels)
        self.weights.clear()  # all three hold the graph of this batch, which nobody needs any more
        self.values.clear()
        self.side_stream.clear()
        return output

    def alignment(self, weights: Tensor, values: Tensor, labels: Tensor) -> Tensor:
        """The contrastive loss of the values [B, H, T, d] with the largest weights [B, H, T], over all processes."""
        if labels.dim() != 1:
            raise InputError(f"DAM aligns one class a row; found labels of shape {list(labels.shape)}, not [batch]")
        config = self.config
        picked = most_attended(weights, values, config.values, config.pick, config.first_token, self.mask)
        z = normalize(self.project(picked.flatten(1).to(next(self.project.parameters()).dtype)), dim=-1)
        return supervised_contrastive(gathered(z), gathered(labels), config.alignment_temperature)


def most_attended(
    weights: Tensor,
    values: Tensor,
    count: int,
    pick: Literal["mean", "per_head"] = "mean",
    first_token: Literal["out", "in", "shifted"] = "out",
    mask: Tensor | None = None,
) -> Tensor:
    """Values [B, H, T, d] of the tokens with the largest weights [B, H, T], the largest first: [B, count, H · d].

    `DAM` says what may be picked. Padding (mask [B, T] is 0) is not: zeros stand in where there are too few tokens.
    """
    skip = 0 if first_token == "in" else 1
    if count > (candidates := weights.shape[-1] - skip):
        raise InputError(f"DAM aligns {count} values but there are only {candidates} tokens to choose from")
    if pick == "mean":
        weights = weights.mean(1, keepdim=True)
    if mask is not None:
        weights = weights.masked_fill(mask[:, None] == 0, -1.0)
    top = weights[..., skip:].topk(count)
    tokens = top.indices if first_token == "shifted" else top.indices + skip  # [B, H or 1, count]
    picked = values.gather(2, tokens[..., None].expand(-1, values.shape[1], -1, values.shape[-1]))
    if mask is not None:
        picked = picked.masked_fill(top.values[..., None] < 0, 0.0)
    return picked.transpose(1, 2).flatten(2)


def supervised_contrastive(z: Tensor, labels: Tensor, temperature: float = 0.07) -> Tensor:
    """Khosla et al.'s loss ("out" form) of unit vectors [B, width], over the rows that have another of their class."""
    positive = (labels[:, None] == labels[None, :]).fill_diagonal_(False)
    positives = positive.sum(1, keepdim=True)
    share = positive / positives.clamp(min=1)  # of the row's positives, each alike
    # In 32 bit whatever the rest of the model runs in: divided by τ, the rounding of 16 bit is no longer small.
    with torch.autocast(z.device.type, enabled=False):
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        logits = (z / temperature @ z.T).fill_diagonal_(-1e9)  # itself: no share of the others' sum
    return -(share * logits.log_softmax(1)).sum() / (positives > 0).sum().clamp(min=1)


def _with_added_loss(output: Any, extra: Tensor) -> Any:
    """A model's output (a `ModelOutput`, or a tuple whose first entry is the loss) with `extra` in its loss."""
    if isinstance(output, tuple):
        return (output[0] + extra, *output[1:])
    if getattr(output, "loss", None) is None:
        raise UnsupportedModel(
            f"{type(output).__name__} has no loss although labels were given, and DAM adds its own term to it: give a "
            "model with a task head, such as ViTForImageClassification or BertForSequenceClassification"
        )
    output.loss = output.loss + extra
    return output


def _refuse_training_without_labels(gradient: Tensor) -> None:
    raise InputError(
        "DAM adds its alignment to the model's own loss, and there is none without labels: call the model with "
        "labels=... (a Trainer with label_smoothing_factor or compute_loss_func does not), or set "
        "DAM(alignment_weight=0)"
    )
