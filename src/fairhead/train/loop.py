"""One loop for every method: AdamW, a schedule, and the epoch with the best validation accuracy.

What a method adds sits in the model it is given (see `fairhead.mitigate`), so plain training and every mitigation
run the same steps on the same batches. Selection uses labels only.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fairhead.errors import FairheadError, InputError
from fairhead.train.examples import Examples, check_classes, check_inputs


class TrainingDiverged(FairheadError):
    """The loss became NaN or infinite; the model is back at its last good epoch."""


@dataclass(frozen=True)
class TrainingPlan:
    """How to train; the same plan and seed give the same model on the same machine.

    Attributes:
        epochs: passes over the training set.
        batch_size: rows a step; the last, smaller batch of an epoch is left out, as batch statistics need full ones.
        learning_rate: AdamW's, at its highest.
        weight_decay: AdamW's.
        schedule: "cosine" down to zero, or "constant"; both after a linear warm-up.
        warmup: share of all steps spent on the warm-up.
        max_grad_norm: gradients are clipped to this norm; None leaves them.
        precision: "no" (32 bit) or "bf16" (autocast).
        seed: of the order of the batches and of everything random inside the model.

    Example:
        >>> from fairhead.train import TrainingPlan
        >>> TrainingPlan(epochs=3).schedule
        'cosine'
    """

    epochs: int = 20
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: float = 0.05
    max_grad_norm: float | None = 1.0
    precision: Literal["no", "bf16"] = "no"
    seed: int = 0

    def rate(self, step: int, steps: int) -> float:
        """The share of `learning_rate` that step `step` of `steps` uses.

        Example:
            >>> plan = TrainingPlan(warmup=0.1)
            >>> plan.rate(0, 100), plan.rate(9, 100), round(plan.rate(100, 100), 6)
            (0.1, 1.0, 0.0)
        """
        warm = max(1, round(self.warmup * steps))
        if step < warm:
            return (step + 1) / warm
        if self.schedule == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


class Epoch(NamedTuple):
    """One line of the history: number from 1, mean training loss, accuracy on the validation set."""

    number: int
    loss: float
    validation_accuracy: float


@dataclass(frozen=True)
class Fit:
    """What a run of training did. The model itself holds the weights of `best`."""

    history: tuple[Epoch, ...]
    best: Epoch
    seconds: float


def fit(
    model: nn.Module,
    train: Examples,
    validation: Examples,
    plan: TrainingPlan | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> Fit:
    """Train a Hugging Face model on its own loss; leave it with the weights of its best epoch.

    The best epoch is the first with the highest validation accuracy; no group is involved.

    Args:
        model: returns `.loss` when given `labels`, and `.logits` of shape [B, C].
        train: inputs and labels to learn from.
        validation: inputs and labels to choose the epoch by.
        plan: how to train.
        on_epoch: called after each epoch, for progress.

    Returns:
        The history and the chosen epoch.

    Raises:
        InputError: one class only, fewer rows than a batch, or an input that the model does not take.
        TrainingDiverged: the loss was not finite.

    Example:
        >>> import torch
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> from fairhead.train import Examples, TrainingPlan, fit
        >>> shape = dict(image_size=4, patch_size=2, num_channels=1, hidden_size=8, intermediate_size=8)
        >>> model = ViTForImageClassification(ViTConfig(num_hidden_layers=1, num_attention_heads=2, **shape))
        >>> data = Examples({"pixel_values": torch.randn(8, 1, 4, 4)}, torch.arange(8) % 2)
        >>> len(fit(model, data, data, TrainingPlan(epochs=2, batch_size=4)).history)
        2
    """
    plan = plan or TrainingPlan()
    check_inputs(model, train)
    check_classes(train, "training")
    check_classes(validation, "validation")
    if len(train) < plan.batch_size:
        raise InputError(
            f"the training set has {len(train)} rows, fewer than one batch of {plan.batch_size}: "
            f"set batch_size to {len(train)} or less"
        )
    started = time.perf_counter()
    torch.manual_seed(plan.seed)
    accelerator = Accelerator(mixed_precision=plan.precision)
    batches: Any = _loader(train, plan.batch_size, seed=plan.seed)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay)
    trained, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    steps = plan.epochs * len(batches)
    # Not prepared: it is advanced once an optimizer step, which is what `rate` counts.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: plan.rate(step, steps))

    history: list[Epoch] = []
    best: Epoch | None = None
    kept = _copy_weights(model)
    for number in range(1, plan.epochs + 1):
        trained.train()
        losses = []
        for batch in batches:
            loss = trained(**batch).loss
            optimizer.zero_grad()
            accelerator.backward(loss)
            if plan.max_grad_norm is not None:
                accelerator.clip_grad_norm_(trained.parameters(), plan.max_grad_norm)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        # Looked at once an epoch: asking for the value at every step would stall an accelerator.
        epoch_losses = torch.stack(losses).float()
        finite = epoch_losses.isfinite()
        if not finite.all():
            model.load_state_dict(kept)
            step = (number - 1) * len(losses) + int((~finite).nonzero()[0]) + 1
            raise TrainingDiverged(
                f"the loss was {epoch_losses[~finite][0].item()} at step {step} (epoch {number} of {plan.epochs}); "
                f"the model is back at {f'epoch {best.number}' if best else 'its first weights'}. Check the inputs "
                f"for NaN, or lower the learning rate (now {plan.learning_rate:g})"
            )
        hits = predict(trained, validation).argmax(-1) == validation.labels
        epoch = Epoch(number, epoch_losses.mean().item(), hits.double().mean().item())
        history.append(epoch)
        if best is None or epoch.validation_accuracy > best.validation_accuracy:
            best, kept = epoch, _copy_weights(model)
        if on_epoch is not None:
            on_epoch(epoch)
    if best is None:
        raise InputError(f"a plan needs at least one epoch; found epochs={plan.epochs}")
    model.load_state_dict(kept)
    model.eval()
    return Fit(tuple(history), best, time.perf_counter() - started)


@torch.inference_mode()
def predict(model: nn.Module, examples: Examples, batch_size: int = 512) -> Tensor:
    """Class probabilities, shape [n, C] on the CPU; the model is left in evaluation mode.

    Example:
        >>> import torch
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> from fairhead.train import Examples, predict
        >>> shape = dict(image_size=4, patch_size=2, num_channels=1, hidden_size=8, intermediate_size=8)
        >>> model = ViTForImageClassification(ViTConfig(num_hidden_layers=1, num_attention_heads=2, **shape))
        >>> data = Examples({"pixel_values": torch.randn(5, 1, 4, 4)}, torch.arange(5) % 2)
        >>> predict(model, data).shape
        torch.Size([5, 2])
    """
    model.eval()
    device = next(model.parameters()).device
    found = []
    for batch in _loader(examples, batch_size):
        inputs = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
        found.append(model(**inputs).logits.float().softmax(-1).cpu())
    return torch.cat(found)


def _loader(examples: Examples, batch_size: int, seed: int | None = None) -> DataLoader:
    """Batches in order, or (with a seed) shuffled and full."""
    order = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(
        examples,
        batch_size,
        shuffle=order is not None,
        drop_last=order is not None,
        generator=order,
        collate_fn=_already_a_batch,
    )


def _already_a_batch(batch: Any) -> Any:
    return batch


def _copy_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
