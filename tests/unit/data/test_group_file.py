"""Groups that come in a file of their own, joined by id: onto data sets of every reader, and onto records."""

import pandas as pd
import pytest

from fairhead.cli import main
from fairhead.data import dataset, read
from fairhead.errors import InputError
from fairhead.records.layout import GroupFile


@pytest.fixture
def posts(tmp_path):
    frame = pd.DataFrame({"id": range(24), "text": "a post", "label": ["no", "yes"] * 12, "sex": ["f", "f", "m"] * 8})
    frame.to_csv(tmp_path / "posts.csv", index=False)
    found = pd.DataFrame({"discovered": [f"cluster {1 + i % 12}" for i in range(24)], "id": range(24)})
    found.sample(frac=1, random_state=0).to_csv(tmp_path / "groups.csv", index=False)
    return tmp_path


def test_a_file_of_groups_is_joined_by_id_and_comes_first(posts):
    data = read("texts", posts / "posts.csv", groups=["sex", "discovered"], groups_from=posts / "groups.csv")
    assert list(data.groups()) == ["discovered", "sex"]
    assert data.groups()["discovered"].levels == tuple(f"cluster {i}" for i in range(1, 13))
    assert data.groups(["13", "2"])["discovered"].values().tolist() == ["cluster 2", "cluster 3"]
    spec = f"texts:{posts / 'posts.csv'}"
    alone = dataset(spec, groups="discovered", groups_from=str(posts / "groups.csv"))
    assert list(alone.groups()) == ["discovered"]
    with pytest.raises(InputError, match="no column 'discovred'"):
        dataset(spec, groups="discovred", groups_from=str(posts / "groups.csv"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,g\n1,a\n", "23 of 24 rows have no entry there; the first has the id 0"),
        ("name,g\n1,a\n", "a column id and columns of groups; found name, g"),
        ("id\n1\n", "columns of groups; found id"),
        ("", "found none"),
        ("id,g\n1,a\n1,b\n", "the id 1 is there twice"),
        ("id,g\n1,\n", "line 2 has a blank"),
    ],
)
def test_what_is_wrong_with_a_file_of_groups_is_one_line(posts, text, message):
    (posts / "groups.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        read("texts", posts / "posts.csv", groups_from=posts / "groups.csv")


def test_a_missing_file_and_rows_without_ids(tmp_path, posts):
    with pytest.raises(InputError, match=r"nowhere\.csv cannot be read"):
        GroupFile.read(tmp_path / "nowhere.csv")
    with pytest.raises(InputError, match="the rows have none"):
        GroupFile.read(posts / "groups.csv").of(None)


def test_audit_takes_groups_from_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    n = 400
    frame = pd.DataFrame({"id": range(n), "y": [0, 1] * (n // 2), "yhat": [0, 1, 1, 1] * (n // 4)})
    frame["race"] = ["a", "b"] * (n // 2)
    frame.to_csv("preds.csv", index=False)
    pd.DataFrame(
        {"id": frame.id, "discovered": ["cluster 1", "cluster 1", "cluster 2", "cluster 2"] * (n // 4)}
    ).to_csv("groups.csv", index=False)
    given = ["audit", "preds.csv", "--label", "y", "--pred", "yhat", "--n-boot", "200"]
    main([*given, "--groups-from", "groups.csv"])
    out = capsys.readouterr().out
    assert "groups by discovered (2)" in out
    assert "by discovered: 50.0 points" in " ".join(out.split())
    main([*given, "--groups-from", "groups.csv", "--group", "race", "--group", "discovered"])
    assert "groups by race (2), discovered (2)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(given)
    assert "Missing option '--group'" in capsys.readouterr().err
