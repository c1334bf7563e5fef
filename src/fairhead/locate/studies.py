"""What edits of heads do: figures before and after, beside those of random heads, in numbers and in words."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.audit_results import Comparison
from fairhead.errors import InputError
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, HeadMap
from fairhead.locate.locate_settings import LocatePlan
from fairhead.report.page import Sentence
from fairhead.report.wording import scale_for
from fairhead.stats import ALPHA, Difference, p_text

# Sets of heads -> what is read with each of them edited; the empty set is the model as it is.
Edited = Callable[[Sequence[Sequence[tuple[int, int]]]], Sequence[Array]]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Ablation:
    """The effect of taking heads out on one metric, against matched controls."""

    selected: tuple[Head, ...]  # the heads taken out
    change: Difference  # the metric before (a) and after (b), paired over rows, with interval and p-value
    controls: tuple[float, ...]  # the change of the metric when each control set is taken out instead
    exhaustive: bool  # whether the controls are all that there are
    accuracy: Difference | None = None  # the change of accuracy, where known
    control_accuracy: tuple[float, ...] = ()  # the change of accuracy under each control set, where known

    @property
    def percentile(self) -> float:
        """Share of the control sets that lower the metric at least as much: near 0 is a strong finding."""
        return float(np.mean(self._as_low))

    @property
    def p_controls(self) -> float:
        """How often a random set would lower the metric as much: (1 + k) / (1 + sets), one-sided."""
        return float((1 + self._as_low.sum()) / (1 + len(self.controls)))

    @property
    def _as_low(self) -> Mask:
        effect = float("nan") if self.change.value is None else self.change.value
        # Equal counts can differ in the last bit as fractions.
        return np.asarray(self.controls) <= effect + 1e-12

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, which is also the data of a report's "ablation" section."""
        change, cost = self.change, self.accuracy
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
            "accuracy_effect": None if cost is None else {"value": cost.value, "low": cost.low, "high": cost.high},
            "control_accuracy": list(self.control_accuracy),
        }


class Rows(Protocol):
    """Who is compared, and the figures that an edit may change: rows with groups, or pairs of texts.

    A *read* is what one pass says of all rows: logits [n, C], or the sums behind the figures of pairs, [n, 7].
    """

    @property
    def noun(self) -> str:
        """What the rows are."""

    @property
    def gap_name(self) -> str:
        """What the gap is in."""

    @property
    def poles(self) -> tuple[str, str]:
        """The two groups."""

    @property
    def ids(self) -> Any:
        """Names of the rows, where they have some."""

    @property
    def doses(self) -> tuple[str, ...]:
        """Figures of dose–response curves."""

    def __len__(self) -> int: ...

    def take(self, rows: NDArray[Any]) -> Self:
        """The chosen rows: positions, or a mask."""

    def score(self, parts: Array, total: Array, level: float = 0.95, measure: str | None = None) -> HeadMap:
        """The gap in parts [n, layers, heads] of a whole [n]."""

    def evidence(self, read: Array) -> Array:
        """The evidence in a read, [n]."""

    def figures(self, reads: Sequence[Array]) -> Mapping[str, Array]:
        """The figures of several reads, each [k]."""

    def compare(self, before: Array, after: Array, plan: LocatePlan) -> "Changes":
        """All figures of two reads, paired."""


class Controls(NamedTuple):
    """Sets of heads, each matched to the chosen ones. `exhaustive`: all that there are."""

    sets: tuple[tuple[Head, ...], ...] = ()
    exhaustive: bool = False


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
    selected: Sequence[tuple[int, int]], norms: Array, *, neighbours: int = 12, draws: int = 200, seed: int = 0
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


class Changes(NamedTuple):
    """What an edit did to the figures of some rows, paired."""

    differences: tuple[Difference, ...]  # one a figure
    comparison: Comparison | None = None  # the same as an audit has it, where rows have labels and groups
    # Accuracy by class and group, as (class, group, change), where rows have them
    by_cell: tuple[tuple[str, str, Difference], ...] = ()

    def change(self, metric: str) -> Difference | None:
        """One figure before and after; None where it has no value."""
        return next((d for d in self.differences if d.metric == metric and d.value is not None), None)


@dataclass(frozen=True)
class Study:
    """The effect of one edit of the selected heads."""

    kind: str  # of edit
    way: str  # "direct" or "forward"; of baselines "together" or "output"
    ablations: tuple[Ablation, ...]  # one a figure, against layer-matched controls
    norm_matched: tuple[Ablation, ...]  # the same against controls that write as much, where there are any
    changes: Changes  # every figure before and after, paired
    before: Array  # what was read of the model as it is
    after: Array  # what was read with the heads edited
    reported: Changes | None = None  # of a baseline: from it to the edit of heads that is reported, paired

    def __getitem__(self, metric: str) -> Ablation:
        """The ablation of one figure, against layer-matched controls."""
        return next(a for a in self.ablations if a.change.metric == metric)

    def change(self, metric: str) -> Difference | None:
        """One figure before and after; None where it has no value."""
        return self.changes.change(metric)

    def with_after(self, rows: Rows, after: Array, plan: LocatePlan) -> "Study":
        """The same with figures of another pass over the edited model, as of one that was saved and loaded."""
        changes = rows.compare(self.before, after, plan)
        new = {change.metric: change for change in changes.differences}
        by_layer, by_norm = (
            tuple(
                replace(a, change=new[a.change.metric], accuracy=None if a.accuracy is None else new["accuracy"])
                for a in ablations
            )
            for ablations in (self.ablations, self.norm_matched)
        )
        return replace(self, ablations=by_layer, norm_matched=by_norm, changes=changes, after=after)

    def to_dict(self, main: Sequence[str]) -> dict[str, Any]:
        """The JSON form; of a baseline, the `main` figures alone."""
        content: dict[str, Any] = {"kind": self.kind, "way": self.way}
        if self.reported is not None:  # its own changes, and from it to the reported edit of heads
            parts = {"changes": self.changes, "heads_beside": self.reported}
            found = {name: [d.to_dict() for d in part.differences if d.metric in main] for name, part in parts.items()}
            return content | found
        if not self.ablations:  # no random heads to compare with
            content["changes"] = [change.to_dict() for change in self.changes.differences]
        content["metrics"] = [ablation.to_dict() for ablation in self.ablations]
        if self.changes.by_cell:
            content["norm_matched"] = [ablation.to_dict() for ablation in self.norm_matched]
            cells = self.changes.by_cell
            content["accuracy_by_cell"] = [{"label": y, "group": group, **d.to_dict()} for y, group, d in cells]
        return content


def study(
    edited: Edited,
    ranked: Sequence[Head],
    rows: Rows,
    controls: Controls,
    plan: LocatePlan,
    kind: str,
    way: str,
    by_norm: Controls | None = None,
) -> Study:
    """Edit the selected heads, and controls matched by layer and by how much heads write."""
    by_norm = by_norm or Controls()
    # All at once: a full forward pass decodes the images once for all of them.
    before, after, *rest = edited([(), ranked, *controls.sets, *by_norm.sets])
    changes = rows.compare(before, after, plan)
    found, n = rows.figures([before, *rest]), 1 + len(controls.sets)
    by_layer, among_norm = (
        _against(changes.differences, {name: x[part] - x[0] for name, x in found.items()}, ranked, some)
        for part, some in ((slice(1, n), controls), (slice(n, None), by_norm))
    )
    return Study(kind, way, by_layer, among_norm, changes, np.asarray(before), np.asarray(after))


def _against(
    differences: Sequence[Difference], changes: Mapping[str, Array], ranked: Sequence[Head], controls: Controls
) -> tuple[Ablation, ...]:
    """One ablation a figure, beside the changes [sets] that the controls make."""
    # A figure may have no value for some sets, as V where all predictions are the same.
    known = {name: tuple(values[~np.isnan(values)].tolist()) for name, values in changes.items()}
    accuracy = next((d for d in differences if d.metric == "accuracy"), None)
    ablations = []
    for change in differences:
        if change.value is not None and known.get(change.metric):
            others = accuracy is not None and change is not accuracy
            cost = (accuracy, known["accuracy"]) if others else (None, ())
            heads = tuple(sorted(ranked))
            ablations.append(Ablation(heads, change, known[change.metric], controls.exhaustive, *cost))
    return tuple(ablations)


def curve_sets(ranked: Sequence[Head]) -> dict[str, list[tuple[Head, ...]]]:
    """Sets of each curve: heads added one by one from none on, best first; each alone; all but one of several."""
    added = [tuple(ranked[:k]) for k in range(len(ranked) + 1)]
    left_out = [tuple(other for other in ranked if other != head) for head in ranked]
    return {"added": added, "alone": [(h,) for h in ranked], "left_out": left_out if len(ranked) > 1 else []}


def curves(edited: Edited, ranked: Sequence[Head], rows: Rows) -> dict[str, Any]:
    """The JSON form of dose–response curves of heads, best first: the figures of each set of `curve_sets`."""
    sets = curve_sets(ranked)
    every = [*chain(*sets.values())]
    found = rows.figures(edited(every))
    points = {
        heads: {"heads": [list(h) for h in heads], **{n: float(found[n][i]) for n in rows.doses}}
        for i, heads in enumerate(every)
    }
    return {"metrics": list(rows.doses), **{name: [points[heads] for heads in part] for name, part in sets.items()}}


def single_head_effects(
    edited: Edited,
    shape: tuple[int, int],
    rows: Rows,
    *,
    kind: str = "mean",
    level: float = 0.95,
    heads: Sequence[Head] | None = None,
    estimate: Array | None = None,
) -> HeadMap:
    """What the gap loses when each head alone is edited in a full forward pass.

    A head's direct contribution leaves out effects through later layers; this does not. The price is
    one pass for each head, of `shape` [layers, heads]; or for some `heads` alone, where there is an `estimate`
    [n, layers, heads] for the others.
    """
    run = [Head(*head) for head in np.ndindex(shape)] if heads is None else list(heads)
    before, *after = (np.asarray(rows.evidence(read), dtype=np.float64) for read in edited([(), *zip(run)]))
    lost = np.zeros((len(before), *shape)) if estimate is None else estimate.copy()
    for head, each in zip(run, after, strict=True):
        lost[:, head.layer, head.head] = before - each
    first, second = rows.poles
    how = "forward pass" if heads is None else f"forward passes of {len(run)} heads, others estimated"
    measure = f"{rows.gap_name} lost without the head ({kind}, {how}), {first} minus {second}"
    return rows.score(lost, before, level, measure)


def outcome(change: Difference, ablation: Ablation | None) -> Sentence:
    """Judge the effect on a gap whose ideal is 0, by its interval, its corrected p and the controls, if any."""
    if change.a is None or change.b is None or change.low is None or change.high is None:
        return Sentence("", "unclear")
    if not change.significant:  # p is about who is where, the interval about the size of the gap
        moved = change.p_adjusted is not None and change.p_adjusted <= ALPHA
        why = "the interval of the change includes 0" if moved else p_text(change.p_adjusted)
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
        return Sentence(" No control does as much, but there are too few controls to rule out chance.", "note")
    return Sentence(" So the effect is not specific to the selected heads.", "unclear")


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
        return "There is only one control set of the same layers, too few for a test."
    what = "lower it as much" if falls else "raise it less, or lower it"
    sets = f"Of {len(ablation.controls)} control sets of the same layers"
    return f"{sets}, {count} {what} ({p_text(ablation.p_controls)})."


def interval(change: Difference, sign: int = 1) -> str:
    """The ends of a change, or of what is its opposite."""
    if change.low is None or change.high is None:
        return "no interval"
    ends = sorted((sign * change.low, sign * change.high))
    return f"95 % interval {' to '.join(scale_for(change.metric).number(end, signed=True) for end in ends)}"


def written(change: Difference | None, with_p: bool = False) -> str:
    """A change with its interval in a cell of a table; of a share in points."""
    if change is None or change.value is None:
        return "–"
    ends = interval(change).removeprefix("95 % interval ") + (f"; {p_text(change.p_adjusted)}" if with_p else "")
    return f"{scale_for(change.metric).number(change.value, signed=True)} ({ends})"
