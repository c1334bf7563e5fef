"""Every method by name, and the one way to run them: same loop, same plan, same data, all cost counted."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, cast

from torch import nn

from fairhead.errors import InputError, did_you_mean
from fairhead.mitigate.afr import AFR
from fairhead.mitigate.arl import ARL
from fairhead.mitigate.clusters import Clusters
from fairhead.mitigate.dam import ABLATIONS, DAM, RELEASED
from fairhead.mitigate.dro import DRO
from fairhead.mitigate.eiil import EIIL
from fairhead.mitigate.encoder_layer import EncoderLayer
from fairhead.mitigate.erm import ERM
from fairhead.mitigate.jtt import JTT
from fairhead.mitigate.kd import KD
from fairhead.mitigate.lff import LfF
from fairhead.mitigate.scaling import ClassScaling
from fairhead.mitigate.spare import SPARE
from fairhead.mitigate.training_job import Job, Method, Trained
from fairhead.mitigate.xrm import XRM
from fairhead.settings import check_config, check_settings
from fairhead.train import Epoch, Examples, Selection, TrainingPlan

# Name -> settings. None of these is ever given a group; see `references` for those that are.
METHODS: Mapping[str, Any] = {
    "erm": ERM(),
    "dam": DAM(),
    **ABLATIONS,
    **RELEASED,
    "encoder_layer": EncoderLayer(),
    "dro": DRO(),
    "dro_chi2": DRO("chi2"),
    "dro_cvar": DRO("cvar"),
    "arl": ARL(),
    "kd": KD(),
    "jtt": JTT(),
    "lff": LfF(),
    "eiil": EIIL(),
    "scaling": ClassScaling(),
    "afr": AFR(),
    "xrm": XRM(),
    "spare": SPARE(),
    "clusters": Clusters(),
}


def method(name: str, **options: Any) -> Any:
    """The settings of a method: its registered ones with `options` changed.

    Raises:
        InputError: no such method or option; the message names the nearest.

    Example:
        >>> method("dam", momentum=0.2).momentum
        0.2
        >>> method("dma")
        Traceback (most recent call last):
        fairhead.errors.InputError: no method 'dma'; known: erm, dam, ... Did you mean 'dam'?
    """
    return configured(METHODS, name, options)


def configured(methods: Mapping[str, Any], name: str, options: Mapping[str, Any]) -> Any:
    """Look `name` up among `methods` and change its options."""
    if name not in methods:
        raise InputError(f"no method {name!r}; known: {', '.join(methods)}.{did_you_mean(name, list(methods))}")
    known = [setting.name for setting in fields(methods[name])]
    for option in options:
        if option not in known:
            raise InputError(
                f"method {name!r} has no option {option!r}; it takes: {', '.join(known) or 'none'}."
                f"{did_you_mean(option, known)}"
            )
    check_settings(type(methods[name]), options, f"method {name!r}")
    # Lists come from YAML and JSON; settings are hashable.
    values = {option: tuple(value) if isinstance(value, list) else value for option, value in options.items()}
    return replace(methods[name], **values)


def run(
    config: Method,
    build_model: Callable[[], nn.Module],
    train: Examples,
    validation: Examples,
    plan: TrainingPlan | None = None,
    selection: Selection = "accuracy",
    on_epoch: Callable[[Epoch], None] | None = None,
    **more: Any,
) -> Trained:
    """Train with one method.

    Args:
        config: the method's settings, from `method(...)` or the class itself.
        build_model: gives a fresh, seeded model, the same one each time: some methods train two.
        train: inputs and labels, no groups.
        validation: inputs and labels to choose the epoch by.
        plan: how to train.
        selection: "accuracy" or "worst_class"; the first best epoch is kept.
        on_epoch: called after each epoch of each stage.
        more: attributes of `Job`: `checkpoints` to go on after a kill, `auxiliary` models by name, ...

    Returns:
        The model, the history, and everything that ran to get there.

    Raises:
        InputError: the method needs attributes, or the data cannot be trained on.

    Example:
        >>> import torch
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> from fairhead.mitigate import method, run
        >>> from fairhead.train import Examples, TrainingPlan
        >>> shape = dict(image_size=4, patch_size=2, num_channels=1, hidden_size=8, intermediate_size=8)
        >>> def build_model():
        ...     torch.manual_seed(0)
        ...     return ViTForImageClassification(ViTConfig(num_hidden_layers=1, num_attention_heads=2, **shape))
        >>> data = Examples({"pixel_values": torch.randn(8, 1, 4, 4)}, torch.arange(8) % 2)
        >>> trained = run(method("dam"), build_model, data, data, TrainingPlan(epochs=2, batch_size=4))
        >>> [(stage.name, stage.steps) for stage in trained.stages]
        [('training', 4)]
    """
    if getattr(config, "uses_attributes", False):
        raise InputError(
            f"{type(config).__name__} uses the sensitive attribute, and `run` trains without one: "
            "use fairhead.mitigate.references.run_with_attributes, and say so where the result is shown"
        )
    return run_job(config, Job(build_model, train, validation, plan or TrainingPlan(), selection, on_epoch, **more))


def run_job(config: Method, job: Job) -> Trained:
    """Train, and put together what came of it."""
    check_config(config)
    settings = {f.name: getattr(config, f.name) for f in fields(cast(Any, config)) if f.compare}
    job.identity = {"method": type(config).__name__, "settings": settings, **job.identity}
    model = config.train(job)
    assert job.last_fit is not None, f"{type(config).__name__} trained nothing through the loop"
    return Trained(model.eval(), job.last_fit, tuple(job.stages), config)
