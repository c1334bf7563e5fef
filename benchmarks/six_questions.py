"""Edits of at most 12 heads of CLIP B/16 on six questions about gender that were fixed beforehand.

    python benchmarks/six_questions.py --model clip-b16-vision --data DATA --out six --device cuda
    python benchmarks/six_questions.py --table six

DATA holds images/fairface_val5k.zip and images/celeba10k.zip. A question's rows are split in three: on 40 % of them a
probe is fitted that predicts the label from CLIP's output, on one half of the others heads and edits are chosen, and on
the other half they are reported. Figures are written to OUT/<question>.json after each step. `--table` prints the
tables of docs/results/locate-six-questions.md from such a folder.
"""

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from transformers import CLIPVisionModelWithProjection

from fairhead.locate.directions import Task, balanced_weights, concept_from_images, fit_logistic, task_from_images
from fairhead.locate.dose import find_dose, learn_gains
from fairhead.locate.edits import HeadEdits
from fairhead.locate.engine import effects
from fairhead.locate.gap_question import GapQuestion
from fairhead.locate.head_maps import Head, top_heads
from fairhead.locate.locate_settings import LocatePlan, Source
from fairhead.locate.passes import RowPasses, matmul_precision
from fairhead.locate.rows import Evaluation, halves_of, shared_labels
from fairhead.locate.session import Session, open_session
from fairhead.locate.streams import stream_of
from fairhead.locate.studies import Edited, layer_matched, single_head_effects, study
from fairhead.models import save
from fairhead.models.inputs import RowInputs
from six_questions_table import METRICS, RULE, print_tables

QUESTIONS = {  # data and label; the group is gender
    "race-by-gender": ("fairface", "race"),
    "age-by-gender": ("fairface", "age"),
    "smiling-by-male": ("celeba", "Smiling"),
    "attractive-by-male": ("celeba", "Attractive"),
    "wavy-hair-by-male": ("celeba", "Wavy_Hair"),
    "high-cheekbones-by-male": ("celeba", "High_Cheekbones"),
}
DATA = {"fairface": ("images/fairface_val5k.zip", 5000), "celeba": ("images/celeba10k.zip", 6000)}
FIGURES = ("accuracy", "EOd", "DP", "cramers_v", "evidence_gap")
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


def ask(session: Session, batches: Batches) -> tuple[Question, Task]:
    """The question, with a probe fitted on rows of its own, and a probe fitted on them with balanced weights."""
    n, classes = len(session.evaluation), session.evaluation.classes
    order = np.random.default_rng(0).permutation(n)
    probe, rest = order[: int(0.4 * n)], np.sort(order[int(0.4 * n) :])
    x = np.asarray(session.features.output[np.sort(probe)], dtype=np.float64)
    y = session.evaluation.labels[np.sort(probe)]
    task = task_from_images(x, y, classes)
    balanced = Task(classes, *fit_logistic(x, y, len(classes), weights=balanced_weights(x, y)[0]), "balanced probe")
    features, rows = session.features.take(rest), session.evaluation.take(rest)
    choosing = halves_of(rows, 0)
    chosen = rows.take(choosing)
    labels = shared_labels(chosen)
    how: dict[str, Any] = {"name": rows.group_by, "poles": rows.poles, "method": "leace"}
    concept = concept_from_images(features.output[choosing], chosen.groups, labels, **how)
    seen = batches(rest[choosing])
    everywhere = HeadEdits.learn_everywhere(session.decomposer, seen, chosen.groups, labels, rows.poles)
    passes = RowPasses(session.decomposer, lambda some: batches(rest[some]), task, everywhere, tf32=True)
    return Question(features, rows, task, concept, choosing=choosing, passes=passes), balanced


def figures(rows: Evaluation, reads: Sequence[NDArray[np.float64]]) -> dict[str, list[float]]:
    return {name: [float(x) for x in values] for name, values in rows.figures(reads).items() if name in FIGURES}


def rank(question: Question, kind: str) -> tuple[tuple[Head, ...], NDArray[np.float64]]:
    """At most 12 heads by the effect of one kind of edit on the choosing half, and the effects of all, [L, H]."""
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


def dose(
    session: Session, question: Question, ranked: Sequence[Head], plan: LocatePlan, draws: int, fine: bool
) -> Iterator[dict[str, Any]]:
    """The cheapest edit that reaches the target on the choosing half; that of the rule with controls."""
    strengths = [k / 10 for k in range(1, 11)] if fine else (0.5, 1.0)
    counts = range(1, 13) if fine else (1, 2, 4, 8, 12)
    found = find_dose(question, ranked, plan, strengths=strengths, counts=counts)
    result, chosen = found.to_dict() | {"sentence": found.sentence}, found.chosen
    if chosen is not None and plan.target == RULE:
        result |= against_controls(session, question, chosen.heads, chosen.kind, draws)
    yield {f"{plan.target_metric} {plan.target}": result}


def gains(session: Session, question: Question, draws: int, gain_draws: int) -> Iterator[dict[str, Any]]:
    """Gains of at most 12 heads, learned without groups; random heads with the same gains, and with gains learned.

    Gives what is known so far, after each set of random heads.
    """
    told, found = question.rows.take(question.reported), learn_gains(question, 12)

    def read(values: NDArray[np.float64], heads: Sequence[Head]) -> Sequence[NDArray[np.float64]]:
        return question.with_gains(values).forward(question.reported, "gain")([(), heads])

    before, after = read(found.values, found.heads)
    changes = told.compare(before, after, PLAN).differences
    result: dict[str, Any] = {
        "heads": [[*head, float(found.values[head])] for head in found.heads],
        "changes": {d.metric: d.to_dict() for d in changes},
        "random": [],
    }
    if found.heads:
        edited = question.with_gains(found.values)
        assert isinstance(edited, Question)
        result |= against_controls(session, edited, found.heads, "gain", draws)
        yield result
        for control in layer_matched(found.heads, question.shape[1], draws=max(1, gain_draws)).sets[:gain_draws]:
            other = learn_gains(question, heads=control, rounds=2)
            result["random"].append(figures(told, read(other.values, other.heads)))
            yield result
    yield result


def run(name: str, session: Session, batches: Batches, arguments: argparse.Namespace, started: float) -> None:
    """All steps of one question; those that would begin after the budget is spent are left out, and said."""
    question, balanced = ask(session, batches)
    told, output = question.rows.take(question.reported), question.features.output[question.reported]
    result: dict[str, Any] = {"question": name, "rows": len(question.rows), "reported": len(told)}

    def step(what: str, into: dict[str, Any], make: Callable[[], Iterable[dict[str, Any]]]) -> None:
        if time.monotonic() - started > arguments.budget:
            print(f"{name}: no time for {what}", flush=True)
            return
        for found in make():
            into |= found
            (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=1))
        print(f"{name}: {what} done at {time.monotonic() - started:.0f} s", flush=True)

    def baselines() -> Iterator[dict[str, Any]]:
        erased = {kind: question.at_output(kind) for kind in ("project", "splince")}
        yield {
            "balanced_last_layer": figures(told, [question.task.logits(output), balanced.logits(output)]),
            "output": {kind: figures(told, edit([(), ((0, 0),)])) for kind, edit in erased.items() if edit is not None},
        }

    step("baselines", result, baselines)
    ranked, effect = rank(question, arguments.rank_by)
    result |= {"ranked": [list(head) for head in ranked], "effect": effect.tolist(), "doses": {}}
    for metric, target in product(METRICS, (RULE, 0.5)):
        plan = replace(PLAN, target=target, target_metric=metric)
        how = ranked, plan, arguments.draws, arguments.fine
        step(f"{metric} {target}", result["doses"], partial(dose, session, question, *how))
    found = gains(session, question, arguments.draws, arguments.gain_draws)
    step("gains", result, lambda: ({"gains": so_far} for so_far in found))


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
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=list(QUESTIONS), metavar="NAME")
    parser.add_argument("--rows", type=int, help="images of a data set at most")
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
        print_tables(arguments.table, list(QUESTIONS))
        return
    if arguments.model is None or arguments.data is None:
        parser.error("--model and --data are needed")
    started = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as features:  # of one data set for all its labels
        for name in arguments.questions[: 1 if arguments.timing else None]:
            data, label = QUESTIONS[name]
            file, rows = DATA[data]
            limit = min(rows, arguments.rows or rows)
            how: dict[str, Any] = {"limit": limit, "device": arguments.device, "batch_size": 256, "tf32": True}
            source = Source(arguments.model, f"{data}:{arguments.data / file}", "gender", label, **how)
            session = open_session(source, f"{features}/{data}")
            batches = on_device(session.inputs)
            if arguments.timing:
                timing(session, batches, arguments.out)
            else:
                run(name, session, batches, arguments, started)


if __name__ == "__main__":
    main()
