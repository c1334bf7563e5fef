"""What locating heads costs, each beside its peer in one run.

    python benchmarks/locate.py [--device cuda] [--repeats 3] [--batch 32] [--rows 20000]
    python benchmarks/locate.py --model clip-b16-vision --data celeba:celeba10k.zip [--limit 96] [--effects 48]

Prints the throughput of taking all heads of CLIP B/16 apart as a share of the plain forward's, and its peak memory; how
much faster TextSpan is on moments than on rows, and whether the texts are the same; and the time of scores and control
sets for 144 heads from stored features. Weights are random: none of this depends on them.

With a model and labelled pictures it prints what the effects of all heads cost instead, exact (a pass a head) and
estimated (attribution patching), and how well the two agree: that depends on the weights. `--estimates` leaves out the
exact ones. `--clock cpu` counts the process's own work, on a machine that has other work to do.
"""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from fairhead.locate.decompose import Decomposer
from fairhead.locate.directions import Task, concept_from_images
from fairhead.locate.edits import HeadEdits
from fairhead.locate.gap_question import GapQuestion, direct_effect
from fairhead.locate.head_features import Features, HeadMoments, Spanned, span_of_moments
from fairhead.locate.head_maps import coupling, group_cells, score, separation, top_heads
from fairhead.locate.locate_settings import LocatePlan, Source
from fairhead.locate.rows import Evaluation
from fairhead.locate.session import open_question
from fairhead.locate.studies import layer_matched, single_head_effects
from machine import interleaved_medians, machine

LAYERS, HEADS, HEAD_DIM, WIDTH = 12, 12, 64, 512


def clip(device: str) -> CLIPVisionModelWithProjection:
    torch.manual_seed(0)
    config = CLIPVisionConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=LAYERS, patch_size=16,
                              num_attention_heads=HEADS, image_size=224, projection_dim=WIDTH)  # fmt: skip
    return CLIPVisionModelWithProjection(config).eval().to(device)


def throughput(device: str, batch: int, repeats: int) -> None:
    model = clip(device)
    images = {"pixel_values": torch.randn(batch, 3, 224, 224, device=device)}
    decomposer = Decomposer(model)
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)

    @torch.no_grad()
    def plain() -> None:
        model(**images)
        sync()

    def apart() -> None:
        terms = decomposer(images)
        HeadMoments.of(terms.heads.cpu().numpy(), np.zeros(batch, dtype=np.intp), 1)
        sync()

    seconds = interleaved_medians({"plain": plain, "apart": apart}, repeats)
    print(
        f"CLIP B/16, batch {batch}: plain {batch / seconds['plain']:.1f} images/s, all heads with moments "
        f"{batch / seconds['apart']:.1f} images/s: {seconds['plain'] / seconds['apart']:.2f} of plain"
    )
    peaks = {}
    for what in ("plain", "apart"):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            (plain if what == "plain" else apart)()
            peaks[what] = torch.cuda.max_memory_allocated() / 2**20
        else:  # a process of its own: a peak never goes down again
            command = [sys.executable, __file__, "--peak", what, "--batch", str(batch)]
            peaks[what] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    ratio = peaks["apart"] / peaks["plain"]
    print(f"  peak memory {peaks['plain']:.0f} MiB plain, {peaks['apart']:.0f} MiB with all heads: {ratio:.2f} times")


def peak(what: str, batch: int) -> None:
    model, images = clip("cpu"), {"pixel_values": torch.randn(batch, 3, 224, 224)}
    decomposer = Decomposer(model) if what == "apart" else None
    for _ in range(2):
        if decomposer is None:
            with torch.no_grad():
                model(**images)
        else:
            HeadMoments.of(decomposer(images).heads.numpy(), np.zeros(batch, dtype=np.intp), 1)
    # Not getrusage: its maximum holds what the parent process had before this one began.
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    print(int(found[1]) / 1024)


def span_of_rows(rows: np.ndarray, texts: np.ndarray, m: int = 20, rank: int = 64) -> Spanned:
    """TextSpan as published, on a head's terms themselves: rows [n, d'], texts [T, d']."""
    terms = np.asarray(rows, dtype=np.float64).copy()
    _, values, right = np.linalg.svd(terms, full_matrices=False)
    right = right[:rank][values[:rank] > values[0] * 1e-6]
    pool = np.asarray(texts, dtype=np.float64) @ right.T @ right
    terms -= terms.mean(0)
    total = float((terms**2).sum())
    smallest = 1e-8 * float((pool**2).sum(1).max())
    chosen, shares = [], []
    for _ in range(min(m, len(right))):
        best = int(np.argmax((terms @ pool.T).std(0)))
        text, length = pool[best].copy(), float(pool[best] @ pool[best])
        if length <= smallest:
            break
        before = float((terms**2).sum())
        terms -= np.outer(terms @ text / length, text)
        pool -= np.outer(pool @ text / length, text)
        chosen.append(best)
        shares.append((before - float((terms**2).sum())) / total)
    return Spanned(np.array(chosen, dtype=np.intp), np.array(shares), len(right))


def text_span(rows: int, repeats: int) -> None:
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(size=HEAD_DIM))
    z = rng.normal(size=(rows, HEAD_DIM)) * scale + rng.normal(size=HEAD_DIM)
    head_map = rng.normal(size=(WIDTH, HEAD_DIM)) / WIDTH**0.5
    texts = rng.normal(size=(3500, WIDTH))
    terms = z @ head_map.T
    mean, covariance = z.mean(0), np.cov(z.T, bias=True)
    started = time.perf_counter()
    by_rows = span_of_rows(terms, texts, m=20)
    slow = time.perf_counter() - started  # once: it takes minutes on a small machine

    def on_moments() -> Spanned:
        return span_of_moments(mean, covariance, head_map, texts, m=20)

    fast = interleaved_medians({"moments": on_moments}, repeats)["moments"]
    same = by_rows.chosen.tolist() == on_moments().chosen.tolist()
    print(
        f"TextSpan, {rows} images, 3500 texts, 20 chosen: rows {slow:.1f} s, moments {fast * 1e3:.0f} ms: "
        f"{slow / fast:.0f} times as fast; the same texts: {'yes' if same else 'NO'}"
    )


def scores_and_controls(rows: int) -> None:
    rng = np.random.default_rng(0)
    groups, labels = rng.integers(0, 2, rows), rng.integers(0, 2, rows)
    heads = rng.normal(size=(rows, LAYERS, HEADS, HEAD_DIM)).astype(np.float32)
    heads[:, 11, 3] += groups[:, None]
    maps = (rng.normal(size=(LAYERS, HEADS, WIDTH, HEAD_DIM)) / 100).astype(np.float32)
    output = np.einsum("nlhd,lhod->no", heads, maps, optimize=True)
    ones = np.ones((rows, LAYERS), dtype=np.float32)
    features = Features(heads, np.zeros((rows, 13, WIDTH), dtype=np.float32), output, ones, maps)
    task = Task(("no", "yes"), rng.normal(size=(2, WIDTH)), np.zeros(2), "made")
    evaluation = Evaluation(labels, task.classes, groups, ("f", "m"), "sex")
    started = time.perf_counter()
    concept = concept_from_images(output, groups, labels, name="sex", poles=("f", "m"))
    parts = features.parts(np.stack([task.evidence(1), concept.vector]))
    cells = group_cells(groups, labels)
    head_map = score(parts[..., 0], output @ task.evidence(1), cells)
    apart = separation(parts[..., 1], cells)
    coupling(parts[..., 1], parts[..., 0], cells)
    scored = time.perf_counter()
    chosen = top_heads(np.abs(apart.d.value), np.zeros((LAYERS, HEADS)), 4, per_layer=3)  # four, whatever their p
    effect = direct_effect(features, task, HeadEdits.learn(features, cells))
    controls = layer_matched(chosen, HEADS, draws=200)
    evaluation.figures(effect([(), chosen, *controls.sets]))
    done = time.perf_counter()
    print(
        f"{head_map.value.size} heads, {rows} images, from stored features without a forward pass: scores "
        f"{scored - started:.1f} s, edits and {len(controls.sets)} control sets {done - scored:.1f} s"
    )


def effects_of_heads(arguments: argparse.Namespace) -> None:
    named = (arguments.model, arguments.data, "gender", arguments.task)
    source = Source(*named, limit=arguments.limit, device=arguments.device, batch_size=arguments.batch, tf32=True)
    question = open_question(source, LocatePlan(rank="effect"))
    assert isinstance(question, GapQuestion)
    passes, at = question.passes, np.flatnonzero(question.choosing & question.comparable)[: arguments.effects]
    assert passes is not None
    decomposer = passes.decomposer
    estimated: list[np.ndarray | None] = []

    @torch.no_grad()
    def plain() -> None:
        for batch in passes.batches(at):
            decomposer.outputs(batch).cpu()

    def apart() -> None:
        for batch in passes.batches(at):
            decomposer(batch).heads.cpu()

    def estimate() -> None:
        estimated[:] = [question.estimate(at, "mean")]

    clock = time.process_time if arguments.clock == "cpu" else time.perf_counter
    seconds = interleaved_medians(
        {"plain": plain, "apart": apart, "estimate": estimate}, arguments.repeats, clock=clock
    )
    print(
        f"{len(at)} images, batch {arguments.batch}: plain pass {seconds['plain']:.1f} s, all heads apart "
        f"{seconds['plain'] / seconds['apart']:.2f} of its throughput, effects of {question.parts[0].size} heads "
        f"estimated in {seconds['estimate'] / seconds['plain']:.2f} of its time (wanted: at most 3)"
    )
    if arguments.estimates:
        return
    started = time.perf_counter()
    rows = question.rows.take(at)
    exact = single_head_effects(question.forward(at, "mean"), question.shape, rows)
    took = time.perf_counter() - started
    assert estimated[0] is not None
    guessed = rows.score(estimated[0], estimated[0].sum((1, 2)))
    one, other = exact.value.ravel(), guessed.value.ravel()
    best = np.isin(np.argsort(-np.abs(one))[:12], np.argsort(-np.abs(other))[:16]).sum()
    print(
        f"  exact in {took / seconds['plain']:.1f} of its time ({took:.0f} s); rank correlation with the estimates "
        f"{spearmanr(one, other).statistic:.3f}; {best} of the 12 largest effects are among the 16 largest estimates"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--model", help="folder of an image tower, for the effects of its heads")
    parser.add_argument("--data", help="labelled pictures, as reader:path")
    parser.add_argument("--task", default="Smiling")
    parser.add_argument("--limit", type=int, default=96)
    parser.add_argument("--effects", type=int, help="rows for the effects, of those that heads are chosen on")
    parser.add_argument("--estimates", action="store_true", help="no exact effects")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="of the effects of heads")
    parser.add_argument("--peak", choices=("plain", "apart"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        peak(arguments.peak, arguments.batch)
        return
    print(machine(arguments.device))
    if arguments.model:
        effects_of_heads(arguments)
        return
    throughput(arguments.device, arguments.batch, arguments.repeats)
    text_span(arguments.rows, arguments.repeats)
    scores_and_controls(min(arguments.rows, 2000))


if __name__ == "__main__":
    main()
