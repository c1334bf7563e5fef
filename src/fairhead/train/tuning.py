"""Fine-tuning a language model: the common loop over examples of unequal length, watched at every step.

A method brings its examples and the loss of a batch; everything else is the same for all of them.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from fairhead.errors import InputError, UnsupportedModel
from fairhead.heads.sites import Heads, Site, check_heads, find_sites, heads_named, read_head_map
from fairhead.train import LanguagePlan
from fairhead.train.loop import Checkpoint, Loop, TrainingDiverged, agreed, joined
from fairhead.train.step import LengthBatches, Parts, Step, free_memory, optimizer_of

E = TypeVar("E")
OnStep = Callable[[int, int, Mapping[str, float]], None]

# Steps between copies of the weights that a NaN falls back to.
_KEEP_EVERY = 25
_EVEN = 0.5  # the stereotype score of a model without a preference


@dataclass(frozen=True)
class Tuned:
    """What a run did."""

    history: tuple[Mapping[str, float], ...]  # the parts of the loss at every step
    steps: int  # how many there were, those before a checkpoint included
    seconds: float  # wall time, that before a checkpoint included
    chosen: int = 0  # the step whose weights were kept; 0 is the model as it was
    looks: Mapping[int, "Look"] = field(default_factory=dict)  # step -> what a check saw after it; 0 is before training
    taken_back: int = 0  # how many checks saw the model forget its language, and had the kept weights put back


class Score(NamedTuple):
    """The stereotype score of a source of data, or of one of its categories."""

    source: str
    ss: float  # a share
    chance: float  # how far the score may be off by chance
    category: str | None = None

    @property
    def beyond_chance(self) -> float:
        """How much further from even it is than chance explains; 0 where chance explains all."""
        return max(0.0, abs(self.ss - _EVEN) - self.chance)

    @property
    def name(self) -> str:
        """What it is called beside the parts of the loss."""
        return f"ss of {self.source or 'all'}"


class Look(NamedTuple):
    """What is seen of a model on terms and texts that it is not trained on."""

    ss: float  # the stereotype score, a share
    perplexity: float
    chance: float = 0.0  # how far the score may be off by chance
    sources: tuple[Score, ...] = ()  # the scores of all sources
    own: float = 1.0  # the perplexity of what the model itself wrote before training


def tune(
    model: nn.Module,  # what `loss` reads
    examples: Sequence[E],  # what to train on
    lengths: Sequence[int],  # tokens of each example, so that batches hold examples of like length
    # Parts of the loss of a batch of examples; "loss" is minimised. It may have `see`, which is told what each check
    # saw, and `steers`: it corrects what goes past even, so that training need not end there.
    loss: Callable[[Sequence[E]], Parts],
    plan: LanguagePlan | None = None,  # how to train
    *,
    # Folder for the state of the training; one that was killed goes on from what it finds there
    checkpoints: str | os.PathLike[str] | None = None,
    # What else a checkpoint must agree with: the data, the method's settings
    identity: Mapping[str, Any] | None = None,
    # For the checks of the plan (`LanguagePlan.checks`); without it there are none
    look: Callable[[], Look] | None = None,
    # Says what is wrong with the model as it is, if anything; asked before its weights are kept, and at the end
    broken: Callable[[], str | None] | None = None,
    on_step: OnStep | None = None,  # called with the steps done, all steps, and the parts of the loss
) -> Tuned:
    """Fine-tune the parameters of `model` that ask for gradients; the model ends in evaluation mode.

    The model is in evaluation mode while it is trained, too: dropout would make two readings of one sentence differ.
    Of several processes (`accelerate launch`) each reads its part of a batch, as one process does with `accumulate`.
    """
    plan = plan or LanguagePlan()
    if not examples:
        raise InputError("there is nothing to train on: no example is left")
    if not any(weight.requires_grad for weight in model.parameters()):
        raise InputError(f"no parameter of this {type(model).__name__} asks for gradients: there is nothing to train")
    torch.manual_seed(plan.seed)
    optimizer = optimizer_of(model, plan.learning_rate, plan.weight_decay)
    same = {"plan": asdict(plan), "examples": len(examples), **(identity or {})}
    processes = joined()
    first = processes.is_main_process
    checkpoint = None if checkpoints is None else Checkpoint(Path(checkpoints), same, writes=first)
    batches = LengthBatches(examples, lengths, plan.batch_size, plan.seed)
    model.eval()
    stopping = None if look is None or not plan.checks else _Stopping(look, plan)  # looks at the model as it was
    loop = Loop(model, optimizer, batches, plan, checkpoint, saves_kept=stopping is not None)
    good = loop.done if stopping is None else stopping.best(loop.history)
    see: Callable[[Look], None] = getattr(loss, "see", lambda seen: None)

    def heed(seen: Look) -> bool:
        """Steer by a check; or train more slowly from then on where the model forgets its language, and say False."""
        assert stopping is not None
        loop.enough = not getattr(loss, "steers", False) and stopping.enough(loop.history)
        if stopping.forgets(seen):
            loop.slower /= 2
            return False
        see(seen)
        return True

    for seen in () if stopping is None else stopping.looks(loop.history).values():  # before a checkpoint, too
        heed(seen)

    def stop(reason: str) -> NoReturn:
        loop.put_back()
        raise TrainingDiverged(
            f"{reason}; the model is back at its weights after step {good}. Lower the learning rate (now "
            f"{plan.learning_rate:g}), or compute in 32 bit",
            model=model if good else None,
        )

    def check() -> None:
        wrong = None if broken is None else broken()
        if wrong is not None:
            stop(f"after step {loop.done} of {loop.steps} {wrong}")

    def keep() -> None:
        nonlocal good
        check()
        loop.keep()
        good = loop.done

    def watch(parts: Parts) -> None:
        """Stop before a loss or gradient that is not finite reaches the weights."""
        # One wait for the device a step.
        values = torch.stack([part.float() for part in parts.values()]).tolist()
        found = dict(zip(parts, values, strict=True))
        if not all(map(math.isfinite, values)):
            seen = ", ".join(f"{name} {x:g}" for name, x in found.items())
            if loop.done == 0:
                raise TrainingDiverged(
                    f"step 1 of {loop.steps}: {seen}; nothing was trained yet. Are the model's weights damaged?"
                )
            stop(f"step {loop.done + 1} of {loop.steps}: {seen}")
        if stopping is None and loop.done and loop.done % _KEEP_EVERY == 0:
            # This batch has just shown that the loss of the weights before this step is good.
            keep()
        found.pop("gradient norm", None)
        loop.history.append(found)

    def after_step() -> None:
        if stopping is not None and stopping.due(loop.done, loop.steps):
            seen = stopping.look()
            of_sources = {one.name: one.ss for one in seen.sources}
            loop.history[-1] |= {"ss": seen.ss, "perplexity": seen.perplexity, "own": seen.own, **of_sources}
            if not heed(seen):
                loop.put_back()
            elif stopping.best(loop.history) == loop.done:
                keep()
        if on_step is not None:
            on_step(loop.done, loop.steps, loop.history[-1])

    step = Step(
        loss,
        optimizer,
        max_grad_norm=plan.max_grad_norm,
        precision=plan.precision,
        accumulate=plan.accumulate,
        watch=watch,
        share=(processes.process_index, processes.num_processes),
    )

    def within_memory(batch: Sequence[E]) -> torch.Tensor:
        """A step; a batch that the device has too little memory for is read in twice as many pieces, from then on."""
        try:
            return step(batch)
        except torch.OutOfMemoryError:
            if step.accumulate >= len(batch) or processes.num_processes > 1:  # the others wait for this one
                raise
        # Here, where the failed pass and its tensors are gone.
        step.accumulate *= 2
        del loop.history[loop.done :]
        optimizer.zero_grad()
        free_memory("for a whole batch, which is trained on in pieces; see --accumulate")
        return within_memory(batch)

    with checkpointed(model, plan):
        loop.run(within_memory, after_step=after_step)
    if stopping is None:
        check()
        return Tuned(tuple(loop.history), loop.done, loop.seconds, loop.done)
    loop.put_back()
    looks = stopping.looks(loop.history)
    taken_back = sum(stopping.forgets(seen) for seen in looks.values())
    return Tuned(tuple(loop.history), loop.done, loop.seconds, good, looks, taken_back)


class _Stopping:
    """Which of the checked weights to keep: the last that are no further from even, at no cost in language.

    The last and not the nearest to even: a score of a few hundred items is noisy, and the nearest would often be an
    early one, at a high learning rate, by luck. Past even a score may be by chance alone, and it must be nearer than
    before, unless chance explains the whole change: what leans as far the other way is no nearer, however few the
    terms. A score that is not clearly off even before training, as that of few terms seldom is, ends no training, and
    weights are kept that are as near to even, on the same side, as it may be by chance.
    """

    def __init__(self, look: Callable[[], Look], plan: LanguagePlan) -> None:
        self.look, self._checks = lambda: agreed(look()), plan.checks
        self._before = self.look()
        self._most = (1 + plan.perplexity_rise) * self._before.perplexity
        self._most_own = (1 + plan.own_rise) * self._before.own
        self._furthest = max(abs(self._before.ss - _EVEN), self._before.chance)

    def forgets(self, seen: Look) -> bool:
        """Whether its own texts have become too unlikely: unlike the perplexity of neutral text, that stays."""
        return seen.own > self._most_own

    def due(self, done: int, steps: int) -> bool:
        """Whether there is a check after so many steps: they are spread evenly, the last at the end."""
        return done in {round(steps * (k + 1) / self._checks) for k in range(self._checks)}

    def looks(self, history: Sequence[Mapping[str, float]]) -> dict[int, Look]:
        """Step -> what was seen after it."""
        found = {0: self._before}
        for i, line in enumerate(history, 1):
            if "ss" in line:
                sources = (one._replace(ss=line[one.name]) for one in self._before.sources)
                found[i] = Look(line["ss"], line["perplexity"], 0.0, tuple(sources), line["own"])
        return found

    def best(self, history: Sequence[Mapping[str, float]]) -> int:
        """The step whose weights are to be kept, of those so far."""
        looks = self.looks(history).items()
        kept = ((k, seen) for k, seen in looks if seen.perplexity <= self._most and not self.forgets(seen))
        return max(k for k, seen in kept if self._near(seen.ss))

    def _near(self, ss: float) -> bool:
        """Whether a score is near enough to even."""
        off, before, chance = abs(ss - _EVEN), abs(self._before.ss - _EVEN), self._before.chance
        if (ss - _EVEN) * (self._before.ss - _EVEN) < 0:  # past even
            return off + before <= chance or (off <= chance and off < before and not math.isclose(off, before))
        return off <= self._furthest

    def enough(self, history: Sequence[Mapping[str, float]]) -> bool:
        """Whether the last two checks have seen a score of even, or on the other side of it."""
        later = [look.ss - _EVEN for look in self.looks(history).values() if not self.forgets(look)][1:][-2:]
        clear = abs(self._before.ss - _EVEN) > self._before.chance
        return clear and len(later) == 2 and all(ss * (self._before.ss - _EVEN) <= 0 for ss in later)


@contextmanager
def checkpointed(model: Any, plan: LanguagePlan) -> Iterator[None]:
    """Layers compute what is inside them again for the gradient while the block is open, if the plan asks for that.

    transformers does so in layers that are in training mode. They alone are: what they hold, dropout above all, stays
    in evaluation mode, in which models are fine-tuned here.
    """
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not plan.gradient_checkpointing:
        yield
        return
    if not layers or not getattr(model, "supports_gradient_checkpointing", True):
        raise InputError(f"{type(model).__name__} has no gradient checkpointing in transformers: leave it out")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
        model.gradient_checkpointing_disable()


def with_lora(model: nn.Module, plan: LanguagePlan) -> nn.Module:
    """The model with LoRA matrices on its attention projections, or the model itself where the plan has none."""
    if plan.lora is None or hasattr(model, "merge_and_unload"):
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise InputError('LoRA needs peft, not installed here: pip install "fairhead[lora]"') from None
    width = getattr(getattr(model, "config", None), "hidden_size", plan.lora)
    if plan.lora > width:
        raise InputError(f"LoRA's rank is {plan.lora:,}, more than the model's width of {width:,}: 8 or 16 is usual")
    torch.manual_seed(plan.seed)
    try:
        return get_peft_model(model, LoraConfig(r=plan.lora, lora_alpha=2 * plan.lora, task_type="CAUSAL_LM"))
    except ValueError as error:
        raise InputError(f"peft cannot put LoRA into {type(model).__name__}: {error}") from None


def merged(model: Any) -> Any:
    """The model with LoRA matrices, where it has them, added into its own weights: in 32 bit, which loses no step.

    In the machine's memory: a GPU that just holds an 8B model in 16 bit cannot hold it in 32.
    """
    return model.cpu().float().merge_and_unload() if hasattr(model, "merge_and_unload") else model


def read_heads(text: str) -> Heads:
    """Heads from their names (L11H1,L10H5), or those that `fairhead locate` chose (headmap.json)."""
    return read_head_map(text)["selected"] if text.endswith(".json") else heads_named(text)


def random_heads(heads: Sequence[tuple[int, int]], per_layer: Sequence[int], seed: int) -> Heads:
    """Draw as many other heads of the same layers; a layer with too few others repeats some of the given heads."""
    rng, found = np.random.default_rng(seed), []
    for layer in sorted({layer for layer, _ in heads}):
        own = [head for of, head in heads if of == layer]
        others = [head for head in range(per_layer[layer]) if head not in own]
        order = [*rng.permutation(others).tolist(), *rng.permutation(own).tolist()]
        found += [(layer, int(head)) for head in sorted(order[: len(own)])]
    return tuple(found)


@contextmanager
def only_heads(model: nn.Module, plan: LanguagePlan) -> Iterator[Heads]:
    """While the block is open, training changes the heads of the plan alone; yields them, none where it names none.

    A key and value head that several query heads share is trained with each of them.
    """
    if plan.only_heads is None:
        yield ()
        return
    if plan.lora is not None or plan.weight_decay:
        raise InputError("heads are trained in the model's own weights, without decay: leave lora and weight_decay out")
    sites = find_sites(model)
    heads = read_heads(plan.only_heads)
    check_heads(heads, [site.n_heads for site in sites])
    if not heads:
        raise InputError(f"{plan.only_heads} names no head, so there is nothing to train")
    if plan.random_heads:
        heads = random_heads(heads, [site.n_heads for site in sites], plan.seed)
    asked = {name: weight.requires_grad for name, weight in model.named_parameters()}
    masks = [found for site in sites for found in _masks(site, [head for layer, head in heads if layer == site.layer])]
    model.requires_grad_(False)
    hooks = [weight.requires_grad_().register_hook(partial(torch.mul, mask)) for weight, mask in masks]
    try:
        yield heads
    finally:
        for hook in hooks:
            hook.remove()
        for name, weight in model.named_parameters():
            weight.requires_grad_(asked[name])


def _masks(site: Site, heads: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """The parameters of a layer that its heads are made of, each with a mask that is 1 where it is trained."""
    if not heads:
        return []
    size, module = site.head_dim, site.module
    found = [_mask(site.projection, "weight", _places(heads, size), inputs=True)]
    fused = getattr(module, "c_attn", None)
    if isinstance(fused, Conv1D):  # GPT-2: q, k and v side by side
        width = site.n_heads * size
        places = [place + part * width for part in range(3) for place in _places(heads, size)]
        return [*found, _mask(fused, "weight", places), _mask(fused, "bias", places)]
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = getattr(module, name, None)
        if type(projection) is not nn.Linear:
            raise UnsupportedModel(
                f"{site.family} (layer {site.layer}) has no linear {name}: which weights are a head's is not known"
            )
        there = projection.out_features // size
        own = sorted({head * there // site.n_heads for head in heads})
        kinds = ("weight",) if projection.bias is None else ("weight", "bias")
        found += [_mask(projection, kind, _places(own, size)) for kind in kinds]
    return found


def _places(heads: Sequence[int], size: int) -> list[int]:
    return [head * size + i for head in heads for i in range(size)]


def _mask(projection: Any, name: str, places: Sequence[int], inputs: bool = False) -> tuple[Tensor, Tensor]:
    """A parameter and its mask over outputs or inputs; a `Conv1D` stores [in, out], a linear layer [out, in]."""
    weight = getattr(projection, name)
    mask = torch.zeros_like(weight)
    of_columns = weight.dim() == 2 and inputs != isinstance(projection, Conv1D)
    mask[(slice(None), places) if of_columns else places] = 1
    return weight, mask
