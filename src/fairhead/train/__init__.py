"""The training loop: inputs and labels go in, never a group. Here are the plans, which need no torch."""

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
    """Settings of every training run; the same plan and seed give the same model on the same machine.

    Attributes:
        epochs: passes over the training set.
        batch_size: examples per step.
        learning_rate: peak learning rate of AdamW.
        weight_decay: weight decay of AdamW.
        schedule: "cosine" or "linear" decay to zero, or "constant"; all after a linear warm-up.
        warmup: share of all steps used for the warm-up.
        max_grad_norm: clip gradients to this norm; None does not clip.
        accumulate: number of pieces a batch is split into (gradient accumulation): less memory, the same step. A loss
            that compares the rows of a batch sees one piece at a time. Language models use more pieces, with a message,
            if the GPU runs out of memory.
        precision: "no" (32 bit) or "bf16" (autocast).
        seed: seed of the batch order and of all randomness in the model.
        checkpoint_minutes: minutes between checkpoints, if there is a folder for them; more if writing one would take
            more than a twentieth of the time. 0 writes one after every step.
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
    checkpoint_minutes: NotNegative = 3.0
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
        device: device to train on; None uses the accelerator if there is one.
        data_on_device: keep all examples in the device's memory; None does so if they take less than half of its free
            memory.
        replay: run training steps as a CUDA graph, if the device and the model allow it (see
            `fairhead.train.recorded`). The results are the same. Turn it off for a model that runs Python code at every
            step, such as skipping layers at random, and for a loss that reads an outer variable that changes
            (attributes of the loss may change between epochs).
        compile: fuse operations between matrix products on a GPU with torch.compile (see `fairhead.train.recorded`).
            Takes about ten seconds, once per process and kind of layer. Results differ by rounding, and with dropout as
            much as between seeds, because compiled code draws other random numbers.

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
    """How to fine-tune a language model. The KLAAD paper gives only the epoch and the learning rate used here.

    Attributes:
        lora: rank of LoRA matrices on the attention projections, trained instead of the model's own weights; None
            trains all weights.
        only_heads: train only these attention heads (their rows of q, k and v, their columns of the output):
            L11H1,L10H5, or the heads in a headmap.json of `fairhead locate`; None trains all weights.
        random_heads: as a control, train as many other heads of the same layers, drawn with the seed.
        checks: number of checks on watched terms, which are not trained on. Training keeps the last weights at which
            the stereotype score was no further from 50 % than before training and perplexity within --perplexity-rise
            and --own-rise. On the other side of 50 %, the score must be nearer than before training and no further than
            half the width of its interval before training, or that half width must cover the whole change. Training
            stops after two checks in a row at or past 50 %, unless the method corrects itself by the checks
            (balance_pairs without --strength). If that interval includes 50 %, as with few terms, training never stops
            early, and on its own side the score may be as far from 50 % as half that interval is wide. The score is
            that of the source or category most clearly off 50 %, by its interval. After a check that exceeds
            --own-rise, training goes on from the kept weights at half the learning rate. 0 disables the checks.
        watched: share of the training items, by target term, that is set aside for the checks and not trained on.
        perplexity_rise: maximum relative rise in perplexity of the neutral text (or of the unrelated sentences, if
            there is no neutral text).
        own_rise: maximum relative rise in perplexity of texts that the model wrote before training. That of neutral
            text may fall while the model forgets its own language, if it was not trained on such text.
        start: token that texts start with: bos, eos, none or a token; the default is BOS, or EOS if there is no BOS.
            Use the same token when you score the model.
        gradient_checkpointing: recompute activations for the backward pass: the same step with much less memory, in
            about a third more time.

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
    own_rise: NotNegative = 0.1
    start: Annotated[str, Option(metavar="TOKEN")] = "default"
    gradient_checkpointing: bool = False
