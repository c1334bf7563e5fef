"""`fairhead mitigate cda | bias_unlearn | sentence_debias | self_debias`: what KLAAD is compared with."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairhead.cli.data_options import DataColumns
from fairhead.cli.klaad import Precision
from fairhead.cli.options import options
from fairhead.errors import FairheadError

if TYPE_CHECKING:
    from fairhead.language.training_record import TrainingRecord

EPILOG = """
All four write an ordinary Hugging Face folder that `fairhead lm ... --model DIR` takes, with `fairhead-training.json`
beside the weights: which terms of StereoSet were trained on, so that nobody scores the model on those.

**Examples**

    fairhead mitigate cda --model SmolLM2-135M --data stereoset:dev.json --swaps winobias --out cda

    fairhead mitigate bias_unlearn --model SmolLM2-135M --data stereoset:dev.json --lr 2e-5 --out unlearnt

    fairhead mitigate sentence_debias --model SmolLM2-135M --data stereoset:dev.json --swaps winobias --out projected

    fairhead mitigate self_debias --model SmolLM2-135M --bias-type gender --bias-type race --out self
"""

_DATA, _METHOD, _TRAINING, _OUTPUT = "Data", "Method", "Training", "Output"


def _option(flag: str, help: str, panel: str, metavar: str | None = None) -> Any:
    variable = f"FAIRHEAD_MITIGATE_{flag.strip('-').replace('-', '_').upper()}"
    return typer.Option(flag, help=help, rich_help_panel=panel, metavar=metavar, envvar=variable, show_envvar=False)


Model = Annotated[str, _option("--model", "Folder of a causal language model, or a name on the hub.", _METHOD, "PATH")]
Data = Annotated[str, _option("--data", "stereoset:PATH; of your own triplets:PATH or pairs:PATH.", _DATA, "SPEC")]
Out = Annotated[Path, _option("--out", "Folder for the new model.", _OUTPUT, "DIR")]
SwapLists = Annotated[
    str, _option("--swaps", "Word lists: folder of WinoBias or gn_glove, or a file of pairs.", _DATA, "PATH")
]
HeldOut = Annotated[float, _option("--held-out", "Share of items whose target terms are kept out.", _DATA, "SHARE")]
SplitSeed = Annotated[int, _option("--split-seed", "Another seed, another split.", _DATA, "N")]
Limit = Annotated[int | None, _option("--limit", "Train on so many items only, to try.", _DATA, "N")]
Epochs = Annotated[int, _option("--epochs", "Passes over the examples.", _TRAINING, "N")]
BatchSize = Annotated[int, _option("--batch-size", "Examples a step.", _TRAINING, "N")]
Rate = Annotated[float, _option("--lr", "AdamW's learning rate.", _TRAINING, "RATE")]
Lora = Annotated[int | None, _option("--lora", "Train LoRA matrices of this rank instead.", _TRAINING, "RANK")]
Bits = Annotated[Precision, _option("--precision", "no: 32 bit; bf16: autocast.", _TRAINING)]
Seed = Annotated[int, _option("--seed", "Of batches and of LoRA's first weights.", _TRAINING, "N")]
Device = Annotated[str, _option("--device", "cpu, cuda, cuda:1, ...; auto takes a GPU.", _TRAINING)]


@options("mitigate")
def cda_command(
    model: Model,
    data: Data,
    columns: DataColumns,
    swaps: SwapLists,
    out: Out,
    one_sided: Annotated[
        bool, _option("--one-sided", "Train on swapped sentences only, not on the originals.", _METHOD)
    ] = False,
    all_sentences: Annotated[
        bool, _option("--all-sentences", "Also on sentences without a word to swap.", _METHOD)
    ] = False,
    held_out: HeldOut = 0.1,
    split_seed: SplitSeed = 0,
    limit: Limit = None,
    epochs: Epochs = 1,
    batch_size: BatchSize = 16,
    lr: Rate = 1e-5,
    lora: Lora = None,
    precision: Bits = Precision.no,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Counterfactual data augmentation: train on sentences and on the same with swapped words."""
    _require(lora)
    from fairhead.language.swaps import read_swaps
    from fairhead.mitigate.cda import CDA

    read_swaps(swaps)  # a mistake there should not wait for the model
    settings = CDA(swaps, originals=not one_sided, all_sentences=all_sentences)
    plan = {"epochs": epochs, "batch_size": batch_size, "learning_rate": lr, "lora": lora, "seed": seed}
    _train("cda", settings, model, _triplets(data, columns, held_out, split_seed, limit), out, plan, precision, device)


@options("mitigate")
def bias_unlearn_command(
    model: Model,
    data: Data,
    columns: DataColumns,
    out: Out,
    forget_weight: Annotated[float, _option("--forget-weight", "Of forgetting stereotypes.", _METHOD, "W")] = 0.5,
    retain_weight: Annotated[float, _option("--retain-weight", "Of learning their opposites.", _METHOD, "W")] = 0.3,
    keep_weight: Annotated[
        float, _option("--keep-weight", "Of staying with the pretrained model elsewhere.", _METHOD, "W")
    ] = 0.2,
    beta: Annotated[float, _option("--beta", "How soon forgetting fades.", _METHOD, "β")] = 0.1,
    anti_in_forget: Annotated[
        float, _option("--anti-in-forget", "Share of opposites that are forgotten too.", _METHOD, "SHARE")
    ] = 0.0,
    held_out: HeldOut = 0.1,
    split_seed: SplitSeed = 0,
    limit: Limit = None,
    epochs: Epochs = 1,
    batch_size: BatchSize = 8,
    lr: Rate = 2e-5,
    lora: Lora = None,
    precision: Bits = Precision.no,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """BiasUnlearn: forget stereotypes, learn their opposites, stay with the pretrained model elsewhere."""
    _require(lora)
    from fairhead.mitigate.bias_unlearn import BiasUnlearn

    settings = BiasUnlearn(forget_weight, retain_weight, keep_weight, beta, anti_in_forget)
    plan = {"epochs": epochs, "batch_size": batch_size, "learning_rate": lr, "lora": lora, "seed": seed}
    _train(
        "bias_unlearn",
        settings,
        model,
        _triplets(data, columns, held_out, split_seed, limit),
        out,
        plan,
        precision,
        device,
    )


@options("mitigate")
def sentence_debias_command(
    model: Model,
    data: Data,
    columns: DataColumns,
    swaps: SwapLists,
    out: Out,
    components: Annotated[int, _option("--components", "Directions that are taken out.", _METHOD, "N")] = 1,
    batch_size: BatchSize = 32,
    held_out: HeldOut = 0.1,
    split_seed: SplitSeed = 0,
    limit: Limit = None,
    device: Device = "auto",
) -> None:
    """SentenceDebias: take the direction that swapped words move sentences along out of the last states."""
    _require(None)
    from fairhead.cli.progress import progress
    from fairhead.mitigate.language_methods import sentence_debias
    from fairhead.mitigate.sentence_debias import SentenceDebias

    settings = SentenceDebias(swaps, components, batch_size)
    with progress() as shown:

        def tell(done: int, total: int) -> None:
            shown.tell("pairs read", done, total)

        triplets = _triplets(data, columns, held_out, split_seed, limit)
        record = sentence_debias(model, triplets, out, settings, device=device, progress=tell)
    typer.echo(f"{record.results['pairs']:,} pairs of sentences, {components} direction(s) taken out\nmodel: {out}")


def self_debias_command(
    model: Model,
    out: Out,
    bias_type: Annotated[
        list[str] | None, _option("--bias-type", "Named before each text; give it several times.", _METHOD, "NAME")
    ] = None,
    decay: Annotated[float, _option("--decay", "How fast a word's probability falls.", _METHOD, "λ")] = 50.0,
    floor: Annotated[float, _option("--floor", "The least it is multiplied with.", _METHOD, "ε")] = 0.01,
    device: Device = "auto",
) -> None:
    """Self-debiasing at decoding: words that a biased text would have are made less likely; no weight is changed."""
    _require(None)
    from fairhead.mitigate.language_methods import self_debias
    from fairhead.mitigate.self_debias import SelfDebias

    settings = SelfDebias(tuple(bias_type or SelfDebias().bias_types), decay, floor)
    self_debias(model, out, settings, device=device)
    typer.echo(f"read through `fairhead lm` with: {', '.join(settings.bias_types)}\nmodel: {out}")


def _require(lora: int | None) -> None:
    needed = ("torch", "transformers", "accelerate", *(("peft",) if lora is not None else ()))
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        extra = "torch" if lora is None else "lora"
        raise FairheadError(f'this needs {", ".join(missing)}, not installed here: pip install "fairhead[{extra}]"')


def _triplets(data: str, columns: DataColumns, held_out: float, split_seed: int, limit: int | None) -> Any:
    from fairhead.mitigate.triplets import TripletData

    return TripletData(data, held_out, split_seed, None, limit, columns.options(data))


def _train(
    name: str,
    settings: Any,
    model: str,
    triplets: Any,
    out: Path,
    plan: Mapping[str, Any],
    precision: Precision,
    device: str,
) -> None:
    from fairhead.cli.progress import progress
    from fairhead.mitigate.language_trainer import train_folder
    from fairhead.train.plan import LanguagePlan

    with progress() as shown:

        def tell(done: int, total: int, parts: Mapping[str, float]) -> None:
            shown.tell(name, done, total, ", ".join(f"{part} {value:.4g}" for part, value in parts.items()))

        made = LanguagePlan(**plan, precision=precision.value)
        record = train_folder(
            model, triplets, out, lambda family: settings, made, name=name, device=device, on_step=tell
        )
    _show(record, out)


def _show(record: "TrainingRecord", out: Path) -> None:
    """Losses on the terms that were held out, before and after, and what was left out."""
    held, done = record.results["held_out"], record.results
    for part, before in held["before"].items():
        after = held["after"].get(part)
        typer.echo(f"{part} on {held['items']} items of held-out terms: {before:.4g} before, {after:.4g} after")
    for reason, ids in done["left_out"].items():
        typer.echo(f"Left out: {len(ids):,} ({reason})")
    typer.echo(f"{done['steps']} steps\nmodel: {out}")


COMMANDS: Mapping[str, Callable[..., None]] = {
    "cda": cda_command,
    "bias_unlearn": bias_unlearn_command,
    "sentence_debias": sentence_debias_command,
    "self_debias": self_debias_command,
}
