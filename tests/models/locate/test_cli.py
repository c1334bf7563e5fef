"""`fairhead locate` and `fairhead ablate` through the real command, on small random models and a made FairFace."""

import csv
import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
import transformers as hf
from families import TOWERS, VIT
from huggingface_hub import ModelCard
from made_towers import tokenizer
from PIL import Image

from fairhead.cli import main
from fairhead.locate.engine import find_dose
from fairhead.locate.locate_settings import Source
from fairhead.locate.session import open_session

GENDERS, AGES = ("Female", "Male"), ("20-29", "30-39", "50-59")


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    """Noise, brighter for one gender; ages at random."""
    folder = tmp_path_factory.mktemp("fairface")
    (folder / "val").mkdir()
    rng = np.random.default_rng(0)
    with (folder / "fairface_label_val.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file", "age", "gender", "race", "service_test"])
        for i in range(160):
            pixels = rng.normal(90 + 80 * (i % 2), 40, size=(8, 8, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"val/{i}.jpg", quality=95)
            rows.writerow([f"val/{i}.jpg", AGES[rng.integers(3)], GENDERS[i % 2], "White", "False"])
    return folder


def saved(model, folder, **parts):
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(4.0)
            elif name.endswith("out_proj.bias"):
                weight.normal_(std=0.1)
    model.save_pretrained(folder)
    size = {"height": 8, "width": 8}
    hf.CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False).save_pretrained(folder)
    for part in parts.values():
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    torch.manual_seed(0)
    model = hf.CLIPModel(hf.CLIPConfig(**TOWERS)).eval()
    return saved(model, tmp_path_factory.mktemp("clip"), tokenizer=tokenizer())


@pytest.fixture(scope="module")
def located(clip, faces, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    table = out / "texts.npz"
    np.savez(
        table, texts=np.array([f"t{i}" for i in range(40)]), vectors=np.random.default_rng(0).normal(size=(40, 16))
    )
    quick = ["--n-boot", "100", "--draws", "20", "--texts", str(table), "--features", str(out / "features")]
    main(["locate", "--model", str(clip), *common(faces), *quick, "--out", str(out), "--forward", "--class", "50-59"])
    return out


def common(faces, task="age"):
    return ["--data", f"fairface:{faces}", "--concept", "gender", "--task", task]


def test_locate_writes_map_report_and_records(located) -> None:
    content = json.loads((located / "headmap.json").read_text())
    assert content["task"]["origin"] == "zero-shot prompts"
    assert content["concept"]["origin"] == "prompts"
    assert np.array(content["auc"]["value"]).shape == (2, 4)
    assert content["selected"], "brightness reaches every head: some must be chosen"
    assert {(e["kind"], e["way"]) for e in content["effects"]} == {
        ("mean", "direct"), ("zero", "direct"), ("resample", "direct"), ("project", "direct"), ("splince", "direct"),
        ("project", "together"), ("project", "output"), ("splince", "together"), ("splince", "output"),
        ("mean", "forward"),
    }  # fmt: skip
    # The first point of the curve is the model as it is, the last all heads edited: what the study itself says.
    forward = {m["metric"]: m for m in content["effects"][-1]["metrics"]}
    added = content["forward_curves"]["added"]
    assert [len(point["heads"]) for point in added] == list(range(len(content["selected"]) + 1))
    assert added[0]["accuracy"] == pytest.approx(forward["accuracy"]["before"])
    assert added[-1]["accuracy"] == pytest.approx(forward["accuracy"]["after"])
    assert content["texts"][0]["texts"]
    assert content["notes"][-1] == "Forward passes edit heads at every token."
    assert set(map(tuple, content["confirmed"])) <= set(map(tuple, content["selected"]))
    page = (located / "report.html").read_text()
    assert "selected heads confirmed on the other half" in page
    assert "shrinks without each head" in page
    assert "data:image/jpeg;base64," in page
    assert len((located / "records.csv").read_text().splitlines()) == content["n"]["reporting"] + 1


def test_features_are_taken_from_where_they_are(located, clip, faces, capsys) -> None:
    quick = ["--n-boot", "100", "--draws", "5", "--features", str(located / "features"), "--json", "-"]
    main(["locate", "--model", str(clip), *common(faces), *quick, "--concept-from", "means"])
    captured = capsys.readouterr()
    assert "rows:" not in captured.err
    assert json.loads(captured.out)["concept"]["origin"] == "labelled images (means)"


@pytest.mark.parametrize("kind", ["zero", "mean", "project"])
def test_ablate_saves_a_model_that_predicts_what_was_reported(located, clip, faces, kind, capsys, tmp_path) -> None:
    arguments = ["--data", f"fairface:{faces}", "--concept", "gender", "--task", "age", "--n-boot", "100"]
    edit = ["--from", str(located / "headmap.json"), "--kind", kind, "--draws", "3", "--out", str(tmp_path / "told")]
    main(["ablate", "--model", str(clip), *arguments, *edit, "--save", str(tmp_path), "--json", "-"])
    first = json.loads(capsys.readouterr().out)
    forward = {m["metric"]: m for m in first["effects"][-1]["metrics"]}
    assert first["effects"][-1]["way"] == "forward"
    assert "loaded again" in first["notes"][-1]
    tokenizer().save_pretrained(tmp_path)
    main(["locate", "--model", str(tmp_path), *arguments, "--draws", "3", "--out", str(tmp_path / "again")])
    told, rows = (
        list(csv.DictReader((tmp_path / name).read_text().splitlines()))
        for name in ("told/records-edited.csv", "again/records.csv")
    )
    assert [row["prediction"] for row in told] == [row["prediction"] for row in rows]
    accuracy = np.mean([row["label"] == row["prediction"] for row in rows])
    assert accuracy == pytest.approx(forward["accuracy"]["after"])


def test_classes_of_other_names_are_found_before_the_pass(faces, tmp_path, capsys, monkeypatch) -> None:
    torch.manual_seed(0)
    saved(hf.ViTForImageClassification(hf.ViTConfig(**VIT)).eval(), tmp_path)
    monkeypatch.setattr("fairhead.locate.session.collect", None)
    message = refused(capsys, ["locate", "--model", str(tmp_path), *common(faces)])
    assert "the model's classes are LABEL_0, LABEL_1 and those of the data" in message


def test_a_model_is_not_saved_over_itself(clip, faces, capsys) -> None:
    before = (clip / "model.safetensors").read_bytes()
    edit = ["--heads", "L1H0", "--save", f"{clip}/../{clip.name}"]
    assert "is the model that is edited" in refused(capsys, ["ablate", "--model", str(clip), *common(faces), *edit])
    assert (clip / "model.safetensors").read_bytes() == before


def test_weights_cannot_hold_an_edit_of_the_first_token(clip, faces, capsys, tmp_path) -> None:
    edit = ["--heads", "L1H0", "--tokens", "first", "--save", str(tmp_path)]
    assert "affects every token" in refused(capsys, ["ablate", "--model", str(clip), *common(faces), *edit])


def test_a_classifier_brings_its_own_classes(faces, tmp_path, capsys) -> None:
    torch.manual_seed(0)
    names = dict(enumerate(("50-59", "20-29", "30-39")))  # in an order of its own
    config = hf.ViTConfig(**VIT, id2label=names, label2id={v: k for k, v in names.items()})
    saved(hf.ViTForImageClassification(config).eval(), tmp_path)
    main(["locate", "--model", str(tmp_path), *common(faces), "--n-boot", "100", "--draws", "5", "--json", "-"])
    content = json.loads(capsys.readouterr().out)
    assert content["task"] == {
        "classes": ["20-29", "30-39", "50-59"],
        "origin": "the model's own classifier",
        "evidence_for": content["task"]["evidence_for"],
    }
    assert content["concept"]["origin"] == "labelled images (leace)"


@pytest.mark.parametrize(("family", "kind"), [("Dinov2", "project"), ("CLIP", "gain"), ("ViT", "splince")])
def test_a_classifier_is_saved_as_it_was_reported(family, kind, faces, tmp_path) -> None:
    """What is reported of the edit is what plain transformers predicts with the saved model."""
    torch.manual_seed(0)
    names = dict(enumerate(AGES))
    parts = {"vision_config": VIT} if family == "CLIP" else VIT
    config = getattr(hf, f"{family}Config")(**parts, id2label=names, label2id={v: k for k, v in names.items()})
    saved(getattr(hf, f"{family}ForImageClassification")(config).eval(), tmp_path)
    options = ["--model", str(tmp_path), *common(faces), "--n-boot", "100", "--draws", "3"]
    edit = ["--heads", "L0H1,L1H2", "--kind", kind, "--save", str(tmp_path / "edited"), "--out", str(tmp_path / "told")]
    main(["ablate", *options, *edit])
    content = json.loads((tmp_path / "told/headmap.json").read_text())
    assert content["task"]["origin"] == "the model's own classifier"
    rows = list(csv.DictReader((tmp_path / "told/records-edited.csv").read_text().splitlines()))
    model = hf.AutoModelForImageClassification.from_pretrained(tmp_path / "edited").eval()
    processor = hf.CLIPImageProcessorPil.from_pretrained(tmp_path / "edited")
    with torch.no_grad():
        logits = model(**processor([Image.open(faces / row["id"]) for row in rows], return_tensors="pt")).logits
    assert [row["prediction"] for row in rows] == [AGES[i] for i in logits.argmax(1)]
    plain = csv.DictReader((tmp_path / "told/records.csv").read_text().splitlines())
    assert [row["prediction"] for row in plain] != [row["prediction"] for row in rows], "the edit changes something"


def test_a_model_with_neither_gets_a_probe(faces, tmp_path, capsys) -> None:
    torch.manual_seed(0)
    saved(hf.Dinov2Model(hf.Dinov2Config(**VIT)).eval(), tmp_path)
    arguments = ["--n-boot", "100", "--draws", "5", "--limit", "120", "--orthogonal", "--json", "-"]
    main(["locate", "--model", str(tmp_path), *common(faces), *arguments])
    content = json.loads(capsys.readouterr().out)
    assert content["task"]["origin"].startswith("a linear probe fitted on")
    assert sum(content["n"].values()) == 120
    assert content["concept"]["left_beside_the_classes"] < 1


def test_age_leaves_out_those_between_its_poles(clip, faces, capsys) -> None:
    arguments = ["--data", f"fairface:{faces}", "--group", "age", "--label", "gender", "--n-boot", "100"]
    main(["locate", "--model", str(clip), *arguments, "--draws", "5", "--json", "-"])
    content = json.loads(capsys.readouterr().out)
    assert "belong to neither pole of age" in content["notes"][0]
    assert content["concept"]["poles"] == ["older", "younger"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["locate", "--model", "nowhere"], "nowhere: expected a folder with a model (config.json)"),
        (["locate", "--concept", "gendre"], "Did you mean 'gender'?"),
        (["locate", "--task", "shoe"], "there is no target 'shoe'"),
        (["locate", "--data", "fairface"], "named as name:path"),
        (["locate", "--limit", "0"], "--limit is 0; expected a whole number of at least 1"),
        (["locate", "--limit", "3"], "of the selection half; both groups are needed in both"),
        (["locate", "--n-boot", "5"], "--n-boot is 5; expected a whole number of at least 100"),
        (["locate", "--out", "/proc/none"], "cannot be written"),
        (["locate", "--features", "/proc/none"], "cannot be written"),
        (["locate", "--text-adapter", "x.npz"], "are given together"),
        (["locate", "--prompts", "missing.yaml"], "missing.yaml cannot be read"),
        (["locate", "--texts", "missing.npz"], "missing.npz cannot be read: No such file"),
        (["ablate"], "either --heads L11H1,L10H5 or --from"),
        (["ablate", "--heads", "11.4"], "write them as L11H4"),
        (["locate", "--task", "gender"], "concept and task are both 'gender'"),
        (["locate", "--device", "cuda:99"], "the device is cuda:99, and PyTorch sees no GPU"),
        (["locate", "--texts", __file__], "is not an .npz file with the arrays texts, vectors"),
        (["ablate", "--from", "missing.json"], "is not a head map"),
        (["ablate", "--from", __file__], "nor other JSON"),
        (["ablate", "--heads", "L0H0", "--kind", "resample", "--batch-size", "2"], "other rows in every batch"),
        (["ablate", "--heads", "L0H0", "--kind", "resample", "--save", "x"], "needs other rows"),
    ],
)
def test_mistakes_get_one_line(clip, faces, capsys, arguments, message) -> None:
    given = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    defaults = {"--model": str(clip), "--data": f"fairface:{faces}", "--concept": "gender", "--task": "age"}
    flags = [part for pair in {**defaults, **given}.items() for part in pair]
    with pytest.raises(SystemExit) as left:
        main([arguments[0], *flags])
    assert left.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert lines[-1].startswith("fairhead: error:")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ablate", "--heads", "L9H0"], "the model has 2 layers of 4 heads"),
        (["locate", "--rank", "ranksum"], "the rank sum needs texts"),
        (["locate", "--class", "40-49"], "there is no class '40-49'"),
        (["locate", "--against", "nowhere"], "nowhere: expected a folder with a model (config.json)"),
        (["locate", "--limit", "14"], "no class has 10 images of both female and male in both halves"),
    ],
)
def test_mistakes_are_found_before_the_model_runs(clip, faces, capsys, monkeypatch, arguments, message) -> None:
    monkeypatch.setattr("fairhead.locate.session.collect", None)
    with pytest.raises(SystemExit):
        main([arguments[0], "--model", str(clip), *common(faces), *arguments[1:]])
    assert message in capsys.readouterr().err


def test_a_second_column_of_groups_is_refused(clip, faces, capsys) -> None:
    two = ["--data", f"fairface:{faces}", "--label", "age", "--group", "gender", "--group", "race"]
    assert "the groups of one column: run it once for each" in refused(capsys, ["locate", "--model", str(clip), *two])


def test_a_whole_layer_can_be_edited_without_controls(clip, faces, capsys) -> None:
    quick = ["--n-boot", "100", "--draws", "3", "--json", "-"]
    main(["ablate", "--model", str(clip), *common(faces), "--heads", "L1H0,L1H1,L1H2,L1H3", "--kind", "zero", *quick])
    content = json.loads(capsys.readouterr().out)
    assert any(note.startswith("Not compared with random heads: 4 of the 4 heads") for note in content["notes"])
    assert {change["metric"] for change in content["effects"][-1]["changes"]} >= {"DP", "accuracy"}


@pytest.mark.parametrize("selected", [None, [[1.5, 0]], [[-1, 0]], [[0]], 3])
def test_head_maps_that_name_no_heads(clip, faces, capsys, tmp_path, selected) -> None:
    (tmp_path / "headmap.json").write_text(json.dumps([] if selected is None else {"selected": selected}))
    with pytest.raises(SystemExit):
        main(["ablate", "--model", str(clip), *common(faces), "--from", str(tmp_path / "headmap.json")])
    assert "no list “selected” of [layer, head]" in capsys.readouterr().err


def test_a_language_model_has_no_images(faces, capsys, tmp_path) -> None:
    hf.LlamaForCausalLM(
        hf.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        main(["locate", "--model", str(tmp_path), *common(faces)])
    assert "holds a LlamaForCausalLM, which reads input_ids and no images" in capsys.readouterr().err


def test_a_row_left_over_still_has_others_to_be_resampled_from(clip, faces, capsys) -> None:
    quick = ["--n-boot", "100", "--draws", "3", "--limit", "130", "--batch-size", "65", "--json", "-"]
    main(["ablate", "--model", str(clip), *common(faces), "--heads", "L0H0", "--kind", "resample", *quick])
    content = json.loads(capsys.readouterr().out)
    assert content["n"]["reporting"] == 66
    assert content["effects"][-1]["way"] == "forward"


def test_a_stopped_save_leaves_no_model(clip, faces, tmp_path, monkeypatch) -> None:
    """Weights are written beside and moved: what lay in the folder stays whole until then."""
    target = tmp_path / "edited"
    (target).mkdir()
    (target / "config.json").write_text("of an earlier model")
    quick = ["--n-boot", "100", "--draws", "3", "--heads", "L0H0", "--kind", "zero", "--save", str(target)]

    def fail(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(hf.CLIPImageProcessorPil, "save_pretrained", fail)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        main(["ablate", "--model", str(clip), *common(faces), *quick])
    assert [file.name for file in target.iterdir() if file.is_file() and file.name != ".lock"] == ["config.json"]
    assert (target / "config.json").read_text() == "of an earlier model"
    monkeypatch.undo()
    main(["ablate", "--model", str(clip), *common(faces), *quick])
    assert hf.CLIPModel.from_pretrained(target).config.projection_dim == 16
    card = ModelCard.load(target / "README.md")
    assert "L0H0" in card.text
    assert {"before", "change", "change_low", "low", "high"} <= card.data.eval_results[0].metric_args.keys()
    assert not (target / ".saving").exists()


def test_images_that_cannot_be_read_are_named(clip, faces, capsys, tmp_path) -> None:
    shutil.copytree(faces, tmp_path / "f")
    (tmp_path / "f/val/7.jpg").write_bytes(b"broken")
    with pytest.raises(SystemExit):
        main(
            [
                "locate",
                "--model",
                str(clip),
                "--data",
                f"fairface:{tmp_path / 'f'}",
                "--concept",
                "gender",
                "--task",
                "age",
            ]
        )
    assert "val/7.jpg: is not an image" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{words: [' '], levels: [Female]}", "has no token in it"),
        ("{words: [lady, girl], levels: [Female]}", "both poles need equally many"),
        ("{words: [lady], levels: [Nobody]}", "not of both poles of 'gender'"),
        ("{words: [], levels: [Female]}", "should be a list of words"),
    ],
)
def test_prompts_that_say_nothing(clip, faces, capsys, tmp_path, text, message) -> None:
    file = tmp_path / "prompts.yaml"
    female = f"    female: {text}\n    male: {{words: [man], levels: [Male]}}\n"
    file.write_text(f'templates: ["{{}}"]\nconcept:\n  name: gender\n  poles:\n{female}')
    assert message in refused(capsys, ["locate", "--model", str(clip), *common(faces), "--prompts", str(file)])


def refused(capsys, arguments) -> str:
    """The one line that a command leaves with."""
    capsys.readouterr()  # what saving the model told
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    lines = [line for line in capsys.readouterr().err.strip().splitlines() if not line.startswith("rows:")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: hf.BeitModel(hf.BeitConfig(**VIT)), "BeitModel (BeitLayer) has no final norm where it is expected"),
        (
            lambda: hf.BertModel(hf.BertConfig(vocab_size=9, **{k: VIT[k] for k in VIT if "size" in k or "num" in k})),
            "holds a BertModel, which reads input_ids and no images",
        ),
        (
            lambda: hf.ResNetModel(hf.ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1])),
            "ResNetModel has 0 lists of attention blocks",
        ),
    ],
    ids=["BEiT", "BERT", "ResNet"],
)
def test_models_whose_terms_cannot_be_followed_are_named(build, message, faces, capsys, tmp_path) -> None:
    saved(build().eval(), tmp_path)
    assert message in refused(capsys, ["locate", "--model", str(tmp_path), *common(faces)])


def test_pictures_of_several_sizes_are_refused(faces, capsys, tmp_path) -> None:
    """SigLIP 2 has as many patches as a picture needs; once this was a traceback from within transformers."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**small, num_patches=16, patch_size=4)).save_pretrained(tmp_path)
    hf.Siglip2ImageProcessorPil(patch_size=4, max_num_patches=16).save_pretrained(tmp_path)
    message = refused(capsys, ["locate", "--model", str(tmp_path), *common(faces)])
    assert "Siglip2VisionModel reads pixel_attention_mask, spatial_shapes beside its pixels" in message


def test_weights_that_are_cut_off(clip, faces, capsys, tmp_path) -> None:
    shutil.copytree(clip, tmp_path / "m")
    (tmp_path / "m/model.safetensors").write_bytes(b"cut")
    assert "the weights cannot be loaded" in refused(capsys, ["locate", "--model", str(tmp_path / "m"), *common(faces)])


def test_a_model_that_pools_all_tokens_has_no_first_one(faces, capsys, tmp_path) -> None:
    torch.manual_seed(0)
    saved(hf.SiglipVisionModel(hf.SiglipVisionConfig(**VIT)).eval(), tmp_path)
    options = [*common(faces), "--n-boot", "100", "--draws", "3", "--features", str(tmp_path / "features")]
    ablate = ["ablate", "--model", str(tmp_path), *options, "--heads", "L1H0"]
    assert "has no first token" in refused(capsys, [*ablate, "--tokens", "first"])
    main([*ablate, "--tokens", "all", "--json", "-"])
    content = json.loads(capsys.readouterr().out)
    assert content["effects"][-1]["way"] == "forward"
    assert content["notes"][-1] == "Forward passes edit heads at every token."
    # Taken out alone, they are edited at every token too: there is no first one.
    main(["locate", "--model", str(tmp_path), *options, "--forward", "--rank", "effect", "--json", "-"])
    by_effect = json.loads(capsys.readouterr().out)
    assert np.array(by_effect["single_heads"]["values"]).shape == np.array(by_effect["gap"]["values"]).shape
    assert by_effect["single_heads"]["selected"] == sorted(by_effect["selected"])
    assert by_effect["notes"][-1] == "Forward passes edit heads at every token."


@pytest.mark.parametrize("gpu", [False, True])
def test_tf32_is_noted_where_there_is_any(clip, faces, capsys, monkeypatch, gpu) -> None:
    monkeypatch.setattr("fairhead.locate.passes.has_tf32", lambda device: gpu)  # a processor multiplies as before
    options = [*common(faces), "--n-boot", "100", "--draws", "3", "--heads", "L1H0", "--tf32", "--json", "-"]
    main(["ablate", "--model", str(clip), *options])
    content = json.loads(capsys.readouterr().out)
    noted = [note for note in content["notes"] if "TF32" in note]
    said = f"Forward passes ran in TF32: 0 of {content['n']['reporting']} predictions of the model as it is differ"
    assert [note.startswith(said) for note in noted] == [True] * gpu
    assert torch.get_float32_matmul_precision() == "highest"


def test_calibration_is_asked_for(clip, faces, capsys) -> None:
    options = [*common(faces), "--n-boot", "100", "--draws", "3", "--calibrate", "--json", "-"]
    main(["locate", "--model", str(clip), *options])
    assert "as often as it occurs" in json.loads(capsys.readouterr().out)["task"]["origin"]


def test_heads_chosen_on_other_rows_are_noted(located, clip, faces, capsys) -> None:
    options = [*common(faces), "--n-boot", "100", "--draws", "3", "--json", "-"]
    ablate = ["ablate", "--model", str(clip), *options, "--from", str(located / "headmap.json")]
    main(ablate)
    assert not any("chosen on other rows" in note for note in json.loads(capsys.readouterr().out)["notes"])
    main([*ablate, "--seed", "1"])
    assert any("chosen on other rows" in note for note in json.loads(capsys.readouterr().out)["notes"])


def test_gains_are_learned_saved_and_compared_with_the_balanced_last_layer(clip, faces, capsys, tmp_path) -> None:
    edit = ["--kind", "gain", "--draws", "3", "--n-boot", "100", "--save", str(tmp_path / "model")]
    main(["ablate", "--model", str(clip), *common(faces), *edit, "--out", str(tmp_path), "--json", "-"])
    content = json.loads(capsys.readouterr().out)
    gains = np.array(content["gains"])
    assert sorted(content["selected"]) == np.argwhere(gains != 1).tolist()
    assert [(e["kind"], e["way"]) for e in content["effects"]] == [
        ("gain", "direct"), ("project", "together"), ("project", "output"), ("splince", "together"),
        ("splince", "output"), ("balance", "output"), ("gain", "forward"),
    ]  # fmt: skip
    main(["ablate", "--model", str(clip), *common(faces), *edit[:-2], "--strength", "0.5", "--json", "-"])
    half = json.loads(capsys.readouterr().out)
    assert half["gains"] == content["gains"]
    assert half["effects"][-1]["kind"] == "gain@0.5", (
        "once another edit was made in its place: the mean at this strength"
    )
    page = (tmp_path / "report.html").read_text()
    assert "Gains of the heads" in page
    assert "refitting the last layer with balanced clusters" in page


def test_the_gains_of_a_dose_are_taken_from_its_head_map(clip, faces, capsys, tmp_path, monkeypatch) -> None:
    """What ablate reports of them is what locate reported of the dose; they are not learned again."""
    with_gains = partial(find_dose, gains=True, kinds=("mean",), strengths=(0.25,), counts=(1,))
    monkeypatch.setattr("fairhead.locate.engine.find_dose", with_gains)  # elsewhere than on a GPU they are not tried
    quick = [*common(faces), "--n-boot", "100", "--draws", "3"]
    main(["locate", "--model", str(clip), *quick, "--target", "0.5", "--target-metric", "DP", "--out", str(tmp_path)])
    content = json.loads((tmp_path / "headmap.json").read_text())
    dose = next(dose for dose in content["doses"]["front"] if dose["kind"] == "gain")
    capsys.readouterr()
    ablate = ["ablate", "--model", str(clip), *quick, "--kind", "gain", "--json", "-", "--from"]
    main([*ablate, str(tmp_path / "headmap.json"), "--save", str(tmp_path / "model")])
    found = json.loads(capsys.readouterr().out)
    assert "loaded again" in found["notes"][-1], "the figures below are those of the saved model"
    gains = np.array(found["gains"])
    assert [gains[tuple(head)] for head in dose["heads"]] == pytest.approx(dose["gains"])
    assert sorted(found["selected"]) == sorted(dose["heads"]) == np.argwhere(gains != 1).tolist()
    after = {m["metric"]: m["after"] for m in found["effects"][-1]["metrics"]}
    for figure in dose["reported"]:
        assert after[figure["metric"]] == pytest.approx(figure["b"])
    assert "The gains are those of the head map." in found["notes"]
    again = tmp_path / "again.json"
    again.write_text(json.dumps(found))
    main([*ablate, str(again)])
    assert json.loads(capsys.readouterr().out)["gains"] == found["gains"], "its own gains, where a map has some"
    for wrong in ({"gains": [[0.5, "a"]]}, {"doses": {"front": [{"kind": "gain", "heads": [[0, 1]], "gains": []}]}}):
        again.write_text(json.dumps({"selected": [[0, 1]], **wrong}))
        with pytest.raises(SystemExit):
            main([*ablate, str(again)])
        assert "not one number for each of its heads" in " ".join(capsys.readouterr().err.split())
    for others in (["mean"], ["gain", "--target", "0.5", "--target-metric", "DP"]):  # which need no gains of the map
        main(["ablate", "--model", str(clip), *quick, "--json", "-", "--from", str(again), "--kind", *others])
        assert "The gains are those of the head map." not in json.loads(capsys.readouterr().out)["notes"]


def test_gains_are_learned_for_a_target_with_the_groups(clip, faces, capsys, tmp_path) -> None:
    edit = ["--kind", "gain", "--target", "0.5", "--target-metric", "DP", "--draws", "3", "--n-boot", "100"]
    ablate = ["ablate", "--model", str(clip), *common(faces), "--json", "-"]
    main([*ablate, *edit, "--save", str(tmp_path / "model")])
    content = json.loads(capsys.readouterr().out)
    assert sorted(content["selected"]) == np.argwhere(np.array(content["gains"]) != 1).tolist()
    assert any("learned with the groups of the selection half" in note for note in content["notes"])
    assert content["doses"] is None, "the gains were learned for the target: no other dose is looked for"
    assert (content["effects"][-1]["kind"], content["effects"][-1]["way"]) == ("gain", "forward")
    assert "loaded again" in content["notes"][-1]
    with pytest.raises(SystemExit):
        main([*ablate, "--kind", "mean", "--heads", "L0H0", "--target", "0.5"])
    assert "--target is for --kind gain" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        main([*ablate, *edit, "--strength", "0.5"])
    assert "--strength is 0.5: leave it out" in " ".join(capsys.readouterr().err.split())


def test_the_cheapest_edit_is_chosen_on_one_half_and_reported_on_the_other(clip, faces, capsys, tmp_path) -> None:
    plan = ["--target", "0.7", "--target-metric", "DP", "--n-boot", "100", "--draws", "3", "--out", str(tmp_path)]
    main(["locate", "--model", str(clip), *common(faces), *plan])
    doses = json.loads((tmp_path / "headmap.json").read_text())["doses"]
    assert doses["tried"] > 10
    chosen = doses["chosen"]
    assert chosen["gap"] < chosen["upper"] <= 0.7 * abs(doses["before"])
    assert {d["metric"] for d in chosen["reported"]} == {"DP", "accuracy"}
    assert "cheapest that is predicted to bring" in " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "report.html").read_text()
    assert 0 < page.find("cheapest that is predicted to bring") < page.find("Head maps"), "among the findings"
    kind, _, strength = chosen["kind"].partition("@")
    heads = ",".join(f"L{layer}H{head}" for layer, head in chosen["heads"])
    edit = ["--kind", kind, "--strength", strength or "1", "--heads", heads, "--n-boot", "100", "--draws", "3"]
    main(["ablate", "--model", str(clip), *common(faces), *edit, "--json", "-"])
    forward = json.loads(capsys.readouterr().out)["effects"][-1]["metrics"]
    after = next(m["after"] for m in forward if m["metric"] == "DP")
    assert after == pytest.approx(next(d["b"] for d in chosen["reported"] if d["metric"] == "DP"))


def test_another_model_is_shown_beside(located, clip, faces, capsys, tmp_path) -> None:
    edit = ["--heads", "L1H0,L1H1", "--kind", "zero", "--draws", "2", "--n-boot", "100", "--save", str(tmp_path / "b")]
    main(["ablate", "--model", str(clip), *common(faces), *edit])
    tokenizer().save_pretrained(tmp_path / "b")
    capsys.readouterr()
    quick = [
        "--n-boot",
        "100",
        "--draws",
        "2",
        "--rank",
        "gap",
        "--out",
        str(tmp_path),
        "--features",
        str(tmp_path / "f"),
    ]
    main(["locate", "--model", str(clip), "--against", str(tmp_path / "b"), *common(faces), *quick])
    assert sum(path.is_dir() for path in (tmp_path / "f").iterdir()) == 2, "each has terms of its own"
    assert "Heads whose direct contribution differs most" in capsys.readouterr().out
    against = json.loads((tmp_path / "headmap.json").read_text())["against"]
    assert np.allclose(np.array(against["theirs"]["values"])[1, :2], 0, atol=1e-6)
    assert "Compared with b" in (tmp_path / "report.html").read_text()


def test_an_encoder_of_patches_alone_is_read_at_their_mean(faces, tmp_path) -> None:
    """I-JEPA has no first token that stands for the picture: its first token is one patch."""
    torch.manual_seed(0)
    saved(hf.IJepaModel(hf.IJepaConfig(**VIT)).eval(), tmp_path)
    session = open_session(Source(str(tmp_path), f"fairface:{faces}", "gender", "age", device="cpu"))
    with torch.no_grad():
        states = session.inputs.model(**next(session.inputs.batches(np.arange(3)))).last_hidden_state
    np.testing.assert_allclose(session.features.output[:3], states.mean(1), atol=1e-5)
