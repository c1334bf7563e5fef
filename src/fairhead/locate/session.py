"""From a model and a data set to a question: what `fairhead locate` and `fairhead ablate` start from."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fairhead.data import parse_spec
from fairhead.data.datasets import digests_of
from fairhead.errors import InputError, UnsupportedModel, check_known
from fairhead.heads import find_sites
from fairhead.heads.sites import check_heads
from fairhead.locate.decompose import Decomposer, reads_of
from fairhead.locate.directions import (
    Concept,
    Task,
    array_of,
    concept_from_images,
    concept_from_texts,
    own_task,
    task_from_images,
    task_from_texts,
)
from fairhead.locate.edits import HeadEdits, parsed
from fairhead.locate.gains import GIVEN, LEARNED, learn_gains, learn_group_aware_gains
from fairhead.locate.gap_question import NO_TEXTS, GapQuestion
from fairhead.locate.gap_words import STAND_IN
from fairhead.locate.head_features import Features, Pool, collect
from fairhead.locate.locate_settings import LocatePlan, Source
from fairhead.locate.log_odds import take_apart
from fairhead.locate.pair_question import PairQuestion
from fairhead.locate.pair_rows import halves_of_pairs, read_pairs
from fairhead.locate.passes import RowPasses
from fairhead.locate.prompts import (
    TEMPLATES,
    AdaptedText,
    PromptFile,
    Prompts,
    TextSide,
    known_prompts,
    read_prompts,
    read_text_table,
    text_side,
)
from fairhead.locate.question import Question
from fairhead.locate.rows import Evaluation, comparable_rows, halves_of, labelled_rows, shared_labels
from fairhead.locate.streams import mean_of_patches
from fairhead.locate.studies import Mask
from fairhead.models.inputs import ImageInputs, RowInputs, TextInputs
from fairhead.models.places import config_of, find

Heads = Sequence[tuple[int, int]]
Progress = Callable[[str, int, int], None]
_TOLERANCE = 1e-3


def open_question(
    source: Source,
    plan: LocatePlan,
    features: str | None = None,
    progress: Progress | None = None,
    heads: Heads | None = None,
    gains: Sequence[float] | None = None,
) -> Question[Any]:
    """Read, load, and run the model over the rows, or take from the folder `features` what is stored of that.

    Where the plan asks for gains, they are those given, or learned here, of the `heads` that were named or of those
    that they choose.
    """
    if source.kind == "pairs":
        return _open_pairs(source, plan, features, progress, heads)
    GapQuestion.check(plan)
    if plan.rank == "ranksum" and source.texts is None:
        raise InputError(NO_TEXTS)
    session = open_session(source, features, progress, heads)
    choosing = halves_of(session.evaluation, source.seed)
    task = session.task(choosing)
    if session.evaluation.others:
        session = session.between_farthest(task, choosing)
    concept = session.concept(task, choosing)
    if source.tokens == "first" and source.terms == "prs":
        raise InputError(
            "terms that share biases and means (--terms prs) cannot be edited by themselves: use all tokens"
        )
    passes = None
    if plan.forward or plan.rank in (None, "effect"):
        everywhere = session.edits_everywhere(choosing) if source.tokens == "all" else None
        inputs = session.inputs
        passes = RowPasses(session.decomposer, inputs.batches, task, everywhere, source.tf32, inputs.order, progress)
    notes = (*session.notes, *((STAND_IN,) if isinstance(session.text, AdaptedText) else ()))
    question = GapQuestion(
        session.features,
        session.evaluation,
        task,
        concept,
        choosing=choosing,
        positive=source.evidence,
        pool=session.pool(),
        refit=None if concept.origin == "prompts" else lambda rows: session.concept(task, rows),
        passes=passes,
        inputs=session.inputs,
    )
    question.notes = (*notes, *question.notes)
    question.provenance = {
        "model": source.called,
        "model_sha256": session.inputs.loaded.fingerprint(),
        "data": source.data,
        "images": len(session.evaluation),
        "seed": source.seed,
        "classes_from": task.origin,
        "concept_from": concept.origin,
    }
    if any(parsed(kind)[0] == "gain" for kind in plan.kinds or ()):
        if gains is not None:
            values = np.ones(question.shape)
            for (layer, head), gain in zip(heads or (), gains, strict=True):
                values[layer, head] = gain
            return question.with_gains(values, GIVEN)
        if plan.target is None:
            learned = learn_gains(question, plan.count, heads, plan.per_layer, seed=plan.seed)
            return question.with_gains(learned.values, LEARNED)
        aware = learn_group_aware_gains(question, plan, heads)
        return question.with_gains(aware.values, aware.sentence)
    return question


def _open_pairs(
    source: Source, plan: LocatePlan, features: str | None, progress: Progress | None, heads: Heads | None
) -> PairQuestion:
    from fairhead.language import load_scorer

    PairQuestion.check(plan)
    pairs = read_pairs(source.data, source.concept, source.limit, source.seed, source.options, source.model)
    halves_of_pairs(pairs, source.seed)  # a mistake there should not wait for the model
    how: dict[str, Any] = {"device": source.device, "dtype": "float32", "start": source.start}
    scorer = load_scorer(source.model, **how, tokenizer=source.beside)
    check_heads(heads or (), [site.n_heads for site in find_sites(scorer.model)])
    terms = take_apart(scorer, pairs, folder=features, progress=_stage(progress, "pairs"))
    question = PairQuestion(scorer, pairs, terms, tf32=source.tf32, seed=source.seed, progress=progress)
    question.provenance = {
        **scorer.settings(),
        "model": source.called,
        "data": source.data,
        "bias_type": source.concept or "all",
        "pairs": len(pairs),
        "seed": source.seed,
    }
    return question


def _stage(progress: Progress | None, name: str) -> Callable[[int, int], None]:
    return lambda done, total: None if progress is None else progress(name, done, total)


@dataclass(frozen=True)
class Session:
    """A model, rows with labels and groups, and what is stored of the model on them."""

    source: Source  # what was asked for
    inputs: RowInputs  # the model and the rows that it reads
    decomposer: Decomposer  # of the model
    evaluation: Evaluation  # labels and groups of the rows
    features: Features  # of the rows
    own: Task | None  # the model's own classifier, or None
    text: TextSide | None  # the text side, or None
    prompts: Prompts | None  # the concept in words, where there are any
    words: PromptFile  # templates, and the classes where the user's own file says them
    notes: tuple[str, ...]  # what was left out, in sentences

    def task(self, choosing: Mask) -> Task:
        """The classes as directions: the model's classifier, prompts, or a probe fitted on the selection half."""
        classes = self.evaluation.classes
        if self.own is not None:
            self._check_logits(self.own)
            return self.own.reordered([self.own.classes.index(name) for name in classes])
        if self.text is None:
            return task_from_images(self.features.output[choosing], self.evaluation.labels[choosing], classes)
        assert self.source.task is not None
        words = self.words.classes or known_prompts().words(parse_spec(self.source.data).reader.name, self.source.task)
        missing = [c for c in classes if c not in words]
        if missing:
            raise InputError(
                f"there are no prompts for the class {missing[0]!r}; there are some for {', '.join(words)}"
            )
        prompted = task_from_texts({c: words[c] for c in classes}, self.words.templates or (), self.text)
        if not self.source.calibrate:
            return prompted
        return prompted.calibrated(self.features.output[choosing], self.evaluation.labels[choosing])

    def _check_logits(self, task: Task) -> None:
        """Once: is that what the model does with what is read of it?"""
        batch = next(self.inputs.batches(np.arange(1)))
        own = array_of(self.inputs.model(**batch).logits)
        ours = task.logits(self.decomposer.outputs(batch).cpu().numpy())
        if np.abs(ours - own).max() > _TOLERANCE * max(1.0, np.abs(own).max()):
            raise UnsupportedModel(
                f"the logits of {type(self.inputs.model).__name__} are not those of its classifier on the tokens that "
                "it reads: it does something more that is not known"
            )

    def between_farthest(self, task: Task, choosing: Mask) -> "Session":
        """The same with the two groups as poles whose predictions differ most in the selection half."""
        rows = self.evaluation
        shared = rows.shared_classes(choosing)
        few = [name for name, most in zip(rows.names, shared.max(0), strict=True) if most < shared.max()]
        rows = rows.between(*rows.farthest(task.logits(self.features.output[choosing]), choosing))
        note = (
            f"{rows.group_by} has {len(rows.names)} groups. Maps of heads and erasure are between {rows.poles[0]} and "
            f"{rows.poles[1]}, whose predictions differ most in the selection half; metrics are over all of them."
        )
        if few:
            note += f" Too few {rows.noun} to compare heads within a class: {', '.join(few)}."
        return replace(self, evaluation=rows, notes=(*self.notes, note))

    def concept(self, task: Task, choosing: Mask) -> Concept:
        """The concept's direction, from prompts or from the selection half."""
        can = self.text is not None and self.prompts is not None
        method = self.source.concept_from
        if method == "auto":
            method = "prompts" if can else "leace"
        if method == "prompts":
            if self.text is None:
                raise InputError("there is no text side to read prompts: give one, or learn the concept from images")
            concept = concept_from_texts(self.prompts or known_prompts().concept(str(self.source.concept)), self.text)
        else:
            choosing = choosing & self.evaluation.of_poles
            chosen = self.evaluation.take(choosing)
            concept = concept_from_images(
                self.features.output[choosing],
                chosen.groups,
                shared_labels(chosen),
                name=str(self.source.concept),
                poles=chosen.poles,
                method=method,
                noun=chosen.noun,
            )
        return concept.orthogonal_to(task) if self.source.orthogonal else concept

    def pool(self) -> Pool | None:
        """The texts for TextSpan, with attribute and neutral prompts among them; None without a table of texts."""
        if self.source.texts is None:
            return None
        texts, known = read_text_table(self.source.texts)
        if known.shape[1] != self.features.output.shape[1]:
            raise InputError(
                f"the text vectors of {self.source.texts} have {known.shape[1]} dimensions, the model's output "
                f"{self.features.output.shape[1]}: they belong to another model"
            )
        if self.text is None or self.prompts is None:
            return Pool.of(texts, known)
        attribute = [text for pole in self.prompts.poles for text in self.prompts.texts(pole.words)]
        neutral = self.prompts.texts(self.prompts.neutral)
        return Pool.of(texts, known, attribute, self.text(attribute), neutral, self.text(neutral) if neutral else None)

    def edits_everywhere(self, choosing: Mask) -> HeadEdits:
        """What is put in a head's place at every token, learned on the selection half: a pass over its rows."""
        rows = np.flatnonzero(choosing & comparable_rows(self.evaluation, choosing)[0])
        cells = self.evaluation.take(rows).cells
        return HeadEdits.learn_everywhere(self.decomposer, self.inputs.batches(rows), cells)


def open_session(
    source: Source, features: str | None = None, progress: Progress | None = None, heads: Heads | None = None
) -> Session:
    """Read labelled rows, load the model, and run it over them; the arguments are those of `open_question`."""
    is_text, reader = source.kind == "texts", parse_spec(source.data).reader
    name, own = reader.name, "label" in reader.options  # which may be found by its name
    if source.concept is None or (source.task is None and not own):
        missing = "groups: --group (by= in Python)" if source.concept is None else "classes: --label"
        raise InputError(f"{name} needs the column of the {missing}; pairs of texts (crows, stereoset) do not")
    if is_text and (source.prompts or source.text_adapter or source.texts):
        raise InputError(f"prompts and text sides are for images; the concept of {name} is learned from its own rows")
    file = read_prompts(source.prompts) if source.prompts else PromptFile()
    # The data first: a mistake there should not wait for the model.
    held_out = is_text or (name == "images" and _is_classifier(source.model))
    chosen = labelled_rows(source, file.concept, held_out)
    evaluation = chosen.evaluation
    if source.evidence is not None:
        check_known(source.evidence, evaluation.classes, f"there is no class {source.evidence!r}; there are")
    choosing = halves_of(evaluation, source.seed)
    if evaluation.others:  # the model says between which two of them heads are compared
        evaluation.shared_classes(choosing)
    else:
        try:
            comparable_rows(evaluation, choosing)
        except InputError as error:  # what was left out may be why
            raise InputError(f"{error}. {' '.join(chosen.notes)}".rstrip(". ")) from None
    kind = TextInputs if is_text else ImageInputs
    inputs: RowInputs = kind(source.model, chosen.items, source.batch_size, source.device, source.beside)
    classifier = own_task(inputs.model, is_text, evaluation.classes)
    text = None if is_text else text_side(source.text_adapter, source.text_encoder, inputs.loaded)
    # The stand-in was fitted on bare words.
    templates = file.templates or (("{}",) if isinstance(text, AdaptedText) else TEMPLATES)
    of_model = mean_of_patches if classifier is None else reads_of
    reads = None if is_text else of_model(inputs.model, next(inputs.batches(np.arange(1))))
    decomposer = Decomposer(inputs.model, reads or "first", None if classifier is None else False, source.terms)
    check_heads(heads or (), [decomposer.n_heads] * decomposer.n_layers)
    if isinstance(text, AdaptedText) and text.width != decomposer.width:
        raise InputError(
            f"the text adapter {source.text_adapter} gives vectors of {text.width} dimensions, the model's output has "
            f"{decomposer.width}: it belongs to another model"
        )
    assert evaluation.ids is not None
    identity = {
        "model": inputs.loaded.fingerprint(),
        "ids": hashlib.sha256("\n".join(evaluation.ids.tolist()).encode()).hexdigest(),
        # Ids may be row numbers; looked at where something is kept.
        "rows": None if features is None else hashlib.sha256("\n".join(digests_of(chosen.items)).encode()).hexdigest(),
        "data": source.data.partition(":")[0],
        "unit": decomposer.unit,
        "token": decomposer.token,
        **({} if decomposer.split == "own" else {"terms": decomposer.split}),
    }
    kept = {"folder": features, "identity": identity, "progress": _stage(progress, "rows")}
    found = collect(decomposer, lambda start: inputs.batches(start=start), len(evaluation), **kept)
    prompts = None if chosen.prompts is None else replace(chosen.prompts, templates=templates)
    words = replace(file, templates=templates)
    return Session(source, inputs, decomposer, evaluation, found, classifier, text, prompts, words, chosen.notes)


def _is_classifier(model: Any) -> bool:
    """Whether a model has been trained to classify pictures."""
    live = not isinstance(model, str)
    names = [type(model).__name__] if live else config_of(find(model)).architectures or ()
    return any(str(name).endswith("ForImageClassification") for name in names)
