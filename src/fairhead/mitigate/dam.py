"""DAM, the debiasing attention mechanism without demographics (Lu et al., ICLR 2024), on the tap.

Two parts, both in one attention layer (the last), neither of which sees a group:

1. q and k are standardised over the batch and taken in absolute value before they meet, so that no group's queries
   and keys can lie far out on one side (section 3.1). Running statistics take the batch's place at evaluation.
2. the values that the first token attends to most are drawn together within a class, and apart between classes, by a
   supervised contrastive loss (section 3.2). It is added to the model's own loss while training.

Departures from the paper's released code, which has defects there: running statistics are buffers that are saved with
the model; ε guards the division; anchors without a positive are left out; the first token is not one of its own values.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fairhead.errors import InputError, UnsupportedModel
from fairhead.heads import Site, Tap, is_recomputing

if TYPE_CHECKING:
    from fairhead.mitigate.job import Job


@dataclass(frozen=True)
class DAM:
    """What DAM does and where; the defaults are the paper's, with its defects mended.

    Attributes:
        layer: the attention layer, counted from 0 or from -1 backwards.
        normalise: standardise q and k.
        absolute: take their absolute values.
        statistics: "batch" has one mean and deviation for each head, position and dimension (the paper; every batch
            must have the same number of tokens); "batch_token" shares them between positions.
        momentum: share of a new batch in the running statistics.
        eps: added to variances.
        temperature: attention logits are divided by it.
        values: how many of the first token's most attended values are aligned (the paper's t).
        include_first: whether the first token itself may be one of them.
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
    normalise: bool = True
    absolute: bool = True
    statistics: Literal["batch", "batch_token"] = "batch"
    momentum: float = 0.1
    eps: float = 1e-5
    temperature: float = 1.0
    values: int = 2
    include_first: bool = False
    alignment_weight: float = 1.0
    alignment_temperature: float = 0.07
    hidden: int = 512
    width: int = 128

    def attach(self, model: nn.Module) -> nn.Module:
        """Make `model` a DAM model, in place: see `fairhead.mitigate.attach`."""
        tap = Tap(model, layers=self.layer).open()
        (site,) = tap.sites
        parts = DAMParts(self, site)
        model.add_module("dam", parts)
        parts.to(next(model.parameters()).device)
        if self.normalise or self.absolute or self.temperature != 1.0:
            tap.transform(parts.transform)
        if self.alignment_weight:
            weights, values = tap.read("weights", tokens=0), tap.read("v")

            def add_alignment(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
                labels = kwargs.get("labels")
                if module.training and labels is not None:
                    extra = self.alignment_weight * parts.alignment(weights[site.layer], values[site.layer], labels)
                    output = _with_added_loss(output, extra)
                # They hold the graph of this batch; nobody needs it any more.
                weights.clear()
                values.clear()
                return output

            model.register_forward_hook(add_alignment, with_kwargs=True)
        return model

    def train(self, job: "Job") -> nn.Module:
        """One stage: plain training of a model that carries DAM."""
        from fairhead.mitigate.attach import attach

        model = attach(job.build_model(), self)
        job.fit("training", model)
        return model


class DAMParts(nn.Module):
    """What DAM adds to a model: running statistics of q and k, and the head of the alignment loss."""

    def __init__(self, config: DAM, site: Site) -> None:
        super().__init__()
        self.config = config
        key_heads = getattr(site.module.config, "num_key_value_heads", None) or site.n_heads
        if key_heads != site.n_heads:
            raise UnsupportedModel(
                f"{site.family} groups {site.n_heads} query heads over {key_heads} key heads; DAM needs an encoder "
                "whose query and key heads pair up (ViT, BERT, CLIP, ...)"
            )
        if config.normalise:
            self.q = RunningStandardise(site, config)
            self.k = RunningStandardise(site, config)
        if config.alignment_weight:
            self.project = nn.Sequential(
                nn.Linear(config.values * site.n_heads * site.head_dim, config.hidden, bias=False),
                nn.ReLU(),
                nn.Linear(config.hidden, config.width, bias=False),
            )

    def transform(self, q: Tensor, k: Tensor, site: Site) -> tuple[Tensor, Tensor]:
        """q, k [B, H, T, d] → m∘n(q), m∘n(k) of the paper's Theorem 1."""
        if self.config.normalise:
            q, k = self.q(q), self.k(k)
        if self.config.absolute:
            q, k = q.abs(), k.abs()
        return q / self.config.temperature, k

    def alignment(self, weights: Tensor, values: Tensor, labels: Tensor) -> Tensor:
        """The contrastive loss of the most attended values.

        Args:
            weights: the first token's attention, [B, H, T].
            values: [B, H, T, d].
            labels: classes, [B].
        """
        if labels.dim() != 1:
            raise InputError(
                f"DAM aligns one class a row; found labels of shape {list(labels.shape)}, expected [batch]"
            )
        picked = most_attended(weights, values, self.config.values, self.config.include_first)
        z = normalize(self.project(picked.flatten(1).to(next(self.project.parameters()).dtype)), dim=-1)
        return supervised_contrastive(z, labels, self.config.alignment_temperature)


class RunningStandardise(nn.Module):
    """(x − mean) / deviation over the batch while training, over what was seen then at evaluation.

    The deviation is the unbiased one, and it is the deviation (not the variance) that is averaged, as in the paper.
    A batch of one row has no deviation: it is treated as at evaluation.
    """

    def __init__(self, site: Site, config: DAM) -> None:
        super().__init__()
        self.axes = (0,) if config.statistics == "batch" else (0, 2)
        self.momentum = config.momentum
        self.eps = config.eps
        # [H, T, d], or [H, 1, d] shared by all positions. T is known only when the first batch comes.
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.zeros(site.n_heads, 1, site.head_dim))
        self.register_buffer("deviation", torch.ones(site.n_heads, 1, site.head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Standardise x [B, H, T, d]."""
        rows = x.shape[0] if self.axes == (0,) else x.shape[0] * x.shape[2]
        if not (self.training and rows > 1):
            self._check_tokens(x)
            return ((x - self.mean) / self.deviation).to(x.dtype)
        variance, mean = torch.var_mean(x.to(self.mean.dtype), self.axes, keepdim=True)
        deviation = (variance + self.eps).sqrt()
        if not is_recomputing():
            self._update(mean[0].detach(), deviation[0].detach())
        return ((x - mean) / deviation).to(x.dtype)

    @torch.no_grad()
    def _update(self, mean: Tensor, deviation: Tensor) -> None:
        if self.mean.shape[1] == 1 < mean.shape[1]:
            self.mean, self.deviation = self.mean.expand_as(mean).clone(), self.deviation.expand_as(mean).clone()
        self._check_tokens(mean)
        self.mean.lerp_(mean, self.momentum)
        self.deviation.lerp_(deviation, self.momentum)

    def _check_tokens(self, x: Tensor) -> None:
        if self.mean.shape[1] not in (1, x.shape[-2]):
            raise InputError(
                f"DAM has statistics for {self.mean.shape[1]} token positions but this batch has {x.shape[-2]}: "
                'pad to one length, or use statistics="batch_token"'
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # The number of positions is whatever the saved model had seen.
        for name in ("mean", "deviation"):
            saved = state_dict.get(prefix + name)
            if saved is not None:
                setattr(self, name, torch.empty_like(saved, device=self.mean.device))
        super()._load_from_state_dict(state_dict, prefix, *rest)


def most_attended(weights: Tensor, values: Tensor, count: int, include_first: bool = False) -> Tensor:
    """Values of the tokens that the first token attends to most, by its weights averaged over heads.

    Args:
        weights: [B, H, T]. Padding has weight 0, so it is picked only where there are too few tokens.
        values: [B, H, T, d].
        count: how many tokens.
        include_first: whether the first token may be picked.

    Returns:
        [B, count, H · d], the most attended first.

    Example:
        >>> import torch
        >>> weights = torch.tensor([[[0.6, 0.1, 0.3]]])
        >>> values = torch.arange(3.0).reshape(1, 1, 3, 1)
        >>> most_attended(weights, values, count=2).flatten().tolist()
        [2.0, 1.0]
    """
    skip = 0 if include_first else 1
    candidates = weights.shape[-1] - skip
    if count > candidates:
        raise InputError(f"DAM aligns {count} values but there are only {candidates} tokens to choose from")
    tokens = weights.mean(1)[:, skip:].topk(count).indices + skip  # [B, count]
    by_token = values.transpose(1, 2).flatten(2)  # [B, T, H · d]
    return by_token.gather(1, tokens[..., None].expand(-1, -1, by_token.shape[-1]))


def supervised_contrastive(z: Tensor, labels: Tensor, temperature: float = 0.07) -> Tensor:
    """Khosla et al.'s loss ("out" form), averaged over the rows that have another row of their class.

    Args:
        z: unit vectors, [B, width].
        labels: [B].
        temperature: τ.

    Example:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> loss = supervised_contrastive(z, torch.tensor([0, 0, 1]), temperature=1.0)
        >>> round(loss.item(), 4)   # log(1 + 1/e); the third row has no positive
        0.3133
    """
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = (z @ z.T / temperature).masked_fill(itself, -torch.inf)
    positive = (labels[:, None] == labels[None, :]) & ~itself
    log_share = (logits - logits.logsumexp(1, keepdim=True)).masked_fill(~positive, 0.0)
    positives = positive.sum(1)
    per_row = -log_share.sum(1) / positives.clamp(min=1)
    return per_row.sum() / (positives > 0).sum().clamp(min=1)


def _with_added_loss(output: Any, extra: Tensor) -> Any:
    """A model's output (a `ModelOutput`, or a tuple whose first entry is the loss) with `extra` in its loss."""
    if isinstance(output, tuple):
        return (output[0] + extra, *output[1:])
    if getattr(output, "loss", None) is None:
        raise UnsupportedModel(
            f"{type(output).__name__} has no loss although labels were given; DAM adds its alignment term to the "
            "model's own loss: use a model with a task head (ViTForImageClassification, BertForSequenceClassification)"
        )
    output.loss = output.loss + extra
    return output
