"""`fairhead demo`, from end to end: find the shade without being told, reduce its gap, locate its heads, prove it.

The data are scikit-learn's handwritten digits, with a background shade that follows the label in training. The task is
odd or even. In 93 % of the training pictures the background is light where the digit is odd and dark where it is even,
so the shade is a shortcut. Validation digits have either shade, as where the model is used. In the test set every digit
appears once in each shade: the shade says nothing about the label there, and the two versions of a digit differ in
nothing else. The verdict joins what the verbs say of their own results.
"""

import hashlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

import fairhead
from fairhead import __version__
from fairhead.bench.one_run import Mitigated
from fairhead.data import Dataset
from fairhead.discover.discovered import Discovered
from fairhead.locate.located import Located
from fairhead.mitigate import method
from fairhead.report import Report, write
from fairhead.report.sections.audited import Audited
from fairhead.report.sections.plain import Text
from fairhead.store import made_folder

CLASSES = ("even", "odd")
SHADES = ("dark", "light")

# Called with the name of a stage, how much of it is done, how much there is, and a word about it.
Tell = Callable[[str, int, int, str], None]
_WHAT_WAS_DONE = (
    "There are {train:,} training pictures, whose background follows the label in {bias:g} % of cases; {val:,} "
    "validation pictures, as they would come from where the model is used: each digit on either background; and "
    "{test:,} test pictures: every test digit appears once on a dark and once on a light background. In validation and "
    "test pictures, the background is independent of the label.\n\n"
    "The encoder is the same network after a short plain training, which learns the easiest feature first: the "
    "background. Clustering its features uses neither labels nor backgrounds. auto weights the training pictures so "
    "that clusters and labels are independent (balance), so that they resemble the validation pictures (match), or "
    "both, and selects the candidate with the most even accuracy across clusters on validation pictures. All models "
    "start from the same weights and train for the same number of epochs. Neither training nor selection sees the "
    "background as a column; it is used only to audit the test pictures and to locate the heads."
)
_SIDES = "Plain training (erm) and the model that auto selected are tested on the same pictures."


def shaded_digits(
    seed: int = 0,
    bias: float = 0.9,  # share of the training pictures whose shade follows the label
    parts: Sequence[str] = ("train", "val", "test"),
    *,
    validation_bias: float | None = None,  # the same of the validation pictures; as `bias` by default
) -> Dataset:
    """Half of the 1797 digits to train on, 15 % to choose by, 35 % to test, as a data set with the group "shade".

    Example:
        >>> from fairhead.demo import shaded_digits
        >>> shaded_digits().sizes   # each test digit twice
        {'train': 898, 'val': 270, 'test': 1258}
    """
    from sklearn.datasets import load_digits

    loaded: Any = load_digits()
    odd, n = loaded.target % 2, len(loaded.target)
    rng = np.random.default_rng(seed)
    train, validation, test = np.split(rng.permutation(n), [n // 2, n // 2 + round(0.15 * n)])
    rows = []  # digit, shade, part
    shares = bias, bias if validation_bias is None else validation_bias
    for part, digits, share in zip(("train", "val"), (train, validation), shares, strict=True):
        against = rng.permutation(len(digits)) < round((1 - share) * len(digits))
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
    """A digit [8, 8] in [0, 1]; a light background goes half the way from black to white."""
    background = shade / 2
    return Image.fromarray(np.round(255 * (background + digit * (1 - background))).astype(np.uint8))


@dataclass(frozen=True)
class DemoPlan:
    """What the demo does. The defaults were chosen as ones with which `auto` works: this is an example, not evidence.

    With the fully trained plain model as the encoder (4 layers, patches of 2 × 2, 30 epochs), the clusters are the
    classes, and `auto` keeps plain training.
    """

    seed: int = 0  # of the data split, the shades, the weights, the batches and the resampling
    bias: float = 0.93  # share of the training pictures whose shade follows the label
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
    """What the demo found: where the report is, which models are compared, and the verdict, one sentence a line."""

    report: Path
    verdict: tuple[str, ...]


def run_demo(
    out: Path | str,  # made where it is missing
    plan: DemoPlan | None = None,  # what to do
    tell: Tell | None = None,  # called as the work goes on
    command: str | None = None,  # the command line that asked for it, for the report's provenance
) -> Demo:
    r"""Run the demo and write report.html, report.json and a folder for each step to a folder.

    Example:
        >>> print(*run_demo("demo", DemoPlan(seed=1)).verdict, sep="\n")  # doctest: +SKIP
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
        digits = shaded_digits(plan.seed, plan.bias, validation_bias=0.5)
        train("erm", "encoder", "training the encoder", plan.encoder_epochs)
        train("erm", "plain", "plain training")
        encoder, plain = out / "encoder" / "model", out / "plain" / "model"
        with _timed(seconds, "discover"):
            tell("discover", 0, 1, "")
            discovered = fairhead.discover(digits, encoder, model=plain, out=out / "discovered", **everywhere)
            tell("discover", 1, 1, f"{len(discovered.clusters)} clusters")
        auto = train(method("auto", encoder=f"path:{encoder}"), "auto", "training by auto")
        with _timed(seconds, "locate"):
            located = fairhead.locate(
                plain,
                shaded_digits(plan.seed, plan.bias, ("test",)),
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
    made = {**({} if command is None else {"command": command}), "seed": plan.seed, "seconds": seconds}
    report = _report(plan, digits, discovered, auto, located, made)
    write(report, out / "report.html")
    return Demo(out / "report.html", (_SIDES, *(sentence.text for sentence in report.verdict)))


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - started, 2)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums are then made in one order, whatever the machine: the same seed gives the same numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _report(
    plan: DemoPlan,
    digits: Dataset,
    discovered: Discovered,  # clusters of all pictures, and the gap of the plain model between them
    auto: Mitigated,  # the run that tried and chose, compared with plain training on the test pictures
    located: Located[Any],  # heads of the plain model that carry the shade
    made: Mapping[str, Any],  # how all that was made
) -> Report:
    """One page of what each verb reports about its own result."""
    assert auto.comparison is not None  # `auto` is always compared with plain training
    found, ran, heads = discovered.page(), auto.page(), located.page(images=False)
    pictures = b"".join(np.asarray(picture).tobytes() for picture in digits.examples("test").inputs)
    return Report(
        title="fairhead demo: digits whose background follows the label",
        question=(
            f"A small vision transformer learns to tell odd from even digits. In {100 * plan.bias:g} % of its training "
            "pictures the background is light for odd and dark for even digits. Can fairhead discover this without "
            "group labels, how much can it reduce the gap without them, and which attention heads contribute to it? "
            f"{_SIDES}"
        ),
        # What was found before how: a page shows the first three sentences. Then the heads, and what their edits do.
        verdict=[*sorted([*ran.verdict, *found.verdict], key=lambda said: said.tone == "note"), *heads.verdict],
        sections=[
            Text(title="Method", text=_WHAT_WAS_DONE.format(bias=100 * plan.bias, **digits.sizes)),
            *found.sections[:2],
            *(section for section in ran.sections if section.kind != "text"),  # the costs of the run have no place here
            Audited(title="Audit of plain training", name="plain training", audit=auto.comparison.a),
            *heads.sections,
        ],
        provenance={
            "fairhead": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            **made,
            "data": "scikit-learn digits, 1797 pictures of 8 × 8",
            "test set sha256": hashlib.sha256(pictures).hexdigest(),
        },
    )
