"""Where to compute: a device by its name."""

import torch

from fairhead.errors import InputError


def device_named(name: str) -> torch.device:
    """A device that can be used: "cpu", "cuda", "cuda:1", ...; "auto" takes a GPU where there is one.

    Raises:
        InputError: there is no such device.

    Example:
        >>> device_named("cpu")
        device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"the device is {name!r}; expected cpu, cuda, cuda:1, ... or auto") from None
    if device.type == "cpu":
        return device
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None or here.type != device.type:
        what = "no GPU" if device.type == "cuda" else f"no {device.type} device"
        raise InputError(f"the device is {name}, and PyTorch sees {what} here: use --device cpu")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise InputError(f"the device is {name}, and there are {torch.accelerator.device_count()}, counted from 0")
    return device
