"""DAM, the debiasing attention mechanism without demographics (Lu et al., ICLR 2024), on the tap.

Two parts, both in one attention layer (the last), neither of which sees a group:

1. q and k are standardised over the batch and taken in absolute value before they meet, so that no group's queries
   and keys can lie far out on one side (section 3.1). Running statistics take the batch's place at evaluation.
2. the values that the first token attends to most are drawn together within a class, and apart between classes, by a
   supervised contrastive loss (section 3.2). It is added to the model's own loss while training.

Departures from the paper's released code, which has defects there: running statistics are buffers that are saved with
the model; ε guards the division; anchors without a positive are left out; the first token is not one of its own values;
padding counts nowhere. `dam_release` in the registry follows the released code (`dam_release_text` that for HateXplain,
whose layer norms come after the sums; MultiNLI's come before), but for HateXplain's second centring at evaluation and
missing unit length, the MultiNLI queue without gradients, ReLU in the appended layer of the frozen and the text form
(GELU here), eight heads in it always, and a projection of text as wide as the model.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fairhead.errors import InputError, UnsupportedModel
from fairhead.heads import Site, Tap, is_recomputing
from fairhead.mitigate.encoder_layer import (
    AttachedMethod,
    EncoderLayer,
    Norm,
    argument,
    freeze_backbone,
    require_encoder,
)
from fairhead.mitigate.training_job import ADDED_LATER
from fairhead.settings import Choice, Count, LogUniform, NotNegative, Positive, Prior, Share
from fairhead.train.last_encoder import all_tokens
from fairhead.train.loop import gathered, is_spread, summed


@dataclass(frozen=True)
class DAM(AttachedMethod):
    """Settings of DAM. The defaults are the paper's, with its defects corrected.

    Attributes:
        layer: the attention layer, counted from 0 or from -1 backwards.
        append: append a new encoder layer to the model and apply DAM there; see `EncoderLayer`.
        norm: layer norms of that new layer "before" attention and feed-forward part, or "after" them.
        freeze: train only that encoder layer (or the one that contains `layer`) and the task head (section 3.4).
        normalise: standardise q and k.
        divide: divide q and k by the standard deviation; otherwise they are only centred.
        absolute: use the absolute values of q and k.
        stats_axes: "batch" has one mean and deviation for each head, position and dimension (the paper; every batch
            must have the same number of tokens); "batch_token" shares them between positions. Padding counts in
            neither.
        running: what is averaged over batches, "std" (the paper) or "var" (batch normalisation).
        detach_stats: stop gradients through the batch statistics.
        momentum: share of a new batch in the running statistics.
        eps: added to variances.
        temperature: divides the attention logits.
        values: number of the first token's most attended values to align (the paper's t).
        pick: pick the values with the highest mean weight over heads ("mean"), or those of each head ("per_head").
        first_token: whether the first token may be picked: "out", "in", or "shifted" (out, but the value used is that
            of the token before the picked one: a bug in the released text code).
        mask_padding: leave padding out of statistics and picks (and of attention in an appended layer).
        alignment_weight: weight of the contrastive loss; 0 turns it off.
        alignment_temperature: temperature of the contrastive loss (the paper's τ).
        hidden: width of the hidden layer between the values and the contrastive loss.
        width: width of the vectors that the contrastive loss compares.

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
        if (key_heads := getattr(self.site.module.config, "num_key_value_heads", None) or heads) != heads:
            raise UnsupportedModel(
                f"{self.site.family} groups {heads} query heads over {key_heads} key heads; DAM needs an encoder "
                "whose query and key heads pair up (ViT, BERT, CLIP, ...)"
            )
        if config.normalise:
            self.q, self.k = (RunningStandardise(heads, head_dim, config) for _ in "qk")
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
            with self.side_stream.work():
                extra = self.alignment(self.weights[self.site.layer], self.values[self.site.layer], labels)
            output = _with_added_loss(output, self.config.alignment_weight * extra)
        elif model.training:
            logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
            if isinstance(logits, Tensor) and logits.requires_grad:
                logits.register_hook(_refuse_training_without_labels)
        for held in (self.weights, self.values, self.side_stream):  # they hold the graph of this batch
            held.clear()
        return output

    def alignment(self, weights: Tensor, values: Tensor, labels: Tensor) -> Tensor:
        """The contrastive loss of the values [B, H, T, d] with the largest weights [B, H, T], over all processes."""
        if labels.dim() != 1:
            raise InputError(f"DAM aligns one class a row; found labels of shape {list(labels.shape)}, not [batch]")
        config, mask = self.config, self.mask
        picked = most_attended(weights, values, config.values, config.pick, config.first_token, mask)
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


class RunningStandardise(nn.Module):
    """(x − mean) / deviation over the batch while training, over what was seen then at evaluation.

    The deviation is the unbiased one. Where a batch has fewer than two rows to count (a batch of one, a position that
    is padding in all rows but one) there is no deviation, and the running statistics serve as at evaluation.
    """

    def __init__(self, heads: int, head_dim: int, config: DAM) -> None:
        super().__init__()
        self.config, self.axes = config, (0,) if config.stats_axes == "batch" else (0, 2)
        # [H, T, d], or [H, 1, d] shared by all positions. T is known only when the first batch comes.
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.zeros(heads, 1, head_dim))
        self.register_buffer("deviation", torch.ones(heads, 1, head_dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Standardise x [B, H, T, d]; mask [B, T] is 0 where there is padding."""
        rows = x.shape[0] if self.axes == (0,) else x.shape[0] * x.shape[2]
        divide, detach = self.config.divide, self.config.detach_stats
        if self.training and mask is None and rows > 1 and divide and not detach and not is_spread():
            return self._as_batch_norm(x, rows)
        if self.training and (mask is not None or is_spread() or rows > 1):
            mean, deviation = self._of_batch(x.to(self.mean.dtype), mask)
            if not is_recomputing():
                self._update(mean[0].detach(), deviation[0].detach())
            if detach:
                mean, deviation = mean.detach(), deviation.detach()
        else:
            self._check_tokens(x)
            mean, deviation = self.mean, self.deviation
        centred = x - mean
        return (centred / deviation if divide else centred).to(x.dtype)

    def _as_batch_norm(self, x: Tensor, rows: int) -> Tensor:
        """The usual case in torch's own batch normalisation: two kernels forward and two backward.

        That divides by the biased deviation; a factor and an ε that make it the unbiased one are given along.
        """
        heads, tokens, width = x.shape[1:]
        by_token = x.transpose(1, 2)  # [B, T, H, d], as the projection has made it: nothing is copied
        channels = (tokens, heads, width) if self.axes == (0,) else (1, heads, width)
        flat = by_token.reshape(rows, math.prod(channels))
        shrink, eps = (rows - 1) / rows, self.config.eps
        factor = torch.full((flat.shape[1],), math.sqrt(shrink), dtype=self.mean.dtype, device=x.device)
        found, mean, scale = torch.native_batch_norm(flat, factor, None, None, None, True, 0.0, eps * shrink)
        if not is_recomputing():
            # [H, T or 1, d]; 32 bit always, though the compiler believes otherwise
            mean, scale = (y.detach().to(self.mean.dtype).view(channels).transpose(0, 1) for y in (mean, scale))
            self._update(mean, scale.reciprocal() / math.sqrt(shrink))
        return found.view(by_token.shape).transpose(1, 2)

    def _of_batch(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and deviation over the rows of all processes, [1, H, T or 1, d]; running ones where none is known."""
        if mask is None and not is_spread():
            variance, mean = torch.var_mean(x, self.axes, keepdim=True)
            return mean, (variance + self.config.eps).sqrt()
        if mask is None:
            mask = torch.ones(x.shape[0], x.shape[2], device=x.device)
        if mask.shape != (x.shape[0], x.shape[2]):
            raise InputError(
                f"the attention mask has shape {list(mask.shape)} but the batch has {x.shape[0]} rows of "
                f"{x.shape[2]} tokens: give one entry per token"
            )
        counted = mask[:, None, :, None].to(x.dtype)
        count = summed(counted.sum(self.axes, keepdim=True))
        mean = summed((x * counted).sum(self.axes, keepdim=True)) / count.clamp(min=1)
        squares = summed(((x - mean).square() * counted).sum(self.axes, keepdim=True))
        known = count > 1
        # Where nothing varies or is known, a variance of 1 keeps the gradient of its root finite.
        variance = torch.where(known, squares / (count - 1).clamp(min=1), torch.ones_like(squares))
        self._make_room(mean)
        self._check_tokens(mean)
        deviation = torch.where(known, (variance + self.config.eps).sqrt(), self.deviation)
        return torch.where(known, mean, self.mean), deviation

    @torch.no_grad()
    def _update(self, mean: Tensor, deviation: Tensor) -> None:
        self._make_room(mean)
        self._check_tokens(mean)
        self.mean.lerp_(mean, self.config.momentum)
        if self.config.running == "std":
            self.deviation.lerp_(deviation, self.config.momentum)
        else:
            self.deviation.square_().lerp_(deviation.square(), self.config.momentum).sqrt_()

    def _make_room(self, statistics: Tensor) -> None:
        """From the first batch on, every position has statistics of its own."""
        if self.mean.shape[1] == 1 < statistics.shape[-2]:
            shape = (-1, statistics.shape[-2], -1)
            self.mean, self.deviation = self.mean.expand(shape).clone(), self.deviation.expand(shape).clone()

    def _check_tokens(self, x: Tensor) -> None:
        if self.mean.shape[1] not in (1, x.shape[-2]):
            raise InputError(
                f"DAM has statistics for {self.mean.shape[1]} token positions but this batch has {x.shape[-2]}: "
                'pad to the length it was trained with (max_length), or train with stats_axes="batch_token"'
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("mean", "deviation"):  # of as many positions as the saved model had seen
            if (saved := state_dict.get(prefix + name)) is not None:
                setattr(self, name, torch.empty_like(saved, device=self.mean.device))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class SideStream:
    """Lets what depends on an early point of the forward pass begin there, while the pass goes on.

    In a step that is being recorded as a CUDA graph the work gets a branch of its own, and so does its backward pass.
    Elsewhere nothing changes: it is Python that takes the time there.
    """

    def __init__(self) -> None:
        self._since: Any = None

    def mark(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """What the work needs is there: a forward hook."""
        tensor = output[0] if isinstance(output, tuple) else output
        on_gpu = isinstance(tensor, Tensor) and tensor.is_cuda and not torch.compiler.is_compiling()
        if on_gpu and torch.cuda.is_current_stream_capturing():
            self._since = torch.cuda.current_stream().record_event()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Do the work; what comes after this block waits for it."""
        since, self._since = self._since, None
        if since is None or not torch.cuda.is_current_stream_capturing():
            yield
            return
        main, beside = torch.cuda.current_stream(), torch.cuda.Stream()
        beside.wait_event(since)
        with torch.cuda.stream(beside):
            yield
        main.wait_stream(beside)

    def clear(self) -> None:
        """Forget the mark of a pass that had no work to do: what it points to can be neither copied nor used."""
        self._since = None
