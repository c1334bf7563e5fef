"""The demo: honest data, a verdict that follows the intervals, and the whole run on a tiny budget."""

import errno
import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import fairhead
from fairhead.audit import Audit, Comparison, Difference, Estimate
from fairhead.cli import main
from fairhead.demo import DemoPlan, run_demo
from fairhead.demo.digits import shaded_digits
from fairhead.demo.writeup import _ablation_line, _in_words, _plain_line, _trade
from fairhead.errors import InputError
from fairhead.locate.ablation import Ablation
from fairhead.locate.head_maps import Head
from fairhead.mitigate import load
from fairhead.records import Records
from fairhead.report import Report
from fairhead.train import TrainingPlan, predict

TINY = DemoPlan(
    training=TrainingPlan(epochs=2, learning_rate=3e-3), layers=2, heads=4, width=16, controls=20, n_boot=100
)
# Just enough training that the model sees more than the shade: before that, no single head makes a difference.
TRAINED = replace(TINY, training=TrainingPlan(epochs=10, learning_rate=5e-3), width=32)


def corner(examples):
    """A corner pixel, which is background in nearly every digit: its median shade."""
    return examples.inputs["pixel_values"][:, 0, :, 0].amin(1).numpy()


def test_the_shade_follows_the_label_in_nine_of_ten_training_pictures_and_in_none_of_the_test():
    digits = shaded_digits(seed=3)
    for part in (digits.train, digits.validation):
        light = corner(part) > -0.5
        agrees = (light == (part.labels.numpy() == 1)).mean()
        assert agrees == pytest.approx(0.9, abs=0.5 / len(part))
    test = digits.test
    assert (digits.test_shade == (corner(test) > -0.5)).all()
    labels = test.labels.numpy()
    assert [labels[digits.test_shade == s].mean() for s in (0, 1)] == [labels.mean()] * 2
    pairs = digits.test_digit.reshape(-1, 2)
    assert (pairs[:, 0] == pairs[:, 1]).all()
    # A light picture is the dark one with the background lifted half-way, and scikit-learn's digit underneath.
    pixels = (test.inputs["pixel_values"][:, 0].numpy() + 1) / 2
    original = load_digits().images[pairs[:, 0]] / 16
    np.testing.assert_allclose(pixels[0::2], original, atol=1e-6)
    np.testing.assert_allclose(pixels[1::2], 0.5 + original / 2, atol=1e-6)
    assert (load_digits().target[pairs[:, 0]] % 2 == labels[0::2]).all()


def test_no_digit_is_in_two_parts():
    digits = shaded_digits()
    # Undo the shade, whichever it is, and compare pictures.
    parts = []
    for part in (digits.train, digits.validation, digits.test):
        pixels = (part.inputs["pixel_values"][:, 0].numpy() + 1) / 2
        background = np.where(corner(part) > -0.5, 0.5, 0.0)[:, None, None]
        plain = np.round((pixels - background) / (1 - background) * 16).astype(int)
        parts.append({picture.tobytes() for picture in plain})
    assert sum(map(len, parts)) == len({d.tobytes() for d in load_digits().images.astype(int)})


@pytest.mark.parametrize(
    ("metric", "value", "half", "tone", "words"),
    [
        ("EOd", -0.05, 0.02, "good", "reduces EOd by 5.0 points (95 % interval −7.0 to −3.0, corrected p = 0.010)"),
        ("EOd", 0.05, 0.02, "bad", "raises EOd by 5.0 points"),
        ("EOd", -0.05, 0.06, "unclear", "not significant"),
        ("accuracy", 0.05, 0.02, "good", "raises accuracy by 5.0 points"),
        ("accuracy", -0.05, 0.02, "bad", "lowers accuracy by 5.0 points"),
    ],
)
def test_words_follow_the_interval(metric, value, half, tone, words):
    found_tone, text = _in_words(difference(metric, value, half), "DAM attention", metric)
    assert found_tone == tone
    assert words in text


def without_times(report):
    report["provenance"].pop("seconds")
    return report


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    told = []
    found = run_demo(folder / "a", TRAINED, lambda *stage: told.append(stage))
    torch.manual_seed(12345)  # the state of the process must not matter
    run_demo(folder / "b", TRAINED)
    return folder, found, told


def test_the_same_seed_gives_the_same_report_and_another_seed_another(two_runs):
    folder, _, _ = two_runs
    first, second = (json.loads((folder / name / "report.json").read_text()) for name in "ab")
    assert without_times(first) == without_times(second)
    for path in sorted((folder / "a" / "records").iterdir()):
        assert path.read_bytes() == (folder / "b" / "records" / path.name).read_bytes()
    for seed in (0, 1):
        run_demo(folder / f"seed {seed}", replace(TINY, seed=seed))
    of_0, of_1 = (json.loads((folder / f"seed {seed}" / "report.json").read_text()) for seed in (0, 1))
    assert without_times(of_0)["sections"] != without_times(of_1)["sections"]


def test_the_report_is_valid_and_its_figures_come_from_the_records(two_runs):
    folder, found, told = two_runs
    out = folder / "a"
    report = json.loads((out / "report.json").read_text())
    Report.from_dict(report)
    assert "command" not in report["provenance"]  # it was no command that made it
    assert found.report == out / "report.html"
    assert found.verdict == tuple(line["text"] for line in report["verdict"])
    assert all(text in (out / "report.html").read_text() for text in ("Plain training", "DAM attention"))
    audits = {s["name"]: s["audit"] for s in report["sections"] if s["kind"] == "audit"}
    for name, file in (("plain training", "plain"), ("DAM attention", "dam")):
        table = Records.read(out / "records" / f"{file}.csv", prediction="prediction", groups="shade")
        estimates = {e["metric"]: e["value"] for e in audits[name]["estimates"]}
        assert estimates["EOd"] == pytest.approx(fairhead.audit(table, n_boot=100)["EOd"].value)
    kinds = [section["kind"] for section in report["sections"]]
    assert kinds == ["text", "audit", "audit", "comparison", "headmap", "ablation", "ablation"]
    stages = {"plain training", "training with DAM", "audit", "scoring heads", "ablating heads and controls"}
    assert {stage for stage, *_ in told} == stages


def test_without_a_head_to_blame_the_report_says_so(tmp_path):
    (tmp_path / "records").mkdir()
    for name in ("plain-half", "plain-half-heads-ablated", "mine"):
        (tmp_path / "records" / f"{name}.csv").write_text("of an earlier run")
    found = run_demo(tmp_path, replace(TINY, most_heads=0, training=TrainingPlan(epochs=1)))
    assert sorted(path.stem for path in (tmp_path / "records").iterdir()) == ["dam", "mine", "plain"]
    assert any(line.startswith("No head, taken out alone, lowers") for line in found.verdict)
    kinds = [section["kind"] for section in json.loads((tmp_path / "report.json").read_text())["sections"]]
    assert kinds == ["text", "audit", "audit", "comparison", "headmap"]


def test_saved_models_answer_as_the_records_say(two_runs):
    out = two_runs[0] / "a"
    digits = shaded_digits(TINY.seed)
    for name in ("plain", "dam"):
        saved = Records.read(out / "records" / f"{name}.csv", prediction="prediction", score="score")
        again = predict(load(out / "models" / name), digits.test)[:, 1].numpy()
        np.testing.assert_allclose(again, saved.scores, atol=1e-5)


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
    assert "- Plain training:" in out
    assert out.endswith(f"report: {tmp_path / 'out' / 'report.html'}\n")
    assert "plain training: 2 of 2" in err
    provenance = json.loads((tmp_path / "out" / "report.json").read_text())["provenance"]
    assert provenance["seed"] == 2
    assert provenance["command"] == f"FAIRHEAD_DEMO_SEED=2 fairhead demo --out {tmp_path / 'out'}"


def test_an_interrupted_run_says_so_and_writes_no_report(tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fairhead.demo.story.fit", interrupt)
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--out", str(tmp_path)])
    assert stopped.value.code == 130
    assert capsys.readouterr().err.strip() == "fairhead: interrupted"
    assert not list(tmp_path.iterdir())


def difference(metric, value, half=0.0, p=0.01):
    ideal = 1.0 if metric == "accuracy" else 0.0
    return Difference(metric, None, 0.5, 0.5 + value, value, value - half, value + half, 9, p, p, ideal=ideal)


def test_a_model_compared_with_itself_is_unclear():
    assert _in_words(difference("EOd", 0.0), "It", "EOd")[0] == "unclear"


@pytest.mark.parametrize(("low", "tone"), [(0.0, "unclear"), (0.004, "note"), (0.06, "bad")])
def test_words_on_plain_training_follow_how_small_the_gap_may_be(low, tone):
    estimates = (Estimate("EOd", "shade", 0.1, low, 0.2, 300, 0.0), Estimate("accuracy", None, 0.9, 0.8, 1.0, 300, 1.0))
    alone = Audit(estimates, (), {})
    assert _plain_line(Comparison((), alone, alone, {})).tone == tone


def test_a_difference_needs_its_corrected_p_too():
    assert _in_words(difference("EOd", -0.05, 0.02, p=0.06), "It", "EOd")[0] == "unclear"


def test_a_smaller_gap_at_the_price_of_accuracy_is_not_praised():
    smaller = difference("EOd", -0.1, 0.02)
    assert _trade("DAM attention", smaller, difference("accuracy", -0.03, 0.01))[0] == "note"
    assert _trade("DAM attention", smaller, difference("accuracy", -0.01, 0.02))[0] == "good"


@pytest.mark.parametrize(
    ("value", "controls", "tone", "words"),
    [
        (-0.1, [0.0] * 40, "good", "0 lower EOd as much (p = 0.024)"),
        (-0.1, [-0.2] * 40, "unclear", "So the effect is not special to the chosen heads."),
        (-0.1, [0.0] * 3, "note", "too few of them to rule out chance"),
        (0.1, [0.0] * 40, "bad", "40 raise EOd less, or lower it"),
        (0.1, [0.2] * 40, "bad", "0 raise EOd less, or lower it"),
        (-0.01, [-0.2] * 40, "unclear", "not significant"),
    ],
)
def test_words_on_the_heads_follow_the_interval_and_the_controls(value, controls, tone, words):
    accuracy = difference("accuracy", 0.0, 0.02)
    heads = Ablation(
        (Head(0, 1),), difference("EOd", value, 0.02), tuple(controls), True, accuracy, tuple(0.0 for _ in controls)
    )
    line = _ablation_line(heads)
    assert line.tone == tone
    assert words in line.text
    assert ("not special" in line.text) == ("not special" in words)
