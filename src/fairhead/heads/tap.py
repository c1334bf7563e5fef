"""`fairhead.tap`: open a Hugging Face model at its attention heads, to read them and to edit them."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Self, SupportsIndex

import torch
from torch import Tensor, nn

from fairhead.errors import InputError, UnsupportedModel, did_you_mean
from fairhead.heads import routes
from fairhead.heads.requests import Edit, HeadEdit, Reading, Requests, Tokens, Transform, check_tokens, take
from fairhead.heads.sites import READABLE, Site, find_sites

Where = Iterable[tuple[int, int]]


class Tap:
    """An open model. Nothing is installed until something is asked for; leaving the block removes all of it.

    A model runs as usual inside the block. Requests are made first, then seen or applied in every forward pass:
    transforms of q and k before attention, edits of head outputs after it, readings last, so that a reading
    always shows what the model goes on with. Taps nest: an inner one works on top of the outer one.

    Requests are kept on the model's modules: `copy.deepcopy` copies them with the model, as it copies hooks, and a copy
    made inside the block keeps them. Saving a model saves none of them.

    Gradient checkpointing runs layers a second time in the backward pass: call `backward` inside the block, so that it
    meets the same requests there.

    Layers are numbers, counted over the model's attention modules from 0 (or from -1, backwards); heads are query
    heads. Token positions are those of the call's own queries: a decoding step with a cache has one, number 0.

    Attributes:
        sites: the attention layers within reach, each with `layer`, `name`, `n_heads`, `head_dim`.
    """

    def __init__(self, model: nn.Module, layers: SupportsIndex | Iterable[int] | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"cannot tap {type(model).__name__} {model!r}; expected a model that is loaded")
        if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
            raise UnsupportedModel(
                "DataParallel runs copies of the model in threads, whose readings would overwrite each other; tap "
                "model.module, or use DistributedDataParallel"
            )
        everything = find_sites(model)
        self._by_layer = {site.layer: site for site in everything}
        self._n_layers = len(everything)
        chosen = range(self._n_layers) if layers is None else _numbers(layers)
        self.sites = [self._by_layer[layer] for layer in sorted({self._layer(number) for number in chosen})]
        self._is_open = False

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> Self:
        """Open the tap; `with` does it for you. For a tap that outlives a block."""
        self._is_open = True
        return self

    def close(self) -> None:
        """Remove every request. Readings keep what they have seen."""
        self._is_open = False
        for site in self._by_layer.values():
            routes.uninstall(site)

    def read(
        self,
        what: str,
        tokens: Tokens = None,
        *,
        layers: SupportsIndex | Iterable[int] | None = None,
        keep: Literal["last", "all"] = "last",
    ) -> Reading:
        """Read from the forward passes to come. Gradients flow through what is read, if the pass records any.

        Args:
            what: "q", "k", "v" ([B, H, T, d]; k and v have fewer heads under grouped queries), "weights"
                ([B, H, Q, K], before dropout), "output" ([B, T, H, d]) or "contribution" ([B, T, H, model width]:
                each head through its block of W_O, after a gate where the family has one; their sum plus the
                projection's bias is the attention output).
            tokens: None for all, an int (that axis is dropped), a slice, a list of positions, or a bool mask
                [B, T] (rows are then flattened to [N, ...]; not for weights). For weights: the query rows;
                no other row is built.
            layers: a part of the tap's layers.
            keep: "last" forward pass only, or "all" of them.
        """
        if what not in READABLE:
            known = ", ".join(READABLE)
            raise InputError(f"cannot read {what!r}; expected one of {known}.{did_you_mean(str(what), READABLE)}")
        if keep not in ("last", "all"):
            raise InputError(f"keep is {keep!r}; expected 'last' or 'all'")
        tokens = check_tokens(tokens)
        if what == "weights" and isinstance(tokens, Tensor) and tokens.dtype == torch.bool:
            raise InputError("weights cannot be read at a bool mask; give positions, or read all rows and index them")
        sites = self._chosen(layers)
        reading = Reading(what, tokens, keep, [site.layer for site in sites])
        for requests, site in self._requests(sites, what, f"read {what!r}"):
            requests.add_reading(site, reading)
        return reading

    def transform(self, function: Transform, *, layers: SupportsIndex | Iterable[int] | None = None) -> None:
        """Change q and k before attention: `function(q, k, site)` returns the two in the same shapes."""
        for requests, site in self._requests(self._chosen(layers), "transform", "transform q and k"):
            requests.transforms.append((site, function))

    def edit(self, where: Where, function: HeadEdit, tokens: Tokens = None) -> None:
        """Replace head outputs by `function(x, site)`, x of shape [..., heads, d].

        Args:
            where: (layer, head) pairs.
            function: called once a layer, with that layer's selected heads in ascending order.
            tokens: as in `read`; the leading axes of x follow from it.
        """
        tokens = check_tokens(tokens)
        chosen = self._heads_by_site(where)
        for requests, site in self._requests(list(chosen), "edit", "edit head outputs"):
            requests.edits.append((site, Edit(chosen[site], function, tokens)))

    def zero(self, where: Where, tokens: Tokens = None) -> None:
        """Put zeros in place of head outputs."""
        self.edit(where, lambda x, site: torch.zeros_like(x), tokens)

    def scale(self, where: Where, factor: float, tokens: Tokens = None) -> None:
        """Multiply head outputs."""
        self.edit(where, lambda x, site: x * factor, tokens)

    def mean(self, where: Where, values: Mapping[int, Tensor], tokens: Tokens = None) -> None:
        """Put given means in place of head outputs.

        Args:
            where: (layer, head) pairs.
            values: by layer, [H, d] for every token alike or [T, H, d] by position. Take them over a set that is
                balanced between the groups, or the ablation brings in the mean of the larger one.
            tokens: as in `read`.
        """
        where, chosen = list(where), check_tokens(tokens)
        given = {self._layer(layer): value for layer, value in values.items()}
        means: dict[int, Tensor] = {}  # [selected heads, d] or [T, selected heads, d]
        for site, heads in self._heads_by_site(where).items():
            if site.layer not in given:
                raise InputError(f"no mean was given for layer {site.layer}; there are means for {sorted(given)}")
            mean = torch.as_tensor(given[site.layer])
            if mean.shape[-2:] != (site.n_heads, site.head_dim) or mean.dim() > 3:
                raise InputError(
                    f"the mean of layer {site.layer} has shape {list(mean.shape)}; expected "
                    f"[{site.n_heads}, {site.head_dim}] or [tokens, {site.n_heads}, {site.head_dim}]"
                )
            means[site.layer] = mean[..., heads, :]

        def replace(x: Tensor, site: Site) -> Tensor:
            new = means[site.layer].to(device=x.device, dtype=x.dtype)
            if new.dim() == 3 and isinstance(chosen, Tensor):
                new = take(new.expand(len(chosen), -1, -1, -1), chosen)
            elif new.dim() == 3:
                new = take(new[None], chosen)[0]
            if new.dim() == 3 and new.shape != x.shape[-3:]:
                raise InputError(
                    f"the mean of layer {site.layer} is for {len(means[site.layer])} positions, of which {len(new)} "
                    f"were chosen; this pass has {x.shape[-3]}: give means for as many, or one for all, [heads, d]"
                )
            return new.expand_as(x)

        self.edit(where, replace, tokens)

    def resample(self, where: Where, index: Tensor | Sequence[int], tokens: Tokens = None) -> None:
        """Put the outputs of other examples of the batch in place: example i gets those of `index[i]`.

        Args:
            where: (layer, head) pairs.
            index: one example's number for each example of the batch.
            tokens: as in `read`, but no mask: its rows are not the same tokens in every example.
        """
        if isinstance(check_tokens(tokens), Tensor):
            raise InputError("head outputs cannot be resampled at a bool mask; give positions")
        rows = torch.as_tensor(index)
        # Compared with its own length here, on the host: an index beyond the end ends the use of a CUDA device.
        if rows.dim() != 1 or rows.is_floating_point() or not all(0 <= row < len(rows) for row in rows.tolist()):
            raise InputError(f"index is {index!r}; expected the number of an example, from 0, for each of the batch")

        def resample(x: Tensor, site: Site) -> Tensor:
            if len(x) != len(rows):
                raise InputError(
                    f"index has {len(rows)} examples and this batch {len(x)}: make the request anew for it"
                )
            return x[rows.to(x.device)]

        self.edit(where, resample, tokens)

    def project(
        self,
        where: Where,
        matrices: Mapping[tuple[int, int], Tensor],
        means: Mapping[tuple[int, int], Tensor] | None = None,
        tokens: Tokens = None,
    ) -> None:
        """Multiply head outputs by a matrix: x becomes mean + M (x − mean).

        Args:
            where: (layer, head) pairs.
            matrices: by (layer, head), M of shape [d, d]; I − u uᵀ takes the direction u out.
            means: by (layer, head), [d]; zero where not given.
            tokens: as in `read`.
        """
        where = list(where)
        by_pair = {(self._layer(layer), head): torch.as_tensor(matrix) for (layer, head), matrix in matrices.items()}
        centre = {(self._layer(layer), head): torch.as_tensor(mean) for (layer, head), mean in (means or {}).items()}
        maps: dict[int, tuple[Tensor, Tensor]] = {}  # [selected heads, d, d] and [selected heads, d]
        for site, heads in self._heads_by_site(where).items():
            pairs, d = [(site.layer, head) for head in heads], site.head_dim
            for pair in pairs:
                if pair not in by_pair:
                    raise InputError(f"no matrix was given for layer {pair[0]}, head {pair[1]}")
                _check_shape(f"the matrix of layer {pair[0]}, head {pair[1]}", by_pair[pair], [d, d])
                if pair in centre:
                    _check_shape(f"the mean of layer {pair[0]}, head {pair[1]}", centre[pair], [d])
            matrix = torch.stack([by_pair[pair] for pair in pairs])
            maps[site.layer] = matrix, torch.stack([centre.get(pair, matrix.new_zeros(d)) for pair in pairs])

        def project(x: Tensor, site: Site) -> Tensor:
            matrix, middle = (part.to(device=x.device, dtype=x.dtype) for part in maps[site.layer])
            return middle + torch.einsum("hij,...hj->...hi", matrix, x - middle)

        self.edit(where, project, tokens)

    def _requests(self, sites: list[Site], ability: str, verb: str) -> list[tuple[Requests, Site]]:
        if not self._is_open:
            raise InputError("the tap is closed: make requests inside the `with` block")
        for site in sites:  # all or none: nothing is installed when one of them cannot
            site.require(ability, verb)
        return [(routes.install(site, ability), site) for site in sites]

    def _layer(self, number: int) -> int:
        if not -self._n_layers <= number < self._n_layers:
            raise InputError(f"layer {number} does not exist: the model has {self._n_layers} attention layers")
        return number % self._n_layers

    def _chosen(self, layers: SupportsIndex | Iterable[int] | None) -> list[Site]:
        if layers is None:
            return self.sites
        numbers = dict.fromkeys(self._layer(number) for number in _numbers(layers))  # each once
        return [self._tapped(number) for number in numbers]

    def _tapped(self, layer: int) -> Site:
        tapped = [site.layer for site in self.sites]
        if layer not in tapped:
            raise InputError(f"layer {layer} is not tapped: the tap was opened on {tapped}")
        return self._by_layer[layer]

    def _heads_by_site(self, where: Where) -> dict[Site, list[int]]:
        chosen: dict[int, set[int]] = {}
        for layer, head in _pairs(where):
            site = self._tapped(self._layer(layer))
            if not 0 <= head < site.n_heads:
                raise InputError(f"head {head} does not exist: layer {site.layer} has {site.n_heads} heads")
            chosen.setdefault(site.layer, set()).add(head)
        return {self._by_layer[layer]: sorted(heads) for layer, heads in sorted(chosen.items())}


def _numbers(layers: SupportsIndex | Iterable[int]) -> list[int]:
    try:
        if isinstance(layers, Iterable):
            return [operator.index(layer) for layer in layers]
        return [operator.index(layers)]
    except TypeError:
        raise InputError(f"layers is {layers!r}; expected a layer's number or several of them") from None


def _pairs(where: Where) -> list[tuple[int, int]]:
    try:
        return [(operator.index(layer), operator.index(head)) for layer, head in where]
    except (TypeError, ValueError):
        raise InputError(
            f"where is {where!r}; expected (layer, head) pairs of numbers, as in [(0, 3), (-1, 2)]"
        ) from None


def _check_shape(name: str, tensor: Tensor, shape: list[int]) -> None:
    if list(tensor.shape) != shape:
        raise InputError(f"{name} has shape {list(tensor.shape)}; expected {shape}")


def tap(model: nn.Module, layers: SupportsIndex | Iterable[int] | None = None) -> Tap:
    """Read and edit the attention heads of a Hugging Face model.

    Args:
        model: any transformers model, a part of one (`clip.vision_model`), or one wrapped by PEFT, DDP, torch.compile.
        layers: the attention layers to read or edit; None for all. Other layers are not touched.

    Raises:
        UnsupportedModel: the model has no attention layer within reach, or cannot do what is asked.

    Example:
        >>> import torch, fairhead
        >>> from transformers import ViTConfig, ViTModel
        >>> model = ViTModel(ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        ...                            intermediate_size=16, image_size=8, patch_size=4)).eval()
        >>> images = torch.zeros(3, 3, 8, 8)
        >>> with fairhead.tap(model) as heads:
        ...     rows = heads.read("weights", tokens=0)   # what the first token attends to
        ...     heads.zero([(0, 1), (1, 3)])             # set two heads to zero
        ...     _ = model(images)
        >>> rows[-1].shape                               # batch, heads, keys
        torch.Size([3, 4, 5])
    """
    return Tap(model, layers)
