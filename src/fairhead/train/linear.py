"""A linear head on frozen features, trained exactly: weighted logistic regression by L-BFGS, seconds on a CPU."""

import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fairhead.models.linear_head import FEATURES, LinearHead
from fairhead.train.examples import Examples, check_classes
from fairhead.train.fitting import Epoch, Fit, accuracy, worst_accuracy
from fairhead.train.plan import TrainingPlan

_ROUNDS, _TOLERANCE = 200, 1e-5


def fit_linear(
    head: LinearHead,
    train: Examples,
    validation: Examples,
    plan: TrainingPlan,
    weights: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Fit:
    """Solve for the head and look at the validation rows once; the penalty is the plan's weight decay."""
    check_classes(train, "training")
    check_classes(validation, "validation")
    started = time.perf_counter()
    nn.Module.to(head, plan.device or "cpu")
    rounds, loss = solve(head, train.inputs[FEATURES], train.labels, weights, offsets, plan.weight_decay)
    head.eval()
    predicted, truth = answers(head, validation.inputs[FEATURES]), validation.labels.cpu()
    right = accuracy(predicted, truth)
    epoch = Epoch(1, loss, right, worst_accuracy(predicted, truth, truth), score=right)
    return Fit((epoch,), epoch, time.perf_counter() - started, rounds)


def solve(
    head: LinearHead,
    features: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    offsets: Tensor | None = None,
    penalty: float = 0.1,
) -> tuple[int, float]:
    """Minimise Σ w·CE(f + offset, y) / Σ w + penalty / 2 · |W|², from where `head` is.

    Args:
        head: changed in place; its weights are those of standardised features.
        features: [n, D].
        labels: [n].
        weights: of the rows, [n]; equal by default.
        offsets: added to the logits while training, [n, C].
        penalty: on the squared weights.

    Returns:
        Rounds of L-BFGS, and the objective.
    """
    device = head.last.weight.device
    standard, labels = head.standardised(features.to(device)), labels.to(device)
    share = torch.ones(len(labels), device=device) if weights is None else weights.to(device).float()
    share = share / share.sum()
    added = None if offsets is None else offsets.to(device).float()
    optimizer = torch.optim.LBFGS(
        head.last.parameters(),
        max_iter=_ROUNDS,
        tolerance_grad=_TOLERANCE,
        tolerance_change=1e-9,
        history_size=20,
        line_search_fn="strong_wolfe",
    )
    last = torch.zeros(())

    def objective() -> Tensor:
        nonlocal last
        optimizer.zero_grad()
        logits = head.last(standard)
        losses = cross_entropy(logits if added is None else logits + added, labels, reduction="none")
        last = share @ losses + penalty / 2 * head.last.weight.square().sum()
        last.backward()
        return last

    with torch.enable_grad():
        optimizer.step(objective)
    optimizer.zero_grad()
    return int(optimizer.state[head.last.weight]["n_iter"]), float(last.detach())


@torch.no_grad()
def answers(head: LinearHead, features: Tensor) -> Tensor:
    """The likeliest class of each row, [n] on the CPU."""
    found: Tensor = head(features.to(head.last.weight.device)).logits.argmax(-1).cpu()
    return found
