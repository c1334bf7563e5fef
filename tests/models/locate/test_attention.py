"""Assumption 1 against SciPy and closed forms; attention maps against eager attention; the command end to end."""

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from made_faces import make_faces
from mixtures import Mixture, exact_gap
from scipy import stats
from transformers import ViTConfig, ViTForImageClassification
from typer.testing import CliRunner

from fairhead.cli import app
from fairhead.cli.model_on_rows import _name
from fairhead.errors import InputError
from fairhead.locate.assumption import check_assumption
from fairhead.locate.read_qk import grouped_rows, look
from fairhead.mitigate import DAM, attach, save
from fairhead.report.form import build, plain
from fairhead.report.sections.attention_sections import Dimension

N = 6000


def made(sd1=1.0, mean1=0.0, shape="normal", seed=0):
    """q and k [n, 2, 3], independent; a quarter of the rows in the second group."""
    rng = np.random.default_rng(seed)
    second = np.arange(N) % 4 == 0
    draw = {"normal": rng.standard_normal, "uniform": lambda size: rng.uniform(-(3**0.5), 3**0.5, size)}[shape]
    x = draw((2, N, 2, 3))
    x[:, second] = mean1 + sd1 * x[:, second]
    return x[0], x[1], second


def test_normal_dimensions_of_one_spread_are_found_to_be_so():
    q, k, second = made()
    found = check_assumption(q, k, second, ("a", "b"))
    for side in (found.q, found.k):
        assert side.not_normal == 0
        assert side.spreads_differ == 0
        assert side.distance_largest < 0.05
        assert 0.9 < side.spread_smallest < side.spread_largest < 1.1
    assert found.shares == (0.75, 0.25)


def test_another_shape_and_another_spread_are_found():
    q, _, second = made(shape="uniform")
    _, k, _ = made(sd1=1.5)
    found = check_assumption(q, k, second, ("a", "b"))
    assert found.q.not_normal == 1
    assert found.q.spreads_differ == 0
    # The furthest that a uniform distribution is from the normal one of its own deviation.
    x = np.linspace(-(3**0.5), 3**0.5, 100_001)
    furthest = np.abs(stats.norm.cdf(x) - stats.uniform.cdf(x, -(3**0.5), 2 * 3**0.5)).max()
    assert found.q.distance_median == pytest.approx(furthest, abs=0.015)
    assert found.k.not_normal == 0
    assert found.k.spreads_differ == 1
    assert found.k.spread_median == pytest.approx(1.5, rel=0.05)


def test_numbers_are_scipy_s():
    q, k, second = made(sd1=1.2, mean1=0.5)
    found = check_assumption(q, k, second, ("a", "b"), chosen=(("q", 1, 2), ("k", 0, 0)))
    for dimension, x in zip(found.chosen, (q[:, 1, 2], k[:, 0, 0]), strict=True):
        for shape, part in zip(dimension.groups, (x[~second], x[second]), strict=True):
            expected = stats.kstest(part, "norm", args=(part.mean(), part.std(ddof=1))).statistic
            assert shape.distance == pytest.approx(expected, abs=1e-12)
            assert sum(shape.counts) == shape.n == len(part)
        assert dimension.spread_ratio == pytest.approx(x[second].std(ddof=1) / x[~second].std(ddof=1))
        assert len(dimension.edges) == len(dimension.groups[0].counts) + 1
    levene = [stats.levene(q[~second, h, j], q[second, h, j], center="median").pvalue for h in (0, 1) for j in range(3)]
    assert max(levene) < 0.05 / 6
    assert found.q.spreads_differ == 1


def test_where_the_assumption_holds_the_theory_predicts_the_gap():
    q, k, second = made(sd1=1.3, mean1=1.0)
    found = check_assumption(q, k, second, ("a", "b"))
    mixture = Mixture(np.zeros(3), np.ones(3), np.ones(3), np.full(3, 1.3))
    for check in found.gaps:
        truth = exact_gap(mixture, mixture, 0.75, check.operation)
        assert check.predicted == pytest.approx(truth, abs=0.1)
        assert abs(check.measured - truth) < 4 * check.error
        assert all(check.predicted <= bound for bound in check.bounds.values())
    # q and k that are not independent within a group: the theory cannot know.
    rng = np.random.default_rng(1)
    same = rng.standard_normal((N, 2, 3))
    other = np.where(second[:, None, None], same, -same)
    dependent = check_assumption(same, other, second, ("a", "b")).gaps[0]
    assert dependent.measured == pytest.approx(2 * 3 / 3**0.5, rel=0.1)
    assert dependent.predicted < 0.2
    assert "does not hold closely enough" in check_assumption(same, other, second, ("a", "b")).sentences()[2]


def test_heads_without_a_gap_have_none_however_many_they_are():
    """The mean size of 24 gaps that are noise is far from 0 for its error, unless signs come from other rows."""
    rng = np.random.default_rng(0)
    off = []
    for _ in range(10):
        q, k = rng.standard_normal((2, 400, 24, 8))
        for check in check_assumption(q, k, np.arange(400) < 100, ("a", "b")).gaps:
            off.append((check.measured - check.predicted) / check.error)
            assert abs(check.measured) < 0.15
    # A t with 9 degrees of freedom: its mean and spread over 30 draws, which are not independent within a set of rows.
    assert abs(np.mean(off)) < 0.8
    assert 0.6 < np.std(off) < 1.8


def test_constant_dimensions_are_counted_and_left_out():
    q, k, second = made()
    q[:, 0, 0] = 1.0
    found = check_assumption(q, k, second, ("a", "b"))
    assert found.q.constant == 1
    assert ("q", 0, 0) not in [(d.side, d.head, d.index) for d in found.chosen]
    asked = check_assumption(q, k, second, ("a", "b"), chosen=(("q", 0, 0),)).chosen[0]
    drawn = build(Dimension, plain(asked, "chosen"), "chosen").draw(("a", "b"))
    assert drawn.count("<rect") == 2  # one bar a group, and no curve that is not a number
    assert "nan" not in drawn
    with pytest.raises(InputError, match="b has 5 rows; at least 20"):
        check_assumption(q[:50], k[:50], np.arange(50) < 5, ("a", "b"))
    with pytest.raises(InputError, match="no dimension 3 of head 0 of q: the layer has 2 heads of 3 dimensions"):
        check_assumption(q, k, second, ("a", "b"), chosen=(("q", 0, 3),))


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    return make_faces(tmp_path_factory.mktemp("faces"), n=480)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a plain model and of one with DAM, as `fairhead mitigate` writes them."""
    folder = tmp_path_factory.mktemp("models")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    for name in ("plain", "dam"):
        torch.manual_seed(0)
        model = ViTForImageClassification(ViTConfig(**shape, image_size=8, patch_size=4))
        save(attach(model, DAM()) if name == "dam" else model, folder / name)
        wanted = {"size": {"height": 8, "width": 8}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        (folder / name / "preprocessor_config.json").write_text(json.dumps(wanted))
    return folder


def test_q_k_and_attention_are_those_of_the_model(faces, models):
    rows = grouped_rows(f"utkface:{faces}", "white", limit=20)
    seen = look(models / "plain", rows.examples, layer=-1, token=2)
    model = ViTForImageClassification.from_pretrained(models / "plain", attn_implementation="eager").eval()
    pixels = torch.from_numpy(rows.examples.inputs.as_array(8)).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        output = model(pixel_values=pixels, output_attentions=True, output_hidden_states=True)
        layer = model.vit.layers[-1] if hasattr(model.vit, "layers") else model.vit.encoder.layer[-1]
        before = layer.layernorm_before(output.hidden_states[-2])[:, 2]
    attention = next(m for m in layer.modules() if hasattr(m, "q_proj") or hasattr(m, "query"))
    project = getattr(attention, "q_proj", None) or attention.query
    np.testing.assert_allclose(seen.q.reshape(20, -1), project(before).detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(seen.looks, output.attentions[-1][:, :, 0].mean(1).numpy(), atol=1e-5)
    assert seen.patch_grid == (2, 2)
    assert seen.layer == 1


class _Balanced(HTMLParser):
    void = frozenset({"meta", "img", "line", "rect", "image"})

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if tag not in self.void:
            assert self.open.pop() == tag


def run(*arguments):
    done = CliRunner().invoke(app, ["attention", *(str(a) for a in arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_two_models_side_by_side_from_the_command_line(faces, models, tmp_path):
    out = tmp_path / "maps"
    said = run(
        "--model", models / "plain", "--against", models / "dam", "--data", f"utkface:{faces}", "--part", "train",
        "--group", "white", "--pictures", 3, "--dimension", "q:1:0", "--device", "cpu", "--out", out,
    )  # fmt: skip
    assert "distance from normal" in said
    page, twin = (out / "report.html").read_text(), json.loads((out / "attention.json").read_text())
    parser = _Balanced()
    parser.feed(page)
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("data:image/jpeg;base64,") == 3 * 3  # each picture, and once under the map of either model
    assert [[m["model"] for m in picture["maps"]] for picture in twin["maps"]] == [["plain", "dam"]] * 3
    for picture in twin["maps"]:
        for found in picture["maps"]:
            assert np.sum(found["patches"]) + found["elsewhere"] == pytest.approx(1)
    # DAM's q and k are absolute: never below 0.
    assert twin["assumption"]["dam"]["chosen"][0]["edges"][0] >= 0
    assert twin["assumption"]["plain"]["chosen"][0]["edges"][0] < 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--group", "wite"], "there is no group 'wite'.*Did you mean 'white'"),
        (["--groups", "White"], "expected two groups of white"),
        (["--groups", "White,Blue"], "white has no 'Blue'"),
        (["--layer", "7"], "layer 7 does not exist"),
        (["--dimension", "v:0:1"], "expected q or k"),
        (["--picture", "nobody"], "there is no row 'nobody'"),
        (["--part", "tst"], "tst"),
        (["--out", "maps.html"], "expected a folder"),
        (["--limit", "-3"], "--limit is -3; expected a whole number of at least 1"),
        (["--pictures", "-1"], "--pictures is -1; expected a whole number of at least 0"),
    ],
)
def test_mistakes_are_named(faces, models, tmp_path, arguments, message):
    given = ["--model", str(models / "plain"), "--data", f"utkface:{faces}", "--device", "cpu", "--part", "train"]
    with pytest.raises(ValueError, match=message):
        run(*given, "--out", tmp_path / "maps", *arguments)


def test_models_are_called_by_their_runs_and_by_their_paths_where_these_are_alike():
    one, two, three = (Path(f"{run}/model") for run in ("a/plain", "a/dam", "b/dam"))
    assert [_name(folder, one, two) for folder in (one, two)] == ["plain", "dam"]
    assert [_name(folder, two, three) for folder in (two, three)] == ["a/dam/model", "b/dam/model"]
    assert _name(one, one, None) == "plain"


def test_a_model_is_not_held_against_itself(faces, models, tmp_path):
    given = ["--model", models / "plain", "--against", models / "dam" / ".." / "plain", "--data", f"utkface:{faces}"]
    with pytest.raises(ValueError, match="the model itself"):
        run(*given, "--out", tmp_path / "maps")


def test_a_folder_without_a_model_is_named(faces, tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json"):
        run("--model", tmp_path, "--data", f"utkface:{faces}", "--out", tmp_path / "maps", "--device", "cpu")
