"""What an audit says: undefined cells, intersections, options, JSON, and how it is called."""

import json
import subprocess
import sys

import numpy as np
import pytest

import fairhead
from fairhead.cli import main
from fairhead.errors import InputError
from fairhead.records import Column, Records
from fairhead.store import json_text


def make(n=400, seed=0, **more):
    rng = np.random.default_rng(seed)
    y = rng.integers(2, size=n)
    p = np.where(rng.random(n) < 0.8, y, 1 - y)
    groups = {
        "race": Column(rng.integers(3, size=n), ("a", "b", "c")),
        "sex": Column(rng.integers(2, size=n), ("f", "m")),
    }
    return Records(Column(y, ("no", "yes")), Column(p, ("no", "yes")), groups=groups, **more)


def test_an_audit_leaves_the_buffers_of_numpy_as_they_were():
    with np.errstate():
        np.setbufsize(4096)
        fairhead.audit(make(), n_boot=100)
        assert np.getbufsize() == 4096


@pytest.mark.parametrize(
    "code",
    [
        "import fairhead; print(callable(fairhead.audit))",
        "import fairhead.audit; import fairhead; print(callable(fairhead.audit))",
        "from fairhead.audit.audit_results import Audit; import fairhead; print(callable(fairhead.audit))",
        "import fairhead; fairhead.compare; print(callable(fairhead.audit) and callable(fairhead.audit.audit))",
        "from fairhead import audit; import fairhead.audit.metrics; print(callable(audit))",
        "import fairhead.audit as a; print(callable(a) and a.METRICS['DP'].ideal == 0)",
    ],
)
def test_audit_is_a_verb_in_every_order_of_imports(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_an_audit_imports_neither_torch_nor_scipy():
    code = (
        "import sys, numpy as np, fairhead; from fairhead.records import Column, Records\n"
        "y = np.tile([0, 1], 50); g = {'g': Column(np.arange(100) // 50, ('f', 'm'))}\n"
        "fairhead.audit(Records(Column(y, (0, 1)), Column(y, (0, 1)), groups=g))\n"
        "print([m for m in ('torch', 'scipy', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_cell_with_too_few_rows_is_undefined_and_never_zero():
    n = 200
    group = np.arange(n) % 2
    y = np.where(group == 0, np.arange(n) % 4 < 2, np.arange(n) < 8).astype(int)
    records = Records(Column(y, (0, 1)), Column(y, (0, 1)), groups={"g": Column(group, ("f", "m"))})
    result = fairhead.audit(records)
    found = result["EOp"]
    assert found.value is found.low is found.high is found.mde is None
    assert found.undefined == "m has 4 rows with label 1; at least 10 are needed"
    assert result["DP"].undefined is None
    row = next(row for row in result.by_group if row.group == "m")
    assert row.rates["TPR"].undefined == "m has 4 rows with label 1; at least 10 are needed"
    assert row.rates["FPR"].value == 0
    assert fairhead.audit(records, min_cell=4)["EOp"].value == 0


def test_small_groups_are_left_out_by_name():
    records = make(300)
    codes = records.groups["race"].codes.copy()
    codes[:] = np.arange(300) % 2
    codes[:5] = 2
    records = Records(records.label, records.prediction, groups={"race": Column(codes, ("a", "b", "c"))})
    found = fairhead.audit(records)["DP"]
    assert found.value is not None
    assert found.n == 295
    assert "c" not in found.groups
    assert found.detail["n_undefined"] == 1
    assert found.detail["excluded"] == ["c has 5 rows; at least 10 are needed"]


def test_thin_cells_are_marked():
    found = fairhead.audit(make(100), group_by="race")
    assert any("rows with label yes" in text for text in found["EOp"].detail["unstable"])
    assert "unstable" not in found["accuracy"].detail


def test_no_positive_prediction_leaves_the_ratio_undefined():
    y = np.tile([0, 1], 50)
    columns = {"g": Column(np.arange(100) // 50, ("f", "m"))}
    never = Records(Column(y, (0, 1)), Column(np.zeros(100, int), (0, 1)), groups=columns)
    found = fairhead.audit(never)
    assert "no row" in found["impact_ratio"].undefined
    assert found["DP"].value == 0
    once = np.where(np.arange(100) < 50, y, 0)
    found = fairhead.audit(Records(Column(y, (0, 1)), Column(once, (0, 1)), groups=columns))["impact_ratio"]
    assert found.value == 0
    assert 0 < found.high < 0.5


def test_a_class_that_nobody_predicts_does_not_enter_the_ratio():
    """The figures of two classes, whether or not a third one is named that no row has."""
    records = make(2000)
    third = ("no", "yes", "maybe")
    label, prediction = (Column(column.codes, third) for column in (records.label, records.prediction))
    found = fairhead.audit(Records(label, prediction, groups=records.groups))["impact_ratio", "race"]
    rates = [np.bincount(records.prediction.codes[records.groups["race"].codes == g]) for g in range(3)]
    rates = np.array([r / r.sum() for r in rates])
    assert found.value == pytest.approx(min(rates.min(axis=0) / rates.max(axis=0)), abs=1e-12)
    assert found.value - 0.25 < found.low < found.value < found.high


def test_too_many_cells_are_refused_before_they_are_drawn():
    n = 3000
    many = Column(np.arange(n) % 1000, tuple(range(1000)))
    records = Records(many, many, groups={"g": Column(np.arange(n) // 1500, ("f", "m"))})
    with pytest.raises(InputError, match=r"2,000 replicates of 2,000,000 cells.*--positive"):
        fairhead.audit(records)
    assert fairhead.audit(records, positive=3)["DP"].value == pytest.approx(1 / 1500)


def test_columns_and_their_intersections():
    records = make(2000)
    result = fairhead.audit(records, intersections=True, metrics=["DP"])
    assert [e.group_by for e in result.estimates] == ["race", "sex", "race × sex"]
    assert {row.group for row in result.by_group if row.group_by == "race × sex"} == {
        f"{race} × {sex}" for race in "abc" for sex in "fm"
    }
    race, sex, p = records.groups["race"].codes, records.groups["sex"].codes, records.prediction.codes
    rates = [p[(race == r) & (sex == s)].mean() for r in range(3) for s in range(2)]
    assert result["DP", "race × sex"].value == pytest.approx(np.ptp(rates), abs=1e-12)
    assert [e.group_by for e in fairhead.audit(records, group_by="sex", metrics=["DP"]).estimates] == ["sex"]


def test_the_other_class_can_be_the_positive_one():
    records = make()
    yes, no = (fairhead.audit(records, positive=c, group_by="sex") for c in ("yes", "no"))
    assert no["DP"].value == pytest.approx(yes["DP"].value, abs=1e-12)
    tnr = [1 - row.rates["FPR"].value for row in yes.by_group]
    assert no["EOp"].value == pytest.approx(np.ptp(tnr), abs=1e-12)


def test_scores_alone_give_predictions_by_a_stated_rule():
    scores = np.random.default_rng(0).random(400)
    bare = make()
    result = fairhead.audit(Records(bare.label, None, scores=scores, groups=bare.groups))
    assert result.provenance["audit"]["prediction"] == "score >= 0.5"
    assert result["accuracy"].value == pytest.approx(np.mean((scores >= 0.5) == bare.label.codes))


def test_same_seed_same_figures():
    assert fairhead.audit(make(), seed=3) == fairhead.audit(make(), seed=3)
    assert fairhead.audit(make(), seed=3)["DP", "sex"].high != fairhead.audit(make(), seed=4)["DP", "sex"].high


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_by": "rase"}, "no group column 'rase'.*Did you mean 'race'"),
        ({"metrics": ["EOpp"]}, "no metric 'EOpp'. Did you mean 'EOp'"),
        ({"metrics": ["AUC_gap"]}, "needs scores"),
        ({"positive": "maybe"}, "not among the classes"),
        ({"reference": {"race": "z"}}, "not in column 'race'"),
        ({"reference": ["race=a", "race=b"]}, "two reference groups, 'a' and 'b'"),
        ({"n_boot": 3}, "at least 100"),
        ({"n_boot": 10**12}, "do not fit in 2 GB"),
        ({"seed": -1}, "at least 0"),
        ({"level": 95}, "confidence level"),
        ({"min_cell": 0}, "min_cell"),
        ({"multiclass": "median"}, "'max', 'mean' or 'weighted'"),
    ],
)
def test_bad_options_are_refused_in_words(options, message):
    with pytest.raises(InputError, match=message):
        fairhead.audit(make(), **options)


def test_bad_records_are_refused_in_words():
    one = Column(np.zeros(5, int), ("x",))
    with pytest.raises(InputError, match="one group only"):
        fairhead.audit(Records(Column(np.arange(5) % 2, (0, 1)), Column(np.arange(5) % 2, (0, 1)), groups={"g": one}))
    with pytest.raises(InputError, match="one class only"):
        fairhead.audit(Records(one, one))
    with pytest.raises(InputError, match="neither predictions nor scores"):
        fairhead.audit(Records(Column(np.arange(5) % 2, (0, 1))))
    empty = Column(np.zeros(0, int), (0, 1))
    with pytest.raises(InputError, match="no rows"):
        fairhead.audit(Records(empty, empty))


@pytest.mark.parametrize("scores", [None, np.linspace(0, 1, 400)])
def test_json_has_the_agreed_fields_and_no_nan(scores):
    result = fairhead.audit(make(scores=scores), intersections=True, metrics="all", min_cell=60)
    data = json.loads(json_text(result.to_dict()), parse_constant=lambda text: pytest.fail(text))
    assert data["schema"] == "fairhead.audit/1"
    for found in data["estimates"]:
        assert {"metric", "group_by", "value", "low", "high", "n", "ideal", "undefined"} <= set(found)
        assert (found["value"] is None) == (found["undefined"] is not None)
        if found["value"] is not None:
            assert found["low"] <= found["value"] <= found["high"]
            assert 0 < found["n"] <= 400
    assert any(found["undefined"] for found in data["estimates"])
    comparison = fairhead.compare(make(), make(seed=0), metrics=["DP"])
    json.loads(json_text(comparison.to_dict()), parse_constant=lambda text: pytest.fail(text))


@pytest.mark.parametrize("seed", range(12))
def test_odd_tables_give_figures_or_reasons(seed):
    """Few rows, many groups, one prediction only, weights of 0, small clusters: never an exception, never NaN."""
    rng = np.random.default_rng(seed)
    n, classes = int(rng.choice([2, 12, 40, 600])), int(rng.choice([2, 2, 5]))
    y = rng.integers(classes, size=n)
    weight = rng.choice([0.0, 1.0, 1e6], size=n) if seed % 3 == 0 else None
    columns = {
        "groups": {"g": rng.integers(int(rng.choice([2, 30])), size=n), "h": np.arange(n) % 2},
        "scores": rng.choice([0, 0.5, 1], size=n) if classes == 2 else rng.dirichlet(np.ones(classes), n),
        "weight": None if weight is None or not weight.any() else weight,
        "cluster": rng.integers(1 + n // 3, size=n) if seed % 3 == 1 else None,
        "classes": range(classes),
    }
    a, b = (Records.from_arrays(y, p, **columns) for p in (np.full(n, y[0]), rng.integers(classes, size=n)))
    options = {"metrics": "all", "n_boot": 100, "min_cell": int(rng.choice([1, 10])), "intersections": True}
    if len(a.groups["g"].levels) < 2:
        options["group_by"] = "h"
    comparison = fairhead.compare(a, b, n_perm=100, **options)
    json.loads(json_text(comparison.to_dict()), parse_constant=lambda text: pytest.fail(text))
    rates = [rate for row in comparison.a.by_group for rate in row.rates.values()]
    for found in (*comparison.a.estimates, *comparison.b.estimates, *rates, *comparison.differences):
        assert (found.value is None) == (found.undefined is not None)
        assert found.value is None or found.low <= found.value <= found.high


def test_intersections_beyond_count_are_refused_before_any_work():
    rng = np.random.default_rng(0)
    groups = {f"g{i}": rng.integers(0, 5, 3000) for i in range(8)}
    records = Records.from_arrays(rng.integers(0, 2, 3000), rng.integers(0, 2, 3000), groups=groups)
    with pytest.raises(InputError, match="8 group columns have 247 combinations, of up to 3"):
        fairhead.audit(records, intersections=True)
    assert fairhead.audit(records, group_by=["g0", "g1"], intersections=True, n_boot=100).estimates


def test_a_doubtful_positive_class_is_said_in_the_verdict():
    rng = np.random.default_rng(0)
    paid, sex = rng.integers(0, 2, 400), rng.choice(["f", "m"], 400)
    score = np.clip(0.3 * paid + rng.uniform(0, 0.7, 400), 0, 1)
    table = {"y": np.where(paid == 1, "approved", "denied"), "p": score, "sex": sex}

    def said(**options):
        found = fairhead.audit(table, label="y", score="p", groups="sex", n_boot=100, **options)
        return [sentence.text for sentence in found.page().verdict][-1]

    assert said().startswith("The positive class is 'denied', the last of two in the alphabet. AUC is below 0.5 (")
    assert said().endswith("If it should be 'approved', set --positive (positive=).")
    assert "positive class" not in said(positive="approved")
    assert said(positive="denied").startswith("AUC is below 0.5 (")


def test_ids_are_no_groups_and_numbers_should_be_binned(tmp_path, capsys):
    rng = np.random.default_rng(0)
    rows = [f"{i},{rng.integers(2)},{rng.integers(2)},{rng.integers(18, 80)}" for i in range(300)]
    file = tmp_path / "preds.csv"
    file.write_text("\n".join(["who,y,yhat,age", *rows]))
    named = ["audit", str(file), "--label", "y", "--prediction", "yhat", "--n-boot", "100"]
    with pytest.raises(SystemExit):
        main([*named, "--group", "who"])
    assert "'who' has 300 groups in 300 rows, as ids have" in capsys.readouterr().err
    main([*named, "--group", "age"])
    assert "numeric groups: combine them with --bins age=25,45" in " ".join(capsys.readouterr().out.split())
    main([*named, "--group", "age", "--bins", "age=30,50"])
    assert "--bins" not in capsys.readouterr().out


def test_texts_are_no_groups(tmp_path, capsys):
    file = tmp_path / "posts.csv"
    file.write_text("\n".join(["y,yhat,post", *(f"{i % 2},{i % 3 % 2},{'word ' * 50}{i % 7}" for i in range(300))]))
    with pytest.raises(SystemExit):
        main(["audit", str(file), "--label", "y", "--prediction", "yhat", "--group", "post", "--n-boot", "100"])
    assert "Group column 'post' has texts (251 characters: word word" in capsys.readouterr().err
