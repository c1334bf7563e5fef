"""Records from arrays and data frames, the rules for values, and the checks."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairhead import Records
from fairhead.data import dataset
from fairhead.errors import InputError


def values(column):
    return column.values().tolist()


def test_from_arrays_codes_and_levels():
    records = Records.from_arrays(
        label=np.array([1, 0, 1]), prediction=[1.0, 0.0, 0.0], groups={"race": ["b", "a", "b"]}, id=["x", "y", "z"]
    )
    assert records.classes == (0, 1)
    assert records.prediction.levels == records.label.levels
    assert values(records.prediction) == [1, 0, 0]
    assert records.groups["race"].levels == ("a", "b")
    assert records.groups["race"].codes.tolist() == [1, 0, 1]
    assert records.groups["race"].codes.dtype == np.int8
    assert records.id.tolist() == ["x", "y", "z"]
    assert records.provenance["rows"] == 3


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc"), st.integers(-300, 300)), min_size=30))
def test_values_come_back(rows):
    label, prediction, group = map(list, zip(*rows, strict=True))
    records = Records.from_arrays(label, prediction, groups={"g": group}, classes=["a", "b", "c"])
    assert values(records.label) == label
    assert values(records.prediction) == prediction
    assert values(records.groups["g"]) == group
    assert records.groups["g"].levels == tuple(sorted(set(group)))


@pytest.mark.parametrize(
    ("label", "prediction"),
    [
        ([1, 0, 1, 0], [True, False, True, True]),
        ([1.0, 0.0, 1.0, 0.0], [1, 0, 1, 1]),
        ([True, False, True, False], [1.0, 0.0, 1.0, 1.0]),
        (pd.Series([1, 0, 1, 0], dtype="Int64"), pd.Categorical([1, 0, 1, 1])),
    ],
)
def test_one_and_true_are_the_same_class(label, prediction):
    records = Records.from_arrays(label, prediction)
    assert records.label.codes.tolist() == [1, 0, 1, 0]
    assert records.prediction.codes.tolist() == [1, 0, 1, 1]


def test_labels_of_one_value_are_zero_and_one():
    assert Records.from_arrays([1, 1, 1], [1, 1, 1]).classes == (0, 1)
    assert Records.from_arrays([0, 0], [0, 1]).classes == (0, 1)


def test_positive_class_comes_last():
    records = Records.from_arrays(["no", "yes", "no"], ["no", "no", "yes"], scores=[0.9, 0.8, 0.1], positive="no")
    assert records.classes == ("yes", "no")
    assert records.scores.tolist() == [0.9, 0.8, 0.1]


def test_positive_class_against_the_rest():
    scores = np.array([[0.7, 0.2, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]])
    records = Records.from_arrays(["a", "b", "c"], ["a", "c", "c"], scores=scores, positive="b")
    assert records.classes == ("not b", "b")
    assert records.label.codes.tolist() == [0, 1, 0]
    assert records.prediction.codes.tolist() == [0, 0, 0]
    assert records.scores.tolist() == [0.2, 0.5, 0.2]


def test_predictions_from_scores():
    records = Records.from_arrays([0, 1, 1], scores=[0.2, 0.4, 0.7], threshold=0.4)
    assert values(records.prediction) == [0, 1, 1]
    scores = [[0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]
    assert values(Records.from_arrays(["a", "b", "c"], scores=scores).prediction) == ["c", "a", "b"]


def test_two_score_columns_are_one():
    records = Records.from_arrays([0, 1], scores=[[0.8, 0.2], [0.3, 0.7]])
    assert records.scores.tolist() == [0.2, 0.7]
    assert Records.from_arrays([0, 1], scores=[[0.8, 0.2], [0.3, 0.7]], positive=0).scores.tolist() == [0.8, 0.3]


@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA, "", " ", "nan"])
def test_missing_values_are_counted_and_refused(missing):
    arrays = {"label": [0, 1, 1, 0], "prediction": [0, 1, 0, 0], "groups": {"sex": ["f", missing, "m", missing]}}
    with pytest.raises(InputError, match=r"group 'sex' 2 \(first in row 2\).*drop"):
        Records.from_arrays(**arrays)
    records = Records.from_arrays(**arrays, drop_missing=True)
    assert values(records.label) == [0, 1, 1, 0], "a row without a group is left out by that column alone"
    assert values(records.groups["sex"]) == ["f", None, "m", None]
    assert records.provenance["rows"] == 4
    assert records.provenance["rows_dropped"] == 0
    assert records.provenance["missing"] == {"group 'sex'": 2}
    with pytest.raises(InputError, match=r"prediction 1 \(first in row 3\), group 'sex' 2"):
        Records.from_arrays(**(arrays | {"prediction": [0, 1, missing, 0]}))
    fewer = Records.from_arrays(**(arrays | {"prediction": [0, 1, missing, 0]}), drop_missing=True)
    assert values(fewer.groups["sex"]) == ["f", None, None]
    assert fewer.groups["sex"].levels == ("f",)
    assert fewer.provenance["rows_dropped"] == 1


def test_rows_are_dropped_in_all_columns_and_so_are_their_levels():
    records = Records.from_arrays(
        [0, 1, None, 0],
        [0, 1, 0, 1],
        scores=[0.1, 0.2, 0.3, np.nan],
        groups={"race": ["a", "b", "only here", "b"]},
        id=[1, 2, 3, 4],
        cluster=["p", "q", "q", "r"],
        weight=[1, 2, 3, 4],
        drop_missing=True,
    )
    assert len(records) == 2
    assert records.groups["race"].levels == ("a", "b")
    assert records.id.tolist() == [1, 2]
    assert records.cluster.levels == ("p", "q")
    assert records.weight.tolist() == [1, 2]
    assert records.provenance["missing"] == {"label": 1, "score": 1}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"label": [0, 1], "prediction": ["0", "1"]}, r"label holds numbers \(0, 1\) but prediction holds text"),
        ({"label": [0, 1], "prediction": [1, 2]}, "prediction holds 2, which is not among the classes 0, 1"),
        ({"label": ["a", "b"], "prediction": ["A", "B"]}, "'A', 'B', which are not among the classes 'a', 'b'"),
        ({"label": [0, 1], "prediction": [0.3, 0.7]}, "prediction holds fractions such as 0.3.*--score"),
        ({"label": [0.5, 1], "prediction": [0, 1]}, "label holds fractions"),
        ({"label": ["a", "a"], "prediction": ["a", "a"]}, "one class only"),
        ({"label": [0, 1]}, "neither predictions nor scores"),
        ({"label": [0, 1], "prediction": [0, 1, 1]}, "label 2, prediction 3 rows"),
        ({"label": [], "prediction": []}, "no rows"),
        ({"label": [[0, 1]], "prediction": [0, 1]}, "holds lists|label 1, prediction 2"),
        ({"label": np.zeros((2, 2)), "prediction": [0, 1]}, r"label has shape \[2, 2\]"),
        ({"label": [0, 1], "scores": [0.2, 1.5]}, r"score lies outside \[0, 1\] in 1 row \(first: 1.5 in row 2\)"),
        ({"label": [0, 1, 2], "scores": [0.2, 0.5, 0.4]}, "1 score column for the 3 classes"),
        ({"label": [0, 1], "scores": ["x", "y"]}, "scores must be numbers"),
        ({"label": [0, 1], "scores": [0.2, 0.5], "threshold": 3}, "threshold is 3"),
        ({"label": [0, 1], "prediction": [0, 1], "weight": [1, -2]}, "weight is negative or infinite in 1 row"),
        ({"label": [0, 1], "prediction": [0, 1], "weight": [0, 0]}, "weight is 0 in all rows"),
        ({"label": [0, 1], "prediction": [0, 1], "weight": ["1", "x"]}, "weight holds 'x' in row 2"),
        ({"label": [0, 1], "prediction": [0, 1], "positive": 2}, "positive class 2 is not among the classes 0, 1"),
        ({"label": [0, 1], "prediction": [0, 1], "classes": [0, 0]}, "hold one twice"),
        ({"label": [0, 1], "prediction": [0, 1], "groups": {"id": range(20_000)}}, "more than 10,000 distinct"),
        ({"label": [None, 1], "prediction": [0, None], "drop_missing": True}, "no row is left"),
    ],
)
def test_bad_arrays_are_refused(arrays, message):
    with pytest.raises(InputError, match=message):
        Records.from_arrays(**arrays)


def test_classes_may_be_named():
    records = Records.from_arrays([0, 1, 1], [0, 2, 1], classes=[0, 1, 2])
    assert records.classes == (0, 1, 2)
    assert values(records.prediction) == [0, 2, 1]


def test_from_frame_equals_from_arrays():
    frame = pd.DataFrame(
        {
            "y": [1, 0, 1, 0],
            "yhat": [1.0, 1.0, 0.0, 0.0],
            "p": [0.9, 0.6, 0.4, 0.1],
            "race": pd.Categorical(["b", "a", "b", "a"], categories=["z", "b", "a"]),
            "sex": pd.Series(["f", "m", "f", "m"], dtype="string"),
            "doc": [7, 7, 3, 3],
            "w": [1, 2, 3, 4],
        }
    )
    records = Records.from_frame(
        frame, label="y", prediction="yhat", score="p", groups=["race", "sex"], cluster="doc", weight="w"
    )
    other = Records.from_arrays(
        frame.y,
        frame.yhat,
        scores=frame.p,
        groups={"race": frame.race, "sex": frame.sex},
        cluster=frame.doc,
        weight=frame.w,
    )
    pd.testing.assert_frame_equal(records.to_frame(), other.to_frame())
    assert records.groups["race"].levels == ("a", "b")
    assert records.provenance["columns"]["groups"] == ["race", "sex"]


def test_from_frame_names_the_nearest_column():
    frame = pd.DataFrame({"label": [0, 1], "yhat": [0, 1]})
    with pytest.raises(InputError, match=r"no column 'yhta'. Did you mean 'yhat'\? Its columns: label, yhat"):
        Records.from_frame(frame, prediction="yhta")
    with pytest.raises(InputError, match="are for files; a data frame has been read already"):
        Records.from_frame(frame, label="y", prediction="yhat", decimal=",")


def test_take_keeps_levels():
    records = Records.from_arrays([1, 0, 1], [1, 1, 0], groups={"g": ["a", "b", "c"]}, scores=[0.1, 0.2, 0.3])
    some = records.take([2, 0])
    assert values(some.groups["g"]) == ["c", "a"]
    assert some.groups["g"].levels == ("a", "b", "c")
    assert some.scores.tolist() == [0.3, 0.1]


def test_split_prediction_refuses_other_classes():
    both = Records.from_arrays([1, 0], [1, 1], groups={"g": ["a", "b"], "new": ["x", "y"]})
    with pytest.raises(InputError, match="holds text"):
        both.split_prediction("new")


def test_rows_that_are_dropped_leave_no_class_behind():
    label, prediction = [0, 1, 0, 1, 2], [0, 1, 1, 1, None]
    records = Records.from_arrays(label, prediction, drop_missing=True)
    assert records.classes == (0, 1)
    records = Records.from_arrays([0, 1, 0, 1, None], [0, 1, 1, 1, 7], drop_missing=True)
    assert records.prediction.values().tolist() == [0, 1, 1, 1]


def test_one_class_against_the_rest_is_predicted_where_its_score_is_the_highest():
    scores = np.random.default_rng(0).dirichlet(np.ones(3), 200)
    records = Records.from_arrays(np.arange(200) % 3, scores=scores, positive=1)
    assert records.prediction.values().tolist() == [1 if best == 1 else "not 1" for best in scores.argmax(axis=1)]
    np.testing.assert_array_equal(records.scores, scores[:, 1])


@pytest.mark.parametrize(
    ("scores", "rule"), [([0.2, 0.4], "score >= 0.3"), ([[0.5, 0.3, 0.2], [0.1, 0.7, 0.2]], "highest score")]
)
def test_provenance_says_how_scores_became_predictions(scores, rule):
    classes = [0, 1] if rule.startswith("score") else [0, 1, 2]
    records = Records.from_arrays([0, 1], scores=scores, classes=classes, threshold=0.3)
    assert records.provenance["prediction"] == rule
    assert records.prediction.values().tolist() == [0, 1]


@settings(max_examples=30)
@given(st.lists(st.from_regex(r"0{0,2}[0-9]{1,3}", fullmatch=True), min_size=12, max_size=40))
def test_readers_neither_merge_nor_invent_groups(tmp_path_factory, values):
    """ "01" and "1" are two groups: codes of regions and the like are names, and not numbers."""
    rows = [f"{i % 2},{i % 3 % 2},{value}" for i, value in enumerate(values)]
    file = tmp_path_factory.mktemp("codes") / "table.csv"
    for header, more in (("y,p,g", ""), ('y,p,g,"note"', ',"a, b"')):  # the quick reader, and pandas' own
        file.write_text("\n".join([header, *(f"{row}{more}" for row in rows)]) + "\n")
        found = Records.read(file, label="y", prediction="p", groups=["g"]).groups["g"]
        assert len({*zip(found.codes.tolist(), values, strict=True)}) == len({*values}) == len(found.levels)


def test_masked_values_are_missing():
    values = np.ma.array(["a", "b", "c", "a"], mask=[0, 0, 1, 0])
    with pytest.raises(InputError, match="missing"):
        Records.from_arrays([0, 1, 1, 0], [0, 1, 0, 0], groups={"g": values})
    kept = Records.from_arrays([0, 1, 1, 0], [0, 1, 0, 0], groups={"g": values}, drop_missing=True)
    assert kept.groups["g"].levels == ("a", "b")
    with pytest.raises(InputError, match="missing"):
        Records.from_arrays([0, 1, 1, 0], scores=np.ma.array([0.1, 0.2, 0.3, 0.4], mask=[1, 0, 0, 0]), threshold=0.5)


@pytest.mark.parametrize(
    ("labels", "positive", "guessed"),
    [
        (["ja", "nein"], "ja", False),
        (["Yes", "No"], "Yes", False),
        (["bad", "good"], "good", False),
        (["not toxic", "toxic"], "toxic", False),
        (["approved", "denied"], "denied", True),  # nothing says which is meant
        ([0, 1], 1, False),
    ],
)
def test_the_positive_class_is_the_one_that_the_words_name(labels, positive, guessed):
    records = Records.from_arrays(labels, scores=[0.2, 0.9])
    assert records.classes[-1] == positive
    assert ("positive" in records.provenance) == guessed
    named = Records.from_arrays(labels, scores=[0.2, 0.9], positive=labels[0])
    assert named.classes[-1] == labels[0]
    assert "positive" not in named.provenance
    ordered = Records.from_arrays(labels, scores=[0.2, 0.9], classes=labels)
    assert list(ordered.classes) == labels


def test_an_accent_is_the_same_however_it_was_typed(tmp_path):
    one, two = "caf\u00e9", "cafe\u0301"
    groups = [one, two, "bar", two] * 5
    found = Records.from_arrays([1, 0] * 10, [1, 1] * 10, groups={"where": groups}).groups["where"]
    assert found.levels == ("bar", one)
    assert found.codes.tolist() == [1, 1, 0, 1] * 5
    table = tmp_path / "table.csv"
    table.write_text("y,yhat,where\n" + "".join(f"{i % 2},1,{group}\n" for i, group in enumerate(groups)))
    read = Records.read(table, label="y", prediction="yhat", groups="where", where=f"where = {two}")
    assert (len(read), read.groups["where"].levels) == (15, (one,))
    own = dataset([f"post {i}" for i in range(20)], label=groups, groups={"where": groups})
    assert own.classes == own.groups()["where"].levels == ("bar", one)


@pytest.mark.parametrize("name", ["two\nlines", "two\r\n lines", "two\tlines", "two\u2028lines"])
def test_names_of_groups_are_of_one_line(name, tmp_path):
    file = tmp_path / "records.csv"
    pd.DataFrame({"id": [1, 2], "label": [0, 1], "prediction": [0, 1], "race": [name, "one"]}).to_csv(file, index=False)
    rows = {"label": [0, 1], "prediction": [0, 1], "groups": {"race": [name, "one"]}}
    for records in (
        Records.read(file, label="label", prediction="prediction", groups=["race"]),
        Records.from_arrays(**rows),
    ):
        assert records.groups["race"].levels == ("one", "two lines")


def test_names_of_several_lines_are_found_as_they_were_written(tmp_path):
    """Whoever has them in a file names them so: as classes, as the positive one, in a condition, and in a data set."""
    names, groups = np.array(["no\nway", "yes\tsir"]), ["two\nlines", "one", "one", "two\nlines"]
    file, label = tmp_path / "records.csv", names[[0, 1, 0, 1]]
    frame = pd.DataFrame({"id": range(4), "label": label, "prediction": label, "race": groups})
    frame.to_csv(file, index=False)
    how = {"label": "label", "prediction": "prediction", "groups": ["race"]}
    assert Records.read(file, **how, positive=names[1]).classes[-1] == "yes sir"
    assert Records.read(file, **how, classes=[*names]).classes == ("no way", "yes sir")
    assert len(Records.read(file, **how, where="race = 'two\nlines'")) == 2
    assert len(Records.read(file, **how, where="race = 'two lines'")) == 2
    own = dataset([f"post {i}" for i in range(4)], label=label, groups={"race": groups})
    assert (own.classes, own.groups()["race"].levels) == (("no way", "yes sir"), ("one", "two lines"))
