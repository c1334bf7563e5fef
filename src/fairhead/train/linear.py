"""A linear head on frozen features, trained exactly: weighted logistic regression by L-BFGS, seconds on a CPU."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from fairhead.models.linear_head import FEATURES, LinearHead
from fairhead.train.examples import Examples, check_classes
from fairhead.train.fitting import Epoch, Fit, accuracy, worst_accuracy
from fairhead.train.plan import TrainingPlan

_ROUNDS, _TOLERANCE = 200, 1e-5


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
        return _solve_two(
            head.last, standard, labels, share, None if added is None else added[:, 1] - added[:, 0], penalty
        )

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
    """The same of two classes, by their difference: one logit, whose gradient needs no graph.

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
        max_iter=_ROUNDS,
        tolerance_grad=_TOLERANCE,
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
