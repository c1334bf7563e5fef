"""The registry of readers: kinds, aliases, and readers that another package brings."""

import pytest

from fairhead.data import READERS, Dataset, Items, Reader, parse_spec, read_items, reader_named
from fairhead.errors import InputError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs a package with entry points: name -> what `made_package.py` has under it."""

    def install(code: str, **points: str) -> None:
        (tmp_path / "made_package.py").write_text(code)
        info = tmp_path / "made_package-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-package\nVersion: 1\n")
        lines = "".join(f"{name} = made_package:{what}\n" for name, what in points.items())
        (info / "entry_points.txt").write_text(f"[fairhead.data]\n{lines}")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(__import__("sys").modules, "made_package", raising=False)

    return install


def test_every_reader_says_what_it_gives():
    labelled = {"images", "texts"}
    for reader in READERS.values():
        returns = reader.load().__annotations__["return"]
        assert (returns is Dataset) == (reader.kind in labelled)
        assert (getattr(returns, "__origin__", None) is Items) == (reader.kind not in labelled)


def test_names_and_aliases_lead_to_one_reader_each():
    names = [name for reader in READERS.values() for name in (reader.name, *reader.aliases)]
    assert len(set(names)) == len(names)
    assert all(reader_named(name.upper().replace("_", "-")).name in READERS for name in names)
    assert reader_named("crows") is reader_named("crows-pairs") is reader_named(" CrowS_Pairs ")


@pytest.mark.parametrize("spec", ["", "crows", "crows:", ":x"])
def test_a_spec_needs_a_name_and_a_path(spec):
    with pytest.raises(InputError, match=r"name:path|there is no reader"):
        parse_spec(spec)


def test_a_package_adds_a_reader(package, tmp_path):
    package(
        "from pathlib import Path\nfrom fairhead.data import Items, Reader\n"
        "notes = Reader('notes', 'prompts', 'made_package:read_notes')\n"
        "def read_notes(path, *, upper: bool = False) -> Items:\n"
        "    text = Path(path).read_text()\n"
        "    return Items('notes', tuple((text.upper() if upper else text).split()))\n",
        notes="notes",
    )
    (tmp_path / "a.txt").write_text("one two")
    assert read_items(f"notes:{tmp_path / 'a.txt'}", "prompts", upper=True).items == ("ONE", "TWO")
    assert parse_spec("notes:x").reader.options == {"upper": False}
    with pytest.raises(InputError, match="reading notes: upper is 3; expected true or false"):
        read_items(f"notes:{tmp_path / 'a.txt'}", upper=3)
    with pytest.raises(InputError, match=r"there is no reader for 'note'.*triplets, notes. Did you mean 'notes'"):
        reader_named("note")


def test_a_reader_of_fairhead_cannot_be_replaced_from_outside(package):
    package("from fairhead.data import Reader\nmine = Reader('celeba', 'texts', 'made_package:read')\n", celeba="mine")
    assert reader_named("celeba").kind == "images"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 3\n", "made_package:x is not a Reader called 'x'"),
        ("y = 3\n", "the reader 'x' cannot be imported from made_package:x"),
        ("import no_such_thing\n", "cannot be imported.*no_such_thing"),
    ],
)
def test_an_entry_point_that_is_wrong_is_named(package, code, message):
    package(code, x="x")
    with pytest.raises(InputError, match=message):
        reader_named("x")


def test_an_unknown_kind_is_refused():
    with pytest.raises(InputError, match="of kind 'videos'; expected one of images, texts"):
        Reader("mine", "videos")


def test_a_file_without_a_reader_is_answered_with_the_readers_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels.csv").write_text("path,label\n")
    with pytest.raises(InputError, match=r"such as images:labels\.csv or texts:labels\.csv; found 'labels\.csv'"):
        parse_spec("labels.csv", "images", "texts")
