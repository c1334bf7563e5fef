"""Balance, match and their choice: methods of this library's own that need no group and no name of one.

`fairhead.train.kmeans` finds the clusters, `row_weights` has the weights that make them independent of the label and
those towards a deployment sample, `choosing` the rule.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fairhead.errors import InputError
from fairhead.mitigate import method
from fairhead.mitigate.choosing import (
    IN_GROUPS,
    STABLE,
    STRENGTHS,
    CandidateResult,
    choose,
    judge,
    least_spread,
    share_of_groups,
    worst_large_cell,
)
from fairhead.mitigate.row_weights import Matched, label_offsets, match_weights
from fairhead.mitigate.training_job import ADDED_LATER, Job, cell_numbers
from fairhead.mitigate.two_stages import features_of, find_head
from fairhead.models.attached import FEATURES, LinearHead, check_features
from fairhead.settings import LogUniform, NotNegative, Positive, Prior, Range
from fairhead.train.fitting import AVERAGE, Fit, Selection, answers, ready_features, solve
from fairhead.train.kmeans import Clusters, find_clusters, independent_weights, unit, unit_numbers
from fairhead.train.loop import agreed
from fairhead.train.step import Examples, class_names

Candidate = Literal["plain", "balance", "logits", "dro", "match", "both"]
# Methods that train once, on rows as they are drawn.
UNDER = ("erm", "dam", "dam_norm", "dam_no_alignment", "dam_no_attention", "dam_release", "encoder_layer")
_ON_CLUSTERS = ("balance", "logits", "dro", "both")
_MATCHED = ("match", "both")
_FOLDS = 4
_PENALTY = 0.1  # of linear heads that stand in for a network


class Encoded(NamedTuple):
    """Frozen features of the training rows, the validation rows and the deployment sample: [n, D] each."""

    train: Tensor
    validation: Tensor
    deployment: Tensor


@dataclass(frozen=True)
class Reduce:
    """Train the candidates and keep the one with the most even accuracy across clusters of features.

    A candidate replaces plain training only if its gain in spread and cost exceeds one standard error (`choosing`).
    If the best candidate costs more than the price, it is trained again at 75, 50 and 25 % of its strength (its weights
    to that power, its offsets times it) until one is within the price. Clusters that are unstable, or that are not
    groups within the classes, are not used for balancing.

    Attributes:
        candidates: "plain" training; "balance": rows weighted by P(y)P(c)/P(y, c); "logits": CE(f + log p(y|c)/p(y)), f
            alone at test; "dro": GroupDRO over (y, c); "match": rows weighted towards the deployment sample, within
            each class; "both": balance under the weights of match. A single one is trained without a choice.
        price: accuracy that the selected candidate may cost against the first candidate, in points.
        clusters: number of clusters; None for the one that is most stable over halves of the rows.
        encoder: model whose features are clustered and matched: the name of a pretrained model, or a function that
            returns [n, D] for examples. None uses the features of a linear head; for a pretrained network, its features
            before training; for a new network, the input of the last layer after plain training.
        epoch: how balanced and matched networks select an epoch: by "price", the rule that selects candidates (by the
            cell, if there is no plain training to count the price from); by the worst (class, cluster) "cell" of the
            validation rows; by "accuracy"; or the "average" of the last third of the epochs.
        cap: largest weight of a row, as a multiple of the mean weight.
        without_label: before clustering, remove from the features what separates the classes in the deployment sample.
            Use it only if label and groups are independent in that sample. It applies only if the sample differs
            significantly from the training rows.
        under: method that uses the weights, such as "dam".
    """

    candidates: tuple[Candidate, ...] = ("plain", "balance", "match", "both")
    price: NotNegative = 2.0
    clusters: Annotated[int, Range(2)] | None = None
    encoder: str | Callable[[Examples], Tensor] | None = None
    epoch: Literal["price", "cell", "accuracy", "average"] = "price"
    cap: Positive = 20.0
    without_label: bool = field(default=False, metadata=ADDED_LATER)
    under: str = "erm"

    priors: ClassVar[Mapping[str, Prior]] = {"cap": LogUniform(0.5, 1.5)}

    def __post_init__(self) -> None:
        if not self.candidates:
            raise InputError("no candidate is named; known: plain, balance, logits, dro, match, both")
        if self.under not in UNDER:
            raise InputError(f"under is {self.under!r}; weights can be used under {', '.join(UNDER)}")
        own = {"dro", "logits"} & set(self.candidates)
        if own and self.under != "erm":
            raise InputError(f"{min(own)} has its own loss and cannot run under {self.under}: leave one of them out")

    def train(self, job: Job) -> nn.Module:
        """One training per candidate; features and clusters come first."""
        done: dict[str, tuple[nn.Module, Fit]] = {}
        ready = FEATURES in job.train.inputs
        encoder = job.pretrained if self.encoder is None and not ready else self.encoder
        if "plain" in self.candidates or (encoder is None and not ready):
            done["plain"] = self._fit(job, "plain")
        plain = done["plain"][0] if "plain" in done else None
        encoded = _encoded(job, encoder, plain)
        notes: dict[str, Any] = {}
        known = job.build_model() if plain is None and ready else plain
        matched = None
        if len(self.candidates) > 1 or self.candidates[0] in _MATCHED or self.without_label:
            matched = agreed(self._matched(job, encoded, notes, class_names(known)))
        if self.without_label:
            notes["label taken out"] = matched is not None and matched.differ
            if notes["label taken out"]:
                encoded = _without_label(encoded, _deployment_sample(job)[0].labels.cpu())
        with job.timed("clusters"):
            clusters = agreed(find_clusters(encoded.train, self.clusters, job.plan.seed, job.units[0]))
            notes["clusters"] = agreed(_cluster_notes(clusters, encoded.train, job.train.labels))
        names: list[str] = list(self.candidates)

        def leave_out(some: Sequence[str]) -> None:
            names[:] = [name for name in names if name not in some] or ["plain"]

        if matched is not None:
            notes["match"] = {key: getattr(matched, key) for key in ("effective", "separation", "p", "differ")}
            notes["match"]["towards"] = "validation part" if job.like is None else "deployment sample"
        if matched is None or not matched.differ:
            leave_out(_MATCHED)
        found = [clusters.clustering.cluster, clusters.of(encoded.validation), clusters.of(encoded.deployment)]
        if len(self.candidates) > 1 and not _are_groups(notes["clusters"]):
            notes["not balanced"] = [name for name in self.candidates if name in _ON_CLUSTERS]
            leave_out(_ON_CLUSTERS)
            found = [torch.zeros_like(rows) for rows in found]
        weights = _Weights(job.train.labels.cpu(), found[0], matched, self.cap)
        other_half: _OtherHalf | None = None
        if matching := [name for name in names if name in _MATCHED]:
            try:
                with job.timed("match"):
                    other_half = _OtherHalf(job, encoded, weights)
                    other_half.predict(matching)
            except InputError as error:  # too few rows of a class in a half
                other_half, notes["not matched"] = None, str(error)
                leave_out(matching)
        if other_half is not None:
            results = agreed(other_half.judged(found[2], self.price))
            if over := [one for one in results if not one.affordable]:
                notes["matching over the price"] = [asdict(one) for one in over]
                leave_out([one.name for one in over])
        selection = self._selection(job, found[1], plain)

        def judged() -> list[CandidateResult]:
            return self._judge(job, {name: done[name][0] for name in names}, found[2], weights, other_half)

        for name in names:
            if name not in done:
                done[name] = self._fit(job, name, weights, selection)
        kept = names[0]
        if len(names) > 1:
            results = judged()
            best = choose(results, at_any_price=True)
            for strength in () if best.affordable or best.name == "dro" else STRENGTHS:
                names.append(f"{best.name} {strength:g}")
                done[names[-1]] = self._fit(job, names[-1], weights, selection)
                results = judged()
                if results[-1].affordable:
                    break
            kept = choose(results).name
            notes |= {"tried": [asdict(one) for one in results], "price": self.price}
        job.notes |= {**notes, "kept": kept, "asked": list(self.candidates)}
        model, job.last_fit = done[kept]
        return model

    def _fit(
        self, job: Job, name: str, weights: "_Weights | None" = None, selection: Selection | None = None
    ) -> tuple[nn.Module, Fit]:
        inner = replace(job, stage_name=f"training: {name}", last_fit=None)
        if weights is not None and name != "plain":
            inner.selection = job.selection if selection is None else selection
            inner.weights, inner.offsets = weights.of(name)
        if name == "dro":
            assert weights is not None
            model = inner.group_dro("training", cell_numbers(weights.labels, weights.clusters))
        else:
            model = method(self.under).train(inner)
        assert inner.last_fit is not None
        return model, inner.last_fit

    def _matched(self, job: Job, encoded: Encoded, notes: dict[str, Any], classes: Mapping[int, str]) -> Matched | None:
        """Weights towards the deployment sample: also where nobody asked, as the test says which rows to choose by.

        None where the sample is too small and there are other candidates; the notes say so.
        """
        sample, units = _deployment_sample(job)
        parts = encoded.train, job.train.labels.cpu(), encoded.deployment, sample.labels.cpu(), job.units[0], units
        try:
            with job.timed("match"):
                return match_weights(*parts, self.cap, job.plan.seed, classes)
        except InputError as error:
            if set(self.candidates) <= set(_MATCHED):
                raise
            notes["not matched"] = str(error)
            return None

    def _selection(self, job: Job, clusters: Tensor, plain: nn.Module | None) -> Selection:
        if self.epoch == "average":
            return AVERAGE
        if self.epoch == "price" and plain is not None:
            answered = job.predict(plain, job.validation).argmax(-1)
            return least_spread(answered, job.validation.labels.cpu(), clusters, job.units[1], self.price)
        return job.selection if self.epoch == "accuracy" else worst_large_cell(job.validation.labels, clusters)

    def _judge(
        self,
        job: Job,
        models: Mapping[str, nn.Module],
        clusters: Tensor,  # of the deployment sample, [m]
        weights: "_Weights",
        other_half: "_OtherHalf | None",
    ) -> list[CandidateResult]:
        """Each candidate on rows that it was not trained on, nor, of a linear head, matched to.

        Those are the deployment sample, or the validation rows where there is none. Where these are not shown to differ
        from the training rows, a linear head is judged on all training rows as well, cross-fitted.
        """
        rows, own_units = _deployment_sample(job)
        labels, groups, units = [rows.labels.cpu()], [clusters], [unit_numbers(own_units, len(clusters))]
        linear = all(isinstance(model, LinearHead) for model in models.values())
        answered = {name: [job.predict(model, rows).argmax(-1)] for name, model in models.items()}
        over = set()
        if other_half is not None:
            matched = [name for name in models if name.partition(" ")[0] in _MATCHED]
            with job.timed("match"):
                other_half.predict(matched)
            over = {one.name for one in other_half.judged(clusters, self.price) if not one.affordable}
            if linear:
                answered |= {name: [other_half.answers[name]] for name in matched}
        alike = weights.matched is not None and not weights.matched.differ
        if alike and linear and "dro" not in models:
            with job.timed("cross-fitting"):
                for name in models:
                    answered[name].append(_cross_fitted(job, name, weights))
            labels.append(weights.labels)
            groups.append(weights.clusters)
            units.append(unit_numbers(job.units[0], len(weights.labels)) + units[0].max() + 1)
        given = {name: torch.cat(parts).numpy() for name, parts in answered.items()}
        truth, cluster, who = (torch.cat(parts).numpy() for parts in (labels, groups, units))
        results = judge(given, truth, cluster, who, self.price / 100, job.plan.seed)
        return agreed([replace(one, affordable=one.affordable and one.name not in over) for one in results])


class _OtherHalf:
    """What weights towards one half of the deployment sample do on its other half, by linear heads.

    On the rows that weights were made for, a head looks better than it is: rows like these were weighted up.
    """

    def __init__(self, job: Job, encoded: Encoded, weights: "_Weights") -> None:
        rows, units = _deployment_sample(job)
        self.labels, self.encoded, self.seed = rows.labels.cpu(), encoded, job.plan.seed
        self.penalty = job.plan.weight_decay if FEATURES in job.train.inputs else _PENALTY
        self.units = unit_numbers(units, len(self.labels))
        half = torch.randperm(int(self.units.max()) + 1, generator=job.generator())[self.units] % 2 == 0
        self.halves = []
        for part in (half, ~half):
            own = encoded.deployment[part], self.labels[part], job.units[0], self.units[part]
            matched = match_weights(encoded.train, weights.labels, *own, weights.cap, self.seed)
            self.halves.append((~part, _Weights(weights.labels, weights.clusters, matched, weights.cap)))
        self.answers: dict[str, Tensor] = {}  # of each candidate, [m]
        self.predict(["plain"])

    def predict(self, names: Sequence[str]) -> None:
        """Add the answers of the candidates that are not there yet."""
        for name in names:
            if name in self.answers:
                continue
            self.answers[name] = torch.zeros_like(self.labels)
            for other, weights in self.halves:
                classes = [str(label) for label in range(int(weights.labels.max()) + 1)]
                head = LinearHead.of(self.encoded.train, classes)
                solve(head, self.encoded.train, weights.labels, *weights.of(name), self.penalty)
                self.answers[name][other] = answers(head, self.encoded.deployment[other])

    def judged(self, clusters: Tensor, price: float) -> list[CandidateResult]:
        """The matched candidates, against a plain head."""
        by_name = {name: answered.numpy() for name, answered in self.answers.items()}
        truth, units = self.labels.numpy(), self.units.numpy()
        return judge(by_name, truth, clusters.numpy(), units, price / 100, self.seed)[1:]


def _encoded(job: Job, encoder: str | Callable[[Examples], Tensor] | None, plain: nn.Module | None) -> Encoded:
    """The features that are clustered and matched."""
    parts = [job.train, job.validation, job.like or job.validation]
    if callable(encoder):
        get = encoder
    elif encoder is not None:
        other = job.auxiliary_model(encoder)
        parts, get = [other.train, other.validation, other.like or other.validation], other.features
    elif FEATURES in job.train.inputs:
        get = ready_features
    else:
        assert plain is not None
        head = find_head(plain, job.train)

        def get(examples: Examples) -> Tensor:
            return features_of(plain, head, examples, job.plan.precision)

    with job.timed("features"):
        kept = {id(part): get(part).float().cpu() for part in {id(part): part for part in parts}.values()}
        encoded = agreed(Encoded(*(kept[id(part)] for part in parts)))
    for name, features in encoded._asdict().items():
        check_features(features, {"train": "training", "deployment": "deployment sample's"}.get(name, name))
    return encoded


def _deployment_sample(job: Job) -> tuple[Examples, Tensor | None]:
    """The sample that rows are matched to and candidates are judged on, and who or what its rows are of."""
    return (job.validation, job.units[1]) if job.like is None else (job.like, job.like_units)


class _Weights:
    """Weights and offsets of each candidate, for all training rows or for some of them."""

    def __init__(self, labels: Tensor, clusters: Tensor, matched: Matched | None, cap: float) -> None:
        self.labels, self.clusters, self.matched, self.cap = labels, clusters.cpu(), matched, cap

    def of(self, name: str, rows: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Weights [n] and offsets [n, C] of the rows, where the candidate has them."""
        rows = torch.arange(len(self.labels)) if rows is None else rows
        labels, clusters = self.labels[rows], self.clusters[rows]
        matched = None if self.matched is None else self.matched.weights[rows]
        name, _, strength = name.partition(" ")
        power = float(strength or 1)
        if name == "logits":
            return None, power * label_offsets(labels, clusters)
        if name == "match" and matched is not None:
            found = matched**power
        elif name in ("balance", "both"):
            found = independent_weights(labels, clusters, matched if name == "both" else None, self.cap) ** power
        else:
            return None, None
        return found / found.mean() if strength else found, None


def _cross_fitted(job: Job, name: str, weights: _Weights) -> Tensor:
    """The answers for all training rows, each by a fresh head that was fitted to the other folds, [n]."""
    features, labels = job.train.inputs[FEATURES], weights.labels
    units = unit_numbers(job.units[0], len(labels))
    fold = torch.randint(0, _FOLDS, (int(units.max()) + 1,), generator=job.generator())[units]
    answered = torch.zeros_like(labels)
    for held in range(_FOLDS):
        head, rows = job.build_model(), (fold != held).nonzero()[:, 0]
        assert isinstance(head, LinearHead)
        solve(head, features[rows], labels[rows], *weights.of(name, rows), job.plan.weight_decay)
        answered[fold == held] = answers(head, features[fold == held])
    return answered


def _without_label(encoded: Encoded, labels: Tensor) -> Encoded:
    """Features [n, D] at right angles to the differences between the classes' means in the deployment sample."""
    sample = unit(encoded.deployment)
    means = torch.stack([sample[labels == label].mean(0) for label in labels.unique()])
    span = torch.linalg.qr((means[1:] - means[0]).T).Q  # [D, classes - 1]
    return Encoded(*(unit(part) - unit(part) @ span @ span.T for part in encoded))


def _cluster_notes(clusters: Clusters, features: Tensor, labels: Tensor) -> dict[str, Any]:
    labels, classes = labels.cpu(), int(labels.max()) + 1
    cells = clusters.clustering.cluster * classes + labels
    rows = torch.bincount(cells, minlength=clusters.size * classes).view(-1, classes)
    points = (unit(features) - clusters.mean) @ clusters.axes
    return {
        "count": clusters.size,
        "rows": rows.sum(1).tolist(),
        "label_rates": (rows / rows.sum(1, keepdim=True).clamp(1)).double().round(decimals=4).tolist(),
        "of_one_class": ((rows > 0).sum(1) == 1).tolist(),
        "stability": {str(one.clusters): round(one.mean, 4) for one in clusters.stability},
        "in_groups": share_of_groups(points, clusters.clustering.centres, labels),
    }


def _are_groups(notes: Mapping[str, Any]) -> bool:
    """Whether the clusters that these notes are of can be balanced on."""
    stability: float = notes["stability"].get(str(notes["count"]), 1.0)
    return stability >= STABLE and (notes["in_groups"] or 0.0) >= IN_GROUPS
