"""The suite on published data and pretrained weights."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("vaderSentiment")

from fairhead.cli import main
from fairhead.language.benchmarks import BENCHMARKS
from fairhead.language.suite import Suite


def test_every_benchmark_runs_and_a_model_is_itself(real_model, real_data, tmp_path, capsys):
    data = real_data("stereoset").parent
    for name in ("crows_pairs", "bbq", "winobias", "bold"):
        real_data(name)
    arguments = ["lm", "suite", "--model", str(real_model("tinystories-15m")), "--data", str(data), "--device", "cpu"]
    for name in ("one", "two"):
        main([*arguments, "--limit", "14", "--n-boot", "100", "--out", str(tmp_path / name)])
    assert Suite.read(tmp_path / "one").measured == list(BENCHMARKS)
    content = tmp_path / "j.json"
    main(["lm", "compare", str(tmp_path / "one"), str(tmp_path / "two"), "--n-perm", "100", "--json", str(content)])
    (run,) = json.loads(content.read_text())["runs"]
    defined = [c for c in run["headlines"] if c["value"] is not None]
    assert len(defined) >= 10  # of so few items, those of BBQ's conditions and of BOLD's groups are undefined
    assert {c["value"] for c in defined} == {0.0}
    assert {c["outcome"] for c in defined} == {"not significant"}
