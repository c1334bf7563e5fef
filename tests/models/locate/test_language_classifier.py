"""Heads of text classifiers by their part in the gap of a logit: exact sums, a planted head, and the commands."""

import csv
import json

import numpy as np
import pytest
import torch
import transformers as hf
from families import TEXT
from made_posts import HEADS, PLANTED, bert, planted_bert, tokenizer, write_posts

from fairhead.cli import main
from fairhead.errors import UnsupportedModel
from fairhead.locate.decompose import Decomposer
from fairhead.locate.directions import PooledTask, own_task, text_classifier_task
from fairhead.locate.edits import HeadEdits
from fairhead.locate.gap_question import direct_effect
from fairhead.locate.head_features import collect
from fairhead.locate.head_maps import group_cells
from fairhead.locate.locate_settings import Source
from fairhead.locate.passes import RowPasses
from fairhead.locate.rows import halves_of
from fairhead.locate.session import open_session

MODELS = {
    "BERT": (hf.BertForSequenceClassification, hf.BertConfig(**TEXT, num_labels=3)),
    "RoBERTa": (hf.RobertaForSequenceClassification, hf.RobertaConfig(**TEXT, num_labels=2)),
    "DistilBERT": (
        hf.DistilBertForSequenceClassification,
        hf.DistilBertConfig(vocab_size=60, dim=32, n_layers=2, n_heads=4, hidden_dim=40, max_position_embeddings=64),
    ),
    "ELECTRA": (hf.ElectraForSequenceClassification, hf.ElectraConfig(**TEXT, embedding_size=32)),
}


def build(name):
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model.requires_grad_(False)


def batch():
    ids = torch.randint(3, 60, (5, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize("name", MODELS)
def test_terms_sum_to_the_models_own_logits(name) -> None:
    model = build(name)
    task = text_classifier_task(model)
    decomposer = Decomposer(model, unit=False)
    terms = decomposer(batch())
    own = model(**batch()).logits.double().numpy()
    output = terms.output.numpy()
    np.testing.assert_allclose(task.logits(output), own, atol=1e-4)
    features = collect(decomposer, lambda start: [batch()], 5)
    biases = (task._ratio(output) * task.dense_bias) @ task.out.T + task.out_bias
    constant = biases + np.einsum("no,nco->nc", terms.constant, task.row_directions(output))
    for positive in range(own.shape[1]):
        others = [c for c in range(own.shape[1]) if c != positive]
        whole = task.parts(features, positive).sum((1, 2)) + task.other_parts(features, positive).sum(1)
        whole = whole + constant[:, positive] - constant[:, others].mean(1)
        np.testing.assert_allclose(whole, own[:, positive] - own[:, others].mean(1), atol=1e-4)
        np.testing.assert_allclose(task.total(output, positive), whole, atol=1e-4)


def test_a_direct_effect_goes_through_the_activation() -> None:
    """As if the classifier had been given the first token without the heads' terms."""
    model = build("BERT")
    decomposer, task = Decomposer(model, unit=False), text_classifier_task(model)
    features = collect(decomposer, lambda start: [batch()], 5)
    edits = HeadEdits.learn(features, group_cells(np.array([0, 1, 0, 1, 0]), np.zeros(5, int)))
    heads = [(0, 1), (1, 0), (1, 1)]
    taken = sum(features.heads[:, la, h] @ features.maps[la, h].T for la, h in heads)
    (found,) = direct_effect(features, task, edits, "zero")([heads])
    np.testing.assert_allclose(found, task.logits(features.output - taken), atol=1e-6)


def test_an_activation_at_zero_has_its_slope() -> None:
    task = PooledTask(("a", "b"), "made", np.eye(2), np.zeros(2), np.eye(2), np.zeros(2), "gelu")
    np.testing.assert_allclose(task.row_directions(np.zeros((1, 2)))[0], 0.5 * np.eye(2))


def test_classifiers_built_otherwise_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no classifier of two layers"):
        text_classifier_task(hf.GPT2ForSequenceClassification(hf.GPT2Config(n_embd=8, n_layer=1, n_head=2)))


def test_a_model_whose_classes_have_no_names_is_read_as_predict_reads_it() -> None:
    model = build("BERT")
    names = {int(number): name for number, name in model.config.id2label.items()}
    assert own_task(model, True, tuple(sorted(names.values(), reverse=True))).classes == tuple(names.values())
    model.config.id2label = {number: f"LABEL_{number}" for number in names}
    classes = tuple(f"class {number}" for number in names)
    assert own_task(model, True, classes).classes == classes


@pytest.fixture(scope="module")
def posts(tmp_path_factory):
    return write_posts(tmp_path_factory.mktemp("hatexplain"))


def saved(model, folder):
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return saved(planted_bert(), tmp_path_factory.mktemp("classifier"))


def common(posts):
    return ["--data", f"hatexplain:{posts}", "--concept", "Women", "--task", "toxic", "--n-boot", "200"]


@pytest.fixture(scope="module")
def located(planted, posts, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    main(["locate", "--model", str(planted), *common(posts), "--forward", "--heads", "2", "--out", str(out)])
    return out


def test_the_planted_head_is_found_and_its_ablation_closes_the_gap(located) -> None:
    content = json.loads((located / "headmap.json").read_text())
    assert content["selected"][0] == list(PLANTED)
    assert content["concept"]["poles"] == ["Women", "not Women"]
    assert content["concept"]["origin"] == "labelled texts (leace)"
    assert sum(content["n"].values()) == 360, "the 40 training posts are left out"
    gaps = np.array(content["gap"]["values"])
    assert np.abs(gaps).argmax() == PLANTED[0] * HEADS + PLANTED[1]
    for effect in (e for e in content["effects"] if "metrics" in e):
        found = {metric["metric"]: metric for metric in effect["metrics"]}
        if effect["kind"] in ("mean", "zero"):
            for name in ("DP", "EOd"):
                assert found[name]["before"] > 0.9
                assert found[name]["after"] < 0.02, (effect["kind"], effect["way"])
                assert found[name]["high"] < 0
                assert min(found[name]["controls"]) > -0.3, "random heads do not close it"
    page = (located / "report.html").read_text()
    assert "L1H5" in page
    assert "texts" in page


def test_it_is_found_by_what_is_lost_without_it(planted, posts, capsys) -> None:
    by_effect = ["--forward", "--rank", "effect", "--heads", "1", "--draws", "5", "--json", "-"]
    main(["locate", "--model", str(planted), *common(posts), *by_effect])
    content = json.loads(capsys.readouterr().out)
    assert content["selected"] == [list(PLANTED)]
    assert np.array(content["single_heads"]["share"])[PLANTED] > 0.9


def test_passes_read_texts_by_length_and_give_them_in_their_own_order(planted, posts) -> None:
    source = Source(str(planted), f"hatexplain:{posts}", "Women", "toxic", batch_size=16, device="cpu")
    session = open_session(source)
    choosing = halves_of(session.evaluation)
    task, rows = session.task(choosing), np.flatnonzero(~choosing)
    inputs = session.inputs
    lengths = [len(inputs.items[row]) for row in rows]
    assert len(set(lengths)) > 1
    assert np.diff(np.array(lengths)[inputs.order(rows)]).min() >= 0
    edits = HeadEdits.learn(session.features, session.evaluation.cells)
    passes = RowPasses(session.decomposer, inputs.batches, task, order=inputs.order)
    (plain,) = passes(rows, edits, "mean")([()])
    np.testing.assert_allclose(plain, task.logits(session.features.output[rows]), atol=1e-4)


def test_a_classifier_without_a_planted_head_has_no_gap_to_close(posts, tmp_path, capsys) -> None:
    saved(bert(), tmp_path)
    main(["locate", "--model", str(tmp_path), *common(posts), "--draws", "20", "--json", "-"])
    content = json.loads(capsys.readouterr().out)
    total = content["gap"]["total"]
    assert abs(total) < 0.2


@pytest.mark.parametrize("kind", ["zero", "mean", "project", "splince"])
def test_ablate_saves_a_classifier_that_predicts_what_was_reported(located, planted, posts, kind, tmp_path) -> None:
    edit = ["--from", str(located / "headmap.json"), "--kind", kind, "--tokens", "all", "--draws", "3"]
    main(
        [
            "ablate",
            "--model",
            str(planted),
            *common(posts),
            *edit,
            "--save",
            str(tmp_path),
            "--out",
            str(tmp_path / "a"),
        ]
    )
    reported = json.loads((tmp_path / "a/headmap.json").read_text())["effects"][-1]
    after = {metric["metric"]: metric["after"] for metric in reported["metrics"]}
    main(["locate", "--model", str(tmp_path), *common(posts), "--draws", "3", "--out", str(tmp_path / "b")])
    rows = list(csv.DictReader((tmp_path / "b/records.csv").read_text().splitlines()))
    assert np.mean([row["label"] == row["prediction"] for row in rows]) == pytest.approx(after["accuracy"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concept", "Wimmen"], "Did you mean 'Women'?"),
        (["--task", "shoe"], "there is no target 'shoe'"),
        (["--prompts", "x.yaml"], "prompts and text sides are for images"),
        (["--model", "nowhere"], "nowhere: expected a folder with a model (config.json)"),
    ],
)
def test_mistakes_get_one_line(planted, posts, capsys, arguments, message) -> None:
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    defaults = {"--model": str(planted), "--data": f"hatexplain:{posts}", "--concept": "Women", "--task": "toxic"}
    with pytest.raises(SystemExit) as left:
        main(["locate", *(part for pair in {**defaults, **given}.items() for part in pair)])
    assert left.value.code == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_an_encoder_that_was_never_trained_to_classify_is_refused(posts, tmp_path, capsys) -> None:
    saved(bert().bert, tmp_path)
    with pytest.raises(SystemExit):
        main(["locate", "--model", str(tmp_path), *common(posts)])
    assert "is not a trained classifier" in capsys.readouterr().err
