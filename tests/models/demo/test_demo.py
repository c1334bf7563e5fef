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
from fairhead.demo import DemoPlan, _choice_line, _in_words, _plain_line, _trade, run_demo, shaded_digits
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


def without_times(folder):
    """The report of a run, but for what differs between two equal runs: seconds, and the folder's own name."""
    text = (folder / "report.json").read_text().replace(str(folder), "FOLDER")
    report = json.loads(text)
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
    assert without_times(folder / "a") == without_times(folder / "b")
    for name in ("plain/records.csv", "auto/records.csv", "discovered/groups.csv"):
        assert (folder / "a" / name).read_bytes() == (folder / "b" / name).read_bytes()
    for seed in (0, 1):
        run_demo(folder / f"seed {seed}", replace(TINY, seed=seed))
    of_0, of_1 = (without_times(folder / f"seed {seed}") for seed in (0, 1))
    assert of_0["sections"] != of_1["sections"]


def test_the_report_is_valid_and_its_figures_come_from_the_records(two_runs):
    folder, found, told = two_runs
    out = folder / "a"
    report = json.loads((out / "report.json").read_text())
    Report.from_dict(report)
    assert "command" not in report["provenance"]  # it was no command that made it
    assert found.report == out / "report.html"
    assert found.verdict == tuple(line["text"] for line in report["verdict"])
    assert all(text in (out / "report.html").read_text() for text in ("Plain training", "The model that auto selected"))
    audits = {s["title"]: s["audit"] for s in report["sections"] if s["kind"] == "audit"}
    for name, file in (("Plain training", "plain"), ("The model that auto selected", "auto")):
        table = Records.read(out / file / "records.csv", prediction="prediction", groups="shade")
        estimates = {e["metric"]: e["value"] for e in audits[name]["estimates"]}
        assert estimates["EOd"] == pytest.approx(fairhead.audit(table, n_boot=100)["EOd"].value)
    kinds = [section["kind"] for section in report["sections"]]
    assert kinds[:7] == ["text", "clusters", "tables", "tables", "audit", "audit", "comparison"]
    assert "headmaps" in kinds[7:]
    stages = {"training the encoder", "plain training", "discover", "training by auto"}
    assert stages < {stage for stage, *_ in told}


def test_the_shade_is_discovered_and_no_training_is_told_of_it(two_runs):
    out = two_runs[0] / "a"
    found = json.loads((out / "discovered" / "discovered.json").read_text())
    (agreement,) = found["agreement"]
    assert agreement["group_by"] == "shade"
    assert agreement["adjusted_rand"] > 0.9
    for run in ("encoder", "plain", "auto"):
        assert not json.loads((out / run / "run.json").read_text())["uses_groups"]


def test_saved_models_answer_as_the_records_say(two_runs):
    out = two_runs[0] / "a"
    digits = shaded_digits(TRAINED.seed)
    for name in ("plain", "auto"):
        saved = Records.read(out / name / "records.csv", prediction="prediction", score="score", id="id")
        again = fairhead.predict(out / name / "model", digits)
        assert again.id.tolist() == saved.id.tolist()
        np.testing.assert_allclose(again.scores, saved.scores, atol=1e-5)


CANDIDATES = [
    {"name": "plain", "accuracy": 0.98, "spread": 0.04, "cost": 0.0, "cost_se": 0.0},
    {"name": "balance", "accuracy": 0.97, "spread": 0.01, "cost": 0.01, "cost_se": 0.01},
]


@pytest.mark.parametrize(
    ("notes", "tone", "words"),
    [
        (
            {"kept": "balance", "tried": CANDIDATES, "price": 2.0},
            "note",
            "spread between clusters of 1.0 points (4.0 with plain training)",
        ),
        (
            {"kept": "plain", "tried": CANDIDATES, "price": 2.0},
            "unclear",
            "selected plain training: no other candidate",
        ),
        ({"kept": "plain"}, "note", "only plain training"),
    ],
)
def test_words_on_the_choice_say_what_was_kept(notes, tone, words):
    line = _choice_line(notes)
    assert line.tone == tone
    assert words in line.text


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
    def interrupt(*_, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("fairhead.demo.shaded_digits", interrupt)
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--out", str(tmp_path)])
    assert stopped.value.code == 130
    assert capsys.readouterr().err.strip() == "fairhead: interrupted"
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


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
