"""What the demo says: the report's sections, and a verdict in words that follows from the intervals alone."""

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

from fairhead import __version__
from fairhead.audit import Comparison, Difference
from fairhead.bench.one_run import Mitigated
from fairhead.data import Dataset
from fairhead.discover.discovered import Discovered
from fairhead.locate.answer import LocatedHeads
from fairhead.report import Report, Sentence
from fairhead.report.sections.audited import Audited
from fairhead.report.sections.changes import Compared
from fairhead.report.sections.plain import PlainTable, PlainTables, Text
from fairhead.stats.outcome import p_text

# An interval that begins below this shows a gap, but does not show that it is a large one.
_SMALL_GAP = 0.02


@dataclass(frozen=True)
class Findings:
    """Everything the report rests on."""

    discovered: Discovered  # clusters of all pictures, and the gap of the plain model between them
    auto: Mitigated  # the run that tried and chose
    comparison: Comparison  # plain training (a) against what auto kept (b) on the test set, by the shade
    located: LocatedHeads  # heads of the plain model that carry the shade


def report_of(
    findings: Findings, seed: int, digits: Dataset, seconds: Mapping[str, float], command: str | None = None
) -> Report:
    """The page of the demo."""
    return Report(
        title="fairhead demo: digits with a shade that follows the label",
        question=(
            "A small vision transformer learns to tell odd from even digits. In 90 % of its training pictures the "
            "background is light for odd and dark for even digits. Can that be found without being told, how far can "
            "the gap be reduced without naming the background, and which attention heads carry it?"
        ),
        verdict=verdict(findings),
        sections=_sections(findings, digits),
        provenance={
            "fairhead": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            **({} if command is None else {"command": command}),
            "seed": seed,
            "data": "scikit-learn digits, 1797 pictures of 8 × 8",
            "test set sha256": _hash(digits),
            "seconds": dict(seconds),
        },
    )


def verdict(findings: Findings) -> list[Sentence]:
    """The answer, then how it came about; what is said on gaps is decided by an interval and a p-value."""
    comparison, notes = findings.comparison, findings.auto.row["notes"]
    tone, text = _trade("What auto kept", _difference(comparison, "EOd"), _difference(comparison, "accuracy"))
    changed = [Sentence(text, tone)] if notes["kept"] != "plain" else []
    return [
        *changed,
        _plain_line(comparison),
        _choice_line(notes),
        *findings.discovered.page().verdict,
        *findings.located.page(images=False).verdict,
        Sentence(
            "Each model was trained once. The intervals cover the choice of test digits, not the luck of a training "
            "run: other seeds can give other answers (--seed).",
            "note",
        ),
    ]


def _choice_line(notes: Mapping[str, Any]) -> Sentence:
    """What auto kept, and what it looked at: clusters and labels of validation pictures, never the shade."""
    tried = {one["name"]: one for one in notes.get("tried", ())}
    if not tried:
        return Sentence(f"auto had {notes['kept']} training alone to keep.", "note")
    names = ", ".join(tried)
    if notes["kept"] == "plain":
        return Sentence(f"auto tried {names} and kept plain training: the others did not pay.", "unclear")
    plain, kept = tried["plain"], tried[notes["kept"]]
    return Sentence(
        f"auto tried {names} and kept {notes['kept']}: on validation pictures its answers differ between clusters by a "
        f"spread of {_points(kept['spread'])} points ({_points(plain['spread'])} plainly trained), at a cost of "
        f"{_points(kept['cost'], sign=True)} points of accuracy (at most {notes['price']:g} are allowed).",
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
    return (
        "good" if better else "bad",
        f"{what} {verb} {metric} by {_points(abs(change.value))} points ({interval}).",
    )


def _sections(findings: Findings, digits: Dataset) -> list[Any]:
    comparison, kept = findings.comparison, f"auto ({findings.auto.row['notes']['kept']})"
    cards, stability = findings.discovered.page().sections[:2]
    return [
        Text(title="What was done", text=_what_was_done(digits)),
        cards,
        stability,
        _tried(findings.auto.row["notes"]),
        Audited(title="Plain training", name="plain training", audit=comparison.a),
        Audited(title="What auto kept", name=kept, audit=comparison.b),
        Compared(
            title="What auto kept against plain training",
            text="Both models answered the same pictures: differences are paired, and digits are resampled whole.",
            a_name="plain training",
            b_name=kept,
            comparison=comparison,
        ),
        *findings.located.page(images=False).sections,
    ]


def _tried(notes: Mapping[str, Any]) -> PlainTables:
    keys = ("accuracy", "spread", "cost", "cost_se")
    rows = [[one["name"], *(_points(one[key]) for key in keys)] for one in notes.get("tried", ())]
    columns = ["Training", "Accuracy, %", "Spread between clusters", "Cost", "Its standard error"]
    match = notes.get("match")
    about = "Of the validation pictures, in points. The smallest sum of spread and cost is kept, within the price."
    if match is not None and not match["differ"]:
        about += (
            " Matching was left out: training and validation pictures do not differ significantly "
            f"({p_text(match['p'])})."
        )
    return PlainTables(
        title="What auto tried", text=about, tables=[PlainTable(caption="Candidates", columns=columns, rows=rows)]
    )


def _what_was_done(digits: Dataset) -> str:
    sizes = digits.sizes
    return (
        f"There are {sizes['train']} training and {sizes['val']} validation pictures, whose background follows the "
        f"label in 90 % of cases, and {sizes['test']} test pictures: every test digit once on a dark and once on a "
        "light background, so that the background says nothing about the label.\n\n"
        "The encoder is the same network after a short plain training: what is easiest, the background, is learnt "
        "first. Its features are clustered; neither labels nor backgrounds have a part in that. `auto` weights the "
        "training pictures so that clusters and labels are independent, and keeps what spreads least between clusters "
        "on validation pictures. All models start from the same weights and train for the same number of epochs; none "
        "sees the background as a column, in training or in a choice. The background is used to audit the test "
        "pictures, and to locate the heads."
    )


def _difference(comparison: Comparison, metric: str) -> Difference:
    return next(d for d in comparison.differences if d.metric == metric)


def _points(fraction: float, sign: bool = False) -> str:
    return f"{100 * fraction:{'+' if sign else ''}.1f}".replace("-", "−")


def _hash(digits: Dataset) -> str:
    pictures = digits.examples("test").inputs
    return hashlib.sha256(b"".join(np.asarray(picture).tobytes() for picture in pictures)).hexdigest()
