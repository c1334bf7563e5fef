"""The effect of taking heads out on one metric, held against random heads of the same layers, and its words."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.locate.edits import parsed
from fairhead.locate.head_maps import Head, HeadMap
from fairhead.report.page import Sentence
from fairhead.report.sections import Section
from fairhead.report.wording import head_name, signed
from fairhead.stats import ALPHA, Difference, p_text

if TYPE_CHECKING:
    from fairhead.locate.engine import Located, Words
    from fairhead.locate.studies import Study

# How an edit was made: of one study, and of curves.
WAYS = {
    "direct": ("direct effect alone", "direct effect alone"),
    "forward": ("as a true forward pass", "true forward passes"),
    "together": ("of what the chosen heads together add to the output", "the chosen heads together"),
    "output": ("of the whole output, in place of heads", "the whole output"),
}


_CARDS = 400  # heads that have a card each on a page


@dataclass(frozen=True)
class Ablation:
    """The effect of taking heads out on one metric, against layer-matched controls."""

    selected: tuple[Head, ...]  # the heads taken out
    change: Difference  # the metric before (a) and after (b), paired over rows, with interval and p-value
    controls: tuple[float, ...]  # the change of the metric when each control set is taken out instead
    exhaustive: bool  # whether the controls are all that there are
    accuracy: Difference | None = None  # the change of accuracy, where known
    control_accuracy: tuple[float, ...] = ()  # the change of accuracy under each control set, where known

    @property
    def effect(self) -> float:
        """After minus before."""
        return float("nan") if self.change.value is None else self.change.value

    @property
    def percentile(self) -> float:
        """Share of the control sets that lower the metric at least as much: near 0 is a strong finding."""
        return float(np.mean(self._as_low))

    @property
    def p_controls(self) -> float:
        """How often a random set would lower the metric as much: (1 + k) / (1 + sets), one-sided."""
        return float((1 + self._as_low.sum()) / (1 + len(self.controls)))

    @property
    def _as_low(self) -> NDArray[np.bool_]:
        # Equal counts can differ in the last bit as fractions.
        return np.asarray(self.controls) <= self.effect + 1e-12

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, which is also the data of a report's "ablation" section."""
        change, accuracy = self.change, self.accuracy
        return {
            "metric": change.metric,
            "selected": [list(head) for head in self.selected],
            "before": change.a,
            "after": change.b,
            "effect": change.value,
            "low": change.low,
            "high": change.high,
            "p": change.p,
            "controls": list(self.controls),
            "exhaustive": self.exhaustive,
            "percentile": self.percentile,
            "p_controls": self.p_controls,
            "accuracy_effect": None
            if accuracy is None
            else {"value": accuracy.value, "low": accuracy.low, "high": accuracy.high},
            "control_accuracy": list(self.control_accuracy),
        }


@dataclass(frozen=True)
class Controls:
    """Sets of heads, each matched to the chosen ones. `exhaustive`: all that there are."""

    sets: tuple[tuple[Head, ...], ...]
    exhaustive: bool


def layer_matched(selected: Sequence[tuple[int, int]], n_heads: int, *, draws: int = 200, seed: int = 0) -> Controls:
    """Head sets with as many heads of each layer as `selected` has, leaving those out.

    So many different `draws` are made where there are more than twice as many sets; otherwise all are taken.
    """
    taken = Counter(layer for layer, _ in selected)
    free = {layer: [h for h in range(n_heads) if (layer, h) not in {tuple(s) for s in selected}] for layer in taken}
    for layer, count in taken.items():
        if len(free[layer]) < count:
            raise InputError(
                f"{count} of the {n_heads} heads of layer {layer} are selected; that leaves {len(free[layer])}, too "
                "few to draw controls from: select fewer heads of one layer"
            )
    layers = sorted(taken)

    def heads(choice: Sequence[Sequence[int]]) -> tuple[Head, ...]:
        return tuple(Head(layer, head) for layer, some in zip(layers, choice, strict=True) for head in some)

    def draw(rng: np.random.Generator) -> tuple[Head, ...]:
        return heads([sorted(rng.choice(free[layer], taken[layer], replace=False).tolist()) for layer in layers])

    count = math.prod(math.comb(len(free[layer]), taken[layer]) for layer in layers)
    every = map(heads, product(*(combinations(free[layer], taken[layer]) for layer in layers)))
    return _controls(len(selected), count, every, draw, draws, seed)


def norm_matched(
    selected: Sequence[tuple[int, int]],
    norms: NDArray[np.floating],
    *,
    neighbours: int = 12,
    draws: int = 200,
    seed: int = 0,
) -> Controls:
    """Head sets in which each chosen head is replaced by one that writes about as much, of whatever layer.

    How much a head writes is the mean length of its centred term, `norms` [layers, heads]; it may be replaced by one of
    so many `neighbours` nearest in the logarithm of that.
    """
    taken = {tuple(head) for head in selected}
    free = [Head(*h) for h in np.ndindex(norms.shape) if h not in taken]
    if len(free) < len(selected):
        raise InputError(f"{len(selected)} heads are selected, which leaves {len(free)}: too few to draw controls from")
    size = np.log(np.maximum(norms, 1e-12))
    sizes, most = np.array([size[head] for head in free]), max(neighbours, len(selected))
    near = [[free[i] for i in np.argsort(np.abs(sizes - size[tuple(head)]), kind="stable")[:most]] for head in selected]

    def draw(rng: np.random.Generator) -> list[Head]:
        return sorted(candidates[int(rng.integers(len(candidates)))] for candidates in near)

    return _controls(len(selected), math.prod(map(len, near)), map(sorted, product(*near)), draw, draws, seed)


def _controls(
    heads: int,  # of a set; one that has a head twice is none
    count: int,  # sets that there are, at most
    every: Iterable[Sequence[Head]],  # all of them
    draw: Callable[[np.random.Generator], Sequence[Head]],  # one of them
    draws: int,
    seed: int,
) -> Controls:
    """So many different draws where there are more than twice as many sets, or all sets."""
    if not heads:
        raise InputError("no heads were selected, so there is nothing to match controls to")
    rng, exhaustive = np.random.default_rng(seed), count <= 2 * draws
    found: dict[tuple[Head, ...], None] = {}  # a set that keeps the order of the draw
    for some in every if exhaustive else (draw(rng) for _ in range(50 * draws)):
        if len(set(some)) == heads:
            found.setdefault(tuple(some))
        if len(found) == draws and not exhaustive:
            break
    return Controls(tuple(found), exhaustive)


def edit_words(words: "Words", study: "Study", start: bool = False) -> str:
    """An edit in words, perhaps at the start of a sentence."""
    name, strength = parsed(study.kind)
    part = "" if strength == 1 else f" at a strength of {strength:g}"
    text = f"{words.edits[name]}{part} ({WAYS[study.way][0]})"
    return text[:1].upper() + text[1:] if start else text


def outcome(change: Difference, ablation: Ablation | None) -> Sentence:
    """Judge the effect on a gap whose ideal is 0, by its interval, its corrected p and the controls, if any."""
    if change.a is None or change.b is None or change.low is None or change.high is None:
        return Sentence("", "unclear")
    if not change.significant:  # p is about who is where, the interval about the size of the gap
        moved = change.p_adjusted is not None and change.p_adjusted <= ALPHA
        why = "the interval of the change holds 0" if moved else p_text(change.p_adjusted)
        return Sentence(f" Not significant ({why}).", "unclear")
    if abs(change.b) > abs(change.a):
        side = ", on the other side" if change.a * change.b < 0 else ""
        return Sentence(f" The gap is wider than before{side}.", "bad")
    if change.low > 0:  # nearer to 0 from below: controls are asked who lowers the figure
        return Sentence("", "note")
    if ablation is None:
        return Sentence(" It was not compared with random heads.", "note")
    if ablation.p_controls <= ALPHA:
        return Sentence("", "good")
    if ablation.percentile == 0:
        return Sentence(" No control does as much, but there are too few of them to rule out chance.", "note")
    return Sentence(" So the effect is not special to the chosen heads.", "unclear")


def beats(gap: Difference, accuracy: Difference) -> tuple[bool, str]:
    """Whether an edit beats another, by the changes from the other to it: better in one and not worse in the other."""
    better: list[str] = []
    worse: list[str] = []
    if gap.significant:
        smaller = abs(gap.b or 0) < abs(gap.a or 0)
        (better if smaller else worse).append("a smaller gap" if smaller else "a larger gap")
    if accuracy.significant:
        higher = (accuracy.value or 0) > 0
        (better if higher else worse).append("higher accuracy" if higher else "lower accuracy")
    if not better and not worse:
        return False, "not beaten, no significant difference"
    return bool(better and not worse), f"{'not ' if worse else ''}beaten, with {' and '.join(better + worse)}"


def among_controls(ablation: Ablation) -> str:
    """How many control sets do what an edit does to a figure that should fall.

    Example:
        >>> lower = Difference("DP", "sex", 0.16, 0.05, -0.11, -0.17, -0.05, n=500, p=0.01, p_adjusted=0.02)
        >>> among_controls(Ablation((Head(2, 1),), lower, controls=(-0.2, 0.01, 0.0), exhaustive=False))
        'Of 3 control sets of the same layers, 1 lower it as much (p = 0.50).'
    """
    count = round(ablation.percentile * len(ablation.controls))
    falls = ablation.change.value is None or ablation.change.value <= 0
    if len(ablation.controls) == 1:
        return "There is one control set of the same layers alone, which is no test."
    what = "lower it as much" if falls else "raise it less, or lower it"
    sets = f"Of {len(ablation.controls)} control sets of the same layers"
    return f"{sets}, {count} {what} ({p_text(ablation.p_controls)})."


def headline(located: "Located") -> str:
    """Which heads, and how many of them the other half confirms."""
    chosen, sure, noun = located.ranked, located.confirmed, located.rows.noun
    which = "" if len(sure) in (0, len(chosen)) else f": {names_of(sure)}"
    count = f"{len(sure) if sure else 'None'} of {len(chosen)}"
    were, are = ("was", "is") if len(chosen) == 1 else ("were", "are")
    if not located.chosen_here:
        how = located.origin if located.gains is None else "given a gain"
        return f"{names_of(chosen)} {were} {how}. {count} {are} significant on the reporting half{which}."
    return (
        f"{count} chosen heads confirmed on the other half{which}. ({names_of(chosen)}, of "
        f"{located.head_map.gap.size} heads, {were} chosen on one half of the {noun}.)"
    )


def mapped(located: "Located", found: HeadMap | Mapping[str, Any], title: str, text: str = "") -> Section:
    """A map for the page, with the chosen heads marked, and those of them that are confirmed."""
    content = found.to_dict() if isinstance(found, HeadMap) else found
    cards = [*located.ranked, *other_cards(located)] if located.ranked else []
    marks = {"selected": sorted(located.ranked), "confirmed": sorted(located.confirmed), "cards": cards}
    lists = {name: [list(head) for head in heads] for name, heads in marks.items()}
    return Section.from_json({"kind": "headmap", "title": title, "text": text, **content, **lists}, title)


def other_cards(located: "Located") -> list[Head]:
    """Heads that were not chosen and have a card, unless they are too many for one page."""
    shape = located.head_map.gap.shape
    every = (Head(*head) for head in np.ndindex(shape))
    return [head for head in every if head not in located.ranked] if np.prod(shape) <= _CARDS else []


def names_of(heads: Sequence[Head]) -> str:
    """Heads in a sentence."""
    return ", ".join(head_name(*head) for head in heads)


def interval(change: Difference, factor: float = 1, digits: int = 3) -> str:
    """The ends of a change, times a factor."""
    if change.low is None or change.high is None:
        return "no interval"
    ends = sorted((factor * change.low, factor * change.high))
    return f"95 % interval {' to '.join(signed(end, digits) for end in ends)}"


def written(change: Difference | None, factor: float = 1, with_p: bool = False) -> str:
    """A change with its interval in a cell of a table; in points where the factor is 100."""
    if change is None or change.value is None or change.low is None or change.high is None:
        return "–"
    value, low, high = (signed(factor * x, 3 if factor == 1 else 1) for x in (change.value, change.low, change.high))
    return f"{value} ({low} to {high}{f'; {p_text(change.p_adjusted)}' if with_p else ''})"
