"""Choosing among trained candidates without any group: by the spread of accuracy between clusters, and by cost.

The spread is the standard deviation, between clusters, of how often the rows of a class are answered rightly, with the
noise of finite cells subtracted: what equalised odds would measure if the clusters were groups. A point of spread
counts as much as a point of accuracy. A candidate replaces plain training only if what it gains (spread and cost
together, against plain training) exceeds one standard error of that gain, and if it costs at most a stated price in
accuracy; one standard error is allowed for there, because a few hundred rows do not show it better.

Clusters of a class may be groups, or may cut one group into rows that are easy and rows that are hard. Two groups lie
farther apart than the sides of a cut, and not in the direction of another class: `share_of_groups` asks for both.

What was chosen, among which candidates and on what clusters, is said by `choice_verdict` and `choice_section`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from fairhead.mitigate.training_job import cell_numbers
from fairhead.report import Sentence
from fairhead.report.sections import Section
from fairhead.report.sections.plain import PlainTable, PlainTables
from fairhead.stats import p_text
from fairhead.train.fitting import Selection, worst_accuracy

Array = NDArray[np.float64]
Codes = NDArray[np.int64]

# Standard deviations between two groups. A cut through one normal distribution gives 2.65 at most (twice the mean of a
# half, by its standard deviation), and up to 3.2 where its rows are scaled to unit length.
APART = 3.3
_LARGE = 20  # rows of a (class, cluster) cell whose accuracy an epoch may be chosen by, or whose mean is looked at
_LEAST = 5  # rows of a (class, cluster) cell: with fewer its rate is not looked at
_REPLICATES = 200
# Of a candidate that costs too much: its weights to this power, its offsets times this. "balance 0.75" names one.
STRENGTHS = (0.75, 0.5, 0.25)
# What clusters must show to be balanced on: agreement between halves of the rows (adjusted Rand index; 0 is chance),
# and the share of the rows that lie, within their class, in one of two groups.
STABLE = 0.1
IN_GROUPS = 0.5
NAMES = {
    "plain": "plain training",
    "balance": "balance",
    "logits": "adjusted logits",
    "dro": "GroupDRO over clusters",
    "match": "match",
    "both": "balance and match",
}
NAMES |= {f"{name} {s:g}": f"{said}, {100 * s:.0f} % strength" for name, said in NAMES.items() for s in STRENGTHS}
_LITTLE = 0.5  # stability under which other rows would give other clusters


@dataclass(frozen=True)
class CandidateResult:
    """One candidate on the rows that it is chosen by."""

    name: str  # such as "balance"
    accuracy: float
    # Standard deviation of the rates between clusters, noise subtracted; 0 where noise explains it all, None where no
    # class has two clusters of enough rows
    spread: float | None
    cost: float  # accuracy of plain training less its own
    cost_se: float  # its standard error, paired on rows (or on the units that they are of)
    # Spread of plain training, less its own spread and its cost. Without a spread, match alone has one: its accuracy
    gain: float | None
    gain_se: float | None  # its standard error, as that of the cost
    affordable: bool  # whether the cost is within the price, one standard error allowed for

    @property
    def total(self) -> float:
        """What is to be small: the spread and the cost, a point for a point."""
        return (self.spread or 0.0) + self.cost

    @property
    def better(self) -> bool:
        """Whether it gains more than one standard error."""
        return self.gain is not None and self.gain_se is not None and self.gain > self.gain_se


def variance_between(right: Array, rows: Array) -> Array:
    """The variance of the rates between clusters, averaged over classes, [...].

    From the right answers and the rows of each cell, [..., classes, clusters]. Cells count by their rows; what binomial
    noise alone would give is subtracted, so that the result can be negative. It is NaN where no class has two clusters
    of enough rows.
    """
    rows = np.where(rows >= _LEAST, rows, 0.0)
    n = np.maximum(rows, _LEAST)
    share, rate = rows / np.maximum(rows.sum(-1, keepdims=True), 1), np.minimum(right / n, 1.0)
    variance = (share * (rate - (share * rate).sum(-1, keepdims=True)) ** 2).sum(-1)
    noise = (share * (1 - share) / (n - 1) * rate * (1 - rate)).sum(-1)
    defined = (rows > 0).sum(-1) >= 2
    with np.errstate(invalid="ignore"):
        found: Array = np.where(defined, variance - noise, 0.0).sum(-1) / defined.sum(-1)
    return found


def judge(
    answers: Mapping[str, Codes],  # of each candidate, [n] each; costs and gains are counted from the first
    labels: Codes,  # [n]
    clusters: Codes,  # [n]
    units: Codes | None,  # who or what a row is of, [n]; each row on its own where None
    price: float,  # the largest cost in accuracy, as a share (0.02 is two points)
    seed: int = 0,
) -> list[CandidateResult]:
    """Each candidate's spread, cost and gain, on the same rows; standard errors by a paired bootstrap of the units."""
    unit = np.arange(len(labels)) if units is None else np.unique(units, return_inverse=True)[1]
    count = int(unit.max()) + 1
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=_REPLICATES)
    times = np.vstack([np.ones((1, count)), drawn])  # how often a unit is drawn: at first the rows as they are
    shape = len(times), int(labels.max()) + 1, int(clusters.max()) + 1
    cell = labels * shape[2] + clusters

    def tables(values: Array) -> Array:
        each = csr_array((values, (cell, unit)), shape=(shape[1] * shape[2], count))
        return np.asarray((each @ times.T).T).reshape(shape)

    rows = tables(np.ones(len(labels)))
    results: list[CandidateResult] = []
    plain_spread = plain_accuracy = np.empty(0)
    for name, given in answers.items():
        right = tables((given == labels).astype(np.float64))
        accuracy = right.sum((1, 2)) / rows.sum((1, 2))
        spread = np.maximum(variance_between(right, rows), 0.0) ** 0.5
        if not results:
            plain_spread, plain_accuracy = spread, accuracy
        cost = plain_accuracy - accuracy
        cost_se = float(cost[1:].std(ddof=1))
        defined = bool(np.isfinite(spread[0]))
        gain = plain_spread - spread - cost if defined else -cost
        known = defined or name.partition(" ")[0] == "match"
        results.append(
            CandidateResult(
                name,
                accuracy=float(accuracy[0]),
                spread=float(spread[0]) if defined else None,
                cost=float(cost[0]),
                cost_se=cost_se,
                gain=float(gain[0]) if known else None,
                gain_se=float(np.nanstd(gain[1:], ddof=1)) if known else None,
                affordable=bool(cost[0] - cost_se <= price),
            )
        )
    return results


def choose(results: Sequence[CandidateResult], at_any_price: bool = False) -> CandidateResult:
    """The candidate with the smallest total among those that are affordable and better than the first; else that."""
    able = (one for one in results[1:] if one.better and (one.affordable or at_any_price))
    return min(able, key=lambda one: one.total, default=results[0])


def share_of_groups(points: Tensor, centres: Tensor, labels: Tensor) -> float | None:
    """The share of the rows that lie, within their class, in one of two groups; None where too few rows show it.

    Of each class and each two clusters, the rows whose nearest centres are these two are looked at. Their means on
    both sides must be `APART` standard deviations from each other (Mahalanobis, less what noise alone gives), not
    counting the directions in which classes differ within clusters: rows that differ in these are easy or hard ones.

    Args:
        points: what was clustered, [n, D].
        centres: of the clusters, [k, D].
        labels: [n].
    """
    points, labels = points.double(), labels.unique(return_inverse=True)[1]
    if len(centres) < 2:  # all rows have the same features
        return None
    nearest = torch.cdist(points, centres.double()).topk(2, dim=1, largest=False).indices  # [n, 2]
    pair = nearest.sort(1).values
    sides: list[tuple[Tensor, Tensor]] = []  # rows
    for a, b, label in torch.cat([pair, labels[:, None]], 1).unique(dim=0).tolist():
        rows = (pair == torch.tensor([a, b])).all(1) & (labels == label)
        one, other = ((rows & (nearest[:, 0] == side)).nonzero()[:, 0] for side in (a, b))
        if min(len(one), len(other)) >= _LARGE:
            sides.append((one, other))
    if not sides:
        return None
    within = torch.cat([points[rows] - points[rows].mean(0) for both in sides for rows in both])
    covariance = within.T @ within / len(within)
    covariance += 1e-3 * covariance.trace() / len(covariance) * torch.eye(len(covariance))
    points = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), points.T, upper=False).T
    known = _class_directions(points, labels, nearest[:, 0])
    points = points - points @ known @ known.T
    seen = apart = 0
    for one, other in sides:
        between = (points[one].mean(0) - points[other].mean(0)).square().sum()
        noise = (len(known) - known.shape[1]) * (1 / len(one) + 1 / len(other))
        seen += len(one) + len(other)
        apart += (len(one) + len(other)) * int(between - noise >= APART**2)
    return apart / seen


def _class_directions(points: Tensor, labels: Tensor, clusters: Tensor) -> Tensor:
    """The directions in which classes differ most within clusters, [D, C - 1], or a quarter of all D.

    The effects of classes are found by least squares, with a term for each class and one for each cluster.
    """
    terms = torch.cat([torch.nn.functional.one_hot(part) for part in (labels, clusters)], 1).to(points)  # [n, C + k]
    effects = torch.linalg.pinv(terms.T @ terms) @ (terms.T @ points)
    shown = effects[labels] - effects[labels].mean(0)
    most = min(int(labels.max()), max(1, points.shape[1] // 4))
    return torch.linalg.eigh(shown.T @ shown).eigenvectors[:, -most:] if most else points.new_zeros(points.shape[1], 0)


def least_spread(plain: Tensor, labels: Tensor, clusters: Tensor, units: Tensor | None, price: float) -> Selection:
    """Select by the smallest spread and cost, among epochs that cost at most `price` points of accuracy.

    The cost is counted from the answers of `plain` training, [m].
    Epochs that cost more come after all others, the costliest last.
    """
    rows = labels.numpy(), clusters.numpy(), None if units is None else units.numpy()

    def score(predicted: Tensor) -> float:
        _, epoch = judge({"plain": plain.numpy(), "epoch": predicted.numpy()}, *rows, price / 100)
        return 1 - epoch.total if epoch.affordable else -epoch.cost

    return score


def worst_large_cell(labels: Tensor, clusters: Tensor, least: int = _LARGE) -> Selection:
    """Select by the lowest accuracy of a (class, cluster) cell of `least` rows or more (of any, if none has)."""
    labels, cells = labels.cpu(), cell_numbers(labels, clusters)
    large = torch.bincount(cells)[cells] >= least
    rows = large if large.any() else torch.ones_like(large)
    return lambda predicted: worst_accuracy(predicted[rows], labels[rows], cells[rows])


def choice_verdict(notes: Mapping[str, Any], uses_groups: bool = False) -> list[Sentence]:
    """What was kept, at what cost, in a sentence or two; nothing for a method that chooses nothing."""
    if "kept" not in notes:
        return []
    texts, tried = [], {one["name"]: one for one in notes.get("tried", ())}
    kept, blind = notes["kept"], "" if uses_groups else " No groups were used."
    if tried:
        first, one = next(iter(tried.values())), tried[kept]
        why = (
            "no other candidate within the price had a combined gain in spread between clusters and accuracy above one "
            "standard error"
        )
        if one is not first:
            spreads = (
                "its accuracy, given the class, has a standard deviation between clusters of "
                f"{_points(one['spread'])} points ({NAMES[first['name']]}: {_points(first['spread'])}), and "
                if one["spread"] is not None
                else ""
            )
            less = f"{_points(abs(one['cost']))} points {'lower' if one['cost'] > 0 else 'higher'}"
            gain = f"{_points(one['gain'])} points, with a standard error of {_points(one['gain_se'])}"
            why = f"{spreads}its overall accuracy is {less}: a gain of {gain}"
        texts.append(f"Selected: {NAMES[kept]}. On rows that no candidate was trained on, {why}.{blind}")
    elif kept == "plain" and len(notes.get("asked", ())) > 1:
        texts.append(f"Selected: {NAMES[kept]}, as no other candidate was left.{blind}")
    texts += _cluster_texts(notes)
    match = notes.get("match")
    if match is not None and {"match", "both"} & set(notes.get("asked", ())):
        differ = "differ significantly" if match["differ"] else "do not differ significantly"
        rest = "" if match["differ"] else ", so nothing was matched"
        texts.append(
            f"The training rows and those of the {match.get('towards', 'deployment sample')} {differ} within classes "
            f"(area under the ROC curve {match['separation']:.2f}, {p_text(match['p'])}){rest}."
        )
    for one in notes.get("matching over the price", ()):
        texts.append(
            f"{NAMES[one['name']].capitalize()} was left out: with weights towards one half of the sample, a linear "
            f"head on the same features loses {_points(one['cost'])} points of accuracy on the other half."
        )
    if "label taken out" in notes:
        done = "removed from" if notes["label taken out"] else "left in"
        texts.append(f"What separates the classes was {done} the features before clustering.")
    if "not matched" in notes:
        texts.append(f"Nothing was matched: {notes['not matched']}.")
    return [Sentence(text, "note") for text in texts]


def _cluster_texts(notes: Mapping[str, Any]) -> list[str]:
    """Why nothing was balanced on the clusters, or what speaks against them."""
    clusters = notes["clusters"]
    stability = clusters["stability"].get(str(clusters.get("count")))
    agreement = f"those of two halves of the rows agree with an adjusted Rand index of {stability or 0:.2f}"
    if notes.get("not balanced"):
        left_out = " and ".join(NAMES[name] for name in notes["not balanced"])
        if len(clusters["rows"]) < 2:
            why = "All rows have the same features when these are scaled to unit length"
        elif stability is not None and stability < STABLE:
            why = f"The clusters are hardly more stable than chance ({agreement}; {STABLE:g} is required)"
        elif _told_by_clusters(clusters) >= 0.9:
            why = "The clusters are nearly the classes (try another encoder: --option encoder=...)"
        elif clusters["in_groups"] is None:
            why = (
                f"Whether the clusters are groups within the classes cannot be told (no class has {_LARGE} rows on "
                "both sides of two clusters)"
            )
        else:
            why = (
                f"Within the classes, the clusters are not separate groups ({100 * clusters['in_groups']:.0f} % of the "
                f"rows lie in separate groups; {100 * IN_GROUPS:.0f} % are required), and may only separate easy rows "
                "from hard ones"
            )
        return [f"{why}, so they were not used for balancing: {left_out} left out."]
    if _told_by_clusters(clusters) >= 0.9 and (clusters.get("in_groups") or 0) < IN_GROUPS:
        return [
            "The clusters are nearly the classes, so balancing had little to compare within them: use another "
            "encoder, such as a pretrained one (--option encoder=...)."
        ]
    said = []
    if alone := [str(n) for n, one in enumerate(clusters.get("of_one_class", ()), start=1) if one]:
        which = f"Clusters {' and '.join(alone)} have" if len(alone) > 1 else f"Cluster {alone[0]} has"
        said.append(f"{which} one class alone: weights cannot make it independent of the label.")
    if stability is not None and stability < _LITTLE:
        said.append(f"The clusters are not very stable ({agreement}): other rows would give other clusters.")
    return said


def choice_section(notes: Mapping[str, Any], classes: Sequence[str]) -> list[Section]:
    """Candidates, clusters and the stability of their number, as tables."""
    if "kept" not in notes:
        return []
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = []  # caption, columns, rows
    if notes.get("tried"):
        rows = [
            (
                NAMES[one["name"]],
                f"{100 * one['accuracy']:.1f}",
                _points(one["spread"]),
                f"{_points(one['cost'])} ± {_points(one['cost_se'])}",
                _points(one["gain"]) + ("" if one["gain"] is None else f" ± {_points(one['gain_se'])}"),
                "selected" if one["name"] == notes["kept"] else "" if one["affordable"] else "over the price",
            )
            for one in notes["tried"]
        ]
        caption = (
            "Candidates, on rows that none was trained on, in points. Spread: standard deviation of accuracy between "
            f"clusters, given the class. Cost: loss of accuracy, of which the price allows {notes['price']:g} and a "
            "standard error. Gain: plain training's spread, less the candidate's own and its cost"
        )
        columns = ("candidate", "accuracy, %", "spread between clusters", "cost ± standard error", "gain", "")
        tables.append((caption, columns, rows))
    clusters = notes["clusters"]
    rates = [[f"{100 * rate:.1f}" for rate in rates] for rates in clusters["label_rates"]]
    sizes = enumerate(zip(clusters["rows"], rates, strict=True), start=1)
    caption = "Clusters of the training rows, found without labels or groups, and the share of each class, %"
    tables.append((caption, ("cluster", "rows", *classes), [(str(n), str(size), *row) for n, (size, row) in sizes]))
    stability = clusters["stability"]
    if stability:
        caption = "Stability of each number of clusters: adjusted Rand index between halves of the rows"
        agreement = ("agreement", *(f"{value:.2f}" for value in stability.values()))
        tables.append((caption, ("clusters", *stability), [agreement]))
    if "match" in notes and notes["match"]["differ"]:
        share = f"{100 * notes['match']['effective']:.0f} % of the training rows"
        title = f"Weights towards the {notes['match'].get('towards', 'deployment sample')}"
        tables.append((title, ("", "match"), [("effective sample size", share)]))
    made = [PlainTable(caption=caption, columns=columns, rows=rows) for caption, columns, rows in tables]
    return [PlainTables(title="Candidates and selection", tables=made)]


def _told_by_clusters(clusters: Mapping[str, Any]) -> float:
    """By what share a row's cluster lowers the errors of guessing its class (Goodman and Kruskal's lambda)."""
    counts = np.array(clusters["rows"])[:, None] * np.array(clusters["label_rates"])  # [clusters, classes]
    wrong, left = (sum(clusters["rows"]) - right for right in (counts.sum(0).max(), counts.max(1).sum()))
    return float(1 - left / wrong) if wrong > 0 else 0.0


def _points(share: float | None) -> str:
    return "undefined" if share is None else f"{100 * share:.1f}"
