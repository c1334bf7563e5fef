"""The log-odds of pairs of texts under a causal language model, asked of their terms and of forward passes."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fairhead.errors import InputError
from fairhead.language import load_scorer
from fairhead.language.benchmarks import all_benchmarks
from fairhead.language.packing import TokenSequence
from fairhead.language.scorer import Scorer
from fairhead.locate.edits import GROUPLESS_KINDS, HeadEdits, TextEdits, parsed
from fairhead.locate.head_maps import Head
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.located import Located
from fairhead.locate.log_odds import PairTerms, encoded_texts, whole
from fairhead.locate.pair_rows import TextPairs, halves_of_pairs
from fairhead.locate.passes import Stages, has_tf32, text_passes
from fairhead.locate.question import Extremes, Question
from fairhead.locate.studies import Edited, Study, among_controls, interval, outcome
from fairhead.report.page import Sentence
from fairhead.report.sections import Section
from fairhead.report.sections.headmap import Fact
from fairhead.report.sections.plain import Text
from fairhead.report.wording import head_name, p_value, signed
from fairhead.stats import adjust

_EXTREMES = 3
_FEW = 50
_LEAST = 10  # pairs of a category, at least, for a figure of it
_OWN = {"pairs": "your own pairs", "triplets": "your own triplets"}


@dataclass(frozen=True, kw_only=True)
class PairLocated(Located[TextPairs]):
    """What is found of the log-odds of pairs."""

    sums: Mapping[str, float]  # mean log-odds of the reporting half by heads, embedding and MLPs, biases and entropy
    # The selected heads' direct contribution to the mean log-odds of each category, with its interval and Holm's p
    by_category: tuple[Mapping[str, Any], ...]

    shown: ClassVar[tuple[str, ...]] = ("log_odds", "log_odds_size", "ss", "nll", "lms")
    in_table: ClassVar[tuple[str, ...]] = shown
    gaps: ClassVar[tuple[str, ...]] = ("log_odds", "log_odds_size", "ss")
    figure: ClassVar[str] = "figure"
    caption: ClassVar[str] = (
        "scores in percent, changes in points (log-odds in nats); p layer: random heads of the same layers lower it "
        "as much"
    )
    edit_names: ClassVar[Mapping[str, str]] = {
        "mean": "replacing the heads' output by its mean",
        "zero": "setting the heads to zero",
        "resample": "replacing the heads' output by that at a token of another text",
    }
    limits: ClassVar[tuple[str, ...]] = (
        "A head's direct contribution is the slope of the log-odds in what the head itself writes to the last layer; "
        "what it does through later layers is not included, and shows only in forward passes. What the entropy of the "
        "predictions adds belongs to no head. Log-odds of pairs also depend on how common the words of each group are, "
        "stereotype or not.",
    )

    @property
    def name(self) -> str:
        """Of the benchmark, as its authors write it."""
        titles = {benchmark.name: benchmark.title for benchmark in all_benchmarks()}
        return {**_OWN, **titles}.get(self.question.rows.name, self.question.rows.name)

    @property
    def title(self) -> str:
        """Of the report."""
        return f"Heads that contribute to stereotypes in {self.name}"

    @property
    def asked(self) -> str:
        """What is asked."""
        return (
            f"A language model reads pairs of texts from {self.name}, a stereotype and an anti-stereotype. Which "
            "attention heads make the one more likely than the other, and what happens to the log-odds when those "
            "heads change?"
        )

    def opening(self) -> Sentence:
        """The log-odds, which heads, and their part."""
        first, second = self.question.rows.poles
        whole = self.head_map
        opening = (
            f"The log-odds of {first} against {second} are {signed(whole.total)} nats on average ({whole.n} pairs, "
            f"95 % interval {signed(whole.total_low)} to {signed(whole.total_high)})"
            + ("" if whole.has_total else ", not significant")
        )
        if not self.ranked:
            text = f"{opening}. No head contributes significantly to them in the selection half."
            return Sentence(text, "unclear")
        ranking = self.effect_map or whole
        part = sum(ranking.value[head] for head in self.ranked)
        what = (
            "their direct contribution is" if self.effect_map is None else "the effects of editing each alone add up to"
        )
        tone, half = "note" if self.confirmed else "unclear", "other" if self.chosen_here else "reporting"
        return Sentence(f"{self.headline()} {opening}. In the {half} half {what} {signed(part)} nats.", tone)

    def effect(self, study: Study) -> Sentence:
        """What an edit did to the log-odds, and to the texts' likelihood."""
        change, damage = study.change("log_odds"), study.change("nll")
        assert change is not None
        ablation = next((a for a in study.ablations if a.change is change), None)
        text = (
            f"{self.edit_words(study)} changes the mean log-odds from {signed(change.a)} to "
            f"{signed(change.b)} nats ({interval(change)}).{'' if ablation is None else ' ' + among_controls(ablation)}"
        )
        cost = False
        if damage is not None and damage.value is not None:
            cost = damage.low is not None and damage.low > 0
            how = "less" if damage.value > 0 else "more"
            text += f" The texts become {how} likely: {signed(-damage.value)} nats per token ({interval(damage, -1)})."
        found = outcome(change, ablation)
        modest = found.tone == "good" and (cost or study.way == "direct")
        return Sentence(text + found.text, "note" if modest else found.tone)

    def done(self) -> str:
        """How it was found."""
        n = int(self.question.choosing.sum()), int((~self.question.choosing).sum())
        sums = "; ".join(f"{name} {signed(value)}" for name, value in self.sums.items())
        origin = f"selected on {n[0]} pairs" if self.chosen_here else self.origin
        return (
            "The log-odds of each pair were decomposed into a sum of terms, one per head, with each position's own "
            f"norm. Heads were {origin}; every figure here comes from {n[1]} pairs. Edits act on all tokens and were "
            f"learned on the other {n[0]}. Mean log-odds by term, in nats: {sums}."
        )

    def maps(self) -> dict[str, Section]:
        """The direct contributions, and what is lost without each head."""
        maps = {"Direct contribution": self.mapped(self.head_map, "Each head's direct contribution to the log-odds")}
        if self.effect_map is not None:
            maps["Effect"] = self.mapped(self.effect_map, "How much the log-odds fall without each head")
        return maps

    def sections(self) -> list[Section]:
        """Parts by category, and the pairs at the ends of heads."""
        lines = [
            f"{one['value']} ({one['n']} pairs, log-odds {signed(one['log_odds'], 2)}): contribution of the selected "
            f"heads {signed(one['part'])} ({signed(one['low'])} to {signed(one['high'])}, adjusted p "
            f"{p_value(one['p_adjusted'])})"
            for one in self.by_category
        ]
        lines += [
            f"{head_name(*e.head)} does most for the {pole} in: " + " / ".join(self._texts(i) for i in rows)
            for e in self.extremes
            for pole, rows in zip(self.question.rows.poles, (e.most, e.least), strict=True)
        ]
        return [Text(title="By category, and at the ends", text="\n\n".join(lines))]

    def facts(self, head: Head) -> list[Fact]:
        """The figures of a head."""
        facts = []
        maps = {"Direct contribution, nats": self.head_map, "Lost without it, nats": self.effect_map}
        for name, found in ((name, found) for name, found in maps.items() if found is not None):
            ends = f"{signed(found.low[head])} to {signed(found.high[head])}"
            note = f"{ends}, adjusted p {p_value(float(found.p_adjusted[head]))}"
            facts.append(Fact(name, signed(found.value[head]), note))
        return facts

    def details(self) -> dict[str, Any]:
        """Benchmark, poles, and log-odds by term and category."""

        def named(rows: Sequence[int]) -> list[dict[str, str]]:
            return [{"id": self.question.rows.ids[row], "texts": self._texts(row)} for row in rows]

        return {
            "benchmark": self.question.rows.name,
            "poles": list(self.question.rows.poles),
            "log_odds_by_term": dict(self.sums),
            "curves": self.curves.get("forward"),
            "by_category": list(self.by_category),
            "extremes": [
                {"head": list(e.head), "first": named(e.most), "second": named(e.least)} for e in self.extremes
            ],
        }

    def _texts(self, row: int) -> str:
        two = self.question.rows.texts[row * self.question.rows.per_pair : row * self.question.rows.per_pair + 2]
        return " | ".join(f"{text.prefix}{text.continuation}".strip() for text in two)


class PairQuestion(Question[TextPairs]):
    """The log-odds of pairs of texts, seen from the pole that the selection half prefers."""

    located = PairLocated
    kinds = GROUPLESS_KINDS
    ranks = ("gap", "effect")
    correction = "holm"

    @classmethod
    def check(cls, plan: LocatePlan) -> None:
        """Refuse a plan that this question cannot follow."""
        super().check(plan)
        if plan.target is not None:
            raise InputError("--target has no meaning for pairs of texts: the cheapest edit is found between groups")

    def __init__(
        self,
        scorer: Scorer,  # the model
        pairs: TextPairs,  # n pairs of texts
        terms: PairTerms,  # their log-odds taken apart (`take_apart`)
        *,
        # On GPUs that can, forward passes multiply in TF32: several times as fast. What that changes is noted.
        tf32: bool = False,
        seed: int = 0,  # of halves, and of the outputs that are resampled
        progress: Callable[[str, int, int], None] | None = None,  # called with (stage, texts done, texts)
    ) -> None:
        self.scorer, self._stages = scorer, Stages(progress)
        self.choosing = halves_of_pairs(pairs, seed)
        self.comparable = np.ones(len(pairs), dtype=bool)
        self._sequences = encoded_texts(scorer, pairs)
        # Seen from the pole that the selection half prefers, so that a fall always means a smaller gap.
        prefers = float(pairs.weights[self.choosing] @ terms.log_odds[self.choosing])
        self.rows = replace(pairs, sign=-1.0 if prefers < 0 else 1.0)
        self.side = self.rows.sign
        self.edits: TextEdits = TextEdits.learn_texts(scorer, self._texts(np.flatnonzero(self.choosing)), seed)
        self.terms = terms.times(self.rows.sign)
        self.parts, self.other_parts, self.total = self.terms.heads, self.terms.others, self.terms.log_odds
        self.in_tf32 = tf32 and has_tf32(next(scorer.model.parameters()).device)
        n = len(self.reported)
        self.notes = (f"{n} reported pairs are few: expect wide intervals.",) if n < _FEW else ()

    def _texts(self, rows: NDArray[np.intp]) -> list[TokenSequence]:
        k = self.rows.per_pair
        return [self._sequences[i * k + j] for i in rows for j in range(k)]

    def direct(self, kind: str, seed: int) -> Edited | None:
        """Of silent heads, or of heads stuck at their mean; resampling would need every token's own output."""
        name, strength = parsed(kind)
        if name == "resample":
            return None
        kept, rows = self.terms.take(self.reported), self.rows.take(self.reported)
        stuck, plain = self.edits.means if name == "mean" else None, kept.log_odds
        return lambda sets: [rows.sums(plain + strength * (kept.without(s, stuck) - plain)) for s in sets]

    def forward(self, rows: NDArray[np.intp], kind: str) -> Edited:
        """All texts of some pairs, by the model itself."""
        texts, part = self._texts(rows), self.rows.take(rows)
        tokens = np.array([len(text.tokens) - text.scored_from for text in texts])
        tell = self._stages.sweep(len(texts))
        passes = text_passes(self.scorer, texts, self.edits, kind, tf32=self.in_tf32, progress=tell)
        return lambda sets: [part.read(found, tokens) for found in passes(sets)]

    @property
    def fast(self) -> bool:
        """Whether the model is on a GPU."""
        return next(self.scorer.model.parameters()).device.type == "cuda"

    def forward_notes(self, edited: Edited | None) -> list[str]:
        """What TF32 changed."""
        if not self.in_tf32:
            return []
        (plain,) = (edited or self.forward(self.reported, self.kinds[0]))([()])
        off = np.abs(self.rows.evidence(plain) - self.total[self.reported])
        return [
            "Forward passes ran in TF32: the log-odds of the model as it is differ from those in float32 by "
            f"{off.mean():.1g} nats a pair on average, {off.max():.1g} at most."
        ]

    def writable(self) -> tuple[nn.Module, Any, HeadEdits]:
        """The model, its tokenizer and the edits, which are of all tokens."""
        return self.scorer.model, self.scorer.tokenizer, self.edits

    def of_saved(self, folder: Path) -> "PairQuestion":
        """The same tokens, read by the saved model."""
        found = copy.copy(self)
        device = next(self.scorer.model.parameters()).device
        found.scorer = load_scorer(str(folder), device=str(device), dtype="float32")
        return found

    def extremes(self, head: Head, count: int | None) -> Extremes:
        """The reported pairs that a head moves most towards either pole."""
        rows = self.reported
        return Extremes.of(head, self.parts[rows, head.layer, head.head], count or _EXTREMES, rows)

    def details(self, ranked: tuple[Head, ...], plan: LocatePlan) -> dict[str, Any]:
        """Log-odds by term, and the selected heads' part by category."""
        kept, rows = self.terms.take(self.reported), self.rows.take(self.reported)
        sums = {name: float(rows.weights @ values) for name, values in whole(kept)}
        return {"sums": sums, "by_category": parts_by_category(kept, rows, ranked, plan.level)}


def parts_by_category(
    terms: PairTerms, rows: TextPairs, ranked: Sequence[Head], level: float = 0.95
) -> tuple[dict[str, Any], ...]:
    """The selected heads' direct contribution, together, in every category that has enough pairs; Holm over them."""
    if not ranked:
        return ()
    together = np.sum([terms.heads[:, layer, head] for layer, head in ranked], axis=0)
    found: list[dict[str, Any]] = []
    ps: list[float | None] = []
    for category, values in rows.categories.items():
        for value in sorted(set(values)):
            chosen = np.flatnonzero(np.array(values) == value)
            part = rows.take(chosen)
            if len(chosen) >= _LEAST and len(np.unique(part.clusters)) > 1:
                scored = part.score(together[chosen, None, None], terms.log_odds[chosen], level)
                about = {"category": category, "value": value, "n": scored.n, "log_odds": scored.total}
                ends = {"part": scored.value, "low": scored.low, "high": scored.high}
                found.append({**about, **{name: float(x[0, 0]) for name, x in ends.items()}})
                ps.append(float(scored.p[0, 0]))
    corrected = (1.0 if p is None else p for p in adjust(ps, "holm"))
    return tuple({**part, "p_adjusted": p} for part, p in zip(found, corrected, strict=True))
