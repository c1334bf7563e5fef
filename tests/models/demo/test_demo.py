"""The demo: honest data, and the whole run on a tiny budget."""

import errno
import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import fairhead
from fairhead.cli import main
from fairhead.demo import DemoPlan, run_demo, shaded_digits
from fairhead.errors import InputError
from fairhead.records import Records
from fairhead.report import Report

TINY = DemoPlan(epochs=2, encoder_epochs=1, learning_rate=3e-3, layers=2, heads=4, width=16, controls=20, n_boot=100)
# Just enough training that the model sees more than the shade: before that, no single head makes a difference.
TRAINED = replace(TINY, epochs=12, encoder_epochs=2, width=32)


def pixels(digits, part):
    """Pictures of one part, in [0, 1], [n, 8, 8]."""
    return np.stack([np.asarray(picture.convert("L")) for picture in digits.examples(part).inputs]) / 255


def light(pictures):
    """Whether a border of the picture, which is background in nearly every digit, is."""
    return pictures[:, :, 0].min(1) > 0.25


def shades(digits, part):
    return digits.groups(digits.examples(part).ids)["shade"].values() == "light"


def test_the_shade_follows_the_label_in_nine_of_ten_training_pictures_and_in_none_of_the_test():
    digits = shaded_digits(seed=3, validation_bias=0.5)
    for part, share in (("train", 0.9), ("val", 0.5)):
        pictures, labels = pixels(digits, part), digits.examples(part).labels
        assert (light(pictures) == (labels == 1)).mean() == pytest.approx(share, abs=0.5 / len(labels))
        assert (light(pictures) == shades(digits, part)).all()
    test, pictures = digits.examples("test"), pixels(digits, "test")
    shade = shades(digits, "test")
    assert (shade == light(pictures)).all()
    assert [test.labels[shade == s].mean() for s in (False, True)] == [test.labels.mean()] * 2
    rows = np.array([int(name.split("-")[1]) for name in test.ids]).reshape(-1, 2)
    assert (rows[:, 0] == rows[:, 1]).all()
    # A light picture is the dark one with the background lifted half-way, and scikit-learn's digit underneath.
    original = load_digits().images[rows[:, 0]] / 16
    np.testing.assert_allclose(pictures[0::2], original, atol=0.5 / 255 + 1e-6)
    np.testing.assert_allclose(pictures[1::2], 0.5 + original / 2, atol=0.5 / 255 + 1e-6)
    assert (load_digits().target[rows[:, 0]] % 2 == test.labels[0::2]).all()


def test_no_digit_is_in_two_parts():
    digits = shaded_digits()
    # Undo the shade, whichever it is, and compare pictures.
    parts = []
    for part in ("train", "val", "test"):
        pictures = pixels(digits, part)
        background = np.where(light(pictures), 0.5, 0.0)[:, None, None]
        plain = np.round((pictures - background) / (1 - background) * 16).astype(int)
        parts.append({picture.tobytes() for picture in plain})
    assert sum(map(len, parts)) == len({d.tobytes() for d in load_digits().images.astype(int)})


def without_times(folder):
    """The report of a run, but for what differs between two equal runs: seconds, and the folder's own name."""
    text = (folder / "report.json").read_text().replace(str(folder), "FOLDER")
    report = json.loads(text)
    report["provenance"].pop("seconds")
    return report


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run, what it found, and what it told on its way."""
    folder, told = tmp_path_factory.mktemp("demo"), []
    found = run_demo(folder, TRAINED, lambda *stage: told.append(stage))
    return folder, found, told


def test_the_same_seed_gives_the_same_report_and_another_seed_another(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_demo(tmp_path / name, replace(TINY, seed=seed))
        torch.manual_seed(12345)  # the state of the process must not matter
    assert without_times(tmp_path / "a") == without_times(tmp_path / "b")
    for name in ("plain/records.csv", "auto/records.csv", "discovered/groups.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert without_times(tmp_path / "a")["sections"] != without_times(tmp_path / "c")["sections"]


def test_the_report_is_valid_and_its_figures_come_from_the_records(trained):
    out, found, told = trained
    report = json.loads((out / "report.json").read_text())
    Report.from_dict(report)
    assert "command" not in report["provenance"]  # it was no command that made it
    assert found.report == out / "report.html"
    assert found.verdict[1:] == tuple(line["text"] for line in report["verdict"])
    audits = {s["title"]: s["audit"] for s in report["sections"] if s["kind"] == "audit"}
    for name, file in (("Audit of plain training", "plain"), ("Audit of auto", "auto")):
        table = Records.read(out / file / "records.csv", prediction="prediction", groups="shade")
        estimates = {e["metric"]: e["value"] for e in audits[name]["estimates"]}
        assert estimates["EOd"] == pytest.approx(fairhead.audit(table, n_boot=100)["EOd"].value)
    kinds = [section["kind"] for section in report["sections"]]
    assert kinds[:7] == ["text", "clusters", "tables", "comparison", "audit", "tables", "audit"]
    assert "headmaps" in kinds[7:]
    stages = {"training the encoder", "plain training", "discover", "training by auto"}
    assert stages < {stage for stage, *_ in told}


def test_the_shade_is_discovered_and_no_training_is_told_of_it(trained):
    out = trained[0]
    found = json.loads((out / "discovered" / "discovered.json").read_text())
    (agreement,) = found["agreement"]
    assert agreement["group_by"] == "shade"
    assert agreement["adjusted_rand"] > 0.9
    for run in ("encoder", "plain", "auto"):
        assert not json.loads((out / run / "run.json").read_text())["uses_groups"]


def test_saved_models_answer_as_the_records_say(trained):
    out = trained[0]
    digits = shaded_digits(TRAINED.seed)
    for name in ("plain", "auto"):
        saved = Records.read(out / name / "records.csv", prediction="prediction", score="score", id="id")
        again = fairhead.predict(out / name / "model", digits)
        assert again.id.tolist() == saved.id.tolist()
        np.testing.assert_allclose(again.scores, saved.scores, atol=1e-5)


def test_a_folder_that_cannot_be_made_is_told_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        run_demo(tmp_path / "file" / "out", TINY)
    with pytest.raises(InputError, match="cannot be written"):
        run_demo(tmp_path / "file", TINY)


def test_a_folder_that_cannot_be_written_to_is_told_before_the_work(tmp_path, monkeypatch):
    def refuse(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("fairhead.store.tempfile.TemporaryFile", refuse)
    told = []
    with pytest.raises(InputError, match="Read-only file system; give another folder"):
        run_demo(tmp_path, TINY, lambda *stage: told.append(stage))
    assert not told


def test_the_command_prints_the_verdict_and_the_place(tmp_path, monkeypatch, capsys):
    import fairhead.demo

    def tiny_run(out, plan, tell, command):
        return run_demo(out, replace(TINY, seed=plan.seed), tell, command)

    monkeypatch.setattr(fairhead.demo, "run_demo", tiny_run)
    monkeypatch.setenv("FAIRHEAD_DEMO_SEED", "2")
    main(["demo", "--out", str(tmp_path / "out")])
    out, err = capsys.readouterr()
    assert "- This is one training run:" in out
    assert out.endswith(f"report: {tmp_path / 'out' / 'report.html'}\n")
    assert "plain training: 2 of 2" in err
    provenance = json.loads((tmp_path / "out" / "report.json").read_text())["provenance"]
    assert provenance["seed"] == 2
    assert provenance["command"] == f"FAIRHEAD_DEMO_SEED=2 fairhead demo --out {tmp_path / 'out'}"


def test_an_interrupted_run_says_so_and_writes_no_report(tmp_path, monkeypatch, capsys):
    def interrupt(*_, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("fairhead.demo.shaded_digits", interrupt)
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--out", str(tmp_path)])
    assert stopped.value.code == 130
    assert capsys.readouterr().err.strip() == "fairhead: interrupted"
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
