"""The worked example of CONTRIBUTING.md ("Add a benchmark"), as a newcomer would follow it."""

import json
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from language_models import build, saved, tokenizer

import fairhead
from fairhead.cli import main
from fairhead.language import benchmarks

PAGE = Path(__file__).parents[3] / "CONTRIBUTING.md"
JOBS = ("nurse", "pilot", "baker", "poet", "people", "stone", "money", "cold", "blue", "home")
TAILS = ("was kind", "was rude", "went home", "was late")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data").mkdir()
    texts = [(job, f"the {job} said that {{}} {tail}") for job in JOBS for tail in TAILS]
    rows = [f"{i},{job},{text.format('he')},{text.format('she')}" for i, (job, text) in enumerate(texts)]
    (tmp_path / "data" / "jobs.csv").write_text("\n".join(["id,job,he,she", *rows]))
    return tmp_path / "data"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The file of the page, where Python finds it."""
    (found,) = re.findall(r"<!-- example: jobs.py -->\n```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "jobs_example.py").write_text(found)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "jobs_example"
    sys.modules.pop("jobs_example", None)


def logprob(model, words, text):
    ids = torch.tensor([[words.bos_token_id, *words(text, add_special_tokens=False)["input_ids"]]])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].double()
    return float(logits.log_softmax(-1).gather(1, ids[0, 1:, None]).sum())


def test_the_example_goes_through_every_command(example, folder, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(benchmarks.BENCHMARKS, "jobs", example)
    main(["lm", "jobs", "--help"])
    assert "Is a sentence about a job likelier" in capsys.readouterr().out
    for named in ("crows", "crows_pairs", "crows-pairs"):  # as the benchmark, as its data
        main(["lm", named, "--help"])
        assert "Of two sentences that differ in the group" in capsys.readouterr().out
    model = ["--model", str(folder), "--device", "cpu", "--n-boot", "100"]
    main(["lm", "jobs", *model, "--data", str(data / "jobs.csv"), "--json", str(tmp_path / "alone.json")])
    assert 'The sentence with "he" is likelier in' in capsys.readouterr().out
    alone = json.loads((tmp_path / "alone.json").read_text())
    llama, words = build("llama"), tokenizer()
    rows = [line.split(",") for line in (data / "jobs.csv").read_text().splitlines()[1:]]
    prefers = [logprob(llama, words, he) > logprob(llama, words, she) for _, _, he, she in rows]
    overall = next(e for e in alone["estimates"] if e["group_by"] is None)
    assert overall["value"] == pytest.approx(sum(prefers) / len(prefers))
    for name in ("one", "two"):
        main(["lm", "suite", *model, "--data", str(data), "--only", "jobs", "--out", str(tmp_path / name)])
    in_suite = json.loads((tmp_path / "one" / "jobs.json").read_text())
    assert in_suite["estimates"] == alone["estimates"]
    compared = ["lm", "compare", str(tmp_path / "one"), str(tmp_path / "two"), "--n-boot", "100", "--n-perm", "100"]
    main([*compared, "--json", str(tmp_path / "c.json"), "--html", str(tmp_path / "page.html")])
    (run,) = json.loads((tmp_path / "c.json").read_text())["runs"]
    (headline,) = run["headlines"]
    assert (headline["benchmark"], headline["metric"], headline["value"]) == ("jobs", "he_likelier", 0.0)
    assert {c["group_by"] for c in run["by_category"]} == set(JOBS)
    assert "he likelier" in (tmp_path / "page.html").read_text()


def test_a_benchmark_alone_leaves_the_folder_of_a_suite(example, folder, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(benchmarks.BENCHMARKS, "jobs", example)
    model = ["--model", str(folder), "--device", "cpu", "--n-boot", "100"]
    main(["lm", "jobs", *model, "--data", str(data / "jobs.csv"), "--out", str(tmp_path / "alone")])
    main(["lm", "suite", *model, "--data", str(data), "--only", "jobs", "--out", str(tmp_path / "suite")])
    for file in ("jobs.items.jsonl", *(path.name for path in (tmp_path / "suite" / "journals").glob("*.jsonl"))):
        place = "journals" if file.startswith("jobs-") else "."
        assert (tmp_path / "alone" / place / file).read_text() == (tmp_path / "suite" / place / file).read_text()
    # What one has computed, the other does not compute again.
    before = (tmp_path / "alone" / "jobs.items.jsonl").stat().st_mtime_ns
    main(["lm", "suite", *model, "--data", str(data), "--only", "jobs", "--out", str(tmp_path / "alone")])
    assert (tmp_path / "alone" / "jobs.items.jsonl").stat().st_mtime_ns == before


@pytest.fixture
def added(monkeypatch):
    """Entry points as another package would bring them."""

    def add(name, value):
        point = EntryPoint(name, value, benchmarks.ENTRY_POINTS)
        monkeypatch.setattr(fairhead, "entry_points", lambda group: [point])
        benchmarks._added.cache_clear()

    yield add
    benchmarks._added.cache_clear()


def test_another_package_adds_a_benchmark(example, added):
    added("jobs", f"{example}:BENCHMARK")
    assert benchmarks.benchmark_named("jobs").title == "Jobs"
    assert benchmarks.all_benchmarks()[-1].name == "jobs"


def test_a_broken_benchmark_of_another_package_is_named_and_the_others_work(example, added):
    added("tasks", f"{example}:BENCHMARK")
    with pytest.warns(UserWarning, match="jobs_example:BENCHMARK is not a Benchmark called 'tasks'"):
        assert benchmarks.benchmark_named("crows").name == "crows_pairs"
