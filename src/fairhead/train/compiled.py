"""Layers that repeat, compiled while a model trains: what lies between the matrix products becomes a few kernels.

One layer is compiled, and all that look like it use the same code: some ten seconds, once in a process. A step of the
paper's ViT on an H200 then takes three quarters of the time that it takes without.
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
    """Within the block, the repeated layers of a model run compiled; outside, and afterwards, as they are.

    Attributes:
        as_they_are: why they are not compiled; None where they are.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
        >>> len(repeated_layers(model))
        2
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.as_they_are = _computed_twice(model) or _cannot_compile(device)
        self._layers = repeated_layers(model) if self.as_they_are is None else []
        # Shapes of a training set are few and fixed: code for any shape would be slower.
        self._forwards: list[Callable[..., Any]] = [
            torch.compile(layer.forward, dynamic=False, backend=_BACKEND) for layer in self._layers
        ]

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
    # A forward of its own, put there by somebody else, is left alone.
    return [layer for found in alike for layer in found if "forward" not in vars(layer)]


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
