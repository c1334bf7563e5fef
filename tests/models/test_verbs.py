"""The verbs in Python: own pictures, posts and pairs from memory to an audited, located, edited and saved model."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial

import made_posts
import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
from made_language import GROUPS, PLANTED, TRAITS, planted_llama, tokenizer
from PIL import Image

import fairhead
from fairhead.errors import InputError, UnsupportedModel
from fairhead.models.inputs import class_order

SMALL = {"width": 16, "mlp": 16, "image_size": 8, "patch_size": 4}


def faces(n=240, seed=0):
    """Pictures whose brightness is the label, and whose left half is the group's."""
    rng = np.random.default_rng(seed)
    label, sex = rng.integers(2, size=n), rng.integers(2, size=n)
    pixels = rng.integers(0, 30, size=(n, 8, 8, 3)) + 120 * label[:, None, None, None]
    pixels[:, :, :4] += (60 * sex)[:, None, None, None]
    pictures = [Image.fromarray(one.astype(np.uint8)) for one in pixels]
    return fairhead.dataset(
        pictures,
        label=np.array(["no", "yes"])[label].tolist(),
        groups={"sex": np.array(["f", "m"])[sex].tolist()},
        split=np.array(["train", "val", "test"])[np.arange(n) % 3].tolist(),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    plan = {"epochs": 3, "batch_size": 40, "learning_rate": 3e-3}
    method = fairhead.DAM(momentum=0.2)
    return fairhead.mitigate(
        "vit-2x4", faces(), method, against="erm", out=out, device="cpu", model_options=SMALL, **plan
    )


def test_mitigate_keeps_the_model_its_audit_and_the_comparison(run):
    assert run.row["settings"]["method"]["options"] == {"momentum": 0.2}
    assert run.comparison is not None
    assert {"EOd", "accuracy"} <= set(run.to_frame()["metric"])
    assert (run.out / "model" / "config.json").is_file()
    assert run.report(run.out / "page.html").is_file()


def test_predict_gives_the_records_that_mitigate_has_audited(run):
    found = fairhead.predict(run.model, faces(), device="cpu")
    kept = fairhead.Records.read(run.out / "records.csv", label="label", prediction="prediction", groups="sex")
    assert found.prediction.values().tolist() == kept.prediction.values().tolist()
    by_path = fairhead.predict(run.out / "model", faces(), device="cpu")
    assert np.allclose(found.scores, by_path.scores, atol=1e-6)
    assert fairhead.audit(found)["accuracy"].value == pytest.approx(run.audit["accuracy"].value)


def test_what_predict_returns_has_the_methods_of_a_result(run, capsys):
    found = fairhead.predict(run.out / "model", faces(), device="cpu")
    right = int((found.prediction.codes == found.label.codes).sum())
    found.show()
    assert f"{right} of {len(found)} predictions are the class of their row" in capsys.readouterr().out
    (table,) = found.page().sections[0].tables
    assert sum(int(cell) for row in table.rows for cell in row[1:]) == len(found)
    assert [int(row[i + 1]) for i, row in enumerate(table.rows)] == [
        int(((found.label.codes == k) & (found.prediction.codes == k)).sum()) for k in range(2)
    ]
    assert found.report(run.out / "predictions.html").is_file()
    assert json.loads(json.dumps(found.to_dict()))["rows"][0]["prediction"] in ("no", "yes")
    assert len(found.to_frame()) == len(found)
    assert repr(found).startswith("Records of")
    sex = found.groups["sex"]
    unknown = replace(found, groups={"sex": replace(sex, codes=np.where(np.arange(len(found)), sex.codes, -1))})
    assert json.loads(json.dumps(unknown.to_dict(), allow_nan=False))["rows"][0]["sex"] is None


def test_a_comparison_of_two_models_on_the_same_rows_names_the_models(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    shutil.copytree(run.out / "model", tmp_path / "other")
    sides = [fairhead.predict(model, faces(), device="cpu") for model in (run.out / "model", tmp_path / "other")]
    fairhead.compare(*sides, n_boot=100, metrics=["EOd"]).show()
    assert f"A = {run.out / 'model'}, B = {tmp_path / 'other'}" in capsys.readouterr().out


def test_predict_refuses_classes_of_other_data(run):
    data = fairhead.dataset([Image.new("RGB", (8, 8))] * 2, label=["cat", "dog"], split=["test", "test"])
    with pytest.raises(InputError, match="the model's classes are no, yes and those of the data cat, dog"):
        fairhead.predict(run.out / "model", data, device="cpu")


def test_predict_refuses_a_model_without_a_classifier(tmp_path):
    """It ended in an AttributeError."""
    config = hf.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
    hf.ViTModel(config).save_pretrained(tmp_path / "vit")
    hf.ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "vit")
    pictures = [Image.new("RGB", (8, 8))] * 2
    with pytest.raises(UnsupportedModel, match=r"ViTModel is no classifier.*fairhead mitigate .* --train head"):
        fairhead.predict(tmp_path / "vit", pictures, device="cpu")


def test_predict_takes_rows_of_some_classes_and_rows_without_labels(run):
    every, n = fairhead.predict(run.out / "model", faces(), device="cpu"), 80
    pictures = [faces().examples("test").inputs[row] for row in range(n)]
    labels, scores = every.label.values(), every.scores
    some = [row for row in range(n) if labels[row] == "no"]
    data = fairhead.dataset([pictures[row] for row in some], label=["no"] * len(some), split=["test"] * len(some))
    found = fairhead.predict(run.out / "model", data, device="cpu")
    assert found.classes == ("no", "yes")
    assert np.allclose(found.scores, scores[some], atol=1e-6)
    assert (found.label.values() == "no").all()
    frame = fairhead.predict(run.out / "model", pictures, device="cpu")
    assert list(frame) == ["id", "prediction", "score"]
    assert np.allclose(frame["score"], scores, atol=1e-6)
    assert frame["prediction"].tolist() == every.prediction.values().tolist()
    with pytest.raises(InputError, match="the rows have no labels"):
        fairhead.mitigate("vit-2x4", fairhead.dataset(pictures, label="none"), device="cpu", model_options=SMALL)


def test_a_model_of_others_answers_all_rows_where_the_parts_are_drawn(run, tmp_path, caplog):
    pictures, labels = [faces().all.inputs[row] for row in range(60)], ["no", "yes"] * 30
    drawn = fairhead.dataset(pictures, label=labels)
    assert drawn.sizes == {"train": 32, "val": 10, "test": 18}
    shutil.copytree(run.out / "model", tmp_path / "model")
    (tmp_path / "model" / "training_rows.json").unlink()
    assert len(fairhead.predict(tmp_path / "model", drawn, device="cpu")) == 60
    assert "predicting all 60 rows" in caplog.text
    assert len(fairhead.predict(tmp_path / "model", drawn, part="test", device="cpu")) == 18
    named = fairhead.dataset(pictures, label=labels, split=["train", "val", "test"] * 20)
    assert len(fairhead.predict(tmp_path / "model", named, device="cpu")) == 20
    # Of rows that a model is known to have been trained on, none is answered, and of the others the test part.
    assert len(fairhead.predict(run.out / "model", drawn, device="cpu")) < 6


def test_classes_without_names_are_taken_in_the_order_of_the_data(caplog):
    small = {
        "hidden_size": 4,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 8,
    }
    model = hf.BertForSequenceClassification(hf.BertConfig(num_labels=12, **small))
    numbered = fairhead.dataset([f"post {i}" for i in range(24)], label=[i % 12 for i in range(24)])
    assert class_order(model, numbered.classes) == list(range(12))
    assert numbered.classes[2] == "2"
    assert not caplog.text
    words = tuple("abcdefghijkl")
    assert class_order(model, words) == list(range(12))
    assert "a, b, c, d, e, f, g, h, i, j, k, l are taken for its classes 0 to 11, in this order" in caplog.text


def test_texts_are_cut_as_in_training_wherever_the_model_is_read(tmp_path):
    """Words before the cut say the class, words behind it the other one."""
    model = made_posts.bert().requires_grad_(True)
    rng = np.random.default_rng(0)
    label = np.arange(240) % 2
    half = np.array(made_posts.FILLERS).reshape(2, -1)
    texts = [" ".join([*rng.choice(half[y], 6), *rng.choice(half[1 - y], 20)]) for y in label]
    data = pd.DataFrame({"text": texts, "label": np.array(["no", "yes"])[label], "about": rng.choice(["f", "m"], 240)})
    plan = {"epochs": 4, "batch_size": 16, "learning_rate": 3e-3, "max_length": 8, "device": "cpu", "out": tmp_path}
    run = fairhead.mitigate(model, data, groups=["about"], beside=made_posts.tokenizer(), **plan)
    kept = fairhead.Records.read(tmp_path / "records.csv").to_frame().astype({"id": str}).set_index("id")["score"]
    assert run.audit["accuracy"].value > 0.8
    found = fairhead.predict(tmp_path / "model", data, device="cpu").to_frame().set_index("id")["score"]
    assert np.allclose(found, kept[found.index], atol=1e-5)
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "model")
    plain = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    rows = [texts[int(name) - 1] for name in found.index]
    with torch.no_grad():
        logits = plain(**tokenizer(rows, truncation=True, padding=True, return_tensors="pt")).logits
    assert np.allclose(logits.softmax(-1)[:, 1], found, atol=1e-5)


def test_texts_longer_than_a_model_has_positions_are_cut(tmp_path):
    """RoBERTa's begin behind that of the padding."""
    words = made_posts.tokenizer()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.RobertaConfig(**sizes, vocab_size=len(made_posts.WORDS), max_position_embeddings=20, pad_token_id=0)
    hf.RobertaForSequenceClassification(config).save_pretrained(tmp_path / "roberta")
    words.save_pretrained(tmp_path / "roberta")
    texts = [" ".join(["word1", f"word{i % 30}"] * 20) for i in range(60)]
    data = pd.DataFrame(
        {"text": texts, "label": ["a", "b"] * 30, "row": range(60), "split": ["train", "val", "test"] * 20}
    )
    fairhead.mitigate(tmp_path / "roberta", data, out=tmp_path / "run", device="cpu", epochs=1, batch_size=8)
    assert len(fairhead.predict(tmp_path / "run" / "model", data, device="cpu")) == 20
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "run" / "model").model_max_length == 19


def test_locate_edit_save_load_audit(run, tmp_path):
    plain = fairhead.mitigate(
        "vit-2x4", faces(), out=tmp_path / "plain", device="cpu", model_options=SMALL, epochs=3, learning_rate=3e-3
    )
    options = {
        "n_boot": 100,
        "draws": 5,
        "forward": True,
        "device": "cpu",
        "alpha": 1.0,
        "per_layer": 2,
        "tokens": "all",
    }
    found = fairhead.locate(plain.out / "model", faces(), by="sex", heads=2, **options)
    frame = found.to_frame()
    assert len(frame) == 8
    assert frame["selected"].sum() == len(found.heads) == 2
    edited = found.save(tmp_path / "edited")
    before, after = (fairhead.predict(folder, faces(), device="cpu") for folder in (plain.out / "model", edited))
    assert not np.allclose(before.scores, after.scores)
    assert fairhead.compare(before, after, n_boot=100).to_frame()["n"].max() == len(before)
    live = fairhead.locate(plain.model, faces(), by="sex", heads=2, **options)
    assert np.allclose(live.to_frame()["gap"], frame["gap"], atol=1e-6)


def test_a_live_model_that_carries_dam_is_located_with_it_and_stays_as_it_is(run, tmp_path):
    quick = {"n_boot": 100, "draws": 5, "forward": True, "device": "cpu", "alpha": 1.0, "per_layer": 2, "heads": 2}
    model = run.model
    before = fairhead.predict(model, faces(), device="cpu").scores
    live, kept = (fairhead.locate(one, faces(), by="sex", **quick) for one in (model, run.out / "model"))
    assert np.allclose(live.to_frame()["gap"], kept.to_frame()["gap"], atol=1e-6)
    edited = fairhead.predict(live.save(tmp_path / "edited"), faces(), device="cpu").scores
    again = fairhead.predict(kept.save(tmp_path / "again"), faces(), device="cpu").scores
    assert np.allclose(edited, again, atol=1e-5)
    assert not np.allclose(edited, before, atol=1e-5)
    assert np.array_equal(fairhead.predict(model, faces(), device="cpu").scores, before)


def test_locate_names_the_groups_that_there_are(run):
    with pytest.raises(InputError, match="no group column 'race'; there are sex"):
        fairhead.locate(run.out / "model", faces(), by="race", device="cpu")
    with pytest.raises(InputError, match="locate has no option 'drawz'"):
        fairhead.locate(run.out / "model", faces(), by="sex", drawz=3)


def test_too_few_rows_are_told_with_those_left_out_in_whole_sentences(run):
    left_out = "compared within a class: use more images. 80 images were left out: the model was trained on them. "
    with pytest.raises(InputError, match=re.escape(left_out)):
        fairhead.locate(run.out / "model", faces(), by="sex", limit=20, device="cpu")


def test_data_without_predictions_or_of_another_kind_are_answered_with_what_is_needed():
    with pytest.raises(InputError, match=r"a Dataset holds no predictions: give fairhead\.predict\(model, data\)"):
        fairhead.audit(faces(30))
    for verb in (partial(fairhead.score, "m", "crows"), partial(fairhead.mitigate, "m", method="klaad")):
        with pytest.raises(InputError, match=r"the data set has labelled pictures; .*sentences.* are needed here"):
            verb(data=faces(30))


def test_classes_and_names_where_objects_are_expected_are_told():
    with pytest.raises(InputError, match=r"DAM is a class; give its settings, such as DAM\(\)"):
        fairhead.mitigate("vit-2x4", faces(30), fairhead.DAM)
    with pytest.raises(
        InputError, match=r"the model is 'run/model'; expected a model object: fairhead\.load gives one"
    ):
        fairhead.attach("run/model", fairhead.DAM())
    with pytest.raises(InputError, match=r"the trainer is a NoneType; expected a transformers\.Trainer"):
        fairhead.AuditCallback(None, groups=["sex"])


def test_options_of_a_reader_are_sent_to_dataset():
    for verb, spec, option in (
        (partial(fairhead.locate, "m", "texts:own.csv"), "texts:own.csv", "input"),
        (partial(fairhead.mitigate, "m", "images:own.csv", "erm"), "images:own.csv", "person"),
        (partial(fairhead.mitigate, "m", "pairs:own.csv", "klaad"), "pairs:own.csv", "more"),
        (partial(fairhead.score, "m", "crows", "pairs:own.csv"), "pairs:own.csv", "less"),
    ):
        told = f"has no option '{option}', which says how data are read: give fairhead.dataset('{spec}', {option}=...)"
        with pytest.raises(InputError, match=re.escape(told)):
            verb(**{option: "column"})


def pairs(n=60):
    rows = [
        (f"the {GROUPS[i % 2]} are {TRAITS[i % 2]}", f"the {GROUPS[i % 2]} are {TRAITS[1 - i % 2]}") for i in range(n)
    ]
    more, less = zip(*((f"word{i % 20} {a}", f"word{i % 20} {b}") for i, (a, b) in enumerate(rows)), strict=True)
    return fairhead.dataset(pd.DataFrame({"more": more, "less": less, "kind": ["sex"] * n}), groups=["kind"])


def test_a_seed_draws_both_the_halves_and_the_controls(monkeypatch):
    monkeypatch.setattr("fairhead.locate.engine.answer", lambda source, plan, **how: (source.seed, plan.seed))
    assert fairhead.locate("model", "crows:pairs.csv", seed=7) == (7, 7)


def test_score_and_locate_a_live_language_model_on_own_pairs():
    model = planted_llama()
    found = fairhead.score(model, "crows", pairs(), tokenizer=tokenizer(), n_boot=100)
    assert found["ss"].value == 1.0
    assert found["ss", "sex"].n == 60
    assert found.to_frame().set_index(["metric", "group_by"]).loc[("ss", "sex"), "value"] == 1.0
    assert "likelier in 100.0 %" in found.page().verdict[0].text
    heads = fairhead.locate(model, pairs(), beside=tokenizer(), heads=1, n_boot=100, draws=5, device="cpu")
    assert heads.heads == (PLANTED,)


def test_mitigate_changes_a_copy_of_a_live_language_model(tmp_path):
    model = planted_llama()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    plan = {"held_out": 0.25, "batch_size": 8, "learning_rate": 1e-2, "device": "cpu", "out": tmp_path / "klaad"}
    found = fairhead.mitigate(model, pairs(), fairhead.KLAAD(kl_weight=0.5), beside=tokenizer(), **plan)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert not torch.equal(found.model.lm_head.weight, model.lm_head.weight)
    assert found.records[""].settings["kl_weight"] == 0.5
    assert (
        found.to_frame().set_index("part").loc["ce", "after"] < found.to_frame().set_index("part").loc["ce", "before"]
    )
    assert found.to_dict()["runs"]["klaad"]["held_out"]["items"] == 15
    assert "15 held-out items" in found.report(tmp_path / "page.html").read_text()
    assert "srcdoc" in found._repr_html_()
    again = fairhead.mitigate(model, pairs(), fairhead.KLAAD(kl_weight=0.5), beside=tokenizer(), **plan)
    assert again.rows() == found.rows()  # it was complete
    with pytest.raises(InputError, match="holds a model of another run"):
        fairhead.mitigate(found.model, pairs(), fairhead.KLAAD(kl_weight=0.5), beside=tokenizer(), **plan)


def test_mitigate_takes_methods_that_train_nothing_and_refuses_what_is_for_classifiers(tmp_path, capsys):
    model = planted_llama()
    fairhead.mitigate(model, method="self_debias", beside=tokenizer(), device="cpu", out=tmp_path).show()
    assert "no weight was changed" in capsys.readouterr().out
    assert (tmp_path / "model.safetensors").is_file()
    with pytest.raises(InputError, match="self_debias has no option 'epochs'"):
        fairhead.mitigate(model, method="self_debias", beside=tokenizer(), epochs=2)
    with pytest.raises(InputError, match="against is for classifiers, but klaad changes a language model"):
        fairhead.mitigate(model, pairs(), "klaad", against="erm", beside=tokenizer())
    with pytest.raises(InputError, match="KLAAD needs data"):
        fairhead.mitigate(model, method="klaad", beside=tokenizer(), device="cpu")
    with pytest.raises(InputError, match="was not loaded from a folder: give its tokenizer"):
        fairhead.mitigate(model, pairs(), "klaad", device="cpu")


def test_packages_are_verbs_in_any_order_of_imports():
    import fairhead.locate
    import fairhead.mitigate

    assert callable(fairhead.locate)
    assert callable(fairhead.mitigate)
    assert fairhead.mitigate.METHODS


def test_mitigate_refuses_what_is_no_method_and_no_setting():
    with pytest.raises(InputError, match="is no method"):
        fairhead.mitigate("vit-2x4", faces(30), torch.nn.Linear(1, 1))
    with pytest.raises(InputError, match=r"has no option 'epoch'.*Did you mean 'epochs'"):
        fairhead.mitigate("vit-2x4", faces(30), epoch=3)
