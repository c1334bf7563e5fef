"""The worked examples of CONTRIBUTING.md ("Add a method"), as a newcomer would follow them."""

import json
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from language_models import saved, write_stereoset
from made_faces import make_faces
from torch.nn.functional import cross_entropy

import fairhead
from fairhead.cli import main
from fairhead.mitigate import METHODS, MethodEntry, method

PAGE = Path(__file__).parents[3] / "CONTRIBUTING.md"
ENTRIES = {
    "focal": MethodEntry("focal", "focal_example:Focal", "rows that the model is sure of count less"),
    "anti_only": MethodEntry("anti_only", "anti_only_example:AntiOnly", "anti-stereotypes alone", "language"),
}


@pytest.fixture(params=["line", "entry point"])
def added(request, tmp_path, monkeypatch):
    """The methods of the page, by a line in the registry or by another package."""
    for name, entry in ENTRIES.items():
        (code,) = re.findall(rf"<!-- example: {name}.py -->\n```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
        (tmp_path / f"{name}_example.py").write_text(code)
        if request.param == "line":
            monkeypatch.setitem(METHODS, name, entry)
    points = [EntryPoint(name, f"test_own_method:{name.upper()}", "fairhead.methods") for name in ENTRIES]
    if request.param == "entry point":
        monkeypatch.setattr(fairhead, "entry_points", lambda group: [p for p in points if p.group == group])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield
    for name in ENTRIES:
        sys.modules.pop(f"{name}_example", None)


FOCAL, ANTI_ONLY = ENTRIES.values()


def test_the_classifier_of_the_page_is_trained_by_the_command(added, tmp_path, capsys):
    faces, out = make_faces(tmp_path / "faces"), tmp_path / "out"
    sizes = [f"--model-option={size}" for size in ("width=16", "mlp=16", "image_size=8", "patch_size=4")]
    given = ["--data", f"utkface:{faces}", "--model", "vit-2x2", *sizes, "--epochs", "2", "--batch-size", "32"]
    given += ["--device", "cpu", "--cache", str(tmp_path / "cache"), "--out", str(out)]
    main(["mitigate", "focal", *given, "--option", "gamma=1"])
    run = json.loads((out / "run.json").read_text())
    assert run["effective"]["method"] == {"name": "focal", "options": {"gamma": 1}}
    assert (out / "model" / "model.safetensors").is_file()
    with pytest.raises(SystemExit):
        main(["mitigate", "focal", *given, "--option", "gamma=-1"])
    assert "method 'focal': gamma is -1; expected a number of at least 0" in capsys.readouterr().err


def test_the_focal_loss_of_the_page_is_what_it_says(added):
    import torch

    logits, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    output = type("Output", (), {"logits": logits})
    plain = cross_entropy(logits, labels)
    assert method("focal", gamma=0).loss(output, labels, labels) == pytest.approx(plain.item())
    p = logits.softmax(-1)[:, 0]
    assert method("focal").loss(output, labels, labels) == pytest.approx(float((-((1 - p) ** 2) * p.log()).mean()))
    assert method("focal").priors["gamma"].low == 0.5


def test_the_language_method_of_the_page_is_trained_by_its_own_command(added, tmp_path, capsys):
    saved(tmp_path / "model")
    write_stereoset(tmp_path / "dev.json")
    given = ["--model", str(tmp_path / "model"), "--data", f"stereoset:{tmp_path / 'dev.json'}", "--device", "cpu"]
    main(["mitigate", "anti_only", *given, "--out", str(tmp_path / "out"), "--weight", "2", "--held-out", "0"])
    record = json.loads((tmp_path / "out" / "fairhead-training.json").read_text())
    assert (record["method"], record["settings"]) == ("anti_only", {"weight": 2.0})
    assert len(record["history"]) == 1
    with pytest.raises(SystemExit):
        main(["mitigate", "anti_only", *given, "--out", str(tmp_path / "other"), "--weight", "0"])
    assert "--weight is 0.0; expected a number above 0" in capsys.readouterr().err
