"""The demo from end to end: find the shade without being told, reduce its gap, locate its heads, prove it.

The data are scikit-learn's handwritten digits, with a background shade that follows the label in training. The task is
odd or even. In 90 % of the training pictures the background is light where the digit is odd and dark where it is even,
so the shade is a shortcut. In the test set every digit appears once in each shade: the shade says nothing about the
label there, and the two versions of a digit differ in nothing else.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import fairhead
from fairhead.data import Dataset
from fairhead.demo.writeup import Findings, report_of
from fairhead.mitigate import method
from fairhead.report import write
from fairhead.store import made_folder

CLASSES = ("even", "odd")
SHADES = ("dark", "light")

# How much of the way from black to white a light background goes.
_LIGHT = 0.5


def shaded_digits(seed: int = 0, bias: float = 0.9, parts: Sequence[str] = ("train", "val", "test")) -> Dataset:
    """Half of the 1797 digits to train on, 15 % to choose by, 35 % to test, as a data set with the group "shade".

    Args:
        seed: of the split and of the shades.
        bias: share of the training and validation pictures whose shade follows the label.
        parts: those wanted.

    Example:
        >>> from fairhead.demo.story import shaded_digits
        >>> shaded_digits().sizes   # each test digit twice
        {'train': 898, 'val': 270, 'test': 1258}
    """
    from sklearn.datasets import load_digits

    loaded: Any = load_digits()
    odd, n = loaded.target % 2, len(loaded.target)
    rng = np.random.default_rng(seed)
    train, validation, test = np.split(rng.permutation(n), [n // 2, n // 2 + round(0.15 * n)])
    rows = []  # digit, shade, part
    for part, digits in (("train", train), ("val", validation)):
        against = rng.permutation(len(digits)) < round((1 - bias) * len(digits))
        rows += [(digit, shade, part) for digit, shade in zip(digits, odd[digits] ^ against, strict=True)]
    rows += [(digit, shade, "test") for digit in test for shade in (0, 1)]
    rows = [row for row in rows if row[2] in parts]
    found = fairhead.dataset(
        [_picture(loaded.images[digit] / 16, shade) for digit, shade, _ in rows],
        label=[CLASSES[odd[digit]] for digit, *_ in rows],
        groups={"shade": [SHADES[shade] for _, shade, _ in rows]},
        split=[part for *_, part in rows],
        id=[f"digit-{digit:04d}-{SHADES[shade]}" for digit, shade, _ in rows],
        person=[f"{digit:04d}" for digit, *_ in rows],
    )
    assert isinstance(found, Dataset)
    return found


def _picture(digit: Any, shade: int) -> Image.Image:
    """A digit [8, 8] in [0, 1], on its background."""
    background = _LIGHT * shade
    return Image.fromarray(np.round(255 * (background + digit * (1 - background))).astype(np.uint8))


# Called with the name of a stage, how much of it is done, how much there is, and a word about it.
Tell = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class DemoPlan:
    """What the demo does. The defaults were chosen as ones with which `auto` works: this is an example, not evidence.

    With the fully trained plain model as the encoder (4 layers, patches of 2 × 2, 30 epochs), the clusters are the
    classes, and `auto` keeps plain training.
    """

    seed: int = 0  # of the data split, the shades, the weights, the batches and the resampling
    epochs: int = 20  # of every training
    # Of the encoder: the same network, trained plainly for so short a time that it has learnt little beyond the shade,
    # which is easiest. Who has a public encoder takes that; none is on a bare machine.
    encoder_epochs: int = 2
    layers: int = 4  # of the small vision transformer
    heads: int = 8  # in each layer
    width: int = 64  # of the residual stream
    learning_rate: float = 1e-3  # of every training
    most_heads: int = 4  # how many heads are chosen at most
    controls: int = 200  # how many random head sets they are held against, unless all are few
    n_boot: int = 2000  # resamples behind each interval


@dataclass(frozen=True)
class Demo:
    """What the demo found: where the report is, and its verdict, one sentence a line."""

    report: Path
    verdict: tuple[str, ...]


def run_demo(
    out: Path | str, plan: DemoPlan | None = None, tell: Tell | None = None, command: str | None = None
) -> Demo:
    """Run the demo and write report.html, report.json and a folder for each step to a folder.

    Args:
        out: the folder; made where it is missing.
        plan: what to do.
        tell: called as the work goes on.
        command: the command line that asked for it, for the report's provenance.

    Returns:
        Where the report is, and what it says.

    Example:
        >>> import tempfile
        >>> from fairhead.demo import DemoPlan, run_demo
        >>> quick = DemoPlan(epochs=1, encoder_epochs=1, layers=1, heads=4, width=16, controls=5, n_boot=100)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = run_demo(folder, quick)
        >>> found.report.name
        'report.html'
    """
    plan = plan or DemoPlan()
    tell = tell or (lambda stage, done, total, note: None)
    out = made_folder(out)
    seconds: dict[str, float] = {}
    everywhere: dict[str, Any] = {"seed": plan.seed, "device": "cpu"}

    def train(how: Any, name: str, stage: str, epochs: int = plan.epochs) -> Any:
        with _timed(seconds, stage):
            return fairhead.mitigate(
                f"vit-{plan.layers}x{plan.heads}",
                digits,
                how,
                out=out / name,
                epochs=epochs,
                learning_rate=plan.learning_rate,
                model_options={"width": plan.width, "mlp": 2 * plan.width, "image_size": 8, "patch_size": 4},
                progress=lambda what, done, total, note: tell(stage, done, total, note) if what == "training" else None,
                **everywhere,
            )

    with _one_thread():
        digits = shaded_digits(plan.seed)
        train("erm", "encoder", "training the encoder", plan.encoder_epochs)
        train("erm", "plain", "plain training")
        encoder, plain = out / "encoder" / "model", out / "plain" / "model"
        with _timed(seconds, "discover"):
            tell("discover", 0, 1, "")
            discovered = fairhead.discover(digits, encoder, model=plain, out=out / "discovered", **everywhere)
            tell("discover", 1, 1, f"{len(discovered.clusters)} clusters")
        auto = train(method("auto", encoder=f"path:{encoder}"), "auto", "training by auto")
        with _timed(seconds, "compare"):
            answers = [fairhead.predict(model, digits, device="cpu") for model in (plain, out / "auto" / "model")]
            comparison = fairhead.compare(*answers, n_boot=plan.n_boot, seed=plan.seed)
        with _timed(seconds, "locate"):
            located = fairhead.locate(
                plain,
                shaded_digits(plan.seed, parts=("test",)),
                by="shade",
                heads=plan.most_heads,
                forward=True,
                rank="effect",
                kinds=("mean",),
                draws=plan.controls,
                n_boot=plan.n_boot,
                progress=lambda stage, done, total: tell(f"locate: {stage}", done, total, ""),
                **everywhere,
            )
    report = report_of(Findings(discovered, auto, comparison, located), plan.seed, digits, seconds, command)
    write(report, out / "report.html")
    return Demo(out / "report.html", tuple(sentence.text for sentence in report.verdict))


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
