"""`fairhead mitigate klaad | cda | ...`: one command for each method that changes a causal language model."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairhead.cli.common import SentenceColumns, need, progress
from fairhead.cli.options import options, parameter_names
from fairhead.errors import InputError
from fairhead.mitigate.registry import MethodEntry
from fairhead.report.console import terminal

if TYPE_CHECKING:
    from fairhead.cli.common import Progress
    from fairhead.language.suite import TrainingRecord

EPILOG = """
**What is trained on**: triplets (a stereotype, its opposite, a sentence unrelated to either) of StereoSet or of your
own. Of own pairs, the third sentence is the less stereotypical one of another pair. A tenth of the target terms (of
pairs: of the pairs) is held out; which ones is written beside the weights, so that nobody scores the model on the
others (`--held-out-of`).

**What is written**: an ordinary Hugging Face folder (safetensors) that `fairhead lm ... --model DIR` takes, and
`fairhead-training.json` (settings, split, the losses of every step). A run that was stopped goes on where it was.

**Examples**

    fairhead mitigate klaad --model SmolLM2-135M --data stereoset:dev.json --out klaad

    fairhead mitigate klaad --model SmolLM2-135M --data pairs:own.csv --lora 8 --lr 1e-4 --out klaad-lora

    fairhead mitigate klaad --model SmolLM2-135M --data stereoset:dev.json --grid klaad-ablations --out ablations

    fairhead mitigate cda --model SmolLM2-135M --data stereoset:dev.json --swaps winobias --out cda

    fairhead mitigate self_debias --model SmolLM2-135M --bias-type gender --bias-type race --out self

Compare KLAAD with a model trained on cross-entropy alone (`--kl-weight 0 --triplet-weight 0`): only then is its effect
told apart from that of fine-tuning on the same sentences.
"""


def _option(flag: str, help: str, panel: str, metavar: str | None = None) -> Any:
    variable = f"FAIRHEAD_MITIGATE_{flag.strip('-').replace('-', '_').upper()}"
    return typer.Option(flag, help=help, rich_help_panel=panel, metavar=metavar, envvar=variable, show_envvar=False)


_COMMON: Mapping[str, Any] = {
    "model": Annotated[
        str, _option("--model", "Folder of a causal language model, or a name on the hub.", "Data", "PATH")
    ],
    "out": Annotated[Path, _option("--out", "Folder for the new model.", "Output", "DIR")],
    "device": Annotated[str, _option("--device", "cpu, cuda, cuda:1, ...; auto takes a GPU.", "Training")],
}
_TRAINED: Mapping[str, Any] = {
    "keep_adapter": Annotated[
        bool, _option("--keep-adapter", "With --lora: also save its matrices, in DIR/adapter.", "Output")
    ],
    "grid": Annotated[
        str | None,
        _option("--grid", "Run the methods of a grid, a folder each: a YAML file or one that ships.", "Output", "FILE"),
    ],
}
_PRESET = Annotated[
    str | None, _option("--preset", "Weights and margin; by default those of the model's family.", "Method", "NAME")
]


def language_command(entry: MethodEntry) -> Callable[..., None]:
    """The command of a method: which settings it takes follows from what the method does."""
    need()
    from fairhead.mitigate.language_trainer import plan_of
    from fairhead.mitigate.triplets import TripletData
    from fairhead.train.plan import LanguagePlan

    settings = entry.load()
    trains = hasattr(settings, "session")

    def run(
        context: Any,
        model: Any,
        out: Any,
        settings: Any,
        data: Any = None,
        columns: Any = None,
        plan: Any = None,
        device: Any = "auto",
        keep_adapter: Any = False,
        grid: Any = None,
        preset: Any = None,
    ) -> None:
        given = _given(context, settings)
        if data is not None:
            data = replace(data, options=columns.options(data.source))
        if preset is not None:
            given = {**asdict(entry.load().preset(preset)), **given}
        _run(entry, model, data, out, given, plan, device, keep_adapter, grid)

    annotations = {"context": typer.Context, **_COMMON, "settings": settings}
    defaults: dict[str, Any] = {"device": "auto"}
    if not hasattr(settings, "attach"):
        annotations |= {"data": TripletData, "columns": SentenceColumns}
    if trains:
        annotations |= {"plan": LanguagePlan, **_TRAINED}
        defaults |= {"plan": plan_of(settings), "keep_adapter": False, "grid": None}
    if hasattr(settings, "preset"):
        annotations["preset"] = _PRESET
        defaults["preset"] = None
    run.__annotations__ = annotations
    run.__doc__ = f"{entry.about[:1].upper()}{entry.about[1:]}."
    keyword, needed = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    offered = [inspect.Parameter(name, keyword, default=defaults.get(name, needed)) for name in annotations]
    vars(run).update(__signature__=inspect.Signature(offered))
    return options("mitigate")(run)


def _given(context: typer.Context, settings: Any) -> dict[str, Any]:
    """The settings that the user has given; what is left to a default may depend on the model."""
    return {
        name: getattr(settings, name)
        for name, key in parameter_names(type(settings)).items()
        if getattr(context.get_parameter_source(key), "name", "DEFAULT") not in ("DEFAULT", "DEFAULT_MAP")
    }


def _run(
    entry: MethodEntry,
    model: str,
    data: Any,
    out: Path,
    given: Mapping[str, Any],
    plan: Any,
    device: str,
    keep_adapter: bool,
    grid: str | None,
) -> None:
    if plan is not None and plan.lora is not None:
        need("lora")
    if keep_adapter and plan.lora is None:
        raise InputError("--keep-adapter needs --lora: without it there is no adapter")
    from fairhead.mitigate.language_trainer import train_folder

    runs = {"": (entry.name, given, plan)} if grid is None else _runs(grid, entry, given, plan)
    records: dict[str, TrainingRecord] = {}
    with progress() as shown:
        for name, (method, wanted, how) in runs.items():

            def tell(
                done: int, total: int, parts: Mapping[str, float], stage: str = f"{method} {name}".strip()
            ) -> None:
                shown.tell(stage, done, total, ", ".join(f"{part} {value:.4g}" for part, value in parts.items()))

            records[name] = train_folder(
                model, data, out / name, method, wanted, how, device=device, adapter=keep_adapter, on_step=tell
            )
    if grid is not None:
        from fairhead.store import write_json

        content = {name: {"settings": r.settings, "plan": r.plan, **r.results} for name, r in records.items()}
        write_json(out / "grid.json", {"schema": "fairhead.language_grid/1", "runs": content})
    _show(records, out)


def _runs(grid: str, entry: MethodEntry, given: Mapping[str, Any], plan: Any) -> dict[str, tuple[str, Any, Any]]:
    """The runs of a grid: name -> method, settings, plan. What is wrong with one is said before any is trained."""
    from fairhead.bench.grid_file import grid_path, read_methods, shipped_grids
    from fairhead.mitigate.language_trainer import plan_of
    from fairhead.mitigate.registry import method_named

    found = {}
    own_grid = f"{entry.name}-{grid}"
    for one in read_methods(grid_path(own_grid if own_grid in shipped_grids() else grid)):
        method, own = method_named(one.method), one.method == entry.name
        options = {**(given if own else {}), **one.options}
        method.configure(**options)
        found[one.name] = (
            method.name,
            options,
            plan_of(method.load(), **{**(asdict(plan) if own else {}), **one.plan}),
        )
    return found


def _tell(shown: "Progress", stage: str, done: int, total: int, parts: Mapping[str, float]) -> None:
    shown.tell(stage, done, total, ", ".join(f"{part} {value:.4g}" for part, value in parts.items()))


def _show(records: "Mapping[str, TrainingRecord]", out: Path) -> None:
    """What came of each run; of trained ones, the losses on held-out terms, before and after."""
    from rich import box
    from rich.table import Table

    console = terminal()
    trained = {name: record for name, record in records.items() if "held_out" in record.results}
    held: dict[str, Any] = next((record.results["held_out"] for record in trained.values()), {"before": {}})
    if held["before"]:
        table = Table("", *(f"{part}" for part in held["before"]), box=box.SIMPLE_HEAD)
        table.add_row("before", *(f"{value:.4g}" for value in held["before"].values()))
        for name, record in trained.items():
            table.add_row(name or "after", *(f"{value:.4g}" for value in record.results["held_out"]["after"].values()))
        console.print(f"Losses on {held['items']} items whose terms were held out:", highlight=False)
        console.print(table)
    elif trained:
        console.print("No term was held out: nothing is known of terms that were not trained on.", highlight=False)
    for name, record in records.items():
        for line in _said(record):
            console.print(f"{f'{name}: ' if name else ''}{line}", highlight=False)
    console.print(f"model: {out}", highlight=False, soft_wrap=True)


def _said(record: "TrainingRecord") -> list[str]:
    done = record.results
    if "held_out" in done:
        left = {reason: len(ids) for reason, ids in done["left_out"].items()}
        steps = f"{done['steps']} steps on {done['items'] - sum(left.values())} items"
        return [steps, *(f"left out: {count:,} ({reason})" for reason, count in left.items())]
    if "pairs" in done:
        return [f"{done['pairs']:,} pairs of sentences, {done['components']} direction(s) taken out"]
    return [f"no weight was changed; settings: {', '.join(f'{k} {v}' for k, v in record.settings.items())}"]
