"""Located log-odds of pairs of texts in words: their terms, the parts by category, and the sentences of the report."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fairhead.data import Images
from fairhead.locate.head_maps import Head, HeadMap
from fairhead.locate.located_report import (
    among_controls,
    edit_words,
    interval,
    line,
    names_of,
    outcome,
    signed,
    surely_lost,
)
from fairhead.locate.pairs import TextPairs
from fairhead.report.wording import head_name, p_value

if TYPE_CHECKING:
    from fairhead.locate.engine import Located, Study

_BENCHMARKS = {"crows_pairs": "CrowS-Pairs", "stereoset": "StereoSet", "pairs": "your own", "triplets": "your own"}


@dataclass(frozen=True)
class CategoryPart:
    """The chosen heads' part in the log-odds of one category of pairs.

    Attributes:
        category: such as "bias_type".
        value: such as "gender".
        n: pairs.
        log_odds: their mean.
        part: the chosen heads' part in it, together.
        low: lower end of the interval of `part`.
        high: upper end.
        p_adjusted: of no part, corrected by Holm over all categories.
    """

    category: str
    value: str
    n: int
    log_odds: float
    part: float
    low: float
    high: float
    p_adjusted: float


@dataclass(frozen=True)
class PairWords:
    """What is told of log-odds.

    Attributes:
        pairs: all of them.
        poles: which text is set against which.
        sums: mean log-odds of the reporting half by heads, embedding and MLPs, biases and entropy.
        by_category: the chosen heads' direct part by category.
    """

    pairs: TextPairs
    poles: tuple[str, str]
    sums: Mapping[str, float]
    by_category: tuple[CategoryPart, ...]

    shown: ClassVar[tuple[str, ...]] = ("log_odds", "log_odds_size", "ss", "nll", "lms")
    in_table: ClassVar[tuple[str, ...]] = shown
    gaps: ClassVar[tuple[str, ...]] = ("log_odds", "log_odds_size", "ss")
    dose_ways: ClassVar[tuple[str, ...]] = ("forward",)
    figure: ClassVar[str] = "figure"
    caption: ClassVar[str] = "p layer: of random heads of the same layers lowering it as much"
    edits: ClassVar[Mapping[str, str]] = {
        "mean": "replacing what they write by its mean",
        "zero": "silencing them",
        "resample": "giving them what they wrote at a token of another text",
    }
    limits: ClassVar[tuple[str, ...]] = (
        "A head's direct part is the slope of the log-odds in what the head itself writes to the last layer; what it "
        "does through later layers is not in it, and shows in forward passes alone. What the entropy of the "
        "predictions adds belongs to no head. Log-odds of pairs also hold how common the words of each group are, "
        "stereotype or not.",
    )

    @property
    def name(self) -> str:
        """Of the benchmark."""
        return _BENCHMARKS.get(self.pairs.name, self.pairs.name)

    @property
    def title(self) -> str:
        """Of the report."""
        return f"Heads that carry the stereotypes of {self.name}"

    def question(self, located: "Located") -> str:
        """What is asked."""
        return (
            f"A language model reads pairs of texts of {self.name}, a stereotype and an anti-stereotype. Which "
            "attention heads make the one likelier than the other, and what happens to the log-odds when those heads "
            "are changed?"
        )

    def opening(self, located: "Located") -> dict[str, str]:
        """The log-odds, which heads, and their part."""
        first, second = self.poles
        whole = located.head_map
        opening = (
            f"The log-odds of {first} against {second} are {signed(whole.total)} nats on average ({whole.n} pairs, "
            f"95 % interval {signed(whole.total_low)} to {signed(whole.total_high)})"
            + ("" if whole.has_total else ", not significant")
        )
        if not located.ranked:
            text = f"{opening}. No head carries a significant part of that after correction."
            return line("unclear", text)
        ranking = located.effect_map or whole
        part = sum(ranking.gap[head] for head in located.ranked)
        what = "their direct part is" if located.effect_map is None else "what is lost without each alone adds up to"
        sure = surely_lost(located, ranking)
        origin, half = ("chosen on one half of the pairs", "other") if located.chosen_here else ("named", "reporting")
        return line(
            "note",
            f"{opening}. {len(located.ranked)} of {whole.gap.size} heads ({names_of(located.ranked)}) were {origin}. "
            f"In the {half} half {what} {signed(part)} nats; "
            f"{f'significant there: {names_of(sure)}' if sure else 'no head is significant there'}.",
        )

    def effect(self, study: "Study") -> dict[str, str]:
        """What an edit did to the log-odds, and to the texts' likelihood."""
        ablation = study["log_odds"]
        change = ablation.change
        assert change.a is not None
        assert change.b is not None
        text = (
            f"{edit_words(self, study, start=True)} changes the mean log-odds from {signed(change.a)} to "
            f"{signed(change.b)} nats ({interval(change)}). {among_controls(ablation)}"
        )
        cost = False
        if study.way == "forward":
            damage = study["nll"].change
            assert damage.value is not None
            cost = damage.low is not None and damage.low > 0
            how = "less" if damage.value > 0 else "more"
            text += f" The texts become {how} likely: {signed(-damage.value)} nats a token ({interval(damage, -1)})."
        found = outcome(ablation)
        modest = found.tone == "good" and (cost or study.way == "direct")
        return line("note" if modest else found.tone, text + found.sentence)

    def done(self, located: "Located") -> str:
        """How it was found."""
        n = int(located.choosing.sum()), int((~located.choosing).sum())
        sums = "; ".join(f"{name} {value:+.3f}" for name, value in self.sums.items())
        origin = f"chosen on {n[0]} pairs" if located.chosen_here else "named"
        return (
            "The log-odds of each pair were taken apart into a sum of terms, one a head, with each position's own "
            f"norm. Heads were {origin}; every figure here is of {n[1]} pairs. Edits act on all tokens and were "
            f"learned on the other {n[0]}. Mean log-odds by term, in nats: {sums}."
        )

    def figure_name(self, metric: str) -> str:
        """A figure in a title."""
        return metric

    def lines(self) -> list[str]:
        """What the terminal shows under the tables: nothing more."""
        return []

    def maps(self, located: "Located") -> list[dict[str, Any]]:
        """The direct parts, and what is lost without each head."""
        titles = {"Each head's direct part in the log-odds": located.head_map}
        if located.effect_map is not None:
            titles["What is lost of the log-odds without each head"] = located.effect_map
        return [{"kind": "headmap", "title": title, **found.to_dict()} for title, found in titles.items()]

    def heads(self, located: "Located", images: Images | None) -> list[dict[str, Any]]:
        """A card a head, parts by category, and the pairs at their ends."""
        cards = [{"head": list(head), "facts": self._facts(located, head)} for head in located.ranked]
        lines = [
            f"{part.value} ({part.n} pairs, log-odds {part.log_odds:+.2f}): part of the chosen heads {part.part:+.3f} "
            f"({part.low:+.3f} to {part.high:+.3f}, adjusted p {p_value(part.p_adjusted)})"
            for part in self.by_category
        ]
        lines += [
            f"{head_name(*e.head)} does most for the {pole} in: " + " / ".join(self._texts(i) for i in rows)
            for e in located.extremes
            for pole, rows in zip(self.poles, (e.most, e.least), strict=True)
        ]
        return [
            {"kind": "top_heads", "title": "The chosen heads", "poles": list(self.poles), "heads": cards},
            {"kind": "text", "title": "By category, and at the ends", "text": "\n\n".join(lines)},
        ]

    def _facts(self, located: "Located", head: Head) -> list[dict[str, str]]:
        facts = []
        for name, found in _maps(located).items():
            ends = f"{found.low[head]:+.3f} to {found.high[head]:+.3f}"
            note = f"{ends}, adjusted p {p_value(float(found.p_adjusted[head]))}"
            facts.append({"name": name, "figure": f"{found.gap[head]:+.3f}", "note": note})
        return facts

    def columns(self, located: "Located", head: Head) -> list[tuple[str, str]]:
        """Of the table in the terminal."""
        cells = []
        for name, found in _maps(located).items():
            ends = f"({found.low[head]:+.3f} to {found.high[head]:+.3f})"
            cells.append((name[0].lower() + name[1:], f"{found.gap[head]:+.3f} {ends}"))
            cells.append(("p adjusted", p_value(float(found.p_adjusted[head]))))
        return cells

    def to_dict(self, located: "Located") -> dict[str, Any]:
        """Benchmark, poles, and log-odds by term and category."""

        def named(rows: Sequence[int]) -> list[dict[str, str]]:
            return [{"id": self.pairs.ids[row], "texts": self._texts(row)} for row in rows]

        return {
            "benchmark": self.pairs.name,
            "poles": list(self.poles),
            "log_odds_by_term": dict(self.sums),
            "curves": located.curves["forward"].to_dict() if "forward" in located.curves else None,
            "by_category": [asdict(part) for part in self.by_category],
            "extremes": [
                {"head": list(e.head), "first": named(e.most), "second": named(e.least)} for e in located.extremes
            ],
        }

    def _texts(self, row: int) -> str:
        two = self.pairs.texts[row * self.pairs.per_pair : row * self.pairs.per_pair + 2]
        return " | ".join(f"{text.prefix}{text.continuation}".strip() for text in two)


def _maps(located: "Located") -> dict[str, HeadMap]:
    maps = {"Direct part, nats": located.head_map}
    return maps if located.effect_map is None else {**maps, "Lost without it, nats": located.effect_map}
