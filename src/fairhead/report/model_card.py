"""The card of a saved model: a README in the format of the Hugging Face hub, with figures and their intervals."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairhead.installed import __version__
from fairhead.report.wording import by, in_short, p_value, scale_of
from fairhead.stats import Difference, Estimate
from fairhead.store import reading, write_text

CARD = "README.md"
# By this line a card of ours is known, which another model in the same folder must not keep.
MARK = "<!-- written by fairhead -->"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LIMITS = (
    "The intervals cover the choice of the rows that were looked at. They hold for rows like those, and say nothing of "
    "groups that were not looked at.",
    "A gap that is not significant may still be there: the sample may be too small to show it.",
)


@dataclass(frozen=True)
class Card:
    """What a model's README says.

    Example:
        >>> gap = Estimate("EOd", "sex", 0.12, 0.08, 0.16, 900, ideal=0.0)
        >>> text = Card("Faces", "Trained.", ["A gap."], "images:labels.csv", estimates=[gap]).text("here")
        >>> print(text[text.index("| EOd") :].splitlines()[0])
        | EOd by sex | 12.0 % (8.0 to 16.0 %) | 900 |
    """

    title: str  # its heading
    done: str  # what was done to which model, and on what, in sentences
    findings: Sequence[str]  # what was found, a sentence each
    data: str  # of the figures, as "reader:path"; of a path only the last part is shown
    base: str | None = None  # the model that this one was made from: a name of the hub, a path or "vit-8x8"
    before: str = ""  # what the changes are against, such as "plain training"
    estimates: Sequence[Estimate] = ()  # figures of this model
    changes: Sequence[Difference] = ()  # figures of both models, paired
    limits: Sequence[str] = ()  # what else a reader must know
    task: str | None = None  # the hub's name of what the model does, such as "image-classification"
    carries: str | None = None  # the method that only `fairhead.load` puts back, if any

    def write(self, folder: Path) -> None:
        """Put the card into a model's folder."""
        write_text(Path(folder, CARD), self.text(Path(folder).name))

    def text(self, name: str) -> str:
        """The README; `name` is the model's own on the hub, or its folder's."""
        from huggingface_hub import ModelCardData

        results = [*map(self._of_estimate, self.estimates), *map(self._of_change, self.changes)]
        found = [result for result in results if result is not None]
        base = (self.base or "").removeprefix("hub:")
        on_hub = _HUB_NAME.fullmatch(base) and not Path(base).exists()
        described = ModelCardData(
            base_model=base if on_hub else None,
            library_name="fairhead" if self.carries else "transformers",
            pipeline_tag=self.task,
            tags=["fairhead", "fairness"],
            eval_results=found or None,
            model_name=name if found else None,
        )
        parts = [f"---\n{described.to_yaml()}\n---\n\n{MARK}\n# {_plain(self.title)}", _plain(self.done)]
        parts += ["## What was found", _listed(self.findings)] if self.findings else []
        parts += [*self._table(), "## Limits", _listed((*self.limits, *_LIMITS))]
        parts += ["## Load it", self._loading(), f"Made with fairhead {__version__}."]
        return "\n\n".join(parts) + "\n"

    def _table(self) -> list[str]:
        """Figures before and after, or those of this model alone."""
        if self.changes:
            head = [f"| figure | {_plain(self.before) or 'before'} | this model | change | p, corrected | n |"]
            rows = [_change_row(change) for change in self.changes]
        elif self.estimates:
            head = ["| figure | this model | n |"]
            rows = [_estimate_row(estimate) for estimate in self.estimates]
        else:
            return []
        rule = "|---" * (head[0].count("|") - 1) + "|"
        title = f"## Figures on {_plain(_short(self.data))}"
        return [title, "\n".join([*head, rule, *rows]), "In brackets: 95 % intervals."]

    def _loading(self) -> str:
        here = '    model = fairhead.load("THIS FOLDER")'
        if self.carries:
            return f"It carries {self.carries}, which `from_pretrained` and other programs leave out:\n\n{here}"
        plain = (
            "It is an ordinary Hugging Face model: `from_pretrained` gives the outputs that were measured, and so does"
        )
        return f"{plain}\n\n{here}"

    def _result(self, figure: Estimate | Difference, value: float, more: dict[str, Any]) -> Any:
        from huggingface_hub import EvalResult

        reader = self.data.partition(":")[0]
        return EvalResult(
            task_type=self.task or "other",
            dataset_type=reader,
            dataset_name=_short(self.data),
            metric_type=figure.metric,
            metric_name=f"{figure.metric} {by(figure.group_by)}",
            metric_value=value,
            metric_args={**more, "n": figure.n},
        )

    def _of_estimate(self, one: Estimate) -> Any:
        return None if one.value is None else self._result(one, one.value, {"low": one.low, "high": one.high})

    def _of_change(self, one: Difference) -> Any:
        if one.b is None or self.estimates:  # those have the figures of this model already
            return None
        return self._result(one, one.b, {"before": one.a, "change": one.value, "low": one.low, "high": one.high})


def is_ours(folder: Path) -> bool:
    """Whether a folder has a card that fairhead wrote."""
    try:
        return MARK in Path(folder, CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def renamed(folder: Path, name: str) -> str:
    """The card of a folder, with the name that its model has on the hub."""
    from huggingface_hub import ModelCard

    with reading(Path(folder, CARD), "is no model card of the Hugging Face hub"):
        card = ModelCard(Path(folder, CARD).read_text(encoding="utf-8"))
    described: Any = card.data
    if described.eval_results:
        described.model_name = name
    return str(card).replace("THIS FOLDER", name)


def _short(data: str) -> str:
    """A data set without the folders that it lay in: they are nobody's business."""
    reader, _, path = data.partition(":")
    if reader == "memory":
        return "rows given in Python"
    return f"{reader}:{Path(path).name}" if path else reader


def _plain(text: str) -> str:
    """Text that is not taken for markup."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("\r", " ").strip()


def _listed(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {_plain(one)}" for one in sentences)


def _interval(figure: Estimate | Difference, signed: bool) -> str:
    assert figure.value is not None
    scale = scale_of(figure.metric, figure.value, figure.low, figure.high, difference=signed)
    ends = scale.interval(figure.low, figure.high, signed)
    return scale.write(figure.value, signed) + (f" ({ends})" if ends else "")


def _name(figure: Estimate | Difference) -> str:
    return _plain(f"{figure.metric.replace('_', ' ')} {by(figure.group_by)}")


def _estimate_row(one: Estimate) -> str:
    value = _interval(one, False) if one.value is not None else f"undefined: {in_short([str(one.undefined)])}"
    return _thin(f"| {_name(one)} | {_plain(value)} | {one.n} |")


def _change_row(one: Difference) -> str:
    if one.value is None or one.a is None or one.b is None:
        return f"| {_name(one)} | | | undefined: {_plain(in_short([str(one.undefined)]))} | | {one.n} |"
    scale = scale_of(one.metric, one.b, one.low, one.high)
    p = "" if one.p_adjusted is None else p_value(one.p_adjusted)
    sides = f"{scale.write(one.a)} | {scale.write(one.b)}"
    return _thin(f"| {_name(one)} | {sides} | {_interval(one, True)} | {p} | {one.n} |")


def _thin(text: str) -> str:
    return text.replace("\u2009", " ").replace("\u202f", " ")
