"""`fairhead mitigate klaad`: train a causal language model to attend alike to stereotypes and their opposites."""

import enum
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairhead.cli.data_options import DataColumns
from fairhead.cli.options import options
from fairhead.cli.output import write_json
from fairhead.errors import FairheadError, InputError
from fairhead.report.console import terminal

if TYPE_CHECKING:
    from fairhead.language.training_record import TrainingRecord

EPILOG = """
**What is trained on**: triplets (a stereotype, its opposite, a sentence unrelated to either) of StereoSet or of your
own. Of own pairs, the third sentence is the less stereotypical one of another pair. A tenth of the target terms (of
pairs: of the pairs) is held out; which ones is written beside the weights, so that nobody scores the model on the
others (`--held-out-of`).

**Presets**: `llama`, `gpt-neo`, `gemma-2` (the paper's weights and margins), `gpt-2`, `qwen`; by default that of the
model's family.

**Examples**

    fairhead mitigate klaad --model SmolLM2-135M --data stereoset:dev.json --out klaad

    fairhead mitigate klaad --model SmolLM2-135M --data pairs:own.csv --lora 8 --lr 1e-4 --out klaad-lora

    fairhead mitigate klaad --model SmolLM2-135M --data stereoset:dev.json --grid ablations --out ablations

**What is written**: an ordinary Hugging Face folder (safetensors) that `fairhead lm ... --model DIR` takes, and
`fairhead-training.json` (settings, split, every step's losses). A run that was stopped goes on where it was.
Compare with a model trained on cross-entropy alone (`--kl-weight 0 --triplet-weight 0`), or you cannot tell KLAAD from
fine-tuning on the same sentences.
"""


class Heads(enum.StrEnum):
    """Over heads."""

    mean = "mean"
    each = "each"


class Renorm(enum.StrEnum):
    """Of attention weights before the divergence."""

    none = "none"
    softmax = "softmax"
    log_renorm = "log-renorm"


class LengthAlign(enum.StrEnum):
    """Which tokens are compared."""

    span = "span"
    pad_common = "pad_common"


class Direction(enum.StrEnum):
    """Of the divergence."""

    anti_stereo = "anti_stereo"
    stereo_anti = "stereo_anti"
    symmetric = "symmetric"


class Pooling(enum.StrEnum):
    """Of hidden states."""

    mean = "mean"
    last = "last"


class Precision(enum.StrEnum):
    """Of the computation."""

    no = "no"
    bf16 = "bf16"


_DATA, _LOSS, _TRAINING, _OUTPUT = "Data", "Loss", "Training", "Output"


def _option(flag: str, help: str, panel: str, metavar: str | None = None) -> Any:
    variable = f"FAIRHEAD_MITIGATE_{flag.strip('-').replace('-', '_').upper()}"
    return typer.Option(flag, help=help, rich_help_panel=panel, metavar=metavar, envvar=variable, show_envvar=False)


@options("mitigate")
def klaad_command(
    model: Annotated[
        str, _option("--model", "Folder of a causal language model, or a name on the hub.", _TRAINING, "PATH")
    ],
    data: Annotated[str, _option("--data", "stereoset:PATH; of your own triplets:PATH or pairs:PATH.", _DATA, "SPEC")],
    columns: DataColumns,
    out: Annotated[Path, _option("--out", "Folder for the trained model.", _OUTPUT, "DIR")],
    held_out: Annotated[
        float, _option("--held-out", "Share of items whose target terms are kept out.", _DATA, "SHARE")
    ] = 0.1,
    split_seed: Annotated[int, _option("--split-seed", "Another seed, another split.", _DATA, "N")] = 0,
    bias_type: Annotated[
        str | None, _option("--bias-type", "Only one category: gender, profession, ...", _DATA, "NAME")
    ] = None,
    limit: Annotated[int | None, _option("--limit", "Train on so many items only, to try.", _DATA, "N")] = None,
    preset: Annotated[
        str | None, _option("--preset", "Weights and margin; by default the family's.", _LOSS, "NAME")
    ] = None,
    ce_weight: Annotated[float | None, _option("--ce-weight", "Of the cross-entropy.", _LOSS, "λ1")] = None,
    kl_weight: Annotated[float | None, _option("--kl-weight", "Of the attention divergence.", _LOSS, "λ2")] = None,
    triplet_weight: Annotated[float | None, _option("--triplet-weight", "Of the triplet loss.", _LOSS, "λ3")] = None,
    margin: Annotated[float | None, _option("--margin", "Of the triplet loss.", _LOSS, "M")] = None,
    layers: Annotated[
        str, _option("--layers", "Whose attention is compared: -1, or 0,5,-1; no other is built.", _LOSS, "LIST")
    ] = "-1",
    heads: Annotated[Heads, _option("--heads", "Compare the mean over heads, or each.", _LOSS)] = Heads.mean,
    renorm: Annotated[
        Renorm, _option("--renorm", "softmax is the paper by the letter: next to no gradient.", _LOSS)
    ] = Renorm.none,
    length_align: Annotated[
        LengthAlign, _option("--length-align", "Unchanged tokens and the span's total, or token i with i.", _LOSS)
    ] = LengthAlign.span,
    direction: Annotated[
        Direction, _option("--direction", "KL(anti, stereo), the reverse, or Jensen-Shannon.", _LOSS)
    ] = Direction.anti_stereo,
    detach_anti: Annotated[
        bool, _option("--detach-anti", "The anti-stereotype's attention is the teacher.", _LOSS)
    ] = False,
    pooling: Annotated[Pooling, _option("--pooling", "A sentence's hidden state.", _LOSS)] = Pooling.mean,
    epochs: Annotated[int, _option("--epochs", "Passes over the triplets.", _TRAINING, "N")] = 1,
    batch_size: Annotated[int, _option("--batch-size", "Triplets a step.", _TRAINING, "N")] = 8,
    lr: Annotated[float, _option("--lr", "AdamW's learning rate.", _TRAINING, "RATE")] = 1e-5,
    weight_decay: Annotated[float, _option("--weight-decay", "AdamW's.", _TRAINING, "RATE")] = 0.0,
    lora: Annotated[
        int | None, _option("--lora", "Train LoRA matrices of this rank instead of all weights.", _TRAINING, "RANK")
    ] = None,
    precision: Annotated[
        Precision, _option("--precision", "no: 32 bit; bf16: autocast, attention to three digits.", _TRAINING)
    ] = Precision.no,
    seed: Annotated[int, _option("--seed", "Of batches and of LoRA's first weights.", _TRAINING, "N")] = 0,
    device: Annotated[
        str, _option("--device", "cpu, cuda, cuda:1, ...; auto takes a GPU where there is one.", _TRAINING)
    ] = "auto",
    checkpoint_minutes: Annotated[
        float, _option("--checkpoint-minutes", "Between the states a stopped run goes on from.", _OUTPUT, "N")
    ] = 10.0,
    keep_adapter: Annotated[
        bool, _option("--keep-adapter", "With --lora: also save its matrices, in DIR/adapter.", _OUTPUT)
    ] = False,
    grid: Annotated[
        str | None,
        _option("--grid", "YAML with many runs, or: ablations, study, weights. A folder each.", _OUTPUT, "FILE"),
    ] = None,
) -> None:
    """Train a causal language model with KLAAD, so that it attends alike to stereotypes and their opposites."""
    needed = ("torch", "transformers", "accelerate", *(("peft",) if lora is not None else ()))
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        extra = "torch" if lora is None else "lora"
        raise FairheadError(f'this needs {", ".join(missing)}, not installed here: pip install "fairhead[{extra}]"')
    if keep_adapter and lora is None:
        raise InputError("--keep-adapter needs --lora: without it there is no adapter")
    from dataclasses import replace

    from fairhead.cli.progress import progress
    from fairhead.mitigate.klaad_grid import Run, method_for, read_grid
    from fairhead.mitigate.language_trainer import train_folder
    from fairhead.mitigate.triplets import TripletData
    from fairhead.train.plan import LanguagePlan

    weights = {"ce_weight": ce_weight, "kl_weight": kl_weight, "triplet_weight": triplet_weight, "margin": margin}
    loss: dict[str, Any] = {name: value for name, value in weights.items() if value is not None}
    loss |= {"layers": _layers(layers), "heads": heads.value, "renorm": renorm.value, "detach_anti": detach_anti}
    loss |= {"length_align": length_align.value, "direction": direction.value, "pooling": pooling.value}
    plan = LanguagePlan(
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=lr,
        weight_decay=weight_decay,
        precision=precision.value,
        lora=lora,
        checkpoint_minutes=checkpoint_minutes,
        seed=seed,
    )
    triplets = TripletData(data, held_out, split_seed, bias_type, limit, columns.options(data))
    runs = [Run("", {}, {})] if grid is None else read_grid(grid)
    for run in runs:  # what is wrong with one is said before any is trained
        method_for(preset, {**loss, **run.loss})("llama")
        replace(plan, **run.plan)
    records: dict[str, TrainingRecord] = {}
    with progress() as shown:
        for run in runs:
            folder = out / run.name if run.name else out
            stage = f"klaad {run.name}".strip()

            def tell(done: int, total: int, parts: Mapping[str, float], stage: str = stage) -> None:
                shown.tell(stage, done, total, ", ".join(f"{name} {value:.4g}" for name, value in parts.items()))

            records[run.name] = train_folder(
                model,
                triplets,
                folder,
                method_for(preset, {**loss, **run.loss}),
                replace(plan, **run.plan),
                name="klaad",
                device=device,
                adapter=keep_adapter,
                on_step=tell,
            )
    if grid is not None:
        content = {name: {"settings": r.settings, "plan": r.plan, **r.results} for name, r in records.items()}
        write_json({"schema": "fairhead.klaad_grid/1", "runs": content}, str(out / "grid.json"))
    _show(records, out)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"--layers is {text!r}; expected numbers with commas, such as -1 or 0,5,-1") from None


def _show(records: "Mapping[str, TrainingRecord]", out: Path) -> None:
    """Losses on the terms that were held out, before and after."""
    from rich import box
    from rich.table import Table

    console = terminal()
    first = next(iter(records.values()))
    held = first.results["held_out"]
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for part in held["before"]:
        table.add_column(part, justify="right")
    if held["before"]:
        table.add_row("before", *(f"{value:.4g}" for value in held["before"].values()))
        for name, record in records.items():
            table.add_row(name or "after", *(f"{value:.4g}" for value in record.results["held_out"]["after"].values()))
        console.print(f"Losses on {held['items']} items whose terms were held out:", highlight=False)
        console.print(table)
    else:
        console.print("No term was held out: nothing is known of terms that were not trained on.", highlight=False)
    for name, record in records.items():
        done = record.results
        left = sum(len(ids) for ids in done["left_out"].values())
        console.print(
            f"{f'{name}: ' if name else ''}{done['steps']} steps on {done['items'] - left} items"
            + (f" ({left} left out: longer than the context)" if left else ""),
            highlight=False,
        )
    console.print(f"model: {out}", highlight=False, soft_wrap=True)
