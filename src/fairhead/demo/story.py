"""The demo from end to end: train twice, audit both, find the heads that carry the shade, take them out."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax
from transformers import ViTConfig, ViTForImageClassification

from fairhead.audit import compare
from fairhead.demo.digits import CLASSES, SHADES, ShadedDigits, shaded_digits
from fairhead.demo.writeup import Findings, report_of
from fairhead.locate.ablation import Ablation, layer_matched
from fairhead.locate.decompose import Decomposer
from fairhead.locate.directions import classifier_task
from fairhead.locate.edits import HeadEdits
from fairhead.locate.engine import single_head_effects, study
from fairhead.locate.head_features import collect
from fairhead.locate.head_maps import HeadMap, top_heads
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.passes import Sweep, forward_passes
from fairhead.locate.rows import Evaluation
from fairhead.mitigate import DAM, attach, save
from fairhead.records import Records
from fairhead.report import write
from fairhead.store import made_folder
from fairhead.train import Epoch, Fit, TrainingPlan, fit, predict

_BATCH = 128  # pictures at a time
# The tables that a run may write.
_RECORDS = ("plain", "dam", "plain-half", "plain-half-heads-ablated")

# Called with the name of a stage, how much of it is done, how much there is, and a word about it.
Tell = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class DemoPlan:
    """What the demo does. The defaults were chosen for what plain training does with them, not for what DAM does.

    Attributes:
        seed: of the data split, the shades, the weights, the batches and the resampling.
        training: the same for both models.
        layers: of the small vision transformer.
        heads: in each layer.
        width: of the residual stream.
        most_heads: how many heads are chosen at most.
        controls: how many random head sets they are held against, unless all are few.
        n_boot: resamples behind each interval.
    """

    seed: int = 0
    training: TrainingPlan = field(default_factory=lambda: TrainingPlan(epochs=30))
    layers: int = 4
    heads: int = 8
    width: int = 64
    most_heads: int = 4
    controls: int = 200
    n_boot: int = 2000


@dataclass(frozen=True)
class Demo:
    """What the demo found: where the report is, and its verdict, one sentence a line."""

    report: Path
    verdict: tuple[str, ...]


def run_demo(
    out: Path | str, plan: DemoPlan | None = None, tell: Tell | None = None, command: str | None = None
) -> Demo:
    """Run the demo and write report.html, report.json, records/ and models/ to a folder.

    Args:
        out: the folder; made where it is missing.
        plan: what to do.
        tell: called as the work goes on.
        command: the command line that asked for it, for the report's provenance.

    Returns:
        Where the report is, and what it says.

    Raises:
        InputError: the folder cannot be made or written to.

    Example:
        >>> import tempfile
        >>> from fairhead.demo import DemoPlan, run_demo
        >>> from fairhead.train import TrainingPlan
        >>> quick = DemoPlan(training=TrainingPlan(epochs=1), layers=1, heads=4, width=16, n_boot=100)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = run_demo(folder, quick)
        >>> found.report.name
        'report.html'
    """
    plan = plan or DemoPlan()
    tell = tell or (lambda stage, done, total, note: None)
    out = made_folder(out)
    seconds: dict[str, float] = {}
    with _one_thread():
        digits = shaded_digits(plan.seed)
        models = {"plain": _new_model(plan), "dam": attach(_new_model(plan), DAM())}
        with _timed(seconds, "plain training"):
            plain_fit = _train("plain training", models["plain"], digits, plan, tell)
        with _timed(seconds, "training with DAM"):
            dam_fit = _train("training with DAM", models["dam"], digits, plan, tell)
        with _timed(seconds, "audit"):
            tell("audit", 0, 1, "")
            records = {name: digits.records(_p_odd(model, digits)) for name, model in models.items()}
            comparison = compare(records["plain"], records["dam"], n_boot=plan.n_boot, seed=plan.seed)
            tell("audit", 1, 1, f"{len(digits.test)} test pictures")
        with _timed(seconds, "locate"):
            located = _locate(models["plain"], digits, plan, tell)
    for name, model in models.items():
        save(model, out / "models" / name)
    _save_records({**records, **located.records}, out / "records")
    findings = Findings(plain_fit, dam_fit, comparison, located.head_map, located.ablations)
    report = report_of(findings, plan.seed, digits, seconds, command)
    write(report, out / "report.html")
    return Demo(out / "report.html", tuple(sentence.text for sentence in report.verdict))


@dataclass(frozen=True)
class _Located:
    head_map: HeadMap
    ablations: tuple[Ablation, ...] = ()
    records: Mapping[str, Records] = field(default_factory=dict)


def _locate(model: ViTForImageClassification, digits: ShadedDigits, plan: DemoPlan, tell: Tell) -> _Located:
    """Choose heads on one half of the test digits; report and ablate them on the other.

    They are chosen by what happens when each is taken out alone: what a head writes itself (the map) says little about
    what later layers make of it.
    """
    labels, pixels = digits.test.labels.numpy(), digits.test.inputs["pixel_values"]
    shown = np.unique(digits.test_digit)
    chosen_by = np.random.default_rng(plan.seed).permutation(shown)[: len(shown) // 2]
    choosing = np.isin(digits.test_digit, chosen_by)
    poles = (SHADES[1], SHADES[0])
    rows = Evaluation(labels, CLASSES, digits.test_shade, poles, "shade", clusters=digits.test_digit)
    seen, kept = rows.take(choosing), rows.take(~choosing)
    decomposer, task = Decomposer(model.eval(), unit=False), classifier_task(model)
    features = collect(decomposer, lambda start: [{"pixel_values": pixels[start:]}], len(rows))
    edits = HeadEdits.learn(features.take(choosing), seen.groups, seen.labels, poles)

    def passes(half: NDArray[np.bool_], stage: str) -> Sweep:
        batches = [{"pixel_values": part} for part in pixels[torch.tensor(half)].split(_BATCH)]
        total = int(half.sum())
        return forward_passes(
            decomposer,
            lambda: batches,
            task,
            edits,
            progress=lambda done, sets: tell(stage, done, total, f"{sets} sets of heads a picture"),
        )

    alone = single_head_effects(passes(choosing, "scoring heads"), features.shape, seen)
    # A quarter of a layer at most: the others are its controls. The other half says whether the choice was luck.
    ranked = top_heads(
        alone.gap * np.sign(alone.total), alone.p_adjusted, plan.most_heads, per_layer=max(1, plan.heads // 4)
    )
    parts, total = task.parts(features, 1)[~choosing], task.total(features.output[~choosing], 1)
    head_map = kept.score(parts, total).marking(tuple(sorted(ranked)))
    if not ranked:
        return _Located(head_map)
    controls = layer_matched(ranked, plan.heads, draws=plan.controls, seed=plan.seed)
    how = LocatePlan(n_boot=plan.n_boot, seed=plan.seed)
    edited = passes(~choosing, "ablating heads and controls")
    found = study(edited, ranked, kept, controls, how, "mean", "forward")
    part = digits.keep(~choosing)
    (before,) = edited([()])
    return _Located(
        head_map,
        tuple(found[metric] for metric in ("EOd", "DP")),
        {
            "plain-half": part.records(softmax(before, axis=1)[:, 1]),
            "plain-half-heads-ablated": part.records(softmax(found.after, axis=1)[:, 1]),
        },
    )


def _p_odd(model: torch.nn.Module, digits: ShadedDigits) -> NDArray[np.float64]:
    """Probability of "odd" for every test picture."""
    return predict(model, digits.test)[:, 1].double().numpy()


def _new_model(plan: DemoPlan) -> ViTForImageClassification:
    """A vision transformer with 17 tokens; the same seed gives the same first weights, whatever is attached later."""
    torch.manual_seed(plan.seed)
    return ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=plan.width,
            intermediate_size=2 * plan.width,
            num_hidden_layers=plan.layers,
            num_attention_heads=plan.heads,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            id2label=dict(enumerate(CLASSES)),
            label2id={name: number for number, name in enumerate(CLASSES)},
        )
    )


def _train(name: str, model: ViTForImageClassification, digits: ShadedDigits, plan: DemoPlan, tell: Tell) -> Fit:
    epochs = plan.training.epochs
    tell(name, 0, epochs, "")

    def on_epoch(epoch: Epoch) -> None:
        note = f"loss {epoch.loss:.3f}, validation accuracy {epoch.validation_accuracy:.3f}"
        tell(name, epoch.number, epochs, note)

    return fit(model, digits.train, digits.validation, replace(plan.training, seed=plan.seed), on_epoch)


def _save_records(records: Mapping[str, Records], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in _RECORDS:  # of an earlier run into the same folder, which may have chosen heads where this one has not
        (folder / f"{name}.csv").unlink(missing_ok=True)
    for name, table in records.items():
        table.save(folder / f"{name}.csv")


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - started, 2)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums are then made in one order, whatever the machine: the same seed gives the same numbers.

    At this size a second thread would save next to nothing.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
