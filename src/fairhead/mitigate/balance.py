"""Balance: weights or offsets that make clusters, which nobody named, independent of the label."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from fairhead.errors import InputError
from fairhead.train.kmeans import find_clusters, independent_weights


def balance_weights(
    features: Tensor, labels: Tensor, clusters: int | None = None, *, cap: float = 20.0, seed: int = 0
) -> Tensor:
    """Weights of training rows, for any training loop that can draw or weight rows, [n]; their mean is 1.

    Args:
        features: of the training rows by a frozen encoder, [n, D].
        labels: [n].
        clusters: how many; by default the number whose clusters of two halves of the rows agree best.
        cap: the largest weight, in means.
        seed: of the clusters.

    Example:
        >>> import torch
        >>> from fairhead.mitigate import balance_weights
        >>> kind = torch.tensor([0] * 90 + [1] * 10 + [0] * 10 + [1] * 90)      # goes along with the label
        >>> features = torch.randn(200, 4, generator=torch.Generator().manual_seed(0)) + 9 * kind[:, None]
        >>> weights = balance_weights(features - 4.5, torch.arange(200) // 100)
        >>> weights[0].item(), weights[95].item()
        (0.5555555555555556, 5.0)
    """
    found = find_clusters(features, clusters, seed)
    return independent_weights(labels, found.clustering.cluster, cap=cap)


def label_offsets(labels: Tensor, groups: Tensor, *, even: bool = False) -> Tensor:
    """Log p(y | g) − log p(y) for the group of each row and every class, [n, C].

    Added to the logits in training (Hong and Yang, 2021): f alone, at test, then has nothing to say about what the
    group says of the label. The shares of the classes stay with f, unless `even`: log p(y | g) as it is. A class that a
    group lacks counts as half a row.

    Example:
        >>> import torch
        >>> label_offsets(torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])).abs().max().item()
        0.0
    """
    table = torch.zeros(int(groups.max()) + 1, int(labels.max()) + 1, dtype=torch.float64)
    table.index_put_((groups, labels), torch.ones(len(labels), dtype=torch.float64), accumulate=True)
    prior = (torch.bincount(labels).double() / len(labels)).clamp(min=1e-9).log()
    table = table.clamp(min=0.5)
    given = (table / table.sum(1, keepdim=True)).log()
    return (given if even else given - prior)[groups].float()


def draw_by_weight(trainer: Any, weights: Tensor) -> None:
    """Let a Hugging Face `Trainer` draw training rows in proportion to their weights, such as `balance_weights`.

    A step has the same rows and the same gradient however many batches and processes it is split into, and a training
    that is resumed draws on.

    Args:
        trainer: before its training begins.
        weights: of the rows of `trainer.train_dataset`, [n].

    Raises:
        InputError: there are not as many weights as training rows.

    Example:
        >>> draw_by_weight(trainer, balance_weights(features, labels))  # doctest: +SKIP
    """
    rows = len(trainer.train_dataset)
    if weights.shape != (rows,):
        raise InputError(f"the Trainer has {rows} training rows and there are weights of shape {list(weights.shape)}")
    trainer._get_train_sampler = lambda *_: _Drawn(weights, trainer.args)
    # The loss is a mean over a batch. Models whose loss ignores how many rows all batches of a step have (BERT, CLIP)
    # say that they mind it, and their gradient would grow with the number of batches.
    trainer.model_accepts_loss_kwargs = False


class _Drawn(Sampler[int]):
    """As many draws as rows, the same on every process; accelerate calls `set_epoch`."""

    def __init__(self, weights: Tensor, args: Any) -> None:
        self.seed = args.seed if args.data_seed is None else args.data_seed
        self.weights, self.epoch = weights.double().cpu(), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, len(self), replacement=True, generator=generator)
        return iter(drawn.tolist())
