"""What every verb returns can be shown, written, turned into a table and seen in a notebook."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

import fairhead
from fairhead.records import Records


@pytest.fixture(scope="module")
def compared():
    rng = np.random.default_rng(0)
    label, group = rng.integers(2, size=800), rng.choice(["a", "b"], size=800)
    first = np.where(rng.random(800) < np.where(group == "a", 0.9, 0.6), label, 1 - label)
    second = np.where(rng.random(800) < 0.8, label, 1 - label)
    made = [Records.from_arrays(label, prediction, groups={"race": group}) for prediction in (first, second)]
    return fairhead.compare(*made, n_boot=200, n_perm=500)


def shown(result, **options):
    console = Console(file=io.StringIO(), width=100)
    result.show(console, **options)
    return console.file.getvalue()


def test_an_audit_is_shown_with_its_verdict_and_its_groups(compared):
    text = shown(compared.a)
    assert "The clearest gap is" in text
    assert "race: each group" in text
    assert f"{100 * compared.a['EOd'].value:.1f}" in text


def test_a_comparison_is_shown_with_its_outcomes(compared):
    text = shown(compared, names=("old", "new"))
    assert "A = old, B = new" in text
    assert "B better" in text


def test_frames_have_one_row_a_figure(compared):
    frame = compared.a.to_frame()
    assert len(frame) == len(compared.a.estimates)
    gap = frame[(frame.metric == "EOd") & (frame.group_by == "race")].iloc[0]
    assert (gap.value, gap.low, gap.high) == tuple(getattr(compared.a["EOd"], k) for k in ("value", "low", "high"))
    differences = compared.to_frame()
    assert differences.set_index("metric").loc["EOd", "outcome"] == "better"


def test_reports_hold_the_figures_and_a_notebook_shows_the_page(tmp_path, compared):
    for result in (compared, compared.a):
        path = result.report(tmp_path / "page.html")
        twin = json.loads(path.with_suffix(".json").read_text())
        assert twin["sections"][-1]["kind"] == "audit"
        html = result._repr_html_()
        assert html.startswith("<iframe srcdoc=")
        assert "<script" not in html
        assert "&lt;html" in html
