"""Training of a language model on triplets, in three lines, whatever the method.

trainer = LanguageTrainer(model, tokenizer, KLAAD.preset("llama"))
trainer.train(TripletData("stereoset:dev.json"))
trainer.save("fairer-model")
"""

import copy
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fairhead.data.sentences import StereoSetItem, TripletSplit
from fairhead.errors import InputError
from fairhead.language.generation import write_after
from fairhead.language.packing import control_token_warning, starting
from fairhead.language.row_layout import context_length, refuse_other_than_causal
from fairhead.language.running import TRAINING_FILE, TrainingRecord
from fairhead.language.scorer import Scorer
from fairhead.language.suite import NOT_WHOLE
from fairhead.mitigate import method_named
from fairhead.mitigate.language_result import MitigatedLanguage, card_of
from fairhead.mitigate.sentence_losses import looker, scores_of, set_aside, wrecked
from fairhead.mitigate.triplets import SHARE, TripletData, targets, texts_of
from fairhead.mitigate.triplets import Prepared as Prepared
from fairhead.models import attach, open_model, save
from fairhead.models.attached import refuse_method
from fairhead.models.load import Model, device_named, weights_digest
from fairhead.settings import check_config
from fairhead.store import reading
from fairhead.train import LanguagePlan
from fairhead.train.loop import TrainingDiverged, agreed, comparable, first_difference, written_by_first
from fairhead.train.step import Parts, autocast, gradient_norms, say_once, shuffled_batches
from fairhead.train.tuning import OnStep, Tuned, checkpointed, merged, only_heads, tune, with_lora

_AT_ONCE = 64  # examples that a GPU reads together where nothing is trained
_CHECKPOINTS = "checkpoint"  # within the folder of the model, until that is saved
_LAST_GOOD = "last-good"  # within it, where training went wrong


def plan_of(method: Any, **changes: Any) -> LanguagePlan:
    """The plan of a method, or of its class: `LanguagePlan`, where the method does not say otherwise, with changes.

    Example:
        >>> from fairhead.mitigate.sentence_losses import CDA
        >>> plan_of(CDA, epochs=2).batch_size
        16
    """
    return LanguagePlan.of(**{**getattr(method, "plan", {}), **changes})


@dataclass
class LanguageTrainer:
    """Changes a causal language model with a method, and saves it as an ordinary model.

    Attributes:
        model: any Hugging Face causal language model; it is trained in place, in the precision that it has.
        tokenizer: its tokeniser.
        method: such as `KLAAD()`: a frozen dataclass of settings, which never learns which group a sentence is about.
            It has `prepare(items, tokenizer, context)`, the tokens and what else it needs of each item, and
            `session(model)`, a `with` block that gives the loss of a batch of examples ("loss", and its parts by name).
            It may have `plan`: where the training should differ from `LanguagePlan`; `writes`: how many texts, of how
            many tokens, the model is to write before training, which `prepare` then gets as `own`;
            `refer(model, prepared)`, which adds what the model says of the examples before training;
            `watched_texts()`, whose perplexity is watched; `choose(items, score)`, which names the one category to
            train on; `measuring()`, the method to measure with, where the loss does not tell all. One that trains
            nothing has either `edit(model, tokenizer, items, progress)`, which changes weights and returns what is
            worth recording, or `attach(model, tokenizer)`.
        plan: how to train; that of the method by default.
        name: the method's, for the record; its class's by default.
        base: where the model came from, for the record.
    """

    model: Any
    tokenizer: Any
    method: Any
    plan: LanguagePlan | None = None
    name: str | None = None
    base: str | None = None

    @property
    def _plan(self) -> LanguagePlan:
        assert self.plan is not None
        return self.plan

    def __post_init__(self) -> None:
        refuse_other_than_causal(self.model)
        check_config(self.method)
        self.plan = self.plan or plan_of(self.method)
        self._texts = starting(self.tokenizer, self.plan.start)  # the tokeniser, with the start token of the plan
        if (told := control_token_warning(self._texts)) is not None:
            say_once(told)
        self.record: TrainingRecord | None = None

    def train(
        self,
        data: TripletData | TripletSplit | None = None,  # None for a method that reads none
        folder: str | os.PathLike[str] | None = None,  # of checkpoints; a run that was stopped goes on there
        on_step: OnStep | None = None,  # called with the steps done, all steps, and the parts of the loss
        on_held_out: OnStep | None = None,  # called with the held-out items measured, and all of them
        on_written: OnStep | None = None,  # called with the texts that the model has written, and all of them
    ) -> Tuned:
        """Train on the training part; measure every part of the loss on the held-out part, before and after.

        The record also says how hard each part pulls at the start: the norms of their gradients in the first batch, of
        as many of its examples as are read together.

        Where a loss is not finite, or the model no longer predicts text, it is back at its last good weights, and
        `TrainingDiverged` is raised.
        """
        split = data.read() if isinstance(data, TripletData) else data
        tuned, results = Tuned((), 0, 0.0), dict[str, Any]()
        if hasattr(self.method, "attach"):
            self.model = attach(self.model, self.method, self.tokenizer)
        elif split is None:
            raise InputError(f"{type(self.method).__name__} needs data, such as stereoset:dev.json")
        elif hasattr(self.method, "edit"):
            results = self.method.edit(
                self.model, self.tokenizer, split.train, lambda i, n: on_step(i, n, {}) if on_step else None
            )
        else:
            checkpoints = None if folder is None else Path(folder) / _CHECKPOINTS
            tuned, results = self._tuned(split, self.identity(data), checkpoints, on_step, on_held_out, on_written)
        self.record = TrainingRecord(
            **self.identity(data),
            training_targets=() if split is None else targets(split.train),
            held_out_targets=() if split is None else targets(split.held_out),
            training_texts=() if split is None else texts_of(split.train),
            history=tuned.history,
            results=results,
        )
        return tuned

    def _tuned(
        self,
        split: TripletSplit,
        identity: Mapping[str, Any],
        checkpoints: Path | None,
        on_step: OnStep | None,
        on_held_out: OnStep | None,
        on_written: OnStep | None,
    ) -> tuple[Tuned, dict[str, Any]]:
        """What training did, and what the record says of it."""
        method, plan = self.method, self._plan
        trained, watched = set_aside(split.train, plan)
        category: str | None = None
        if hasattr(method, "choose"):
            category = method.choose(trained, scores_of(Scorer(self.model, self._texts)))
            trained, watched = (
                tuple(item for item in items if item.bias_type == category) or items for items in (trained, watched)
            )
        own: dict[str, Any] = {}
        count, longest = getattr(method, "writes", (0, 0))
        if count:
            others, count = [item.texts.unrelated for item in trained], min(count, len(trained))
            tell = None if on_written is None else lambda done, total: on_written(done, total, {})
            own["own"] = agreed(write_after(Scorer(self.model, self._texts), others, count, longest, 1, tell))
        prepared: Prepared[Any] = method.prepare(trained, self._texts, context_length(self.model), **own)
        if not prepared.examples:
            reasons = ", ".join(f"{len(ids)} {reason}" for reason, ids in prepared.left_out.items())
            raise InputError(f"no item can be trained on{f': {reasons}' if reasons else ''}")
        before = self.evaluate(split.held_out, on_held_out)
        if hasattr(method, "refer"):
            prepared = method.refer(self.model, prepared)
        model = with_lora(self.model, plan)
        texts = method.watched_texts() if hasattr(method, "watched_texts") else ()
        look = looker(model, self._texts, watched, texts) if plan.checks else None
        with only_heads(model, plan) as heads, method.session(model) as loss:
            batch = shuffled_batches(prepared.lengths, plan.batch_size, plan.seed)[0]
            norms = self._first_norms(model, loss, [prepared.examples[i] for i in batch[:: plan.accumulate]])
            tuned = tune(
                model,
                prepared.examples,
                prepared.lengths,
                loss,
                plan,
                checkpoints=checkpoints,
                identity=identity,
                look=look,
                broken=wrecked(model, self._texts, trained),
                on_step=on_step,
            )
        self.model = model
        after = self.evaluate(split.held_out, on_held_out)
        results: dict[str, Any] = {"held_out": {"items": len(split.held_out), "before": before, "after": after}}
        if tuned.looks:
            before_after = {"before": tuned.looks[0], "after": tuned.looks[tuned.chosen]}
            looks = {
                when: {"ss": seen.ss, "perplexity": seen.perplexity, "own": seen.own}
                for when, seen in before_after.items()
            }
            chance = tuned.looks[0].chance
            kept = {"chosen": tuned.chosen, "taken_back": tuned.taken_back, "chance": chance}
            results["watched"] = {"items": len(watched), **kept, **looks}
        results |= {f"{name}_texts": len(found) for name, found in own.items()}
        if hasattr(loss, "record"):
            results |= loss.record()
        if heads:
            results["heads"] = [list(head) for head in heads]
        if category is not None:
            results["category"] = category
        results |= {"items": len(trained), "left_out": {why: list(ids) for why, ids in prepared.left_out.items()}}
        if prepared.noted:
            results["noted"] = {reason: len(ids) for reason, ids in prepared.noted.items()}
        return tuned, results | {
            "first_gradient_norms": norms,
            "steps": tuned.steps,
            "seconds": round(tuned.seconds, 3),
        }

    def _first_norms(self, model: nn.Module, loss: Callable[[Any], Parts], examples: list[Any]) -> dict[str, float]:
        """How hard each part of the loss pulls; of fewer examples where the device has too little memory."""
        try:
            with checkpointed(model, self._plan), autocast(next(model.parameters()).device, self._plan.precision):
                return gradient_norms(model, loss(examples))
        except torch.OutOfMemoryError:
            if len(examples) == 1:
                raise
        return self._first_norms(model, loss, examples[::2])

    def evaluate(self, items: Iterable[StereoSetItem], on_step: OnStep | None = None) -> dict[str, float]:
        """Every part of the loss, averaged over items; empty where there are none. `on_step` as in `train`."""
        method = getattr(self.method, "measuring", lambda: self.method)()
        prepared = method.prepare(items, self._texts, context_length(self.model))
        totals: dict[str, float] = {}
        self.model.eval()
        order = sorted(range(len(prepared.examples)), key=lambda i: prepared.lengths[i])
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        size = self._plan.batch_size if on_cpu else max(self._plan.batch_size, _AT_ONCE)
        with torch.no_grad(), method.session(self.model) as loss:
            for begin in range(0, len(order), size):
                batch = [prepared.examples[i] for i in order[begin : begin + size]]
                for part, value in loss(batch).items():
                    totals[part] = totals.get(part, 0.0) + float(value) * len(batch)
                if on_step is not None:
                    on_step(begin + len(batch), len(order), {})
        if len(totals) > 1:
            totals.pop("loss", None)  # a sum with weights that nothing was trained with
        means = {part: total / len(order) for part, total in totals.items()}
        # A batch's figure of some of its items is one over all of them, so that batches add up, with their share.
        shares = {part.removesuffix(SHARE): means.pop(part) for part in list(means) if part.endswith(SHARE)}
        return {part: mean / shares.get(part, 1.0) for part, mean in means.items() if shares.get(part, 1.0)}

    def save(self, folder: str | os.PathLike[str], *, adapter: bool = False) -> None:
        """Write an ordinary Hugging Face folder, LoRA merged into its weights, with the record of the training.

        Args:
            folder: where to; `fairhead lm ... --model FOLDER` takes it from there.
            adapter: also keep LoRA's own matrices, in the subfolder "adapter".

        A model with LoRA is then in 32 bit and in the machine's memory, whatever it was trained on.
        """
        if self.record is None:
            raise InputError("nothing has been trained yet: call train first")
        if adapter and not hasattr(self.model, "merge_and_unload"):
            raise InputError("there is no adapter to keep: all weights were trained (plan.lora is None)")
        if adapter:
            self.model.save_pretrained(Path(folder, "adapter"))
        self.model = merged(self.model)
        card = card_of(self.record, self.record.method if hasattr(self.method, "attach") else None)
        save(self.model, Path(folder), self.tokenizer.save_pretrained, self.record.write, card.write)
        shutil.rmtree(Path(folder, _CHECKPOINTS), ignore_errors=True)

    def identity(self, data: TripletData | TripletSplit | None) -> dict[str, Any]:
        """What decides the result: the method, its settings, the plan, the data and the model to begin with."""
        described: dict[str, Any] = {}
        if isinstance(data, TripletData):
            described = data.described()
        elif data is not None:
            described = {"items": len(data.train), "held_out_items": len(data.held_out)}
        return {
            "method": self.name or type(self.method).__name__.lower(),
            "settings": asdict(self.method),
            "plan": asdict(self._plan) if hasattr(self.method, "session") else {},
            "data": described,
            "base": self.base,
        }


class LanguageRun(NamedTuple):
    """One run of a method: its name in the registry, its settings, and how to train."""

    method: str
    options: Mapping[str, Any]
    plan: LanguagePlan | None


def mitigate_language(
    model: Model,
    data: TripletData | None,
    out: str | os.PathLike[str],
    runs: Mapping[str, LanguageRun],
    *,
    progress: Callable[[str, int, int, str], None] | None = None,
    **how: Any,
) -> MitigatedLanguage:
    """Change a language model by one method, or by several, into a folder each: `fairhead.mitigate` and its command.

    `runs` maps a subfolder ("" for none) to what is done into it; `progress` is called with (stage, done, all, note);
    all else is as in `train_folder`.
    """

    def tell(stage: str, done: int, total: int, parts: Mapping[str, float]) -> None:
        if progress is not None:
            progress(stage, done, total, ", ".join(f"{part} {value:.4g}" for part, value in parts.items()))

    records = {}
    for name, run in runs.items():
        stage = f"{run.method} {name}".strip()
        how |= {"on_step": partial(tell, stage), "on_held_out": partial(tell, f"{stage}, held out")}
        how |= {"on_written": partial(tell, f"{stage}, texts of its own")}
        records[name] = train_folder(model, data, Path(out, name), *run, **how)
    return MitigatedLanguage(records, Path(out))


def train_folder(
    model: Model,  # a live one is copied
    data: TripletData | None,  # None for a method that reads none
    out: str | os.PathLike[str],
    method: str,  # its name in the registry
    options: Mapping[str, Any] | None = None,  # settings; those not given are the method's for the family of the model
    plan: LanguagePlan | None = None,
    *,
    device: str = "auto",
    adapter: bool = False,  # also keep LoRA's own matrices
    tokenizer: Any = None,  # of a live model that was not loaded from a folder
    on_step: OnStep | None = None,  # called with the steps done, all steps, and the parts of the loss
    on_held_out: OnStep | None = None,  # called with the held-out items measured and all of them
    on_written: OnStep | None = None,  # called with the texts that the model has written, and all of them
) -> TrainingRecord:
    """Train a model into a folder; a run that was stopped goes on, and a complete one is kept.

    It is trained in 32 bit, as half precision would lose small steps; with LoRA and bf16 the weights beneath stay in
    bfloat16. Where training diverges, the subfolder "last-good" has the last good weights, if there are any.
    """
    entry = method_named(method)
    # Mistakes should not wait for the model.
    getattr(entry.configure(**(options or {})), "check", lambda: None)()
    if data is not None:
        data.read()
    out = Path(out)
    with written_by_first(out) as writes:
        base = str(model)
        if isinstance(model, nn.Module):  # the caller's own stays as it is
            refuse_other_than_causal(model)
            base = f"a live {type(model).__name__}, {weights_digest(model)}"
            model = copy.deepcopy(model).float().requires_grad_().to(device_named(device))
        # Weights that are not trained may stay in bfloat16, if that is what their file has.
        half = plan is not None and plan.lora is not None and plan.precision == "bf16"
        loaded = open_model(model, "causal", device=device, dtype="stored" if half else "float32", tokenizer=tokenizer)
        refuse_method(loaded.model, "training")
        if next(loaded.model.parameters()).dtype != torch.bfloat16:
            loaded.model.float()
        settings = entry.load()
        own = settings.of_family(loaded.model.config.model_type) if hasattr(settings, "of_family") else {}
        config = entry.configure(**{**own, **(options or {})})
        trainer = LanguageTrainer(loaded.model, loaded.tokenizer, config, plan, method, base)
        if (out / TRAINING_FILE).is_file():
            found = TrainingRecord.read(out)
            identity = comparable(trainer.identity(data))
            before = comparable({key: getattr(found, key) for key in identity})
            # Settings of a plan that came later have their defaults in records that lack them.
            before["plan"] = {**(identity["plan"] and asdict(LanguagePlan())), **before["plan"]}
            difference = first_difference(comparable(before), identity)
            if difference is not None:
                raise InputError(f"{out} holds a model of another run ({difference}): choose another folder")
            with reading(out / TRAINING_FILE, NOT_WHOLE):  # what is shown of it
                MitigatedLanguage({"": found}, out).page()
            return found
        if writes and (out / "config.json").is_file():
            raise InputError(f"{out} holds a model that was not trained here: choose another folder")
        try:
            trainer.train(data, out, on_step, on_held_out, on_written)
        except TrainingDiverged as diverged:
            if not writes:
                raise
            shutil.rmtree(out / _CHECKPOINTS, ignore_errors=True)  # going on there would end here again
            if diverged.model is None:
                raise
            save(merged(diverged.model), out / _LAST_GOOD, trainer.tokenizer.save_pretrained)
            raise TrainingDiverged(f"{diverged}. Those weights are kept in {out / _LAST_GOOD}") from None
        if writes:
            trainer.save(out, adapter=adapter)
    assert trainer.record is not None
    return trainer.record
