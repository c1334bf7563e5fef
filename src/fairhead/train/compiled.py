"""Layers compiled while a model trains: what lies between the matrix products becomes a few kernels.

Of the layers that repeat, one is compiled, and all that look like it use the same code: some ten seconds, once in a
process. Pictures are cut into patches by a matrix product, which the convolution that models have there amounts to. A
step of the paper's ViT on an H200 then takes seven tenths of the time that it takes without.
"""

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

_BACKEND = "inductor"
# Variants of one kind of layer that a process keeps: shapes, precisions, and methods that work inside of it. A grid has
# more than PyTorch's eight, after which it would run those to come uncompiled: at another cost, and without an error.
_VARIANTS = 64


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
        and _convolves_plainly(module)
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


def _convolves_plainly(module: nn.Conv2d) -> bool:
    """Whether its class does what nn.Conv2d does: others standardise or quantise weights, or pad."""
    own, plain = type(module), nn.Conv2d
    return own.forward is plain.forward and own._conv_forward is plain._conv_forward


def _forward_is_its_own(module: nn.Module) -> bool:
    """Whether nobody has given this one module another."""
    return "forward" not in vars(module)


def _computed_twice(model: nn.Module) -> str | None:
    """Gradient checkpointing runs layers again on the way back, out of the block: as they are, with other dropout."""
    found = any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
    return (
        "gradient checkpointing computes them twice, and the second time they would not be compiled" if found else None
    )


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
