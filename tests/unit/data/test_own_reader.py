"""The worked example of CONTRIBUTING.md ("Add a data set"), as a newcomer would follow it."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from fairhead.data import parse_spec, read_labelled
from fairhead.errors import InputError

PAGE = Path(__file__).parents[3] / "CONTRIBUTING.md"


@pytest.fixture
def reviews(tmp_path, monkeypatch):
    """The package of the example, installed, and its data."""
    text = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"<!-- example: reviews.py -->\n```python\n(.*?)```", text, re.DOTALL)
    (points,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "reviews.py").write_text(code)
    info = tmp_path / "reviews-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: reviews\nVersion: 1\n")
    ((name, place),) = tomllib.loads(points)["project"]["entry-points"]["fairhead.data"].items()
    (info / "entry_points.txt").write_text(f"[fairhead.data]\n{name} = {place}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "reviews", raising=False)
    folder = tmp_path / "data"
    folder.mkdir()
    rows = []
    for i in range(20):
        of = {"verdict": "good" if i % 2 else "bad", "dialect": "a", "country": "xy"[i % 2]}
        rows.append({"id": str(i), "text": f"text {i}", **of})
    (folder / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"id": "last"}]))
    return folder


def test_the_example_is_read_by_its_name(reviews):
    spec = f"reviews:{reviews}"
    assert parse_spec(spec, "texts").reader.name == "reviews"
    with pytest.raises(InputError, match="line 21: lacks a field: mend or remove it"):
        read_labelled(spec)
    data = read_labelled(spec, groups=["country"], on_error="skip")
    assert (data.classes, len(data), data.skipped_counts) == (("bad", "good"), 20, {"incomplete": 1})
    assert data.sizes == {"train": 16, "val": 2, "test": 2}
    assert list(data.groups()) == ["country"]
    with pytest.raises(InputError, match=r"there is no group 'contry'.*Did you mean 'country'"):
        read_labelled(spec, groups=["contry"])
