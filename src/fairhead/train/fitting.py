"""Training a classifier, and asking it: `fit` keeps the epoch that does best on the validation set, by labels only.

A method enters in three places and nowhere else: what sits in the model it hands over (attached attention, a second
network), the loss of a batch, and the rows that an epoch shows. So plain training and every mitigation run the same
steps. A linear head on frozen features is trained exactly instead (`fit_linear`), in seconds on a CPU.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler

from fairhead.errors import InputError, did_you_mean
from fairhead.models.attached import FEATURES, LinearHead
from fairhead.models.load import raw_bytes
from fairhead.train import TrainingPlan
from fairhead.train.loop import Checkpoint, Loop, TrainingDiverged, joined
from fairhead.train.recorded import CompiledLayers, Recorded, recorder_for
from fairhead.train.step import (
    Batch,
    Batches,
    ClassifierLoss,
    Examples,
    Loss,
    Step,
    autocast,
    check_classes,
    check_inputs,
    in_order,
    optimizer_of,
    say_once,
)

# A name of SELECTIONS, or a function of the predicted classes [n] of the validation set: higher is better.
Selection = str | Callable[[Tensor], float]

SELECTIONS = ("accuracy", "worst_class")
# The last epoch, whatever its predictions: for first stages whose length is a setting of the method.
LAST_EPOCH = "last_epoch"
# The mean of the weights of the last third of the epochs, whatever their predictions.
AVERAGE = "average"


class Epoch(NamedTuple):
    """One line of the history."""

    number: int  # from 1
    loss: float  # mean over the epoch's batches
    validation_accuracy: float  # on all validation rows
    worst_class_accuracy: float  # the lowest accuracy within a class of the validation set
    score: float  # what the epoch is chosen by; one of the two above, unless a method chooses otherwise


@dataclass(frozen=True)
class Fit:
    """What a run of training did. The model itself holds the weights of `best`."""

    history: tuple[Epoch, ...]  # one line per epoch
    best: Epoch  # the epoch that was kept
    seconds: float  # wall time, that before a checkpoint included
    steps: int  # of the optimizer
    replayed: bool = False  # whether steps were recorded once and replayed
    resumed_at: int = 0  # steps that a checkpoint had; 0 for a training in one go


def fit(
    model: nn.Module,  # returns `.logits` of shape [B, C], and `.loss` when given `labels`
    train: Examples,  # inputs and labels to learn from
    validation: Examples,  # inputs and labels to choose the epoch by
    plan: TrainingPlan | None = None,  # how to train
    on_epoch: Callable[[Epoch], None] | None = None,  # called after each epoch, for progress
    *,
    # "accuracy" or "worst_class" on the validation set, or a function of its predicted classes
    selection: Selection = "accuracy",
    # Of a batch, from what the model returned, the labels and the row numbers; the model's own by default. The model is
    # then not given the labels.
    loss: Loss | None = None,
    sampler: Sampler[int] | None = None,  # gives the rows of each epoch; each row once, in random order, by default
    # Folder for the state of the training; one that was killed goes on from what it finds there
    checkpoints: Path | None = None,
    # What else a checkpoint must agree with, such as the settings of a method
    identity: Mapping[str, Any] | None = None,
) -> Fit:
    """Train a Hugging Face model; leave it in evaluation mode with the weights of the first epoch of highest score."""
    plan = plan or TrainingPlan()
    check_selection(selection)
    check_inputs(model, train)
    check_classes(train, "training", model)
    check_classes(validation, "validation", model)
    if len(train) < plan.batch_size:
        raise InputError(
            f"the training set has {len(train)} rows, fewer than one batch of {plan.batch_size}: "
            f"set batch_size to {len(train)} or less"
        )
    torch.manual_seed(plan.seed)
    processes = joined()
    share = (processes.process_index, processes.num_processes)
    several = share[1] > 1
    if plan.batch_size % share[1]:
        raise InputError(
            f"a batch of {plan.batch_size} rows cannot be shared evenly by {share[1]} processes: "
            "set batch_size to a multiple of their number"
        )
    checkpoint = None
    if checkpoints is not None:
        same = {**(identity or {}), "plan": asdict(plan), "data": _digest(train), "validation": _digest(validation)}
        checkpoint = Checkpoint(Path(checkpoints), same, writes=share[0] == 0)
    device = processes.device if plan.device is None else torch.device(plan.device)
    train, validation = _placed(train, device, plan), _placed(validation, device, plan)
    batches = Batches(train, plan.batch_size, device, seed=plan.seed, sampler=sampler, share=share)
    model.to(device)
    # Gradients are averaged over processes. Statistics are shared by those who keep them (see DAM).
    trained = DistributedDataParallel(model, find_unused_parameters=True) if several else model
    optimizer = optimizer_of(model, plan.learning_rate, plan.weight_decay)
    replays = plan.replay and not several
    layers = CompiledLayers(model, device) if plan.compile else None
    if layers is not None and layers.as_they_are is not None and device.type == "cuda":
        say_once(f"layers are not compiled: {layers.as_they_are}")
    step = Recorded(
        Step(
            ClassifierLoss(trained, loss, layers),
            optimizer,
            max_grad_norm=plan.max_grad_norm,
            precision=plan.precision,
            accumulate=plan.accumulate,
        ),
        recorder_for(device) if replays else None,
        model,
        loss,
    )
    probabilities = predicting(model, precision=plan.precision, replay=replays)
    loop = Loop(model, optimizer, batches, plan, checkpoint, loss)
    history = [Epoch(*found) for found in loop.history]

    def before_epoch() -> None:
        trained.train()
        step.look_again()  # `on_epoch` may have changed the model or the loss

    def after_epoch(losses: Tensor) -> None:
        if replays and device.type == "cuda" and step.as_it_is is not None:
            say_once(f"training steps are not replayed: {step.as_it_is}; they take several times longer")
        # Looked at once per epoch: asking for the value at every step would stall an accelerator.
        losses = losses.float()
        if several:  # each saw its share of the batches; all stop where one has to
            torch.distributed.all_reduce(losses)
            losses /= share[1]
        finite = losses.isfinite()
        found = probabilities(validation) if finite.all() else None
        if found is None or not found.isfinite().all():
            loop.put_back()
            best = _best(history)
            seen = "the predictions were not finite"  # the last step of the epoch has spoiled the weights
            if found is None:
                first = (loop.epoch - 1) * len(losses) + int((~finite).nonzero()[0]) + 1
                seen = f"the loss was {losses[~finite][0].item()} at step {first}"
            back = f"epoch {best.number}" if best else "its first weights"
            raise TrainingDiverged(
                f"{seen} (epoch {loop.epoch} of {plan.epochs}); the model is back at {back}. Check the inputs for NaN, "
                f"or lower the learning rate (now {plan.learning_rate:g})",
                model=None if best is None else model,
            )
        predicted, truth = found.argmax(-1), validation.labels.cpu()
        epoch = Epoch(
            loop.epoch,
            losses.mean().item(),
            validation_accuracy=accuracy(predicted, truth),
            worst_class_accuracy=worst_accuracy(predicted, truth, truth),
            score=float(loop.epoch) if selection in (LAST_EPOCH, AVERAGE) else score_of(selection, predicted, truth),
        )
        history.append(epoch)
        loop.history.append(list(epoch))
        if selection == AVERAGE:
            loop.keep_mean(loop.epoch - plan.epochs + max(1, plan.epochs // 3))
        elif _best(history) is epoch:
            loop.keep()
        if on_epoch is not None:
            on_epoch(epoch)

    loop.run(step, before_epoch=before_epoch, after_epoch=after_epoch)
    loop.put_back()
    model.eval()
    best = _best(history)
    assert best is not None  # a plan has at least one epoch
    return Fit(tuple(history), best, loop.seconds, loop.steps, step.replays, loop.resumed_at)


def _best(history: list[Epoch]) -> Epoch | None:
    """The first with the highest score."""
    return max(history, key=lambda epoch: epoch.score, default=None)


def _digest(examples: Examples) -> str:
    """What tells one set of examples from another: the labels and the inputs."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in (examples.labels, *(examples.inputs[name] for name in sorted(examples.inputs))):
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(raw_bytes(tensor).data)
    return digest.hexdigest()


def predict(
    model: nn.Module, examples: Examples, batch_size: int = 512, precision: Literal["no", "bf16"] = "no"
) -> Tensor:
    """Class probabilities, shape [n, C] on the CPU; the model is left in evaluation mode."""
    return predicting(model, batch_size, precision)(examples)


def predicting(
    model: nn.Module, batch_size: int = 512, precision: Literal["no", "bf16"] = "no", replay: bool = False
) -> Callable[[Examples], Tensor]:
    """`predict` for a model that is asked again and again while it is trained."""
    device = next(model.parameters()).device
    recorder = recorder_for(device) if replay else None
    probabilities = Recorded(partial(_probabilities, model, precision), recorder, model)

    @torch.no_grad()
    def predict_all(examples: Examples) -> Tensor:
        model.eval()
        # Rows do not depend on each other in evaluation mode: a batch made full can be replayed like the others.
        batches = in_order(examples, batch_size, device, full=probabilities.as_it_is is None)
        return torch.cat([probabilities(batch) for batch in batches])[: len(examples)].cpu()

    return predict_all


def _probabilities(model: nn.Module, precision: str, batch: Batch) -> Tensor:
    """[B, C]."""
    with autocast(batch.labels.device, precision):
        logits = model(**batch.inputs).logits
    return logits.float().softmax(-1)


def _placed(examples: Examples, device: torch.device, plan: TrainingPlan) -> Examples:
    """The examples in the device's memory where the plan or the free memory there says so."""
    keep = plan.data_on_device
    if keep is None:
        keep = device.type == "cuda" and examples.bytes < torch.cuda.mem_get_info(device)[0] / 2
    return examples.to(device) if keep else examples


def accuracy(predicted: Tensor, labels: Tensor) -> float:
    """Share of predictions [n] that equal the labels [n]."""
    return (predicted == labels).double().mean().item()


def worst_accuracy(predicted: Tensor, labels: Tensor, cells: Tensor) -> float:
    """The lowest accuracy among the cells that rows fall in: their labels, or (label, cluster) numbers, [n]."""
    _, cell = cells.unique(return_inverse=True)
    hits = torch.bincount(cell, weights=(predicted == labels).double())
    return (hits / torch.bincount(cell)).min().item()


def score_of(selection: Selection, predicted: Tensor, labels: Tensor) -> float:
    """What `selection` thinks of these predictions; higher is better."""
    if callable(selection):
        return float(selection(predicted))
    check_selection(selection)
    return accuracy(predicted, labels) if selection == "accuracy" else worst_accuracy(predicted, labels, labels)


def check_selection(selection: Selection) -> None:
    """Raise `InputError` for a name that is not known."""
    if not callable(selection) and selection not in (*SELECTIONS, LAST_EPOCH, AVERAGE):
        raise InputError(
            f"cannot select by {selection!r}; expected {' or '.join(SELECTIONS)}.{did_you_mean(selection, SELECTIONS)} "
            "Both need labels only"
        )


def worst_of_cells(labels: Tensor, cells: Tensor) -> Selection:
    """Select by the lowest accuracy of a cell of the validation set; labels and cells are [n]."""
    labels, cells = labels.cpu(), cells.cpu()
    return lambda predicted: worst_accuracy(predicted, labels, cells)


def ready_features(examples: Examples) -> Tensor:
    """Features that came as such, [n, D]."""
    return examples.inputs[FEATURES]


def fit_linear(
    head: LinearHead,
    train: Examples,
    validation: Examples,
    plan: TrainingPlan,
    weights: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Fit:
    """Solve for the head and look at the validation rows once; the penalty is the plan's weight decay."""
    check_classes(train, "training", head)
    check_classes(validation, "validation", head)
    started = time.perf_counter()
    nn.Module.to(head, plan.device or "cpu")
    rounds, loss = solve(head, train.inputs[FEATURES], train.labels, weights, offsets, plan.weight_decay)
    head.eval()
    predicted, truth = answers(head, validation.inputs[FEATURES]), validation.labels.cpu()
    right = accuracy(predicted, truth)
    epoch = Epoch(1, loss, right, worst_accuracy(predicted, truth, truth), score=right)
    return Fit((epoch,), epoch, time.perf_counter() - started, rounds)


def solve(
    head: LinearHead,  # changed in place; its weights are those of standardised features
    features: Tensor,  # [n, D]
    labels: Tensor,  # [n]
    weights: Tensor | None = None,  # of the rows, [n]; equal by default
    offsets: Tensor | None = None,  # added to the logits while training, [n, C]
    penalty: float = 0.1,  # on the squared weights
) -> tuple[int, float]:
    """Minimise Σ w·CE(f + offset, y) / Σ w + penalty / 2 · |W|², from where `head` is.

    Returns:
        Rounds of L-BFGS, and the objective.
    """
    device = head.last.weight.device
    standard, labels = head.standardised(features.to(device)), labels.to(device)
    share = torch.ones(len(labels), device=device) if weights is None else weights.to(device).float()
    share = share / share.sum()
    added = None if offsets is None else offsets.to(device).float()
    if added is not None:  # the last classes may have no row here
        added = pad(added, (0, head.last.out_features - added.shape[1]))
    if head.last.out_features == 2:
        of_two = None if added is None else added[:, 1] - added[:, 0]
        return _solve_two(head.last, standard, labels, share, of_two, penalty)

    def objective() -> Tensor:
        logits = head.last(standard)
        losses = cross_entropy(logits if added is None else logits + added, labels, reduction="none")
        found: Tensor = share @ losses + penalty / 2 * head.last.weight.square().sum()
        found.backward()
        return found.detach()

    with torch.enable_grad():
        return _minimise(list(head.last.parameters()), objective)


def _solve_two(
    last: nn.Linear, standard: Tensor, labels: Tensor, share: Tensor, added: Tensor | None, penalty: float
) -> tuple[int, float]:
    """`solve` for two classes, by the difference of their logits, whose gradient needs no graph.

    The penalty makes the weights of the classes opposite; the sum of the biases plays no part and stays.
    """
    weight, bias = (part.detach() for part in last.parameters())
    slope, level = nn.Parameter(weight[1] - weight[0]), nn.Parameter(bias[1] - bias[0])
    sign = 2.0 * labels - 1

    def objective() -> Tensor:
        margin = torch.addmv(level, standard, slope)
        margin = sign * (margin if added is None else margin + added)
        pull = share * sign * torch.sigmoid(-margin)
        slope.grad = penalty / 2 * slope - pull @ standard
        level.grad = -pull.sum()
        return share @ nn.functional.softplus(-margin) + penalty / 4 * slope.square().sum()

    with torch.no_grad():
        found = _minimise([slope, level], objective)
        halves = torch.tensor([-0.5, 0.5], device=weight.device)
        last.weight.copy_(torch.outer(halves, slope))
        last.bias.copy_(bias.mean() + halves * level)
    return found


def _minimise(parameters: list[nn.Parameter], objective: Callable[[], Tensor]) -> tuple[int, float]:
    """Rounds of L-BFGS, and the smallest value of an objective that leaves its gradient with the parameters."""
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=200,
        tolerance_grad=1e-5,
        tolerance_change=1e-9,
        history_size=20,
        line_search_fn="strong_wolfe",
    )
    last = torch.zeros(())

    def closure() -> Tensor:
        nonlocal last
        optimizer.zero_grad()
        last = objective()
        return last

    optimizer.step(closure)
    optimizer.zero_grad()
    return int(optimizer.state[parameters[0]]["n_iter"]), float(last)


@torch.no_grad()
def answers(head: LinearHead, features: Tensor) -> Tensor:
    """The likeliest class of each row, [n] on the CPU."""
    found: Tensor = head(features.to(head.last.weight.device)).logits.argmax(-1).cpu()
    return found
