"""A model's way through the rooms: mitigate, save, load, locate, edit, save, load, audit."""

import csv
import json

import numpy as np
import pytest
import torch
import transformers as hf
from made_faces import make_faces
from made_language import pairs as made
from made_language import planted_llama
from made_language import tokenizer as words
from made_posts import bert, tokenizer, write_posts

from fairhead import Records, audit, load
from fairhead.cli import main
from fairhead.data import read_labelled
from fairhead.language import load_scorer
from fairhead.mitigate import DAM
from fairhead.mitigate.without_training import SelfDebias
from fairhead.models import method_of, open_model
from fairhead.models.attached import positions_of
from fairhead.store import made_folder

TINY = {"width": 16, "mlp": 16, "image_size": 8, "patch_size": 4}
FRESH = ["--model", "vit-2x2", *(part for k, v in TINY.items() for part in ("--model-option", f"{k}={v}"))]
QUICK = ["--n-boot", "100", "--draws", "3", "--device", "cpu"]


def answers(folder, inputs):
    """Classes of a folder's model, straight from `load`; texts are padded as its method needs them."""
    opened = open_model(folder, dtype="float32")
    if isinstance(inputs[0], str):
        padding = {"padding": "max_length", "max_length": positions_of(opened.model) or 16, "truncation": True}
        batch = opened.tokenizer(inputs, return_tensors="pt", **padding)
    else:
        batch = opened.processor(inputs, return_tensors="pt")
    with torch.inference_mode():
        found = opened.model(**batch).logits.argmax(-1).tolist()
    return [opened.model.config.id2label[number] for number in found]


def records_of(folder):
    with (folder / "records.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def the_way(trained, spec, concept, task, tmp_path):
    """Locate on what training left, edit its heads, save, load and audit. Returns the edited folder."""
    data = ["--data", spec, "--concept", concept, "--task", task]
    main(["locate", "--model", str(trained), *data, *QUICK, "--out", str(tmp_path / "heads")])
    rows = read_labelled(spec, target=task, groups=(concept,)).all
    inputs = {str(name): rows.inputs[i] for i, name in enumerate(rows.ids)}
    said = records_of(tmp_path / "heads")
    assert [row["prediction"] for row in said] == answers(trained, [inputs[row["id"]] for row in said])

    edited = tmp_path / "edited"
    edit = ["--heads", "L0H0,L1H1", "--kind", "zero", "--tokens", "all", "--save", str(edited)]
    main(["ablate", "--model", str(trained), *data, *QUICK, *edit])
    assert method_of(load(edited)) == method_of(load(trained))
    main(["locate", "--model", str(edited), *data, *QUICK, "--out", str(tmp_path / "again")])
    said = records_of(tmp_path / "again")
    predicted = answers(edited, [inputs[row["id"]] for row in said])
    assert [row["prediction"] for row in said] == predicted
    labels, groups = [row["label"] for row in said], {concept: [row[concept] for row in said]}
    found = audit(Records.from_arrays(labels, predicted, groups=groups), group_by=[concept])
    assert found.estimates
    return edited


@pytest.mark.parametrize("method", ["erm", "dam"])
def test_an_image_model(method, tmp_path, capsys):
    spec = f"utkface:{make_faces(tmp_path / 'faces', 640)}"  # a tenth is left to locate heads on
    plan = [
        "--epochs",
        "2",
        "--batch-size",
        "32",
        "--lr",
        "1e-2",
        "--device",
        "cpu",
        "--cache",
        str(tmp_path / "cache"),
    ]
    of_race = ["--data-option", "target=race", "--data-option", "groups=[gender]"]
    main(["mitigate", method, "--data", spec, *of_race, *FRESH, *plan, "--out", str(tmp_path / "run")])
    trained = tmp_path / "run" / "model"
    assert method_of(load(trained)) == (DAM() if method == "dam" else None)
    edited = the_way(trained, spec, "gender", "race", tmp_path)
    # The heads that were edited are still, whatever the model carries.
    weight = load(edited).vit.layers[1].attention.o_proj.weight.detach()
    assert (weight[:, 8:] == 0).all()
    assert (weight[:, :8] != 0).any()
    maps = ["--model", str(edited), "--against", str(trained), "--data", spec, "--out", str(tmp_path / "maps")]
    main(["attention", *maps, *of_race, "--device", "cpu", "--pictures", "2", "--part", "train"])
    if method == "dam":  # q and k as attention goes on with them: absolute values
        twin = json.loads((tmp_path / "maps/attention.json").read_text())
        assert all(min(shape["edges"]) >= 0 for side in twin["assumption"].values() for shape in side["chosen"])


def test_a_text_model(tmp_path, capsys):
    spec = f"hatexplain:{write_posts(made_folder(tmp_path / 'posts'))}"
    bert().bert.save_pretrained(tmp_path / "encoder")
    tokenizer().save_pretrained(tmp_path / "encoder")
    plan = ["--epochs", "1", "--batch-size", "32", "--lr", "1e-3", "--max-length", "12", "--device", "cpu"]
    model = ["--model", str(tmp_path / "encoder"), "--data-option", "target=toxic"]
    main(["mitigate", "dam", "--data", spec, *model, *plan, "--out", str(tmp_path / "run")])
    trained = tmp_path / "run" / "model"
    assert positions_of(load(trained)) == 12
    edited = the_way(trained, spec, "Women", "toxic", tmp_path)
    attention = ["--data", spec, "--group", "Women", "--data-option", "target=toxic", "--device", "cpu"]
    main(["attention", "--model", str(edited), *attention, "--out", str(tmp_path / "maps")])


@pytest.fixture
def crows(tmp_path):
    file = tmp_path / "crows_pairs_anonymized.csv"
    with file.open("w", newline="") as handle:
        rows = csv.writer(handle)
        rows.writerow(["", "sent_more", "sent_less", "stereo_antistereo", "bias_type", "annotations"])
        for pair in made():
            rows.writerow([pair.id, pair.more, pair.less, pair.direction, pair.bias_type, "[['gender']]"])
    return file


def test_a_language_model(crows, tmp_path, capsys):
    """Trained with an adapter, located, edited, and read with self-debiasing at last."""
    planted_llama().save_pretrained(tmp_path / "base")
    words().save_pretrained(tmp_path / "base")
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(
        load(tmp_path / "base"), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    run = ["--data", f"crows:{crows}", "--n-boot", "100", "--draws", "3", "--device", "cpu"]
    main(["locate", "--model", str(tmp_path / "adapter"), *run, "--out", str(tmp_path / "heads")])
    edit = ["--from", str(tmp_path / "heads" / "headmap.json"), "--kind", "zero", "--save", str(tmp_path / "edited")]
    main(["ablate", "--model", str(tmp_path / "adapter"), *run, *edit])
    ids = torch.tensor([[0, 1, 2, 3, 4]])
    plain = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "edited")(ids).logits
    torch.testing.assert_close(load(tmp_path / "edited")(ids).logits, plain, rtol=0, atol=0)

    debiased = tmp_path / "debiased"
    settings = ["--bias-type", "word1", "--device", "cpu"]
    main(["mitigate", "self_debias", "--model", str(tmp_path / "edited"), *settings, "--out", str(debiased)])
    assert isinstance(method_of(load(debiased)), SelfDebias)
    scores = load_scorer(debiased, device="cpu").model(ids).logits
    torch.testing.assert_close(load(debiased)(ids).logits, scores, rtol=0, atol=0)
    assert (scores - plain.log_softmax(-1)).abs().max() > 1e-4
    result = tmp_path / "result.json"
    main(["lm", "crows", "--model", str(debiased), "--data", str(crows), "--device", "cpu", "--json", str(result)])
    found = {e["metric"]: e["value"] for e in json.loads(result.read_text())["estimates"]}
    assert np.isfinite(found["ss"])
    with pytest.raises(SystemExit):  # and not silently without it
        main(["locate", "--model", str(debiased), *run])
    assert "carries SelfDebias" in capsys.readouterr().err
