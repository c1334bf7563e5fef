"""One loop for every method: AdamW, a schedule, and the epoch that does best on the validation set.

A method enters in three places and nowhere else: what sits in the model it hands over (attached attention, a second
network), the loss of a batch, and the rows that an epoch shows. So plain training and every mitigation run the same
steps. Selection uses labels only.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler

from fairhead.errors import FairheadError, InputError
from fairhead.settings import Count, NotNegative, Positive, Share, WholeNumber, check_settings
from fairhead.train.compiled import CompiledLayers
from fairhead.train.examples import Batch, Batches, Examples, check_classes, check_inputs, in_order
from fairhead.train.selection import Selection, accuracy, check_selection, score_of, worst_accuracy
from fairhead.train.step import Loss, Recorded, Step, autocast, optimizer_of, recorder_for, say_once, set_rate


class TrainingDiverged(FairheadError):
    """The loss became NaN or infinite; the model is back at its last good epoch.

    Attributes:
        model: at that epoch; None where no epoch was finished.
    """

    model: nn.Module | None = None


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
        replay: record the step once and replay it, where the device can (CUDA) and the step is the same work every
            time (see `fairhead.train.step`). The results are the same; set it to False for a model that does
            something in Python at every step, such as skipping layers by chance, and for a loss that reads a variable
            of its surroundings which changes (attributes of the loss may change between epochs).
        compile: fuse what layers do between their matrix products, on a GPU (see `fairhead.train.compiled`). Some ten
            seconds, once in a process for each kind of layer; results differ by rounding, and where there is dropout,
            as those of another seed do: compiled code draws other numbers.

    Example:
        >>> from fairhead.train import TrainingPlan
        >>> TrainingPlan(epochs=3).schedule
        'cosine'
    """

    epochs: Count = 20
    batch_size: Count = 64
    learning_rate: Positive = 1e-3
    weight_decay: NotNegative = 0.05
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: Share = 0.05
    max_grad_norm: Positive | None = 1.0
    precision: Literal["no", "bf16"] = "no"
    seed: WholeNumber = 0
    device: str | None = None
    data_on_device: bool | None = None
    replay: bool = True
    compile: bool = False

    def __post_init__(self) -> None:
        check_settings(TrainingPlan, vars(self), "the plan")

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
    """What a run of training did. The model itself holds the weights of `best`.

    Attributes:
        history: one line an epoch.
        best: the epoch that was kept.
        seconds: wall time.
        steps: of the optimizer.
        replayed: whether steps were recorded once and replayed.
    """

    history: tuple[Epoch, ...]
    best: Epoch
    seconds: float
    steps: int
    replayed: bool = False


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
    optimizer = optimizer_of(model, plan.learning_rate, plan.weight_decay)
    replays = plan.replay and processes.num_processes == 1
    layers = CompiledLayers(model, device) if plan.compile else None
    if layers is not None and layers.as_they_are is not None and device.type == "cuda":
        say_once(f"layers are not compiled: {layers.as_they_are}")
    step = Recorded(
        Step(trained, optimizer, loss, max_grad_norm=plan.max_grad_norm, precision=plan.precision, layers=layers),
        recorder_for(device) if replays else None,
        model,
        loss,
    )
    predicting = Predicting(model, precision=plan.precision, replay=replays)
    steps = plan.epochs * len(batches)
    done = 0

    history: list[Epoch] = []
    best: Epoch | None = None
    kept = _copy_weights(model)
    for number in range(1, plan.epochs + 1):
        trained.train()
        step.look_again()  # `on_epoch` may have changed the model or the loss
        losses = []
        for batch in batches:
            set_rate(optimizer, plan.learning_rate * plan.rate(done, steps))
            losses.append(step(batch))
            done += 1
        if replays and device.type == "cuda" and step.as_it_is is not None:
            say_once(f"training steps are not replayed: {step.as_it_is}; they take several times longer")
        # Looked at once an epoch: asking for the value at every step would stall an accelerator.
        epoch_losses = torch.stack(losses).float()
        if processes.num_processes > 1:  # each saw its share of the batches; all stop where one has to
            torch.distributed.all_reduce(epoch_losses)
            epoch_losses /= processes.num_processes
        finite = epoch_losses.isfinite()
        if not finite.all():
            model.load_state_dict(kept)
            first = (number - 1) * len(losses) + int((~finite).nonzero()[0]) + 1
            diverged = TrainingDiverged(
                f"the loss was {epoch_losses[~finite][0].item()} at step {first} (epoch {number} of {plan.epochs}); "
                f"the model is back at {f'epoch {best.number}' if best else 'its first weights'}. Check the inputs "
                f"for NaN, or lower the learning rate (now {plan.learning_rate:g})"
            )
            diverged.model = None if best is None else model
            raise diverged
        predicted, truth = predicting(validation).argmax(-1), validation.labels.cpu()
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
    optimizer.zero_grad()  # gradients of a recorded step hold on to all of its memory
    model.load_state_dict(kept)
    model.eval()
    return Fit(tuple(history), best, time.perf_counter() - started, steps, replayed=step.replays)


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
    return Predicting(model, batch_size, precision)(examples)


class Predicting:
    """`predict` for a model that is asked again and again while it is trained; see there."""

    def __init__(
        self, model: nn.Module, batch_size: int = 512, precision: Literal["no", "bf16"] = "no", replay: bool = False
    ) -> None:
        self._model, self._batch_size = model, batch_size
        self._device = next(model.parameters()).device
        # A function apart, not a method: a recording that led back to its owner would keep its memory until some
        # later collection of garbage.
        self._probabilities = Recorded(
            partial(_probabilities, model, precision), recorder_for(self._device) if replay else None, model
        )

    @torch.no_grad()
    def __call__(self, examples: Examples) -> Tensor:
        """Class probabilities, [n, C] on the CPU."""
        self._model.eval()
        # Rows do not depend on each other in evaluation mode: a batch made full can be replayed like the others.
        full = self._probabilities.as_it_is is None
        batches = in_order(examples, self._batch_size, self._device, full=full)
        return torch.cat([self._probabilities(batch) for batch in batches])[: len(examples)].cpu()


def _probabilities(model: nn.Module, precision: str, batch: Batch) -> Tensor:
    """[B, C]."""
    with autocast(batch.labels.device, precision):
        logits = model(**batch.inputs).logits
    return logits.float().softmax(-1)


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
