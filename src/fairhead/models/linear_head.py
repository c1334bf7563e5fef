"""A linear classifier of ready features, as a Hugging Face model: saved, loaded and trained like the others."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

from fairhead.errors import InputError

FEATURES = "features"  # the name of its input


class LinearHeadConfig(PreTrainedConfig):
    """How many features there are; the classes are `id2label`, as in every classifier."""

    model_type = "fairhead_linear_head"

    def __init__(self, hidden_size: int = 1, **more: Any) -> None:
        """`hidden_size` features."""
        self.hidden_size = hidden_size
        super().__init__(**more)


class LinearHead(PreTrainedModel):
    """Logits of standardised features: what a network's last layer is, without the network.

    Mean and scale of the features are kept with the weights, so that a penalty treats all features alike; `layer` folds
    them into one linear layer, for a network that ends in it.
    """

    config_class = LinearHeadConfig
    main_input_name = FEATURES
    base_model_prefix = ""

    mean: Tensor
    scale: Tensor

    def __init__(self, config: LinearHeadConfig) -> None:
        """Zero weights, features as they are."""
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(config.hidden_size))
        self.register_buffer("scale", torch.ones(config.hidden_size))
        self.last = nn.Linear(config.hidden_size, len(config.id2label or {}))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, LinearHead):
            nn.init.zeros_(module.mean)
            nn.init.ones_(module.scale)

    @classmethod
    def of(cls, features: Tensor, classes: Sequence[str]) -> "LinearHead":
        """Zero weights; mean and scale are those of `features`, [n, D]."""
        check_features(features, "training")
        head = cls(LinearHeadConfig(features.shape[1], id2label=dict(enumerate(classes))))
        scale = features.float().std(0)
        head.mean.copy_(features.float().mean(0))
        # A column that is constant says nothing: whatever it is divided by, its weight stays at zero.
        head.scale.copy_(torch.where(scale > 1e-6, scale, 1.0))
        return head

    def standardised(self, features: Tensor) -> Tensor:
        """[n, D], each column with mean 0 and variance 1 over the rows that it was made for."""
        return (features.float() - self.mean) / self.scale

    def forward(self, features: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        """`.logits` [n, C], and `.loss` where labels are given."""
        logits: Any = self.last(self.standardised(features))
        loss: Any = None if labels is None else cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)

    def layer(self) -> tuple[Tensor, Tensor]:
        """Weight [C, D] and bias [C] of the same function of the features as they are."""
        weight = self.last.weight.detach() / self.scale
        return weight, self.last.bias.detach() - weight @ self.mean


def check_features(features: Tensor, what: str) -> None:
    """Refuse features that are not finite numbers, or all alike."""
    if features.dim() != 2:
        raise InputError(f"the {what} features have the shape {list(features.shape)}; expected [rows, columns]")
    check_finite(features, what)
    if len(features) > 1 and torch.equal(features.amin(0), features.amax(0)):
        raise InputError(f"the {what} features are the same in every row: this encoder says nothing about these inputs")


def check_finite(features: Tensor, what: str) -> None:
    """Refuse features [n, D] that are not finite numbers."""
    finite = features.isfinite()
    if not finite.all():
        column = int((~finite).any(0).nonzero()[0])
        raise InputError(
            f"column {column} of the {what} features is not finite in {int((~finite[:, column]).sum())} of "
            f"{len(features)} rows: check the encoder, or leave those rows out"
        )


AutoConfig.register(LinearHeadConfig.model_type, LinearHeadConfig)
AutoModelForImageClassification.register(LinearHeadConfig, LinearHead)
