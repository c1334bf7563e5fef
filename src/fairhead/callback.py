"""Audits within somebody's own training script: a callback of the Hugging Face `Trainer`."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import softmax
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback

from fairhead.audit import Audit, audit
from fairhead.errors import InputError, did_you_mean
from fairhead.records import Records
from fairhead.records.columns import known_positive

METRICS = ("DP", "EOp", "EOd")
_log = logging.getLogger(__name__)


class AuditCallback(TrainerCallback):
    """Audits each evaluation of a `Trainer` that trains a classifier, and logs the gaps with their intervals.

    The figures are added to the metrics of the evaluation: `eval_EOd_sex`, `eval_EOd_sex_low` and `eval_EOd_sex_high`.
    So every tracker of the Trainer receives them (TensorBoard, trackio, wandb, mlflow, ...), and you can use one as
    `metric_for_best_model`. An undefined gap is NaN, which is never the best; a warning gives the reason once. Rows
    without a group are left out of the figures by that column; a warning counts them once. Training sees no groups:
    they are looked up after an evaluation. No row is predicted twice.

    Attributes:
        audits: one for each evaluation so far, as (prefix of its figures' names, step, audit).

    Example:
        >>> trainer = Trainer(model, arguments, eval_dataset=rows, ...)  # doctest: +SKIP
        >>> trainer.add_callback(fairhead.AuditCallback(trainer, groups=["sex"]))  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
        {'eval_loss': 0.41, 'eval_DP_sex': 0.12, 'eval_DP_sex_low': 0.08, 'eval_DP_sex_high': 0.16, ...}
    """

    def __init__(self, trainer: Any, groups: Sequence[str] | Mapping[str, Any], **options: Any) -> None:
        """Join a Trainer.

        Args:
            trainer: the one that is to be audited, whose model gives a class for each row.
            groups: columns of the evaluation data, which the model need not take; or the groups themselves by name,
                one value for each row of `trainer.eval_dataset`.
            options: of `fairhead.audit`: metrics (DP, EOp and EOd by default), positive (by default the second of two
                classes), n_boot, level, intersections, ...

        Raises:
            InputError: the groups are not those of the evaluation data, or the model gives no class for each row.
        """
        if not hasattr(trainer, "get_eval_dataloader"):
            raise InputError(f"the trainer is a {type(trainer).__name__}; expected a transformers.Trainer")
        self.trainer, self.options = trainer, {"metrics": METRICS, **options}
        self.groups = groups if isinstance(groups, Mapping) else [groups] if isinstance(groups, str) else list(groups)
        config = trainer.model.config
        if config.num_labels < 2 or config.problem_type not in (None, "single_label_classification"):
            raise InputError(
                f"AuditCallback audits classifiers with one class a row: this model has num_labels={config.num_labels} "
                f"and problem_type={config.problem_type!r}; give its predictions to fairhead.audit instead"
            )
        if trainer.args.batch_eval_metrics:
            raise InputError("AuditCallback needs all predictions at once: leave out batch_eval_metrics=True")
        self.audits: list[tuple[str, int, Audit]] = []
        self._data: Any = None  # of the evaluation that is under way
        self._columns: tuple[Any, dict[str, Any]] | None = None  # the groups of the data that were looked at last
        self._told: set[str] = set()
        self._loader, self._loop = trainer.get_eval_dataloader, trainer.evaluation_loop
        trainer.get_eval_dataloader, trainer.evaluation_loop = self._get_loader, self._evaluate
        data = trainer.eval_dataset
        for one in data.values() if isinstance(data, dict) else () if data is None else (data,):
            self._groups_of(one)

    def _get_loader(self, eval_dataset: Any = None) -> Any:
        """Stands for `Trainer.get_eval_dataloader`: notes which data are evaluated."""
        known = self.trainer.eval_dataset
        self._data = known[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        self._data = known if self._data is None else self._data
        # Rows that training groups by length would be evaluated in another order, too.
        arguments = self.trainer.args
        strategy, arguments.train_sampling_strategy = arguments.train_sampling_strategy, "random"
        try:
            loader = self._loader(eval_dataset)
        finally:
            arguments.train_sampling_strategy = strategy
        # Where several processes share the rows, the sampler is within the part of this one.
        batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
        if not isinstance(getattr(batches, "sampler", None), SequentialSampler):
            raise InputError(
                "AuditCallback needs evaluation rows in the order of their data, and this Trainer has another "
                "sampler: give evaluation data that have a length, and leave their sampler to transformers"
            )
        return loader

    def _evaluate(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Stands for `Trainer.evaluation_loop`: adds the figures to its metrics, which the Trainer then logs."""
        data, self._data = self._data, None
        if data is None:  # `Trainer.predict`, whose rows have no groups
            return self._loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        output = self._loop(dataloader, description, False, ignore_keys, metric_key_prefix)
        config = self.trainer.model.config
        names = [str(config.id2label[code]) for code in range(config.num_labels)]
        records = self._records(output, self._groups_of(data), names)
        positive = (known_positive((names[0], names[1])) or names[1]) if len(records.classes) == 2 else None
        options = {"positive": positive, **self.options}
        found = audit(records, **options)
        self.audits.append((metric_key_prefix, self.trainer.state.global_step, found))
        for column, n in found.provenance["audit"].get("without_group", {}).items():
            self._tell(column, "%s rows of the evaluation have no %s and are left out of its figures", n, column)
        for figure in found.estimates:
            name = "_".join([metric_key_prefix, figure.metric, *([figure.group_by] if figure.group_by else [])])
            if figure.value is None:
                self._tell(name, "%s is undefined and logged as NaN: %s", name, figure.undefined)
            ends = {name: figure.value, f"{name}_low": figure.low, f"{name}_high": figure.high}
            output.metrics.update({key: math.nan if value is None else value for key, value in ends.items()})
        return output

    def _tell(self, about: str, message: str, *values: object) -> None:
        """Log a warning, once about each thing."""
        if about not in self._told:
            self._told.add(about)
            _log.warning(message, *values)

    def _records(self, output: Any, groups: Mapping[str, Any], names: Sequence[str]) -> Records:
        """One row for each that was evaluated; `names` are the classes."""
        said = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
        label = output.label_ids
        if label is None or np.ndim(label) != 1 or np.ndim(said) not in (1, 2) or len(said) != len(label):
            shapes = [None if part is None else list(np.shape(part)) for part in (said, label)]
            raise InputError(
                f"AuditCallback audits classifiers: expected predictions [rows, classes] and labels [rows], but "
                f"this evaluation gives {shapes[0]} and {shapes[1]}"
            )
        if self.trainer.args.dataloader_drop_last:  # the last batch, unless it is full
            groups = {name: values[: len(label)] for name, values in groups.items()}
        scores = None if said.ndim == 1 else softmax(said.astype(np.float64), axis=-1)
        if scores is not None and scores.shape[1] != len(names):
            raise InputError(f"the predictions have {scores.shape[1]} columns and the model {len(names)} classes")
        answer = said if scores is None else scores.argmax(-1)
        return Records.from_arrays(
            [names[code] for code in label.tolist()],
            [names[int(code)] for code in answer.tolist()],
            scores=None if scores is None else scores[:, 1] if len(names) == 2 else scores,
            groups=groups,
            classes=names,
            drop_missing=scores is None or bool(np.isfinite(scores).all()),  # of groups alone
        )

    def _groups_of(self, data: Any) -> dict[str, Any]:
        """The groups of evaluation data; read once from their columns."""
        if isinstance(self.groups, Mapping):
            if data is not self.trainer.eval_dataset:
                raise InputError("groups given as values belong to trainer.eval_dataset: name columns for other data")
            for name, values in self.groups.items():
                if len(values) != len(data):
                    raise InputError(
                        f"group {name!r} has {len(values)} values and the evaluation data {len(data)} rows: give one "
                        "for each row, or name a column of the evaluation data"
                    )
            return dict(self.groups)
        if self._columns is None or self._columns[0] is not data:
            self._columns = data, {name: _column(data, name) for name in self.groups}
        return self._columns[1]


def _column(data: Any, name: str) -> Any:
    """One column of a `datasets.Dataset`, or of a sequence of dictionaries."""
    known = getattr(data, "column_names", None)
    if known is None:
        known = list(data[0]) if len(data) and isinstance(data[0], Mapping) else []
    if name not in known:
        raise InputError(
            f"the evaluation data have no column {name!r}; there are: {', '.join(known) or 'none'}."
            f"{did_you_mean(name, known)} Groups can also be given as values: groups={{{name!r}: [...]}}"
        )
    values = list(data[name]) if hasattr(data, "column_names") else [data[i][name] for i in range(len(data))]
    found = np.asarray(values)
    return found if found.dtype.kind != "U" else np.array(values, dtype=object)  # NaN among texts is not "nan"
