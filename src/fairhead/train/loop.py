"""One loop for every method: AdamW, a schedule, and the epoch that does best on the validation set.

A method enters in three places and nowhere else: what sits in the model it hands over (attached attention, a second
network), the loss of a batch, and the rows that an epoch shows. So plain training and every mitigation run the same
steps. Selection uses labels only.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler

from fairhead.errors import FairheadError, InputError
from fairhead.train.examples import Batches, Examples, check_classes, check_inputs, in_order
from fairhead.train.selection import Selection, accuracy, check_selection, score_of, worst_accuracy

# The loss of a batch: (what the model returned, labels [B], rows of the training set [B]) -> a scalar.
Loss = Callable[[Any, Tensor, Tensor], Tensor]


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
        device: where to train; None takes the accelerator if there is one.
        data_on_device: keep all examples in the device's memory; None does so where they take less than half of what
            is free there.

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
    device: str | None = None
    data_on_device: bool | None = None

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise InputError(f"a plan needs {name} of at least {least}; found {getattr(self, name)}")

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
    """One line of the history.

    Attributes:
        number: from 1.
        loss: mean over the epoch's batches.
        validation_accuracy: on all validation rows.
        worst_class_accuracy: the lowest accuracy within a class of the validation set.
        score: what the epoch is chosen by; one of the two above, unless a method chooses otherwise.
    """

    number: int
    loss: float
    validation_accuracy: float
    worst_class_accuracy: float
    score: float


@dataclass(frozen=True)
class Fit:
    """What a run of training did. The model itself holds the weights of `best`."""

    history: tuple[Epoch, ...]
    best: Epoch
    seconds: float
    steps: int


def fit(
    model: nn.Module,
    train: Examples,
    validation: Examples,
    plan: TrainingPlan | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    *,
    selection: Selection = "accuracy",
    loss: Loss | None = None,
    sampler: Sampler[int] | None = None,
) -> Fit:
    """Train a Hugging Face model; leave it in evaluation mode with the weights of its best epoch.

    The best epoch is the first with the highest score; no group is involved.

    Args:
        model: returns `.logits` of shape [B, C], and `.loss` when given `labels`.
        train: inputs and labels to learn from.
        validation: inputs and labels to choose the epoch by.
        plan: how to train.
        on_epoch: called after each epoch, for progress.
        selection: "accuracy" or "worst_class" on the validation set, or a function of its predicted classes.
        loss: of a batch, from what the model returned, the labels and the row numbers; the model's own by default.
            The model is then not given the labels.
        sampler: gives the rows of each epoch; each row once, in random order, by default.

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
    check_selection(selection)
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
    # Joins the processes that a launcher started; told that there is no accelerator, it looks for those on the CPU.
    processes = PartialState(cpu=not torch.accelerator.is_available())
    if plan.batch_size % processes.num_processes:
        raise InputError(
            f"a batch of {plan.batch_size} rows cannot be shared evenly by {processes.num_processes} processes: "
            "set batch_size to a multiple of their number"
        )
    device = processes.device if plan.device is None else torch.device(plan.device)
    train, validation = _placed(train, device, plan), _placed(validation, device, plan)
    share = (processes.process_index, processes.num_processes)
    batches = Batches(train, plan.batch_size, device, seed=plan.seed, sampler=sampler, share=share)
    model.to(device)
    trained = _parallel(model) if processes.num_processes > 1 else model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = device.type == "cuda"  # one kernel instead of dozens; on a CPU it gains nothing
    optimizer = torch.optim.AdamW(parameters, lr=plan.learning_rate, weight_decay=plan.weight_decay, fused=fused)
    steps = plan.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: plan.rate(step, steps))

    history: list[Epoch] = []
    best: Epoch | None = None
    kept = _copy_weights(model)
    for number in range(1, plan.epochs + 1):
        trained.train()
        losses = []
        for inputs, labels, rows in batches:
            with _autocast(device, plan.precision):
                if loss is None:
                    value: Tensor = trained(**inputs, labels=labels).loss
                else:
                    value = loss(trained(**inputs), labels, rows)
            optimizer.zero_grad()
            value.backward()
            if plan.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(parameters, plan.max_grad_norm)
            optimizer.step()
            schedule.step()
            losses.append(value.detach())
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
        predicted, truth = predict(model, validation, precision=plan.precision).argmax(-1), validation.labels.cpu()
        epoch = Epoch(
            number,
            epoch_losses.mean().item(),
            validation_accuracy=accuracy(predicted, truth),
            worst_class_accuracy=worst_accuracy(predicted, truth, truth),
            score=score_of(selection, predicted, truth),
        )
        history.append(epoch)
        if best is None or epoch.score > best.score:
            best, kept = epoch, _copy_weights(model)
        if on_epoch is not None:
            on_epoch(epoch)
    assert best is not None  # a plan has at least one epoch
    model.load_state_dict(kept)
    model.eval()
    return Fit(tuple(history), best, time.perf_counter() - started, steps)


@torch.inference_mode()
def predict(
    model: nn.Module, examples: Examples, batch_size: int = 512, precision: Literal["no", "bf16"] = "no"
) -> Tensor:
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
    for inputs in in_order(examples, batch_size):
        with _autocast(device, precision):
            logits = model(**{name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}).logits
        found.append(logits.float().softmax(-1))
    return torch.cat(found).cpu()


def _autocast(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def _placed(examples: Examples, device: torch.device, plan: TrainingPlan) -> Examples:
    """The examples in the device's memory where the plan or the room there says so."""
    keep = plan.data_on_device
    if keep is None:
        keep = device.type == "cuda" and examples.bytes < torch.cuda.mem_get_info(device)[0] / 2
    return examples.to(device) if keep else examples


def _parallel(model: nn.Module) -> nn.Module:
    """The model with gradients averaged over processes. Statistics are shared by those who keep them (see DAM)."""
    return DistributedDataParallel(model, find_unused_parameters=True)


def _copy_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
