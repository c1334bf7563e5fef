"""Training: tables of methods, single runs with their records, and language models after a few steps."""

import csv
import json
from functools import cache
from pathlib import Path

import made_posts
import made_vision
from cases_language import made as made_language
from figures import TORCH, TRAINED, Case, as_json, run, scratch

GRID = """
title: Made faces
data:
  - {{name: faces, read: "utkface:{faces}", group: white, split_by_seed: true}}
backbones:
  - {{name: tiny, model: vit-2x2, settings: {{width: 16, mlp: 16, image_size: 8, patch_size: 4}}}}
methods: [{methods}]
references: [{references}]
seeds: [{seeds}]
plan: {{epochs: {epochs}, batch_size: 64, learning_rate: 1e-2}}
n_boot: 200
"""
METHODS = (
    "erm, dam_norm, dam_no_alignment, dam_no_attention, dam_release, dam_release_frozen, encoder_layer, dro, dro_chi2, "
    "dro_cvar, arl, kd, lff, eiil, scaling, afr, xrm, spare"
)


@cache
def made():
    """A folder with faces and posts, and a model that reads posts; made once a process."""
    root = scratch()
    made_vision.write_hard_faces(root / "faces")
    (root / "posts").mkdir()
    _tell_labels(made_posts.write_posts(root / "posts", n=300))
    made_posts.bert().save_pretrained(root / "bert")
    made_posts.tokenizer().save_pretrained(root / "bert")
    return root


def _tell_labels(folder):
    """A word in seven of eight posts that tells their label."""
    file = folder / "dataset.json"
    posts = json.loads(file.read_text())
    for i, post in enumerate(posts.values()):
        if i % 8:
            post["post_tokens"] += ["word0" if post["annotators"][0]["label"] == "normal" else "word1"] * 4
    file.write_text(json.dumps(posts))


def bench(methods, references="", seeds="0", epochs=1):
    """The table of a grid, and of each run what it was chosen by and its figures."""

    def figures(folder):
        grid = GRID.format(faces=made() / "faces", methods=methods, references=references, seeds=seeds, epochs=epochs)
        Path("grid.yaml").write_text(grid)
        run("bench", "grid.yaml", "--out", folder / "out", "--device", "cpu", "--cache", made() / "cache")
        blocks = json.loads((folder / "out/table.json").read_text())["blocks"]
        runs = [json.loads(line) for line in (folder / "out/results.jsonl").read_text().splitlines()]
        kept = ("cell", "rows", "classes", "best_epoch", "validation_accuracy", "history", "figures")
        return {
            "blocks": _without(("seconds", "watt_hours", "mib", "mib_of", "shared_by"), blocks),
            "runs": [{key: row[key] for key in kept} for row in sorted(runs, key=lambda row: row["cell"])],
        }

    return figures


def _without(keys, value):
    if isinstance(value, dict):
        return {key: _without(keys, one) for key, one in value.items() if key not in keys}
    return [_without(keys, one) for one in value] if isinstance(value, list) else value


def mitigated(method, data, model, *options):
    """What `mitigate` writes: history, audit, and the probabilities of the first rows of the test.

    Curves count rows above thresholds, and two scores may be nearer to each other than another processor rounds.
    """

    def figures(folder):
        model_and_data = ("--model", model.format(made()), "--data", data.format(made()))
        plan = ("--epochs", 2, "--lr", 1e-3, "--device", "cpu", "--cache", made() / "cache", "--out", folder / "run")
        run("mitigate", method, *model_and_data, *plan, *options)
        with (folder / "run/records.csv").open(newline="") as handle:
            rows = list(csv.DictReader(handle))[:50]
        done = json.loads((folder / "run/run.json").read_text())
        return {
            "run": {key: done[key] for key in ("rows", "best_epoch", "validation_accuracy", "history", "figures")},
            "audit": _without(("curves",), json.loads((folder / "run/audit.json").read_text())),
            "records": [{**row, "score": round(float(row["score"]), 4)} for row in rows],
        }

    return figures


def trained(out, method, *options):
    """A language model after a few steps."""
    root = made_language()
    (root / "swaps.txt").write_text("he\tshe\nman\twoman\nboy\tgirl\n")
    given = [str(option).format(root) for option in options]
    run("mitigate", method, "--model", root / "one", "--out", out, "--device", "cpu", *given)
    return root


def language(method, *options):
    """How the losses went, and CrowS-Pairs afterwards."""

    def figures(folder):
        out = folder / "trained"
        root = trained(out, method, *options)
        record = json.loads((out / "fairhead-training.json").read_text())
        after = ("--data", root / "data/crows_pairs", "--device", "cpu", "--n-boot", 200)
        kept = ("method", "training_targets", "held_out_targets", "history", "results")
        return {**{key: record[key] for key in kept}, "crows": as_json("lm", "crows", "--model", out, *after)}

    return figures


def compared(folder):
    """Before and after: the terms that were trained on are left out."""
    root = trained(folder / "trained", "klaad", *STEPS)
    for name, model in (("before", root / "one"), ("after", folder / "trained")):
        only = ("--only", "stereoset", "--only", "crows", "--device", "cpu", "--n-boot", 200)
        run("lm", "suite", "--model", model, "--data", root / "data", "--out", folder / name, *only)
    return as_json("lm", "compare", folder / "before", folder / "after", "--n-boot", 200, "--n-perm", 2000)


SIZES = (f"--model-option={size}" for size in ("width=16", "mlp=16", "image_size=8", "patch_size=4"))
FACES = ("utkface:{}/faces", "vit-2x2", "--batch-size", 64, *SIZES)
POSTS = ("hatexplain:{}/posts", "path:{}/bert", "--batch-size", 8, "--epochs", 5, "--max-length", 16)
DATA = ("--data", "stereoset:{}/data/stereoset", "--held-out", 0.25)
# Of BiasUnlearn: all categories to the end, without what its authors add.
PLAIN = ("--category", "all", "--checks", 0, "--watched", 0, "--anti-in-forget", 0)
STEPS = (*DATA, "--lr", 1e-3, "--batch-size", 8)
SWAPS = ("--swaps", "{}/swaps.txt")

CASES = {
    name: Case(figures, TRAINED)
    for name, figures in {
        "bench_table": bench("erm, dam, {method: jtt, options: {upweight: 3}}", "group_dro", "0, 1", epochs=2),
        "bench_methods": bench(METHODS, "dfr, fscl, tadet, dsa"),
        "mitigate_dam_against_erm": mitigated("dam", *FACES, "--against", "erm", "--seed", 1),
        "mitigate_worst_group": mitigated(
            "group_dro", *FACES, "--reference-group", "white", "--selection", "worst_group"
        ),
        "mitigate_last_encoder": mitigated("jtt", *FACES, "--train", "last_encoder", "--seed", 1),
        "mitigate_posts": mitigated("dam_release_text", *POSTS, "--option", "norm=before"),
        "klaad": language("klaad", *STEPS, "--kl-weight", 0.5, "--layers=0,-1", "--pooling", "last"),
        "klaad_lora": language("klaad", *STEPS, "--lora", 4, "--direction", "symmetric", "--epochs", 2),
        "klaad_compared": compared,
        "cda": language("cda", *STEPS, *SWAPS),
        "bias_unlearn": language("bias_unlearn", *STEPS, *PLAIN),
    }.items()
} | {
    # No step of training.
    "sentence_debias": Case(language("sentence_debias", *DATA, *SWAPS), TORCH),
    "self_debias": Case(language("self_debias"), TORCH),
}
