"""Running training steps fast on a GPU: recorded once and replayed, and with compiled layers.

A step of a small transformer is about a thousand short kernels, and launching them from Python takes a GPU's time
several times over. A recording (a CUDA graph) launches them all at once. What is recorded is what the device does,
never what Python does, so a recorded step must be the same work every time: fixed shapes, no decision that depends on
a value, and all that changes from step to step held in tensors that are changed in place. `Recorded` finds out by
itself whether that holds, and runs the step as it is where it does not.

`CompiledLayers` makes a few kernels of what lies between the matrix products. Of the layers that repeat, one is
compiled, and all that look like it use the same code: some ten seconds, once in a process. Pictures are cut into
patches by a matrix product, which the convolution that models have there amounts to. A step of the paper's ViT on an
H200 then takes seven tenths of the time that it takes without.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fairhead.train.step import Batch

# Steps before a recording: libraries choose their kernels, and state that depends on the first batch is made.
_WARM_UP = 3
# Hooks of these do their work on the device; what others do in Python would happen once and never again.
_KNOWN_HOOKS = ("fairhead", "transformers", "torch", "accelerate", "peft")
_LOSS = "the loss"
_CHANGING_MASKS = threading.RLock()
_BACKEND = "inductor"
# Variants of one kind of layer that a process keeps: shapes, precisions, and methods that work inside of it. A grid has
# more than PyTorch's eight, after which it would run those to come uncompiled: at another cost, and without an error.
_VARIANTS = 64


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
        for one in seen:
            if "synchronizing CUDA operation" in str(one.message):
                place = f"{one.filename.rpartition('/')[2]}, line {one.lineno}"
                return value, f"it waits for a value of the device ({place})"
        return value, None

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


class Recorded:
    """A function of a batch that is recorded after a few calls and replayed from then on; the results are the same.

    Batches of another shape than the first run as they are. So does every batch where the function cannot be recorded;
    `as_it_is` then says why.

    Attributes:
        as_it_is: why the function runs as it is; None where it is (or will be) replayed.
        replays: whether calls are replayed; a few are too few for that.
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
        self.replays = False
        self.as_it_is: str | None = "this device cannot record" if recorder is None else _foreign_hook(model)

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
        self.replays = True
        return self._result.clone()

    def look_again(self) -> None:
        """Run as it is from now on where somebody has changed a number that the recording took for granted."""
        changed = None if self._state is None else self._state.changed(between_steps=True)
        if changed is not None:
            self.as_it_is = f"{changed} was changed after the step had been recorded"
            self._result = self._state = None
            self.replays = False

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


class CompiledLayers(AbstractContextManager["CompiledLayers"]):
    """Within the block, repeated layers and patch embeddings run compiled; outside, and afterwards, as they are.

    Attributes:
        as_they_are: why they are not compiled; None where they are.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.as_they_are = _computed_twice(model) or _cannot_compile(device)
        forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        if self.as_they_are is None:
            forwards += [(layer, layer.forward) for layer in repeated_layers(model)]
            forwards += [(cut, functools.partial(patches, cut)) for cut in patch_embeddings(model)]
        self._layers = [layer for layer, _ in forwards]
        # Shapes of a training set are few and fixed: code for any shape would be slower.
        self._forwards = [torch.compile(forward, dynamic=False, backend=_BACKEND) for _, forward in forwards]

    def __enter__(self) -> "CompiledLayers":
        if self._layers:
            # Otherwise code that was made for a layer without hooks serves one that has them, and leaves them out.
            self._rules = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False, recompile_limit=_VARIANTS)
            self._rules.__enter__()
        for layer, forward in zip(self._layers, self._forwards, strict=True):
            layer.forward = forward
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            del layer.forward  # the class has its own
        if self._layers:
            self._rules.__exit__(None, None, None)


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The members of every list of layers of one kind: the encoders of a model, or of several side by side."""
    lists = [list(found) for found in model.modules() if isinstance(found, nn.ModuleList)]
    alike = [found for found in lists if len(found) > 1 and len({type(layer) for layer in found}) == 1]
    return [layer for found in alike for layer in found if _forward_is_its_own(layer)]


def patch_embeddings(model: nn.Module) -> list[nn.Conv2d]:
    """The convolutions whose windows lie side by side."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Conv2d)
        # Classes of their own standardise or quantise weights, or pad.
        and type(module).forward is nn.Conv2d.forward
        and type(module)._conv_forward is nn.Conv2d._conv_forward
        and module.stride == module.kernel_size != (1, 1)
        and (module.dilation, module.groups) == ((1, 1), 1)
        and module.padding in ((0, 0), "valid")
        and _forward_is_its_own(module)
    ]


def patches(convolution: nn.Conv2d, pictures: Tensor) -> Tensor:
    """What such a convolution gives for pictures [B, C, H, W], as one matrix product: [B, D, rows, columns]."""
    height, width = convolution.kernel_size
    rows, columns = pictures.shape[-2] // height, pictures.shape[-1] // width
    windows = pictures[..., : rows * height, : columns * width].unflatten(-1, (columns, width))
    windows = windows.unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5)  # [B, rows, columns, C, height, width]
    found = nn.functional.linear(windows.flatten(3), convolution.weight.flatten(1), convolution.bias)
    return found.permute(0, 3, 1, 2)


def _forward_is_its_own(module: nn.Module) -> bool:
    """Whether the module has the forward of its class."""
    return "forward" not in vars(module)


def _computed_twice(model: nn.Module) -> str | None:
    """Gradient checkpointing runs layers again on the way back, out of the block: as they are, with other dropout."""
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        return "gradient checkpointing computes them twice, and the second time they would not be compiled"
    return None


@functools.cache
def _cannot_compile(device: torch.device) -> str | None:
    return _try_out(device) if device.type == "cuda" else "only steps on a GPU gain from it"


def _try_out(device: torch.device) -> str | None:
    """Compile a line, and say what went wrong."""

    def some(x: Tensor) -> Tensor:
        return x * 2 + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice to round more
        try:
            torch.compile(some, dynamic=False, backend=_BACKEND)(torch.ones(8, device=device))
        except Exception as error:  # no compiler, no Triton, or either too old for the other
            return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return None
