"""A model's output representation as an exact sum: one term a head, one an MLP, the embedding, and the biases.

The residual stream is a sum of what the blocks add to it. A norm is linear once a row's own deviation is known, so
every term can be followed to the output: through a fixed matrix, times a scalar of the row. A head's term is then
`maps[layer, head] @ z`, where z [d] is the head's output times that scalar. All statistics of a head can therefore be
kept in its own few dimensions instead of the model's.

The mean that a LayerNorm takes out is taken out of each term separately, which is the same in sum.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fairhead.errors import InputError, UnsupportedModel
from fairhead.heads import Reading, output_weight, tap
from fairhead.heads.tokens import take
from fairhead.locate.streams import Norm, Stream, stream_of

# The share of the output that may be lost to rounding before a decomposition is refused.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_LOW_PRECISION = 0.1


class Terms(NamedTuple):
    """A batch of outputs, taken apart. M counts the embedding and the MLPs."""

    heads: Tensor  # z, [B, L, H, d]; `maps[l, h] @ z[b, l, h]` is the term of a head
    others: Tensor  # terms of the embedding (first) and of each layer's MLP (then, and of a pooler's, last), [B, M, d']
    constant: Tensor  # what biases add, [B, d']
    output: Tensor  # the model's own output, [B, d']
    # [B, L]: a head's z is its own output times this. None after a pooler, which reads many tokens.
    scale: Tensor | None


class _Path(NamedTuple):
    """How a term goes to the output: a matrix [d', D], and the norms whose deviation divides it."""

    matrix: Tensor
    norms: tuple[Norm, ...]

    def before(self, norm: Norm | None) -> "_Path":
        if norm is None:
            return self
        return _Path(norm.through(self.matrix), self.norms if norm.module is None else (*self.norms, norm))


class _Constant(NamedTuple):
    vector: Tensor
    norms: tuple[Norm, ...]


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


class AttentionPool:
    """A pooling head: a learned query looks at all tokens; an MLP adds to what it sees.

    The pool needs every token of every layer, so a batch holds them all at once: choose smaller batches.
    """

    def __init__(self, module: nn.Module) -> None:
        whole: Any = module
        self._module = whole
        attention: nn.MultiheadAttention = whole.attention
        self._heads = attention.num_heads
        width = attention.embed_dim
        assert attention.in_proj_weight is not None
        w_q, w_k, w_v = attention.in_proj_weight.detach().float().chunk(3)
        b_q, b_k, b_v = attention.in_proj_bias.detach().float().chunk(3)
        split = (self._heads, width // self._heads)
        self._query = (whole.probe.detach().float().reshape(width) @ w_q.T + b_q).unflatten(0, split)  # [P, e]
        self._key, self._key_bias = w_k.unflatten(0, split), b_k.unflatten(0, split)  # [P, e, D]
        self._value = w_v.unflatten(0, split)
        out = attention.out_proj.weight.detach().float()
        self._out = out.unflatten(1, split)  # [D, P, e]
        self._bias = out @ b_v + attention.out_proj.bias.detach().float()  # attention sums to 1, so b_v passes whole

    def output(self, end: Tensor) -> Tensor:
        """The pooled output of tokens [B, T, D], by the module itself: [B, D]."""
        pooled: Tensor = self._module(end)
        return pooled

    def terms(
        self,
        end: Tensor,
        sources: Sequence[tuple[Any, Tensor]],
        heads: Sequence[Any],
        weights: Sequence[Tensor],
        outputs: Sequence[Tensor],
        constants: Sequence[Any],
        scale: Callable[[Any], Tensor],
        unit: bool,
    ) -> Terms:
        """Terms of the pooled output; `end` [B, T, D] is what the pool sees, `outputs` the heads', [B, T, H, d]."""
        logits = torch.einsum("pe,btpe->bpt", self._query, torch.einsum("btD,peD->btpe", end, self._key))
        logits = logits + (self._query * self._key_bias).sum(-1)[:, None]
        look = (logits * self._query.shape[-1] ** -0.5).softmax(-1)  # [B, P, T]
        pooled = self._pool(torch.einsum("bpt,btD->bpD", look, end)) + self._bias
        module = self._module
        mlp = module.mlp(module.layernorm(pooled.to(module.layernorm.weight.dtype))).float()
        output = pooled + mlp
        length = 1 / output.norm(dim=-1) if unit else torch.ones_like(output[:, 0])

        def through(path: Any, x: Tensor) -> Tensor:  # [B, T, D] -> [B, D]
            seen = torch.einsum("bpt,btD->bpD", look * scale(path.norms)[:, None], x.float())
            return self._pool(seen @ path.matrix.T) * length[:, None]

        others = [through(path, x) for path, x in sources]
        others.append(mlp * length[:, None])
        terms = []
        for path, weight, x in zip(heads, weights, outputs, strict=True):
            seen = torch.einsum("bpt,bthd->bphd", look * scale(path.norms)[:, None], x.float())
            written = torch.einsum("bphd,Dhd->bphD", seen, weight) @ path.matrix.T
            terms.append(torch.einsum("bphD,peD,ope->bho", written, self._value, self._out) * length[:, None, None])
        constant = self._bias.expand_as(output) * length[:, None]
        for vector, norms in constants:
            seen = torch.einsum("bpt,D->bpD", look * scale(norms)[:, None], vector)
            constant = constant + self._pool(seen) * length[:, None]
        return Terms(torch.stack(terms, 1), torch.stack(others, 1), constant, output * length[:, None], None)

    def _pool(self, seen: Tensor) -> Tensor:
        """What each pooling head saw [B, P, D] through its value and output matrices: [B, D]."""
        return torch.einsum("bpe,ope->bo", torch.einsum("bpD,peD->bpe", seen, self._value), self._out)


class Decomposer:
    """Takes the outputs of a model apart, a batch at a time.

    Image models (CLIP, ViT, DINOv2, ...) are read at their first token and after the projection where there is one,
    SigLIP after its attention pooling; text models at the first token or at the last that is not padding. Post-norm
    models (BERT) are exact as well: every later norm is followed with the row's own deviation.

    Args:
        model: a transformers model in evaluation mode; of a CLIP or SigLIP with two towers, the image tower is read.
        token: "first", "last" (by the attention mask) or a position.
        unit: divide by the length of the output, as zero-shot classification does; by default where a projection or a
            pooler makes the output an embedding.

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

    def __init__(self, model: nn.Module, token: str | int = "first", unit: bool | None = None) -> None:
        if isinstance(token, str) and token not in ("first", "last"):
            raise InputError(f"token is {token!r}; expected 'first', 'last' or a position")
        self.stream: Stream = stream_of(model)
        self.token = token
        self.unit = bool(self.stream.projection or self.stream.pooler) if unit is None else unit
        self.pool = None if self.stream.pooler is None else AttentionPool(self.stream.pooler)
        self._tap = tap(self.stream.base)
        sites = self._tap.sites
        if len(sites) != len(self.stream.blocks) or len({(s.n_heads, s.head_dim) for s in sites}) > 1:
            raise UnsupportedModel(
                f"{type(model).__name__} has {len(self.stream.blocks)} blocks and attention layers with "
                f"{sorted({s.n_heads for s in sites})} heads ({len(sites)} layers); one layer a block, all with "
                "equally many heads, is expected"
            )
        self.n_layers, self.n_heads = len(sites), sites[0].n_heads
        self._follow()
        self.head_dim = self.maps.shape[-1]
        self.width = self.maps.shape[-2]
        self._checked = False

    @torch.no_grad()
    def _follow(self) -> None:
        """Walk from the output back to the first block, collecting each term's path."""
        stream, sites = self.stream, self._tap.sites
        first = output_weight(sites[0])
        width = first.shape[0]
        matrix = torch.eye(width, device=first.device)
        if stream.projection is not None:
            matrix = stream.projection.weight.float()
        self._constants: list[_Constant] = []
        if stream.projection is not None and stream.projection.bias is not None:
            self._constants.append(_Constant(stream.projection.bias.float(), ()))
        path = self._through(_Path(matrix, ()), stream.final_norm)
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
                self._constants.append(_Constant(attention.matrix @ bias.float(), attention.norms))
        self._mlps, self._heads, self._embedding = mlps[::-1], heads[::-1], path
        self._weights = weights[::-1]
        if self.pool is None:
            terms = [torch.einsum("oD,Dhd->hod", p.matrix, w) for p, w in zip(self._heads, self._weights, strict=True)]
            self.maps = torch.stack(terms)
        else:  # a pooled head has no few dimensions of its own: its term is kept as it is
            self.maps = torch.eye(width, device=first.device).expand(self.n_layers, self.n_heads, width, width)

    def _through(self, path: _Path, norm: Norm | None) -> _Path:
        if norm is not None and norm.shift is not None:
            self._constants.append(_Constant(path.matrix @ norm.shift, path.norms))
        return path.before(norm)

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor], tokens: Tensor | None = None) -> Terms:
        """Run the model on a batch (its arguments by name, each [B, ...]) and take its outputs apart.

        `tokens` reads others than the decomposer's own, a bool mask [B, T]: one row of terms for each, in their order.
        """
        n = len(next(iter(inputs.values())))
        if tokens is None and self.pool is None:
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
            self._check(terms, next(self.stream.base.parameters()).dtype)
        return terms

    @torch.no_grad()
    def outputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The output representation alone, [B, d']: for passes in which heads are edited."""
        n = len(next(iter(inputs.values())))
        tokens = None if self.pool is not None else self._tokens(inputs)
        seen: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            flat = output.dim() == 2 and len(output) == n
            seen.append(output if flat else take(output.reshape(n, -1, output.shape[-1]), tokens))

        handle = self._end.register_forward_hook(keep)
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
        if self.pool is not None:
            return z
        return torch.einsum("blhd,lhod->blho", z, self.maps)

    def _shelve(self, reading: Reading, outputs: list[Tensor], shelf: "_Shelf") -> list[RemovableHandle]:
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
        def keep_input(key: nn.Module | str) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen[key] = pick(args[0] if args else kwargs["hidden_states"])

            return hook

        def keep_output(module: nn.Module, args: Any, output: Any) -> None:
            seen[module] = pick(output)

        stream = self.stream
        norms = {norm.module for path in (*self._heads, *self._mlps) for norm in path.norms if norm.module is not None}
        handles = [norm.register_forward_pre_hook(keep_input(norm), with_kwargs=True) for norm in norms]
        handles += [block.mlp.register_forward_hook(keep_output) for block in stream.blocks]
        start = stream.blocks[0].module
        handles.append(start.register_forward_pre_hook(keep_input("embedding"), with_kwargs=True))

        def keep_end(module: nn.Module, args: Any, output: Tensor) -> None:
            seen["end"] = pick(output)

        handles.append(self._end.register_forward_hook(keep_end))
        return handles

    @property
    def _end(self) -> nn.Module:
        """The norm that the stream ends in."""
        last = self.stream.final_norm or self.stream.blocks[-1].mlp_norm
        assert last is not None
        assert last.module is not None
        return last.module

    def _terms(self, seen: Mapping[nn.Module | str, Tensor], outputs: list[Tensor]) -> Terms:
        scales = {
            norm: norm.scale(seen[norm.module])
            for path in (*self._heads, *self._mlps, self._embedding)
            for norm in path.norms
            if norm.module is not None
        }

        def scale(norms: tuple[Norm, ...]) -> Tensor:  # [B], or [B, T] before a pool
            product = torch.ones_like(seen["embedding"][..., 0], dtype=torch.float32)
            for norm in norms:
                product = product * scales[norm]
            return product

        end = seen["end"].float()
        sources = [(self._embedding, seen["embedding"])]
        sources += [(path, seen[b.mlp]) for path, b in zip(self._mlps, self.stream.blocks, strict=True)]
        if self.pool is not None:
            return self.pool.terms(end, sources, self._heads, self._weights, outputs, self._constants, scale, self.unit)
        projection = self.stream.projection
        output = end if projection is None else projection(end.to(projection.weight.dtype)).float()
        length = 1 / output.norm(dim=-1) if self.unit else torch.ones_like(output[:, 0])
        others = [(x.float() @ path.matrix.T) * (length * scale(path.norms))[:, None] for path, x in sources]
        by_layer = torch.stack([length * scale(path.norms) for path in self._heads], 1)
        z = torch.stack(outputs, 1).float() * by_layer[:, :, None, None]
        constant = torch.zeros_like(output)
        for vector, norms in self._constants:
            constant += (length * scale(norms))[:, None] * vector
        return Terms(z, torch.stack(others, 1), constant, output * length[:, None], by_layer)

    def _check(self, terms: Terms, dtype: torch.dtype) -> None:
        """Once: do the terms add up? A family that does more to its stream than is known here must not pass."""
        whole = self.head_terms(terms.heads).sum((1, 2)) + terms.others.sum(1) + terms.constant
        miss = float((whole - terms.output).abs().max() / terms.output.abs().max())
        if not miss <= _TOLERANCE.get(dtype, _LOW_PRECISION):
            raise UnsupportedModel(
                f"the terms of {type(self.stream.base).__name__} miss its output by {miss:.1%}: its blocks "
                f"({type(self.stream.blocks[0].module).__name__}) add something to the stream that is not known"
            )
        self._checked = True
