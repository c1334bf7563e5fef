"""Edits of at most 12 heads of CLIP B/16 on six questions about gender, on new random splits by person.

    python benchmarks/six_questions.py --model clip-b16-vision --data DATA --work WORK --prepare --device cuda
    python benchmarks/six_questions.py --model clip-b16-vision --data DATA --work WORK --split 0 --out six --device cuda
    python benchmarks/six_questions.py --table six

DATA holds images/celeba10k.zip and images/fairface_val5k.zip. `--prepare` decodes the images once and reads the model's
outputs into WORK; one process for each split then waits for it. A split divides the rows by person in three: a quarter
for a probe that predicts the label from CLIP's output, three eighths on which gains of heads are learned and their
strength is chosen, and three eighths on which they are reported. Figures are written to OUT/split-<number>.json after
each step, and a run that finds such a file goes on from there. Learning and controls run in 16 bits, what is reported
in TF32. `--table` prints the tables of docs/results/locate-six-questions.md.
"""

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import CLIPVisionModelWithProjection

from fairhead.heads import Site, tap
from fairhead.locate.decompose import Decomposer
from fairhead.locate.directions import Task, balanced_weights, fit_logistic, task_from_images
from fairhead.locate.edits import HeadEdits
from fairhead.locate.gains import learn_gains, learn_group_aware_gains
from fairhead.locate.gap_question import GapQuestion
from fairhead.locate.head_features import Features, HeadMoments
from fairhead.locate.head_maps import Head
from fairhead.locate.locate_settings import LocatePlan, Source
from fairhead.locate.passes import Estimated, RowPasses, matmul_precision
from fairhead.locate.rows import Evaluation, comparable_rows, labelled_rows
from fairhead.locate.streams import stream_of
from fairhead.locate.studies import layer_matched
from fairhead.models import save
from fairhead.models.inputs import ImageInputs
from six_questions_table import meets, print_tables

# Data, label, and the gap that told gains are to halve; the group is gender. The last is fixed beforehand: EOd where
# the group goes along with the label, V for Smiling (whose EOd is within its noise), and for more classes the V whose
# value by chance is 0.
QUESTIONS = {
    "smiling-by-male": ("celeba", "Smiling", "cramers_v"),
    "high-cheekbones-by-male": ("celeba", "High_Cheekbones", "EOd"),
    "attractive-by-male": ("celeba", "Attractive", "EOd"),
    "wavy-hair-by-male": ("celeba", "Wavy_Hair", "EOd"),
    "race-by-gender": ("fairface", "race", "cramers_v_corrected"),
    "age-by-gender": ("fairface", "age", "cramers_v_corrected"),
}
DATA = {"celeba": ("images/celeba10k.zip", 8000), "fairface": ("images/fairface_val5k.zip", 5000)}
FIGURES = ("accuracy", "EOd", "DP", "cramers_v", "cramers_v_corrected", "cramers_v_excess", "evidence_gap")
PLAN = LocatePlan(count=12, draws=100, n_boot=1000, per_layer=4, kinds=("gain",), target=0.5)
PARTS = (0.25, 0.625)  # where the probe's rows end, and the rows that edits are chosen on
MEAN, STD = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))  # of CLIP's pixels
_CHUNK = 10  # control sets between two looks at the time
_SCALE = 128.0  # of gradients in 16 bits, so that small ones are not lost


class HalfPasses(RowPasses):
    """Passes that learn in 16 bits on a GPU, where gradients of the first rows are then those of TF32."""

    trusted: ClassVar[list[bool]] = []

    def estimate(self, rows: Any, edits: Any, kind: Any, slopes: Any, where: Any = (), now: str = "gain") -> Estimated:
        """As ever, with gradients scaled."""
        if slopes and not self.trusted:
            first = rows[:256]
            one, other = (
                self._half(first, edits, slopes, where).lost,
                super().estimate(first, edits, kind, slopes, where).lost,
            )
            agreement = np.corrcoef(one.ravel(), other.ravel())[0, 1]
            self.trusted.append(bool(agreement > 0.99))
            print(f"gradients in 16 bits: correlation {agreement:.5f} with TF32", flush=True)
        if slopes and not self.trusted[0]:
            return super().estimate(rows, edits, kind, slopes, where, now)
        found = self._half(rows, edits, slopes, where)
        finite = np.isfinite(found.lost).all() and np.isfinite(found.output).all()
        return found if finite else super().estimate(rows, edits, kind, slopes, where, now)

    def _half(self, rows: Any, edits: Any, slopes: Any, where: Any) -> Estimated:
        scaled = [lambda output, slope=slope: _SCALE * slope(output) for slope in slopes]
        with half(self.fast):
            found = super().estimate(rows, edits, "mean", scaled, where, "gain")
        return found._replace(lost=found.lost / _SCALE)


def half(wanted: bool) -> Any:
    """Inside, products are in 16 bits."""
    return torch.autocast("cuda" if wanted else "cpu", torch.float16, enabled=wanted)


class Question(GapQuestion):
    """A question of gains alone: it needs outputs of rows and passes, and no stored terms of heads."""

    def __init__(
        self, output: Any, rows: Evaluation, task: Task, choosing: Any, passes: RowPasses, shape: tuple[int, int]
    ) -> None:
        empty = np.zeros((len(rows), *shape, 0), dtype=np.float32)
        one, maps = np.ones((len(rows), shape[0]), dtype=np.float32), np.zeros((*shape, 0, 0), dtype=np.float32)
        self.features = Features(empty, empty, output, one, maps)
        self.task, self.choosing, self.passes, self.notes = task, choosing, passes, ()
        self.comparable, _ = comparable_rows(rows, choosing)
        assert passes.everywhere is not None
        self.rows, self.edits, self.parts = rows, passes.everywhere, empty.sum(-1)


class Prepared:
    """A data set: pixels of all rows as bytes, CLIP's outputs, and the mean of each head over an image's tokens."""

    def __init__(self, name: str, how: argparse.Namespace) -> None:
        file, rows = DATA[name]
        self.folder, self.how, self.data = how.work / name, how, f"{name}:{how.data / file}"
        self.limit = min(rows, how.rows or rows)
        first = labelled_rows(self.source(next(q[1] for q in QUESTIONS.values() if q[0] == name)))
        self.inputs = ImageInputs(how.model, first.items, how.batch, how.device)
        self.decomposer = Decomposer(self.inputs.model)
        self.shape = (self.decomposer.n_layers, self.decomposer.n_heads)

    def source(self, label: str) -> Source:
        """What is read of the data: the same rows for each label."""
        return Source(self.how.model, self.data, "gender", label, limit=self.limit, device=self.how.device)

    def write(self) -> None:
        """Decode every image, and run the model over them once, in 32 bits."""
        self.folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, list[Any]] = {"pixels": [], "output": [], "means": []}
        model, now = tap(self.decomposer.stream.base), list[torch.Tensor]()
        mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (MEAN, STD))

        def watch(x: torch.Tensor, site: Site) -> torch.Tensor:  # [B, T, H, d]
            now.append(x.double().mean(1).float())
            return x

        with torch.no_grad(), model as heads:
            heads.edit([(s.layer, h) for s in heads.sites for h in range(s.n_heads)], watch)
            for batch in self.inputs.batches():
                now.clear()
                found["output"].append(self.decomposer.outputs(batch).float().cpu().numpy())
                found["means"].append(torch.stack(now, 1).cpu().numpy())
                bytes_of = ((batch["pixel_values"].cpu() * std + mean) * 255).round().clamp(0, 255)
                found["pixels"].append(bytes_of.to(torch.uint8).numpy())
        for name, parts in found.items():
            np.save(self.folder / f"{name}.npy", np.concatenate(parts))
        (self.folder / "ready").touch()

    def read(self) -> None:
        """Wait for what another process prepares."""
        while not (self.folder / "ready").exists():
            time.sleep(0.5)
        self.output, self.means = (np.load(self.folder / f"{name}.npy") for name in ("output", "means"))
        device = self.decomposer.maps.device
        self.pixels = torch.from_numpy(np.load(self.folder / "pixels.npy")).to(device)
        self.middle, self.width = (torch.tensor(x, device=device).view(-1, 1, 1) for x in (MEAN, STD))

    def batches(self, rows: NDArray[np.intp]) -> Iterator[Mapping[str, torch.Tensor]]:
        """The model's inputs for some rows."""
        for some in torch.as_tensor(rows, device=self.pixels.device).split(self.how.batch):
            yield {"pixel_values": (self.pixels[some].float() / 255 - self.middle) / self.width}

    def everywhere(self, rows: NDArray[np.intp], evaluation: Evaluation) -> HeadEdits:
        """The mean of each head over all tokens, every cell of label and group counting the same.

        Gains need nothing else: second moments are those of a unit covariance.
        """
        cells, x = evaluation.cells, self.means[rows]
        first = np.stack([x[cells.cell == c].sum(0, dtype=np.float64) for c in range(len(cells.counts))])
        n = np.bincount(cells.cell, minlength=len(first)).astype(np.int64)
        mean = first / n[:, None, None, None]
        second = n[:, None, None, None, None] * (mean[..., None] * mean[..., None, :] + np.eye(x.shape[-1]))
        return HeadEdits.of_moments(HeadMoments(n, first, second), len(rows))

    def ask(self, label: str, split: int) -> tuple[Question, Task]:
        """The question of one split, and a probe that was fitted on the same rows with balanced weights."""
        rows = labelled_rows(self.source(label)).evaluation
        units = np.arange(len(rows)) if rows.clusters is None else rows.clusters
        names = np.unique(units)
        place = np.empty(len(names))
        place[np.random.default_rng(split).permutation(len(names))] = (np.arange(len(names)) + 0.5) / len(names)
        part = np.searchsorted(PARTS, place[np.searchsorted(names, units)])
        probe, rest = np.flatnonzero(part == 0), np.flatnonzero(part > 0)
        x, y = np.asarray(self.output[probe], dtype=np.float64), rows.labels[probe]
        task = task_from_images(x, y, rows.classes)
        weights = balanced_weights(x, y)[0]
        balanced = Task(rows.classes, *fit_logistic(x, y, len(rows.classes), weights=weights), "balanced probe")
        kept, choosing = rows.take(rest), part[rest] == 1
        seen, _ = comparable_rows(kept, choosing)
        learning = np.flatnonzero(choosing & seen)
        everywhere = self.everywhere(rest[learning], kept.take(learning))
        passes = HalfPasses(self.decomposer, lambda some: self.batches(rest[some]), task, everywhere, tf32=True)
        return Question(self.output[rest], kept, task, choosing, passes, self.shape), balanced


def figures(rows: Evaluation, reads: Sequence[NDArray[np.float64]]) -> dict[str, list[float]]:
    """Some figures of several logits."""
    return {name: [float(x) for x in values] for name, values in rows.figures(reads).items() if name in FIGURES}


class Run:
    """One question on one split."""

    def __init__(self, name: str, data: Prepared, split: int, edits: Mapping[str, Any]) -> None:
        self.data, label = data, QUESTIONS[name][1]
        self.question, balanced = data.ask(label, split)
        self.told = self.question.rows.take(self.question.reported)
        output = self.question.features.output[self.question.reported]
        logits = [self.question.task.logits(output), balanced.logits(output)]
        erased = self.question.at_output("project")
        assert erased is not None
        n = {"rows": len(self.question.rows), "reported": len(self.told)}
        self.result: dict[str, Any] = {"question": name, "split": split, **n, "edits": dict(edits)}
        self.result["balanced_last_layer"] = figures(self.told, logits)
        self.result["erased_at_output"] = figures(self.told, erased([(), ((0, 0),)]))

    def learn_told(self, metric: Any) -> None:
        """Gains learned against a gap, told the groups of the selection half."""
        if f"told {metric}" in self.result["edits"]:
            return
        found = learn_group_aware_gains(self.question, replace(PLAN, target_metric=metric))
        names = ("weight", "before", "gap", "upper", "accuracy", "reached")
        told: dict[str, Any] = {name: getattr(found, name) for name in names} | {"metric": metric}
        self.result["edits"][f"told {metric}"] = told | self.reported(found.values, found.heads)

    def learn_untold(self) -> None:
        """Gains learned with clusters balanced."""
        found = learn_gains(self.question, 12) if "gains" not in self.result["edits"] else None
        if found is not None and found.heads:
            self.result["edits"]["gains"] = self.reported(found.values, found.heads)

    def reported(self, values: NDArray[np.float64], heads: Sequence[Head]) -> dict[str, Any]:
        """Gains on the reporting rows, in TF32."""
        before, after = self.question.with_gains(values).forward(self.question.reported, "gain")([(), heads])
        changes = {d.metric: d.to_dict() for d in self.told.compare(before, after, PLAN).differences}
        return {"heads": [[*map(int, head), float(values[head])] for head in heads], "changes": changes}

    def controls(self, edit: str) -> int:
        """How many control sets an edit has been held against."""
        return max((one["n"] for one in self.result["edits"][edit].get("controls", {}).values()), default=0)

    def control(self, edit: str, draws: int) -> Iterator[None]:
        """An edit saved, and read with plain transformers; and against heads of the same layers with its gains."""
        part = self.result["edits"][edit]
        heads, values = [Head(layer, head) for layer, head, _ in part["heads"]], np.ones(self.data.shape)
        for layer, head, gain in part["heads"]:
            values[layer, head] = gain
        edited = self.question.with_gains(values)
        model, passes = copy.deepcopy(self.data.inputs.model), edited.passes
        assert passes is not None
        assert passes.everywhere is not None
        passes.everywhere.bake(stream_of(model).base, heads, "gain")
        after = edited.forward(edited.reported, "gain")([heads])[0]
        with tempfile.TemporaryDirectory() as folder, torch.no_grad(), matmul_precision(passes.in_tf32):
            save(model, folder, self.data.inputs.beside.save_pretrained)
            loaded = CLIPVisionModelWithProjection.from_pretrained(folder, use_safetensors=True).eval().to(model.device)
            read = [loaded(**batch).image_embeds.cpu() for batch in passes.batches(edited.reported)]
        again = edited.task.logits(torch.nn.functional.normalize(torch.cat(read).double(), dim=-1).numpy())
        differ = int((again.argmax(1) != after.argmax(1)).sum())
        part["saved"] = {"predictions that differ": differ, "figures": figures(self.told, [after, again])}
        yield
        read_sets, sets = edited.forward(edited.reported, "gain"), layer_matched(heads, self.data.shape[1], draws=draws)
        change: dict[str, list[float]] = {}  # by figure, of the edit and then of each control set
        for start in range(0, len(sets.sets), _CHUNK):
            with half(edited.fast):
                reads = read_sets([(), heads, *sets.sets[start : start + _CHUNK]])
            for name, x in figures(self.told, reads).items():
                change.setdefault(name, [x[1] - x[0]]).extend(value - x[0] for value in x[2:])
            part["controls"] = {
                name: {"percentile": float(np.mean(np.array(x[1:]) <= x[0] + 1e-12)), "n": len(x) - 1}
                for name, x in change.items()
            }
            yield


class Work:
    """The steps of one process, in the order of their worth; none begins after the budget is spent."""

    def __init__(self, how: argparse.Namespace) -> None:
        self.how, self.started, self.runs = how, time.monotonic(), dict[str, Run]()
        self.file = how.out / f"split-{how.split}.json"
        written = json.loads(self.file.read_text()) if self.file.exists() else []
        self.results = {one["question"]: one for one in written}
        self.data, self.pool, self.asked = dict[str, Prepared](), ThreadPoolExecutor(1), dict[str, Future[Run]]()

    def run(self) -> None:
        """All that time allows."""
        asked = self.how.questions or list(QUESTIONS)
        first = self.how.split % len(asked)  # so that processes take controls of different questions
        turned = asked[first:] + asked[:first]
        for name in asked:
            self.do(f"{name} told", partial(self.told, name))
        self.controls(turned)
        for name in asked:
            self.do(f"{name} gains", partial(self.untold, name))
        self.controls(turned)
        for name in asked:
            if QUESTIONS[name][2] == "EOd":
                self.do(f"{name} told V", partial(self.told, name, "cramers_v"))
        self.controls(turned)

    def told(self, name: str, metric: str | None = None) -> None:
        """Gains that are told the groups, for the question's own gap or another."""
        self.get(name).learn_told(metric or QUESTIONS[name][2])

    def untold(self, name: str) -> None:
        """Gains that are not."""
        self.get(name).learn_untold()

    def get(self, name: str) -> Run:
        """A question, asked once."""
        data = QUESTIONS[name][0]
        if data not in self.data:
            self.data[data] = Prepared(data, self.how)
            self.data[data].read()
            # Probes are fitted on the processor meanwhile, one question after the other.
            of_data = [one for one in self.how.questions or QUESTIONS if QUESTIONS[one][0] == data]
            self.asked |= {one: self.pool.submit(self.open, one) for one in of_data}
        if name not in self.runs:
            self.runs[name] = self.asked[name].result()
        return self.runs[name]

    def open(self, name: str) -> Run:
        """A question, with the edits that an earlier run found."""
        return Run(name, self.data[QUESTIONS[name][0]], self.how.split, self.results.get(name, {"edits": {}})["edits"])

    def controls(self, names: Sequence[str]) -> None:
        """Controls of edits that could meet the bar, by the first process that has one."""
        for name in names:
            run = self.runs.get(name)
            for edit in list(run.result["edits"]) if run is not None else []:
                if run is None or not meets(run.result, edit) or not self.claim(f"controls {name} {edit}"):
                    continue
                if run.controls(edit) < self.how.draws:
                    steps = run.control(edit, self.how.draws)
                    while self.do(f"{name} {edit} controls", partial(next, steps)):
                        pass

    def claim(self, what: str) -> bool:
        """Whether no other process does it."""
        try:
            (self.how.work / f"claim {what}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def do(self, what: str, step: Callable[[], object]) -> bool:
        """One step, and what there is after it; False where there was none."""
        if time.monotonic() - self.started > self.how.budget:
            print(f"split {self.how.split}: no time for {what}", flush=True)
            return False
        try:
            step()
        except StopIteration:
            return False
        except Exception as error:  # one step that fails must not take the others with it
            print(f"split {self.how.split}: {what} failed: {error!r}", flush=True)
            return False
        self.results |= {key: run.result for key, run in self.runs.items()}
        self.file.write_text(json.dumps(list(self.results.values())))
        print(f"split {self.how.split}: {what} done at {time.monotonic() - self.started:.0f} s", flush=True)
        return True


def main() -> None:
    """Prepare, run a split, or print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of CLIP's image tower with its projection")
    parser.add_argument("--data", type=Path, help="folder with images/")
    parser.add_argument("--work", type=Path, help="folder for what is prepared, which the processes share")
    parser.add_argument("--prepare", action="store_true", help="decode images and read outputs into WORK")
    parser.add_argument("--split", type=int, default=0, help="number of the split, and its seed")
    parser.add_argument("--out", type=Path, default=Path("six"), help="folder for the results")
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, metavar="NAME", help="default: the six")
    parser.add_argument("--rows", type=int, help="images of a data set at most, to try it")
    parser.add_argument("--draws", type=int, default=100, help="control sets of an edit")
    parser.add_argument("--batch", type=int, default=128, help="images at a time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no step begins")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the tables of a folder of results")
    how = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)  # a run in 16 bits with it moved no gain; why was not confirmed
    if how.table is not None:
        print_tables(how.table, list(QUESTIONS))
        return
    if how.model is None or how.data is None or how.work is None:
        parser.error("--model, --data and --work are needed")
    how.work.mkdir(parents=True, exist_ok=True)
    if how.prepare:
        for name in {QUESTIONS[question][0]: None for question in how.questions or QUESTIONS}:
            Prepared(name, how).write()
            print(f"{name} is prepared", flush=True)
        return
    how.out.mkdir(parents=True, exist_ok=True)
    Work(how).run()


if __name__ == "__main__":
    main()
