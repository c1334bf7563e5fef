"""Whatever stops a run, what is on disk is whole: what was there before, or what was written."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairhead.errors import InputError
from fairhead.store import (
    LineJournal,
    append_lines,
    filling,
    locked,
    made_folder,
    settled,
    whole_file,
    whole_folder,
    whole_lines,
    write_json,
    write_text,
)


def run(code, *arguments):
    """Python in a process of its own, with everything of the store imported."""
    code = "import os, signal, sys\nfrom fairhead.store import *\n" + textwrap.dedent(code)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_another_process_is_told_in_one_line_and_may_write_afterwards(tmp_path):
    code = """
        from fairhead.errors import InputError
        try:
            with locked(sys.argv[1], hint="or else"): print("mine")
        except InputError as error:
            print(error)
    """
    with locked(tmp_path) as folder:
        told = run(code, folder).stdout
        assert told == f"another run is writing to {str(tmp_path)!r}: wait for it, or give another folder or else\n"
        with locked(tmp_path):  # the same run may ask again
            pass
        assert "another run" in run(code, folder).stdout
    assert run(code, tmp_path).stdout == "mine\n"


def test_another_thread_is_told_too(tmp_path):
    def other():
        with locked(tmp_path):
            pass

    with locked(tmp_path), ThreadPoolExecutor(1) as pool, pytest.raises(InputError, match="another run is writing"):
        pool.submit(other).result()


def test_a_killed_run_lets_go(tmp_path):
    done = run("with locked(sys.argv[1]): os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert done.returncode == -signal.SIGKILL
    with locked(tmp_path):
        pass


def test_waiting_is_one_after_the_other(tmp_path):
    code = """
        import time
        for _ in range(20):
            with locked(sys.argv[1], wait=True) as folder:
                file = folder / "count"
                count = int(file.read_text()) if file.exists() else 0
                time.sleep(0.001)
                file.write_text(str(count + 1))
    """
    with ThreadPoolExecutor(3) as pool:
        assert all(done.returncode == 0 for done in pool.map(lambda _: run(code, tmp_path), range(3)))
    assert (tmp_path / "count").read_text() == "60"


@pytest.mark.parametrize("write", [made_folder, lambda path: locked(path).__enter__()])
def test_a_folder_that_cannot_be_is_one_line(tmp_path, write):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot be written: .*; give another folder") as error:
        write(tmp_path / "file")
    assert "\n" not in str(error.value)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_one_line(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="cannot be written: Permission denied; give another folder"):
        made_folder(tmp_path)


def test_a_file_in_a_folder_that_is_not_there_names_the_folder(tmp_path):
    with pytest.raises(InputError, match=r"a\.json cannot be written: there is no folder .*nowhere"):
        write_json(tmp_path / "nowhere" / "a.json", {})


def test_a_file_stays_as_it_was_where_its_writer_fails(tmp_path):
    write_json(tmp_path / "a.json", {"a": 1})

    def half():
        with whole_file(tmp_path / "a.json") as part:
            part.write_text("{")
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        half()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"a": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
    assert names(tmp_path) == ["a.json"]


LIMITED = """
    import resource
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.dont_write_bytecode = True  # of that many bytes, which later runs would fail on
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # a disk that is full after 1000 bytes
    from fairhead.errors import InputError
    try:
        {what}
    except InputError as error:
        print(error)
"""


@pytest.mark.parametrize(
    "what",
    [
        "write_json(sys.argv[1] + '/kept.jsonl', ['x' * 2000])",
        "append_lines(sys.argv[1] + '/kept.jsonl', [{'b': 2}, {'x': 'x' * 2000}])",
        """with whole_folder(sys.argv[1] + '/model') as part: (part / 'weights').write_bytes(bytes(2000))""",
        """with filling(sys.argv[1] + '/model') as part: (part / 'weights').write_bytes(bytes(2000))""",
    ],
)
def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path, what):
    append_lines(tmp_path / "kept.jsonl", [{"a": 1}])
    with whole_folder(tmp_path / "model") as part:
        (part / "weights").write_bytes(b"good")
    done = run(textwrap.dedent(LIMITED).format(what=what), tmp_path)
    assert done.stderr == ""
    assert done.stdout.endswith("cannot be written: File too large\n")
    assert done.stdout.count("\n") == 1
    assert names(tmp_path) == ["kept.jsonl", "model"]
    assert (tmp_path / "kept.jsonl").read_text() == '{"a": 1}\n'
    assert names(tmp_path / "model") == ["weights"]
    assert (tmp_path / "model" / "weights").read_bytes() == b"good"


@pytest.mark.parametrize(
    ("kill_before", "found"), [("part.rename", "old"), ("path.rename", "old"), ("shutil.rmtree(old", "new")]
)
def test_a_folder_is_the_old_or_the_new_one_wherever_a_kill_comes(tmp_path, kill_before, found):
    with whole_folder(tmp_path / "state") as part:
        (part / "which").write_text("old")
    code = f"""
        import inspect, fairhead.store as store
        lines = inspect.getsource(store.whole_folder).split("\\n")
        at = next(i for i, line in enumerate(lines) if line.strip().startswith({kill_before!r}))
        indent = len(lines[at]) - len(lines[at].lstrip())
        lines.insert(at, " " * indent + "os.kill(os.getpid(), 9)")
        source = "import signal\\n" + "\\n".join(lines)
        exec(compile(source, "killed", "exec"), vars(store))
        with store.whole_folder(sys.argv[1]) as part:
            (part / "which").write_text("new")
    """
    assert run(code, tmp_path / "state").returncode == -signal.SIGKILL
    assert (settled(tmp_path / "state") / "which").read_text() == found
    with whole_folder(tmp_path / "state") as part:
        (part / "which").write_text("next")
    assert (tmp_path / "state" / "which").read_text() == "next"
    assert names(tmp_path) == ["state"]


def test_filling_keeps_what_else_is_there_and_moves_the_configuration_last(tmp_path, monkeypatch):
    (tmp_path / "headmap.json").write_text("{}")
    moved = []
    replace = type(tmp_path).replace
    monkeypatch.setattr(type(tmp_path), "replace", lambda self, to: moved.append(self.name) or replace(self, to))
    with filling(tmp_path) as beside:
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (beside / name).write_text("x")
    assert moved[-1] == "config.json"
    assert names(tmp_path) == ["config.json", "headmap.json", "model.safetensors", "tokenizer.json"]


texts = st.text(st.characters(codec="utf-8"), max_size=20)


@given(st.lists(texts, max_size=5), st.integers(0, 200))
def test_a_cut_anywhere_loses_the_last_line_alone(tmp_path_factory, values, cut):
    path = tmp_path_factory.mktemp("journal") / "rows.jsonl"
    for value in values:
        append_lines(path, [{"value": value}])
    content = path.read_bytes() if path.exists() else b""
    path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n")
    assert [json.loads(line)["value"] for line in whole_lines(path)] == values[:whole]
    append_lines(path, [{"value": "next"}])
    assert [json.loads(line)["value"] for line in whole_lines(path)] == [*values[:whole], "next"]


@dataclass
class Notes(LineJournal):
    schema = "notes/1"
    what = "notes"
    found: list = field(default_factory=list)

    def take(self, row):
        self.found.append(row["note"])


def test_a_journal_goes_on_where_it_stopped_and_has_one_writer(tmp_path):
    path = tmp_path / "deep" / "notes.jsonl"
    with Notes(path, {"model": "m"}) as notes:
        notes.write([{"note": 1}, {"note": float("inf")}])
        with ThreadPoolExecutor(1) as pool, pytest.raises(InputError, match="another run is writing"):
            pool.submit(Notes(path, {"model": "m"}).__enter__).result()
    with Notes(path, {"model": "m"}) as notes:
        assert notes.found == [1, float("inf")]
    with pytest.raises(InputError, match="made with model 'm', not 'n'"), Notes(path, {"model": "n"}):
        pass
    path.write_text(path.read_text() + "[]\n")
    with pytest.raises(InputError, match="line 4: is not a line of notes"), Notes(path, {"model": "m"}):
        pass
    path.write_text('{"schema": "other"}\n')
    with pytest.raises(InputError, match="is not a file of notes"), Notes(path, {"model": "m"}):
        pass


def test_a_device_gets_the_bytes_and_stays_one(tmp_path):
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    write_text(fifo, "all of it")
    assert os.read(reader, 100) == b"all of it"
    os.close(reader)
    assert names(tmp_path) == ["pipe"]
    assert fifo.is_fifo()
    with pytest.raises(InputError, match="/dev/full cannot be written: No space left on device"):
        write_text("/dev/full", "all of it")
    assert Path("/dev/full").is_char_device()


def test_a_link_stays_one(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link.txt").symlink_to(tmp_path / "there" / "file.txt")
    write_text(tmp_path / "link.txt", "all of it")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "there" / "file.txt").read_text() == "all of it"
    assert names(tmp_path / "there") == ["file.txt"]


def test_a_lock_clears_away_what_killed_runs_left_and_nothing_else(tmp_path):
    """A run in a folder below, or one that takes no lock, may be writing at the same time."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for folder in (tmp_path, tmp_path / "model", tmp_path / "run"):
        folder.mkdir(exist_ok=True)
        for process in (gone.pid, os.getpid()):
            (folder / f".{process}.part.a.json").touch()
    (tmp_path / "run" / ".lock").touch()
    with locked(tmp_path):
        kept = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob(".*.part.*")}
    live = f".{os.getpid()}.part.a.json"
    assert kept == {live, f"model/{live}", f"run/{live}", f"run/.{gone.pid}.part.a.json"}
