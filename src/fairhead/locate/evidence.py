"""Each head's own part in the class evidence: its direct effect on the logits.

The first token's last residual stream is a sum of terms, one of them a head's contribution c. The final LayerNorm is
linear once the row's own deviation σ is known, so the head's part in logit(positive) − logit(negative) = w · LN(x) is
(c · u) / σ with u = γ ⊙ w, centred. All that has to be kept of a head is that one number a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fairhead.errors import InputError, UnsupportedModel
from fairhead.heads import output_weight, tap


@dataclass(frozen=True)
class HeadEvidence:
    """What one pass over n rows leaves behind.

    Attributes:
        heads: each head's part in the class evidence, in logits, shape [n, layers, heads].
        total: the model's own class evidence, logit(positive) − logit(negative), shape [n].
        means: by layer, the first token's head outputs averaged within each cell and then over cells, [heads, d]:
            what a balanced mean ablation puts in a head's place.
    """

    heads: NDArray[np.float64]
    total: NDArray[np.float64]
    means: Mapping[int, Tensor]


@dataclass(frozen=True)
class Readout:
    """How the first token's residual stream becomes logits: a final LayerNorm, then a linear classifier."""

    norm: nn.LayerNorm
    classifier: nn.Linear

    def direction(self, positive: int, negative: int) -> Tensor:
        """The residual-stream direction u of the class evidence, shape [model width]."""
        w = self.classifier.weight[positive] - self.classifier.weight[negative]
        u = self.norm.weight * w
        return u - u.mean()

    def deviation(self, x: Tensor) -> Tensor:
        """The LayerNorm's own deviation of x [B, D], shape [B]."""
        return (x.var(-1, unbiased=False) + self.norm.eps).sqrt()


def readout_of(model: nn.Module) -> Readout:
    """The final norm and classifier of an image classifier that reads its first token (ViT and its kin).

    Raises:
        UnsupportedModel: they are not where they are expected.
    """
    parts: Any = model
    base = getattr(parts, "base_model", parts)
    norm, classifier = getattr(base, "layernorm", None), getattr(parts, "classifier", None)
    if not isinstance(norm, nn.LayerNorm) or not isinstance(classifier, nn.Linear):
        raise UnsupportedModel(
            f"{type(model).__name__} has no final LayerNorm called layernorm with a linear layer called classifier "
            "after it; head evidence can be read from ViTForImageClassification and models built like it"
        )
    if classifier.in_features != norm.weight.shape[0]:
        raise UnsupportedModel(
            f"the classifier of {type(model).__name__} reads {classifier.in_features} features, not the first token's "
            f"{norm.weight.shape[0]} alone; head evidence needs a classifier on the first token"
        )
    return Readout(norm, classifier)


@torch.inference_mode()
def head_evidence(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    cells: NDArray[np.integer],
    *,
    positive: int = 1,
    negative: int = 0,
    batch_size: int = 512,
) -> HeadEvidence:
    """Read every head's direct effect on the class evidence, and its balanced mean output, in one pass.

    Args:
        model: an image classifier that reads its first token.
        inputs: the model's arguments by name, each [n, ...].
        cells: the cell of each row, [n]: rows of one group and one label share a number. Each cell counts the same
            in the means, so that the larger group does not set them.
        positive: the class that the evidence is for.
        negative: the class that it is against.
        batch_size: rows at a time.

    Example:
        >>> import numpy as np, torch
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> shape = dict(image_size=4, patch_size=2, num_channels=1, hidden_size=8, intermediate_size=8)
        >>> model = ViTForImageClassification(ViTConfig(num_hidden_layers=3, num_attention_heads=2, **shape))
        >>> found = head_evidence(model, {"pixel_values": torch.randn(6, 1, 4, 4)}, np.arange(6) % 2)
        >>> found.heads.shape    # rows, layers, heads
        (6, 3, 2)
    """
    n = len(cells)
    for name, tensor in inputs.items():
        if len(tensor) != n:
            raise InputError(f"input {name!r} has {len(tensor)} rows but there are {n} cells: give one a row")
    readout = readout_of(model)
    model.eval()
    cell = torch.unique(torch.as_tensor(cells), return_inverse=True)[1]
    n_cells = int(cell.max()) + 1
    device = readout.norm.weight.device
    direction = readout.direction(positive, negative)
    streams: list[Tensor] = []
    handle = readout.norm.register_forward_pre_hook(lambda module, args: streams.append(args[0][:, 0]))
    evidence, totals = [], []
    try:
        with tap(model) as heads:
            output = heads.read("output", tokens=0)
            if len({(site.n_heads, site.head_dim) for site in heads.sites}) > 1:
                raise UnsupportedModel(f"{type(model).__name__} has layers with different numbers of heads")
            through_output = torch.stack(
                [torch.einsum("ohd,o->hd", output_weight(site), direction) for site in heads.sites]
            )  # [L, H, d]
            sums = torch.zeros(n_cells, *through_output.shape, device=device)
            for start in range(0, n, batch_size):
                rows = slice(start, start + batch_size)
                streams.clear()
                logits = model(**{name: tensor[rows].to(device) for name, tensor in inputs.items()}).logits
                seen = output.stack().transpose(0, 1)  # [B, L, H, d]
                sums.index_add_(0, cell[rows].to(device), seen)
                scale = readout.deviation(streams[0])[:, None, None]
                evidence.append((torch.einsum("blhd,lhd->blh", seen, through_output) / scale).cpu())
                totals.append((logits[:, positive] - logits[:, negative]).cpu())
            layers = [site.layer for site in heads.sites]
    finally:
        handle.remove()
    counts = torch.bincount(cell, minlength=n_cells).to(sums)
    means = (sums / counts[:, None, None, None]).mean(0)
    return HeadEvidence(
        heads=torch.cat(evidence).double().numpy(),
        total=torch.cat(totals).double().numpy(),
        means=dict(zip(layers, means, strict=True)),
    )
