"""The gap between two groups in the evidence for a class, of images or of texts, asked of stored features."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, rankdata
from torch import nn

from fairhead.data import Images
from fairhead.errors import InputError, check_known
from fairhead.locate.decompose import Decomposer
from fairhead.locate.directions import Concept, Task, balanced_weights, fit_logistic
from fairhead.locate.edits import HeadEdits, check_kind
from fairhead.locate.gap_words import GapLocated
from fairhead.locate.head_features import Array, Features, HeadMoments, HeadTexts, Pool, Pooled, text_spans
from fairhead.locate.head_maps import Head, HeadMap, Measure, Separation, coupling, separation
from fairhead.locate.locate_settings import LocatePlan, Rank
from fairhead.locate.passes import RowPasses
from fairhead.locate.question import Extremes, Question, Scores
from fairhead.locate.rows import Evaluation, comparable_rows, halves_of
from fairhead.locate.studies import Edited, Mask, Study
from fairhead.models.inputs import RowInputs
from fairhead.records import Records
from fairhead.report.wording import signed

NO_TEXTS = "the rank sum needs texts, those of the attribute among them: add --texts, and a text side"
_EXTREMES = 4
_CLASSES = 12  # classes that have a map each, at most
_ROWS = 128  # whose changes by every head are held at a time


def direct_effect(features: Features, task: Task, edits: HeadEdits, kind: str = "mean", seed: int = 0) -> Edited:
    """Logits [n, C] with sets of heads edited by one kind of edit, if no later layer and no norm answered."""
    check_kind(kind)
    (weight, shift), n = task.linear, len(features)
    before = np.asarray(features.output, dtype=np.float64) @ weight.T + shift  # [n, K]
    order = np.random.default_rng(seed).permutation(n)

    def moved(layer: int) -> Array:  # by how much the edit moves z, [n, H, d]
        scale = np.asarray(features.scale[:, layer], dtype=np.float64)[:, None, None]
        own = np.asarray(features.heads[:, layer], dtype=np.float64) / scale
        return np.asarray((edits.outputs(kind, own, layer, order) - own) * scale)

    def logits(sets: Sequence[Sequence[tuple[int, int]]]) -> list[Array]:
        heads = {Head(*head) for some in sets for head in some}
        by_layer = {layer: moved(layer) for layer in {head.layer for head in heads}}
        through = {head: (weight @ features.maps[head]).T for head in heads}  # [d, K]
        found = []
        for rows in (slice(start, start + _ROWS) for start in range(0, n, _ROWS)):
            change = {head: by_layer[head.layer][rows, head.head] @ through[head] for head in heads}
            found.append([task.finished(sum((change[Head(*h)] for h in some), before[rows])) for some in sets])
        return [np.concatenate(parts) for parts in zip(*found, strict=True)]

    return logits


class GapQuestion(Question[Evaluation]):
    """The gap between two groups in the evidence for a class."""

    located = GapLocated
    kinds = ("mean", "zero", "resample", "project", "splince")
    learned = ("gain",)
    baselines: tuple[str, ...] = ("project", "splince")

    def __init__(
        self,
        features: Features,  # of the model on n rows
        evaluation: Evaluation,  # their labels and groups; classes in the order of the task's
        task: Task,  # classes as directions
        concept: Concept,  # the attribute's direction
        *,
        choosing: Mask | None = None,  # rows to choose heads on, [n] bool; None splits in halves
        # The class whose evidence is looked at; None for the one with the largest gap of selection rates in the
        # selection half (of two classes, the last)
        positive: str | None = None,
        pool: Pool | None = None,  # texts for TextSpan
        # Learns the concept from the rows of a mask [n]; None where it does not come from these rows
        refit: Callable[[Mask], Concept] | None = None,
        passes: RowPasses | None = None,  # full forward passes over some rows; None where none are asked for
        seed: int = 0,  # of the halves
        inputs: RowInputs | None = None,  # the model and its rows, which an edit is saved from; None where none is
    ) -> None:
        if len(features) != len(evaluation) or evaluation.classes != task.classes:
            raise InputError(
                f"{len(features)} rows of features came with {len(evaluation)} of labels (classes "
                f"{', '.join(evaluation.classes)}), and a task with the classes {', '.join(task.classes)}; they must "
                "agree"
            )
        self.features, self.task, self.concept, self.pool, self.passes = features, task, concept, pool, passes
        self.refit, self.inputs = refit, inputs
        self.images = inputs.items if inputs is not None and isinstance(inputs.items, Images) else None
        self.choosing = halves_of(evaluation, seed) if choosing is None else choosing
        self.comparable, notes = comparable_rows(evaluation, self.choosing)
        seen = evaluation.take(self.choosing)
        number = _positive(positive, seen, task.logits(features.output[self.choosing]))
        self.parts, self.other_parts = task.parts(features, number), task.other_parts(features, number)
        self.total = task.total(features.output, number)
        learning = self.choosing & self.comparable
        part = replace(evaluation.take(learning), positive=number)
        whole = part.score(self.total[learning, None, None], self.total[learning]).total
        self.rows = replace(evaluation, positive=number, sign=-1.0 if whole < 0 else 1.0)
        self.along = features.parts(concept.vector[None])[..., 0]  # the concept, [n, L, H]
        self.edits = HeadEdits.learn(features.take(learning), part.cells)
        if self.edits.shrinkage > 0.2:
            notes.append(
                f"{self.edits.n} {evaluation.noun} are few for {self.edits.means.shape[-1]} numbers read of a head: "
                f"the covariances behind the projections were shrunk by up to {100 * self.edits.shrinkage:.0f} %."
            )
        self.notes = tuple(notes)

    @cached_property
    def moments(self) -> Pooled:
        """Of all heads, over all rows."""
        return self.features.moments(np.zeros(len(self.features), dtype=np.intp)).pooled(by="rows")

    @cached_property
    def norms(self) -> Array:  # type: ignore[override]
        """How much each head writes: root of the mean squared length of its centred term, [L, H]."""
        maps = self.features.maps
        gram = np.einsum("lhod,lhoe->lhde", maps, maps, optimize=True)
        return np.sqrt(np.maximum(np.einsum("lhde,lhde->lh", gram, self.moments.covariance), 0.0))

    def measures(self, rows: Mask, level: float, along: Array | None = None) -> tuple[Separation, Measure]:
        """How well heads separate the groups of some rows along the concept, and its coupling with the evidence."""
        part, along = self.rows.take(rows), self.along if along is None else along
        cells = part.cells
        return separation(along[rows], cells, level), coupling(along[rows], self.parts[rows], cells, level)

    def scores(self, found: HeadMap, rows: Mask, plan: LocatePlan) -> Scores:
        """By the gap, or by how well heads separate the groups along the concept.

        A direction that was learned from the selection half is not tested on the rows that it was learned from: of two
        folds each is tested along the direction that the other gives. How far the two tests depend on each other is not
        known, so p is that of the mean of their z, as if they were one: if these are jointly normal, that can only be
        too large.
        """
        if plan.rank in ("gap", "effect"):
            return super().scores(found, rows, plan)
        both = [(rows, self.along)]
        if self.refit is not None and (rows & self.choosing).any():
            fold = np.zeros_like(rows)
            fold[rows] = halves_of(self.rows.take(rows), plan.seed)
            both = [
                (tested, self.features.parts(self.refit(rows & ~tested).vector[None])[..., 0])
                for tested in (fold, rows & ~fold)
            ]
        values, ps = [], []
        for tested, along in both:
            apart, coupled = self.measures(tested, plan.level, along)
            value, p = apart.d.value, apart.d.p
            if plan.rank != "concept":
                value, p = value * np.abs(coupled.value), np.maximum(p, coupled.p)
            if plan.rank == "ranksum":  # the mean of three ranks, with the sign of the separation
                share, p_texts = self.text_shares(plan)
                three = (np.abs(apart.d.value), np.abs(coupled.value), share)
                value = np.sign(value) * np.mean([rankdata(x).reshape(x.shape) for x in three], axis=0)
                p = np.maximum(p, p_texts)
            values.append(value)
            ps.append(p)
        if len(both) == 1:
            return Scores(values[0], ps[0])
        z = np.mean([np.sign(v) * norm.isf(np.maximum(p, 1e-300) / 2) for v, p in zip(values, ps, strict=True)], axis=0)
        return Scores(np.mean(values, axis=0), np.asarray(2 * norm.sf(np.abs(z))))

    def text_shares(self, plan: LocatePlan) -> tuple[Array, Array]:
        """The share that texts of the attribute have in what each head writes, and its p against neutral texts, [L, H].

        The moments behind it know no groups. Without neutral texts p is that of as many random texts of the pool.
        """
        if self.pool is None or not self.pool.attribute.any():
            raise InputError(NO_TEXTS)
        spans = self._spans(plan)
        p = [span.p if span.p_matched is None else span.p_matched for span in spans]
        share = np.array([span.attribute_share for span in spans])
        return share.reshape(self.shape), np.array(p).reshape(self.shape)

    def doubts(self, direct: HeadMap, plan: LocatePlan) -> list[str]:
        """Whether there is a gap at all in the selection half."""
        if plan.rank not in ("gap", "effect") or direct.has_total:
            return []
        return [
            "In the selection half the gap of the evidence as a whole is not significant "
            f"({signed(direct.total)} logits, {signed(direct.total_low)} to {signed(direct.total_high)}): which "
            "heads are on its side is uncertain."
        ]

    def forward_kinds(self, kinds: Sequence[str]) -> Sequence[str]:
        """The first alone: each is a pass over the images for every control."""
        return kinds[:1]

    def direct(self, kind: str, seed: int) -> Edited:
        """Logits of the reporting half, from stored features."""
        return direct_effect(self.features.take(~self.choosing), self.task, self.edits, kind, seed)

    def forward(self, rows: NDArray[np.intp], kind: str) -> Edited:
        """Logits of some rows, by the model itself."""
        if self.passes is None:
            raise InputError("this question was asked without the model: give it forward passes")
        return self.passes(rows, self.edits, kind)

    def with_gains(self, gains: Array, origin: str = "") -> "GapQuestion":
        """The same question, which knows the edit "gain" by these gains [L, H], and how they were learned in words.

        Heads whose gain is 1 are controls of the others: they get the mean gain of those in their layer.
        """
        chosen = gains != 1
        with np.errstate(invalid="ignore"):
            of_layer = np.where(chosen, gains, 0).sum(1) / chosen.sum(1)
        given = np.where(chosen | ~chosen.any(1)[:, None], gains, of_layer[:, None])
        found = copy.copy(self)
        found.gains, found.edits = gains, self.edits.with_gains(given)
        found.notes = (*self.notes, origin) if origin else self.notes
        found.baselines = (*GapQuestion.baselines, "balance")
        if self.passes is not None and self.passes.everywhere is not None:
            found.passes = replace(self.passes, everywhere=self.passes.everywhere.with_gains(given))
        return found

    @property
    def fast(self) -> bool:
        """Whether the model is on a GPU."""
        return self.passes is not None and self.passes.fast

    @property
    def default_rank(self) -> Rank:
        """By their effect, where there is a model: exact on a GPU, elsewhere estimated for most of them."""
        return "gap" if self.passes is None else "effect"

    def estimate(self, rows: NDArray[np.intp], kind: str) -> Array | None:
        """By attribution patching."""
        if self.passes is None or kind == "resample":
            return None
        slope = partial(self.task.slope, positive=self.rows.positive)
        return self.passes.estimate(rows, self.edits, kind, [slope]).lost[..., 0]

    def at_output(self, kind: str, heads: Sequence[Head] | None = None) -> Edited | None:
        """Logits of the reporting half with the whole output edited, or what some heads together add to it.

        "balance" fits the last layer anew with the balanced objective that gains are learned with.
        """
        output = np.asarray(self.features.output, dtype=np.float64)
        plain = self.task.logits(output[self.reported])
        if kind == "balance":
            if heads is not None:
                return None
            x, labels = output[self.choosing], self.rows.labels[self.choosing]
            weights = balanced_weights(x, labels)[0]
            directions, bias = fit_logistic(x, labels, len(self.task.classes), weights=weights)
            after = output[self.reported] @ directions.T + bias
        else:
            part = output
            if heads is not None:  # what they together add to the output, [n, d']
                terms = (self.features.heads[:, la, h] @ self.features.maps[la, h].T for la, h in heads)
                part = np.asarray(sum(np.asarray(term, dtype=np.float64) for term in terms))
            learning = self.choosing & self.comparable
            seen = self.rows.take(learning)
            moments = HeadMoments.of(part[learning, None, None], seen.cells.cell, len(seen.cells.counts))
            reported = part[self.reported]
            edited = HeadEdits.of_moments(moments, len(seen)).outputs(
                kind, reported[:, None], 0, np.arange(len(reported))
            )
            after = self.task.logits(output[self.reported] + edited[:, 0] - reported)
        return lambda sets: [after if some else plain for some in sets]

    def forward_notes(self, edited: Edited | None) -> list[str]:
        """Where heads were edited, and what TF32 changed."""
        assert self.passes is not None
        notes, rows = list(self.passes.notes), self.reported
        if self.passes.in_tf32:
            (plain,) = (edited or self.forward(rows, self.kinds[0]))([()])
            moved = int((plain.argmax(1) != self.task.logits(self.features.output[rows]).argmax(1)).sum())
            notes.append(
                f"Forward passes ran in TF32: {moved} of {len(rows)} predictions of the model as it is differ from "
                "those in float32."
            )
        return notes

    def records(self, studies: Sequence[Study]) -> Mapping[str, Records]:
        """As the model is, and with the heads edited: in a forward pass where there is one, else the first kind."""
        judged = self.rows.take(self.reported)
        found = {"records": judged.records(self.task.logits(self.features.output[self.reported]))}
        if studies:
            main = next((s for s in studies if s.way == "forward"), studies[0])
            found["records-edited"] = judged.records(main.after)
        return found

    def writable(self) -> tuple[nn.Module, Any, HeadEdits]:
        """The model, where edits are of all tokens: weights act on every one."""
        if self.inputs is None or self.passes is None or self.passes.everywhere is None:
            raise InputError("weights act on every token, and this edit was made at the first alone: use all tokens")
        return self.inputs.model, self.inputs.beside, self.passes.everywhere

    def of_saved(self, folder: Path) -> "GapQuestion":
        """The same rows, read by the saved model."""
        found, given, passes = copy.copy(self), self.inputs, self.passes
        assert given is not None
        assert passes is not None
        found.inputs = type(given)(str(folder), given.items, given.batch_size, str(given.loaded.device))
        decomposer = Decomposer(found.inputs.model, passes.decomposer.token, passes.decomposer.unit)
        found.passes = replace(passes, decomposer=decomposer, batches=found.inputs.batches)
        return found

    def extremes(self, head: Head, count: int | None) -> Extremes:
        """Rows at the ends of its concept axis, which knows no groups: of both halves."""
        return Extremes.of(head, self.along[:, head.layer, head.head], count or _EXTREMES)

    def details(self, ranked: tuple[Head, ...], plan: LocatePlan) -> dict[str, Any]:
        """Separation and coupling of all heads on the reporting half; TextSpan of the chosen ones, on all rows."""
        rows, by_class = ~self.choosing & self.comparable, {}
        apart, coupled = self.measures(rows, plan.level)
        if 2 < len(self.rows.classes) <= _CLASSES:
            features, part = self.features.take(rows), self.rows.take(rows)
            for number, name in enumerate(self.rows.classes):
                if number != self.rows.positive:
                    of = self.task.parts(features, number), self.task.total(features.output, number)
                    by_class[name] = part.score(*of, plan.level)
        spans = self._spans(plan, ranked or None)
        about = {"concept": self.concept, "task": self.task, "separation": apart, "coupling": coupled}
        return {**about, "spans": spans, "by_class": by_class}

    def _spans(self, plan: LocatePlan, heads: Sequence[Head] | None = None) -> tuple[HeadTexts, ...]:
        """TextSpan of some heads, or of all; nothing without texts."""
        if self.pool is None:
            return ()
        # Of all heads, enough for one alone to be significant once corrected over all.
        least = 0 if heads is not None else 2 * int(np.prod(self.shape) / plan.alpha)
        how: dict[str, Any] = {"m": plan.m, "permutations": max(plan.permutations, least), "seed": plan.seed}
        return text_spans(self.moments, self.features.maps, self.pool, heads, **how)


def _positive(wanted: str | None, evaluation: Evaluation, logits: Array) -> int:
    names = evaluation.classes
    if wanted is not None:
        check_known(wanted, names, f"there is no class {wanted!r}; there are")
        return names.index(wanted)
    if len(names) == 2:
        return 1
    predicted = evaluation.counts(logits).sum(1)  # [2, C]
    rates = predicted / predicted.sum(1, keepdims=True)
    return int(np.argmax(np.abs(rates[0] - rates[1])))
