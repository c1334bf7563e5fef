"""References with the groups in their weights, draws or losses; and DFR, which fits its last layer on even groups."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize

from fairhead.errors import InputError
from fairhead.heads import Reading, Tap
from fairhead.mitigate.encoder_layer import require_encoder
from fairhead.mitigate.hard_rows import PairOutput, second_head
from fairhead.mitigate.references import JobWithAttributes, Reference
from fairhead.mitigate.row_weights import label_offsets
from fairhead.mitigate.training_job import ERM, cell_numbers, row_losses
from fairhead.mitigate.two_stages import features_of, find_head, set_head
from fairhead.settings import Count, ListOf, LogUniform, NotNegative, Positive, Prior
from fairhead.train.kmeans import independent_weights
from fairhead.train.loop import gathered

Array = NDArray[np.float64]
Codes = NDArray[np.int64]


@dataclass(frozen=True)
class GroupDRO(Reference):
    """GroupDRO with the true groups (Sagawa et al., 2020): the worst (class, group) cell drives training.

    Attributes:
        step_size: how fast the weights of the cells follow their losses (η_q).
        adjustment: C of the generalisation adjustment C / √n.
        balance: sample every cell equally often.
    """

    step_size: NotNegative = 0.01
    adjustment: NotNegative = 0.0
    balance: bool = True

    priors: ClassVar[Mapping[str, Prior]] = {"step_size": LogUniform(-3, -1)}

    def train(self, job: JobWithAttributes) -> nn.Module:
        """One stage."""
        cells = cell_numbers(job.train.labels, job.groups_train)
        return job.group_dro("training", cells, self.step_size, self.adjustment, self.balance)


@dataclass(frozen=True)
class GroupBalanced(Reference):
    """Weight rows by P(y) P(a) / P(y, a), which makes label and group independent.

    Attributes:
        cap: largest weight, as a multiple of the mean; otherwise a cell with one or two rows would dominate.
    """

    cap: Positive = 20.0

    def train(self, job: JobWithAttributes) -> nn.Module:
        """One stage."""
        job.weights = independent_weights(job.train.labels.cpu(), job.groups_train, cap=self.cap)
        return ERM().train(job)


@dataclass(frozen=True)
class BiasBalance(Reference):
    """CE(f + log p(y | a)) while training, f alone at test (Hong & Yang, 2021).

    The term supplies what the group tells about the label, so f need not learn it; all rows are sampled equally often.

    Attributes:
        even: as published, f also predicts as if the classes were balanced; otherwise class shares are kept.
    """

    even: bool = True

    def train(self, job: JobWithAttributes) -> nn.Module:
        """One stage."""
        job.offsets = label_offsets(job.train.labels.cpu(), job.groups_train, even=self.even)
        return ERM().train(job)


@dataclass(frozen=True)
class FSCL(Reference):
    """Fair supervised contrastive loss (Park et al., 2022): the group does not help to tell rows apart.

    The published method trains the encoder with the contrastive loss first and a linear head afterwards; here both
    losses are minimised together, in one stage of the common loop, which keeps budgets equal.

    Attributes:
        weight: weight of the contrastive loss.
        temperature: temperature of the contrastive loss (τ).
        even_groups: give the positives of every group equal weight, whatever their number (FSCL+).
        width: width of the projection that the contrastive loss compares.
    """

    weight: NotNegative = 1.0
    temperature: Positive = 0.1
    even_groups: bool = True
    width: Count = 128

    priors: ClassVar[Mapping[str, Prior]] = {"weight": LogUniform(-1, 1), "temperature": LogUniform(-1.2, -0.5)}

    def train(self, job: JobWithAttributes) -> nn.Module:
        """One stage with both losses."""

        def projection(head: nn.Linear) -> nn.Module:
            width = head.in_features
            return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, self.width))

        with second_head(job, projection) as both:
            job.fit("training", both, loss=_ContrastiveLoss(self, job.groups_train))
        return both.first


class _ContrastiveLoss:
    def __init__(self, config: FSCL, groups: Tensor) -> None:
        self.config, self.groups = config, groups

    def __call__(self, output: PairOutput, labels: Tensor, rows: Tensor) -> Tensor:
        assert output.second is not None
        z, classes, groups = (gathered(part) for part in (normalize(output.second, dim=-1), labels, self.groups[rows]))
        contrast = fair_contrastive(z, classes, groups, self.config.temperature, self.config.even_groups)
        return row_losses(output.logits, labels).mean() + self.config.weight * contrast


def fair_contrastive(z: Tensor, labels: Tensor, groups: Tensor, temperature: float, even_groups: bool) -> Tensor:
    """SupCon of unit vectors [B, width]; negatives are of another class and of the anchor's own group.

    `even_groups` averages within each (class, group) cell of positives first, and over anchors' cells last.
    """
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    same_class, same_group = labels[:, None] == labels, groups[:, None] == groups
    positive, negative = same_class & ~itself, ~same_class & same_group
    logits = z @ z.T / temperature
    # Below the line stand the negatives alone; an anchor without any is left out, as is one without a positive.
    has_both = positive.any(1) & negative.any(1)
    hidden = ~negative & has_both[:, None]
    against = logits.masked_fill(hidden, -torch.inf).logsumexp(1, keepdim=True)
    log_share = logits - against
    weight, anchors = positive.float(), has_both.float()
    if even_groups:
        weight = weight / (weight @ same_group.float()).clamp(min=1)  # one over how many positives share the group
        anchors = anchors / ((same_class & same_group).float() @ anchors).clamp(min=1)
    per_row = -(log_share.masked_fill(~positive, 0.0) * weight).sum(1) / weight.sum(1).clamp(min=1e-12)
    return (anchors * per_row).sum() / anchors.sum().clamp(min=1e-12)


@dataclass(frozen=True)
class TADeT(Reference):
    """Targeted alignment of the first token's queries (Sudhakar et al., 2023), with an adversary.

    The loss is cross-entropy, an adversary's that reads the group off the last features, and a term of the queries:
    ‖mean q(s) − mean q‖² of the first token's queries in one layer, over the groups s of each class (for two groups of
    equal size a quarter of the published ‖mean q(s=0) − mean q(s=1)‖²).

    Attributes:
        layer: layer whose queries are aligned.
        adversary: weight of the adversary's cross-entropy.
        alignment: weight of the query term.
    """

    layer: int = -1
    adversary: NotNegative = 1.0
    alignment: NotNegative = 1.0

    priors: ClassVar[Mapping[str, Prior]] = {"adversary": LogUniform(-1, 1), "alignment": LogUniform(-1, 1)}

    def train(self, job: JobWithAttributes) -> nn.Module:
        """One stage."""
        groups, width = job.groups_train, int(job.groups_train.max()) + 1
        # Each step runs once for each piece of its batch.
        steps = job.plan.epochs * (len(job.train) // job.plan.batch_size) * job.plan.accumulate
        with second_head(job, lambda head: _Adversary(head.in_features, width, self.adversary, steps)) as both:
            assert isinstance(both.second, _Adversary)
            require_encoder(both.first)
            with Tap(both.first, layers=self.layer) as tap:
                both.second.queries = tap.read("q", tokens=0)
                job.fit("training", both, loss=_AlignedLoss(self, groups))
        return both.first


class _Adversary(nn.Module):
    """Guesses the group from the input of the head, and passes the first token's queries on."""

    queries: Reading

    def __init__(self, width: int, n_groups: int, weight: float, steps: int) -> None:
        super().__init__()
        self.weight, self.steps = weight, steps
        self.step: Tensor
        self.register_buffer("step", torch.zeros(()))  # a tensor: a recorded and replayed step must count as well
        self.guess = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, n_groups))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        queries = self.queries[self.queries.layers[0]]
        self.queries.clear()
        # The adversary's say grows from 0 to 1 over the run, as in the reference.
        strength = 2 / (1 + (-10 * self.step / max(1, self.steps)).exp()) - 1
        self.step += 1
        return self.guess(reversed_gradient(features, self.weight * strength)), queries


class _AlignedLoss:
    def __init__(self, config: TADeT, groups: Tensor) -> None:
        self.config, self.groups = config, groups

    def __call__(self, output: PairOutput, labels: Tensor, rows: Tensor) -> Tensor:
        assert output.second is not None
        guesses, queries = output.second
        groups, queries = self.groups[rows], queries.flatten(1).float()
        return (
            row_losses(output.logits, labels).mean()
            + row_losses(guesses, groups).mean()
            + self.config.alignment * query_gap(*(gathered(part) for part in (queries, labels, groups)))
        )


def reversed_gradient(x: Tensor, strength: Tensor | float) -> Tensor:
    """Return x, but gradients come back times −strength: what follows learns, what came before unlearns."""
    return x.detach() + strength * (x.detach() - x)


def query_gap(queries: Tensor, labels: Tensor, groups: Tensor) -> Tensor:
    """Mean over the (class, group) cells of a batch of ‖cell mean − class mean‖²; queries [B, D]."""
    same_class = (labels[:, None] == labels).float()
    same_cell = same_class * (groups[:, None] == groups).float()
    cell_mean = same_cell @ queries / same_cell.sum(1, keepdim=True)
    class_mean = same_class @ queries / same_class.sum(1, keepdim=True)
    gap = (cell_mean - class_mean).square().sum(1)
    return (gap / same_cell.sum(1)).sum() / (1 / same_cell.sum(1)).sum()


@dataclass(frozen=True)
class DFR(Reference):
    """Deep feature reweighting (Kirichenko et al., 2023): a last layer fitted on even (class, group) cells.

    Plain training, then an L1 logistic regression on the features of the validation rows. Only their groups are used.

    Attributes:
        strengths: values of scikit-learn's C to try; half of the validation rows select one by worst-cell accuracy.
        subsets: number of random balanced subsets that the last layer is averaged over.
    """

    strengths: tuple[Positive, ...] = (1.0, 0.7, 0.3, 0.1, 0.07, 0.03, 0.01)
    subsets: Count = 20

    priors: ClassVar[Mapping[str, Prior]] = {"strengths": ListOf(LogUniform(-2, 0.5))}

    def train(self, job: JobWithAttributes) -> nn.Module:
        """Plain training, then the last layer."""
        model = job.train_fresh("training")
        with job.timed("last layer"):
            head = find_head(model, job.validation)
            features = features_of(model, head, job.validation, job.plan.precision).double().numpy()
            labels = job.validation.labels.cpu()
            cells = cell_numbers(labels, job.groups_validation).numpy()
            weight, bias = self.last_layer(features, labels.numpy(), cells, seed=job.plan.seed)
            if len(weight) == 1:  # one direction tells two classes apart
                weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
            set_head(head, torch.tensor(weight), torch.tensor(bias))
        return model

    def last_layer(self, features: Array, labels: Codes, cells: Codes, seed: int = 0) -> tuple[Array, Array]:
        """Weight [C or 1, D] and bias of the averaged regressions; features [n, D], labels and cells [n]."""
        from sklearn.preprocessing import StandardScaler

        rng = np.random.default_rng(seed)
        order = rng.permutation(len(labels))
        fitting, choosing = order[: len(order) // 2], order[len(order) // 2 :]
        scaler = StandardScaler().fit(features)
        scaled = scaler.transform(features)

        def fitted(rows: Codes, strength: float) -> Any:
            even = even_rows(cells[rows], rng)
            return _regression(strength).fit(scaled[rows][even], labels[rows][even])

        def worst(strength: float) -> float:
            hits = fitted(fitting, strength).predict(scaled[choosing]) == labels[choosing]
            return min(hits[cells[choosing] == cell].mean() for cell in np.unique(cells[choosing]))

        best, every = max(self.strengths, key=worst), np.arange(len(labels))
        subsets = [fitted(every, best).estimators_ for _ in range(self.subsets)]  # of each, one for a class
        weight = np.mean([np.concatenate([one.coef_ for one in parts]) for parts in subsets], 0) / scaler.scale_
        bias = np.mean([np.concatenate([one.intercept_ for one in parts]) for parts in subsets], 0)
        return weight, bias - weight @ scaler.mean_


def even_rows(cells: Codes, rng: np.random.Generator) -> Codes:
    """As many random rows of every cell as the smallest has."""
    sizes = np.bincount(cells)
    if (sizes == 0).any():
        raise InputError(
            f"DFR needs rows of every (class, group) cell in both halves of the validation set; cell "
            f"{int((sizes == 0).argmax())} has none: give more validation rows"
        )
    return np.concatenate([rng.permutation(np.flatnonzero(cells == cell))[: sizes.min()] for cell in range(len(sizes))])


def _regression(strength: float) -> Any:
    import sklearn
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    # The same penalty has two names; each release warns about, or overlooks, the other one.
    is_new = tuple(int(part) for part in sklearn.__version__.split(".")[:2]) >= (1, 8)
    penalty: dict[str, Any] = {"l1_ratio": 1.0} if is_new else {"penalty": "l1"}
    return OneVsRestClassifier(LogisticRegression(C=strength, solver="liblinear", random_state=0, **penalty))
