"""A model's output representation as an exact sum: one term a head, one an MLP, the embedding, and the biases.

The residual stream is a sum of what the blocks add to it. A norm is linear once a row's own deviation is known, so
every term can be followed to the output: through a fixed matrix, times a scalar of the row. A head's term is then
`maps[layer, head] @ z`, where z [d] is the head's output times that scalar. All statistics of a head can therefore be
kept in its own few dimensions instead of the model's.

The mean that a LayerNorm takes out is taken out of each term separately, which is the same in sum.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fairhead.errors import InputError, UnsupportedModel
from fairhead.heads import Reading, output_weight, tap
from fairhead.heads.requests import take
from fairhead.locate.streams import AttentionPool, MeanPool, Norm, Reads, Stream, TermPath, Terms, stream_of

# The share of the output that may be lost to rounding before a decomposition is refused.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_LOW_PRECISION = 0.1
_READ_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}  # of what a classifier reads


class _Shelf:
    """A few tensors that hold what all layers leave behind.

    Small tensors that stay between large ones that go would fragment the heap: on a CPU, a third more memory in all.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken: dict[tuple[torch.Size, torch.dtype], int] = {}
        self._shelves: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def put(self, x: Tensor) -> Tensor:
        """A copy of x, on the shelf of its shape and type."""
        kind = x.shape, x.dtype
        place = self._taken.get(kind, 0)
        if place % self._places == 0:  # a new shelf, the old one being full
            self._shelves[kind] = x.new_empty(self._places, *x.shape)
        self._taken[kind] = place + 1
        return self._shelves[kind][place % self._places].copy_(x)


class Decomposer:
    """Takes the outputs of a model apart, a batch at a time.

    Image models (CLIP, ViT, DINOv2, ...) are read at their first token and after the projection where there is one,
    SigLIP after its attention pooling, classifiers where they read (`reads_of`); text models at the first token or at
    the last that is not padding. Post-norm models (BERT) are exact as well: every later norm is followed with the row's
    own deviation.

    Args:
        model: a transformers model in evaluation mode; of a CLIP or SigLIP with two towers, the image tower is read.
        token: "first", "last" (by the attention mask), a position, or means of tokens.
        unit: divide by the length of the output, as zero-shot classification does; by default where a projection or a
            pooler makes the output an embedding.
        split: what becomes of what no head owns. "own": the last norm takes its mean out of each term by itself, and
            biases are a term of their own. "prs": as in the published decomposition of CLIP (Gandelsman et al., 2024),
            where the row's mean and the norm's shift are split equally over all M = 2L + 1 layers and MLPs and, like
            the bias of W_O, over the H heads of a layer: γ ⊙ (c + b / H − μ / (M H)) / σ + β / (M H). Both add up to
            the same output. A head has three more dimensions then (1, μ and σ of its row); for models whose blocks
            have no norm after what they add.

    Attributes:
        maps: [L, H, d', d], from a head's z to its term.

    Example:
        >>> import torch
        >>> from transformers import ViTConfig, ViTModel
        >>> shape = dict(image_size=4, patch_size=2, hidden_size=8, intermediate_size=8)
        >>> model = ViTModel(ViTConfig(num_hidden_layers=3, num_attention_heads=2, **shape)).eval()
        >>> decomposer = Decomposer(model)
        >>> terms = decomposer({"pixel_values": torch.randn(5, 3, 4, 4)})
        >>> terms.heads.shape, terms.others.shape       # three layers of two heads; the embedding and three MLPs
        (torch.Size([5, 3, 2, 4]), torch.Size([5, 4, 8]))
        >>> whole = decomposer.head_terms(terms.heads).sum((1, 2)) + terms.others.sum(1) + terms.constant
        >>> torch.allclose(whole, terms.output, atol=1e-4)
        True
    """

    def __init__(
        self, model: nn.Module, token: str | int | Reads = "first", unit: bool | None = None, split: str = "own"
    ) -> None:
        if isinstance(token, str) and token not in ("first", "last"):
            raise InputError(f"token is {token!r}; expected 'first', 'last' or a position")
        self.stream: Stream = stream_of(model)
        self.token, self.split = token, split
        self.pool: AttentionPool | MeanPool | None = None
        if isinstance(token, Reads):
            self.pool = MeanPool(token)
            self.stream = replace(self.stream, projection=None, pooler=None)
            self.stream = self.stream if token.normed else replace(self.stream, final_norm=None)
        elif self.stream.pooler is not None:
            self.pool = AttentionPool(self.stream.pooler)
        self.unit = bool(self.stream.projection or self.stream.pooler) if unit is None else unit
        self._tap = tap(self.stream.base)
        sites = self._tap.sites
        if len(sites) != len(self.stream.blocks) or len({(s.n_heads, s.head_dim) for s in sites}) > 1:
            raise UnsupportedModel(
                f"{type(model).__name__} has {len(self.stream.blocks)} blocks and attention layers with "
                f"{sorted({s.n_heads for s in sites})} heads ({len(sites)} layers); expected one layer per block, "
                "all with equally many heads"
            )
        self.n_layers, self.n_heads = len(sites), sites[0].n_heads
        self._follow()
        self._shared: list[Tensor] = []
        if split == "prs":
            self._share_equally()
        paths = (*self.heads, *self._mlps, self._embedding)
        # Each once: many paths go through the same one.
        self._norms = {norm: norm.module for path in paths for norm in path.norms if norm.module is not None}
        self.head_dim = self.maps.shape[-1]
        self.n_others = self.n_layers + 1 + isinstance(self.pool, AttentionPool)  # the embedding, MLPs, and a pool's
        self.width = self.maps.shape[-2]
        self._checked = False

    @torch.no_grad()
    def _follow(self) -> None:
        """Walk from the output back to the first block, collecting each term's path."""
        stream, sites = self.stream, self._tap.sites
        first = output_weight(sites[0])
        matrix = torch.eye(first.shape[0], device=first.device)
        self.constants: list[TermPath] = []
        if stream.projection is not None:
            matrix = stream.projection.weight.float()
            if stream.projection.bias is not None:
                self.constants.append(TermPath(stream.projection.bias.float(), ()))
        path = self._through(TermPath(matrix, ()), stream.final_norm)
        mlps, heads, weights = [], [], []
        for site, block in zip(reversed(sites), reversed(stream.blocks), strict=True):
            path = self._through(path, block.mlp_norm)
            mlps.append(path.before(block.mlp_scale))
            path = self._through(path, block.attention_norm)
            attention = path.before(block.attention_scale)
            heads.append(attention)
            weights.append(output_weight(site).float())  # [D, H, d]
            bias = getattr(site.projection, "bias", None)
            if bias is not None:
                self.constants.append(TermPath(attention.matrix @ bias.float(), attention.norms))
        self._mlps, self.heads, self._embedding = mlps[::-1], heads[::-1], path
        self.weights = weights[::-1]
        terms = [torch.einsum("oD,Dhd->hod", p.matrix, w) for p, w in zip(self.heads, self.weights, strict=True)]
        self.maps = torch.stack(terms) if self.pool is None else self.pool.maps(torch.stack(terms))

    @torch.no_grad()
    def _share_equally(self) -> None:
        """Terms without the last norm's centring, and what is split over all of them."""
        norm, stream = self.stream.final_norm, self.stream
        paths = (*self.heads, *self._mlps, self._embedding)
        if norm is None or not norm.centred or self.pool is not None or any(path.norms != (norm,) for path in paths):
            raise UnsupportedModel(
                f"terms as in the published decomposition (prs) need a LayerNorm at the end of the stream and no other "
                f"that a term passes through; {type(stream.base).__name__} is built otherwise"
            )
        before = torch.eye(len(norm.gain)).to(norm.gain) if stream.projection is None else stream.projection.weight
        matrix = before.float() * norm.gain
        shift = torch.zeros_like(matrix[:, 0]) if norm.shift is None else before.float() @ norm.shift
        m = 2 * self.n_layers + 1
        self._shared = [matrix.sum(1) / m, shift / m]  # of the row's mean, and of the norm's shift: [d'] each
        path = TermPath(matrix, (norm,))
        self.heads, self._mlps, self._embedding = [path] * self.n_layers, [path] * self.n_layers, path
        of_mean, of_shift = (part / self.n_heads for part in self._shared)
        maps = []
        for site, weight in zip(self._tap.sites, self.weights, strict=True):
            bias = getattr(site.projection, "bias", None)
            own = torch.zeros_like(of_mean) if bias is None else matrix @ bias.float() / self.n_heads
            rest = torch.stack([own, -of_mean, of_shift], 1).expand(self.n_heads, -1, -1)
            maps.append(torch.cat([torch.einsum("oD,Dhd->hod", matrix, weight), rest], 2))
        self.maps = torch.stack(maps)
        apart = stream.projection is not None and stream.projection.bias is not None  # which comes first
        self.constants = self.constants[:1] if apart else []

    def _through(self, path: TermPath, norm: Norm | None) -> TermPath:
        if norm is not None and norm.shift is not None:
            self.constants.append(TermPath(path.matrix @ norm.shift, path.norms))
        return path.before(norm)

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor], tokens: Tensor | None = None) -> Terms:
        """Run the model on a batch (its arguments by name, each [B, ...]) and take its outputs apart.

        `tokens` reads others than the decomposer's own, a bool mask [B, T]: one row of terms for each, in their order.
        """
        n = len(next(iter(inputs.values())))
        own = tokens is None
        if own and self.pool is None:
            tokens = self._tokens(inputs)
        seen: dict[nn.Module | str, Tensor] = {}

        def pick(x: Any) -> Tensor:
            x = x[0] if isinstance(x, tuple) else x
            if x.dim() == 2 and len(x) == n:  # pooled already, as before CLIP's last norm
                return x
            # A copy: a view of one token would keep every token of every layer alive.
            chosen = take(x.reshape(n, -1, x.shape[-1]), tokens)
            return chosen if tokens is None else shelf.put(chosen)

        shelf = _Shelf(4 * self.n_layers + 2)
        handles = self._watch(seen, pick)
        try:
            with self._tap as heads:
                reading = heads.read("output", tokens)
                outputs: list[Tensor] = []
                if tokens is not None:
                    handles += self._shelve(reading, outputs, shelf)
                self.stream.base(**inputs)
                outputs = outputs or list(reading)
        finally:
            for handle in handles:
                handle.remove()
        terms = self._terms(seen, outputs)
        if not self._checked:
            self._check(terms, self.outputs(inputs) if own else terms.output)
        return terms

    def outputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The output representation alone, [B, d']: for passes with edited heads. Gradients flow where recorded."""
        n = len(next(iter(inputs.values())))
        tokens = None if self.pool is not None else self._tokens(inputs)
        seen: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            flat = output.dim() == 2 and len(output) == n
            seen.append(output if flat else take(output.reshape(n, -1, output.shape[-1]), tokens))

        handle = self.stream.end.register_forward_hook(keep)
        try:
            self.stream.base(**inputs)
        finally:
            handle.remove()
        end = seen[-1]
        if self.pool is not None:
            output = self.pool.output(end)
        else:
            output = end if self.stream.projection is None else self.stream.projection(end)
        output = output.float()
        return nn.functional.normalize(output, dim=-1) if self.unit else output

    def head_terms(self, z: Tensor) -> Tensor:
        """The heads' terms in the output's own space: z [B, L, H, d] to [B, L, H, d']."""
        if isinstance(self.pool, AttentionPool):
            return z
        return torch.einsum("blhd,lhod->blho", z, self.maps)

    def _shelve(self, reading: Reading, outputs: list[Tensor], shelf: _Shelf) -> list[RemovableHandle]:
        """Put each layer's head outputs on the shelf as soon as its block is through."""

        def after(layer: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                outputs.append(shelf.put(reading[layer]))
                reading.clear()

            return hook

        return [b.module.register_forward_hook(after(layer)) for layer, b in enumerate(self.stream.blocks)]

    def _tokens(self, inputs: Mapping[str, Tensor]) -> Any:
        if self.token == "first":
            return 0
        if self.token != "last":
            return self.token
        mask = inputs.get("attention_mask")
        if mask is None:
            return -1
        if not mask.bool().any(1).all():
            row = int(torch.argmin(mask.bool().any(1).int()))
            raise InputError(f"row {row} of the batch has no token that is not padding: its text is empty")
        last = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
        return nn.functional.one_hot(last, mask.shape[1]).bool()

    def _watch(self, seen: dict[nn.Module | str, Tensor], pick: Callable[[Any], Tensor]) -> list[RemovableHandle]:
        """Keep what goes into the norms and the first block, and what comes out of the MLPs and the end."""

        def before(key: nn.Module | str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen[key] = pick(args[0] if args else kwargs["hidden_states"])

            return hook

        def after(key: nn.Module | str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                seen[key] = pick(output)

            return hook

        blocks, norms = self.stream.blocks, self._norms.values()
        handles = [norm.register_forward_pre_hook(before(norm), with_kwargs=True) for norm in norms]
        handles.append(blocks[0].module.register_forward_pre_hook(before("embedding"), with_kwargs=True))
        handles += [block.mlp.register_forward_hook(after(block.mlp)) for block in blocks]
        return [*handles, self.stream.end.register_forward_hook(after("end"))]

    def _terms(self, seen: Mapping[nn.Module | str, Tensor], outputs: list[Tensor]) -> Terms:
        scales = {norm: norm.scale(seen[module]) for norm, module in self._norms.items()}

        def scale(norms: tuple[Norm, ...]) -> Tensor:  # [B], or [B, T] before a pool
            product = torch.ones_like(seen["embedding"][..., 0], dtype=torch.float32)
            for norm in norms:
                product = product * scales[norm]
            return product

        end = seen["end"].float()
        sources = [(self._embedding, seen["embedding"])]
        sources += [(path, seen[b.mlp]) for path, b in zip(self._mlps, self.stream.blocks, strict=True)]
        if self.pool is not None:
            return self.pool.terms(self, end, sources, outputs, scale)
        projection = self.stream.projection
        output = end if projection is None else projection(end.to(projection.weight.dtype)).float()
        length = 1 / output.norm(dim=-1) if self.unit else torch.ones_like(output[:, 0])
        others = [(x.float() @ path.matrix.T) * (length * scale(path.norms))[:, None] for path, x in sources]
        by_layer = torch.stack([length * scale(path.norms) for path in self.heads], 1)
        own = torch.stack(outputs, 1).float()
        if self._shared:
            norm = self._embedding.norms[0]
            assert norm.module is not None
            mean, deviation = seen[norm.module].float().mean(-1), 1 / scales[norm]
            row = torch.stack([torch.ones_like(mean), mean, deviation], 1)  # [B, 3]
            own = torch.cat([own, row[:, None, None].expand(*own.shape[:3], -1)], -1)
            of_mean, of_shift = self._shared
            part = length[:, None] * (of_shift - (mean / deviation)[:, None] * of_mean)
            others = [x + part for x in others]
        z = own * by_layer[:, :, None, None]
        constant = torch.zeros_like(output)
        for vector, norms in self.constants:
            constant += (length * scale(norms))[:, None] * vector
        return Terms(z, torch.stack(others, 1), constant, output * length[:, None], by_layer)

    def _check(self, terms: Terms, again: Tensor) -> None:
        """Once: do the terms add up, and does the model say the same `again`? Else its family must not pass."""
        name, block = type(self.stream.base).__name__, type(self.stream.blocks[0].module).__name__
        tolerance = _TOLERANCE.get(next(self.stream.base.parameters()).dtype, _LOW_PRECISION)
        whole = self.head_terms(terms.heads).sum((1, 2)) + terms.others.sum(1) + terms.constant
        for found, what, why in (
            (whole, f"the terms of {name} miss", f"its blocks ({block}) add something to the stream that is not known"),
            (again, f"a second pass of {name} misses", "it masks tokens at random, or is in training mode"),
        ):
            miss = float((found - terms.output).abs().max() / terms.output.abs().max())
            if not miss <= tolerance:
                raise UnsupportedModel(f"{what} its output by {miss:.1%}: {why}")
        self._checked = True


@torch.no_grad()
def reads_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> Reads | None:
    """What the linear layer `classifier` reads of a model's tokens, seen on a batch; None for the first token alone.

    Known are the first token, the mean of all tokens or of those after the first few, and several of these side by
    side, each before or after the final norm. No family is named: whatever reads so can be taken apart.
    """
    stream, seen = stream_of(model), dict[str, Tensor]()

    def keep(key: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            x = args[0] if key == "read" else output[0] if isinstance(output, tuple) else output
            seen[key] = x

        return hook

    classifier = model.get_submodule("classifier")
    watched = {"read": classifier, "normed": stream.end, "plain": stream.blocks[-1].module}
    handles = [module.register_forward_hook(keep(key)) for key, module in watched.items()]
    try:
        model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    for key in ("normed", "plain"):
        spans = _spans(seen[key].unsqueeze(1) if seen[key].dim() == 2 else seen[key], seen["read"])
        if spans is not None:
            first = key == "normed" and spans == ((0, 1),)
            return None if first else Reads(spans, key == "normed")
    raise UnsupportedModel(
        f"the classifier of {type(model).__name__} reads {seen['read'].shape[-1]} features that are neither its first "
        "token nor a mean of its tokens, nor these side by side: it does something more, which heads cannot be "
        "followed through"
    )


def _spans(tokens: Tensor, read: Tensor) -> tuple[tuple[int, int | None], ...] | None:
    """The spans of tokens [B, T, D] whose means, side by side, are what was read, [B, K D]; None if there are none."""
    width, tolerance = tokens.shape[-1], _READ_TOLERANCE.get(tokens.dtype, 0.02)
    if read.dim() != 2 or read.shape[-1] % width:
        return None
    tokens, found = tokens.double(), list[tuple[int, int | None]]()
    from_here_on = tokens.flip(1).cumsum(1).flip(1) / torch.arange(tokens.shape[1], 0, -1).to(tokens)[:, None]
    known = torch.cat([tokens[:, :1], from_here_on], 1)  # the first, and the mean of those from each one on
    for part in read.double().split(width, -1):
        miss = (known - part[:, None]).abs().amax((0, 2)) / part.abs().max()
        best = int(miss.argmin())
        if not miss[best] <= tolerance:
            return None
        found.append((0, 1) if best == 0 else (best - 1, None))
    return tuple(found)
