"""One run of a method whose model is kept: training, saving, and what it found, with its report and its card."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fairhead.audit import Audit, Comparison, audit, compare
from fairhead.audit.audit_results import audit_verdicts, comparison_verdicts
from fairhead.bench.cell import Tell, fingerprint, run_cell
from fairhead.bench.grid import Cell, Method
from fairhead.bench.runner import check
from fairhead.bench.tasks import Task, recipe_of
from fairhead.errors import InputError
from fairhead.mitigate import Trained, method_named
from fairhead.mitigate.choosing import NAMES, choice_section, choice_verdict
from fairhead.mitigate.two_stages import find_head, set_head
from fairhead.models import attach, load, method_of, save
from fairhead.models.attached import LinearHead
from fairhead.models.fresh import Recipe, is_ready
from fairhead.models.inputs import text_length
from fairhead.models.places import config_of, tokenizer_of, with_training_rows
from fairhead.report import Report, Result, Sentence
from fairhead.report.model_card import Card, name_of
from fairhead.report.sections import Section
from fairhead.report.sections.audited import Audited
from fairhead.report.sections.changes import Compared
from fairhead.report.sections.plain import Text
from fairhead.store import reading, refuse_others, whole_folder, write_json
from fairhead.train.last_encoder import put_back
from fairhead.train.loop import TrainingDiverged, written_by_first
from fairhead.train.step import Examples


@dataclass(frozen=True)
class Mitigated(Result):
    """What a run found, and where it is kept."""

    cell: Cell  # what was run
    row: Mapping[str, Any]  # its figures, costs and settings
    audit: Audit  # of the test rows
    comparison: Comparison | None  # with another method, if there was one
    against: str | None  # the name of that
    out: Path  # the folder, with the model in `model/`

    @property
    def compared(self) -> Comparison | None:
        """The comparison, unless plain training was kept and is what the run would be compared with."""
        return None if self.against == "erm" and kept_plain(self.cell, self.row) else self.comparison

    @property
    def notes(self) -> Mapping[str, Any]:
        """What the method found on its way."""
        found: Mapping[str, Any] = self.row.get("notes", {})
        return found

    @property
    def model(self) -> nn.Module:
        """The trained model, loaded from its folder."""
        return load(self.out / "model")

    def card(self) -> Card:
        """The README of the model."""
        cell, rows = self.cell, self.row["rows"]
        ready = is_ready(cell.backbone.model)
        trained = {"all": "All of", "last_encoder": "The last encoder of", "head": "The last layer of"}
        method = self.notes.get("kept", cell.method.method)
        carries = None if ready else method_of(load(self.out / "model"))
        choice = {sentence.text for sentence in choice_verdict(self.notes, cell.method.uses_groups)[:1]}
        sentences = self.page().verdict
        before = _trained(self.against) if self.against == "erm" else f"training with {self.against}"
        kept = f"; it selected {NAMES.get(method, method)}" if method != cell.method.method else ""
        return Card(
            title=f"{name_of(cell.backbone.name)} trained with {cell.method.name}",
            done=(
                f"{trained[cell.backbone.train]} {name_of(cell.backbone.name)} was trained with {cell.method.name} "
                f"({method_named(cell.method.method).about}{kept}) to tell {', '.join(self.row['classes'])} apart: "
                f"{rows['train']} training rows, {rows['validation']} validation rows; the figures are for "
                f"{rows['test']} test rows. "
                f"{'Training used the groups.' if cell.method.trains_with_groups else 'Training saw no groups.'}"
                f"{f' It is compared with the same model after {before}.' if self.compared else ''}"
            ),
            findings=[one.text for one in sentences if one.tone != "note" or one.text in choice],
            data=cell.data.read,
            base=cell.backbone.model,
            before=f"after {before}",
            estimates=self.audit.estimates,
            were=self.compared.a.estimates if self.compared else (),
            changes=self.compared.differences if self.compared else (),
            limits=[one.text for one in sentences if one.tone == "note" and one.text not in choice],
            carries="a linear head on precomputed features" if ready else carries and type(carries).__name__,
        )

    def to_dict(self) -> dict[str, Any]:
        """The audit's JSON form, with the comparison if there is one."""
        found = self.audit.to_dict()
        return found if self.comparison is None else {**found, "comparison": self.comparison.to_dict()}

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """One row per figure: of the comparison where there is one, else of the audit."""
        return (self.comparison or self.audit).rows()

    def page(self, command: str = "") -> Report:
        """The run as a report."""
        cell, method, name = self.cell, self.cell.method, self.cell.method.name
        by = " and ".join(dict.fromkeys(e.group_by for e in self.audit.estimates if e.group_by is not None))
        question = f"Does {cell.backbone.name}, trained with {name} on {cell.data.name}, have gaps by {by}?"
        verdict, sections = audit_verdicts(self.audit), list[Section]()
        if not by:
            question = f"How accurate is {cell.backbone.name}, trained with {name}? {cell.data.name} has no groups."
        if self.compared is not None and self.against is not None:
            if by:
                trained = f"when trained with {name} than with {_trained(self.against)}"
                question = f"Does {cell.backbone.name} have smaller gaps by {by} {trained}?"
            title = f"{name} against {self.against}"
            sections = [Compared(title=title, comparison=self.compared, a_name=self.against, b_name=name)]
            alone = [s if s.tone == "note" else Sentence(f"{name}: {s.text}", s.tone) for s in verdict]
            verdict = [*comparison_verdicts(self.compared, (_trained(self.against), name)), *alone]
        elif self.comparison is not None:
            same = f"Both models are the same, because {name} selected plain training."
            verdict = [Sentence(same, "unclear"), *verdict]
        notes = [
            "This is one training run: the intervals cover the sampling of test rows, not the variation between seeds. "
            "Use fairhead bench to run several seeds."
        ]
        if by and len(self.row["classes"]) == 2:
            positive = self.row["classes"][-1]
            notes.append(
                f"The positive class is {positive}: the selection rate, TPR and FPR are of predicting {positive}."
            )
        how = [f"{name} used the groups in training"] if method.trains_with_groups else []
        if method.selection is not None:
            rows = "test rows, which is circular" if method.circular else "validation rows"
            how.append(f"The epoch of {name} was selected with the groups of the {rows}")
        if method.uses_groups:
            notes.append(f"{'. '.join(how)}. It shows what is possible with groups.")
        chosen = choice_verdict(self.notes, method.uses_groups)
        return Report(
            title=f"{name} on {cell.data.name}",
            question=question,
            verdict=[*verdict, *chosen, *(Sentence(note, "note") for note in notes)],
            sections=[
                *sections,
                Audited(title=f"Audit of {name}", name=name, audit=self.audit),
                *choice_section(self.notes, self.row["classes"]),
                Text(title="Training and its cost", text=_cost_text(self.row)),
            ],
            provenance={
                "command": command,
                "settings": json.dumps(self.row["settings"], default=str),
                **self.row["made_with"],
            },
        )


def _trained(method: str | None) -> str:
    """What a method is called in a sentence."""
    return "plain training" if method == "erm" else str(method)


def kept_plain(cell: Cell, row: Mapping[str, Any]) -> bool:
    """Whether balance, match or auto kept plain training, and not that of another method under it."""
    return row.get("notes", {}).get("kept") == "plain" and cell.method.options.get("under", "erm") == "erm"


def _cost_text(row: Mapping[str, Any]) -> str:
    cost = row["cost"]
    stages = ", ".join(f"{name} ({steps} steps, {seconds:.0f} s)" for name, seconds, steps in row["stages"])
    energy = "energy unknown"
    if cost["energy_wh"] is not None:
        source = "the GPU's energy counter" if cost["energy_counter_wh"] is not None else "integrated power"
        energy = f"{cost['energy_wh']:.2f} Wh by {source}"
    memory = cost["gpu_allocated_mib"]
    peak = f"{memory:.0f} MiB of GPU memory" if memory is not None else f"{cost['peak_rss_mib'] or 0:.0f} MiB resident"
    rows = row["rows"]
    return (
        f"{rows['train']} training rows, {rows['validation']} validation rows, {rows['test']} test rows; groups were "
        f"joined after training.\n\nStages: {stages}. Epoch {row['best_epoch']} was kept, with a validation accuracy "
        f"of {100 * row['validation_accuracy']:.1f} %.\n\n{cost['seconds']:.0f} s, {peak}, {energy}."
    )


def mitigate(
    cell: Cell,  # what to run
    out: Path | str,  # the folder
    # Another method, trained with the same seed, data and plan, to compare with; for auto, balance and match plain
    # training, where none is named
    against: str | None = None,
    device: str = "cpu",  # where
    cache: Path | None = None,  # folder for decoded pictures and frozen features
    tell: Tell | None = None,  # called as the work goes on
) -> Mitigated:
    """Train one method, and store the model, its records, the audit and a card.

    Writes `model/` (safetensors, with what loads its pictures or texts), `records.csv`, `audit.json` and `run.json`;
    with `against`, also `records-<method>.csv`, and the audit holds the paired comparison. A run that was killed goes
    on from its checkpoints when it is started again.
    """
    if against is None and cell.method.method in ("auto", "balance", "match") and not cell.method.uses_groups:
        against = "erm"
    cells = [cell] if against is None else [cell, replace(cell, method=Method(against, against))]
    check(cells)  # the second as well before the first is trained
    out = Path(out)
    checkpoints = out / "checkpoint"  # until the run has ended
    with written_by_first(out) as writes:
        refuse_others(out, "run.json")
        _refuse_another_run(out / "run.json", cell)

        def keep(trained: Trained, task: Task) -> None:
            if writes:
                with whole_folder(out / "model") as folder:
                    save_model(trained.model, task.kind, task.classes, cell, folder, task)

        try:
            done = run_cell(cell, device, cache, tell, checkpoints=checkpoints / "method", keep=keep)
        except TrainingDiverged as diverged:
            if writes:
                shutil.rmtree(checkpoints, ignore_errors=True)  # resuming would diverge again
                if _keep_last_good(diverged, cell, out / "model"):
                    raise TrainingDiverged(f"{diverged}. That epoch is kept in {out / 'model'}") from None
            raise
        if writes:
            done.records.save(out / "records.csv")
            write_json(out / "run.json", done.row)
        columns = list(done.records.groups)
        found, comparison, other = audit(done.records, group_by=columns), None, done.records
        if against is not None:
            # The plainly trained candidate is what would be trained once more.
            if against != "erm" or not kept_plain(cell, done.row):
                other = run_cell(cells[1], device, cache, tell, checkpoints=checkpoints / "against").records
            comparison = compare(other, done.records, group_by=columns)
        result = Mitigated(cell, done.row, found, comparison, against, out)
        if writes:
            if against is not None:
                other.save(out / f"records-{against}.csv")
            write_json(out / "audit.json", result.to_dict())
            result.card().write(out / "model")
            shutil.rmtree(checkpoints, ignore_errors=True)
    return result


def _refuse_another_run(before: Path, cell: Cell) -> None:
    """Raise before the training where a folder holds another run: its model may be the only copy."""
    if not before.is_file():
        return
    with reading(before, "is no row of a run: give another folder"):
        row = json.loads(before.read_text(encoding="utf-8"))
        other = row["fingerprint"] != fingerprint(cell) and f"{row['method']}, seed {row['seed']}"
    if other:
        raise InputError(f"{before.parent} holds another run ({other}): choose another folder, or remove this one")


def _keep_last_good(diverged: TrainingDiverged, cell: Cell, folder: Path) -> bool:
    """Write the classifier inside a model whose training diverged: of two networks the one that predicts."""
    inside = () if diverged.model is None else diverged.model.modules()
    classifier: Any = next((part for part in inside if hasattr(part, "save_pretrained")), None)
    if classifier is None or isinstance(classifier, LinearHead):
        return False
    kind = "image" if classifier.main_input_name == "pixel_values" else "text"
    try:
        with whole_folder(folder) as beside:
            save_model(classifier, kind, tuple(classifier.config.id2label.values()), cell, beside, diverged.task)
    except RuntimeError:  # the last layer of another model, such as a larger teacher: it has no place in this one
        return False
    return True


def save_model(
    model: nn.Module,  # as training left it: after last-encoder training, the last encoder alone
    kind: str,  # "image" or "text"
    classes: tuple[str, ...],  # names of the classes
    cell: Cell,  # what it was trained as
    folder: Path,  # where to
    task: Task | None = None,  # what it was trained on; needed where its last layer alone was trained
) -> None:
    """Write a trained model to a folder that `fairhead.load` gives back, with what makes its inputs ready."""
    recipe = recipe_of(cell, classes)
    rows = None if task is None else {part: task.published(part) for part in ("train", "validation")}
    trained_on = with_training_rows(None if recipe.place is None else recipe.name, rows)
    if is_ready(recipe.name):  # a linear head of features: nothing makes its inputs ready
        save(model.cpu(), folder, trained_on)
        return
    if kind == "text":
        assert recipe.place is not None
        tokenizer = tokenizer_of(recipe.place)
        # Later readers of the model then truncate texts as in training.
        tokenizer.model_max_length = text_length(config_of(recipe.place), cell.data.max_length)
        beside = tokenizer.save_pretrained
    else:
        beside = recipe.pictures().save
    whole = whole_model(model, kind, cell, recipe, None if task is None else task.validation)
    save(whole, folder, beside, trained_on)


def whole_model(trained: nn.Module, kind: str, cell: Cell, recipe: Recipe, rows: Examples | None = None) -> nn.Module:
    """The trained model; where a part alone was trained, with its frozen part before it again."""
    trained = trained.cpu()
    if isinstance(trained, LinearHead):
        assert rows is not None
        whole: nn.Module = recipe.build(kind, 0, head_only=True).eval()
        set_head(find_head(whole, rows), *trained.layer())
        return whole
    if cell.backbone.train != "last_encoder":
        return trained
    whole = recipe.build(kind, cell.seed)
    put_back(whole, trained)
    method = method_of(trained)
    if method is not None:
        plain = {name for name, _ in whole.named_children()}
        attach(whole, method)
        for name, module in trained.named_children():
            if name not in plain:
                # Not by `put_back`: the statistics of a method may have another shape than they began with.
                whole.get_submodule(name).load_state_dict(module.state_dict())
    return whole.eval()
