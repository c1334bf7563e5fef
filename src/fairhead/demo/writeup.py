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
from fairhead.demo.digits import ShadedDigits
from fairhead.locate.ablation import Ablation, outcome
from fairhead.locate.head_maps import HeadMap
from fairhead.report import Report, Sentence
from fairhead.report.sections.audited import Audited
from fairhead.report.sections.compared import Compared
from fairhead.report.sections.prose import Text
from fairhead.stats.outcome import p_text
from fairhead.train import Fit

# An interval that begins below this shows a gap, but does not show that it is a large one.
_SMALL_GAP = 0.02


@dataclass(frozen=True)
class Findings:
    """Everything the report rests on.

    Attributes:
        plain_fit: how plain training went.
        dam_fit: how training with DAM went.
        comparison: plain training (a) against DAM attention (b) on the test set.
        head_map: heads of the plain model, on the reporting half, the chosen ones marked.
        ablations: what taking the chosen heads out does, one metric each; empty when none was chosen.
    """

    plain_fit: Fit
    dam_fit: Fit
    comparison: Comparison
    head_map: HeadMap
    ablations: tuple[Ablation, ...]


def report_of(
    findings: Findings, seed: int, digits: ShadedDigits, seconds: Mapping[str, float], command: str | None = None
) -> Report:
    """The page of the demo."""
    return Report(
        title="fairhead demo: digits with a shade that follows the label",
        question=(
            "A small vision transformer learns to tell odd from even digits. In 90 % of its training pictures the "
            "background is light for odd and dark for even digits. How far do its answers depend on the background, "
            "does DAM attention reduce that, and which attention heads carry it?"
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
    """Sentences with their tone, each decided by an interval and a p-value."""
    lines = [_plain_line(findings.comparison), *_dam_lines(findings.comparison)]
    if findings.ablations:
        lines += [_heads_line(findings.head_map), _ablation_line(findings.ablations[0])]
    else:
        text = "No head, taken out alone, lowers the effect of the background on the logits significantly."
        lines.append(Sentence(text, "unclear"))
    return lines


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


def _dam_lines(comparison: Comparison) -> list[Sentence]:
    tone, text = _trade("DAM attention", _difference(comparison, "EOd"), _difference(comparison, "accuracy"))
    return [
        Sentence(text, tone),
        Sentence(
            "Each model was trained once. The intervals cover the choice of test digits, not the luck of a training "
            "run: other seeds can give other answers (--seed).",
            "note",
        ),
    ]


def _heads_line(head_map: HeadMap) -> Sentence:
    names = ", ".join(f"L{layer}H{head}" for layer, head in head_map.selected)
    text = (
        f"{len(head_map.selected)} of {head_map.gap.size} heads ({names}) were chosen on one half "
        f"of the test digits: taken out alone, each lowers the background's effect on the logits there."
    )
    if head_map.has_total:
        share = sum(head_map.share[head] for head in head_map.selected)
        text += f" In the other half, what they write themselves makes up {_points(share)} % of it."
    return Sentence(text, "note")


def _ablation_line(ablation: Ablation) -> Sentence:
    assert ablation.accuracy is not None
    what = "Replacing what they tell the first token by its mean"
    tone, text = _trade(what, ablation.change, ablation.accuracy)
    as_low = round(ablation.percentile * len(ablation.controls))
    as_much = "raise EOd less, or lower it" if ablation.effect > 0 else "lower EOd as much"
    which = "all there are" if ablation.exhaustive else "drawn at random"
    text += (
        f" Of {len(ablation.controls)} other sets of as many heads in the same layers ({which}), {as_low} {as_much} "
        f"(p = {ablation.p_controls:.3f}); the median change of accuracy under them is "
        f"{_points(float(np.median(ablation.control_accuracy)), sign=True)} points."
    )
    found = outcome(ablation)
    if tone in ("good", "note") and found.tone != "good":  # EOd falls, but as far with other heads, for all we know
        return Sentence(text + found.sentence, found.tone)
    return Sentence(text, tone)


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


def _sections(findings: Findings, digits: ShadedDigits) -> list[Any]:
    comparison = findings.comparison
    sections: list[Any] = [
        Text(title="What was done", text=_what_was_done(findings, digits)),
        Audited(title="Plain training", name="plain training", audit=comparison.a),
        Audited(title="DAM attention", name="DAM attention", audit=comparison.b),
        Compared(
            title="DAM attention against plain training",
            text="Both models answered the same pictures: differences are paired, and digits are resampled whole.",
            a_name="plain training",
            b_name="DAM attention",
            comparison=comparison,
        ),
        {
            "kind": "headmap",
            "title": "Heads of the plain model that carry the background",
            "text": (
                "Each head's direct effect on logit(odd) − logit(even): how much more it speaks for odd when the same "
                f"kind of digit has a light background. The whole model's gap is {findings.head_map.total:.2f} logits. "
                "Outlined heads were chosen on the other half of the test digits: those without which, each taken out "
                "alone, that gap is lowest, whatever they write themselves, but no more than a quarter of a layer, so "
                "that the others can serve as controls."
            ),
            **findings.head_map.to_dict(),
        },
    ]
    for ablation in findings.ablations:
        metric = ablation.change.metric
        sections.append(
            {
                "kind": "ablation",
                "title": f"Taking the chosen heads out: effect on {metric}",
                "text": (
                    "The chosen heads' outputs at the first token are replaced by their mean over balanced cells of "
                    "label and background (from the half they were chosen on), and the model runs again. Controls are "
                    "as many other heads of the same layers."
                ),
                **ablation.to_dict(),
            }
        )
    return sections


def _what_was_done(findings: Findings, digits: ShadedDigits) -> str:
    plain, dam = findings.plain_fit.best, findings.dam_fit.best
    return (
        f"There are {len(digits.train)} training and {len(digits.validation)} validation pictures, whose background "
        f"follows the label in 90 % of cases, and {len(digits.test)} test pictures: every test digit once on a dark "
        "and once on a light background, so that the background says nothing about the label.\n\n"
        "Both models start from the same weights and see the same batches for the same number of epochs; neither sees "
        "the background as a column, in training or in the choice of the epoch, which is by validation accuracy: "
        f"epoch {plain.number} ({_points(plain.validation_accuracy)} %) for plain training, epoch {dam.number} "
        f"({_points(dam.validation_accuracy)} %) with DAM attention in the last layer."
    )


def _difference(comparison: Comparison, metric: str) -> Difference:
    return next(d for d in comparison.differences if d.metric == metric)


def _points(fraction: float, sign: bool = False) -> str:
    return f"{100 * fraction:{'+' if sign else ''}.1f}".replace("-", "−")


def _hash(digits: ShadedDigits) -> str:
    return hashlib.sha256(digits.test.inputs["pixel_values"].numpy().tobytes()).hexdigest()
