"""How to train: plans, checked when they are made. Imports no torch."""

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, Self

from fairhead.errors import check_known
from fairhead.settings import (
    PYTHON_ONLY,
    Count,
    NotNegative,
    Option,
    Positive,
    Seed,
    Share,
    WholeNumber,
    check_settings,
)


@dataclass(frozen=True)
class Plan:
    """What every training has; the same plan and seed give the same model on the same machine.

    Attributes:
        epochs: passes over the training set.
        batch_size: examples per step.
        learning_rate: AdamW's, at its highest.
        weight_decay: AdamW's.
        schedule: "cosine" or "linear" down to zero, or "constant"; all after a linear warm-up.
        warmup: share of all steps spent on the warm-up.
        max_grad_norm: gradients are clipped to this norm; None leaves them.
        accumulate: pieces that a batch is read in, one after the other: less memory, the same step. A loss that
            compares the rows of a batch sees one piece at a time.
        precision: "no" (32 bit) or "bf16" (autocast).
        seed: of the order of the batches and of everything random inside the model.
        checkpoint_minutes: time between checkpoints, where there is a folder for them.
    """

    epochs: Count = 20
    batch_size: Count = 64
    learning_rate: Annotated[Positive, Option("--lr", "RATE")] = 1e-3
    weight_decay: NotNegative = 0.05
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Share = 0.05
    max_grad_norm: Positive | None = 1.0
    accumulate: Count = 1
    precision: Literal["no", "bf16"] = "no"
    seed: Seed = 0
    checkpoint_minutes: NotNegative = 10.0
    panel: ClassVar[str] = "Training"

    def __post_init__(self) -> None:
        check_settings(type(self), vars(self), "the plan")

    @classmethod
    def of(cls, **values: Any) -> Self:
        """The plan with these values; as the class itself, but a setting that it lacks is an `InputError`."""
        known = [setting.name for setting in fields(cls)]
        for name in values:
            check_known(name, known, f"{cls.__name__} has no setting {name!r}; it has:")
        return cls(**values)

    def rate(self, step: int, steps: int) -> float:
        """The share of `learning_rate` that step `step` (from 0) of `steps` uses."""
        warm = round(self.warmup * steps)
        if self.schedule == "linear":
            return (step + 1) / warm if step < warm else (steps - step) / max(1, steps - warm)
        warm = max(1, warm)
        if step < warm:
            return (step + 1) / warm
        if self.schedule == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


@dataclass(frozen=True)
class TrainingPlan(Plan):
    """How to train a classifier.

    The last, smaller batch of an epoch is left out: batch statistics need full ones.

    Attributes:
        device: where to train; None takes the accelerator if there is one.
        data_on_device: keep all examples in the device's memory; None does so where they take less than half of what
            is free there.
        replay: record the step as a CUDA graph and replay it, where the device can and the step is the same work every
            time (see `fairhead.train.recorded`). The results are the same; set it to False for a model that does
            something in Python at every step, such as skipping layers by chance, and for a loss that reads a variable
            of its surroundings which changes (attributes of the loss may change between epochs).
        compile: fuse what layers do between their matrix products, on a GPU (see `fairhead.train.recorded`). Some ten
            seconds, once in a process for each kind of layer; results differ by rounding, and where there is dropout,
            as those of another seed do: compiled code draws other numbers.

    Example:
        >>> from fairhead.train import TrainingPlan
        >>> TrainingPlan(epochs=3).schedule
        'cosine'
        >>> TrainingPlan(weight_decay=-2)
        Traceback (most recent call last):
        fairhead.errors.InputError: the plan: weight_decay is -2; expected a number of at least 0
    """

    device: Annotated[str | None, PYTHON_ONLY] = None
    data_on_device: Annotated[bool | None, PYTHON_ONLY] = None
    replay: bool = True
    compile: bool = False


@dataclass(frozen=True)
class LanguagePlan(Plan):
    """How to fine-tune a language model. Epoch and rate are KLAAD's; beyond them its paper is silent.

    Attributes:
        lora: rank of LoRA matrices on the attention projections, trained instead of the model's own weights; None
            trains all weights.
        only_heads: train in these attention heads only (their rows of q, k and v, their columns of the output):
            L11H1,L10H5, or those of a headmap.json that `fairhead locate` wrote; None trains all weights.
        random_heads: as a control: as many other heads of the same layers, drawn with the seed.
        checks: how often training looks at terms that it is not trained on. The weights that are kept are the last at
            which the stereotype score was no further from 50 % than before training and perplexity within
            --perplexity-rise; training ends after two checks in a row at or past 50 %. 0: it runs to its end.
        watched: share of the training items, by target term, that is set aside for the checks and not trained on.
        perplexity_rise: share by which the perplexity of the neutral text (of the unrelated sentences, where there is
            none) may rise.
        start: the token that texts start with: bos, eos, none or a token; default is BOS, or end of text where there
            is none. Score the model with the same.
        gradient_checkpointing: keep what enters each layer and compute the rest again for the gradient: the same step
            in much less memory, at a third more time.

    Example:
        >>> LanguagePlan().learning_rate
        1e-05
    """

    epochs: Count = 1
    batch_size: Count = 8
    learning_rate: Annotated[Positive, Option("--lr", "RATE")] = 1e-5
    weight_decay: NotNegative = 0.0
    schedule: Literal["cosine", "linear", "constant"] = "linear"
    warmup: Share = 0.03
    lora: Count | None = None
    only_heads: Annotated[str | None, Option(metavar="HEADS")] = None
    random_heads: bool = False
    checks: WholeNumber = 0
    watched: Share = 0.0
    perplexity_rise: NotNegative = 0.01
    start: Annotated[str, Option(metavar="TOKEN")] = "default"
    gradient_checkpointing: bool = False
