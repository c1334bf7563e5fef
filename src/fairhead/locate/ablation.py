"""What happens when heads are taken out: a true forward pass, held against random heads of the same layers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fairhead.heads import tap
from fairhead.locate.scores import Head
from fairhead.stats import Difference


@contextmanager
def ablated(
    model: nn.Module, where: Sequence[tuple[int, int]], means: Mapping[int, Tensor], tokens: int | None = 0
) -> Iterator[None]:
    """Inside the block the model runs with the outputs of some heads replaced by their means.

    Args:
        model: any Hugging Face model.
        where: (layer, head) pairs; none leaves the model as it is.
        means: by layer, [heads, d]; take them over balanced groups (`HeadEvidence.means`).
        tokens: where to replace them: the first token alone, or None for every token.

    Example:
        >>> import numpy as np, torch
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> from fairhead.locate import ablated, head_evidence
        >>> shape = dict(image_size=4, patch_size=2, num_channels=1, hidden_size=8, intermediate_size=8)
        >>> model = ViTForImageClassification(ViTConfig(num_hidden_layers=3, num_attention_heads=2, **shape))
        >>> images = {"pixel_values": torch.randn(6, 1, 4, 4)}
        >>> found = head_evidence(model, images, np.arange(6) % 2)
        >>> with ablated(model, [(0, 1)], found.means):
        ...     logits = model(**images).logits
    """
    with tap(model) as heads:
        if where:
            heads.mean(where, means, tokens=tokens)
        yield


@dataclass(frozen=True)
class Ablation:
    """The effect of taking heads out on one metric, against layer-matched controls.

    Attributes:
        selected: the heads taken out.
        change: the metric before (a) and after (b), paired over rows, with interval and p-value.
        controls: the change of the metric when each control set is taken out instead.
        exhaustive: whether the controls are all that there are.
        accuracy: the change of accuracy, where known.
        control_accuracy: the change of accuracy under each control set, where known.

    Example:
        >>> change = Difference("DP", "sex", 0.30, 0.10, -0.20, -0.25, -0.15, n=500, p=0.001, p_adjusted=0.001)
        >>> found = Ablation((Head(2, 1),), change, controls=(0.01, -0.02, 0.0, 0.03), exhaustive=True)
        >>> found.percentile, found.p_controls          # no control set lowers DP as much
        (0.0, 0.2)
    """

    selected: tuple[Head, ...]
    change: Difference
    controls: tuple[float, ...]
    exhaustive: bool
    accuracy: Difference | None = None
    control_accuracy: tuple[float, ...] = ()

    @property
    def effect(self) -> float:
        """After minus before."""
        return float("nan") if self.change.value is None else self.change.value

    @property
    def percentile(self) -> float:
        """Share of the control sets that lower the metric at least as much: near 0 is a strong finding."""
        return float(np.mean(self._as_low))

    @property
    def p_controls(self) -> float:
        """How often a random set would lower the metric as much: (1 + k) / (1 + sets), one-sided."""
        return float((1 + self._as_low.sum()) / (1 + len(self.controls)))

    @property
    def _as_low(self) -> NDArray[np.bool_]:
        # Equal counts can differ in the last bit as fractions.
        return np.asarray(self.controls) <= self.effect + 1e-12

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, which is also the data of a report's "ablation" section."""
        change, accuracy = self.change, self.accuracy
        return {
            "metric": change.metric,
            "selected": [list(head) for head in self.selected],
            "before": change.a,
            "after": change.b,
            "effect": change.value,
            "low": change.low,
            "high": change.high,
            "p": change.p,
            "controls": list(self.controls),
            "exhaustive": self.exhaustive,
            "percentile": self.percentile,
            "p_controls": self.p_controls,
            "accuracy_effect": None
            if accuracy is None
            else {"value": accuracy.value, "low": accuracy.low, "high": accuracy.high},
            "control_accuracy": list(self.control_accuracy),
        }
