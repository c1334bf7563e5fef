"""`fairhead demo`, from end to end: find the shade without being told, reduce its gap, locate its heads, prove it.

The data are scikit-learn's handwritten digits, with a background shade that follows the label in training. The task is
odd or even. In 93 % of the training pictures the background is light where the digit is odd and dark where it is even,
so the shade is a shortcut. Validation digits have either shade, as where the model is used. In the test set every digit
appears once in each shade: the shade says nothing about the label there, and the two versions of a digit differ in
nothing else. The verdict is words that follow from the intervals alone.
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
from fairhead.audit import Comparison, Difference
from fairhead.bench.one_run import Mitigated
from fairhead.data import Dataset
from fairhead.discover.discovered import Discovered
from fairhead.locate.answer import LocatedHeads
from fairhead.mitigate import method
from fairhead.report import Report, Sentence, write
from fairhead.report.sections.audited import Audited
from fairhead.report.sections.changes import Compared
from fairhead.report.sections.plain import PlainTable, PlainTables, Text
from fairhead.report.wording import number, signed
from fairhead.stats import p_text
from fairhead.store import made_folder

CLASSES = ("even", "odd")
SHADES = ("dark", "light")

# Called with the name of a stage, how much of it is done, how much there is, and a word about it.
Tell = Callable[[str, int, int, str], None]
_WHAT_WAS_DONE = (
    "There are {train} training pictures, whose background follows the label in {bias:g} % of cases; {val} validation "
    "pictures, as they would come from where the model is used: each digit on either background; and {test} test "
    "pictures: every test digit appears once on a dark and once on a light background. In validation and test "
    "pictures, the background is independent of the label.\n\n"
    "The encoder is the same network after a short plain training, which learns the easiest feature first: the "
    "background. Clustering its features uses neither labels nor backgrounds. `auto` weights the training pictures so "
    "that clusters and labels are independent (balance), so that they resemble the validation pictures (match), or "
    "both, and selects the candidate with the most even accuracy across clusters on validation pictures. All models "
    "start from the same weights and train for the same number of epochs. Neither training nor selection sees the "
    "background as a column; it is used only to audit the test pictures and to locate the heads."
)
# An interval that begins below this shows a gap, but does not show that it is a large one.
_SMALL_GAP = 0.02


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
    """What the demo found: where the report is, and its verdict, one sentence a line."""

    report: Path
    verdict: tuple[str, ...]


def run_demo(
    out: Path | str,  # made where it is missing
    plan: DemoPlan | None = None,  # what to do
    tell: Tell | None = None,  # called as the work goes on
    command: str | None = None,  # the command line that asked for it, for the report's provenance
) -> Demo:
    """Run the demo and write report.html, report.json and a folder for each step to a folder.

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
        digits = shaded_digits(plan.seed, plan.bias, validation_bias=0.5)
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
    report = _report(plan, digits, discovered, auto, comparison, located, made)
    write(report, out / "report.html")
    return Demo(out / "report.html", tuple(sentence.text for sentence in report.verdict))


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
    auto: Mitigated,  # the run that tried and chose
    comparison: Comparison,  # plain training (a) against what auto kept (b) on the test set, by the shade
    located: LocatedHeads,  # heads of the plain model that carry the shade
    made: Mapping[str, Any],  # how all that was made
) -> Report:
    """The page: the answer, then how it came about; what is said on gaps is decided by an interval and a p-value."""
    notes = auto.row["notes"]
    kept = f"auto ({notes['kept']})"
    change = {one.metric: one for one in comparison.differences}
    tone, text = _trade("The model that auto selected", change["EOd"], change["accuracy"])
    found, heads = discovered.page(), located.page(images=False)
    pictures = b"".join(np.asarray(picture).tobytes() for picture in digits.examples("test").inputs)
    return Report(
        title="fairhead demo: digits whose background follows the label",
        question=(
            f"A small vision transformer learns to tell odd from even digits. In {100 * plan.bias:g} % of its training "
            "pictures the background is light for odd and dark for even digits. Can fairhead discover this without "
            "group labels, how much can it reduce the gap without them, and which attention heads contribute to it?"
        ),
        verdict=[
            *([Sentence(text, tone)] if notes["kept"] != "plain" else []),
            _plain_line(comparison),
            _choice_line(notes),
            *found.verdict,
            *heads.verdict,
            Sentence(
                "Each model was trained once. The intervals cover the sampling of test digits, not the variation "
                "between training runs: other seeds can give other results (--seed).",
                "note",
            ),
        ],
        sections=[
            Text(title="Method", text=_WHAT_WAS_DONE.format(bias=100 * plan.bias, **digits.sizes)),
            *found.sections[:2],
            _tried(notes),
            Audited(title="Plain training", name="plain training", audit=comparison.a),
            Audited(title="The model that auto selected", name=kept, audit=comparison.b),
            Compared(
                title="The selected model against plain training",
                text="Both models predict the same pictures: differences are paired, and whole digits are resampled.",
                a_name="plain training",
                b_name=kept,
                comparison=comparison,
            ),
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


def _choice_line(notes: Mapping[str, Any]) -> Sentence:
    """What auto kept, and what it looked at: clusters and labels of validation pictures, never the shade."""
    tried = {one["name"]: one for one in notes.get("tried", ())}
    if not tried:
        return Sentence(f"auto had only {notes['kept']} training to choose from.", "note")
    names = ", ".join(tried)
    if notes["kept"] == "plain":
        return Sentence(f"auto tried {names} and selected plain training: no other candidate was better.", "unclear")
    plain, kept = tried["plain"], tried[notes["kept"]]
    less = f"{_points(abs(kept['cost']))} points {'lower' if kept['cost'] > 0 else 'higher'}"
    return Sentence(
        f"auto tried {names} and selected {notes['kept']}: on validation pictures, its accuracy has a spread between "
        f"clusters of {_points(kept['spread'])} points ({_points(plain['spread'])} with plain training), and its "
        f"accuracy is {less} (at most {notes['price']:g} points lower are allowed).",
        "note",
    )


def _plain_line(comparison: Comparison) -> Sentence:
    gap, accuracy = comparison.a["EOd"], comparison.a["accuracy"]
    if gap.value is None or gap.low is None or gap.high is None or accuracy.value is None:
        return Sentence(f"Plain training: the gap is undefined, because {gap.undefined}.", "unclear")
    text = (
        f"Plain training: error rates differ between light and dark backgrounds by {_points(gap.value)} points (EOd, "
        f"95 % interval {_points(gap.low)} to {_points(gap.high)}), at {_points(accuracy.value)} % accuracy."
    )
    if gap.low <= 0:
        return Sentence(f"{text} A gap of 0 is within the interval.", "unclear")
    if gap.low < _SMALL_GAP:
        return Sentence(f"{text} There is a gap; it may be smaller than {_points(_SMALL_GAP)} points.", "note")
    return Sentence(text, "bad")


def _trade(what: str, gap: Difference, accuracy: Difference) -> tuple[str, str]:
    """A change of EOd and what it costs: a gap that shrinks at the price of accuracy is noted, not praised."""
    tone, text = _in_words(gap, what, "EOd")
    accuracy_tone, about_accuracy = _in_words(accuracy, "It", "accuracy")
    if tone == "good" and accuracy_tone == "bad":
        tone = "note"
    return tone, f"{text} {about_accuracy}"


def _in_words(change: Difference, what: str, metric: str) -> tuple[str, str]:
    """A tone and a sentence about a paired difference; better is lower for gaps and higher for accuracy."""
    if change.value is None or change.low is None or change.high is None:
        return "unclear", f"{what}: the change of {metric} is undefined, because {change.undefined}."
    interval = f"95 % interval {_points(change.low, sign=True)} to {_points(change.high, sign=True)}"
    if change.p_adjusted is not None:
        interval += f", corrected {p_text(change.p_adjusted)}"
    if not change.significant:
        moved = f"{what} changes {metric} by {_points(change.value, sign=True)} points ({interval})"
        return "unclear", f"{moved}: not significant."
    lowers = change.high < 0
    better = lowers == (change.ideal == 0)
    verb = ("reduces" if better else "lowers") if lowers else "raises"
    return ("good" if better else "bad", f"{what} {verb} {metric} by {_points(abs(change.value))} points ({interval}).")


def _tried(notes: Mapping[str, Any]) -> PlainTables:
    keys = ("accuracy", "spread", "cost", "cost_se", "gain", "gain_se")
    rows = [[one["name"], *(_points(one[key]) for key in keys)] for one in notes.get("tried", ())]
    se = "Its standard error"
    columns = ["Training", "Accuracy, %", "Spread between clusters", "Cost", se, "Gain", se]
    match = notes.get("match")
    about = (
        "On validation pictures, in points. Of the candidates within the price whose gain over plain training exceeds "
        "one standard error, the one with the smallest sum of spread and cost is selected."
    )
    if match is not None and not match["differ"]:
        about += (
            " Matching was left out, because training and validation pictures do not differ significantly "
            f"({p_text(match['p'])})."
        )
    return PlainTables(
        title="What auto tried", text=about, tables=[PlainTable(caption="Candidates", columns=columns, rows=rows)]
    )


def _points(fraction: float | None, sign: bool = False) -> str:
    return "undefined" if fraction is None else (signed if sign else number)(100 * fraction, 1)
