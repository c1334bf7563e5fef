"""Locating heads on pretrained weights: the terms add up, and CLIP's gender heads lie in its last layers."""

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from scipy import stats

from fairhead.cli import main
from fairhead.data import Dataset, read
from fairhead.locate.decompose import Decomposer, reads_of
from fairhead.locate.directions import task_from_images
from fairhead.locate.edits import HeadEdits
from fairhead.locate.head_features import collect
from fairhead.locate.head_maps import group_cells, score, top_heads
from fairhead.locate.locate_settings import Source
from fairhead.locate.passes import RowPasses
from fairhead.locate.rows import Evaluation
from fairhead.locate.session import open_session
from fairhead.locate.streams import Reads
from fairhead.locate.studies import single_head_effects


def sentences(folder) -> dict[str, torch.Tensor]:
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = ["The nurse said that she was tired.", "Once upon a time there was a fox who could not sleep at night."]
    return dict(tokenizer(texts, padding=True, return_tensors="pt"))


def pictures(folder) -> dict[str, torch.Tensor]:
    processor = hf.AutoImageProcessor.from_pretrained(folder)
    gradient = Image.linear_gradient("L").convert("RGB")
    return dict(processor([gradient, gradient.rotate(90)], return_tensors="pt"))


@pytest.mark.parametrize(
    ("name", "model_class", "inputs", "token"),
    [
        ("clip-b16-vision", "CLIPVisionModelWithProjection", pictures, "first"),
        ("dinov2-small", "AutoModel", pictures, "first"),
        ("smollm2-135m", "AutoModelForCausalLM", sentences, "last"),
        ("minilm-l6", "AutoModel", sentences, "first"),
    ],
)
def test_terms_of_real_models_add_up(real_model, name, model_class, inputs, token) -> None:
    folder = real_model(name)
    model = getattr(hf, model_class).from_pretrained(folder, dtype=torch.float32).eval()
    batch = inputs(folder)
    decomposer = Decomposer(model, token)
    terms = decomposer(batch)
    with torch.no_grad():
        if name == "clip-b16-vision":
            expected = torch.nn.functional.normalize(model(**batch).image_embeds, dim=-1)
        else:
            states = getattr(model, "base_model", model)(**batch).last_hidden_state
            ends = [int(row.nonzero().max()) for row in batch["attention_mask"]] if token == "last" else [0, 0]
            expected = torch.stack([states[row, end] for row, end in enumerate(ends)])
    whole = decomposer.head_terms(terms.heads).sum((1, 2)) + terms.others.sum(1) + terms.constant
    # SmolLM2's states reach into the hundreds: there 1e-4 is of the largest.
    scale = max(1.0, float(expected.abs().max()))
    assert float((whole - expected).abs().max()) < 1e-4 * scale
    torch.testing.assert_close(terms.output, expected, atol=1e-6, rtol=1e-5)


def test_terms_of_a_real_encoder_add_up_to_the_logits_of_a_classifier_on_it(real_model) -> None:
    """DINOv2 with a fresh head, which reads the first token and the mean of the patches."""
    folder = real_model("dinov2-small")
    model, batch = hf.AutoModelForImageClassification.from_pretrained(folder).eval(), pictures(folder)
    reads = reads_of(model, batch)
    assert reads == Reads(((0, 1), (1, None)))
    decomposer = Decomposer(model, reads, unit=False)
    terms = decomposer(batch)
    whole = decomposer.head_terms(terms.heads).sum((1, 2)) + terms.others.sum(1) + terms.constant
    with torch.no_grad():
        torch.testing.assert_close(model.classifier(whole), model(**batch).logits, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def text_side():
    """The stand-in text side for CLIP B/16; the fitted map lies beside the script that fetches the models."""
    folder = os.environ.get("FAIRHEAD_CLIP_TEXT")
    if not folder:
        pytest.skip("$FAIRHEAD_CLIP_TEXT is not set")
    return Path(folder)


# The golden case real_locate_clip holds the figures of such a run in every check.
@pytest.mark.slow
def test_gender_of_fairface_on_the_real_tower(real_model, real_data, text_side, tmp_path) -> None:
    arguments = ["locate", "--model", str(real_model("clip-b16-vision")), "--concept", "gender", "--task", "age"]
    arguments += ["--data", f"fairface:{real_data('images/fairface_val5k.zip')}", "--limit", "180", "--rank", "concept"]
    arguments += ["--text-adapter", str(text_side / "gte_adapter.npz"), "--text-encoder", str(real_model("gte-small"))]
    arguments += ["--texts", str(text_side / "text_vectors.npz"), "--n-boot", "200", "--out", str(tmp_path)]
    main(arguments)
    content = json.loads((tmp_path / "headmap.json").read_text())
    layers = [layer for layer, _ in content["selected"]]
    assert max(layers) >= 10, "the last layers of CLIP carry gender"
    best = content["selected"][0]
    assert content["auc"]["low"][best[0]][best[1]] > 0.7
    assert "substitute" in content["notes"][0]
    assert "substitute" in (tmp_path / "report.html").read_text()


def faces_read_by(folder, data, n):
    """DINOv2 at a quarter of its size, and a function that gives it some of the first n faces."""
    model = hf.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    processor = hf.AutoImageProcessor.from_pretrained(folder, backend="pil")

    def batches(rows):
        for i in range(0, len(rows), 32):
            pictures = [data.all.inputs[row] for row in rows[i : i + 32]]
            size = {"height": 112, "width": 112}  # a quarter of the work; the model takes any multiple of its patches
            yield {
                "pixel_values": processor(pictures, size=size, do_center_crop=False, return_tensors="pt").pixel_values
            }

    return Decomposer(model), lambda rows=range(n): batches(rows)


def test_shuffled_groups_of_real_faces_leave_nothing(real_model, real_data) -> None:
    """Groups that were dealt out at random: p-values of a head are uniform over deals, and no head is chosen."""
    folder, n = real_model("dinov2-small"), 96
    data = read("fairface", real_data("images/fairface_val5k.zip"), target="gender", groups=("race",))
    assert isinstance(data, Dataset)
    labels = data.all.labels[:n]
    decomposer, batches = faces_read_by(folder, data, n)
    features = collect(decomposer, lambda start: batches(range(start, n)), n)
    task = task_from_images(features.output, labels, data.classes)
    evidence = task.evidence(1)
    parts, total = features.parts(evidence[None])[..., 0], features.output @ evidence
    rng, p, hits = np.random.default_rng(0), [], 0
    for _ in range(200):
        groups = rng.permutation(np.arange(n) % 2)
        found = score(parts, total, group_cells(groups, labels))
        p.append(found.p[11, 2])  # of one head: heads of one model are not independent of each other
        hits += bool(top_heads(found.value * np.sign(found.total), found.p_adjusted, 4))
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert hits <= stats.binom.ppf(0.999, 200, 0.05), "more false findings than the false discovery rate allows"


@pytest.mark.slow
def test_effects_estimated_from_gradients_are_in_the_order_of_exact_ones(real_model, real_data) -> None:
    """Attribution patching beside a forward pass without each of the 72 heads of DINOv2, at every token."""
    n = 64
    data = read("celeba", real_data("images/celeba10k.zip"), target="Smiling", groups=("Male",))
    assert isinstance(data, Dataset)
    rows = np.arange(n)
    decomposer, batches = faces_read_by(real_model("dinov2-small"), data, n)
    labels, groups = data.all.labels[:n], data.groups(data.all.ids[:n])["Male"].codes
    features = collect(decomposer, lambda start: batches(range(start, n)), n)
    task = task_from_images(features.output, labels, data.classes)
    faces = Evaluation(labels, data.classes, groups, ("1", "0"), "Male")
    edits = HeadEdits.learn_everywhere(decomposer, batches(), faces.cells)
    passes = RowPasses(decomposer, batches, task, edits)
    exact = single_head_effects(passes(rows, edits, "mean"), features.shape, faces)
    lost = passes.estimate(rows, edits, "mean", [partial(task.slope, positive=1)]).lost[..., 0]
    estimated = faces.score(lost, lost.sum((1, 2)))
    assert stats.spearmanr(exact.value.ravel(), estimated.value.ravel()).statistic >= 0.9


def claims(features, share, skewed, runs):
    """Runs in which a head is claimed, of those with ten rows a cell: labels, groups and probes know nothing."""
    n, found = len(features), []
    probes = []
    for seed in range(6):  # fitted on the rows that heads are then chosen on, as where a model has no classifier
        rng = np.random.default_rng(seed)
        labels, half = rng.permutation(np.arange(n) % 2), rng.permutation(n)[: n // 2]
        task = task_from_images(features.output[half], labels[half], ("no", "yes"))
        probes.append((labels[half], task.parts(features.take(half), 1)))
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        labels, parts = probes[seed % len(probes)]
        rates = np.where(labels == 1, 1.8, 0.2) * share if skewed else share  # a minority that has mostly one label
        groups = (rng.random(len(labels)) < rates).astype(int)
        enough = np.bincount(2 * labels + groups, minlength=4).reshape(2, 2).min(1) >= 10
        kept = enough[labels]
        if kept.any():
            of = score(parts[kept], parts[kept].sum((1, 2)), group_cells(groups[kept], labels[kept]))
            found.append(bool(top_heads(of.value * np.sign(of.total), of.p_adjusted, 4)))
    return sum(found), len(found)


@pytest.mark.slow
def test_random_labels_and_groups_claim_a_head_of_clip_in_one_run_of_twenty(real_model, real_data) -> None:
    data = f"celeba:{real_data('images/celeba10k.zip')}"
    source = Source(str(real_model("clip-b16-vision")), data, "gender", "Smiling", limit=1200, device="cpu")
    features = open_session(source).features
    for share in (0.5, 0.1, 0.05):
        for skewed in (False, True):
            few, runs = claims(features, share, skewed, 400)
            assert runs >= 200, (share, skewed)
            assert few <= stats.binom.ppf(0.999, runs, 0.05), (share, skewed)
