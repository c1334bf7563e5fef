"""Folders, archives and single files read alike; what is broken is refused by name."""

import multiprocessing
import os
import pickle
import random
import zipfile
from pathlib import Path

import pytest

from fairhead.data.files import Skips, Source
from fairhead.errors import InputError

FILES = {"a/one.txt": b"1", "a/b/two.txt": b"22" * 5000, "three.json": b'{"x": [1, 2]}'}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "folder"
    for name, data in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "archive.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in FILES.items():
            z.writestr(name, data)
    return path


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_folder_and_archive_hold_the_same(kind, request):
    source = Source(request.getfixturevalue(kind))
    assert source.names == tuple(sorted(FILES))
    assert {n: source.read(n) for n in source.names} == FILES
    assert source.json(source.find("three.json")) == {"x": [1, 2]}


def test_a_single_file_is_a_source_of_one(folder):
    source = Source(folder / "three.json")
    assert source.json(source.find("whatever.json")) == {"x": [1, 2]}


@pytest.mark.parametrize("name", ["../evil.txt", "a/../../evil.txt", "/etc/evil", "C:/evil.txt", "..\\evil.txt"])
def test_an_archive_that_climbs_out_is_refused_by_member(tmp_path, name):
    path = tmp_path / "evil.zip"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("fine.txt", b"")
        z.writestr(zipfile.ZipInfo(name), b"boo")
    with pytest.raises(InputError, match="points outside the archive") as error:
        Source(path)
    assert repr(name) in str(error.value)
    assert str(path) in str(error.value)


def test_names_with_two_dots_inside_are_fine(tmp_path):
    path = tmp_path / "fine.zip"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("a..b/c..txt", b"x")
    assert Source(path).names == ("a..b/c..txt",)


def test_clutter_of_operating_systems_is_not_data(folder):
    (folder / "__MACOSX").mkdir()
    (folder / "__MACOSX/one.txt").write_bytes(b"")
    (folder / "a/._one.txt").write_bytes(b"")
    (folder / ".DS_Store").write_bytes(b"")
    assert Source(folder).names == tuple(sorted(FILES))


def test_a_cut_off_archive_is_refused(archive):
    data = archive.read_bytes()
    archive.write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"archive\.zip: .*not a complete zip archive"):
        Source(archive)


def test_a_damaged_member_is_named(archive):
    data = bytearray(archive.read_bytes())
    # Bytes of the deflated stream itself: after the local header (30 bytes and the name).
    with zipfile.ZipFile(archive) as z:
        start = z.getinfo("a/b/two.txt").header_offset + 30 + len("a/b/two.txt")
    data[start : start + 8] = b"\xff" * 8
    archive.write_bytes(bytes(data))
    with pytest.raises(InputError, match=r"a/b/two\.txt: damaged"):
        Source(archive).read("a/b/two.txt")


def test_what_is_not_there_is_named(folder, tmp_path):
    with pytest.raises(InputError, match="no such file or folder"):
        Source(tmp_path / "nowhere")
    source = Source(folder)
    with pytest.raises(InputError, match=r"a/gone\.txt: there is no such file"):
        source.read("a/gone.txt")
    with pytest.raises(
        InputError, match=r"StereoSet needs a file dev\.json; this folder holds 3 files: a/, three\.json"
    ):
        source.find("dev.json", "StereoSet")


def test_the_shallowest_of_several_is_found_and_a_tie_is_refused(folder):
    (folder / "a/three.json").write_bytes(b"0")
    assert Source(folder).find("three.json") == "three.json"
    (folder / "b").mkdir()
    (folder / "a/x.json").write_bytes(b"0")
    (folder / "b/x.json").write_bytes(b"0")
    with pytest.raises(InputError, match=r"both a/x\.json and b/x\.json"):
        Source(folder).find("x.json")


def test_truncated_json_says_where(folder):
    (folder / "three.json").write_bytes(b'{"x": [1,\n 2')
    with pytest.raises(InputError, match=r"three\.json: is not complete JSON: .* \(line 2, "):
        Source(folder).json("three.json")


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000], ids=["nested without end", "endless number"])
def test_json_that_python_will_not_read_is_named(folder, text):
    (folder / "three.json").write_text(text)
    with pytest.raises(InputError, match=r"three\.json: is not JSON that can be read"):
        Source(folder).json("three.json")
    skips = Skips("skip")
    assert list(Source(folder).jsonl("three.json", skips)) == []
    assert skips.found() == {"not complete JSON": ("three.json:1",)}


def test_binary_is_not_text(folder):
    (folder / "three.json").write_bytes(b"ab\xff\xfe")
    with pytest.raises(InputError, match=r"three\.json: is not UTF-8 text \(byte 2\)"):
        Source(folder).json("three.json")


def test_json_lines_raise_or_skip(folder):
    # The line separator U+2028 is legal inside a JSON string and must not end a line.
    (folder / "x.jsonl").write_text('{"a": "1\u2028"}\n\n[2]\n{"a": 3\n{"a": 4}\n', encoding="utf-8")
    source = Source(folder)
    with pytest.raises(InputError, match=r"x\.jsonl, line 3: .*found list"):
        list(source.jsonl("x.jsonl", Skips()))
    skips = Skips("skip")
    assert [(n, row["a"]) for n, row in source.jsonl("x.jsonl", skips)] == [(1, "1\u2028"), (5, 4)]
    assert skips.found() == {"not complete JSON": ("x.jsonl:3", "x.jsonl:4")}


def test_on_error_knows_two_words():
    with pytest.raises(InputError, match="'raise' or 'skip'"):
        Skips("ignore")


def test_a_source_can_be_pickled(archive):
    source = Source(archive)
    source.read("a/one.txt")
    again = pickle.loads(pickle.dumps(source))  # noqa: S301  made one line up
    assert again.names == source.names
    assert again.read("a/b/two.txt") == FILES["a/b/two.txt"]


def _exit_zero_if_right(source: Source, files: dict[str, bytes]) -> None:
    raise SystemExit(0 if all(source.read(n) == files[n] for _ in range(50) for n in source.names) else 1)


def test_forked_processes_do_not_disturb_each_other(tmp_path):
    # Larger than any buffer, so that reading moves the file position, which a forked child shares with its parent.
    files = {f"{i}.bin": random.Random(i).randbytes(50_000) for i in range(20)}
    with zipfile.ZipFile(tmp_path / "big.zip", "w") as z:
        for name, data in files.items():
            z.writestr(name, data)
    source = Source(tmp_path / "big.zip")
    source.read("1.bin")  # the handle is open before the fork
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=_exit_zero_if_right, args=(source, files)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]


def test_a_file_that_memory_cannot_hold_is_refused_before_it_is_read(folder, monkeypatch):
    with zipfile.ZipFile(folder / "whole.zip", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("dev.json", b"[" * 3_000_000)
    (folder / "sparse.json").touch()
    os.truncate(folder / "sparse.json", 1 << 40)
    with pytest.raises(InputError, match=r"sparse\.json: has 1,099\.5 GB, more than this machine can read at once"):
        Source(folder).read("sparse.json")
    monkeypatch.setattr(os, "sysconf", lambda name: 3000)
    with pytest.raises(InputError, match=r"whole\.zip: dev\.json: has 0\.0 GB, more than"):
        Source(folder / "whole.zip").read("dev.json")


def test_links_are_followed_once(folder, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "data").symlink_to(folder, target_is_directory=True)
    (folder / "loop").symlink_to(linked, target_is_directory=True)
    assert Source(linked).names == tuple(sorted(f"data/{name}" for name in FILES))
