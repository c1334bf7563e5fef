"""Logs that lm-evaluation-harness and inspect_ai themselves wrote (`logs/make.py`), compared as runs."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from fairhead.cli import main
from fairhead.errors import InputError
from fairhead.language.before_after import compare_suites
from fairhead.language.suite import read_run
from fairhead.stats.bootstrap import Resampling

LOGS = Path(__file__).parent / "logs"
QUICK = {"resampling": Resampling(n_boot=400), "n_perm": 2000}


def logs(kind, ending):
    return [LOGS / f"{kind}-{name}.{ending}" for name in ("before", "after")]


def test_lm_eval_means_are_those_that_the_harness_printed():
    run = compare_suites(logs("lm-eval", "jsonl"), **QUICK, category="job").runs[0]
    figures = {change.metric: (change.a, change.b) for change in run.headlines}
    # The table that `lm_eval` printed for each of the two.
    assert figures["acc"] == pytest.approx((0.5833, 0.0833), abs=1e-4)
    assert figures["acc_norm"] == pytest.approx((0.4583, 0.0), abs=1e-4)
    assert "brier_score" not in figures  # of which a sample has a list
    acc = run.headlines[0]
    tables = [read_run(path).table("lm-eval:samples").column("acc") for path in logs("lm-eval", "jsonl")]
    assert acc.outcome == "worse"
    assert acc.p == pytest.approx(ttest_rel(*tables).pvalue, abs=5e-3)
    assert {change.group_by for change in run.by_category} >= {"nurse", "pilot"}
    assert all(change.value is None for change in run.by_category)  # three documents a job


@pytest.mark.parametrize("version", ["0.4.2", "0.4.6"])
def test_logs_of_older_harnesses_give_the_same_figures(tmp_path, version):
    """0.4.3 to 0.4.6 list neither metrics nor filter; 0.4.0 to 0.4.2 have no hashes either and write one list."""
    older, hashes = [], ("doc_hash", "prompt_hash", "target_hash") if version == "0.4.2" else ()
    for path in logs("lm-eval", "jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            for key in (
                "metrics",
                "filter",
                *(("doc_hash", "prompt_hash", "target_hash") if hashes else ()),
            ):
                del line[key]
        older.append(tmp_path / path.name)
        older[-1].write_text(json.dumps(lines, indent=2) if hashes else "\n".join(map(json.dumps, lines)))
    for before in (logs("lm-eval", "jsonl")[0], older[0]):
        told, known = compare_suites([before, older[1]], **QUICK), compare_suites(logs("lm-eval", "jsonl"), **QUICK)
        assert told.runs[0].headlines == known.runs[0].headlines


def test_filters_without_a_name_are_numbered(tmp_path):
    """As gsm8k writes them: a line of a document for each filter, the strict one first."""
    doc = {"doc_id": 0, "doc": {"question": "1 + 1"}, "target": "2", "arguments": {}, "resps": [], "filtered_resps": []}
    path = tmp_path / "samples_gsm8k_2024-09-16T11-48-27.324691.jsonl"
    path.write_text("".join(json.dumps({**doc, "exact_match": value}) + "\n" for value in (0.0, 1.0)))
    table = read_run(path).table("lm-eval:gsm8k")
    assert {name: table.column(name).tolist() for name in table.fields} == {
        "exact_match": [0.0],
        "filter 2 exact_match": [1.0],
    }


def test_samples_that_share_a_field_are_drawn_together():
    plain, clustered = (
        compare_suites(logs("lm-eval", "jsonl"), **QUICK, cluster=by).runs[0].headlines[0] for by in (None, "end")
    )
    assert (plain.clusters, plain.n) == (24, 24)
    assert clustered.undefined == "3 clusters; at least 10 are needed for an interval"


def test_inspect_accuracy_is_the_one_in_its_log():
    change = compare_suites(logs("inspect", "json"), **QUICK).runs[0].headlines[0]
    for path, value in zip(logs("inspect", "json"), (change.a, change.b), strict=True):
        said = json.loads(path.read_text())["results"]["scores"][0]["metrics"]["accuracy"]["value"]
        assert value == pytest.approx(said)
    assert (change.n, change.clusters) == (48, 24)  # two epochs of a sample are one cluster
    assert change.outcome == "better"


def test_a_folder_of_logs_as_the_harness_leaves_it(tmp_path, capsys):
    for name in ("before", "after"):
        folder = tmp_path / name / "org__model"
        folder.mkdir(parents=True)
        shutil.copy(LOGS / f"lm-eval-{name}.jsonl", folder / "samples_made_pairs_2026-11-16T11-48-27.324691.jsonl")
        results = folder / "results_2026-11-16T11-48-27.324691.json"
        results.write_text(json.dumps({"model_name": f"org/{name}"}))
    runs = [str(tmp_path / name) for name in ("before", "after")]
    main(["lm", "compare", *runs, "--category", "job", "--html", str(tmp_path / "page.html")])
    assert "made_pairs acc" in capsys.readouterr().out
    assert "org/after" in (tmp_path / "page.html").read_text()
    again = tmp_path / "before" / "org__model" / "samples_made_pairs_2026-12-16T11-48-27.324691.jsonl"
    shutil.copy(LOGS / "lm-eval-before.jsonl", again)
    with pytest.raises(InputError, match=r"are both of lm-eval:made_pairs: give one file"):
        read_run(tmp_path / "before")


def test_samples_without_a_score_are_left_out_and_named(tmp_path):
    log = json.loads((LOGS / "inspect-before.json").read_text())
    log["samples"][0]["scores"] = {}
    log["samples"][1]["scores"]["match"]["value"] = np.nan
    path = tmp_path / "log.json"
    path.write_text(json.dumps(log))
    table = read_run(path).table("inspect:sums")
    assert len(table) == 46
    assert [len(names) for names in table.left_out.values()] == [2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"doc_id": 1}\n', "is not a file of samples that lm-evaluation-harness wrote"),
        ("a.jsonl", "", "no metric has a number for most of the 0 samples"),
        ("a.json", '{"schema": 1}', "is not a log of inspect_ai"),
        ("a.json", "{", "is not JSON"),
        ("a.json", '{"version": 2, "status": "error", "eval": {}}', r"has no samples \(status 'error'\)"),
        ("a.eval", "", "its logs are compressed: inspect log convert --to json"),
        ("a.txt", "", "a folder of fairhead lm suite"),
    ],
)
def test_other_files_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        read_run(tmp_path / name)


def test_what_cannot_be_compared_is_said():
    before, after = logs("lm-eval", "jsonl")
    with pytest.raises(InputError, match=r"has no field 'jop'; there are job, choices, end. Did you mean 'job'"):
        compare_suites([before, after], category="jop")
    with pytest.raises(InputError, match=r"have no benchmark or task in common"):
        compare_suites([before, LOGS / "inspect-after.json"])
    with pytest.raises(InputError, match=r"a folder of fairhead lm suite"):
        read_run(Path("nowhere"))
