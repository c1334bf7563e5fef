"""Each head's own part in the class evidence of an image classifier: its direct effect on the logits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fairhead.errors import InputError, UnsupportedModel
from fairhead.locate.decompose import Decomposer
from fairhead.locate.features import collect
from fairhead.locate.tasks import Task


@dataclass(frozen=True)
class HeadEvidence:
    """What one pass over n rows leaves behind.

    Attributes:
        heads: each head's part in the class evidence, in logits, shape [n, layers, heads].
        total: the model's own class evidence, logit(positive) − logit(negative), shape [n].
        means: by layer, the first token's head outputs averaged within each cell and then over cells, [heads, d]:
            what a balanced mean ablation puts in a head's place.

    Example:
        >>> found = HeadEvidence(np.zeros((6, 3, 2)), np.zeros(6), {0: torch.zeros(2, 4)})
        >>> found.heads.shape                           # rows, layers, heads
        (6, 3, 2)
    """

    heads: NDArray[np.float64]
    total: NDArray[np.float64]
    means: Mapping[int, Tensor]


def classifier_task(model: nn.Module) -> Task:
    """The classes of an image classifier that reads its first token (ViT and its kin).

    Raises:
        UnsupportedModel: the classifier is not where it is expected, or reads more than that token.

    Example:
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> shape = dict(image_size=4, patch_size=2, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> model = ViTForImageClassification(ViTConfig(num_hidden_layers=1, id2label={0: "no", 1: "yes"}, **shape))
        >>> classifier_task(model).classes
        ('no', 'yes')
    """
    parts: Any = model
    classifier = getattr(parts, "classifier", None)
    width = getattr(getattr(parts, "config", None), "hidden_size", None)
    if not isinstance(classifier, nn.Linear) or getattr(getattr(parts, "base_model", None), "pooler", None) is not None:
        raise UnsupportedModel(
            f"{type(model).__name__} has no linear layer called classifier right after its first token; head evidence "
            "can be read from ViTForImageClassification and models built like it"
        )
    if classifier.in_features != width:
        raise UnsupportedModel(
            f"the classifier of {type(model).__name__} reads {classifier.in_features} features, not the first token's "
            f"{width} alone; head evidence needs a classifier on the first token"
        )
    weight = classifier.weight.detach().double().cpu().numpy()
    bias = np.zeros(len(weight)) if classifier.bias is None else classifier.bias.detach().double().cpu().numpy()
    names = tuple(str(parts.config.id2label[i]) for i in range(len(weight)))
    return Task(names, weight, bias, "the model's own classifier")


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
    task = classifier_task(model)
    decomposer = Decomposer(model.eval(), unit=False)
    device = decomposer.maps.device

    def batches(start: int) -> Iterator[Mapping[str, Tensor]]:
        for i in range(start, n, batch_size):
            yield {name: tensor[i : i + batch_size].to(device) for name, tensor in inputs.items()}

    features = collect(decomposer, batches, n)
    logits = task.logits(features.output)
    direction = task.directions[positive] - task.directions[negative]
    cell = np.unique(cells, return_inverse=True)[1]
    outputs = features.outputs()
    by_cell = np.stack([outputs[cell == c].mean(0, dtype=np.float64) for c in range(int(cell.max()) + 1)])
    means = torch.tensor(by_cell.mean(0), dtype=torch.float32, device=device)
    return HeadEvidence(
        heads=features.parts(direction[None])[..., 0],
        total=logits[:, positive] - logits[:, negative],
        means=dict(enumerate(means)),
    )
