"""One training step, and how to run it fast: recorded once, then replayed.

A step of a small transformer is about a thousand short kernels, and launching them from Python takes a GPU's time
several times over. A recording (a CUDA graph) launches them all at once. What is recorded is what the device does,
never what Python does, so a recorded step must be the same work every time: fixed shapes, no decision that depends on
a value, and all that changes from step to step held in tensors that are changed in place. `Recorded` finds out by
itself whether that holds, and runs the step as it is where it does not.
"""

import functools
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress, islice
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairhead.train.examples import Batch

# The loss of a batch: (what the model returned, labels [B], rows of the training set [B]) -> a scalar.
Loss = Callable[[Any, Tensor, Tensor], Tensor]
# The parts of a batch's loss by name; "loss" is what is minimised, the others are for the record.
Parts = Mapping[str, Tensor]
B = TypeVar("B")

# Steps before a recording: libraries choose their kernels, and state that depends on the first batch is made.
_WARM_UP = 3
# Hooks of these do their work on the device; what others do in Python would happen once and never again.
_KNOWN_HOOKS = ("fairhead", "transformers", "torch", "accelerate", "peft")
_LOSS = "the loss"
_CHANGING_MASKS = threading.RLock()


class CudaRecorder:
    """Records what a function does with tensors as a CUDA graph, on a stream of its own, and does it again."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()
        number = torch.cuda.current_device() if device.index is None else device.index
        self._chance = torch.cuda.default_generators[number]

    def warm_up(self, function: Callable[[], Tensor]) -> Tensor:
        """Run on the stream that will record: autograd remembers which one it saw first."""
        with torch.cuda.device(self._stream.device):  # the current one may be another
            self._stream.wait_stream(torch.cuda.current_stream())
            with _masks_as_when_recorded(), torch.cuda.stream(self._stream):
                value = function()
            torch.cuda.current_stream().wait_stream(self._stream)
        return value

    def waits(self, function: Callable[[], Tensor]) -> tuple[Tensor, str | None]:
        """Run as usual, and say where Python waited for a value, if it did: a recording that meets one breaks."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                value = self.warm_up(function)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        found = [w for w in seen if "synchronizing CUDA operation" in str(w.message)]
        place = f"{found[0].filename.rpartition('/')[2]}, line {found[0].lineno}" if found else None
        return value, place and f"it waits for a value of the device ({place})"

    def record(self, function: Callable[[], Tensor]) -> Tensor:
        """Record without running; `replay` leaves its result in the tensor. Other threads may use the device."""
        with torch.cuda.device(self._stream.device):
            stream, chance = torch.cuda.current_stream(), self._chance.clone_state()
            try:
                with (
                    _masks_as_when_recorded(),
                    torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"),
                ):
                    return function()
            except BaseException:
                # A recording that fails leaves its stream in place, and a generator that waits for its end.
                torch.cuda.set_stream(stream)
                self._chance.graphsafe_set_state(chance)
                raise

    def replay(self) -> None:
        """One launch for the whole step."""
        self._graph.replay()


class ClassifierLoss:
    """The loss of a batch of labelled examples: the model's own, or a method's."""

    def __init__(
        self, model: nn.Module, loss: Loss | None = None, layers: AbstractContextManager[object] | None = None
    ) -> None:
        """`loss` is the model's own where none is given; `layers` is how the model's layers run while it reads."""
        self._model, self._loss = model, loss
        self._layers = nullcontext() if layers is None else layers

    def __call__(self, batch: Batch) -> Tensor:
        """A scalar."""
        with self._layers:
            if self._loss is None:
                value: Tensor = self._model(**batch.inputs, labels=batch.labels).loss
                return value
            return self._loss(self._model(**batch.inputs), batch.labels, batch.rows)


class Step(Generic[B]):
    """Forward, loss, backward, clipping and optimizer on one batch."""

    def __init__(
        self,
        loss: Callable[[B], Tensor | Parts],
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None = None,
        precision: str = "no",
        accumulate: int = 1,
        watch: Callable[[Parts], None] | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """`loss` gives a scalar, or its parts by name; see `Plan` for the rest.

        `watch` is called before the weights change, with the parts and, where gradients are clipped, their norm. Of
        several processes that are given the same batches, each takes its `share` (number, of how many) of the pieces.
        """
        self._loss, self._optimizer, self._watch = loss, optimizer, watch
        self._max_grad_norm, self._precision, self._accumulate = max_grad_norm, precision, accumulate
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._mine, self._of = share

    def __call__(self, batch: B) -> Tensor:
        """Train on one batch and return its loss, a scalar without gradients."""
        totals: dict[str, Tensor] = {}
        pieces = _pieces(batch, self._accumulate * self._of)
        for number, (piece, share) in enumerate(islice(pieces, self._mine, None, self._of)):
            with autocast(self._parameters[0].device, self._precision):
                found = self._loss(piece)
            parts = found if isinstance(found, Mapping) else {"loss": found}
            if number == 0:
                self._optimizer.zero_grad()
            # A batch in one piece is not multiplied: the same kernels as without pieces.
            (parts["loss"] if share == 1 else share * parts["loss"]).backward()
            for name, part in parts.items():
                value = part.detach() if share == 1 else share * part.detach()
                totals[name] = totals[name] + value if name in totals else value
        if self._of > 1:
            totals = self._added_up(totals)
        if self._max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
            totals = {**totals, "gradient norm": norm}
        if self._watch is not None:
            self._watch(totals)
        self._optimizer.step()
        return totals["loss"]

    def _added_up(self, totals: Parts) -> dict[str, Tensor]:
        """Add up gradients and parts of the loss over processes; one may have had no piece of a small batch."""
        if not totals:
            self._optimizer.zero_grad()
        device = self._parameters[0].device
        reached = torch.tensor([parameter.grad is not None for parameter in self._parameters], device=device).int()
        dist.all_reduce(reached)
        for parameter in compress(self._parameters, reached.tolist()):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        found: list[dict[str, float]] = [{}] * self._of
        dist.all_gather_object(found, {name: float(part) for name, part in totals.items()})
        # The first process has had a piece of every batch.
        return {name: torch.tensor(sum(part.get(name, 0.0) for part in found), device=device) for name in found[0]}


def _pieces(batch: Any, n: int) -> Iterator[tuple[Any, float]]:
    """Up to `n` pieces of a batch that is a `Batch` or a list, each with its share of the rows."""
    if n == 1:
        yield batch, 1
        return
    rows = len(batch.labels) if isinstance(batch, Batch) else len(batch)
    size = math.ceil(rows / n)
    for start in range(0, rows, size):
        chosen = slice(start, min(start + size, rows))
        if isinstance(batch, Batch):
            inputs = {name: tensor[chosen] for name, tensor in batch.inputs.items()}
            piece: Any = Batch(inputs, batch.labels[chosen], batch.rows[chosen])
        else:
            piece = batch[chosen]
        yield piece, (chosen.stop - start) / rows


class Recorded:
    """A function of a batch that is recorded after a few calls and replayed from then on; the results are the same.

    Batches of another shape than the first run as they are. So does every batch where the function cannot be recorded;
    `as_it_is` then says why.

    Attributes:
        as_it_is: why the function runs as it is; None where it is (or will be) replayed.
    """

    def __init__(
        self,
        function: Callable[[Batch], Tensor],
        recorder: CudaRecorder | None,
        model: nn.Module | None = None,
        loss: object = None,
    ) -> None:
        """Watch the state of `model` and `loss`; without a recorder the function runs as it is."""
        self._function, self._recorder = function, recorder
        self._model, self._loss = model, loss
        self._batch: Batch | None = None  # what is replayed reads from these tensors
        self._result: Tensor | None = None
        self._state: _State | None = None  # what the recording took for granted
        self._calls = 0
        self._replayed = False
        self.as_it_is: str | None = "this device cannot record" if recorder is None else _foreign_hook(model)

    @property
    def replays(self) -> bool:
        """Whether calls are replayed: a few are too few for that."""
        return self._replayed

    def __call__(self, batch: Batch) -> Tensor:
        """The function of this batch."""
        if self.as_it_is is not None or self._recorder is None:
            return self._function(batch)
        if self._batch is None:
            inputs = {name: tensor.clone() for name, tensor in batch.inputs.items()}
            self._batch = Batch(inputs, batch.labels.clone(), batch.rows.clone())
        elif _shapes(self._batch) != _shapes(batch):
            return self._function(batch)
        else:
            for here, there in zip(_tensors(self._batch), _tensors(batch), strict=True):
                here.copy_(there, non_blocking=True)
        self._calls += 1
        call = functools.partial(self._function, self._batch)
        if self._calls < _WARM_UP:
            return self._recorder.warm_up(call)
        if self._calls == _WARM_UP:
            value, self.as_it_is = self._recorder.waits(call)
            return value
        if self._result is None:
            # Run once more, then record at once: an evaluation in between may have left its own tensors in the model.
            value = self._recorder.warm_up(call)
            self._result = self._recorded(self._recorder, call)
            return value
        self._recorder.replay()
        self._replayed = True
        return self._result.clone()

    def look_again(self) -> None:
        """Run as it is from now on where somebody has changed a number that the recording took for granted."""
        changed = None if self._state is None else self._state.changed(between_steps=True)
        if changed is not None:
            self.as_it_is = f"{changed} was changed after the step had been recorded"
            self._result = self._state = None
            self._replayed = False

    def _recorded(self, recorder: CudaRecorder, call: Callable[[], Tensor]) -> Tensor | None:
        state = _State(self._model, self._loss)
        try:
            result = recorder.record(call)
        except Exception as error:  # whatever the device refuses, training goes on
            self.as_it_is = f"recording failed ({' '.join(str(error).split())[:120]})"
        else:
            changed = state.changed()
            if changed is None:
                self._state = state
                return result
            self.as_it_is = f"{changed} is replaced at every step instead of changed in place"
        state.put_back()  # nothing was computed while recording
        return None


def recorder_for(device: torch.device) -> CudaRecorder | None:
    """What records on this device, or None where nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None


def optimizer_of(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW in one kernel, with a learning rate that a recorded step can read: a tensor (see `set_rate`)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = parameters[0].device
    rate = torch.tensor(learning_rate, device=device)
    return torch.optim.AdamW(
        parameters, lr=rate, weight_decay=weight_decay, fused=True, capturable=device.type == "cuda"
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the steps to come."""
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context that "bf16" asks for; "no" leaves everything in 32 bit."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@functools.cache
def say_once(what: str) -> None:
    """Tell the user, the first time."""
    logging.getLogger("fairhead").warning(what)


@contextmanager
def _masks_as_when_recorded() -> Iterator[None]:
    """Let transformers decide about masks without looking at them, before a recording as within it.

    Where a mask is given it is used: while a stream records, its values cannot be looked at, and layers that were
    compiled without one would have to be compiled again in the middle of the recording, which breaks it. Where none is
    given none is made: up to 5.17 transformers builds one of ones while a stream records, and a mask keeps the fast
    attention kernels away. One thread at a time: of two that took turns, one would leave its change behind.
    """
    from transformers import masking_utils

    changeable: Any = masking_utils
    with _CHANGING_MASKS:
        asked = getattr(masking_utils, "is_tracing", None)
        if asked is None:
            yield
            return
        changeable.is_tracing = lambda tensor=None: tensor is not None
        try:
            yield
        finally:
            changeable.is_tracing = asked


def _tensors(batch: Batch) -> list[Tensor]:
    return [*batch.inputs.values(), batch.labels, batch.rows]


def _shapes(batch: Batch) -> list[tuple[str, torch.Size]]:
    return [*((name, x.shape) for name, x in batch.inputs.items()), ("labels", batch.labels.shape)]


def _foreign_hook(model: nn.Module | None) -> str | None:
    for name, module in () if model is None else model.named_modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
            for hook in hooks.values():
                inner = hook.func if isinstance(hook, functools.partial) else hook
                home = str(getattr(inner, "__module__", "") or type(inner).__module__)
                if home.partition(".")[0] not in _KNOWN_HOOKS:
                    return f"{name or 'the model'} has a hook of {home or 'unknown origin'}, which a replay would skip"
    return None


class _State:
    """Numbers and tensors of a loss and of every module, as Python has them bound at this moment."""

    def __init__(self, model: nn.Module | None, loss: object) -> None:
        owner = getattr(loss, "__self__", loss)
        holders = [(_LOSS, owner), *(() if model is None else model.named_modules())]
        spaces = [(f"{name}.", vars(holder)) for name, holder in holders if hasattr(holder, "__dict__")]
        spaces += [(f"{name}.", module._buffers) for name, module in holders if isinstance(module, nn.Module)]
        self._bound = [
            (name + key, space, key, value)
            for name, space in spaces
            for key, value in space.items()
            if isinstance(value, Tensor | int | float)
        ]

    def changed(self, between_steps: bool = False) -> str | None:
        """The name of one that is bound to something else by now.

        Between steps a module may well hold a tensor of another pass (the mask of an evaluation): those do not count.
        """
        for name, space, key, value in self._bound:
            now, is_tensor = space.get(key), isinstance(value, Tensor)
            if between_steps and is_tensor and not name.startswith(_LOSS):
                continue
            if now is not value and (is_tensor or now != value):
                return name
        return None

    def put_back(self) -> None:
        """Bind all of them as they were."""
        for _, space, key, value in self._bound:
            space[key] = value
