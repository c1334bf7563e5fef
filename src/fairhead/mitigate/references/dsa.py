"""DSA, debiased self-attention (Qiang et al., 2024): patches that give the group away are found and perturbed.

It uses the attribute.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fairhead.errors import InputError, UnsupportedModel
from fairhead.heads import Tap
from fairhead.mitigate.references import JobWithAttributes, Reference
from fairhead.mitigate.training_job import row_losses
from fairhead.mitigate.two_stages import find_head
from fairhead.settings import Count, LogUniform, NotNegative, Prior, WholeNumber
from fairhead.train.step import Examples

_TEMPERATURE = 3.0  # of the attention rows that are compared
_ATTACK_RATE, _ATTACK_DECAY, _DECAY_EVERY = 0.22, 0.95, 10
_ATTACK_BATCH = 256


@dataclass(frozen=True)
class DSA(Reference):
    """Learn from every picture and from a copy in which the patches that reveal the group are adversarial noise.

    Training has three stages. First, a model learns to predict the *group*. Then, in each training picture, the patches
    that this model attends to most are replaced by noise optimised to mislead it. Last, a new model is trained on both
    pictures with CE(x) + CE(copy) + weight · Σ over layers of ½ KL(attention(x) ‖ attention(copy)), where attention
    rows are softened by a temperature of 3.

    Attributes:
        weight: weight of the attention term.
        patches: number of patches to replace in each picture.
        layer: layer whose attention selects them, from 0; the last layer if the model has fewer.
        attack_steps: Adam steps on the noise.
        attack_attention: weight of the attention on the noise, in the first half of the layers; the part of its
            gradient that opposes the gradient of the loss is removed.
        group_epochs: epochs of the model of the group; None for as many as the plan has.
    """

    weight: NotNegative = 1.0
    patches: Count = 1
    layer: WholeNumber = 3
    attack_steps: Count = 20
    attack_attention: NotNegative = 0.002
    group_epochs: Count | None = None

    priors: ClassVar[Mapping[str, Prior]] = {"weight": LogUniform(-1, 1)}

    def train(self, job: JobWithAttributes) -> nn.Module:
        """Two models, and the attack on the first."""
        pixels = job.train.inputs.get("pixel_values")
        if pixels is None or pixels.dim() != 4:
            raise UnsupportedModel(
                "DSA replaces patches of pictures: it needs pictures, and a model that is trained as a whole"
            )
        group_model = self._model_of_groups(job)
        with job.timed("attack"):
            noise, places = self._attacked(group_model, job)
        del group_model

        def loss(output: _Output, labels: Tensor, rows: Tensor) -> Tensor:
            assert output.double is not None
            apart = torch.stack([attention_divergence(one, other) for one, other in output.attention])
            both = row_losses(output.logits, labels).mean() + row_losses(output.double, labels).mean()
            return both + self.weight * apart.sum()

        model = job.build_model()
        train = Examples({**job.train.inputs, "noise": noise, "places": places}, job.train.labels)
        with _watched(model) as both:
            job.fit("training with doubles", both, train=train, loss=loss)
        return model

    def _model_of_groups(self, job: JobWithAttributes) -> nn.Module:
        model = job.build_model()
        head = find_head(model, job.train)
        (name,) = (name for name, module in model.named_modules() if module is head)
        model.set_submodule(name, nn.Linear(head.in_features, int(job.groups_train.max()) + 1))
        job.fit(
            "model of the group",
            model,
            train=Examples(job.train.inputs, job.groups_train),
            validation=Examples(job.validation.inputs, job.groups_validation),
            plan=replace(job.plan, epochs=self.group_epochs or job.plan.epochs),
            selection="accuracy",
            loss=lambda output, groups, rows: row_losses(output.logits, groups).mean(),
        )
        return model

    def _attacked(self, model: nn.Module, job: JobWithAttributes) -> tuple[Tensor, Tensor]:
        """What each double differs by: noise [n, k, channels, P, P] and the numbers of its patches [n, k]."""
        device, chance, found = next(model.parameters()).device, job.generator(), []
        model.requires_grad_(False)
        with _watched(model) as watched:
            for rows in torch.arange(len(job.train)).split(_ATTACK_BATCH):
                pixels = job.train.take(rows).to(device).inputs["pixel_values"]
                found.append(self._attack(watched, pixels, job.groups_train[rows].to(device), chance))
        noise, places = (torch.cat(parts) for parts in zip(*found, strict=True))
        return noise, places

    def _attack(
        self, watched: "_Watched", pixels: Tensor, groups: Tensor, chance: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            watched.model(pixel_values=pixels)
        x, seen, size = watched.pixels[0], watched.weights(), watched.patch_size
        places = telling_patches(seen[min(self.layer, len(seen) - 1)], self.patches)
        # Noise stays among the values that pictures have.
        low, high = (bound.view(1, 1, -1, 1, 1) for bound in (x.amin((0, 2, 3)), x.amax((0, 2, 3))))
        start = torch.rand(len(x), self.patches, x.shape[1], size, size, generator=chance).to(x.device)
        noise = (low + (high - low) * start).requires_grad_()
        optimizer = torch.optim.Adam([noise], lr=_ATTACK_RATE)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, _DECAY_EVERY, _ATTACK_DECAY)
        index = places[:, None, None, :] + 1  # after the first token
        for _ in range(self.attack_steps):
            output = watched.model(pixel_values=pasted(x, noise, places))
            loss = cross_entropy(output.logits.float(), groups, reduction="sum")
            early = watched.weights()[: max(1, len(seen) // 2)]
            looked = torch.stack([w.gather(-1, index.expand(*w.shape[:3], -1)).mean((1, 2)).sum() for w in early])
            (main,) = torch.autograd.grad(loss, noise, retain_graph=True)
            (side,) = torch.autograd.grad(looked.sum(), noise)
            noise.grad = -(main + self.attack_attention * without_conflict(side, main))
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                noise.copy_(torch.minimum(torch.maximum(noise, low), high))
        return noise.detach().cpu(), places.cpu()


class _Output(NamedTuple):
    """A tuple: parallel training takes outputs apart and puts them together, and loses what was added to others."""

    logits: Tensor
    double: Tensor | None = None
    attention: Sequence[tuple[Tensor, Tensor]] = ()


class _Watched(nn.Module):
    """A model that is shown a picture and, while training, its double; it keeps what it has seen in the latest pass."""

    def __init__(self, model: Any, tap: Tap) -> None:
        super().__init__()
        size = getattr(model.config, "patch_size", None)
        if not isinstance(size, int):
            raise UnsupportedModel(f"{type(model).__name__} has no patches of one size: DSA replaces patches")
        self.model, self.patch_size, self.reading = model, size, tap.read("weights")
        self.pixels: list[Tensor] = []  # as they were normalised, [B, channels, H, W]

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.pixels[:] = [kwargs["pixel_values"]]

    def forward(self, pixel_values: Tensor, noise: Tensor | None = None, places: Tensor | None = None) -> _Output:
        logits = self.model(pixel_values=pixel_values).logits
        if noise is None or places is None:
            return _Output(logits)
        weights = self.weights()
        double = self.model(pixel_values=pasted(self.pixels[0], noise, places)).logits
        return _Output(logits, double, list(zip(weights, self.weights(), strict=True)))

    def weights(self) -> list[Tensor]:
        """Attention of each layer, [B, H, T, T]."""
        found, (height, width) = list(self.reading), self.pixels[0].shape[-2:]
        n_patches = (width // self.patch_size) * (height // self.patch_size)
        if found[0].shape[-1] != n_patches + 1:
            raise UnsupportedModel(
                f"DSA expects one token before the {n_patches} patches; this model has {found[0].shape[-1]} tokens"
            )
        return found


@contextmanager
def _watched(model: nn.Module) -> Iterator[_Watched]:
    with Tap(model) as tap:
        watched = _Watched(model, tap)
        # Comes after whatever normalises: what it sees can be given to the model again.
        hook = model.register_forward_pre_hook(watched.see, with_kwargs=True)
        try:
            yield watched
        finally:
            hook.remove()
            watched.reading.clear()
            watched.pixels.clear()


def telling_patches(weights: Tensor, k: int) -> Tensor:
    """The k patches that get most of the weights [B, H, T, T] of a layer, [B, k]; the first token is no patch."""
    received = weights.mean((1, 2))[:, 1:]
    if k > received.shape[1]:
        raise InputError(f"DSA is to replace {k} patches; pictures have {received.shape[1]}")
    return received.topk(k, dim=1).indices


def pasted(pixels: Tensor, patches: Tensor, places: Tensor) -> Tensor:
    """Pictures [B, channels, H, W] with patches [B, k, channels, P, P] at `places` [B, k], counted row by row."""
    batch, channels, height, width = pixels.shape
    size = patches.shape[-1]
    rows, columns = height // size, width // size
    grid = pixels.view(batch, channels, rows, size, columns, size).permute(0, 2, 4, 1, 3, 5)
    flat = grid.reshape(batch, rows * columns, channels, size, size)
    where = places[:, :, None, None, None].expand_as(patches)
    flat = flat.scatter(1, where, patches.to(flat.dtype))
    grid = flat.view(batch, rows, columns, channels, size, size).permute(0, 3, 1, 4, 2, 5)
    return grid.reshape(batch, channels, height, width)


def without_conflict(side: Tensor, main: Tensor) -> Tensor:
    """`side` [B, ...] without what points against `main` [B, ...], row by row (PCGrad)."""
    flat_side, flat_main = side.flatten(1), main.flatten(1)
    along = (flat_side * flat_main).sum(1, keepdim=True)
    share = along.clamp(max=0) / flat_main.square().sum(1, keepdim=True).clamp(min=1e-30)
    return (flat_side - share * flat_main).view_as(side)


def attention_divergence(one: Tensor, other: Tensor, temperature: float = _TEMPERATURE) -> Tensor:
    """½ KL(one ‖ other) between rows of attention [B, H, T, T], softened and renormalised, on average over rows."""
    log_one, log_other = ((x.float().clamp(min=1e-12).log() / temperature).log_softmax(-1) for x in (one, other))
    return 0.5 * (log_one.exp() * (log_one - log_other)).sum(-1).mean()
