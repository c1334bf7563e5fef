"""What DAM's attention is made of: running statistics over batches with padding left out, and work on a side stream."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fairhead.errors import InputError
from fairhead.heads import is_recomputing
from fairhead.train.launched import is_spread, summed


class _Statistics(NamedTuple):
    """Of one batch, [1, H, T or 1, d]; `known` [1, 1, T or 1, 1] is false where fewer than two rows were counted."""

    mean: Tensor
    variance: Tensor
    known: Tensor | None


class RunningStandardise(nn.Module):
    """(x − mean) / deviation over the batch while training, over what was seen then at evaluation.

    The deviation is the unbiased one. Where a batch has fewer than two rows to count (a batch of one, a position that
    is padding in all rows but one) there is no deviation, and the running statistics serve as at evaluation.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        stats_axes: Literal["batch", "batch_token"] = "batch",
        momentum: float = 0.1,
        eps: float = 1e-5,
        running: Literal["std", "var"] = "std",
        divide: bool = True,
        detach: bool = False,
    ) -> None:
        """See `fairhead.mitigate.DAM` for the settings."""
        super().__init__()
        self.axes = (0,) if stats_axes == "batch" else (0, 2)
        self.momentum = momentum
        self.eps = eps
        self.power = 1 if running == "std" else 2
        self.divide = divide
        self.detach = detach
        # [H, T, d], or [H, 1, d] shared by all positions. T is known only when the first batch comes.
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.zeros(heads, 1, head_dim))
        self.register_buffer("deviation", torch.ones(heads, 1, head_dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Standardise x [B, H, T, d]; mask [B, T] is 0 where there is padding."""
        rows = x.shape[0] if self.axes == (0,) else x.shape[0] * x.shape[2]
        if self.training and mask is None and rows > 1 and self.divide and not self.detach and not is_spread():
            return self._as_batch_norm(x, rows)
        found = self._of_batch(x, mask, rows) if self.training else None
        if found is None:
            self._check_tokens(x)
            mean, deviation = self.mean, self.deviation
        else:
            mean, deviation = found.mean, (found.variance + self.eps).sqrt()
            if found.known is not None:
                self._make_room(mean)
                self._check_tokens(mean)
                mean = torch.where(found.known, mean, self.mean)
                deviation = torch.where(found.known, deviation, self.deviation)
            if not is_recomputing():
                self._update(mean[0].detach(), deviation[0].detach())
            if self.detach:
                mean, deviation = mean.detach(), deviation.detach()
        centred = x - mean
        return (centred / deviation if self.divide else centred).to(x.dtype)

    def _as_batch_norm(self, x: Tensor, rows: int) -> Tensor:
        """The usual case in torch's own batch normalisation: two kernels forward and two backward.

        That divides by the biased deviation; a factor and an ε that make it the unbiased one are given along.
        """
        heads, tokens, width = x.shape[1:]
        by_token = x.transpose(1, 2)  # [B, T, H, d], as the projection has made it: nothing is copied
        channels = (tokens, heads, width) if self.axes == (0,) else (1, heads, width)
        flat = by_token.reshape(rows, math.prod(channels))
        shrink = (rows - 1) / rows
        factor = torch.full((flat.shape[1],), math.sqrt(shrink), dtype=self.mean.dtype, device=x.device)
        found, mean, scale = torch.native_batch_norm(flat, factor, None, None, None, True, 0.0, self.eps * shrink)
        if not is_recomputing():
            # [H, T or 1, d]; 32 bit always, though the compiler believes otherwise
            mean, scale = (y.detach().to(self.mean.dtype).view(channels).transpose(0, 1) for y in (mean, scale))
            self._update(mean, scale.reciprocal() / math.sqrt(shrink))
        return found.view(by_token.shape).transpose(1, 2)

    def _of_batch(self, x: Tensor, mask: Tensor | None, rows: int) -> _Statistics | None:
        """Statistics over the rows of all processes; None where there is but one row."""
        x = x.to(self.mean.dtype)
        if mask is None and not is_spread():
            if rows < 2:
                return None
            variance, mean = torch.var_mean(x, self.axes, keepdim=True)
            return _Statistics(mean, variance, None)
        if mask is None:
            mask = torch.ones(x.shape[0], x.shape[2], device=x.device)
        if mask.shape != (x.shape[0], x.shape[2]):
            raise InputError(
                f"the attention mask has shape {list(mask.shape)} but the batch has {x.shape[0]} rows of "
                f"{x.shape[2]} tokens: give one entry per token"
            )
        counted = mask[:, None, :, None].to(x.dtype)
        count = summed(counted.sum(self.axes, keepdim=True))
        mean = summed((x * counted).sum(self.axes, keepdim=True)) / count.clamp(min=1)
        squares = summed(((x - mean).square() * counted).sum(self.axes, keepdim=True))
        known = count > 1
        # Where nothing varies or is known, a variance of 1 keeps the gradient of its root finite.
        variance = torch.where(known, squares / (count - 1).clamp(min=1), torch.ones_like(squares))
        return _Statistics(mean, variance, known)

    @torch.no_grad()
    def _update(self, mean: Tensor, deviation: Tensor) -> None:
        self._make_room(mean)
        self._check_tokens(mean)
        self.mean.lerp_(mean, self.momentum)
        if self.power == 1:
            self.deviation.lerp_(deviation, self.momentum)
        else:
            self.deviation.square_().lerp_(deviation.square(), self.momentum).sqrt_()

    def _make_room(self, statistics: Tensor) -> None:
        """From the first batch on, every position has statistics of its own."""
        if self.mean.shape[1] == 1 < statistics.shape[-2]:
            shape = (-1, statistics.shape[-2], -1)
            self.mean, self.deviation = self.mean.expand(shape).clone(), self.deviation.expand(shape).clone()

    def _check_tokens(self, x: Tensor) -> None:
        if self.mean.shape[1] not in (1, x.shape[-2]):
            raise InputError(
                f"DAM has statistics for {self.mean.shape[1]} token positions but this batch has {x.shape[-2]}: "
                'pad to the length it was trained with (max_length), or train with stats_axes="batch_token"'
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # The number of positions is whatever the saved model had seen.
        for name in ("mean", "deviation"):
            saved = state_dict.get(prefix + name)
            if saved is not None:
                setattr(self, name, torch.empty_like(saved, device=self.mean.device))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class SideStream:
    """Lets what depends on an early point of the forward pass begin there, while the pass goes on.

    In a step that is being recorded (see `fairhead.train.step`) the work gets a branch of its own, and so does its
    backward pass. Elsewhere nothing changes: it is Python that takes the time there.

    Example:
        >>> side_stream = SideStream()
        >>> side_stream.mark(torch.nn.Identity(), (), torch.zeros(1))
        >>> with side_stream.work():
        ...     value = torch.ones(2).sum().item()
        >>> value
        2.0
    """

    def __init__(self) -> None:
        self._since: Any = None

    def mark(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """What the work needs is there: a forward hook."""
        tensor = output[0] if isinstance(output, tuple) else output
        on_gpu = isinstance(tensor, Tensor) and tensor.is_cuda and not torch.compiler.is_compiling()
        if on_gpu and torch.cuda.is_current_stream_capturing():
            self._since = torch.cuda.current_stream().record_event()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Do the work; what comes after this block waits for it."""
        since, self._since = self._since, None
        if since is None or not torch.cuda.is_current_stream_capturing():
            yield
            return
        main, beside = torch.cuda.current_stream(), torch.cuda.Stream()
        beside.wait_event(since)
        with torch.cuda.stream(beside):
            yield
        main.wait_stream(beside)

    def clear(self) -> None:
        """Forget the mark of a pass that had no work to do: what it points to can be neither copied nor used."""
        self._since = None
