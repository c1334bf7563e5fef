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
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device
