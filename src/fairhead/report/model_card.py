"""The card of a saved model: a README in the format of the Hugging Face hub, with intervals; and its upload."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from fairhead import __version__
from fairhead.errors import FairheadError, InputError
from fairhead.report.sections.plain import markdown_table
from fairhead.report.wording import by, in_short, p_value, scale_of, with_interval
from fairhead.stats import Difference, Estimate
from fairhead.store import reading, write_text

CARD = "README.md"
# This line marks a card of ours: another model that is saved to the same folder must replace it.
MARK = "<!-- written by fairhead -->"
# The files of a model. Records and reports, which may name persons, are not uploaded.
_FILES = ("README.md", "*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
_NOT = ("fairhead-training.json", "training_rows.json")
# `fairhead lm compare --markdown` writes its figures between these lines.
FIGURES = ("<!-- figures: begin -->", "<!-- figures: end -->")
_HERE = "THIS FOLDER"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LIMITS = (
    "The intervals cover the sampling of the audited rows. They hold for similar rows, and say nothing about groups "
    "that were not audited.",
    "A gap that is not significant may still exist: the sample may be too small to detect it.",
)


# The hub's name of a task, by the ending of the model's class.
_TASKS = {
    "ForImageClassification": "image-classification",
    "ForSequenceClassification": "text-classification",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "CLIPModel": "zero-shot-image-classification",
}
Figure = TypeVar("Figure", Estimate, Difference)


@dataclass(frozen=True)
class Card:
    """What a model's README says.

    Example:
        >>> gap = Estimate("EOd", "sex", 0.12, 0.08, 0.16, 900, ideal=0.0)
        >>> text = Card("Faces", "Trained.", ["A gap."], "images:labels.csv", estimates=[gap]).text("here")
        >>> print(text[text.index("| EOd") :].splitlines()[0])
        | EOd by sex | 12.0 % (8.0 to 16.0 %) | 900 |
        >>> change = Difference("EOd", "sex", 0.2, 0.12, -0.08, -0.11, -0.05, 900, p_adjusted=0.002, ideal=0.0)
        >>> text = Card("Faces", "Trained.", [], "images:labels.csv", estimates=[gap], changes=[change]).text("here")
        >>> print(text[text.index("| EOd") :].splitlines()[0])
        | EOd by sex | 20.0 % | 12.0 % (8.0 to 16.0 %) | −8.0 points (−11.0 to −5.0 points) | 0.002 | 900 |
    """

    title: str  # its heading
    done: str  # what was done to which model, and on what, in sentences
    findings: Sequence[str]  # what was found, a sentence each
    data: str  # of the figures, as "reader:path"; of a path only the last part is shown
    base: str | None = None  # the model that this one was made from: a name of the hub, a path or "vit-8x8"
    before: str = ""  # what the changes are against, such as "plain training"
    estimates: Sequence[Estimate] = ()  # figures of this model
    were: Sequence[Estimate] = ()  # the same figures of the model before
    changes: Sequence[Difference] = ()  # figures of both models, paired
    limits: Sequence[str] = ()  # what else a reader must know
    unmeasured: str = ""  # how to get figures that are still to be had; what is found then stands in its place
    carries: str | None = None  # the method that only `fairhead.load` puts back, if any

    def write(self, folder: Path) -> None:
        """Put the card into a model's folder."""
        write_text(Path(folder, CARD), self.text(Path(folder).name, _task(folder)))

    def text(self, name: str, task: str | None = None) -> str:
        """The README; `name` is the model's own on the hub, or its folder's, `task` what the hub calls what it does."""
        from huggingface_hub import ModelCardData

        found = self._results(task or "other")
        base = (self.base or "").removeprefix("hub:")
        on_hub = _HUB_NAME.fullmatch(base) and not Path(base).exists()
        described = ModelCardData(
            base_model=base if on_hub else None,
            library_name="fairhead" if self.carries else "transformers",
            pipeline_tag=task,
            tags=["fairhead", "fairness"],
            eval_results=found or None,
            model_name=name if found else None,
        )
        parts = [f"---\n{described.to_yaml()}\n---\n\n{MARK}\n# {_plain(self.title)}", _plain(self.done)]
        parts += ["## Findings", _listed(self.findings)] if self.findings else []
        if self.unmeasured:
            parts += ["## Figures", f"{FIGURES[0]}\n\n{_plain(self.unmeasured)}\n\n{FIGURES[1]}"]
        parts += [*self._table(), "## Limits", _listed((*self.limits, *_LIMITS))]
        parts += ["## Load it", self._loading(), f"Made with fairhead {__version__}."]
        return "\n\n".join(parts) + "\n"

    def _table(self) -> list[str]:
        """Figures before and after, or those of this model alone."""
        if self.changes:
            head = ["figure", self.before or "before", "this model", "change", "p, corrected", "n"]
            rows = [self._change_row(change) for change in self.changes]
        elif self.estimates:
            head, rows = ["figure", "this model", "n"], []
            for one in self.estimates:
                value = with_interval(one) if one.value is not None else f"undefined: {in_short([str(one.undefined)])}"
                rows.append([_name(one), value, str(one.n)])
        else:
            return []
        title = f"## Figures on {_plain(short_data(self.data))}"
        named = {_name(one): one.detail.get("definition") for one in self.estimates if one.group_by is not None}
        defined = [f"{name}: {definition}" for name, definition in named.items() if definition]
        table = markdown_table([_plain(text) for text in head], [[_plain(text) for text in row] for row in rows])
        shown = [title, table, "95 % intervals are in brackets."]
        return [*shown, _listed(defined)] if defined else shown

    def _change_row(self, one: Difference) -> list[str]:
        if one.value is None or one.a is None or one.b is None:
            return [_name(one), "", "", f"undefined: {in_short([str(one.undefined)])}", "", str(one.n)]
        scale = scale_of(one.metric, one.b, one.low, one.high)
        sides = []
        for value, figures in ((one.a, self.were), (one.b, self.estimates)):
            found = _same(one, figures)
            sides.append(scale.write(value) if found is None or found.value is None else with_interval(found))
        p = "" if one.p_adjusted is None else p_value(one.p_adjusted)
        return [_name(one), *sides, with_interval(one, signed=True), p, str(one.n)]

    def _loading(self) -> str:
        here = f'    import fairhead\n\n    model = fairhead.load("{_HERE}")'
        if self.carries:
            return f"It carries {self.carries}, which `from_pretrained` and other programs would drop:\n\n{here}"
        plain = "It is an ordinary Hugging Face model: `from_pretrained` reproduces the measured outputs, and so does"
        return f"{plain}\n\n{here}"

    def _results(self, task: str) -> list[Any]:
        """The figures of this model as the hub lists them, each once."""
        from huggingface_hub import EvalResult

        found: list[tuple[Estimate | Difference, float | None, dict[str, Any]]] = []
        for one in self.estimates:
            change = _same(one, self.changes)
            more = {} if change is None else _moved(change)
            found.append((one, one.value, {"low": one.low, "high": one.high, **more}))
        found += [(one, one.b, _moved(one)) for one in self.changes if _same(one, self.estimates) is None]
        return [
            EvalResult(
                task_type=task,
                dataset_type=self.data.partition(":")[0],
                dataset_name=short_data(self.data),
                metric_type=one.metric,
                metric_name=f"{one.metric} {by(one.group_by)}",
                metric_value=value,
                metric_args={**more, "n": one.n},
            )
            for one, value, more in found
            if value is not None
        ]


def name_of(model: str) -> str:
    """The name of a model on a card: its folder, or the run that contains the folder.

    Example:
        >>> name_of("runs/plain/model"), name_of("hub:me/faces")
        ('plain', 'faces')
    """
    path = Path(model)
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def _task(folder: Path) -> str | None:
    """The task of the model in a folder, as the hub names it, if it is known."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        name = str(json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))["architectures"][0])
        return next((task for end, task in _TASKS.items() if name.endswith(end)), None)
    return None


def _same(one: Estimate | Difference, figures: Sequence[Figure]) -> Figure | None:
    """The figure of the same metric and group column among `figures`, if there is one."""
    return next((f for f in figures if (f.metric, f.group_by) == (one.metric, one.group_by)), None)


def _moved(one: Difference) -> dict[str, Any]:
    return {"before": one.a, "change": one.value, "change_low": one.low, "change_high": one.high}


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
    return str(card).replace(_HERE, f"hub:{name}")


def push(folder: Path, name: str, *, private: bool = False) -> str:
    """Upload a model and return its address."""
    from huggingface_hub import CommitOperationAdd, HfApi

    errors: Any = import_module("huggingface_hub.errors")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InputError(f"{name!r} is not a hub name; expected one such as you/model")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: expected a folder with a model (config.json); it is not there")
    if not (folder / CARD).is_file():
        raise InputError(f"{folder} has no {CARD}, the model card that documents its gaps. Write one first")
    files = sorted(file.name for pattern in _FILES for file in folder.glob(pattern) if file.name not in _NOT)
    api = HfApi()
    card = renamed(folder, name).encode()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        operations = [
            CommitOperationAdd(file, card if file == CARD else str(folder / file))  # the folder itself is not changed
            for file in files
        ]
        api.create_commit(name, operations, commit_message="Upload a model and its card")
    except (errors.HTTPError, errors.LocalTokenNotFoundError, OSError) as error:
        code = getattr(getattr(error, "response", None), "status_code", None)
        if code in (401, 403) or isinstance(error, errors.LocalTokenNotFoundError):
            raise FairheadError(
                f"this token has no write access to {name} on the hub: log in with `hf auth login`, or set HF_TOKEN to "
                "a token with write access"
            ) from None
        if code is None:
            raise FairheadError(f"{api.endpoint} does not answer ({error}): nothing was uploaded") from None
        raise FairheadError(f"the hub refused {name}: {error}") from None
    return str(address)


def short_data(data: str) -> str:
    """A data set without the folders of its path, which a card should not publish.

    Example:
        >>> short_data("pairs:runs/own.csv")
        'pairs:own.csv'
    """
    reader, _, path = data.partition(":")
    if reader == "memory":
        return "rows given in Python"
    return f"{reader}:{Path(path).name}" if path else reader


def _plain(text: str) -> str:
    """Text that is not taken for markup, with ordinary spaces."""
    return re.sub("[\r\u2009\u202f]", " ", text).replace("<", "&lt;").strip()


def _listed(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {_plain(one)}" for one in sentences)


def _name(figure: Estimate | Difference) -> str:
    return _plain(f"{figure.metric.replace('_', ' ')} {by(figure.group_by)}")
