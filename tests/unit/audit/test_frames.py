"""Audits of data frames, and gaps as scores of scikit-learn."""

from inspect import signature
from typing import get_args, get_type_hints

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from fairlearn.metrics import equal_opportunity_difference
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score

import fairhead
from fairhead.audit import scorer
from fairhead.errors import InputError
from fairhead.records import Records, TableColumns


def frame(n=600):
    rng = np.random.default_rng(0)
    race = rng.choice(["a", "b", "c"], n)
    label = rng.integers(0, 2, n)
    score = np.clip(0.5 + 0.2 * (2 * label - 1) + 0.1 * (race == "a") + rng.normal(0, 0.2, n), 0, 1)
    age = pd.array(rng.integers(18, 80, n)).astype("Int64")
    age[rng.random(n) < 0.1] = pd.NA
    return pd.DataFrame({"y": label, "p": score, "race": race, "age": age, "flag": label == 1})


def of_polars(made):
    return pl.DataFrame({name: [None if pd.isna(v) else v for v in made[name].tolist()] for name in made})


KINDS = {
    "pandas": lambda made: made,
    "polars": of_polars,
    "lazy polars": lambda made: of_polars(made).lazy(),
    "polars categories": lambda made: of_polars(made).with_columns(pl.col("race").cast(pl.Categorical)),
    "arrow": lambda made: pa.Table.from_pandas(made),
    "lists": lambda made: {name: made[name].tolist() for name in made},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_frame_gives_the_same_audit(kind):
    made = frame()
    columns = {"label": "y", "score": "p", "groups": ["race", "age"], "bins": {"age": [40]}, "drop_missing": True}
    found = fairhead.audit(KINDS[kind](made), **columns, n_boot=100, metrics=["DP", "EOp", "AUC_gap"])
    wanted = fairhead.audit(fairhead.Records.from_frame(made, **columns), n_boot=100, metrics=["DP", "EOp", "AUC_gap"])
    assert found.to_dict()["estimates"] == wanted.to_dict()["estimates"]
    assert {row.group for row in found.by_group} == {"a", "b", "c", "under 40", "40 and over"}
    named = fairhead.audit(KINDS[kind](made), label="flag", score="p", groups="race", positive=False, n_boot=100)
    assert named.provenance["audit"]["classes"] == ["True", "False"]


def test_a_path_and_a_wrong_word(tmp_path):
    path = tmp_path / "made.csv"
    frame().to_csv(path, index=False)
    found = fairhead.audit(path, label="y", score="p", groups="race", n_boot=100)
    assert found.provenance["rows"] == 600
    assert "<iframe" in found._repr_html_()
    assert set(found.to_frame()) >= {"metric", "group_by", "value", "low", "high", "n"}
    with pytest.raises(InputError, match="Did you mean 'label'"):
        fairhead.audit(path, lable="y", score="p", groups="race")
    with pytest.raises(InputError, match="the records have their columns"):
        fairhead.audit(fairhead.Records.from_arrays([0, 1], [1, 0]), label="y")
    with pytest.raises(InputError, match="ndarray is not a table"):
        fairhead.audit(np.zeros((3, 2)), label="y")


def test_a_gap_is_a_score_of_scikit_learn():
    made = frame(1200)
    x, hidden = made[["p", "race"]].assign(race=(made["race"] == "a").astype(int)), made["race"]
    by_index = scorer("EOp", hidden)
    model = LogisticRegression().fit(x, made["y"])
    theirs = equal_opportunity_difference(made["y"], model.predict(x), sensitive_features=hidden)
    assert by_index(model, x, made["y"]) == pytest.approx(-theirs)
    assert scorer("EOp", "race")(model, x.assign(race=hidden.map(ord) % 2), made["y"]) <= 0
    scores = cross_val_score(LogisticRegression(), x, made["y"], scoring=by_index, cv=3)
    assert (scores <= 0).all()
    assert np.isfinite(scores).all()
    search = GridSearchCV(LogisticRegression(), {"C": [1e-4, 1.0]}, scoring=by_index, cv=3).fit(x, made["y"])
    assert search.best_score_ == pytest.approx(search.cv_results_["mean_test_score"].max())
    assert scorer("impact_ratio", hidden, threshold=0.4)(model, x, made["y"]) <= 1
    assert np.isnan(scorer("EOp", hidden, min_cell=5000)(model, x, made["y"]))
    some = hidden.where(np.arange(len(hidden)) % 5 > 0)
    known = some.notna()
    assert scorer("EOp", some)(model, x, made["y"]) == by_index(model, x[known], made["y"][known])


@pytest.mark.parametrize(
    ("metric", "groups", "says"),
    [
        ("EOpp", "race", "Did you mean 'EOp'"),
        ("accuracy", "race", "not about groups"),
        ("DP", "sex", "no column 'sex'"),
    ],
)
def test_a_score_that_cannot_be(metric, groups, says):
    made = frame(100)
    with pytest.raises(InputError, match=says):
        scorer(metric, groups)(LogisticRegression().fit(made[["p"]], made["y"]), made[["p"]], made["y"])


def test_comparisons_take_tables_and_conditions(tmp_path):
    """Two frames, two files, or two columns of one: the same figures as from records."""
    rng = np.random.default_rng(0)
    y, sex = rng.integers(0, 2, (2, 600))
    old, new = (np.where(rng.random(600) < 0.3 - 0.2 * (sex == k), 1 - y, y) for k in (0, 1))
    frame = pd.DataFrame({"y": y, "old": old, "new": new, "sex": sex, "age": np.arange(600) % 60})
    columns, options = {"label": "y", "groups": "sex"}, {"metrics": ["DP", "accuracy"], "n_boot": 200, "n_perm": 500}
    one, other = (Records.from_frame(frame, prediction=name, **columns) for name in ("old", "new"))
    expected = fairhead.compare(one, other, **options).differences
    for name in ("old", "new"):
        frame.rename(columns={name: "said"}).to_csv(tmp_path / f"{name}.csv", index=False)
    files = [tmp_path / "old.csv", tmp_path / "new.csv"]
    assert fairhead.compare(frame, prediction=("old", "new"), **columns, **options).differences == expected
    assert fairhead.compare(*files, prediction="said", **columns, **options).differences == expected
    assert fairhead.compare(one, files[1], prediction="said", **columns, **options).differences == expected
    young = fairhead.compare(frame, prediction=("old", "new"), where="age < 30", **columns, **options)
    assert young.provenance["n"] == 300
    moved = fairhead.audit.drift(*files, prediction="said", where="age < 30", **columns, metrics=["DP"], n_boot=200)
    assert moved.a.provenance["audit"]["n"] == 300
    with pytest.raises(InputError, match="expected a second table"):
        fairhead.compare(frame, prediction="old", **columns)
    with pytest.raises(InputError, match="Did you mean 'groups'"):
        fairhead.compare(frame, frame, label="y", prediction="old", grops="sex")


def test_editors_see_every_argument_of_a_table():
    """`audit`, `compare` and `from_frame` name their columns by a TypedDict, which says what `Records.read` takes."""
    read = {name for name in signature(Records.read).parameters if name not in ("path", "positive")}
    assert set(TableColumns.__annotations__) == read
    for verb in (fairhead.audit.audit, fairhead.compare, Records.from_frame):
        (columns,) = get_args(get_type_hints(verb)["columns"])
        assert columns is TableColumns
        assert "positive" in signature(verb).parameters
