"""Strings from data on their way out: to terminals, pipes of any encoding, and JSON."""

import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress as Bars

import fairhead
from fairhead.cli import main
from fairhead.cli.common import Progress, _columns
from fairhead.records import Records
from fairhead.report.terminal_tables import show_audit

HOSTILE = ["\x1b[31mred\x07", "\u202egnp.exe", "[bold]x[/]", "Zoë – ŷ", "\ud800", "nul\0"]
ARGUMENTS = ["--label", "y", "--pred", "yhat", "--group", "race", "--n-boot", "100"]


@pytest.fixture
def answers(tmp_path):
    path = tmp_path / "answers.jsonl"
    rows = [{"y": i % 2, "yhat": i // 2 % 2, "race": HOSTILE[i // 4 % len(HOSTILE)]} for i in range(960)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ran(answers, encoding, *arguments):
    command = [sys.executable, "-m", "fairhead", "audit", str(answers), *ARGUMENTS, *arguments]
    environment = {"PYTHONIOENCODING": encoding, "COLUMNS": "160", "PATH": ""}
    return subprocess.run(command, capture_output=True, check=True, env=environment).stdout


def test_strings_from_data_do_not_steer_the_terminal(answers):
    shown = ran(answers, "utf-8").decode()
    assert not {"\x1b", "\x07", "\0", "\u202e"} & set(shown)
    for written in [r"\x1b[31mred\x07", r"\u202egnp.exe", "[bold]x[/]", "Zoë – ŷ", r"\ud800", r"nul\x00"]:
        assert written in shown


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_json_is_json_in_every_encoding(answers, encoding):
    found = json.loads(ran(answers, encoding, "--json", "-").decode(encoding))
    assert {group["group"] for group in found["by_group"]} == set(HOSTILE)
    assert b"accuracy" in ran(answers, encoding)  # the table, too


@pytest.mark.parametrize(
    ("closed", "words", "code", "told"),
    [
        ("<&-", "audit -", 2, "standard input is closed: give a file instead of -"),
        ("<&-", "audit {answers}", 0, ""),
        (">&-", "audit {answers} --json -", 2, "standard output is closed: give a file instead of -"),
        (">&-", "audit {answers}", 0, ""),
        ("> /dev/full", "audit {answers}", 2, "No space left on device"),
    ],
)
def test_a_closed_or_full_stream_is_one_line(answers, closed, words, code, told):
    words = [word.format(answers=answers) for word in words.split()]
    command = ["bash", "-c", f'"$@" {closed}', "bash", sys.executable, "-m", "fairhead", *words, *ARGUMENTS]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (code, f"fairhead: error: {told}\n" if told else "")


def test_json_files_and_pages_hold_any_string(answers, tmp_path):
    main(["audit", str(answers), *ARGUMENTS, "--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "page.html")])
    found = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert {group["group"] for group in found["by_group"]} == set(HOSTILE)
    assert "Zoë – ŷ" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_progress_keeps_its_figures_on_a_narrow_terminal(width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    bars = Bars(*_columns(), console=console)
    stages = Progress(bars)
    stages.tell("plain training", 12, 30, "loss 0.026, validation accuracy 0.967")
    stages.tell("ablating heads and controls", 315, 630, "227 sets of heads a picture")
    console.print(bars.make_tasks_table(bars.tasks))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= width
    for line, words in zip(lines, (["plain training", "12/30"], ["heads and controls", "315/630"]), strict=True):
        assert all(word in line for word in [*words, "0:00:0"]), line


def test_no_width_cuts_a_word_of_a_comparison():
    rng = np.random.default_rng(0)
    label, group = rng.integers(2, size=600), rng.choice(["a", "b"], size=600)
    both = [np.where(rng.random(600) < right, label, 1 - label) for right in (0.8, 0.7)]
    found = fairhead.compare(
        *(
            Records.from_arrays(label, prediction, groups={"race": group}, cluster=np.arange(600) // 3)
            for prediction in both
        ),
        n_boot=100,
        n_perm=500,
    )
    for width in range(60, 130):
        console = Console(file=io.StringIO(), width=width)
        found.show(console, ("a", "b"))
        shown = set(re.findall(r"\w+", console.file.getvalue()))
        assert {word for word in shown if word.startswith(("differ", "wors", "sig"))} <= {
            *("difference", "differs", "worse", "worst", "significant")
        }, width


@pytest.mark.parametrize("width", [80, 100])
def test_no_name_of_a_group_or_of_its_column_is_broken(width):
    label = np.arange(400) // 2 % 2
    groups = {"perceived_gender": np.array(["not-Hispanic-or-Latino", "Hispanic or Latino"])[np.arange(400) % 2]}
    console = Console(file=io.StringIO(), width=width)
    show_audit(console, fairhead.audit(Records.from_arrays(label, label, groups=groups), metrics=["DP"], n_boot=100))
    table = console.file.getvalue().partition("gaps in points")[0].partition("intervals")[2]
    assert {"perceived_gender", "not-Hispanic-or-Latino", "Hispanic"} <= {*table.split()}
    console, same = Console(file=io.StringIO(), width=width), Records.from_arrays(label, label, groups=groups)
    fairhead.compare(same, same, n_boot=100, n_perm=100).show(console)
    table = console.file.getvalue().partition("paired")[2].partition("p adj.:")[0]
    assert "(perceived_gender)" in table.split()
    assert max(map(len, table.splitlines())) <= width


def test_a_table_without_gaps_does_not_explain_them():
    console = Console(file=io.StringIO(), width=80)
    show_audit(console, fairhead.audit(Records.from_arrays([0, 1] * 50, [0, 1] * 50), n_boot=100))
    assert "accuracy" in console.file.getvalue()
    assert "MDE" not in console.file.getvalue()


SEVEN = ("TPR", "FPR", "FNR", "FDR", "NPV", "accuracy", "precision")


@pytest.mark.parametrize("wanted", [(), SEVEN[1:5], SEVEN])
def test_no_width_cuts_off_a_rate_of_a_group(wanted):
    """With names as long as those of COMPAS, also in the 80 columns that a file is given."""
    rng = np.random.default_rng(0)
    race = np.array(["African-American", "Caucasian", "Native American"])[rng.choice(3, 3000, p=[0.7, 0.29, 0.01])]
    label = rng.integers(2, size=3000)
    prediction = np.where(rng.random(3000) < 0.7, label, 1 - label)
    found = fairhead.audit(Records.from_arrays(label, prediction, groups={"race": race}), metrics=["DP"], n_boot=100)
    for width in range(60, 130):
        console = Console(file=io.StringIO(), width=width)
        show_audit(console, found, wanted)
        shown = console.file.getvalue().partition("gaps in points")[0].replace("selected", "selection_rate")
        heads = [line.split()[2:] for line in shown.splitlines() if line.startswith("race  ")]
        rates = [name for line in heads for name in line]
        assert rates == list(wanted) or (not wanted and len(rates) >= 2), width
        for row in found.by_group:
            for span in [rate.span for name, rate in row.rates.items() if name in rates and rate.value is not None]:
                value, low, high = (f"{100 * number:.1f}" for number in (span.value, span.low, span.high))
                assert re.search(rf"(?<!\d){value}\b", shown), (width, row.group)
                assert f"({low}–{high})" in shown, (width, row.group)


def test_a_worst_group_says_what_it_goes_without(tmp_path):
    """All of the few rows of class y are wrong; too few to count, and more than nothing."""
    lines = [f"{label},n,{group}" for group in "fm" for label in "n" * 30 + "y" * 6]
    (tmp_path / "preds.csv").write_text("\n".join(["y,yhat,race", *lines]))
    shown = ran(tmp_path / "preds.csv", "utf-8", "--metric", "worst_group_accuracy").decode()
    assert "without 2 cells that are too small" in shown
