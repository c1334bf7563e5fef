"""Heads: where a gap sits, what an edit of heads does, and what q and k look like, for pictures, posts and pairs."""

import csv
import json
from functools import cache
from pathlib import Path

import made_faces
import made_language
import made_posts
import made_vision
import numpy as np
import torch
from figures import HEADS, Case, as_json, run, scratch

from fairhead.data.sentences import GOLD_LABELS

QUICK = ("--device", "cpu", "--n-boot", 200, "--draws", 20)


@cache
def made():
    """A folder of data and models; made once a process."""
    root = scratch()
    made_vision.write_faces(root / "faces")
    made_vision.save_clip(root / "clip")
    made_vision.save_classifier(root / "classifier")
    made_vision.save_backbone(root / "backbone")
    made_faces.make_faces(root / "utkface", 80)
    (root / "posts").mkdir()
    made_posts.write_posts(root / "posts")
    _uneven(made_posts.planted_bert()).save_pretrained(root / "bert")
    made_posts.tokenizer().save_pretrained(root / "bert")
    _uneven(made_language.planted_llama()).save_pretrained(root / "llama")
    made_language.tokenizer().save_pretrained(root / "llama")
    _write_pairs(root)
    vectors = np.random.default_rng(0).normal(size=(40, 16))
    np.savez(root / "texts.npz", texts=np.array([f"t{i}" for i in range(40)]), vectors=vectors)
    return root


def _uneven(model):
    """With some noise: without its planted head such a model is at a tie, and rounding would decide."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.add_(0.05 * torch.randn(weight.shape))
    return model


def _write_pairs(root):
    """The made pairs as CrowS-Pairs and as StereoSet."""
    items = []
    with (root / "crows.csv").open("w", newline="") as handle:
        rows = csv.writer(handle)
        rows.writerow(["", "sent_more", "sent_less", "stereo_antistereo", "bias_type", "annotations"])
        for pair in made_language.pairs():
            rows.writerow([pair.id, pair.more, pair.less, pair.direction, pair.bias_type, "[['gender']]"])
    for pair in made_language.pairs(n=60):
        texts = (pair.more, pair.less, "are are the word1 word2 word3 the")
        sentences = [{"sentence": t, "gold_label": g} for t, g in zip(texts, GOLD_LABELS, strict=True)]
        about = {"target": f"term{int(pair.id) % 12}", "bias_type": pair.bias_type, "context": "the BLANK are"}
        items.append({"id": pair.id, **about, "sentences": sentences})
    (root / "stereoset.json").write_text(json.dumps({"data": {"intrasentence": items}}))


FIRST = ("--rank", "gap", "--tokens", "first")
FACES = ("fairface:{}/faces", "--concept", "gender", "--task", "age")
POSTS = ("hatexplain:{}/posts", "--concept", "Women", "--task", "toxic")
CROWS = ("crows:{}/crows.csv",)
STEREOSET = ("stereoset:{}/stereoset.json",)


def on(command, model, data, *options):
    """JSON of `locate` or `ablate`; `{}` is the folder of what was made."""

    def figures(folder):
        place, *others = (str(part).format(made()) for part in (*data, *options))
        return as_json(command, "--model", made() / model, "--data", place, *others, *QUICK)

    return figures


def chosen(model, data, *options):
    """What `ablate` says of the heads that `locate` wrote down."""

    def figures(folder):
        place, *others = (str(part).format(made()) for part in data)
        how = (*QUICK, "--rank", "gap", "--out", folder / "located")
        run("locate", "--model", made() / model, "--data", place, *others, *how)
        head_map = ("--from", folder / "located/headmap.json")
        return as_json("ablate", "--model", made() / model, "--data", place, *others, *QUICK, *head_map, *options)

    return figures


def records(folder):
    """The table of predictions that `locate` leaves beside its map."""
    model, faces = made() / "classifier", f"fairface:{made() / 'faces'}"
    run("locate", "--model", model, "--data", faces, *FACES[1:], *QUICK, "--out", folder / "located")
    with (folder / "located/records.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    return [{key: _number(value) for key, value in row.items()} for row in rows[:40]]


def _number(text):
    try:
        return float(text)
    except ValueError:
        return text


def attention(model, data, *options):
    def figures(folder):
        place = data.format(made())
        run("attention", "--model", made() / model, "--data", place, *options, "--device", "cpu", "--out", "page")
        return json.loads(Path("page/attention.json").read_text())

    return figures


CASES = {
    name: Case(figures, HEADS)
    for name, figures in {
        "locate_clip": on("locate", "clip", FACES, "--forward", *FIRST, "--class", "50-59", "--texts", "{}/texts.npz"),
        "locate_clip_effect": on("locate", "clip", FACES, "--exact", 3),
        "locate_clip_means": on("locate", "clip", FACES, "--concept-from", "means", "--calibrate", *FIRST),
        "locate_classifier": on("locate", "classifier", FACES, "--forward", "--rank", "effect", *FIRST[2:]),
        "locate_backbone": on("locate", "backbone", FACES, "--limit", 120, "--orthogonal", *FIRST),
        "locate_posts": on("locate", "bert", POSTS, "--forward", "--heads", 2, *FIRST),
        "locate_posts_effect": on("locate", "bert", POSTS, "--forward", "--rank", "effect", "--heads", 1, *FIRST[2:]),
        "locate_crows": on("locate", "llama", CROWS, "--forward"),
        "locate_crows_gender": on("locate", "llama", CROWS, "--concept", "gender", "--seed", 1, "--limit", 50),
        "locate_stereoset": on("locate", "llama", STEREOSET, "--forward", "--rank", "effect", "--heads", 1),
        "locate_records": records,
        "ablate_clip": chosen("clip", FACES, "--kind", "project", "--tokens", "all"),
        "ablate_clip_resample": on("ablate", "clip", FACES, "--heads", "L0H0,L1H2", "--kind", "resample", *FIRST[2:]),
        "ablate_classifier": chosen("classifier", FACES, "--kind", "zero", *FIRST[2:]),
        "ablate_posts": chosen("bert", POSTS, "--kind", "mean", "--tokens", "all"),
        "ablate_crows": chosen("llama", CROWS, "--kind", "mean"),
        "ablate_stereoset": on("ablate", "llama", STEREOSET, "--heads", "L1H2", "--kind", "zero"),
        "attention_posts": attention(
            "bert", "hatexplain:{}/posts", "--group", "Women", "--max-length", 24, "--token", 1
        ),
        "attention_faces": attention(
            "classifier", "utkface:{}/utkface", "--part", "train", "--group", "white", "--pictures", 2
        ),
    }.items()
}
