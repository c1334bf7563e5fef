"""Edits of at most 12 heads of CLIP B/16 on six questions about gender that were fixed beforehand.

    python benchmarks/six_questions.py --model clip-b16-vision --data DATA --out six --device cuda
    python benchmarks/six_questions.py --model clip-b16-vision --data DATA --out fresh --device cuda --fresh
    python benchmarks/six_questions.py --table six

DATA holds images/fairface_val5k.zip and images/celeba10k.zip. A question's rows are split in three: on 40 % of them a
probe is fitted that predicts the label from CLIP's output, on one half of the others heads and edits are chosen, and on
the other half they are reported. With `--fresh` they are reported on rows of CelebA that were never drawn, of persons
that are neither among the probe's rows nor in the selection half. Figures are written to OUT/<question>.json after each
step; each step is made for all questions before the next. `--table` prints the tables of
docs/results/locate-six-questions.md from such a folder.
"""

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from transformers import CLIPVisionModelWithProjection

from fairhead.locate.directions import Task, balanced_weights, concept_from_images, fit_logistic, task_from_images
from fairhead.locate.dose import find_dose
from fairhead.locate.edits import HeadEdits
from fairhead.locate.engine import effects
from fairhead.locate.gains import WEIGHTS, follow_gains, learn_gains, learn_told_gains
from fairhead.locate.gap_question import GapQuestion
from fairhead.locate.head_maps import Head, check_cells, top_heads
from fairhead.locate.locate_settings import LocatePlan, Source
from fairhead.locate.passes import RowPasses, matmul_precision
from fairhead.locate.rows import Evaluation, even_rows, halves_of, labelled_rows, shared_labels
from fairhead.locate.session import Session, open_session
from fairhead.locate.streams import stream_of
from fairhead.locate.studies import Edited, layer_matched, single_head_effects, study
from fairhead.models import save
from fairhead.models.inputs import RowInputs
from six_questions_table import METRICS, RULE, allowed_cost, print_tables

QUESTIONS = {  # data and label; the group is gender
    "race-by-gender": ("fairface", "race"),
    "age-by-gender": ("fairface", "age"),
    "smiling-by-male": ("celeba", "Smiling"),
    "attractive-by-male": ("celeba", "Attractive"),
    "wavy-hair-by-male": ("celeba", "Wavy_Hair"),
    "high-cheekbones-by-male": ("celeba", "High_Cheekbones"),
}
# Not among the six: to look at a rule without looking at them.
OTHERS = {
    "mouth-by-male": ("celeba", "Mouth_Slightly_Open"),
    "bags-by-male": ("celeba", "Bags_Under_Eyes"),
    "big-nose-by-male": ("celeba", "Big_Nose"),
    "pointy-nose-by-male": ("celeba", "Pointy_Nose"),
    "oval-face-by-male": ("celeba", "Oval_Face"),
}
STEPS = ("baselines", "told", "gains", "doses", "learned controls")
DATA = {"fairface": ("images/fairface_val5k.zip", 5000), "celeba": ("images/celeba10k.zip", 6000)}
FIGURES = ("accuracy", "EOd", "DP", "cramers_v", "cramers_v_excess", "evidence_gap")
PLAN = LocatePlan(count=12, draws=100, n_boot=1000, exact=32, per_layer=4, kinds=("mean",))
Batches = Callable[[NDArray[np.intp]], Iterable[Mapping[str, torch.Tensor]]]


class Question(GapQuestion):
    """A question that keeps what its passes have read: doses for two metrics and two targets try the same edits."""

    def forward(self, rows: NDArray[np.intp], kind: str) -> Edited:
        """Logits of some rows, by the model itself."""
        if kind == "gain":  # differs from one copy of the question to the next
            return super().forward(rows, kind)
        kept: dict[Any, Edited] = self.__dict__.setdefault("kept", {})
        if (rows.tobytes(), kind) not in kept:
            kept[rows.tobytes(), kind] = super().forward(rows, kind)
        return kept[rows.tobytes(), kind]


def on_device(inputs: RowInputs) -> Batches:
    """Batches of some rows, from the pixels of all: each image is decoded once."""
    pixels = torch.cat([batch["pixel_values"] for batch in inputs.batches()])

    def batches(rows: NDArray[np.intp]) -> Iterator[Mapping[str, torch.Tensor]]:
        for some in torch.as_tensor(rows, device=pixels.device).split(inputs.batch_size):
            yield {"pixel_values": pixels[some]}

    return batches


def fresh_rows(rows: Evaluation, drawn: NDArray[np.intp], known: NDArray[np.intp]) -> NDArray[np.intp]:
    """Rows that were not drawn, of persons that are not among the known rows: as many of each group as can be."""
    assert rows.clusters is not None
    new = ~np.isin(np.arange(len(rows)), drawn) & ~np.isin(rows.clusters, rows.clusters[known])
    left = np.flatnonzero(new)
    return even_rows(left, rows.groups, 2 * int(np.bincount(rows.groups[left]).min()))


def ask(session: Session, batches: Batches, drawn: NDArray[np.intp] | None = None) -> tuple[Question, Task]:
    """The question, with a probe fitted on rows of its own, and a probe fitted on them with balanced weights.

    Of the rows that were `drawn` for the question, one half of those that are not the probe's are reported; but if the
    session has others, those that are fresh are.
    """
    everything, classes = session.evaluation, session.evaluation.classes
    drawn = np.arange(len(everything)) if drawn is None else drawn
    order, n = np.random.default_rng(0).permutation(len(drawn)), int(0.4 * len(drawn))
    probe, rest = drawn[np.sort(order[:n])], drawn[np.sort(order[n:])]
    x, y = np.asarray(session.features.output[probe], dtype=np.float64), everything.labels[probe]
    task = task_from_images(x, y, classes)
    balanced = Task(classes, *fit_logistic(x, y, len(classes), weights=balanced_weights(x, y)[0]), "balanced probe")
    choosing = halves_of(everything.take(rest), 0)
    if len(drawn) < len(everything):
        learned = rest[choosing]
        rest = np.concatenate([learned, fresh_rows(everything, drawn, np.concatenate([probe, learned]))])
        choosing = np.arange(len(rest)) < len(learned)
    features, rows = session.features.take(rest), everything.take(rest)
    chosen = rows.take(choosing)
    labels = shared_labels(chosen)
    how: dict[str, Any] = {"name": rows.group_by, "poles": rows.poles, "method": "leace"}
    concept = concept_from_images(features.output[choosing], chosen.groups, labels, **how)
    seen = batches(rest[choosing])
    cells = check_cells(chosen.groups, labels, rows.poles)
    everywhere = HeadEdits.learn_everywhere(session.decomposer, seen, cells)
    passes = RowPasses(session.decomposer, lambda some: batches(rest[some]), task, everywhere, tf32=True)
    return Question(features, rows, task, concept, choosing=choosing, passes=passes), balanced


def figures(rows: Evaluation, reads: Sequence[NDArray[np.float64]]) -> dict[str, list[float]]:
    return {name: [float(x) for x in values] for name, values in rows.figures(reads).items() if name in FIGURES}


def rank(question: Question, kind: str) -> tuple[tuple[Head, ...], NDArray[np.float64]]:
    """At most 12 heads by the effect of one kind of edit on the selection half, and the effects of all, [L, H]."""
    rows = question.choosing & question.comparable
    found, exact = effects(question, rows, PLAN, kind)
    run = np.ones(question.shape, dtype=bool)
    if exact is not None:  # an estimate alone chooses no head
        run = np.zeros(question.shape, dtype=bool)
        run[tuple(np.transpose(exact))] = True
    ranks = question.scores(found, rows, replace(PLAN, rank="effect")).rank
    return top_heads(np.where(run, ranks, -1), np.zeros(question.shape), 12, per_layer=4), found.gap


def against_controls(
    session: Session, question: Question, heads: Sequence[Head], kind: str, draws: int
) -> dict[str, Any]:
    """The edit against heads of the same layers; and saved, read again with plain transformers, and audited again."""
    told, edited = question.rows.take(question.reported), question.forward(question.reported, kind)
    sets = layer_matched(heads, question.shape[1], draws=draws)
    found = study(edited, heads, told, sets, PLAN, kind, "forward")
    model = copy.deepcopy(session.inputs.model)
    assert question.passes is not None
    assert question.passes.everywhere is not None
    question.passes.everywhere.bake(stream_of(model).base, heads, kind)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), matmul_precision(question.passes.in_tf32):
        save(model, folder, session.inputs.beside.save_pretrained)
        loaded = CLIPVisionModelWithProjection.from_pretrained(folder, use_safetensors=True).eval().to(model.device)
        read = [loaded(**batch).image_embeds.cpu() for batch in question.passes.batches(question.reported)]
    again = question.task.logits(torch.nn.functional.normalize(torch.cat(read).double(), dim=-1).numpy())
    return {
        "controls": {
            a.change.metric: {"percentile": a.percentile, "n": len(a.controls), "exhaustive": a.exhaustive}
            for a in found.ablations
        },
        "saved": {
            "largest difference of a logit": float(np.abs(again - found.after).max()),
            "predictions that differ": int((again.argmax(1) != found.after.argmax(1)).sum()),
            "figures": figures(told, [found.after, again]),
        },
    }


class Run:
    """The steps of one question, each written as soon as it is made."""

    def __init__(self, name: str, session: Session, batches: Batches, how: argparse.Namespace, drawn: Any) -> None:
        self.session, self.how, self.file = session, how, how.out / f"{name}.json"
        self.question, self.balanced = ask(session, batches, drawn)
        self.told = self.question.rows.take(self.question.reported)
        self.result: dict[str, Any] = {"question": name, "rows": len(self.question.rows), "reported": len(self.told)}
        self.result |= {"doses": {}, "told": {}}

    def write(self) -> None:
        """What there is so far."""
        self.file.write_text(json.dumps(self.result, indent=1))

    def baselines(self) -> Iterator[str]:
        """The balanced last layer, and erasure at the output."""
        question, output = self.question, self.question.features.output[self.question.reported]
        logits = [question.task.logits(output), self.balanced.logits(output)]
        erased = {kind: question.at_output(kind) for kind in ("project", "splince")}
        done = {kind: figures(self.told, edit([(), ((0, 0),)])) for kind, edit in erased.items() if edit is not None}
        self.result |= {"balanced_last_layer": figures(self.told, logits), "output": done}
        yield ""

    def could_meet(self, gap: Mapping[str, float], accuracy: Mapping[str, float]) -> bool:
        """Whether controls decide: an edit that does not halve the gap, or costs too much, fails anyway."""
        return abs(gap["b"]) <= 0.5 * abs(gap["a"]) and -accuracy["value"] <= allowed_cost(self.result)

    def doses(self) -> Iterator[str]:
        """The cheapest edit that reaches the target on the selection half; that of the rule with controls."""
        ranked, effect = rank(self.question, self.how.rank_by)
        self.result |= {"ranked": [list(head) for head in ranked], "effect": effect.tolist()}
        strengths = [k / 10 for k in range(1, 11)] if self.how.fine else (0.5, 1.0)
        counts = range(1, 13) if self.how.fine else (1, 2, 4, 8, 12)
        for target, metric in product((RULE, 0.5), METRICS):
            plan = replace(PLAN, target=target, target_metric=metric)
            found = find_dose(self.question, ranked, plan, gains=False, strengths=strengths, counts=counts)
            result, chosen = found.to_dict() | {"sentence": found.sentence}, found.chosen
            self.result["doses"][f"{metric} {target}"] = result
            if chosen is not None and target == RULE:
                told = {d["metric"]: d for d in result["chosen"]["reported"]}
                if self.could_meet(told[metric], told["accuracy"]):
                    result |= against_controls(self.session, self.question, chosen.heads, chosen.kind, self.how.draws)
            yield f"{metric} {target}"

    def read(self, values: NDArray[np.float64], heads: Sequence[Head]) -> Sequence[NDArray[np.float64]]:
        """Logits of the reporting half before and after gains."""
        return self.question.with_gains(values).forward(self.question.reported, "gain")([(), heads])

    def reported(self, values: NDArray[np.float64], heads: Sequence[Head], metrics: Sequence[str]) -> dict[str, Any]:
        """Gains on the reporting half, with controls where they decide."""
        before, after = self.read(values, heads)
        changes = {d.metric: d.to_dict() for d in self.told.compare(before, after, PLAN).differences}
        gained = [[*map(int, head), float(values[head])] for head in heads]
        result: dict[str, Any] = {"heads": gained, "changes": changes, "random": []}
        if any(self.could_meet(changes[metric], changes["accuracy"]) for metric in metrics):
            edited = self.question.with_gains(values)
            assert isinstance(edited, Question)
            result |= against_controls(self.session, edited, heads, "gain", self.how.draws)
        return result

    def gains(self) -> Iterator[str]:
        """Gains learned with clusters balanced."""
        found = learn_gains(self.question, 12)
        self.result["gains"] = {"heads": []}
        if found.heads:
            self.result["gains"] = self.reported(found.values, found.heads, METRICS)
        yield ""

    def told_gains(self) -> Iterator[str]:
        """Gains learned against each gap, told the groups of the selection half."""
        at = np.flatnonzero(self.question.choosing)
        for metric in METRICS:
            found = learn_told_gains(self.question, replace(PLAN, target=0.5, target_metric=metric))
            names = ("weight", "before", "gap", "upper", "accuracy", "reached", "sentence")
            result: dict[str, Any] = {name: getattr(found, name) for name in names} | {"heads": []}
            if found.reached:
                there = self.question.with_gains(found.values).forward(at, "gain")([(), found.heads])
                result["choosing"] = figures(self.question.rows.take(at), there)
                result |= self.reported(found.values, found.heads, [metric])
            self.result["told"][metric] = result
            yield metric

    def learned_controls(self) -> Iterator[str]:
        """Sets of heads of the same layers, whose own gains are learned, for the gains that have other controls."""
        edits = [("gains", None, self.result.get("gains", {}))]
        edits += [(f"told {metric}", metric, found) for metric, found in self.result["told"].items()]
        for name, metric, found in edits:
            heads = [Head(layer, head) for layer, head, _ in found.get("heads", ())] if "controls" in found else []
            sets = layer_matched(heads, self.question.shape[1], draws=self.how.gain_draws).sets if heads else ()
            for control in sets[: self.how.gain_draws]:
                if metric is None:
                    values = learn_gains(self.question, heads=control, rounds=2).values
                else:
                    plan = replace(PLAN, target=0.5, target_metric=metric)
                    steps = [weight for weight in WEIGHTS if weight <= found["weight"]]
                    *_, (values, _) = follow_gains(self.question, plan, control, steps)
                found["random"].append(figures(self.told, self.read(values, control)))
                yield f"{name} {len(found['random'])}"


def run(runs: Sequence[Run], arguments: argparse.Namespace, started: float) -> None:
    """All steps of all questions; what would begin after the budget is spent is left out, and said."""
    makers = (Run.baselines, Run.told_gains, Run.gains, Run.doses, Run.learned_controls)
    for (name, make), one in product(zip(STEPS, makers, strict=True), runs):
        if name not in arguments.steps:
            continue
        steps = make(one)
        while True:
            if time.monotonic() - started > arguments.budget:
                print(f"{one.file.stem}: no time for {name}", flush=True)
                break
            done = next(steps, None)
            if done is None:
                break
            one.write()
            print(f"{one.file.stem}: {name} {done} done at {time.monotonic() - started:.0f} s", flush=True)


def timing(session: Session, batches: Batches, out: Path) -> None:
    """Seconds of a plain pass, of the decomposition and of `effect` of every head, estimated and exact, all in TF32."""
    question, _ = ask(session, batches)
    assert question.passes is not None
    everything, seconds = np.arange(len(session.evaluation)), {}
    passes = replace(question.passes, batches=batches)
    rows = replace(session.evaluation, positive=question.rows.positive, sign=question.rows.sign)

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        with matmul_precision(passes.in_tf32), torch.no_grad():
            found = call()
        seconds[name] = time.perf_counter() - start
        return found

    for _ in range(2):  # the first warms up
        timed("plain_pass_s", lambda: [session.decomposer.outputs(b).cpu() for b in batches(everything)])
        timed("decomposition_s", lambda: [session.decomposer(b).output.cpu() for b in batches(everything)])
    slope = [lambda output: question.task.slope(output, question.rows.positive)]
    lost = timed("estimate_s", lambda: passes.estimate(everything, question.edits, "mean", slope).lost[..., 0])
    edited = passes(everything, question.edits, "mean")
    exact = timed("effect_exact_s", lambda: single_head_effects(edited, question.shape, rows))
    agreement = stats.spearmanr(rows.score(lost, lost.sum((1, 2))).gap.ravel(), exact.gap.ravel()).statistic
    result = {"rows": len(everything), "heads": int(exact.gap.size), "spearman": float(agreement), **seconds}
    (out / "timing.json").write_text(json.dumps(result, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of CLIP's image tower with its projection")
    parser.add_argument("--data", type=Path, help="folder with images/")
    parser.add_argument("--out", type=Path, default=Path("six"), help="folder for the results")
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS | OTHERS, metavar="NAME", help="default: the six")
    parser.add_argument("--fresh", action="store_true", help="report on rows of CelebA that were never drawn")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="those to make, as far as time goes")
    parser.add_argument("--rows", type=int, help="images that are drawn of a data set at most")
    parser.add_argument("--fresh-rows", type=int, help="images with those that are fresh at most, to try it")
    parser.add_argument("--draws", type=int, default=100, help="control sets of an edit")
    parser.add_argument("--gain-draws", type=int, default=2, help="control sets whose gains are learned as well")
    parser.add_argument("--rank-by", choices=("mean", "project", "splince"), default="mean", help="edit of one head")
    parser.add_argument("--fine", action="store_true", help="doses of ten strengths and of 1 to 12 heads")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no step begins")
    parser.add_argument("--timing", action="store_true", help="time `effect` on the first question's rows instead")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the tables of a folder of results")
    arguments = parser.parse_args()
    if arguments.table is not None:
        print_tables(arguments.table, list(QUESTIONS | OTHERS))
        return
    if arguments.model is None or arguments.data is None:
        parser.error("--model and --data are needed")
    started = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    asked = {name: (QUESTIONS | OTHERS)[name] for name in arguments.questions or QUESTIONS}
    if arguments.fresh:  # all of FairFace was drawn
        asked = {name: question for name, question in asked.items() if question[0] == "celeba"}
    pixels: dict[str, Batches] = {}  # of a data set, for all its labels
    runs = []
    with tempfile.TemporaryDirectory() as features:
        for name, (data, label) in asked.items():
            file, rows = DATA[data]
            limit = min(rows, arguments.rows or rows)
            how: dict[str, Any] = {"limit": limit, "device": arguments.device, "batch_size": 256, "tf32": True}
            source = Source(arguments.model, f"{data}:{arguments.data / file}", "gender", label, **how)
            drawn = None
            if arguments.fresh:
                known, source = labelled_rows(source).evaluation, replace(source, limit=arguments.fresh_rows)
            session = open_session(source, f"{features}/{data}")
            if arguments.fresh:
                drawn = np.flatnonzero(np.isin(np.asarray(session.evaluation.ids), np.asarray(known.ids)))
            if data not in pixels:
                pixels[data] = on_device(session.inputs)
            print(f"{name}: {len(session.evaluation)} rows read at {time.monotonic() - started:.0f} s", flush=True)
            if arguments.timing:
                timing(session, pixels[data], arguments.out)
                return
            runs.append(Run(name, session, pixels[data], arguments, drawn))
        run(runs, arguments, started)


if __name__ == "__main__":
    main()
