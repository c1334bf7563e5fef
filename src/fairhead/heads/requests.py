"""What has been asked of one attention module, and at which tokens: transforms, then edits, then readings.

Readings come last, so they always show what the model goes on with. The lists belong to the module, not to a tap:
nested taps add to the same lists and take their own requests out again.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, SupportsIndex

import torch
from torch import Tensor

from fairhead.errors import InputError, UnsupportedModel
from fairhead.heads.sites import Site, output_weight

# None: every token. int: one position. slice or list of ints: several. bool tensor [batch, tokens]: per example.
Tokens = None | SupportsIndex | slice | Iterable[int] | Tensor
# The same once it is checked: positions are plain numbers, so that they can be compared with a pass's length on the
# host (an index beyond the end of a CUDA tensor ends the process's use of the device).
CheckedTokens = None | int | slice | list[int] | Tensor
# x [..., h, d] (the selected heads at the chosen tokens) -> the same shape.
HeadEdit = Callable[[Tensor, Site], Tensor]
_INSIDE = frozenset({"q", "k", "v", "weights"})
# Outputs that a reading of one token may hold back, to copy the rows of many layers at once.
_HELD_BYTES = 64 * 2**20


def check_tokens(tokens: Tokens) -> CheckedTokens:
    """Return `tokens` in a form that `take` and `put` accept, or raise `InputError`."""
    if tokens is None or isinstance(tokens, slice):
        return tokens
    if isinstance(tokens, Tensor) and tokens.dim() > 0:
        if tokens.dtype == torch.bool and tokens.dim() == 2:
            return tokens
        if tokens.dtype != torch.bool and tokens.dim() == 1 and not tokens.is_floating_point():
            return [int(token) for token in tokens.tolist()]
        raise InputError(
            f"tokens is a {tokens.dtype} tensor of shape {list(tokens.shape)}; expected a bool mask [batch, tokens] "
            "or a one-dimensional tensor of positions"
        )
    try:
        if isinstance(tokens, Iterable) and not isinstance(tokens, Tensor):
            return [int(operator.index(token)) for token in tokens]
        return int(operator.index(tokens))  # True is an index too, and another one than 1
    except TypeError:
        raise InputError(
            f"tokens is {tokens!r}; expected a position, a slice, a list of positions or a bool tensor [batch, tokens]"
        ) from None


def check_range(tokens: CheckedTokens, batch: int, length: int) -> None:
    """Raise `InputError` if `tokens` asks for what a pass of [batch, length] does not have."""
    if tokens is None or isinstance(tokens, slice):
        return
    if isinstance(tokens, Tensor):
        if tuple(tokens.shape) == (batch, length):
            return
        raise InputError(
            f"the mask of tokens has shape {list(tokens.shape)}; this pass has [batch, tokens] = "
            f"[{batch}, {length}]: make the request anew for each batch"
        )
    for token in [tokens] if isinstance(tokens, int) else tokens:
        if not -length <= token < length:
            raise InputError(
                f"token {token} does not exist: this pass has {length} tokens, counted from 0 or from -1 backwards "
                "(a decoding step with a cache has only its new ones)"
            )


def take(x: Tensor, tokens: CheckedTokens, axis: int = 1) -> Tensor:
    """Rows of x [B, T, ...] at the chosen tokens: [B, ...] for an int, [N, ...] for a mask, else [B, t, ...].

    Tokens lie on `axis`. A mask puts its rows first, whatever the axis.
    """
    if tokens is None:
        return x
    shape = x.shape
    check_range(tokens, shape[0], shape[axis])
    if isinstance(tokens, int):
        return x.select(axis, tokens)
    if isinstance(tokens, Tensor):
        return x.transpose(1, axis)[tokens.to(x.device)]
    return x[:, tokens] if axis == 1 else x.transpose(1, axis)[:, tokens].transpose(1, axis)


def take_copy(x: Tensor, tokens: CheckedTokens, axis: int = 1) -> Tensor:
    """`take`, copied unless every token is asked for: a view would keep the other rows in memory."""
    chosen = take(x, tokens, axis)
    return chosen.clone() if isinstance(tokens, int | slice) else chosen


def put(x: Tensor, tokens: CheckedTokens, new: Tensor) -> Tensor:
    """A copy of x [B, T, ...] with the chosen tokens replaced by `new`, shaped as `take` gives them."""
    if tokens is None:
        return new
    out = x.clone()
    if isinstance(tokens, Tensor):
        out[tokens.to(x.device)] = new
    else:
        out[:, tokens] = new
    return out


class Transform(Protocol):
    """Changes q [B, H, T, d] and k [B, H_kv, T, d] before attention."""

    def __call__(self, q: Tensor, k: Tensor, site: Site) -> tuple[Tensor, Tensor]:
        """Return the new q and k, in the shapes of the old ones."""


class Reading:
    """What one `read` has seen: `reading[layer]` is the tensor of the latest forward pass.

    With `keep="all"`, `reading.calls(layer)` has one tensor a forward pass, as generation makes many. Tensors of
    several layers may share memory; `clone` one to keep it without the others.
    """

    def __init__(self, what: str, tokens: CheckedTokens, keep: str, layers: list[int]) -> None:
        self.what = what
        self.tokens = tokens
        self.layers = layers
        self._keep = keep
        self._calls: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        self._held: dict[int, Tensor] = {}  # layer -> outputs [B, T, H, d] whose row has not been copied yet
        self._held_bytes = 0

    def __getitem__(self, layer: int) -> Tensor:
        calls = self._calls_of(layer)
        if not calls:
            raise LookupError(f"{self.what!r} of layer {layer} has not been seen: no forward pass has reached it")
        return calls[-1]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[layer] for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def calls(self, layer: int) -> list[Tensor]:
        """Tensors of every forward pass so far (of the latest alone, unless `keep="all"`)."""
        return list(self._calls_of(layer))

    def stack(self) -> Tensor:
        """The latest tensors of all read layers, shape [layers, ...]."""
        return torch.stack(list(self))

    def clear(self) -> None:
        """Forget what was seen, to free its memory."""
        self._held, self._held_bytes = {}, 0
        for calls in self._calls.values():
            calls.clear()

    def _calls_of(self, layer: int) -> list[Tensor]:
        if self._held:
            self._copy_rows()
        if layer not in self._calls:
            if not -len(self.layers) <= layer < 0:
                raise KeyError(f"layer {layer} is not among the layers read: {self.layers}")
            layer = self.layers[layer]
        return self._calls[layer]

    def _see(self, layer: int, tensor: Tensor) -> None:
        # The second forward of a checkpoint computes what is read again, because its first one saved tensors for it,
        # but no reading receives it: gradients flow through what the first one showed.
        if not is_recomputing():
            self._store(layer, tensor)

    def _store(self, layer: int, tensor: Tensor) -> None:
        if layer in self._held:  # of a pass before, which did not come to its end
            self._copy_rows()
        if self._keep == "last":
            self._calls[layer] = [tensor]
        else:
            self._calls[layer].append(tensor)

    def _see_row(self, layer: int, output: Tensor) -> None:
        """See one token of output [B, T, H, d], later: rows of all layers in one copy, not in one a layer.

        A small model on a fast device waits for Python and for the launch of each kernel. Until then `output` must
        not be changed in place.
        """
        if layer in self._held:
            self._copy_rows()
        self._held[layer] = output
        self._held_bytes += output.nbytes
        if layer == self.layers[-1] or self._held_bytes > _HELD_BYTES:
            self._copy_rows()

    def _copy_rows(self) -> None:
        held, self._held, self._held_bytes = self._held, {}, 0
        rows = [take(output, self.tokens) for output in held.values()]
        alike = len({(row.shape, row.dtype, row.device) for row in rows}) == 1
        copies = torch.stack(rows).unbind() if alike else [row.clone() for row in rows]
        for layer, row in zip(held, copies, strict=True):
            self._store(layer, row)


@dataclass(frozen=True, eq=False)
class Edit:
    """Replace the outputs of some heads at some tokens by `function` of them."""

    heads: list[int]
    function: HeadEdit
    tokens: CheckedTokens

    def __call__(self, output: Tensor, site: Site) -> Tensor:
        """Output [B, T, H, d] with the edit made, in a tensor of its own."""
        before = take(output, self.tokens)
        chosen = before[..., self.heads, :]
        new = self.function(chosen, site)
        if not isinstance(new, Tensor) or new.shape != chosen.shape:
            found = f"shape {list(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
            raise InputError(
                f"an edit of layer {site.layer} returned {found}; expected that of the head outputs it was given, "
                f"{list(chosen.shape)}"
            )
        after = before.clone()
        after[..., self.heads, :] = new.to(after.dtype)  # an edit may reckon in another precision
        return put(output, self.tokens, after)


@dataclass(eq=False)
class Requests:
    """The requests on one attention module. Each carries the site it was made through, which knows its tap."""

    transforms: list[tuple[Site, Transform]] = field(default_factory=list)  # of q and k
    edits: list[tuple[Site, Edit]] = field(default_factory=list)  # of head outputs
    # Whom to show what, by what it is; nothing has an empty list. Reading one token of every layer must cost next to
    # nothing where a model waits for Python, so a pass looks up no more than it needs.
    readings: dict[str, list[tuple[Site, Reading]]] = field(default_factory=dict)
    reads_inside: bool = False  # whether some of them are of q, k, v or weights

    def __bool__(self) -> bool:
        return bool(self.transforms or self.edits or self.readings)

    def add_reading(self, site: Site, reading: Reading) -> None:
        """Show `reading` what it asks for from now on."""
        self.readings.setdefault(reading.what, []).append((site, reading))
        self.reads_inside = not _INSIDE.isdisjoint(self.readings)

    def remove(self, site: Site) -> None:
        """Drop what was asked through `site`."""
        self.transforms = [request for request in self.transforms if request[0] is not site]
        self.edits = [request for request in self.edits if request[0] is not site]
        kept = {what: [request for request in asked if request[0] is not site] for what, asked in self.readings.items()}
        self.readings = {what: asked for what, asked in kept.items() if asked}
        self.reads_inside = not _INSIDE.isdisjoint(self.readings)

    def transform(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Pass q [B, H, T, d] and k through every transform, the outermost tap's first."""
        for site, function in self.transforms:
            shapes, dtype = (q.shape, k.shape), q.dtype
            new = function(q, k, site)
            if not isinstance(new, tuple) or len(new) != 2:
                raise InputError(
                    f"a transform of layer {site.layer} returned {type(new).__name__}; expected the pair (q, k)"
                )
            q, k = new
            if (q.shape, k.shape) != shapes:
                raise InputError(
                    f"a transform of layer {site.layer} returned q and k of shapes {list(q.shape)} and "
                    f"{list(k.shape)}; expected those it was given, {list(shapes[0])} and {list(shapes[1])}"
                )
            q, k = q.to(dtype), k.to(dtype)  # a transform may reckon in another precision than v has
        return q, k

    def edit(self, output: Tensor) -> Tensor:
        """Pass head outputs [B, T, H, d] through every edit."""
        for site, edit in self.edits:
            if output.shape[2:] != (site.n_heads, site.head_dim):
                raise UnsupportedModel(
                    f"{site.family} ({site.name}) puts out heads of shape {list(output.shape[2:])}, "
                    f"not [{site.n_heads}, {site.head_dim}] as its output projection suggests"
                )
            output = edit(output, site)
        return output

    def read_all(self, output: Tensor, q: Tensor, k: Tensor, v: Tensor, get: Callable[[CheckedTokens], Tensor]) -> None:
        """Show head outputs [B, T, H, d], q, k, v [B, H, T, d] and weights to their readings."""
        self.read_output(output)
        if self.reads_inside:
            self.read_weights(get)
            self.read("q", q)
            self.read("k", k)
            self.read("v", v)

    def read(self, what: str, x: Tensor) -> None:
        """Show q, k or v, x of shape [B, H, T, d], to the readings of it."""
        for site, reading in self.readings.get(what, ()):
            site.require_gradients()
            seen = take_copy(x, reading.tokens, axis=2)
            if reading.tokens is None and reading._keep == "all" and what != "q":
                seen = seen.clone()  # a static cache goes on writing into the same k and v
            reading._see(site.layer, seen)

    def read_output(self, output: Tensor) -> None:
        """Show head outputs [B, T, H, d] to the readings of outputs."""
        for site, reading in self.readings.get("output", ()):
            site.require_gradients()
            now = torch.is_grad_enabled() or torch.compiler.is_compiling() or site.passes_hooks()
            if isinstance(reading.tokens, int) and not now:
                check_range(reading.tokens, output.shape[0], output.shape[1])
                reading._see_row(site.layer, output)
            else:
                reading._see(site.layer, take_copy(output, reading.tokens))

    def read_weights(self, get: Callable[[CheckedTokens], Tensor]) -> None:
        """Show `get(rows)` to the readings of weights; it builds no other rows."""
        for site, reading in self.readings.get("weights", ()):
            site.require_gradients()
            reading._see(site.layer, get(reading.tokens))

    def read_contribution(self, joined: Tensor) -> None:
        """Show the input of the output projection [B, T, H · d], head by head through W_O."""
        for site, reading in self.readings.get("contribution", ()):
            site.require_gradients()
            heads = take(joined.unflatten(-1, (site.n_heads, site.head_dim)), reading.tokens)
            weight = output_weight(site, joined.device).to(heads.dtype)
            reading._see(site.layer, torch.einsum("...hd,ohd->...ho", heads, weight))


def is_recomputing() -> bool:
    """Whether this forward is the second one that gradient checkpointing makes, inside the backward pass.

    Readings show nothing of it, and a transform that keeps running statistics must not count the batch twice.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
