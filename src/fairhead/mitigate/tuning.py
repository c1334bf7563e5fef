"""The loop that fine-tunes a language model: AdamW, a linear schedule, a checkpoint to go on from, a stop at a NaN.

A method brings its examples and the loss of a batch; everything else is the same for all of them.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fairhead.errors import InputError
from fairhead.mitigate.triplets import shuffled_batches
from fairhead.store import settled, whole_folder, write_json
from fairhead.train.loop import TrainingDiverged
from fairhead.train.step import autocast

E = TypeVar("E")
# The parts of a batch's loss by name; "loss" is what is made small, the others are for the record.
Parts = Mapping[str, Tensor]
OnStep = Callable[[int, int, Mapping[str, float]], None]

_CHECKPOINT = "checkpoint"
# Steps between copies of the weights that a NaN falls back to.
_KEEP_EVERY = 25


@dataclass(frozen=True)
class TuningPlan:
    """How to fine-tune. Beyond the epoch and the rate, which are KLAAD's, the paper is silent.

    Attributes:
        epochs: passes over the examples.
        batch_size: examples a step (a triplet is one example).
        learning_rate: AdamW's, at its highest.
        weight_decay: AdamW's.
        warmup: share of the steps in which the rate rises from 0; it then falls to 0, both in a straight line.
        max_grad_norm: gradients are clipped to this norm.
        precision: "no" (32 bit) or "bf16" (autocast; attention weights then have three digits).
        lora: rank of LoRA matrices on the attention projections, trained instead of the model's own weights; None
            trains all weights.
        checkpoint_minutes: time between checkpoints, where there is a folder for them.
        seed: of the order of batches and of LoRA's first weights.

    Example:
        >>> plan = TuningPlan(warmup=0.1)
        >>> [round(plan.rate(step, 100), 2) for step in (0, 9, 55, 99)]
        [0.1, 1.0, 0.5, 0.01]
    """

    epochs: int = 1
    batch_size: int = 8
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    warmup: float = 0.03
    max_grad_norm: float = 1.0
    precision: Literal["no", "bf16"] = "no"
    lora: int | None = None
    checkpoint_minutes: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "lora"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"a plan needs {name} of at least 1; found {value}")
        for name in ("learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise InputError(f"a plan needs a {name} above 0; found {getattr(self, name)}")
        if not 0 <= self.warmup <= 1:
            raise InputError(f"warmup is a share of the steps, from 0 to 1; found {self.warmup}")
        if self.precision not in ("no", "bf16"):
            raise InputError(f"precision {self.precision!r} is not known; no or bf16 is expected")

    def rate(self, step: int, steps: int) -> float:
        """The share of `learning_rate` that step `step` (from 0) of `steps` uses."""
        warm = round(self.warmup * steps)
        return (step + 1) / warm if step < warm else (steps - step) / max(1, steps - warm)


@dataclass(frozen=True)
class Tuned:
    """What a run did.

    Attributes:
        history: the parts of the loss at every step.
        steps: how many there were, those before a checkpoint included.
        seconds: wall time of this run.
    """

    history: tuple[Mapping[str, float], ...]
    steps: int
    seconds: float


def with_lora(model: nn.Module, plan: TuningPlan) -> nn.Module:
    """The model with LoRA matrices on its attention projections, or the model itself where the plan has none.

    Raises:
        InputError: peft is not installed, or does not know the family's projections.
    """
    if plan.lora is None or hasattr(model, "merge_and_unload"):
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise InputError('LoRA needs peft, not installed here: pip install "fairhead[lora]"') from None
    torch.manual_seed(plan.seed)
    try:
        return get_peft_model(model, LoraConfig(r=plan.lora, lora_alpha=2 * plan.lora, task_type="CAUSAL_LM"))
    except ValueError as error:
        raise InputError(f"peft cannot put LoRA into {type(model).__name__}: {error}") from None


def merged(model: Any) -> Any:
    """The model with LoRA matrices, where it has them, added into its own weights."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def tune(
    model: nn.Module,
    examples: Sequence[E],
    lengths: Sequence[int],
    loss: Callable[[Sequence[E]], Parts],
    plan: TuningPlan | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    identity: Mapping[str, Any] | None = None,
    on_step: OnStep | None = None,
) -> Tuned:
    """Fine-tune the parameters of `model` that ask for gradients; the model ends in evaluation mode.

    The model is in evaluation mode while it is trained, too: dropout would make two readings of one sentence differ.

    Args:
        model: what `loss` reads.
        examples: what to train on.
        lengths: tokens of each example, so that batches hold examples of like length.
        loss: parts of the loss of a batch of examples; "loss" is made small.
        plan: how to train.
        folder: where checkpoints lie; a run that was stopped goes on from the one it finds there.
        identity: what else a checkpoint must agree with: the data, the method's settings.
        on_step: called with the steps done, all steps, and the parts of the loss.

    Raises:
        InputError: nothing to train on or nothing to train; a checkpoint of another run.
        TrainingDiverged: a loss or a gradient was not finite; the model is back at its last good weights.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> def loss(batch):
        ...     return {"loss": (model(torch.tensor(batch)) - 1.0).square().mean()}
        >>> tune(model, [[1.0]] * 64, [1] * 64, loss, TuningPlan(learning_rate=0.1, epochs=8)).history[-1]["loss"] < 0.1
        True
    """
    plan = plan or TuningPlan()
    if not examples:
        raise InputError("there is nothing to train on: no example is left")
    named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not named:
        raise InputError(f"no parameter of this {type(model).__name__} asks for gradients: there is nothing to train")
    device = next(iter(named.values())).device
    torch.manual_seed(plan.seed)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(named.values(), plan.learning_rate, weight_decay=plan.weight_decay, fused=fused)
    per_epoch = math.ceil(len(examples) / plan.batch_size)
    steps = plan.epochs * per_epoch
    same = as_json({"plan": asdict(plan), "examples": len(examples), **(identity or {})})
    keeper = None if folder is None else _Checkpoint(Path(folder) / _CHECKPOINT, same, named, optimizer)
    history = [] if keeper is None else keeper.restore()
    model.eval()
    started = saved = time.perf_counter()
    kept = {name: weight.detach().clone() for name, weight in named.items()}
    good = len(history)
    batches: list[list[int]] = []
    for step in range(len(history), steps):
        if step % per_epoch == 0 or not batches:
            batches = shuffled_batches(lengths, plan.batch_size, plan.seed, epoch=step // per_epoch)
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * plan.rate(step, steps)
        with autocast(device, plan.precision):
            parts = loss([examples[i] for i in batches[step % per_epoch]])
        optimizer.zero_grad()
        parts["loss"].backward()
        norm = nn.utils.clip_grad_norm_(named.values(), plan.max_grad_norm)
        # One wait for the device a step, before the weights are touched.
        values = torch.stack([part.detach().float() for part in (*parts.values(), norm)]).tolist()
        if not all(map(math.isfinite, values)):
            with torch.no_grad():
                for name, weight in named.items():
                    weight.copy_(kept[name])
            found = dict(zip((*parts, "gradient norm"), values, strict=True))
            seen = f"step {step + 1} of {steps}: {', '.join(f'{name} {value:g}' for name, value in found.items())}"
            if step == 0:
                raise TrainingDiverged(f"{seen}; nothing was trained yet. Are the model's weights damaged?")
            raise TrainingDiverged(
                f"{seen}; the model is back at its weights after step {good}. Lower the learning rate (now "
                f"{plan.learning_rate:g}), or compute in 32 bit"
            )
        if step % _KEEP_EVERY == 0:
            # This batch has just shown that the weights before this step are good.
            kept = {name: weight.detach().clone() for name, weight in named.items()}
            good = step
        optimizer.step()
        history.append(dict(zip(parts, values, strict=False)))
        if on_step is not None:
            on_step(step + 1, steps, history[-1])
        if keeper is not None and time.perf_counter() - saved >= 60 * plan.checkpoint_minutes and step + 1 < steps:
            keeper.save(history)
            saved = time.perf_counter()
    return Tuned(tuple(history), steps, time.perf_counter() - started)


def gradient_norms(model: nn.Module, parts: Parts) -> dict[str, float]:
    """How hard each part of a loss pulls: the norm of its gradient with the weight that it has in the loss.

    Args:
        model: what is trained.
        parts: of one batch; those that the loss does not depend on are left out.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> near, far = model.weight.sum() - 1, model.weight.sum() + 1
        >>> gradient_norms(model, {"loss": 2 * near + 0.5 * far, "near": near, "far": far})
        {'near': 2.0, 'far': 0.5}
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    named = {name: part for name, part in parts.items() if name != "loss" and part.requires_grad}
    found: dict[str, float] = {}
    for name, part in named.items():
        (share,) = torch.autograd.grad(parts["loss"], part, retain_graph=True, allow_unused=True)
        if share is not None:
            pulls = torch.autograd.grad(part, weights, share, retain_graph=True, allow_unused=True)
            norms = [pull.norm().float() for pull in pulls if pull is not None]
            found[name] = float(torch.stack(norms).norm()) if norms else 0.0
    return found


def remove_checkpoint(folder: str | os.PathLike[str]) -> None:
    """Remove what `tune` has left in a folder, once the model is saved."""
    shutil.rmtree(Path(folder) / _CHECKPOINT, ignore_errors=True)


@dataclass(frozen=True)
class _Checkpoint:
    """Weights, AdamW's moments and the history after some step: safetensors and JSON."""

    folder: Path
    identity: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    optimizer: torch.optim.Optimizer

    def save(self, history: Sequence[Mapping[str, float]]) -> None:
        """Put a new one in the place of the old: one of them is always whole."""
        tensors = {f"weight.{name}": weight.detach().contiguous() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{moment}.{name}"] = self.optimizer.state[weight][moment].contiguous()
        with whole_folder(self.folder) as beside:
            save_file(tensors, beside / "state.safetensors")
            write_json(beside / "state.json", {"identity": self.identity, "history": list(history)})

    def restore(self) -> list[Mapping[str, float]]:
        """Put back what was saved and return its history; empty where there is nothing."""
        folder = settled(self.folder)
        if not (folder / "state.json").is_file():
            return []
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            tensors = load_file(folder / "state.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(f"the checkpoint in {folder} cannot be read ({error}): remove it to start anew") from None
        difference = first_difference(state["identity"], self.identity)
        if difference is not None:
            raise InputError(
                f"the checkpoint in {folder} is of another run ({difference}): "
                "repeat that run's settings, choose another folder, or remove the checkpoint"
            )
        moments = {
            i: {
                "step": torch.tensor(float(len(state["history"]))),
                "exp_avg": tensors[f"exp_avg.{name}"],
                "exp_avg_sq": tensors[f"exp_avg_sq.{name}"],
            }
            for i, name in enumerate(self.weights)
        }
        self.optimizer.load_state_dict({"state": moments, "param_groups": self.optimizer.state_dict()["param_groups"]})
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(tensors[f"weight.{name}"])
        return list(state["history"])


def first_difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """The first thing in which two settings, as JSON has them, differ; None where they agree.

    Example:
        >>> first_difference({"plan": {"epochs": 1, "seed": 0}}, {"plan": {"epochs": 1, "seed": 3}})
        'seed was 0, now 3'
    """
    for key in {**expected, **found}:
        before, now = found.get(key), expected.get(key)
        if before != now and isinstance(before, dict) and isinstance(now, dict):
            return first_difference(before, now)
        if before != now:
            return f"{key} was {before!r}, now {now!r}"
    return None


def as_json(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is, as it is compared: in JSON's types, without what does not change its result."""
    plain: dict[str, Any] = json.loads(json.dumps(identity))
    plain["plan"].pop("checkpoint_minutes", None)
    return plain
