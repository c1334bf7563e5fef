"""Heads by their part in stereotype log-odds and in a classifier's gap, on pretrained weights and published data."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import transformers  # noqa: E402

from fairhead.cli import main  # noqa: E402
from fairhead.heads import tap  # noqa: E402
from fairhead.language import load_scorer  # noqa: E402
from fairhead.locate.decompose import Decomposer  # noqa: E402
from fairhead.locate.directions import text_classifier_task  # noqa: E402
from fairhead.locate.edits import TextEdits  # noqa: E402
from fairhead.locate.head_features import collect  # noqa: E402
from fairhead.locate.log_odds import encoded_texts, take_apart, whole  # noqa: E402
from fairhead.locate.pair_rows import halves_of_pairs, read_pairs  # noqa: E402
from fairhead.locate.passes import text_passes  # noqa: E402


@pytest.mark.parametrize(
    ("name", "data", "pairs"),
    [
        ("tinystories-15m", "crows:crows_pairs", 12),
        ("tinystories-15m", "stereoset:stereoset", 12),
        ("smollm2-135m", "crows:crows_pairs", 3),
    ],
)
def test_terms_sum_to_the_models_own_log_odds(name, data, pairs, real_model, real_data) -> None:
    scorer = load_scorer(real_model(name), device="cpu", dtype="float32")
    kind, _, folder = data.partition(":")
    chosen = read_pairs(f"{kind}:{real_data(folder)}", limit=pairs)
    found = take_apart(scorer, chosen)
    scores = scorer.score(list(chosen.texts))
    asked = [scores[text.id] for text in chosen.texts]
    own = np.array([s.per_token_mean if chosen.per_token else s.logprob for s in asked]).reshape(len(chosen), -1)
    np.testing.assert_allclose(found.log_odds, own[:, 0] - own[:, 1], atol=2e-4)
    np.testing.assert_allclose(sum(values for _, values in whole(found)), found.log_odds, atol=2e-4)


def test_passes_that_start_late_equal_whole_ones(real_model, real_data) -> None:
    scorer = load_scorer(real_model("tinystories-15m"), device="cpu", dtype="float32")
    pairs = read_pairs(f"crows:{real_data('crows_pairs')}", limit=6)
    texts = encoded_texts(scorer, pairs)
    edits = TextEdits.learn_texts(scorer, texts)
    sets = [(), ((5, 0),), ((3, 1), (4, 2))]
    found = text_passes(scorer, texts, edits, "mean")(sets)
    for heads, values in zip(sets, found, strict=True):
        with tap(scorer.model) as open_tap:
            edits.apply(open_tap, heads, "mean") if heads else None
            expected = [v.sum() for v in scorer.score_tokens(texts, [text.id for text in pairs.texts])]
        np.testing.assert_allclose(values, expected, atol=2e-3)


def test_locate_and_ablate_on_real_pairs(real_model, real_data, tmp_path, capsys) -> None:
    common = ["--data", f"crows:{real_data('crows_pairs')}", "--limit", "40", "--n-boot", "100", "--device", "cpu"]
    main(["locate", "--model", str(real_model("tinystories-15m")), *common, "--out", str(tmp_path / "map")])
    content = json.loads((tmp_path / "map/headmap.json").read_text())
    assert np.array(content["gap"]["values"]).shape == (6, 6)
    parts = content["log_odds_by_term"]
    assert sum(parts.values()) == pytest.approx(content["gap"]["total"], abs=1e-3)
    edit = ["--heads", "L5H4", "--kind", "mean", "--draws", "3", "--save", str(tmp_path / "edited"), "--json", "-"]
    capsys.readouterr()
    main(["ablate", "--model", str(real_model("tinystories-15m")), *common, *edit])
    metrics = {m["metric"]: m for m in json.loads(capsys.readouterr().out)["effects"][-1]["metrics"]}
    assert len(metrics["log_odds"]["controls"]) == 5, "all other heads of the layer"
    edited = load_scorer(tmp_path / "edited", device="cpu", dtype="float32")
    pairs = read_pairs(f"crows:{real_data('crows_pairs')}", limit=40)
    scores = edited.score(list(pairs.take(~halves_of_pairs(pairs)).texts))
    lost = -sum(s.logprob for s in scores.values()) / sum(s.n_tokens for s in scores.values())
    assert lost == pytest.approx(metrics["nll"]["after"], abs=1e-4)


def test_a_real_encoders_heads_sum_to_its_logits(real_model, real_data) -> None:
    torch.manual_seed(0)
    folder = real_model("minilm-l6")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True).eval()
    texts = ["women are here", "a post about nothing at all, and then some more words"]
    batch = transformers.AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    decomposer = Decomposer(model, unit=False)
    task = text_classifier_task(model)
    features = collect(decomposer, lambda start: [dict(batch)], 2)
    terms = decomposer(dict(batch))
    directions = task.row_directions(features.output)
    biases = (task._ratio(features.output) * task.dense_bias) @ task.out.T + task.out_bias
    constant = biases + np.einsum("no,nco->nc", terms.constant, directions)
    total = task.parts(features, 1).sum((1, 2)) + task.other_parts(features, 1).sum(1) + constant[:, 1] - constant[:, 0]
    with torch.no_grad():
        own = model(**batch).logits.numpy()
    np.testing.assert_allclose(total, own[:, 1] - own[:, 0], atol=1e-4)
